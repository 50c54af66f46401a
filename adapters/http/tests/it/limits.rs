//! The bounds on what a message decides about the headers.

use bytes::Bytes;
use inboxd_contract::Header;
use inboxd_http::{HEADER_LINES_MAX, HEADERS_BYTES_MAX, OMITTED_BYTES_MAX, VALUE_BYTES_MAX};

use crate::support::{ACCEPTED, Message, OK, Raw, RawRequest, forwarder};

async fn sent(message: &Message) -> RawRequest {
    let raw = Raw::answering(OK).await;
    assert_eq!(message.send(&forwarder(raw.url())).await, ACCEPTED);
    raw.request()
}

fn own_bytes(request: &RawRequest) -> usize {
    let own = request.lines().into_iter().filter(|line| line.starts_with("inbox-header-"));
    own.map(|line| line.len() + 2).sum()
}

#[tokio::test]
async fn above_8_kib_the_rest_is_left_out_and_named() {
    let values: Vec<_> = (0..20).map(|index| (format!("h{index}"), "v".repeat(900))).collect();
    let mut message = Message::new("m");
    for (name, value) in &values {
        message.header(name.as_bytes(), value.as_bytes());
    }
    message.header(b"small", b"fits");
    let request = sent(&message).await;
    assert!(own_bytes(&request) <= HEADERS_BYTES_MAX);
    let omitted: Vec<_> = request.value("inbox-headers-omitted").unwrap().split(", ").collect();
    for (name, value) in &values {
        let present = request.value(&format!("inbox-header-{name}")) == Some(value);
        assert_ne!(present, omitted.contains(&name.as_str()), "{name}");
    }
    assert_eq!(omitted.len(), 12);
    assert_eq!(request.value("inbox-header-small"), Some("fits"));
}

#[tokio::test]
async fn of_a_repeated_name_only_the_beginning_is_sent() {
    let large = vec![b'x'; HEADERS_BYTES_MAX + 1];
    let message =
        Message::with_headers([(&b"a"[..], &b"1"[..]), (b"a", &large), (b"A", b"3"), (b"b", b"4")]);
    let request = sent(&message).await;
    assert_eq!(request.values("inbox-header-a"), ["1"]);
    assert_eq!(request.value("inbox-header-b"), Some("4"));
    assert_eq!(request.value("inbox-headers-omitted"), Some("a"));
}

#[tokio::test]
async fn a_hundred_thousand_headers_cost_neither_time_nor_the_request() {
    let mut message = Message::new("m");
    for index in 0..100_000 {
        let name = Bytes::from(format!("n{index}"));
        message.envelope.headers.push(Header::new(name, Bytes::new()));
    }
    let request = sent(&message).await;
    let omitted = request.value("inbox-headers-omitted").unwrap();
    assert!(omitted.len() <= OMITTED_BYTES_MAX, "{}", omitted.len());
    let (named, rest) = omitted.rsplit_once(", ...+").unwrap();
    let rest: usize = rest.parse().unwrap();
    assert_eq!(HEADER_LINES_MAX + named.split(", ").count() + rest, 100_000);
    assert!(request.lines().len() < 100);
}

#[tokio::test]
async fn a_name_too_long_to_be_listed_is_counted() {
    let name = vec![b'n'; 20_000];
    let request = sent(&Message::with_headers([(&name[..], &b""[..])])).await;
    assert_eq!(request.value("inbox-headers-omitted"), Some("...+1"));
}

#[tokio::test]
async fn an_oversized_field_is_left_out_and_named() {
    let mut message = Message::new("m");
    message.ordering_key = Some(vec![b'k'; 1024 * 1024]);
    message.envelope.message_type = Some(Bytes::from(vec![0xff; VALUE_BYTES_MAX / 3 + 1]));
    message.envelope.producer = Some(Bytes::from(vec![b'p'; VALUE_BYTES_MAX]));
    message.envelope.content_type = Some(Bytes::from(vec![b'c'; 20_000]));
    let request = sent(&message).await;
    assert_eq!(request.value("inbox-producer").map(str::len), Some(VALUE_BYTES_MAX));
    assert_eq!(request.value("inbox-ordering-key"), None);
    assert_eq!(request.value("content-type"), Some("application/octet-stream"));
    assert_eq!(
        request.value("inbox-headers-omitted"),
        Some("content-type, inbox-message-type, inbox-ordering-key")
    );
}

#[tokio::test]
async fn the_largest_head_stays_below_16_kib() {
    let mut message = Message::new(&"\u{e9}".repeat(256));
    let longest = || Some(Bytes::from(vec![b'x'; VALUE_BYTES_MAX]));
    message.envelope.message_type = longest();
    message.envelope.producer = longest();
    message.envelope.correlation_id = longest();
    message.envelope.causation_id = longest();
    message.envelope.content_type = longest();
    message.ordering_key = Some(vec![b'x'; VALUE_BYTES_MAX]);
    for index in 0..2_000 {
        message.header(format!("name-{index}").as_bytes(), &[0xff; 40]);
    }
    let request = sent(&message).await;
    assert!(request.head.len() < 16 * 1024, "{}", request.head.len());
    assert!(request.lines().len() < 100, "{}", request.lines().len());
}
