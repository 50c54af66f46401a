//! A broker in memory and sources that consume from it.
//!
//! Purpose: to test the engine against a broker whose every fault can be ordered. The
//! [`MemoryBroker`] is shared; each [`MemorySource`] is one instance consuming from it.
//!
//! Two kinds, after the two brokers that matter. A *queue* hands each message to any one
//! instance, each ack stands for itself, and a lost connection is a lost channel. A *log* gives
//! each stream to one instance, commits positions, hands streams over by draining them, and
//! an assignment outlives a short loss.
//!
//! Invariants: an acker settles the one hand-over it came with and no other (serials); a
//! position is committed only when everything below it is acked; time is tokio's alone, so
//! that paused time works; everything iterates in a fixed order, so that a seed decides a run.
//!
//! What it does not do: lose acks by itself. To lose them, [`MemoryBroker::set_hanging`], let
//! them be made, then [`MemoryBroker::sever`].

mod consumer;
mod state;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

pub use consumer::MemorySource;
use inboxd_contract::{Envelope, RedeliveryHorizon};
use state::State;
use tokio::sync::Notify;

/// How a broker hands over and settles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryKind {
    /// Like a RabbitMQ queue.
    Queue,
    /// Like a Kafka topic and one consumer group.
    Log,
}

/// Sees what the broker forgets for good.
pub trait MemoryBrokerWitness: Send + Sync {
    /// A record is gone: acked (queue), or below the committed position (log). Called under the
    /// broker's lock: must not call the broker.
    fn forgotten(&self, stream: usize, position: u64);
}

/// A rule of settling that the broker breaks on purpose, to show that somebody notices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryBrokerFlaw {
    /// Log: an ack commits its own position, whatever below it is unsettled.
    CommitHighest,
    /// An ack of an earlier hand-over settles the lowest one that the instance holds now, as a
    /// tag of an older channel would.
    SettleStaleTags,
}

/// What a broker is made of.
#[derive(Debug, Clone)]
pub struct MemoryBrokerOptions {
    /// How it hands over and settles.
    pub kind: MemoryKind,
    /// Queue: one instance at a time has it, the others stand by, and what is released comes again
    /// only with the next connection, in order.
    pub exclusive: bool,
    /// Queue: what is ready is handed over in an order that this seed decides.
    pub shuffle_seed: Option<u64>,
    /// The name; streams are called `<name>/<n>`.
    pub name: String,
    /// How many streams it has; at least 1.
    pub streams: usize,
    /// The most unsettled deliveries of one instance; `None` is no bound.
    pub prefetch: Option<usize>,
    /// How long a disconnected instance waits before it connects again.
    pub reconnect_after: Duration,
    /// How long a stream that is handed over may drain before its fence is lost.
    pub drain_max: Duration,
    /// What sources answer when asked how long the broker can redeliver.
    pub horizon: RedeliveryHorizon,
}

impl MemoryBrokerOptions {
    /// A queue named `name` with a prefetch of 64.
    pub fn queue(name: impl Into<String>) -> Self {
        Self { prefetch: Some(64), ..Self::log(name, 1) }.of(MemoryKind::Queue)
    }

    /// A log named `name` with so many streams.
    pub fn log(name: impl Into<String>, streams: usize) -> Self {
        Self {
            kind: MemoryKind::Log,
            exclusive: false,
            shuffle_seed: None,
            name: name.into(),
            streams: streams.max(1),
            prefetch: None,
            reconnect_after: Duration::from_millis(50),
            drain_max: Duration::from_secs(10),
            horizon: RedeliveryHorizon::Unlimited,
        }
    }

    fn of(mut self, kind: MemoryKind) -> Self {
        self.kind = kind;
        self
    }
}

/// A broker in memory. Cloned handles share it.
#[derive(Debug, Clone)]
pub struct MemoryBroker(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    options: MemoryBrokerOptions,
    state: Mutex<State>,
    /// Something changed that a waiting instance may want to see.
    changed: Notify,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state and wakes whoever waits for a change.
    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let answer = change(&mut self.lock());
        self.changed.notify_waiters();
        answer
    }
}

impl MemoryBroker {
    /// An empty broker.
    pub fn new(options: MemoryBrokerOptions) -> Self {
        let state = Mutex::new(State::new(&options));
        Self(Arc::new(Shared { options, state, changed: Notify::new() }))
    }

    /// Appends a message to a stream (0-based); its origin becomes the stream's name and the
    /// position that is answered.
    ///
    /// # Panics
    /// If there is no such stream.
    pub fn publish(&self, stream: usize, envelope: Envelope) -> u64 {
        self.0.change(|state| state.publish(stream, envelope))
    }

    /// Tells `witness` what is forgotten from now on.
    pub fn watch(&self, witness: Arc<dyn MemoryBrokerWitness>) {
        self.0.lock().set_witness(witness);
    }

    /// Breaks a rule from now on, or none.
    pub fn set_flaw(&self, flaw: Option<MemoryBrokerFlaw>) {
        self.0.lock().set_flaw(flaw);
    }

    /// Another instance of the consumer. Must be called within a tokio runtime.
    pub fn source(&self) -> MemorySource {
        MemorySource::start(Arc::clone(&self.0))
    }

    /// The ids of instances that are open, in the order in which they were opened.
    pub fn instances(&self) -> Vec<u64> {
        self.0.lock().instance_ids()
    }

    /// Cuts the connection of every instance, once.
    pub fn sever(&self) {
        self.0.change(|state| state.sever(None));
    }

    /// Cuts the connection of one instance, once.
    pub fn sever_one(&self, instance: u64) {
        self.0.change(|state| state.sever(Some(instance)));
    }

    /// False: cuts all connections and refuses new ones until it is called with true.
    pub fn set_reachable(&self, reachable: bool) {
        self.0.change(|state| state.set_reachable(reachable));
    }

    /// True: nothing passes either way while connections stay. Settlements made meanwhile
    /// arrive when it is called with false, unless the connection is cut first.
    pub fn set_hanging(&self, hanging: bool) {
        self.0.change(|state| state.set_hanging(hanging));
    }

    /// Takes a stream of a log from its owner gracefully: its fence drains, and once nothing is
    /// unsettled (or the drain took too long) the next instance has it, or the same where
    /// there is only one. On a queue: the same as [`MemoryBroker::sever`].
    pub fn revoke(&self, stream: usize) {
        self.0.change(|state| state.revoke(stream));
    }

    /// True: the instance's process stands still: it takes nothing, and does not come back where it
    /// is thrown out.
    pub fn set_stopped(&self, instance: u64, stopped: bool) {
        self.0.change(|state| state.set_stopped(instance, stopped));
    }

    /// Takes all streams of a log's instance at once, as when its session expired: fences are
    /// lost, and what was not committed is delivered again, to whoever has the stream
    /// next. On a queue: the same as [`MemoryBroker::sever_one`].
    pub fn expel(&self, instance: u64) {
        self.0.change(|state| state.expel(instance));
    }

    /// Messages that are not acked yet, delivered or not.
    pub fn unsettled(&self) -> usize {
        self.0.lock().unsettled()
    }

    /// Messages that are delivered and not settled yet.
    pub fn held(&self) -> usize {
        self.0.lock().held()
    }
}
