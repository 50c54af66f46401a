//! What taking costs, and whom it waits for.

use std::sync::Arc;
use std::time::{Duration, Instant};

use inboxd_conformance::store::StoreHarness as _;
use inboxd_contract::{
    Arrival, ConsumerId, Envelope, InboxKey, InboxStore, LaneId, MessageId, NewCopy, Origin,
    OwnerId, ParkReason, TakeDue, Token,
};
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use uuid::Uuid;

use crate::harness::Harness;

const LEASE: Duration = Duration::from_secs(15);
const BLOCKED: u64 = 100_000;

fn asking(rows: usize) -> TakeDue {
    TakeDue {
        consumer_id: ConsumerId::new("billing").expect("valid"),
        subscription: "orders".into(),
        tokens: (0..rows).map(|_| Token(Uuid::new_v4())).collect(),
        run_max: 4,
        bytes_max: 1 << 20,
        lanes_from: LaneId(*Uuid::new_v4().as_bytes()),
    }
}

/// Rows by SQL: `number` is each row's number from 1 on, and what is given are expressions of it.
async fn fill(harness: &Harness, rows: u64, lane: &str, due_in_s: &str) {
    let envelope = Envelope::new(Origin::Memory { stream: "s".into(), position: 1 }, None);
    let sql = format!(
        "INSERT INTO {}inbox_parked (subscription, consumer_id, message_id, envelope, body, \
         attempts, due_at, reason, state, lane_id) \
         SELECT 'orders', 'billing', gen_random_uuid()::text, '{}', 'body', 0, \
             now() + ({due_in_s}) * interval '1 second', 'stored', 'due', {lane} \
         FROM generate_series(1, {rows}) AS number ORDER BY number",
        harness.t(),
        envelope.to_stored(),
    );
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(&harness.pool).await.expect("filled");
}

/// Entries that were read of the indexes of parked rows: a backend tells when it ends.
async fn entries_read(harness: &Harness) -> i64 {
    let sql = "SELECT coalesce(sum(idx_tup_read), 0)::bigint FROM pg_stat_user_indexes \
               WHERE schemaname = $1 AND relname = 'p1_inbox_parked'";
    sqlx::query_scalar(sql).bind(&harness.schema).fetch_one(&harness.pool).await.expect("read")
}

async fn settled_entries_read(harness: &Harness) -> i64 {
    let mut before = entries_read(harness).await;
    let mut since = Instant::now();
    while since.elapsed() < Duration::from_millis(500) {
        tokio::time::sleep(Duration::from_millis(50)).await;
        let now = entries_read(harness).await;
        if now != before {
            (before, since) = (now, Instant::now());
        }
    }
    before
}

/// 100,000 rows wait behind one head that is put off, and others wait for their time: what is due
/// is found beside them, and none of them is read.
#[tokio::test]
async fn rows_that_wait_cost_nothing() {
    let harness = Harness::new().await;
    let lane = |text: &str| format!("decode(md5({text}), 'hex')");
    fill(&harness, 1, &lane("'long'"), "3600").await;
    fill(&harness, BLOCKED, &lane("'long'"), "-number").await;
    fill(&harness, BLOCKED, "NULL", "3600 + number").await;
    fill(&harness, 200, &lane("'waits' || number"), "3600").await;
    fill(&harness, 3, &lane("'due' || number"), "-1").await;
    fill(&harness, 2, "NULL", "-1").await;

    let before = settled_entries_read(&harness).await;
    let store = harness.store();
    let owner = OwnerId("a".into());
    let started = Instant::now();
    let batch = store.take_due(&owner, LEASE, &asking(16)).await.expect("taken");
    let took = started.elapsed();
    assert_eq!(batch.rows.len(), 5);
    let next_in = batch.next_in.expect("others wait");
    assert!(next_in > Duration::from_secs(3_000), "{next_in:?}");
    store.close().await;
    // Each lane is one entry; those in hand are read again by their keys.
    let read = settled_entries_read(&harness).await - before;
    println!("taking 5 of {} rows: {read} entries read, {took:?}", 2 * BLOCKED + 206);
    assert!(read > 0, "the server has not told yet");
    assert!(read < 1_000, "{read} entries were read");
    harness.drop_schemas().await;
}

/// Somebody has inserted a claim and neither commits nor rolls back: the other rows are taken.
#[tokio::test]
async fn claim_that_is_not_committed_stalls_no_other_row() {
    let harness = Harness::new().await;
    let store = harness.store();
    let keys: Vec<_> = (0..4)
        .map(|index| InboxKey {
            consumer_id: ConsumerId::new("billing").expect("valid"),
            message_id: MessageId::from_bytes(format!("m{index}").as_bytes()).expect("valid"),
        })
        .collect();
    let origin = Origin::Memory { stream: "s".into(), position: 1 };
    let arrivals: Vec<_> = keys
        .iter()
        .map(|key| Arrival {
            key: key.clone(),
            copy: NewCopy {
                subscription: "orders".into(),
                lane: None,
                lane_id: None,
                envelope: Arc::new(Envelope::new(origin.clone(), None)),
                fingerprint: None,
                attempts: 0,
                delay: Duration::ZERO,
                last_status: None,
                last_error: None,
                reason: ParkReason::Stored,
                first_ago: Duration::ZERO,
            },
        })
        .collect();
    store.arrive(&arrivals).await.expect("arrived");
    let mut other = PgConnection::connect(&harness.url).await.expect("connected");
    let insert = format!(
        "BEGIN; INSERT INTO {}inbox_claims (consumer_id, message_id, owner, attempts, expires_at) \
         VALUES ('billing', 'm1', 'x', 1, now() + interval '1 hour')",
        harness.t()
    );
    sqlx::raw_sql(AssertSqlSafe(insert)).execute(&mut other).await.expect("inserted");
    let started = Instant::now();
    let batch = store.take_due(&OwnerId("a".into()), LEASE, &asking(4)).await.expect("taken");
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    let mut taken: Vec<_> = batch.rows.iter().map(|row| row.claim.key.clone()).collect();
    taken.sort();
    assert_eq!(taken, [keys[0].clone(), keys[2].clone(), keys[3].clone()]);
    assert!(batch.next_in.is_some(), "one is left");
    sqlx::raw_sql("ROLLBACK").execute(&mut other).await.expect("rolled back");
    let batch = store.take_due(&OwnerId("b".into()), LEASE, &asking(4)).await.expect("taken");
    assert_eq!(batch.rows.len(), 1);
    // Whoever locks a row meanwhile is passed over at once.
    let guard = harness.lock_parked(&keys[1]).await;
    let batch = store.take_due(&OwnerId("b".into()), LEASE, &asking(4)).await.expect("taken");
    assert!(batch.rows.is_empty());
    guard.rollback().await;
    store.close().await;
    harness.drop_schemas().await;
}
