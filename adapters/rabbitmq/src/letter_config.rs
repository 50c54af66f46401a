//! What an exchange for dead letters is told, and where the broker is.

use std::time::Duration;

use inboxd_contract::SourceError;
use secrecy::SecretString;

use crate::config::{RabbitMqConfig, RabbitMqTls, SHORT_STRING_BYTES_MAX};

const PUBLISH: Duration = Duration::from_secs(10);
const PUBLISH_MAX: Duration = Duration::from_secs(600);

/// Where a RabbitMQ cluster is and how to log in.
#[derive(Debug, Clone)]
pub struct RabbitMqBroker {
    /// Hosts (or IP addresses, IPv6 without brackets) and ports of the cluster's nodes, tried in turn.
    pub hosts: Vec<(String, u16)>,
    /// The virtual host's name, not percent-encoded.
    pub vhost: String,
    /// The user's name.
    pub user: String,
    /// The user's password.
    pub password: SecretString,
    /// TLS; `None` is plain TCP.
    pub tls: Option<RabbitMqTls>,
    /// The interval in which a silent peer must be heard of; whole seconds.
    pub heartbeat: Duration,
    /// The bound on one attempt to connect, TLS and login included.
    pub connect_timeout: Duration,
    /// The connection's name in the broker's lists.
    pub connection_name: String,
}

impl RabbitMqBroker {
    /// The broker that a source consumes from.
    pub fn of_source(source: &RabbitMqConfig) -> Self {
        Self {
            hosts: source.hosts.clone(),
            vhost: source.vhost.clone(),
            user: source.user.clone(),
            password: source.password.clone(),
            tls: source.tls.clone(),
            heartbeat: source.heartbeat,
            connect_timeout: source.connect_timeout,
            connection_name: source.connection_name.clone(),
        }
    }

    /// # Errors
    /// Permanent; names the key and the remedy. `what` is what uses the broker.
    pub(crate) fn validate(&self, what: &str) -> Result<(), SourceError> {
        let refuse = |text: String| Err(SourceError::permanent(text));
        if self.hosts.is_empty() || self.hosts.iter().any(|(host, _)| host.is_empty()) {
            return refuse(format!("{what} names no host; give at least one"));
        }
        for (key, text) in [("vhost", &self.vhost), ("user", &self.user)] {
            if text.is_empty() || text.len() > SHORT_STRING_BYTES_MAX {
                return refuse(format!(
                    "{key} of {what} has {} bytes; it must have 1 to {SHORT_STRING_BYTES_MAX}",
                    text.len()
                ));
            }
        }
        let heartbeat = self.heartbeat.as_secs();
        if heartbeat == 0 || heartbeat > u64::from(u16::MAX) || self.heartbeat.subsec_nanos() > 0 {
            return refuse(format!("heartbeat of {what} must be 1 to 65535 whole seconds"));
        }
        if self.connect_timeout.is_zero() {
            return refuse(format!("connect_timeout of {what} must be above 0"));
        }
        if let Some(tls) = &self.tls
            && tls.cert_file.is_some() != tls.key_file.is_some()
        {
            return refuse("tls.cert_file and tls.key_file go together; give both or none".into());
        }
        Ok(())
    }
}

/// Where copies of dead letters go. [`DeadLetterExchangeConfig::new`] has the defaults.
#[derive(Debug, Clone)]
pub struct DeadLetterExchangeConfig {
    /// The broker; the connection is another than any source's.
    pub broker: RabbitMqBroker,
    /// The exchange's name; it must exist. Empty is the default exchange, which needs a
    /// `routing_key`: the name of a queue.
    pub exchange: String,
    /// The routing key of every copy; `None`: the one that the message was published with, and
    /// the subscription's name for what came from elsewhere.
    pub routing_key: Option<String>,
    /// The bound on each try, 1 s to 10 min.
    pub publish_timeout: Duration,
}

impl DeadLetterExchangeConfig {
    /// The defaults: the message's own routing key, 10 s for each try.
    pub fn new(broker: RabbitMqBroker, exchange: impl Into<String>) -> Self {
        let exchange = exchange.into();
        Self { broker, exchange, routing_key: None, publish_timeout: PUBLISH }
    }

    /// An exchange of the broker that a source consumes from.
    pub fn of_source(source: &RabbitMqConfig, exchange: impl Into<String>) -> Self {
        let mut broker = RabbitMqBroker::of_source(source);
        broker.connection_name.push_str(" dead letters");
        Self::new(broker, exchange)
    }

    /// Checks everything that can be checked without the broker.
    ///
    /// # Errors
    /// Permanent; names the key and the remedy.
    pub fn validate(&self) -> Result<(), SourceError> {
        let refuse = |text: String| Err(SourceError::permanent(text));
        self.broker.validate("the exchange for dead letters")?;
        let key = self.routing_key.as_deref();
        for (name, text) in
            [("exchange", self.exchange.as_str()), ("routing_key", key.unwrap_or_default())]
        {
            if text.len() > SHORT_STRING_BYTES_MAX {
                return refuse(format!(
                    "{name} for dead letters has {} bytes; it may have {SHORT_STRING_BYTES_MAX}",
                    text.len()
                ));
            }
        }
        if self.exchange.is_empty() && key.is_none_or(str::is_empty) {
            return refuse(
                "the default exchange takes the routing key for a queue's name, and would give a dead \
                 letter back to the queue it came from: give routing_key, the name of a queue for dead \
                 letters, or another exchange"
                    .into(),
            );
        }
        if !(Duration::from_secs(1)..=PUBLISH_MAX).contains(&self.publish_timeout) {
            return refuse("publish_timeout must be between 1 s and 10 min".into());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(exchange: &str) -> DeadLetterExchangeConfig {
        DeadLetterExchangeConfig::of_source(&RabbitMqConfig::new("h", 1, "q"), exchange)
    }

    #[test]
    fn the_default_exchange_needs_a_queue() {
        assert!(config("dead").validate().is_ok());
        let mut config = config("");
        let error = config.validate().expect_err("it would go round").to_string();
        assert!(error.contains("routing_key"), "{error}");
        config.routing_key = Some("dead".into());
        assert!(config.validate().is_ok());
    }

    #[test]
    fn what_amqp_cannot_carry_is_refused() {
        assert!(config(&"x".repeat(256)).validate().is_err());
        let mut long = config("dead");
        long.routing_key = Some("x".repeat(256));
        assert!(long.validate().is_err());
        let mut endless = config("dead");
        endless.publish_timeout = Duration::ZERO;
        assert!(endless.validate().is_err());
        let mut nowhere = config("dead");
        nowhere.broker.hosts.clear();
        assert!(nowhere.validate().is_err());
    }
}
