//! `[subscription.NAME]`.

use std::collections::BTreeMap;
use std::time::Duration;

use inboxd_contract::ConsumerId;

use super::address::BrokerKind;
use super::broker::Broker;
use super::model::{
    Declare, KafkaSourceConfig, QueueKind, RabbitMqSourceConfig, SourceConfig, Start,
    SubscriptionConfig,
};
use super::names;
use super::problem::Fault;
use super::reader::Section;
use super::{callback, failure, forms, identity, routes};
use crate::engine::{Extractor, IdentitySettings, Ordering, SubscriptionSettings};

/// RabbitMQ's and Kafka's bound on names, in bytes.
const NAME_BYTES_MAX: usize = 255;

/// What gives a source beside the file.
pub(super) const SOURCE_FLAGS: &[&str] =
    &["--source", "--source-file", "INBOXD_SOURCE", "INBOXD_SOURCE_FILE"];

/// `source.declare`.
pub(super) const DECLARE: [(&str, Declare); 4] = [
    ("false", Declare::No),
    ("true", Declare::Quorum),
    ("quorum", Declare::Quorum),
    ("classic", Declare::Classic),
];

/// `source.queue_kind`.
pub(super) const QUEUE_KINDS: [(&str, QueueKind); 2] =
    [("quorum", QueueKind::Quorum), ("classic", QueueKind::Classic)];

/// `source.start`.
pub(super) const STARTS: [(&str, Start); 3] =
    [("earliest", Start::Earliest), ("latest", Start::Latest), ("refuse", Start::Refuse)];

/// Reads one subscription; `None` where too little is known of it to go on.
pub(super) fn read(
    name: &str,
    section: &Section<'_>,
    brokers: &BTreeMap<&str, Option<Broker>>,
    notices: &mut Vec<String>,
) -> Option<SubscriptionConfig> {
    let callback = callback::read(section);
    let source_section = section.section("source");
    let known = broker(section, &source_section, brokers);
    // Without its broker the rest is read all the same: all problems are told at once.
    let stand_in = match known {
        Some(_) => None,
        None => implied_kind(&source_section).map(Broker::of_kind),
    };
    let (broker_name, broker) = match (known, &stand_in) {
        (Some((name, broker)), _) => (name, broker),
        (None, Some(broker)) => ("", broker),
        (None, None) => return None,
    };
    let (ordering, key_from) = identity::ordering(section, broker.kind);
    let identity = identity::identity(section, broker.kind, notices);
    let concurrency = section.count("concurrency") as usize;
    let limits = limits(section, concurrency);
    let source =
        source(section, &source_section, broker, concurrency, &limits, &identity, ordering);
    let consumer_id = consumer_id(section, &source);
    let body_bytes_max = section.size("body_bytes_max");
    let lease = section.duration("lease");
    let hold_max = section.duration("hold_max");
    let failure = failure::read(section, ordering);
    let health_interval = section.duration("health_interval");
    let (routes, on_unrouted) = routes::read(section, broker.kind);
    // Whose keys they are is not guessed.
    known?;
    let (dead_letter_to, dead_letter) =
        failure::dead_letter(section, broker_name, brokers, &source);
    section.refuse_those_of_others(broker.kind);
    source_section.refuse_those_of_others(broker.kind);
    let settings = SubscriptionSettings {
        name: name.into(),
        consumer_id: consumer_id?,
        ordering,
        key_from,
        identity,
        delivery: failure.delivery,
        concurrency,
        adaptive: failure.adaptive,
        rate: failure.rate,
        in_flight_max: limits.in_flight_max,
        in_flight_bytes_max: limits.in_flight_bytes_max,
        body_bytes_max,
        callback_timeout: limits.callback_timeout,
        lease,
        hold_max,
        retry: failure.retry,
        park: failure.park,
        on_blocked_lane: failure.on_blocked_lane,
        on_dead_letter: failure.on_dead_letter,
        dead_letter_to,
        breaker: failure.breaker,
        health_interval,
        routes,
        on_unrouted,
    };
    Some(SubscriptionConfig { settings, source, callback: callback?, dead_letter })
}

/// What the keys of a source say of its broker.
fn implied_kind(source: &Section<'_>) -> Option<BrokerKind> {
    let is_kafka = source.has("topics") || source.has("topic_pattern") || source.has("group");
    match (source.has("queue"), is_kafka) {
        (true, false) => Some(BrokerKind::RabbitMq),
        (false, true) => Some(BrokerKind::Kafka),
        _ => None,
    }
}

struct Limits {
    in_flight_max: usize,
    in_flight_bytes_max: usize,
    callback_timeout: Duration,
    offset_span_max: usize,
}

fn limits(section: &Section<'_>, concurrency: usize) -> Limits {
    let in_flight_max = section.count("in_flight_max") as usize;
    if in_flight_max < concurrency {
        let remedy = format!("set at least {concurrency}, or lower concurrency");
        let what = format!("{in_flight_max} is below concurrency, {concurrency}");
        let key = if section.has("in_flight_max") { "in_flight_max" } else { "concurrency" };
        section.problem(key, Fault::new(what, remedy));
    }
    let bytes = section.size("in_flight_bytes_max");
    Limits {
        in_flight_max,
        in_flight_bytes_max: usize::try_from(bytes).unwrap_or(usize::MAX),
        callback_timeout: callback::timeout(section),
        offset_span_max: section.count("offset_span_max") as usize,
    }
}

fn broker<'a>(
    section: &Section<'_>,
    source: &Section<'_>,
    brokers: &'a BTreeMap<&'a str, Option<Broker>>,
) -> Option<(&'a str, &'a Broker)> {
    if !section.has("source") {
        // One that was given and cannot be read is told already.
        if section.problems.has_flag(SOURCE_FLAGS) {
            return None;
        }
        section.missing(
            "source",
            "set { broker = \"NAME\", topics = [\"…\"] } or { broker = \"NAME\", queue = \"…\" } (flag --source)",
        );
        return None;
    }
    let known = || brokers.keys().copied().collect::<Vec<_>>().join(", ");
    let name = match source.text("broker") {
        Some(name) => name,
        None if source.has("broker") => return None,
        // With one broker there is nothing to choose.
        None if brokers.len() == 1 => brokers.keys().next()?,
        // Which is told once.
        None if brokers.is_empty() => return None,
        None => {
            source.missing("broker", format!("name one of the brokers: {}", known()));
            return None;
        }
    };
    match brokers.get_key_value(name) {
        Some((name, broker)) => broker.as_ref().map(|broker| (*name, broker)),
        None => {
            source.problem(
                "broker",
                Fault::new(
                    format!("there is no [broker.{name}]"),
                    match brokers.is_empty() {
                        true => "add it with its url".to_owned(),
                        false => format!("add it, or name one of: {}", known()),
                    },
                ),
            );
            None
        }
    }
}

fn consumer_id(section: &Section<'_>, source: &SourceConfig) -> Option<ConsumerId> {
    if section.has("consumer_id") {
        return section.parse("consumer_id", forms::consumer_id);
    }
    let default = match source {
        SourceConfig::Kafka(kafka) => &kafka.group,
        SourceConfig::RabbitMq(rabbitmq) => &rabbitmq.queue,
    };
    if default.is_empty() {
        // The missing group or queue is told already.
        return ConsumerId::new("unknown").ok();
    }
    forms::consumer_id(default)
        .map_err(|fault| {
            section.missing(
                "consumer_id",
                format!("set it: the default, {default:?}, is refused ({})", fault.what),
            );
        })
        .ok()
}

fn source(
    section: &Section<'_>,
    source: &Section<'_>,
    broker: &Broker,
    concurrency: usize,
    limits: &Limits,
    identity: &IdentitySettings,
    ordering: Ordering,
) -> SourceConfig {
    match broker.kind {
        BrokerKind::Kafka => {
            let position = identity.extractors.contains(&Extractor::KafkaPosition);
            SourceConfig::Kafka(kafka(section, source, broker, limits, position))
        }
        BrokerKind::RabbitMq => {
            SourceConfig::RabbitMq(rabbitmq(source, broker, concurrency, ordering))
        }
    }
}

fn kafka(
    section: &Section<'_>,
    source: &Section<'_>,
    broker: &Broker,
    limits: &Limits,
    position_identity: bool,
) -> KafkaSourceConfig {
    // The group is what Kafka knows a subscriber by; one who has named the consumer has named it.
    let group = source
        .parse("group", |text| names::broker_text(text, NAME_BYTES_MAX))
        .or_else(|| section.text("consumer_id").map(str::to_owned));
    if group.is_none() && !source.has("group") {
        source.missing("group", "set the consumer group (or consumer_id, which is its default)");
    }
    KafkaSourceConfig {
        brokers: broker.hosts.clone(),
        topics: topics(source),
        group: group.unwrap_or_default(),
        start: source.choice("start", &STARTS),
        properties: broker.kafka_properties(),
        commit_interval: source.duration("commit_interval"),
        offset_span_max: limits.offset_span_max,
        position_identity,
    }
}

fn topics(source: &Section<'_>) -> Vec<String> {
    let mut topics = Vec::new();
    for item in source.list("topics").unwrap_or_default() {
        match names::topic(&item) {
            Ok(topic) if topics.contains(&topic) => source.problem(
                "topics",
                Fault::new(format!("{topic:?} is there twice"), "name each once"),
            ),
            Ok(topic) => topics.push(topic),
            Err(fault) => source.unreadable("topics", fault),
        }
    }
    let pattern = source.parse("topic_pattern", |text| {
        names::broker_text(text, 1_024)
            .map(|text| if text.starts_with('^') { text } else { format!("^{text}") })
    });
    topics.extend(pattern);
    if topics.is_empty() && !source.has("topics") && !source.has("topic_pattern") {
        source.missing("topics", "name at least one topic, or a topic_pattern");
    }
    topics
}

fn rabbitmq(
    source: &Section<'_>,
    broker: &Broker,
    concurrency: usize,
    ordering: Ordering,
) -> RabbitMqSourceConfig {
    let queue = source.parse("queue", |text| names::broker_text(text, NAME_BYTES_MAX));
    if !source.has("queue") {
        source.missing("queue", "name the queue to consume");
    }
    let default_prefetch = (2 * concurrency as u64).min(u64::from(u16::MAX));
    let declare = source.choice("declare", &DECLARE);
    let single_active_consumer = source.switch("single_active_consumer");
    let queue_kind = source.word("queue_kind", &QUEUE_KINDS).or(match declare {
        Declare::No => None,
        Declare::Quorum => Some(QueueKind::Quorum),
        Declare::Classic => Some(QueueKind::Classic),
    });
    if ordering != Ordering::None
        && queue_kind == Some(QueueKind::Quorum)
        && !single_active_consumer
    {
        source.missing(
            "single_active_consumer",
            "set true: a quorum queue keeps an order only with a single active consumer",
        );
    }
    RabbitMqSourceConfig {
        hosts: broker.hosts.clone(),
        vhost: broker.vhost.clone(),
        user: broker.user.clone().unwrap_or_else(|| "guest".to_owned()),
        password: broker.password.clone().unwrap_or_else(|| "guest".into()),
        tls: broker.tls.clone(),
        heartbeat: broker.heartbeat,
        queue: queue.unwrap_or_default(),
        prefetch: source.count_or("prefetch", default_prefetch) as u16,
        declare,
        queue_kind,
        single_active_consumer,
        ordered: ordering != Ordering::None,
    }
}
