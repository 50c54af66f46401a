//! The message's own headers: under their prefix, and as a CloudEvent in binary mode.

use http::{HeaderMap, HeaderName};
use inboxd_contract::{Envelope, Header};

use super::budget::{Budget, HEADER_LINES_MAX};
use super::names::{
    encode_cloud_event_value, encode_value, full_name, is_never_copied, is_reserved, normalised,
};
use crate::{HeaderCopy, HeaderPolicy, HttpConfigError};

/// How CloudEvents attributes are prefixed on Kafka, on AMQP (two ways), and over HTTP.
const CLOUD_EVENT_PREFIXES: &[&str] = &["ce_", "cloudevents:", "cloudevents_", "ce-"];
/// Without these, a message is no CloudEvent.
const CLOUD_EVENT_REQUIRED: &[&str] = &["id", "source", "specversion", "type"];
const ATTRIBUTE_BYTES_MAX: usize = 64;

/// A validated [`HeaderPolicy`].
pub(crate) struct CopyRule {
    policy: HeaderPolicy,
}

impl CopyRule {
    /// # Errors
    /// A prefix that is no part of a header's name, or that is empty for all headers.
    pub(crate) fn new(policy: HeaderPolicy) -> Result<Self, HttpConfigError> {
        if policy.prefix.is_empty() && policy.copy == HeaderCopy::All {
            return Err(HttpConfigError::Headers(
                "an empty prefix needs an allow list of names in headers.copy: without one, \
                 whoever publishes could set any header of the request"
                    .into(),
            ));
        }
        if HeaderName::try_from(format!("{}x", policy.prefix)).is_err() {
            return Err(HttpConfigError::Headers(
                "the prefix may have letters, digits and - alone".into(),
            ));
        }
        Ok(Self { policy })
    }

    fn admits(&self, header: &Header) -> bool {
        let named = |names: &[String]| {
            names.iter().any(|name| header.name.eq_ignore_ascii_case(name.as_bytes()))
        };
        match &self.policy.copy {
            HeaderCopy::All => true,
            HeaderCopy::Allow(names) => named(names),
        }
    }

    /// The request header's name, or none where the message may not set it.
    fn name(&self, header: &Header) -> Option<HeaderName> {
        let normal = normalised(&header.name);
        let unasked_baggage = normal == b"baggage" && self.policy.copy == HeaderCopy::All;
        if is_never_copied(&normal) || unasked_baggage {
            return None;
        }
        let full = full_name(&self.policy.prefix, &header.name);
        if is_reserved(&normalised(full.as_bytes())) {
            return None;
        }
        HeaderName::try_from(full).ok()
    }
}

/// The message's headers in order. A null value goes as an empty one; what may not be copied or
/// has no room is named as omitted.
pub(super) fn put_own(
    headers: &mut HeaderMap,
    budget: &mut Budget,
    rule: &CopyRule,
    envelope: &Envelope,
) {
    for header in envelope.headers.iter().filter(|header| rule.admits(header)) {
        // A message may have any number of headers: those that cannot fit cost no encoding.
        if budget.is_spent() {
            budget.omit(&header.name);
            continue;
        }
        let value = header.value.as_deref().unwrap_or_default();
        // Encoding makes nothing shorter: what is too long before need not be encoded.
        let size = header.name.len().max(value.len());
        match rule.name(header).filter(|_| size <= super::HEADERS_BYTES_MAX) {
            Some(name) => budget.put(headers, name, &encode_value(value), &header.name),
            None => budget.omit(&header.name),
        }
    }
}

/// `ce-<attribute>` for a CloudEvent in binary mode. In structured mode the body says it all.
pub(super) fn put_cloud_event(headers: &mut HeaderMap, budget: &mut Budget, envelope: &Envelope) {
    let structured = envelope.content_type.as_deref().is_some_and(|value| {
        value.to_ascii_lowercase().trim_ascii_start().starts_with(b"application/cloudevents")
    });
    let attributes = cloud_event_attributes(envelope);
    let has = |wanted: &&str| attributes.iter().any(|(name, ..)| name == *wanted);
    if structured || !CLOUD_EVENT_REQUIRED.iter().all(has) {
        return;
    }
    for (attribute, header, value) in attributes {
        // In binary mode this is the content type.
        if attribute == "datacontenttype" {
            continue;
        }
        match HeaderName::try_from(format!("ce-{attribute}")) {
            Ok(name) => budget.put(headers, name, &encode_cloud_event_value(value), &header.name),
            Err(_) => budget.omit(&header.name),
        }
    }
}

/// The media type that the publisher of a CloudEvent in binary mode gave as an attribute, although
/// the bindings keep it in the content type alone.
pub(super) fn datacontenttype(envelope: &Envelope) -> Option<&[u8]> {
    let attributes = cloud_event_attributes(envelope);
    let has = |wanted: &&str| attributes.iter().any(|(name, ..)| name == *wanted);
    let is_event = CLOUD_EVENT_REQUIRED.iter().all(has);
    let given = attributes.iter().find(|(name, ..)| name == "datacontenttype");
    given.filter(|_| is_event).map(|(_, _, value)| *value)
}

/// Values are text, and a receiver has to reject what is not. Blank ones are missing, as they are
/// for the message's identity.
fn is_attribute_value(value: &[u8]) -> bool {
    !value.iter().all(u8::is_ascii_whitespace) && std::str::from_utf8(value).is_ok()
}

/// Attribute, header and value; the first of each name, and no more than there is room for.
fn cloud_event_attributes(envelope: &Envelope) -> Vec<(String, &Header, &[u8])> {
    let mut attributes: Vec<(String, &Header, &[u8])> = Vec::new();
    for header in &envelope.headers {
        if attributes.len() >= HEADER_LINES_MAX {
            break;
        }
        let (Some(attribute), Some(value)) = (attribute(&header.name), header.value.as_deref())
        else {
            continue;
        };
        let fits = value.len() <= super::HEADERS_BYTES_MAX && is_attribute_value(value);
        if fits && attributes.iter().all(|(name, ..)| *name != attribute) {
            attributes.push((attribute, header, value));
        }
    }
    attributes
}

/// The attribute's name where this is a CloudEvents header: lower-case letters and digits.
fn attribute(name: &[u8]) -> Option<String> {
    let name = std::str::from_utf8(name).ok()?.to_ascii_lowercase();
    let attribute =
        CLOUD_EVENT_PREFIXES.iter().find_map(|prefix| name.strip_prefix(prefix))?.to_owned();
    let fits = (1..=ATTRIBUTE_BYTES_MAX).contains(&attribute.len())
        && attribute.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
    fits.then_some(attribute)
}
