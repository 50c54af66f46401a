//! What a subscription calls, and how the answers are read.

use std::time::Duration;

use base64::Engine as _;
use base64::alphabet::STANDARD;
use base64::engine::DecodePaddingMode;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig};
use secrecy::{ExposeSecret, SecretString};

use super::broker::tls_files;
use super::model::{CallbackConfig, Contract, HeadersCopy, MappedVerdict, StatusPattern};
use super::problem::{Fault, quote};
use super::reader::Section;
use super::{headers, names};

const HEADER_PREFIX_BYTES_MAX: usize = 64;
const SIGNING_PREFIX: &str = "whsec_";
/// What Standard Webhooks asks of a secret's bytes.
const SIGNING_BYTES: std::ops::RangeInclusive<usize> = 24..=64;

/// `contract`.
pub(super) const CONTRACTS: [(&str, Contract); 2] =
    [("plain", Contract::Plain), ("dapr", Contract::Dapr)];

/// The values of `status_map`.
pub(super) const VERDICTS: [(&str, MappedVerdict); 4] = [
    ("accepted", MappedVerdict::Accepted),
    ("refused", MappedVerdict::Refused),
    ("retry", MappedVerdict::Retry),
    ("drop", MappedVerdict::Drop),
];

/// Reads the keys of the application; `None` where it has no address.
pub(super) fn read(section: &Section<'_>) -> Option<CallbackConfig> {
    let url = section.parse("callback", names::callback);
    if !section.has("callback") {
        section.missing(
            "callback",
            "set the application's route: http://127.0.0.1:8080/orders (flag --callback)",
        );
    }
    let callback_timeout = timeout(section);
    let connect = section.duration("connect_timeout");
    if section.has("connect_timeout") && connect > callback_timeout {
        section.problem(
            "connect_timeout",
            Fault::new("it is above callback_timeout, which ends it", "set it to less"),
        );
    }
    let headers = section.section("headers");
    let headers_copy = match headers.list("copy") {
        None => HeadersCopy::All,
        Some(names) if names == ["all"] => HeadersCopy::All,
        Some(names) if names == ["none"] => HeadersCopy::Named(Vec::new()),
        Some(names) => HeadersCopy::Named(names),
    };
    let prefix = headers.parse("prefix", header_prefix);
    if prefix.as_deref() == Some("") && headers_copy == HeadersCopy::All {
        headers.problem(
            "prefix",
            Fault::new(
                "without a prefix a publisher could set any header of the request",
                "name the headers to copy in headers.copy, or keep a prefix",
            ),
        );
    }
    let headers_prefix = prefix.unwrap_or_else(|| "Inbox-Header-".to_owned());
    let headers_set = headers::read(&headers.section("set"), may_be_set);
    let tls = tls_files(&section.section("tls"), false);
    let http2 = section.switch("callback_http2");
    let health_url = section.parse("health_url", names::callback);
    if section.has("health_interval") && !section.has("health_url") {
        let remedy = "set health_url, or leave it out";
        section
            .problem("health_interval", Fault::new("it has no effect without health_url", remedy));
    }
    Some(CallbackConfig {
        url: url?,
        health_url,
        connect_timeout: connect.min(callback_timeout),
        http2,
        headers_copy,
        headers_prefix,
        headers_set,
        tls,
        contract: section.choice("contract", &CONTRACTS),
        status_map: status_map(&section.section("status_map")),
        signing: signing(&section.section("signing")),
    })
}

/// What a header's name may begin with.
pub(super) fn header_prefix(text: &str) -> Result<String, Fault> {
    let fits = text.is_empty() || headers::is_token(text) && text.len() <= HEADER_PREFIX_BYTES_MAX;
    if fits {
        return Ok(text.to_owned());
    }
    Err(Fault::new(
        format!("{} cannot begin a header's name", quote(text)),
        format!("use letters, digits and -, at most {HEADER_PREFIX_BYTES_MAX}"),
    ))
}

/// `callback_timeout`.
pub(super) fn timeout(section: &Section<'_>) -> Duration {
    section.duration("callback_timeout")
}

/// Names that neither the contract nor HTTP itself needs.
pub(super) fn may_be_set(name: &str) -> Result<(), Fault> {
    headers::check_name(name)?;
    if inboxd_http::is_settable(name) {
        return Ok(());
    }
    Err(Fault::new(
        format!("{name} belongs to the contract with the application, or to HTTP itself"),
        "leave it out; docs/http-contract.md has what each request carries",
    ))
}

/// `[….status_map]`: codes before classes.
fn status_map(section: &Section<'_>) -> Vec<(StatusPattern, MappedVerdict)> {
    let mut map: Vec<_> = section
        .names()
        .into_iter()
        .filter_map(|name| {
            let verdict = section.word(name, &VERDICTS);
            let pattern =
                status_pattern(name).map_err(|fault| section.unreadable(name, fault)).ok();
            Some((pattern?, verdict?))
        })
        .collect();
    map.sort_by_key(|(pattern, _)| *pattern);
    map
}

/// A status, or a class of them.
pub(super) fn status_pattern(text: &str) -> Result<StatusPattern, Fault> {
    let bytes = text.as_bytes();
    let first = bytes.first().filter(|first| (b'2'..=b'9').contains(first));
    match (first, bytes) {
        (Some(first), [_, b'x' | b'X', b'x' | b'X']) => Ok(StatusPattern::Class(first - b'0')),
        (Some(_), [_, _, _]) if bytes.iter().all(u8::is_ascii_digit) => {
            Ok(StatusPattern::Code(text.parse().unwrap_or_default()))
        }
        _ => Err(Fault::new(
            format!("{} is no final status", quote(text)),
            "write three digits from 200, like 404, or a class, like 4xx",
        )),
    }
}

/// `[….signing]`: secrets of Standard Webhooks, themselves or in files.
fn signing(section: &Section<'_>) -> Vec<SecretString> {
    let (secrets, key) = section.secrets("secrets");
    for (at, secret) in secrets.iter().enumerate() {
        if let Err(Fault { what, remedy }) = signing_secret(secret.expose_secret()) {
            section.unreadable(key, Fault::new(format!("entry {}: {what}", at + 1), remedy));
        }
    }
    secrets
}

/// Faults show nothing of the secret.
pub(super) fn signing_secret(secret: &str) -> Result<(), Fault> {
    let remedy = "use whsec_ followed by the output of: openssl rand -base64 32";
    let text = secret.strip_prefix(SIGNING_PREFIX);
    let text =
        text.ok_or_else(|| Fault::new(format!("it does not begin with {SIGNING_PREFIX}"), remedy))?;
    let padding =
        GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent);
    let bytes = GeneralPurpose::new(&STANDARD, padding)
        .decode(text)
        .map_err(|_| Fault::new(format!("what follows {SIGNING_PREFIX} is no base64"), remedy))?;
    if SIGNING_BYTES.contains(&bytes.len()) {
        return Ok(());
    }
    Err(Fault::new(
        format!(
            "it has {} bytes when decoded, which must be {} to {}",
            bytes.len(),
            SIGNING_BYTES.start(),
            SIGNING_BYTES.end()
        ),
        remedy,
    ))
}
