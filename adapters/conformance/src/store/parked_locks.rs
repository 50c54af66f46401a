//! Locks that somebody else holds while messages are parked, taken and put off.

use std::time::Instant;

use inboxd_contract::{Settled, Unpark};

use super::context::{Context, LEASE, LOCK_BOUND, all_ok, assert_locked, only, told};
use super::copies::{
    Subscription, assert_same_keys, finish, keys_of, park, put_off, reschedule, unpark,
};

/// The place of the locked member: neither first nor last.
const LOCKED: usize = 2;

fn assert_in_time(started: Instant) {
    let took = started.elapsed();
    assert!(took < LOCK_BOUND, "a lock was waited for {took:?}, longer than {LOCK_BOUND:?}");
}

pub async fn locked_member_of_a_parking_stalls_nobody(context: &Context) {
    let orders = Subscription::new(context);
    let mut batch = Vec::new();
    for index in 0..6 {
        batch.push(orders.parking(&context.held_by_a(&format!("{index}")).await));
    }
    let guard = context.harness.lock_claim(&batch[LOCKED].claim.key).await;
    let started = Instant::now();
    let answers = context.a.park(&batch).await;
    assert_in_time(started);
    for (index, answer) in answers.iter().enumerate() {
        match answer {
            answer if index == LOCKED => assert_locked(answer),
            Ok(answer) => assert_eq!(*answer, Settled::Done, "member {index} is held"),
            Err(error) => panic!("member {index} is held: {}", told(error)),
        }
    }
    guard.rollback().await;
    assert_eq!(park(&*context.a, &batch[LOCKED]).await, Settled::Done, "still held");
}

pub async fn locked_member_of_a_putting_off_stalls_nobody(context: &Context) {
    let orders = Subscription::new(context);
    for index in 0..6 {
        orders.due(&format!("{index}")).await;
    }
    let taken = orders.take_a(&orders.asking(6)).await.rows;
    let batch: Vec<_> = taken.iter().map(put_off).collect();
    let guard = context.harness.lock_claim(&batch[LOCKED].claim.key).await;
    let started = Instant::now();
    let answers = context.a.reschedule(&batch).await;
    assert_in_time(started);
    for (index, answer) in answers.iter().enumerate() {
        match answer {
            answer if index == LOCKED => assert_locked(answer),
            Ok(answer) => assert_eq!(*answer, Settled::Done, "member {index} is held"),
            Err(error) => panic!("member {index} is held: {}", told(error)),
        }
    }
    guard.rollback().await;
    assert_eq!(reschedule(&*context.a, &batch[LOCKED]).await, Settled::Done, "still held");
    assert_eq!(orders.row(&taken[LOCKED].claim.key).await.copy.attempts, 1, "counted once");
}

/// Each kind of write of a worker meets a locked claim row: an error that says so, in bounded
/// time, and everything is as it was.
pub async fn locked_claim_row_bounds_every_write(context: &Context) {
    let orders = Subscription::new(context);
    let taken = orders.taken_by_a("m").await;
    let guard = context.harness.lock_claim(&taken.claim.key).await;

    let started = Instant::now();
    assert_locked(&only(context.a.reschedule(&[put_off(&taken)]).await));
    assert_in_time(started);

    let started = Instant::now();
    let gone = Unpark { claim: taken.claim.clone(), seq: taken.seq };
    assert_locked(&only(context.a.unpark(&[gone]).await));
    assert_in_time(started);

    let started = Instant::now();
    assert_locked(&only(context.a.park(&[orders.parking(&taken.claim)]).await));
    assert_in_time(started);

    guard.rollback().await;
    let row = orders.row(&taken.claim.key).await;
    assert_eq!((row.seq, row.copy.attempts), (taken.seq, 0));
    assert_eq!(unpark(&*context.a, &taken).await, Settled::Done);
}

/// A row that another worker is just taking is passed over, and nobody waits for it.
pub async fn taking_passes_over_locked_rows(context: &Context) {
    let orders = Subscription::new(context);
    let mut free = Vec::new();
    for index in 0..3 {
        free.push(orders.due(&format!("{index}")).await);
        free.push(orders.due_in(&format!("{index}"), 1).await.remove(0));
    }
    let locked = [free.remove(3), free.remove(2)];
    let guards = [
        context.harness.lock_parked(&locked[0]).await,
        context.harness.lock_parked(&locked[1]).await,
    ];
    let started = Instant::now();
    let batch = context.b.take_due(&context.owner_b, LEASE, &orders.asking(8)).await;
    assert_in_time(started);
    assert_same_keys(keys_of(&only(all_ok(vec![batch]))), &free);
    for guard in guards {
        guard.rollback().await;
    }
    assert_same_keys(orders.keys_for_b().await, &locked);
}

/// The claim of a worker that died is locked by somebody: the other rows are taken all the same.
pub async fn taking_is_not_stalled_by_a_locked_claim(context: &Context) {
    let orders = Subscription::new(context);
    let died = orders.taken_by_a("m").await;
    context.expire(&died.claim.key).await;
    let mut free = Vec::new();
    for index in 0..4 {
        free.push(orders.due(&format!("{index}")).await);
    }
    let guard = context.harness.lock_claim(&died.claim.key).await;
    let started = Instant::now();
    let batch = context.b.take_due(&context.owner_b, LEASE, &orders.asking(8)).await;
    assert_in_time(started);
    assert_same_keys(keys_of(&only(all_ok(vec![batch]))), &free);
    guard.rollback().await;
    let again = only(orders.take_b(&orders.asking(8)).await.rows);
    assert_eq!((again.seq, again.attempts), (died.seq, 2));
    assert_eq!(finish(&*context.b, &again).await, Settled::Done);
}

/// So does a lane whose head is locked: what follows it is not taken for the head.
pub async fn lane_whose_head_is_locked_waits(context: &Context) {
    let orders = Subscription::new(context);
    let keys = orders.due_in("lane", 3).await;
    let guard = context.harness.lock_parked(&keys[0]).await;
    let started = Instant::now();
    let batch = orders.take_b(&orders.asking_runs(8, 8)).await;
    assert_in_time(started);
    assert!(batch.rows.is_empty(), "{batch:?}");
    guard.rollback().await;
    // One in the middle ends the run before it.
    let guard = context.harness.lock_parked(&keys[1]).await;
    let run = orders.take_b(&orders.asking_runs(8, 8)).await;
    assert_eq!(keys_of(&run), keys[..1]);
    guard.rollback().await;
}
