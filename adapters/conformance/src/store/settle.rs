//! Completing and dead-lettering: claim removed and row written, or nothing.

use inboxd_contract::{
    ClaimAnswer, Completion, DeadLetter, ErrorClass, Look, MessageRecord, Settled,
};

use super::context::{
    Context, LEASE, all_ok, complete, completion, dead_letter, fingerprint_of, key, letter,
    new_claim, only, refused_key, requests, told,
};

pub async fn completion_moves_claim_to_row(context: &Context) {
    let claim = context.held_by_a("m").await;
    assert_eq!(context.look(&claim.key).await, Look::default());
    assert_eq!(complete(&*context.a, &claim).await, Settled::Done);
    assert_eq!(context.claim_rows(&claim.key).await, 0);
    assert_eq!(context.message_rows(&claim.key).await, 1);
    let processed = Some(Some(fingerprint_of(&claim.key)));
    assert_eq!(context.look(&claim.key).await, Look { processed, ..Look::default() });
}

/// The answer of a completion was lost: the same again finds no claim, and the look shows why.
pub async fn completion_repeated_finds_its_own_commit(context: &Context) {
    let claim = context.held_by_a("m").await;
    assert_eq!(complete(&*context.a, &claim).await, Settled::Done);
    let processed = Some(Some(fingerprint_of(&claim.key)));
    let lost = Settled::Lost(Look { processed, ..Look::default() });
    assert_eq!(complete(&*context.a, &claim).await, lost);
    assert_eq!(context.message_rows(&claim.key).await, 1);
}

/// The application inserted the row itself, or a holder before us did.
pub async fn completion_of_a_row_that_exists_is_already_processed(context: &Context) {
    let claim = context.held_by_a("m").await;
    context.harness.hold_uncommitted_message(&claim.key).await.commit().await;
    let answer = complete(&*context.a, &claim).await;
    assert_eq!(answer, Settled::AlreadyProcessed { fingerprint: None });
    assert_eq!(context.claim_rows(&claim.key).await, 0, "the claim goes with it");
    assert_eq!(context.message_rows(&claim.key).await, 1);
}

pub async fn dead_letter_repeated_finds_its_own_commit(context: &Context) {
    let claim = context.held_by_a("m").await;
    let letter = DeadLetter { fingerprint: Some(fingerprint_of(&claim.key)), ..letter(&claim) };
    assert_eq!(dead_letter(&*context.a, &letter).await, Settled::Done);
    assert_eq!(context.claim_rows(&claim.key).await, 0);
    let Settled::Lost(look) = dead_letter(&*context.a, &letter).await else {
        panic!("the claim went with the first commit");
    };
    assert_eq!(look.processed, None);
    assert_eq!(look.dead.len(), 1, "the look shows our own commit");
    assert_eq!(look.dead[0].fingerprint, letter.fingerprint);
    assert_eq!(look.dead[0].position, letter.envelope.origin.position());
    assert_eq!(context.parked_rows(&claim.key).await, 1);
}

pub async fn record_is_stored_and_may_be_absent(context: &Context) {
    let bare = context.held_by_a("bare").await;
    let full = context.held_by_a("full").await;
    let record = MessageRecord {
        fingerprint: Some(fingerprint_of(&full.key)),
        producer: Some(String::from("shop ☕ 'quoted'")),
        message_type: Some("t".repeat(256)),
        correlation_id: Some(String::from("c")),
        causation_id: Some(String::new()),
    };
    let completions = [
        Completion {
            claim: bare.clone(),
            record: MessageRecord::default(),
            supersedes_dead: false,
            parked: None,
        },
        Completion {
            claim: full.clone(),
            record: record.clone(),
            supersedes_dead: false,
            parked: None,
        },
    ];
    assert_eq!(all_ok(context.a.complete(&completions).await), [Settled::Done, Settled::Done]);
    assert_eq!(context.look(&bare.key).await.processed, Some(None), "a row without fingerprint");
    assert_eq!(context.look(&full.key).await.processed, Some(record.fingerprint));
    let answer = context.claim_b(&new_claim(&bare.key)).await;
    assert_eq!(answer, ClaimAnswer::Processed { fingerprint: None });
}

pub async fn mixed_batch_answers_each_member(context: &Context) {
    let (stale, new) = context.taken_over("stale").await;
    let exists = context.held_by_a("exists").await;
    context.harness.hold_uncommitted_message(&exists.key).await.commit().await;
    let good = [context.held_by_a("1").await, context.held_by_a("2").await];
    let batch =
        [completion(&good[1]), completion(&stale), completion(&exists), completion(&good[0])];
    let answers = all_ok(context.a.complete(&batch).await);
    assert_eq!(
        answers,
        [
            Settled::Done,
            Settled::Lost(Look::default()),
            Settled::AlreadyProcessed { fingerprint: None },
            Settled::Done
        ]
    );
    assert_eq!(complete(&*context.b, &new).await, Settled::Done);
}

pub async fn expired_claim_that_nobody_took_still_completes(context: &Context) {
    let claim = context.held_by_a("m").await;
    context.expire(&claim.key).await;
    assert_eq!(complete(&*context.a, &claim).await, Settled::Done);
}

pub async fn refused_member_leaves_the_others_of_its_batch_alone(context: &Context) {
    let good = [context.held_by_a("1").await, context.held_by_a("2").await];
    // Held, but with a record that no column takes.
    let bad = context.held_by_a("bad").await;
    let mut refused = completion(&bad);
    refused.record.message_type = Some("x".repeat(300));
    let batch = [completion(&good[0]), refused, completion(&good[1])];
    let answers = context.a.complete(&batch).await;
    assert_eq!(answers.len(), 3);
    for index in [0, 2] {
        match &answers[index] {
            Ok(answer) => assert_eq!(*answer, Settled::Done),
            Err(error) => panic!("member {index}: {}", told(error)),
        }
    }
    match &answers[1] {
        Ok(answer) => panic!("refused by the database, and yet answered {answer:?}"),
        Err(error) => assert_eq!(error.class, ErrorClass::Permanent, "{}", told(error)),
    }
    assert_eq!(context.message_rows(&bad.key).await, 0);
    assert_eq!(complete(&*context.a, &bad).await, Settled::Done, "its claim is still held");
    // A key that cannot be stored was never claimed: lost, or an error, but nothing written.
    let unknown = new_claim(&refused_key());
    match only(context.a.complete(&[completion(&unknown)]).await) {
        Ok(answer) => assert_eq!(answer, Settled::Lost(Look::default())),
        Err(error) => assert_eq!(error.class, ErrorClass::Permanent, "{}", told(&error)),
    }
}

pub async fn large_batches_are_answered_whole(context: &Context) {
    let claims: Vec<_> = (0..1_000).map(|index| new_claim(&key(&format!("{index}")))).collect();
    let answers = all_ok(context.a.claim(&context.owner_a, LEASE, &requests(&claims)).await);
    assert_eq!(answers.len(), claims.len());
    assert!(answers.iter().all(|answer| *answer == ClaimAnswer::Fresh { attempts: 1 }));
    let completions: Vec<_> = claims.iter().map(completion).collect();
    let answers = all_ok(context.a.complete(&completions).await);
    assert_eq!(answers.len(), claims.len());
    assert!(answers.iter().all(|answer| *answer == Settled::Done));
    let keys: Vec<_> = claims.iter().map(|claim| claim.key.clone()).collect();
    let looks = context.a.look(&keys).await.expect("answered");
    for (key, look) in keys.iter().zip(&looks) {
        assert_eq!(look.processed, Some(Some(fingerprint_of(key))));
    }
}
