//! `[subscription.NAME.route.NAME]`: which messages go to which path.

use super::address::BrokerKind;
use super::headers;
use super::names;
use super::problem::{Fault, quote};
use super::reader::Section;
use crate::engine::{HeaderPattern, OnUnrouted, RouteSettings};

const PATTERN_BYTES_MAX: usize = 1_024;
const PATH_BYTES_MAX: usize = 4_096;

/// `on_unrouted`.
pub(super) const ON_UNROUTED: [(&str, OnUnrouted); 3] = [
    ("dead_letter", OnUnrouted::DeadLetter),
    ("ignore", OnUnrouted::Ignore),
    ("forward", OnUnrouted::Forward),
];

/// Reads `route` and `on_unrouted`. Routes come in the order of their names.
pub(super) fn read(section: &Section<'_>, kind: BrokerKind) -> (Vec<RouteSettings>, OnUnrouted) {
    let names = section.section("route").names();
    if section.has("on_unrouted") && names.is_empty() {
        let remedy = format!("add [{}.NAME], or leave it out", section.key("route"));
        section.problem("on_unrouted", Fault::new("it has no effect without a route", remedy));
    }
    let routes = names
        .into_iter()
        .filter_map(|name| route(name, &section.entry("route", name), kind))
        .collect();
    (routes, section.choice("on_unrouted", &ON_UNROUTED))
}

fn route(name: &str, section: &Section<'_>, kind: BrokerKind) -> Option<RouteSettings> {
    section.refuse_those_of_others(kind);
    let message_type = section.parse("type", pattern);
    let routing_key = section.parse("routing_key", pattern);
    let header = section.parse("header", header_pattern);
    let path = section.parse("path", path);
    if !["type", "routing_key", "header"].iter().any(|key| section.has(key)) {
        section.missing("type", "say what it matches: type, routing_key or header (name=value)");
    }
    if !section.has("path") {
        section.missing("path", "set the path of the application's route, like \"/refunds\"");
    }
    Some(RouteSettings { name: name.into(), message_type, routing_key, header, path: path?.into() })
}

/// A pattern with `*`.
pub(super) fn pattern(text: &str) -> Result<String, Fault> {
    names::broker_text(text, PATTERN_BYTES_MAX)
}

/// `NAME=PATTERN`.
pub(super) fn header_pattern(text: &str) -> Result<HeaderPattern, Fault> {
    let fault = || {
        Fault::new(
            format!("{} is no header with its value", quote(text)),
            "write name=value; * in the value is any run of characters",
        )
    };
    let (name, value) = text.split_once('=').ok_or_else(fault)?;
    let (name, value) = (name.trim(), value.trim());
    if !headers::is_token(name) {
        return Err(fault());
    }
    Ok(HeaderPattern { name: name.to_owned(), value: pattern(value)? })
}

/// Path and query of a request.
pub(super) fn path(text: &str) -> Result<String, Fault> {
    let text = text.trim();
    let fits = text.starts_with('/')
        && !text.starts_with("//")
        && text.len() <= PATH_BYTES_MAX
        && text.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'#' && byte != b'\\');
    if fits {
        return Ok(text.to_owned());
    }
    Err(Fault::new(
        format!("{} is no path of a request", quote(text)),
        format!(
            "write /path?query, one / first, percent-encoded, at most {PATH_BYTES_MAX} bytes; the \
             host is the callback's"
        ),
    ))
}
