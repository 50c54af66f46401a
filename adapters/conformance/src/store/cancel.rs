//! Calls whose future is dropped in the middle: all or nothing, and no connection is left dirty.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use inboxd_contract::{ClaimAnswer, InboxStore, Settled};

use super::context::{
    Context, LEASE, claim_one, completion, dead_letter, key, letter, loose_letter, new_claim,
    request, requests, told,
};
use crate::eventually;

/// More polls than any call needs; a call that is done earlier ends the case.
const POLLS_MAX: usize = 40;
/// How long a server may need to notice that a client is gone.
const SETTLED_WITHIN: Duration = Duration::from_secs(20);

/// Polls a future at most `polls` times, each time it wants to be polled, then drops it.
async fn cut_after<T>(polls: usize, future: impl Future<Output = T>) -> Option<T> {
    let mut future = pin!(future);
    let mut left = polls;
    std::future::poll_fn(|context| {
        if left == 0 {
            return Poll::Ready(None);
        }
        left -= 1;
        match future.as_mut().poll(context) {
            Poll::Ready(value) => Poll::Ready(Some(value)),
            // The last poll was this one: dropped now, not at the next wake-up.
            Poll::Pending if left == 0 => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

/// An instance of its own: what a case leaves behind concerns no other case.
async fn instance(context: &Context) -> Arc<dyn InboxStore> {
    context.harness.open().await
}

async fn put_away(context: &Context, store: &Arc<dyn InboxStore>) {
    if context.harness.traits().instances > 1 {
        store.close().await;
    }
}

/// More calls than the pool has connections, so that each of them is used again.
async fn use_every_connection(context: &Context, store: &dyn InboxStore) {
    let claims: Vec<_> = (0..8).map(|_| new_claim(&key("next"))).collect();
    let calls = claims.iter().map(|claim| claim_one(store, &context.owner_a, request(claim)));
    for answer in futures::future::join_all(calls).await {
        let answer = answer.unwrap_or_else(|error| panic!("the pool is broken: {}", told(&error)));
        assert_eq!(answer, ClaimAnswer::Fresh { attempts: 1 });
    }
}

pub async fn claim_dropped_at_any_point_leaves_all_or_nothing(context: &Context) {
    let store = instance(context).await;
    for polls in 1..POLLS_MAX {
        let claims = [new_claim(&key("1")), new_claim(&key("2"))];
        let requests = requests(&claims);
        let done = cut_after(polls, store.claim(&context.owner_a, LEASE, &requests)).await;
        use_every_connection(context, &*store).await;
        for claim in &claims {
            // Nobody else's lock is left, and the message can be had: at once, or after the
            // claim has run out.
            let attempts = eventually(SETTLED_WITHIN, async || {
                context.expire(&claim.key).await;
                let request = request(&new_claim(&claim.key));
                match claim_one(&*context.b, &context.owner_b, request).await {
                    Ok(ClaimAnswer::Fresh { attempts }) => Ok(attempts),
                    Ok(other) => Err(format!("{other:?}")),
                    Err(error) => Err(told(&error)),
                }
            })
            .await;
            assert!((1..=2).contains(&attempts), "claimed {attempts} times");
        }
        if done.is_some() {
            break;
        }
    }
    put_away(context, &store).await;
}

pub async fn completion_dropped_at_any_point_leaves_all_or_nothing(context: &Context) {
    let store = instance(context).await;
    for polls in 1..POLLS_MAX {
        let claims = [context.held_by_a("1").await, context.held_by_a("2").await];
        let batch = [completion(&claims[0]), completion(&claims[1])];
        let done = cut_after(polls, store.complete(&batch)).await;
        use_every_connection(context, &*store).await;
        for claim in &claims {
            // A claim without a row, or a row without a claim. Which one may change while the
            // server still works on what it was sent; anything else never lasts.
            eventually(SETTLED_WITHIN, async || {
                let rows = context.message_rows(&claim.key).await;
                let claims = context.claim_rows(&claim.key).await;
                crate::ensure(rows + claims == 1, format!("{rows} rows and {claims} claims"))
            })
            .await;
            let settled = eventually(SETTLED_WITHIN, async || {
                match store.complete(&[completion(claim)]).await.remove(0) {
                    Ok(settled) => Ok(settled),
                    Err(error) => Err(told(&error)),
                }
            })
            .await;
            match settled {
                Settled::Done => {}
                Settled::Lost(look) if look.processed.is_some() => {}
                other => panic!("neither done nor done before: {other:?}"),
            }
            assert_eq!(context.message_rows(&claim.key).await, 1);
        }
        if done.is_some() {
            break;
        }
    }
    put_away(context, &store).await;
}

pub async fn dead_letter_dropped_at_any_point_leaves_all_or_nothing(context: &Context) {
    let store = instance(context).await;
    for polls in 1..POLLS_MAX {
        let claim = context.held_by_a("m").await;
        let batch = [letter(&claim)];
        let done = cut_after(polls, store.dead_letter(&batch)).await;
        use_every_connection(context, &*store).await;
        eventually(SETTLED_WITHIN, async || {
            let rows = context.parked_rows(&claim.key).await;
            let claims = context.claim_rows(&claim.key).await;
            crate::ensure(rows + claims == 1, format!("{rows} letters and {claims} claims"))
        })
        .await;
        if done.is_some() {
            break;
        }
    }
    put_away(context, &store).await;
}

/// Many calls, all cut: the pool is neither empty nor poisoned.
pub async fn store_is_usable_after_many_dropped_calls(context: &Context) {
    let store = instance(context).await;
    for round in 0..5 {
        let claims: Vec<_> = (0..32).map(|_| new_claim(&key("cut"))).collect();
        let calls = claims.iter().enumerate().map(|(index, claim)| {
            let request = request(claim);
            cut_after(1 + (index + round) % 7, async {
                claim_one(&*store, &context.owner_a, request).await
            })
        });
        futures::future::join_all(calls).await;
    }
    use_every_connection(context, &*store).await;
    let renewed = store.renew(LEASE, &[new_claim(&key("none"))]).await;
    assert!(renewed.expect("renewal has its connection").is_empty());
    assert_eq!(dead_letter(&*store, &loose_letter(&key("d"))).await, Settled::Done);
    put_away(context, &store).await;
}
