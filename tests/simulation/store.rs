//! The store as one process sees it: every call passes the gate on its way there and back, and
//! fares as the seed says.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use async_trait::async_trait;
use inboxd_contract::{
    Actor, Arrival, Arrived, Attempt, AuditEntry, Claim, ClaimAnswer, ClaimRequest, Completion,
    DeadLetter, Explanation, InboxKey, InboxStore, Look, Notes, OwnerId, ParkedCopy, ParkedFilter,
    ParkedRow, ParkedSeq, Parking, Release, Replay, Replayed, Reschedule, Settled, StoreError,
    StoreLimits, StoreStats, SweepPolicy, SweepReport, TakeDue, TakenBatch, Token, Unpark,
};
use inboxd_memory::{FaultPoint, MemoryDatabase, MemoryStore, StoreCall, StoreFault, StoreFaults};

use super::chance::Chance;
use super::life::Life;
use super::oracle::Oracle;
use super::plan::StoreProfile;

/// Draws how each call fares, while there is chaos.
pub struct Faults {
    pub life: Arc<Life>,
    pub chance: Chance,
    pub profile: StoreProfile,
    pub lease: Duration,
    pub calm: Arc<AtomicBool>,
    pub oracle: Oracle,
}

impl Faults {
    /// Often just below a lease, after which the engine gives a call up.
    fn slow(&self) -> Duration {
        match self.chance.hits(500) {
            true => self.lease.mul_f32(0.6) + self.chance.up_to(self.lease.mul_f32(0.35)),
            false => self.chance.up_to(self.lease),
        }
    }
}

impl StoreFaults for Faults {
    fn next(&self, call: StoreCall) -> StoreFault {
        let profile = &self.profile;
        let mut fault = StoreFault {
            point: FaultPoint::Never,
            delay_before: self.chance.up_to(profile.delay_max),
            delay_after: self.chance.up_to(profile.delay_max),
        };
        if self.calm.load(SeqCst) {
            return fault;
        }
        if self.chance.hits(profile.before_commit) {
            fault.point = FaultPoint::BeforeCommit;
        } else if self.chance.hits(profile.after_commit) {
            fault.point = FaultPoint::AfterCommit;
        }
        if self.chance.hits(profile.slow) {
            fault.delay_before = self.slow();
        }
        if self.chance.hits(profile.slow) {
            fault.delay_after = self.slow();
        }
        if self.chance.hits(profile.hangs) {
            fault.delay_before = self.lease * 3;
        }
        if fault.point != FaultPoint::Never {
            self.oracle.store_failed(&self.life, call, fault.point);
        }
        fault
    }
}

/// A call that leaves claims behind if it is not answered.
struct Unanswered<'a>(&'a Life);

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        self.0.release_failed.store(true, SeqCst);
    }
}

pub struct SimStore {
    pub life: Arc<Life>,
    pub inner: MemoryStore,
    pub oracle: Oracle,
}

impl SimStore {
    pub fn new(life: Arc<Life>, database: Arc<MemoryDatabase>, faults: Faults) -> Self {
        let oracle = faults.oracle.clone();
        Self { life, oracle, inner: MemoryStore::with_faults(database, Arc::new(faults)) }
    }

    /// A call that changes attempts: where an answer is missing, one may have been counted.
    async fn counted<T>(
        &self,
        what: &str,
        keys: Vec<InboxKey>,
        call: impl Future<Output = Vec<Result<T, StoreError>>>,
    ) -> Vec<Result<T, StoreError>> {
        self.oracle.may_skip(&keys);
        let answers = self.through(what, call).await;
        let answered = keys.iter().zip(&answers).filter(|(_, answer)| answer.is_ok());
        self.oracle.does_not_skip(answered.map(|(key, _)| key));
        answers
    }

    async fn through<T>(&self, what: &str, call: impl Future<Output = T>) -> T {
        self.life.pass(what).await;
        let answer = call.await;
        self.life.pass(what).await;
        answer
    }
}

#[async_trait]
impl Notes for SimStore {
    async fn note(&self, key: &str) -> Result<Option<String>, StoreError> {
        self.through("note", self.inner.note(key)).await
    }

    async fn note_once(&self, key: &str, value: &str) -> Result<String, StoreError> {
        self.through("note_once", self.inner.note_once(key, value)).await
    }

    async fn set_note(&self, key: &str, value: &str) -> Result<(), StoreError> {
        self.through("set_note", self.inner.set_note(key, value)).await
    }
}

#[async_trait]
impl InboxStore for SimStore {
    fn limits(&self) -> StoreLimits {
        self.inner.limits()
    }

    fn describe(&self) -> String {
        self.inner.describe()
    }

    async fn claim(
        &self,
        owner: &OwnerId,
        lease: Duration,
        requests: &[ClaimRequest],
    ) -> Vec<Result<ClaimAnswer, StoreError>> {
        let keys = requests.iter().map(|request| request.claim.key.clone()).collect();
        self.counted("claim", keys, self.inner.claim(owner, lease, requests)).await
    }

    async fn renew(&self, lease: Duration, claims: &[Claim]) -> Result<Vec<Token>, StoreError> {
        self.through("renew", self.inner.renew(lease, claims)).await
    }

    async fn count_attempts(&self, claims: &[Claim]) -> Vec<Result<Attempt, StoreError>> {
        let keys = claims.iter().map(|claim| claim.key.clone()).collect();
        self.counted("count", keys, self.inner.count_attempts(claims)).await
    }

    async fn complete(&self, completions: &[Completion]) -> Vec<Result<Settled, StoreError>> {
        // Those whose answer does not arrive may be found committed later.
        let members = completions.len() as u64;
        self.oracle.life(&self.life, |life| life.completions_unanswered += members);
        let answers = self.through("complete", self.inner.complete(completions)).await;
        let answered = answers.iter().filter(|answer| answer.is_ok()).count() as u64;
        self.oracle.life(&self.life, |life| life.completions_unanswered -= answered);
        answers
    }

    async fn dead_letter(&self, letters: &[DeadLetter]) -> Vec<Result<Settled, StoreError>> {
        self.through("dead_letter", self.inner.dead_letter(letters)).await
    }

    async fn release(&self, releases: &[Release]) -> Vec<Result<Settled, StoreError>> {
        let keys = releases.iter().map(|release| release.claim.key.clone()).collect();
        let answers = self.counted("release", keys, self.inner.release(releases)).await;
        if answers.iter().any(Result::is_err) {
            self.life.release_failed.store(true, SeqCst);
        }
        answers
    }

    async fn park(&self, parkings: &[Parking]) -> Vec<Result<Settled, StoreError>> {
        // Those whose answer does not arrive may be found committed later.
        let members = parkings.len() as u64;
        self.oracle.life(&self.life, |life| life.completions_unanswered += members);
        // What waited in vain for its turn was counted; parked, it is no more.
        let keys: Vec<InboxKey> =
            parkings.iter().map(|parking| parking.claim.key.clone()).collect();
        self.oracle.may_skip(&keys);
        let answers = self.through("park", self.inner.park(parkings)).await;
        let done =
            keys.iter().zip(&answers).filter(|(_, answer)| matches!(answer, Ok(Settled::Done)));
        self.oracle.does_not_skip(done.map(|(key, _)| key));
        let answered = answers.iter().filter(|answer| answer.is_ok()).count() as u64;
        self.oracle.life(&self.life, |life| life.completions_unanswered -= answered);
        answers
    }

    async fn arrive(&self, arrivals: &[Arrival]) -> Result<Vec<Arrived>, StoreError> {
        self.through("arrive", self.inner.arrive(arrivals)).await
    }

    async fn take_due(
        &self,
        owner: &OwnerId,
        lease: Duration,
        request: &TakeDue,
    ) -> Result<TakenBatch, StoreError> {
        // Claims whose answer is lost run out by themselves.
        let unanswered = Unanswered(&self.life);
        let answer = self.through("take", self.inner.take_due(owner, lease, request)).await;
        if let Ok(batch) = &answer {
            std::mem::forget(unanswered);
            self.oracle.does_not_skip(batch.rows.iter().map(|row| &row.claim.key));
        }
        answer
    }

    async fn reschedule(&self, reschedules: &[Reschedule]) -> Vec<Result<Settled, StoreError>> {
        let keys = reschedules.iter().map(|reschedule| reschedule.claim.key.clone()).collect();
        self.counted("reschedule", keys, self.inner.reschedule(reschedules)).await
    }

    async fn unpark(&self, unparks: &[Unpark]) -> Vec<Result<Settled, StoreError>> {
        self.through("unpark", self.inner.unpark(unparks)).await
    }

    async fn list_parked(
        &self,
        filter: &ParkedFilter,
        after: Option<ParkedSeq>,
        limit: u32,
    ) -> Result<Vec<ParkedRow>, StoreError> {
        self.through("list", self.inner.list_parked(filter, after, limit)).await
    }

    async fn count_parked(&self, filter: &ParkedFilter, most: u64) -> Result<u64, StoreError> {
        self.through("count parked", self.inner.count_parked(filter, most)).await
    }

    async fn parked_row(&self, seq: ParkedSeq) -> Result<Option<ParkedRow>, StoreError> {
        self.through("parked row", self.inner.parked_row(seq)).await
    }

    async fn replay(&self, replays: &[Replay], actor: &Actor) -> Vec<Result<Replayed, StoreError>> {
        self.through("replay", self.inner.replay(replays, actor)).await
    }

    async fn discard(&self, rows: &[ParkedSeq], actor: &Actor) -> Vec<Result<bool, StoreError>> {
        self.through("discard", self.inner.discard(rows, actor)).await
    }

    async fn audit(&self, before: Option<i64>, limit: u32) -> Result<Vec<AuditEntry>, StoreError> {
        self.through("audit", self.inner.audit(before, limit)).await
    }

    async fn look(&self, keys: &[InboxKey]) -> Result<Vec<Look>, StoreError> {
        self.through("look", self.inner.look(keys)).await
    }

    async fn parked(&self, key: &InboxKey) -> Result<Vec<ParkedCopy>, StoreError> {
        self.through("parked", self.inner.parked(key)).await
    }

    async fn explain(&self, key: &InboxKey) -> Result<Explanation, StoreError> {
        self.through("explain", self.inner.explain(key)).await
    }

    async fn stats(&self) -> Result<StoreStats, StoreError> {
        self.through("stats", self.inner.stats()).await
    }

    async fn sweep(&self, policy: &SweepPolicy) -> Result<SweepReport, StoreError> {
        self.through("sweep", self.inner.sweep(policy)).await
    }

    async fn ping(&self) -> Result<(), StoreError> {
        self.through("ping", self.inner.ping()).await
    }

    async fn close(&self) {
        self.inner.close().await;
    }
}
