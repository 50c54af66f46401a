//! From an envelope to the identity that deduplication uses.
//!
//! Invariants: two messages that differ in the bytes an extractor looks at never get one
//! id (numbers in JSON are taken as written, never through a float); an id is never trimmed;
//! blank is missing.

use std::borrow::Cow;

use inboxd_contract::{Envelope, Fingerprint, MessageId, MessageRecord, Origin, length_prefixed};
use sha2::{Digest, Sha256};

use super::json;
use super::settings::{Extractor, FingerprintOf, IdentitySettings, KeyFrom, Ordering};

/// Text recorded for audit is left out when longer than this.
const AUDIT_TEXT_BYTES_MAX: usize = 256;

/// Longer lane keys are replaced by their hash, which is the same lane.
const LANE_KEY_BYTES_MAX: usize = 1_024;

/// What identity came to for one delivery.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// The id, if an extractor yielded one.
    pub message_id: Option<MessageId>,
    /// Tells contents of one id apart, where the settings ask for it.
    pub fingerprint: Option<Fingerprint>,
}

/// Applies the extractors in order; the first that yields a non-blank value wins.
pub fn identify(settings: &IdentitySettings, envelope: &Envelope) -> Identity {
    let found = settings.extractors.iter().find_map(|extractor| {
        let bytes = extract(extractor, envelope)?;
        let bytes = if settings.scope_by_producer {
            length_prefixed(envelope.producer.as_deref().unwrap_or_default(), &bytes)
        } else {
            bytes
        };
        Some((extractor, MessageId::from_bytes(&bytes)?))
    });
    let folds_bodies = found.as_ref().is_some_and(|(extractor, _)| {
        matches!(extractor, Extractor::Hash(_) | Extractor::KafkaKey)
    });
    Identity {
        message_id: found.map(|(_, id)| id),
        fingerprint: if folds_bodies { None } else { fingerprint(&settings.fingerprint, envelope) },
    }
}

fn extract(extractor: &Extractor, envelope: &Envelope) -> Option<Vec<u8>> {
    match extractor {
        Extractor::Property => not_blank(envelope.property_id.as_deref()?),
        Extractor::Header(name) => envelope
            .headers
            .iter()
            .filter(|header| header.name.eq_ignore_ascii_case(name.as_bytes()))
            .find_map(|header| not_blank(header.value.as_deref()?)),
        Extractor::CloudEvents => cloud_event_id(envelope),
        Extractor::Json(pointer) => {
            not_blank(json::scalar_at(envelope.body.as_deref()?, pointer)?.as_bytes())
        }
        Extractor::Hash(pointers) => hash_of(envelope.body.as_deref()?, pointers),
        Extractor::BodyHash => {
            let body = envelope.body.as_deref()?;
            Some(format!("body:{}", hex::encode(Sha256::digest(body))).into_bytes())
        }
        Extractor::KafkaKey => not_blank(envelope.key.as_deref()?),
        Extractor::KafkaPosition => match &envelope.origin {
            Origin::Kafka { partition, offset, position_scope: Some(scope), .. } => {
                Some(format!("{scope}/{partition}/{offset}").into_bytes())
            }
            Origin::Memory { .. } => Some(envelope.origin.to_string().into_bytes()),
            _ => None,
        },
    }
}

fn not_blank(bytes: &[u8]) -> Option<Vec<u8>> {
    (!bytes.iter().all(u8::is_ascii_whitespace)).then(|| bytes.to_vec())
}

/// An id derived from the business fact: every pointer must yield a value.
fn hash_of(body: &[u8], pointers: &[String]) -> Option<Vec<u8>> {
    let mut hasher = Sha256::new();
    for pointer in pointers {
        let value = json::text_at(body, pointer)?;
        hasher.update(length_prefixed(value.as_bytes(), b""));
    }
    Some(format!("hash:{}", hex::encode(hasher.finalize())).into_bytes())
}

/// One attribute of a CloudEvent in binary mode, whatever the broker's prefix
/// (Kafka `ce_`, AMQP `cloudEvents:` or `cloudEvents_`, HTTP `ce-`), in any case.
fn cloud_event_header<'a>(envelope: &'a Envelope, attribute: &str) -> Option<&'a [u8]> {
    const PREFIXES: [&str; 4] = ["ce_", "ce-", "cloudevents:", "cloudevents_"];
    envelope.headers.iter().find_map(|header| {
        let name = std::str::from_utf8(&header.name).ok()?.to_ascii_lowercase();
        let bare = PREFIXES.iter().find_map(|prefix| name.strip_prefix(prefix))?;
        (bare == attribute).then_some(())?;
        header.value.as_deref().filter(|value| !value.iter().all(u8::is_ascii_whitespace))
    })
}

/// True for a CloudEvent in structured JSON mode.
pub fn is_structured_cloud_event(envelope: &Envelope) -> bool {
    const TYPE: &[u8] = b"application/cloudevents+json";
    envelope.content_type.as_deref().is_some_and(|content_type| {
        content_type.len() >= TYPE.len() && content_type[..TYPE.len()].eq_ignore_ascii_case(TYPE)
    })
}

fn cloud_event_id(envelope: &Envelope) -> Option<Vec<u8>> {
    if let Some(id) = cloud_event_header(envelope, "id") {
        let source = cloud_event_header(envelope, "source").unwrap_or_default();
        return Some(length_prefixed(source, id));
    }
    if !is_structured_cloud_event(envelope) {
        return None;
    }
    let body = envelope.body.as_deref()?;
    let id = not_blank(json::scalar_at(body, "/id")?.as_bytes())?;
    let source = json::scalar_at(body, "/source").unwrap_or_default();
    Some(length_prefixed(source.as_bytes(), &id))
}

/// The message's type: the broker's property or the header `message-type`, else that of a
/// CloudEvent of either mode. Blank is missing: clients set the property to nothing.
pub fn message_type(envelope: &Envelope) -> Option<Cow<'_, [u8]>> {
    let named = envelope
        .message_type
        .as_deref()
        .filter(|value| !value.iter().all(u8::is_ascii_whitespace))
        .or_else(|| cloud_event_header(envelope, "type"));
    if named.is_some() || !is_structured_cloud_event(envelope) {
        return named.map(Cow::Borrowed);
    }
    let of_event = json::scalar_at(envelope.body.as_deref()?, "/type")?;
    Some(Cow::Owned(of_event.into_bytes()))
}

fn fingerprint(of: &FingerprintOf, envelope: &Envelope) -> Option<Fingerprint> {
    match of {
        FingerprintOf::Off => None,
        FingerprintOf::Json(pointer) => json::text_at(envelope.body.as_deref()?, pointer)
            .map(|text| Fingerprint::of(text.as_bytes())),
        FingerprintOf::Body => {
            let Some(body) = envelope.body.as_deref() else {
                return Some(Fingerprint::of(b"\0tombstone"));
            };
            if is_structured_cloud_event(envelope) {
                let part = |pointer| json::text_at(body, pointer).unwrap_or_default();
                let mut parts = length_prefixed(part("/type").as_bytes(), b"");
                parts.extend(length_prefixed(part("/data").as_bytes(), b""));
                parts.extend(length_prefixed(part("/data_base64").as_bytes(), b""));
                return Some(Fingerprint::of(&parts));
            }
            Some(Fingerprint::of(body))
        }
    }
}

/// The key of the delivery's lane; `None`: it is in no lane. The empty key is a
/// key; with [`Ordering::Partition`] all share one. A long key is replaced by its hash.
pub fn lane_key(ordering: Ordering, from: &KeyFrom, envelope: &Envelope) -> Option<Vec<u8>> {
    let key = whole_lane_key(ordering, from, envelope)?;
    if key.len() <= LANE_KEY_BYTES_MAX {
        return Some(key);
    }
    Some(format!("sha256:{}", hex::encode(Sha256::digest(&key))).into_bytes())
}

fn whole_lane_key(ordering: Ordering, from: &KeyFrom, envelope: &Envelope) -> Option<Vec<u8>> {
    match ordering {
        Ordering::None => None,
        Ordering::Partition => Some(Vec::new()),
        Ordering::Key => match from {
            KeyFrom::RecordKey => envelope.key.as_deref().map(<[u8]>::to_vec),
            KeyFrom::Header(name) => envelope.header(name).map(|value| value.to_vec()),
            KeyFrom::RoutingKey => match &envelope.origin {
                Origin::RabbitMq { routing_key, .. } => Some(routing_key.as_bytes().to_vec()),
                _ => None,
            },
            KeyFrom::Json(pointer) => {
                json::scalar_at(envelope.body.as_deref()?, pointer).map(String::into_bytes)
            }
        },
    }
}

/// What is recorded of a message for audit. Text that a column could not hold is left out.
pub fn record(envelope: &Envelope, fingerprint: Option<Fingerprint>) -> MessageRecord {
    MessageRecord {
        fingerprint,
        producer: audit_text(envelope.producer.as_deref())
            .or_else(|| audit_text(cloud_event_header(envelope, "source"))),
        message_type: audit_text(envelope.message_type.as_deref())
            .or_else(|| audit_text(cloud_event_header(envelope, "type"))),
        correlation_id: audit_text(envelope.correlation_id.as_deref()),
        causation_id: audit_text(envelope.causation_id.as_deref()),
    }
}

fn audit_text(bytes: Option<&[u8]>) -> Option<String> {
    let text = std::str::from_utf8(bytes?).ok()?;
    (text.len() <= AUDIT_TEXT_BYTES_MAX && !text.contains('\0')).then(|| text.to_owned())
}

#[cfg(test)]
mod tests;
