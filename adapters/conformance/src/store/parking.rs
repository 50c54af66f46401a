//! Parking a claimed message: its claim goes, its full copy is due later.

use std::sync::Arc;

use inboxd_contract::{
    Attempt, ClaimAnswer, ClaimRequest, CopyReason, DeadLetter, Fingerprint, InboxKey, Look,
    NewCopy, ParkReason, ParkedState, Parking, Settled,
};

use super::context::{
    Context, all_ok, at, claim_one, count, dead_letter, fingerprint_of, from_queue, key, new_claim,
    only, request,
};
use super::copies::{HOUR, SLACK, Subscription, park};

/// The look where this message is due, and nothing else.
fn due(key: &InboxKey) -> Look {
    Look { due: vec![Some(fingerprint_of(key))], ..Look::default() }
}

pub async fn copy_takes_the_place_of_the_claim(context: &Context) {
    let orders = Subscription::new(context);
    let claim = context.held_by_a("m").await;
    assert_eq!(count(&*context.a, &claim).await, Attempt::Counted(2));
    let mut parking = orders.parking(&claim);
    parking.copy = NewCopy {
        lane: Some(b"lane".to_vec()),
        lane_id: Some(orders.lane("lane")),
        attempts: 2,
        delay: HOUR,
        last_status: Some(500),
        last_error: Some(String::from("down")),
        first_ago: HOUR * 2,
        ..parking.copy
    };
    assert_eq!(park(&*context.a, &parking).await, Settled::Done);
    assert_eq!(context.claim_rows(&claim.key).await, 0, "the claim went in the same commit");
    assert_eq!(context.message_rows(&claim.key).await, 0, "nothing was processed");
    assert_eq!(context.look(&claim.key).await, due(&claim.key));
    let row = orders.row(&claim.key).await;
    assert_eq!(
        (row.state, row.copy.attempts, row.copy.last_status),
        (ParkedState::Due, 2, Some(500))
    );
    assert_eq!(row.copy.reason, CopyReason::Parked(ParkReason::Failed));
    let due_in = row.due_in.expect("it is due some time");
    assert!(due_in <= HOUR && due_in > HOUR - SLACK, "{due_in:?}");
    assert!(row.first_ago >= HOUR * 2 && row.first_ago < HOUR * 2 + SLACK, "{:?}", row.first_ago);
    assert!(row.parked_ago < SLACK, "{:?}", row.parked_ago);

    assert!(orders.keys_for_b().await.is_empty(), "in an hour, by the clock of the database");
    context.harness.backdate_due(&claim.key, SLACK).await;
    let taken = only(orders.take_b(&orders.asking(1)).await.rows);
    assert_eq!((taken.attempts, taken.copy.attempts), (3, 2), "attempts go on");
}

pub async fn parking_repeated_finds_its_own_commit(context: &Context) {
    let orders = Subscription::new(context);
    let claim = context.held_by_a("m").await;
    let parking = orders.parking(&claim);
    assert_eq!(park(&*context.a, &parking).await, Settled::Done);
    assert_eq!(park(&*context.a, &parking).await, Settled::Lost(due(&claim.key)));
    assert_eq!(context.parked_rows(&claim.key).await, 1);
}

pub async fn message_processed_meanwhile_is_not_parked(context: &Context) {
    let orders = Subscription::new(context);
    let claim = context.held_by_a("m").await;
    context.harness.hold_uncommitted_message(&claim.key).await.commit().await;
    let answer = park(&*context.a, &orders.parking(&claim)).await;
    assert_eq!(answer, Settled::AlreadyProcessed { fingerprint: None });
    assert_eq!(context.parked_rows(&claim.key).await, 0);
    assert_eq!(context.claim_rows(&claim.key).await, 0);
}

pub async fn stale_token_parks_nothing(context: &Context) {
    let orders = Subscription::new(context);
    let (old, new) = context.taken_over("m").await;
    let answer = park(&*context.a, &orders.parking(&old)).await;
    assert_eq!(answer, Settled::Lost(Look::default()));
    assert_eq!(context.parked_rows(&old.key).await, 0);
    assert_eq!(park(&*context.b, &orders.parking(&new)).await, Settled::Done, "who holds it does");
}

/// A claim on a copy of a dead letter that came from elsewhere, held by instance b.
async fn copy_of_dead(context: &Context, key: &InboxKey) -> inboxd_contract::Claim {
    let claim = new_claim(key);
    let ask = ClaimRequest {
        fingerprint: Some(fingerprint_of(key)),
        position: at(8).position(),
        ..request(&claim)
    };
    let answer = claim_one(&*context.b, &context.owner_b, ask).await.expect("answered");
    assert!(matches!(answer, ClaimAnswer::Dead { held: Some(_), .. }), "{answer:?}");
    claim
}

pub async fn dead_letter_gives_way_and_the_copy_is_last_of_its_lane(context: &Context) {
    let orders = Subscription::new(context);
    for (known, discarded) in [(true, false), (false, false), (true, true)] {
        let claim = context.held_by_a("m").await;
        let fingerprint = known.then(|| fingerprint_of(&claim.key));
        let letter = DeadLetter { fingerprint, ..orders.letter(&claim) };
        assert_eq!(dead_letter(&*context.a, &letter).await, Settled::Done);
        if discarded {
            context.harness.discard(&claim.key).await;
        }
        let before = orders.due_in("lane", 1).await.remove(0);
        let claim = copy_of_dead(context, &claim.key).await;
        let mut parking = orders.parking(&claim);
        parking.copy.lane_id = Some(orders.lane("lane"));
        assert_eq!(park(&*context.b, &parking).await, Settled::Done);
        let row = orders.row(&claim.key).await;
        assert_eq!(row.state, ParkedState::Due, "the dead letter is gone");
        assert!(row.seq > orders.row(&before).await.seq, "a new place, the last one");
    }
}

pub async fn dead_letter_of_another_content_stays(context: &Context) {
    let orders = Subscription::new(context);
    let claim = context.held_by_a("m").await;
    let other = Some(Fingerprint::of(b"other"));
    let letter = DeadLetter { token: None, fingerprint: other, ..orders.letter(&claim) };
    assert_eq!(dead_letter(&*context.b, &letter).await, Settled::Done);
    assert_eq!(park(&*context.a, &orders.parking(&claim)).await, Settled::Done);
    assert_eq!(context.harness.rows_in_state(&claim.key, ParkedState::Dead).await, 1);
    assert_eq!(context.harness.rows_in_state(&claim.key, ParkedState::Due).await, 1);
}

pub async fn due_copy_that_came_meanwhile_stays_as_it_is(context: &Context) {
    let orders = Subscription::new(context);
    let claim = context.held_by_a("m").await;
    orders.parked(&[orders.arrival(&claim.key)]).await;
    let before = orders.row(&claim.key).await;
    let mut parking = orders.parking(&claim);
    parking.copy.delay = HOUR;
    assert_eq!(park(&*context.a, &parking).await, Settled::Done);
    let row = orders.row(&claim.key).await;
    assert_eq!((row.seq, row.copy), (before.seq, before.copy));
    assert_eq!(row.due_in, Some(std::time::Duration::ZERO), "due as it was");
}

/// Two contents of one id, both due: they have one claim, so they go one after the other.
pub async fn two_contents_of_one_id_are_taken_one_after_the_other(context: &Context) {
    let orders = Subscription::new(context);
    let claim = context.held_by_a("m").await;
    orders.parked(&[orders.arrival(&claim.key)]).await;
    let mut parking = orders.parking(&claim);
    parking.copy.fingerprint = Some(Fingerprint::of(b"other"));
    assert_eq!(park(&*context.a, &parking).await, Settled::Done);
    assert_eq!(context.harness.rows_in_state(&claim.key, ParkedState::Due).await, 2);
    let first = only(orders.take_b(&orders.asking(4)).await.rows);
    assert!(orders.take_a(&orders.asking(4)).await.rows.is_empty(), "its key is claimed");
    assert_eq!(super::copies::finish(&*context.b, &first).await, Settled::Done);
    let second = only(orders.take_b(&orders.asking(4)).await.rows);
    assert!(second.seq != first.seq && second.processed.is_some(), "{second:?}");
}

pub async fn mixed_batch_answers_each_member(context: &Context) {
    let orders = Subscription::new(context);
    let mut batch = Vec::new();
    for index in 0..40 {
        batch.push(orders.parking(&context.held_by_a(&format!("{index}")).await));
    }
    let (lost, _) = context.taken_over("lost").await;
    batch[7] = orders.parking(&lost);
    let processed = batch[13].claim.key.clone();
    context.harness.hold_uncommitted_message(&processed).await.commit().await;
    // One body is large, so that what is sent is too.
    let mut large = (*batch[21].copy.envelope).clone();
    large.body = Some(vec![0xfe; 3 << 20].into());
    batch[21].copy.envelope = Arc::new(large.clone());
    batch[22].copy.envelope = Arc::new(inboxd_contract::Envelope::new(from_queue(), None));
    let answers = all_ok(context.a.park(&batch).await);
    for (index, answer) in answers.iter().enumerate() {
        let expected = match index {
            7 => Settled::Lost(Look::default()),
            13 => Settled::AlreadyProcessed { fingerprint: None },
            _ => Settled::Done,
        };
        assert_eq!(*answer, expected, "member {index}");
    }
    assert_eq!(orders.rows().await.len(), 38);
    let row = orders.row(&batch[21].claim.key).await;
    let whole = context.a.parked_row(row.seq).await.expect("answered").expect("it is there");
    assert!(whole.copy.envelope == large, "a large body came back changed");
    assert!(context.a.park(&[]).await.is_empty());
}

/// Unclaimed and never seen: there is nothing to remove, so nothing is written.
pub async fn unknown_token_parks_nothing(context: &Context) {
    let orders = Subscription::new(context);
    let key = key("m");
    let parking: Parking = orders.parking(&new_claim(&key));
    assert_eq!(park(&*context.a, &parking).await, Settled::Lost(Look::default()));
    assert_eq!(context.parked_rows(&key).await, 0);
}
