//! Claiming: who holds, who waits, what is read back.

use std::time::Duration;

use inboxd_contract::{ClaimAnswer, ErrorClass, Settled};

use super::context::{
    Context, LEASE, all_ok, claim_one, complete, fingerprint_of, key, new_claim, owner,
    refused_key, request, requests, told,
};
use super::harness::Row;

pub async fn first_claim_is_fresh_and_second_is_busy(context: &Context) {
    let first = context.held_by_a("m").await;
    let answer = context.claim_b(&new_claim(&first.key)).await;
    assert!(matches!(answer, ClaimAnswer::Busy { .. }), "held by a, and b got {answer:?}");
}

pub async fn repeated_with_its_own_token_is_fresh_with_the_same_attempts(context: &Context) {
    let claim = context.held_by_a("m").await;
    for _ in 0..3 {
        assert_eq!(context.claim_a(&claim).await, ClaimAnswer::Fresh { attempts: 1 });
    }
    // Its answer may come so late that the claim has run out, and nobody took it.
    context.expire(&claim.key).await;
    assert_eq!(context.claim_a(&claim).await, ClaimAnswer::Fresh { attempts: 1 });
    let answer = context.claim_b(&new_claim(&claim.key)).await;
    assert!(matches!(answer, ClaimAnswer::Busy { .. }), "repeated, so extended: {answer:?}");
}

pub async fn repeated_with_an_old_token_after_a_take_over_is_busy(context: &Context) {
    let (old, _new) = context.taken_over("m").await;
    let answer = context.claim_a(&old).await;
    assert!(matches!(answer, ClaimAnswer::Busy { .. }), "b holds it, and a got {answer:?}");
}

pub async fn processed_message_is_never_fresh_and_leaves_no_claim(context: &Context) {
    let key = context.processed("m").await;
    for _ in 0..2 {
        let answer = context.claim_b(&new_claim(&key)).await;
        let fingerprint = Some(fingerprint_of(&key));
        assert_eq!(answer, ClaimAnswer::Processed { fingerprint });
        assert_eq!(context.claim_rows(&key).await, 0, "a claim that does not hold is removed");
    }
}

pub async fn expired_claim_is_taken_over(context: &Context) {
    let (_old, new) = context.taken_over("m").await;
    assert_eq!(context.claim_rows(&new.key).await, 1);
    assert_eq!(complete(&*context.b, &new).await, Settled::Done);
}

pub async fn unexpired_claim_is_not_taken_over(context: &Context) {
    let claim = context.held_by_a("m").await;
    for _ in 0..5 {
        let answer = context.claim_b(&new_claim(&claim.key)).await;
        assert!(matches!(answer, ClaimAnswer::Busy { .. }), "{answer:?}");
    }
    // Nothing of that changed the holder.
    assert_eq!(context.claim_a(&claim).await, ClaimAnswer::Fresh { attempts: 1 });
}

pub async fn batch_answers_in_the_order_asked(context: &Context) {
    let processed = context.processed("p").await;
    let busy = context.held_by_a("b").await.key;
    // Asked in an order that is not the keys' order.
    let mut keys: Vec<_> = (0..20).map(|index| key(&format!("{index}"))).collect();
    keys.sort();
    keys.reverse();
    keys.insert(3, processed.clone());
    keys.insert(11, busy.clone());
    let claims: Vec<_> = keys.iter().map(new_claim).collect();
    let answers = all_ok(context.b.claim(&context.owner_b, LEASE, &requests(&claims)).await);
    assert_eq!(answers.len(), keys.len());
    for (key, answer) in keys.iter().zip(&answers) {
        let fits = match answer {
            ClaimAnswer::Processed { .. } => *key == processed,
            ClaimAnswer::Busy { .. } => *key == busy,
            ClaimAnswer::Fresh { attempts: 1 } => *key != processed && *key != busy,
            _ => false,
        };
        assert!(fits, "{key:?} got {answer:?}");
    }
}

pub async fn duplicate_in_a_batch_is_busy(context: &Context) {
    let (twice, once) = (key("twice"), key("once"));
    let claims = [new_claim(&twice), new_claim(&once), new_claim(&twice)];
    let answers = all_ok(context.a.claim(&context.owner_a, LEASE, &requests(&claims)).await);
    assert_eq!(answers[0], ClaimAnswer::Fresh { attempts: 1 }, "the first is served");
    assert_eq!(answers[1], ClaimAnswer::Fresh { attempts: 1 });
    assert!(matches!(answers[2], ClaimAnswer::Busy { .. }), "{:?}", answers[2]);
    assert_eq!(complete(&*context.a, &claims[0]).await, Settled::Done);
}

pub async fn refused_member_leaves_the_others_of_its_batch_alone(context: &Context) {
    let claims = [new_claim(&key("1")), new_claim(&refused_key()), new_claim(&key("2"))];
    let answers = context.a.claim(&context.owner_a, LEASE, &requests(&claims)).await;
    assert_eq!(answers.len(), 3);
    for index in [0, 2] {
        match &answers[index] {
            Ok(ClaimAnswer::Fresh { attempts: 1 }) => {}
            Ok(other) => panic!("member {index}: {other:?}"),
            Err(error) => panic!("member {index}: {}", told(error)),
        }
    }
    match &answers[1] {
        Ok(answer) => panic!("refused by the database, and yet answered {answer:?}"),
        Err(error) => assert_eq!(error.class, ErrorClass::Permanent, "{}", told(error)),
    }
}

pub async fn empty_batches_answer_nothing(context: &Context) {
    assert!(context.a.claim(&context.owner_a, LEASE, &[]).await.is_empty());
    assert!(context.a.complete(&[]).await.is_empty());
    assert!(context.a.dead_letter(&[]).await.is_empty());
    assert!(context.a.release(&[]).await.is_empty());
    assert!(context.a.count_attempts(&[]).await.is_empty());
    assert!(context.a.look(&[]).await.expect("answered").is_empty());
    assert!(context.a.renew(LEASE, &[]).await.expect("answered").is_empty());
}

pub async fn busy_says_how_long_by_the_clock_of_the_database(context: &Context) {
    let claim = context.held_by_a("m").await;
    let ClaimAnswer::Busy { wait } = context.claim_b(&new_claim(&claim.key)).await else {
        panic!("held by a");
    };
    assert!(wait <= LEASE, "longer than the lease: {wait:?}");
    assert!(wait > LEASE / 5, "hardly any time has passed, and the wait is {wait:?}");
    // A lease of another length is the other one's to choose.
    let long = new_claim(&key("long"));
    let lease = Duration::from_secs(3_600);
    let answers = context.a.claim(&context.owner_a, lease, &[request(&long)]).await;
    assert!(all_ok(answers)[0].is_held());
    let ClaimAnswer::Busy { wait } = context.claim_b(&new_claim(&long.key)).await else {
        panic!("held by a");
    };
    assert!(wait > Duration::from_secs(3_000) && wait <= lease, "{wait:?}");
}

pub async fn lease_starts_anew_with_a_take_over(context: &Context) {
    let (old, new) = context.taken_over("m").await;
    let wait = match claim_one(&*context.a, &context.owner_a, request(&new_claim(&old.key))).await {
        Ok(ClaimAnswer::Busy { wait }) => wait,
        other => panic!("held by b, and a got {other:?}"),
    };
    assert!(wait > LEASE / 5, "a take-over has a whole lease, this one {wait:?}");
    context.harness.backdate(Row::Claim(&new.key), Duration::from_secs(1)).await;
    assert_eq!(
        context.claim_a(&new_claim(&new.key)).await,
        ClaimAnswer::Fresh { attempts: 3 },
        "taken over a second time"
    );
}

/// Another life that starts is no proof that this one has ended.
pub async fn starting_instance_clears_no_claims(context: &Context) {
    let claim = context.held_by_a("m").await;
    let other = context.harness.open().await;
    let answer = claim_one(&*other, &owner("other"), request(&new_claim(&claim.key))).await;
    assert!(matches!(answer, Ok(ClaimAnswer::Busy { .. })), "held by a: {answer:?}");
    other.close().await;
    assert_eq!(complete(&*context.a, &claim).await, Settled::Done);
}

/// What is answered is what is there now: the look remembers nothing.
pub async fn look_is_not_cached(context: &Context) {
    let claim = context.held_by_a("m").await;
    for _ in 0..2 {
        assert!(context.claim_a(&claim).await.is_held());
        assert_eq!(context.look(&claim.key).await.processed, None);
    }
    context.harness.hold_uncommitted_message(&claim.key).await.commit().await;
    assert_eq!(context.look(&claim.key).await.processed, Some(None));
    assert_eq!(context.claim_a(&claim).await, ClaimAnswer::Processed { fingerprint: None });
    assert_eq!(context.claim_rows(&claim.key).await, 0);
}
