//! What a store tells about one message and about all of them.

use std::time::Duration;

use inboxd_contract::{
    Completion, DeadLetter, EXPLAINED_COPIES_MAX, Envelope, Explanation, Fingerprint, InboxKey,
    ParkedCopy, ParkedState, Settled,
};

use super::context::{
    Context, complete, completion, dead_letter, key, letter, loose_letter, new_claim, release,
};
use super::harness::Row;

const HOUR: Duration = Duration::from_secs(3_600);
/// The machine may be slow; the difference of two time zones is larger.
const SLACK: Duration = Duration::from_secs(60);

async fn explain(context: &Context, key: &InboxKey) -> Explanation {
    context.b.explain(key).await.expect("an explanation is answered")
}

pub async fn unknown_message_is_explained_by_nothing(context: &Context) {
    assert_eq!(explain(context, &key("unknown")).await, Explanation::default());
    let mut elsewhere = context.processed("of another consumer").await;
    elsewhere.consumer_id = super::context::key_of("another", "x").consumer_id;
    assert_eq!(explain(context, &elsewhere).await, Explanation::default(), "not its consumer id");
}

pub async fn claim_is_explained_with_its_owner(context: &Context) {
    let claim = context.held_by_a("held").await;
    let known = explain(context, &claim.key).await;
    let told = known.claim.expect("it is held");
    assert_eq!((&told.owner, told.attempts), (&context.owner_a, 1));
    let left = told.expires_in.expect("it has not run out");
    assert!(left > Duration::ZERO && left <= super::context::LEASE, "{left:?}");
    assert_eq!((known.message, known.copies), (None, Vec::new()));

    context.expire(&claim.key).await;
    let told = explain(context, &claim.key).await.claim.expect("its row is there");
    assert_eq!((told.attempts, told.expires_in), (1, None), "run out");

    let claim = new_claim(&key("released"));
    assert!(context.claim_a(&claim).await.is_held());
    assert_eq!(release(&*context.a, &claim, false).await, Settled::Done);
    let told = explain(context, &claim.key).await.claim.expect("its attempts are kept");
    assert_eq!((told.attempts, told.expires_in), (1, None), "given up");
}

pub async fn processed_message_is_explained_with_its_age(context: &Context) {
    let claim = context.held_by_a("processed").await;
    assert_eq!(complete(&*context.a, &claim).await, Settled::Done);
    let known = explain(context, &claim.key).await;
    assert_eq!((known.claim, known.copies), (None, Vec::new()));
    let told = known.message.expect("it was processed");
    assert_eq!(told.record.fingerprint, completion(&claim).record.fingerprint);
    assert!(told.processed_ago < SLACK, "{:?}", told.processed_ago);

    context.harness.backdate(Row::Message(&claim.key), HOUR).await;
    let told = explain(context, &claim.key).await.message.expect("it was processed");
    assert!(told.processed_ago >= HOUR && told.processed_ago < HOUR + SLACK);
}

pub async fn dead_letter_is_explained_whole(context: &Context) {
    let claim = context.held_by_a("dead").await;
    assert_eq!(dead_letter(&*context.a, &letter(&claim)).await, Settled::Done);
    let known = explain(context, &claim.key).await;
    assert_eq!((known.message, known.claim), (None, None));
    let parked = context.a.parked(&claim.key).await.expect("parked rows are answered");
    assert_eq!((known.copies.len(), known.copies_total), (1, 1));
    let told = &known.copies[0];
    let body_bytes = parked[0].envelope.body.as_ref().map(|body| body.len() as u64);
    assert_eq!((told.body_bytes, body_bytes), (Some(4), Some(4)));
    assert_eq!(told.copy, without_body(&parked[0]), "whole but for its body, which is not read");
    assert!(known.copies[0].state == ParkedState::Dead && known.copies[0].parked_ago < SLACK);

    context.harness.backdate(Row::Parked(&claim.key), HOUR).await;
    context.harness.discard(&claim.key).await;
    let told = explain(context, &claim.key).await.copies.remove(0);
    assert!(told.state == ParkedState::Discarded && told.body_bytes.is_none(), "its body is gone");
    assert!(told.parked_ago >= HOUR && told.parked_ago < HOUR + SLACK, "{:?}", told.parked_ago);
}

fn without_body(copy: &ParkedCopy) -> ParkedCopy {
    ParkedCopy { envelope: Envelope { body: None, ..copy.envelope.clone() }, ..copy.clone() }
}

/// A publisher that reuses one id for everything must not fill the memory of who asks about it.
pub async fn newest_of_many_dead_letters_are_explained(context: &Context) {
    let key = key("conflicts");
    let total = EXPLAINED_COPIES_MAX + 2;
    for round in 0..total {
        let fingerprint = Some(Fingerprint::of(round.to_string().as_bytes()));
        let letter = DeadLetter { fingerprint, ..loose_letter(&key) };
        assert_eq!(dead_letter(&*context.a, &letter).await, Settled::Done);
    }
    let known = explain(context, &key).await;
    assert_eq!(known.copies_total, total as u64);
    let told: Vec<_> = known.copies.iter().map(|told| told.copy.clone()).collect();
    let parked = context.a.parked(&key).await.expect("parked rows are answered");
    let newest: Vec<_> = parked[2..].iter().map(without_body).collect();
    assert_eq!(told, newest, "the newest, oldest first");
}

/// A row of one table takes the place of another's, and whoever asks meanwhile sees one of them.
pub async fn message_on_its_way_is_never_unknown(context: &Context) {
    for round in 0..40 {
        let claim = new_claim(&key(&format!("{round}")));
        let (dead, key) = (round % 4 == 0, &claim.key);
        match dead {
            true => drop(dead_letter(&*context.a, &loose_letter(key)).await),
            false => assert!(context.claim_a(&claim).await.is_held()),
        }
        let processed = async {
            if dead {
                assert!(context.claim_a(&claim).await.is_held());
            }
            let completion = Completion { supersedes_dead: dead, ..completion(&claim) };
            let settled = context.a.complete(&[completion]).await.remove(0);
            assert_eq!(settled.expect("completed"), Settled::Done);
        };
        let asked = async {
            let mut known = explain(context, key).await;
            while known.message.is_none() {
                assert_ne!(known, Explanation::default(), "it was known, dead letter: {dead}");
                tokio::task::yield_now().await;
                known = explain(context, key).await;
            }
        };
        tokio::join!(processed, asked);
        let known = explain(context, key).await;
        assert_eq!((known.claim, known.copies), (None, Vec::new()), "only its row is left");
    }
}

/// Cases before this one have left rows, so that it counts what is added.
pub async fn rows_and_ages_are_counted(context: &Context) {
    let before = context.a.stats().await.expect("counts are answered");
    let first = context.processed("first").await;
    context.processed("second").await;
    context.held_by_a("held").await;
    let dead = key("dead");
    assert_eq!(dead_letter(&*context.a, &loose_letter(&dead)).await, Settled::Done);
    let discarded = key("discarded");
    assert_eq!(dead_letter(&*context.a, &loose_letter(&discarded)).await, Settled::Done);
    context.harness.discard(&discarded).await;
    // Older than whatever other cases made old.
    let age = HOUR * 24 * 300;
    context.harness.backdate(Row::Message(&first), age).await;
    context.harness.backdate(Row::Parked(&dead), age).await;
    context.harness.backdate(Row::Parked(&discarded), age * 2).await;

    let after = context.a.stats().await.expect("counts are answered");
    let added = |after: Option<u64>, before: Option<u64>| Some(after? - before?);
    assert_eq!(added(after.messages, before.messages), Some(2));
    assert_eq!(added(after.claims, before.claims), Some(1));
    assert_eq!(added(after.dead, before.dead), Some(1), "discarded ones are not dead");
    for oldest in [after.oldest_message, after.oldest_dead] {
        let oldest = oldest.expect("there is one");
        assert!(oldest >= age && oldest < age + SLACK, "{oldest:?}");
    }
}
