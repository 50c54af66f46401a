//! Transactions: how they begin, and what becomes of their connection.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgArguments, PgConnectOptions, PgConnection, PgPoolOptions, PgRow};
use sqlx::query::Query;
use sqlx::{AssertSqlSafe, PgPool, Postgres};

use crate::config::PostgresConfig;
use crate::error::Failure;

/// A batch or a single call waits so long for a lock, if a fifth of the lease is not less. Not
/// longer: meanwhile it has a connection of the pool.
const LOCK_TIMEOUT: Duration = Duration::from_millis(250);
/// A member that is tried again because its batch met a lock: one of many.
const LOCK_TIMEOUT_SPLIT: Duration = Duration::from_millis(50);
/// How long members of a batch that met locks are tried in smaller parts, if half of the
/// lease is not less.
const LOCK_PATIENCE: Duration = Duration::from_secs(2);
/// A call without an answer is given up after the lease, but never sooner.
const CALL_TIMEOUT_MIN: Duration = Duration::from_secs(5);

/// How long locks are waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LockWait {
    /// A first try.
    Whole,
    /// A part of a batch that met a lock.
    Part,
}

/// A pool and the way transactions begin on it.
pub(crate) struct Sessions {
    pool: PgPool,
    begin_whole: Arc<str>,
    begin_part: Arc<str>,
    /// Connections that may have died in the pool, and one that is new.
    begin_tries_max: u32,
    call_timeout: Duration,
    lock_patience: Duration,
    prepared: bool,
}

impl Sessions {
    /// Connects when it is first used.
    pub(crate) fn new(config: &PostgresConfig, options: PgConnectOptions, max: u32) -> Self {
        // Not tested before use: a dead connection is found by its first statement, BEGIN, and
        // another one is taken.
        let pool = PgPoolOptions::new()
            .max_connections(max)
            .acquire_timeout(config.acquire_timeout)
            .test_before_acquire(false)
            .connect_lazy_with(options);
        let fifth = config.lease / 5;
        Self {
            pool,
            begin_whole: begin(LOCK_TIMEOUT.min(fifth)),
            begin_part: begin(LOCK_TIMEOUT_SPLIT.min(fifth)),
            begin_tries_max: max + 1,
            call_timeout: config.lease.max(CALL_TIMEOUT_MIN),
            lock_patience: LOCK_PATIENCE.min(config.lease / 2),
            prepared: config.prepared_statements,
        }
    }

    /// How long a batch that met locks is tried in parts.
    pub(crate) fn lock_patience(&self) -> Duration {
        self.lock_patience
    }

    /// Begins a transaction: one round trip.
    pub(crate) async fn begin(&self, wait: LockWait) -> Result<Work, Failure> {
        let sql = match wait {
            LockWait::Whole => &self.begin_whole,
            LockWait::Part => &self.begin_part,
        };
        let mut tries = 0;
        loop {
            tries += 1;
            let connection = self.pool.acquire().await;
            let connection =
                connection.map_err(|error| Failure::of("taking a connection", error))?;
            let mut work = Work { connection: Some(connection), prepared: self.prepared };
            let begun = sqlx::raw_sql(AssertSqlSafe(Arc::clone(sql))).execute(work.connection());
            match begun.await {
                Ok(_) => return Ok(work),
                // It died while it was idle, and nothing was done yet.
                Err(error) if is_lost(&error) && tries < self.begin_tries_max => {}
                Err(error) => return Err(Failure::of("beginning a transaction", error)),
            }
        }
    }

    /// Bounds a whole call. What is cut closes its connection.
    pub(crate) async fn bounded<T>(
        &self,
        doing: &str,
        call: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        match tokio::time::timeout(self.call_timeout, call).await {
            Ok(answer) => answer,
            Err(_) => Err(Failure::timed_out(doing, self.call_timeout)),
        }
    }

    pub(crate) async fn close(&self) {
        self.pool.close().await;
    }
}

/// All settings belong to the transaction, so that they hold behind a transaction pooler.
///
/// The last three are for the planner: every statement finds its rows by their keys, so it is
/// planned once, by index, whatever the statistics of tables that fill and empty all the time say;
/// and what must be scanned (idle claims) is not worth compiling.
fn begin(lock_timeout: Duration) -> Arc<str> {
    format!(
        "BEGIN ISOLATION LEVEL READ COMMITTED; \
         SET LOCAL lock_timeout = {}; \
         SET LOCAL synchronous_commit = on; \
         SET LOCAL plan_cache_mode = force_generic_plan; \
         SET LOCAL enable_seqscan = off; \
         SET LOCAL jit = off",
        lock_timeout.as_millis()
    )
    .into()
}

fn is_lost(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Io(_) | sqlx::Error::Protocol(_) => true,
        sqlx::Error::Database(database) => {
            database.code().is_some_and(|code| code.starts_with("57P") || code.starts_with("08"))
        }
        _ => false,
    }
}

/// An open transaction. Unless it ends by [`Work::commit`] or [`Work::rollback`], its
/// connection is closed, and the server rolls back: nothing of it can reach another call.
pub(crate) struct Work {
    /// `None` once it has ended.
    connection: Option<PoolConnection<Postgres>>,
    prepared: bool,
}

impl Work {
    fn connection(&mut self) -> &mut PgConnection {
        match &mut self.connection {
            Some(connection) => connection,
            None => unreachable!("commit and rollback consume the work"),
        }
    }

    /// Runs one statement.
    pub(crate) async fn rows(
        &mut self,
        doing: &str,
        query: Query<'_, Postgres, PgArguments>,
    ) -> Result<Vec<PgRow>, Failure> {
        let prepared = self.prepared;
        let rows = query.persistent(prepared).fetch_all(self.connection()).await;
        rows.map_err(|error| Failure::of(doing, error))
    }

    /// Runs a statement of the protocol of transactions.
    pub(crate) async fn simple(&mut self, sql: &'static str) -> Result<(), Failure> {
        let done = sqlx::raw_sql(sql).execute(self.connection()).await;
        done.map_err(|error| Failure::of(sql, error))?;
        Ok(())
    }

    /// Runs a statement that is put together for this one call, and not kept prepared.
    pub(crate) async fn rows_once(
        &mut self,
        doing: &str,
        query: Query<'_, Postgres, PgArguments>,
    ) -> Result<Vec<PgRow>, Failure> {
        let rows = query.persistent(false).fetch_all(self.connection()).await;
        rows.map_err(|error| Failure::of(doing, error))
    }

    /// Makes it durable: one round trip.
    pub(crate) async fn commit(mut self) -> Result<(), Failure> {
        let done = sqlx::raw_sql("COMMIT").execute(self.connection()).await;
        done.map_err(|error| Failure::of("COMMIT", error))?;
        drop(self.connection.take());
        Ok(())
    }

    /// Undoes it after a failure: by ROLLBACK where the connection is sound, else by closing it
    /// (it may be lost, or keep a plan that no longer fits).
    pub(crate) async fn fail(self, failure: &Failure) {
        if failure.concerns_a_member() {
            self.rollback().await;
        }
    }

    /// Undoes it. Where that fails, closing the connection does it.
    pub(crate) async fn rollback(mut self) {
        if sqlx::raw_sql("ROLLBACK").execute(self.connection()).await.is_ok() {
            drop(self.connection.take());
        }
    }

    /// Ends as `result` says: what it answers is durable if it is `Ok`.
    pub(crate) async fn end<T>(self, result: Result<T, Failure>) -> Result<T, Failure> {
        match result {
            Ok(value) => self.commit().await.map(|()| value),
            Err(failure) => {
                self.fail(&failure).await;
                Err(failure)
            }
        }
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        if let Some(connection) = self.connection.take() {
            drop(connection.detach());
        }
    }
}
