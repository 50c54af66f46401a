//! What the holder of a taken row can do, and what one whose claim was taken over cannot.

use std::time::Duration;

use inboxd_contract::{ClaimAnswer, InboxKey, Look, ParkedState, Reschedule, Settled, Taken};

use super::context::{Context, LEASE, all_ok, count, dead_letter, fingerprint_of, only, release};
use super::copies::{
    HOUR, SLACK, Subscription, claim_anew, finish, finished, put_off, reschedule, unpark,
};

fn due(key: &InboxKey) -> Look {
    Look { due: vec![Some(fingerprint_of(key))], ..Look::default() }
}

pub async fn completion_takes_the_row_along(context: &Context) {
    let orders = Subscription::new(context);
    let taken = orders.taken_by_a("m").await;
    assert_eq!(finish(&*context.a, &taken).await, Settled::Done);
    let key = &taken.claim.key;
    assert_eq!(context.parked_rows(key).await + context.claim_rows(key).await, 0);
    assert_eq!(context.message_rows(key).await, 1);
    match finish(&*context.a, &taken).await {
        Settled::Lost(look) => {
            let own = Look { processed: Some(Some(fingerprint_of(key))), ..Look::default() };
            assert_eq!(look, own, "its own commit");
        }
        other => panic!("committed before, and now {other:?}"),
    }
}

pub async fn completion_of_a_processed_message_takes_the_row_along(context: &Context) {
    let orders = Subscription::new(context);
    let taken = orders.taken_by_a("m").await;
    context.harness.hold_uncommitted_message(&taken.claim.key).await.commit().await;
    let answer = finish(&*context.a, &taken).await;
    assert_eq!(answer, Settled::AlreadyProcessed { fingerprint: None });
    assert_eq!(context.parked_rows(&taken.claim.key).await, 0);
    assert_eq!(context.claim_rows(&taken.claim.key).await, 0);
}

pub async fn completions_with_and_without_a_row_go_together(context: &Context) {
    let orders = Subscription::new(context);
    let direct = context.held_by_a("direct").await;
    let stays = orders.due("stays").await;
    let mut batch = vec![super::context::completion(&direct)];
    let mut taken = Vec::new();
    for index in 0..6 {
        orders.due(&format!("{index}")).await;
    }
    for row in orders.take_a(&orders.asking(7)).await.rows {
        if row.claim.key == stays {
            assert_eq!(release(&*context.a, &row.claim, true).await, Settled::Done);
        } else {
            batch.push(finished(&row));
            taken.push(row);
        }
    }
    let answers = all_ok(context.a.complete(&batch).await);
    assert!(answers.iter().all(|answer| *answer == Settled::Done), "{answers:?}");
    assert_eq!(taken.len(), 6);
    let left: Vec<_> = orders.rows().await.into_iter().map(|row| row.key).collect();
    assert_eq!(left, [stays]);
}

pub async fn row_put_off_keeps_its_attempts_and_its_place(context: &Context) {
    let orders = Subscription::new(context);
    let first = orders.due_in("lane", 2).await;
    let taken = only(orders.take_a(&orders.asking(1)).await.rows);
    context.harness.backdate_first(&first[0], HOUR * 3).await;
    count(&*context.a, &taken.claim).await;
    assert_eq!(reschedule(&*context.a, &put_off(&taken)).await, Settled::Done);
    assert_eq!(context.claim_rows(&taken.claim.key).await, 0, "the claim is gone");
    let row = orders.row(&first[0]).await;
    assert_eq!((row.seq, row.state, row.copy.attempts), (taken.seq, ParkedState::Due, 2));
    assert_eq!(row.copy.last_status, Some(500));
    assert_eq!(row.copy.last_error, put_off(&taken).last_error);
    let due_in = row.due_in.expect("it is due some time");
    assert!(due_in <= HOUR && due_in > HOUR - SLACK, "{due_in:?}");
    assert!(row.first_ago >= HOUR * 3 && row.first_ago < HOUR * 3 + SLACK, "{:?}", row.first_ago);
    assert_eq!(reschedule(&*context.a, &put_off(&taken)).await, Settled::Lost(due(&first[0])));
    context.harness.backdate_due(&first[0], Duration::ZERO).await;
    let again = only(orders.take_b(&orders.asking(1)).await.rows);
    assert_eq!((again.seq, again.attempts), (taken.seq, 3));
}

/// The application was not asked: no attempt, and what was known of the last one stays.
pub async fn row_put_off_without_an_attempt_counts_none(context: &Context) {
    let orders = Subscription::new(context);
    let taken = orders.taken_by_a("m").await;
    assert_eq!(reschedule(&*context.a, &put_off(&taken)).await, Settled::Done);
    for _ in 0..3 {
        context.harness.backdate_due(&taken.claim.key, Duration::ZERO).await;
        let again = only(orders.take_b(&orders.asking(1)).await.rows);
        assert_eq!(again.attempts, 2);
        let back = Reschedule {
            attempt_back: true,
            last_status: None,
            last_error: None,
            ..put_off(&again)
        };
        assert_eq!(reschedule(&*context.b, &back).await, Settled::Done);
        let row = orders.row(&taken.claim.key).await;
        assert_eq!((row.copy.attempts, row.copy.last_status), (1, Some(500)));
        assert_eq!(row.copy.last_error, put_off(&taken).last_error);
        assert!(row.due_in.expect("it is due some time") > HOUR - SLACK);
    }
}

pub async fn many_are_put_off_at_once(context: &Context) {
    let orders = Subscription::new(context);
    for index in 0..20 {
        orders.due(&format!("{index}")).await;
    }
    let taken = orders.take_a(&orders.asking(20)).await.rows;
    assert_eq!(taken.len(), 20);
    let mut batch: Vec<_> = taken.iter().map(put_off).collect();
    for (index, one) in batch.iter_mut().enumerate() {
        one.delay = HOUR * u32::try_from(index).expect("20");
        one.last_error = Some(format!("{index}"));
    }
    batch[3].claim = super::context::new_claim(&taken[3].claim.key);
    let answers = all_ok(context.a.reschedule(&batch).await);
    for (index, (answer, taken)) in answers.iter().zip(&taken).enumerate() {
        let row = orders.row(&taken.claim.key).await;
        if index == 3 {
            assert_eq!(*answer, Settled::Lost(due(&taken.claim.key)), "another's token");
            assert_eq!((row.copy.attempts, row.copy.last_error), (0, None));
            continue;
        }
        assert_eq!((answer, row.copy.attempts), (&Settled::Done, 1), "member {index}");
        assert_eq!(row.copy.last_error, Some(format!("{index}")));
        let delay = HOUR * u32::try_from(index).expect("20");
        let due_in = row.due_in.expect("it is due some time");
        assert!(due_in <= delay && due_in + SLACK > delay, "member {index}: {due_in:?}");
    }
    assert!(context.a.reschedule(&[]).await.is_empty());
    assert!(context.a.unpark(&[]).await.is_empty());
}

pub async fn row_of_a_processed_message_is_removed(context: &Context) {
    let orders = Subscription::new(context);
    let taken = orders.taken_by_a("m").await;
    context.harness.hold_uncommitted_message(&taken.claim.key).await.commit().await;
    assert_eq!(unpark(&*context.a, &taken).await, Settled::Done);
    let key = &taken.claim.key;
    assert_eq!(context.parked_rows(key).await + context.claim_rows(key).await, 0);
    let look = Look { processed: Some(None), ..Look::default() };
    assert_eq!(unpark(&*context.a, &taken).await, Settled::Lost(look), "its own commit");
}

pub async fn row_becomes_dead_in_place(context: &Context) {
    let orders = Subscription::new(context);
    // The one that blocks comes last: nothing of its lane would be taken after it.
    for halt in [false, true] {
        orders.due_in("lane", 1).await;
        let taken = only(orders.take_a(&orders.asking(1)).await.rows);
        let key = &taken.claim.key;
        context.harness.backdate_first(key, HOUR * 3).await;
        let mut letter = orders.letter(&taken.claim);
        letter.attempts = 20;
        letter.first_ago = HOUR;
        letter.lane = taken.copy.lane.clone();
        letter.lane_id = taken.lane_id.filter(|_| halt);
        assert_eq!(dead_letter(&*context.a, &letter).await, Settled::Done);
        let row = orders.row(key).await;
        assert_eq!((row.seq, row.state, row.copy.attempts), (taken.seq, ParkedState::Dead, 20));
        assert_eq!((row.lane_id, row.due_in), (letter.lane_id, None));
        let first_ago = row.first_ago;
        assert!(first_ago >= HOUR * 3 && first_ago < HOUR * 3 + SLACK, "the older: {first_ago:?}");
        let look = context.look(key).await;
        assert_eq!((look.dead.len(), look.due.len()), (1, 0));
        match dead_letter(&*context.a, &letter).await {
            Settled::Lost(again) => assert_eq!(again, look, "its own commit"),
            other => panic!("committed before, and now {other:?}"),
        }
    }
    let claim = context.held_by_a("m").await;
    let letter = inboxd_contract::DeadLetter { first_ago: HOUR, ..orders.letter(&claim) };
    assert_eq!(dead_letter(&*context.a, &letter).await, Settled::Done);
    let first_ago = orders.row(&claim.key).await.first_ago;
    assert!(first_ago >= HOUR && first_ago < HOUR + SLACK, "{first_ago:?}");
}

pub async fn row_given_back_is_due_still(context: &Context) {
    let orders = Subscription::new(context);
    let taken = orders.taken_by_a("m").await;
    assert!(orders.keys_for_b().await.is_empty(), "held");
    assert_eq!(release(&*context.a, &taken.claim, true).await, Settled::Done);
    for _ in 0..3 {
        let again = only(orders.take_b(&orders.asking(1)).await.rows);
        assert_eq!((again.seq, again.attempts), (taken.seq, 1), "no attempt was made");
        assert_eq!(release(&*context.b, &again.claim, true).await, Settled::Done);
    }
    let again = only(orders.take_a(&orders.asking(1)).await.rows);
    assert_eq!(release(&*context.a, &again.claim, false).await, Settled::Done);
    let again = only(orders.take_b(&orders.asking(1)).await.rows);
    assert_eq!(again.attempts, 2, "an attempt was made");
    assert_eq!(finish(&*context.b, &again).await, Settled::Done);
}

pub async fn claim_of_a_taken_row_is_renewed(context: &Context) {
    let orders = Subscription::new(context);
    let taken = orders.taken_by_a("m").await;
    context.expire(&taken.claim.key).await;
    let named = [taken.claim.clone()];
    let renewed = context.a.renew(LEASE, &named).await.expect("answered");
    assert_eq!(renewed, [taken.claim.token]);
    assert!(orders.keys_for_b().await.is_empty(), "held again");
}

/// A row that a worker of instance a took, whose claim ran out, and that b's worker has now.
async fn taken_over(orders: &Subscription<'_>) -> (Taken, Taken) {
    let old = orders.taken_by_a("m").await;
    orders.context.expire(&old.claim.key).await;
    let new = only(orders.take_b(&orders.asking(1)).await.rows);
    assert_eq!((new.seq, new.attempts), (old.seq, 2));
    (old, new)
}

pub async fn stale_token_changes_nothing(context: &Context) {
    let orders = Subscription::new(context);
    let (old, new) = taken_over(&orders).await;
    let key = &old.claim.key;
    let before = orders.row(key).await;
    let lost = Settled::Lost(due(key));
    assert_eq!(finish(&*context.a, &old).await, lost);
    assert_eq!(reschedule(&*context.a, &put_off(&old)).await, lost);
    assert_eq!(unpark(&*context.a, &old).await, lost);
    assert_eq!(dead_letter(&*context.a, &orders.letter(&old.claim)).await, lost);
    assert_eq!(super::copies::park(&*context.a, &orders.parking(&old.claim)).await, lost);
    assert_eq!(release(&*context.a, &old.claim, true).await, lost);
    let after = orders.row(key).await;
    assert_eq!((after.seq, after.state, after.copy), (before.seq, before.state, before.copy));
    assert_eq!(context.message_rows(key).await, 0, "nothing may be recorded");
    let answer = claim_anew(context, key, None).await;
    assert!(matches!(answer, ClaimAnswer::Parked { .. }), "{answer:?}");
    assert_eq!(finish(&*context.b, &new).await, Settled::Done, "who holds it goes on");
    assert_eq!(context.parked_rows(key).await, 0);
}
