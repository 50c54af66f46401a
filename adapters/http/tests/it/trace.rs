//! Trace context passes unchanged where it is valid and never blocks a message: case O1.

use bytes::Bytes;

use crate::support::{ACCEPTED, Message, OK, Raw, forwarder};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const SPAN: &str = "00f067aa0ba902b7";

async fn passed(parent: &str, state: Option<&str>) -> (Option<String>, Option<String>) {
    let raw = Raw::answering(OK).await;
    let mut message = Message::new("m");
    message.envelope.traceparent = Some(Bytes::from(parent.to_owned()));
    message.envelope.tracestate = state.map(|state| Bytes::from(state.to_owned()));
    assert_eq!(message.send(&forwarder(raw.url())).await, ACCEPTED, "{parent}");
    let request = raw.request();
    let value = |name| request.value(name).map(str::to_owned);
    (value("traceparent"), value("tracestate"))
}

#[tokio::test]
async fn a_valid_context_passes_unchanged() {
    for parent in [
        format!("00-{TRACE}-{SPAN}-01"),
        format!("00-{TRACE}-{SPAN}-00"),
        format!("01-{TRACE}-{SPAN}-01-of-the-future"),
    ] {
        let state = "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE";
        let expected = (Some(parent.clone()), Some(state.to_owned()));
        assert_eq!(passed(&parent, Some(state)).await, expected);
    }
}

#[tokio::test]
async fn a_malformed_one_is_left_out_and_the_message_is_delivered() {
    for parent in [
        format!("00-{}-{SPAN}-01", TRACE.to_uppercase()),
        format!("00-{}-{SPAN}-01", "0".repeat(32)),
        format!("00-{TRACE}-{}-01", "0".repeat(16)),
        format!("ff-{TRACE}-{SPAN}-01"),
        format!("00-{TRACE}-{SPAN}-01-more"),
        format!("00-{TRACE}-{SPAN}"),
        format!("00-{TRACE}-{SPAN}-01\r\nx: y"),
        "1".repeat(55),
        "0".repeat(10 * 1024),
        String::new(),
    ] {
        assert_eq!(passed(&parent, Some("a=1")).await, (None, None), "{parent}");
    }
}

#[tokio::test]
async fn a_malformed_state_does_not_cost_the_parent() {
    let parent = format!("00-{TRACE}-{SPAN}-01");
    for state in ["", "no equals", "a=1\r\nx: y", "a=1,a=2"] {
        assert_eq!(passed(&parent, Some(state)).await, (Some(parent.clone()), None), "{state}");
    }
}

#[tokio::test]
async fn no_context_is_invented_and_none_bleeds_over() {
    let raw = Raw::answering(OK).await;
    let forwarder = forwarder(raw.url());
    let parent = format!("00-{TRACE}-{SPAN}-01");
    for index in 0..6 {
        let mut message = Message::new("m");
        message.envelope.traceparent = (index % 2 == 0).then(|| Bytes::from(parent.clone()));
        assert_eq!(message.send(&forwarder).await, ACCEPTED);
    }
    for (index, request) in raw.requests().iter().enumerate() {
        let expected = (index % 2 == 0).then_some(parent.as_str());
        assert_eq!(request.value("traceparent"), expected);
        assert_eq!(request.value("tracestate"), None);
    }
}
