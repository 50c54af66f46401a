//! What a subscription calls, and how the answers are read.

use std::time::Duration;

use base64::Engine as _;
use base64::alphabet::STANDARD;
use base64::engine::DecodePaddingMode;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig};
use secrecy::{ExposeSecret, SecretString};

use super::broker::tls_files;
use super::model::{CallbackConfig, Contract, HeadersCopy, MappedVerdict, StatusPattern};
use super::problem::Fault;
use super::reader::{Section, read_secret};
use super::units::{minutes, seconds};
use super::{headers, names};

const HEADERS_MAX: usize = 256;
const HEADER_PREFIX_BYTES_MAX: usize = 64;
const SIGNING_SECRETS_MAX: usize = 16;
const SIGNING_PREFIX: &str = "whsec_";
/// What Standard Webhooks asks of a secret's bytes.
const SIGNING_BYTES: std::ops::RangeInclusive<usize> = 24..=64;

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
    let connect =
        section.duration("connect_timeout", seconds(5), Duration::from_millis(10)..=minutes(5));
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
        Some(names) => HeadersCopy::Named(header_names(&headers, names)),
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
    headers.finish();
    let tls = tls_files(section.section("tls"));
    let http2 = section.switch("callback_http2", false);
    Some(CallbackConfig {
        url: url?,
        connect_timeout: connect.min(callback_timeout),
        http2,
        headers_copy,
        headers_prefix,
        headers_set,
        tls,
        contract: section
            .choice("contract", &[("plain", Contract::Plain), ("dapr", Contract::Dapr)])
            .unwrap_or_default(),
        status_map: status_map(&section.section("status_map")),
        signing: signing(section.section("signing")),
    })
}

fn header_names(headers: &Section<'_>, names: Vec<String>) -> Vec<String> {
    let bad = names.iter().find(|name| !headers::is_token(name)).cloned();
    if let Some(name) = bad {
        headers.problem(
            "copy",
            Fault::new(
                format!("{name:?} is no header's name"),
                "list names, or set \"all\" or \"none\"",
            ),
        );
    }
    if names.len() > HEADERS_MAX {
        headers.problem(
            "copy",
            Fault::new(
                format!("it has {} names, the most is {HEADERS_MAX}", names.len()),
                "name fewer, or set \"all\"",
            ),
        );
    }
    names
}

fn header_prefix(text: &str) -> Result<String, Fault> {
    let fits = text.is_empty() || headers::is_token(text) && text.len() <= HEADER_PREFIX_BYTES_MAX;
    if fits {
        return Ok(text.to_owned());
    }
    Err(Fault::new(
        format!("{text:?} cannot begin a header's name"),
        format!("use letters, digits and -, at most {HEADER_PREFIX_BYTES_MAX}"),
    ))
}

/// `callback_timeout`.
pub(super) fn timeout(section: &Section<'_>) -> Duration {
    section.duration("callback_timeout", seconds(30), Duration::from_millis(10)..=minutes(60))
}

/// Names that neither the contract nor HTTP itself needs.
fn may_be_set(name: &str) -> Result<(), Fault> {
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
    let mut map: Vec<(StatusPattern, MappedVerdict)> = Vec::new();
    for name in section.names() {
        let verdict = section.choice(
            name,
            &[
                ("accepted", MappedVerdict::Accepted),
                ("refused", MappedVerdict::Refused),
                ("retry", MappedVerdict::Retry),
                ("drop", MappedVerdict::Drop),
            ],
        );
        match status_pattern(name) {
            Ok(pattern) if map.iter().any(|(known, _)| *known == pattern) => {
                section.problem(name, Fault::new("it is there twice", "write it once"));
            }
            Ok(pattern) => map.extend(verdict.map(|verdict| (pattern, verdict))),
            Err(fault) => section.problem(name, fault),
        }
    }
    map.sort_by_key(|(pattern, _)| *pattern);
    map
}

fn status_pattern(text: &str) -> Result<StatusPattern, Fault> {
    let bytes = text.as_bytes();
    let first = bytes.first().filter(|first| (b'2'..=b'9').contains(first));
    match (first, bytes) {
        (Some(first), [_, b'x' | b'X', b'x' | b'X']) => Ok(StatusPattern::Class(first - b'0')),
        (Some(_), [_, _, _]) if bytes.iter().all(u8::is_ascii_digit) => {
            Ok(StatusPattern::Code(text.parse().unwrap_or_default()))
        }
        _ => Err(Fault::new(
            format!("{text:?} is no final status"),
            "write three digits from 200, like 404, or a class, like 4xx",
        )),
    }
}

/// `[….signing]`: secrets of Standard Webhooks, themselves or in files.
fn signing(section: Section<'_>) -> Vec<SecretString> {
    let (secrets, files) = (section.list("secrets"), section.list("secret_files"));
    let (key, given): (_, Vec<Result<SecretString, Fault>>) = match (secrets, files) {
        (Some(_), Some(_)) => {
            section.problem(
                "secret_files",
                Fault::new("secrets is set too", "set secrets or secret_files, not both"),
            );
            ("secret_files", Vec::new())
        }
        (Some(secrets), None) => {
            ("secrets", secrets.into_iter().map(|secret| Ok(secret.into())).collect())
        }
        (None, Some(files)) => {
            ("secret_files", files.iter().map(|file| read_secret(file.as_ref())).collect())
        }
        (None, None) => ("secrets", Vec::new()),
    };
    if given.len() > SIGNING_SECRETS_MAX {
        section.problem(
            key,
            Fault::new(
                format!("it has {} entries, the most is {SIGNING_SECRETS_MAX}", given.len()),
                "keep those that the application still knows",
            ),
        );
    }
    let mut signing = Vec::new();
    for (at, secret) in given.into_iter().enumerate() {
        match secret.and_then(|secret| signing_secret(&secret).map(|()| secret)) {
            Ok(secret) => signing.push(secret),
            Err(Fault { what, remedy }) => {
                section.problem(key, Fault::new(format!("entry {}: {what}", at + 1), remedy));
            }
        }
    }
    section.finish();
    signing
}

/// Faults show nothing of the secret.
fn signing_secret(secret: &SecretString) -> Result<(), Fault> {
    let remedy = "use whsec_ followed by the output of: openssl rand -base64 32";
    let text = secret.expose_secret().strip_prefix(SIGNING_PREFIX);
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
