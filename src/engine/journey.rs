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
use std::time::Duration;

use futures::FutureExt as _;
use inboxd_contract::{
    Completion, DeadReason, Delivery, ErrorCode, Fingerprint, InboxKey, Look, Origin, Outcome,
    Settled,
};
use tokio::sync::{SemaphorePermit, oneshot};
use tokio::time::Instant;

use super::attempt::{Claimed, Held, Tried};
use super::budget::Permit;
use super::flights::{Entry, FlightEnd, Leader};
use super::hub::Hub;
use super::identity;
use super::lanes::Ticket;
use super::letter;
use super::progress::{Progress, Stage};
use super::settings::OnIdConflict;
use super::subscription::Shared;
use crate::telemetry::{DeliveryTrace, TraceIds};

/// Half of the delivery limit that quorum queues have by default since RabbitMQ 4: a release
/// beyond it could be the one after which the broker drops the message.
const DELIVERY_COUNT_MAX: u64 = 10;

/// What the configuration makes of a delivery before anything is asked of the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Course {
    /// Forward it.
    Forward,
    /// Forward it under an id made for this delivery: nothing is suppressed.
    ForwardUnidentified,
    /// Record it as processed without forwarding it.
    Ignore,
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
    /// Where its route leads, instead of the callback's own path.
    pub(super) path: Option<Arc<str>>,
    pub(super) progress: Progress,
    /// What follows it, where something is exported.
    pub(super) trace: Option<DeliveryTrace>,
}

impl Item {
    /// What a log line about this message carries beside its key.
    pub(super) fn ids(&self) -> TraceIds {
        let own = self.trace.as_ref().and_then(DeliveryTrace::ids);
        own.unwrap_or_else(|| TraceIds::of_message(&self.delivery.envelope))
    }

    /// The lane's key, or the record's own where lanes have none.
    pub(super) fn ordering_key(&self) -> Option<&[u8]> {
        let lane = self.lane.as_deref().filter(|lane| !lane.is_empty());
        lane.or(self.delivery.envelope.key.as_deref())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Ack(Outcome),
    Release,
}

/// What the application decided and what is still to be recorded.
#[derive(Clone)]
pub(super) enum Decision {
    Complete(Outcome),
    DeadLetter { status: u16, detail: String, attempts: u32 },
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

/// Carries one delivery to its settlement. Never panics: an attempt that does is made again.
pub(super) async fn process(shared: Arc<Shared>, mut item: Item) {
    if let Some(ticket) = &mut item.ticket {
        shared.metrics.lane_waiting(1);
        item.progress.stage(Stage::Lane);
        tokio::select! {
            biased;
            () = ticket.turn() => {}
            () = item.delivery.fence.closed() => {}
            () = shared.draining.cancelled() => {}
        }
        shared.metrics.lane_waiting(-1);
        if broken!(LanePassesEarly) {
            item.ticket = None;
        }
    }
    let mut delays = Hub::backoff(&shared.settings.retry);
    let end = loop {
        let journey = Journey { shared: &shared, item: &item };
        match AssertUnwindSafe(journey.run()).catch_unwind().await {
            Ok(end) => break end,
            Err(_) => {
                shared.metrics.panicked();
                let TraceIds { trace_id, span_id } = item.ids();
                tracing::error!(code = %ErrorCode::Bug, key = ?item.key, trace_id, span_id, "an attempt panicked; it is made again");
                let bound = delays.next().unwrap_or(shared.settings.retry.cap);
                if journey.may_go_back() || journey.sleep(shared.hub.jitter(bound)).await.is_none()
                {
                    break End::Release;
                }
            }
        }
    };
    settle(&shared, item, end);
}

/// Acks or releases, then passes the lane's turn on, then gives the permit back.
fn settle(shared: &Shared, item: Item, end: End) {
    let Item { delivery, ticket, permit, course, trace, .. } = item;
    let outcome = match end {
        End::Ack(Outcome::Processed) if course == Course::ForwardUnidentified => {
            Outcome::Unidentified
        }
        End::Ack(outcome) => outcome,
        End::Release => Outcome::Released,
    };
    shared.metrics.outcome(outcome);
    shared.metrics.settled_seconds(delivery.received_at.elapsed().as_secs_f64());
    match end {
        End::Ack(_) => delivery.acker.ack(),
        End::Release if broken!(ForgetReleaseOnCancel) => std::mem::forget(delivery.acker),
        End::Release => delivery.acker.release(),
    }
    if let Some(trace) = trace {
        trace.end(outcome);
    }
    drop(ticket);
    shared.metrics.in_flight(-1, -(permit.bytes() as i64));
    if broken!(KeepPermit) {
        std::mem::forget(permit);
    }
}

#[derive(Clone, Copy)]
pub(super) struct Journey<'a> {
    pub(super) shared: &'a Shared,
    pub(super) item: &'a Item,
}

impl<'a> Journey<'a> {
    async fn run(self) -> End {
        if self.is_stopped() {
            return End::Release;
        }
        match self.item.course {
            Course::DeadLetter(reason @ (DeadReason::BodyTooLarge | DeadReason::Unrouted)) => {
                return self.dead_letter_unless_known(reason).await;
            }
            Course::DeadLetter(_) if broken!(AckUnidentified) => {
                return End::Ack(Outcome::DeadLettered);
            }
            Course::DeadLetter(reason) => {
                return self.dead_letter_unclaimed(reason, Outcome::DeadLettered).await;
            }
            Course::Forward | Course::ForwardUnidentified | Course::Ignore => {}
        }
        loop {
            match self.shared.hub.flights.enter(&self.item.key) {
                Entry::Leader(leader) => return self.lead(leader).await,
                Entry::Follower(end) => match self.follow(end).await {
                    None => return End::Release,
                    Some(Ok(FlightEnd::Processed { fingerprint })) => {
                        return self.processed(fingerprint, Outcome::DuplicateInFlight).await;
                    }
                    Some(_) if broken!(UndecidedTwinIsDuplicate) => {
                        return End::Ack(Outcome::DuplicateInFlight);
                    }
                    Some(Ok(FlightEnd::Undecided) | Err(_)) => {}
                },
            }
        }
    }

    async fn follow(
        self,
        end: oneshot::Receiver<FlightEnd>,
    ) -> Option<Result<FlightEnd, oneshot::error::RecvError>> {
        self.item.progress.stage(Stage::Twin);
        self.unless_held_too_long(end).await
    }

    /// The one delivery of this key that is at it.
    async fn lead(self, leader: Leader) -> End {
        let mut decision: Option<Decision> = None;
        loop {
            let mut held = match self.claim(decision.is_some()).await {
                Claimed::Held(held) => held,
                Claimed::Stopped => return End::Release,
                Claimed::Processed(fingerprint) => {
                    leader.processed(fingerprint.clone());
                    let outcome = match decision {
                        Some(_) => Outcome::ClaimLost,
                        None => Outcome::Duplicate,
                    };
                    return self.processed(fingerprint, outcome).await;
                }
                Claimed::Dead(fingerprint) => {
                    drop(leader);
                    return self.dead(fingerprint).await;
                }
            };
            if broken!(MarkBeforeAnswer) {
                drop(self.complete(&held, Outcome::Processed).await);
            }
            let ignored = self.item.course == Course::Ignore;
            if ignored && held.supersedes_dead {
                // Ignoring is no reason to let a dead letter go that somebody may still want.
                self.shared.hub.release(held.lease, true).await;
                return End::Ack(Outcome::DeadDuplicate);
            }
            let tried = match decision.take() {
                Some(decided) => Tried::Decided(decided),
                None if ignored => Tried::Decided(Decision::Complete(Outcome::Unrouted)),
                None => self.attempts(&mut held).await,
            };
            let look = match tried {
                Tried::Decided(decided) => match self.record(&held, &decided).await {
                    Ok(recorded) => {
                        if recorded.end == End::Release {
                            self.shared.hub.release(held.lease, false).await;
                        } else if let Some(fingerprint) = recorded.row {
                            leader.processed(fingerprint);
                        }
                        return recorded.end;
                    }
                    Err(look) => {
                        decision = (!broken!(ForgetDecision)).then_some(decided);
                        look
                    }
                },
                Tried::Lost(look) => look,
                Tried::Again => {
                    self.shared.hub.metrics().claims_lost();
                    self.shared.hub.release(held.lease, true).await;
                    continue;
                }
                Tried::GiveUp { .. } if broken!(KeepClaimOnGiveUp) => return End::Release,
                Tried::GiveUp { attempt_back } => {
                    let attempt_back = attempt_back && !broken!(KeepAttempt);
                    self.shared.hub.release(held.lease, attempt_back).await;
                    return End::Release;
                }
            };
            self.shared.hub.metrics().claims_lost();
            if let Some(fingerprint) = look.processed {
                leader.processed(fingerprint.clone());
                return self.processed(fingerprint, Outcome::ClaimLost).await;
            }
        }
    }

    /// Commits the decision. `Err`: the claim was lost.
    async fn record(self, held: &Held<'_>, decision: &Decision) -> Result<Ending, Look> {
        self.item.progress.stage(Stage::Record);
        match decision {
            Decision::Complete(outcome) => self.complete(held, *outcome).await,
            Decision::DeadLetter { status, detail, attempts } => {
                let mut letter = letter::of(self.shared, self.item, DeadReason::Refused);
                letter.token = Some(held.lease.claim().token);
                letter.attempts = *attempts;
                letter.last_status = Some(*status);
                letter.last_error = Some(detail.clone());
                if broken!(AckBeforeDeadLetter) {
                    let hub = self.shared.hub.clone();
                    tokio::spawn(async move { drop(hub.dead_letter(letter).await) });
                    return Ok(Ending { end: End::Ack(Outcome::DeadLettered), row: None });
                }
                let Some(recorded) = self.unless_lost(self.shared.hub.dead_letter(letter)).await
                else {
                    return Ok(Ending { end: End::Release, row: None });
                };
                match recorded.answer {
                    Settled::Done => {}
                    Settled::AlreadyProcessed { fingerprint } => {
                        return Ok(Ending::row(Outcome::Duplicate, fingerprint));
                    }
                    // Our own commit, whose answer was lost.
                    Settled::Lost(Look { processed: None, dead, .. })
                        if recorded.doubtful && letter::is_among(self.item, &dead) => {}
                    Settled::Lost(look) => return Err(look),
                }
                let TraceIds { trace_id, span_id } = self.item.ids();
                tracing::warn!(code = %ErrorCode::DeadLetter, key = ?self.item.key, trace_id, span_id, status, detail, "refused by the application; kept as a dead letter");
                Ok(Ending { end: End::Ack(Outcome::DeadLettered), row: None })
            }
        }
    }

    async fn complete(self, held: &Held<'_>, outcome: Outcome) -> Result<Ending, Look> {
        let fingerprint = &self.item.fingerprint;
        let completion = Completion {
            claim: held.lease.claim().clone(),
            record: identity::record(&self.item.delivery.envelope, fingerprint.clone()),
            supersedes_dead: held.supersedes_dead,
            parked: None,
        };
        if broken!(AckBeforeCommit) {
            let hub = self.shared.hub.clone();
            tokio::spawn(async move { drop(hub.complete(&completion).await) });
            return Ok(Ending { end: End::Ack(outcome), row: None });
        }
        let recorded = self.shared.hub.complete(&completion).await;
        match recorded.answer {
            Settled::Done => Ok(Ending::row(outcome, fingerprint.clone())),
            Settled::AlreadyProcessed { fingerprint } => {
                Ok(Ending::row(Outcome::Duplicate, fingerprint))
            }
            // Our own commit, whose answer was lost.
            Settled::Lost(Look { processed: Some(row), .. })
                if recorded.doubtful
                    && !Fingerprint::conflict(row.as_ref(), fingerprint.as_ref()) =>
            {
                Ok(Ending::row(outcome, row))
            }
            Settled::Lost(look) => Err(look),
        }
    }

    /// The row exists: a duplicate of some kind, unless its content differs.
    async fn processed(self, row: Option<Fingerprint>, outcome: Outcome) -> End {
        if broken!(IgnoreConflict)
            || !Fingerprint::conflict(row.as_ref(), self.item.fingerprint.as_ref())
        {
            return End::Ack(outcome);
        }
        match self.conflict() {
            OnIdConflict::Duplicate => End::Ack(Outcome::Duplicate),
            OnIdConflict::DeadLetter => {
                self.dead_letter_unclaimed(DeadReason::IdConflict, Outcome::IdConflict).await
            }
        }
    }

    /// A dead letter has this id: the same copy, or another content, of which nothing is kept
    /// yet, whatever the policy for duplicates of what was processed.
    async fn dead(self, row: Option<Fingerprint>) -> End {
        if !Fingerprint::conflict(row.as_ref(), self.item.fingerprint.as_ref()) {
            return End::Ack(Outcome::DeadDuplicate);
        }
        self.conflict();
        self.dead_letter_unclaimed(DeadReason::IdConflict, Outcome::IdConflict).await
    }

    fn conflict(self) -> OnIdConflict {
        let on_conflict = self.shared.settings.identity.on_conflict;
        self.shared.metrics.id_conflict();
        let TraceIds { trace_id, span_id } = self.item.ids();
        tracing::warn!(
            code = %ErrorCode::IdConflict,
            key = ?self.item.key,
            trace_id,
            span_id,
            origin = %self.item.delivery.envelope.origin,
            ?on_conflict,
            "the same message id with another content"
        );
        on_conflict
    }

    /// What is never forwarded is kept, unless the inbox has the message: a body above the limit
    /// without its body, a message without a route whole.
    async fn dead_letter_unless_known(self, reason: DeadReason) -> End {
        self.item.progress.stage(Stage::Record);
        let Some(look) = self.unless_stopped(self.shared.hub.look(&self.item.key)).await else {
            return End::Release;
        };
        if let Some(fingerprint) = look.processed {
            return self.processed(fingerprint, Outcome::Duplicate).await;
        }
        let known = look.dead.iter().any(|row| {
            !Fingerprint::conflict(row.fingerprint.as_ref(), self.item.fingerprint.as_ref())
        });
        if known {
            return End::Ack(Outcome::DeadDuplicate);
        }
        self.dead_letter_unclaimed(reason, Outcome::DeadLettered).await
    }

    /// A dead letter that needs no claim: nobody else decides about this copy.
    async fn dead_letter_unclaimed(self, reason: DeadReason, outcome: Outcome) -> End {
        self.item.progress.stage(Stage::Record);
        let letter = match reason {
            DeadReason::BodyTooLarge => letter::without_body(self.shared, self.item).await,
            _ => letter::of(self.shared, self.item, reason),
        };
        match self.unless_lost(self.shared.hub.dead_letter(letter)).await {
            None => End::Release,
            Some(recorded) if recorded.answer == Settled::Done => {
                let TraceIds { trace_id, span_id } = self.item.ids();
                tracing::warn!(code = %ErrorCode::DeadLetter, key = ?self.item.key, trace_id, span_id, ?reason, "kept as a dead letter");
                End::Ack(outcome)
            }
            Some(recorded) => {
                let TraceIds { trace_id, span_id } = self.item.ids();
                tracing::error!(code = %ErrorCode::Bug, key = ?self.item.key, trace_id, span_id, answer = ?recorded.answer, "a dead letter without a claim was not written: a bug of the store; the delivery goes back");
                End::Release
            }
        }
    }

    /// Held for `hold_max`, where going back does no harm.
    pub(super) fn may_go_back(self) -> bool {
        self.hold_left() == Some(Duration::ZERO)
    }

    /// How much longer the delivery may be held; `None` where it must not go back.
    fn hold_left(self) -> Option<Duration> {
        let count = match self.item.delivery.envelope.origin {
            Origin::RabbitMq { delivery_count, .. } => delivery_count.unwrap_or(0),
            Origin::Kafka { .. } | Origin::Memory { .. } => 0,
        };
        let releasable = self.shared.releasable && count < DELIVERY_COUNT_MAX;
        let until = self.item.delivery.received_at + self.shared.settings.hold_max;
        releasable.then(|| until.saturating_duration_since(Instant::now()))
    }

    pub(super) fn is_stopped(self) -> bool {
        (!self.item.delivery.fence.is_open() && !broken!(IgnoreFence))
            || self.shared.draining.is_cancelled()
    }

    /// `None` if work was stopped first. Only for futures that may be dropped.
    pub(super) async fn unless_stopped<T>(self, future: impl Future<Output = T>) -> Option<T> {
        if self.is_stopped() {
            return None;
        }
        tokio::select! {
            biased;
            value = future => Some(value),
            () = self.item.delivery.fence.closed() => None,
            () = self.shared.draining.cancelled() => None,
        }
    }

    /// As [`Journey::unless_stopped`]; `None` too once the delivery has to go back.
    pub(super) async fn unless_held_too_long<T>(
        self,
        future: impl Future<Output = T>,
    ) -> Option<T> {
        match self.hold_left() {
            Some(left) => self.unless_stopped(tokio::time::timeout(left, future)).await?.ok(),
            None => self.unless_stopped(future).await,
        }
    }

    /// `None` if the fence was lost first: from then on nothing but a completed row is recorded.
    async fn unless_lost<T>(self, future: impl Future<Output = T>) -> Option<T> {
        if self.item.delivery.fence.is_lost() {
            return None;
        }
        tokio::select! {
            biased;
            value = future => Some(value),
            () = self.item.delivery.fence.lost() => None,
        }
    }

    pub(super) async fn sleep(self, duration: Duration) -> Option<()> {
        self.unless_stopped(tokio::time::sleep(duration)).await
    }

    pub(super) async fn slot(
        self,
        slots: &'a tokio::sync::Semaphore,
    ) -> Option<SemaphorePermit<'a>> {
        // Never closed.
        self.unless_stopped(slots.acquire()).await?.ok()
    }
}
