//! From the configuration's plain values to the adapters' own.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use inboxd_contract::{Finding, Forwarder, InboxStore, Severity, Source};
use inboxd_http::{Dialect, HeaderCopy, HeaderPolicy, HttpConfig, HttpForwarder, Meaning};

use super::AppError;
use crate::config::{
    Config, Contract, HeadersCopy, MappedVerdict, SourceConfig, StatusPattern, SubscriptionConfig,
};
use crate::engine::compare_retention;
use crate::telemetry::Described;

/// The application of one subscription.
pub(super) fn forwarder(subscription: &SubscriptionConfig) -> Result<Arc<dyn Forwarder>, AppError> {
    Ok(Arc::new(http_forwarder(subscription)?))
}

pub(super) fn http_forwarder(subscription: &SubscriptionConfig) -> Result<HttpForwarder, AppError> {
    let callback = &subscription.callback;
    let settings = &subscription.settings;
    let mut http = HttpConfig::new(callback.url.clone());
    http.health_url = callback.health_url.clone();
    http.connect_timeout = callback.connect_timeout;
    http.callback_timeout = settings.callback_timeout;
    http.retry_after_cap = settings.retry.cap;
    http.http2_prior_knowledge = callback.http2;
    http.headers = HeaderPolicy {
        copy: match &callback.headers_copy {
            HeadersCopy::All => HeaderCopy::All,
            HeadersCopy::Named(names) => HeaderCopy::Allow(names.clone()),
        },
        prefix: callback.headers_prefix.clone(),
    };
    http.fixed_headers = callback.headers_set.clone();
    http.dialect = match callback.contract {
        Contract::Plain => Dialect::Plain,
        Contract::Dapr => Dialect::Dapr,
    };
    http.status_map = callback.status_map.iter().map(mapped).collect();
    http.signing_secrets = callback.signing.clone();
    http.tls = inboxd_http::TlsFiles {
        ca_file: callback.tls.ca_file.clone(),
        cert_file: callback.tls.cert_file.clone(),
        key_file: callback.tls.key_file.clone(),
    };
    HttpForwarder::new(http).map_err(|error| AppError::Config {
        key: format!("subscription.{}.callback", settings.name),
        source: error.into(),
    })
}

fn mapped(&(pattern, verdict): &(StatusPattern, MappedVerdict)) -> (RangeInclusive<u16>, Meaning) {
    let statuses = match pattern {
        StatusPattern::Code(code) => code..=code,
        StatusPattern::Class(digit) => {
            let first = u16::from(digit) * 100;
            first..=first + 99
        }
    };
    let meaning = match verdict {
        MappedVerdict::Accepted => Meaning::Accepted,
        MappedVerdict::Refused => Meaning::Refused,
        MappedVerdict::Retry => Meaning::Retry,
        MappedVerdict::Drop => Meaning::Drop,
    };
    (statuses, meaning)
}

/// What traces and metrics say of one subscription; `None` for a callback that no forwarder takes.
pub(super) fn described(subscription: &SubscriptionConfig) -> Option<Described> {
    let callback = inboxd_http::Callback::parse(&subscription.callback.url).ok()?;
    Some(Described {
        subscription: subscription.settings.name.clone(),
        group: match &subscription.source {
            SourceConfig::Kafka(kafka) => Some(kafka.group.clone()),
            SourceConfig::RabbitMq(_) => None,
        },
        url: callback.url().clone(),
        socket: callback.socket().map(|path| path.display().to_string()),
    })
}

/// What only the broker's library can refuse; connects to nothing.
pub(super) fn validate(subscription: &SubscriptionConfig) -> Result<(), AppError> {
    match &subscription.source {
        #[cfg(feature = "kafka")]
        SourceConfig::Kafka(kafka) => kafka_config(subscription, kafka)
            .validate()
            .map_err(|error| refused(subscription, error)),
        #[cfg(not(feature = "kafka"))]
        SourceConfig::Kafka(_) => Err(AppError::Feature("kafka")),
        #[cfg(feature = "rabbitmq")]
        SourceConfig::RabbitMq(rabbitmq) => rabbitmq_config(subscription, rabbitmq)
            .validate()
            .map_err(|error| refused(subscription, error)),
        #[cfg(not(feature = "rabbitmq"))]
        SourceConfig::RabbitMq(_) => Err(AppError::Feature("rabbitmq")),
    }
}

/// Looks at where a subscription consumes from, within this time.
pub(super) async fn inspect(
    config: &Config,
    subscription: &SubscriptionConfig,
    within: Duration,
) -> Vec<Finding> {
    match &subscription.source {
        SourceConfig::Kafka(kafka) => {
            inspect_kafka(config.database.retention, subscription, kafka, within).await
        }
        SourceConfig::RabbitMq(rabbitmq) => inspect_rabbitmq(subscription, rabbitmq, within).await,
    }
}

#[cfg(feature = "kafka")]
async fn inspect_kafka(
    retention: Duration,
    subscription: &SubscriptionConfig,
    config: &crate::config::KafkaSourceConfig,
    within: Duration,
) -> Vec<Finding> {
    let kafka = kafka_config(subscription, config);
    let (mut findings, horizons) = futures::join!(
        inboxd_kafka::inspect(&kafka, within),
        inboxd_kafka::redelivery_horizon(&kafka),
    );
    // A broker that cannot be used says so once.
    if !findings.iter().any(|finding| finding.severity == Severity::Problem) {
        findings.extend(compare_retention(retention, &horizons));
    }
    findings
}

#[cfg(not(feature = "kafka"))]
async fn inspect_kafka(
    _: Duration,
    _: &SubscriptionConfig,
    _: &crate::config::KafkaSourceConfig,
    _: Duration,
) -> Vec<Finding> {
    vec![super::check::refused(&AppError::Feature("kafka"))]
}

#[cfg(feature = "rabbitmq")]
async fn inspect_rabbitmq(
    subscription: &SubscriptionConfig,
    config: &crate::config::RabbitMqSourceConfig,
    within: Duration,
) -> Vec<Finding> {
    inboxd_rabbitmq::inspect(&rabbitmq_config(subscription, config), within).await
}

#[cfg(not(feature = "rabbitmq"))]
async fn inspect_rabbitmq(
    _: &SubscriptionConfig,
    _: &crate::config::RabbitMqSourceConfig,
    _: Duration,
) -> Vec<Finding> {
    vec![super::check::refused(&AppError::Feature("rabbitmq"))]
}

/// Starts the source of one subscription. `inbox_id` goes with Kafka's commits.
pub(super) fn source(
    subscription: &SubscriptionConfig,
    store: &Arc<dyn InboxStore>,
    inbox_id: &str,
) -> Result<Box<dyn Source>, AppError> {
    match &subscription.source {
        SourceConfig::Kafka(kafka) => self::kafka(subscription, kafka, store, inbox_id),
        SourceConfig::RabbitMq(rabbitmq) => self::rabbitmq(subscription, rabbitmq),
    }
}

#[cfg(any(feature = "kafka", feature = "rabbitmq"))]
fn refused(subscription: &SubscriptionConfig, error: inboxd_contract::SourceError) -> AppError {
    AppError::Config {
        key: format!("subscription.{}.source", subscription.settings.name),
        source: error.into(),
    }
}

#[cfg(feature = "kafka")]
fn kafka(
    subscription: &SubscriptionConfig,
    config: &crate::config::KafkaSourceConfig,
    store: &Arc<dyn InboxStore>,
    inbox_id: &str,
) -> Result<Box<dyn Source>, AppError> {
    let mut kafka = kafka_config(subscription, config);
    kafka.commit_metadata = Some(inbox_id.to_owned());
    kafka.position_identity = config.position_identity;
    kafka.notes = Some(store.clone());
    let source = inboxd_kafka::KafkaSource::start(kafka);
    Ok(Box::new(source.map_err(|error| refused(subscription, error))?))
}

#[cfg(feature = "kafka")]
fn kafka_config(
    subscription: &SubscriptionConfig,
    config: &crate::config::KafkaSourceConfig,
) -> inboxd_kafka::KafkaConfig {
    use inboxd_kafka::{KafkaConfig, StartAt};

    use crate::config::Start;

    let brokers = config.brokers.join(",");
    let mut kafka = KafkaConfig::new(brokers, config.topics.clone(), config.group.clone());
    kafka.start = match config.start {
        Start::Earliest => StartAt::Earliest,
        Start::Latest => StartAt::Latest,
        Start::Refuse => StartAt::Refuse,
    };
    kafka.properties =
        config.properties.iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
    kafka.join_when_asked = true;
    kafka.commit_interval = config.commit_interval;
    kafka.offset_span_max = config.offset_span_max;
    kafka.in_flight_bytes_max = subscription.settings.in_flight_bytes_max;
    kafka
}

#[cfg(not(feature = "kafka"))]
fn kafka(
    _: &SubscriptionConfig,
    _: &crate::config::KafkaSourceConfig,
    _: &Arc<dyn InboxStore>,
    _: &str,
) -> Result<Box<dyn Source>, AppError> {
    Err(AppError::Feature("kafka"))
}

#[cfg(feature = "rabbitmq")]
fn rabbitmq(
    subscription: &SubscriptionConfig,
    config: &crate::config::RabbitMqSourceConfig,
) -> Result<Box<dyn Source>, AppError> {
    let rabbitmq = rabbitmq_config(subscription, config);
    let source = inboxd_rabbitmq::RabbitMqSource::start(rabbitmq);
    Ok(Box::new(source.map_err(|error| refused(subscription, error))?))
}

#[cfg(feature = "rabbitmq")]
fn rabbitmq_config(
    subscription: &SubscriptionConfig,
    config: &crate::config::RabbitMqSourceConfig,
) -> inboxd_rabbitmq::RabbitMqConfig {
    use inboxd_rabbitmq::{ArgumentValue, DeclareOptions, QueueKind, RabbitMqConfig};

    use crate::config::{self, Declare};

    let mut rabbitmq = RabbitMqConfig::new("", 0, config.queue.clone());
    rabbitmq.hosts = config.hosts.iter().filter_map(|host| host_and_port(host)).collect();
    rabbitmq.vhost = config.vhost.clone();
    rabbitmq.user = config.user.clone();
    rabbitmq.password = config.password.clone();
    rabbitmq.tls = config.tls.as_ref().map(rabbitmq_tls);
    rabbitmq.heartbeat = config.heartbeat;
    rabbitmq.prefetch = config.prefetch;
    rabbitmq.ordered = config.ordered;
    rabbitmq.single_active_consumer = config.single_active_consumer;
    rabbitmq.queue_kind = config.queue_kind.map(|kind| match kind {
        config::QueueKind::Quorum => QueueKind::Quorum,
        config::QueueKind::Classic => QueueKind::Classic,
    });
    let declared = match config.declare {
        Declare::No => None,
        Declare::Quorum => Some(QueueKind::Quorum),
        Declare::Classic => Some(QueueKind::Classic),
    };
    rabbitmq.declare = declared.map(|kind| {
        let mut declare = DeclareOptions::durable(kind);
        if config.single_active_consumer {
            let argument = ("x-single-active-consumer".to_owned(), ArgumentValue::Bool(true));
            declare.arguments.push(argument);
        }
        declare
    });
    rabbitmq.connection_name = format!("inboxd {}", subscription.settings.name);
    rabbitmq
}

#[cfg(feature = "rabbitmq")]
pub(super) fn rabbitmq_tls(tls: &crate::config::TlsFiles) -> inboxd_rabbitmq::RabbitMqTls {
    inboxd_rabbitmq::RabbitMqTls {
        ca_file: tls.ca_file.clone(),
        cert_file: tls.cert_file.clone(),
        key_file: tls.key_file.clone(),
    }
}

/// The configuration writes every host with its port, an IPv6 address in brackets.
#[cfg(feature = "rabbitmq")]
pub(super) fn host_and_port(text: &str) -> Option<(String, u16)> {
    let (host, port) = text.rsplit_once(':')?;
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    Some((host.to_owned(), port.parse().ok()?))
}

#[cfg(not(feature = "rabbitmq"))]
fn rabbitmq(
    _: &SubscriptionConfig,
    _: &crate::config::RabbitMqSourceConfig,
) -> Result<Box<dyn Source>, AppError> {
    Err(AppError::Feature("rabbitmq"))
}

#[cfg(all(test, feature = "rabbitmq"))]
mod tests {
    use super::*;

    #[test]
    fn hosts_lose_their_brackets() {
        assert_eq!(host_and_port("h:5672"), Some(("h".to_owned(), 5672)));
        assert_eq!(host_and_port("[::1]:5671"), Some(("::1".to_owned(), 5671)));
    }
}
