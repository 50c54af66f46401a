//! A server that turns read-only, ends its sessions, or is not there.

use std::time::Duration;

use inboxd_conformance::{ensure, eventually, servers};
use inboxd_contract::{
    Claim, ClaimAnswer, ClaimRequest, ConsumerId, InboxKey, InboxStore, MessageId, OwnerId,
    StoreError, Token,
};
use inboxd_postgres::{PostgresConfig, PostgresStore};
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use uuid::Uuid;

use crate::harness::Harness;

pub const DEADLINE: Duration = Duration::from_secs(30);

pub fn new_claim() -> Claim {
    let id = Uuid::new_v4().to_string();
    let key = InboxKey {
        consumer_id: ConsumerId::new("billing").expect("a valid id"),
        message_id: MessageId::from_bytes(id.as_bytes()).expect("a valid id"),
    };
    Claim { key, token: Token(Uuid::new_v4()) }
}

pub async fn claim(store: &PostgresStore, claim: &Claim) -> Result<ClaimAnswer, StoreError> {
    let request =
        ClaimRequest { claim: claim.clone(), fingerprint: None, position: None, lane_id: None };
    let owner = OwnerId("a".into());
    store.claim(&owner, Duration::from_secs(15), &[request]).await.remove(0)
}

/// A database of its own, so that what happens to it concerns no other test.
pub struct OwnDatabase {
    admin: PgConnection,
    pub name: String,
    pub url: String,
}

impl OwnDatabase {
    pub async fn create() -> Self {
        let shared = servers::postgres_url();
        let mut admin = PgConnection::connect(&shared).await.expect("connected");
        let name = format!("it_{}", Uuid::new_v4().simple());
        let sql = format!("CREATE DATABASE {name} ENCODING 'UTF8' TEMPLATE template0");
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut admin).await.expect("created");
        let (server, _) = shared.rsplit_once('/').expect("the URL names a database");
        Self { admin, url: format!("{server}/{name}"), name }
    }

    pub async fn execute(&mut self, sql: String) {
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut self.admin).await.expect("executed");
    }

    async fn end_sessions(&mut self) {
        let sql = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = ";
        self.execute(format!("{sql}'{}'", self.name)).await;
    }

    pub async fn drop(mut self) {
        let name = self.name.clone();
        self.execute(format!("DROP DATABASE {name} WITH (FORCE)")).await;
    }
}

/// D5: the server turns read-only for a while, and sessions are cut.
#[tokio::test]
async fn read_only_server_is_transient_and_recovers_alone() {
    let mut database = OwnDatabase::create().await;
    let store = PostgresStore::connect(PostgresConfig::new(database.url.as_str().into()))
        .expect("a valid configuration");
    store.migrate().await.expect("migrated");
    assert!(claim(&store, &new_claim()).await.expect("claimed").is_held());
    store.ping().await.expect("writable");

    let name = database.name.clone();
    database.execute(format!("ALTER DATABASE {name} SET default_transaction_read_only = on")).await;
    database.end_sessions().await;
    let error = claim(&store, &new_claim()).await.expect_err("read-only");
    assert!(error.is_transient() && !error.locked, "{error}: {:?}", error.source);
    let error = store.ping().await.expect_err("read-only");
    assert!(error.is_transient(), "{error}");

    database.execute(format!("ALTER DATABASE {name} RESET default_transaction_read_only")).await;
    database.end_sessions().await;
    eventually(DEADLINE, async || match store.ping().await {
        Ok(()) => ensure(claim(&store, &new_claim()).await.is_ok(), "claims fail"),
        Err(error) => Err(error.to_string()),
    })
    .await;
    store.close().await;
    database.drop().await;
}

/// Connections that died while they were idle cost no call its answer.
#[tokio::test]
async fn ended_sessions_are_replaced_without_an_error() {
    let mut database = OwnDatabase::create().await;
    let store = PostgresStore::connect(PostgresConfig::new(database.url.as_str().into()))
        .expect("a valid configuration");
    store.migrate().await.expect("migrated");
    for _ in 0..5 {
        // As many connections as the pool may have, all idle, all ended.
        let claims: Vec<_> = (0..4).map(|_| new_claim()).collect();
        let calls = claims.iter().map(|one| claim(&store, one));
        for answer in futures::future::join_all(calls).await {
            let answer = answer.unwrap_or_else(|error| panic!("{error}: {:?}", error.source));
            assert!(answer.is_held());
        }
        let renewed = store.renew(Duration::from_secs(15), &claims).await.expect("renewed");
        assert_eq!(renewed.len(), claims.len());
        database.end_sessions().await;
    }
    store.close().await;
    database.drop().await;
}

#[tokio::test]
async fn server_that_is_not_there_is_transient_in_bounded_time() {
    // Port 1 of loopback: refused.
    let url = "postgres://nobody:secret@127.0.0.1:1/none";
    let config = PostgresConfig {
        acquire_timeout: Duration::from_millis(300),
        ..PostgresConfig::new(url.into())
    };
    let store = PostgresStore::connect(config).expect("a valid configuration");
    for error in [
        store.migrate().await.expect_err("refused"),
        store.ping().await.expect_err("refused"),
        claim(&store, &new_claim()).await.expect_err("refused"),
    ] {
        assert!(error.is_transient(), "{error}");
        assert!(!format!("{error} {error:?}").contains("secret"));
    }
    assert!(!store.describe().contains("secret"), "{}", store.describe());
}

#[tokio::test]
async fn missing_tables_are_permanent_and_name_the_remedy() {
    let harness = Harness::new().await;
    let config = PostgresConfig {
        table_prefix: String::from("other_"),
        ..crate::harness::config(&harness.url, &harness.schema)
    };
    let store = PostgresStore::connect(config).expect("a valid configuration");
    let error = claim(&store, &new_claim()).await.expect_err("no tables");
    assert!(!error.is_transient() && error.what.contains("inboxd migrate"), "{error}");
    store.close().await;
    harness.drop_schemas().await;
}
