//! What the consumer's thread, the engine's calls and the ackers share.
//!
//! Invariants: the lock is held for bookkeeping only, never across a call of librdkafka or an
//! await. Settling never blocks longer than that. A panic elsewhere cannot poison it: no
//! state is left half changed by code that can panic.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use inboxd_contract::{
    Acker, Delivery, ErrorCode, Room, Settle, Settlement, SourceCounts, SourceError, SourceStatus,
};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::beginning::{Begun, FirstSeen};
use crate::health::Health;
use crate::partitions::{Epoch, Kept, Partitions, Record, Waiting};

/// Figures beside the status, for metrics. Each only grows.
#[derive(Debug, Default)]
pub struct KafkaCounters {
    commit_errors: AtomicU64,
    foreign_commits: AtomicU64,
    rebalances: AtomicU64,
    started_over: AtomicU64,
    releases: AtomicU64,
    unreadable: AtomicU64,
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

    /// Partitions read from another offset than the next one: truncated, made again, or overtaken
    /// by retention.
    pub fn started_over(&self) -> u64 {
        self.started_over.load(Ordering::Relaxed)
    }

    /// Batches of records that could not be read, and were passed over.
    pub fn unreadable(&self) -> u64 {
        self.unreadable.load(Ordering::Relaxed)
    }

    /// As the status tells them.
    fn of_status(&self) -> SourceCounts {
        SourceCounts {
            rebalances: self.rebalances(),
            commit_errors: self.commit_errors(),
            foreign_commits: self.foreign_commits(),
            started_over: self.started_over(),
            releases: self.releases.load(Ordering::Relaxed),
            ..SourceCounts::default()
        }
    }

    pub(crate) fn count_started_over(&self) {
        self.started_over.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn count_unreadable(&self) {
        self.unreadable.fetch_add(1, Ordering::Relaxed);
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
    /// What that is for an operator.
    pub(crate) failure_code: Option<ErrorCode>,
    pub(crate) end: Option<End>,
    /// Deliveries were asked for.
    pub(crate) asked: bool,
    /// How many partitions topics had when the group first saw them; for `start = latest`.
    pub(crate) first_seen: FirstSeen,
    /// Where partitions without a committed offset began in this process.
    pub(crate) begun: Begun,
    /// An assignment could not be begun with: the group is to be left and joined again.
    pub(crate) rejoin: bool,
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
            state: Mutex::new(State {
                partitions,
                health,
                failure: None,
                failure_code: None,
                end: None,
                asked: false,
                first_seen: FirstSeen::new(),
                begun: Begun::new(),
                rejoin: false,
            }),
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
        let code = state.failure_code.or_else(|| state.health.code());
        let status = SourceStatus {
            phase,
            reason,
            code,
            reconnects: state.health.reconnects(),
            partitions: state.partitions.reports(),
            counts: self.counters.of_status(),
            turned_at: Instant::now(),
            ..SourceStatus::connecting()
        };
        drop(state);
        self.status.send_replace(status);
    }

    /// A record was read.
    pub(crate) fn receive(&self, record: Record<'_>) -> Kept {
        let (topic, partition, offset) = (record.topic, record.partition, record.offset);
        let kept = self.lock().partitions.receive(record);
        match kept {
            Kept::Waits => {}
            Kept::Held => return Kept::Held,
            Kept::Ignored => return Kept::Ignored,
            Kept::StartedOver => {
                self.counters.count_started_over();
                tracing::warn!(
                    code = ErrorCode::TopicRemade.as_str(),
                    topic,
                    partition,
                    offset,
                    "offsets went back: the log was truncated or the topic made again; \
                     consuming from there"
                );
            }
        }
        self.arrived.notify_one();
        kept
    }

    /// A topic was made again, and this partition is read from its beginning.
    pub(crate) fn start_over(&self, topic: &str, partition: i32) {
        if self.lock().partitions.start_over(topic, partition).is_some() {
            self.counters.count_started_over();
        }
    }

    /// Something waits that could not be handed out before.
    pub(crate) fn notify_arrived(&self) {
        self.arrived.notify_one();
    }

    /// The source cannot go on. The first failure stands.
    pub(crate) fn fail(&self, what: String) {
        self.fail_as(ErrorCode::SourceEnded, what);
    }

    /// The same, known to be of this kind.
    pub(crate) fn fail_as(&self, code: ErrorCode, what: String) {
        let mut state = self.lock();
        state.partitions.lose_all();
        if state.failure.is_none() {
            state.failure = Some(what);
            state.failure_code = Some(code);
        }
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
            let code = state.failure_code.unwrap_or(ErrorCode::SourceEnded);
            return Err(SourceError::permanent(failure.clone()).with_code(code));
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
        if settlement == Settlement::Release {
            shared.counters.releases.fetch_add(1, Ordering::Relaxed);
        }
        let waits = shared.lock().partitions.settle(epoch, record, settlement, Instant::now());
        // A revoke may be waiting for this one.
        shared.changed.notify_all();
        if waits {
            shared.arrived.notify_one();
        }
    }
}
