//! Parked rows: what an older database becomes, and what a take costs.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use inboxd_contract::{
    Actor, Arrival, Arrived, Envelope, InboxStore, LaneId, NewCopy, Origin, ParkReason,
    ParkedFilter, ParkedSeq, ParkedState, Replay, Replayed, TakeDue, TakenBatch, Token,
};
use inboxd_mysql::MysqlStore;
use sha2::Digest as _;
use sqlx::{AssertSqlSafe, Executor as _, Row as _};
use uuid::Uuid;

use crate::harness::Database;
use crate::short::{LEASE, key, owner};

const FIRST: &str = include_str!("../../../../migrations/mysql/0001_inbox.sql");
const SECOND: &str = include_str!("../../../../migrations/mysql/0002_parking.sql");

pub fn lane(number: u128) -> LaneId {
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

pub fn asking(rows: usize, lanes_from: LaneId) -> TakeDue {
    TakeDue {
        consumer_id: key("any").consumer_id,
        subscription: "orders".into(),
        tokens: (0..rows).map(|_| Token(Uuid::new_v4())).collect(),
        run_max: 1,
        bytes_max: 1 << 20,
        lanes_from,
    }
}

pub async fn take(store: &MysqlStore, request: &TakeDue) -> TakenBatch {
    store.take_due(&owner("owner"), LEASE, request).await.expect("answered")
}

/// A database of the first version, with rows in every state, on which the second migration was
/// begun, and cut after so many statements.
async fn first_version(database: &Database, cut_after: usize) {
    let mut connection = database.connect().await;
    let table = "CREATE TABLE inbox_migrations (version BIGINT NOT NULL PRIMARY KEY, \
         name VARCHAR(255) NOT NULL, checksum VARCHAR(64) NOT NULL, breaking BOOLEAN NOT NULL, \
         applied_at DATETIME(3) NOT NULL)";
    connection.execute(table).await.expect("made");
    let script = FIRST.replace("{p}", "");
    connection.execute(sqlx::raw_sql(AssertSqlSafe(script))).await.expect("made");
    sqlx::query("INSERT INTO inbox_migrations VALUES (1, 'inbox', ?, FALSE, NOW(3))")
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
    ] {
        sqlx::query(
            "INSERT INTO inbox_parked (seq, subscription, consumer_id, message_id, envelope, \
             attempts, parked_at, reason, state, body) \
             VALUES (?, 'orders', 'billing', ?, ?, 4, '2001-01-01', ?, ?, ?)",
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
    let script = SECOND.replace("{p}", "");
    for statement in script.split_inclusive(";\n").take(cut_after) {
        let statement = sqlx::raw_sql(AssertSqlSafe(statement.to_owned()));
        connection.execute(statement).await.expect("a statement of the migration");
    }
}

/// However far a start came that was killed, the next one gets the same database.
#[tokio::test]
async fn rows_of_the_first_version_are_read_and_replayed_wherever_the_migration_was_cut() {
    let statements = SECOND.split_inclusive(";\n").count();
    assert!(statements >= 5, "{statements}");
    for cut_after in 0..=statements {
        let database = Database::shared().await;
        first_version(&database, cut_after).await;
        let store = database.open().await;
        let rows = store.list_parked(&ParkedFilter::default(), None, 10).await.expect("listed");
        let seen: Vec<_> = rows
            .iter()
            .map(|row| (row.seq.0, row.state, row.copy.attempts, row.body_bytes))
            .collect();
        use ParkedState::{Dead, Discarded};
        let expected = [
            (3, Dead, 4, Some(4)),
            (5, Dead, 4, None),
            (6, Dead, 4, None),
            (7, Discarded, 4, None),
        ];
        assert_eq!(seen, expected, "cut after {cut_after}");
        for row in &rows {
            assert_eq!(row.first_ago, row.parked_ago, "what is not known is when it was parked");
            assert!(row.lane_id.is_none() && row.parked_ago > Duration::from_secs(600_000_000));
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
        assert_eq!(store.audit(None, 10).await.expect("read").len(), 2);
        assert_eq!(take(&store, &asking(4, lane(0))).await.rows.len(), 2);
        store.close().await;
    }
}

/// Index entries and rows that the server has read since it was started.
async fn entries_read(database: &Database) -> i64 {
    let mut connection = database.connect().await;
    let rows = sqlx::query("SHOW GLOBAL STATUS LIKE 'Handler\\_read\\_%'")
        .fetch_all(&mut connection)
        .await
        .expect("the server's counters");
    rows.iter().map(|row| row.get::<String, _>(1).parse::<i64>().expect("a number")).sum()
}

/// On a server that nobody else uses: 100,000 rows of one lane behind a head that is not due for
/// an hour.
pub async fn rows_behind_a_head_cost_a_take_nothing(database: &Database, store: &MysqlStore) {
    let mut head = arrival("head", Some(lane(7)));
    head.copy.delay = Duration::from_secs(3_600);
    assert_eq!(store.arrive(&[head]).await.expect("arrived"), [Arrived::Parked]);
    let digits = "(SELECT 0 AS d UNION SELECT 1 UNION SELECT 2 UNION SELECT 3 UNION SELECT 4 \
         UNION SELECT 5 UNION SELECT 6 UNION SELECT 7 UNION SELECT 8 UNION SELECT 9)";
    let fill = format!(
        "INSERT INTO inbox_parked (subscription, consumer_id, message_id, envelope, attempts, \
         due_at, parked_at, first_at, reason, state, lane_id, body) \
         SELECT 'orders', 'billing', CONCAT('blocked-', a.d, b.d, c.d, d.d, e.d), ?, 0, \
             UTC_TIMESTAMP(3) - INTERVAL 1 HOUR, UTC_TIMESTAMP(3), UTC_TIMESTAMP(3), \
             'lane_blocked', 'due', ?, 'x' \
         FROM {digits} AS a, {digits} AS b, {digits} AS c, {digits} AS d, {digits} AS e"
    );
    let mut connection = database.connect().await;
    let origin = Origin::Memory { stream: "orders".into(), position: 1 };
    let filled = sqlx::query(AssertSqlSafe(fill))
        .bind(Envelope::new(origin, None).to_stored())
        .bind(lane(7).0.to_vec())
        .execute(&mut connection)
        .await
        .expect("filled");
    assert_eq!(filled.rows_affected(), 100_000);
    let arrivals = [arrival("alone", None), arrival("other", Some(lane(9)))];
    store.arrive(&arrivals).await.expect("arrived");

    let before = entries_read(database).await;
    let started = std::time::Instant::now();
    let batch = take(store, &asking(16, lane(8))).await;
    println!("a take beside 100,000 blocked rows: {:?}", started.elapsed());
    let read = entries_read(database).await - before;
    let mut taken: Vec<_> =
        batch.rows.iter().map(|row| row.claim.key.message_id.to_string()).collect();
    taken.sort_unstable();
    assert_eq!(taken, ["alone", "other"]);
    let next_in = batch.next_in.expect("the head is due in an hour");
    assert!(next_in > Duration::from_secs(3_000) && next_in <= Duration::from_secs(3_600));
    // The counters' own rows are among them.
    assert!(read < 5_000, "{read} entries were read");

    // A delivery of the lane asks whether it is blocked.
    let claim = crate::short::new_claim("next");
    let request = inboxd_contract::ClaimRequest {
        lane_id: Some(lane(7)),
        ..crate::short::requests(std::slice::from_ref(&claim)).remove(0)
    };
    let before = entries_read(database).await;
    let answer = store.claim(&owner("owner"), LEASE, &[request]).await.remove(0);
    let read = entries_read(database).await - before;
    let blocked = inboxd_contract::ClaimAnswer::LaneBlocked { attempts: 0 };
    assert_eq!(answer.expect("answered"), blocked);
    assert!(read < 5_000, "{read} entries were read");

    let before = entries_read(database).await;
    store.stats().await.expect("counted");
    let read = entries_read(database).await - before;
    assert!(read < 50_000, "{read} entries were read");
}
