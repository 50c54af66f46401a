//! What a delivery is told whose message, or whose lane, is parked.

use std::time::Duration;

use inboxd_contract::{Attempt, ClaimAnswer, ClaimRequest, DeadLetter, Fingerprint, Settled};

use super::context::{
    Context, at, claim_one, count, dead_letter, fingerprint_of, key, new_claim, only, patiently,
    release, request,
};
use super::copies::{Subscription, claim_anew, claim_copy, finish, keys_of};

pub async fn copy_of_a_due_row_is_parked(context: &Context) {
    let orders = Subscription::new(context);
    let key = orders.due("m").await;
    let parked = ClaimAnswer::Parked { fingerprint: Some(fingerprint_of(&key)) };
    assert_eq!(claim_anew(context, &key, None).await, parked);
    // The same for another content of it: the fingerprint tells.
    let other =
        ClaimRequest { fingerprint: Some(Fingerprint::of(b"other")), ..request(&new_claim(&key)) };
    let answer =
        patiently(async || claim_one(&*context.b, &context.owner_b, other.clone()).await).await;
    assert_eq!(answer, parked);
    // Nothing is held: a worker takes it, and this is its first attempt.
    let taken = only(orders.take_a(&orders.asking(1)).await.rows);
    assert_eq!(taken.attempts, 1);
    assert_eq!(claim_anew(context, &key, None).await, parked, "while a worker has it, too");
    assert_eq!(finish(&*context.a, &taken).await, Settled::Done);
    let answer = claim_anew(context, &key, None).await;
    assert!(matches!(answer, ClaimAnswer::Processed { .. }), "{answer:?}");
    assert_eq!(context.claim_rows(&key).await, 0);
}

pub async fn processed_comes_before_parked(context: &Context) {
    let orders = Subscription::new(context);
    let key = orders.due("m").await;
    context.harness.hold_uncommitted_message(&key).await.commit().await;
    let answer = claim_anew(context, &key, None).await;
    assert_eq!(answer, ClaimAnswer::Processed { fingerprint: None });
}

/// A copy that is answered so must not wipe out what the claim of a worker that died had counted.
pub async fn parked_keeps_the_attempts_of_a_worker_that_died(context: &Context) {
    let orders = Subscription::new(context);
    let taken = orders.taken_by_a("m").await;
    assert_eq!(count(&*context.a, &taken.claim).await, Attempt::Counted(2));
    context.expire(&taken.claim.key).await;
    for _ in 0..3 {
        let answer = claim_anew(context, &taken.claim.key, None).await;
        assert!(matches!(answer, ClaimAnswer::Parked { .. }), "{answer:?}");
    }
    let again = only(orders.take_b(&orders.asking(1)).await.rows);
    assert_eq!((again.seq, again.attempts), (taken.seq, 3), "2 counted, +1");
}

/// A batch in which some are parked, some blocked, and some fresh.
pub async fn batch_answers_each_member(context: &Context) {
    let orders = Subscription::new(context);
    let due = orders.due_in("lane", 1).await.remove(0);
    let (behind, beside, free) = (key("behind"), key("beside"), key("free"));
    let done = context.processed("done").await;
    let ask = |key: &inboxd_contract::InboxKey, lane: Option<&str>| ClaimRequest {
        fingerprint: Some(fingerprint_of(key)),
        lane_id: lane.map(|lane| orders.lane(lane)),
        ..request(&new_claim(key))
    };
    let batch = [
        ask(&behind, Some("lane")),
        ask(&due, Some("lane")),
        ask(&beside, Some("another")),
        ask(&free, None),
        ask(&done, Some("lane")),
    ];
    let answers = patiently(async || {
        let answers = context.b.claim(&context.owner_b, super::context::LEASE, &batch).await;
        answers.into_iter().collect::<Result<Vec<_>, _>>()
    });
    assert_eq!(
        answers.await,
        [
            ClaimAnswer::LaneBlocked { attempts: 0 },
            ClaimAnswer::Parked { fingerprint: Some(fingerprint_of(&due)) },
            ClaimAnswer::Fresh { attempts: 1 },
            ClaimAnswer::Fresh { attempts: 1 },
            ClaimAnswer::Processed { fingerprint: Some(fingerprint_of(&done)) },
        ]
    );
}

/// Blocked, with the attempts made before; free as soon as nothing of the lane is left.
pub async fn lane_is_blocked_until_its_rows_are_gone(context: &Context) {
    let orders = Subscription::new(context);
    let lane = Some(orders.lane("lane"));
    let claim = context.held_by_a("m").await;
    assert_eq!(count(&*context.a, &claim).await, Attempt::Counted(2));
    assert_eq!(release(&*context.a, &claim, false).await, Settled::Done);
    orders.due_in("lane", 2).await;
    let blocked = ClaimAnswer::LaneBlocked { attempts: 2 };
    assert_eq!(claim_anew(context, &claim.key, lane).await, blocked);
    assert_eq!(context.claim_rows(&claim.key).await, 0, "nothing is held");
    let run = orders.take_a(&orders.asking_runs(2, 2)).await;
    for taken in &run.rows {
        let answer = claim_anew(context, &claim.key, lane).await;
        assert_eq!(answer, ClaimAnswer::LaneBlocked { attempts: 0 }, "at the application or not");
        assert_eq!(finish(&*context.a, taken).await, Settled::Done);
    }
    assert_eq!(claim_anew(context, &claim.key, lane).await, ClaimAnswer::Fresh { attempts: 1 });
}

pub async fn other_lanes_are_not_blocked(context: &Context) {
    let orders = Subscription::new(context);
    orders.due_in("lane", 1).await;
    orders.due("loose").await;
    for lane in [None, Some(orders.lane("another")), Some(Subscription::new(context).lane("lane"))]
    {
        let answer = claim_anew(context, &key("m"), lane).await;
        assert_eq!(answer, ClaimAnswer::Fresh { attempts: 1 });
    }
}

/// Repeated with its own token after the lane was blocked, a claim is blocked too.
pub async fn claim_that_is_held_meets_a_lane_that_was_blocked_since(context: &Context) {
    let orders = Subscription::new(context);
    let lane = Some(orders.lane("lane"));
    let claim = new_claim(&key("m"));
    assert_eq!(claim_copy(context, &claim, lane).await, ClaimAnswer::Fresh { attempts: 1 });
    orders.due_in("lane", 1).await;
    let answer = claim_copy(context, &claim, lane).await;
    assert!(matches!(answer, ClaimAnswer::LaneBlocked { .. }), "{answer:?}");
}

/// A dead letter blocks its lane only where it has one, and until it is discarded or replayed
/// and done.
pub async fn dead_letter_blocks_a_lane_only_if_it_has_one(context: &Context) {
    let orders = Subscription::new(context);
    let lane = Some(orders.lane("lane"));
    for (lane_id, blocks) in [(None, false), (lane, true)] {
        let claim = context.held_by_a("dead").await;
        let letter = DeadLetter { lane_id, lane: Some(b"lane".to_vec()), ..orders.letter(&claim) };
        assert_eq!(dead_letter(&*context.a, &letter).await, Settled::Done);
        let answer = claim_anew(context, &key("m"), lane).await;
        assert_eq!(matches!(answer, ClaimAnswer::LaneBlocked { .. }), blocks, "{answer:?}");
        // A copy of it from elsewhere, published again on purpose, waits as well.
        let again = ClaimRequest {
            fingerprint: Some(fingerprint_of(&claim.key)),
            position: at(8).position(),
            lane_id: lane,
            ..request(&new_claim(&claim.key))
        };
        let answer =
            patiently(async || claim_one(&*context.b, &context.owner_b, again.clone()).await).await;
        match answer {
            ClaimAnswer::LaneBlocked { attempts: 0 } => assert!(blocks),
            ClaimAnswer::Dead { held: Some(1), .. } => assert!(!blocks),
            other => panic!("blocks: {blocks}, and got {other:?}"),
        }
        if blocks {
            context.harness.discard(&claim.key).await;
            let answer = claim_anew(context, &key("m"), lane).await;
            assert_eq!(answer, ClaimAnswer::Fresh { attempts: 1 }, "discarded, it blocks nothing");
        }
    }
}

/// A claim beside the parking of the message before it: blocked, or first.
pub async fn claim_beside_parking_sees_it_or_waits(context: &Context) {
    let orders = Subscription::new(context);
    for _ in 0..30 {
        let held = context.held_by_a("m").await;
        let mut parking = orders.parking(&held);
        parking.copy.delay = Duration::from_secs(60);
        let ask = ClaimRequest {
            fingerprint: Some(fingerprint_of(&held.key)),
            ..request(&new_claim(&held.key))
        };
        let claim = claim_one(&*context.b, &context.owner_b, ask);
        let (answer, settled) = tokio::join!(claim, super::copies::park(&*context.a, &parking));
        assert_eq!(settled, Settled::Done);
        match answer {
            Ok(ClaimAnswer::Parked { .. } | ClaimAnswer::Busy { .. }) => {}
            Ok(other) => panic!("held, then parked, and b got {other:?}"),
            Err(error) => assert!(error.locked, "{}", super::context::told(&error)),
        }
        let answer = claim_anew(context, &held.key, None).await;
        assert!(matches!(answer, ClaimAnswer::Parked { .. }), "{answer:?}");
    }
}

/// A delivery behind its own lane's rows arrives behind them, with its attempts.
pub async fn blocked_delivery_arrives_behind_its_lane(context: &Context) {
    let orders = Subscription::new(context);
    let mut keys = orders.due_in("lane", 2).await;
    let claim = new_claim(&key("m"));
    let answer = claim_copy(context, &claim, Some(orders.lane("lane"))).await;
    assert_eq!(answer, ClaimAnswer::LaneBlocked { attempts: 0 });
    orders.parked(&[orders.arrival_in(&claim.key, "lane")]).await;
    keys.push(claim.key);
    assert_eq!(keys_of(&orders.take_a(&orders.asking_runs(4, 4)).await), keys);
}
