//! Where deliveries come from, and how they are settled.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::{Envelope, ErrorCode, SourceError};

/// What the broker orders by: `topic/partition` on Kafka, the queue on RabbitMQ.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StreamId(pub Arc<str>);

impl fmt::Display for StreamId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// One hand-over of a message by the broker. Dropping it gives it back: never an ack.
#[derive(Debug)]
pub struct Delivery {
    /// The content; shared, so that a retry copies nothing.
    pub envelope: Arc<Envelope>,
    /// What the broker orders by.
    pub stream: StreamId,
    /// Whether work for this delivery may still be started and recorded.
    pub fence: Fence,
    /// Settles it.
    pub acker: Acker,
    /// When the source received it (monotonic).
    pub received_at: Instant,
}

/// How a delivery is settled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Settlement {
    /// Done with: the proof is committed.
    Ack,
    /// Deliver it again.
    Release,
}

/// The adapter's side of an [`Acker`]. Must not block: it records the wish, the
/// source's own task or thread carries it out.
pub trait Settle: Send + Sync {
    /// Called exactly once, possibly while a task unwinds or the runtime ends: must not panic.
    fn settle(self: Box<Self>, settlement: Settlement);
}

/// Settles one delivery, once. Dropped without a word it releases.
pub struct Acker(Option<Box<dyn Settle>>);

impl Acker {
    /// Wraps the adapter's side.
    pub fn new(settle: impl Settle + 'static) -> Self {
        Self(Some(Box::new(settle)))
    }

    /// The proof is committed: the broker may forget this delivery.
    pub fn ack(mut self) {
        if let Some(settle) = self.0.take() {
            settle.settle(Settlement::Ack);
        }
    }

    /// Give it back to the broker.
    pub fn release(self) {
        drop(self);
    }
}

impl Drop for Acker {
    fn drop(&mut self) {
        if let Some(settle) = self.0.take() {
            settle.settle(Settlement::Release);
        }
    }
}

impl fmt::Debug for Acker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Acker")
    }
}

/// Tells whether work for a delivery may still be started and recorded. One fence
/// per assignment of a Kafka partition, per channel of a RabbitMQ consumer.
///
/// *Open*: everything may. *Draining* (partition being revoked): nothing new starts;
/// what is at the application finishes, is recorded and acked; the source waits
/// for that, up to its deadline. *Lost* (partition or channel is somebody else's):
/// what is at the application may complete its row; nothing starts, parks or
/// dead-letters, and acks go nowhere.
#[derive(Debug, Clone)]
pub struct Fence {
    draining: CancellationToken,
    lost: CancellationToken,
}

impl Fence {
    /// A new attempt may start.
    pub fn is_open(&self) -> bool {
        !self.draining.is_cancelled() && !self.lost.is_cancelled()
    }

    /// The assignment or the channel is gone.
    pub fn is_lost(&self) -> bool {
        self.lost.is_cancelled()
    }

    /// Resolves when nothing new may start: draining or lost.
    ///
    /// # Cancel safety
    /// Cancel-safe.
    pub async fn closed(&self) {
        self.draining.cancelled().await;
    }

    /// Resolves when the assignment or channel is lost.
    ///
    /// # Cancel safety
    /// Cancel-safe.
    pub async fn lost(&self) {
        self.lost.cancelled().await;
    }
}

/// The source's side of a [`Fence`].
#[derive(Debug, Clone)]
pub struct FenceHandle(Fence);

impl FenceHandle {
    /// An open fence.
    pub fn open() -> Self {
        Self(Fence { draining: CancellationToken::new(), lost: CancellationToken::new() })
    }

    /// What deliveries carry.
    pub fn fence(&self) -> Fence {
        self.0.clone()
    }

    /// Nothing new starts.
    pub fn drain(&self) {
        self.0.draining.cancel();
    }

    /// Nothing new starts, and nothing but a completed row is recorded.
    pub fn lose(&self) {
        self.0.lost.cancel();
        self.0.draining.cancel();
    }
}

/// How much the engine is ready to take. Sources stop adding to a batch when either is
/// used up; one delivery may overshoot the bytes (the engine holds it until there is room).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// Deliveries; at least 1.
    pub deliveries: usize,
    /// Bytes of envelopes; at least 1.
    pub bytes: usize,
}

/// What the engine must know of a source to decide.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SourceTraits {
    /// A released delivery comes again soon, to this or another consumer, without harm to an
    /// order that somebody asked for (an unordered RabbitMQ subscription). False: a delivery
    /// that cannot be processed now is held and tried in place.
    pub releasable: bool,
    /// The most deliveries the broker hands over before one is settled (RabbitMQ's prefetch).
    pub unsettled_max: Option<usize>,
}

/// Where a source stands, for readiness and metrics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SourcePhase {
    /// Not connected yet, or again after a loss.
    Connecting,
    /// Consuming (Kafka: a member of the group, possibly without partitions).
    Ready,
    /// Another replica has the exclusive consumer; ready to take over.
    Standby,
    /// Something an operator must know; the source goes on trying.
    Failing,
    /// Closed on purpose.
    Closed,
}

/// State of one partition, for metrics.
#[derive(Debug, Clone)]
pub struct PartitionReport {
    /// Which.
    pub stream: StreamId,
    /// Records between the committed position and the end of the log, where known.
    pub lag: Option<i64>,
    /// When the oldest unsettled delivery was received.
    pub oldest_unsettled_at: Option<Instant>,
    /// The broker is asked not to send more for now.
    pub paused: bool,
}

/// What happened to a source since it was made; only ever upwards.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SourceCounts {
    /// Assignments and revocations of partitions (Kafka).
    pub rebalances: u64,
    /// Commits of offsets that failed (Kafka).
    pub commit_errors: u64,
    /// Assigned partitions whose committed offset carries another inbox's id (Kafka).
    pub foreign_commits: u64,
    /// Partitions read from their beginning because their topic was made again (Kafka).
    pub started_over: u64,
    /// Consumers that the broker cancelled (RabbitMQ).
    pub cancels: u64,
    /// Deliveries given back to the broker.
    pub releases: u64,
}

/// A source's state as it tells it.
#[derive(Debug, Clone)]
pub struct SourceStatus {
    /// Where it stands.
    pub phase: SourcePhase,
    /// Why, for a person: what, where and what to do. Empty when ready.
    pub reason: String,
    /// What it is for an operator, where something is the matter.
    pub code: Option<ErrorCode>,
    /// Connections made after the first, channels reopened included.
    pub reconnects: u64,
    /// Kafka's partitions, empty elsewhere.
    pub partitions: Vec<PartitionReport>,
    /// Messages ready in the queue, where the broker can be asked (RabbitMQ).
    pub queue_depth: Option<u64>,
    /// What happened since the source was made.
    pub counts: SourceCounts,
    /// The source's inner loop has turned at this time (monotonic): for liveness.
    pub turned_at: Instant,
}

impl SourceStatus {
    /// The state before the first connection.
    pub fn connecting() -> Self {
        Self {
            phase: SourcePhase::Connecting,
            reason: "not connected yet".into(),
            code: None,
            reconnects: 0,
            partitions: Vec::new(),
            queue_depth: None,
            counts: SourceCounts::default(),
            turned_at: Instant::now(),
        }
    }
}

/// How long a broker can still deliver again what it delivered once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RedeliveryHorizon {
    /// At most this long (Kafka: `retention.ms`; RabbitMQ: message TTL).
    Limited(Duration),
    /// No limit is set.
    Unlimited,
    /// The topic is compacted.
    Compacted,
    /// Could not be found out; not an error.
    Unknown(String),
}

/// The answer to [`Source::redelivery_horizon`].
pub type HorizonAnswer = Pin<Box<dyn Future<Output = Vec<(String, RedeliveryHorizon)>> + Send>>;

/// Consumes from one broker for one subscription.
///
/// Construction does not wait for the broker: connecting, and mending what can be mended,
/// is the source's own work, told through [`Source::status`].
#[async_trait]
pub trait Source: Send + 'static {
    /// Constant for the life of the source.
    fn traits(&self) -> SourceTraits;

    /// The state, kept up to date: `turned_at` at least once a second while the loop lives.
    fn status(&self) -> watch::Receiver<SourceStatus>;

    /// The next deliveries, at least one, at most `room.deliveries`, in broker order
    /// within each stream. Waits as long as it takes. An error is permanent: the
    /// configuration or the broker's set-up must change.
    ///
    /// # Cancel safety
    /// Cancel-safe: no delivery is lost when the future is dropped.
    async fn next_batch(&mut self, room: Room) -> Result<Vec<Delivery>, SourceError>;

    /// Asks how long the broker can redeliver, by stream (topic or queue). Called after the
    /// status was ready once; the answer comes within a few seconds, beside `next_batch`, and may
    /// be given up.
    fn redelivery_horizon(&self) -> HorizonAnswer;

    /// Stops taking: after this `next_batch` is not called again. What the source holds
    /// itself goes back (where its order rules allow), fences stay open, acks
    /// and heartbeats go on. Deliveries that were handed over are released only after it.
    ///
    /// # Cancel safety
    /// Cancel-safe: it may be given up at a deadline, and close follows.
    async fn stop_taking(&mut self);

    /// Carries out the settlements made so far (acks answered, offsets committed), then leaves.
    /// Ends by `deadline` whatever the broker does.
    async fn close(self: Box<Self>, deadline: Duration) -> Result<(), SourceError>;
}
