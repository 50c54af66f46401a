//! Names, values and bodies as they are on the wire: cases B1, B2, B5 and B6.

use bytes::Bytes;
use inboxd_contract::{Header, Origin, decode_percent};
use inboxd_http::{HeaderCopy, HeaderPolicy, HttpConfig, HttpForwarder};
use sha2::{Digest, Sha256};

use crate::support::{ACCEPTED, Message, OK, Raw, RawRequest, config, forwarder};

async fn sent(message: &Message) -> RawRequest {
    let raw = Raw::answering(OK).await;
    assert_eq!(message.send(&forwarder(raw.url())).await, ACCEPTED);
    raw.request()
}

async fn sent_with(policy: HeaderPolicy, message: &Message) -> RawRequest {
    let raw = Raw::answering(OK).await;
    let config = HttpConfig { headers: policy, ..config(raw.url()) };
    assert_eq!(message.send(&HttpForwarder::new(config).unwrap()).await, ACCEPTED);
    raw.request()
}

fn unprefixed(names: &[&str]) -> HeaderPolicy {
    let names = names.iter().map(|name| (*name).to_owned()).collect();
    HeaderPolicy { copy: HeaderCopy::Allow(names), prefix: String::new() }
}

#[tokio::test]
async fn a_plain_message_has_these_headers_and_no_others() {
    let request = sent(&Message::new("m/1")).await;
    assert_eq!(request.lines()[0], "POST /orders HTTP/1.1");
    let mut names = request.names();
    names.sort_unstable();
    assert_eq!(
        names,
        [
            "accept",
            "content-length",
            "content-type",
            "host",
            "idempotency-key",
            "inbox-attempt",
            "inbox-consumer-id",
            "inbox-message-id",
            "inbox-origin",
            "inbox-subscription",
            "user-agent",
        ]
    );
    assert_eq!(request.value("inbox-message-id"), Some("m%2F1"));
    assert_eq!(request.value("idempotency-key"), Some("\"m%2F1\""));
    assert_eq!(request.value("inbox-consumer-id"), Some("billing"));
    assert_eq!(request.value("inbox-subscription"), Some("orders"));
    assert_eq!(request.value("inbox-attempt"), Some("1"));
    assert_eq!(request.value("inbox-origin"), Some("kafka:orders/3/42"));
    assert_eq!(request.value("content-type"), Some("application/octet-stream"));
    assert!(request.value("user-agent").unwrap().starts_with("inboxd/"));
    assert_eq!(request.body, b"{}");
}

#[tokio::test]
async fn what_is_known_of_a_message_has_its_header() {
    let mut message = Message::new("m");
    message.envelope.message_type = Some(Bytes::from_static(b"order created"));
    message.envelope.producer = Some(Bytes::from_static(b"shop"));
    message.envelope.correlation_id = Some(Bytes::from_static(b"c\r\n1"));
    message.envelope.causation_id = Some(Bytes::from_static(b"\xff"));
    message.ordering_key = Some(b"\x00key".to_vec());
    message.envelope.origin = Origin::RabbitMq {
        queue: "orders queue".into(),
        exchange: "".into(),
        routing_key: "a".into(),
        redelivered: true,
        delivery_count: None,
    };
    let request = sent(&message).await;
    assert_eq!(request.value("inbox-message-type"), Some("order%20created"));
    assert_eq!(request.value("inbox-producer"), Some("shop"));
    assert_eq!(request.value("inbox-correlation-id"), Some("c%0D%0A1"));
    assert_eq!(request.value("inbox-causation-id"), Some("%FF"));
    assert_eq!(request.value("inbox-ordering-key"), Some("%00key"));
    assert_eq!(request.value("inbox-origin"), Some("rabbitmq:orders%20queue"));
    assert_eq!(request.value("inbox-redelivered"), Some("true"));
    assert_eq!(request.value("inbox-tombstone"), None);
}

#[tokio::test]
async fn bytes_that_http_forbids_are_encoded_in_values_and_names() {
    let message = Message::with_headers([
        (&b"plain"[..], &b"a value; q=\"1\", more"[..]),
        (b"control", b"\x02"),
        (b"break", b"a\r\nInbox-Attempt: 9\r\n\r\nGET / HTTP/1.1"),
        (b"high", b"\xff\xc3\xa9"),
        (b"edges", b" a b "),
        (b"percent", b"100%41"),
        (b"empty", b""),
        (b"a name", b"1"),
        (b"a\r\nevil: x", b"2"),
        (b"a:b", b"3"),
        (b"\xff", b"4"),
        (b"", b"5"),
    ]);
    let request = sent(&message).await;
    for (name, value) in [
        ("plain", "a value; q=\"1\", more"),
        ("control", "%02"),
        ("break", "a%0D%0AInbox-Attempt: 9%0D%0A%0D%0AGET / HTTP/1.1"),
        ("high", "%FF%C3%A9"),
        ("edges", "%20a b%20"),
        ("percent", "100%2541"),
        ("empty", ""),
        ("a%20name", "1"),
        ("a%0d%0aevil%3a%20x", "2"),
        ("a%3ab", "3"),
        ("%ff", "4"),
        ("", "5"),
    ] {
        assert_eq!(request.value(&format!("inbox-header-{name}")), Some(value), "{name}");
    }
    assert_eq!(request.value("inbox-attempt"), Some("1"));
    assert_eq!(request.value("evil"), None);
    assert_eq!(request.value("inbox-headers-omitted"), None);
}

#[tokio::test]
async fn every_byte_comes_back_by_one_decoding() {
    let all: Vec<u8> = (0..=255).collect();
    let request = sent(&Message::with_headers([(&b"all"[..], &all[..])])).await;
    assert_eq!(decode_percent(request.value("inbox-header-all").unwrap()), all);
}

#[tokio::test]
async fn a_null_value_is_an_empty_one_and_repeated_names_keep_their_order() {
    let mut message = Message::with_headers([(&b"x"[..], &b"2"[..]), (b"y", b"0"), (b"X", b"1")]);
    message.envelope.headers.push(Header { name: Bytes::from_static(b"null"), value: None });
    let request = sent(&message).await;
    assert_eq!(request.values("inbox-header-x"), ["2", "1"]);
    assert_eq!(request.value("inbox-header-null"), Some(""));
}

#[tokio::test]
async fn framing_and_authentication_are_never_copied_and_named_as_omitted() {
    let never: [&[u8]; 15] = [
        b"content-length",
        b"Content_Length",
        b"transfer-encoding",
        b"host",
        b"connection",
        b"Keep-Alive",
        b"te",
        b"trailer",
        b"upgrade",
        b"expect",
        b"Authorization",
        b"proxy-authorization",
        b"cookie",
        b"set-cookie",
        b"baggage",
    ];
    let message = Message::with_headers(never.map(|name| (name, &b"777"[..])));
    let with_prefix = sent(&message).await;
    let names: Vec<_> = never.iter().map(|name| std::str::from_utf8(name).unwrap()).collect();
    let without_prefix = sent_with(unprefixed(&names), &message).await;
    for request in [&with_prefix, &without_prefix] {
        let with_777: Vec<_> =
            request.lines().into_iter().filter(|line| line.contains("777")).collect();
        let baggage_asked_for = ["baggage: 777"];
        let expected: &[&str] =
            if std::ptr::eq(request, &without_prefix) { &baggage_asked_for } else { &[] };
        assert_eq!(with_777, expected);
        assert_eq!(request.value("content-length"), Some("2"));
        assert_eq!(request.body, b"{}");
        let omitted = request.value("inbox-headers-omitted").unwrap();
        assert!(omitted.contains("Authorization") && omitted.contains("transfer-encoding"));
    }
}

#[tokio::test]
async fn without_a_prefix_named_headers_go_as_they_are_and_reserved_ones_do_not() {
    let message = Message::with_headers([
        (&b"X-Tenant"[..], &b"t1"[..]),
        (b"unnamed", b"evil"),
        (b"Inbox-Message-Id", b"evil"),
        (b"inbox_message_id", b"evil"),
        (b"Idempotency-Key", b"evil"),
        (b"content-type", b"evil"),
        (b"traceparent", b"evil"),
        (b"ce-id", b"evil"),
        (b"webhook-signature", b"evil"),
        (b"X-Forwarded-For", b"evil"),
        (b"user-agent", b"evil"),
        (b"Inbox-Header-x", b"fine"),
    ]);
    let names: Vec<_> = message
        .envelope
        .headers
        .iter()
        .map(|header| std::str::from_utf8(&header.name).unwrap())
        .filter(|name| *name != "unnamed")
        .collect();
    let request = sent_with(unprefixed(&names), &message).await;
    assert_eq!(request.value("x-tenant"), Some("t1"));
    assert_eq!(request.value("inbox-header-x"), Some("fine"));
    assert!(!request.head.contains("evil"), "{}", request.head);
    let omitted = request.value("inbox-headers-omitted").unwrap();
    assert!(omitted.contains("inbox_message_id") && !omitted.contains("unnamed"), "{omitted}");
}

#[tokio::test]
async fn a_prefix_cannot_be_made_to_spell_a_reserved_name() {
    let policy = HeaderPolicy { copy: HeaderCopy::All, prefix: "Inbox-".to_owned() };
    let message = Message::with_headers([(&b"Attempt"[..], &b"evil"[..]), (b"header-ok", b"fine")]);
    let request = sent_with(policy, &message).await;
    assert_eq!(request.value("inbox-attempt"), Some("1"));
    assert_eq!(request.value("inbox-header-ok"), Some("fine"));
    assert_eq!(request.value("inbox-headers-omitted"), Some("Attempt"));
}

#[tokio::test]
async fn an_idempotency_key_of_the_message_does_not_override_ours() {
    let message = Message::with_headers([(&b"Idempotency-Key"[..], &b"\"theirs\""[..])]);
    let request = sent(&message).await;
    assert_eq!(request.value("idempotency-key"), Some("\"m\""));
    assert_eq!(request.value("inbox-header-idempotency-key"), Some("\"theirs\""));
}

#[tokio::test]
async fn content_type_and_encoding_pass_verbatim() {
    for (content_type, encoding) in [
        ("application/xml", None),
        ("text/plain; charset=latin1", None),
        ("application/json", Some("gzip")),
        ("multipart/mixed; boundary=\"a b\"", Some("zstd, gzip")),
    ] {
        let mut message = Message::new("m");
        message.envelope.content_type = Some(content_type.into());
        message.envelope.content_encoding = encoding.map(Bytes::from);
        // Not gzip at all: nobody may look into it.
        message.envelope.body = Some(Bytes::from_static(b"\x1f\x8b\x08\x00broken"));
        let request = sent(&message).await;
        assert_eq!(request.value("content-type"), Some(content_type));
        assert_eq!(request.value("content-encoding"), encoding);
        assert_eq!(request.body, b"\x1f\x8b\x08\x00broken");
    }
}

#[tokio::test]
async fn a_content_type_that_http_cannot_carry_goes_under_the_prefix() {
    let mut message = Message::new("m");
    message.envelope.content_type = Some(Bytes::from_static(b"text/plain\r\nX: y"));
    message.envelope.content_encoding = Some(Bytes::from_static(b"gz\xffip"));
    let request = sent(&message).await;
    assert_eq!(request.value("content-type"), Some("application/octet-stream"));
    assert_eq!(request.value("inbox-header-content-type"), Some("text/plain%0D%0AX: y"));
    assert_eq!(request.value("content-encoding"), None);
    assert_eq!(request.value("inbox-header-content-encoding"), Some("gz%FFip"));
}

#[tokio::test]
async fn a_charset_in_place_of_an_encoding_is_no_content_encoding() {
    for charset in ["utf-8", "UTF-8", "binary", "iso-8859-1"] {
        let mut message = Message::new("m");
        message.envelope.content_encoding = Some(charset.into());
        let request = sent(&message).await;
        assert_eq!(request.value("content-encoding"), None);
        assert_eq!(request.value("inbox-header-content-encoding"), Some(charset));
    }
}

#[tokio::test]
async fn bodies_arrive_with_the_same_hash_and_a_length() {
    let random: Vec<u8> = (0..1024 * 1024).map(|_| rand::random()).collect();
    let awkward = vec![0x00, 0x01, 0x7f, 0x80, 0xff, 0xfe, 0xc3, 0x28];
    for body in [random, awkward, Vec::new()] {
        let mut message = Message::new("m");
        message.envelope.body = Some(Bytes::from(body.clone()));
        let request = sent(&message).await;
        assert_eq!(request.body.len(), body.len());
        assert_eq!(hex::encode(Sha256::digest(&request.body)), hex::encode(Sha256::digest(&body)));
        assert_eq!(request.value("inbox-tombstone"), None);
    }
}

#[tokio::test]
async fn a_tombstone_has_no_body_and_says_so() {
    let mut message = Message::new("m");
    message.envelope.body = None;
    let request = sent(&message).await;
    assert_eq!(request.value("inbox-tombstone"), Some("true"));
    assert_eq!(request.value("content-length"), Some("0"));
}
