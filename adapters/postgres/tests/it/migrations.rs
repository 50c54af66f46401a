//! Tables of an earlier version, filled.

use std::time::Duration;

use inboxd_contract::{
    Actor, ConsumerId, DeadReason, Envelope, InboxStore, Origin, ParkedFilter, ParkedState, Replay,
    Replayed,
};
use sqlx::AssertSqlSafe;
use uuid::Uuid;

use crate::harness::Harness;

const FIRST: &str = include_str!("../../../../migrations/postgres/0001_inbox.sql");

/// Back to version 1, as its binary left it.
async fn back_to_the_first(harness: &Harness) {
    let t = harness.t();
    let drop = format!(
        "DROP TABLE {t}inbox_messages, {t}inbox_claims, {t}inbox_parked, {t}inbox_notes, \
         {t}inbox_audit; DELETE FROM {t}inbox_migrations WHERE version > 1"
    );
    let first = FIRST.replace("{t}", &t).replace("{p}", "p1_");
    for sql in [drop, first] {
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&harness.pool).await.expect("back");
    }
}

#[tokio::test]
async fn rows_of_the_first_version_are_kept_and_readable() {
    let harness = Harness::new().await;
    back_to_the_first(&harness).await;
    let envelope = Envelope::new(Origin::Memory { stream: "s".into(), position: 1 }, None);
    let insert = format!(
        "INSERT INTO {}inbox_parked (subscription, consumer_id, message_id, envelope, body, \
         attempts, parked_at, reason, state) VALUES \
         ('orders', 'billing', 'whole', '{envelope}', 'body', 3, now() - interval '5 h', \
          'refused', 'dead'), \
         ('orders', 'billing', 'large', '{envelope}', NULL, 0, now(), 'body_too_large', 'dead'), \
         ('orders', 'billing', 'tombstone', '{envelope}', NULL, 1, now(), 'refused', 'dead'), \
         ('orders', 'billing', 'gone', '{envelope}', NULL, 1, now(), 'refused', 'discarded')",
        harness.t(),
        envelope = envelope.to_stored(),
    );
    sqlx::raw_sql(AssertSqlSafe(insert)).execute(&harness.pool).await.expect("filled");

    let store = harness.store();
    store.migrate().await.expect("migrated");
    let rows = store.list_parked(&ParkedFilter::default(), None, 10).await.expect("listed");
    let told: Vec<_> = rows.iter().map(|row| (row.key.message_id.as_str(), row.state)).collect();
    let (dead, gone) = (ParkedState::Dead, ParkedState::Discarded);
    assert_eq!(told, [("whole", dead), ("large", dead), ("tombstone", dead), ("gone", gone)]);
    let whole = &rows[0];
    assert_eq!((whole.copy.attempts, whole.lane_id, whole.body_bytes), (3, None, Some(4)));
    assert_eq!(whole.copy.reason, DeadReason::Refused);
    assert!(whole.first_ago >= Duration::from_secs(5 * 3_600), "as long as it is parked");
    assert_eq!(whole.key.consumer_id, ConsumerId::new("billing").expect("valid"));

    let replays: Vec<_> = rows
        .iter()
        .map(|row| Replay {
            seq: row.seq,
            delay: Duration::ZERO,
            allow_processed: false,
            fresh: Uuid::new_v4(),
        })
        .collect();
    let answers = store.replay(&replays, &Actor::new("anna")).await;
    let answers: Vec<_> = answers.into_iter().map(|answer| answer.expect("answered")).collect();
    let due = |index: usize| Replayed::Due(rows[index].key.message_id.clone());
    assert_eq!(answers, [due(0), Replayed::NoBody, due(2), Replayed::NotDead]);
    store.close().await;
    harness.drop_schemas().await;
}
