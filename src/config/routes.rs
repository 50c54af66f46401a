//! `[subscription.NAME.route.NAME]`: which messages go to which path.

use super::address::BrokerKind;
use super::headers;
use super::names;
use super::problem::Fault;
use super::reader::Section;
use crate::engine::{HeaderPattern, OnUnrouted, RouteSettings};

const ROUTES_MAX: usize = 256;
const PATTERN_BYTES_MAX: usize = 1_024;
const PATH_BYTES_MAX: usize = 4_096;

/// Reads `route` and `on_unrouted`. Routes come in the order of their names.
pub(super) fn read(section: &Section<'_>, kind: BrokerKind) -> (Vec<RouteSettings>, OnUnrouted) {
    let table = section.section("route");
    let names = table.names();
    if names.len() > ROUTES_MAX {
        section.problem(
            "route",
            Fault::new(
                format!("there are {}, the most is {ROUTES_MAX}", names.len()),
                "use patterns with *",
            ),
        );
    }
    let on_unrouted = section.choice(
        "on_unrouted",
        &[
            ("dead_letter", OnUnrouted::DeadLetter),
            ("ignore", OnUnrouted::Ignore),
            ("forward", OnUnrouted::Forward),
        ],
    );
    if section.has("on_unrouted") && names.is_empty() {
        section.problem(
            "on_unrouted",
            Fault::new(
                "it has no effect without a route",
                format!("add [{}.NAME], or leave it out", section.key("route")),
            ),
        );
    }
    let routes =
        names.into_iter().filter_map(|name| route(name, table.section(name), kind)).collect();
    (routes, on_unrouted.unwrap_or_default())
}

fn route(name: &str, section: Section<'_>, kind: BrokerKind) -> Option<RouteSettings> {
    if let Err(fault) = names::table_name(name) {
        section.problems.add(section.place(), section.path.clone(), fault);
    }
    let message_type = section.parse("type", pattern);
    let routing_key = section.parse("routing_key", |text| match kind {
        BrokerKind::RabbitMq => pattern(text),
        BrokerKind::Kafka => {
            Err(Fault::new("Kafka's records have no routing key", "match by type or header"))
        }
    });
    let header = section.parse("header", header_pattern);
    let path = section.parse("path", path);
    if !["type", "routing_key", "header"].iter().any(|key| section.has(key)) {
        section.missing("type", "say what it matches: type, routing_key or header (name=value)");
    }
    if !section.has("path") {
        section.missing("path", "set the path of the application's route, like \"/refunds\"");
    }
    section.finish();
    Some(RouteSettings { name: name.into(), message_type, routing_key, header, path: path?.into() })
}

fn pattern(text: &str) -> Result<String, Fault> {
    names::broker_text(text, PATTERN_BYTES_MAX)
}

fn header_pattern(text: &str) -> Result<HeaderPattern, Fault> {
    let fault = || {
        Fault::new(
            format!("{text:?} is no header with its value"),
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

fn path(text: &str) -> Result<String, Fault> {
    let text = text.trim();
    let fits = text.starts_with('/')
        && !text.starts_with("//")
        && text.len() <= PATH_BYTES_MAX
        && text.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'#' && byte != b'\\');
    if fits {
        return Ok(text.to_owned());
    }
    Err(Fault::new(
        format!("{text:?} is no path of a request"),
        format!(
            "write /path?query, one / first, percent-encoded, at most {PATH_BYTES_MAX} bytes; the \
             host is the callback's"
        ),
    ))
}
