//! What the consumer's thread, the engine's calls and the ackers share.
//!
//! Invariants: the lock is held for bookkeeping only, never across a call of librdkafka or an
//! await. Settling never blocks longer than that. A panic elsewhere cannot poison it: no
//! state is left half changed by code that can panic.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use inboxd_contract::{
    Acker, Delivery, ErrorClass, Room, Settle, Settlement, SourceError, SourceStatus,
};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::health::Health;
use crate::partitions::{Epoch, Kept, Partitions, Record, Waiting};

/// Figures beside the status, for metrics. Each only grows.
#[derive(Debug, Default)]
pub struct KafkaCounters {
    commit_errors: AtomicU64,
    foreign_commits: AtomicU64,
    rebalances: AtomicU64,
    started_over: AtomicU64,
    topic_ids: AtomicU64,
}

impl KafkaCounters {
    /// Topic ids learnt: one for each topic, and one more each time that it was made again.
    pub fn topic_ids(&self) -> u64 {
        self.topic_ids.load(Ordering::Relaxed)
    }

    /// Commits that the broker refused or did not answer in time; they are tried again.
    pub fn commit_errors(&self) -> u64 {
        self.commit_errors.load(Ordering::Relaxed)
    }

    /// Partitions that came with an offset committed beside another inbox: two inboxes do not
    /// deduplicate each other's messages.
    pub fn foreign_commits(&self) -> u64 {
        self.foreign_commits.load(Ordering::Relaxed)
    }

    /// Assignments and revocations.
    pub fn rebalances(&self) -> u64 {
        self.rebalances.load(Ordering::Relaxed)
    }

    /// Partitions whose offsets went back while they were ours: truncated, or made again.
    pub fn started_over(&self) -> u64 {
        self.started_over.load(Ordering::Relaxed)
    }

    pub(crate) fn count_topic_id(&self) {
        self.topic_ids.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn count_commit_error(&self) {
        self.commit_errors.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn count_foreign_commit(&self) {
        self.foreign_commits.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn count_rebalance(&self) {
        self.rebalances.fetch_add(1, Ordering::Relaxed);
    }
}

/// How the source ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// Commit what is settled, leave the group, by this time.
    Close(Instant),
    /// The source was dropped: leave the group and commit nothing.
    Drop,
}

/// What the lock protects.
pub(crate) struct State {
    pub(crate) partitions: Partitions,
    pub(crate) health: Health,
    /// Why the source cannot go on.
    pub(crate) failure: Option<String>,
    pub(crate) end: Option<End>,
    /// Deliveries were asked for.
    pub(crate) asked: bool,
}

/// See the module.
pub(crate) struct Shared {
    state: Mutex<State>,
    /// Wakes the consumer's thread: room, a settlement, the end.
    changed: Condvar,
    /// Wakes `next_batch`: something waits, or the source failed.
    arrived: Notify,
    status: watch::Sender<SourceStatus>,
    pub(crate) counters: Arc<KafkaCounters>,
}

impl Shared {
    pub(crate) fn new(partitions: Partitions, health: Health) -> Self {
        Self {
            state: Mutex::new(State { partitions, health, failure: None, end: None, asked: false }),
            changed: Condvar::new(),
            arrived: Notify::new(),
            status: watch::Sender::new(SourceStatus::connecting()),
            counters: Arc::default(),
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a change while `condition` holds, for at most `timeout`.
    pub(crate) fn wait_while(&self, timeout: Duration, condition: impl Fn(&State) -> bool) {
        let guard = self.lock();
        let waited = self.changed.wait_timeout_while(guard, timeout, |state| condition(state));
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    pub(crate) fn status(&self) -> watch::Receiver<SourceStatus> {
        self.status.subscribe()
    }

    /// Publishes the status; the loop has turned.
    pub(crate) fn publish(&self) {
        let state = self.lock();
        let (phase, reason) = state.health.phase(state.failure.as_deref());
        let status = SourceStatus {
            phase,
            reason,
            reconnects: state.health.reconnects(),
            partitions: state.partitions.reports(),
            queue_depth: None,
            counts: inboxd_contract::SourceCounts::default(),
            turned_at: Instant::now(),
        };
        drop(state);
        self.status.send_replace(status);
    }

    /// A record was read.
    pub(crate) fn receive(&self, record: Record<'_>) {
        let (topic, partition, offset) = (record.topic, record.partition, record.offset);
        let kept = self.lock().partitions.receive(record);
        match kept {
            Kept::Waits => {}
            Kept::Ignored => return,
            Kept::StartedOver => {
                self.counters.started_over.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(
                    topic,
                    partition,
                    offset,
                    "offsets went back: the log was truncated or the topic made again; \
                     consuming from there"
                );
            }
        }
        self.arrived.notify_one();
    }

    /// A topic was made again, and this partition is read from its beginning.
    pub(crate) fn start_over(&self, topic: &str, partition: i32) {
        if self.lock().partitions.start_over(topic, partition).is_some() {
            self.counters.started_over.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Something waits that could not be handed out before.
    pub(crate) fn notify_arrived(&self) {
        self.arrived.notify_one();
    }

    /// The source cannot go on. The first failure stands.
    pub(crate) fn fail(&self, what: String) {
        tracing::error!(error = %what, "the Kafka source cannot go on");
        let mut state = self.lock();
        state.partitions.lose_all();
        state.failure.get_or_insert(what);
        drop(state);
        self.arrived.notify_waiters();
        self.arrived.notify_one();
    }

    pub(crate) fn end(&self, end: End) {
        let mut state = self.lock();
        state.end.get_or_insert(end);
        if end == End::Drop {
            state.partitions.lose_all();
            state.health.close();
        }
        drop(state);
        self.changed.notify_all();
        if end == End::Drop {
            self.publish();
        }
    }

    /// Waits for deliveries.
    ///
    /// # Cancel safety
    /// Cancel-safe: what is taken is answered without another await.
    pub(crate) async fn next(self: &Arc<Self>, room: Room) -> Result<Vec<Delivery>, SourceError> {
        loop {
            let arrived = self.arrived.notified();
            tokio::pin!(arrived);
            arrived.as_mut().enable();
            let due = match self.take(room) {
                Ok(Taking::Batch(batch)) => return Ok(batch),
                Ok(Taking::Nothing(due)) => due,
                Err(error) => return Err(error),
            };
            match due {
                Some(due) => {
                    let _ = tokio::time::timeout_at(due, arrived).await;
                }
                None => arrived.await,
            }
        }
    }

    fn take(self: &Arc<Self>, room: Room) -> Result<Taking, SourceError> {
        let mut state = self.lock();
        state.asked = true;
        if let Some(failure) = &state.failure {
            return Err(SourceError {
                class: ErrorClass::Permanent,
                what: failure.clone(),
                source: None,
            });
        }
        let was_full = state.partitions.is_full();
        let (taken, due) = state.partitions.take(room, Instant::now());
        let wake = was_full && !state.partitions.is_full();
        drop(state);
        if wake {
            self.changed.notify_all();
        }
        if taken.is_empty() {
            return Ok(Taking::Nothing(due));
        }
        let deliveries = taken.into_iter().map(|taken| Delivery {
            envelope: Arc::clone(&taken.record.envelope),
            stream: taken.stream,
            fence: taken.fence.fence(),
            received_at: taken.record.received_at,
            acker: Acker::new(KafkaSettle {
                shared: Arc::clone(self),
                epoch: taken.epoch,
                record: taken.record,
            }),
        });
        Ok(Taking::Batch(deliveries.collect()))
    }
}

enum Taking {
    Batch(Vec<Delivery>),
    Nothing(Option<Instant>),
}

/// Settles one record. It holds the record, so that a release needs no second read.
struct KafkaSettle {
    shared: Arc<Shared>,
    epoch: Epoch,
    record: Waiting,
}

impl Settle for KafkaSettle {
    fn settle(self: Box<Self>, settlement: Settlement) {
        let Self { shared, epoch, record } = *self;
        let waits = shared.lock().partitions.settle(epoch, record, settlement, Instant::now());
        // A revoke may be waiting for this one.
        shared.changed.notify_all();
        if waits {
            shared.arrived.notify_one();
        }
    }
}
