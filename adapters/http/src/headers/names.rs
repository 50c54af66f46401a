//! Which names may come from a message, and how bytes become header text.

use inboxd_contract::encode_percent;

/// Hop-by-hop, framing and authentication: never copied, whatever the prefix is.
const NEVER: &[&str] = &[
    "authentication-info",
    "authorization",
    "connection",
    "content-length",
    "cookie",
    "expect",
    "host",
    "http2-settings",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authentication-info",
    "proxy-authorization",
    "proxy-connection",
    "set-cookie",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "www-authenticate",
];

/// Names that the contract or the way to the application gives a meaning.
const RESERVED: &[&str] = &[
    "accept",
    "content-encoding",
    "content-type",
    "forwarded",
    "idempotency-key",
    "traceparent",
    "tracestate",
    "user-agent",
    "via",
    "x-real-ip",
];

/// Names that begin with these are reserved as well, `Inbox-Header-` excepted.
const RESERVED_PREFIXES: &[&str] = &["inbox-", "ce-", "webhook-", "x-forwarded-", "x-http-method"];

/// For comparing: lower case, and `_` like `-`, since CGI and its descendants (WSGI, PHP)
/// make one name of both.
pub(super) fn normalised(name: &[u8]) -> Vec<u8> {
    let fold = |byte: &u8| if *byte == b'_' { b'-' } else { byte.to_ascii_lowercase() };
    name.iter().map(fold).collect()
}

/// Never copied. Expects a normalised name.
pub(super) fn is_never_copied(normal: &[u8]) -> bool {
    NEVER.iter().any(|name| name.as_bytes() == normal)
}

/// Must not come from a message as the whole name of a request's header. Expects a
/// normalised name.
pub(super) fn is_reserved(normal: &[u8]) -> bool {
    let begins = |prefix: &str| normal.starts_with(prefix.as_bytes());
    if begins("inbox-header-") {
        return false;
    }
    is_never_copied(normal)
        || RESERVED.iter().any(|name| name.as_bytes() == normal)
        || RESERVED_PREFIXES.iter().any(|prefix| begins(prefix))
}

/// May be set to a fixed value by the configuration: whatever does not break framing or the
/// contract.
pub fn is_settable(name: &str) -> bool {
    let normal = normalised(name.as_bytes());
    let credentials = matches!(
        normal.as_slice(),
        b"authorization" | b"cookie" | b"proxy-authorization" | b"host"
    );
    let contract = normal.starts_with(b"inbox-")
        || matches!(
            normal.as_slice(),
            b"idempotency-key"
                | b"traceparent"
                | b"tracestate"
                | b"content-type"
                | b"content-encoding"
        );
    credentials || !(is_never_copied(&normal) || contract)
}

/// `prefix` and the name, percent-encoded but for RFC 3986's unreserved characters.
pub(super) fn full_name(prefix: &str, name: &[u8]) -> String {
    format!("{prefix}{}", encode_percent(name)).to_ascii_lowercase()
}

/// Visible ASCII and the spaces between stay; every other byte, `%`, and spaces at either
/// end are percent-encoded, so that one decoding gives the bytes back.
pub(super) fn encode_value(value: &[u8]) -> String {
    let blank = |byte: &u8| *byte == b' ';
    let begin = value.iter().position(|byte| !blank(byte)).unwrap_or(value.len());
    let end = value.iter().rposition(|byte| !blank(byte)).map_or(begin, |last| last + 1);
    let mut text = String::with_capacity(value.len());
    for (index, byte) in value.iter().enumerate() {
        let inner_space = blank(byte) && (begin..end).contains(&index);
        if inner_space || (byte.is_ascii_graphic() && *byte != b'%') {
            text.push(char::from(*byte));
        } else {
            push_encoded(&mut text, *byte);
        }
    }
    text
}

/// As the HTTP binding of CloudEvents wants it: space, `"`, `%` and whatever is not visible
/// ASCII are encoded.
pub(super) fn encode_cloud_event_value(value: &[u8]) -> String {
    let mut text = String::with_capacity(value.len());
    for byte in value {
        if byte.is_ascii_graphic() && !matches!(byte, b'"' | b'%') {
            text.push(char::from(*byte));
        } else {
            push_encoded(&mut text, *byte);
        }
    }
    text
}

fn push_encoded(text: &mut String, byte: u8) {
    const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
    text.push('%');
    text.push(char::from(DIGITS[usize::from(byte >> 4)]));
    text.push(char::from(DIGITS[usize::from(byte & 15)]));
}
