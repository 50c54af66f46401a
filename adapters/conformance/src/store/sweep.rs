//! Deletion of what is old, by rows that were made old.

use std::time::Duration;

use inboxd_contract::{DeadLetter, Fingerprint, Settled, SweepPolicy, SweepReport};

use super::context::{Context, complete, dead_letter, key, loose_letter, new_claim, release};
use super::harness::Row;

const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3_600);

/// Everything is kept for ever, but for what a case says.
fn keep_all() -> SweepPolicy {
    let for_ever = Duration::from_secs(3_600 * 24 * 365);
    SweepPolicy { retention: for_ever, dead_retention: for_ever, idle_claims: for_ever, batch: 100 }
}

async fn sweep(context: &Context, policy: &SweepPolicy) -> SweepReport {
    let report = context.a.sweep(policy).await.expect("a sweep is answered");
    assert!(report.ran, "nobody else is at it");
    report
}

pub async fn old_rows_are_deleted_and_young_ones_kept(context: &Context) {
    let (old, young) = (context.processed("old").await, context.processed("young").await);
    context.harness.backdate(Row::Message(&old), HOUR + MINUTE).await;
    context.harness.backdate(Row::Message(&young), HOUR - MINUTE).await;
    let report = sweep(context, &SweepPolicy { retention: HOUR, ..keep_all() }).await;
    assert!(report.messages >= 1);
    assert_eq!(context.message_rows(&old).await, 0, "61 minutes old");
    assert_eq!(context.message_rows(&young).await, 1, "59 minutes old");
    // Forgotten means new.
    assert!(context.claim_a(&new_claim(&old)).await.is_held());
}

pub async fn dead_and_discarded_rows_have_a_retention_of_their_own(context: &Context) {
    let keys = [key("old"), key("old and discarded"), key("young"), key("young and discarded")];
    for key in &keys {
        assert_eq!(dead_letter(&*context.a, &loose_letter(key)).await, Settled::Done);
    }
    context.harness.discard(&keys[1]).await;
    context.harness.discard(&keys[3]).await;
    for key in &keys[..2] {
        context.harness.backdate(Row::Parked(key), HOUR + MINUTE).await;
    }
    for key in &keys[2..] {
        context.harness.backdate(Row::Parked(key), HOUR - MINUTE).await;
    }
    sweep(context, &SweepPolicy { retention: MINUTE, ..keep_all() }).await;
    for key in &keys {
        assert_eq!(context.parked_rows(key).await, 1, "retention is not for these");
    }
    let report = sweep(context, &SweepPolicy { dead_retention: HOUR, ..keep_all() }).await;
    assert!(report.dead >= 2);
    for (key, rows) in keys.iter().zip([0, 0, 1, 1]) {
        assert_eq!(context.parked_rows(key).await, rows, "{key:?}");
    }
}

pub async fn idle_claims_are_deleted(context: &Context) {
    let held = context.held_by_a("held").await;
    let expired = context.held_by_a("expired").await;
    let idle = context.held_by_a("idle").await;
    let released = context.held_by_a("released").await;
    assert_eq!(release(&*context.a, &released, false).await, Settled::Done);
    context.harness.backdate(Row::Claim(&expired.key), MINUTE).await;
    context.harness.backdate(Row::Claim(&idle.key), HOUR + MINUTE).await;
    let policy = SweepPolicy { idle_claims: HOUR, ..keep_all() };
    let report = sweep(context, &policy).await;
    assert!(report.claims >= 1);
    assert_eq!(context.claim_rows(&idle.key).await, 0, "expired an hour ago");
    assert_eq!(context.claim_rows(&expired.key).await, 1, "expired, but its attempts count");
    assert_eq!(context.claim_rows(&released.key).await, 1, "released, but its attempts count");
    assert_eq!(complete(&*context.a, &held).await, Settled::Done, "held all the while");
    context.harness.backdate(Row::Claim(&released.key), HOUR + MINUTE).await;
    sweep(context, &policy).await;
    assert_eq!(context.claim_rows(&released.key).await, 0);
}

pub async fn small_batches_delete_everything_old(context: &Context) {
    let mut messages = Vec::new();
    let letters = key("letters");
    for index in 0..7 {
        let key = context.processed(&format!("{index}")).await;
        context.harness.backdate(Row::Message(&key), HOUR * 2).await;
        messages.push(key);
        let fingerprint = Some(Fingerprint::of(&[index]));
        let letter = DeadLetter { fingerprint, ..loose_letter(&letters) };
        assert_eq!(dead_letter(&*context.a, &letter).await, Settled::Done);
    }
    context.harness.backdate(Row::Parked(&letters), HOUR * 2).await;
    let policy = SweepPolicy { retention: HOUR, dead_retention: HOUR, idle_claims: HOUR, batch: 3 };
    let report = sweep(context, &policy).await;
    assert!(report.messages >= 7 && report.dead >= 7, "{report:?}");
    for key in &messages {
        assert_eq!(context.message_rows(key).await, 0);
    }
    assert_eq!(context.parked_rows(&letters).await, 0);
    let report = sweep(context, &policy).await;
    assert_eq!((report.messages, report.dead), (0, 0), "nothing old is left");
}

pub async fn one_instance_at_a_time(context: &Context) {
    let old = context.processed("old").await;
    context.harness.backdate(Row::Message(&old), HOUR * 2).await;
    let policy = SweepPolicy { retention: HOUR, ..keep_all() };
    let guard = context.harness.hold_sweep_lock().await;
    let report = context.b.sweep(&policy).await.expect("a sweep is answered");
    assert_eq!(report, SweepReport::default(), "another instance is at it");
    assert_eq!(context.message_rows(&old).await, 1);
    guard.rollback().await;
    let report = context.b.sweep(&policy).await.expect("a sweep is answered");
    assert!(report.ran && report.messages >= 1, "{report:?}");
    assert_eq!(context.message_rows(&old).await, 0);
}
