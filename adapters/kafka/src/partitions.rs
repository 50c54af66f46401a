//! The assigned partitions: what waits for the engine, what is at it, and what may be committed.
//!
//! Purpose: all decisions of the source that need no broker, behind one lock (see
//! [`crate::shared`]).
//!
//! Invariants: each assignment of a partition has an epoch of its own and a fence of its own; an
//! acker names its epoch, so that one of an earlier assignment finds nothing. What waits is
//! bounded by [`WAITING_MAX`] and a budget of bytes, but for one record of each partition that
//! is being paused, and of each whose scope is not known (which is paused for it). Records of one partition are handed out in ascending order; one that was
//! given back goes to the head of its partition's queue, and nothing overtakes it from there.
//!
//! What it does not do: no I/O, no lock, no clock.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use inboxd_contract::{Envelope, FenceHandle, Origin, PartitionReport, Room, Settlement, StreamId};
use tokio::time::Instant;

use crate::stats::Statistics;
use crate::tracker::{OffsetTracker, Received};

/// The most records that wait for the engine.
pub(crate) const WAITING_MAX: usize = 1_024;
const RELEASE_DELAY: Duration = Duration::from_millis(100);
const RELEASE_DELAY_MAX: Duration = Duration::from_secs(5);

/// One assignment of one partition.
pub(crate) type Epoch = u64;

/// What makes positions of a topic an identity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Scope {
    /// The source was not asked for it.
    NotAsked,
    /// Being found out; nothing is handed out before.
    Wanted,
    /// Found. With `marked`, only offsets below it may be handed out: it is the stored
    /// high-water mark of a topic without an id.
    Known { scope: Arc<str>, marked: Option<i64> },
}

/// A record as it was read.
pub(crate) struct Record<'a> {
    pub(crate) topic: &'a str,
    pub(crate) partition: i32,
    pub(crate) offset: i64,
    /// Milliseconds, as the producer or the broker set it.
    pub(crate) timestamp: Option<i64>,
    pub(crate) envelope: Envelope,
    pub(crate) received_at: Instant,
}

impl Record<'_> {
    /// What tells it from another record of the same offset.
    fn mark(&self) -> (i64, Option<i64>, usize) {
        (self.offset, self.timestamp, self.envelope.bytes())
    }
}

/// A record on its way to the engine, and back if it is released.
pub(crate) struct Waiting {
    pub(crate) offset: i64,
    pub(crate) envelope: Arc<Envelope>,
    pub(crate) received_at: Instant,
    /// How often it was given back.
    pub(crate) releases: u32,
}

/// A record that leaves for the engine.
pub(crate) struct Taken {
    pub(crate) epoch: Epoch,
    pub(crate) stream: StreamId,
    pub(crate) fence: FenceHandle,
    pub(crate) record: Waiting,
}

/// An offset to commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Commit {
    pub(crate) epoch: Epoch,
    pub(crate) topic: Arc<str>,
    pub(crate) partition: i32,
    pub(crate) offset: i64,
}

/// What became of a record that was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kept {
    /// It waits for the engine.
    Waits,
    /// Its partition is not ours, nothing is taken any more, or it was read twice.
    Ignored,
    /// It waits for its partition's scope, and the partition is to be paused before more is read.
    Held,
    /// It waits; offsets went back: the log was truncated or the topic made again.
    StartedOver,
}

struct Partition {
    topic: Arc<str>,
    number: i32,
    stream: StreamId,
    fence: FenceHandle,
    tracker: OffsetTracker<Instant>,
    /// Ascending by offset.
    waiting: VecDeque<Waiting>,
    /// Nothing is handed out before: set by a release.
    not_before: Option<Instant>,
    scope: Scope,
    /// What the broker has confirmed in this assignment.
    committed: Option<i64>,
    /// Where the log ends, by the last statistics.
    end: Option<i64>,
    /// What the broker said is committed, by the last statistics.
    committed_before: Option<i64>,
    draining: bool,
    paused: bool,
    /// The last record read.
    last: Option<(i64, Option<i64>, usize)>,
    /// What the last statistics since the last record said was polled.
    polled: Option<i64>,
}

/// See the module.
pub(crate) struct Partitions {
    by_epoch: HashMap<Epoch, Partition>,
    epochs: HashMap<Arc<str>, BTreeMap<i32, Epoch>>,
    /// Partitions in which something waits, each once, in turn.
    turns: VecDeque<Epoch>,
    last_epoch: Epoch,
    /// What waits and may be handed out as far as its scope goes; what is held back for want of one
    /// does not fill the queue, and is bounded by its partition's pause.
    waiting: usize,
    waiting_bytes: usize,
    waiting_bytes_max: usize,
    span_max: usize,
    taking: bool,
}

impl Partitions {
    pub(crate) fn new(waiting_bytes_max: usize, span_max: usize) -> Self {
        Self {
            by_epoch: HashMap::new(),
            epochs: HashMap::new(),
            turns: VecDeque::new(),
            last_epoch: 0,
            waiting: 0,
            waiting_bytes: 0,
            waiting_bytes_max,
            span_max,
            taking: true,
        }
    }

    /// A partition is ours from now on.
    pub(crate) fn assign(&mut self, topic: &str, number: i32, scope: Scope) -> Epoch {
        self.lose(topic, number);
        let topic = match self.epochs.get_key_value(topic) {
            Some((topic, _)) => Arc::clone(topic),
            None => Arc::from(topic),
        };
        self.last_epoch += 1;
        let partition = Partition {
            stream: StreamId(format!("{topic}/{number}").into()),
            topic: Arc::clone(&topic),
            number,
            fence: FenceHandle::open(),
            tracker: OffsetTracker::new(),
            waiting: VecDeque::new(),
            not_before: None,
            scope,
            committed: None,
            end: None,
            committed_before: None,
            draining: false,
            paused: false,
            last: None,
            polled: None,
        };
        self.by_epoch.insert(self.last_epoch, partition);
        self.epochs.entry(topic).or_default().insert(number, self.last_epoch);
        self.last_epoch
    }

    /// Reading of a partition that was just assigned begins here, which is committed like what is
    /// settled.
    pub(crate) fn begin_at(&mut self, epoch: Epoch, offset: i64) {
        if let Some(partition) = self.by_epoch.get_mut(&epoch) {
            partition.tracker.start_at(offset);
        }
    }

    /// A record was read.
    pub(crate) fn receive(&mut self, record: Record<'_>) -> Kept {
        let Some(epoch) = self.epoch(record.topic, record.partition).filter(|_| self.taking) else {
            return Kept::Ignored;
        };
        let Some(partition) = self.by_epoch.get_mut(&epoch) else { return Kept::Ignored };
        if partition.tracker.receive(record.offset, record.received_at) == Received::New {
            let held = partition.scope == Scope::Wanted;
            self.push(epoch, record);
            return if held { Kept::Held } else { Kept::Waits };
        }
        // A pause by librdkafka itself, around a rebalance, may rewind by the one record that
        // was polled in that moment.
        if partition.last == Some(record.mark()) {
            return Kept::Ignored;
        }
        let Some(epoch) = self.start_over(record.topic, record.partition) else {
            return Kept::Ignored;
        };
        if let Some(partition) = self.by_epoch.get_mut(&epoch) {
            partition.tracker.receive(record.offset, record.received_at);
        }
        self.push(epoch, record);
        Kept::StartedOver
    }

    /// A partition's log is another one from now on: as if it were lost and assigned again.
    pub(crate) fn start_over(&mut self, topic: &str, number: i32) -> Option<Epoch> {
        let partition = self.by_epoch.get(&self.epoch(topic, number)?)?;
        let scope = match partition.scope {
            Scope::NotAsked => Scope::NotAsked,
            Scope::Wanted | Scope::Known { .. } => Scope::Wanted,
        };
        let paused = partition.paused;
        let epoch = self.assign(topic, number, scope);
        self.set_paused(&[epoch], paused);
        Some(epoch)
    }

    /// Queues a record that is tracked behind the others.
    fn push(&mut self, epoch: Epoch, record: Record<'_>) {
        let Some(partition) = self.by_epoch.get_mut(&epoch) else { return };
        partition.polled = None;
        partition.last = Some(record.mark());
        let mut envelope = record.envelope;
        if let Scope::Known { scope, .. } = &partition.scope {
            set_scope(&mut envelope, scope);
        }
        if partition.scope != Scope::Wanted {
            self.waiting += 1;
            self.waiting_bytes += envelope.bytes();
        }
        if partition.waiting.is_empty() {
            self.turns.push_back(epoch);
        }
        partition.waiting.push_back(Waiting {
            offset: record.offset,
            envelope: Arc::new(envelope),
            received_at: record.received_at,
            releases: 0,
        });
    }

    /// What the engine has room for, and, if that is nothing, when something becomes due.
    pub(crate) fn take(&mut self, room: Room, now: Instant) -> (Vec<Taken>, Option<Instant>) {
        let (mut taken, mut due, mut bytes) = (Vec::new(), None, 0);
        for _ in 0..self.turns.len() {
            if taken.len() >= room.deliveries || bytes >= room.bytes {
                break;
            }
            let Some(epoch) = self.turns.pop_front() else { break };
            let Some(partition) = self.by_epoch.get_mut(&epoch) else { continue };
            match partition.not_before {
                Some(at) if at > now => due = Some(due.map_or(at, |due: Instant| due.min(at))),
                _ => {
                    while taken.len() < room.deliveries && bytes < room.bytes {
                        let Some(record) = partition.next() else { break };
                        let size = record.envelope.bytes();
                        bytes += size;
                        self.waiting -= 1;
                        self.waiting_bytes -= size;
                        taken.push(Taken {
                            epoch,
                            stream: partition.stream.clone(),
                            fence: partition.fence.clone(),
                            record,
                        });
                    }
                }
            }
            if !partition.waiting.is_empty() {
                self.turns.push_back(epoch);
            }
        }
        (taken, due)
    }

    /// An acker of this epoch was used or dropped. True if something now waits again.
    pub(crate) fn settle(
        &mut self,
        epoch: Epoch,
        mut record: Waiting,
        settlement: Settlement,
        now: Instant,
    ) -> bool {
        let taking = self.taking;
        let Some(partition) = self.by_epoch.get_mut(&epoch) else { return false };
        match settlement {
            Settlement::Ack => {
                partition.tracker.settle(record.offset);
                false
            }
            Settlement::Release => {
                let waits = partition.tracker.give_back(record.offset);
                if !waits || !taking || partition.draining {
                    return false;
                }
                let delay = RELEASE_DELAY.saturating_mul(1 << record.releases.min(10));
                record.releases += 1;
                let at = now + delay.min(RELEASE_DELAY_MAX);
                partition.not_before = partition.not_before.max(Some(at));
                self.waiting += 1;
                self.waiting_bytes += record.envelope.bytes();
                if partition.waiting.is_empty() {
                    self.turns.push_back(epoch);
                }
                let index = partition.waiting.partition_point(|other| other.offset < record.offset);
                partition.waiting.insert(index, record);
                true
            }
        }
    }

    /// Nothing new of this partition starts; what waits is dropped.
    pub(crate) fn drain(&mut self, topic: &str, number: i32) -> Option<Epoch> {
        let epoch = self.epoch(topic, number)?;
        self.drop_waiting(epoch);
        let partition = self.by_epoch.get_mut(&epoch)?;
        partition.draining = true;
        partition.fence.drain();
        Some(epoch)
    }

    /// A partition is not ours any more.
    pub(crate) fn lose(&mut self, topic: &str, number: i32) {
        let Some(numbers) = self.epochs.get_mut(topic) else { return };
        let Some(epoch) = numbers.remove(&number) else { return };
        if numbers.is_empty() {
            self.epochs.remove(topic);
        }
        self.drop_waiting(epoch);
        if let Some(partition) = self.by_epoch.remove(&epoch) {
            partition.fence.lose();
        }
    }

    /// Nothing is ours any more.
    pub(crate) fn lose_all(&mut self) {
        for (topic, number) in self.assigned() {
            self.lose(&topic, number);
        }
    }

    /// Nothing is handed out or received any more; acks go on.
    pub(crate) fn stop_taking(&mut self) {
        self.taking = false;
        let epochs: Vec<_> = self.by_epoch.keys().copied().collect();
        epochs.into_iter().for_each(|epoch| self.drop_waiting(epoch));
    }

    /// How many records of these epochs are at the engine.
    pub(crate) fn handed_out(&self, epochs: &[Epoch]) -> usize {
        let partitions = epochs.iter().filter_map(|epoch| self.by_epoch.get(epoch));
        partitions.map(|partition| partition.tracker.handed_out()).sum()
    }

    /// Offsets that the broker has not confirmed yet; of these epochs, or of all.
    pub(crate) fn commits(&self, only: Option<&[Epoch]>) -> Vec<Commit> {
        let wanted = |epoch: &Epoch| only.is_none_or(|only| only.contains(epoch));
        let all = self.by_epoch.iter().filter(|(epoch, _)| wanted(epoch));
        all.filter_map(|(epoch, partition)| {
            let offset = partition.tracker.committable()?;
            (partition.committed != Some(offset) && partition.moved(offset)).then(|| Commit {
                epoch: *epoch,
                topic: Arc::clone(&partition.topic),
                partition: partition.number,
                offset,
            })
        })
        .collect()
    }

    /// The broker has confirmed an offset.
    pub(crate) fn committed(&mut self, commit: &Commit) {
        if let Some(partition) = self.by_epoch.get_mut(&commit.epoch) {
            partition.committed = Some(commit.offset);
        }
    }

    /// Whether reading should stop for a moment.
    pub(crate) fn is_full(&self) -> bool {
        self.waiting >= WAITING_MAX || self.waiting_bytes >= self.waiting_bytes_max
    }

    /// Whether there is room worth resuming for.
    pub(crate) fn is_half_empty(&self) -> bool {
        self.waiting <= WAITING_MAX / 2 && self.waiting_bytes <= self.waiting_bytes_max / 2
    }

    /// What is to be paused and resumed now, given whether the queue to the engine stalls.
    /// The caller carries it out and says so by [`Partitions::set_paused`].
    pub(crate) fn to_pause(&self, stalled: bool) -> (Vec<Epoch>, Vec<Epoch>) {
        let (mut pause, mut resume) = (Vec::new(), Vec::new());
        for (epoch, partition) in &self.by_epoch {
            // A partition that was never read has nothing to pause; its first record shows.
            let wide = partition.tracker.span() > self.span_max;
            let read = partition.last.is_some();
            let held = partition.scope == Scope::Wanted;
            let wanted = wide || !self.taking || (read && (stalled || held));
            match (wanted, partition.paused) {
                (true, false) => pause.push(*epoch),
                (false, true) => resume.push(*epoch),
                _ => {}
            }
        }
        (pause, resume)
    }

    /// Partitions were paused or resumed.
    pub(crate) fn set_paused(&mut self, epochs: &[Epoch], paused: bool) {
        for epoch in epochs {
            if let Some(partition) = self.by_epoch.get_mut(epoch) {
                partition.paused = paused;
            }
        }
    }

    /// A partition's pause or resume was refused.
    pub(crate) fn not_paused(&mut self, topic: &str, number: i32, paused: bool) {
        if let Some(epoch) = self.epoch(topic, number) {
            self.set_paused(&[epoch], !paused);
        }
    }

    /// Topic and number of an epoch.
    pub(crate) fn name(&self, epoch: Epoch) -> Option<(Arc<str>, i32)> {
        let partition = self.by_epoch.get(&epoch)?;
        Some((Arc::clone(&partition.topic), partition.number))
    }

    /// Everything that is ours.
    pub(crate) fn assigned(&self) -> Vec<(Arc<str>, i32)> {
        let partitions = self.by_epoch.values();
        partitions.map(|partition| (Arc::clone(&partition.topic), partition.number)).collect()
    }

    /// Partitions whose scope is to be found out.
    pub(crate) fn unscoped(&self) -> Vec<(Epoch, Arc<str>, i32)> {
        let all = self.by_epoch.iter();
        all.filter(|(_, partition)| partition.scope == Scope::Wanted)
            .map(|(epoch, partition)| (*epoch, Arc::clone(&partition.topic), partition.number))
            .collect()
    }

    /// A partition's scope was found; what waits gets it.
    pub(crate) fn set_scope(&mut self, epoch: Epoch, scope: Arc<str>, marked: Option<i64>) {
        let Some(partition) = self.by_epoch.get_mut(&epoch) else { return };
        if partition.scope == Scope::Wanted {
            self.waiting += partition.waiting.len();
            self.waiting_bytes += partition.waiting_bytes();
        }
        for waiting in &mut partition.waiting {
            // What waits and was never handed out is shared with nobody.
            if let Some(envelope) = Arc::get_mut(&mut waiting.envelope) {
                set_scope(envelope, &scope);
            }
        }
        partition.scope = Scope::Known { scope, marked };
    }

    /// Partitions in which something waits above the stored mark: (epoch, scope, number,
    /// the mark to store).
    pub(crate) fn unmarked(&self) -> Vec<(Epoch, Arc<str>, i32, i64)> {
        let all = self.by_epoch.iter();
        all.filter_map(|(epoch, partition)| match &partition.scope {
            Scope::Known { scope, marked: Some(marked) } => {
                let last = partition.waiting.back()?.offset;
                let beyond = last >= *marked;
                beyond.then(|| (*epoch, Arc::clone(scope), partition.number, last + 1))
            }
            _ => None,
        })
        .collect()
    }

    /// The mark was stored.
    pub(crate) fn set_mark(&mut self, epoch: Epoch, stored: i64) {
        if let Some(Partition { scope: Scope::Known { marked: Some(marked), .. }, .. }) =
            self.by_epoch.get_mut(&epoch)
        {
            *marked = stored;
        }
    }

    /// Takes over what librdkafka knows of the partitions' ends.
    pub(crate) fn observe(&mut self, statistics: &Statistics, committed_only: bool) {
        // What is read after the source was stopped is not tracked: librdkafka counts it as polled,
        // but it was never delivered, and nothing of it may be committed.
        let taking = self.taking;
        for (topic, partitions) in &statistics.topics {
            for known in partitions.partitions.values() {
                let Some(epoch) = self.epoch(topic, known.partition) else { continue };
                let Some(partition) = self.by_epoch.get_mut(&epoch) else { continue };
                partition.end = known.end(committed_only);
                partition.committed_before = known.committed();
                if taking {
                    partition.observe(known.polled());
                }
            }
        }
    }

    /// For status and metrics.
    pub(crate) fn reports(&self) -> Vec<PartitionReport> {
        let mut all: Vec<&Partition> = self.by_epoch.values().collect();
        all.sort_by(|a, b| (&a.topic, a.number).cmp(&(&b.topic, b.number)));
        all.into_iter()
            .map(|partition| {
                let committed = partition.committed.or(partition.committed_before);
                let end = partition.end;
                PartitionReport {
                    stream: partition.stream.clone(),
                    lag: end.zip(committed).map(|(end, committed)| (end - committed).max(0)),
                    oldest_unsettled_at: partition.tracker.oldest(),
                    paused: partition.paused,
                }
            })
            .collect()
    }

    fn epoch(&self, topic: &str, number: i32) -> Option<Epoch> {
        self.epochs.get(topic)?.get(&number).copied()
    }

    fn drop_waiting(&mut self, epoch: Epoch) {
        if let Some(partition) = self.by_epoch.get_mut(&epoch) {
            if partition.scope != Scope::Wanted {
                self.waiting -= partition.waiting.len();
                self.waiting_bytes -= partition.waiting_bytes();
            }
            partition.waiting.clear();
            self.turns.retain(|turn| *turn != epoch);
        }
    }
}

impl Partition {
    fn waiting_bytes(&self) -> usize {
        self.waiting.iter().map(|waiting| waiting.envelope.bytes()).sum()
    }

    /// The next record that may go to the engine.
    fn next(&mut self) -> Option<Waiting> {
        let allowed = match &self.scope {
            Scope::NotAsked => true,
            Scope::Wanted => false,
            Scope::Known { marked: None, .. } => true,
            Scope::Known { marked: Some(marked), .. } => {
                self.waiting.front().is_some_and(|waiting| waiting.offset < *marked)
            }
        };
        let record = if allowed { self.waiting.pop_front() } else { None }?;
        self.not_before = None;
        self.tracker.hand_out(record.offset);
        Some(record)
    }

    /// Whether an offset is more than where this assignment began.
    fn moved(&self, offset: i64) -> bool {
        self.committed.is_some() || self.committed_before != Some(offset)
    }

    /// Markers and aborted records are polled too, unseen: what librdkafka counts as polled
    /// beyond our last record is behind us. Said twice, a second apart, without a record
    /// between, for one report may be older than a log that was just made again.
    fn observe(&mut self, polled: Option<i64>) {
        let said_before = polled.is_some() && polled == self.polled;
        self.polled = polled;
        if let Some(polled) = polled.filter(|_| said_before) {
            self.tracker.advance(polled);
        }
    }
}

fn set_scope(envelope: &mut Envelope, known: &Arc<str>) {
    if let Origin::Kafka { position_scope, .. } = &mut envelope.origin {
        *position_scope = Some(Arc::clone(known));
    }
}

#[cfg(test)]
#[path = "partitions_tests.rs"]
mod tests;
