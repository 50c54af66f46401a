//! Many calls at once: one holder, no deadlock, no starved pool.

use std::collections::{HashMap, HashSet};
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use inboxd_contract::{Claim, ClaimAnswer, InboxKey, InboxStore, OwnerId, Settled, Token};
use tokio::task::JoinSet;

use super::context::{
    Context, LEASE, all_ok, claim_one, complete, completion, key, new_claim, request, requests,
    told,
};

const TASKS: usize = 50;
const KEYS: usize = 20;
const RETRIES_MAX: usize = 200;

/// Claims all keys in one batch; members that met a lock are asked again with the same token,
/// until each has an answer. Returns what it holds.
async fn claim_all(store: Arc<dyn InboxStore>, owner: OwnerId, keys: Vec<InboxKey>) -> Vec<Claim> {
    let mut open: Vec<Claim> = keys.iter().map(new_claim).collect();
    let mut held = Vec::new();
    for _ in 0..RETRIES_MAX {
        let answers = store.claim(&owner, LEASE, &requests(&open)).await;
        let mut again = Vec::new();
        for (claim, answer) in open.into_iter().zip(answers) {
            match answer {
                Ok(ClaimAnswer::Fresh { .. }) => held.push(claim),
                Ok(ClaimAnswer::Busy { .. }) => {}
                Ok(other) => panic!("nothing was processed, and yet {other:?}"),
                Err(error) if error.is_transient() => again.push(claim),
                Err(error) => panic!("{}", told(&error)),
            }
        }
        if again.is_empty() {
            return held;
        }
        open = again;
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("{} members never got an answer", open.len())
}

pub async fn claim_storm_has_exactly_one_holder_each(context: &Context) {
    let keys: Vec<_> = (0..KEYS).map(|index| key(&format!("{index}"))).collect();
    let mut tasks = JoinSet::new();
    for (store, owner) in [(&context.a, &context.owner_a), (&context.b, &context.owner_b)] {
        for task in 0..TASKS {
            // Each asks in an order of its own.
            let mut keys = keys.clone();
            keys.rotate_left(task % KEYS);
            if task % 2 == 1 {
                keys.reverse();
            }
            tasks.spawn(claim_all(Arc::clone(store), owner.clone(), keys));
        }
    }
    let mut holders: HashMap<InboxKey, Vec<Token>> = HashMap::new();
    while let Some(held) = tasks.join_next().await {
        for claim in held.expect("a task of the storm failed") {
            holders.entry(claim.key).or_default().push(claim.token);
        }
    }
    for key in &keys {
        let tokens = holders.get(key).map_or(&[][..], Vec::as_slice);
        assert_eq!(tokens.len(), 1, "{key:?} has {} holders", tokens.len());
        let claim = Claim { key: key.clone(), token: tokens[0] };
        assert_eq!(complete(&*context.a, &claim).await, Settled::Done);
        assert_eq!(context.message_rows(key).await, 1);
    }
}

/// Two instances claim the same keys in opposite orders, and complete them so: each is held by
/// one, and done once.
pub async fn batches_in_opposite_order_share_the_work(context: &Context) {
    for _ in 0..8 {
        let keys: Vec<_> = (0..200).map(|index| key(&format!("{index}"))).collect();
        let forward: Vec<_> = keys.iter().map(new_claim).collect();
        let backward: Vec<_> = keys.iter().rev().map(new_claim).collect();
        let held = claim_both(context, &forward, &backward).await;
        let distinct: HashSet<_> = held.iter().map(|claim| &claim.key).collect();
        assert_eq!(distinct.len(), held.len(), "a key has two holders");
        complete_both(context, &held).await;
    }
}

/// Rounds of the next case; a machine that stalls may spoil a few of them.
const ROUNDS: usize = 7;
/// Somebody's lock is held for so long: time enough for two calls to come and wait.
const HELD: Duration = Duration::from_millis(80);
/// A deadlock waits for a lock timeout from then on; what is in order is done sooner.
const SLOW: Duration = Duration::from_millis(240);

/// The middle one of three rows is locked by somebody else, while one instance asks for them
/// upwards and another downwards. Who takes locks in the order asked holds the two ends then,
/// and once the middle is free, each waits for the other. It shows in the time only, since a
/// batch that meets a deadlock is tried again in parts.
pub async fn batches_take_locks_in_one_order(context: &Context) {
    let (mut slow_claims, mut slow_completions) = (0, 0);
    for _ in 0..ROUNDS {
        let mut keys: Vec<_> = (0..3).map(|index| key(&format!("{index}"))).collect();
        keys.sort();
        for key in &keys {
            assert!(context.claim_a(&new_claim(key)).await.is_held());
            context.expire(key).await;
        }
        let upwards: Vec<_> = keys.iter().map(new_claim).collect();
        let downwards: Vec<_> = keys.iter().rev().map(new_claim).collect();

        let both = claim_both(context, &upwards, &downwards);
        let (mut held, took) = while_locked(context, &keys[1], both).await;
        slow_claims += usize::from(took > SLOW);

        // What met the lock is had now.
        for key in &keys {
            if held.iter().all(|claim| claim.key != *key) {
                let claim = new_claim(key);
                assert!(context.claim_a(&claim).await.is_held());
                held.push(claim);
            }
        }
        held.sort_by(|left, right| left.key.cmp(&right.key));
        let both = complete_both(context, &held);
        let ((), took) = while_locked(context, &keys[1], both).await;
        slow_completions += usize::from(took > SLOW);
    }
    assert!(slow_claims <= ROUNDS / 2, "{slow_claims} of {ROUNDS} pairs of claims waited");
    assert!(slow_completions <= ROUNDS / 2, "{slow_completions} of {ROUNDS} completions waited");
}

/// Runs `calls` while the key's claim is locked for [`HELD`]; answers how long they took after.
async fn while_locked<T>(
    context: &Context,
    key: &InboxKey,
    calls: impl Future<Output = T>,
) -> (T, Duration) {
    let guard = context.harness.lock_claim(key).await;
    let unlock = async {
        tokio::time::sleep(HELD).await;
        guard.rollback().await;
        Instant::now()
    };
    let (answer, unlocked) = tokio::join!(calls, unlock);
    (answer, unlocked.elapsed())
}

/// Both at once; answers the claims that are held by one of them.
async fn claim_both(context: &Context, forward: &[Claim], backward: &[Claim]) -> Vec<Claim> {
    let (ask_a, ask_b) = (requests(forward), requests(backward));
    let (a, b) = tokio::join!(
        context.a.claim(&context.owner_a, LEASE, &ask_a),
        context.b.claim(&context.owner_b, LEASE, &ask_b)
    );
    let mut held = Vec::new();
    for (claim, answer) in forward.iter().zip(a).chain(backward.iter().zip(b)) {
        match answer {
            Ok(ClaimAnswer::Fresh { .. }) => held.push(claim.clone()),
            Ok(ClaimAnswer::Busy { .. }) => {}
            Ok(other) => panic!("nothing was processed, and yet {other:?}"),
            Err(error) => assert!(error.locked, "{}", told(&error)),
        }
    }
    held
}

/// Both complete all of it, in opposite orders: each is done once.
async fn complete_both(context: &Context, held: &[Claim]) {
    let completions: Vec<_> = held.iter().map(completion).collect();
    let reversed: Vec<_> = completions.iter().rev().cloned().collect();
    let (a, b) = tokio::join!(context.a.complete(&completions), context.b.complete(&reversed));
    let mut done = 0;
    for answer in a.into_iter().chain(b) {
        match answer {
            Ok(Settled::Done) => done += 1,
            Ok(Settled::Lost(look)) => assert!(look.processed.is_some(), "{look:?}"),
            Ok(other) => panic!("{other:?}"),
            Err(error) => assert!(error.locked, "{}", told(&error)),
        }
    }
    assert!(done <= held.len(), "completed more than once");
}

/// 64 calls over a pool of four: each takes one connection at a time, so they finish.
pub async fn more_calls_than_connections_all_finish(context: &Context) {
    let claims: Vec<_> = (0..64).map(|index| new_claim(&key(&format!("{index}")))).collect();
    let lives = claims.iter().map(|claim| async {
        let answer = claim_one(&*context.a, &context.owner_a, request(claim)).await;
        assert!(all_ok(vec![answer])[0].is_held());
        let (renewed, looked) = tokio::join!(
            context.a.renew(LEASE, std::slice::from_ref(claim)),
            context.a.look(std::slice::from_ref(&claim.key))
        );
        assert_eq!(all_ok(vec![renewed]), [vec![claim.token]]);
        all_ok(vec![looked]);
        assert_eq!(complete(&*context.a, claim).await, Settled::Done);
    });
    futures::future::join_all(lives).await;
}
