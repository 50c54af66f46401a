//! What arrives.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::future::{LocalBoxFuture, join_all};
use inboxd_contract::{
    ConsumerId, DeadLetterTarget, DeadReason, Envelope, Header, InboxKey, LetterCopy, MessageId,
    Origin, PublishError,
};

use super::{Abilities, LettersHarness, LettersPlace, SeenCopy};
use crate::eventually;

/// How long a case waits for what must happen.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);
const MANY: usize = 300;

pub(super) struct Case {
    pub(super) name: &'static str,
    pub(super) applies: fn(&Abilities) -> bool,
    pub(super) run: fn(Arc<dyn LettersHarness>) -> LocalBoxFuture<'static, ()>,
}

macro_rules! case {
    ($name:ident) => {
        case!($name, |_| true)
    };
    ($name:ident, $applies:expr) => {
        Case { name: stringify!($name), applies: $applies, run: |harness| Box::pin($name(harness)) }
    };
}
pub(super) use case;

pub(super) const CASES: &[Case] = &[
    case!(body_and_headers_arrive_to_the_byte),
    case!(the_key_arrives_to_the_byte, |abilities| abilities.keys),
    case!(an_empty_body_arrives_empty),
    case!(a_tombstone_arrives_as_one),
    case!(the_stamps_say_what_became_of_it),
    case!(what_is_not_known_has_no_stamp),
    case!(a_long_error_is_cut),
    case!(forged_headers_make_way_and_are_kept),
    case!(headers_that_the_broker_acts_on_make_way, |abilities| !abilities.taken_names.is_empty()),
    case!(the_trace_context_arrives_as_it_came),
    case!(a_large_body_arrives),
    case!(many_headers_arrive),
    case!(many_at_once_all_arrive),
    case!(the_same_letter_twice_is_there_twice),
    case!(it_says_where_it_publishes),
];

/// A dead letter with an owner.
#[derive(Debug, Clone)]
pub(super) struct Letter {
    pub(super) envelope: Envelope,
    pub(super) key: InboxKey,
    pub(super) last_status: Option<u16>,
    pub(super) last_error: Option<String>,
}

impl Letter {
    /// A letter whose id and body are `id`.
    pub(super) fn new(id: &str) -> Self {
        let origin = Origin::Memory { stream: "orders/eu".into(), position: 7 };
        let body = Bytes::copy_from_slice(id.as_bytes());
        Self {
            envelope: Envelope::new(origin, Some(body)),
            key: InboxKey {
                consumer_id: ConsumerId::new("shop/eu").expect("an id"),
                message_id: MessageId::from_stored(id),
            },
            last_status: None,
            last_error: None,
        }
    }

    pub(super) fn with_headers(mut self, headers: &[(&[u8], Option<&[u8]>)]) -> Self {
        let headers = headers.iter().map(|(name, value)| Header {
            name: Bytes::copy_from_slice(name),
            value: value.map(Bytes::copy_from_slice),
        });
        self.envelope.headers = headers.collect();
        self
    }

    pub(super) async fn publish(&self, target: &dyn DeadLetterTarget) -> Result<(), PublishError> {
        let copy = LetterCopy {
            envelope: &self.envelope,
            key: &self.key,
            subscription: "orders of the shop",
            reason: DeadReason::AttemptsExhausted,
            attempts: 12,
            last_status: self.last_status,
            last_error: self.last_error.as_deref(),
            first_ago: Duration::from_secs(60),
        };
        target.publish(copy).await
    }
}

/// So many copies, once they are there.
pub(super) async fn copies(place: &dyn LettersPlace, count: usize) -> Vec<SeenCopy> {
    eventually(PATIENCE, async || {
        let copies = place.copies().await;
        if copies.len() >= count { Ok(copies) } else { Err(format!("{} of {count}", copies.len())) }
    })
    .await
}

/// Publishes one letter to a new place and gives its only copy.
async fn copied(harness: &dyn LettersHarness, letter: &Letter) -> SeenCopy {
    let place = harness.fresh().await;
    letter.publish(&*place.target()).await.expect("published");
    let mut copies = copies(&*place, 1).await;
    assert_eq!(copies.len(), 1, "once");
    copies.remove(0)
}

fn pairs(headers: &[(&[u8], Option<&[u8]>)]) -> Vec<(Bytes, Option<Bytes>)> {
    let pairs = headers.iter();
    pairs
        .map(|(name, value)| (Bytes::copy_from_slice(name), value.map(Bytes::copy_from_slice)))
        .collect()
}

async fn body_and_headers_arrive_to_the_byte(harness: Arc<dyn LettersHarness>) {
    let headers: &[(&[u8], Option<&[u8]>)] = &[
        (b"z", Some(b"1")),
        (b"a", Some(b"")),
        (b"z", None),
        (b"z", Some(b"3")),
        (&[0xff, 0xfe, b'n'], Some(&[0x00, 0xff, 0x80])),
        (b"A", Some("größer".as_bytes())),
    ];
    let mut letter = Letter::new("m").with_headers(headers);
    let body: Vec<u8> = (0..=255).collect();
    letter.envelope.body = Some(body.clone().into());
    let copy = copied(&*harness, &letter).await;
    assert_eq!(copy.body.as_deref(), Some(&body[..]));
    assert_eq!(copy.own_headers(), pairs(headers));
}

async fn the_key_arrives_to_the_byte(harness: Arc<dyn LettersHarness>) {
    for key in [None, Some(&b""[..]), Some(&[0xff, 0x00, b'k'][..])] {
        let mut letter = Letter::new("m");
        letter.envelope.key = key.map(Bytes::copy_from_slice);
        let copy = copied(&*harness, &letter).await;
        assert_eq!(copy.key.as_deref(), key);
    }
}

async fn an_empty_body_arrives_empty(harness: Arc<dyn LettersHarness>) {
    let mut letter = Letter::new("m");
    letter.envelope.body = Some(Bytes::new());
    let copy = copied(&*harness, &letter).await;
    assert_eq!(copy.body.as_deref(), Some(&b""[..]));
    assert!(!copy.stamps().contains_key("inbox-tombstone"));
}

async fn a_tombstone_arrives_as_one(harness: Arc<dyn LettersHarness>) {
    let mut letter = Letter::new("m");
    letter.envelope.body = None;
    let copy = copied(&*harness, &letter).await;
    if harness.abilities().tombstones {
        assert_eq!(copy.body, None);
    } else {
        assert_eq!(copy.body.as_deref(), Some(&b""[..]));
        assert_eq!(copy.stamps()["inbox-tombstone"], "true");
    }
}

async fn the_stamps_say_what_became_of_it(harness: Arc<dyn LettersHarness>) {
    let mut letter = Letter::new("order 1");
    letter.last_status = Some(503);
    letter.last_error = Some("the application answered 503: é".into());
    let stamps = copied(&*harness, &letter).await.stamps();
    for (name, value) in [
        ("inbox-dead-reason", "attempts_exhausted"),
        ("inbox-last-status", "503"),
        ("inbox-last-error", "the application answered 503: é"),
        ("inbox-attempts", "12"),
        ("inbox-origin", "memory:orders%2Feu/7"),
        ("inbox-subscription", "orders%20of%20the%20shop"),
        ("inbox-consumer-id", "shop%2Feu"),
        ("inbox-message-id", "order%201"),
    ] {
        assert_eq!(stamps.get(name).map(String::as_str), Some(value), "{name}: {stamps:?}");
    }
    let (first, dead) = (&stamps["inbox-first-received"], &stamps["inbox-dead-lettered"]);
    for time in [first, dead] {
        assert!(time.len() == 24 && time.ends_with('Z') && time.starts_with("20"), "{time}");
    }
    assert!(first < dead, "{first} is a minute before {dead}");
}

async fn what_is_not_known_has_no_stamp(harness: Arc<dyn LettersHarness>) {
    let stamps = copied(&*harness, &Letter::new("m")).await.stamps();
    assert!(!stamps.contains_key("inbox-last-status"), "{stamps:?}");
    assert!(!stamps.contains_key("inbox-last-error"), "{stamps:?}");
}

async fn a_long_error_is_cut(harness: Arc<dyn LettersHarness>) {
    let mut letter = Letter::new("m");
    letter.last_error = Some("é".repeat(50_000));
    let stamps = copied(&*harness, &letter).await.stamps();
    assert_eq!(stamps["inbox-last-error"], "é".repeat(512));
}

async fn forged_headers_make_way_and_are_kept(harness: Arc<dyn LettersHarness>) {
    let forged: &[(&[u8], Option<&[u8]>)] = &[
        (b"inbox-dead-reason", Some(b"refused")),
        (b"Inbox-Attempts", None),
        (b"inbox-copy-id", Some(b"forged")),
        (b"inbox-tombstone", Some(b"true")),
        (b"original-inbox-attempts", Some(b"1")),
        (b"original", Some(b"kept")),
        (b"inbox", Some(b"kept")),
    ];
    let copy = copied(&*harness, &Letter::new("m").with_headers(forged)).await;
    let kept: &[(&[u8], Option<&[u8]>)] = &[
        (b"original-inbox-dead-reason", Some(b"refused")),
        (b"original-Inbox-Attempts", None),
        (b"original-inbox-copy-id", Some(b"forged")),
        (b"original-inbox-tombstone", Some(b"true")),
        (b"original-original-inbox-attempts", Some(b"1")),
        (b"original", Some(b"kept")),
        (b"inbox", Some(b"kept")),
    ];
    assert_eq!(copy.own_headers(), pairs(kept));
    let stamps = copy.stamps();
    assert_eq!(stamps["inbox-dead-reason"], "attempts_exhausted");
    assert_eq!(stamps["inbox-attempts"], "12");
    assert!(!stamps.contains_key("inbox-tombstone"));
}

async fn headers_that_the_broker_acts_on_make_way(harness: Arc<dyn LettersHarness>) {
    let mut letter = Letter::new("m");
    let taken = harness.abilities().taken_names;
    letter.envelope.headers = taken.iter().map(|name| Header::new(*name, "[\"x\"]")).collect();
    let copy = copied(&*harness, &letter).await;
    let kept = taken.iter().map(|name| Bytes::from(format!("original-{name}")));
    let names: Vec<_> = copy.own_headers().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, kept.collect::<Vec<_>>());
}

async fn the_trace_context_arrives_as_it_came(harness: Arc<dyn LettersHarness>) {
    let headers: &[(&[u8], Option<&[u8]>)] = &[
        (b"traceparent", Some(b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")),
        (b"tracestate", Some(b"shop=1")),
        (b"content-type", Some(b"application/json")),
    ];
    let mut letter = Letter::new("m").with_headers(headers);
    letter.envelope.fill_from_headers();
    let copy = copied(&*harness, &letter).await;
    assert_eq!(copy.own_headers(), pairs(headers), "as often as they came");
}

async fn a_large_body_arrives(harness: Arc<dyn LettersHarness>) {
    let bytes = harness.abilities().large_bytes;
    let body: Vec<u8> = (0..bytes).map(|at| (at % 251) as u8).collect();
    let mut letter = Letter::new("m");
    letter.envelope.body = Some(body.clone().into());
    let copy = copied(&*harness, &letter).await;
    assert!(copy.body.as_deref() == Some(&body[..]), "{bytes} bytes, the same");
}

async fn many_headers_arrive(harness: Arc<dyn LettersHarness>) {
    let mut letter = Letter::new("m");
    let header = |n| Header::new(format!("h{}", n % 7), format!("value {n}"));
    letter.envelope.headers = (0..1_000).map(header).collect();
    let copy = copied(&*harness, &letter).await;
    let sent = letter.envelope.headers.into_iter();
    let sent: Vec<_> = sent.map(|header| (header.name, header.value)).collect();
    assert!(copy.own_headers() == sent, "all, in order");
}

async fn many_at_once_all_arrive(harness: Arc<dyn LettersHarness>) {
    let place = harness.fresh().await;
    let target = place.target();
    let letters: Vec<_> = (0..MANY).map(|n| Letter::new(&format!("m{n}"))).collect();
    let published = join_all(letters.iter().map(|letter| letter.publish(&*target))).await;
    published.into_iter().for_each(|answer| answer.expect("published"));
    let mut came = BTreeMap::new();
    for copy in copies(&*place, MANY).await {
        let body = copy.body.clone().expect("a body");
        assert_eq!(copy.stamps()["inbox-message-id"].as_bytes(), &body[..], "each its own headers");
        *came.entry(body).or_insert(0) += 1;
    }
    let ids: BTreeSet<_> = came.keys().cloned().collect();
    assert_eq!(ids.len(), MANY);
    assert!(came.values().all(|times| *times == 1), "once each");
}

/// Deduplicating is not the target's: who publishes again meant it.
async fn the_same_letter_twice_is_there_twice(harness: Arc<dyn LettersHarness>) {
    let place = harness.fresh().await;
    let (target, letter) = (place.target(), Letter::new("m"));
    for _ in 0..2 {
        letter.publish(&*target).await.expect("published");
    }
    assert_eq!(copies(&*place, 2).await.len(), 2);
}

async fn it_says_where_it_publishes(harness: Arc<dyn LettersHarness>) {
    let place = harness.fresh().await;
    let said = place.target().describe();
    assert!(!said.is_empty() && !said.contains('\n'), "one line: {said:?}");
}
