//! What happens when the application fails: retrying, parking, dead letters, the breaker.

use std::collections::BTreeMap;

use regex::Regex;

use super::address::BrokerKind;
use super::broker::Broker;
use super::model::{DeadLetterTargetConfig, SourceConfig};
use super::names;
use super::problem::{Fault, quote};
use super::reader::Section;
use super::units::{minutes, show_duration};
use crate::engine::{
    BreakerSettings, DeadLetterTo, DeliveryMode, Jitter, OnBlockedLane, OnDeadLetter, Ordering,
    RetrySettings, SubscriptionSettings,
};

/// RabbitMQ's bound on names, in bytes.
const NAME_BYTES_MAX: usize = 255;
/// RabbitMQ's `consumer_timeout`, as it comes.
const CONSUMER_TIMEOUT: std::time::Duration = minutes(30);

/// `delivery`.
pub(super) const DELIVERIES: [(&str, DeliveryMode); 2] =
    [("direct", DeliveryMode::Direct), ("stored", DeliveryMode::Stored)];

/// `retry.jitter` and `park.jitter`.
pub(super) const JITTERS: [(&str, Jitter); 2] = [("full", Jitter::Full), ("none", Jitter::None)];

/// `on_blocked_lane`.
pub(super) const ON_BLOCKED_LANE: [(&str, OnBlockedLane); 3] =
    [("park", OnBlockedLane::Park), ("skip", OnBlockedLane::Skip), ("halt", OnBlockedLane::Halt)];

/// `on_dead_letter`.
pub(super) const ON_DEAD_LETTER: [(&str, OnDeadLetter); 2] =
    [("continue", OnDeadLetter::Continue), ("halt", OnDeadLetter::Halt)];

/// `dead_letter.to`.
pub(super) const DEAD_LETTER_TO: [(&str, DeadLetterTo); 3] = [
    ("table", DeadLetterTo::Table),
    ("broker", DeadLetterTo::Broker),
    ("both", DeadLetterTo::Both),
];

/// Where dead letters go: keys that mean nothing while the table has them alone.
const TARGET_KEYS: [&str; 4] = ["broker", "topic", "exchange", "routing_key"];

/// The keys of this module; all but where dead letters are published.
pub(super) struct Failure {
    pub(super) delivery: DeliveryMode,
    pub(super) adaptive: bool,
    pub(super) rate: Option<f64>,
    pub(super) retry: RetrySettings,
    pub(super) park: RetrySettings,
    pub(super) on_blocked_lane: OnBlockedLane,
    pub(super) on_dead_letter: OnDeadLetter,
    pub(super) breaker: BreakerSettings,
}

/// Reads them.
pub(super) fn read(section: &Section<'_>, ordering: Ordering) -> Failure {
    let retry = backoff(&section.section("retry"));
    let park = backoff(&section.section("park"));
    if park.attempts_max < retry.attempts_max {
        let park_is_set = section.section("park").has("attempts_max");
        let (table, remedy) = match park_is_set {
            true => ("park", "set it to retry.attempts_max or more"),
            false => ("retry", "set park.attempts_max to as much or more"),
        };
        let what = format!(
            "park.attempts_max, {}, bounds all attempts of a message, those in place included, \
             and retry.attempts_max is {}",
            park.attempts_max, retry.attempts_max
        );
        section.section(table).problem("attempts_max", Fault::new(what, remedy));
    }
    Failure {
        delivery: section.choice("delivery", &DELIVERIES),
        adaptive: section.switch("adaptive_concurrency"),
        rate: section.number_if_set("rate").map(widened),
        retry,
        park,
        on_blocked_lane: on_blocked_lane(section, ordering),
        on_dead_letter: on_dead_letter(section, ordering),
        breaker: breaker(&section.section("breaker")),
    }
}

/// The number that was written, not the nearest one of fewer digits.
fn widened(number: f32) -> f64 {
    number.to_string().parse().unwrap_or_else(|_| f64::from(number))
}

fn backoff(section: &Section<'_>) -> RetrySettings {
    let settings = RetrySettings {
        initial: section.duration("initial"),
        factor: section.number("factor"),
        cap: section.duration("cap"),
        jitter: section.choice("jitter", &JITTERS),
        attempts_max: section.count("attempts_max") as u32,
        elapsed_max: section.duration("elapsed_max"),
    };
    if settings.cap < settings.initial {
        let key = if section.has("cap") { "cap" } else { "initial" };
        let what = format!("{} is below {}", section.key("cap"), section.key("initial"));
        section.problem(key, Fault::new(what, "set cap to initial or more"));
    }
    settings
}

fn breaker(section: &Section<'_>) -> BreakerSettings {
    let settings = BreakerSettings {
        failures: section.count("failures") as u32,
        probe_initial: section.duration("probe_initial"),
        probe_cap: section.duration("probe_cap"),
    };
    if settings.probe_cap < settings.probe_initial {
        let key = if section.has("probe_cap") { "probe_cap" } else { "probe_initial" };
        let what = "breaker.probe_cap is below breaker.probe_initial";
        section.problem(key, Fault::new(what, "set probe_cap to probe_initial or more"));
    }
    settings
}

fn on_blocked_lane(section: &Section<'_>, ordering: Ordering) -> OnBlockedLane {
    let given = section.word("on_blocked_lane", &ON_BLOCKED_LANE);
    if ordering == Ordering::None && given.is_some_and(|given| given != OnBlockedLane::Park) {
        section.problem(
            "on_blocked_lane",
            Fault::new(
                "without ordering there are no lanes, and nothing waits for another message",
                "set ordering to key or partition, or leave it out",
            ),
        );
    }
    given.unwrap_or(match ordering {
        // Everything behind a message that fails would be parked.
        Ordering::Partition => OnBlockedLane::Halt,
        Ordering::None | Ordering::Key => OnBlockedLane::Park,
    })
}

fn on_dead_letter(section: &Section<'_>, ordering: Ordering) -> OnDeadLetter {
    let policy = section.choice("on_dead_letter", &ON_DEAD_LETTER);
    if ordering == Ordering::None && policy == OnDeadLetter::Halt {
        section.problem(
            "on_dead_letter",
            Fault::new(
                "without ordering there are no lanes for a dead letter to block",
                "set ordering to key or partition, or leave it out",
            ),
        );
    }
    policy
}

/// Reads `dead_letter`: where dead letters go, and the target where that is a broker.
pub(super) fn dead_letter(
    section: &Section<'_>,
    source_broker: &str,
    brokers: &BTreeMap<&str, Option<Broker>>,
    source: &SourceConfig,
) -> (DeadLetterTo, Option<DeadLetterTargetConfig>) {
    let section = section.section("dead_letter");
    let to = section.choice("to", &DEAD_LETTER_TO);
    if to == DeadLetterTo::Table {
        for key in TARGET_KEYS.into_iter().filter(|key| section.has(key)) {
            let remedy = "set dead_letter.to to broker or both, or leave it out";
            let what = format!("it has no effect with {} = \"table\"", section.key("to"));
            section.problem(key, Fault::new(what, remedy));
        }
        return (to, None);
    }
    let named = section.text("broker");
    if section.has("broker") && named.is_none() {
        return (to, None);
    }
    let name = named.unwrap_or(source_broker);
    let Some(broker) = brokers.get(name) else {
        let known = brokers.keys().copied().collect::<Vec<_>>().join(", ");
        let what = format!("there is no [broker.{name}]");
        section.problem("broker", Fault::new(what, format!("add it, or name one of: {known}")));
        return (to, None);
    };
    // One that cannot be read is told already.
    let Some(broker) = broker else { return (to, None) };
    section.refuse_those_of_others(broker.kind);
    let target = match broker.kind {
        BrokerKind::Kafka => kafka(&section, broker),
        BrokerKind::RabbitMq => rabbitmq(&section, broker),
    };
    if let Some(target) = &target {
        refuse_loop(&section, target, source);
    }
    (to, target)
}

fn kafka(section: &Section<'_>, broker: &Broker) -> Option<DeadLetterTargetConfig> {
    let topic = section.parse("topic", topic_name);
    if !section.has("topic") {
        section.missing("topic", "name the topic that dead letters go to; it must exist");
    }
    Some(DeadLetterTargetConfig::Kafka {
        brokers: broker.hosts.clone(),
        properties: broker.kafka_properties(),
        topic: topic?,
    })
}

/// One topic: to publish to a pattern means nothing.
pub(super) fn topic_name(text: &str) -> Result<String, Fault> {
    if text.starts_with('^') {
        let what = format!("{} is a regular expression", quote(text));
        return Err(Fault::new(what, "name one topic"));
    }
    names::topic(text)
}

fn rabbitmq(section: &Section<'_>, broker: &Broker) -> Option<DeadLetterTargetConfig> {
    let exchange = section.parse("exchange", |text| names::broker_text(text, NAME_BYTES_MAX));
    let routing_key = section.parse("routing_key", |text| names::broker_text(text, NAME_BYTES_MAX));
    if !section.has("exchange") && !section.has("routing_key") {
        section.missing(
            "exchange",
            "name the exchange that dead letters go to, or the queue itself in routing_key; it must exist",
        );
        return None;
    }
    Some(DeadLetterTargetConfig::RabbitMq {
        hosts: broker.hosts.clone(),
        vhost: broker.vhost.clone(),
        user: broker.user.clone().unwrap_or_else(|| "guest".to_owned()),
        password: broker.password.clone().unwrap_or_else(|| "guest".into()),
        tls: broker.tls.clone(),
        heartbeat: broker.heartbeat,
        exchange: exchange.unwrap_or_default(),
        routing_key,
    })
}

/// A dead letter that comes back is dead again: the same id from elsewhere, forwarded for ever.
fn refuse_loop(section: &Section<'_>, target: &DeadLetterTargetConfig, source: &SourceConfig) {
    match (target, source) {
        (DeadLetterTargetConfig::Kafka { brokers, topic, .. }, SourceConfig::Kafka(source))
            if shares_one(brokers, &source.brokers) =>
        {
            if let Some(consumed) = source.topics.iter().find(|consumed| means(consumed, topic)) {
                let what = format!(
                    "{topic:?} is consumed by the subscription itself ({consumed}): its dead \
                     letters would come back"
                );
                section.problem("topic", Fault::new(what, "name another topic"));
            }
        }
        (
            DeadLetterTargetConfig::RabbitMq { hosts, vhost, exchange, routing_key, .. },
            SourceConfig::RabbitMq(source),
        ) if exchange.is_empty()
            && routing_key.as_ref() == Some(&source.queue)
            && *vhost == source.vhost
            && shares_one(hosts, &source.hosts) =>
        {
            let what = format!(
                "{:?} is the queue that the subscription itself consumes: its dead letters would \
                 come back",
                source.queue
            );
            section.problem("routing_key", Fault::new(what, "name another queue"));
        }
        _ => {}
    }
}

fn shares_one(some: &[String], others: &[String]) -> bool {
    some.iter().any(|host| others.contains(host))
}

/// Whether what is consumed, a name or a pattern, means this topic.
fn means(consumed: &str, topic: &str) -> bool {
    match consumed.starts_with('^') {
        true => Regex::new(consumed).is_ok_and(|pattern| pattern.is_match(topic)),
        false => consumed == topic,
    }
}

/// What fits together badly, though it is no mistake.
pub(super) fn notice(
    settings: &SubscriptionSettings,
    source: &SourceConfig,
    retention: std::time::Duration,
    notices: &mut Vec<String>,
) {
    let name = &settings.name;
    if matches!(source, SourceConfig::RabbitMq(_)) && settings.hold_max >= CONSUMER_TIMEOUT {
        notices.push(format!(
            "subscription.{name}.hold_max: {} is not below RabbitMQ's consumer_timeout, {} unless \
             the server says otherwise: the server would close the channel first, and deliver again",
            show_duration(settings.hold_max),
            show_duration(CONSUMER_TIMEOUT)
        ));
    }
    let horizon = settings.park.elapsed_max.max(settings.retry.elapsed_max);
    if horizon > retention {
        notices.push(format!(
            "subscription.{name}.park.elapsed_max: messages are retried for up to {}, longer than \
             database.retention, {}: a copy that comes late finds the first one's row deleted, and \
             is processed again",
            show_duration(horizon),
            show_duration(retention)
        ));
    }
}
