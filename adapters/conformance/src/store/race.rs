//! Claim first, then look: a completion that commits in between is seen.

use std::time::Duration;

use inboxd_contract::{ClaimAnswer, Settled};

use super::context::{Context, claim_one, complete, fingerprint_of, new_claim, request, told};

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
