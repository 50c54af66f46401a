//! What every source must do, whatever broker is behind it.
//!
//! An adapter brings a [`SourceHarness`] and calls [`run`]. Each case has a place (a queue or
//! topic) of its own, so that cases run side by side. Cases never wait for *nothing* to
//! happen to learn that nothing happened: a marker is published behind what must
//! not come, and the marker must be what comes next.

mod cases;
mod content;
mod loss;
mod settling;
mod support;

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use inboxd_contract::Source;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::Instant;

/// What a case publishes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TestMessage {
    /// The message's id: AMQP's message-id property; elsewhere the header `message-id`, which
    /// goes before [`TestMessage::headers`].
    pub id: String,
    /// Further headers in order. Values are published as byte strings, null ones as the
    /// broker's null.
    pub headers: Vec<(Bytes, Option<Bytes>)>,
    /// `None` is a tombstone; published only where [`Abilities::tombstones`].
    pub body: Option<Bytes>,
    /// The record's key; published only where [`Abilities::keys`].
    pub key: Option<Bytes>,
}

impl TestMessage {
    /// A message with this id, the id as its body, and nothing else.
    pub fn new(id: impl Into<String>) -> Self {
        let id = id.into();
        let body = Some(Bytes::from(id.clone().into_bytes()));
        Self { id, headers: Vec::new(), body, key: None }
    }
}

/// In what a broker (as the adapter uses it) differs from others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Abilities {
    /// The most streams (partitions) one place has; 1 for a queue.
    pub streams_max: usize,
    /// A null body exists and is not the empty one.
    pub tombstones: bool,
    /// Records have a key.
    pub keys: bool,
    /// A header name may occur more than once, and order is kept.
    pub repeated_headers: bool,
    /// A header's value may be null.
    pub null_header_values: bool,
    /// A header's name may be any bytes.
    pub binary_header_names: bool,
    /// A released delivery comes again to the same source while that is open. False: it comes to
    /// the next owner, after close.
    pub release_returns_here: bool,
    /// Each ack stands for itself (RabbitMQ). False: a position is committed, so that what was
    /// acked above an unsettled delivery may come again (Kafka).
    pub settles_singly: bool,
    /// A lost connection is a lost channel: fences are lost, unsettled deliveries come again,
    /// and old acks go nowhere. False: the assignment outlives a short loss (Kafka).
    pub loss_fences: bool,
    /// Several sources share one stream's messages at the same time.
    pub competing: bool,
    /// A second source takes over some of the streams of the first (Kafka's groups).
    pub rebalances: bool,
}

/// An adapter's side of the suite.
#[async_trait]
pub trait SourceHarness: Send + Sync + 'static {
    /// The adapter's name as printed, for instance `rabbitmq-classic`.
    fn adapter(&self) -> &'static str;

    /// In what it differs.
    fn abilities(&self) -> Abilities;

    /// How many cases run side by side.
    fn concurrency(&self) -> usize {
        4
    }

    /// A new, empty queue or topic with a name of its own and `streams` streams
    /// (at most [`Abilities::streams_max`]), with a group of its own.
    async fn fresh(&self, streams: usize) -> Box<dyn SourcePlace>;
}

/// One queue or topic and the network between it and its sources.
#[async_trait]
pub trait SourcePlace: Send + Sync {
    /// Publishes to one stream (0-based), in order, confirmed; not over the network that
    /// `sever`, `hang` and `set_reachable` change.
    async fn publish(&self, stream: usize, messages: &[TestMessage]);

    /// Opens one more source on this place, in the same group where there are groups. Does not
    /// wait for it to be ready.
    async fn open(&self) -> Box<dyn Source>;

    /// Cuts the connections of all sources of this place, once. They may connect again at once.
    async fn sever(&self);

    /// From now on nothing passes either way, while connections stay open.
    async fn hang(&self);

    /// False: cuts all connections, and refuses new ones until it is called with true.
    async fn set_reachable(&self, reachable: bool);
}

/// Runs every case that applies to this adapter and prints one line on stdout:
/// `conformance source <adapter>: <n> cases`.
///
/// # Panics
/// After all cases have run, if any failed; the message names them.
pub async fn run(harness: impl SourceHarness) {
    let harness: Arc<dyn SourceHarness> = Arc::new(harness);
    let abilities = harness.abilities();
    let permits = Arc::new(Semaphore::new(harness.concurrency().max(1)));
    let mut running = JoinSet::new();
    let mut names = std::collections::HashMap::new();
    for case in cases::CASES.iter().filter(|case| (case.applies)(&abilities)) {
        let (harness, permits) = (Arc::clone(&harness), Arc::clone(&permits));
        let task = running.spawn(async move {
            let _permit = permits.acquire().await;
            let began = Instant::now();
            (case.run)(harness).await;
            tracing::debug!(case = case.name, took = ?began.elapsed(), "passed");
        });
        names.insert(task.id(), case.name);
    }
    let mut failed = Vec::new();
    let count = names.len();
    while let Some(ended) = running.join_next().await {
        if let Err(error) = ended {
            let name = names.get(&error.id()).copied().unwrap_or("?");
            failed.push(format!("{name}: {}", support::panic_text(error)));
        }
    }
    println!("conformance source {}: {count} cases", harness.adapter());
    assert!(
        failed.is_empty(),
        "conformance source {}: {} of {count} cases failed:\n{}",
        harness.adapter(),
        failed.len(),
        failed.join("\n")
    );
}
