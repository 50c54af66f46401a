//! A CloudEvent of either broker arrives in the binary mode of HTTP.

use bytes::Bytes;

use crate::support::{ACCEPTED, Message, OK, Raw, RawRequest, forwarder};

async fn sent(message: &Message) -> RawRequest {
    let raw = Raw::answering(OK).await;
    assert_eq!(message.send(&forwarder(raw.url())).await, ACCEPTED);
    raw.request()
}

fn event(prefix: &str) -> Message {
    let mut message = Message::new("m");
    for (attribute, value) in [
        ("specversion", "1.0"),
        ("id", "e 1"),
        ("source", "/shop/\u{e9}\"%"),
        ("type", "order.created"),
        ("comexampleextension", "x"),
    ] {
        message.header(format!("{prefix}{attribute}").as_bytes(), value.as_bytes());
    }
    message
}

#[tokio::test]
async fn attributes_of_kafka_and_amqp_become_ce_headers() {
    for prefix in ["ce_", "cloudEvents:", "cloudEvents_", "CE_", "ce-"] {
        let request = sent(&event(prefix)).await;
        assert_eq!(request.value("ce-specversion"), Some("1.0"), "{prefix}");
        assert_eq!(request.value("ce-id"), Some("e%201"));
        assert_eq!(request.value("ce-source"), Some("/shop/%C3%A9%22%25"));
        assert_eq!(request.value("ce-type"), Some("order.created"));
        assert_eq!(request.value("ce-comexampleextension"), Some("x"));
    }
}

#[tokio::test]
async fn half_an_event_and_a_structured_one_have_no_ce_headers() {
    let mut structured = event("ce_");
    structured.envelope.content_type =
        Some(Bytes::from_static(b"application/cloudevents+json; charset=utf-8"));
    let half = Message::with_headers([(&b"ce_id"[..], &b"1"[..]), (b"ce_type", b"t")]);
    for message in [structured, half] {
        let request = sent(&message).await;
        assert!(request.names().iter().all(|name| !name.starts_with("ce-")), "{}", request.head);
        assert!(request.value("inbox-header-ce_id").is_some());
    }
}

#[tokio::test]
async fn an_attribute_cannot_smuggle_a_header_or_be_doubled() {
    let mut message = event("ce_");
    message.header(b"ce_id", b"second");
    message.header(b"cloudEvents:type", b"second");
    message.header(b"ce_x\r\nevil: y", b"1");
    message.header(b"ce_breaking", b"a\r\nevil: y");
    message.header(b"ce_not-an-attribute", b"1");
    let request = sent(&message).await;
    assert_eq!(request.value("ce-id"), Some("e%201"));
    assert_eq!(request.value("ce-type"), Some("order.created"));
    assert_eq!(request.value("ce-breaking"), Some("a%0D%0Aevil:%20y"));
    assert_eq!(request.value("evil"), None);
    assert_eq!(request.value("ce-not-an-attribute"), None);
}

#[tokio::test]
async fn values_are_encoded_as_the_http_binding_says_by_its_own_example() {
    let mut message = event("ce_");
    message.header(b"ce_subject", "Euro \u{20ac} \u{1f600}".as_bytes());
    message.header(b"ce_edges", b"!~");
    message.header(b"ce_control", b"a\x7f\x01");
    let request = sent(&message).await;
    assert_eq!(request.value("ce-subject"), Some("Euro%20%E2%82%AC%20%F0%9F%98%80"));
    assert_eq!(request.value("ce-edges"), Some("!~"));
    assert_eq!(request.value("ce-control"), Some("a%7F%01"));
}

#[tokio::test]
async fn datacontenttype_is_the_content_type_and_no_attribute() {
    let mut message = event("ce_");
    message.header(b"ce_datacontenttype", b"application/xml");
    let request = sent(&message).await;
    assert_eq!(request.value("content-type"), Some("application/xml"));
    assert_eq!(request.value("ce-datacontenttype"), None);

    message.envelope.content_type = Some(Bytes::from_static(b"text/csv"));
    assert_eq!(sent(&message).await.value("content-type"), Some("text/csv"));

    let stray = Message::with_headers([(&b"ce_datacontenttype"[..], &b"application/xml"[..])]);
    let request = sent(&stray).await;
    assert_eq!(request.value("content-type"), Some("application/octet-stream"));
}

#[tokio::test]
async fn what_no_receiver_may_take_is_no_attribute() {
    let mut message = Message::with_headers([(&b"ce_id"[..], &b" "[..]), (b"ce_odd", b"\xff")]);
    for header in event("cloudEvents:").envelope.headers {
        message.envelope.headers.push(header);
    }
    let request = sent(&message).await;
    assert_eq!(request.value("ce-id"), Some("e%201"), "the first that is one, as for the identity");
    assert_eq!(request.value("ce-odd"), None);
    assert_eq!(request.value("inbox-header-ce_odd"), Some("%FF"));
}

#[tokio::test]
async fn structured_events_and_batches_pass_as_they_are() {
    for content_type in [
        "application/cloudevents+json",
        "Application/CloudEvents+JSON; charset=UTF-8",
        "application/cloudevents-batch+json; charset=UTF-8",
        "application/cloudevents+avro",
    ] {
        let mut message = event("ce_");
        let body = b" {\"specversion\": \"1.0\", \"data_base64\":\"AP8=\"}\n";
        message.envelope.content_type = Some(content_type.into());
        message.envelope.body = Some(Bytes::from_static(body));
        let request = sent(&message).await;
        assert_eq!(request.value("content-type"), Some(content_type));
        assert_eq!(request.body, body);
        assert!(request.names().iter().all(|name| !name.starts_with("ce-")), "{}", request.head);
    }
}
