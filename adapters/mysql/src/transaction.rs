//! Connections and transactions.
//!
//! Invariants: a transaction is READ COMMITTED and has its settings from its own first
//! round trip, so that they hold behind a pooler which gives each transaction another session.
//! A connection goes back to the pool only after a commit or rollback that the server confirmed;
//! a cut one (dropped future, panic, lost answer) is closed, and the server rolls back.

use std::future::Future;
use std::time::Duration;

use inboxd_contract::StoreError;
use sqlx::mysql::{MySqlConnectOptions, MySqlConnection, MySqlPool};
use sqlx::pool::{PoolConnection, PoolOptions};
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, MySql};

use crate::error::{is_broken, store_error};

/// How long a call may wait for a connection.
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(10);

/// The first connection of a start: a server that swallows packets must not stall it.
pub(crate) async fn connect(options: &MySqlConnectOptions) -> Result<MySqlConnection, sqlx::Error> {
    match tokio::time::timeout(ACQUIRE_TIMEOUT, MySqlConnection::connect_with(options)).await {
        Ok(connected) => connected,
        Err(_) => Err(sqlx::Error::PoolTimedOut),
    }
}

/// A pool and how its transactions begin.
#[derive(Debug)]
pub(crate) struct Connections {
    pool: MySqlPool,
    begin: String,
    /// Bounds a whole call, for servers that do not answer at all.
    call_timeout: Duration,
}

impl Connections {
    pub(crate) fn new(
        options: MySqlConnectOptions,
        max: u32,
        lock_wait_s: u64,
        call_timeout: Duration,
    ) -> Self {
        let pool = PoolOptions::new()
            .max_connections(max.max(1))
            .acquire_timeout(ACQUIRE_TIMEOUT)
            // A dead connection shows itself in a transaction's first round trip.
            .test_before_acquire(false)
            .connect_lazy_with(options);
        let begin = format!(
            "SET TRANSACTION ISOLATION LEVEL READ COMMITTED; \
             SET SESSION innodb_lock_wait_timeout = {lock_wait_s}, \
             sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', time_zone = '+00:00'; \
             START TRANSACTION"
        );
        Self { pool, begin, call_timeout }
    }

    /// Begins a transaction. A connection that turns out to be dead is replaced: nothing has
    /// happened on it yet.
    pub(crate) async fn begin(&self) -> Result<Transaction, sqlx::Error> {
        let mut tries_left = self.pool.options().get_max_connections() + 1;
        loop {
            tries_left -= 1;
            let mut transaction =
                Transaction { connection: self.pool.acquire().await?, clean: false };
            let begin = sqlx::raw_sql(AssertSqlSafe(self.begin.as_str()));
            match transaction.connection().execute(begin).await {
                Ok(_) => return Ok(transaction),
                Err(error) if is_broken(&error) && tries_left > 0 => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Bounds `call` and says what it was.
    pub(crate) async fn in_time<T>(
        &self,
        what: &'static str,
        call: impl Future<Output = Result<T, sqlx::Error>>,
    ) -> Result<T, StoreError> {
        match tokio::time::timeout(self.call_timeout, call).await {
            Ok(result) => result.map_err(|error| store_error(what, error)),
            Err(_) => Err(StoreError::transient(format!(
                "{what}: the database did not answer within {:?}",
                self.call_timeout
            ))),
        }
    }

    pub(crate) async fn close(&self) {
        self.pool.close().await;
    }
}

/// An open transaction. Dropped before its end, its connection is closed.
pub(crate) struct Transaction {
    connection: PoolConnection<MySql>,
    clean: bool,
}

impl Transaction {
    pub(crate) fn connection(&mut self) -> &mut MySqlConnection {
        &mut self.connection
    }

    /// Commits what went well and rolls back what did not.
    pub(crate) async fn end<T>(mut self, result: Result<T, sqlx::Error>) -> Result<T, sqlx::Error> {
        match result {
            Ok(value) => {
                self.run("COMMIT").await?;
                self.clean = true;
                Ok(value)
            }
            Err(error) => {
                // What is broken is closed. A rollback that fails leaves the connection unclean,
                // and the error to tell is the first one.
                if !is_broken(&error) && self.run("ROLLBACK").await.is_ok() {
                    self.clean = true;
                }
                Err(error)
            }
        }
    }

    async fn run(&mut self, sql: &'static str) -> Result<(), sqlx::Error> {
        self.connection.execute(sqlx::raw_sql(sql)).await.map(drop)
    }
}

impl Drop for Transaction {
    fn drop(&mut self) {
        if !self.clean {
            self.connection.close_on_drop();
        }
    }
}
