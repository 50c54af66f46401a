//! Cases about what a message carries.

use std::sync::Arc;

use bytes::Bytes;
use inboxd_contract::{Delivery, Header};

use super::support::{Bench, close, id, take};
use super::{SourceHarness, TestMessage};

/// Publishes, takes as many, and answers them in order, settled.
async fn round_trip(harness: &Arc<dyn SourceHarness>, messages: &[TestMessage]) -> Vec<Delivery> {
    let bench = Bench::new(harness, 1).await;
    bench.place.publish(0, messages).await;
    let mut source = bench.place.open().await;
    let mut came = Vec::new();
    for message in messages {
        let delivery = take(&mut source, 1).await.remove(0);
        assert_eq!(id(&delivery), message.id);
        came.push(delivery);
    }
    close(source).await;
    came
}

/// The headers but for the id.
fn headers(delivery: &Delivery) -> Vec<Header> {
    let all = delivery.envelope.headers.iter();
    all.filter(|header| header.name.as_ref() != b"message-id").cloned().collect()
}

fn with_headers(id: &str, headers: &[(&'static [u8], Option<&'static [u8]>)]) -> TestMessage {
    let headers = headers.iter();
    let headers = headers.map(|(n, v)| (Bytes::from_static(n), v.map(Bytes::from_static)));
    TestMessage { headers: headers.collect(), ..TestMessage::new(id) }
}

/// Bytes that are no text, every byte, none at all, and many.
pub(super) async fn bodies_are_kept_to_the_byte(harness: Arc<dyn SourceHarness>) {
    let large: Vec<u8> =
        (0..300_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let bodies: Vec<Bytes> = vec![
        Bytes::from_static(&[0x00, 0x01, 0x7f, 0x80, 0xff, 0xfe, 0xc3, 0x28]),
        (0..=255_u8).collect(),
        Bytes::new(),
        Bytes::from(large),
    ];
    let messages: Vec<_> = bodies
        .iter()
        .enumerate()
        .map(|(n, body)| TestMessage {
            body: Some(body.clone()),
            ..TestMessage::new(format!("b{n}"))
        })
        .collect();
    for (delivery, body) in round_trip(&harness, &messages).await.iter().zip(&bodies) {
        let came = delivery.envelope.body.as_ref();
        assert!(came == Some(body), "the body of {} changed", id(delivery));
    }
}

/// Null and empty bodies are two things.
pub(super) async fn a_tombstone_is_not_an_empty_body(harness: Arc<dyn SourceHarness>) {
    let key = Some(Bytes::from_static(b"k"));
    let empty = TestMessage { body: Some(Bytes::new()), key: key.clone(), ..TestMessage::new("e") };
    let tombstone = TestMessage { body: None, key, ..TestMessage::new("t") };
    let came = round_trip(&harness, &[empty, tombstone]).await;
    assert_eq!(came[0].envelope.body, Some(Bytes::new()));
    assert_eq!(came[1].envelope.body, None);
}

/// Values that are no text, and the empty value.
pub(super) async fn header_values_are_bytes(harness: Arc<dyn SourceHarness>) {
    let message = with_headers(
        "m",
        &[
            (b"binary", Some(&[0x02, 0x0d, 0x0a, 0xff, 0x00, 0xc3, 0x28])),
            (b"empty", Some(b"")),
            (b"X-Text", Some("gr\u{fc}n".as_bytes())),
        ],
    );
    let came = round_trip(&harness, std::slice::from_ref(&message)).await;
    let mut came = headers(&came[0]);
    came.sort_by(|a, b| a.name.cmp(&b.name));
    let mut expected = as_headers(&message);
    expected.sort_by(|a, b| a.name.cmp(&b.name));
    assert_eq!(came, expected);
}

/// A name twice, with another between.
pub(super) async fn headers_repeat_in_order(harness: Arc<dyn SourceHarness>) {
    let message = with_headers("m", &[(b"z", Some(b"1")), (b"a", Some(b"2")), (b"z", Some(b"3"))]);
    let came = round_trip(&harness, std::slice::from_ref(&message)).await;
    assert_eq!(headers(&came[0]), as_headers(&message));
}

/// Null and empty values are two things.
pub(super) async fn a_null_header_is_not_an_empty_one(harness: Arc<dyn SourceHarness>) {
    let message = with_headers("m", &[(b"empty", Some(b"")), (b"null", None)]);
    let came = round_trip(&harness, std::slice::from_ref(&message)).await;
    let mut came = headers(&came[0]);
    came.sort_by(|a, b| a.name.cmp(&b.name));
    assert_eq!(came, as_headers(&message));
}

/// A name that is not UTF-8 stops nothing and is kept.
pub(super) async fn header_names_are_bytes(harness: Arc<dyn SourceHarness>) {
    let odd = with_headers("odd", &[(&[0xff, 0xfe, b'n'], Some(b"v")), (b"", Some(b"no name"))]);
    let plain = TestMessage::new("plain");
    let came = round_trip(&harness, &[odd.clone(), plain]).await;
    assert_eq!(headers(&came[0]), as_headers(&odd));
}

/// Trace context and lineage are found whatever the broker calls them.
pub(super) async fn well_known_headers_fill_the_envelope(harness: Arc<dyn SourceHarness>) {
    let trace = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let message = with_headers(
        "m",
        &[
            (b"traceparent", Some(trace)),
            (b"tracestate", Some(b"a=1")),
            (b"causation-id", Some(b"cause")),
            (b"correlation-id", Some(b"correlated")),
            (b"message-type", Some(b"order.placed")),
            (b"producer", Some(b"shop")),
            (b"content-type", Some(b"application/json")),
        ],
    );
    let came = round_trip(&harness, std::slice::from_ref(&message)).await;
    let envelope = &came[0].envelope;
    assert_eq!(envelope.traceparent.as_deref(), Some(trace.as_slice()));
    assert_eq!(envelope.tracestate.as_deref(), Some(b"a=1".as_slice()));
    assert_eq!(envelope.causation_id.as_deref(), Some(b"cause".as_slice()));
    assert_eq!(envelope.correlation_id.as_deref(), Some(b"correlated".as_slice()));
    assert_eq!(envelope.message_type.as_deref(), Some(b"order.placed".as_slice()));
    assert_eq!(envelope.producer.as_deref(), Some(b"shop".as_slice()));
    assert_eq!(envelope.content_type.as_deref(), Some(b"application/json".as_slice()));
}

/// Keys that are no text; no key is not the empty key.
pub(super) async fn keys_are_bytes(harness: Arc<dyn SourceHarness>) {
    let keys = [Some(Bytes::from_static(&[0xff, 0x00])), Some(Bytes::new()), None];
    let messages: Vec<_> = keys
        .iter()
        .enumerate()
        .map(|(n, key)| TestMessage { key: key.clone(), ..TestMessage::new(format!("k{n}")) })
        .collect();
    let came = round_trip(&harness, &messages).await;
    for (delivery, key) in came.iter().zip(&keys) {
        assert_eq!(&delivery.envelope.key, key);
    }
}

fn as_headers(message: &TestMessage) -> Vec<Header> {
    let headers = message.headers.iter();
    headers.map(|(name, value)| Header { name: name.clone(), value: value.clone() }).collect()
}
