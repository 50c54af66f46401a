use std::collections::BTreeSet;

use bytes::Bytes;
use inboxd_contract::Header;

use super::*;
use crate::engine::settings::{OnIdConflict, OnMissingId};

fn settings(extractors: &[Extractor]) -> IdentitySettings {
    IdentitySettings {
        extractors: extractors.to_vec(),
        scope_by_producer: false,
        fingerprint: FingerprintOf::Body,
        on_missing: OnMissingId::DeadLetter,
        on_missing_is_explicit: false,
        on_conflict: OnIdConflict::DeadLetter,
    }
}

fn kafka(body: Option<&[u8]>, headers: &[(&str, &str)]) -> Envelope {
    let origin = Origin::Kafka {
        topic: "orders".into(),
        partition: 2,
        offset: 7,
        position_scope: Some("cluster/topic".into()),
    };
    with_headers(Envelope::new(origin, body.map(Bytes::copy_from_slice)), headers)
}

fn rabbitmq(body: &[u8], headers: &[(&str, &str)]) -> Envelope {
    let origin = Origin::RabbitMq {
        queue: "orders".into(),
        exchange: "".into(),
        routing_key: "a.b".into(),
        redelivered: false,
        delivery_count: None,
    };
    with_headers(Envelope::new(origin, Some(Bytes::copy_from_slice(body))), headers)
}

fn with_headers(mut envelope: Envelope, headers: &[(&str, &str)]) -> Envelope {
    envelope.headers = headers
        .iter()
        .map(|(name, value)| Header::new(name.to_string(), value.to_string()))
        .collect();
    envelope.fill_from_headers();
    envelope
}

fn id(extractor: Extractor, envelope: &Envelope) -> Option<String> {
    identify(&settings(&[extractor]), envelope).message_id.map(|id| id.as_str().to_owned())
}

#[test]
fn the_first_extractor_with_a_value_that_is_not_blank_wins() {
    let chain = settings(&[
        Extractor::Property,
        Extractor::Header("message-id".into()),
        Extractor::KafkaPosition,
    ]);
    let mut envelope = kafka(None, &[("Message-Id", " "), ("message-id", "m1")]);
    envelope.property_id = Some(Bytes::from_static(b"\t "));
    assert_eq!(identify(&chain, &envelope).message_id.unwrap().as_str(), "m1");
    let position = identify(&chain, &kafka(None, &[])).message_id.unwrap();
    assert_eq!(position.as_str(), "cluster/topic/2/7");
    assert_eq!(identify(&chain, &rabbitmq(b"x", &[])).message_id, None);
}

#[test]
fn ids_that_differ_in_any_byte_stay_apart() {
    let mut seen = BTreeSet::new();
    let long = "x".repeat(513);
    let longer = "x".repeat(514);
    let hashed = MessageId::from_bytes(long.as_bytes()).unwrap();
    for value in [
        "bar",
        "bar ",
        "bar  ",
        "BAR",
        "b\u{e4}r",
        "ba\u{308}r",
        "a\0b",
        "ab",
        &long,
        &longer,
        hashed.as_str(),
    ] {
        let found = id(Extractor::Header("id".into()), &kafka(None, &[("id", value)])).unwrap();
        assert!(seen.insert(found), "{value:?} met another id");
    }
}

#[test]
fn a_cloud_event_has_one_id_whatever_the_broker_and_the_mode() {
    let expected = id(Extractor::CloudEvents, &kafka(None, &[("ce_id", "7"), ("ce_source", "/s")]));
    assert!(expected.is_some());
    for (name, source) in [
        ("ce-id", "ce-source"),
        ("cloudEvents:id", "cloudEvents:source"),
        ("cloudEvents_id", "cloudEvents_source"),
        ("CLOUDEVENTS:ID", "CloudEvents:Source"),
    ] {
        let envelope = rabbitmq(b"", &[(name, "7"), (source, "/s")]);
        assert_eq!(id(Extractor::CloudEvents, &envelope), expected, "{name}");
    }
    let structured = rabbitmq(
        br#"{"specversion":"1.0","id":"7","source":"/s","type":"t","data":{"a":1}}"#,
        &[("content-type", "application/cloudevents+json; charset=utf-8")],
    );
    assert_eq!(id(Extractor::CloudEvents, &structured), expected);
}

#[test]
fn no_two_pairs_of_source_and_id_meet() {
    let pair = |source, event| {
        id(Extractor::CloudEvents, &kafka(None, &[("ce_id", event), ("ce_source", source)]))
    };
    assert_ne!(pair("a", "bc"), pair("ab", "c"));
    assert_ne!(pair("1:a", "b"), pair("1", ":ab"));
}

#[test]
fn an_id_scoped_by_producer_differs_by_producer() {
    let mut scoped = settings(&[Extractor::Header("id".into())]);
    scoped.scope_by_producer = true;
    let of = |producer| identify(&scoped, &kafka(None, &[("id", "1"), ("producer", producer)]));
    assert_ne!(of("shop"), of("till"));
    assert_eq!(of("shop"), of("shop"));
}

#[test]
fn numbers_in_json_are_ids_as_written() {
    let of = |body: &[u8]| id(Extractor::Json("/id".into()), &rabbitmq(body, &[]));
    assert_eq!(of(br#"{"id": 12345678901234567890123}"#).unwrap(), "12345678901234567890123");
    assert_eq!(of(br#"{"id": {"a": 1}}"#), None);
    assert_eq!(of(br#"{"id": "  "}"#), None);
    assert_eq!(of(b"\xff\xfe"), None);
}

#[test]
fn a_hashed_fact_needs_every_part_and_folds_bodies() {
    let fact = Extractor::Hash(vec!["/order".into(), "/line".into()]);
    let by_fact = settings(&[fact]);
    let of = |body: &[u8]| identify(&by_fact, &rabbitmq(body, &[]));
    let one = of(br#"{"order": 1, "line": 23, "sent": "now"}"#);
    assert_eq!(one, of(br#"{"sent": "later", "line": 23, "order": 1}"#));
    assert_ne!(one.message_id, of(br#"{"order": 12, "line": 3}"#).message_id);
    assert_eq!(one.fingerprint, None);
    assert_eq!(of(br#"{"order": 1}"#).message_id, None);
}

#[test]
fn a_tombstone_is_not_an_empty_body() {
    let of = |body| identify(&settings(&[Extractor::KafkaPosition]), &kafka(body, &[])).fingerprint;
    assert_ne!(of(None), of(Some(b"".as_slice())));
    assert_eq!(id(Extractor::BodyHash, &kafka(None, &[])), None);
}

#[test]
fn a_structured_cloud_event_is_told_apart_by_type_and_data() {
    let of = |body: &[u8]| {
        let headers = [("content-type", "application/cloudevents+json")];
        identify(&settings(&[Extractor::CloudEvents]), &rabbitmq(body, &headers)).fingerprint
    };
    let one = of(br#"{"id":"1","source":"s","type":"t","data":{"a":1},"time":"1"}"#);
    assert_eq!(one, of(br#"{"id":"1","source":"s","type":"t","data":{"a":1},"time":"2"}"#));
    assert_ne!(one, of(br#"{"id":"1","source":"s","type":"t","data":{"a":2},"time":"1"}"#));
}

#[test]
fn text_that_a_column_cannot_hold_is_left_out_of_the_record() {
    let long = "p".repeat(257);
    let envelope =
        kafka(None, &[("producer", &long), ("message-type", "order\0"), ("correlation-id", "c1")]);
    let record = record(&envelope, None);
    assert_eq!(record.producer, None);
    assert_eq!(record.message_type, None);
    assert_eq!(record.correlation_id.as_deref(), Some("c1"));
}

#[test]
fn a_delivery_without_a_key_is_in_no_lane_and_an_empty_key_is_a_key() {
    let mut envelope = kafka(None, &[]);
    assert_eq!(lane_key(Ordering::Key, &KeyFrom::RecordKey, &envelope), None);
    envelope.key = Some(Bytes::new());
    assert_eq!(lane_key(Ordering::Key, &KeyFrom::RecordKey, &envelope), Some(Vec::new()));
    assert_eq!(lane_key(Ordering::None, &KeyFrom::RecordKey, &envelope), None);
    let routed = rabbitmq(b"", &[]);
    assert_eq!(lane_key(Ordering::Key, &KeyFrom::RoutingKey, &routed), Some(b"a.b".to_vec()));
}

#[test]
fn a_blank_type_hides_no_other() {
    let mut envelope = rabbitmq(b"{}", &[]);
    envelope.headers.push(Header::new("cloudEvents:type", "b"));
    for blank in ["", "  "] {
        envelope.message_type = Some(Bytes::from(blank));
        assert_eq!(message_type(&envelope).as_deref(), Some(&b"b"[..]));
    }
    envelope.message_type = Some(Bytes::from("a"));
    assert_eq!(message_type(&envelope).as_deref(), Some(&b"a"[..]));
}
