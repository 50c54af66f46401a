//! What the suite needs beside the store: direct access to a database of its own.

use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use inboxd_conformance::servers::{mysql_url, unique};
use inboxd_conformance::store::{FreshDatabase, Guard, Row, StoreHarness, StoreTraits};
use inboxd_contract::{Claim, InboxKey, InboxStore, ParkedSeq, ParkedState, StoreError};
use inboxd_mysql::{MysqlConfig, MysqlStore};
use secrecy::SecretString;
use sqlx::mysql::{MySqlConnectOptions, MySqlConnection};
use sqlx::{AssertSqlSafe, Connection, Executor as _, Row as _};

const KEY: &str = "consumer_id = ? AND message_id = ?";

/// An empty database on a server, and how to reach it.
pub struct Database {
    url: String,
    pub name: String,
}

impl Database {
    /// Makes one on the shared server.
    pub async fn shared() -> Self {
        Self::on(&mysql_url()).await
    }

    /// Makes one on the server at `url`.
    pub async fn on(url: &str) -> Self {
        let database = Self { url: url.to_owned(), name: unique("mysql") };
        database.admin(&format!("CREATE DATABASE {}", database.name)).await;
        database
    }

    /// Runs a statement outside of the database.
    pub async fn admin(&self, sql: &str) {
        let options = MySqlConnectOptions::from_str(&self.url).expect("the server's URL");
        let mut connection =
            MySqlConnection::connect_with(&options).await.expect("the server answers");
        connection.execute(sqlx::raw_sql(AssertSqlSafe(sql))).await.expect("an admin's statement");
        connection.close().await.expect("closed");
    }

    /// A configuration for it. Its lease bounds the waits for locks, so the shortest one keeps
    /// tests short; claims have the lease that a test asks for.
    pub fn config(&self) -> MysqlConfig {
        MysqlConfig {
            database: Some(self.name.clone()),
            lease: Duration::from_secs(5),
            ..MysqlConfig::new(SecretString::from(self.url.clone()))
        }
    }

    pub async fn open(&self) -> MysqlStore {
        MysqlStore::connect(self.config()).await.expect("connected")
    }

    /// A connection of the test's own.
    pub async fn connect(&self) -> MySqlConnection {
        let options = MySqlConnectOptions::from_str(&self.url).expect("the server's URL");
        MySqlConnection::connect_with(&options.database(&self.name)).await.expect("connected")
    }

    /// Runs a statement whose two parameters are a key.
    pub async fn with_key(&self, sql: &str, key: &InboxKey) -> u64 {
        let mut connection = self.connect().await;
        let rows = run_with_key(&mut connection, sql, key).await;
        connection.close().await.expect("closed");
        rows
    }

    /// A transaction that has run `statements` and stays open.
    pub async fn open_transaction(&self, statements: &[String], key: &InboxKey) -> Box<Open> {
        let mut connection = self.connect().await;
        connection.execute("START TRANSACTION").await.expect("begun");
        for statement in statements {
            run_with_key(&mut connection, statement, key).await;
        }
        Box::new(Open { connection })
    }
}

/// Drops the database too, off the runtime: a drop cannot wait. A server that is gone has no
/// database to drop.
impl Drop for Database {
    fn drop(&mut self) {
        let options = MySqlConnectOptions::from_str(&self.url).expect("the server's URL");
        let sql = format!("DROP DATABASE IF EXISTS {}", self.name);
        let dropping = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime").block_on(async {
                if let Ok(mut connection) = MySqlConnection::connect_with(&options).await {
                    let _ = connection.execute(sqlx::raw_sql(AssertSqlSafe(sql))).await;
                }
            });
        });
        let _ = dropping.join();
    }
}

async fn run_with_key(connection: &mut MySqlConnection, sql: &str, key: &InboxKey) -> u64 {
    sqlx::query(AssertSqlSafe(sql))
        .bind(key.consumer_id.as_str().as_bytes())
        .bind(key.message_id.as_str().as_bytes())
        .execute(connection)
        .await
        .expect("a statement of the test")
        .rows_affected()
}

pub fn insert_message() -> String {
    String::from("INSERT INTO inbox_messages (consumer_id, message_id) VALUES (?, ?)")
}

/// Somebody else's transaction.
pub struct Open {
    connection: MySqlConnection,
}

impl Open {
    async fn end(mut self, how: &'static str) {
        self.connection.execute(how).await.expect("the transaction ends");
        self.connection.close().await.expect("closed");
    }
}

#[async_trait]
impl Guard for Open {
    async fn commit(self: Box<Self>) {
        self.end("COMMIT").await;
    }

    async fn rollback(self: Box<Self>) {
        self.end("ROLLBACK").await;
    }
}

/// A database that was migrated.
pub struct MysqlHarness {
    database: Database,
    sweep_lock: String,
}

impl MysqlHarness {
    pub async fn new() -> Self {
        let database = Database::shared().await;
        let store = database.open().await;
        let sweep_lock = store.sweep_lock_name().to_owned();
        store.close().await;
        Self { database, sweep_lock }
    }
}

fn table(row: &Row<'_>) -> (&'static str, &'static str) {
    match row {
        Row::Claim(_) => ("inbox_claims", "expires_at"),
        Row::Message(_) => ("inbox_messages", "processed_at"),
        Row::Parked(_) => ("inbox_parked", "parked_at"),
    }
}

fn key_of<'a>(row: &Row<'a>) -> &'a InboxKey {
    match row {
        Row::Claim(key) | Row::Message(key) | Row::Parked(key) => key,
    }
}

#[async_trait]
impl StoreHarness for MysqlHarness {
    fn adapter(&self) -> &'static str {
        "mysql"
    }

    fn traits(&self) -> StoreTraits {
        StoreTraits { row_locks: true, instances: usize::MAX, sweep_lock: true, migrations: true }
    }

    async fn open(&self) -> Arc<dyn InboxStore> {
        Arc::new(self.database.open().await)
    }

    async fn backdate(&self, row: Row<'_>, age: Duration) {
        let (table, column) = table(&row);
        let age = age.as_micros();
        let sql = format!(
            "UPDATE {table} SET {column} = UTC_TIMESTAMP(3) - INTERVAL {age} MICROSECOND \
             WHERE {KEY}"
        );
        // No row is no fault: a claim that was cut may never have happened.
        self.database.with_key(&sql, key_of(&row)).await;
    }

    async fn rows(&self, row: Row<'_>) -> u64 {
        let (table, _) = table(&row);
        let key = key_of(&row);
        let mut connection = self.database.connect().await;
        let row = sqlx::query(AssertSqlSafe(format!("SELECT COUNT(*) FROM {table} WHERE {KEY}")))
            .bind(key.consumer_id.as_str().as_bytes())
            .bind(key.message_id.as_str().as_bytes())
            .fetch_one(&mut connection)
            .await
            .expect("counted");
        connection.close().await.expect("closed");
        u64::try_from(row.get::<i64, _>(0)).expect("a count")
    }

    async fn discard(&self, key: &InboxKey) {
        let sql = format!("UPDATE inbox_parked SET state = 'discarded', body = NULL WHERE {KEY}");
        assert!(self.database.with_key(&sql, key).await > 0, "no parked row to discard");
    }

    async fn hold_uncommitted_message(&self, key: &InboxKey) -> Box<dyn Guard> {
        self.database.open_transaction(&[insert_message()], key).await
    }

    async fn hold_open_completion(&self, claim: &Claim) -> Box<dyn Guard> {
        let delete = format!("DELETE FROM inbox_claims WHERE {KEY}");
        self.database.open_transaction(&[delete, insert_message()], &claim.key).await
    }

    async fn lock_claim(&self, key: &InboxKey) -> Box<dyn Guard> {
        let lock = format!("UPDATE inbox_claims SET attempts = attempts WHERE {KEY}");
        self.database.open_transaction(&[lock], key).await
    }

    async fn backdate_due(&self, key: &InboxKey, age: Duration) {
        let sql = format!(
            "UPDATE inbox_parked SET due_at = UTC_TIMESTAMP(3) - INTERVAL {} MICROSECOND \
             WHERE {KEY} AND state = 'due'",
            age.as_micros()
        );
        self.database.with_key(&sql, key).await;
    }

    async fn backdate_first(&self, key: &InboxKey, age: Duration) {
        let sql = format!(
            "UPDATE inbox_parked SET first_at = UTC_TIMESTAMP(3) - INTERVAL {} MICROSECOND \
             WHERE {KEY}",
            age.as_micros()
        );
        self.database.with_key(&sql, key).await;
    }

    async fn backdate_audit(&self, seq: ParkedSeq, age: Duration) {
        let sql = format!(
            "UPDATE inbox_audit SET acted_at = UTC_TIMESTAMP(3) - INTERVAL {} MICROSECOND \
             WHERE seq = ?",
            age.as_micros()
        );
        let mut connection = self.database.connect().await;
        let done = sqlx::query(AssertSqlSafe(sql)).bind(seq.0).execute(&mut connection).await;
        assert!(done.expect("a statement of the test").rows_affected() > 0, "no such entry");
        connection.close().await.expect("closed");
    }

    async fn rows_in_state(&self, key: &InboxKey, state: ParkedState) -> u64 {
        let sql = format!("SELECT COUNT(*) FROM inbox_parked WHERE {KEY} AND state = ?");
        let mut connection = self.database.connect().await;
        let row = sqlx::query(AssertSqlSafe(sql))
            .bind(key.consumer_id.as_str().as_bytes())
            .bind(key.message_id.as_str().as_bytes())
            .bind(state.as_str())
            .fetch_one(&mut connection)
            .await
            .expect("counted");
        connection.close().await.expect("closed");
        u64::try_from(row.get::<i64, _>(0)).expect("a count")
    }

    async fn lock_parked(&self, key: &InboxKey) -> Box<dyn Guard> {
        let lock = format!("UPDATE inbox_parked SET attempts = attempts WHERE {KEY}");
        self.database.open_transaction(&[lock], key).await
    }

    async fn hold_sweep_lock(&self) -> Box<dyn Guard> {
        let mut connection = self.database.connect().await;
        connection.execute("START TRANSACTION").await.expect("begun");
        let taken = sqlx::query("SELECT GET_LOCK(?, 20)")
            .bind(&self.sweep_lock)
            .fetch_one(&mut connection)
            .await
            .expect("the lock");
        assert_eq!(taken.get::<i64, _>(0), 1, "the sweep's lock is free");
        Box::new(Open { connection })
    }

    async fn fresh_database(&self) -> Box<dyn FreshDatabase> {
        Box::new(Fresh { database: Database::shared().await })
    }
}

struct Fresh {
    database: Database,
}

#[async_trait]
impl FreshDatabase for Fresh {
    async fn start(&self) -> Result<Arc<dyn InboxStore>, StoreError> {
        Ok(Arc::new(MysqlStore::connect(self.database.config()).await?))
    }

    async fn versions(&self) -> Vec<i64> {
        let mut connection = self.database.connect().await;
        let rows = sqlx::query("SELECT version FROM inbox_migrations ORDER BY version")
            .fetch_all(&mut connection)
            .await
            .expect("the table of migrations");
        rows.iter().map(|row| row.get(0)).collect()
    }

    async fn record_newer(&self, breaking: bool) {
        let mut connection = self.database.connect().await;
        sqlx::query("INSERT INTO inbox_migrations VALUES (?, 'newer', 'sum', ?, NOW(3))")
            .bind(9_000 + i64::from(breaking))
            .bind(breaking)
            .execute(&mut connection)
            .await
            .expect("recorded");
    }
}
