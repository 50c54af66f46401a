//! The configuration as a whole: layers, defaults, refusals.

mod bad_input;
mod every_key;
mod failure;
mod http;

use std::time::Duration;

use secrecy::ExposeSecret;

use super::*;
use crate::engine::{Extractor, FingerprintOf, KeyFrom, OnMissingId, Ordering};

struct Given {
    inputs: Inputs,
    // Deleted with the test.
    _file: Option<tempfile::NamedTempFile>,
}

fn file(toml: &str) -> Given {
    let file = tempfile::Builder::new().suffix(".toml").tempfile().unwrap();
    std::fs::write(file.path(), toml).unwrap();
    let inputs = Inputs {
        file: Some(file.path().to_owned()),
        needs_subscriptions: true,
        ..Inputs::default()
    };
    Given { inputs, _file: Some(file) }
}

fn flags(source: &str, callback: &str) -> Given {
    let flags = Flags {
        source: Some((source.into(), "--source")),
        callback: Some((callback.into(), "--callback")),
        ..Flags::default()
    };
    let inputs = Inputs { flags, needs_subscriptions: true, ..Inputs::default() };
    Given { inputs, _file: None }
}

impl Given {
    fn env(mut self, name: &str, value: &str) -> Self {
        self.inputs.environment.push((name.into(), value.into()));
        self
    }

    fn good(self) -> Config {
        load(self.inputs).unwrap_or_else(|error| panic!("{error}"))
    }

    fn bad(self) -> ConfigError {
        match load(self.inputs) {
            Ok(config) => panic!("taken: {config:?}"),
            Err(error) => error,
        }
    }
}

const RABBITMQ: &str = "amqp://guest:geheim@127.0.0.1:5672/%2f?queue=orders&prefetch=64";
const KAFKA: &str = "kafka://127.0.0.1:9092/orders?group=billing";
const CALLBACK: &str = "http://127.0.0.1:8080/orders";

const TWO: &str = r#"
[broker.main]
kind = "kafka"
url = "127.0.0.1:9092"
[broker.main.properties]
"fetch.wait.max.ms" = "50"

[broker.rabbit]
url = "amqp://inbox:geheim@mq/%2Fprod"

[subscription.orders]
consumer_id = "billing"
callback = "http://127.0.0.1:8080/orders"
source = { broker = "main", topics = ["orders"], group = "billing" }
ordering = "key"

[subscription.mails]
callback = "unix:/run/app.sock:/mails"
source = { broker = "rabbit", queue = "mails" }
"#;

#[track_caller]
fn assert_says(error: &ConfigError, key: &str, what: &str) {
    let found = error.0.iter().any(|problem| {
        problem.key == key && (problem.what.contains(what) || problem.remedy.contains(what))
    });
    assert!(found, "no {key:?} with {what:?} in: {error}");
}

fn kafka(config: &SubscriptionConfig) -> &KafkaSourceConfig {
    match &config.source {
        SourceConfig::Kafka(kafka) => kafka,
        SourceConfig::RabbitMq(_) => panic!("not Kafka"),
    }
}

fn rabbitmq(config: &SubscriptionConfig) -> &RabbitMqSourceConfig {
    match &config.source {
        SourceConfig::RabbitMq(rabbitmq) => rabbitmq,
        SourceConfig::Kafka(_) => panic!("not RabbitMQ"),
    }
}

#[test]
fn two_flags_are_enough_for_rabbitmq() {
    let config = flags(RABBITMQ, CALLBACK).good();
    let [subscription] = &config.subscriptions[..] else { panic!("one subscription") };
    assert_eq!(&*subscription.settings.name, "default");
    assert_eq!(subscription.settings.consumer_id.as_str(), "orders");
    assert_eq!(subscription.callback.url, CALLBACK);
    let source = rabbitmq(subscription);
    assert_eq!(source.hosts, ["127.0.0.1:5672"]);
    assert_eq!((source.vhost.as_str(), source.user.as_str()), ("/", "guest"));
    assert_eq!(source.password.expose_secret(), "geheim");
    assert_eq!((source.queue.as_str(), source.prefetch), ("orders", 64));
    assert!(source.tls.is_none());
    assert!(
        matches!(&config.database.url, DatabaseUrl::Sqlite(path) if path.as_os_str() == "inbox.db")
    );
    assert_eq!(config.admin.listen, Some(([127, 0, 0, 1], 7461).into()));
}

#[test]
fn two_flags_are_enough_for_kafka() {
    let config = flags(KAFKA, CALLBACK).good();
    let subscription = &config.subscriptions[0];
    assert_eq!(subscription.settings.consumer_id.as_str(), "billing");
    let source = kafka(subscription);
    assert_eq!(source.brokers, ["127.0.0.1:9092"]);
    assert_eq!(source.topics, ["orders"]);
    assert_eq!(source.start, Start::Earliest);
    assert!(source.position_identity);
    assert_eq!(
        subscription.settings.identity.extractors,
        [
            Extractor::Property,
            Extractor::Header("message-id".into()),
            Extractor::CloudEvents,
            Extractor::KafkaPosition
        ]
    );
}

#[test]
fn the_defaults_are_those_of_the_documentation() {
    let config = flags(RABBITMQ, CALLBACK).good();
    let settings = &config.subscriptions[0].settings;
    assert_eq!(settings.concurrency, 16);
    assert_eq!(settings.in_flight_max, 1_024);
    assert_eq!(settings.in_flight_bytes_max, 64 << 20);
    assert_eq!(settings.body_bytes_max, 16 << 20);
    assert_eq!(settings.callback_timeout, Duration::from_secs(30));
    assert_eq!(settings.lease, Duration::from_secs(15));
    assert_eq!(settings.hold_max, Duration::from_secs(600));
    assert_eq!(settings.retry.initial, Duration::from_millis(200));
    assert_eq!(settings.retry.cap, Duration::from_secs(30));
    assert_eq!(settings.ordering, Ordering::None);
    assert_eq!(settings.identity.fingerprint, FingerprintOf::Body);
    assert!(!settings.identity.on_missing_is_explicit);
    assert_eq!(config.database.retention, Duration::from_secs(14 * 86_400));
    assert_eq!(config.database.sweep_interval, Duration::from_secs(600));
    assert_eq!(config.database.pool_max, 4);
    assert_eq!(config.shutdown_grace, Duration::from_secs(25));
    assert_eq!(config.subscriptions[0].callback.headers_prefix, "Inbox-Header-");
    assert_eq!(config.subscriptions[0].callback.connect_timeout, Duration::from_secs(5));
}

#[test]
fn prefetch_follows_concurrency_unless_it_is_set() {
    let source = "amqp://h/?queue=orders&concurrency=100";
    assert_eq!(rabbitmq(&flags(source, CALLBACK).good().subscriptions[0]).prefetch, 200);
}

#[test]
fn a_source_s_parameters_are_the_keys_of_the_file() {
    let source = "kafka://a,b:1/x?group=g&start=latest&topic_pattern=orders-.*&ordering=key\
                  &ordering_key=header:tenant&retry.cap=5s&properties.session.timeout.ms=6000\
                  &commit_interval=200ms";
    let config = flags(source, CALLBACK).good();
    let settings = &config.subscriptions[0].settings;
    assert_eq!(settings.ordering, Ordering::Key);
    assert_eq!(settings.key_from, KeyFrom::Header("tenant".into()));
    assert_eq!(settings.retry.cap, Duration::from_secs(5));
    let source = kafka(&config.subscriptions[0]);
    assert_eq!(source.brokers, ["a:9092", "b:1"]);
    assert_eq!(source.topics, ["x", "^orders-.*"]);
    assert_eq!(source.properties.get("session.timeout.ms"), Some("6000"));
    assert_eq!(source.commit_interval, Duration::from_millis(200));

    let error = flags("amqp://h/?queue=a&colour=red", CALLBACK).bad();
    assert_says(&error, "", "\"colour\"");
}

#[test]
fn a_file_has_several_brokers_and_subscriptions() {
    let config = file(TWO).good();
    let [mails, orders] = &config.subscriptions[..] else { panic!("two subscriptions") };
    assert_eq!(orders.settings.consumer_id.as_str(), "billing");
    assert_eq!(orders.settings.key_from, KeyFrom::RecordKey);
    assert_eq!(kafka(orders).properties.get("fetch.wait.max.ms"), Some("50"));
    assert_eq!(mails.settings.consumer_id.as_str(), "mails");
    assert_eq!(rabbitmq(mails).vhost, "/prod");
    assert_eq!(rabbitmq(mails).user, "inbox");
}

#[test]
fn the_environment_overrides_the_file_and_flags_override_both() {
    let given = file(TWO)
        .env("INBOXD__SUBSCRIPTION__ORDERS__CONCURRENCY", "4")
        .env("INBOXD__SUBSCRIPTION__ORDERS__SOURCE__TOPICS", "orders, refunds")
        .env("INBOXD__BROKER__MAIN__PROPERTIES__FETCH_WAIT_MAX_MS", "70")
        .env("INBOXD__DATABASE__RETENTION", "7d")
        .env("INBOXD__DATABASE__URL", "postgres://a@b/c");
    let config = given.good();
    let orders = &config.subscriptions[1];
    assert_eq!(orders.settings.concurrency, 4);
    assert_eq!(kafka(orders).topics, ["orders", "refunds"]);
    assert_eq!(kafka(orders).properties.get("fetch.wait.max.ms"), Some("70"));
    assert_eq!(config.database.retention, Duration::from_secs(7 * 86_400));

    let mut given = file(TWO).env("INBOXD__DATABASE__URL", "postgres://a@b/c");
    given.inputs.flags.database = Some(("sqlite:other.db".into(), "--database"));
    given.inputs.flags.admin = Some(("off".into(), "--admin"));
    let config = given.good();
    assert!(matches!(config.database.url, DatabaseUrl::Sqlite(_)));
    assert_eq!(config.admin.listen, None);
}

#[test]
fn the_environment_reaches_the_subscription_that_flags_make() {
    let config = flags("amqp://h/?queue=orders", CALLBACK)
        .env("INBOXD__SUBSCRIPTION__DEFAULT__LEASE", "5s")
        .env("INBOXD__SUBSCRIPTION__DEFAULT__ON_MISSING_ID", "forward")
        .env("INBOXD__SUBSCRIPTION__DEFAULT__SOURCE__PREFETCH", "7")
        .env("INBOXD__BROKER__DEFAULT__USER", "inbox")
        .env("INBOXD__BROKER__DEFAULT__PASSWORD", "geheim")
        .good();
    let subscription = &config.subscriptions[0];
    assert_eq!(subscription.settings.lease, Duration::from_secs(5));
    assert_eq!(subscription.settings.identity.on_missing, OnMissingId::Forward);
    assert!(subscription.settings.identity.on_missing_is_explicit);
    assert_eq!(rabbitmq(subscription).prefetch, 7);
    assert_eq!(rabbitmq(subscription).user, "inbox");
    assert_eq!(rabbitmq(subscription).password.expose_secret(), "geheim");
}

#[test]
fn a_source_from_a_flag_replaces_the_file_s_only_one() {
    let one = "[subscription.a]\ncallback = \"http://h/\"\n\
               source = { broker = \"b\", topics = [\"t\"], group = \"g\" }\n\
               [broker.b]\nkind = \"kafka\"\nurl = \"h\"\n";
    let mut given = file(one);
    given.inputs.flags.source = Some((RABBITMQ.into(), "--source"));
    let config = given.good();
    assert_eq!(&*config.subscriptions[0].settings.name, "a");
    assert_eq!(rabbitmq(&config.subscriptions[0]).queue, "orders");

    let mut given = file(TWO);
    given.inputs.flags.callback = Some((CALLBACK.into(), "--callback"));
    assert!(given.bad().to_string().contains("several subscriptions"));
}

#[test]
fn all_problems_are_told_at_once() {
    let error = file(
        r#"
shutdown_grace = "1ms"
colour = "red"
[database]
url = "oracle://h"
retention = "forever"
[broker.b]
kind = "kafka"
url = "h:0"
[subscription.s]
callback = "ftp://h"
concurency = 3
lease = "1ms"
source = { broker = "c", queue = "q", prefetch = 0 }
"#,
    )
    .bad();
    assert_says(&error, "shutdown_grace", "\"1ms\" is below the least, 100ms");
    assert_says(&error, "colour", "no such key");
    assert_says(&error, "database.url", "\"oracle\"");
    assert_says(&error, "database.retention", "\"forever\" is no duration");
    assert_says(&error, "broker.b.url", "port");
    assert_says(&error, "subscription.s.callback", "\"ftp\"");
    assert_says(&error, "subscription.s.concurency", "did you mean");
    assert_says(&error, "subscription.s.lease", "\"1ms\" is below the least, 500ms");
    assert_says(&error, "subscription.s.source.broker", "there is no [broker.c]");
    assert_says(&error, "subscription.s.source.prefetch", "0 is below the least, 1");
    let line = |key: &str| {
        let problem = error.0.iter().find(|problem| problem.key == key).unwrap();
        problem.place.to_string().rsplit(':').next().unwrap().to_owned()
    };
    assert_eq!(line("shutdown_grace"), "2");
    assert_eq!(line("database.retention"), "6");
}

#[test]
fn what_could_lose_messages_is_refused() {
    let error = flags("amqp://h/?queue=orders&prefetch=0", CALLBACK).bad();
    assert_says(&error, "subscription.default.source.prefetch", "0 is below the least, 1");
    let error = flags("amqp://h/?queue=orders&message_id=delivery-tag", CALLBACK).bad();
    assert_says(&error, "subscription.default.message_id", "another at each delivery");
    let error = flags(RABBITMQ, CALLBACK).env("INBOXD__DATABASE__RETENTION", "10s").bad();
    assert_says(&error, "database.retention", "below the lease, 15s");
    let error = file("[subscription.a]\n[subscription.a]\n").bad();
    assert!(error.to_string().contains("duplicate key"), "{error}");
}

#[test]
fn a_short_lease_is_refused_where_locks_are_counted_in_seconds() {
    let given = |lease| {
        flags(RABBITMQ, CALLBACK)
            .env("INBOXD__DATABASE__URL", "mysql://inbox@h/inbox")
            .env("INBOXD__SUBSCRIPTION__DEFAULT__LEASE", lease)
    };
    assert_says(&given("4s").bad(), "subscription.default.lease", "at least 5s");
    given("5s").good();
}

#[test]
fn a_consumer_id_is_shared_only_on_purpose() {
    let toml = |shared: &str, second: &str| {
        format!(
            "{shared}\n[broker.b]\nurl = \"amqp://h/\"\n\
             [subscription.a]\nconsumer_id = \"x\"\ncallback = \"http://h/a\"\nsource = {{ queue = \"a\" }}\n\
             [subscription.b]\nconsumer_id = \"x\"\ncallback = \"http://h/{second}\"\nsource = {{ queue = \"b\" }}\n"
        )
    };
    let error = file(&toml("", "b")).bad();
    assert_says(&error, "subscription.b.consumer_id", "shared_consumer_ids = [\"x\"]");
    assert!(error.0[0].place.to_string().ends_with(":9"), "{error}");
    file(&toml("shared_consumer_ids = [\"x\"]", "b")).good();
    // Two queues of one application need no permission.
    file(&toml("", "a")).good();
}

#[test]
fn the_longest_lease_holds_for_all() {
    let config = file(&format!("{TWO}\nlease = \"20s\"\n")).good();
    assert_eq!(config.lease, Duration::from_secs(20));
    assert!(config.subscriptions.iter().all(|one| one.settings.lease == config.lease));
    assert_eq!(config.notices.len(), 1);
}

#[test]
fn an_order_needs_a_key_and_a_queue_that_keeps_it() {
    let error = flags("amqp://h/?queue=a&ordering=key", CALLBACK).bad();
    assert_says(&error, "subscription.default.ordering_key", "it is missing");
    let error = flags("amqp://h/?queue=a&ordering_key=routing-key", CALLBACK).bad();
    assert_says(&error, "subscription.default.ordering_key", "no effect");
    let error = flags("kafka://h/t?group=g&ordering=key&ordering_key=routing-key", CALLBACK).bad();
    assert_says(&error, "subscription.default.ordering_key", "no routing key");
    let error = flags("amqp://h/?queue=a&ordering=partition&declare=quorum", CALLBACK).bad();
    assert_says(&error, "subscription.default.source.single_active_consumer", "set true");
    let source = "amqp://h/?queue=a&ordering=partition&declare=quorum&single_active_consumer=true";
    let config = flags(source, CALLBACK).good();
    assert!(rabbitmq(&config.subscriptions[0]).single_active_consumer);
}

#[test]
fn a_listener_beyond_loopback_wants_a_token() {
    let error = flags(RABBITMQ, CALLBACK).env("INBOXD__ADMIN__LISTEN", "0.0.0.0:7461").bad();
    assert_says(&error, "admin.token_file", "can be reached from elsewhere");
    let config = flags(RABBITMQ, CALLBACK)
        .env("INBOXD__ADMIN__LISTEN", "0.0.0.0:7461")
        .env("INBOXD__ADMIN__TOKEN", "0123456789abcdef")
        .env("INBOXD__HEALTH__LISTEN", "0.0.0.0:7462")
        .good();
    assert!(config.admin.token.is_some());
    assert_eq!(config.health_listen.unwrap().port(), 7462);
}

#[test]
fn a_publisher_cannot_be_given_bare_header_names() {
    let error = flags("amqp://h/?queue=a&headers.prefix=", CALLBACK).bad();
    assert_says(&error, "subscription.default.headers.prefix", "publisher");
    let config =
        flags("amqp://h/?queue=a&headers.prefix=&headers.copy=tenant,x-id", CALLBACK).good();
    let callback = &config.subscriptions[0].callback;
    assert_eq!(callback.headers_copy, HeadersCopy::Named(vec!["tenant".into(), "x-id".into()]));
    assert_eq!(callback.headers_prefix, "");
}

#[test]
fn what_is_missing_is_named_with_its_flag() {
    let mut given = flags(RABBITMQ, CALLBACK);
    given.inputs.flags.callback = None;
    assert_says(&given.bad(), "subscription.default.callback", "--callback");
    let mut given = flags(RABBITMQ, CALLBACK);
    given.inputs.flags.source = None;
    assert_says(&given.bad(), "subscription.default.source", "--source");
    let inputs = Inputs { needs_subscriptions: true, ..Inputs::default() };
    assert_says(&load(inputs).err().unwrap(), "subscription", "--source and --callback");
    load(Inputs::default()).unwrap();
    let error = flags("kafka://h/t", CALLBACK).bad();
    assert_says(&error, "subscription.default.source.group", "consumer_id");
    let error = flags("amqp://h/", CALLBACK).bad();
    assert_says(&error, "subscription.default.source.queue", "name the queue");
}

#[test]
fn a_source_that_cannot_be_read_is_not_missing_too() {
    let error = flags("amqp://h:0/?queue=a", CALLBACK).bad();
    assert_eq!(error.0.len(), 1, "{error}");
    assert!(error.to_string().contains("--source: a port is no number"), "{error}");
}

#[test]
fn the_group_and_the_consumer_name_each_other() {
    let mut given = flags("kafka://h/t", CALLBACK);
    given.inputs.flags.consumer_id = Some(("billing".into(), "--consumer-id"));
    assert_eq!(kafka(&given.good().subscriptions[0]).group, "billing");
}

#[test]
fn secrets_are_in_no_debug_output() {
    let config = flags(RABBITMQ, CALLBACK)
        .env("INBOXD__DATABASE__URL", "postgres://inbox:geheim@h/inbox")
        .env("INBOXD__ADMIN__TOKEN", "geheimgeheimgeheim")
        .good();
    assert!(!format!("{config:?}").contains("geheim"));
    let source = "kafka://u:geheim@h/t?group=g&properties.ssl.key.password=geheim";
    let config = flags(source, CALLBACK).good();
    let properties = &kafka(&config.subscriptions[0]).properties;
    assert_eq!(properties.get("sasl.password"), Some("geheim"));
    assert_eq!(properties.get("security.protocol"), Some("sasl_plaintext"));
    assert!(!format!("{config:?}").contains("geheim"));
}

#[test]
fn a_short_variable_is_over_the_long_one_of_the_same_key() {
    let mut given = flags(RABBITMQ, CALLBACK)
        .env("INBOXD__DATABASE__URL", "sqlite:long.db")
        .env("INBOXD_SORCE", "x");
    given.inputs.flags.database = Some(("sqlite:short.db".into(), "INBOXD_DATABASE"));
    let config = given.good();
    assert!(
        matches!(&config.database.url, DatabaseUrl::Sqlite(path) if path.as_os_str() == "short.db")
    );
    assert!(config.notices.iter().any(|notice| notice.contains("INBOXD_SORCE")));
}

#[test]
fn a_password_without_a_user_is_refused() {
    let text = "[broker.main]\nurl = \"amqp://mq/\"\npassword = \"geheim\"\n";
    assert_says(&file(text).bad(), "broker.main.user", "set user too");
}

#[test]
fn secrets_are_in_no_error() {
    for given in [
        flags("amqp://u:geheim@h:x/?queue=a", CALLBACK),
        flags("amqp://u:geheim@h/?queue=a&colour=red", CALLBACK),
        flags(RABBITMQ, CALLBACK).env("INBOXD__DATABASE__URL", "postgres://u:geheim@h:x/y"),
        flags(RABBITMQ, CALLBACK).env("INBOXD__ADMIN__TOKEN", "geheim"),
        file("[broker.a]\nkind = \"kafka\"\nurl = \"amqp://u:geheim@h/\"\npasswort = \"geheim\"\n"),
    ] {
        let error = given.bad();
        assert!(!error.to_string().contains("geheim"), "{error}");
    }
}

#[test]
fn tls_is_a_scheme_a_switch_or_files() {
    let ca = tempfile::NamedTempFile::new().unwrap();
    let pem = |label| format!("-----BEGIN {label}-----\nAAAA\n-----END {label}-----\n");
    std::fs::write(ca.path(), pem("CERTIFICATE")).unwrap();
    let path = ca.path().display();
    let config = flags(&format!("amqps://h/?queue=a&tls.ca_file={path}"), CALLBACK).good();
    let source = rabbitmq(&config.subscriptions[0]);
    assert_eq!(source.hosts, ["h:5671"]);
    assert_eq!(source.tls.as_ref().unwrap().ca_file.as_deref(), Some(ca.path()));
    let config = flags("kafka://h/t?group=g&tls=true", CALLBACK).good();
    assert_eq!(kafka(&config.subscriptions[0]).properties.get("security.protocol"), Some("ssl"));
    let error = flags("amqps://h/?queue=a&tls.ca_file=/nowhere", CALLBACK).bad();
    assert_says(&error, "broker.default.tls.ca_file", "cannot be read");
    let error = flags(&format!("amqps://h/?queue=a&tls.cert_file={path}"), CALLBACK).bad();
    assert_says(&error, "broker.default.tls.key_file", "belong together");
}

#[test]
fn what_is_no_certificate_or_key_is_told_where_it_is_named() {
    let files = tempfile::tempdir().unwrap();
    let holding = |name: &str, text: &str| {
        std::fs::write(files.path().join(name), text).unwrap();
        files.path().join(name).display().to_string()
    };
    let pem = |label| format!("-----BEGIN {label}-----\nAAAA\n-----END {label}-----\n");
    let certificate = holding("certificate", &pem("CERTIFICATE"));
    let key = holding("key", &pem("PRIVATE KEY"));
    let encrypted = holding("encrypted", &pem("ENCRYPTED PRIVATE KEY"));
    let rubbish = holding("rubbish", "geheim");
    let broken = holding("broken", "-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n");
    let with = |cert: &str, key: &str| {
        let source = "kafka://h/t?group=g";
        flags(&format!("{source}&tls.cert_file={cert}&tls.key_file={key}"), CALLBACK)
    };
    with(&certificate, &key).good();
    for (cert, key, at, what) in [
        (&rubbish, &key, "broker.default.tls.cert_file", "no certificate"),
        (&broken, &key, "broker.default.tls.cert_file", "no certificate"),
        (&key, &key, "broker.default.tls.cert_file", "no certificate"),
        (&certificate, &certificate, "broker.default.tls.key_file", "no private key"),
        (&certificate, &encrypted, "broker.default.tls.key_file", "encrypted"),
    ] {
        let error = with(cert, key).bad();
        assert_says(&error, at, what);
        assert!(!error.to_string().contains("geheim") && error.0.len() == 1, "{error}");
    }
    with(&certificate, &encrypted)
        .env("INBOXD__BROKER__DEFAULT__PROPERTIES__SSL_KEY_PASSWORD", "x")
        .good();
    let error = flags(RABBITMQ, CALLBACK)
        .env("INBOXD__SUBSCRIPTION__DEFAULT__TLS__CA_FILE", &rubbish)
        .bad();
    assert_says(&error, "subscription.default.tls.ca_file", "no certificate");
}

#[cfg(feature = "kafka")]
#[test]
fn properties_of_librdkafka_are_checked_each_where_it_is_set() {
    let text = "[broker.main]\nurl = \"kafka://k\"\n[broker.main.properties]\n\
        \"enable.auto.commit\" = true\n\"no.such.thing\" = 1\n\"session.timeout.ms\" = \"soon\"\n\
        \"fetch.wait.max.ms\" = 50\n\"ssl.key.pem\" = \"geheim\"\n";
    let error = file(text).env("INBOXD__BROKER__MAIN__PROPERTIES__GROUP_ID", "g").bad();
    for (line, what) in [
        (":4)", "cannot be set"),
        (":5)", "no such property"),
        (":6)", "session.timeout.ms"),
        ("(INBOXD__BROKER__MAIN__PROPERTIES__GROUP_ID)", "`group`"),
    ] {
        let told = error.0.iter().map(ToString::to_string);
        let found = told.into_iter().any(|one| one.contains(line) && one.contains(what));
        assert!(found, "{line} {what}: {error}");
    }
    assert!(!error.to_string().contains("geheim"), "{error}");
    assert!(!error.to_string().contains("fetch.wait"), "{error}");
}

#[test]
fn two_listeners_of_one_address_are_refused() {
    let error = flags(RABBITMQ, CALLBACK)
        .env("INBOXD__ADMIN__LISTEN", "127.0.0.1:7000")
        .env("INBOXD__HEALTH__LISTEN", "127.0.0.1:7000")
        .bad();
    assert_says(&error, "health.listen", "admin.listen");
    flags(RABBITMQ, CALLBACK)
        .env("INBOXD__ADMIN__LISTEN", "127.0.0.1:0")
        .env("INBOXD__HEALTH__LISTEN", "127.0.0.1:0")
        .good();
}

#[test]
fn a_file_that_is_none_is_named() {
    let given = |path: &str| Inputs { file: Some(path.into()), ..Inputs::default() };
    let error = load(given("/nowhere/inboxd.toml")).err().unwrap();
    assert!(error.to_string().contains("/nowhere/inboxd.toml"), "{error}");
    let error = load(given("inboxd.yaml")).err().unwrap();
    assert!(error.to_string().contains("YAML"), "{error}");
}

#[test]
fn a_secret_set_above_replaces_its_twin_below() {
    let with_file = format!("{TWO}\n[database]\nurl_file = \"/does/not/exist\"\n");
    let config = file(&with_file).env("INBOXD__DATABASE__URL", "sqlite:above.db").good();
    assert!(
        matches!(&config.database.url, DatabaseUrl::Sqlite(path) if path.as_os_str() == "above.db")
    );
    // Both in one layer are still a contradiction.
    let both =
        format!("{TWO}\n[database]\nurl = \"sqlite:a.db\"\nurl_file = \"/does/not/exist\"\n");
    assert!(!file(&both).bad().0.is_empty());
}
