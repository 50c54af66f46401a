//! What a Kafka source is told, and how that becomes librdkafka's configuration.
//!
//! Invariant: what I5 and I7 stand on (offset storing, committing, the prefetch budget) is set
//! here and cannot be overridden by a property.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use inboxd_contract::{Notes, SourceError};
use rdkafka::config::{ClientConfig, NativeClientConfig, RDKafkaLogLevel};
use rdkafka::error::KafkaError;
use rdkafka::types::RDKafkaConfRes;

/// The most time between two looks at the cluster's metadata, in milliseconds: new partitions
/// and topics are noticed within it.
const METADATA_REFRESH_MS_MAX: u64 = 60_000;
const STATISTICS_MS: u64 = 1_000;
const STATISTICS_MS_MAX: u64 = 5_000;
const MAX_POLL_INTERVAL_MS: u64 = 300_000;
const HEARTBEAT_MS: u64 = 3_000;
const MESSAGE_BYTES_MAX: u64 = 1_000_000;
const FETCH_BYTES_MAX: u64 = 50 << 20;
const DRAIN_MAX: Duration = Duration::from_secs(25);

/// Properties that inboxd sets itself, each with the reason and the remedy.
const OWNED: &[(&str, &str)] = &[
    ("bootstrap.servers", "the brokers are part of the source's address"),
    ("metadata.broker.list", "the brokers are part of the source's address"),
    ("group.id", "the group is a setting of the source: `group`"),
    ("auto.offset.reset", "where to start is a setting of the source: `start`"),
    ("enable.auto.commit", "offsets follow the lowest unsettled record; inboxd commits them"),
    ("auto.commit.enable", "offsets follow the lowest unsettled record; inboxd commits them"),
    ("auto.commit.interval.ms", "how often offsets are committed is `commit_interval`"),
    ("enable.auto.offset.store", "offsets follow the lowest unsettled record"),
    ("offset.store.method", "offsets are kept by the broker"),
    ("enable.partition.eof", "the end of a partition is no event here"),
    ("queued.max.messages.kbytes", "it is set from the budget `in_flight_bytes_max`"),
];

/// Properties with bounds that librdkafka does not have: the most, in milliseconds, and the reason.
const BOUNDED: &[(&str, u64, &str)] = &[
    (
        "topic.metadata.refresh.interval.ms",
        METADATA_REFRESH_MS_MAX,
        "new partitions would be noticed too late",
    ),
    ("statistics.interval.ms", STATISTICS_MS_MAX, "lag and readiness are read from the statistics"),
];

/// Parts of the names of properties whose values may be secret.
const SECRET: &[&str] =
    &["password", "secret", "key", "token", "jaas", "credential", "sasl.oauthbearer.config"];

/// Why a property is refused. Holds no value that may be secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PropertyError {
    /// What is wrong.
    pub what: String,
    /// What to do.
    pub remedy: String,
}

impl PropertyError {
    fn new(what: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { what: what.into(), remedy: remedy.into() }
    }
}

/// Checks one librdkafka property as a source would: that it is not one which inboxd sets, that
/// librdkafka knows it and takes its value. Connects to nothing.
///
/// # Errors
/// What is wrong and what to do, without the name, and without the value where that may be secret.
pub fn check_property(name: &str, value: &str) -> Result<(), PropertyError> {
    check(name, value, OWNED, BOUNDED)
}

/// The same for any client: which properties inboxd sets, and which have bounds.
pub(crate) fn check(
    name: &str,
    value: &str,
    owned: &[(&str, &str)],
    bounded: &[(&str, u64, &str)],
) -> Result<(), PropertyError> {
    if name.contains('\0') || value.contains('\0') {
        return Err(PropertyError::new("it contains a NUL character", "leave it out"));
    }
    if let Some((_, why)) = owned.iter().find(|(key, _)| *key == name) {
        return Err(PropertyError::new(format!("it cannot be set: {why}"), "leave it out"));
    }
    for (key, most, why) in bounded {
        if *key == name && !in_bounds(value, *most) {
            return Err(PropertyError::new(
                format!("{why} with this value"),
                format!("set 1 to {most}, in milliseconds"),
            ));
        }
    }
    let mut client = ClientConfig::new();
    client.set(name, value);
    match client.create_native_config() {
        Ok(_) => Ok(()),
        Err(KafkaError::ClientConfig(RDKafkaConfRes::RD_KAFKA_CONF_UNKNOWN, ..)) => {
            Err(PropertyError::new(
                "librdkafka has no such property",
                "use a name from librdkafka's CONFIGURATION.md, or leave it out",
            ))
        }
        Err(KafkaError::ClientConfig(_, words, ..)) if !may_be_secret(name) => {
            Err(PropertyError::new(
                format!("librdkafka refuses it: {words}"),
                "set a value that librdkafka's CONFIGURATION.md allows",
            ))
        }
        Err(_) => Err(PropertyError::new(
            "librdkafka refuses its value",
            "set a value that librdkafka's CONFIGURATION.md allows",
        )),
    }
}

fn in_bounds(value: &str, most: u64) -> bool {
    value.parse().is_ok_and(|ms: u64| (1..=most).contains(&ms))
}

fn may_be_secret(name: &str) -> bool {
    SECRET.iter().any(|part| name.contains(part))
}

/// Where a group without a committed offset begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum StartAt {
    /// With the oldest record that the broker has.
    #[default]
    Earliest,
    /// With what is produced from the time on when the group first saw the topic: decides once,
    /// for partitions that were there then. Those that come later are read from their beginning,
    /// and so are those whose committed offset retention has overtaken.
    Latest,
    /// Nowhere: a partition without a committed offset is a permanent error.
    Refuse,
}

impl StartAt {
    /// What librdkafka does where an offset is missing that nothing else has decided.
    fn as_property(self) -> &'static str {
        match self {
            // An end is given explicitly: this is also for what retention has overtaken.
            Self::Earliest | Self::Latest => "earliest",
            Self::Refuse => "error",
        }
    }
}

/// How to consume. [`KafkaConfig::new`] has the defaults.
#[derive(Clone)]
pub struct KafkaConfig {
    /// `host:port`, comma-separated.
    pub brokers: String,
    /// Names, or regular expressions that begin with `^`; at least one.
    pub topics: Vec<String>,
    /// The consumer group.
    pub group: String,
    /// Where to begin without a committed offset.
    pub start: StartAt,
    /// librdkafka properties, passed through; those that inboxd owns are refused.
    pub properties: BTreeMap<String, String>,
    /// Join the group only when deliveries are first asked for: a member whose application is
    /// away would keep partitions from those that could work.
    pub join_when_asked: bool,
    /// How often changed offsets are committed.
    pub commit_interval: Duration,
    /// A partition with more records than this from its lowest unsettled one up is paused.
    pub offset_span_max: usize,
    /// The budget for bytes in flight: bounds what librdkafka fetches ahead.
    pub in_flight_bytes_max: usize,
    /// Stored with every commit: the inbox's id (at most 255 bytes).
    pub commit_metadata: Option<String>,
    /// Fill `Origin::Kafka::position_scope`.
    pub position_identity: bool,
    /// Where durable facts are kept: epochs and high-water marks for clusters whose topic ids
    /// cannot be read, how many partitions a topic had when [`StartAt::Latest`] first saw it.
    /// Needed by `position_identity`.
    pub notes: Option<Arc<dyn Notes>>,
    /// How long a revoked partition waits for what is under way; `None`: half of
    /// `max.poll.interval.ms`, at most 25 s.
    pub drain_deadline: Option<Duration>,
}

impl KafkaConfig {
    /// The defaults: start at the earliest record, commit each second, a span of 100,000
    /// records, 64 MiB, no metadata, no position identity.
    pub fn new(
        brokers: impl Into<String>,
        topics: impl IntoIterator<Item = impl Into<String>>,
        group: impl Into<String>,
    ) -> Self {
        Self {
            brokers: brokers.into(),
            topics: topics.into_iter().map(Into::into).collect(),
            group: group.into(),
            start: StartAt::default(),
            properties: BTreeMap::new(),
            join_when_asked: false,
            commit_interval: Duration::from_secs(1),
            offset_span_max: 100_000,
            in_flight_bytes_max: 64 << 20,
            commit_metadata: None,
            position_identity: false,
            notes: None,
            drain_deadline: None,
        }
    }

    /// The value of a property that is a number.
    fn number(&self, property: &str, default: u64) -> u64 {
        self.properties.get(property).and_then(|value| value.parse().ok()).unwrap_or(default)
    }

    /// How long a revoke waits for what is under way.
    pub(crate) fn drain_for(&self) -> Duration {
        let poll = self.number("max.poll.interval.ms", MAX_POLL_INTERVAL_MS);
        let most = Duration::from_millis(poll / 2).min(DRAIN_MAX);
        self.drain_deadline.map_or(most, |wanted| wanted.min(most))
    }

    /// A broker that has said nothing for this long is not reachable: heartbeats and
    /// empty fetches are answered more often.
    pub(crate) fn silence_max(&self) -> Duration {
        let heartbeat = self.number("heartbeat.interval.ms", HEARTBEAT_MS);
        Duration::from_millis((heartbeat * 3).max(10_000))
    }

    /// Whether only committed records are seen.
    pub(crate) fn reads_committed(&self) -> bool {
        self.properties.get("isolation.level").is_none_or(|level| level == "read_committed")
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
        let kbytes = (self.in_flight_bytes_max >> 10).clamp(1, 2_097_151);
        // librdkafka asks for no less than one message in a fetch.
        let message = self.number("message.max.bytes", MESSAGE_BYTES_MAX);
        let fetch_bytes = (self.in_flight_bytes_max as u64).min(FETCH_BYTES_MAX).max(message);
        for (key, value) in [
            ("isolation.level", "read_committed".into()),
            ("topic.metadata.refresh.interval.ms", "30000".into()),
            ("statistics.interval.ms", STATISTICS_MS.to_string()),
            // Prefetched records are dropped by a pause: no more of them than keep a consumer busy.
            ("queued.min.messages", "10000".into()),
            ("fetch.queue.backoff.ms", "50".into()),
            ("fetch.max.bytes", fetch_bytes.to_string()),
            ("fetch.message.max.bytes", fetch_bytes.min(MESSAGE_BYTES_MAX).to_string()),
            // The broker's closing an idle connection is routine.
            ("log.connection.close", "false".into()),
        ] {
            client.set(key, value);
        }
        if self.properties.get("group.protocol").is_none_or(|protocol| protocol != "consumer") {
            client.set("partition.assignment.strategy", "cooperative-sticky");
        }
        for (key, value) in &self.properties {
            client.set(key, value);
        }
        client
            .set("bootstrap.servers", &self.brokers)
            .set("group.id", &self.group)
            .set("auto.offset.reset", self.start.as_property())
            .set("enable.auto.commit", "false")
            .set("enable.auto.offset.store", "false")
            .set("queued.max.messages.kbytes", kbytes.to_string());
        client.set_log_level(match self.properties.contains_key("debug") {
            true => RDKafkaLogLevel::Debug,
            false => RDKafkaLogLevel::Info,
        });
        native(&client)?;
        Ok(client)
    }

    fn check(&self) -> Result<(), SourceError> {
        let refuse = |what: String| Err(SourceError::permanent(what));
        if self.brokers.trim().is_empty() {
            return refuse("no Kafka broker is named: give `host:port`, comma-separated".into());
        }
        if self.group.trim().is_empty() {
            return refuse("no Kafka consumer group is named: set `group`".into());
        }
        if self.topics.is_empty() || self.topics.iter().any(|topic| topic.trim().is_empty()) {
            return refuse("a Kafka topic's name is blank, or none is named: set `topics`".into());
        }
        let texts = self.topics.iter().chain([&self.brokers, &self.group]);
        let texts = texts.chain(self.properties.iter().flat_map(|(key, value)| [key, value]));
        if texts.chain(&self.commit_metadata).any(|text| text.contains('\0')) {
            return refuse("a setting of the Kafka source contains a NUL character".into());
        }
        if self.commit_metadata.as_ref().is_some_and(|metadata| metadata.len() > 255) {
            return refuse("the metadata of Kafka commits has more than 255 bytes".into());
        }
        if self.position_identity && self.notes.is_none() {
            return refuse("position identity on Kafka needs a place for notes".into());
        }
        if self.commit_interval.is_zero() || self.offset_span_max == 0 {
            return refuse("commit_interval and offset_span_max must be above zero".into());
        }
        for (key, why) in OWNED {
            if self.properties.contains_key(*key) {
                return refuse(format!("the Kafka property `{key}` cannot be set: {why}"));
            }
        }
        for (key, most, why) in BOUNDED {
            if self.properties.get(*key).is_some_and(|value| !in_bounds(value, *most)) {
                return refuse(format!(
                    "the Kafka property `{key}` must be between 1 and {most} milliseconds: {why}"
                ));
            }
        }
        Ok(())
    }
}

/// Property values may be secrets: only their names are printed.
impl fmt::Debug for KafkaConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KafkaConfig")
            .field("brokers", &self.brokers)
            .field("topics", &self.topics)
            .field("group", &self.group)
            .field("start", &self.start)
            .field("properties", &self.properties.keys())
            .field("commit_interval", &self.commit_interval)
            .field("offset_span_max", &self.offset_span_max)
            .field("in_flight_bytes_max", &self.in_flight_bytes_max)
            .field("position_identity", &self.position_identity)
            .finish_non_exhaustive()
    }
}

/// librdkafka's own check of names and values. Its words may repeat a value, so they are left
/// out for properties that may be secret.
pub(crate) fn native(client: &ClientConfig) -> Result<NativeClientConfig, SourceError> {
    client.create_native_config().map_err(|error| match error {
        KafkaError::ClientConfig(_, words, key, _) => {
            let words = match may_be_secret(&key) {
                true => "its value is not valid".to_owned(),
                false => words,
            };
            SourceError::permanent(format!("librdkafka refuses the property `{key}`: {words}"))
        }
        error => SourceError::new(
            inboxd_contract::ErrorClass::Permanent,
            "librdkafka refuses the configuration",
            error,
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> KafkaConfig {
        KafkaConfig::new("127.0.0.1:1", ["t"], "g")
    }

    fn with(key: &str, value: &str) -> KafkaConfig {
        let mut config = config();
        config.properties.insert(key.into(), value.into());
        config
    }

    #[test]
    fn owned_properties_are_refused_with_a_reason() {
        for (key, why) in OWNED {
            let error = with(key, "1").client().expect_err(key).to_string();
            assert!(error.contains(key) && error.contains(why), "{error}");
        }
    }

    #[test]
    fn an_unknown_property_or_value_is_named() {
        let error = with("no.such.thing", "1").client().expect_err("unknown").to_string();
        assert!(error.contains("no.such.thing"), "{error}");
        let error = with("session.timeout.ms", "soon").client().expect_err("value").to_string();
        assert!(error.contains("session.timeout.ms"), "{error}");
    }

    #[test]
    fn a_secret_is_neither_in_errors_nor_in_debug() {
        let config = with("ssl.key.password", "hunter2");
        assert!(!format!("{config:?}").contains("hunter2"));
        let mut config = with("sasl.password", "hunter2");
        config.properties.insert("ssl.key.pem.bad".into(), "hunter2".into());
        assert!(!config.client().expect_err("unknown").to_string().contains("hunter2"));
    }

    #[test]
    fn one_property_is_checked_alone_as_a_source_would() {
        assert_eq!(check_property("fetch.wait.max.ms", "50"), Ok(()));
        assert_eq!(check_property("security.protocol", "sasl_ssl"), Ok(()));
        for (key, why) in OWNED {
            let error = check_property(key, "1").expect_err(key);
            assert!(error.what.contains(why), "{error:?}");
        }
        for (name, value, what) in [
            ("no.such.thing", "1", "no such property"),
            ("session.timeout.ms", "soon", "session.timeout.ms"),
            ("statistics.interval.ms", "0", "statistics"),
            ("client.id", "a\0b", "NUL"),
        ] {
            let error = check_property(name, value).expect_err(name);
            assert!(error.what.contains(what) && !error.remedy.is_empty(), "{error:?}");
        }
        let error = check_property("sasl.oauthbearer.token.endpoint.urll", "hunter2");
        assert!(!format!("{error:?}").contains("hunter2"), "{error:?}");
        for bad in ["ssl.key.pem", "enable.ssl.key.verification"] {
            let error = check_property(bad, "hunter2");
            assert!(!format!("{error:?}").contains("hunter2"), "{error:?}");
        }
    }

    #[test]
    fn new_partitions_are_noticed_within_a_minute() {
        assert!(with("topic.metadata.refresh.interval.ms", "300000").client().is_err());
        assert!(with("topic.metadata.refresh.interval.ms", "-1").client().is_err());
        assert!(with("topic.metadata.refresh.interval.ms", "1000").client().is_ok());
    }

    #[test]
    fn the_budget_bounds_the_prefetch() {
        let mut config = config();
        config.in_flight_bytes_max = 2 << 20;
        let client = config.client().expect("valid");
        assert_eq!(client.get("queued.max.messages.kbytes"), Some("2048"));
        assert_eq!(client.get("fetch.max.bytes"), Some("2097152"));
    }

    #[test]
    fn the_new_group_protocol_needs_no_assignor() {
        let client = with("group.protocol", "consumer").client().expect("valid");
        assert_eq!(client.get("partition.assignment.strategy"), None);
    }

    #[test]
    fn a_drain_ends_long_before_the_poll_interval() {
        assert_eq!(config().drain_for(), DRAIN_MAX);
        assert_eq!(with("max.poll.interval.ms", "10000").drain_for(), Duration::from_secs(5));
    }
}
