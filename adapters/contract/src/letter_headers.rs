//! What a copy of a dead letter says of itself, the same on every broker.
//!
//! Purpose: the headers whose names begin with `inbox-`, and the rule by which a publisher's own
//! headers of such names make way.
//!
//! Invariants: every name that begins with `inbox-` in a copy is inboxd's. The rule is one to one:
//! from a name in a copy the publisher's follows, so nothing of a message is lost by it.

use std::borrow::Cow;
use std::time::{Duration, SystemTime};

use crate::{LetterCopy, Origin, encode_percent};

/// The most bytes of an error's text in a copy.
pub const LETTER_ERROR_BYTES_MAX: usize = 1_024;

/// Before a publisher's own header whose name is taken.
const MOVED: &[u8] = b"original-";
/// What the names of inboxd's own headers begin with.
const OURS: &[u8] = b"inbox-";

impl LetterCopy<'_> {
    /// The headers that the copy has besides the message's own, in this order; all values are
    /// text. Names of messages, subscribers, subscriptions, topics, queues and streams are
    /// percent-encoded like in the HTTP contract; times are RFC 3339 in UTC, `now` that of this copy.
    pub fn stamps(&self, now: SystemTime) -> Vec<(&'static str, String)> {
        let encoded = |text: &str| encode_percent(text.as_bytes());
        let reason: &str = self.reason.into();
        let mut stamps = vec![("inbox-dead-reason", reason.to_owned())];
        if let Some(status) = self.last_status {
            stamps.push(("inbox-last-status", status.to_string()));
        }
        if let Some(error) = self.last_error {
            stamps.push(("inbox-last-error", shortened(error).to_owned()));
        }
        let first = now.checked_sub(self.first_ago).unwrap_or(SystemTime::UNIX_EPOCH);
        stamps.extend([
            ("inbox-attempts", self.attempts.to_string()),
            ("inbox-first-received", rfc_3339(first)),
            ("inbox-dead-lettered", rfc_3339(now)),
            ("inbox-origin", origin(&self.envelope.origin)),
            ("inbox-subscription", encoded(self.subscription)),
            ("inbox-consumer-id", encoded(self.key.consumer_id.as_str())),
            ("inbox-message-id", encoded(self.key.message_id.as_str())),
        ]);
        if let Origin::RabbitMq { exchange, routing_key, .. } = &self.envelope.origin {
            stamps.push(("inbox-origin-exchange", encoded(exchange)));
            stamps.push(("inbox-origin-routing-key", encoded(routing_key)));
        }
        stamps
    }
}

/// The name under which a publisher's header goes into a copy: its own, or with `original-` before
/// it where it, after any number of these, begins with `inbox-` or is taken by the broker.
/// Letters' case does not count.
///
/// The other way round: a name that begins with `original-`, and is so taken without it, was the
/// publisher's without it.
pub fn kept_name(name: &[u8], taken_by_broker: impl Fn(&[u8]) -> bool) -> Cow<'_, [u8]> {
    let mut bare = name;
    while let Some(rest) = stripped(bare, MOVED) {
        bare = rest;
    }
    match stripped(bare, OURS).is_some() || taken_by_broker(bare) {
        true => Cow::Owned([MOVED, name].concat()),
        false => Cow::Borrowed(name),
    }
}

fn stripped<'a>(name: &'a [u8], prefix: &[u8]) -> Option<&'a [u8]> {
    let (head, rest) = name.split_at_checked(prefix.len())?;
    head.eq_ignore_ascii_case(prefix).then_some(rest)
}

fn origin(origin: &Origin) -> String {
    let encoded = |text: &str| encode_percent(text.as_bytes());
    match origin {
        Origin::Kafka { topic, partition, offset, .. } => {
            format!("kafka:{}/{partition}/{offset}", encoded(topic))
        }
        Origin::RabbitMq { queue, .. } => format!("rabbitmq:{}", encoded(queue)),
        Origin::Memory { stream, position } => format!("memory:{}/{position}", encoded(stream)),
    }
}

fn shortened(text: &str) -> &str {
    match text.len() <= LETTER_ERROR_BYTES_MAX {
        true => text,
        false => &text[..text.floor_char_boundary(LETTER_ERROR_BYTES_MAX)],
    }
}

/// To the millisecond. Times that the format does not have are the nearest that it has.
fn rfc_3339(time: SystemTime) -> String {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let time = SystemTime::UNIX_EPOCH + since.min(Duration::from_secs(253_402_300_799));
    humantime::format_rfc3339_millis(time).to_string()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;
    use crate::{ConsumerId, DeadReason, Envelope, InboxKey, MessageId};

    fn text(name: &str, taken: &[&str]) -> String {
        let taken =
            |bare: &[u8]| taken.iter().any(|name| bare.eq_ignore_ascii_case(name.as_bytes()));
        String::from_utf8(kept_name(name.as_bytes(), taken).into_owned()).expect("text")
    }

    #[test]
    fn names_that_are_taken_make_way() {
        for (name, kept) in [
            ("order-id", "order-id"),
            ("inbox", "inbox"),
            ("inbox-", "original-inbox-"),
            ("inbox-dead-reason", "original-inbox-dead-reason"),
            ("INBOX-Attempts", "original-INBOX-Attempts"),
            ("original-inbox-attempts", "original-original-inbox-attempts"),
            ("Original-Original-Inbox-x", "original-Original-Original-Inbox-x"),
            ("original-", "original-"),
            ("original-name", "original-name"),
            ("x-death", "original-x-death"),
            ("original-X-Death", "original-original-X-Death"),
        ] {
            assert_eq!(text(name, &["x-death"]), kept);
        }
    }

    proptest! {
        /// No two names become one, and none that is not ours looks like ours.
        #[test]
        fn the_rule_is_one_to_one(
            names in proptest::collection::hash_set("((o|O)riginal-|inbox-|cc|x){0,4}", 1..40),
        ) {
            let kept: HashSet<_> = names.iter().map(|name| text(name, &["cc"])).collect();
            prop_assert_eq!(kept.len(), names.len());
            prop_assert!(kept.iter().all(|name| !name.to_lowercase().starts_with("inbox-")));
            prop_assert!(!kept.contains("cc"));
        }
    }

    #[test]
    fn the_stamps_are_bounded_text() {
        let key = InboxKey {
            consumer_id: ConsumerId::new("shop/eu").expect("an id"),
            message_id: MessageId::from_stored("a b"),
        };
        let queue = "q/1".into();
        let origin = Origin::RabbitMq {
            queue,
            exchange: "".into(),
            routing_key: "a.b c".into(),
            redelivered: false,
            delivery_count: None,
        };
        let (envelope, error) = (Envelope::new(origin, None), "é".repeat(1_000));
        let copy = LetterCopy {
            envelope: &envelope,
            key: &key,
            subscription: "orders",
            reason: DeadReason::AttemptsExhausted,
            attempts: 7,
            last_status: Some(500),
            last_error: Some(&error),
            first_ago: Duration::from_millis(1_500),
        };
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
        let expected = [
            ("inbox-dead-reason", "attempts_exhausted"),
            ("inbox-last-status", "500"),
            ("inbox-last-error", &"é".repeat(512)),
            ("inbox-attempts", "7"),
            ("inbox-first-received", "2023-11-14T22:13:18.500Z"),
            ("inbox-dead-lettered", "2023-11-14T22:13:20.000Z"),
            ("inbox-origin", "rabbitmq:q%2F1"),
            ("inbox-subscription", "orders"),
            ("inbox-consumer-id", "shop%2Feu"),
            ("inbox-message-id", "a%20b"),
            ("inbox-origin-exchange", ""),
            ("inbox-origin-routing-key", "a.b%20c"),
        ];
        let stamps = copy.stamps(now);
        let stamps: Vec<_> = stamps.iter().map(|(name, value)| (*name, value.as_str())).collect();
        assert_eq!(stamps, expected);
        let long_ago = LetterCopy { first_ago: Duration::MAX, ..copy }.stamps(now);
        assert!(long_ago.contains(&("inbox-first-received", "1970-01-01T00:00:00.000Z".into())));
    }
}
