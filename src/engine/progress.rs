//! Where each delivery of this process stands: for people who ask, never for a decision.
//!
//! Invariants: an entry lives exactly as long as its delivery's task; the table is as large as
//! the budget of deliveries; no lock is held across an await, and none for longer than one look
//! through the table.
//!
//! What it does not do: know anything that the engine does not know anyhow. It asks nobody.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use inboxd_contract::{Envelope, InboxKey, ParkedSeq};
use slab::Slab;
use tokio::time::Instant;

/// What a delivery is waiting for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Its lane: what came before it is not done.
    Lane,
    /// Another delivery of the same id, which is under way in this process.
    Twin,
    /// What is parked before it in its lane; it is looked at again after this.
    LaneBlocked {
        /// From the last look.
        again_in: Duration,
    },
    /// A slot: `concurrency` others are at it.
    Slot,
    /// The database's answer to its claim.
    Claim,
    /// Somebody else's claim, or lock; it is looked at again after this.
    Busy {
        /// From the last look.
        again_in: Duration,
    },
    /// The application's answer.
    Callback,
    /// The next attempt.
    Backoff {
        /// From the beginning of the stage.
        delay: Duration,
    },
    /// The broker's confirmation of its dead letter.
    Publish,
    /// The database, which records what came of it.
    Record,
}

/// One delivery that is under way in this process.
#[derive(Debug, Clone)]
pub struct Flight {
    /// Its key.
    pub key: InboxKey,
    /// The message.
    pub envelope: Arc<Envelope>,
    /// What it waits for.
    pub stage: Stage,
    /// For how long.
    pub in_stage: Duration,
    /// Since the source received it.
    pub taken: Duration,
    /// Attempts counted so far, those of earlier deliveries included; 0 before the first.
    pub attempts: u32,
    /// What the last attempt here came to, where it has to be made again.
    pub last: Option<String>,
    /// The row that it was taken from; `None`: the source handed it over.
    pub parked: Option<ParkedSeq>,
}

/// All deliveries under way of one subscription.
#[derive(Clone, Default)]
pub(super) struct Table(Arc<Mutex<Slab<Arc<Entry>>>>);

struct Entry {
    key: InboxKey,
    envelope: Arc<Envelope>,
    received_at: Instant,
    parked: Option<ParkedSeq>,
    state: Mutex<State>,
}

struct State {
    stage: Stage,
    since: Instant,
    attempts: u32,
    last: Option<String>,
}

/// A delivery's place in the table; gone when it is dropped.
pub(super) struct Progress {
    table: Table,
    place: usize,
    entry: Arc<Entry>,
}

impl Table {
    pub(super) fn enter(
        &self,
        key: InboxKey,
        envelope: Arc<Envelope>,
        received_at: Instant,
    ) -> Progress {
        self.place(key, envelope, received_at, None, 0)
    }

    /// The same for a row that was taken, with so many attempts counted.
    pub(super) fn enter_parked(
        &self,
        key: InboxKey,
        envelope: Arc<Envelope>,
        seq: ParkedSeq,
        attempts: u32,
    ) -> Progress {
        self.place(key, envelope, Instant::now(), Some(seq), attempts)
    }

    fn place(
        &self,
        key: InboxKey,
        envelope: Arc<Envelope>,
        received_at: Instant,
        parked: Option<ParkedSeq>,
        attempts: u32,
    ) -> Progress {
        let state = State { stage: Stage::Slot, since: Instant::now(), attempts, last: None };
        let state = Mutex::new(state);
        let entry = Arc::new(Entry { key, envelope, received_at, parked, state });
        let place = locked(&self.0).insert(entry.clone());
        Progress { table: self.clone(), place, entry }
    }

    pub(super) fn len(&self) -> usize {
        locked(&self.0).len()
    }

    /// Those of one key, in the order in which they were received.
    pub(super) fn of(&self, key: &InboxKey) -> Vec<Flight> {
        self.those(|entry| entry.key == *key, usize::MAX)
    }

    /// The `max` that were received first.
    pub(super) fn oldest(&self, max: usize) -> Vec<Flight> {
        self.those(|_| true, max)
    }

    fn those(&self, wanted: impl Fn(&Entry) -> bool, max: usize) -> Vec<Flight> {
        let mut entries: Vec<_> = locked(&self.0)
            .iter()
            .filter(|(_, entry)| wanted(entry))
            .map(|(_, entry)| entry.clone())
            .collect();
        entries.sort_by_key(|entry| entry.received_at);
        entries.iter().take(max).map(|entry| entry.report()).collect()
    }
}

impl Entry {
    fn report(&self) -> Flight {
        let state = locked(&self.state);
        Flight {
            key: self.key.clone(),
            envelope: self.envelope.clone(),
            stage: state.stage,
            in_stage: state.since.elapsed(),
            taken: self.received_at.elapsed(),
            attempts: state.attempts,
            last: state.last.clone(),
            parked: self.parked,
        }
    }
}

impl Progress {
    /// The delivery waits for this from now on.
    pub(super) fn stage(&self, stage: Stage) {
        let mut state = locked(&self.entry.state);
        // Looking again at what is still busy is the same wait.
        let is_same = matches!(
            (state.stage, stage),
            (Stage::Busy { .. }, Stage::Busy { .. })
                | (Stage::LaneBlocked { .. }, Stage::LaneBlocked { .. })
        );
        if !is_same {
            state.since = Instant::now();
        }
        state.stage = stage;
    }

    /// It is being claimed; what is busy stays so until the claim is had.
    pub(super) fn at_claim(&self) {
        let stage = locked(&self.entry.state).stage;
        if !matches!(stage, Stage::Busy { .. } | Stage::LaneBlocked { .. }) {
            self.stage(Stage::Claim);
        }
    }

    /// It is at the application, with so many attempts counted.
    pub(super) fn at_callback(&self, attempts: u32) {
        self.stage(Stage::Callback);
        locked(&self.entry.state).attempts = attempts;
    }

    /// What an attempt came to that has to be made again, and when.
    pub(super) fn again(&self, last: String, delay: Duration) {
        self.stage(Stage::Backoff { delay });
        locked(&self.entry.state).last = Some(last);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        locked(&self.table.0).try_remove(self.place);
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use inboxd_contract::{ConsumerId, MessageId, Origin};

    use super::*;

    fn enter(table: &Table, id: &str) -> Progress {
        let key = key(id);
        let origin = Origin::Memory { stream: "s".into(), position: 0 };
        table.enter(key, Envelope::new(origin, None).into(), Instant::now())
    }

    fn key(id: &str) -> InboxKey {
        InboxKey {
            consumer_id: ConsumerId::new("c").unwrap(),
            message_id: MessageId::from_bytes(id.as_bytes()).unwrap(),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn it_is_told_what_is_waited_for_and_for_how_long() {
        let table = Table::default();
        let progress = enter(&table, "a");
        tokio::time::advance(Duration::from_secs(1)).await;
        progress.at_callback(3);
        tokio::time::advance(Duration::from_secs(12)).await;
        let flight = table.of(&key("a")).pop().unwrap();
        assert_eq!((flight.stage, flight.attempts), (Stage::Callback, 3));
        assert_eq!((flight.in_stage.as_secs(), flight.taken.as_secs()), (12, 13));
        progress.again("503".into(), Duration::from_secs(8));
        let flight = table.of(&key("a")).pop().unwrap();
        assert_eq!(flight.stage, Stage::Backoff { delay: Duration::from_secs(8) });
        assert_eq!(flight.last.as_deref(), Some("503"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_claim_of_somebody_else_is_one_wait_however_often_it_is_looked_at() {
        let table = Table::default();
        let progress = enter(&table, "a");
        for _ in 0..3 {
            progress.at_claim();
            progress.stage(Stage::Busy { again_in: Duration::from_secs(1) });
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        assert_eq!(table.of(&key("a"))[0].in_stage.as_secs(), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn an_entry_is_gone_with_its_delivery_and_the_oldest_come_first() {
        let table = Table::default();
        let first = enter(&table, "a");
        tokio::time::advance(Duration::from_secs(1)).await;
        let second = enter(&table, "b");
        drop(first);
        tokio::time::advance(Duration::from_secs(1)).await;
        let _third = enter(&table, "c");
        assert!(table.of(&key("a")).is_empty());
        let oldest = table.oldest(1);
        assert_eq!((oldest.len(), &oldest[0].key), (1, &second.entry.key));
    }
}
