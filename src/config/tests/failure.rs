//! What happens when the application fails: retrying, parking, dead letters, the breaker.

use std::time::Duration;

use super::*;
use crate::engine::{
    BreakerSettings, DeadLetterTo, DeliveryMode, Jitter, OnBlockedLane, OnDeadLetter, RetrySettings,
};

/// One subscription to a queue; `#` is where further keys go.
const QUEUE: &str = "[broker.rabbit]\nurl = \"amqp://mq/\"\n[broker.main]\nurl = \"kafka://k\"\n\
                     [subscription.orders]\ncallback = \"http://127.0.0.1:8080/orders\"\n\
                     source = { broker = \"rabbit\", queue = \"orders\" }\n#";
/// The same to two topics, one of them a pattern.
const TOPICS: &str = "[broker.rabbit]\nurl = \"amqp://mq/\"\n[broker.main]\nurl = \"kafka://k\"\n\
                      [broker.other]\nurl = \"kafka://elsewhere\"\n\
                      [subscription.orders]\ncallback = \"http://127.0.0.1:8080/orders\"\n\
                      source = { broker = \"main\", topics = [\"orders\", \"^eu-\"], group = \"g\" }\n#";

fn with(text: &str, keys: &str) -> Given {
    file(&text.replacen('#', keys, 1))
}

fn orders(config: &Config) -> &SubscriptionSettings {
    &config.subscriptions[0].settings
}

#[test]
fn the_defaults_are_those_of_the_engine() {
    let config = with(QUEUE, "").good();
    let settings = orders(&config);
    assert_eq!(settings.delivery, DeliveryMode::Direct);
    assert_eq!(settings.retry, RetrySettings::IN_PLACE);
    assert_eq!(settings.park, RetrySettings::PARKED);
    assert_eq!(settings.breaker, BreakerSettings::default());
    assert_eq!(settings.on_blocked_lane, OnBlockedLane::Park);
    assert_eq!(settings.on_dead_letter, OnDeadLetter::Continue);
    assert_eq!(settings.dead_letter_to, DeadLetterTo::Table);
    assert_eq!((settings.adaptive, settings.rate), (true, None));
    assert_eq!(settings.health_interval, Duration::from_secs(5));
    assert!(config.subscriptions[0].dead_letter.is_none());
    assert!(config.notices.is_empty(), "{:?}", config.notices);
}

#[test]
fn every_value_reaches_the_engine() {
    let config = with(
        QUEUE,
        "delivery = \"stored\"\nordering = \"key\"\nordering_key = \"routing-key\"\n\
         on_blocked_lane = \"skip\"\non_dead_letter = \"halt\"\nadaptive_concurrency = false\n\
         rate = 0.1\nhealth_url = \"http://127.0.0.1:8080/health\"\nhealth_interval = \"2s\"\n\
         retry = { initial = \"10ms\", factor = 3, cap = \"1s\", jitter = \"none\", \
         attempts_max = 2, elapsed_max = \"5s\" }\n\
         park = { initial = \"1s\", factor = 1, cap = \"2s\", jitter = \"none\", \
         attempts_max = 7, elapsed_max = \"1h\" }\n\
         breaker = { failures = 0, probe_initial = \"100ms\", probe_cap = \"3s\" }\n",
    )
    .good();
    let settings = orders(&config);
    assert_eq!(settings.delivery, DeliveryMode::Stored);
    assert_eq!(settings.on_blocked_lane, OnBlockedLane::Skip);
    assert_eq!(settings.on_dead_letter, OnDeadLetter::Halt);
    assert_eq!((settings.adaptive, settings.rate), (false, Some(0.1)));
    assert_eq!(settings.health_interval, Duration::from_secs(2));
    let health_url = config.subscriptions[0].callback.health_url.as_deref();
    assert_eq!(health_url, Some("http://127.0.0.1:8080/health"));
    let backoff = |initial, factor, cap, attempts_max, elapsed_max| RetrySettings {
        initial: Duration::from_millis(initial),
        factor,
        cap: Duration::from_millis(cap),
        jitter: Jitter::None,
        attempts_max,
        elapsed_max: Duration::from_millis(elapsed_max),
    };
    assert_eq!(settings.retry, backoff(10, 3.0, 1_000, 2, 5_000));
    assert_eq!(settings.park, backoff(1_000, 1.0, 2_000, 7, 3_600_000));
    let breaker = BreakerSettings {
        failures: 0,
        probe_initial: Duration::from_millis(100),
        probe_cap: Duration::from_secs(3),
    };
    assert_eq!(settings.breaker, breaker);
}

#[test]
fn a_partition_halts_behind_a_message_that_fails_unless_told_otherwise() {
    let partition = "ordering = \"partition\"\n";
    let config = with(TOPICS, partition).good();
    assert_eq!(orders(&config).on_blocked_lane, OnBlockedLane::Halt);
    let config = with(TOPICS, &format!("{partition}on_blocked_lane = \"park\"\n")).good();
    assert_eq!(orders(&config).on_blocked_lane, OnBlockedLane::Park);
}

#[test]
fn every_delivery_goes_with_every_ordering_on_both_brokers() {
    for delivery in ["direct", "stored"] {
        for ordering in ["none", "key", "partition"] {
            for (text, key) in [(TOPICS, ""), (QUEUE, "ordering_key = \"header:key\"\n")] {
                let key = if ordering == "key" { key } else { "" };
                let keys = format!("delivery = \"{delivery}\"\nordering = \"{ordering}\"\n{key}");
                with(text, &keys).good();
            }
        }
    }
}

#[test]
fn what_contradicts_itself_is_told_where_it_was_set() {
    for (keys, key, what) in [
        ("retry.cap = \"1ms\"", "retry.cap", "below subscription.orders.retry.initial"),
        ("park.initial = \"2h\"", "park.initial", "park.cap is below"),
        ("breaker.probe_cap = \"10ms\"", "breaker.probe_cap", "probe_initial"),
        ("retry.attempts_max = 21", "retry.attempts_max", "set park.attempts_max"),
        ("park.attempts_max = 4", "park.attempts_max", "retry.attempts_max is 5"),
        ("on_blocked_lane = \"halt\"", "on_blocked_lane", "no lanes"),
        ("on_blocked_lane = \"skip\"", "on_blocked_lane", "no lanes"),
        ("on_dead_letter = \"halt\"", "on_dead_letter", "no lanes"),
        ("health_interval = \"1s\"", "health_interval", "without health_url"),
        ("health_url = \"127.0.0.1\"", "health_url", "no URL"),
        ("dead_letter.topic = \"dead\"", "dead_letter.topic", "no effect"),
        ("dead_letter.broker = \"main\"", "dead_letter.broker", "no effect"),
    ] {
        let error = with(QUEUE, &format!("{keys}\n")).bad();
        assert_says(&error, &format!("subscription.orders.{key}"), what);
        assert_eq!(error.0.len(), 1, "{error}");
    }
}

#[test]
fn dead_letters_go_to_the_broker_of_the_source_or_to_a_named_one_of_either_kind() {
    let target = |text, keys| with(text, keys).good().subscriptions.remove(0).dead_letter;
    let Some(DeadLetterTargetConfig::Kafka { brokers, topic, .. }) =
        target(TOPICS, "dead_letter = { to = \"broker\", topic = \"dead\" }\n")
    else {
        panic!("Kafka")
    };
    assert_eq!((brokers, topic.as_str()), (vec!["k:9092".to_owned()], "dead"));
    let Some(DeadLetterTargetConfig::RabbitMq { hosts, exchange, routing_key, .. }) =
        target(QUEUE, "dead_letter = { to = \"both\", exchange = \"dead\" }\n")
    else {
        panic!("RabbitMQ")
    };
    assert_eq!((hosts, exchange.as_str()), (vec!["mq:5672".to_owned()], "dead"));
    assert_eq!(routing_key, None, "the message's own");
    assert!(matches!(
        target(QUEUE, "dead_letter = { to = \"both\", broker = \"main\", topic = \"orders\" }\n"),
        Some(DeadLetterTargetConfig::Kafka { .. })
    ));
    assert!(matches!(
        target(TOPICS, "dead_letter = { to = \"broker\", broker = \"rabbit\", routing_key = \"d\" }\n"),
        Some(DeadLetterTargetConfig::RabbitMq { exchange, .. }) if exchange.is_empty()
    ));
}

#[test]
fn where_dead_letters_go_must_be_said_and_fit() {
    for (text, keys, key, what) in [
        (TOPICS, "to = \"broker\"", "topic", "name the topic"),
        (QUEUE, "to = \"both\"", "exchange", "name the exchange"),
        (TOPICS, "to = \"broker\", topic = \"^dead\"", "topic", "regular expression"),
        (
            TOPICS,
            "to = \"broker\", broker = \"none\", topic = \"dead\"",
            "broker",
            "no [broker.none]",
        ),
        (QUEUE, "to = \"broker\", exchange = \"dead\", topic = \"dead\"", "topic", "it is Kafka's"),
        (
            TOPICS,
            "to = \"broker\", exchange = \"dead\", topic = \"dead\"",
            "exchange",
            "it is RabbitMQ's",
        ),
    ] {
        let error = with(text, &format!("dead_letter = {{ {keys} }}\n")).bad();
        assert_says(&error, &format!("subscription.orders.dead_letter.{key}"), what);
        assert_eq!(error.0.len(), 1, "{error}");
    }
}

#[test]
fn dead_letters_that_would_come_back_are_refused() {
    for (text, keys, key) in [
        (TOPICS, "to = \"broker\", topic = \"orders\"", "topic"),
        (TOPICS, "to = \"both\", topic = \"eu-dead\"", "topic"),
        (TOPICS, "to = \"broker\", broker = \"main\", topic = \"orders\"", "topic"),
        (QUEUE, "to = \"broker\", routing_key = \"orders\"", "routing_key"),
    ] {
        let error = with(text, &format!("dead_letter = {{ {keys} }}\n")).bad();
        let key = format!("subscription.orders.dead_letter.{key}");
        assert_says(&error, &key, "would come back");
    }
    for (text, keys) in [
        (TOPICS, "to = \"broker\", broker = \"other\", topic = \"orders\""),
        (TOPICS, "to = \"broker\", topic = \"orders-dead\""),
        (QUEUE, "to = \"broker\", exchange = \"dead\", routing_key = \"orders\""),
    ] {
        with(text, &format!("dead_letter = {{ {keys} }}\n")).good();
    }
}

#[test]
fn what_fits_together_badly_is_noticed() {
    for (keys, what) in [
        ("hold_max = \"30m\"\n", "hold_max: 30min is not below RabbitMQ's consumer_timeout"),
        ("park.elapsed_max = \"15d\"\n", "longer than database.retention, 14d"),
    ] {
        let notices = with(QUEUE, keys).good().notices;
        let [notice] = &notices[..] else { panic!("{notices:?}") };
        assert!(notice.contains(what), "{notice}");
    }
    let notices = with(TOPICS, "hold_max = \"1h\"\n").good().notices;
    assert!(notices.is_empty(), "{notices:?}");
}

#[test]
fn the_listener_s_certificate_and_key_belong_together() {
    let files = tempfile::tempdir().unwrap();
    let path = files.path().join("both.pem");
    std::fs::write(
        &path,
        "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n\
         -----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n",
    )
    .unwrap();
    let path = path.display();
    let both = format!("[admin.tls]\ncert_file = \"{path}\"\nkey_file = \"{path}\"\n");
    assert!(with(QUEUE, &both).good().admin.tls.is_some());
    let error = with(QUEUE, &format!("[admin.tls]\ncert_file = \"{path}\"\n")).bad();
    assert_says(&error, "admin.tls.key_file", "belong together");
    assert!(with(QUEUE, "").good().admin.tls.is_none());
}
