//! Locks that somebody else holds: waited for shortly, and only by the member they concern.

use std::time::Instant;

use inboxd_contract::{ClaimAnswer, InboxKey, Look, Settled, StoreError};

use super::context::{
    Context, LEASE, LOCK_BOUND, all_ok, assert_locked, claim_one, complete, completion, count, key,
    letter, new_claim, only, request, requests, told,
};

/// The place of the locked member: neither first nor last.
const LOCKED: usize = 2;

fn assert_in_time(started: Instant) {
    let took = started.elapsed();
    assert!(took < LOCK_BOUND, "a lock was waited for {took:?}, longer than {LOCK_BOUND:?}");
}

/// Six fresh keys in the order in which stores take locks.
fn six_keys() -> Vec<InboxKey> {
    let mut keys: Vec<_> = (0..6).map(|index| key(&format!("{index}"))).collect();
    keys.sort();
    keys
}

pub async fn locked_member_of_a_claim_stalls_nobody(context: &Context) {
    let mut keys = six_keys();
    let expired = context.held_by_a("expired").await;
    context.expire(&expired.key).await;
    keys[LOCKED] = expired.key.clone();
    let claims: Vec<_> = keys.iter().map(new_claim).collect();
    let guard = context.harness.lock_claim(&expired.key).await;
    let started = Instant::now();
    let answers = context.b.claim(&context.owner_b, LEASE, &requests(&claims)).await;
    assert_in_time(started);
    assert_eq!(answers.len(), keys.len());
    for (index, answer) in answers.iter().enumerate() {
        match (index, answer) {
            (LOCKED, Ok(ClaimAnswer::Busy { .. })) => {}
            (LOCKED, answer) => assert_locked(answer),
            (_, Ok(ClaimAnswer::Fresh { attempts: 1 })) => {}
            (_, Ok(other)) => panic!("member {index} is free, and got {other:?}"),
            (_, Err(error)) => panic!("member {index} is free: {}", told(error)),
        }
    }
    guard.rollback().await;
    let answer = context.claim_b(&claims[LOCKED]).await;
    assert_eq!(answer, ClaimAnswer::Fresh { attempts: 2 }, "alone and later, it goes through");
}

pub async fn locked_member_of_a_completion_stalls_nobody(context: &Context) {
    let mut claims = Vec::new();
    for key in six_keys() {
        let claim = new_claim(&key);
        assert!(context.claim_a(&claim).await.is_held());
        claims.push(claim);
    }
    let guard = context.harness.hold_uncommitted_message(&claims[LOCKED].key).await;
    let batch: Vec<_> = claims.iter().map(completion).collect();
    let started = Instant::now();
    let answers = context.a.complete(&batch).await;
    assert_in_time(started);
    for (index, answer) in answers.iter().enumerate() {
        match (index, answer) {
            (LOCKED, answer) => assert_locked(answer),
            (_, Ok(Settled::Done)) => {}
            (_, Ok(other)) => panic!("member {index} is held, and got {other:?}"),
            (_, Err(error)) => panic!("member {index} is held: {}", told(error)),
        }
    }
    guard.rollback().await;
    assert_eq!(complete(&*context.a, &claims[LOCKED]).await, Settled::Done, "still held");
}

/// Each kind of write meets a locked claim row: an error that says so, in bounded time, and the
/// claim is as it was.
pub async fn locked_claim_row_bounds_every_write(context: &Context) {
    let claim = context.held_by_a("m").await;
    let guard = context.harness.lock_claim(&claim.key).await;

    let started = Instant::now();
    assert_locked(&only(context.a.complete(&[completion(&claim)]).await));
    assert_in_time(started);

    let started = Instant::now();
    assert_locked(&only(context.a.dead_letter(&[letter(&claim)]).await));
    assert_in_time(started);

    let started = Instant::now();
    let releases = [inboxd_contract::Release { claim: claim.clone(), attempt_back: false }];
    assert_locked(&only(context.a.release(&releases).await));
    assert_in_time(started);

    let started = Instant::now();
    assert_locked(&only(context.a.count_attempts(std::slice::from_ref(&claim)).await));
    assert_in_time(started);

    let started = Instant::now();
    let request = request(&new_claim(&claim.key));
    match claim_one(&*context.b, &context.owner_b, request).await {
        Ok(ClaimAnswer::Busy { .. }) => {}
        answer => assert_locked(&answer),
    }
    assert_in_time(started);

    guard.rollback().await;
    let counted = inboxd_contract::Attempt::Counted(2);
    assert_eq!(count(&*context.a, &claim).await, counted, "nothing of all that was counted");
    assert_eq!(complete(&*context.a, &claim).await, Settled::Done);
    assert_eq!(context.parked_rows(&claim.key).await, 0);
}

/// The application (or a slower holder) has inserted the row and not committed yet.
async fn completion_against_uncommitted(
    context: &Context,
) -> (inboxd_contract::Claim, Box<dyn super::Guard>) {
    let held = context.held_by_a("m").await;
    let guard = context.harness.hold_uncommitted_message(&held.key).await;
    let started = Instant::now();
    assert_locked(&only(context.a.complete(&[completion(&held)]).await));
    assert_in_time(started);
    (held, guard)
}

pub async fn completion_against_an_uncommitted_row_that_commits(context: &Context) {
    let (held, guard) = completion_against_uncommitted(context).await;
    guard.commit().await;
    let answer = complete(&*context.a, &held).await;
    assert_eq!(answer, Settled::AlreadyProcessed { fingerprint: None });
    assert_eq!(context.message_rows(&held.key).await, 1);
    assert_eq!(context.claim_rows(&held.key).await, 0);
}

pub async fn completion_against_an_uncommitted_row_that_rolls_back(context: &Context) {
    let (held, guard) = completion_against_uncommitted(context).await;
    guard.rollback().await;
    assert_eq!(complete(&*context.a, &held).await, Settled::Done);
    assert_eq!(context.message_rows(&held.key).await, 1);
}

pub async fn renewal_skips_locked_rows(context: &Context) {
    let claims = [
        context.held_by_a("1").await,
        context.held_by_a("locked").await,
        context.held_by_a("2").await,
    ];
    let guard = context.harness.lock_claim(&claims[1].key).await;
    let started = Instant::now();
    let mut renewed = context.a.renew(LEASE, &claims).await.expect("answered");
    assert_in_time(started);
    renewed.sort();
    let mut expected = [claims[0].token, claims[2].token];
    expected.sort();
    assert_eq!(renewed, expected);
    guard.rollback().await;
    let renewed = context.a.renew(LEASE, &claims).await.expect("answered");
    assert_eq!(renewed.len(), 3);
}

pub async fn look_and_ping_do_not_wait_for_locks(context: &Context) {
    let claim = context.held_by_a("m").await;
    let guard = context.harness.lock_claim(&claim.key).await;
    let started = Instant::now();
    assert_eq!(context.look(&claim.key).await, Look::default());
    assert!(context.b.parked(&claim.key).await.expect("answered").is_empty());
    if context.harness.traits().row_locks {
        let answers: Vec<Result<(), StoreError>> =
            vec![context.a.ping().await, context.b.ping().await];
        all_ok(answers);
    }
    assert_in_time(started);
    guard.rollback().await;
    all_ok(vec![context.a.ping().await, context.b.ping().await]);
    assert_eq!(complete(&*context.a, &claim).await, Settled::Done);
}
