//! Where dead letters are published, from the configuration's plain values.

use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use inboxd_contract::{DeadLetterTarget, Finding};

use super::AppError;
use crate::config::{DeadLetterTargetConfig, SubscriptionConfig};

/// The target of one subscription; `None`: the table alone has its dead letters.
pub(super) fn target(
    subscription: &SubscriptionConfig,
) -> Result<Option<Arc<dyn DeadLetterTarget>>, AppError> {
    match &subscription.dead_letter {
        None => Ok(None),
        #[cfg(feature = "kafka")]
        Some(config @ DeadLetterTargetConfig::Kafka { .. }) => {
            let target = inboxd_kafka::DeadLetterTopic::start(topic(config));
            Ok(Some(Arc::new(target.map_err(|error| refused(subscription, error))?)))
        }
        #[cfg(not(feature = "kafka"))]
        Some(DeadLetterTargetConfig::Kafka { .. }) => Err(AppError::Feature("kafka")),
        #[cfg(feature = "rabbitmq")]
        Some(config @ DeadLetterTargetConfig::RabbitMq { .. }) => {
            let target = inboxd_rabbitmq::DeadLetterExchange::start(exchange(subscription, config));
            Ok(Some(Arc::new(target.map_err(|error| refused(subscription, error))?)))
        }
        #[cfg(not(feature = "rabbitmq"))]
        Some(DeadLetterTargetConfig::RabbitMq { .. }) => Err(AppError::Feature("rabbitmq")),
    }
}

/// What only the broker's library can refuse; connects to nothing.
pub(super) fn validate(subscription: &SubscriptionConfig) -> Result<(), AppError> {
    match &subscription.dead_letter {
        None => Ok(()),
        #[cfg(feature = "kafka")]
        Some(config @ DeadLetterTargetConfig::Kafka { .. }) => {
            topic(config).validate().map_err(|error| refused(subscription, error))
        }
        #[cfg(not(feature = "kafka"))]
        Some(DeadLetterTargetConfig::Kafka { .. }) => Err(AppError::Feature("kafka")),
        #[cfg(feature = "rabbitmq")]
        Some(config @ DeadLetterTargetConfig::RabbitMq { .. }) => {
            exchange(subscription, config).validate().map_err(|error| refused(subscription, error))
        }
        #[cfg(not(feature = "rabbitmq"))]
        Some(DeadLetterTargetConfig::RabbitMq { .. }) => Err(AppError::Feature("rabbitmq")),
    }
}

/// Looks at where dead letters would go, within this time; publishes nothing.
pub(super) async fn inspect(subscription: &SubscriptionConfig, within: Duration) -> Vec<Finding> {
    match &subscription.dead_letter {
        None => Vec::new(),
        #[cfg(feature = "kafka")]
        Some(config @ DeadLetterTargetConfig::Kafka { .. }) => {
            inboxd_kafka::inspect_dead_letters(&topic(config), within).await
        }
        #[cfg(feature = "rabbitmq")]
        Some(config @ DeadLetterTargetConfig::RabbitMq { .. }) => {
            inboxd_rabbitmq::inspect_dead_letters(&exchange(subscription, config), within).await
        }
        #[cfg(not(all(feature = "kafka", feature = "rabbitmq")))]
        Some(_) => validate(subscription).err().iter().map(super::check::refused).collect(),
    }
}

/// Closes all at once; each ends within this time, whatever the broker does.
pub(super) async fn close(targets: &[Arc<dyn DeadLetterTarget>], within: Duration) {
    join_all(targets.iter().map(|target| target.close(within))).await;
}

#[cfg(any(feature = "kafka", feature = "rabbitmq"))]
fn refused(subscription: &SubscriptionConfig, error: inboxd_contract::SourceError) -> AppError {
    AppError::Config {
        key: format!("subscription.{}.dead_letter", subscription.settings.name),
        source: error.into(),
    }
}

/// A cluster's properties are there for consumers too: those that say how to connect are taken.
#[cfg(feature = "kafka")]
fn topic(config: &DeadLetterTargetConfig) -> inboxd_kafka::DeadLetterTopicConfig {
    use inboxd_kafka::{DeadLetterTopicConfig, KafkaConfig};

    let DeadLetterTargetConfig::Kafka { brokers, properties, topic } = config else {
        unreachable!("asked for a topic alone")
    };
    let mut cluster = KafkaConfig::new(brokers.join(","), [topic.as_str()], "");
    cluster.properties =
        properties.iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
    DeadLetterTopicConfig::of_source(&cluster, topic)
}

#[cfg(feature = "rabbitmq")]
fn exchange(
    subscription: &SubscriptionConfig,
    config: &DeadLetterTargetConfig,
) -> inboxd_rabbitmq::DeadLetterExchangeConfig {
    use inboxd_rabbitmq::{DeadLetterExchangeConfig, RabbitMqConfig};

    use super::sources::{host_and_port, rabbitmq_tls};

    let DeadLetterTargetConfig::RabbitMq {
        hosts,
        vhost,
        user,
        password,
        tls,
        heartbeat,
        exchange,
        routing_key,
    } = config
    else {
        unreachable!("asked for an exchange alone")
    };
    let mut server = RabbitMqConfig::new("", 0, "");
    server.hosts = hosts.iter().filter_map(|host| host_and_port(host)).collect();
    server.vhost = vhost.clone();
    server.user = user.clone();
    server.password = password.clone();
    server.tls = tls.as_ref().map(rabbitmq_tls);
    server.heartbeat = *heartbeat;
    server.connection_name = format!("inboxd {}", subscription.settings.name);
    let mut letters = DeadLetterExchangeConfig::of_source(&server, exchange);
    letters.routing_key = routing_key.clone();
    letters
}
