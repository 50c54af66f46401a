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
    Arrival, Arrived, Completion, DeadLetter, DeadReason, Delivery, ErrorCode, Fingerprint, Look,
    Origin, Outcome, ParkReason, Parking, Settled,
};
use tokio::sync::{SemaphorePermit, oneshot};
use tokio::time::Instant;

use super::arrivals::Answer;
use super::attempt::{Claimed, Held, Tried};
use super::budget::Permit;
use super::callback::Admission;
use super::flights::{Entry, FlightEnd, Leader};
use super::hub::Hub;
use super::identity;
use super::lanes::Ticket;
use super::letter;
use super::message::{Gate, Message};
use super::progress::Stage;
use super::schedule;
use super::settings::{OnBlockedLane, OnIdConflict};
use super::subscription::Shared;
use crate::telemetry::TraceIds;

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

impl Course {
    /// The application is to have it.
    pub(super) fn forwards(self) -> bool {
        matches!(self, Self::Forward | Self::ForwardUnidentified)
    }
}

/// A delivery with its identity, its permit and its place in a lane.
pub(super) struct Item {
    pub(super) message: Message,
    pub(super) delivery: Delivery,
    pub(super) ticket: Option<Ticket>,
    pub(super) permit: Permit,
    pub(super) course: Course,
    /// Where its route leads, instead of the callback's own path.
    pub(super) path: Option<Arc<str>>,
    /// The answer to its arrival, where every message is stored; it has its place already.
    pub(super) arriving: Option<oneshot::Receiver<Answer>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Ack(Outcome),
    Release,
}

/// What was decided and is still to be recorded.
#[derive(Clone)]
pub(super) enum Decision {
    Complete(Outcome),
    DeadLetter(Letter),
    /// The dead letter that the broker has: what the table is to hold.
    Published(Box<DeadLetter>),
    Park(Parked),
}

impl Decision {
    /// The application has the last word in it: it is recorded whatever happens meanwhile.
    fn is_final(&self) -> bool {
        !matches!(self, Self::Park(_))
    }
}

/// A dead letter of a message that was tried.
#[derive(Clone)]
pub(super) struct Letter {
    pub(super) reason: DeadReason,
    pub(super) status: Option<u16>,
    pub(super) detail: String,
    pub(super) attempts: u32,
}

/// A message that was tried and is to be tried later.
#[derive(Clone)]
pub(super) struct Parked {
    pub(super) reason: ParkReason,
    pub(super) delay: Duration,
    pub(super) status: Option<u16>,
    pub(super) detail: Option<String>,
    pub(super) attempts: u32,
}

/// What waiting came to.
pub(super) enum Wait<T> {
    Over(T),
    /// Nothing new may start.
    Stopped,
    /// The delivery was held for `hold_max`.
    TooLong,
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
        item.message.progress.stage(Stage::Lane);
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
    let mut arriving = item.arriving.take();
    let end = loop {
        let journey = Journey { shared: &shared, item: &item };
        match AssertUnwindSafe(journey.run(arriving.take())).catch_unwind().await {
            Ok(end) => break end,
            Err(_) => {
                shared.metrics.panicked();
                let TraceIds { trace_id, span_id } = item.message.ids();
                tracing::error!(code = %ErrorCode::Bug, key = ?item.message.key, trace_id, span_id, "an attempt panicked; it is made again");
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
    let Item { message, delivery, ticket, permit, course, .. } = item;
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
        End::Ack(_) => {
            delivery.acker.ack();
            failpoint!(InPlaceAcked);
        }
        End::Release if broken!(ForgetReleaseOnCancel) => std::mem::forget(delivery.acker),
        End::Release => delivery.acker.release(),
    }
    if let Some(trace) = message.trace {
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
    /// `arriving`: it has its place among the arrivals already.
    async fn run(self, arriving: Option<oneshot::Receiver<Answer>>) -> End {
        if let Some(arriving) = arriving {
            return self.arrived(arriving).await;
        }
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
            // It waited for its turn in the lane, or its arrival panicked.
            Course::Forward | Course::ForwardUnidentified if self.shared.stores() => {
                return self.arrive(ParkReason::Stored, 0).await;
            }
            Course::Forward | Course::ForwardUnidentified | Course::Ignore => {}
        }
        loop {
            match self.shared.hub.flights.enter(&self.item.message.key) {
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
        self.item.message.progress.stage(Stage::Twin);
        self.unless_to_go_back(end).await
    }

    /// The one delivery of this key that is at it.
    async fn lead(self, leader: Leader) -> End {
        let mut decision: Option<Decision> = None;
        let mut blocked = Blocked::new(self.shared);
        loop {
            let mut held = match self.claim(decision.is_some()).await {
                Claimed::Held(held) => held,
                Claimed::Stopped => return End::Release,
                Claimed::TooLong => return self.arrive(ParkReason::HeldTooLong, 0).await,
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
                Claimed::Parked(fingerprint) => {
                    drop(leader);
                    return self.parked_already(fingerprint).await;
                }
                Claimed::LaneBlocked(attempts) => {
                    if self.shared.settings.on_blocked_lane != OnBlockedLane::Halt {
                        return self.arrive(ParkReason::LaneBlocked, attempts).await;
                    }
                    if blocked.wait(self).await.is_none() {
                        return End::Release;
                    }
                    continue;
                }
            };
            failpoint!(InPlaceClaimed);
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
                Tried::Decided(decided) => match self.record(&held, decided).await {
                    Ok(recorded) => {
                        if recorded.end == End::Release {
                            self.shared.hub.release(held.lease, false).await;
                        } else if let Some(fingerprint) = recorded.row {
                            leader.processed(fingerprint);
                        }
                        return recorded.end;
                    }
                    Err((look, decided)) => {
                        let keep = decided.is_final() && !broken!(ForgetDecision);
                        decision = keep.then_some(decided);
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

    /// Commits the decision. `Err`: the claim was lost; what is there, and what is still to be
    /// recorded.
    async fn record(self, held: &Held<'_>, decision: Decision) -> Result<Ending, (Look, Decision)> {
        self.item.message.progress.stage(Stage::Record);
        match decision {
            Decision::Complete(outcome) => {
                let lost = |look| (look, Decision::Complete(outcome));
                self.complete(held, outcome).await.map_err(lost)
            }
            Decision::DeadLetter(Letter { reason, status, detail, attempts }) => {
                let mut letter = letter::of(self.shared, &self.item.message, reason);
                letter.attempts = attempts;
                letter.last_status = status;
                letter.last_error = Some(schedule::stored_error(&detail));
                if broken!(AckBeforeDeadLetter) {
                    letter.token = Some(held.lease.claim().token);
                    let hub = self.shared.hub.clone();
                    tokio::spawn(async move { drop(hub.dead_letter(letter).await) });
                    return Ok(Ending { end: End::Ack(Outcome::DeadLettered), row: None });
                }
                match self.publish(letter).await {
                    Some(letter) => self.bury(held, Box::new(letter)).await,
                    None => Ok(Ending { end: End::Release, row: None }),
                }
            }
            Decision::Published(letter) => self.bury(held, letter).await,
            Decision::Park(parked) => {
                if broken!(AckBeforePark) {
                    let copy = letter::copy(self.shared, &self.item.message, parked.reason);
                    let parking = Parking { claim: held.lease.claim().clone(), copy };
                    let hub = self.shared.hub.clone();
                    tokio::spawn(async move { drop(hub.park(&parking).await) });
                    return Ok(Ending { end: End::Ack(Outcome::Parked), row: None });
                }
                let lost = |look| (look, Decision::Park(parked.clone()));
                self.park(held, &parked).await.map_err(lost)
            }
        }
    }

    /// Publishes a dead letter where that is configured; what the table is to hold.
    async fn publish(self, letter: DeadLetter) -> Option<DeadLetter> {
        self.item.message.progress.stage(Stage::Publish);
        let letter = self.shared.letters.publish(self.shared, self.gate(), letter).await;
        self.item.message.progress.stage(Stage::Record);
        letter
    }

    /// Commits a dead letter of a claimed message.
    async fn bury(
        self,
        held: &Held<'_>,
        mut letter: Box<DeadLetter>,
    ) -> Result<Ending, (Look, Decision)> {
        letter.token = Some(held.lease.claim().token);
        let recorded = self.shared.hub.dead_letter((*letter).clone());
        let Some(recorded) = self.gate().unless_lost(recorded).await else {
            return Ok(Ending { end: End::Release, row: None });
        };
        match recorded.answer {
            Settled::Done => {}
            Settled::AlreadyProcessed { fingerprint } => {
                return Ok(Ending::row(Outcome::Duplicate, fingerprint));
            }
            // Our own commit, whose answer was lost.
            Settled::Lost(Look { processed: None, dead, .. })
                if recorded.doubtful && letter::is_among(&self.item.message, &dead) => {}
            Settled::Lost(look) => return Err((look, Decision::Published(letter))),
        }
        let DeadLetter { key, reason, attempts, last_status, last_error, .. } = &*letter;
        let TraceIds { trace_id, span_id } = self.item.message.ids();
        tracing::warn!(code = %ErrorCode::DeadLetter, ?key, trace_id, span_id, ?reason, attempts, status = last_status, detail = last_error, "kept as a dead letter");
        Ok(Ending { end: End::Ack(Outcome::DeadLettered), row: None })
    }

    /// Commits a copy to be forwarded later.
    async fn park(self, held: &Held<'_>, parked: &Parked) -> Result<Ending, Look> {
        let message = &self.item.message;
        let mut copy = letter::copy(self.shared, message, parked.reason);
        copy.attempts = if broken!(ForgetAttemptsOnPark) { 0 } else { parked.attempts };
        copy.delay = parked.delay;
        copy.last_status = parked.status;
        copy.last_error = parked.detail.as_deref().map(schedule::stored_error);
        let parking = Parking { claim: held.lease.claim().clone(), copy };
        failpoint!(ParkBegins);
        let parking = self.shared.hub.park(&parking);
        let Some(recorded) = self.gate().unless_lost(parking).await else {
            return Ok(Ending { end: End::Release, row: None });
        };
        failpoint!(ParkCommitted);
        let recorded = match recorded {
            Ok(recorded) => recorded,
            Err(refusal) => {
                let mut letter = letter::of_refused(self.shared, message, &refusal.to_string());
                letter.attempts = parked.attempts;
                return match self.bury(held, Box::new(letter)).await {
                    Ok(ending) => Ok(ending),
                    Err((look, _)) => Err(look),
                };
            }
        };
        match recorded.answer {
            Settled::Done => {}
            Settled::AlreadyProcessed { fingerprint } => {
                return Ok(Ending::row(Outcome::Duplicate, fingerprint));
            }
            // Our own commit, whose answer was lost.
            Settled::Lost(Look { processed: None, due, .. })
                if recorded.doubtful && due.contains(&message.fingerprint) => {}
            Settled::Lost(look) => return Err(look),
        }
        self.shared.due.within(parked.delay);
        let TraceIds { trace_id, span_id } = message.ids();
        let Parked { reason, delay, status, detail, attempts } = parked;
        tracing::info!(key = ?message.key, trace_id, span_id, ?reason, ?delay, status, detail, attempts, "parked, to be forwarded later");
        Ok(Ending { end: End::Ack(Outcome::Parked), row: None })
    }

    /// Stores a message that is not claimed here.
    async fn arrive(self, reason: ParkReason, attempts: u32) -> End {
        if self.is_stopped() {
            return End::Release;
        }
        let copy = letter::copy(self.shared, &self.item.message, reason);
        let copy = inboxd_contract::NewCopy { attempts, ..copy };
        let arrival = Arrival { key: self.item.message.key.clone(), copy };
        let fence = self.item.delivery.fence.clone();
        self.arrived(self.shared.arrivals.enter(arrival, fence)).await
    }

    async fn arrived(self, answer: oneshot::Receiver<Answer>) -> End {
        self.item.message.progress.stage(Stage::Record);
        match self.gate().unless_lost(answer).await {
            None | Some(Err(_) | Ok(Answer::Stopped)) => End::Release,
            Some(Ok(Answer::Refused(refusal))) => {
                let message = &self.item.message;
                let letter = letter::of_refused(self.shared, message, &refusal.to_string());
                self.bury_unclaimed(letter, Outcome::DeadLettered).await
            }
            Some(Ok(Answer::Arrived(arrived))) => match arrived {
                Arrived::Parked => End::Ack(Outcome::Parked),
                Arrived::Processed { fingerprint } => {
                    self.processed(fingerprint, Outcome::Duplicate).await
                }
                Arrived::Known { fingerprint } => self.parked_already(fingerprint).await,
                Arrived::Dead { fingerprint } => self.dead(fingerprint).await,
            },
        }
    }

    async fn complete(self, held: &Held<'_>, outcome: Outcome) -> Result<Ending, Look> {
        let fingerprint = &self.item.message.fingerprint;
        let completion = Completion {
            claim: held.lease.claim().clone(),
            record: identity::record(&self.item.message.envelope, fingerprint.clone()),
            supersedes_dead: held.supersedes_dead,
            parked: None,
        };
        if broken!(AckBeforeCommit) {
            let hub = self.shared.hub.clone();
            tokio::spawn(async move { drop(hub.complete(&completion).await) });
            return Ok(Ending { end: End::Ack(outcome), row: None });
        }
        failpoint!(InPlaceAccepted);
        let recorded = self.shared.hub.complete(&completion).await;
        failpoint!(InPlaceCompleted);
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
            || !Fingerprint::conflict(row.as_ref(), self.item.message.fingerprint.as_ref())
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
        if !Fingerprint::conflict(row.as_ref(), self.item.message.fingerprint.as_ref()) {
            return End::Ack(Outcome::DeadDuplicate);
        }
        self.conflict();
        self.dead_letter_unclaimed(DeadReason::IdConflict, Outcome::IdConflict).await
    }

    /// A due copy has this id: the same message, or another content, of which nothing is kept
    /// yet.
    async fn parked_already(self, row: Option<Fingerprint>) -> End {
        if !Fingerprint::conflict(row.as_ref(), self.item.message.fingerprint.as_ref()) {
            return End::Ack(Outcome::ParkedDuplicate);
        }
        match self.conflict() {
            OnIdConflict::Duplicate => End::Ack(Outcome::ParkedDuplicate),
            OnIdConflict::DeadLetter => {
                self.dead_letter_unclaimed(DeadReason::IdConflict, Outcome::IdConflict).await
            }
        }
    }

    fn conflict(self) -> OnIdConflict {
        let on_conflict = self.shared.settings.identity.on_conflict;
        self.shared.metrics.id_conflict();
        let TraceIds { trace_id, span_id } = self.item.message.ids();
        tracing::warn!(
            code = %ErrorCode::IdConflict,
            key = ?self.item.message.key,
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
        self.item.message.progress.stage(Stage::Record);
        let look = self.shared.hub.look(&self.item.message.key);
        let Some(look) = self.gate().unless_stopped(look).await else {
            return End::Release;
        };
        if let Some(fingerprint) = look.processed {
            return self.processed(fingerprint, Outcome::Duplicate).await;
        }
        let known = look.dead.iter().any(|row| {
            !Fingerprint::conflict(row.fingerprint.as_ref(), self.item.message.fingerprint.as_ref())
        });
        if known {
            return End::Ack(Outcome::DeadDuplicate);
        }
        self.dead_letter_unclaimed(reason, Outcome::DeadLettered).await
    }

    /// A dead letter that needs no claim: nobody else decides about this copy.
    async fn dead_letter_unclaimed(self, reason: DeadReason, outcome: Outcome) -> End {
        self.item.message.progress.stage(Stage::Record);
        let letter = match reason {
            DeadReason::BodyTooLarge => letter::without_body(self.shared, &self.item.message).await,
            _ => letter::of(self.shared, &self.item.message, reason),
        };
        match self.publish(letter).await {
            Some(letter) => self.bury_unclaimed(letter, outcome).await,
            None => End::Release,
        }
    }

    async fn bury_unclaimed(self, letter: DeadLetter, outcome: Outcome) -> End {
        let reason = letter.reason;
        let TraceIds { trace_id, span_id } = self.item.message.ids();
        let key = &self.item.message.key;
        match self.gate().unless_lost(self.shared.hub.dead_letter(letter)).await {
            None => End::Release,
            Some(recorded) if recorded.answer == Settled::Done => {
                tracing::warn!(code = %ErrorCode::DeadLetter, ?key, trace_id, span_id, ?reason, "kept as a dead letter");
                End::Ack(outcome)
            }
            Some(recorded) => {
                tracing::error!(code = %ErrorCode::Bug, ?key, trace_id, span_id, answer = ?recorded.answer, "a dead letter without a claim was not written: a bug of the store; the delivery goes back");
                End::Release
            }
        }
    }

    /// Held for `hold_max`, where going back does no harm.
    pub(super) fn may_go_back(self) -> bool {
        self.can_go_back() && self.hold_left().is_zero()
    }

    /// Another release may be the one after which the broker drops the message.
    pub(super) fn is_near_the_delivery_limit(self) -> bool {
        let count = match self.item.delivery.envelope.origin {
            Origin::RabbitMq { delivery_count, .. } => delivery_count.unwrap_or(0),
            Origin::Kafka { .. } | Origin::Memory { .. } => 0,
        };
        count >= DELIVERY_COUNT_MAX
    }

    fn can_go_back(self) -> bool {
        self.shared.releasable && !self.is_near_the_delivery_limit()
    }

    /// How much longer the delivery may be held.
    fn hold_left(self) -> Duration {
        let until = self.item.delivery.received_at + self.shared.settings.hold_max;
        until.saturating_duration_since(Instant::now())
    }

    pub(super) fn gate(self) -> Gate<'a> {
        Gate { fence: Some(&self.item.delivery.fence), draining: &self.shared.draining }
    }

    pub(super) fn is_stopped(self) -> bool {
        self.gate().is_stopped()
    }

    /// `None` if work was stopped first, or once the delivery has to go back. Only for futures
    /// that may be dropped.
    pub(super) async fn unless_to_go_back<T>(self, future: impl Future<Output = T>) -> Option<T> {
        match self.can_go_back() {
            true => {
                let bounded = tokio::time::timeout(self.hold_left(), future);
                self.gate().unless_stopped(bounded).await?.ok()
            }
            false => self.gate().unless_stopped(future).await,
        }
    }

    pub(super) async fn sleep(self, duration: Duration) -> Option<()> {
        self.gate().unless_stopped(tokio::time::sleep(duration)).await
    }

    /// The right to make an attempt, `made` of which count under this claim already; `None`: it
    /// must not wait for it in place.
    pub(super) async fn admission(self, attempts: u32, made: u32) -> Wait<Option<Admission<'a>>> {
        let (callback, key) = (&self.shared.callback, &self.item.message.key);
        let admitted = async {
            match made {
                0 => Some(callback.admit(attempts <= 1, key).await),
                _ => callback.admit_in_place(key).await,
            }
        };
        self.unless_held_too_long(admitted).await
    }

    pub(super) async fn slot(self, slots: &'a tokio::sync::Semaphore) -> Wait<SemaphorePermit<'a>> {
        match self.unless_held_too_long(slots.acquire()).await {
            Wait::Over(Ok(slot)) => Wait::Over(slot),
            Wait::TooLong => Wait::TooLong,
            // Slots are never closed.
            Wait::Over(Err(_)) | Wait::Stopped => Wait::Stopped,
        }
    }

    async fn unless_held_too_long<T>(self, future: impl Future<Output = T>) -> Wait<T> {
        let bounded = tokio::time::timeout(self.hold_left(), future);
        match self.gate().unless_stopped(bounded).await {
            Some(Ok(value)) => Wait::Over(value),
            Some(Err(_)) => Wait::TooLong,
            None => Wait::Stopped,
        }
    }
}

/// A delivery whose lane is blocked, where the lane halts: it waits unsettled, for as long as it
/// takes, and says so once it is held for longer than `hold_max`.
struct Blocked<'a> {
    shared: &'a Shared,
    counted: bool,
    delays: backon::ExponentialBackoff,
}

impl<'a> Blocked<'a> {
    fn new(shared: &'a Shared) -> Self {
        let schedule = super::settings::RetrySettings {
            initial: Duration::from_millis(100),
            cap: shared.hub.lease() / 5,
            ..super::settings::RetrySettings::IN_PLACE
        };
        Self { shared, counted: false, delays: Hub::backoff(&schedule) }
    }

    async fn wait(&mut self, journey: Journey<'_>) -> Option<()> {
        let message = &journey.item.message;
        if journey.hold_left().is_zero() && !std::mem::replace(&mut self.counted, true) {
            self.shared.metrics.held(1);
            let TraceIds { trace_id, span_id } = message.ids();
            tracing::warn!(code = %ErrorCode::HeldTooLong, key = ?message.key, trace_id, span_id, "held longer than hold_max: its lane is blocked, and on_blocked_lane is halt");
        }
        let delay = self.delays.next().unwrap_or(self.shared.hub.lease() / 5);
        message.progress.stage(Stage::LaneBlocked { again_in: delay });
        journey.sleep(delay).await
    }
}

impl Drop for Blocked<'_> {
    fn drop(&mut self) {
        if self.counted {
            self.shared.metrics.held(-1);
        }
    }
}
