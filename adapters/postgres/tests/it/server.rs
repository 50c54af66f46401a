//! What is seen at the server: statements per call, settings, sessions.

use std::time::Duration;

use inboxd_contract::{ClaimAnswer, Completion, InboxStore, MessageRecord, Settled};
use inboxd_postgres::{PostgresConfig, PostgresStore};
use sqlx::AssertSqlSafe;

use crate::failover::{claim, new_claim};
use crate::harness::{Harness, config};

pub fn completion(claim: &inboxd_contract::Claim) -> Completion {
    Completion {
        claim: claim.clone(),
        record: MessageRecord::default(),
        supersedes_dead: false,
        parked: None,
    }
}

/// Without prepared statements, as behind a pooler that does not know them.
#[tokio::test]
async fn works_without_prepared_statements() {
    let harness = Harness::new().await;
    let config =
        PostgresConfig { prepared_statements: false, ..config(&harness.url, &harness.schema) };
    let store = PostgresStore::connect(config).expect("a valid configuration");
    for _ in 0..3 {
        let one = new_claim();
        assert_eq!(claim(&store, &one).await.expect("claimed"), ClaimAnswer::Fresh { attempts: 1 });
        let settled = store.complete(&[completion(&one)]).await.remove(0);
        assert_eq!(settled.expect("completed"), Settled::Done);
    }
    let left: i64 = sqlx::query_scalar("SELECT count(*) FROM pg_prepared_statements")
        .fetch_one(&harness.pool)
        .await
        .expect("counted");
    assert!(left < 10, "the harness's own");
    store.close().await;
    harness.drop_schemas().await;
}

/// D4: nothing stays open between two calls, so a server that ends idle transactions ends none.
#[tokio::test]
async fn no_transaction_is_open_between_calls() {
    let harness = Harness::new().await;
    let url = format!("{}?application_name={}", harness.url, harness.schema);
    let store = PostgresStore::connect(config(&url, &harness.schema)).expect("a valid one");
    let one = new_claim();
    assert!(claim(&store, &one).await.expect("claimed").is_held());
    let open: i64 = sqlx::query_scalar(
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = $1 AND xact_start IS NOT NULL",
    )
    .bind(&harness.schema)
    .fetch_one(&harness.pool)
    .await
    .expect("counted");
    assert_eq!(open, 0, "a claim is a row, not a transaction");
    let settled = store.complete(&[completion(&one)]).await.remove(0);
    assert_eq!(settled.expect("completed"), Settled::Done);
    store.close().await;
    harness.drop_schemas().await;
}

/// The settings that durability and bounded waits rest on hold against the role's own.
#[tokio::test]
async fn settings_of_the_session_do_not_matter() {
    let harness = Harness::new().await;
    let options = "-c%20default_transaction_isolation%3Dserializable\
                   %20-c%20synchronous_commit%3Doff%20-c%20lock_timeout%3D0";
    let url = format!("{}?options={options}", harness.url);
    let store = PostgresStore::connect(config(&url, &harness.schema)).expect("a valid one");
    let one = new_claim();
    assert!(claim(&store, &one).await.expect("claimed").is_held());

    // Somebody else holds the row for ever: the call comes back all the same.
    let mut other = harness.pool.begin().await.expect("begun");
    let lock = format!("SELECT 1 FROM {}inbox_claims FOR UPDATE", harness.t());
    sqlx::query(AssertSqlSafe(lock)).execute(&mut *other).await.expect("locked");
    let answer = tokio::time::timeout(Duration::from_secs(20), store.complete(&[completion(&one)]))
        .await
        .expect("a lock timeout of our own");
    assert!(answer[0].as_ref().is_err_and(|error| error.locked));
    other.rollback().await.expect("rolled back");

    let settled = store.complete(&[completion(&one)]).await.remove(0);
    assert_eq!(settled.expect("completed"), Settled::Done);
    store.close().await;
    harness.drop_schemas().await;
}
