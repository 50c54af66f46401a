//! Rows of any age, locks and open transactions, by a connection of its own.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use inboxd_conformance::servers;
use inboxd_conformance::store::{FreshDatabase, Guard, Row, StoreHarness, StoreTraits};
use inboxd_contract::{Claim, InboxKey, InboxStore, ParkedSeq, ParkedState, StoreError};
use inboxd_postgres::{PostgresConfig, PostgresStore};
use sqlx::postgres::PgPoolOptions;
use sqlx::{AssertSqlSafe, Connection, PgConnection, PgPool};
use uuid::Uuid;

/// A store's tables in a schema of their own on the shared server.
pub struct Harness {
    pub url: String,
    pub pool: PgPool,
    pub schema: String,
    /// All schemas that were made here, to be dropped at the end.
    schemas: Mutex<Vec<String>>,
}

pub fn config(url: &str, schema: &str) -> PostgresConfig {
    PostgresConfig {
        schema: Some(schema.to_owned()),
        table_prefix: String::from("p1_"),
        ..PostgresConfig::new(url.into())
    }
}

pub fn fresh_schema() -> String {
    format!("it_{}", Uuid::new_v4().simple())
}

impl Harness {
    pub async fn new() -> Self {
        let url = servers::postgres_url();
        let pool = PgPoolOptions::new()
            .max_connections(2)
            .connect(&url)
            .await
            .expect("the shared PostgreSQL answers; `scripts/services up` starts it");
        let schema = fresh_schema();
        let store = PostgresStore::connect(config(&url, &schema)).expect("a valid configuration");
        store.migrate().await.expect("migrated");
        store.close().await;
        Self { url, pool, schemas: Mutex::new(vec![schema.clone()]), schema }
    }

    pub fn config(&self) -> PostgresConfig {
        config(&self.url, &self.schema)
    }

    pub fn store(&self) -> PostgresStore {
        PostgresStore::connect(self.config()).expect("a valid configuration")
    }

    /// Where the tables are.
    pub fn t(&self) -> String {
        format!("\"{}\".p1_", self.schema)
    }

    pub async fn drop_schemas(&self) {
        let schemas = std::mem::take(&mut *self.schemas.lock().expect("no test panics here"));
        for schema in schemas {
            let sql = format!("DROP SCHEMA IF EXISTS \"{schema}\" CASCADE");
            sqlx::raw_sql(AssertSqlSafe(sql)).execute(&self.pool).await.expect("dropped");
        }
    }

    /// Runs a statement about one key.
    async fn about(&self, sql: String, key: &InboxKey) -> u64 {
        sqlx::query(AssertSqlSafe(sql))
            .bind(key.consumer_id.as_str())
            .bind(key.message_id.as_str())
            .execute(&self.pool)
            .await
            .expect("a statement of the harness")
            .rows_affected()
    }

    /// Counts rows of one key.
    async fn counted(&self, sql: String, key: &InboxKey) -> u64 {
        let count: i64 = sqlx::query_scalar(AssertSqlSafe(sql))
            .bind(key.consumer_id.as_str())
            .bind(key.message_id.as_str())
            .fetch_one(&self.pool)
            .await
            .expect("counted");
        count.unsigned_abs()
    }

    /// Sets a time of the parked rows of one key.
    async fn set_age(&self, column: &str, key: &InboxKey, age: Duration, which: &str) {
        let sql = format!(
            "UPDATE {}inbox_parked \
             SET {column} = clock_timestamp() - interval '{} milliseconds' WHERE {KEY}{which}",
            self.t(),
            age.as_millis()
        );
        self.about(sql, key).await;
    }

    /// A transaction that has run these statements about one key.
    async fn open_transaction(&self, statements: &[String], key: &InboxKey) -> Box<dyn Guard> {
        let mut connection = PgConnection::connect(&self.url).await.expect("connected");
        sqlx::raw_sql("BEGIN").execute(&mut connection).await.expect("begun");
        for sql in statements {
            sqlx::query(AssertSqlSafe(sql.clone()))
                .bind(key.consumer_id.as_str())
                .bind(key.message_id.as_str())
                .execute(&mut connection)
                .await
                .expect("a statement of the harness");
        }
        Box::new(Open(connection))
    }

    fn insert_message(&self) -> String {
        format!("INSERT INTO {}inbox_messages (consumer_id, message_id) VALUES ($1, $2)", self.t())
    }
}

struct Open(PgConnection);

#[async_trait]
impl Guard for Open {
    async fn commit(mut self: Box<Self>) {
        sqlx::raw_sql("COMMIT").execute(&mut self.0).await.expect("committed");
    }

    async fn rollback(mut self: Box<Self>) {
        sqlx::raw_sql("ROLLBACK").execute(&mut self.0).await.expect("rolled back");
    }
}

fn place(row: Row<'_>) -> (&'static str, &'static str, &InboxKey) {
    match row {
        Row::Claim(key) => ("inbox_claims", "expires_at", key),
        Row::Message(key) => ("inbox_messages", "processed_at", key),
        Row::Parked(key) => ("inbox_parked", "parked_at", key),
    }
}

const KEY: &str = "consumer_id = $1 AND message_id = $2";

#[async_trait]
impl StoreHarness for Harness {
    fn adapter(&self) -> &'static str {
        "postgres"
    }

    fn traits(&self) -> StoreTraits {
        StoreTraits { row_locks: true, instances: 8, sweep_lock: true, migrations: true }
    }

    async fn open(&self) -> Arc<dyn InboxStore> {
        Arc::new(self.store())
    }

    async fn backdate(&self, row: Row<'_>, age: Duration) {
        let (table, column, key) = place(row);
        let ms = age.as_millis();
        let sql = format!(
            "UPDATE {}{table} SET {column} = clock_timestamp() - interval '{ms} milliseconds' \
             WHERE {KEY}",
            self.t()
        );
        self.about(sql, key).await;
    }

    async fn rows(&self, row: Row<'_>) -> u64 {
        let (table, _, key) = place(row);
        let sql = format!("SELECT count(*) FROM {}{table} WHERE {KEY}", self.t());
        self.counted(sql, key).await
    }

    async fn discard(&self, key: &InboxKey) {
        let sql = format!(
            "UPDATE {}inbox_parked SET state = 'discarded', body = NULL WHERE {KEY}",
            self.t()
        );
        self.about(sql, key).await;
    }

    async fn hold_uncommitted_message(&self, key: &InboxKey) -> Box<dyn Guard> {
        self.open_transaction(&[self.insert_message()], key).await
    }

    async fn hold_open_completion(&self, claim: &Claim) -> Box<dyn Guard> {
        let delete = format!("DELETE FROM {}inbox_claims WHERE {KEY}", self.t());
        self.open_transaction(&[delete, self.insert_message()], &claim.key).await
    }

    async fn lock_claim(&self, key: &InboxKey) -> Box<dyn Guard> {
        let sql = format!("SELECT 1 FROM {}inbox_claims WHERE {KEY} FOR UPDATE", self.t());
        self.open_transaction(&[sql], key).await
    }

    async fn backdate_due(&self, key: &InboxKey, age: Duration) {
        self.set_age("due_at", key, age, " AND state = 'due'").await;
    }

    async fn backdate_first(&self, key: &InboxKey, age: Duration) {
        self.set_age("first_at", key, age, "").await;
    }

    async fn backdate_audit(&self, seq: ParkedSeq, age: Duration) {
        let sql = format!(
            "UPDATE {}inbox_audit SET acted_at = clock_timestamp() - interval '{} milliseconds' \
             WHERE seq = $1",
            self.t(),
            age.as_millis()
        );
        let update = sqlx::query(AssertSqlSafe(sql)).bind(seq.0).execute(&self.pool).await;
        update.expect("a statement of the harness");
    }

    async fn rows_in_state(&self, key: &InboxKey, state: ParkedState) -> u64 {
        let sql = format!(
            "SELECT count(*) FROM {}inbox_parked WHERE {KEY} AND state = '{}'",
            self.t(),
            state.as_str()
        );
        self.counted(sql, key).await
    }

    async fn lock_parked(&self, key: &InboxKey) -> Box<dyn Guard> {
        let sql = format!("SELECT 1 FROM {}inbox_parked WHERE {KEY} FOR UPDATE", self.t());
        self.open_transaction(&[sql], key).await
    }

    async fn hold_sweep_lock(&self) -> Box<dyn Guard> {
        let mut connection = PgConnection::connect(&self.url).await.expect("connected");
        sqlx::raw_sql("BEGIN").execute(&mut connection).await.expect("begun");
        sqlx::query("SELECT pg_advisory_xact_lock(hashtextextended($1, 0))")
            .bind(format!("inboxd sweep {}", self.t()))
            .execute(&mut connection)
            .await
            .expect("locked");
        Box::new(Open(connection))
    }

    async fn fresh_database(&self) -> Box<dyn FreshDatabase> {
        let schema = fresh_schema();
        self.schemas.lock().expect("no test panics here").push(schema.clone());
        Box::new(Fresh { url: self.url.clone(), pool: self.pool.clone(), schema })
    }
}

struct Fresh {
    url: String,
    pool: PgPool,
    schema: String,
}

#[async_trait]
impl FreshDatabase for Fresh {
    async fn start(&self) -> Result<Arc<dyn InboxStore>, StoreError> {
        let store = PostgresStore::connect(config(&self.url, &self.schema))?;
        store.migrate().await?;
        Ok(Arc::new(store))
    }

    async fn versions(&self) -> Vec<i64> {
        let sql = format!(
            "SELECT version::bigint FROM \"{}\".p1_inbox_migrations ORDER BY version",
            self.schema
        );
        sqlx::query_scalar(AssertSqlSafe(sql)).fetch_all(&self.pool).await.expect("read")
    }

    async fn record_newer(&self, breaking: bool) {
        let sql = format!(
            "INSERT INTO \"{}\".p1_inbox_migrations (version, name, checksum, breaking) \
             VALUES ($1, 'newer', '', $2)",
            self.schema
        );
        sqlx::query(AssertSqlSafe(sql))
            .bind(9_000 + i32::from(breaking))
            .bind(breaking)
            .execute(&self.pool)
            .await
            .expect("recorded");
    }
}
