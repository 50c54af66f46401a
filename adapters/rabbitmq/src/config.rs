//! What a RabbitMQ source is told.

use std::path::PathBuf;
use std::time::Duration;

use inboxd_contract::SourceError;
use lapin::types::{AMQPValue, FieldTable};
use percent_encoding::percent_decode_str;
use secrecy::SecretString;
use url::Url;

use crate::letter_config::RabbitMqBroker;

/// The longest name AMQP can carry.
pub(crate) const SHORT_STRING_BYTES_MAX: usize = 255;
/// `-` and a UUID without hyphens: what makes a consumer tag unique.
const TAG_SUFFIX_BYTES: usize = 33;

/// TLS to the broker. Files are read at each connection, so that they may be renewed.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RabbitMqTls {
    /// PEM certificates that are trusted in addition to the system's.
    pub ca_file: Option<PathBuf>,
    /// PEM client certificate chain; needs `key_file`.
    pub cert_file: Option<PathBuf>,
    /// PEM private key of the client certificate.
    pub key_file: Option<PathBuf>,
}

/// What sort of queue it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueueKind {
    /// A classic queue, mirrored ones included.
    Classic,
    /// A quorum queue.
    Quorum,
}

impl QueueKind {
    /// The value of `x-queue-type`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Classic => "classic",
            Self::Quorum => "quorum",
        }
    }
}

/// The value of a queue argument.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ArgumentValue {
    /// A boolean.
    Bool(bool),
    /// A whole number.
    Integer(i64),
    /// Text.
    Text(String),
}

/// How the queue is declared at each connection. Without it, the queue is only looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeclareOptions {
    /// The queue's kind; a quorum queue is always durable.
    pub kind: QueueKind,
    /// Survives a restart of the broker.
    pub durable: bool,
    /// Further arguments (`x-dead-letter-exchange`, `x-max-length` …), `x-queue-type` excepted.
    pub arguments: Vec<(String, ArgumentValue)>,
}

impl DeclareOptions {
    /// A durable queue of this kind without arguments.
    pub fn durable(kind: QueueKind) -> Self {
        Self { kind, durable: true, arguments: Vec::new() }
    }

    /// The arguments as AMQP has them.
    pub(crate) fn table(&self) -> FieldTable {
        let mut table = FieldTable::default();
        table.insert("x-queue-type".into(), AMQPValue::LongString(self.kind.as_str().into()));
        for (name, value) in &self.arguments {
            let value = match value {
                ArgumentValue::Bool(value) => AMQPValue::Boolean(*value),
                ArgumentValue::Integer(value) => AMQPValue::LongLongInt(*value),
                ArgumentValue::Text(value) => AMQPValue::LongString(value.as_str().into()),
            };
            table.insert(name.as_str().into(), value);
        }
        table
    }
}

/// Everything about one RabbitMQ subscription.
#[derive(Debug, Clone)]
pub struct RabbitMqConfig {
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
    /// The interval in which a silent peer must be heard of; whole seconds. A peer that is
    /// silent for two and a half of them is lost.
    pub heartbeat: Duration,
    /// The bound on one attempt to connect, TLS and login included.
    pub connect_timeout: Duration,
    /// The queue's name.
    pub queue: String,
    /// The most deliveries the broker hands over before one is settled.
    pub prefetch: u16,
    /// The order of the queue is kept: one consumer, no nack, no cancel.
    pub ordered: bool,
    /// The queue was declared with `x-single-active-consumer`; what `ordered` needs on a quorum queue.
    pub single_active_consumer: bool,
    /// The queue's kind where it is known; `None`: found out where `ordered` needs it, which
    /// takes the right to configure the queue.
    pub queue_kind: Option<QueueKind>,
    /// Declares the queue; `None`: it must exist.
    pub declare: Option<DeclareOptions>,
    /// What consumer tags begin with; each consumer's is unique.
    pub consumer_tag_prefix: String,
    /// The connection's name in the broker's lists.
    pub connection_name: String,
    /// The most releases (`basic.nack` with requeue) a second while consuming.
    pub releases_per_second: u32,
    /// How often the queue's depth is asked for, on a channel of its own; above zero.
    pub depth_interval: Duration,
}

impl RabbitMqConfig {
    /// The defaults, for one host and one queue: user and password `guest`, vhost `/`.
    pub fn new(host: impl Into<String>, port: u16, queue: impl Into<String>) -> Self {
        Self {
            hosts: vec![(host.into(), port)],
            vhost: "/".into(),
            user: "guest".into(),
            password: SecretString::from("guest"),
            tls: None,
            heartbeat: Duration::from_secs(20),
            connect_timeout: Duration::from_secs(10),
            queue: queue.into(),
            prefetch: 32,
            ordered: false,
            single_active_consumer: false,
            queue_kind: None,
            declare: None,
            consumer_tag_prefix: "inboxd".into(),
            connection_name: "inboxd".into(),
            releases_per_second: 50,
            depth_interval: Duration::from_secs(15),
        }
    }

    /// From `amqp[s]://[user[:password]@]host[:port][/vhost]`, user, password and vhost percent-encoded.
    /// No vhost, and an empty one, are `/`.
    ///
    /// # Errors
    /// Permanent, without the URI in its text: it may hold a password.
    pub fn from_uri(uri: &str, queue: impl Into<String>) -> Result<Self, SourceError> {
        let invalid = |why: &str| {
            SourceError::permanent(format!(
                "the RabbitMQ URI is not valid: {why}; write amqp[s]://user:password@host:port/vhost, \
                 user, password and vhost percent-encoded"
            ))
        };
        let url = Url::parse(uri).map_err(|error| invalid(&error.to_string()))?;
        let (tls, port) = match url.scheme() {
            "amqp" => (None, 5672),
            "amqps" => (Some(RabbitMqTls::default()), 5671),
            _ => return Err(invalid("its scheme is neither amqp nor amqps")),
        };
        let decode = |text: &str| {
            let text = percent_decode_str(text).decode_utf8();
            text.map(|text| text.into_owned()).map_err(|_| invalid("a part is not UTF-8"))
        };
        let host = url.host_str().ok_or_else(|| invalid("it names no host"))?;
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let mut config = Self::new(decode(host)?, url.port().unwrap_or(port), queue);
        config.tls = tls;
        if !url.username().is_empty() {
            config.user = decode(url.username())?;
        }
        if let Some(password) = url.password() {
            config.password = SecretString::from(decode(password)?);
        }
        let vhost = url.path().strip_prefix('/').unwrap_or_default();
        if vhost.contains('/') {
            return Err(invalid("a slash in the vhost is written %2f"));
        }
        if !vhost.is_empty() {
            config.vhost = decode(vhost)?;
        }
        Ok(config)
    }

    /// Checks everything that can be checked without the broker.
    ///
    /// # Errors
    /// Permanent; names the key and the remedy.
    pub fn validate(&self) -> Result<(), SourceError> {
        let refuse = |what: String| Err(SourceError::permanent(what));
        RabbitMqBroker::of_source(self).validate("the RabbitMQ source")?;
        for (key, text) in [("queue", &self.queue)] {
            if text.is_empty() || text.len() > SHORT_STRING_BYTES_MAX {
                return refuse(format!(
                    "{key} of the RabbitMQ source has {} bytes; it must have 1 to \
                     {SHORT_STRING_BYTES_MAX}",
                    text.len()
                ));
            }
        }
        if self.prefetch == 0 {
            return refuse(
                "prefetch of the RabbitMQ source is 0, which AMQP takes for no limit; give 1 to 65535"
                    .into(),
            );
        }
        if self.depth_interval.is_zero() || self.releases_per_second == 0 {
            return refuse(
                "depth_interval and releases_per_second of the RabbitMQ source must be above 0"
                    .into(),
            );
        }
        if self.consumer_tag_prefix.len() + TAG_SUFFIX_BYTES > SHORT_STRING_BYTES_MAX {
            return refuse(format!(
                "consumer_tag_prefix of the RabbitMQ source may have {} bytes at most",
                SHORT_STRING_BYTES_MAX - TAG_SUFFIX_BYTES
            ));
        }
        self.validate_queue()
    }

    fn validate_queue(&self) -> Result<(), SourceError> {
        if let Some(declare) = &self.declare {
            let named = |name: &str| declare.arguments.iter().any(|(key, _)| key == name);
            if named("x-queue-type") {
                return Err(SourceError::permanent(
                    "x-queue-type is given by the declared queue's kind; remove the argument",
                ));
            }
            if declare.arguments.iter().any(|(key, _)| key.len() > SHORT_STRING_BYTES_MAX) {
                return Err(SourceError::permanent("the name of a queue argument is too long"));
            }
            if declare.kind == QueueKind::Quorum && !declare.durable {
                return Err(SourceError::permanent(
                    "a quorum queue is always durable; declare it durable",
                ));
            }
            if self.queue_kind.is_some_and(|kind| kind != declare.kind) {
                return Err(SourceError::permanent(
                    "queue_kind is not the kind that is declared; give one of the two",
                ));
            }
        }
        if self.ordered
            && !self.single_active_consumer
            && self.known_kind() == Some(QueueKind::Quorum)
        {
            return Err(SourceError::permanent(quorum_needs_single_active(&self.queue)));
        }
        Ok(())
    }

    /// The kind, as far as the configuration says.
    pub(crate) fn known_kind(&self) -> Option<QueueKind> {
        self.queue_kind.or_else(|| self.declare.as_ref().map(|declare| declare.kind))
    }
}

/// What is said when order is asked for on a quorum queue and nothing is said of its consumers.
pub(crate) fn quorum_needs_single_active(queue: &str) -> String {
    format!(
        "queue '{queue}' is a quorum queue, and quorum queues do not keep a second consumer away: \
         with ordering it must be declared with x-single-active-consumer and the source must say \
         single_active_consumer = true; or use ordering = none"
    )
}

#[cfg(test)]
mod tests {
    use secrecy::ExposeSecret;

    use super::*;

    #[test]
    fn a_uri_is_taken_apart_and_decoded() {
        let config =
            RabbitMqConfig::from_uri("amqps://us%40er:p%2Fw%3A@h:1234/a%2fb", "q").unwrap();
        assert_eq!(config.hosts, [("h".to_owned(), 1234)]);
        assert_eq!((config.user.as_str(), config.vhost.as_str()), ("us@er", "a/b"));
        assert_eq!(config.password.expose_secret(), "p/w:");
        assert!(config.tls.is_some());
        assert!(!format!("{config:?}").contains("p/w:"));
        for (uri, vhost) in
            [("amqp://h", "/"), ("amqp://h/", "/"), ("amqp://h/%2f", "/"), ("amqp://h/x", "x")]
        {
            let config = RabbitMqConfig::from_uri(uri, "q").unwrap();
            assert_eq!((config.vhost.as_str(), config.hosts[0].1), (vhost, 5672), "{uri}");
        }
        assert_eq!(RabbitMqConfig::from_uri("amqp://[::1]/", "q").unwrap().hosts[0].0, "::1");
    }

    #[test]
    fn a_bad_uri_is_refused_without_its_password() {
        for uri in ["http://u:geheim@h/", "amqp://u:geheim@h/a/b", "amqp://u:geheim@:x/", "amqp:"] {
            let error = RabbitMqConfig::from_uri(uri, "q").unwrap_err();
            assert!(!error.to_string().contains("geheim"), "{error}");
        }
    }

    #[test]
    fn what_cannot_work_is_refused_with_the_key_named() {
        fn refused(change: impl FnOnce(&mut RabbitMqConfig), word: &str) {
            let mut config = RabbitMqConfig::new("h", 1, "q");
            assert!(config.validate().is_ok());
            change(&mut config);
            let error = config.validate().unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
        refused(|c| c.hosts.clear(), "host");
        refused(|c| c.prefetch = 0, "prefetch");
        refused(|c| c.queue.clear(), "queue");
        refused(|c| c.vhost = "v".repeat(256), "vhost");
        refused(|c| c.heartbeat = Duration::ZERO, "heartbeat");
        refused(|c| c.heartbeat = Duration::from_millis(1_500), "heartbeat");
        refused(|c| c.consumer_tag_prefix = "t".repeat(250), "consumer_tag_prefix");
        refused(
            |c| c.tls = Some(RabbitMqTls { cert_file: Some("c".into()), ..Default::default() }),
            "key_file",
        );
        refused(
            |c| (c.ordered, c.queue_kind) = (true, Some(QueueKind::Quorum)),
            "single_active_consumer",
        );
    }
}
