//! Claim first, then look: a completion that commits in between is seen.

use std::time::Duration;

use inboxd_contract::{ClaimAnswer, ClaimRequest, Settled};

use super::context::{
    Context, LEASE, claim_one, complete, dead_letter, fingerprint_of, key, letter, loose_letter,
    new_claim, request, told,
};

/// A claim on a message whose completion is open, then committed.
pub async fn claim_against_an_open_completion_is_never_fresh(context: &Context) {
    let held = context.held_by_a("m").await;
    let open = context.harness.hold_open_completion(&held).await;
    let answer = claim_one(&*context.b, &context.owner_b, request(&new_claim(&held.key))).await;
    match answer {
        Ok(ClaimAnswer::Busy { .. }) => {}
        Ok(other) => panic!("a completion is open, and b got {other:?}"),
        Err(error) => assert!(error.locked, "{}", told(&error)),
    }
    open.commit().await;
    let answer = context.claim_b(&new_claim(&held.key)).await;
    assert_eq!(answer, ClaimAnswer::Processed { fingerprint: None });
    // Rolled back, it never happened, and the old holder goes on.
    let held = context.held_by_a("m").await;
    context.harness.hold_open_completion(&held).await.rollback().await;
    let answer = context.claim_b(&new_claim(&held.key)).await;
    assert!(matches!(answer, ClaimAnswer::Busy { .. }), "{answer:?}");
    assert_eq!(complete(&*context.a, &held).await, Settled::Done);
}

/// A claim that is already waiting when the completion commits, at several moments: the
/// statement that waited has the snapshot of before.
pub async fn claim_that_waits_for_a_completion_sees_it(context: &Context) {
    for delay_ms in [0, 1, 2, 5, 10, 20, 40, 80] {
        let held = context.held_by_a("m").await;
        let open = context.harness.hold_open_completion(&held).await;
        let claim = claim_one(&*context.b, &context.owner_b, request(&new_claim(&held.key)));
        let commit = async {
            tokio::time::sleep(Duration::from_millis(delay_ms)).await;
            open.commit().await;
        };
        let (answer, ()) = tokio::join!(claim, commit);
        match answer {
            Ok(ClaimAnswer::Processed { .. } | ClaimAnswer::Busy { .. }) => {}
            Ok(other) => panic!("processed meanwhile, and b got {other:?}"),
            Err(error) => assert!(error.locked, "{}", told(&error)),
        }
        let answer = context.claim_b(&new_claim(&held.key)).await;
        assert_eq!(answer, ClaimAnswer::Processed { fingerprint: None });
    }
}

/// The store's own completion beside a claim, many times.
pub async fn claim_beside_a_completion_is_never_fresh(context: &Context) {
    for _ in 0..100 {
        let held = context.held_by_a("m").await;
        let claim = claim_one(&*context.b, &context.owner_b, request(&new_claim(&held.key)));
        let (answer, settled) = tokio::join!(claim, complete(&*context.a, &held));
        assert_eq!(settled, Settled::Done);
        match answer {
            Ok(ClaimAnswer::Processed { fingerprint }) => {
                assert_eq!(fingerprint, Some(fingerprint_of(&held.key)));
            }
            Ok(ClaimAnswer::Busy { .. }) => {}
            Ok(other) => panic!("held, then processed, and b got {other:?}"),
            Err(error) => assert!(error.locked, "{}", told(&error)),
        }
        assert_eq!(context.message_rows(&held.key).await, 1);
        if context.claim_rows(&held.key).await != 0 {
            panic!("a claim was left beside a processed message");
        }
    }
}

/// A renewal changes the row while a completion is on its way to it.
pub async fn completion_beside_a_renewal_is_done(context: &Context) {
    for _ in 0..50 {
        let held = context.held_by_a("m").await;
        let named = [held.clone()];
        let (renewed, settled) =
            tokio::join!(context.a.renew(LEASE, &named), complete(&*context.a, &held));
        renewed.expect("a renewal is answered");
        assert_eq!(settled, Settled::Done);
        assert_eq!(context.claim_rows(&held.key).await, 0, "the renewal brought it back");
    }
}

/// An expired holder completes at the moment when another takes over: one of them has it.
pub async fn completion_beside_a_take_over_has_one_winner(context: &Context) {
    for _ in 0..50 {
        let old = context.held_by_a("m").await;
        context.expire(&old.key).await;
        let new = new_claim(&old.key);
        let take_over = claim_one(&*context.b, &context.owner_b, request(&new));
        let (answer, settled) = tokio::join!(take_over, complete(&*context.a, &old));
        match (settled, answer) {
            (Settled::Done, Ok(ClaimAnswer::Processed { .. } | ClaimAnswer::Busy { .. })) => {}
            (Settled::Done, Err(error)) => assert!(error.locked, "{}", told(&error)),
            (Settled::Lost(look), Ok(ClaimAnswer::Fresh { attempts: 2 })) => {
                assert_eq!(look.processed, None);
                assert_eq!(complete(&*context.b, &new).await, Settled::Done);
            }
            other => panic!("both or none: {other:?}"),
        }
        assert_eq!(context.message_rows(&old.key).await, 1);
    }
}

/// A claim beside the commit of a dead letter from the same position is never a second forward.
pub async fn claim_beside_a_dead_letter_is_not_held(context: &Context) {
    for _ in 0..50 {
        let held = context.held_by_a("m").await;
        let letter = letter(&held);
        let copy = ClaimRequest {
            position: letter.envelope.origin.position(),
            ..request(&new_claim(&held.key))
        };
        let claim = claim_one(&*context.b, &context.owner_b, copy);
        let (answer, settled) = tokio::join!(claim, dead_letter(&*context.a, &letter));
        assert_eq!(settled, Settled::Done);
        match answer {
            Ok(ClaimAnswer::Dead { held: None, .. } | ClaimAnswer::Busy { .. }) => {}
            Ok(other) => panic!("a dead letter of this position, and b got {other:?}"),
            Err(error) => assert!(error.locked, "{}", told(&error)),
        }
    }
}

/// The same dead letter from many at once is one row.
pub async fn dead_letters_at_once_are_one_row(context: &Context) {
    let key = key("m");
    let letters: Vec<_> = (0..16).map(|_| [loose_letter(&key)]).collect();
    let calls = letters.iter().enumerate().map(|(index, letter)| {
        let store = if index % 2 == 0 { &context.a } else { &context.b };
        store.dead_letter(letter)
    });
    for answers in futures::future::join_all(calls).await {
        match &answers[0] {
            Ok(settled) => assert_eq!(*settled, Settled::Done),
            Err(error) => assert!(error.locked, "{}", told(error)),
        }
    }
    assert_eq!(context.parked_rows(&key).await, 1);
}
