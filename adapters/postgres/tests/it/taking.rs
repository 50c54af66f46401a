//! What taking costs, and whom it waits for.

use std::sync::Arc;
use std::time::{Duration, Instant};

use inboxd_conformance::store::StoreHarness as _;
use inboxd_contract::{
    Arrival, Claim, ClaimRequest, Completion, ConsumerId, Envelope, InboxKey, InboxStore, LaneId,
    MessageId, MessageRecord, NewCopy, Origin, OwnerId, ParkReason, Reschedule, Settled, TakeDue,
    Token, Unpark,
};
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use uuid::Uuid;

use crate::harness::Harness;

const LEASE: Duration = Duration::from_secs(15);
const BLOCKED: u64 = 100_000;
const FEWER: u64 = 30_000;

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

fn arrival(id: &str, lane: LaneId) -> Arrival {
    let origin = Origin::Memory { stream: "s".into(), position: 1 };
    Arrival {
        key: InboxKey {
            consumer_id: ConsumerId::new("billing").expect("valid"),
            message_id: MessageId::from_bytes(id.as_bytes()).expect("valid"),
        },
        copy: NewCopy {
            subscription: "orders".into(),
            lane: None,
            lane_id: Some(lane),
            envelope: Arc::new(Envelope::new(origin, None)),
            fingerprint: None,
            attempts: 0,
            delay: Duration::ZERO,
            last_status: None,
            last_error: None,
            reason: ParkReason::Stored,
            first_ago: Duration::ZERO,
        },
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
    fill(&harness, FEWER, "NULL", "3600 + number").await;
    fill(&harness, 200, &lane("'waits' || number"), "3600").await;
    fill(&harness, 3, &lane("'due' || number"), "-1").await;
    fill(&harness, 2, "NULL", "-1").await;

    let before = settled_entries_read(&harness).await;
    let store = harness.store();
    let batch = store.take_due(&OwnerId("a".into()), LEASE, &asking(16)).await.expect("taken");
    assert_eq!(batch.rows.len(), 5);
    let next_in = batch.next_in.expect("others wait");
    assert!(next_in > Duration::from_secs(3_000), "{next_in:?}");
    store.close().await;
    // Each lane is one entry; those in hand are read again by their keys.
    few_entries_were_read(&harness, before, 0).await;
    harness.drop_schemas().await;
}

/// Not more than 2,000 entries of all indexes but what is `allowed` beside them.
async fn few_entries_were_read(harness: &Harness, before: i64, allowed: i64) {
    let deadline = Instant::now() + Duration::from_secs(30);
    let mut read = 0;
    while read == 0 {
        assert!(Instant::now() < deadline, "the server does not tell");
        read = settled_entries_read(harness).await - before;
    }
    let by_index: Vec<(String, i64)> = sqlx::query_as(
        "SELECT indexrelname::text, idx_tup_read FROM pg_stat_user_indexes WHERE schemaname = $1",
    )
    .bind(&harness.schema)
    .fetch_all(&harness.pool)
    .await
    .expect("read");
    println!("{read} entries were read");
    assert!(read < 2_000 + allowed, "{read} entries were read: {by_index:?}");
}

/// A worker's whole round, and a delivery beside it: what it looks up in each call.
async fn round(store: &dyn InboxStore, name: &str, takes: usize) {
    let owner = OwnerId("a".into());
    let lane = LaneId([9; 16]);
    let arrivals: Vec<_> = (0..6).map(|index| arrival(&format!("{name}{index}"), lane)).collect();
    store.arrive(&arrivals).await.expect("arrived");
    for round in 0..takes {
        let request = TakeDue { lanes_from: LaneId([8; 16]), ..asking(2) };
        let batch = store.take_due(&owner, LEASE, &request).await.expect("taken");
        assert!(!batch.rows.is_empty(), "a lane of its own");
        for taken in batch.rows {
            let (claim, seq) = (taken.claim, taken.seq);
            let settled = match round {
                0 => {
                    let delay = Duration::ZERO;
                    let (last_status, last_error) = (None, None);
                    let later = Reschedule {
                        claim,
                        seq,
                        attempt_back: true,
                        delay,
                        last_status,
                        last_error,
                    };
                    store.reschedule(&[later]).await.remove(0)
                }
                1 => store.unpark(&[Unpark { claim, seq }]).await.remove(0),
                _ => {
                    let record = MessageRecord::default();
                    let parked = Some(seq);
                    let done = Completion { claim, record, supersedes_dead: true, parked };
                    store.complete(&[done]).await.remove(0)
                }
            };
            assert_eq!(settled.expect("answered"), Settled::Done);
        }
    }
    let claim =
        Claim { key: arrival(&format!("{name} new"), lane).key, token: asking(1).tokens[0] };
    let request = ClaimRequest {
        claim: claim.clone(),
        fingerprint: None,
        position: None,
        lane_id: Some(lane),
    };
    store.claim(&owner, LEASE, &[request]).await.remove(0).expect("answered");
    store.look(&[claim.key]).await.expect("answered");
    store.stats().await.expect("answered");
}

/// Statements are planned once. What was planned on an empty table that the server knows to be
/// empty must do when there are 60,000 rows, before the server has noticed.
#[tokio::test]
async fn plans_of_an_empty_table_do_for_a_full_one() {
    let harness = Harness::new().await;
    let t = harness.t();
    let know = format!(
        "ALTER TABLE {t}inbox_parked SET (autovacuum_enabled = false, \
             toast.autovacuum_enabled = false); \
         ALTER TABLE {t}inbox_messages SET (autovacuum_enabled = false)"
    );
    sqlx::raw_sql(AssertSqlSafe(know)).execute(&harness.pool).await.expect("altered");
    for table in ["inbox_parked", "inbox_messages", "inbox_claims"] {
        let vacuum = format!("VACUUM ANALYZE {t}{table}");
        sqlx::raw_sql(AssertSqlSafe(vacuum)).execute(&harness.pool).await.expect("vacuumed");
    }
    let config = inboxd_postgres::PostgresConfig { pool_max: 1, ..harness.config() };
    let store = inboxd_postgres::PostgresStore::connect(config).expect("a valid configuration");
    round(&store, "empty", 4).await;
    let lane = |text: &str| format!("decode(md5({text}), 'hex')");
    fill(&harness, 1, &lane("'long'"), "3600").await;
    fill(&harness, FEWER, &lane("'long'"), "-number").await;
    fill(&harness, FEWER, "NULL", "3600 + number").await;
    let before = settled_entries_read(&harness).await;
    round(&store, "full", 4).await;
    store.close().await;
    // Counting reads up to 10,000 of the due ones; everything else is by its key.
    few_entries_were_read(&harness, before, 10_001).await;
    harness.drop_schemas().await;
}

/// Somebody has inserted a claim and neither commits nor rolls back: the other rows are taken.
#[tokio::test]
async fn claim_that_is_not_committed_stalls_no_other_row() {
    let harness = Harness::new().await;
    let store = harness.store();
    let mut arrivals: Vec<_> =
        (0..4).map(|index| arrival(&format!("m{index}"), LaneId([0; 16]))).collect();
    for arrival in &mut arrivals {
        arrival.copy.lane_id = None;
    }
    let keys: Vec<_> = arrivals.iter().map(|arrival| arrival.key.clone()).collect();
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
