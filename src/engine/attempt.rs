//! Claiming a message and calling the application for it.
//!
//! Invariants: a forward begins only under a claim with time left on its lease; one
//! attempt is counted for each POST, before it, and taken back where no verdict came of it;
//! a message that cannot be claimed now holds no slot while it waits.

use inboxd_contract::{
    Attempt, ClaimAnswer, ErrorCode, Fingerprint, ForwardRequest, Look, Outcome, RetryReason,
    Verdict,
};
use std::time::Duration;
use tokio::sync::SemaphorePermit;
use tokio::time::Instant;

use super::hub::{Claim, Hub};
use super::journey::{Decision, Item, Journey};
use super::keeper::Lease;
use super::progress::Stage;
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

impl<'a> Journey<'a> {
    /// Asks for a claim until there is an answer that is not "busy". With `decided` it goes on
    /// although nothing more may start: what the application decided is still to be recorded.
    pub(super) async fn claim(self, decided: bool) -> Claimed<'a> {
        let hub = &self.shared.hub;
        let mut alone = false;
        self.item.progress.stage(Stage::Slot);
        loop {
            let slot = match decided {
                true => None,
                false => match self.slot(&self.shared.claim_slots).await {
                    Some(slot) => Some(slot),
                    None => return Claimed::Stopped,
                },
            };
            // What was accepted supersedes a dead letter of this very copy: without a position
            // the claim holds, and the completion removes the letter.
            let position = match decided {
                true => None,
                false => self.item.delivery.envelope.origin.position(),
            };
            self.item.progress.at_claim();
            let fingerprint = self.item.fingerprint.clone();
            let stopped = || !decided && self.is_stopped();
            let claim = hub.claim(&self.item.key, fingerprint, position, alone, stopped).await;
            let (answer, lease) = match claim {
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
                ClaimAnswer::Parked { .. } | ClaimAnswer::LaneBlocked { .. } => {
                    return Claimed::Stopped;
                }
                ClaimAnswer::Busy { wait } => {
                    drop(slot);
                    let wait = wait.min(hub.lease() / 10).max(BUSY_WAIT_MIN);
                    self.item.progress.stage(Stage::Busy { again_in: wait });
                    if decided {
                        tokio::time::sleep(wait).await;
                    } else if self.unless_held_too_long(tokio::time::sleep(wait)).await.is_none() {
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

    /// POSTs until the application decides, the claim is lost or nothing more may start.
    pub(super) async fn attempts(self, held: &mut Held<'a>) -> Tried {
        let settings = &self.shared.settings;
        let mut delays = Hub::backoff(&settings.retry);
        let mut hold = Hold { shared: self.shared, counted: false };
        let mut is_first = true;
        loop {
            if !std::mem::take(&mut is_first) {
                let count = self.shared.hub.count_attempt(held.lease.claim(), || self.is_stopped());
                match count.await {
                    Some(Attempt::Counted(attempts)) => held.attempts = attempts,
                    Some(Attempt::Lost(look)) => return Tried::Lost(look),
                    None => return Tried::GiveUp { attempt_back: false },
                }
            }
            self.item.progress.stage(Stage::Slot);
            let Some(post_slot) = self.slot(&self.shared.post_slots).await else {
                return Tried::GiveUp { attempt_back: true };
            };
            if let Some(tried) = self.ensure_valid(&held.lease).await {
                return tried;
            }
            self.item.progress.at_callback(held.attempts);
            let verdict = self.post(held.attempts).await;
            drop(post_slot);
            held.slot = None;
            let (reason, after, last) = match verdict {
                Verdict::Accepted { .. } => {
                    return Tried::Decided(Decision::Complete(Outcome::Processed));
                }
                Verdict::Drop { .. } => {
                    return Tried::Decided(Decision::Complete(Outcome::Dropped));
                }
                Verdict::Refused { status, detail } => {
                    let attempts = held.attempts;
                    return Tried::Decided(Decision::DeadLetter { status, detail, attempts });
                }
                Verdict::Park { .. } => (RetryReason::Busy, None, "asked to be parked".into()),
                Verdict::Retry { reason, status, after, detail } => {
                    (reason, after, last_answer(reason, status, &detail))
                }
            };
            if self.shared.draining.is_cancelled() {
                // The application was told to stop together with us: no attempt was made.
                return Tried::GiveUp { attempt_back: reason == RetryReason::Unreachable };
            }
            if self.may_go_back() {
                return Tried::GiveUp { attempt_back: false };
            }
            if self.item.delivery.received_at.elapsed() >= settings.hold_max {
                hold.tell(self.item, held.attempts);
            }
            let bound = delays.next().unwrap_or(settings.retry.cap);
            // The application may ask for more time than the backoff, never for less.
            let delay = self.shared.hub.jitter(bound).max(after.unwrap_or_default());
            self.item.progress.again(last, delay);
            if self.sleep(delay).await.is_none() {
                return Tried::GiveUp { attempt_back: false };
            }
        }
    }

    /// A forward begins only with time left on the lease. Tries to get some; `Some` if
    /// the attempt cannot go on.
    async fn ensure_valid(self, lease: &Lease) -> Option<Tried> {
        while !lease.has_time_left() && !broken!(IgnoreLease) {
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
        self.is_stopped().then_some(Tried::GiveUp { attempt_back: true })
    }

    async fn post(self, attempt: u32) -> Verdict {
        let path = self.item.path.as_deref();
        let trace = self.item.trace.as_ref().and_then(|trace| trace.attempt(attempt, path));
        let started = Instant::now();
        let request = ForwardRequest {
            envelope: &self.item.delivery.envelope,
            key: &self.item.key,
            subscription: &self.shared.settings.name,
            attempt,
            ordering_key: self.item.ordering_key(),
            timeout: self.shared.settings.callback_timeout,
            path,
            trace: trace.as_ref().map(AttemptTrace::context),
        };
        let verdict = self.shared.forwarder.forward(request).await;
        self.shared.metrics.attempt_seconds(started.elapsed().as_secs_f64());
        self.shared.metrics.verdict(verdict.as_str());
        if let Some(trace) = trace {
            trace.end(&verdict);
        }
        let path = self.item.path.as_ref();
        self.shared.endpoint_said(path, &verdict);
        let is_paused = *self.shared.gone.borrow();
        self.shared.trouble.note(&self.shared.settings.name, path, &verdict, is_paused);
        if let Verdict::Retry { reason, status, detail, .. } = &verdict {
            self.shared.metrics.retry(*reason);
            let TraceIds { trace_id, span_id } = self.item.ids();
            tracing::debug!(key = ?self.item.key, trace_id, span_id, attempt, ?reason, status, detail, "to be tried again");
        }
        verdict
    }
}

/// What an attempt came to, for a person.
fn last_answer(reason: RetryReason, status: Option<u16>, detail: &str) -> String {
    let reason: &str = reason.into();
    match status {
        Some(status) => format!("{status} ({reason}) {detail}"),
        None => format!("{reason}: {detail}"),
    }
}

/// Counts a delivery among those held beyond `hold_max`, and says so once.
struct Hold<'a> {
    shared: &'a Shared,
    counted: bool,
}

impl Hold<'_> {
    fn tell(&mut self, item: &Item, attempts: u32) {
        if !std::mem::replace(&mut self.counted, true) {
            self.shared.metrics.held(1);
            let TraceIds { trace_id, span_id } = item.ids();
            tracing::warn!(code = %ErrorCode::HeldTooLong, key = ?item.key, trace_id, span_id, attempts, "held longer than hold_max: tried on in place");
        }
    }
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        if self.counted {
            self.shared.metrics.held(-1);
        }
    }
}
