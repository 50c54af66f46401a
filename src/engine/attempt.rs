//! Claiming a message and calling the application for it.
//!
//! Invariants: a forward begins only under a claim with time left on its lease; one
//! attempt is counted for each POST, before it, and taken back where no verdict came of it;
//! a message that cannot be claimed now holds no slot while it waits.

use std::sync::Arc;
use std::time::Duration;

use backon::ExponentialBackoff;
use inboxd_contract::{
    Attempt, ClaimAnswer, DeadReason, Fingerprint, ForwardRequest, LaneId, Look, Outcome,
    ParkReason, RetryReason, Verdict,
};
use tokio::sync::SemaphorePermit;
use tokio::time::Instant;

use super::callback::{Admission, Judged};
use super::hub::{Claim, Hub};
use super::journey::{Decision, Journey, Letter, Parked, Wait};
use super::keeper::Lease;
use super::message::{Gate, Message};
use super::progress::Stage;
use super::schedule::{self, Failed};
use super::settings::OnBlockedLane;
use super::subscription::Shared;
use crate::telemetry::{AttemptTrace, TraceIds};

/// The least time between two looks at a message that somebody else has.
const BUSY_WAIT_MIN: Duration = Duration::from_millis(20);

/// A claim in hand.
pub(super) struct Held<'a> {
    pub(super) lease: Lease,
    pub(super) attempts: u32,
    pub(super) supersedes_dead: bool,
    /// Until the first POST is over.
    slot: Option<SemaphorePermit<'a>>,
}

/// What claiming came to.
pub(super) enum Claimed<'a> {
    Held(Held<'a>),
    /// The row exists; its fingerprint.
    Processed(Option<Fingerprint>),
    /// A dead letter that is this copy, or another content; its fingerprint.
    Dead(Option<Fingerprint>),
    /// A due copy; its fingerprint.
    Parked(Option<Fingerprint>),
    /// A message before it in its lane is parked; attempts made so far.
    LaneBlocked(u32),
    /// It was held for `hold_max` before it was claimed.
    TooLong,
    /// Nothing more may start, or the delivery has to go back.
    Stopped,
}

/// How the attempts at the application ended.
pub(super) enum Tried {
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

/// Whether a forward may begin.
pub(super) enum Validity {
    Valid,
    /// Nothing more may start.
    Stopped,
    /// The lease ran out and is not to be had back; what is there now.
    Lost(Look),
}

impl<'a> Journey<'a> {
    /// Asks for a claim until there is an answer that is not "busy". With `decided` it goes on
    /// although nothing more may start: what the application decided is still to be recorded.
    pub(super) async fn claim(self, decided: bool) -> Claimed<'a> {
        let (hub, message) = (&self.shared.hub, &self.item.message);
        let mut alone = false;
        message.progress.stage(Stage::Slot);
        loop {
            let slot = match decided {
                true => None,
                false => match self.slot(&self.shared.claim_slots).await {
                    Wait::Over(slot) => Some(slot),
                    Wait::Stopped => return Claimed::Stopped,
                    Wait::TooLong => return Claimed::TooLong,
                },
            };
            // What was accepted supersedes a dead letter of this very copy: without a position
            // the claim holds, and the completion removes the letter. Nor does its lane matter.
            let (position, lane_id) = match decided {
                true => (None, None),
                false => (message.envelope.origin.position(), self.lane_to_ask()),
            };
            message.progress.at_claim();
            let fingerprint = message.fingerprint.clone();
            let stopped = || !decided && self.is_stopped();
            let claim = hub.claim(&message.key, fingerprint, position, lane_id, alone, stopped);
            let (answer, lease) = match claim.await {
                Claim::Answered { answer, lease } => (answer, lease),
                Claim::Locked => {
                    alone = true;
                    (ClaimAnswer::Busy { wait: hub.lease() / 10 }, None)
                }
                Claim::Stopped => return Claimed::Stopped,
            };
            let (attempts, supersedes_dead) = match answer {
                ClaimAnswer::Fresh { attempts } => (attempts, false),
                ClaimAnswer::Dead { held: Some(attempts), .. } => (attempts, true),
                ClaimAnswer::Processed { fingerprint } => return Claimed::Processed(fingerprint),
                ClaimAnswer::Dead { fingerprint, held: None } => return Claimed::Dead(fingerprint),
                ClaimAnswer::Parked { fingerprint } => return Claimed::Parked(fingerprint),
                ClaimAnswer::LaneBlocked { attempts } => return Claimed::LaneBlocked(attempts),
                ClaimAnswer::Busy { wait } => {
                    drop(slot);
                    let wait = wait.min(hub.lease() / 10).max(BUSY_WAIT_MIN);
                    message.progress.stage(Stage::Busy { again_in: wait });
                    if decided {
                        tokio::time::sleep(wait).await;
                    } else if self.unless_to_go_back(tokio::time::sleep(wait)).await.is_none() {
                        return Claimed::Stopped;
                    }
                    continue;
                }
            };
            let Some(lease) = lease else {
                unreachable!("an answer that holds comes with a lease")
            };
            if attempts > 1 {
                hub.metrics().claim_taken_over();
            }
            return Claimed::Held(Held { lease, attempts, supersedes_dead, slot });
        }
    }

    /// POSTs until the application decides, the message is to be parked or is dead, the claim is
    /// lost or nothing more may start.
    pub(super) async fn attempts(self, held: &mut Held<'a>) -> Tried {
        let mut tries = Tries::new(self.shared);
        loop {
            if tries.is_spent {
                let count = self.shared.hub.count_attempt(held.lease.claim(), || self.is_stopped());
                match count.await {
                    Some(Attempt::Counted(attempts)) => held.attempts = attempts,
                    Some(Attempt::Lost(look)) => return Tried::Lost(look),
                    None => return Tried::GiveUp { attempt_back: false },
                }
            }
            tries.is_spent = false;
            self.item.message.progress.stage(Stage::Slot);
            let admission = match self.admission(held.attempts, tries.made).await {
                Wait::Over(Some(admission)) => admission,
                Wait::Over(None) => return self.park_unsent(held, tries, ParkReason::Failed),
                Wait::Stopped => return Tried::GiveUp { attempt_back: true },
                Wait::TooLong => return self.park_unsent(held, tries, ParkReason::HeldTooLong),
            };
            let message = &self.item.message;
            match ensure_valid(self.shared, self.gate(), message, &held.lease).await {
                Validity::Valid => {}
                Validity::Stopped => return Tried::GiveUp { attempt_back: true },
                Validity::Lost(look) if look.processed.is_some() => return Tried::Lost(look),
                // Taken over, or locked by somebody.
                Validity::Lost(_) => return Tried::Again,
            }
            message.progress.at_callback(held.attempts);
            let path = self.item.path.as_ref();
            let (verdict, judged) =
                post(self.shared, message, path, held.attempts, admission).await;
            tries.is_spent = judged.counts_as_attempt;
            tries.made += u32::from(judged.counts_as_attempt);
            held.slot = None;
            let delay = match self.after(verdict, judged, held, &mut tries) {
                After::Ends(tried) => return tried,
                After::Again(delay) => delay,
            };
            if self.sleep(delay).await.is_none() {
                return Tried::GiveUp { attempt_back: !tries.is_spent };
            }
        }
    }

    /// What follows one attempt.
    fn after(self, verdict: Verdict, judged: Judged, held: &Held<'_>, tries: &mut Tries) -> After {
        let settings = &self.shared.settings;
        let decided = |decision| After::Ends(Tried::Decided(decision));
        // What was counted for one that says nothing of the message is taken back.
        let attempts = held.attempts - u32::from(!tries.is_spent);
        let (failed, status, after, detail) = match verdict {
            Verdict::Accepted { .. } => return decided(Decision::Complete(Outcome::Processed)),
            Verdict::Drop { .. } => return decided(Decision::Complete(Outcome::Dropped)),
            Verdict::Refused { status, detail } => {
                let reason = DeadReason::Refused;
                let letter = Letter { reason, status: Some(status), detail, attempts };
                return decided(Decision::DeadLetter(letter));
            }
            Verdict::Park { status } => (Failed::Asked, Some(status), None, asked()),
            Verdict::Retry { reason, status, after, detail } => {
                let detail = last_answer(reason, status, &detail);
                (Failed::Retry(reason), status, after, detail)
            }
        };
        if self.is_stopped() {
            return After::Ends(Tried::GiveUp { attempt_back: !tries.is_spent });
        }
        let first_ago = self.item.message.first_ago();
        if let Some(reason) = schedule::death(&settings.park, attempts, first_ago, failed) {
            return decided(Decision::DeadLetter(Letter { reason, status, detail, attempts }));
        }
        let retry = &settings.retry;
        // A callback that rests is waited for: that makes the message's own pauses no longer.
        let bound = match tries.is_spent {
            true => tries.delays.next().unwrap_or(retry.cap),
            false => retry.initial,
        };
        // The application may ask for more time than the backoff, never for less.
        let delay = self.shared.hub.delay(retry.jitter, bound).max(after.unwrap_or_default());
        let elapsed = self.item.delivery.received_at.elapsed() + delay;
        let reason = match failed {
            Failed::Asked => ParkReason::Asked,
            Failed::Retry(_) if self.is_near_the_delivery_limit() => ParkReason::DeliveryLimit,
            Failed::Retry(_) if tries.made >= retry.attempts_max => ParkReason::Failed,
            Failed::Retry(_) if elapsed >= retry.elapsed_max && !judged.rests => ParkReason::Failed,
            Failed::Retry(_) if elapsed >= settings.hold_max => ParkReason::HeldTooLong,
            Failed::Retry(_) => {
                self.item.message.progress.again(detail.clone(), delay);
                tries.last = Some((status, detail));
                return After::Again(delay);
            }
        };
        let delay = self.parking_delay(attempts).max(after.unwrap_or_default());
        let detail = Some(detail);
        decided(Decision::Park(Parked { reason, delay, status, detail, attempts }))
    }

    /// It has waited for its turn for too long, or must not wait for it: no attempt came of the
    /// last one that was counted.
    fn park_unsent(self, held: &Held<'_>, tries: Tries, reason: ParkReason) -> Tried {
        let attempts = held.attempts.saturating_sub(1);
        let delay = match reason {
            // For want of a slot, not of attempts: as soon as it would be tried in place.
            ParkReason::Failed => {
                let settings = &self.shared.settings;
                let bound = schedule::worker_bound(settings, attempts);
                self.shared.hub.delay(settings.retry.jitter, bound)
            }
            _ => Duration::ZERO,
        };
        let (status, detail) = tries.last.unzip();
        let status = status.flatten();
        Tried::Decided(Decision::Park(Parked { reason, delay, status, detail, attempts }))
    }

    fn parking_delay(self, attempts: u32) -> Duration {
        let settings = &self.shared.settings;
        self.shared.hub.delay(settings.park.jitter, schedule::parking_bound(settings, attempts))
    }

    /// The lane that must be free before it is forwarded.
    fn lane_to_ask(self) -> Option<LaneId> {
        let skips = self.shared.settings.on_blocked_lane == OnBlockedLane::Skip;
        let skips = skips || broken!(IgnoreBlockedLane);
        self.item.message.lane_id.filter(|_| !skips && self.item.course.forwards())
    }
}

/// The attempts in place under one claim.
struct Tries {
    delays: ExponentialBackoff,
    /// Those that count.
    made: u32,
    /// What was counted last was used; else the next attempt is made under the same count.
    is_spent: bool,
    /// What the last one came to.
    last: Option<(Option<u16>, String)>,
}

impl Tries {
    fn new(shared: &Shared) -> Self {
        let delays = Hub::backoff(&shared.settings.retry);
        Self { delays, made: 0, is_spent: false, last: None }
    }
}

/// What follows an attempt.
enum After {
    Ends(Tried),
    Again(Duration),
}

fn asked() -> String {
    "the application asked to have it later".into()
}

/// A forward begins only with time left on the lease. Tries to get some.
pub(super) async fn ensure_valid(
    shared: &Shared,
    gate: Gate<'_>,
    message: &Message,
    lease: &Lease,
) -> Validity {
    while !lease.has_time_left() && !broken!(IgnoreLease) {
        shared.hub.renew(lease).await;
        if lease.has_time_left() {
            break;
        }
        if let Ok(mut looks) = shared.hub.store().look(std::slice::from_ref(&message.key)).await {
            return Validity::Lost(looks.pop().unwrap_or_default());
        }
        let pause = tokio::time::sleep(shared.hub.lease() / 10);
        if gate.unless_stopped(pause).await.is_none() {
            return Validity::Stopped;
        }
    }
    match gate.is_stopped() {
        true => Validity::Stopped,
        false => Validity::Valid,
    }
}

/// The one place where the application is called, and its callback told what came of it.
pub(super) async fn post(
    shared: &Shared,
    message: &Message,
    path: Option<&Arc<str>>,
    attempt: u32,
    admission: Admission<'_>,
) -> (Verdict, Judged) {
    let trace = message.trace.as_ref();
    let trace = trace.and_then(|trace| trace.attempt(attempt, path.map(|path| &**path)));
    let started = Instant::now();
    let request = ForwardRequest {
        envelope: &message.envelope,
        key: &message.key,
        subscription: &shared.settings.name,
        attempt,
        ordering_key: message.ordering_key(),
        timeout: shared.settings.callback_timeout,
        path: path.map(|path| &**path),
        trace: trace.as_ref().map(AttemptTrace::context),
    };
    let verdict = shared.forwarder.forward(request).await;
    let took = started.elapsed();
    shared.metrics.attempt_seconds(took.as_secs_f64());
    shared.metrics.verdict(verdict.as_str());
    if let Some(trace) = trace {
        trace.end(&verdict);
    }
    let judged = admission.answered(path, &verdict, took);
    let is_gone = shared.callback.is_gone();
    shared.trouble.note(&shared.settings.name, path, &verdict, is_gone);
    if let Verdict::Retry { reason, status, detail, .. } = &verdict {
        shared.metrics.retry(*reason);
        let TraceIds { trace_id, span_id } = message.ids();
        tracing::debug!(key = ?message.key, trace_id, span_id, attempt, ?reason, status, detail, "to be tried again");
    }
    (verdict, judged)
}

/// What an attempt came to, for a person.
pub(super) fn last_answer(reason: RetryReason, status: Option<u16>, detail: &str) -> String {
    let reason: &str = reason.into();
    match status {
        Some(status) => format!("{status} ({reason}) {detail}"),
        None => format!("{reason}: {detail}"),
    }
}
