//! What all subscriptions of a process share: calls of the store in batches, leases, single
//! flight, randomness.
//!
//! Invariants: a claim is asked for again with the same token until there is an answer; what the
//! application decided is recorded for as long as it takes; one member that
//! meets a lock is retried alone, so that it stalls nobody. The hub holds no lock across an await.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use backon::{BackoffBuilder as _, ExponentialBackoff, ExponentialBuilder};
use futures::future::BoxFuture;
use inboxd_contract::{
    self as contract, Arrival, Arrived, Attempt, ClaimAnswer, ClaimRequest, Completion, DeadLetter,
    ErrorCode, Fingerprint, InboxKey, InboxStore, LaneId, Look, OwnerId, Parking, Release,
    Reschedule, Settled, StoreError, TakeDue, TakenBatch, Token, Unpark,
};
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::alone::Alone;
use super::batcher::Batcher;
use super::flights::Flights;
use super::keeper::{Keeper, Lease};
use super::letter;
use super::settings::{HubSettings, Jitter, RetrySettings};
use crate::telemetry::{Metrics, StoreCall};

/// Members of one call that carries keys and small columns.
const BATCH_MEMBERS_MAX: usize = 256;
/// Members of one call that carries bodies.
const BATCH_BODIES_MAX: usize = 8;
const STORE_RETRY: RetrySettings = RetrySettings {
    initial: Duration::from_millis(50),
    cap: Duration::from_secs(2),
    ..RetrySettings::IN_PLACE
};

/// What the store's calls need.
struct Context {
    store: Arc<dyn InboxStore>,
    owner: OwnerId,
    lease: Duration,
    retention: Duration,
    metrics: Metrics,
}

/// The shared part of the engine.
pub struct Hub {
    context: Arc<Context>,
    claims: Batcher<ClaimRequest, ClaimAnswer>,
    counts: Batcher<contract::Claim, Attempt>,
    completions: Batcher<Completion, Settled>,
    dead_letters: Batcher<DeadLetter, Settled>,
    releases: Batcher<Release, Settled>,
    parkings: Batcher<Parking, Settled>,
    reschedules: Batcher<Reschedule, Settled>,
    unparks: Batcher<Unpark, Settled>,
    alone_claims: Alone,
    alone_writes: Alone,
    keeper: Keeper,
    pub(super) flights: Flights,
    random: Mutex<SmallRng>,
    trouble: Trouble,
    stop: CancellationToken,
    renewals: Mutex<Option<JoinHandle<()>>>,
}

/// What asking for a claim came to.
pub(super) enum Claim {
    /// This is the answer; the lease is present exactly if it holds.
    Answered { answer: ClaimAnswer, lease: Option<Lease> },
    /// Somebody holds a lock on it. Nothing is claimed: ask again later, alone.
    Locked,
    /// Given up, since nothing more may start.
    Stopped,
}

/// What a write came to.
pub(super) struct Recorded<T> {
    pub(super) answer: T,
    /// An earlier try ended without an answer: it may have been committed.
    pub(super) doubtful: bool,
}

/// What the store came to with a member that it may refuse for good.
enum Persisted<T> {
    Recorded(Recorded<T>),
    Refused(StoreError),
}

/// What to do about a member that the store refuses for good.
enum Refusal<I> {
    /// Ask again.
    Again,
    /// Write this instead, once.
    Instead(I),
    /// Give it up.
    GiveUp,
}

type Answers<'a, O> = BoxFuture<'a, Vec<Result<O, StoreError>>>;
type Op<I, O> = for<'a> fn(&'a Context, &'a [I]) -> Answers<'a, O>;

const CLAIM: Op<ClaimRequest, ClaimAnswer> =
    |context, members| context.store.claim(&context.owner, context.lease, members);
const COUNT: Op<contract::Claim, Attempt> =
    |context, members| context.store.count_attempts(members);
const COMPLETE: Op<Completion, Settled> = |context, members| context.store.complete(members);
const DEAD_LETTER: Op<DeadLetter, Settled> = |context, members| context.store.dead_letter(members);
const RELEASE: Op<Release, Settled> = |context, members| context.store.release(members);
const PARK: Op<Parking, Settled> = |context, members| context.store.park(members);
const RESCHEDULE: Op<Reschedule, Settled> = |context, members| context.store.reschedule(members);
const UNPARK: Op<Unpark, Settled> = |context, members| context.store.unpark(members);

impl Hub {
    /// Starts the batchers and the renewals.
    pub fn start(store: Arc<dyn InboxStore>, settings: HubSettings, metrics: Metrics) -> Arc<Self> {
        let HubSettings { owner, lease, retention, random_seed } = settings;
        let context = Arc::new(Context { store: store.clone(), owner, lease, retention, metrics });
        let keeper = Keeper::new(lease);
        let stop = CancellationToken::new();
        let renewals = tokio::spawn(keeper.clone().run(store, stop.clone()));
        Arc::new(Self {
            claims: batcher(&context, StoreCall::Claim, BATCH_MEMBERS_MAX, CLAIM),
            counts: batcher(&context, StoreCall::CountAttempts, BATCH_MEMBERS_MAX, COUNT),
            completions: batcher(&context, StoreCall::Complete, BATCH_MEMBERS_MAX, COMPLETE),
            dead_letters: batcher(&context, StoreCall::DeadLetter, BATCH_BODIES_MAX, DEAD_LETTER),
            releases: batcher(&context, StoreCall::Release, BATCH_MEMBERS_MAX, RELEASE),
            parkings: batcher(&context, StoreCall::Park, BATCH_BODIES_MAX, PARK),
            reschedules: batcher(&context, StoreCall::Reschedule, BATCH_MEMBERS_MAX, RESCHEDULE),
            unparks: batcher(&context, StoreCall::Unpark, BATCH_MEMBERS_MAX, UNPARK),
            context,
            alone_claims: Alone::new(),
            alone_writes: Alone::new(),
            keeper,
            flights: Flights::default(),
            random: Mutex::new(SmallRng::seed_from_u64(random_seed)),
            trouble: Trouble::default(),
            stop,
            renewals: Mutex::new(Some(renewals)),
        })
    }

    /// Ends the renewals. Called after the last subscription was drained.
    pub async fn close(&self) {
        self.stop.cancel();
        let renewals = self.renewals.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(renewals) = renewals
            && let Err(error) = renewals.await
        {
            tracing::error!(code = %ErrorCode::Bug, %error, "the renewal of leases ended by a panic");
        }
    }

    /// This process life, as claims name it.
    pub fn owner(&self) -> &OwnerId {
        &self.context.owner
    }

    pub(super) fn store(&self) -> &dyn InboxStore {
        &*self.context.store
    }

    pub(super) fn lease(&self) -> Duration {
        self.context.lease
    }

    pub(super) fn retention(&self) -> Duration {
        self.context.retention
    }

    pub(super) fn metrics(&self) -> &Metrics {
        &self.context.metrics
    }

    /// A claim with a token of its own, asked for until there is an answer or `stopped` says so
    /// between two tries.
    pub(super) async fn claim(
        &self,
        key: &InboxKey,
        fingerprint: Option<Fingerprint>,
        position: Option<String>,
        lane_id: Option<LaneId>,
        alone: bool,
        stopped: impl Fn() -> bool,
    ) -> Claim {
        let claim = contract::Claim { key: key.clone(), token: self.token() };
        // Before the first call with this token: the lease ends here no later than there.
        let sent_at = Instant::now();
        let request = ClaimRequest { claim: claim.clone(), fingerprint, position, lane_id };
        let mut retry = Retry { alone, ..Retry::new() };
        // An earlier call may have been committed: only its own token finds that claim again.
        let mut doubtful = false;
        loop {
            let alone = retry.alone.then_some((&self.alone_claims, key));
            match self.call(&self.claims, CLAIM, &request, alone).await {
                Ok(answer) => {
                    let sent_at = if broken!(LeaseFromAnswer) { Instant::now() } else { sent_at };
                    let lease = answer.is_held().then(|| self.keeper.hold(claim, sent_at));
                    return Claim::Answered { answer, lease };
                }
                Err(error) if error.locked && !doubtful => return Claim::Locked,
                Err(error) if stopped() => {
                    tracing::debug!(%error, "a claim was given up");
                    // It may have been committed, and its answer lost.
                    self.release_claim(claim, true).await;
                    return Claim::Stopped;
                }
                Err(error) => {
                    doubtful |= !error.locked;
                    self.wait(&mut retry, "claim", &error).await;
                }
            }
        }
    }

    /// +1 attempt, for as long as it takes; `None` if `stopped` says so between two tries.
    pub(super) async fn count_attempt(
        &self,
        claim: &contract::Claim,
        stopped: impl Fn() -> bool,
    ) -> Option<Attempt> {
        let mut retry = Retry::new();
        loop {
            let alone = retry.alone.then_some((&self.alone_writes, &claim.key));
            match self.call(&self.counts, COUNT, claim, alone).await {
                Ok(answer) => return Some(answer),
                Err(_) if stopped() => return None,
                Err(error) => self.wait(&mut retry, "count an attempt", &error).await,
            }
        }
    }

    /// Moves the message to `inbox_messages`, for as long as it takes.
    pub(super) async fn complete(&self, completion: &Completion) -> Recorded<Settled> {
        let key = &completion.claim.key;
        self.persist("complete", key, &self.completions, COMPLETE, completion).await
    }

    /// Commits a dead letter, for as long as it takes. What the database refuses to take whole is
    /// cut.
    pub(super) async fn dead_letter(&self, letter: DeadLetter) -> Recorded<Settled> {
        let cut = |error: &StoreError| Refusal::Instead(letter::cut(&letter, &error.to_string()));
        let (key, letters) = (&letter.key, &self.dead_letters);
        match self.persist_or("dead-letter", key, letters, DEAD_LETTER, &letter, cut).await {
            Persisted::Recorded(recorded) => {
                failpoint!(LetterKept);
                recorded
            }
            Persisted::Refused(_) => unreachable!("a letter that is refused is cut"),
        }
    }

    /// Commits a copy to be forwarded later, for as long as it takes. `Err`: the database will
    /// never take it.
    pub(super) async fn park(&self, parking: &Parking) -> Result<Recorded<Settled>, StoreError> {
        let (key, parkings) = (&parking.claim.key, &self.parkings);
        let give_up = |_: &StoreError| Refusal::GiveUp;
        match self.persist_or("park", key, parkings, PARK, parking, give_up).await {
            Persisted::Recorded(recorded) => Ok(recorded),
            Persisted::Refused(error) => Err(error),
        }
    }

    /// Gives a taken row back, for as long as it takes.
    pub(super) async fn reschedule(&self, reschedule: &Reschedule) -> Recorded<Settled> {
        let key = &reschedule.claim.key;
        self.persist("reschedule", key, &self.reschedules, RESCHEDULE, reschedule).await
    }

    /// Removes a taken row whose message is processed, for as long as it takes.
    pub(super) async fn unpark(&self, unpark: &Unpark) -> Recorded<Settled> {
        let key = &unpark.claim.key;
        self.persist("unpark", key, &self.unparks, UNPARK, unpark).await
    }

    /// Takes due rows, once; with each comes its lease. An answer that is lost leaves claims that
    /// run out.
    ///
    /// # Cancel safety
    /// As an answer that is lost.
    pub(super) async fn take_due(
        &self,
        request: &TakeDue,
    ) -> Result<(TakenBatch, Vec<Lease>), StoreError> {
        let Context { store, owner, lease, metrics, .. } = &*self.context;
        let sent_at = Instant::now();
        let call = tokio::time::timeout(*lease, store.take_due(owner, *lease, request));
        let answer = call.await.unwrap_or_else(|_| Err(too_late()));
        let members = answer.as_ref().map_or(1, |batch| batch.rows.len());
        let seconds = sent_at.elapsed().as_secs_f64();
        metrics.store_call(StoreCall::TakeDue, members, seconds, usize::from(answer.is_err()));
        let batch = answer.inspect_err(|error| self.trouble.tell("take due messages", error))?;
        let leases = batch.rows.iter().map(|row| self.keeper.hold(row.claim.clone(), sent_at));
        let leases = leases.collect();
        Ok((batch, leases))
    }

    /// Commits copies of messages that nobody has claimed, all or none, once.
    pub(super) async fn arrive(&self, arrivals: &[Arrival]) -> Result<Vec<Arrived>, StoreError> {
        let Context { store, lease, metrics, .. } = &*self.context;
        let started = Instant::now();
        let answer = tokio::time::timeout(*lease, store.arrive(arrivals)).await;
        let answer = answer.unwrap_or_else(|_| Err(too_late()));
        let failed = if answer.is_err() { arrivals.len() } else { 0 };
        let seconds = started.elapsed().as_secs_f64();
        metrics.store_call(StoreCall::Arrive, arrivals.len(), seconds, failed);
        answer.inspect_err(|error| {
            if !error.locked {
                self.trouble.tell("store arrivals", error);
            }
        })
    }

    /// What is there of one message, asked for as long as it takes.
    pub(super) async fn look(&self, key: &InboxKey) -> Look {
        let mut retry = Retry::new();
        loop {
            match self.store().look(std::slice::from_ref(key)).await {
                Ok(mut looks) => return looks.pop().unwrap_or_default(),
                Err(error) => self.wait(&mut retry, "look", &error).await,
            }
        }
    }

    /// Gives a claim up. One try: if it fails, the claim runs out by itself.
    pub(super) async fn release(&self, lease: Lease, attempt_back: bool) {
        self.release_claim(lease.claim().clone(), attempt_back).await;
    }

    /// The same, of a claim whose lease stays in hand.
    pub(super) async fn release_claim(&self, claim: contract::Claim, attempt_back: bool) {
        let release = Release { claim, attempt_back };
        if let Err(error) = self.releases.submit(release).await {
            tracing::debug!(%error, "a claim was not released; it runs out by itself");
        }
    }

    /// Tries to make a lease valid again that has no time left.
    pub(super) async fn renew(&self, lease: &Lease) {
        self.keeper.renew(self.store(), std::slice::from_ref(lease.claim())).await;
    }

    /// Exponential backoff; sample it with [`Hub::jitter`].
    pub(super) fn backoff(settings: &RetrySettings) -> ExponentialBackoff {
        ExponentialBuilder::new()
            .with_min_delay(settings.initial)
            .with_factor(settings.factor)
            .with_max_delay(settings.cap)
            .without_max_times()
            .build()
    }

    /// Full jitter: anything between nothing and the bound.
    pub(super) fn jitter(&self, bound: Duration) -> Duration {
        self.rng(|random| random.random_range(Duration::ZERO..=bound))
    }

    /// A delay below this bound, as the settings have it.
    pub(super) fn delay(&self, jitter: Jitter, bound: Duration) -> Duration {
        match jitter {
            Jitter::Full => self.jitter(bound),
            Jitter::None => bound,
        }
    }

    /// Any lane.
    pub(super) fn lane(&self) -> LaneId {
        LaneId(self.rng(|random| random.random()))
    }

    /// Random bytes for an id made here.
    pub(super) fn uuid(&self) -> uuid::Uuid {
        uuid::Builder::from_random_bytes(self.rng(|random| random.random())).into_uuid()
    }

    pub(super) fn token(&self) -> Token {
        Token(self.uuid())
    }

    fn rng<T>(&self, draw: impl FnOnce(&mut SmallRng) -> T) -> T {
        draw(&mut self.random.lock().unwrap_or_else(PoisonError::into_inner))
    }

    async fn persist<I: Clone + Send + 'static, O: Send + 'static>(
        &self,
        what: &'static str,
        key: &InboxKey,
        batcher: &Batcher<I, O>,
        op: Op<I, O>,
        member: &I,
    ) -> Recorded<O> {
        match self.persist_or(what, key, batcher, op, member, |_| Refusal::Again).await {
            Persisted::Recorded(recorded) => recorded,
            Persisted::Refused(_) => unreachable!("it is asked again"),
        }
    }

    /// `refusal`: what to do where the store refuses the member for good.
    async fn persist_or<I: Clone + Send + 'static, O: Send + 'static>(
        &self,
        what: &'static str,
        key: &InboxKey,
        batcher: &Batcher<I, O>,
        op: Op<I, O>,
        member: &I,
        refusal: impl Fn(&StoreError) -> Refusal<I>,
    ) -> Persisted<O> {
        let mut retry = Retry::new();
        let mut doubtful = false;
        let mut instead = None;
        loop {
            let member = instead.as_ref().unwrap_or(member);
            let alone = retry.alone.then_some((&self.alone_writes, key));
            match self.call(batcher, op, member, alone).await {
                Ok(answer) => return Persisted::Recorded(Recorded { answer, doubtful }),
                Err(error) => {
                    doubtful |= !error.locked;
                    if instead.is_none() && error.refused {
                        match refusal(&error) {
                            Refusal::Again => {}
                            Refusal::Instead(member) => instead = Some(member),
                            Refusal::GiveUp => return Persisted::Refused(error),
                        }
                    }
                    self.wait(&mut retry, what, &error).await;
                }
            }
        }
    }

    async fn call<I: Clone + Send + 'static, O: Send + 'static>(
        &self,
        batcher: &Batcher<I, O>,
        op: Op<I, O>,
        member: &I,
        alone: Option<(&Alone, &InboxKey)>,
    ) -> Result<O, StoreError> {
        let Some((calls, key)) = alone else {
            return batcher.submit(member.clone()).await;
        };
        let _turn = calls.turn(&key.consumer_id).await;
        bounded(&self.context, op, std::slice::from_ref(member))
            .await
            .pop()
            .unwrap_or_else(|| Err(StoreError::transient("the store gave no answer")))
    }

    /// How long a call that failed so often in a row is put off.
    pub(super) fn patience(&self, failures: u32) -> Duration {
        let bound = STORE_RETRY.initial * 2_u32.pow(failures.saturating_sub(1).min(8));
        self.jitter(bound.min(STORE_RETRY.cap)).max(Duration::from_millis(5))
    }

    async fn wait(&self, retry: &mut Retry, what: &'static str, error: &StoreError) {
        retry.failures += 1;
        // A member that spoils its batch again and again is tried on its own in between.
        retry.alone = error.locked || (retry.failures >= 3 && retry.failures % 2 == 1);
        if !error.locked {
            self.trouble.tell(what, error);
        }
        let bound = retry.delays.next().unwrap_or(STORE_RETRY.cap);
        tokio::time::sleep(self.jitter(bound).max(Duration::from_millis(5))).await;
    }
}

/// The renewals end with the hub, closed or not.
impl Drop for Hub {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

struct Retry {
    delays: ExponentialBackoff,
    failures: u32,
    alone: bool,
}

impl Retry {
    fn new() -> Self {
        Self { delays: Hub::backoff(&STORE_RETRY), failures: 0, alone: false }
    }
}

/// A database that is away fails every message: it is logged once in a while, not once each.
#[derive(Default)]
struct Trouble(Mutex<Option<(Instant, u64)>>);

impl Trouble {
    const EVERY: Duration = Duration::from_secs(5);

    fn tell(&self, what: &str, error: &StoreError) {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        match &mut *last {
            Some((told_at, untold)) if now < *told_at + Self::EVERY => *untold += 1,
            _ => {
                let untold = last.map_or(0, |(_, untold)| untold);
                *last = Some((now, 0));
                let cause = std::error::Error::source(error).map(ToString::to_string);
                let code = error.code();
                if error.is_transient() {
                    tracing::warn!(%code, what, %error, cause, untold, "the inbox cannot be written; trying again");
                } else {
                    tracing::error!(%code, what, %error, cause, untold, "the inbox refuses a write; trying again");
                }
            }
        }
    }
}

/// A call that takes longer than a lease is given up, its connection with it: one that hangs
/// would stall all messages. Every call may be repeated.
async fn bounded<I, O>(
    context: &Context,
    op: Op<I, O>,
    members: &[I],
) -> Vec<Result<O, StoreError>> {
    match tokio::time::timeout(context.lease, op(context, members)).await {
        Ok(answers) => answers,
        Err(_) => members.iter().map(|_| Err(too_late())).collect(),
    }
}

fn too_late() -> StoreError {
    StoreError::transient("the database did not answer in time")
}

fn batcher<I: Send + Sync + 'static, O: Send + 'static>(
    context: &Arc<Context>,
    call: StoreCall,
    members_max: usize,
    op: Op<I, O>,
) -> Batcher<I, O> {
    let context = context.clone();
    Batcher::start(members_max, move |members: Vec<I>| {
        let context = context.clone();
        async move {
            let started = Instant::now();
            let answers = bounded(&context, op, &members).await;
            let failed = answers.iter().filter(|answer| answer.is_err()).count();
            let seconds = started.elapsed().as_secs_f64();
            context.metrics.store_call(call, members.len(), seconds, failed);
            answers
        }
    })
}
