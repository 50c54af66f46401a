//! From a dead letter to an AMQP message.
//!
//! | of the envelope | goes into |
//! |---|---|
//! | id, type, correlation id, producer, content type and encoding | the properties message-id, type, correlation-id, app-id, content-type, content-encoding, where they fit (255 bytes) |
//! | a header's value that is UTF-8 | a long string |
//! | a header's value that is not | a byte array |
//! | a null value | void |
//! | Kafka's key | the header `inbox-origin-key`, percent-encoded |
//! | a tombstone | an empty body and the header `inbox-tombstone: true` |
//!
//! What AMQP had as a number, a table or a date is text in the envelope, and goes out as that text.
//! Names, repeated ones and their order stay; those that the broker itself acts on (`x-death` and
//! its kin, `CC`, `BCC`, `x-delay`) get `original-` before them, like names that begin with `inbox-`.
//! The delivery mode is persistent. Priority, reply-to, expiration, timestamp and user-id are not
//! in an envelope: an expiration would delete the copy, and the broker refuses another's user-id.

use std::time::SystemTime;

use bytes::{BufMut, Bytes, BytesMut};
use inboxd_contract::{LetterCopy, encode_percent, kept_name};

use crate::config::SHORT_STRING_BYTES_MAX;
use crate::outgoing::COPY_ID;
use crate::properties::{
    APP_ID, CONTENT_ENCODING, CONTENT_TYPE, CORRELATION_ID, DELIVERY_MODE, HEADERS, MESSAGE_ID,
    TYPE,
};

const PERSISTENT: u8 = 2;

/// A header's name is longer than AMQP allows; of so many bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NameTooLong(pub(crate) usize);

/// The copy's properties as they are on the wire: flags, then values.
///
/// # Errors
/// AMQP cannot carry a header's name.
pub(crate) fn properties(
    letter: &LetterCopy<'_>,
    copy_id: &str,
    now: SystemTime,
) -> Result<Bytes, NameTooLong> {
    let envelope = letter.envelope;
    let table = headers(letter, copy_id, now)?;
    let (mut flags, mut values) = (HEADERS | DELIVERY_MODE, BytesMut::new());
    let mut short = |values: &mut BytesMut, flag, value: &Option<Bytes>| {
        if let Some(value) = value
            && let Ok(length) = u8::try_from(value.len())
        {
            flags |= flag;
            values.put_u8(length);
            values.extend_from_slice(value);
        }
    };
    short(&mut values, CONTENT_TYPE, &envelope.content_type);
    short(&mut values, CONTENT_ENCODING, &envelope.content_encoding);
    put_long(&mut values, &table);
    values.put_u8(PERSISTENT);
    short(&mut values, CORRELATION_ID, &envelope.correlation_id);
    short(&mut values, MESSAGE_ID, &envelope.property_id);
    short(&mut values, TYPE, &envelope.message_type);
    short(&mut values, APP_ID, &envelope.producer);
    let mut properties = BytesMut::with_capacity(values.len() + 2);
    properties.put_u16(flags);
    properties.unsplit(values);
    Ok(properties.freeze())
}

/// The routing key of a copy that has none of its own.
pub(crate) fn routing_key(key: &str) -> &str {
    // A key that was no UTF-8 is longer here than it was.
    &key[..key.floor_char_boundary(SHORT_STRING_BYTES_MAX)]
}

fn headers(
    letter: &LetterCopy<'_>,
    copy_id: &str,
    now: SystemTime,
) -> Result<BytesMut, NameTooLong> {
    let mut table = BytesMut::new();
    for header in &letter.envelope.headers {
        put(&mut table, &kept_name(&header.name, broker_acts_on), header.value.as_deref())?;
    }
    for (name, value) in letter.stamps(now) {
        put(&mut table, name.as_bytes(), Some(value.as_bytes()))?;
    }
    if let Some(key) = &letter.envelope.key {
        put(&mut table, b"inbox-origin-key", Some(encode_percent(key).as_bytes()))?;
    }
    if letter.envelope.body.is_none() {
        put(&mut table, b"inbox-tombstone", Some(b"true"))?;
    }
    put(&mut table, COPY_ID.as_bytes(), Some(copy_id.as_bytes()))?;
    Ok(table)
}

/// Whether RabbitMQ reads a header of this name from what is published.
fn broker_acts_on(name: &[u8]) -> bool {
    const NAMES: &[&str] = &[
        "cc",
        "bcc",
        "x-death",
        "x-delivery-count",
        "x-acquired-count",
        "x-delay",
        "x-received-from",
    ];
    const BEGINNINGS: &[&str] = &["x-first-death-", "x-last-death-"];
    let begins = |beginning: &str| {
        name.get(..beginning.len())
            .is_some_and(|head| head.eq_ignore_ascii_case(beginning.as_bytes()))
    };
    NAMES.iter().any(|taken| name.eq_ignore_ascii_case(taken.as_bytes()))
        || BEGINNINGS.iter().any(|beginning| begins(beginning))
}

fn put(table: &mut BytesMut, name: &[u8], value: Option<&[u8]>) -> Result<(), NameTooLong> {
    table.put_u8(u8::try_from(name.len()).map_err(|_| NameTooLong(name.len()))?);
    table.extend_from_slice(name);
    match value {
        None => table.put_u8(b'V'),
        Some(value) => {
            table.put_u8(if std::str::from_utf8(value).is_ok() { b'S' } else { b'x' });
            put_long(table, value);
        }
    }
    Ok(())
}

fn put_long(into: &mut BytesMut, value: &[u8]) {
    // What does not fit into a frame, which is less, is refused before it is sent.
    into.put_u32(u32::try_from(value.len()).unwrap_or(u32::MAX));
    into.extend_from_slice(value);
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use inboxd_contract::{ConsumerId, DeadReason, Envelope, Header, InboxKey, MessageId, Origin};

    use super::*;
    use crate::properties::{Properties, Value};

    fn written(envelope: &Envelope) -> Result<Properties, NameTooLong> {
        let key = InboxKey {
            consumer_id: ConsumerId::new("shop").expect("an id"),
            message_id: MessageId::from_stored("m"),
        };
        let letter = LetterCopy {
            envelope,
            key: &key,
            subscription: "orders",
            reason: DeadReason::Refused,
            attempts: 1,
            last_status: Some(422),
            last_error: None,
            first_ago: Duration::ZERO,
        };
        let bytes = properties(&letter, "copy", SystemTime::UNIX_EPOCH)?;
        let (read, malformed) = Properties::read(bytes);
        assert_eq!(malformed, None);
        Ok(read)
    }

    fn memory() -> Envelope {
        Envelope::new(Origin::Memory { stream: "s".into(), position: 1 }, Some(Bytes::new()))
    }

    #[test]
    fn everything_is_written_as_it_is_read() {
        let mut envelope = memory();
        let bytes = |text: &'static [u8]| Some(Bytes::from_static(text));
        envelope.property_id = bytes(b"id\xff");
        envelope.producer = bytes(b"shop");
        envelope.message_type = bytes(b"placed");
        envelope.correlation_id = bytes(b"c");
        envelope.content_type = bytes(b"text/plain");
        envelope.content_encoding = Some(Bytes::from(vec![b'x'; 256]));
        envelope.headers = vec![
            Header::new("z", "1"),
            Header { name: Bytes::from_static(b"\xff"), value: None },
            Header::new("z", &b"\xfe\x00"[..]),
            Header::new("x-death", "[]"),
            Header::new("CC", "other"),
            Header::new("Inbox-Dead-Reason", "forged"),
        ];
        let read = written(&envelope).expect("it fits");
        assert_eq!(read.message_id, envelope.property_id);
        assert_eq!(read.app_id, envelope.producer);
        assert_eq!(read.kind, envelope.message_type);
        assert_eq!(read.correlation_id, envelope.correlation_id);
        assert_eq!(read.content_type, envelope.content_type);
        assert_eq!(read.content_encoding, None, "more than a short string holds");
        let value = |text: &'static [u8]| Value::Bytes(Bytes::from_static(text));
        let expected: [(&[u8], Value); 7] = [
            (b"z", value(b"1")),
            (b"\xff", Value::Void),
            (b"z", value(b"\xfe\x00")),
            (b"original-x-death", value(b"[]")),
            (b"original-CC", value(b"other")),
            (b"original-Inbox-Dead-Reason", value(b"forged")),
            (b"inbox-dead-reason", value(b"refused")),
        ];
        let shown = read.headers.iter().map(|(name, value)| (name.as_ref(), value.clone()));
        assert_eq!(shown.take(expected.len()).collect::<Vec<_>>(), expected);
        let last = read.headers.last().expect("the copy's id");
        assert_eq!((last.0.as_ref(), &last.1), (COPY_ID.as_bytes(), &value(b"copy")));
    }

    #[test]
    fn what_kafka_has_and_amqp_lacks_is_in_headers() {
        let mut envelope = memory();
        (envelope.body, envelope.key) = (None, Some(Bytes::from_static(b"k/\xff")));
        let read = written(&envelope).expect("it fits");
        let value = |name: &str| {
            let found = read.headers.iter().find(|(key, _)| key.as_ref() == name.as_bytes());
            found.map(|(_, value)| value.clone())
        };
        let text = |text: &'static str| Some(Value::Bytes(Bytes::from_static(text.as_bytes())));
        assert_eq!(value("inbox-origin-key"), text("k%2F%FF"));
        assert_eq!(value("inbox-tombstone"), text("true"));
    }

    #[test]
    fn a_name_that_is_too_long_is_said() {
        let mut envelope = memory();
        envelope.headers = vec![Header::new(format!("inbox-{}", "x".repeat(245)), "v")];
        assert_eq!(written(&envelope), Err(NameTooLong(260)));
    }
}
