//! Parked rows in a file: what an older file becomes, and what a take costs.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use inboxd_contract::{
    Actor, Arrival, Arrived, Claim, ClaimAnswer, ClaimRequest, Completion, ConsumerId, Envelope,
    InboxKey, InboxStore, LaneId, MessageId, NewCopy, Origin, OwnerId, ParkReason, ParkedFilter,
    ParkedSeq, ParkedState, Replay, Replayed, Settled, TakeDue, TakenBatch, Token,
};
use inboxd_sqlite::{SqliteConfig, SqliteStore};
use sqlx::{AssertSqlSafe, Connection as _};
use tempfile::TempDir;
use uuid::Uuid;

use crate::harness::connect;
use crate::lifecycle::request;

const LEASE: Duration = Duration::from_secs(15);
const FIRST: &str = include_str!("../../../../migrations/sqlite/0001_inbox.sql");

fn key(id: &str) -> InboxKey {
    InboxKey {
        consumer_id: ConsumerId::new("billing").expect("fit"),
        message_id: MessageId::from_bytes(id.as_bytes()).expect("fit"),
    }
}

fn lane(number: u128) -> LaneId {
    LaneId(number.to_be_bytes())
}

pub fn arrival(id: &str, lane_id: Option<LaneId>) -> Arrival {
    let origin = Origin::Memory { stream: "orders".into(), position: 1 };
    Arrival {
        key: key(id),
        copy: NewCopy {
            subscription: "orders".into(),
            lane: lane_id.map(|lane| lane.0.to_vec()),
            lane_id,
            envelope: Arc::new(Envelope::new(origin, Some(Bytes::from_static(b"body")))),
            fingerprint: None,
            attempts: 0,
            delay: Duration::ZERO,
            last_status: None,
            last_error: None,
            reason: ParkReason::LaneBlocked,
            first_ago: Duration::ZERO,
        },
    }
}

async fn open(directory: &TempDir) -> SqliteStore {
    SqliteStore::open(SqliteConfig::new(directory.path().join("inbox.db"))).await.expect("opened")
}

pub fn asking(tokens: usize, lanes_from: LaneId) -> TakeDue {
    TakeDue {
        consumer_id: ConsumerId::new("billing").expect("fit"),
        subscription: "orders".into(),
        tokens: (0..tokens).map(|_| Token(Uuid::new_v4())).collect(),
        run_max: 1,
        bytes_max: 1 << 20,
        lanes_from,
    }
}

async fn take(store: &SqliteStore, tokens: usize, lanes_from: LaneId) -> TakenBatch {
    let owner = OwnerId(Arc::from("owner"));
    store.take_due(&owner, LEASE, &asking(tokens, lanes_from)).await.expect("answered")
}

fn ids(batch: &TakenBatch) -> Vec<&str> {
    batch.rows.iter().map(|row| row.claim.key.message_id.as_str()).collect()
}

async fn complete(store: &SqliteStore, claim: Claim, parked: ParkedSeq) -> Settled {
    let completion = Completion {
        claim,
        record: Default::default(),
        supersedes_dead: false,
        parked: Some(parked),
    };
    store.complete(&[completion]).await.remove(0).expect("answered")
}

/// A file of the first version, with rows in every state.
async fn first_version(directory: &TempDir) {
    std::fs::File::create(directory.path().join("inbox.db")).expect("made");
    let mut connection = connect(&directory.path().join("inbox.db")).await;
    let table = "CREATE TABLE inbox_migrations (version INTEGER PRIMARY KEY, name TEXT NOT NULL, \
         checksum TEXT NOT NULL, breaking INTEGER NOT NULL, applied_at INTEGER NOT NULL) STRICT";
    sqlx::query(table).execute(&mut connection).await.expect("made");
    let script = FIRST.replace("{p}", "");
    sqlx::raw_sql(AssertSqlSafe(script)).execute(&mut connection).await.expect("made");
    use sha2::Digest as _;
    sqlx::query("INSERT INTO inbox_migrations VALUES (1, 'inbox', ?1, 0, 0)")
        .bind(hex::encode(sha2::Sha256::digest(FIRST)))
        .execute(&mut connection)
        .await
        .expect("recorded");
    let origin = Origin::Memory { stream: "orders".into(), position: 1 };
    let envelope = Envelope::new(origin, None).to_stored();
    for (seq, id, state, reason, body) in [
        (3, "refused", "dead", "refused", Some("body")),
        (5, "tombstone", "dead", "refused", None),
        (6, "large", "dead", "body_too_large", None),
        (7, "given-up", "discarded", "refused", None),
        (9, "gone", "dead", "refused", Some("body")),
    ] {
        sqlx::query(
            "INSERT INTO inbox_parked (seq, subscription, consumer_id, message_id, envelope, \
             attempts, parked_at, reason, state, body) \
             VALUES (?1, 'orders', 'billing', ?2, ?3, 4, 1000, ?4, ?5, CAST(?6 AS BLOB))",
        )
        .bind(seq)
        .bind(id)
        .bind(&envelope)
        .bind(reason)
        .bind(state)
        .bind(body)
        .execute(&mut connection)
        .await
        .expect("inserted");
    }
    let gone = "DELETE FROM inbox_parked WHERE seq = 9";
    sqlx::query(gone).execute(&mut connection).await.expect("deleted");
    connection.close().await.expect("closed");
}

#[tokio::test]
async fn rows_of_the_first_version_are_read_replayed_and_never_meet_a_new_one() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    first_version(&directory).await;
    let store = open(&directory).await;
    let rows = store.list_parked(&ParkedFilter::default(), None, 10).await.expect("listed");
    let seen: Vec<_> =
        rows.iter().map(|row| (row.seq.0, row.state, row.copy.attempts, row.body_bytes)).collect();
    use ParkedState::{Dead, Discarded};
    let expected =
        [(3, Dead, 4, Some(4)), (5, Dead, 4, None), (6, Dead, 4, None), (7, Discarded, 4, None)];
    assert_eq!(seen, expected);
    for row in &rows {
        assert_eq!(row.first_ago, row.parked_ago, "what is not known is when it was parked");
        assert!(row.lane_id.is_none() && row.parked_ago > Duration::from_secs(1_000_000_000));
    }

    let replay = |seq| Replay {
        seq: ParkedSeq(seq),
        delay: Duration::ZERO,
        allow_processed: false,
        fresh: Uuid::new_v4(),
    };
    let actor = Actor::new("anna");
    let answers = store.replay(&[replay(3), replay(5), replay(6), replay(7)], &actor).await;
    let answers: Vec<_> = answers.into_iter().map(|answer| answer.expect("answered")).collect();
    let due = |id: &str| Replayed::Due(key(id).message_id);
    let expected = [due("refused"), due("tombstone"), Replayed::NoBody, Replayed::NotDead];
    assert_eq!(answers, expected, "a tombstone has no body, and nothing is missing");

    let arrived = store.arrive(&[arrival("new", None)]).await.expect("arrived");
    assert_eq!(arrived, [Arrived::Parked]);
    let filter = ParkedFilter { message_id: Some(key("new").message_id), ..Default::default() };
    let rows = store.list_parked(&filter, None, 10).await.expect("listed");
    assert_eq!(rows[0].seq, ParkedSeq(10), "9 was given once, and is not given again");
    store.close().await;
}

/// Rows of one lane behind a head that is not due for an hour, and a few beside it.
async fn blocked(directory: &TempDir, rows: u32) -> SqliteStore {
    let store = open(directory).await;
    let mut head = arrival("head", Some(lane(7)));
    head.copy.delay = Duration::from_secs(3_600);
    assert_eq!(store.arrive(&[head]).await.expect("arrived"), [Arrived::Parked]);
    let mut connection = connect(store.path()).await;
    let origin = Origin::Memory { stream: "orders".into(), position: 1 };
    sqlx::query(
        "INSERT INTO inbox_parked (subscription, consumer_id, message_id, envelope, attempts, \
         due_at, parked_at, reason, state, lane_id, body) \
         WITH RECURSIVE n (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < ?1) \
         SELECT 'orders', 'billing', 'blocked-' || n, ?2, 0, 1, 1, 'lane_blocked', 'due', ?3, x'00' \
         FROM n",
    )
    .bind(rows)
    .bind(Envelope::new(origin, None).to_stored())
    .bind(lane(7).0.to_vec())
    .execute(&mut connection)
    .await
    .expect("filled");
    connection.close().await.expect("closed");
    store
}

#[tokio::test]
async fn rows_behind_a_head_cost_a_take_nothing() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let store = blocked(&directory, 100_000).await;
    let arrivals = [arrival("alone", None), arrival("other", Some(lane(9)))];
    store.arrive(&arrivals).await.expect("arrived");
    let begun = Instant::now();
    let batch = take(&store, 16, lane(8)).await;
    let first = begun.elapsed();
    let mut taken = ids(&batch);
    taken.sort_unstable();
    assert_eq!(taken, ["alone", "other"]);
    let next_in = batch.next_in.expect("the head is due in an hour");
    assert!(next_in > Duration::from_secs(3_000) && next_in <= Duration::from_secs(3_600));

    // A scan of the rows takes some hundred times as long.
    let begun = Instant::now();
    const ROUNDS: u32 = 20;
    for _ in 0..ROUNDS {
        assert_eq!(take(&store, 16, lane(0)).await.rows, []);
    }
    let each = begun.elapsed() / ROUNDS;
    println!("first take {first:?}, further takes {each:?} each");
    assert!(each < Duration::from_millis(60), "{each:?}");
    let claim = Claim { key: key("next"), token: Token(Uuid::new_v4()) };
    let request = ClaimRequest { lane_id: Some(lane(7)), ..request(&claim) };
    let answer = store.claim(&OwnerId(Arc::from("owner")), LEASE, &[request]).await.remove(0);
    let answer = answer.expect("answered");
    assert_eq!(answer, ClaimAnswer::LaneBlocked { attempts: 0 });
    store.close().await;
}

/// More lanes than one call looks at: whichever lane it begins with, each is come to.
#[tokio::test]
async fn many_lanes_are_looked_at_in_parts_and_none_is_left_out() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let store = open(&directory).await;
    const LANES: u128 = 10_000;
    let mut arrivals: Vec<_> =
        (0..LANES).map(|n| arrival(&format!("{n}"), Some(lane(n << 64)))).collect();
    for arrival in &mut arrivals {
        arrival.copy.delay = Duration::from_secs(3_600);
    }
    arrivals[6_000].copy.delay = Duration::ZERO;
    store.arrive(&arrivals).await.expect("arrived");
    let near = take(&store, 1, lane(5_000 << 64)).await;
    assert_eq!(ids(&near), ["6000"], "within what one call looks at");
    let claim = near.rows[0].claim.clone();
    assert_eq!(complete(&store, claim, near.rows[0].seq).await, Settled::Done);

    store.arrive(&[arrival("last", Some(lane((9_000 << 64) + 1)))]).await.expect("arrived");
    let mut found = Vec::new();
    for from in [0, 4_000, 8_000] {
        let batch = take(&store, 1, lane(from << 64)).await;
        assert!(batch.next_in.is_some_and(|next| next < Duration::from_secs(1)), "{batch:?}");
        found.extend(batch.rows.iter().map(|row| row.claim.key.message_id.to_string()));
    }
    assert_eq!(found, ["last"]);
    let around = take(&store, 4, lane(9_500 << 64)).await;
    assert_eq!(ids(&around), [] as [&str; 0], "taken already");
    store.close().await;
}
