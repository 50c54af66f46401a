//! The inbox in memory: a faithful model of the contract, for the simulator and for tests.
//!
//! Purpose: behave like a database behind a network. The rows live in a [`MemoryDatabase`] that
//! any number of stores (instances, one process life each) share; dropping a store with all
//! its futures is a crash, and the rows are still there. A [`StoreFaults`] says call by call
//! what goes wrong.
//!
//! Invariants: one call is one step of the database, so it is atomic; time is tokio's, so paused
//! time works; every call gives way at least once before and once after its step, so that
//! a future dropped in the middle has either happened or not happened.
//!
//! What it does not do: wait for locks. A member that meets one is answered at once.

mod copies;
mod database;
mod faults;
mod operator;
mod parking;
mod rows;
mod witness;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use inboxd_contract::{
    Actor, Arrival, Arrived, Attempt, AuditEntry, Claim, ClaimAnswer, ClaimRequest, Completion,
    DeadLetter, Explanation, InboxKey, InboxStore, Look, Notes, OwnerId, ParkedCopy, ParkedFilter,
    ParkedRow, ParkedSeq, Parking, Release, Replay, Replayed, Reschedule, Settled, StoreError,
    StoreLimits, StoreStats, SweepPolicy, SweepReport, TakeDue, TakenBatch, Token, Unpark,
};

pub use database::{MemoryDatabase, MemoryLock, MemoryTable};
pub use faults::{FaultPoint, NoFaults, ScriptedFaults, StoreCall, StoreFault, StoreFaults};
use rows::Rows;
pub use witness::{MemoryChange, MemoryFlaw, MemoryWitness};

/// Between look and claim, where they are in the wrong order.
const FLAWED_GAP: Duration = Duration::from_millis(20);

/// One instance: a connection, so to say, to a [`MemoryDatabase`].
pub struct MemoryStore {
    database: Arc<MemoryDatabase>,
    /// Asked once per call.
    faults: Arc<dyn StoreFaults>,
}

impl fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryStore").finish_non_exhaustive()
    }
}

impl MemoryStore {
    /// An instance that nothing happens to.
    pub fn new(database: Arc<MemoryDatabase>) -> Self {
        Self::with_faults(database, Arc::new(NoFaults))
    }

    /// An instance whose calls fare as `faults` says.
    pub fn with_faults(database: Arc<MemoryDatabase>, faults: Arc<dyn StoreFaults>) -> Self {
        Self { database, faults }
    }

    /// One round trip: what happens before, the step, what happens after.
    async fn call<T>(
        &self,
        call: StoreCall,
        step: impl FnOnce(&mut Rows) -> T,
    ) -> Result<T, StoreError> {
        let fault = self.faults.next(call);
        pause(fault.delay_before).await;
        if !self.database.is_available() {
            return Err(StoreError::transient("the memory database is unavailable"));
        }
        if fault.point == FaultPoint::BeforeCommit {
            return Err(StoreError::transient(format!("{call:?} failed before its commit")));
        }
        let value = self.database.step(step);
        pause(fault.delay_after).await;
        if fault.point == FaultPoint::AfterCommit {
            return Err(StoreError::transient(format!("{call:?}: the answer was lost")));
        }
        Ok(value)
    }

    /// A round trip whose failure is the failure of each member.
    async fn batch<T>(
        &self,
        call: StoreCall,
        members: usize,
        step: impl FnOnce(&mut Rows) -> Vec<Result<T, StoreError>>,
    ) -> Vec<Result<T, StoreError>> {
        if members == 0 {
            return Vec::new();
        }
        match self.call(call, step).await {
            Ok(answers) => answers,
            Err(error) => {
                (0..members).map(|_| Err(StoreError::transient(error.what.clone()))).collect()
            }
        }
    }
}

/// Gives way at least once.
async fn pause(delay: Duration) {
    if delay.is_zero() {
        tokio::task::yield_now().await;
    } else {
        tokio::time::sleep(delay).await;
    }
}

#[async_trait]
impl Notes for MemoryStore {
    async fn note(&self, key: &str) -> Result<Option<String>, StoreError> {
        self.call(StoreCall::Note, |rows| rows.notes.get(key).cloned()).await
    }

    async fn note_once(&self, key: &str, value: &str) -> Result<String, StoreError> {
        self.call(StoreCall::Note, |rows| {
            rows.notes.entry(key.to_owned()).or_insert_with(|| value.to_owned()).clone()
        })
        .await
    }

    async fn set_note(&self, key: &str, value: &str) -> Result<(), StoreError> {
        self.call(StoreCall::Note, |rows| {
            rows.notes.insert(key.to_owned(), value.to_owned());
        })
        .await
    }
}

#[async_trait]
impl InboxStore for MemoryStore {
    fn limits(&self) -> StoreLimits {
        StoreLimits { body_bytes_max: 1 << 30 }
    }

    fn describe(&self) -> String {
        String::from("memory: deduplication ends with this process")
    }

    async fn claim(
        &self,
        owner: &OwnerId,
        lease: Duration,
        requests: &[ClaimRequest],
    ) -> Vec<Result<ClaimAnswer, StoreError>> {
        let looks = match self.database.has_flaw(MemoryFlaw::LookBeforeClaim) {
            true => {
                let looks: Vec<Look> = self.database.step(|rows| {
                    requests
                        .iter()
                        .map(|request| rows.look(&request.claim.key, request.lane_id.as_ref()))
                        .collect()
                });
                tokio::time::sleep(FLAWED_GAP).await;
                Some(looks)
            }
            false => None,
        };
        let looks = looks.as_deref();
        self.batch(StoreCall::Claim, requests.len(), |rows| {
            rows.claim(owner, lease, requests, looks)
        })
        .await
    }

    async fn renew(&self, lease: Duration, claims: &[Claim]) -> Result<Vec<Token>, StoreError> {
        self.call(StoreCall::Renew, |rows| rows.renew(lease, claims)).await
    }

    async fn count_attempts(&self, claims: &[Claim]) -> Vec<Result<Attempt, StoreError>> {
        self.batch(StoreCall::CountAttempts, claims.len(), |rows| {
            claims.iter().map(|claim| rows.count(claim)).collect()
        })
        .await
    }

    async fn complete(&self, completions: &[Completion]) -> Vec<Result<Settled, StoreError>> {
        self.batch(StoreCall::Complete, completions.len(), |rows| {
            completions.iter().map(|completion| rows.complete(completion)).collect()
        })
        .await
    }

    async fn dead_letter(&self, letters: &[DeadLetter]) -> Vec<Result<Settled, StoreError>> {
        self.batch(StoreCall::DeadLetter, letters.len(), |rows| {
            letters.iter().map(|letter| rows.dead_letter(letter)).collect()
        })
        .await
    }

    async fn release(&self, releases: &[Release]) -> Vec<Result<Settled, StoreError>> {
        self.batch(StoreCall::Release, releases.len(), |rows| {
            releases.iter().map(|release| rows.release(release)).collect()
        })
        .await
    }

    async fn park(&self, parkings: &[Parking]) -> Vec<Result<Settled, StoreError>> {
        self.batch(StoreCall::Park, parkings.len(), |rows| {
            parkings.iter().map(|parking| rows.park(parking)).collect()
        })
        .await
    }

    async fn arrive(&self, arrivals: &[Arrival]) -> Result<Vec<Arrived>, StoreError> {
        if arrivals.is_empty() {
            return Ok(Vec::new());
        }
        self.call(StoreCall::Arrive, |rows| rows.arrive(arrivals)).await?
    }

    async fn take_due(
        &self,
        owner: &OwnerId,
        lease: Duration,
        request: &TakeDue,
    ) -> Result<TakenBatch, StoreError> {
        self.call(StoreCall::TakeDue, |rows| rows.take_due(owner, lease, request)).await
    }

    async fn reschedule(&self, reschedules: &[Reschedule]) -> Vec<Result<Settled, StoreError>> {
        self.batch(StoreCall::Reschedule, reschedules.len(), |rows| {
            reschedules.iter().map(|reschedule| rows.reschedule(reschedule)).collect()
        })
        .await
    }

    async fn unpark(&self, unparks: &[Unpark]) -> Vec<Result<Settled, StoreError>> {
        self.batch(StoreCall::Unpark, unparks.len(), |rows| {
            unparks.iter().map(|unpark| rows.unpark(unpark)).collect()
        })
        .await
    }

    async fn list_parked(
        &self,
        filter: &ParkedFilter,
        after: Option<ParkedSeq>,
        limit: u32,
    ) -> Result<Vec<ParkedRow>, StoreError> {
        self.call(StoreCall::Look, |rows| rows.list_parked(filter, after, limit)).await
    }

    async fn count_parked(&self, filter: &ParkedFilter, most: u64) -> Result<u64, StoreError> {
        self.call(StoreCall::Look, |rows| rows.count_parked(filter, most)).await
    }

    async fn parked_row(&self, seq: ParkedSeq) -> Result<Option<ParkedRow>, StoreError> {
        self.call(StoreCall::Look, |rows| rows.parked_row(seq)).await
    }

    async fn replay(&self, replays: &[Replay], actor: &Actor) -> Vec<Result<Replayed, StoreError>> {
        self.batch(StoreCall::Replay, replays.len(), |rows| {
            replays.iter().map(|replay| rows.replay(replay, actor)).collect()
        })
        .await
    }

    async fn discard(&self, rows: &[ParkedSeq], actor: &Actor) -> Vec<Result<bool, StoreError>> {
        self.batch(StoreCall::Discard, rows.len(), |database| {
            rows.iter().map(|seq| database.discard(*seq, actor)).collect()
        })
        .await
    }

    async fn audit(&self, before: Option<i64>, limit: u32) -> Result<Vec<AuditEntry>, StoreError> {
        self.call(StoreCall::Look, |rows| rows.audit(before, limit)).await
    }

    async fn look(&self, keys: &[InboxKey]) -> Result<Vec<Look>, StoreError> {
        self.call(StoreCall::Look, |rows| keys.iter().map(|key| rows.look(key, None)).collect())
            .await
    }

    async fn parked(&self, key: &InboxKey) -> Result<Vec<ParkedCopy>, StoreError> {
        self.call(StoreCall::Look, |rows| rows.parked(key)).await
    }

    async fn explain(&self, key: &InboxKey) -> Result<Explanation, StoreError> {
        self.call(StoreCall::Look, |rows| rows.explain(key)).await
    }

    async fn stats(&self) -> Result<StoreStats, StoreError> {
        self.call(StoreCall::Look, |rows| rows.stats()).await
    }

    async fn sweep(&self, policy: &SweepPolicy) -> Result<SweepReport, StoreError> {
        self.call(StoreCall::Sweep, |rows| rows.sweep(policy)).await
    }

    async fn ping(&self) -> Result<(), StoreError> {
        self.call(StoreCall::Ping, |_| ()).await
    }

    async fn close(&self) {}
}
