//! The one connection that writes, and the few that read.
//!
//! Invariants: every write is one `BEGIN IMMEDIATE` transaction on the one writing connection,
//! which a mutex hands from call to call in order. A transaction that began runs to its end on
//! a task of its own, whether or not its caller still waits: a dropped future leaves no
//! transaction open. A connection goes back only after a clean end; after any error it
//! is closed, which rolls back, and the next write opens another.
//!
//! SQLITE_BUSY can come from `BEGIN IMMEDIATE` alone (another process writes); nothing has
//! happened then, so it is tried again here for a fifth of the lease.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use inboxd_contract::{ErrorClass, StoreError};
use sqlx::pool::PoolOptions;
use sqlx::sqlite::{
    SqliteConnectOptions, SqliteConnection, SqliteJournalMode, SqlitePool, SqliteSynchronous,
};
use sqlx::{ConnectOptions, Connection, Row};
use tokio::sync::{Mutex, oneshot};
use tokio::time::{Instant, sleep};
use tokio_util::task::TaskTracker;

use crate::error::{is_busy, store_error};

/// How long SQLite itself waits for a lock, on the connection's own thread, before we wait
/// without a thread.
const BUSY_SLICE: Duration = Duration::from_millis(50);
/// Between two tries for the write lock; short against the gaps that other writers leave.
const BUSY_PAUSE: Duration = Duration::from_millis(2);

pub(crate) struct Writer {
    options: SqliteConnectOptions,
    /// `None` before the first write and after an error.
    connection: Mutex<Option<SqliteConnection>>,
    /// Bounds the wait for the write lock.
    lock_wait: Duration,
    /// Every transaction under way; as many as there are calls.
    tasks: TaskTracker,
}

impl Writer {
    pub(crate) fn new(path: &Path, lock_wait: Duration) -> Arc<Self> {
        let options = base_options(path, lock_wait)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            // In WAL mode the default of many builds (NORMAL) loses commits on power loss.
            .synchronous(SqliteSynchronous::Full);
        Arc::new(Self {
            options,
            connection: Mutex::new(None),
            lock_wait,
            tasks: TaskTracker::new(),
        })
    }

    /// Runs `body` in one transaction and commits it. `what` is for the error's text.
    ///
    /// # Cancel safety
    /// Dropped before its turn, nothing happens; later, the transaction happens whole.
    pub(crate) async fn transaction<T, F>(
        self: &Arc<Self>,
        what: &'static str,
        body: F,
    ) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: for<'c> FnOnce(&'c mut SqliteConnection) -> BoxFuture<'c, Result<T, sqlx::Error>>
            + Send
            + 'static,
    {
        if self.tasks.is_closed() {
            return Err(StoreError::transient(format!("{what}: the SQLite store is closed")));
        }
        let (answer, answered) = oneshot::channel();
        let writer = Arc::clone(self);
        self.tasks.spawn(async move {
            let mut slot = writer.connection.lock().await;
            if answer.is_closed() {
                return;
            }
            let result = writer.run(&mut slot, what, body).await;
            drop(slot);
            // An error here: the caller has gone and will look at what is there.
            let _ = answer.send(result);
        });
        answered.await.unwrap_or_else(|_| {
            Err(StoreError::transient(format!("{what}: the transaction ended without an answer")))
        })
    }

    /// Shows that a write could begin. Waits for nobody: whoever holds the lock shows it too.
    pub(crate) async fn ping(self: &Arc<Self>) -> Result<(), StoreError> {
        let writer = Arc::clone(self);
        let asked = self.tasks.spawn(async move {
            let Ok(mut slot) = writer.connection.try_lock() else { return Ok(()) };
            let mut connection = match slot.take() {
                Some(connection) => connection,
                None => writer.connect().await?,
            };
            let began = sqlx::query("BEGIN IMMEDIATE").execute(&mut connection).await;
            let ended = match began {
                Ok(_) => sqlx::query("ROLLBACK").execute(&mut connection).await,
                Err(error) if is_busy(&error) => Ok(Default::default()),
                Err(error) => Err(error),
            };
            ended.map_err(|error| store_error("asking for the write lock", error))?;
            *slot = Some(connection);
            Ok(())
        });
        asked.await.unwrap_or_else(|error| {
            Err(StoreError::new(ErrorClass::Bug, "asking for the write lock", error))
        })
    }

    async fn run<T, F>(
        &self,
        slot: &mut Option<SqliteConnection>,
        what: &'static str,
        body: F,
    ) -> Result<T, StoreError>
    where
        F: for<'c> FnOnce(&'c mut SqliteConnection) -> BoxFuture<'c, Result<T, sqlx::Error>>,
    {
        // Taken out, so that a panic in `body` closes the connection too.
        let mut connection = match slot.take() {
            Some(connection) => connection,
            None => self.connect().await?,
        };
        match self.begin(&mut connection).await {
            Ok(()) => {}
            Err(error) if is_busy(&error) => {
                *slot = Some(connection);
                let waited = self.lock_wait;
                let what = format!("{what}: another process held the write lock for {waited:?}");
                return Err(store_error(what, error));
            }
            Err(error) => return Err(store_error(format!("{what}: beginning"), error)),
        }
        let value = match body(&mut connection).await {
            Ok(value) => value,
            Err(error) => {
                // Awaited, so that the rollback is over before the next write begins. Its own
                // error adds nothing: closing rolls back in any case.
                let _ = connection.close().await;
                return Err(store_error(what, error));
            }
        };
        if let Err(error) = sqlx::query("COMMIT").execute(&mut connection).await {
            let _ = connection.close().await;
            return Err(store_error(format!("{what}: committing"), error));
        }
        *slot = Some(connection);
        Ok(value)
    }

    async fn begin(&self, connection: &mut SqliteConnection) -> Result<(), sqlx::Error> {
        let deadline = Instant::now() + self.lock_wait;
        loop {
            match sqlx::query("BEGIN IMMEDIATE").execute(&mut *connection).await {
                Err(error) if is_busy(&error) && Instant::now() < deadline => {
                    sleep(BUSY_PAUSE).await;
                }
                other => return other.map(drop),
            }
        }
    }

    async fn connect(&self) -> Result<SqliteConnection, StoreError> {
        let what = || format!("opening the SQLite database {}", self.path().display());
        let deadline = Instant::now() + self.lock_wait;
        let mut connection = loop {
            // Turning WAL on needs the whole file for a moment and does not wait for it.
            match self.options.connect().await {
                Ok(connection) => break connection,
                Err(error) if is_busy(&error) && Instant::now() < deadline => {
                    sleep(BUSY_PAUSE).await;
                }
                Err(error) => return Err(store_error(what(), error)),
            }
        };
        let mode: String = sqlx::query("PRAGMA journal_mode")
            .fetch_one(&mut connection)
            .await
            .and_then(|row| row.try_get(0))
            .map_err(|error| store_error(what(), error))?;
        if mode != "wal" {
            return Err(StoreError::permanent(format!(
                "{}: its journal mode stays {mode:?} and must be \"wal\"; use a local disk, \
                 network file systems cannot do it",
                what()
            )));
        }
        Ok(connection)
    }

    pub(crate) fn path(&self) -> &Path {
        self.options.get_filename()
    }

    /// Lets what is under way finish, then closes.
    pub(crate) async fn close(&self) {
        self.tasks.close();
        self.tasks.wait().await;
        if let Some(connection) = self.connection.lock().await.take()
            && let Err(error) = connection.close().await
        {
            tracing::warn!(%error, "closing the SQLite database");
        }
    }
}

/// Connections that only read: they see the last commit and wait for nobody (WAL).
pub(crate) fn reader_pool(path: &Path, lock_wait: Duration, readers_max: u32) -> SqlitePool {
    // Not SQLite's read-only mode: it cannot restore the WAL's index after a crash.
    let options = base_options(path, lock_wait).pragma("query_only", "ON");
    PoolOptions::new()
        .max_connections(readers_max.max(1))
        .acquire_timeout(lock_wait.max(Duration::from_secs(1)))
        .test_before_acquire(false)
        .idle_timeout(None)
        .max_lifetime(None)
        .connect_lazy_with(options)
}

fn base_options(path: &Path, lock_wait: Duration) -> SqliteConnectOptions {
    SqliteConnectOptions::new().filename(path).busy_timeout(lock_wait.min(BUSY_SLICE))
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    #[tokio::test]
    async fn what_is_written_is_flushed_at_commit_and_read_by_readers_that_cannot_write() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("inbox.db");
        let wait = Duration::from_secs(1);
        let writer = Writer::new(&path, wait);
        let synchronous: i64 = writer
            .transaction("asking", |connection| {
                async move {
                    sqlx::query("CREATE TABLE t (a INTEGER)").execute(&mut *connection).await?;
                    sqlx::query("PRAGMA synchronous").fetch_one(connection).await?.try_get(0)
                }
                .boxed()
            })
            .await
            .unwrap();
        assert_eq!(synchronous, 2, "FULL");
        let readers = reader_pool(&path, wait, 2);
        sqlx::query("SELECT a FROM t").fetch_all(&readers).await.unwrap();
        sqlx::query("INSERT INTO t VALUES (1)").execute(&readers).await.unwrap_err();
        readers.close().await;
        writer.close().await;
        let closed = writer.transaction("late", |_| async { Ok(()) }.boxed()).await;
        assert!(closed.unwrap_err().is_transient());
    }

    #[tokio::test]
    async fn a_failed_or_panicked_transaction_leaves_nothing_and_the_next_one_works() {
        let directory = tempfile::tempdir().unwrap();
        let writer = Writer::new(&directory.path().join("inbox.db"), Duration::from_secs(1));
        let insert = |then: fn()| {
            writer.transaction("inserting", move |connection| {
                async move {
                    sqlx::query("CREATE TABLE IF NOT EXISTS t (a INTEGER)")
                        .execute(&mut *connection)
                        .await?;
                    sqlx::query("INSERT INTO t VALUES (1)").execute(&mut *connection).await?;
                    then();
                    sqlx::query("SELECT count(*) FROM t").fetch_one(connection).await?.try_get(0)
                }
                .boxed()
            })
        };
        insert(|| panic!("a fault of the program")).await.unwrap_err();
        let failed = writer.transaction("failing", |connection| {
            async move {
                sqlx::query("CREATE TABLE t (a INTEGER)").execute(&mut *connection).await?;
                sqlx::query("no SQL").execute(connection).await.map(drop)
            }
            .boxed()
        });
        assert_eq!(failed.await.unwrap_err().class, ErrorClass::Permanent);
        let rows: i64 = insert(|| {}).await.unwrap();
        assert_eq!(rows, 1);
        writer.close().await;
    }
}
