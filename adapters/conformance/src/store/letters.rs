//! Parked rows for operators: lists, replay, discarding, and who did it.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use inboxd_contract::{
    Actor, AuditAction, AuditEntry, ClaimAnswer, CopyReason, DeadLetter, DeadReason, Envelope,
    Fingerprint, InboxKey, ParkReason, ParkedFilter, ParkedRow, ParkedSeq, ParkedState, Replay,
    Replayed, Settled, SweepPolicy,
};
use uuid::Uuid;

use super::context::{
    Context, at, claim_one, dead_letter, fingerprint_of, key, key_of, loose_letter, new_claim,
    only, patiently, release, request,
};
use super::copies::{HOUR, SLACK, Subscription, claim_anew, finish, keys_of, put_off, reschedule};
use super::harness::Row;

fn actor() -> Actor {
    Actor::new("anna\n at the \u{2615} desk")
}

fn replay_of(seq: ParkedSeq) -> Replay {
    Replay { seq, delay: Duration::ZERO, allow_processed: false, fresh: Uuid::new_v4() }
}

async fn replay(context: &Context, replay: &Replay) -> Replayed {
    let batch = std::slice::from_ref(replay);
    patiently(async || only(context.a.replay(batch, &actor()).await)).await
}

async fn discard(context: &Context, seq: ParkedSeq) -> bool {
    patiently(async || only(context.a.discard(&[seq], &actor()).await)).await
}

/// A row of the audit about this parked row; at most one.
async fn audited(context: &Context, seq: ParkedSeq) -> Option<AuditEntry> {
    let entries = context.b.audit(None, 1_000).await.expect("the audit is answered");
    let mut of_row = entries.into_iter().filter(|entry| entry.seq == seq);
    let entry = of_row.next();
    assert_eq!(of_row.next(), None, "one entry");
    entry
}

fn keys(rows: &[ParkedRow]) -> Vec<InboxKey> {
    rows.iter().map(|row| row.key.clone()).collect()
}

pub async fn list_tells_everything_but_bodies(context: &Context) {
    let orders = Subscription::new(context);
    let due = orders.due_in("lane", 1).await.remove(0);
    let dead = orders.dead("dead").await;
    let rows = orders.rows().await;
    assert_eq!(keys(&rows), [due.clone(), dead.clone()], "in the order of seq");
    for row in &rows {
        assert_eq!((&row.copy.envelope.body, row.body_bytes), (&None, Some(4)));
        assert_eq!(row.copy.subscription, *orders.name);
        assert!(row.parked_ago < SLACK && row.first_ago < SLACK, "{row:?}");
        let whole = context.a.parked_row(row.seq).await.expect("answered").expect("it is there");
        assert_eq!(whole.copy.envelope.body, Some(Bytes::from_static(b"body")));
        let envelope = Envelope { body: None, ..whole.copy.envelope.clone() };
        assert_eq!(envelope, row.copy.envelope);
        assert_eq!((&whole.key, whole.state, whole.seq), (&row.key, row.state, row.seq));
    }
    assert_eq!(rows[0].lane_id, Some(orders.lane("lane")));
    assert_eq!(rows[0].copy.lane.as_deref(), Some(&b"lane"[..]));
    assert_eq!((rows[0].state, rows[0].due_in), (ParkedState::Due, Some(Duration::ZERO)));
    assert_eq!((rows[1].state, rows[1].due_in, rows[1].lane_id), (ParkedState::Dead, None, None));
    assert_eq!(rows[1].copy.reason, DeadReason::Refused);
    assert_eq!(rows[0].copy.reason, ParkReason::Stored);
    context.harness.discard(&dead).await;
    let row = orders.row(&dead).await;
    assert_eq!((row.state, row.body_bytes), (ParkedState::Discarded, None));
    assert_eq!(context.a.parked_row(ParkedSeq(i64::MAX)).await.expect("answered"), None);
}

pub async fn each_field_of_the_filter_counts(context: &Context) {
    let orders = Subscription::new(context);
    let other = Subscription::new(context);
    let consumer = format!("c{}", Uuid::new_v4().simple());
    let id = Uuid::new_v4().to_string();
    let (due, dead, gone) =
        (key_of(&consumer, &id), key_of(&consumer, &format!("{id}x")), key("gone"));
    orders.parked(&[orders.arrival(&due)]).await;
    let letter = DeadLetter {
        subscription: Arc::clone(&orders.name),
        reason: DeadReason::AttemptsExhausted,
        last_error: Some(String::from("50% of _this_ \\ went w'r\u{f6}ng")),
        ..loose_letter(&dead)
    };
    assert_eq!(dead_letter(&*context.a, &letter).await, Settled::Done);
    let letter = DeadLetter {
        subscription: Arc::clone(&orders.name),
        last_error: Some(String::from("50 of this went wrong")),
        ..loose_letter(&gone)
    };
    assert_eq!(dead_letter(&*context.a, &letter).await, Settled::Done);
    context.harness.discard(&gone).await;
    context.harness.backdate(Row::Parked(&dead), HOUR * 2).await;
    other.due("of another subscription").await;

    let all = orders.filter();
    let by = |change: &dyn Fn(&mut ParkedFilter)| {
        let mut filter = all.clone();
        change(&mut filter);
        filter
    };
    let error = |text: &str| {
        let text = text.to_owned();
        by(&|filter| filter.error_contains = Some(text.clone()))
    };
    let states = |states: &[ParkedState]| by(&|filter| filter.states = states.to_vec());
    let (due, dead, gone) = (&due, &dead, &gone);
    let expected: Vec<(ParkedFilter, Vec<&InboxKey>)> = vec![
        (all.clone(), vec![due, dead, gone]),
        (by(&|filter| filter.consumer_id = Some(due.consumer_id.clone())), vec![due, dead]),
        (states(&[ParkedState::Due]), vec![due]),
        (states(&[ParkedState::Dead]), vec![dead]),
        (states(&[ParkedState::Dead, ParkedState::Discarded]), vec![dead, gone]),
        (by(&|filter| filter.message_id = Some(dead.message_id.clone())), vec![dead]),
        (by(&|filter| filter.reason = Some(DeadReason::AttemptsExhausted.into())), vec![dead]),
        (by(&|filter| filter.reason = Some(ParkReason::Stored.into())), vec![due]),
        (by(&|filter| filter.reason = Some(DeadReason::TooOld.into())), vec![]),
        (error("50"), vec![dead, gone]),
        (error("50%"), vec![dead]),
        (error("_this_"), vec![dead]),
        (error("\\"), vec![dead]),
        (error("w'r\u{f6}ng"), vec![dead]),
        (error("W'R\u{d6}NG"), vec![]),
        (error("wro"), vec![gone]),
        (by(&|filter| filter.parked_at_least = Some(HOUR)), vec![dead]),
        (by(&|filter| filter.parked_at_most = Some(HOUR)), vec![due, gone]),
        (
            by(&|filter| {
                filter.parked_at_least = Some(HOUR);
                filter.parked_at_most = Some(HOUR * 3);
                filter.states = vec![ParkedState::Dead];
            }),
            vec![dead],
        ),
    ];
    for (filter, expected) in expected {
        let rows = orders.listed(&filter).await;
        assert_eq!(keys(&rows).iter().collect::<Vec<_>>(), expected, "{filter:?}");
        let count = context.a.count_parked(&filter, 1_000).await.expect("counted");
        assert_eq!(count, expected.len() as u64, "{filter:?}");
    }
    // Without a subscription, too.
    let filter = ParkedFilter { consumer_id: Some(due.consumer_id.clone()), ..Default::default() };
    assert_eq!(keys(&orders.listed(&filter).await), [due.clone(), dead.clone()]);
}

pub async fn pages_follow_each_other_by_seq(context: &Context) {
    let orders = Subscription::new(context);
    let mut all = Vec::new();
    for index in 0..5 {
        all.push(orders.due(&format!("{index}")).await);
    }
    let (mut after, mut came) = (None, Vec::new());
    loop {
        let page = context.b.list_parked(&orders.filter(), after, 2).await.expect("a page");
        assert!(page.len() <= 2);
        let Some(last) = page.last() else { break };
        after = Some(last.seq);
        came.extend(keys(&page));
    }
    assert_eq!(came, all);
    for (most, expected) in [(0, 0), (3, 3), (5, 5), (100, 5)] {
        let count = context.a.count_parked(&orders.filter(), most).await.expect("counted");
        assert_eq!(count, expected, "at most {most}");
    }
}

pub async fn replayed_letter_is_due_with_attempts_anew(context: &Context) {
    let orders = Subscription::new(context);
    let taken = orders.taken_by_a("m").await;
    let key = taken.claim.key.clone();
    let letter = DeadLetter { attempts: 20, ..orders.letter(&taken.claim) };
    assert_eq!(dead_letter(&*context.a, &letter).await, Settled::Done);
    context.harness.backdate(Row::Parked(&key), HOUR * 2).await;
    context.harness.backdate_first(&key, HOUR * 2).await;
    // A claim that nobody holds any more, with attempts of its own.
    let idle = new_claim(&key);
    let ask = inboxd_contract::ClaimRequest { position: at(8).position(), ..request(&idle) };
    let answer = claim_one(&*context.a, &context.owner_a, ask).await.expect("answered");
    assert!(answer.is_held(), "{answer:?}");
    assert_eq!(release(&*context.a, &idle, false).await, Settled::Done);
    assert_eq!(context.claim_rows(&key).await, 1);

    let answer = replay(context, &replay_of(taken.seq)).await;
    assert_eq!(answer, Replayed::Due(key.message_id.clone()));
    assert_eq!(context.claim_rows(&key).await, 0, "its attempts went with it");
    let row = orders.row(&key).await;
    assert_eq!((row.seq, row.state, row.copy.attempts), (taken.seq, ParkedState::Due, 0));
    assert_eq!(row.copy.reason, ParkReason::Replayed);
    assert!(row.parked_ago < SLACK, "since it is due: {:?}", row.parked_ago);
    let again = only(orders.take_b(&orders.asking(1)).await.rows);
    assert_eq!((again.seq, again.attempts), (taken.seq, 1));
    assert!(again.first_ago < SLACK, "its age starts anew: {:?}", again.first_ago);
    assert_eq!(again.copy.envelope.body, Some(Bytes::from_static(b"body")));
    assert_eq!(finish(&*context.b, &again).await, Settled::Done);

    let entry = audited(context, taken.seq).await.expect("who did it is recorded");
    assert_eq!((entry.actor.as_str(), entry.action), (actor().as_str(), AuditAction::Replay));
    assert_eq!((&entry.key, &entry.replayed_as), (&key, &None));
    assert!(entry.ago < SLACK, "{:?}", entry.ago);
}

/// Somebody forwards a copy of it just now: that claim is left alone, and the row waits for it.
pub async fn replay_leaves_a_claim_that_is_held(context: &Context) {
    let orders = Subscription::new(context);
    let key = orders.dead("m").await;
    let seq = orders.row(&key).await.seq;
    let claim = new_claim(&key);
    let ask = inboxd_contract::ClaimRequest { position: at(8).position(), ..request(&claim) };
    let answer = claim_one(&*context.a, &context.owner_a, ask).await.expect("answered");
    assert!(answer.is_held(), "{answer:?}");
    assert_eq!(replay(context, &replay_of(seq)).await, Replayed::Due(key.message_id.clone()));
    assert!(orders.keys_for_b().await.is_empty(), "its key is claimed");
    assert_eq!(release(&*context.a, &claim, true).await, Settled::Done);
    assert_eq!(orders.keys_for_b().await, [key]);
}

pub async fn replay_waits_for_its_delay(context: &Context) {
    let orders = Subscription::new(context);
    let key = orders.dead("m").await;
    let seq = orders.row(&key).await.seq;
    let later = Replay { delay: HOUR, ..replay_of(seq) };
    assert_eq!(replay(context, &later).await, Replayed::Due(key.message_id.clone()));
    assert!(orders.keys_for_b().await.is_empty());
    let due_in = orders.row(&key).await.due_in.expect("it is due some time");
    assert!(due_in <= HOUR && due_in > HOUR - SLACK, "{due_in:?}");
    let answer = claim_anew(context, &key, None).await;
    assert!(matches!(answer, ClaimAnswer::Parked { .. }), "as any due row: {answer:?}");
}

pub async fn replay_keeps_the_place_in_the_lane(context: &Context) {
    let orders = Subscription::new(context);
    let all = orders.due_in("lane", 3).await;
    let head = only(orders.take_a(&orders.asking(1)).await.rows);
    let letter = DeadLetter { lane_id: head.lane_id, ..orders.letter(&head.claim) };
    assert_eq!(dead_letter(&*context.a, &letter).await, Settled::Done);
    assert!(orders.keys_for_b().await.is_empty(), "it blocks its lane");
    assert!(matches!(replay(context, &replay_of(head.seq)).await, Replayed::Due(_)));
    assert_eq!(keys_of(&orders.take_b(&orders.asking_runs(4, 4)).await), all);
}

/// A dead letter with another content than what was processed, or set aside for that.
async fn conflict(orders: &Subscription<'_>, key: &InboxKey, reason: DeadReason) -> ParkedRow {
    let letter = DeadLetter {
        subscription: Arc::clone(&orders.name),
        fingerprint: Some(Fingerprint::of(b"other")),
        reason,
        ..loose_letter(key)
    };
    assert_eq!(dead_letter(&*orders.context.a, &letter).await, Settled::Done);
    orders.row(key).await
}

pub async fn conflicting_copy_is_replayed_under_an_id_of_its_own(context: &Context) {
    let orders = Subscription::new(context);
    let processed = context.processed("processed").await;
    let fresh = key("fresh");
    for (key, reason) in [
        (&processed, DeadReason::IdConflict),
        (&context.processed("processed too").await, DeadReason::Refused),
        (&fresh, DeadReason::IdConflict),
    ] {
        let row = conflict(&orders, key, reason).await;
        let own = key.message_id.of_conflict(&Fingerprint::of(b"other"));
        assert_eq!(replay(context, &replay_of(row.seq)).await, Replayed::Due(own.clone()));
        let entry = audited(context, row.seq).await.expect("recorded");
        assert_eq!((&entry.key, &entry.replayed_as), (key, &Some(own.clone())));
        assert_eq!(entry.action, AuditAction::Replay);
        assert_eq!(context.parked_rows(key).await, 0, "it has left the id of the other");
        let taken = only(orders.take_b(&orders.asking(1)).await.rows);
        assert_eq!((taken.seq, &taken.claim.key.message_id), (row.seq, &own));
        assert_eq!((&taken.processed, taken.attempts), (&None, 1));
        // Refused again, it is replayed under the same id.
        let letter = DeadLetter {
            fingerprint: Some(Fingerprint::of(b"other")),
            reason: DeadReason::IdConflict,
            ..orders.letter(&taken.claim)
        };
        assert_eq!(dead_letter(&*context.b, &letter).await, Settled::Done);
        assert_eq!(replay(context, &replay_of(row.seq)).await, Replayed::Due(own));
        let taken = only(orders.take_b(&orders.asking(1)).await.rows);
        assert_eq!(finish(&*context.b, &taken).await, Settled::Done);
    }
    let look = context.look(&processed).await;
    assert!(look.processed.is_some(), "no replay takes from what was processed");
}

pub async fn processed_message_is_replayed_only_if_allowed(context: &Context) {
    let orders = Subscription::new(context);
    let key = orders.dead("m").await;
    let seq = orders.row(&key).await.seq;
    let guard = context.harness.hold_uncommitted_message(&key).await;
    guard.commit().await;
    let ask = replay_of(seq);
    assert_eq!(replay(context, &ask).await, Replayed::Processed);
    assert_eq!(orders.row(&key).await.state, ParkedState::Dead, "as it was");
    assert_eq!(audited(context, seq).await, None, "nothing was done");
    let ask = Replay { allow_processed: true, ..ask };
    let own = key.message_id.of_override(ask.fresh);
    assert_eq!(replay(context, &ask).await, Replayed::Due(own.clone()));
    let entry = audited(context, seq).await.expect("recorded");
    assert_eq!(entry.action, AuditAction::ReplayProcessed);
    assert_eq!((&entry.key, &entry.replayed_as), (&key, &Some(own.clone())));
    let taken = only(orders.take_b(&orders.asking(1)).await.rows);
    assert_eq!((&taken.claim.key.message_id, &taken.processed), (&own, &None));
    assert_eq!(context.message_rows(&key).await, 1);

    // Allowed for a message that is not processed, it changes nothing.
    let key = orders.dead("fresh").await;
    let seq = orders.row(&key).await.seq;
    let ask = Replay { allow_processed: true, ..replay_of(seq) };
    assert_eq!(replay(context, &ask).await, Replayed::Due(key.message_id.clone()));
    let entry = audited(context, seq).await.expect("recorded");
    assert_eq!(entry.action, AuditAction::Replay);
}

/// A body that was not kept cannot be forwarded; a tombstone has none, and can.
pub async fn row_without_a_body_is_not_replayed_but_a_tombstone_is(context: &Context) {
    let orders = Subscription::new(context);
    let (large, tombstone, empty) = (key("large"), key("tombstone"), key("empty"));
    for (key, body, body_kept) in [
        (&large, Some(Bytes::from_static(b"large")), false),
        (&tombstone, None, true),
        (&empty, Some(Bytes::new()), true),
    ] {
        let letter = DeadLetter {
            subscription: Arc::clone(&orders.name),
            envelope: Arc::new(Envelope::new(at(7), body)),
            body_kept,
            ..loose_letter(key)
        };
        assert_eq!(dead_letter(&*context.a, &letter).await, Settled::Done);
    }
    let rows = orders.rows().await;
    let batch: Vec<_> = rows.iter().map(|row| replay_of(row.seq)).collect();
    let answers = super::context::all_ok(context.a.replay(&batch, &actor()).await);
    let due = |key: &InboxKey| Replayed::Due(key.message_id.clone());
    assert_eq!(answers, [Replayed::NoBody, due(&tombstone), due(&empty)], "each on its own");
    let mut taken = orders.take_b(&orders.asking(3)).await.rows;
    taken.sort_by_key(|taken| taken.seq);
    let bodies: Vec<_> = taken.iter().map(|taken| taken.copy.envelope.body.clone()).collect();
    assert_eq!(bodies, [None, Some(Bytes::new())]);
    assert_eq!(orders.row(&large).await.state, ParkedState::Dead);
    // A later letter of the same content that keeps its body can be replayed.
    let letter = DeadLetter { subscription: Arc::clone(&orders.name), ..loose_letter(&large) };
    assert_eq!(dead_letter(&*context.a, &letter).await, Settled::Done);
    assert_eq!(replay(context, &replay_of(rows[0].seq)).await, due(&large));
}

pub async fn what_is_not_dead_is_not_replayed(context: &Context) {
    let orders = Subscription::new(context);
    let due = orders.due("due").await;
    let seq = orders.row(&due).await.seq;
    assert_eq!(replay(context, &replay_of(seq)).await, Replayed::NotDead, "it is due");
    assert_eq!(audited(context, seq).await, None);
    let key = orders.dead("discarded").await;
    let seq = orders.row(&key).await.seq;
    assert!(discard(context, seq).await);
    assert_eq!(replay(context, &replay_of(seq)).await, Replayed::NotDead, "it is discarded");
    assert_eq!(replay(context, &replay_of(ParkedSeq(i64::MAX))).await, Replayed::NotDead);
    // Twice, also within one batch.
    let key = orders.dead("twice").await;
    let seq = orders.row(&key).await.seq;
    let twice = [replay_of(seq), replay_of(seq)];
    let answers = super::context::all_ok(context.a.replay(&twice, &actor()).await);
    assert_eq!(answers, [Replayed::Due(key.message_id.clone()), Replayed::NotDead]);
    assert!(context.a.replay(&[], &actor()).await.is_empty());
}

pub async fn replay_does_not_meet_a_copy_that_is_there(context: &Context) {
    let orders = Subscription::new(context);
    let key = key("m");
    let row = conflict(&orders, &key, DeadReason::IdConflict).await;
    let other = Fingerprint::of(b"other");
    let own = InboxKey { message_id: key.message_id.of_conflict(&other), ..key.clone() };
    let mut arrival = orders.arrival(&own);
    arrival.copy.fingerprint = Some(other);
    orders.parked(&[arrival]).await;
    assert_eq!(replay(context, &replay_of(row.seq)).await, Replayed::Exists);
    assert_eq!(orders.row(&key).await.state, ParkedState::Dead, "as it was");
    assert_eq!(audited(context, row.seq).await, None);
    // Once that copy is processed, this content is.
    let taken = only(orders.take_b(&orders.asking(1)).await.rows);
    assert_eq!(finish(&*context.b, &taken).await, Settled::Done);
    assert_eq!(replay(context, &replay_of(row.seq)).await, Replayed::Processed);
}

pub async fn discarded_letter_loses_its_body_and_stays(context: &Context) {
    let orders = Subscription::new(context);
    let (key, other) = (orders.dead("m").await, orders.dead("other").await);
    let due = orders.due("due").await;
    let seqs: Vec<_> = orders.rows().await.into_iter().map(|row| row.seq).collect();
    context.harness.backdate(Row::Parked(&key), HOUR).await;
    let answers = super::context::all_ok(
        context.a.discard(&[seqs[0], seqs[2], ParkedSeq(i64::MAX)], &actor()).await,
    );
    assert_eq!(answers, [true, false, false]);
    let row = orders.row(&key).await;
    assert_eq!((row.state, row.body_bytes, row.seq), (ParkedState::Discarded, None, seqs[0]));
    assert!(row.parked_ago < SLACK, "since it came into this state: {:?}", row.parked_ago);
    let whole = context.a.parked_row(row.seq).await.expect("answered").expect("it stays");
    assert_eq!(whole.copy.envelope.body, None);
    assert_eq!(orders.row(&other).await.state, ParkedState::Dead);
    assert_eq!(orders.row(&due).await.state, ParkedState::Due);
    let look = context.look(&key).await;
    assert!(look.dead.len() == 1 && look.dead[0].discarded, "it still answers: {look:?}");
    let entry = audited(context, row.seq).await.expect("recorded");
    assert_eq!((entry.actor.as_str(), entry.action), (actor().as_str(), AuditAction::Discard));
    assert_eq!((&entry.key, &entry.replayed_as), (&key, &None));
    assert!(!discard(context, row.seq).await, "once");
    assert!(audited(context, row.seq).await.is_some());
    assert_eq!(audited(context, seqs[2]).await, None);
    assert!(context.a.discard(&[], &actor()).await.is_empty());
}

pub async fn audit_comes_newest_first_in_pages(context: &Context) {
    let orders = Subscription::new(context);
    let mut seqs = Vec::new();
    for index in 0..4 {
        let key = orders.dead(&format!("{index}")).await;
        let seq = orders.row(&key).await.seq;
        assert!(discard(context, seq).await);
        seqs.push(seq);
    }
    seqs.reverse();
    let first = context.b.audit(None, 3).await.expect("the audit is answered");
    let second = context.b.audit(Some(first[2].id), 1).await.expect("the audit is answered");
    let came: Vec<_> = first.iter().chain(&second).map(|entry| entry.seq).collect();
    assert_eq!(came, seqs);
    let ids: Vec<_> = first.iter().chain(&second).map(|entry| entry.id).collect();
    assert!(ids.is_sorted_by(|newer, older| newer > older), "{ids:?}");
}

/// Due rows are never swept, however old; the audit is kept as long as dead letters.
pub async fn due_rows_are_not_swept_and_the_audit_is(context: &Context) {
    let orders = Subscription::new(context);
    let due = orders.due("due").await;
    context.harness.backdate(Row::Parked(&due), HOUR * 24 * 300).await;
    context.harness.backdate_first(&due, HOUR * 24 * 300).await;
    let mut seqs = Vec::new();
    for name in ["old", "young"] {
        let key = orders.dead(name).await;
        let seq = orders.row(&key).await.seq;
        assert!(discard(context, seq).await);
        seqs.push(seq);
    }
    context.harness.backdate_audit(seqs[0], HOUR * 24 * 40).await;
    context.harness.backdate_audit(seqs[1], HOUR * 24 * 20).await;
    let policy = SweepPolicy {
        retention: HOUR * 24 * 365,
        dead_retention: HOUR * 24 * 30,
        idle_claims: HOUR * 24 * 365,
        batch: 2,
    };
    assert!(context.a.sweep(&policy).await.expect("swept").ran);
    assert_eq!(context.harness.rows_in_state(&due, ParkedState::Due).await, 1);
    assert_eq!(audited(context, seqs[0]).await, None, "older than dead letters are kept");
    assert!(audited(context, seqs[1]).await.is_some());
}

/// Cases before this one have left rows, so that it counts what is added.
pub async fn due_rows_are_counted(context: &Context) {
    let orders = Subscription::new(context);
    let before = context.a.stats().await.expect("counts are answered");
    let key = orders.due("1").await;
    orders.due_in("lane", 2).await;
    let dead = orders.dead("dead").await;
    let age = HOUR * 24 * 600;
    context.harness.backdate_first(&key, age).await;
    context.harness.backdate_first(&dead, age * 2).await;
    let after = context.a.stats().await.expect("counts are answered");
    let added = |after: Option<u64>, before: Option<u64>| Some(after? - before?);
    assert_eq!(added(after.due, before.due), Some(3));
    assert_eq!(added(after.dead, before.dead), Some(1));
    let oldest = after.oldest_due.expect("there is one");
    assert!(oldest >= age && oldest < age + SLACK, "the one received first: {oldest:?}");
}

pub async fn due_row_is_explained(context: &Context) {
    let orders = Subscription::new(context);
    let taken = orders.taken_by_a("m").await;
    let key = &taken.claim.key;
    let known = context.b.explain(key).await.expect("an explanation is answered");
    assert_eq!((known.copies.len(), known.copies_total), (1, 1));
    let told = &known.copies[0];
    assert_eq!((told.state, told.due_in), (ParkedState::Due, Some(Duration::ZERO)));
    assert_eq!(
        (told.body_bytes, told.copy.reason),
        (Some(4), CopyReason::from(ParkReason::Stored))
    );
    assert_eq!(known.claim.expect("a worker has it").owner, context.owner_a);
    assert_eq!(reschedule(&*context.a, &put_off(&taken)).await, Settled::Done);
    let known = context.b.explain(key).await.expect("an explanation is answered");
    let due_in = known.copies[0].due_in.expect("it is due some time");
    assert!(due_in <= HOUR && due_in > HOUR - SLACK, "{due_in:?}");
    assert_eq!((known.claim, known.copies[0].copy.attempts), (None, 1));
    let dead = orders.dead("dead").await;
    let known = context.b.explain(&dead).await.expect("an explanation is answered");
    assert_eq!(known.copies[0].due_in, None);
    assert_eq!(known.copies[0].copy.fingerprint, Some(fingerprint_of(&dead)));
}
