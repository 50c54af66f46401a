//! A token that was taken over can do nothing, and breaks nothing of the new holder's.

use inboxd_contract::{Attempt, Claim, Look, Settled};

use super::context::{Context, LEASE, complete, count, dead_letter, letter, release};

/// The new holder is untouched: it holds two attempts and completes.
async fn new_holder_goes_on(context: &Context, new: &Claim) {
    assert_eq!(count(&*context.b, new).await, Attempt::Counted(3), "b still holds it");
    assert_eq!(complete(&*context.b, new).await, Settled::Done);
    assert_eq!(context.message_rows(&new.key).await, 1);
    assert_eq!(context.claim_rows(&new.key).await, 0);
}

pub async fn token_completes_nothing(context: &Context) {
    let (old, new) = context.taken_over("m").await;
    assert_eq!(complete(&*context.a, &old).await, Settled::Lost(Look::default()));
    assert_eq!(context.message_rows(&old.key).await, 0, "nothing may be recorded");
    new_holder_goes_on(context, &new).await;
}

pub async fn token_dead_letters_nothing(context: &Context) {
    let (old, new) = context.taken_over("m").await;
    assert_eq!(dead_letter(&*context.a, &letter(&old)).await, Settled::Lost(Look::default()));
    assert_eq!(context.parked_rows(&old.key).await, 0, "nothing may be parked");
    new_holder_goes_on(context, &new).await;
}

pub async fn token_releases_nothing(context: &Context) {
    let (old, new) = context.taken_over("m").await;
    for attempt_back in [true, false] {
        let answer = release(&*context.a, &old, attempt_back).await;
        assert_eq!(answer, Settled::Lost(Look::default()));
    }
    new_holder_goes_on(context, &new).await;
}

pub async fn token_counts_nothing(context: &Context) {
    let (old, new) = context.taken_over("m").await;
    assert_eq!(count(&*context.a, &old).await, Attempt::Lost(Look::default()));
    new_holder_goes_on(context, &new).await;
}

pub async fn token_renews_nothing(context: &Context) {
    let (old, new) = context.taken_over("m").await;
    let renewed = context.a.renew(LEASE, std::slice::from_ref(&old)).await.expect("answered");
    assert!(renewed.is_empty(), "renewed what another holds");
    new_holder_goes_on(context, &new).await;
}
