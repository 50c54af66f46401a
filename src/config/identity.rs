//! How a subscription finds ids, fingerprints and ordering keys.

use super::address::BrokerKind;
use super::problem::{Fault, quote};
use super::reader::Section;
use crate::engine::{
    Extractor, FingerprintOf, IdentitySettings, KeyFrom, OnIdConflict, OnMissingId, Ordering,
};

const HEADER_NAME_BYTES_MAX: usize = 255;
const POINTER_BYTES_MAX: usize = 1024;
const EXTRACTORS: &str = "property, header:NAME, cloudevents, json:/POINTER, hash:/POINTER,/POINTER, \
                          body-hash, kafka-key or kafka-position";

/// `on_missing_id`.
pub(super) const ON_MISSING_ID: [(&str, OnMissingId); 2] =
    [("dead_letter", OnMissingId::DeadLetter), ("forward", OnMissingId::Forward)];

/// `on_id_conflict`.
pub(super) const ON_ID_CONFLICT: [(&str, OnIdConflict); 2] =
    [("dead_letter", OnIdConflict::DeadLetter), ("duplicate", OnIdConflict::Duplicate)];

/// `ordering`.
pub(super) const ORDERINGS: [(&str, Ordering); 3] =
    [("none", Ordering::None), ("key", Ordering::Key), ("partition", Ordering::Partition)];

/// Reads `message_id`, `scope_by_producer`, `fingerprint` and the policies.
pub(super) fn identity(
    section: &Section<'_>,
    kind: BrokerKind,
    notices: &mut Vec<String>,
) -> IdentitySettings {
    let extractors = match section.list("message_id") {
        Some(items) => explicit(section, kind, items, notices),
        None => defaults(kind),
    };
    IdentitySettings {
        extractors,
        scope_by_producer: section.switch("scope_by_producer"),
        fingerprint: section.parse("fingerprint", fingerprint).unwrap_or_default(),
        on_missing: section.choice("on_missing_id", &ON_MISSING_ID),
        on_missing_is_explicit: section.has("on_missing_id"),
        on_conflict: section.choice("on_id_conflict", &ON_ID_CONFLICT),
    }
}

fn defaults(kind: BrokerKind) -> Vec<Extractor> {
    let mut extractors =
        vec![Extractor::Property, Extractor::Header("message-id".into()), Extractor::CloudEvents];
    if kind == BrokerKind::Kafka {
        extractors.push(Extractor::KafkaPosition);
    }
    extractors
}

fn explicit(
    section: &Section<'_>,
    kind: BrokerKind,
    items: Vec<String>,
    notices: &mut Vec<String>,
) -> Vec<Extractor> {
    let mut extractors = Vec::new();
    if items.is_empty() {
        let fault = Fault::new("the list is empty", format!("name at least one of {EXTRACTORS}"));
        section.problem("message_id", fault);
    }
    for item in items {
        let extractor = match extractor(&item) {
            Ok(extractor) => extractor,
            Err(fault) => {
                section.unreadable("message_id", fault);
                continue;
            }
        };
        match fits(extractor, kind) {
            Ok(extractor) if extractors.contains(&extractor) => section.problem(
                "message_id",
                Fault::new(format!("{} is there twice", quote(&item)), "name each once"),
            ),
            Ok(extractor) => extractors.push(extractor),
            Err(fault) => section.problem("message_id", fault),
        }
    }
    if kind == BrokerKind::Kafka && extractors == [Extractor::Property] {
        notices.push(format!(
            "{}: Kafka's records have no property for an id; every record will be without one",
            section.key("message_id")
        ));
    }
    if extractors.is_empty() { defaults(kind) } else { extractors }
}

/// A list with commas splits `hash:/a,/b` too: what begins with a slash continues it.
pub(super) fn join_hashes(items: Vec<String>) -> Vec<String> {
    let mut joined: Vec<String> = Vec::new();
    for item in items {
        match joined.last_mut() {
            Some(last) if item.starts_with('/') && last.starts_with("hash:") => {
                last.push(',');
                last.push_str(&item);
            }
            _ => joined.push(item),
        }
    }
    joined
}

/// One entry of `message_id`.
pub(super) fn extractor(text: &str) -> Result<Extractor, Fault> {
    let (word, rest) = match text.split_once(':') {
        Some((word, rest)) => (word, Some(rest)),
        None => (text, None),
    };
    match (word, rest) {
        ("property", None) => Ok(Extractor::Property),
        ("cloudevents", None) => Ok(Extractor::CloudEvents),
        ("body-hash", None) => Ok(Extractor::BodyHash),
        ("kafka-key", None) => Ok(Extractor::KafkaKey),
        ("kafka-position", None) => Ok(Extractor::KafkaPosition),
        ("header", Some(name)) => header(name).map(Extractor::Header),
        ("json", Some(at)) => pointer(at).map(Extractor::Json),
        ("hash", Some(list)) => list
            .split(',')
            .map(|at| pointer(at.trim()))
            .collect::<Result<_, _>>()
            .map(Extractor::Hash),
        ("delivery-tag" | "delivery_tag", _) => Err(Fault::new(
            "a delivery tag is another at each delivery: no duplicate would ever be found",
            format!("use what the publisher sets: {EXTRACTORS}"),
        )),
        _ => Err(Fault::new(format!("{} is not known", quote(text)), format!("use {EXTRACTORS}"))),
    }
}

fn fits(extractor: Extractor, kind: BrokerKind) -> Result<Extractor, Fault> {
    match (&extractor, kind) {
        (Extractor::KafkaPosition | Extractor::KafkaKey, BrokerKind::RabbitMq) => Err(Fault::new(
            "RabbitMQ has neither record keys nor positions",
            "use property, header:NAME, cloudevents, json:/POINTER, hash:/POINTER or body-hash",
        )),
        _ => Ok(extractor),
    }
}

fn header(name: &str) -> Result<String, Fault> {
    let fits = !name.trim().is_empty()
        && name.len() <= HEADER_NAME_BYTES_MAX
        && !name.chars().any(char::is_control);
    if fits {
        return Ok(name.to_owned());
    }
    Err(Fault::new(
        format!("{} is no header's name", quote(name)),
        format!("use 1 to {HEADER_NAME_BYTES_MAX} bytes without control characters"),
    ))
}

fn pointer(text: &str) -> Result<String, Fault> {
    let escapes_fit =
        text.split('~').skip(1).all(|after| after.starts_with('0') || after.starts_with('1'));
    if text.starts_with('/') && text.len() <= POINTER_BYTES_MAX && escapes_fit {
        return Ok(text.to_owned());
    }
    Err(Fault::new(
        format!("{} is no JSON pointer", quote(text)),
        format!(
            "write /key/0/key, ~1 for a / and ~0 for a ~ (RFC 6901), at most {POINTER_BYTES_MAX} bytes"
        ),
    ))
}

/// `fingerprint`.
pub(super) fn fingerprint(text: &str) -> Result<FingerprintOf, Fault> {
    match text.split_once(':') {
        None if text == "body" => Ok(FingerprintOf::Body),
        None if text == "off" => Ok(FingerprintOf::Off),
        Some(("json", at)) => pointer(at).map(FingerprintOf::Json),
        _ => Err(Fault::new(
            format!("{} is not known", quote(text)),
            "set body, json:/POINTER or off",
        )),
    }
}

/// Reads `ordering` and `ordering_key`.
pub(super) fn ordering(section: &Section<'_>, kind: BrokerKind) -> (Ordering, KeyFrom) {
    let ordering = section.choice("ordering", &ORDERINGS);
    let given = section.parse("ordering_key", key_from);
    if let Some(fault) = given.as_ref().and_then(|key| key_fits(key, kind).err()) {
        section.problem("ordering_key", fault);
    }
    let is_set = section.has("ordering_key");
    if is_set && ordering != Ordering::Key {
        section.problem(
            "ordering_key",
            Fault::new(
                "it has no effect without ordering = \"key\"",
                "set ordering to \"key\", or leave ordering_key out",
            ),
        );
    }
    if !is_set && ordering == Ordering::Key && kind == BrokerKind::RabbitMq {
        section.missing(
            "ordering_key",
            "say what orders RabbitMQ's messages: header:NAME, routing-key or json:/POINTER",
        );
    }
    (ordering, given.unwrap_or(KeyFrom::RecordKey))
}

/// `ordering_key`.
pub(super) fn key_from(text: &str) -> Result<KeyFrom, Fault> {
    let key = match (text.split_once(':'), text) {
        (None, "record-key") => KeyFrom::RecordKey,
        (None, "routing-key") => KeyFrom::RoutingKey,
        (Some(("header", name)), _) => KeyFrom::Header(header(name)?),
        (Some(("json", at)), _) => KeyFrom::Json(pointer(at)?),
        _ => {
            return Err(Fault::new(
                format!("{} is not known", quote(text)),
                "set record-key (Kafka), routing-key (RabbitMQ), header:NAME or json:/POINTER",
            ));
        }
    };
    Ok(key)
}

fn key_fits(key: &KeyFrom, kind: BrokerKind) -> Result<(), Fault> {
    match (key, kind) {
        (KeyFrom::RecordKey, BrokerKind::RabbitMq) => Err(Fault::new(
            "RabbitMQ's messages have no record key",
            "set routing-key, header:NAME or json:/POINTER",
        )),
        (KeyFrom::RoutingKey, BrokerKind::Kafka) => Err(Fault::new(
            "Kafka's records have no routing key",
            "set record-key, header:NAME or json:/POINTER",
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_extractor_is_read() {
        for (text, expected) in [
            ("property", Extractor::Property),
            ("header:x-id", Extractor::Header("x-id".into())),
            ("header:a:b", Extractor::Header("a:b".into())),
            ("cloudevents", Extractor::CloudEvents),
            ("json:/order/id", Extractor::Json("/order/id".into())),
            ("hash:/a,/b~1c", Extractor::Hash(vec!["/a".into(), "/b~1c".into()])),
            ("body-hash", Extractor::BodyHash),
            ("kafka-key", Extractor::KafkaKey),
            ("kafka-position", Extractor::KafkaPosition),
        ] {
            assert_eq!(extractor(text), Ok(expected), "{text}");
        }
    }

    #[test]
    fn what_is_no_extractor_is_refused() {
        for text in
            ["", "message-id", "header:", "json:a", "hash:", "hash:/a,b", "json:/a~2", "property:x"]
        {
            assert!(extractor(text).is_err(), "{text}");
        }
        let fault = extractor("delivery-tag").unwrap_err();
        assert!(fault.what.contains("another at each delivery"));
    }

    #[test]
    fn a_hash_survives_a_list_with_commas() {
        let items = "property,hash:/a,/b,header:x".split(',').map(str::to_owned).collect();
        assert_eq!(join_hashes(items), ["property", "hash:/a,/b", "header:x"]);
    }

    #[test]
    fn each_broker_has_its_own() {
        assert!(fits(Extractor::KafkaPosition, BrokerKind::RabbitMq).is_err());
        assert!(fits(Extractor::KafkaPosition, BrokerKind::Kafka).is_ok());
        assert!(key_fits(&KeyFrom::RecordKey, BrokerKind::RabbitMq).is_err());
        assert!(key_fits(&KeyFrom::RoutingKey, BrokerKind::Kafka).is_err());
        assert_eq!(key_from("header:tenant"), Ok(KeyFrom::Header("tenant".into())));
    }
}
