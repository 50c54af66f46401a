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
