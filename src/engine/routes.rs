//! Which path of the callback a message goes to.
//!
//! Invariants: a route is chosen once per delivery, by the message alone, so that a retry goes the
//! same way; a pattern is matched in time linear in the value, whatever a publisher put into it.

use std::sync::Arc;

use inboxd_contract::{Envelope, Origin};
use memchr::memmem;

use super::identity;
use super::settings::{OnUnrouted, RouteSettings, SubscriptionSettings};

/// Where a message goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Routed {
    /// To the callback's own path.
    Callback,
    /// To this path and query instead.
    Path(Arc<str>),
    /// Nowhere: recorded as processed.
    Ignored,
    /// Nowhere: kept as a dead letter.
    Nowhere,
}

/// The first route that matches, or the policy for messages without one. Without routes every
/// message goes to the callback.
pub(super) fn route(settings: &SubscriptionSettings, envelope: &Envelope) -> Routed {
    if settings.routes.is_empty() {
        return Routed::Callback;
    }
    // Reading it may mean to parse the body: once for all routes, and only where one asks.
    let by_type = settings.routes.iter().any(|route| route.message_type.is_some());
    let message_type = by_type.then(|| identity::message_type(envelope)).flatten();
    let matching =
        settings.routes.iter().find(|route| is_match(route, message_type.as_deref(), envelope));
    match (matching, settings.on_unrouted) {
        (Some(route), _) => Routed::Path(route.path.clone()),
        (None, OnUnrouted::Forward) => Routed::Callback,
        (None, OnUnrouted::Ignore) => Routed::Ignored,
        (None, OnUnrouted::DeadLetter) => Routed::Nowhere,
    }
}

fn is_match(route: &RouteSettings, message_type: Option<&[u8]>, envelope: &Envelope) -> bool {
    let RouteSettings { name: _, message_type: of_type, routing_key, header, path: _ } = route;
    let type_fits = of_type
        .as_deref()
        .is_none_or(|pattern| message_type.is_some_and(|value| matches(pattern, value)));
    let key_fits = routing_key.as_deref().is_none_or(|pattern| match &envelope.origin {
        Origin::RabbitMq { routing_key, .. } => matches(pattern, routing_key.as_bytes()),
        Origin::Kafka { .. } | Origin::Memory { .. } => false,
    });
    let header_fits = header.as_ref().is_none_or(|wanted| {
        envelope.headers.iter().any(|header| {
            header.name.eq_ignore_ascii_case(wanted.name.as_bytes())
                && header.value.as_deref().is_some_and(|value| matches(&wanted.value, value))
        })
    });
    type_fits && key_fits && header_fits
}

/// `*` is any run of bytes, none included; everything else is itself.
fn matches(pattern: &str, value: &[u8]) -> bool {
    let mut parts = pattern.split('*').map(str::as_bytes);
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = value.strip_prefix(first) else { return false };
    let Some(last) = parts.next_back() else { return rest.is_empty() };
    for part in parts {
        let Some(at) = memmem::find(rest, part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use inboxd_contract::Header;
    use proptest::prelude::*;

    use super::super::settings::HeaderPattern;
    use super::*;

    #[test]
    fn a_star_is_any_run_and_everything_else_is_itself() {
        for (pattern, value) in [
            ("order.created", "order.created"),
            ("order.*", "order."),
            ("order.*", "order.created"),
            ("*", ""),
            ("*.created", "order.created"),
            ("a*b*c", "a-b-b-c"),
            ("a*b*c", "abc"),
            ("**", "x"),
            ("a*a", "aa"),
            ("?", "?"),
        ] {
            assert!(matches(pattern, value.as_bytes()), "{pattern} {value}");
        }
        for (pattern, value) in [
            ("order.created", "order.created.v2"),
            ("order.created", "Order.created"),
            ("order.*", "order"),
            ("a*a", "a"),
            ("a*bc*c", "abc"),
            ("?", "x"),
            ("", "x"),
        ] {
            assert!(!matches(pattern, value.as_bytes()), "{pattern} {value}");
        }
        assert!(matches("a*", b"a\xff\x00"));
    }

    proptest! {
        /// Against the obvious way, which tries every length of every star.
        #[test]
        fn patterns_match_as_the_obvious_way_says(pattern in "[ab*]{0,8}", value in "[ab]{0,10}") {
            fn obvious(pattern: &[u8], value: &[u8]) -> bool {
                match pattern.split_first() {
                    None => value.is_empty(),
                    Some((b'*', rest)) => {
                        (0..=value.len()).any(|taken| obvious(rest, &value[taken..]))
                    }
                    Some((byte, rest)) => {
                        value.first() == Some(byte) && obvious(rest, &value[1..])
                    }
                }
            }
            prop_assert_eq!(
                matches(&pattern, value.as_bytes()),
                obvious(pattern.as_bytes(), value.as_bytes())
            );
        }
    }

    fn envelope() -> Envelope {
        let origin = Origin::RabbitMq {
            queue: "q".into(),
            exchange: "".into(),
            routing_key: "eu.orders".into(),
            redelivered: false,
            delivery_count: None,
        };
        let mut envelope = Envelope::new(origin, None);
        envelope.message_type = Some(Bytes::from_static(b"order.created"));
        envelope.headers.push(Header::new("Tenant", "one"));
        envelope.headers.push(Header::new("tenant", "two"));
        envelope.headers.push(Header { name: "nothing".into(), value: None });
        envelope
    }

    fn to(path: &str) -> RouteSettings {
        RouteSettings {
            name: path.into(),
            message_type: None,
            routing_key: None,
            header: None,
            path: path.into(),
        }
    }

    #[test]
    fn all_that_a_route_names_must_match() {
        let header = |name: &str, value: &str| {
            Some(HeaderPattern { name: name.to_owned(), value: value.to_owned() })
        };
        let envelope = envelope();
        let fits = |route: RouteSettings| is_match(&route, Some(b"order.created"), &envelope);
        assert!(fits(RouteSettings { message_type: Some("order.*".into()), ..to("/") }));
        assert!(fits(RouteSettings { routing_key: Some("*.orders".into()), ..to("/") }));
        assert!(fits(RouteSettings { header: header("TENANT", "two"), ..to("/") }));
        assert!(!fits(RouteSettings { header: header("tenant", "three"), ..to("/") }));
        assert!(!fits(RouteSettings { header: header("nothing", "*"), ..to("/") }));
        assert!(!fits(RouteSettings {
            message_type: Some("order.*".into()),
            routing_key: Some("us.*".into()),
            ..to("/")
        }));
        assert!(!is_match(
            &RouteSettings { message_type: Some("*".into()), ..to("/") },
            None,
            &envelope
        ));
    }
}
