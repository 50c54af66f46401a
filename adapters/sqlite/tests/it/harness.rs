//! What the suite needs beside the store: direct access to the file.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use inboxd_conformance::store::{FreshDatabase, Guard, Row, StoreHarness, StoreTraits};
use inboxd_contract::{Claim, InboxKey, InboxStore, ParkedSeq, ParkedState, StoreError};
use inboxd_sqlite::{SqliteConfig, SqliteStore};
use sqlx::sqlite::{SqliteConnectOptions, SqliteConnection};
use sqlx::{AssertSqlSafe, Connection, Row as _};
use tempfile::TempDir;

const NOW: &str = "CAST(unixepoch('subsec') * 1000 AS INTEGER)";

/// A connection of the test's own.
pub async fn connect(path: &Path) -> SqliteConnection {
    let options = SqliteConnectOptions::new().filename(path).busy_timeout(Duration::from_secs(30));
    SqliteConnection::connect_with(&options).await.expect("the test opens the database")
}

/// A configuration that lets several instances share a file. Its lease bounds the waits for
/// locks, so a short one keeps the suite short; claims have the lease that the suite asks for.
pub fn shared(path: &Path) -> SqliteConfig {
    SqliteConfig { exclusive: false, lease: Duration::from_secs(2), ..SqliteConfig::new(path) }
}

/// One database file and its directory.
pub struct SqliteHarness {
    directory: TempDir,
}

impl SqliteHarness {
    pub async fn new() -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let harness = Self { directory };
        let store = SqliteStore::open(shared(&harness.path())).await.expect("migrated");
        store.close().await;
        harness
    }

    pub fn path(&self) -> PathBuf {
        self.directory.path().join("inbox.db")
    }

    /// Runs one statement with a key as its first two parameters.
    pub async fn with_key(&self, sql: String, key: &InboxKey) -> u64 {
        let mut connection = connect(&self.path()).await;
        let done = run_with_key(&mut connection, sql, key).await;
        connection.close().await.expect("closed");
        done
    }

    async fn open_transaction(&self, statements: &[String], key: &InboxKey) -> Box<dyn Guard> {
        let mut connection = connect(&self.path()).await;
        sqlx::query("BEGIN IMMEDIATE").execute(&mut connection).await.expect("the write lock");
        for statement in statements {
            run_with_key(&mut connection, statement.clone(), key).await;
        }
        Box::new(Open { connection })
    }
}

async fn run_with_key(connection: &mut SqliteConnection, sql: String, key: &InboxKey) -> u64 {
    sqlx::query(AssertSqlSafe(sql))
        .bind(key.consumer_id.as_str())
        .bind(key.message_id.as_str())
        .execute(connection)
        .await
        .expect("a statement of the test")
        .rows_affected()
}

const KEY: &str = "consumer_id = ?1 AND message_id = ?2";

fn insert_message() -> String {
    String::from("INSERT INTO inbox_messages (consumer_id, message_id) VALUES (?1, ?2)")
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

struct Open {
    connection: SqliteConnection,
}

impl Open {
    async fn end(mut self, how: &'static str) {
        sqlx::query(how).execute(&mut self.connection).await.expect("the transaction ends");
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

#[async_trait]
impl StoreHarness for SqliteHarness {
    fn adapter(&self) -> &'static str {
        "sqlite"
    }

    fn traits(&self) -> StoreTraits {
        StoreTraits { row_locks: false, instances: usize::MAX, sweep_lock: false, migrations: true }
    }

    async fn open(&self) -> Arc<dyn InboxStore> {
        Arc::new(SqliteStore::open(shared(&self.path())).await.expect("opened"))
    }

    async fn backdate(&self, row: Row<'_>, age: Duration) {
        let (table, column) = table(&row);
        let age = age.as_millis();
        let sql = format!("UPDATE {table} SET {column} = {NOW} - {age} WHERE {KEY}");
        // No row is no fault: a claim that was cut may never have happened.
        self.with_key(sql, key_of(&row)).await;
    }

    async fn rows(&self, row: Row<'_>) -> u64 {
        let (table, _) = table(&row);
        let key = key_of(&row);
        let mut connection = connect(&self.path()).await;
        let row = sqlx::query(AssertSqlSafe(format!("SELECT count(*) FROM {table} WHERE {KEY}")))
            .bind(key.consumer_id.as_str())
            .bind(key.message_id.as_str())
            .fetch_one(&mut connection)
            .await
            .expect("counted");
        connection.close().await.expect("closed");
        row.get(0)
    }

    async fn discard(&self, key: &InboxKey) {
        let sql = format!("UPDATE inbox_parked SET state = 'discarded', body = NULL WHERE {KEY}");
        assert!(self.with_key(sql, key).await > 0, "no parked row to discard");
    }

    async fn hold_uncommitted_message(&self, key: &InboxKey) -> Box<dyn Guard> {
        self.open_transaction(&[insert_message()], key).await
    }

    async fn hold_open_completion(&self, claim: &Claim) -> Box<dyn Guard> {
        let delete = format!("DELETE FROM inbox_claims WHERE {KEY}");
        self.open_transaction(&[delete, insert_message()], &claim.key).await
    }

    async fn lock_claim(&self, key: &InboxKey) -> Box<dyn Guard> {
        let touch = format!("UPDATE inbox_claims SET attempts = attempts WHERE {KEY}");
        self.open_transaction(&[touch], key).await
    }

    async fn backdate_due(&self, key: &InboxKey, age: Duration) {
        let age = age.as_millis();
        let sql =
            format!("UPDATE inbox_parked SET due_at = {NOW} - {age} WHERE {KEY} AND state = 'due'");
        self.with_key(sql, key).await;
    }

    async fn backdate_first(&self, key: &InboxKey, age: Duration) {
        let age = age.as_millis();
        let sql = format!("UPDATE inbox_parked SET first_at = {NOW} - {age} WHERE {KEY}");
        self.with_key(sql, key).await;
    }

    async fn backdate_audit(&self, seq: ParkedSeq, age: Duration) {
        let mut connection = connect(&self.path()).await;
        let age = age.as_millis();
        let sql = format!("UPDATE inbox_audit SET acted_at = {NOW} - {age} WHERE seq = ?1");
        let done = sqlx::query(AssertSqlSafe(sql)).bind(seq.0).execute(&mut connection).await;
        assert!(done.expect("a statement of the test").rows_affected() > 0, "no such entry");
        connection.close().await.expect("closed");
    }

    async fn rows_in_state(&self, key: &InboxKey, state: ParkedState) -> u64 {
        let mut connection = connect(&self.path()).await;
        let sql = format!("SELECT count(*) FROM inbox_parked WHERE {KEY} AND state = ?3");
        let row = sqlx::query(AssertSqlSafe(sql))
            .bind(key.consumer_id.as_str())
            .bind(key.message_id.as_str())
            .bind(state.as_str())
            .fetch_one(&mut connection)
            .await
            .expect("counted");
        connection.close().await.expect("closed");
        row.get(0)
    }

    async fn fresh_database(&self) -> Box<dyn FreshDatabase> {
        Box::new(Fresh { directory: tempfile::tempdir().expect("a temporary directory") })
    }
}

struct Fresh {
    directory: TempDir,
}

impl Fresh {
    fn path(&self) -> PathBuf {
        self.directory.path().join("fresh.db")
    }
}

#[async_trait]
impl FreshDatabase for Fresh {
    async fn start(&self) -> Result<Arc<dyn InboxStore>, StoreError> {
        Ok(Arc::new(SqliteStore::open(shared(&self.path())).await?))
    }

    async fn versions(&self) -> Vec<i64> {
        let mut connection = connect(&self.path()).await;
        let rows = sqlx::query("SELECT version FROM inbox_migrations ORDER BY version")
            .fetch_all(&mut connection)
            .await
            .expect("the table of migrations");
        rows.iter().map(|row| row.get(0)).collect()
    }

    async fn record_newer(&self, breaking: bool) {
        let mut connection = connect(&self.path()).await;
        sqlx::query("INSERT INTO inbox_migrations VALUES (?1, 'newer', 'sum', ?2, 0)")
            .bind(9_000 + i64::from(breaking))
            .bind(breaking)
            .execute(&mut connection)
            .await
            .expect("recorded");
    }
}
