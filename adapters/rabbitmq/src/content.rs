//! From an AMQP message to an envelope.
//!
//! Every header is rendered, whatever its type; nothing a publisher writes is believed, `x-death`
//! included. Names are the publisher's bytes, repeated ones stay repeated, in order. The values:
//!
//! | AMQP type | value |
//! |---|---|
//! | long string, byte array | the bytes themselves |
//! | void | null |
//! | boolean | `true`, `false` |
//! | integers | decimal |
//! | float, double | the shortest decimal that reads back the same; `NaN`, `inf`, `-inf` |
//! | decimal | its digits with the point in place: `123.45` |
//! | timestamp | seconds since 1970 in decimal |
//! | array, table | JSON; within it integers, floats and timestamps are numbers (`NaN` and infinities text), decimals text, byte strings text, or `{"base64":"…"}` where they are not UTF-8; what is nested deeper than 32 is `null` |
//!
//! Properties that are malformed (the broker does not look) are given as far as they can be read,
//! and whole, as bytes, in a header `x-malformed-properties`.

use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use inboxd_contract::{Envelope, Header, Origin};

use crate::properties::{Properties, Value};
use crate::wire::Raw;

const MALFORMED: &str = "x-malformed-properties";
const DELIVERY_COUNT: &[u8] = b"x-delivery-count";

/// The envelope of a delivery from `queue`.
pub(crate) fn envelope(queue: &Arc<str>, raw: Raw, redelivered: bool, body: Vec<u8>) -> Envelope {
    let (properties, malformed) = Properties::read(raw.properties.clone());
    let origin = Origin::RabbitMq {
        queue: Arc::clone(queue),
        exchange: String::from_utf8_lossy(&raw.exchange).into(),
        routing_key: String::from_utf8_lossy(&raw.routing_key).into(),
        redelivered,
        delivery_count: delivery_count(&properties),
    };
    // The body is never null: AMQP has no tombstones.
    let mut envelope = Envelope::new(origin, Some(Bytes::from(body)));
    envelope.property_id = properties.message_id;
    envelope.producer = properties.app_id;
    envelope.message_type = properties.kind;
    envelope.correlation_id = properties.correlation_id;
    envelope.content_type = properties.content_type;
    envelope.content_encoding = properties.content_encoding;
    let headers = properties.headers.into_iter();
    envelope.headers = headers.map(|(name, value)| Header { name, value: render(value) }).collect();
    // As many as there are: what is counted for the budget is what is held.
    envelope.headers.shrink_to_fit();
    if malformed.is_some() {
        envelope.headers.push(Header::new(MALFORMED, raw.properties));
    }
    envelope.fill_from_headers();
    envelope
}

/// How often a quorum queue says it was delivered before.
fn delivery_count(properties: &Properties) -> Option<u64> {
    let mut headers = properties.headers.iter();
    match headers.find(|(name, _)| name.as_ref() == DELIVERY_COUNT)? {
        (_, Value::Integer(count)) => u64::try_from(*count).ok(),
        _ => None,
    }
}

fn render(value: Value) -> Option<Bytes> {
    let text = match value {
        Value::Void | Value::TooDeep => return None,
        Value::Bytes(bytes) => return Some(bytes),
        Value::Bool(value) => value.to_string(),
        Value::Integer(value) => value.to_string(),
        Value::Float(value) => value.to_string(),
        Value::Double(value) => value.to_string(),
        Value::Decimal { scale, value } => decimal(scale, value),
        Value::Timestamp(seconds) => seconds.to_string(),
        nested @ (Value::Array(_) | Value::Table(_)) => {
            let mut json = String::new();
            write_json(&nested, &mut json);
            json
        }
    };
    Some(Bytes::from(text))
}

/// `123.45` for 12345 with a scale of 2.
fn decimal(scale: u8, value: u32) -> String {
    let scale = usize::from(scale);
    if scale == 0 {
        return value.to_string();
    }
    let digits = format!("{value:0>width$}", width = scale + 1);
    let (whole, fraction) = digits.split_at(digits.len() - scale);
    format!("{whole}.{fraction}")
}

fn write_json(value: &Value, json: &mut String) {
    match value {
        Value::Void | Value::TooDeep => json.push_str("null"),
        Value::Bool(value) => json.push_str(if *value { "true" } else { "false" }),
        Value::Integer(value) => json.push_str(&value.to_string()),
        Value::Timestamp(seconds) => json.push_str(&seconds.to_string()),
        // The text of a float is that of its own width: 0.1 is not 0.10000000149011612.
        Value::Float(value) => write_float(value.is_finite(), value.to_string(), json),
        Value::Double(value) => write_float(value.is_finite(), value.to_string(), json),
        Value::Decimal { scale, value } => write_text(&decimal(*scale, *value), json),
        Value::Bytes(bytes) => write_bytes(bytes, json),
        Value::Array(values) => {
            json.push('[');
            for (index, value) in values.iter().enumerate() {
                if index > 0 {
                    json.push(',');
                }
                write_json(value, json);
            }
            json.push(']');
        }
        Value::Table(entries) => {
            json.push('{');
            for (index, (name, value)) in entries.iter().enumerate() {
                if index > 0 {
                    json.push(',');
                }
                // A name must be text here; one that is none is shown as far as it is.
                write_text(&String::from_utf8_lossy(name), json);
                json.push(':');
                write_json(value, json);
            }
            json.push('}');
        }
    }
}

fn write_float(finite: bool, text: String, json: &mut String) {
    match finite {
        true => json.push_str(&text),
        false => write_text(&text, json),
    }
}

fn write_bytes(bytes: &Bytes, json: &mut String) {
    match std::str::from_utf8(bytes) {
        Ok(text) => write_text(text, json),
        Err(_) => {
            json.push_str("{\"base64\":\"");
            STANDARD.encode_string(bytes, json);
            json.push_str("\"}");
        }
    }
}

fn write_text(text: &str, json: &mut String) {
    json.push_str(&serde_json::Value::from(text).to_string());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(value: Value) -> String {
        String::from_utf8(render(value).expect("not null").to_vec()).expect("text")
    }

    #[test]
    fn every_type_has_its_text() {
        assert_eq!(render(Value::Void), None);
        assert_eq!(text(Value::Bool(true)), "true");
        assert_eq!(text(Value::Integer(i64::MIN)), i64::MIN.to_string());
        assert_eq!(text(Value::Float(0.1)), "0.1");
        assert_eq!(text(Value::Double(-1.5)), "-1.5");
        assert_eq!(text(Value::Double(f64::NAN)), "NaN");
        assert_eq!(text(Value::Timestamp(1_700_000_000)), "1700000000");
        let raw = Bytes::from_static(&[0xff, 0x00, b'x']);
        assert_eq!(render(Value::Bytes(raw.clone())), Some(raw));
        for (scale, value, expected) in
            [(0, 5, "5"), (2, 12_345, "123.45"), (3, 5, "0.005"), (1, 0, "0.0")]
        {
            assert_eq!(text(Value::Decimal { scale, value }), expected);
        }
    }

    #[test]
    fn tables_and_arrays_are_json() {
        let entry = |name: &'static str, value| (Bytes::from_static(name.as_bytes()), value);
        let table = Value::Table(vec![
            entry("n", Value::Integer(1)),
            entry("f", Value::Float(0.1)),
            entry("nan", Value::Double(f64::NAN)),
            entry("raw", Value::Bytes(Bytes::from_static(&[0xff]))),
            entry("q\"", Value::Void),
            entry("deep", Value::TooDeep),
        ]);
        let array = Value::Array(vec![table, Value::Bytes(Bytes::from_static(b"t\n"))]);
        let json = text(array);
        assert_eq!(
            json,
            r#"[{"n":1,"f":0.1,"nan":"NaN","raw":{"base64":"/w=="},"q\"":null,"deep":null},"t\n"]"#
        );
        assert!(serde_json::from_str::<serde_json::Value>(&json).is_ok());
    }

    /// The budget counts what headers cost in memory, not what they are on the wire.
    #[test]
    fn what_many_small_headers_hold_is_counted() {
        let mut table = Vec::new();
        for _ in 0..10_000 {
            table.extend([&[1][..], b"n", b"S", &1_u32.to_be_bytes(), b"v"].concat());
        }
        let flags = (1_u16 << 13).to_be_bytes();
        let length = u32::try_from(table.len()).expect("small").to_be_bytes();
        let properties = Bytes::from([&flags[..], &length, &table].concat());
        let (wire, raw) = (properties.len(), Raw { properties, ..Raw::default() });
        let envelope = envelope(&"q".into(), raw, false, Vec::new());
        assert_eq!(envelope.headers.len(), 10_000);
        let held = envelope.headers.capacity() * size_of::<Header>();
        assert!(envelope.bytes() >= held, "{held} bytes are held, {} counted", envelope.bytes());
        assert!(wire < held / 4, "kept as on the wire until then: {wire} bytes");
    }

    #[test]
    fn malformed_properties_are_shown_and_the_body_is_kept() {
        let raw = Raw { properties: Bytes::from_static(&[0x20, 0, 0, 0]), ..Raw::default() };
        let envelope = envelope(&"q".into(), raw, true, b"body".to_vec());
        assert_eq!(envelope.header(MALFORMED).map(|raw| raw.len()), Some(4));
        assert_eq!(envelope.body.as_deref(), Some(&b"body"[..]));
    }
}
