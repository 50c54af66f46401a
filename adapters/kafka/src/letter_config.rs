//! What a topic for dead letters is told, and how that becomes librdkafka's configuration.
//!
//! Invariant: what "confirmed" stands on (idempotence, acks of all replicas in sync, a bound on each
//! try) is set here and cannot be overridden by a property.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use inboxd_contract::SourceError;
use rdkafka::config::{ClientConfig, RDKafkaLogLevel};

use crate::config::{self, KafkaConfig, PropertyError};

/// No broker takes a larger record than its own settings allow; librdkafka is to say no to none.
const MESSAGE_BYTES_MAX: u64 = 1_000_000_000;
/// What waits in the producer: two of the largest, since a record that does not fit waits.
const QUEUED_KBYTES: u64 = (2 * MESSAGE_BYTES_MAX) >> 10;
/// Records that wait in the producer. Those who publish wait for each, which is fewer by far.
const QUEUED_MAX: u64 = 10_000;
const PUBLISH: Duration = Duration::from_secs(10);
const TOPIC_REFRESH_MS: u64 = 5_000;

/// Properties that inboxd sets itself, each with the reason.
const OWNED: &[(&str, &str)] = &[
    ("bootstrap.servers", "the brokers are part of the target's address"),
    ("metadata.broker.list", "the brokers are part of the target's address"),
    ("enable.idempotence", "a copy that is sent again must not come twice, or out of order"),
    ("acks", "a copy is safe once all replicas in sync have it"),
    ("request.required.acks", "a copy is safe once all replicas in sync have it"),
    ("enable.gapless.guarantee", "a copy that fails is tried again by itself"),
    ("max.in.flight", "idempotence stands on it"),
    ("max.in.flight.requests.per.connection", "idempotence stands on it"),
    ("queuing.strategy", "idempotence stands on it"),
    ("transactional.id", "copies are published one by one, without transactions"),
    ("message.timeout.ms", "how long a copy is tried is `publish_timeout`"),
    ("delivery.timeout.ms", "how long a copy is tried is `publish_timeout`"),
    ("message.send.max.retries", "copies are sent again until `publish_timeout`"),
    ("retries", "copies are sent again until `publish_timeout`"),
    ("message.max.bytes", "which record is too large is for the broker to say"),
    ("message.copy.max.bytes", "a copy outlives the message that it was made of"),
    ("batch.num.messages", "a record that is too large must not fail others"),
    ("batch.size", "a record that is too large must not fail others"),
    ("queue.buffering.max.messages", "no more wait than are being published"),
    ("queue.buffering.max.kbytes", "no more wait than are being published"),
    ("queue.buffering.max.ms", "nothing is gathered"),
    ("linger.ms", "nothing is gathered"),
    ("delivery.report.only.error", "a copy is safe once it is confirmed"),
    ("topic.metadata.propagation.max.ms", "a topic that is missing is named soon"),
    ("topic.metadata.refresh.interval.ms", "a topic that was made is noticed soon"),
];

/// Checks one librdkafka property as a topic for dead letters would: that it is not one which
/// inboxd sets or which weakens what it promises, that librdkafka knows it and takes its value.
/// Connects to nothing.
///
/// # Errors
/// As [`crate::check_property`].
pub fn check_dead_letter_property(name: &str, value: &str) -> Result<(), PropertyError> {
    config::check(name, value, OWNED, &[])
}

/// Where copies of dead letters go. [`DeadLetterTopicConfig::new`] has the defaults.
#[derive(Clone)]
pub struct DeadLetterTopicConfig {
    /// `host:port`, comma-separated.
    pub brokers: String,
    /// The topic's name. It is never created by inboxd; where it is missing and the brokers
    /// create topics by themselves (`auto.create.topics.enable`), they may.
    pub topic: String,
    /// librdkafka properties, passed through (TLS, SASL, `compression.type` …); those that inboxd
    /// owns are refused.
    pub properties: BTreeMap<String, String>,
    /// The bound on each try, 1 s to 10 min.
    pub publish_timeout: Duration,
}

impl DeadLetterTopicConfig {
    /// The defaults: 10 s for each try.
    pub fn new(brokers: impl Into<String>, topic: impl Into<String>) -> Self {
        Self {
            brokers: brokers.into(),
            topic: topic.into(),
            properties: BTreeMap::new(),
            publish_timeout: PUBLISH,
        }
    }

    /// A topic of the same cluster that a source reads, with the source's address and those of its
    /// properties that say how to connect (TLS, SASL, addresses, sockets).
    pub fn of_source(source: &KafkaConfig, topic: impl Into<String>) -> Self {
        let connecting = source.properties.iter().filter(|(name, _)| connects(name));
        let properties = connecting.map(|(name, value)| (name.clone(), value.clone())).collect();
        Self { properties, ..Self::new(source.brokers.clone(), topic) }
    }

    /// Checks everything that can be checked without the broker.
    ///
    /// # Errors
    /// Permanent; names the property.
    pub fn validate(&self) -> Result<(), SourceError> {
        self.client().map(drop)
    }

    /// Checks everything and gives librdkafka's configuration.
    pub(crate) fn client(&self) -> Result<ClientConfig, SourceError> {
        self.check()?;
        let mut client = ClientConfig::new();
        // Where other clients put keys. The broker's closing an idle connection is routine.
        client.set("partitioner", "murmur2_random").set("log.connection.close", "false");
        client.set("client.id", "inboxd");
        // Brokers that are back are found within a try.
        client.set("reconnect.backoff.max.ms", "1000");
        for (key, value) in &self.properties {
            client.set(key, value);
        }
        let timeout_ms = self.publish_timeout.as_millis();
        for (key, value) in [
            ("bootstrap.servers", self.brokers.clone()),
            ("enable.idempotence", "true".into()),
            ("acks", "all".into()),
            ("message.timeout.ms", timeout_ms.to_string()),
            ("message.max.bytes", MESSAGE_BYTES_MAX.to_string()),
            // The broker refuses a batch as a whole; it would not say whose size it was.
            ("batch.num.messages", "1".into()),
            ("linger.ms", "0".into()),
            ("queue.buffering.max.messages", QUEUED_MAX.to_string()),
            ("queue.buffering.max.kbytes", QUEUED_KBYTES.to_string()),
            // Missing for less than a try, so that the topic is named and not just the time.
            ("topic.metadata.propagation.max.ms", (timeout_ms / 3).to_string()),
            ("topic.metadata.refresh.interval.ms", TOPIC_REFRESH_MS.to_string()),
        ] {
            client.set(key, value);
        }
        client.set_log_level(match self.properties.contains_key("debug") {
            true => RDKafkaLogLevel::Debug,
            false => RDKafkaLogLevel::Info,
        });
        config::native(&client)?;
        Ok(client)
    }

    fn check(&self) -> Result<(), SourceError> {
        let refuse = |what: String| Err(SourceError::permanent(what));
        if self.brokers.trim().is_empty() {
            return refuse("no Kafka broker is named: give `host:port`, comma-separated".into());
        }
        if self.topic.trim().is_empty() || self.topic.starts_with('^') {
            return refuse("dead letters go to one topic: give its name, not a pattern".into());
        }
        let texts = [&self.brokers, &self.topic].into_iter();
        let texts = texts.chain(self.properties.iter().flat_map(|(key, value)| [key, value]));
        if texts.into_iter().any(|text| text.contains('\0')) {
            return refuse(
                "a setting of the topic for dead letters contains a NUL character".into(),
            );
        }
        let ms = self.publish_timeout.as_millis();
        if !(1_000..=600_000).contains(&ms) {
            return refuse("publish_timeout must be between 1 s and 10 min".into());
        }
        for (key, why) in OWNED {
            if self.properties.contains_key(*key) {
                return refuse(format!("the Kafka property `{key}` cannot be set: {why}"));
            }
        }
        Ok(())
    }
}

/// Whether a property says how to connect, the same for any client.
pub(crate) fn connects(name: &str) -> bool {
    const BEGINNINGS: &[&str] =
        &["security.", "ssl.", "enable.ssl.", "sasl.", "socket.", "broker.address.", "reconnect."];
    const NAMES: &[&str] =
        &["client.id", "client.rack", "client.dns.lookup", "enable.sasl.oauthbearer.unsecure.jwt"];
    NAMES.contains(&name) || BEGINNINGS.iter().any(|beginning| name.starts_with(beginning))
}

/// Property values may be secrets: only their names are printed.
impl fmt::Debug for DeadLetterTopicConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeadLetterTopicConfig")
            .field("brokers", &self.brokers)
            .field("topic", &self.topic)
            .field("properties", &self.properties.keys())
            .field("publish_timeout", &self.publish_timeout)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(key: &str, value: &str) -> DeadLetterTopicConfig {
        let mut config = DeadLetterTopicConfig::new("127.0.0.1:1", "dead");
        config.properties.insert(key.into(), value.into());
        config
    }

    #[test]
    fn what_a_confirm_stands_on_cannot_be_weakened() {
        for (key, why) in OWNED {
            let error = with(key, "1").validate().expect_err(key).to_string();
            assert!(error.contains(key) && error.contains(why), "{error}");
            let error = check_dead_letter_property(key, "1").expect_err(key);
            assert!(error.what.contains(why) && !error.remedy.is_empty(), "{error:?}");
        }
        let client = with("compression.type", "zstd").client().expect("valid");
        assert_eq!(client.get("acks"), Some("all"));
        assert_eq!(client.get("enable.idempotence"), Some("true"));
        assert!(check_dead_letter_property("compression.type", "zstd").is_ok());
        assert!(check_dead_letter_property("no.such.thing", "1").is_err());
    }

    #[test]
    fn a_source_lends_how_it_connects_and_nothing_else() {
        let mut source = KafkaConfig::new("h:1", ["t"], "g");
        for (key, value) in [
            ("security.protocol", "sasl_ssl"),
            ("sasl.password", "hunter2"),
            ("session.timeout.ms", "6000"),
            ("debug", "fetch"),
        ] {
            source.properties.insert(key.into(), value.into());
        }
        let topic = DeadLetterTopicConfig::of_source(&source, "dead");
        let names: Vec<_> = topic.properties.keys().map(String::as_str).collect();
        assert_eq!(names, ["sasl.password", "security.protocol"]);
        assert!(!format!("{topic:?}").contains("hunter2"));
    }

    #[test]
    fn a_topic_is_one_name_and_a_try_is_bounded() {
        for topic in ["", " ", "^dead.*", "a\0"] {
            assert!(DeadLetterTopicConfig::new("h:1", topic).validate().is_err(), "{topic:?}");
        }
        let mut config = DeadLetterTopicConfig::new("h:1", "dead");
        assert!(config.validate().is_ok());
        config.publish_timeout = Duration::ZERO;
        assert!(config.validate().is_err());
    }
}
