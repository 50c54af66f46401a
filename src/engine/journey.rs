//! The way of one delivery, from its lane's turn to its settlement.
//!
//! Invariants: nothing is acked before a commit said so; no claim is dropped
//! silently but by being cut; what the application has decided is not asked again, even if the
//! claim was lost before it was recorded; nothing starts when the fence is closed or
//! the process drains; nothing but a completed row is recorded when the fence is lost.
//!
//! What happens when the process dies, step by step:
//!
//! | died after | what is left | what comes of it |
//! |---|---|---|
//! | taking the delivery | nothing | delivered again |
//! | claim | a claim that runs out | delivered again, waits for the lease, forwarded |
//! | POST begun | the same | forwarded again, same key: the window that a sidecar cannot close |
//! | answer 2xx | the same | the same |
//! | completion committed | the row | delivered again, a duplicate, acked |
//! | refused, dead letter committed | the dead row | Kafka: acked as `dead_duplicate`; RabbitMQ: asked once more |
//! | ack sent, not arrived | the row | delivered again, a duplicate, acked |

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use futures::FutureExt as _;
use inboxd_contract::{
    Attempt, ClaimAnswer, Completion, DeadLetter, DeadReason, Delivery, Fingerprint,
    ForwardRequest, InboxKey, Look, Outcome, RetryReason, Settled, Verdict,
};
use sha2::{Digest as _, Sha256};
use tokio::sync::SemaphorePermit;
use tokio::time::Instant;

use super::budget::Permit;
use super::flights::{Entry, FlightEnd, Leader};
use super::hub::Hub;
use super::identity;
use super::keeper::Lease;
use super::lanes::Ticket;
use super::settings::OnIdConflict;
use super::subscription::Shared;

/// The least time between two looks at a message that another instance has claimed.
const BUSY_WAIT_MIN: Duration = Duration::from_millis(20);

/// What the configuration makes of a delivery before anything is asked of the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Course {
    /// Forward it.
    Forward,
    /// Forward it under an id made for this delivery: nothing is suppressed.
    ForwardUnidentified,
    /// Keep it as a dead letter.
    DeadLetter(DeadReason),
}

/// A delivery with its identity, its permit and its place in a lane.
pub(super) struct Item {
    pub(super) delivery: Delivery,
    pub(super) key: InboxKey,
    pub(super) fingerprint: Option<Fingerprint>,
    pub(super) lane: Option<Vec<u8>>,
    pub(super) ticket: Option<Ticket>,
    pub(super) permit: Permit,
    pub(super) course: Course,
}

impl Item {
    /// The lane's key, or the record's own where lanes have none.
    fn ordering_key(&self) -> Option<&[u8]> {
        let lane = self.lane.as_deref().filter(|lane| !lane.is_empty());
        lane.or(self.delivery.envelope.key.as_deref())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Ack(Outcome),
    Release,
}

/// What the application (or the configuration) decided and what is still to be recorded.
enum Decision {
    Complete(Outcome),
    DeadLetter { status: u16, detail: String },
}

/// A claim in hand.
struct Held<'a> {
    lease: Lease,
    leader: Leader,
    attempts: u32,
    supersedes_dead: bool,
    _slot: Option<SemaphorePermit<'a>>,
}

/// How a recorded decision ends the delivery.
struct Ending {
    end: End,
    /// The fingerprint of the row that exists now, if one does.
    row: Option<Option<Fingerprint>>,
}

impl Ending {
    fn row(outcome: Outcome, fingerprint: Option<Fingerprint>) -> Self {
        Self { end: End::Ack(outcome), row: Some(fingerprint) }
    }
}

/// How the attempts at the application ended.
enum Tried {
    Decided(Decision),
    /// The claim is gone: look at what is there.
    Lost(Look),
    /// The lease ran out before the attempt began: claim from the start.
    Again,
    /// No verdict, and none to be waited for.
    GiveUp {
        attempt_back: bool,
    },
}

enum Lead<'a> {
    Held(Held<'a>),
    End(End),
}

/// Carries one delivery to its settlement. Never panics: an attempt that does is made again.
pub(super) async fn process(shared: Arc<Shared>, mut item: Item) {
    if let Some(ticket) = &mut item.ticket {
        shared.metrics.lane_waiting(1);
        let turn = async {
            tokio::select! {
                biased;
                () = ticket.turn() => {}
                () = item.delivery.fence.closed() => {}
                () = shared.draining.cancelled() => {}
            }
        };
        turn.await;
        shared.metrics.lane_waiting(-1);
    }
    let mut delays = Hub::backoff(&shared.settings.retry);
    let end = loop {
        let journey = Journey { shared: &shared, item: &item };
        match AssertUnwindSafe(journey.run()).catch_unwind().await {
            Ok(end) => break end,
            Err(_) => {
                shared.metrics.panicked();
                tracing::error!(key = ?item.key, "an attempt panicked; it is made again");
                let bound = delays.next().unwrap_or(shared.settings.retry.cap);
                if journey.sleep(shared.hub.jitter(bound)).await.is_none() {
                    break End::Release;
                }
            }
        }
    };
    settle(&shared, item, end);
}

/// Acks or releases, then passes the lane's turn on, then gives the permit back.
fn settle(shared: &Shared, item: Item, end: End) {
    let Item { delivery, ticket, permit, course, .. } = item;
    let outcome = match end {
        End::Ack(Outcome::Processed) if course == Course::ForwardUnidentified => {
            Outcome::Unidentified
        }
        End::Ack(outcome) => outcome,
        End::Release => Outcome::Released,
    };
    shared.metrics.outcome(outcome);
    match end {
        End::Ack(_) => delivery.acker.ack(),
        End::Release => delivery.acker.release(),
    }
    drop(ticket);
    shared.metrics.in_flight(-1, -(permit.bytes() as i64));
}

#[derive(Clone, Copy)]
struct Journey<'a> {
    shared: &'a Shared,
    item: &'a Item,
}

impl<'a> Journey<'a> {
    async fn run(self) -> End {
        if self.is_stopped() {
            return End::Release;
        }
        if let Course::DeadLetter(reason) = self.item.course {
            return self.dead_letter_unclaimed(reason, Outcome::DeadLettered).await;
        }
        let mut decision = None;
        loop {
            let mut held = match self.lead().await {
                Lead::Held(held) => held,
                Lead::End(end) => return end,
            };
            let tried = match decision.take() {
                Some(decided) => Tried::Decided(decided),
                None => self.attempts(&mut held).await,
            };
            let look = match tried {
                Tried::Decided(decided) => match self.record(&held, &decided).await {
                    Ok(recorded) => {
                        if recorded.end == End::Release {
                            self.shared.hub.release(held.lease, false).await;
                        } else if let Some(fingerprint) = recorded.row {
                            held.leader.processed(fingerprint);
                        }
                        return recorded.end;
                    }
                    Err(look) => {
                        decision = Some(decided);
                        look
                    }
                },
                Tried::Lost(look) => look,
                Tried::Again => {
                    self.shared.hub.metrics().claims_lost();
                    self.shared.hub.release(held.lease, true).await;
                    continue;
                }
                Tried::GiveUp { attempt_back } => {
                    self.shared.hub.release(held.lease, attempt_back).await;
                    return End::Release;
                }
            };
            self.shared.hub.metrics().claims_lost();
            if let Some(fingerprint) = look.processed {
                held.leader.processed(fingerprint.clone());
                return self.known(fingerprint, Outcome::ClaimLost).await;
            }
        }
    }

    /// Becomes the one delivery of this key that is at it, with a claim; or finds out that there
    /// is nothing to do.
    async fn lead(self) -> Lead<'a> {
        let hub = &self.shared.hub;
        loop {
            let leader = match hub.flights.enter(&self.item.key) {
                Entry::Leader(leader) => leader,
                Entry::Follower(end) => match self.unless_stopped(end).await {
                    None => return Lead::End(End::Release),
                    Some(Ok(FlightEnd::Processed { fingerprint })) => {
                        let end = self.known(fingerprint, Outcome::DuplicateInFlight).await;
                        return Lead::End(end);
                    }
                    Some(Ok(FlightEnd::Undecided) | Err(_)) => continue,
                },
            };
            loop {
                let Some(slot) = self.slot(&self.shared.claim_slots).await else {
                    return Lead::End(End::Release);
                };
                let envelope = &self.item.delivery.envelope;
                let claimed = hub
                    .claim(
                        &self.item.key,
                        self.item.fingerprint.clone(),
                        envelope.origin.position(),
                        || self.is_stopped(),
                    )
                    .await;
                let Some(claimed) = claimed else { return Lead::End(End::Release) };
                let (attempts, supersedes_dead) = match claimed.answer {
                    ClaimAnswer::Fresh { attempts } => (attempts, false),
                    ClaimAnswer::Dead { held: Some(attempts), .. } => (attempts, true),
                    ClaimAnswer::Processed { fingerprint } => {
                        leader.processed(fingerprint.clone());
                        return Lead::End(self.known(fingerprint, Outcome::Duplicate).await);
                    }
                    ClaimAnswer::Dead { fingerprint, held: None } => {
                        return Lead::End(self.known(fingerprint, Outcome::DeadDuplicate).await);
                    }
                    ClaimAnswer::Busy { wait } => {
                        drop(slot);
                        let wait = wait.min(hub.lease() / 10).max(BUSY_WAIT_MIN);
                        if self.sleep(wait).await.is_none() {
                            return Lead::End(End::Release);
                        }
                        continue;
                    }
                };
                let Some(lease) = claimed.lease else {
                    unreachable!("an answer that holds comes with a lease")
                };
                return Lead::Held(Held {
                    lease,
                    leader,
                    attempts,
                    supersedes_dead,
                    _slot: Some(slot),
                });
            }
        }
    }

    /// POSTs until the application decides, the claim is lost or nothing more may start.
    async fn attempts(self, held: &mut Held<'a>) -> Tried {
        let settings = &self.shared.settings;
        let mut delays = Hub::backoff(&settings.retry);
        let mut hold = Hold { shared: self.shared, counted: false };
        let mut counted = true;
        loop {
            let Some(post_slot) = self.slot(&self.shared.post_slots).await else {
                return Tried::GiveUp { attempt_back: counted };
            };
            if !counted {
                let count = self.shared.hub.count_attempt(held.lease.claim());
                match self.unless_stopped(count).await {
                    Some(Attempt::Counted(attempts)) => held.attempts = attempts,
                    Some(Attempt::Lost(look)) => return Tried::Lost(look),
                    None => return Tried::GiveUp { attempt_back: false },
                }
            }
            if let Some(tried) = self.ensure_valid(&held.lease).await {
                return tried;
            }
            let verdict = self.post(held.attempts).await;
            drop(post_slot);
            held._slot = None;
            counted = false;
            let (reason, after) = match verdict {
                Verdict::Accepted { .. } => {
                    return Tried::Decided(Decision::Complete(Outcome::Processed));
                }
                Verdict::Drop { .. } => {
                    return Tried::Decided(Decision::Complete(Outcome::Dropped));
                }
                Verdict::Refused { status, detail } => {
                    return Tried::Decided(Decision::DeadLetter { status, detail });
                }
                Verdict::Park { .. } => (RetryReason::Busy, None),
                Verdict::Retry { reason, after, .. } => (reason, after),
            };
            if self.shared.draining.is_cancelled() {
                // The application was told to stop together with us: no attempt was made.
                return Tried::GiveUp { attempt_back: reason == RetryReason::Unreachable };
            }
            if self.item.delivery.received_at.elapsed() >= settings.hold_max {
                if self.shared.releasable {
                    return Tried::GiveUp { attempt_back: false };
                }
                hold.tell(&self.item.key, held.attempts);
            }
            let bound = delays.next().unwrap_or(settings.retry.cap);
            // The application may ask for more time than the backoff, never for less.
            let delay = self.shared.hub.jitter(bound).max(after.unwrap_or_default());
            if self.sleep(delay).await.is_none() {
                return Tried::GiveUp { attempt_back: false };
            }
        }
    }

    /// A forward begins only with time left on the lease. Tries to get some; `Some` if
    /// the attempt cannot go on.
    async fn ensure_valid(self, lease: &Lease) -> Option<Tried> {
        while !lease.has_time_left() {
            self.shared.hub.renew(lease).await;
            if lease.has_time_left() {
                break;
            }
            match self.shared.hub.store().look(std::slice::from_ref(&self.item.key)).await {
                Ok(looks) if looks.iter().any(|look| look.processed.is_some()) => {
                    return looks.into_iter().next().map(Tried::Lost);
                }
                // Taken over, or locked by somebody.
                Ok(_) => return Some(Tried::Again),
                Err(_) => {}
            }
            if self.sleep(self.shared.hub.lease() / 10).await.is_none() {
                return Some(Tried::GiveUp { attempt_back: true });
            }
        }
        if self.is_stopped() { Some(Tried::GiveUp { attempt_back: true }) } else { None }
    }

    async fn post(self, attempt: u32) -> Verdict {
        let started = Instant::now();
        let request = ForwardRequest {
            envelope: &self.item.delivery.envelope,
            key: &self.item.key,
            subscription: &self.shared.settings.name,
            attempt,
            ordering_key: self.item.ordering_key(),
            timeout: self.shared.settings.callback_timeout,
        };
        let verdict = self.shared.forwarder.forward(request).await;
        self.shared.metrics.attempt_seconds(started.elapsed().as_secs_f64());
        self.shared.metrics.verdict(verdict.as_str());
        let gone = matches!(verdict, Verdict::Retry { reason: RetryReason::Gone, .. });
        self.shared.endpoint_gone(gone);
        if let Verdict::Retry { reason, status, detail, .. } = &verdict {
            self.shared.metrics.retry(*reason);
            tracing::debug!(key = ?self.item.key, attempt, ?reason, status, detail, "to be tried again");
        }
        verdict
    }

    /// Commits the decision. `Err`: the claim was lost.
    async fn record(self, held: &Held<'_>, decision: &Decision) -> Result<Ending, Look> {
        let fingerprint = &self.item.fingerprint;
        match decision {
            Decision::Complete(outcome) => {
                let envelope = &self.item.delivery.envelope;
                let completion = Completion {
                    claim: held.lease.claim().clone(),
                    record: identity::record(envelope, fingerprint.clone()),
                    supersedes_dead: held.supersedes_dead,
                };
                let recorded = self.shared.hub.complete(&completion).await;
                match recorded.answer {
                    Settled::Done => Ok(Ending::row(*outcome, fingerprint.clone())),
                    Settled::AlreadyProcessed { fingerprint } => {
                        Ok(Ending::row(Outcome::Duplicate, fingerprint))
                    }
                    Settled::Lost(Look { processed: Some(row), .. }) if recorded.doubtful => {
                        Ok(Ending::row(*outcome, row))
                    }
                    Settled::Lost(look) => Err(look),
                }
            }
            Decision::DeadLetter { status, detail } => {
                let mut letter = self.letter(DeadReason::Refused);
                letter.token = Some(held.lease.claim().token);
                letter.attempts = held.attempts;
                letter.last_status = Some(*status);
                letter.last_error = Some(detail.clone());
                let Some(recorded) = self.unless_lost(self.shared.hub.dead_letter(&letter)).await
                else {
                    return Ok(Ending { end: End::Release, row: None });
                };
                match recorded.answer {
                    Settled::Done => {}
                    Settled::AlreadyProcessed { fingerprint } => {
                        return Ok(Ending::row(Outcome::Duplicate, fingerprint));
                    }
                    // Our own commit, whose answer was lost.
                    Settled::Lost(Look { processed: None, dead })
                        if recorded.doubtful && !dead.is_empty() => {}
                    Settled::Lost(look) => return Err(look),
                }
                tracing::warn!(key = ?self.item.key, status, detail, "refused by the application; kept as a dead letter");
                Ok(Ending { end: End::Ack(Outcome::DeadLettered), row: None })
            }
        }
    }

    /// The id is known to the inbox: a duplicate of some kind, unless its content differs.
    async fn known(self, row: Option<Fingerprint>, outcome: Outcome) -> End {
        if !Fingerprint::conflict(row.as_ref(), self.item.fingerprint.as_ref()) {
            return End::Ack(outcome);
        }
        self.shared.metrics.id_conflict();
        let on_conflict = self.shared.settings.identity.on_conflict;
        tracing::warn!(
            key = ?self.item.key,
            origin = %self.item.delivery.envelope.origin,
            ?on_conflict,
            "the same message id with another content"
        );
        match on_conflict {
            OnIdConflict::Duplicate => End::Ack(Outcome::Duplicate),
            OnIdConflict::DeadLetter => {
                self.dead_letter_unclaimed(DeadReason::IdConflict, Outcome::IdConflict).await
            }
        }
    }

    /// A dead letter that needs no claim: nobody else decides about this copy.
    async fn dead_letter_unclaimed(self, reason: DeadReason, outcome: Outcome) -> End {
        let letter = self.letter(reason);
        if self.unless_lost(self.shared.hub.dead_letter(&letter)).await.is_none() {
            return End::Release;
        }
        tracing::warn!(key = ?self.item.key, ?reason, "kept as a dead letter");
        End::Ack(outcome)
    }

    fn letter(self, reason: DeadReason) -> DeadLetter {
        let envelope = &self.item.delivery.envelope;
        let body_kept = reason != DeadReason::BodyTooLarge;
        let last_error = (!body_kept).then(|| {
            let body = envelope.body.as_deref().unwrap_or_default();
            let digest = hex::encode(Sha256::digest(body));
            format!("body of {} bytes is above body_bytes_max; sha256 {digest}", body.len())
        });
        DeadLetter {
            key: self.item.key.clone(),
            token: None,
            subscription: self.shared.settings.name.clone(),
            lane: self.item.lane.clone(),
            envelope: envelope.clone(),
            body_kept,
            fingerprint: self.item.fingerprint.clone(),
            attempts: 0,
            last_status: None,
            last_error,
            reason,
        }
    }

    fn is_stopped(self) -> bool {
        !self.item.delivery.fence.is_open() || self.shared.draining.is_cancelled()
    }

    /// `None` if work was stopped first. Only for futures that may be dropped.
    async fn unless_stopped<T>(self, future: impl Future<Output = T>) -> Option<T> {
        if self.is_stopped() {
            return None;
        }
        tokio::select! {
            value = future => Some(value),
            () = self.item.delivery.fence.closed() => None,
            () = self.shared.draining.cancelled() => None,
        }
    }

    /// `None` if the fence was lost first: from then on nothing but a completed row is recorded.
    async fn unless_lost<T>(self, future: impl Future<Output = T>) -> Option<T> {
        if self.item.delivery.fence.is_lost() {
            return None;
        }
        tokio::select! {
            value = future => Some(value),
            () = self.item.delivery.fence.lost() => None,
        }
    }

    async fn sleep(self, duration: Duration) -> Option<()> {
        self.unless_stopped(tokio::time::sleep(duration)).await
    }

    async fn slot(self, slots: &'a tokio::sync::Semaphore) -> Option<SemaphorePermit<'a>> {
        // Never closed.
        self.unless_stopped(slots.acquire()).await?.ok()
    }
}

/// Counts a delivery among those held beyond `hold_max`, and says so once.
struct Hold<'a> {
    shared: &'a Shared,
    counted: bool,
}

impl Hold<'_> {
    fn tell(&mut self, key: &InboxKey, attempts: u32) {
        if !self.counted {
            self.counted = true;
            self.shared.metrics.held(self.shared.held.fetch_add(1, Relaxed) + 1);
            tracing::warn!(?key, attempts, "held longer than hold_max: tried on in place");
        }
    }
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        if self.counted {
            self.shared.metrics.held(self.shared.held.fetch_sub(1, Relaxed) - 1);
        }
    }
}
