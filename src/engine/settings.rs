//! What one subscription is told to do: plain values, validated by the configuration.

use std::sync::Arc;
use std::time::Duration;

use inboxd_contract::{ConsumerId, OwnerId};

/// In which order messages are forwarded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Ordering {
    /// None: side by side.
    #[default]
    None,
    /// One at a time per key; a delivery without a key is in no lane.
    Key,
    /// One at a time per partition or queue.
    Partition,
}

/// Where a lane's key is taken from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KeyFrom {
    /// The Kafka record's key.
    RecordKey,
    /// A header's value.
    Header(String),
    /// RabbitMQ's routing key.
    RoutingKey,
    /// A JSON pointer (RFC 6901) into the body.
    Json(String),
}

/// Where a message id is taken from. The first that yields a non-blank value wins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Extractor {
    /// AMQP's message-id property.
    Property,
    /// A header.
    Header(String),
    /// CloudEvents: `id`, scoped by `source`; binary or structured mode.
    CloudEvents,
    /// The value at a JSON pointer (RFC 6901) into the body.
    Json(String),
    /// A hash of the values at these JSON pointers: an id derived from the business fact.
    Hash(Vec<String>),
    /// A hash of the body.
    BodyHash,
    /// The Kafka record's key.
    KafkaKey,
    /// Cluster id, topic id (or epoch), partition and offset.
    KafkaPosition,
}

/// What is hashed to tell two contents of one id apart.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum FingerprintOf {
    /// The body (for a structured CloudEvent: type and data).
    #[default]
    Body,
    /// The value at a JSON pointer.
    Json(String),
    /// Nothing: the same id is the same message.
    Off,
}

/// What to do with the same id and another fingerprint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnIdConflict {
    /// Keep it as a dead letter.
    #[default]
    DeadLetter,
    /// Take it for a duplicate.
    Duplicate,
}

/// What to do with a delivery that has no id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnMissingId {
    /// Keep it as a dead letter.
    #[default]
    DeadLetter,
    /// Forward it under a generated id: nothing is suppressed.
    Forward,
}

/// How a message's identity is found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdentitySettings {
    /// In order of preference; not empty.
    pub extractors: Vec<Extractor>,
    /// Prefix ids by the message's producer.
    pub scope_by_producer: bool,
    /// What tells contents apart.
    pub fingerprint: FingerprintOf,
    /// The policy for deliveries without an id.
    pub on_missing: OnMissingId,
    /// The policy was set by the operator: no pause for newcomers.
    pub on_missing_is_explicit: bool,
    /// The policy for the same id with another fingerprint.
    pub on_conflict: OnIdConflict,
}

/// How a delay is drawn below its bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Jitter {
    /// Anything between nothing and the bound.
    #[default]
    Full,
    /// The bound itself.
    None,
}

/// When a message that failed is tried again, and when no more: exponential backoff. In place
/// (`retry`), and from `inbox_parked` (`park`).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RetrySettings {
    /// The first delay's upper bound.
    pub initial: Duration,
    /// Each next bound is this much larger.
    pub factor: f32,
    /// The largest bound; also the cap of `Retry-After`.
    pub cap: Duration,
    /// How delays are drawn.
    pub jitter: Jitter,
    /// In place: attempts before it is parked. Parked: all attempts of a message, those in place
    /// included, before it is a dead letter. At least 1.
    pub attempts_max: u32,
    /// In place: since it was received, before it is parked. Parked: since it was received
    /// first, before it is a dead letter.
    pub elapsed_max: Duration,
}

impl RetrySettings {
    /// The defaults of `retry`.
    pub const IN_PLACE: Self = Self {
        initial: Duration::from_millis(200),
        factor: 2.0,
        cap: Duration::from_secs(30),
        jitter: Jitter::Full,
        attempts_max: 5,
        elapsed_max: Duration::from_secs(120),
    };
    /// The defaults of `park`.
    pub const PARKED: Self = Self {
        initial: Duration::from_secs(30),
        factor: 2.0,
        cap: Duration::from_secs(3_600),
        jitter: Jitter::Full,
        attempts_max: 20,
        elapsed_max: Duration::from_secs(3 * 86_400),
    };
}

/// When a message is forwarded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum DeliveryMode {
    /// At once: a ledger; acked after it was processed.
    #[default]
    Direct,
    /// Store and forward: parked on arrival and acked at once, forwarded by the workers.
    Stored,
}

/// What becomes of a message behind a parked one of its lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnBlockedLane {
    /// It is parked behind it.
    #[default]
    Park,
    /// It passes: the order is given up.
    Skip,
    /// It waits, unsettled, for as long as it takes.
    Halt,
}

/// What a dead letter means for its lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnDeadLetter {
    /// Nothing: the lane goes on, and a replay is out of order.
    #[default]
    Continue,
    /// It blocks its lane until it is replayed or discarded.
    Halt,
}

/// Where dead letters go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeadLetterTo {
    /// The table, whole.
    #[default]
    Table,
    /// The broker, whole; then a row without the body.
    Broker,
    /// The broker, then the table, whole.
    Both,
}

/// When the callback is given a rest.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BreakerSettings {
    /// Failures of the endpoint in a row that open it; 0: it never opens.
    pub failures: u32,
    /// From its opening to the first probe.
    pub probe_initial: Duration,
    /// The longest time between two probes.
    pub probe_cap: Duration,
}

impl Default for BreakerSettings {
    fn default() -> Self {
        Self {
            failures: 10,
            probe_initial: Duration::from_secs(1),
            probe_cap: Duration::from_secs(30),
        }
    }
}

/// What may be changed while it runs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limits {
    /// Concurrent POSTs.
    pub concurrency: usize,
    /// POSTs begun in a second; `None`: as many as there are.
    pub rate: Option<f64>,
}

/// A value that a header must have for a route.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeaderPattern {
    /// The header's name; ASCII case does not count.
    pub name: String,
    /// A pattern like those of [`RouteSettings`].
    pub value: String,
}

/// Which messages go to which path of the callback. What is given must match, all of it; at
/// least one pattern is given. In a pattern, `*` stands for any run of characters, none
/// included; everything else is itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouteSettings {
    /// Its name: unique in the subscription.
    pub name: Arc<str>,
    /// A pattern of the message's type.
    pub message_type: Option<String>,
    /// A pattern of RabbitMQ's routing key.
    pub routing_key: Option<String>,
    /// A header of the message.
    pub header: Option<HeaderPattern>,
    /// Path and query instead of the callback's own; begins with one `/`.
    pub path: Arc<str>,
}

/// What to do with a message that no route matches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnUnrouted {
    /// Keep it as a dead letter.
    #[default]
    DeadLetter,
    /// Record it as processed without forwarding it.
    Ignore,
    /// Forward it to the callback's own path.
    Forward,
}

/// What all subscriptions of a process share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubSettings {
    /// This process life.
    pub owner: OwnerId,
    /// A claim's life; renewed at a third.
    pub lease: Duration,
    /// How long rows are kept; compared with how long the broker can redeliver.
    pub retention: Duration,
    /// Makes tokens and jitter: from the operating system in production, chosen in a simulation.
    pub random_seed: u64,
}

/// One subscription.
#[derive(Debug, Clone, PartialEq)]
pub struct SubscriptionSettings {
    /// Its name: unique in the process.
    pub name: Arc<str>,
    /// Half of the deduplication key.
    pub consumer_id: ConsumerId,
    /// Ordering of forwards.
    pub ordering: Ordering,
    /// Where the key comes from, with [`Ordering::Key`].
    pub key_from: KeyFrom,
    /// Identity and conflicts.
    pub identity: IdentitySettings,
    /// When messages are forwarded.
    pub delivery: DeliveryMode,
    /// Concurrent POSTs: what it starts with, and the most that an adaptive limit gives.
    pub concurrency: usize,
    /// The limit on concurrency follows how the application copes.
    pub adaptive: bool,
    /// POSTs begun in a second; `None`: as many as there are.
    pub rate: Option<f64>,
    /// Deliveries in flight.
    pub in_flight_max: usize,
    /// Bytes of deliveries in flight.
    pub in_flight_bytes_max: usize,
    /// The largest body that is forwarded.
    pub body_bytes_max: u64,
    /// The bound on one attempt.
    pub callback_timeout: Duration,
    /// A claim's life; renewed at a third.
    pub lease: Duration,
    /// How long a delivery is held before it is parked.
    pub hold_max: Duration,
    /// Backoff in place.
    pub retry: RetrySettings,
    /// Backoff from `inbox_parked`.
    pub park: RetrySettings,
    /// What becomes of messages behind a parked one.
    pub on_blocked_lane: OnBlockedLane,
    /// What a dead letter means for its lane.
    pub on_dead_letter: OnDeadLetter,
    /// Where dead letters go.
    pub dead_letter_to: DeadLetterTo,
    /// When the callback is given a rest.
    pub breaker: BreakerSettings,
    /// How often a health URL is asked while the application is well.
    pub health_interval: Duration,
    /// Tried in this order, the first that matches wins; none: everything goes to the callback.
    pub routes: Vec<RouteSettings>,
    /// The policy for messages that no route matches, where there are routes.
    pub on_unrouted: OnUnrouted,
}
