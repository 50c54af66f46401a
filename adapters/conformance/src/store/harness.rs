//! What an adapter gives the suite beside its store.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use inboxd_contract::{Claim, InboxKey, InboxStore, ParkedSeq, ParkedState, StoreError};

/// In what a store differs from others, as far as cases must know.
#[derive(Debug, Clone, Copy)]
pub struct StoreTraits {
    /// Locks are held on rows. False: one writer at a time in the whole database (SQLite).
    pub row_locks: bool,
    /// How many instances may have one database open. Where it is 1,
    /// [`StoreHarness::open`] answers the same store again.
    pub instances: usize,
    /// [`StoreHarness::hold_sweep_lock`] is there.
    pub sweep_lock: bool,
    /// [`StoreHarness::fresh_database`] is there.
    pub migrations: bool,
}

/// A row of the three tables.
#[derive(Debug, Clone, Copy)]
pub enum Row<'a> {
    /// `inbox_claims`; its age is counted from `expires_at`.
    Claim(&'a InboxKey),
    /// `inbox_messages`; its age is counted from `processed_at`.
    Message(&'a InboxKey),
    /// All rows of `inbox_parked` with this key; their age is counted from `parked_at`.
    Parked(&'a InboxKey),
}

/// Somebody else's open transaction. Dropping it rolls back, but maybe later than the test needs.
#[async_trait]
pub trait Guard: Send {
    /// Commits; answers when that is done.
    async fn commit(self: Box<Self>);
    /// Rolls back; answers when that is done.
    async fn rollback(self: Box<Self>);
}

/// An empty database of its own, for start-up.
#[async_trait]
pub trait FreshDatabase: Send + Sync {
    /// Opens an instance and migrates, as a replica does when it starts.
    async fn start(&self) -> Result<Arc<dyn InboxStore>, StoreError>;
    /// The versions recorded in `inbox_migrations`, ascending.
    async fn versions(&self) -> Vec<i64>;
    /// Records migration 9000 (or 9001, if breaking), as a newer binary would have.
    async fn record_newer(&self, breaking: bool);
}

/// A store under test. Everything here goes to the database directly, by its own connection.
/// Methods panic when they cannot do what they say.
#[async_trait]
pub trait StoreHarness: Send + Sync {
    /// The adapter's name: `memory`, `sqlite`, `postgres`, `mysql`.
    fn adapter(&self) -> &'static str;

    /// In what it differs.
    fn traits(&self) -> StoreTraits;

    /// Another instance on the same migrated database, with a pool of at most 4 connections and
    /// made for leases of 15 s.
    async fn open(&self) -> Arc<dyn InboxStore>;

    /// Makes a row as old as `age`: sets its time to the database's now less `age`.
    async fn backdate(&self, row: Row<'_>, age: Duration);

    /// How many rows there are.
    async fn rows(&self, row: Row<'_>) -> u64;

    /// Sets all parked rows of this key to state discarded and empties their bodies.
    async fn discard(&self, key: &InboxKey);

    /// A transaction that has inserted the key's row into `inbox_messages` (everything else
    /// left to its default), not yet committed.
    async fn hold_uncommitted_message(&self, key: &InboxKey) -> Box<dyn Guard>;

    /// A transaction that has deleted the claim's row and inserted the key's row into
    /// `inbox_messages`, not yet committed: a completion in mid-air.
    async fn hold_open_completion(&self, claim: &Claim) -> Box<dyn Guard>;

    /// A transaction that holds the existing claim row of this key locked.
    async fn lock_claim(&self, key: &InboxKey) -> Box<dyn Guard>;

    /// Makes the due rows of this key due since `age`: sets `due_at` to the database's now less
    /// `age`, and nothing else.
    async fn backdate_due(&self, key: &InboxKey, age: Duration) {
        let _ = (key, age);
        unimplemented_here("backdate_due")
    }

    /// Sets `first_at` of all parked rows of this key to the database's now less `age`.
    async fn backdate_first(&self, key: &InboxKey, age: Duration) {
        let _ = (key, age);
        unimplemented_here("backdate_first")
    }

    /// Makes the entries of the audit about this row as old as `age`.
    async fn backdate_audit(&self, seq: ParkedSeq, age: Duration) {
        let _ = (seq, age);
        unimplemented_here("backdate_audit")
    }

    /// How many parked rows of this key are in this state.
    async fn rows_in_state(&self, key: &InboxKey, state: ParkedState) -> u64 {
        let _ = (key, state);
        unimplemented_here("rows_in_state")
    }

    /// A transaction that holds the existing parked rows of this key locked, as another worker
    /// does while it takes them. Called only with [`StoreTraits::row_locks`].
    async fn lock_parked(&self, key: &InboxKey) -> Box<dyn Guard> {
        let _ = key;
        unimplemented_here("lock_parked")
    }

    /// Holds what a sweep takes so that it runs on one instance at a time. Called only with
    /// [`StoreTraits::sweep_lock`].
    async fn hold_sweep_lock(&self) -> Box<dyn Guard> {
        unimplemented_here("hold_sweep_lock")
    }

    /// An empty database. Called only with [`StoreTraits::migrations`].
    async fn fresh_database(&self) -> Box<dyn FreshDatabase> {
        unimplemented_here("fresh_database")
    }
}

fn unimplemented_here<T>(what: &str) -> T {
    panic!("the harness promises {what} in its traits, and does not have it")
}
