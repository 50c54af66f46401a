//! Attempts have one home; releasing and renewing.

use inboxd_contract::{Attempt, ClaimAnswer, Look, Settled};

use super::context::{Context, LEASE, complete, count, new_claim, release};

pub async fn attempts_count_claims_and_retries(context: &Context) {
    let claim = context.held_by_a("m").await;
    assert_eq!(count(&*context.a, &claim).await, Attempt::Counted(2));
    assert_eq!(count(&*context.a, &claim).await, Attempt::Counted(3));
    let again = context.claim_a(&claim).await;
    assert_eq!(again, ClaimAnswer::Fresh { attempts: 3 }, "repeating a claim counts nothing");
}

pub async fn attempts_are_taken_back_by_a_release_without_verdict(context: &Context) {
    let claim = context.held_by_a("m").await;
    assert_eq!(count(&*context.a, &claim).await, Attempt::Counted(2));
    assert_eq!(release(&*context.a, &claim, true).await, Settled::Done);
    let next = new_claim(&claim.key);
    assert_eq!(context.claim_b(&next).await, ClaimAnswer::Fresh { attempts: 2 }, "1 kept, +1");
    // However often it is claimed and given back, nothing adds up, and nothing goes below zero.
    assert_eq!(release(&*context.b, &next, true).await, Settled::Done);
    for _ in 0..3 {
        let claim = new_claim(&claim.key);
        assert_eq!(context.claim_a(&claim).await, ClaimAnswer::Fresh { attempts: 2 });
        assert_eq!(release(&*context.a, &claim, true).await, Settled::Done);
    }
}

pub async fn attempts_are_kept_by_a_release_with_verdict(context: &Context) {
    let claim = context.held_by_a("m").await;
    assert_eq!(count(&*context.a, &claim).await, Attempt::Counted(2));
    assert_eq!(release(&*context.a, &claim, false).await, Settled::Done);
    let next = new_claim(&claim.key);
    assert_eq!(context.claim_b(&next).await, ClaimAnswer::Fresh { attempts: 3 });
}

pub async fn attempts_are_kept_by_a_take_over(context: &Context) {
    let claim = context.held_by_a("m").await;
    assert_eq!(count(&*context.a, &claim).await, Attempt::Counted(2));
    context.expire(&claim.key).await;
    let next = new_claim(&claim.key);
    assert_eq!(context.claim_b(&next).await, ClaimAnswer::Fresh { attempts: 3 });
}

pub async fn release_makes_claimable_at_once(context: &Context) {
    for attempt_back in [true, false] {
        let claim = context.held_by_a("m").await;
        assert_eq!(release(&*context.a, &claim, attempt_back).await, Settled::Done);
        assert_eq!(context.claim_rows(&claim.key).await, 1, "its row stays: it keeps attempts");
        let next = new_claim(&claim.key);
        assert!(context.claim_b(&next).await.is_held(), "free at once");
        assert_eq!(complete(&*context.b, &next).await, Settled::Done);
    }
}

pub async fn released_token_holds_nothing(context: &Context) {
    let claim = context.held_by_a("m").await;
    assert_eq!(release(&*context.a, &claim, false).await, Settled::Done);
    let lost = Look::default();
    assert_eq!(complete(&*context.a, &claim).await, Settled::Lost(lost.clone()));
    assert_eq!(count(&*context.a, &claim).await, Attempt::Lost(lost.clone()));
    assert_eq!(release(&*context.a, &claim, true).await, Settled::Lost(lost));
    let renewed = context.a.renew(LEASE, std::slice::from_ref(&claim)).await.expect("answered");
    assert!(renewed.is_empty());
    assert_eq!(context.message_rows(&claim.key).await, 0);
    let next = context.claim_b(&new_claim(&claim.key)).await;
    assert_eq!(next, ClaimAnswer::Fresh { attempts: 2 }, "the late release took nothing back");
}

pub async fn renewal_extends_only_the_named_tokens(context: &Context) {
    let named = context.held_by_a("named").await;
    let unnamed = context.held_by_a("unnamed").await;
    context.expire(&named.key).await;
    context.expire(&unnamed.key).await;
    let renewed = context.a.renew(LEASE, std::slice::from_ref(&named)).await.expect("answered");
    assert_eq!(renewed, [named.token]);
    let answer = context.claim_b(&new_claim(&named.key)).await;
    let ClaimAnswer::Busy { wait } = answer else { panic!("renewed, and b got {answer:?}") };
    assert!(wait > LEASE / 5 && wait <= LEASE, "{wait:?}");
    let answer = context.claim_b(&new_claim(&unnamed.key)).await;
    assert_eq!(answer, ClaimAnswer::Fresh { attempts: 2 }, "not renewed, so it ran out");
}

pub async fn renewal_revives_an_expired_claim_that_nobody_took(context: &Context) {
    let claim = context.held_by_a("m").await;
    context.expire(&claim.key).await;
    let claims = [claim.clone(), new_claim(&claim.key)];
    let renewed = context.a.renew(LEASE, &claims).await.expect("answered");
    assert_eq!(renewed, [claim.token], "and a token that never held anything is not among them");
    assert_eq!(context.claim_a(&claim).await, ClaimAnswer::Fresh { attempts: 1 });
}
