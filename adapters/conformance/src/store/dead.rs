//! Dead letters: kept to the byte, one per content, and what they answer to further copies.

use std::sync::Arc;

use bytes::Bytes;
use inboxd_contract::{
    Claim, ClaimAnswer, ClaimRequest, Completion, DeadLetter, DeadReason, Envelope, Fingerprint,
    Header, InboxKey, Origin, ParkedCopy, Settled,
};

use super::context::{
    Context, all_ok, at, claim_one, completion, dead_letter, from_queue, key, letter, loose_letter,
    new_claim, only,
};

fn print(text: &str) -> Fingerprint {
    Fingerprint::of(text.as_bytes())
}

fn letter_with(claim: &Claim, origin: Origin, fingerprint: Option<Fingerprint>) -> DeadLetter {
    let body = Some(Bytes::from_static(b"body"));
    let envelope = Arc::new(Envelope::new(origin, body));
    DeadLetter { envelope, fingerprint, ..letter(claim) }
}

/// A request by another token for a copy that came from `origin`.
fn copy(key: &InboxKey, origin: &Origin, fingerprint: Option<Fingerprint>) -> ClaimRequest {
    ClaimRequest { claim: new_claim(key), fingerprint, position: origin.position(), lane_id: None }
}

async fn ask(context: &Context, request: &ClaimRequest) -> ClaimAnswer {
    claim_one(&*context.b, &context.owner_b, request.clone()).await.expect("a claim is answered")
}

/// A message that the application refused: its key.
async fn refused(context: &Context, origin: Origin, print: Option<Fingerprint>) -> InboxKey {
    let claim = context.held_by_a("m").await;
    let letter = letter_with(&claim, origin, print);
    assert_eq!(dead_letter(&*context.a, &letter).await, Settled::Done);
    assert_eq!(context.claim_rows(&claim.key).await, 0, "the claim went in the same commit");
    claim.key
}

async fn parked(context: &Context, key: &InboxKey) -> Vec<ParkedCopy> {
    context.b.parked(key).await.expect("answered")
}

pub fn envelope_of_every_kind() -> Envelope {
    let bytes = |bytes: &'static [u8]| Bytes::from_static(bytes);
    Envelope {
        property_id: Some(bytes(b"id \xff")),
        producer: Some(bytes("bestellungen \u{e9}".as_bytes())),
        message_type: Some(bytes(b"")),
        correlation_id: Some(bytes(b"\0\x01")),
        causation_id: None,
        traceparent: Some(bytes(b"00-x")),
        tracestate: Some(bytes(b"a=b")),
        key: Some(bytes(b"key\0\xfe")),
        content_type: Some(bytes(b"text/plain; charset=latin1")),
        content_encoding: Some(bytes(b"gzip")),
        headers: vec![
            Header::new(bytes(b"repeated"), bytes(b"2")),
            Header::new(bytes(b"repeated"), bytes(b"1")),
            Header { name: bytes(b"null"), value: None },
            Header::new(bytes(b"empty"), bytes(b"")),
            Header::new(bytes(b"\xff name\0"), bytes(b"\x00\x01\x7f\x80\xff\xfe\xc3\x28\r\n")),
            Header::new(bytes(b""), bytes(b"no name")),
        ],
        body: Some(bytes(b"\x00\x01\x7f\x80\xff\xfe\xc3\x28'\\\"")),
        origin: Origin::Kafka {
            topic: "orders".into(),
            partition: 3,
            offset: 9_007_199_254_740_993,
            position_scope: Some("cluster/topic".into()),
        },
    }
}

pub async fn letter_keeps_every_byte(context: &Context) {
    let claim = context.held_by_a("m").await;
    let letter = DeadLetter {
        lane: Some(b"\x00lane\xff".to_vec()),
        envelope: Arc::new(envelope_of_every_kind()),
        fingerprint: Some(print("1")),
        attempts: 17,
        last_status: Some(422),
        last_error: Some(format!("refused: \u{2615} {}", "x".repeat(2_000))),
        ..letter(&claim)
    };
    assert_eq!(dead_letter(&*context.a, &letter).await, Settled::Done);
    let stored = only(parked(context, &claim.key).await);
    let expected = ParkedCopy {
        subscription: String::from("orders"),
        envelope: envelope_of_every_kind(),
        fingerprint: letter.fingerprint.clone(),
        lane: letter.lane.clone(),
        attempts: 17,
        last_status: Some(422),
        last_error: letter.last_error.clone(),
        reason: DeadReason::Refused.into(),
    };
    assert_eq!(stored, expected);
    for reason in [
        DeadReason::IdConflict,
        DeadReason::Unidentified,
        DeadReason::Unrouted,
        DeadReason::BodyTooLarge,
    ] {
        let letter = DeadLetter { reason, ..loose_letter(&key("reason")) };
        assert_eq!(dead_letter(&*context.a, &letter).await, Settled::Done);
        let stored = only(parked(context, &letter.key).await);
        assert_eq!((stored.reason, stored.lane, stored.last_status), (reason.into(), None, None));
    }
}

pub async fn tombstone_is_not_an_empty_body(context: &Context) {
    for body in [None, Some(Bytes::new()), Some(Bytes::from_static(b"\0"))] {
        let key = key("m");
        let envelope = Arc::new(Envelope::new(at(1), body.clone()));
        let letter = DeadLetter { envelope, ..loose_letter(&key) };
        assert_eq!(dead_letter(&*context.a, &letter).await, Settled::Done);
        assert_eq!(only(parked(context, &key).await).envelope.body, body);
    }
}

pub async fn large_body_is_kept_whole(context: &Context) {
    // Every byte value in an order that no text survives, from a generator that repeats itself.
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let body: Bytes = std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()[3]
    })
    .take(1 << 20)
    .collect();
    let claim = context.held_by_a("m").await;
    let envelope = Arc::new(Envelope::new(at(1), Some(body.clone())));
    let letter = DeadLetter { envelope, ..letter(&claim) };
    assert_eq!(dead_letter(&*context.a, &letter).await, Settled::Done);
    let stored = only(parked(context, &claim.key).await).envelope.body;
    assert!(stored == Some(body), "a body of 1 MiB came back changed");
    assert!(context.a.limits().body_bytes_max >= 1 << 20);
}

pub async fn body_that_is_not_kept_is_none(context: &Context) {
    let claim = context.held_by_a("m").await;
    let letter = DeadLetter {
        body_kept: false,
        reason: DeadReason::BodyTooLarge,
        last_error: Some(String::from("4 bytes, sha256 230d83")),
        ..letter(&claim)
    };
    assert_eq!(dead_letter(&*context.a, &letter).await, Settled::Done);
    let stored = only(parked(context, &claim.key).await);
    assert_eq!(stored.envelope.body, None);
    assert_eq!(stored.envelope.origin, letter.envelope.origin);
    assert_eq!(stored.last_error, letter.last_error);
}

pub async fn same_fingerprint_is_updated(context: &Context) {
    let key = key("m");
    let first = DeadLetter { fingerprint: Some(print("1")), ..loose_letter(&key) };
    let second = DeadLetter {
        subscription: "other".into(),
        envelope: Arc::new(Envelope::new(at(8), Some(Bytes::from_static(b"again")))),
        attempts: 5,
        last_status: Some(400),
        last_error: Some(String::from("again")),
        ..first.clone()
    };
    // Within one batch too.
    let answers = all_ok(context.a.dead_letter(&[first, second.clone()]).await);
    assert_eq!(answers, [Settled::Done, Settled::Done]);
    let stored = only(parked(context, &key).await);
    assert_eq!(stored.envelope, *second.envelope);
    assert_eq!((stored.attempts, stored.last_status), (5, Some(400)));
    assert_eq!((stored.subscription, stored.last_error), ("other".into(), second.last_error));
}

pub async fn no_fingerprint_is_one_row_too(context: &Context) {
    let key = key("m");
    for attempts in [1, 2] {
        let letter = DeadLetter { attempts, ..loose_letter(&key) };
        assert_eq!(dead_letter(&*context.a, &letter).await, Settled::Done);
    }
    let stored = only(parked(context, &key).await);
    assert_eq!((stored.attempts, stored.fingerprint), (2, None));
}

pub async fn another_fingerprint_is_another_row(context: &Context) {
    let key = key("m");
    let prints = [Some(print("1")), None, Some(print("2"))];
    for fingerprint in &prints {
        let letter = DeadLetter { fingerprint: fingerprint.clone(), ..loose_letter(&key) };
        assert_eq!(dead_letter(&*context.a, &letter).await, Settled::Done);
    }
    let stored: Vec<_> =
        parked(context, &key).await.into_iter().map(|copy| copy.fingerprint).collect();
    assert_eq!(stored, prints, "oldest first");
}

pub async fn copy_of_the_same_position_is_not_held(context: &Context) {
    let key = refused(context, at(7), Some(print("1"))).await;
    let answer = ask(context, &copy(&key, &at(7), Some(print("1")))).await;
    assert_eq!(answer, ClaimAnswer::Dead { fingerprint: Some(print("1")), held: None });
    assert_eq!(context.claim_rows(&key).await, 0, "a claim that does not hold is removed");
}

pub async fn copy_of_another_position_is_held(context: &Context) {
    let key = refused(context, at(7), Some(print("1"))).await;
    let answer = ask(context, &copy(&key, &at(8), Some(print("1")))).await;
    assert_eq!(answer, ClaimAnswer::Dead { fingerprint: Some(print("1")), held: Some(1) });
    assert_eq!(context.claim_rows(&key).await, 1);
}

pub async fn copy_without_position_is_held(context: &Context) {
    let key = refused(context, from_queue(), None).await;
    let answer = ask(context, &copy(&key, &from_queue(), None)).await;
    assert_eq!(answer, ClaimAnswer::Dead { fingerprint: None, held: Some(1) });
    // A fingerprint conflicts with none; an unknown position is nobody's position.
    let key = refused(context, from_queue(), None).await;
    let answer = ask(context, &copy(&key, &at(7), Some(print("1")))).await;
    assert_eq!(answer, ClaimAnswer::Dead { fingerprint: None, held: Some(1) });
}

pub async fn conflicting_copy_is_not_held(context: &Context) {
    let key = refused(context, at(7), Some(print("1"))).await;
    for origin in [at(7), at(8), from_queue()] {
        let answer = ask(context, &copy(&key, &origin, Some(print("2")))).await;
        assert_eq!(answer, ClaimAnswer::Dead { fingerprint: Some(print("1")), held: None });
        assert_eq!(context.claim_rows(&key).await, 0);
    }
}

async fn accept(context: &Context, request: &ClaimRequest) {
    assert!(ask(context, request).await.is_held());
    let mut accepted = Completion { supersedes_dead: true, ..completion(&request.claim) };
    accepted.record.fingerprint = request.fingerprint.clone();
    assert_eq!(all_ok(context.b.complete(&[accepted]).await), [Settled::Done]);
}

pub async fn accepted_copy_takes_the_letter_away(context: &Context) {
    for (dead, arriving) in [
        (Some(print("1")), Some(print("1"))),
        (None, Some(print("1"))),
        (Some(print("1")), None),
        (None, None),
    ] {
        let key = refused(context, at(7), dead).await;
        accept(context, &copy(&key, &at(8), arriving.clone())).await;
        let look = context.look(&key).await;
        assert_eq!(look.processed, Some(arriving));
        assert!(look.dead.is_empty(), "accepted, the dead letter goes: {look:?}");
        assert_eq!(context.parked_rows(&key).await, 0);
    }
}

pub async fn accepted_copy_leaves_letters_of_other_contents(context: &Context) {
    let key = refused(context, at(7), Some(print("1"))).await;
    let other = DeadLetter {
        fingerprint: Some(print("2")),
        reason: DeadReason::IdConflict,
        ..loose_letter(&key)
    };
    assert_eq!(dead_letter(&*context.a, &other).await, Settled::Done);
    accept(context, &copy(&key, &at(8), Some(print("1")))).await;
    let left = only(parked(context, &key).await);
    assert_eq!(left.fingerprint, Some(print("2")));
    // And a completion that supersedes nothing takes nothing away.
    let key = refused(context, at(7), None).await;
    let request = copy(&key, &at(8), None);
    assert!(ask(context, &request).await.is_held());
    assert_eq!(all_ok(context.b.complete(&[completion(&request.claim)]).await), [Settled::Done]);
    assert_eq!(context.parked_rows(&key).await, 1);
}

pub async fn refused_copy_updates_the_letter(context: &Context) {
    let key = refused(context, at(7), Some(print("1"))).await;
    let request = copy(&key, &at(8), Some(print("1")));
    assert!(ask(context, &request).await.is_held());
    let again = DeadLetter { attempts: 2, ..letter_with(&request.claim, at(8), Some(print("1"))) };
    assert_eq!(dead_letter(&*context.b, &again).await, Settled::Done);
    let stored = only(parked(context, &key).await);
    assert_eq!((stored.attempts, &stored.envelope.origin), (2, &at(8)));
    // From now on it is the newer copy whose redelivery is acked.
    let answer = ask(context, &copy(&key, &at(8), Some(print("1")))).await;
    assert_eq!(answer, ClaimAnswer::Dead { fingerprint: Some(print("1")), held: None });
    let answer = ask(context, &copy(&key, &at(7), Some(print("1")))).await;
    assert_eq!(answer, ClaimAnswer::Dead { fingerprint: Some(print("1")), held: Some(1) });
}

pub async fn letter_without_a_token_needs_no_claim(context: &Context) {
    // An id conflict with a processed message: both rows stand side by side.
    let key = context.processed("m").await;
    let conflict = DeadLetter {
        fingerprint: Some(print("2")),
        reason: DeadReason::IdConflict,
        ..loose_letter(&key)
    };
    assert_eq!(dead_letter(&*context.a, &conflict).await, Settled::Done);
    let look = context.look(&key).await;
    assert!(look.processed.is_some());
    assert_eq!(look.dead.len(), 1);
    let answer = ask(context, &copy(&key, &at(9), Some(print("2")))).await;
    assert!(matches!(answer, ClaimAnswer::Processed { .. }), "the row comes first: {answer:?}");
    // One beside a claim that somebody holds leaves that claim alone.
    let claim = context.held_by_a("held").await;
    let conflict = DeadLetter { fingerprint: Some(print("2")), ..loose_letter(&claim.key) };
    assert_eq!(dead_letter(&*context.a, &conflict).await, Settled::Done);
    assert_eq!(all_ok(context.a.complete(&[completion(&claim)]).await), [Settled::Done]);
}

pub async fn letter_of_a_processed_message_is_not_written(context: &Context) {
    let claim = context.held_by_a("m").await;
    context.harness.hold_uncommitted_message(&claim.key).await.commit().await;
    let answer = dead_letter(&*context.a, &letter(&claim)).await;
    assert_eq!(answer, Settled::AlreadyProcessed { fingerprint: None });
    assert_eq!(context.parked_rows(&claim.key).await, 0);
    assert_eq!(context.claim_rows(&claim.key).await, 0);
}

pub async fn discarded_letter_still_answers(context: &Context) {
    let key = refused(context, at(7), Some(print("1"))).await;
    context.harness.discard(&key).await;
    let look = context.look(&key).await;
    assert_eq!(look.dead.len(), 1);
    assert!(look.dead[0].discarded);
    assert_eq!(only(parked(context, &key).await).envelope.body, None);
    let answer = ask(context, &copy(&key, &at(7), Some(print("1")))).await;
    assert_eq!(answer, ClaimAnswer::Dead { fingerprint: Some(print("1")), held: None });
    let request = copy(&key, &at(8), Some(print("1")));
    let answer = ask(context, &request).await;
    assert_eq!(answer, ClaimAnswer::Dead { fingerprint: Some(print("1")), held: Some(1) });
    // Refused once more, it is a dead letter again, with its body.
    let again = letter_with(&request.claim, at(8), Some(print("1")));
    assert_eq!(dead_letter(&*context.b, &again).await, Settled::Done);
    assert!(!context.look(&key).await.dead[0].discarded);
    assert!(only(parked(context, &key).await).envelope.body.is_some());
}
