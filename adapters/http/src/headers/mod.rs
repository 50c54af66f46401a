//! The request's headers: the contract's table, then the message's own headers.
//!
//! Invariants: what publishers chose is percent-encoded before it becomes a value or a
//! name, so that no byte of it can end a header; a name of the contract never comes from a message;
//! everything that a message decides has a bound in bytes, and the whole stays below the
//! 16 KiB and the 100 lines that common servers take.

mod budget;
mod copied;
mod names;

use http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use http::{HeaderMap, HeaderName, HeaderValue};
use inboxd_contract::{
    Envelope, ForwardRequest, Origin, encode_percent, is_valid_traceparent, is_valid_tracestate,
};

use self::budget::Budget;
pub use self::budget::{HEADER_LINES_MAX, HEADERS_BYTES_MAX, OMITTED_BYTES_MAX};
pub(crate) use self::copied::CopyRule;
pub use self::names::is_settable;

/// The longest value that a field of the message (type, producer, correlation and causation id,
/// ordering key, content type) gives a header, in encoded bytes. A longer one is left out and
/// named in `Inbox-Headers-Omitted`.
pub const VALUE_BYTES_MAX: usize = 1024;

const OCTET_STREAM: HeaderValue = HeaderValue::from_static("application/octet-stream");
const TRUE: HeaderValue = HeaderValue::from_static("true");
const FALSE: HeaderValue = HeaderValue::from_static("false");

/// All headers of one request. `fixed` ones replace others of their name.
pub(crate) fn build(rule: &CopyRule, fixed: &HeaderMap, request: &ForwardRequest<'_>) -> HeaderMap {
    let mut headers = HeaderMap::with_capacity(24);
    put_identity(&mut headers, request);
    let mut budget = Budget::new();
    put_content(&mut headers, &mut budget, request.envelope);
    put_trace(&mut headers, request);
    put_fields(&mut headers, &mut budget, request);
    copied::put_cloud_event(&mut headers, &mut budget, request.envelope);
    copied::put_own(&mut headers, &mut budget, rule, request.envelope);
    if let Some(omitted) = budget.omitted() {
        put(&mut headers, "inbox-headers-omitted", &omitted);
    }
    for (name, value) in fixed {
        headers.insert(name.clone(), value.clone());
    }
    headers
}

fn put_identity(headers: &mut HeaderMap, request: &ForwardRequest<'_>) {
    let id = encode_percent(request.key.message_id.as_str().as_bytes());
    // Nothing in it needs an escape within a structured field's quotes.
    put(headers, "idempotency-key", &format!("\"{id}\""));
    put(headers, "inbox-message-id", &id);
    let consumer_id = encode_percent(request.key.consumer_id.as_str().as_bytes());
    put(headers, "inbox-consumer-id", &consumer_id);
    put(headers, "inbox-attempt", &request.attempt.to_string());
    put(headers, "inbox-subscription", &encode_percent(request.subscription.as_bytes()));
    put(headers, "inbox-origin", &origin(&request.envelope.origin));
    if let Some(redelivered) = request.envelope.origin.redelivered() {
        headers.insert("inbox-redelivered", if redelivered { TRUE } else { FALSE });
    }
    if request.envelope.body.is_none() {
        headers.insert("inbox-tombstone", TRUE);
    }
}

/// The names in it are encoded, so that `/` separates.
fn origin(origin: &Origin) -> String {
    let name = |text: &str| encode_percent(text.as_bytes());
    match origin {
        Origin::Kafka { topic, partition, offset, .. } => {
            format!("kafka:{}/{partition}/{offset}", name(topic))
        }
        Origin::RabbitMq { queue, .. } => format!("rabbitmq:{}", name(queue)),
        Origin::Memory { stream, position } => format!("memory:{}/{position}", name(stream)),
    }
}

/// Content type and encoding as published where HTTP can carry them, else under the prefix.
fn put_content(headers: &mut HeaderMap, budget: &mut Budget, envelope: &Envelope) {
    let content_type = envelope.content_type.as_deref().filter(|value| !value.is_empty());
    let content_type = content_type.or_else(|| copied::datacontenttype(envelope));
    let fitting = content_type.and_then(verbatim);
    if let (Some(unfit), None) = (content_type, &fitting) {
        put_unfit(headers, budget, envelope, "content-type", unfit);
    }
    headers.insert(CONTENT_TYPE, fitting.unwrap_or(OCTET_STREAM));

    let encoding = envelope.content_encoding.as_deref().filter(|value| !value.is_empty());
    match encoding.map(|value| (value, verbatim(value))) {
        Some((raw, Some(value))) if !names_a_charset(raw) => {
            headers.insert(CONTENT_ENCODING, value);
        }
        Some((unfit, _)) => put_unfit(headers, budget, envelope, "content-encoding", unfit),
        None => {}
    }
}

/// A value that goes out byte for byte: visible ASCII, spaces and tabs inside.
fn verbatim(value: &[u8]) -> Option<HeaderValue> {
    let inside = value.iter().all(|byte| *byte == b'\t' || (0x20..0x7f).contains(byte));
    let trimmed = value.trim_ascii().len() == value.len();
    if !inside || !trimmed || value.len() > VALUE_BYTES_MAX {
        return None;
    }
    HeaderValue::from_bytes(value).ok()
}

/// AMQP's content-encoding often holds a charset or a transfer encoding (`utf-8`, `binary`).
/// As `Content-Encoding` it would make servers answer 415 to a good message.
fn names_a_charset(value: &[u8]) -> bool {
    let name = String::from_utf8_lossy(value).to_ascii_lowercase();
    let starts = ["utf", "iso-8859", "iso8859", "latin", "windows-", "us-ascii"];
    starts.iter().any(|start| name.starts_with(start))
        || matches!(name.as_str(), "ascii" | "binary" | "7bit" | "8bit" | "base64" | "none")
}

/// What HTTP cannot carry in its own place, unless it is among the message's headers anyway.
fn put_unfit(
    headers: &mut HeaderMap,
    budget: &mut Budget,
    envelope: &Envelope,
    name: &'static str,
    value: &[u8],
) {
    if envelope.header(name).is_some() {
        return;
    }
    let full = HeaderName::try_from(format!("inbox-header-{name}"));
    if let Ok(full) = full {
        budget.put(headers, full, &names::encode_value(value), name.as_bytes());
    }
}

/// The forward's own context, or the message's: a valid one passes unchanged, an invalid one is
/// left out, so that the application starts a trace of its own.
fn put_trace(headers: &mut HeaderMap, request: &ForwardRequest<'_>) {
    let (parent, state) = match request.trace {
        Some(own) => (
            Some(own.traceparent.as_bytes()),
            own.tracestate.as_ref().map(|state| state.as_bytes()),
        ),
        None => (request.envelope.traceparent.as_deref(), request.envelope.tracestate.as_deref()),
    };
    let parent = parent.filter(|value| is_valid_traceparent(value));
    let Some(parent) = parent.and_then(|value| HeaderValue::from_bytes(value).ok()) else { return };
    headers.insert("traceparent", parent);
    let state = state.filter(|value| is_valid_tracestate(value));
    if let Some(state) = state.and_then(|value| HeaderValue::from_bytes(value).ok()) {
        headers.insert("tracestate", state);
    }
}

fn put_fields(headers: &mut HeaderMap, budget: &mut Budget, request: &ForwardRequest<'_>) {
    let envelope = request.envelope;
    for (name, value) in [
        ("inbox-message-type", envelope.message_type.as_deref()),
        ("inbox-producer", envelope.producer.as_deref()),
        ("inbox-correlation-id", envelope.correlation_id.as_deref()),
        ("inbox-causation-id", envelope.causation_id.as_deref()),
        ("inbox-ordering-key", request.ordering_key),
    ] {
        let Some(value) = value else { continue };
        // Encoding makes nothing shorter: what is too long before need not be encoded.
        let encoded = (value.len() <= VALUE_BYTES_MAX).then(|| encode_percent(value));
        match encoded.filter(|encoded| encoded.len() <= VALUE_BYTES_MAX) {
            Some(encoded) => {
                let full = HeaderName::from_static(name);
                budget.put(headers, full, &encoded, name.as_bytes());
            }
            None => budget.omit(name.as_bytes()),
        }
    }
}

/// Puts a value that is percent-encoded or made of digits, which no header refuses.
fn put(headers: &mut HeaderMap, name: &'static str, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        headers.insert(HeaderName::from_static(name), value);
    }
}
