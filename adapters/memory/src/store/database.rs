//! The database that stores share, and what tests and simulations do to it directly.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use inboxd_contract::{InboxKey, OwnerId, ParkedSeq, ParkedState};

use super::copies::ParkedRow;
use super::rows::{Rows, micros};
use super::witness::{MemoryFlaw, MemoryWitness};

/// One of the three tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryTable {
    /// `inbox_claims`; a row's age is counted from its expiry.
    Claims,
    /// `inbox_messages`; a row's age is counted from `processed_at`.
    Messages,
    /// `inbox_parked`; a row's age is counted from `parked_at`.
    Parked,
}

/// The rows, shared by all instances. Outlives them: keep it to survive a crash.
#[derive(Debug)]
pub struct MemoryDatabase {
    /// Never held across an await.
    rows: Mutex<Rows>,
    /// False: every call of every instance fails, nothing is changed.
    available: AtomicBool,
}

impl MemoryDatabase {
    /// An empty database whose clock starts now. Needs a tokio runtime with time.
    pub fn new() -> Arc<Self> {
        Arc::new(Self { rows: Mutex::new(Rows::new()), available: AtomicBool::new(true) })
    }

    fn rows(&self) -> MutexGuard<'_, Rows> {
        // A panic in a step leaves at worst what a panic in a test leaves: a failed test.
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn step<T>(&self, step: impl FnOnce(&mut Rows) -> T) -> T {
        let mut rows = self.rows();
        rows.read_clock();
        step(&mut rows)
    }

    pub(super) fn is_available(&self) -> bool {
        self.available.load(Ordering::SeqCst)
    }

    /// Makes every call of every instance fail, or work again.
    pub fn set_available(&self, available: bool) {
        self.available.store(available, Ordering::SeqCst);
    }

    /// Tells every further change to `witness`.
    pub fn watch(&self, witness: Arc<dyn MemoryWitness>) {
        self.rows().witness = Some(witness);
    }

    /// Breaks a rule from now on, or none.
    pub fn set_flaw(&self, flaw: Option<MemoryFlaw>) {
        self.rows().flaw = flaw;
    }

    pub(super) fn has_flaw(&self, flaw: MemoryFlaw) -> bool {
        self.rows().flaw == Some(flaw)
    }

    /// Moves the database's clock by so many microseconds, forwards or back.
    pub fn shift_clock(&self, micros: i64) {
        self.rows().shift += micros;
    }

    /// How many claims of this owner have not run out and were not released.
    pub fn claims_held_by(&self, owner: &OwnerId) -> usize {
        self.step(|rows| rows.held().filter(|row| row.owner == *owner).count())
    }

    /// Every claim runs out now, as if its holder had stood still for a lease.
    pub fn expire_claims(&self) {
        self.step(|rows| {
            let now = rows.now;
            rows.claims.values_mut().for_each(|row| row.expires_at = row.expires_at.min(now));
        });
    }

    /// This claim runs out now. True if there is one.
    pub fn expire_claim(&self, key: &InboxKey) -> bool {
        self.backdate(MemoryTable::Claims, key, Duration::ZERO)
    }

    /// Makes the key's rows of a table as old as `age`. True if there are any.
    pub fn backdate(&self, table: MemoryTable, key: &InboxKey, age: Duration) -> bool {
        let then = |rows: &Rows| rows.now - micros(age);
        match table {
            MemoryTable::Claims => self.step(|rows| {
                let then = then(rows);
                rows.claims.get_mut(key).map(|row| row.expires_at = then).is_some()
            }),
            MemoryTable::Messages => self.step(|rows| {
                let then = then(rows);
                rows.messages.get_mut(key).map(|row| row.processed_at = then).is_some()
            }),
            MemoryTable::Parked => self.change_copies(key, |row, now| {
                row.parked_at = now - micros(age);
                true
            }),
        }
    }

    /// Makes the entries of the audit about this row as old as `age`.
    pub fn backdate_audit(&self, seq: ParkedSeq, age: Duration) {
        self.step(|rows| {
            let then = rows.now - micros(age);
            rows.audit.iter_mut().filter(|row| row.seq == seq).for_each(|row| row.at = then);
        });
    }

    /// How many parked rows of a key are in this state.
    pub fn rows_in_state(&self, key: &InboxKey, state: ParkedState) -> usize {
        self.rows().copies.of(key).filter(|row| row.state == state).count()
    }

    /// How many rows a key has in a table.
    pub fn rows_of(&self, table: MemoryTable, key: &InboxKey) -> usize {
        let rows = self.rows();
        match table {
            MemoryTable::Claims => usize::from(rows.claims.contains_key(key)),
            MemoryTable::Messages => usize::from(rows.messages.contains_key(key)),
            MemoryTable::Parked => rows.copies.of(key).count(),
        }
    }

    /// Who held or holds the key's claim.
    pub fn owner_of(&self, key: &InboxKey) -> Option<OwnerId> {
        self.rows().claims.get(key).map(|row| row.owner.clone())
    }

    /// Every key that was processed, in order: for oracles.
    pub fn processed(&self) -> Vec<InboxKey> {
        self.rows().messages.keys().cloned().collect()
    }

    /// Every key that has a dead letter, in the order of parking, one entry per row.
    pub fn dead(&self) -> Vec<InboxKey> {
        let rows = self.rows();
        rows.copies.all().filter(|row| !row.is_due()).map(|row| row.key.clone()).collect()
    }

    /// Every key that is parked and due now or later, in the order of parking, one entry per row.
    pub fn due(&self) -> Vec<InboxKey> {
        let rows = self.rows();
        rows.copies.all().filter(|row| row.is_due()).map(|row| row.key.clone()).collect()
    }

    /// Makes the key's due rows due since `age`. True if there are any.
    pub fn backdate_due(&self, key: &InboxKey, age: Duration) -> bool {
        self.change_copies(key, |row, now| {
            row.due_at = now - micros(age);
            row.is_due()
        })
    }

    /// Makes the key's parked rows received first so long ago. True if there are any.
    pub fn set_first_ago(&self, key: &InboxKey, age: Duration) -> bool {
        self.change_copies(key, |row, now| {
            row.first_at = now - micros(age);
            true
        })
    }

    /// Changes the key's parked rows; true if the change says so for any.
    fn change_copies(&self, key: &InboxKey, change: impl Fn(&mut ParkedRow, i64) -> bool) -> bool {
        self.step(|rows| {
            let of: Vec<_> = rows.copies.of(key).cloned().collect();
            let mut changed = false;
            for mut row in of {
                changed |= change(&mut row, rows.now);
                rows.copies.put(row);
            }
            changed
        })
    }

    /// How many claims have not run out and were not released.
    pub fn claims_held(&self) -> usize {
        self.step(|rows| rows.held().count())
    }

    /// The application's own insert (`commit = "app"`). False: the row was there.
    pub fn insert_message(&self, key: &InboxKey) -> bool {
        self.step(|rows| rows.insert_message(key, None))
    }

    /// An operator's discarding: state discarded, body emptied, rows kept.
    pub fn discard(&self, key: &InboxKey) {
        self.change_copies(key, |row, _| {
            row.state = ParkedState::Discarded;
            row.copy.envelope.body = None;
            row.body_kept = false;
            true
        });
    }

    /// Somebody else's transaction that locks the claim's row.
    pub fn lock_claim(self: &Arc<Self>, key: &InboxKey) -> MemoryLock {
        self.lock(Held::Claim(key.clone()))
    }

    /// Somebody else's transaction that has inserted the message's row.
    pub fn lock_message(self: &Arc<Self>, key: &InboxKey) -> MemoryLock {
        self.lock(Held::Message(key.clone()))
    }

    /// A completion in mid-air: the claim's row deleted, the message's row inserted.
    pub fn lock_completion(self: &Arc<Self>, key: &InboxKey) -> MemoryLock {
        self.lock(Held::Completion(key.clone()))
    }

    /// Somebody else's transaction that locks the key's parked rows.
    pub fn lock_parked(self: &Arc<Self>, key: &InboxKey) -> MemoryLock {
        let rows = self.rows().copies.of(key).map(|row| row.seq).collect();
        self.lock(Held::Parked(rows))
    }

    /// Another instance's sweep.
    pub fn lock_sweep(self: &Arc<Self>) -> MemoryLock {
        self.lock(Held::Sweep)
    }

    fn lock(self: &Arc<Self>, held: Held) -> MemoryLock {
        self.step(|rows| {
            match &held {
                Held::Claim(key) => {
                    rows.locked_claims.insert(key.clone());
                }
                Held::Message(key) => {
                    rows.open_messages.insert(key.clone());
                }
                Held::Completion(key) => {
                    rows.locked_claims.insert(key.clone());
                    rows.open_messages.insert(key.clone());
                }
                Held::Parked(of) => rows.locked_copies.extend(of),
                Held::Sweep => rows.sweep_locked = true,
            };
        });
        MemoryLock { database: Arc::clone(self), held: Some(held) }
    }
}

#[derive(Debug, Clone)]
enum Held {
    Claim(InboxKey),
    Message(InboxKey),
    Completion(InboxKey),
    Parked(Vec<ParkedSeq>),
    Sweep,
}

/// An open transaction of somebody else. Dropping it rolls back.
#[derive(Debug)]
pub struct MemoryLock {
    database: Arc<MemoryDatabase>,
    /// `None` once it has ended.
    held: Option<Held>,
}

impl MemoryLock {
    /// Makes what it wrote visible and lets go.
    pub fn commit(mut self) {
        let held = self.end();
        self.database.step(|rows| match held {
            Some(Held::Completion(key)) => {
                rows.claims.remove(&key);
                rows.insert_message(&key, None);
            }
            Some(Held::Message(key)) => {
                rows.insert_message(&key, None);
            }
            Some(Held::Claim(_) | Held::Parked(_) | Held::Sweep) | None => {}
        });
    }

    /// Undoes what it wrote and lets go.
    pub fn rollback(mut self) {
        self.end();
    }

    fn end(&mut self) -> Option<Held> {
        let held = self.held.take()?;
        self.database.step(|rows| match &held {
            Held::Claim(key) => {
                rows.locked_claims.remove(key);
            }
            Held::Message(key) => {
                rows.open_messages.remove(key);
            }
            Held::Completion(key) => {
                rows.locked_claims.remove(key);
                rows.open_messages.remove(key);
            }
            Held::Parked(of) => rows.locked_copies.retain(|seq| !of.contains(seq)),
            Held::Sweep => rows.sweep_locked = false,
        });
        Some(held)
    }
}

impl Drop for MemoryLock {
    fn drop(&mut self) {
        self.end();
    }
}
