//! The way of one parked message that was taken, to its processed row, its next time or its
//! dead letter.
//!
//! Invariants: a forward begins only under the row's claim with time left on its lease; whatever
//! comes of it is committed in one transaction that begins with that claim; a row whose claim
//! was lost is somebody else's.
//!
//! | died after | what is left | what comes of it |
//! |---|---|---|
//! | taking | the due row, a claim that runs out | taken again after the lease |
//! | POST begun, answer 2xx | the same | forwarded again, same key: the window that a sidecar cannot close |
//! | completion committed | the row of `inbox_messages` | nothing more to do |
//! | rescheduling committed | the due row, its attempts | taken when it is due |
//! | dead letter committed | the dead row | nothing more to do |

use std::time::Duration;

use inboxd_contract::{
    Completion, DeadLetter, DeadReason, ErrorCode, Fingerprint, Look, Outcome, ParkedSeq,
    Reschedule, Settled, Taken, Unpark, Verdict,
};
use tokio::time::Instant;

use super::attempt::{self, Validity};
use super::callback::Judged;
use super::hub::Recorded;
use super::intake::INLINE_BYTES_MAX;
use super::keeper::Lease;
use super::message::{Gate, Message};
use super::progress::Stage;
use super::routes::{self, Routed};
use super::schedule::{self, Failed};
use super::settings::OnIdConflict;
use super::subscription::Shared;
use super::worker::Place;
use super::{identity, letter};
use crate::telemetry::{ParkedResult, TraceIds};

/// How long a row is put off for which there is no room to wait for a slot.
const ROOM_AGAIN_MIN: Duration = Duration::from_secs(1);
const ROOM_AGAIN_JITTER: Duration = Duration::from_secs(4);

/// A due row in hand.
pub(super) struct TakenRow {
    pub(super) message: Message,
    pub(super) lease: Lease,
    seq: ParkedSeq,
    /// This one included.
    attempts: u32,
    /// The row of `inbox_messages`, where it exists.
    processed: Option<Option<Fingerprint>>,
    place: Place,
}

/// What becomes of a row's place in its lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    /// The row is gone, or blocks nothing any more.
    Leaves(ParkedResult),
    /// What follows has to wait.
    Stays(ParkedResult),
}

/// A failure that is not the end.
struct Failure {
    failed: Failed,
    status: Option<u16>,
    detail: String,
    after: Option<Duration>,
}

impl TakenRow {
    pub(super) fn new(shared: &Shared, taken: Taken, lease: Lease, place: Place) -> Self {
        let Taken { claim, seq, attempts, lane_id, copy, first_ago, processed } = taken;
        let envelope = std::sync::Arc::new(copy.envelope);
        let received_at = Instant::now();
        let progress =
            shared.table.enter_parked(claim.key.clone(), envelope.clone(), seq, attempts);
        let message = Message {
            trace: shared.metrics.delivery(&envelope, &claim.key),
            key: claim.key,
            fingerprint: copy.fingerprint,
            envelope,
            lane: copy.lane,
            lane_id,
            received_at,
            first_before: first_ago,
            progress,
        };
        Self { message, lease, seq, attempts, processed, place }
    }

    /// Tells what became of it.
    pub(super) fn end(self, shared: &Shared, fate: Fate) {
        let (Fate::Leaves(result) | Fate::Stays(result)) = fate;
        shared.metrics.parked_settled(result);
        if let Some(trace) = self.message.trace {
            trace.end(outcome_of(result));
        }
    }

    /// Carries it to what becomes of it.
    pub(super) async fn process(&self, shared: &Shared) -> Fate {
        if let Some(fingerprint) = &self.processed
            && !broken!(WorkerIgnoresRow)
        {
            return self.found_processed(shared, fingerprint.as_ref()).await;
        }
        match route(shared, &self.message).await {
            Routed::Callback => self.forward(shared, None).await,
            Routed::Path(path) => self.forward(shared, Some(path)).await,
            Routed::Ignored => self.complete(shared, ParkedResult::Unrouted).await,
            Routed::Nowhere => {
                let letter = letter::of(shared, &self.message, DeadReason::Unrouted);
                self.dead_letter(shared, letter, ParkedResult::DeadLettered).await
            }
        }
    }

    fn gate<'a>(&self, shared: &'a Shared) -> Gate<'a> {
        Gate { fence: None, draining: &shared.draining }
    }

    async fn forward(&self, shared: &Shared, path: Option<std::sync::Arc<str>>) -> Fate {
        let (gate, message) = (self.gate(shared), &self.message);
        message.progress.stage(Stage::Slot);
        let is_first = self.attempts <= 1;
        let waits = match is_first {
            true => None,
            false => match self.place.wait_further() {
                None => return self.make_room(shared).await,
                waits => waits,
            },
        };
        let admitted = shared.callback.admit(is_first, &message.key);
        let Some(admission) = gate.unless_stopped(admitted).await else {
            return self.give_back(shared, true).await;
        };
        drop(waits);
        match attempt::ensure_valid(shared, gate, message, &self.lease).await {
            Validity::Valid => {}
            Validity::Stopped => return self.give_back(shared, true).await,
            Validity::Lost(look) => return self.lost(shared, &look),
        }
        message.progress.at_callback(self.attempts);
        let (verdict, judged) =
            attempt::post(shared, message, path.as_ref(), self.attempts, admission).await;
        self.after(shared, verdict, judged).await
    }

    async fn after(&self, shared: &Shared, verdict: Verdict, judged: Judged) -> Fate {
        let failure = match verdict {
            Verdict::Accepted { .. } => {
                return self.complete(shared, ParkedResult::Processed).await;
            }
            Verdict::Drop { .. } => return self.complete(shared, ParkedResult::Dropped).await,
            Verdict::Refused { status, detail } => {
                let mut letter = letter::of(shared, &self.message, DeadReason::Refused);
                letter.last_status = Some(status);
                letter.last_error = Some(detail);
                return self.dead_letter(shared, letter, ParkedResult::DeadLettered).await;
            }
            Verdict::Park { status } => Failure {
                failed: Failed::Asked,
                status: Some(status),
                detail: "the application asked to have it later".into(),
                after: None,
            },
            Verdict::Retry { reason, status, after, detail } => {
                let detail = attempt::last_answer(reason, status, &detail);
                Failure { failed: Failed::Retry(reason), status, detail, after }
            }
        };
        let counts = judged.counts_as_attempt;
        let is_over = shared.draining.is_cancelled() || judged.rests;
        let (park, first_ago) = (&shared.settings.park, self.message.first_ago());
        if !counts && is_over && first_ago < park.elapsed_max {
            // It says nothing of the message, and nothing is taken before the callback is back
            // but for a probe: the row stays due.
            let fate = self.give_back(shared, true).await;
            shared.due.now();
            return fate;
        }
        match schedule::death(park, self.attempts, first_ago, failure.failed) {
            Some(reason) => {
                let mut letter = letter::of(shared, &self.message, reason);
                letter.last_status = failure.status;
                letter.last_error = Some(failure.detail);
                self.dead_letter(shared, letter, ParkedResult::DeadLettered).await
            }
            None => self.put_off(shared, failure, !counts).await,
        }
    }

    /// Due again later.
    async fn put_off(&self, shared: &Shared, failure: Failure, attempt_back: bool) -> Fate {
        let settings = &shared.settings;
        let bound = match failure.failed {
            Failed::Asked => schedule::parking_bound(settings, self.attempts),
            Failed::Retry(_) => schedule::worker_bound(settings, self.attempts),
        };
        let delay = shared.hub.delay(settings.park.jitter, bound);
        let delay = delay.max(failure.after.unwrap_or_default());
        self.message.progress.again(failure.detail.clone(), delay);
        self.message.progress.stage(Stage::Record);
        let reschedule = Reschedule {
            claim: self.lease.claim().clone(),
            seq: self.seq,
            attempt_back,
            delay,
            last_status: failure.status,
            last_error: Some(schedule::stored_error(&failure.detail)),
        };
        failpoint!(RescheduleBegins);
        let Recorded { answer, doubtful } = shared.hub.reschedule(&reschedule).await;
        failpoint!(RescheduleCommitted);
        match answer {
            Settled::Lost(look) if !(doubtful && self.is_due(&look)) => self.lost(shared, &look),
            Settled::Done | Settled::AlreadyProcessed { .. } | Settled::Lost(_) => {
                shared.due.within(delay);
                Fate::Stays(ParkedResult::Rescheduled)
            }
        }
    }

    async fn complete(&self, shared: &Shared, result: ParkedResult) -> Fate {
        let message = &self.message;
        message.progress.stage(Stage::Record);
        let completion = Completion {
            claim: self.lease.claim().clone(),
            record: identity::record(&message.envelope, message.fingerprint.clone()),
            supersedes_dead: false,
            parked: Some(self.seq).filter(|_| !broken!(CompleteKeepsRow)),
        };
        failpoint!(WorkerAccepted);
        let Recorded { answer, doubtful } = shared.hub.complete(&completion).await;
        failpoint!(WorkerCompleted);
        match answer {
            Settled::Done => Fate::Leaves(result),
            Settled::AlreadyProcessed { .. } => Fate::Leaves(ParkedResult::Duplicate),
            // Our own commit, whose answer was lost.
            Settled::Lost(Look { processed: Some(row), .. })
                if doubtful && !self.conflicts(row.as_ref()) =>
            {
                Fate::Leaves(result)
            }
            Settled::Lost(look) => self.lost(shared, &look),
        }
    }

    /// Processed meanwhile, by a delivery or another copy: nothing is left to do, unless that was
    /// another content.
    async fn found_processed(&self, shared: &Shared, row: Option<&Fingerprint>) -> Fate {
        self.message.progress.stage(Stage::Record);
        if self.conflicts(row) {
            shared.metrics.id_conflict();
            let on_conflict = shared.settings.identity.on_conflict;
            tracing::warn!(code = %ErrorCode::IdConflict, key = ?self.message.key, ?on_conflict, "a parked message's id was processed with another content");
            if on_conflict == OnIdConflict::DeadLetter {
                let letter = letter::of(shared, &self.message, DeadReason::IdConflict);
                return self.dead_letter(shared, letter, ParkedResult::IdConflict).await;
            }
        }
        let unpark = Unpark { claim: self.lease.claim().clone(), seq: self.seq };
        let Recorded { answer, doubtful } = shared.hub.unpark(&unpark).await;
        match answer {
            Settled::Lost(look) if !doubtful => self.lost(shared, &look),
            _ => Fate::Leaves(ParkedResult::Duplicate),
        }
    }

    async fn dead_letter(&self, shared: &Shared, letter: DeadLetter, result: ParkedResult) -> Fate {
        let (gate, message) = (self.gate(shared), &self.message);
        let mut letter = letter;
        letter.token = Some(self.lease.claim().token);
        letter.attempts = self.attempts;
        let reason = letter.reason;
        message.progress.stage(Stage::Publish);
        let Some(letter) = shared.letters.publish(shared, gate, letter).await else {
            return self.give_back(shared, false).await;
        };
        message.progress.stage(Stage::Record);
        let blocks = letter.lane_id.is_some();
        let Recorded { answer, doubtful } = shared.hub.dead_letter(letter).await;
        match answer {
            Settled::Done => {}
            Settled::AlreadyProcessed { .. } => return Fate::Leaves(ParkedResult::Duplicate),
            // Our own commit, whose answer was lost.
            Settled::Lost(Look { processed: None, dead, .. })
                if doubtful && letter::is_among(message, &dead) => {}
            Settled::Lost(look) => return self.lost(shared, &look),
        }
        let TraceIds { trace_id, span_id } = message.ids();
        tracing::warn!(code = %ErrorCode::DeadLetter, key = ?message.key, trace_id, span_id, ?reason, attempts = self.attempts, "a parked message is kept as a dead letter");
        match blocks {
            true => Fate::Stays(result),
            false => Fate::Leaves(result),
        }
    }

    /// Too many that have failed before wait for a slot: due again soon, no attempt made.
    async fn make_room(&self, shared: &Shared) -> Fate {
        self.message.progress.stage(Stage::Record);
        let reschedule = Reschedule {
            claim: self.lease.claim().clone(),
            seq: self.seq,
            attempt_back: true,
            delay: ROOM_AGAIN_MIN + shared.hub.jitter(ROOM_AGAIN_JITTER),
            last_status: None,
            last_error: None,
        };
        let Recorded { answer, doubtful } = shared.hub.reschedule(&reschedule).await;
        match answer {
            Settled::Lost(look) if !(doubtful && self.is_due(&look)) => self.lost(shared, &look),
            _ => Fate::Stays(ParkedResult::Released),
        }
    }

    /// Free for whoever takes it next.
    async fn give_back(&self, shared: &Shared, attempt_back: bool) -> Fate {
        shared.hub.release_claim(self.lease.claim().clone(), attempt_back).await;
        Fate::Stays(ParkedResult::Released)
    }

    /// Somebody else has it now.
    fn lost(&self, shared: &Shared, look: &Look) -> Fate {
        shared.hub.metrics().claims_lost();
        let TraceIds { trace_id, span_id } = self.message.ids();
        tracing::debug!(key = ?self.message.key, trace_id, span_id, ?look, "the claim of a parked message was lost");
        Fate::Stays(ParkedResult::ClaimLost)
    }

    fn conflicts(&self, row: Option<&Fingerprint>) -> bool {
        Fingerprint::conflict(row, self.message.fingerprint.as_ref())
    }

    fn is_due(&self, look: &Look) -> bool {
        look.processed.is_none() && look.due.contains(&self.message.fingerprint)
    }
}

/// The route is chosen by the message alone, as the intake does.
async fn route(shared: &Shared, message: &Message) -> Routed {
    if message.envelope.bytes() <= INLINE_BYTES_MAX {
        return routes::route(&shared.settings, &message.envelope);
    }
    let (settings, envelope) = (shared.settings.clone(), message.envelope.clone());
    match tokio::task::spawn_blocking(move || routes::route(&settings, &envelope)).await {
        Ok(routed) => routed,
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}

fn outcome_of(result: ParkedResult) -> Outcome {
    match result {
        ParkedResult::Processed => Outcome::Processed,
        ParkedResult::Dropped => Outcome::Dropped,
        ParkedResult::Unrouted => Outcome::Unrouted,
        ParkedResult::Duplicate => Outcome::Duplicate,
        ParkedResult::IdConflict => Outcome::IdConflict,
        ParkedResult::DeadLettered => Outcome::DeadLettered,
        ParkedResult::Rescheduled => Outcome::Parked,
        ParkedResult::Released => Outcome::Released,
        ParkedResult::ClaimLost => Outcome::ClaimLost,
    }
}
