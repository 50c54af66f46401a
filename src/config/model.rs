//! The configuration as the rest of the program takes it: typed, within bounds, consistent.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use secrecy::{ExposeSecret, SecretString};

use crate::engine::SubscriptionSettings;
use crate::telemetry::LogSettings;

/// Everything.
#[derive(Debug, Clone)]
pub struct Config {
    /// The operators' listener.
    pub admin: AdminConfig,
    /// A listener for `/livez`, `/readyz` and `/metrics` alone, without a token.
    pub health_listen: Option<SocketAddr>,
    /// The inbox.
    pub database: DatabaseConfig,
    /// Log lines.
    pub log: LogSettings,
    /// The collector of traces and metrics.
    pub telemetry: TelemetryConfig,
    /// From the first signal to the end of the process.
    pub shutdown_grace: Duration,
    /// A loop that has not turned for this long makes the process not live.
    pub stale_after: Duration,
    /// A claim's life, the same in the whole process.
    pub lease: Duration,
    /// At least one for `run`, by name.
    pub subscriptions: Vec<SubscriptionConfig>,
    /// What the operator should know, though it is no error.
    pub notices: Vec<String>,
}

/// The operators' listener.
#[derive(Debug, Clone)]
pub struct AdminConfig {
    /// Where; `None` is off.
    pub listen: Option<SocketAddr>,
    /// Asked for as a bearer token; always there beyond loopback.
    pub token: Option<SecretString>,
    /// Its certificate; `None`: plain HTTP.
    pub tls: Option<ServerTls>,
}

/// What a listener proves itself with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerTls {
    /// The certificate chain, PEM.
    pub cert_file: PathBuf,
    /// Its key, PEM.
    pub key_file: PathBuf,
}

/// Which database.
#[derive(Debug, Clone)]
pub enum DatabaseUrl {
    /// A file.
    Sqlite(PathBuf),
    /// `postgres://…`
    Postgres(SecretString),
    /// `mysql://…`, which is MariaDB too.
    MySql(SecretString),
}

/// The inbox's database.
#[derive(Debug, Clone)]
pub struct DatabaseConfig {
    /// Which.
    pub url: DatabaseUrl,
    /// Used by migrations instead, where they need more rights.
    pub migrate_url: Option<SecretString>,
    /// Connections that work at once, beside the one that renews leases.
    pub pool_max: u32,
    /// PostgreSQL's schema; MySQL's database instead of the one that the URL names.
    pub schema: Option<String>,
    /// Before each table's name.
    pub table_prefix: String,
    /// MySQL: a server that does not flush at commit is taken all the same.
    pub allow_weak_durability: bool,
    /// PostgreSQL: false behind a pooler that does not know prepared statements.
    pub prepared_statements: bool,
    /// How long rows of processed messages are kept.
    pub retention: Duration,
    /// How long dead letters are kept.
    pub dead_retention: Duration,
    /// How often old rows are deleted.
    pub sweep_interval: Duration,
}

/// One subscription.
#[derive(Debug, Clone)]
pub struct SubscriptionConfig {
    /// What the engine is told.
    pub settings: SubscriptionSettings,
    /// Where it consumes from.
    pub source: SourceConfig,
    /// What it calls.
    pub callback: CallbackConfig,
    /// The broker that dead letters are published to; `None`: the table alone has them.
    pub dead_letter: Option<DeadLetterTargetConfig>,
}

/// Where dead letters are published.
#[derive(Debug, Clone)]
pub enum DeadLetterTargetConfig {
    /// A topic of a Kafka cluster.
    Kafka {
        /// `host:port` each.
        brokers: Vec<String>,
        /// librdkafka's, those that come from `user`, `password` and `tls` included.
        properties: Properties,
        /// Where to.
        topic: String,
    },
    /// An exchange of a RabbitMQ server.
    RabbitMq {
        /// `host:port` each, tried in turn.
        hosts: Vec<String>,
        /// The virtual host.
        vhost: String,
        /// Who connects.
        user: String,
        /// With which password.
        password: SecretString,
        /// TLS, where it is used.
        tls: Option<TlsFiles>,
        /// How often the connection is proved alive.
        heartbeat: Duration,
        /// Where to; empty: the default one, whose routing keys are names of queues.
        exchange: String,
        /// With which routing key; `None`: the message's own.
        routing_key: Option<String>,
    },
}

/// Where a subscription consumes from.
#[derive(Debug, Clone)]
pub enum SourceConfig {
    /// Topics of a Kafka cluster.
    Kafka(KafkaSourceConfig),
    /// A queue of a RabbitMQ server.
    RabbitMq(RabbitMqSourceConfig),
}

/// Where a Kafka group without a committed offset begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Start {
    /// With the oldest record.
    #[default]
    Earliest,
    /// With what is produced from now on.
    Latest,
    /// Nowhere: the subscription ends with an error.
    Refuse,
}

/// Topics of a Kafka cluster.
#[derive(Debug, Clone)]
pub struct KafkaSourceConfig {
    /// `host:port` each.
    pub brokers: Vec<String>,
    /// Names, or regular expressions that begin with `^`.
    pub topics: Vec<String>,
    /// The consumer group.
    pub group: String,
    /// Where to begin.
    pub start: Start,
    /// librdkafka's, those that come from `user`, `password` and `tls` included.
    pub properties: Properties,
    /// How often changed offsets are committed.
    pub commit_interval: Duration,
    /// Records above the lowest unsettled one before a partition is paused.
    pub offset_span_max: usize,
    /// Ids are taken from the position.
    pub position_identity: bool,
}

/// Whether a queue is declared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Declare {
    /// No: it exists, or is waited for.
    #[default]
    No,
    /// A durable quorum queue.
    Quorum,
    /// A durable classic queue.
    Classic,
}

/// What sort of queue it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueueKind {
    /// A quorum queue.
    Quorum,
    /// A classic one.
    Classic,
}

/// A queue of a RabbitMQ server.
#[derive(Debug, Clone)]
pub struct RabbitMqSourceConfig {
    /// `host:port` each, tried in turn.
    pub hosts: Vec<String>,
    /// The virtual host.
    pub vhost: String,
    /// Who connects.
    pub user: String,
    /// With which password.
    pub password: SecretString,
    /// TLS, where it is used.
    pub tls: Option<TlsFiles>,
    /// How often the connection is proved alive.
    pub heartbeat: Duration,
    /// The queue.
    pub queue: String,
    /// Unsettled deliveries at once.
    pub prefetch: u16,
    /// Whether the queue is declared.
    pub declare: Declare,
    /// What sort of queue it is, where it is known.
    pub queue_kind: Option<QueueKind>,
    /// The queue is a single-active-consumer queue: the operator's word, or how to declare it.
    pub single_active_consumer: bool,
    /// The order of the queue is kept.
    pub ordered: bool,
}

/// Certificates of a TLS connection; none are the system's roots.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TlsFiles {
    /// Authorities to trust, PEM.
    pub ca_file: Option<PathBuf>,
    /// The client's certificate chain, PEM; only with `key_file`.
    pub cert_file: Option<PathBuf>,
    /// The client's key, PEM.
    pub key_file: Option<PathBuf>,
}

/// Which headers of a message are copied to the request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HeadersCopy {
    /// All that may be.
    All,
    /// Those of these names.
    Named(Vec<String>),
}

/// How the application answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Contract {
    /// By the status.
    #[default]
    Plain,
    /// By the status, and after a 2xx by the body's `status`, as Dapr's applications do.
    Dapr,
}

/// Which statuses an entry of the status map is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum StatusPattern {
    /// One, from 200.
    Code(u16),
    /// Those of one first digit, from 2: `Class(4)` is 4xx.
    Class(u8),
}

/// What a status is made to mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MappedVerdict {
    /// Processed.
    Accepted,
    /// A dead letter.
    Refused,
    /// To be tried again.
    Retry,
    /// Recorded as processed, though the application did not want it.
    Drop,
}

/// The application.
#[derive(Debug, Clone)]
pub struct CallbackConfig {
    /// `http://…`, `https://…` or `unix:/path.sock:/route`.
    pub url: String,
    /// Asked with GET whether the application is well; `None`: nobody asks.
    pub health_url: Option<String>,
    /// Until a connection is open.
    pub connect_timeout: Duration,
    /// HTTP/2 without asking.
    pub http2: bool,
    /// Which headers of a message are copied.
    pub headers_copy: HeadersCopy,
    /// Before the name of a copied header.
    pub headers_prefix: String,
    /// Headers that every request gets, each name once; may be credentials.
    pub headers_set: Vec<(String, SecretString)>,
    /// Certificates of an `https` callback.
    pub tls: TlsFiles,
    /// How the application answers.
    pub contract: Contract,
    /// What statuses are made to mean; codes before classes, so that the first that fits wins.
    pub status_map: Vec<(StatusPattern, MappedVerdict)>,
    /// Secrets of Standard Webhooks, each `whsec_` and the base64 of 24 to 64 bytes. All sign,
    /// the first one first; none: nothing is signed.
    pub signing: Vec<SecretString>,
}

/// The collector of traces and metrics. What is `None` is for the `OTEL_*` variables to say, and
/// for the default where they say nothing.
#[derive(Debug, Clone, Default)]
pub struct TelemetryConfig {
    /// The base URL of an OTLP/HTTP collector, without `/` at its end; `/v1/traces` and
    /// `/v1/metrics` follow.
    pub endpoint: Option<String>,
    /// Whether traces are sent.
    pub traces: Option<bool>,
    /// Whether metrics are sent.
    pub metrics: Option<bool>,
    /// Headers of each export, each name once; may be credentials.
    pub headers: Vec<(String, SecretString)>,
    /// `service.name`.
    pub service_name: Option<String>,
    /// The part of new traces that is sampled, 0 to 1.
    pub sample_ratio: Option<f64>,
    /// How often metrics are sent.
    pub metrics_interval: Option<Duration>,
    /// The bound on one export.
    pub timeout: Option<Duration>,
}

/// librdkafka's properties. Values may be secrets: only names are printed.
#[derive(Clone, Default)]
pub struct Properties(BTreeMap<String, SecretString>);

impl Properties {
    /// Sets one; the last wins.
    pub fn insert(&mut self, name: impl Into<String>, value: SecretString) {
        self.0.insert(name.into(), value);
    }

    /// Sets one unless it is set.
    pub fn insert_default(&mut self, name: &str, value: SecretString) {
        self.0.entry(name.to_owned()).or_insert(value);
    }

    /// A value, secret or not.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(|value| value.expose_secret())
    }

    /// All of them, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value.expose_secret()))
    }
}

impl fmt::Debug for Properties {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}
