//! Copies of messages that nobody has claimed: all or nothing, in order, nothing decided.

use std::sync::Arc;

use bytes::Bytes;
use inboxd_contract::{
    Arrival, Arrived, CopyReason, Envelope, Fingerprint, InboxKey, NewCopy, Origin, ParkReason,
    ParkedState, Settled,
};

use super::context::{
    Context, at, complete, dead_letter, fingerprint_of, from_queue, key, only, refused_key,
};
use super::copies::{HOUR, SLACK, Subscription, assert_same_keys, finish, keys_of};
use super::dead::envelope_of_every_kind;
use super::identity::keys_alike;

fn other() -> Option<Fingerprint> {
    Some(Fingerprint::of(b"another content"))
}

/// The same message with another content.
fn conflicting(arrival: &Arrival) -> Arrival {
    let copy = NewCopy { fingerprint: other(), ..arrival.copy.clone() };
    Arrival { copy, ..arrival.clone() }
}

/// The same message, delivered from elsewhere.
fn from(arrival: &Arrival, origin: Origin) -> Arrival {
    let envelope = Arc::new(Envelope::new(origin, Some(Bytes::from_static(b"again"))));
    Arrival { copy: NewCopy { envelope, ..arrival.copy.clone() }, ..arrival.clone() }
}

pub async fn copies_keep_every_byte(context: &Context) {
    let orders = Subscription::new(context);
    let key = key("m");
    let mut arrival = orders.arrival(&key);
    arrival.copy = NewCopy {
        lane: Some(b"\x00lane\xff".to_vec()),
        lane_id: Some(orders.lane("lane")),
        envelope: Arc::new(envelope_of_every_kind()),
        attempts: 3,
        last_status: Some(503),
        last_error: Some(format!("down: \u{2615} {}", "x".repeat(2_000))),
        reason: ParkReason::LaneBlocked,
        first_ago: HOUR,
        ..arrival.copy
    };
    orders.parked(std::slice::from_ref(&arrival)).await;
    assert_eq!(context.claim_rows(&key).await, 0, "nobody claimed it");
    let taken = only(orders.take_b(&orders.asking(4)).await.rows);
    assert_eq!((&taken.claim.key, taken.attempts), (&key, 4));
    assert_eq!((taken.lane_id, &taken.processed), (arrival.copy.lane_id, &None));
    assert!(taken.first_ago >= HOUR && taken.first_ago < HOUR + SLACK, "{:?}", taken.first_ago);
    let copy = &taken.copy;
    assert_eq!(copy.envelope, envelope_of_every_kind());
    assert_eq!((&copy.fingerprint, &copy.lane), (&arrival.copy.fingerprint, &arrival.copy.lane));
    assert_eq!((copy.attempts, copy.last_status), (3, Some(503)), "those before this claim");
    assert_eq!(copy.last_error, arrival.copy.last_error);
    assert_eq!(copy.reason, CopyReason::Parked(ParkReason::LaneBlocked));
    assert_eq!(copy.subscription, *orders.name);
}

pub async fn tombstones_and_large_bodies_are_kept_whole(context: &Context) {
    let orders = Subscription::new(context);
    let large: Bytes = (0..2 << 20_u32).map(|at| (at ^ (at >> 7)) as u8).collect();
    let bodies = [None, Some(Bytes::new()), Some(large), Some(Bytes::from_static(b"\0"))];
    let keys: Vec<_> = (0..4).map(|index| key(&format!("{index}"))).collect();
    let arrivals = keys.iter().zip(&bodies).map(|(key, body)| {
        let mut arrival = orders.arrival_in(key, "lane");
        arrival.copy.envelope = Arc::new(Envelope::new(at(1), body.clone()));
        arrival
    });
    let arrivals: Vec<_> = arrivals.collect();
    orders.parked(&arrivals).await;
    let taken = orders.take_a(&orders.asking_runs(4, 4)).await.rows;
    let came: Vec<_> = taken.into_iter().map(|taken| taken.copy.envelope.body).collect();
    assert!(came == bodies, "a body came back changed, or in another place");
}

pub async fn order_given_is_the_order_of_the_lane(context: &Context) {
    let orders = Subscription::new(context);
    // Ids in no order of their own, so that sorting them would show.
    let keys: Vec<_> = (0..12).map(|_| key("m")).collect();
    let lanes = ["a", "b", "a", "b", "b", "a", "a", "a", "b", "a", "b", "a"];
    let arrivals: Vec<_> =
        keys.iter().zip(lanes).map(|(key, lane)| orders.arrival_in(key, lane)).collect();
    let (first, second) = arrivals.split_at(7);
    orders.parked(first).await;
    orders.parked(second).await;
    let listed: Vec<_> = orders.rows().await.into_iter().map(|row| row.key).collect();
    assert_eq!(listed, keys, "the order of seq");
    let mut came = Vec::new();
    while came.len() < keys.len() {
        let taken = orders.take_a(&orders.asking_runs(12, 12)).await.rows;
        assert!(!taken.is_empty(), "{} of {} came", came.len(), keys.len());
        for taken in taken {
            assert_eq!(finish(&*context.a, &taken).await, Settled::Done);
            came.push(taken.claim.key);
        }
    }
    for lane in ["a", "b"] {
        let of_lane: Vec<_> =
            keys.iter().zip(lanes).filter(|(_, of)| *of == lane).map(|(key, _)| key).collect();
        let came: Vec<_> = came.iter().filter(|key| of_lane.contains(key)).collect();
        assert_eq!(came, of_lane, "lane {lane}");
    }
}

pub async fn key_twice_in_a_batch_meets_the_first(context: &Context) {
    let orders = Subscription::new(context);
    let key = key("m");
    let first = orders.arrival(&key);
    let arrived = orders.arrive(&[first.clone(), first.clone(), conflicting(&first)]).await;
    let known = Arrived::Known { fingerprint: first.copy.fingerprint.clone() };
    assert_eq!(arrived, [Arrived::Parked, known.clone(), known]);
    assert_eq!(context.harness.rows_in_state(&key, ParkedState::Due).await, 1);
}

/// Its answer was lost, and it is sent again.
pub async fn arrival_repeated_finds_its_own_commit(context: &Context) {
    let orders = Subscription::new(context);
    let (one, two) = (key("1"), key("2"));
    let first = [orders.arrival(&one)];
    orders.parked(&first).await;
    let seq = orders.row(&one).await.seq;
    let both = [first[0].clone(), orders.arrival(&two), conflicting(&first[0])];
    let known = Arrived::Known { fingerprint: Some(fingerprint_of(&one)) };
    let arrived = orders.arrive(&both).await;
    assert_eq!(arrived, [known.clone(), Arrived::Parked, known], "and by another content, too");
    assert_eq!(orders.row(&one).await.seq, seq, "the row is as it was");
    assert_eq!(context.harness.rows_in_state(&one, ParkedState::Due).await, 1);
}

pub async fn processed_message_is_told_and_not_parked(context: &Context) {
    let orders = Subscription::new(context);
    let key = context.processed("m").await;
    let arrival = orders.arrival(&key);
    let processed = Arrived::Processed { fingerprint: Some(fingerprint_of(&key)) };
    let arrived = orders.arrive(&[arrival.clone(), conflicting(&arrival)]).await;
    assert_eq!(arrived, [processed.clone(), processed]);
    assert_eq!(context.parked_rows(&key).await, 0);
}

pub async fn dead_letter_of_the_same_position_is_told(context: &Context) {
    let orders = Subscription::new(context);
    let key = orders.dead("m").await;
    let dead = Arrived::Dead { fingerprint: Some(fingerprint_of(&key)) };
    let arrival = from(&orders.arrival(&key), at(7));
    assert_eq!(orders.arrive(std::slice::from_ref(&arrival)).await, std::slice::from_ref(&dead));
    for origin in [at(7), at(8), from_queue()] {
        let arrival = conflicting(&from(&arrival, origin));
        assert_eq!(orders.arrive(&[arrival]).await, std::slice::from_ref(&dead), "another content");
    }
    assert_eq!(context.parked_rows(&key).await, 1);
    assert_eq!(context.harness.rows_in_state(&key, ParkedState::Dead).await, 1);
}

pub async fn dead_letter_published_again_gives_way(context: &Context) {
    let orders = Subscription::new(context);
    for origin in [at(8), from_queue()] {
        let key = orders.dead("m").await;
        let dead = orders.row(&key).await.seq;
        let before = orders.due_in("lane", 1).await.remove(0);
        let mut arrival = from(&orders.arrival_in(&key, "lane"), origin);
        arrival.copy.fingerprint = None;
        orders.parked(&[arrival]).await;
        let row = orders.row(&key).await;
        assert_eq!(row.state, ParkedState::Due);
        let last = orders.row(&before).await.seq;
        assert!(row.seq > dead && row.seq > last, "it has the last place of its lane");
    }
    // Discarded or not.
    let key = orders.dead("m").await;
    context.harness.discard(&key).await;
    let again = from(&orders.arrival(&key), at(8));
    // A letter of another content stays where it is.
    let conflict =
        inboxd_contract::DeadLetter { fingerprint: other(), ..super::context::loose_letter(&key) };
    assert_eq!(dead_letter(&*context.a, &conflict).await, Settled::Done);
    orders.parked(&[again]).await;
    assert_eq!(context.harness.rows_in_state(&key, ParkedState::Due).await, 1);
    assert_eq!(context.harness.rows_in_state(&key, ParkedState::Discarded).await, 0);
    assert_eq!(context.harness.rows_in_state(&key, ParkedState::Dead).await, 1);
}

pub async fn arrivals_are_all_there_or_none(context: &Context) {
    let orders = Subscription::new(context);
    let (one, two) = (key("1"), key("2"));
    let bad = orders.arrival(&refused_key());
    let batch = [orders.arrival(&one), bad, orders.arrival(&two)];
    let answer = context.a.arrive(&batch).await;
    assert!(answer.is_err(), "no column holds that id, and yet {answer:?}");
    assert_eq!(context.parked_rows(&one).await + context.parked_rows(&two).await, 0);
    orders.parked(&[batch[0].clone(), batch[2].clone()]).await;
    assert!(orders.arrive(&[]).await.is_empty());
}

/// Nothing is decided: who has the claim goes on, and the row waits for the end of it.
pub async fn claim_of_somebody_is_left_alone(context: &Context) {
    let orders = Subscription::new(context);
    let held = context.held_by_a("m").await;
    orders.parked(&[orders.arrival(&held.key)]).await;
    assert!(orders.keys_for_b().await.is_empty(), "it is claimed");
    assert_eq!(complete(&*context.a, &held).await, Settled::Done);
    let taken = only(orders.take_b(&orders.asking(1)).await.rows);
    assert_eq!(taken.processed, Some(Some(fingerprint_of(&held.key))));
}

pub async fn ids_compare_by_bytes(context: &Context) {
    let orders = Subscription::new(context);
    let keys: Vec<InboxKey> = keys_alike();
    let arrivals: Vec<_> = keys.iter().map(|key| orders.arrival(key)).collect();
    orders.parked(&arrivals).await;
    let (some, others) = keys.split_at(keys.len() / 2);
    let taken = orders.take_a(&orders.asking(some.len())).await.rows;
    let mut came: Vec<_> = taken.iter().map(|taken| taken.claim.key.clone()).collect();
    for taken in &taken {
        let key = &taken.claim.key;
        assert_eq!(taken.copy.fingerprint, Some(fingerprint_of(key)), "{key:?} met another id");
        assert_eq!(finish(&*context.a, taken).await, Settled::Done);
    }
    let rest = orders.take_b(&orders.asking(keys.len())).await;
    assert_eq!(rest.rows.len(), others.len());
    assert!(rest.rows.iter().all(|taken| taken.processed.is_none()), "met another id");
    came.extend(keys_of(&rest));
    assert_same_keys(came, &keys);
}

pub async fn large_batches_keep_their_order(context: &Context) {
    let orders = Subscription::new(context);
    let keys = orders.due_in("lane", 300).await;
    let mut came = Vec::new();
    while came.len() < keys.len() {
        let taken = orders.take_a(&orders.asking_runs(128, 128)).await.rows;
        assert!(!taken.is_empty(), "{} of {} came", came.len(), keys.len());
        let done: Vec<_> = taken.iter().map(super::copies::finished).collect();
        let answers = super::context::all_ok(context.a.complete(&done).await);
        assert!(answers.iter().all(|answer| *answer == Settled::Done));
        came.extend(taken.into_iter().map(|taken| taken.claim.key));
    }
    assert_eq!(came, keys);
}
