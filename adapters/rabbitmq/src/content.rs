//! From an AMQP message to an envelope.
//!
//! Every header is rendered, whatever its type; nothing a publisher writes is parsed or
//! believed, `x-death` included. The text forms:
//!
//! | AMQP type | value |
//! |---|---|
//! | long string, short string, byte array | the bytes themselves |
//! | void | null |
//! | boolean | `true`, `false` |
//! | integers | decimal |
//! | float, double | the shortest decimal that reads back the same; `NaN`, `inf`, `-inf` |
//! | decimal | its digits with the point in place: `123.45` |
//! | timestamp | seconds since 1970 in decimal |
//! | array, table | JSON; within it integers, floats and timestamps are numbers (`NaN` and infinities text), decimals text, byte strings text, or `{"base64": "…"}` where they are not UTF-8; what is nested deeper than 32 is `null` |

use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use inboxd_contract::{Envelope, Header, Origin};
use lapin::message::Delivery;
use lapin::types::{AMQPValue, DecimalValue, FieldTable, ShortString};
use serde_json::{Map, Number, Value, json};

/// Nested tables and arrays are rendered this deep.
const DEPTH_MAX: usize = 32;

/// The envelope of a delivery from `queue`.
pub(crate) fn envelope(queue: &Arc<str>, delivery: Delivery) -> Envelope {
    let properties = &delivery.properties;
    let headers = properties.headers().as_ref();
    let origin = Origin::RabbitMq {
        queue: Arc::clone(queue),
        exchange: delivery.exchange.as_str().into(),
        routing_key: delivery.routing_key.as_str().into(),
        redelivered: delivery.redelivered,
        delivery_count: headers.and_then(delivery_count),
    };
    // The body is never null: AMQP has no tombstones.
    let mut envelope = Envelope::new(origin, None);
    envelope.property_id = short(properties.message_id());
    envelope.producer = short(properties.app_id());
    envelope.message_type = short(properties.kind());
    envelope.correlation_id = short(properties.correlation_id());
    envelope.content_type = short(properties.content_type());
    envelope.content_encoding = short(properties.content_encoding());
    envelope.headers = headers.map(render_headers).unwrap_or_default();
    envelope.body = Some(Bytes::from(delivery.data));
    envelope.fill_from_headers();
    envelope
}

fn short(text: &Option<ShortString>) -> Option<Bytes> {
    text.as_ref().map(|text| Bytes::copy_from_slice(text.as_str().as_bytes()))
}

fn render_headers(table: &FieldTable) -> Vec<Header> {
    let headers = table.inner().iter().map(|(name, value)| Header {
        name: Bytes::copy_from_slice(name.as_str().as_bytes()),
        value: render(value),
    });
    headers.collect()
}

/// How often a quorum queue says it was delivered before.
fn delivery_count(table: &FieldTable) -> Option<u64> {
    let value = table.inner().get("x-delivery-count")?;
    match value {
        AMQPValue::ShortShortInt(n) => u64::try_from(*n).ok(),
        AMQPValue::ShortShortUInt(n) => Some(u64::from(*n)),
        AMQPValue::ShortInt(n) => u64::try_from(*n).ok(),
        AMQPValue::ShortUInt(n) => Some(u64::from(*n)),
        AMQPValue::LongInt(n) => u64::try_from(*n).ok(),
        AMQPValue::LongUInt(n) => Some(u64::from(*n)),
        AMQPValue::LongLongInt(n) => u64::try_from(*n).ok(),
        _ => None,
    }
}

fn render(value: &AMQPValue) -> Option<Bytes> {
    let text = match value {
        AMQPValue::Void => return None,
        AMQPValue::LongString(text) => return Some(Bytes::copy_from_slice(text.as_bytes())),
        AMQPValue::ByteArray(bytes) => return Some(Bytes::copy_from_slice(bytes.as_slice())),
        AMQPValue::ShortString(text) => text.as_str().to_owned(),
        AMQPValue::Boolean(value) => value.to_string(),
        AMQPValue::ShortShortInt(value) => value.to_string(),
        AMQPValue::ShortShortUInt(value) => value.to_string(),
        AMQPValue::ShortInt(value) => value.to_string(),
        AMQPValue::ShortUInt(value) => value.to_string(),
        AMQPValue::LongInt(value) => value.to_string(),
        AMQPValue::LongUInt(value) => value.to_string(),
        AMQPValue::LongLongInt(value) => value.to_string(),
        AMQPValue::Float(value) => value.to_string(),
        AMQPValue::Double(value) => value.to_string(),
        AMQPValue::DecimalValue(value) => decimal(*value),
        AMQPValue::Timestamp(seconds) => seconds.to_string(),
        AMQPValue::FieldArray(_) | AMQPValue::FieldTable(_) => to_json(value, 0).to_string(),
    };
    Some(Bytes::from(text))
}

/// `123.45` for 12345 with a scale of 2.
fn decimal(value: DecimalValue) -> String {
    let scale = usize::from(value.scale);
    if scale == 0 {
        return value.value.to_string();
    }
    let digits = format!("{:0>width$}", value.value, width = scale + 1);
    let (whole, fraction) = digits.split_at(digits.len() - scale);
    format!("{whole}.{fraction}")
}

fn to_json(value: &AMQPValue, depth: usize) -> Value {
    if depth > DEPTH_MAX {
        return Value::Null;
    }
    match value {
        AMQPValue::Void => Value::Null,
        AMQPValue::Boolean(value) => Value::Bool(*value),
        AMQPValue::ShortShortInt(value) => json!(value),
        AMQPValue::ShortShortUInt(value) => json!(value),
        AMQPValue::ShortInt(value) => json!(value),
        AMQPValue::ShortUInt(value) => json!(value),
        AMQPValue::LongInt(value) => json!(value),
        AMQPValue::LongUInt(value) => json!(value),
        AMQPValue::LongLongInt(value) => json!(value),
        AMQPValue::Float(value) => float(f64::from(*value), value.to_string()),
        AMQPValue::Double(value) => float(*value, value.to_string()),
        AMQPValue::DecimalValue(value) => Value::String(decimal(*value)),
        AMQPValue::Timestamp(seconds) => json!(seconds),
        AMQPValue::ShortString(text) => Value::String(text.as_str().to_owned()),
        AMQPValue::LongString(text) => text_or_base64(text.as_bytes()),
        AMQPValue::ByteArray(bytes) => text_or_base64(bytes.as_slice()),
        AMQPValue::FieldArray(array) => {
            Value::Array(array.as_slice().iter().map(|value| to_json(value, depth + 1)).collect())
        }
        AMQPValue::FieldTable(table) => {
            let members = table.inner().iter();
            let members = members.map(|(k, v)| (k.as_str().to_owned(), to_json(v, depth + 1)));
            Value::Object(members.collect::<Map<_, _>>())
        }
    }
}

/// The text of a float is that of its own width: 0.1 as a float is not 0.10000000149011612.
fn float(value: f64, text: String) -> Value {
    let exact = text.parse().ok().filter(|_| value.is_finite()).and_then(Number::from_f64);
    exact.map_or(Value::String(text), Value::Number)
}

fn text_or_base64(bytes: &[u8]) -> Value {
    match std::str::from_utf8(bytes) {
        Ok(text) => Value::String(text.to_owned()),
        Err(_) => json!({ "base64": STANDARD.encode(bytes) }),
    }
}

#[cfg(test)]
mod tests {
    use lapin::types::FieldArray;

    use super::*;

    fn text(value: AMQPValue) -> String {
        String::from_utf8(render(&value).expect("not null").to_vec()).expect("text")
    }

    #[test]
    fn every_type_has_its_text() {
        assert_eq!(render(&AMQPValue::Void), None);
        assert_eq!(text(AMQPValue::Boolean(true)), "true");
        assert_eq!(text(AMQPValue::ShortShortInt(-7)), "-7");
        assert_eq!(text(AMQPValue::ShortShortUInt(7)), "7");
        assert_eq!(text(AMQPValue::ShortInt(-300)), "-300");
        assert_eq!(text(AMQPValue::ShortUInt(300)), "300");
        assert_eq!(text(AMQPValue::LongInt(-70_000)), "-70000");
        assert_eq!(text(AMQPValue::LongUInt(70_000)), "70000");
        assert_eq!(text(AMQPValue::LongLongInt(i64::MIN)), i64::MIN.to_string());
        assert_eq!(text(AMQPValue::Float(0.1)), "0.1");
        assert_eq!(text(AMQPValue::Double(1e300)), 1e300_f64.to_string());
        assert_eq!(text(AMQPValue::Double(f64::NAN)), "NaN");
        assert_eq!(text(AMQPValue::Timestamp(1_700_000_000)), "1700000000");
        assert_eq!(text(AMQPValue::ShortString("s".into())), "s");
        let binary = [0xff, 0x00, b'x'];
        let raw = Some(Bytes::copy_from_slice(&binary));
        assert_eq!(render(&AMQPValue::LongString(binary.to_vec().into())), raw);
        assert_eq!(render(&AMQPValue::ByteArray(binary.to_vec().into())), raw);
        for (scale, value, expected) in
            [(0, 5, "5"), (2, 12_345, "123.45"), (3, 5, "0.005"), (1, 0, "0.0")]
        {
            assert_eq!(text(AMQPValue::DecimalValue(DecimalValue { scale, value })), expected);
        }
    }

    #[test]
    fn tables_and_arrays_are_json() {
        let mut table = FieldTable::default();
        table.insert("n".into(), AMQPValue::LongInt(1));
        table.insert("f".into(), AMQPValue::Float(0.1));
        table.insert("nan".into(), AMQPValue::Double(f64::NAN));
        table.insert("raw".into(), AMQPValue::ByteArray(vec![0xff].into()));
        table.insert("void".into(), AMQPValue::Void);
        let array = vec![AMQPValue::FieldTable(table), AMQPValue::LongString("t".into())];
        assert_eq!(
            text(AMQPValue::FieldArray(array.into())),
            r#"[{"f":0.1,"n":1,"nan":"NaN","raw":{"base64":"/w=="},"void":null},"t"]"#
        );
    }

    #[test]
    fn deep_nesting_is_cut() {
        let mut value = AMQPValue::Void;
        for _ in 0..5_000 {
            value = AMQPValue::FieldArray(FieldArray::from(vec![value]));
        }
        let rendered = text(value);
        assert_eq!(rendered.matches('[').count(), DEPTH_MAX + 1);
    }
}
