//! When the application is called: one [`Callback`] per subscription decides it for what comes
//! from the source and for what was parked.
//!
//! An attempt asks to be admitted and waits until nothing speaks against it: no operator has
//! paused the callback, it was reached once, its health URL answers well, it is not gone (410),
//! the breaker is closed or lets this attempt through as its probe, the rate allows one more, and
//! a slot is free under the limit, for a further attempt of a message one of the few for those.
//! What the application then answers feeds the breaker, the limit and the judge of 410.
//!
//! Invariants: an admission that is dropped, waiting or held, gives everything back; while the
//! callback rests nothing is taken from the source or by the workers ([`Flow`]) but one message at
//! a time that a probe needs; failures that say nothing of the message are not counted against it
//! while the callback rests, nor is one that never left this process. The state is in memory:
//! another instance has its own, and a start begins closed. What it does not do: retry, park, or
//! end a message.

mod breaker;
mod driver;
mod limit;
mod rate;
mod report;
mod state;
#[cfg(test)]
mod tests;
mod told;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use inboxd_contract::{Forwarder, InboxKey, Verdict};
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use self::breaker::Change;
pub use self::report::{CallbackReport, CallbackState};
pub(super) use self::state::Flow;
use self::state::{Answer, Effects, Grant, Jitter, State};
use self::told::Told;
use super::settings::{Limits, SubscriptionSettings};
use super::shown::Shown;
use crate::admin::SubscriptionHealth;
use crate::telemetry::SubscriptionMetrics;

/// What a callback is made of.
pub(super) struct CallbackParts {
    pub(super) forwarder: Arc<dyn Forwarder>,
    pub(super) metrics: SubscriptionMetrics,
    pub(super) health: SubscriptionHealth,
    /// From then on no answer opens anything: the application stops as well.
    pub(super) draining: CancellationToken,
    /// Anything between nothing and the bound.
    pub(super) jitter: Box<Jitter>,
}

/// Decides when the application is called.
pub(super) struct Callback {
    name: Arc<str>,
    parts: CallbackParts,
    inner: Mutex<Inner>,
    flow: Shown<Flow>,
    /// Something is due earlier than the driver knows.
    earlier: Notify,
}

struct Inner {
    state: State,
    told: Told,
    /// When the driver looks next; `None`: when it is told.
    armed: Option<Instant>,
    /// The limit that was shown last.
    shown_limit: usize,
}

/// What an answer means beyond the verdict.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Judged {
    /// False: what was counted for the attempt is to be taken back, or the next one is made under
    /// the same count. It said nothing of the message, and the callback rests or was never reached.
    pub(super) counts_as_attempt: bool,
    /// The callback rests: the next attempt will wait for a probe, not for a backoff alone.
    pub(super) rests: bool,
}

impl Callback {
    pub(super) fn new(settings: &SubscriptionSettings, parts: CallbackParts) -> Arc<Self> {
        let now = Instant::now();
        let state = State::new(settings, parts.forwarder.has_health(), now);
        let metrics = parts.metrics.callback();
        metrics.state(CallbackState::Starting.as_str());
        metrics.limit(state.limit());
        metrics.rate(settings.rate);
        let inner = Inner { shown_limit: state.limit(), state, told: Told::default(), armed: None };
        Arc::new(Self {
            name: settings.name.clone(),
            parts,
            inner: Mutex::new(inner),
            flow: Shown::new(Flow::Nothing),
            earlier: Notify::new(),
        })
    }

    /// Waits until this attempt may be made. `is_first`: none of the message was counted before.
    ///
    /// # Cancel safety
    /// Cancel-safe: the place in the queue is lost, and what was had is given back.
    pub(super) async fn admit(&self, is_first: bool, key: &InboxKey) -> Admission<'_> {
        let place = match self.at_once_or_place(is_first, key) {
            Ok(admission) => return admission,
            Err(place) => place,
        };
        place.turn(key).await
    }

    /// As [`Callback::admit`] for a further attempt in place; `None`, at once, where no slot for
    /// those is free: the message is parked, so that those that fail take nobody's place. While
    /// the callback rests that is no reason: it waits.
    ///
    /// # Cancel safety
    /// As [`Callback::admit`].
    pub(super) async fn admit_in_place(&self, key: &InboxKey) -> Option<Admission<'_>> {
        if !self.locked(|inner, _| inner.state.has_further_slot()) {
            return None;
        }
        Some(self.admit(false, key).await)
    }

    /// What may be taken from the source and by the workers, as it changes.
    pub(super) fn flow(&self) -> Shown<Flow> {
        self.flow.clone()
    }

    /// Every path says 410.
    pub(super) fn is_gone(&self) -> bool {
        self.locked(|inner, _| inner.state.is_gone())
    }

    /// One message was taken under [`Flow::One`]: it is on its way to be admitted, and no other is
    /// asked for in the next seconds.
    pub(super) fn one_was_taken(&self) {
        if self.flow.get() == Flow::One {
            self.change(|state, now| state.one_was_taken(now));
        }
    }

    /// Nothing more is taken and no attempt begins, until [`Callback::resume`].
    pub(super) fn pause(&self) {
        self.set_paused(true);
    }

    /// Ends what [`Callback::pause`] began.
    pub(super) fn resume(&self) {
        self.set_paused(false);
    }

    /// From now on; attempts that are under way are not cut.
    pub(super) fn set_limits(&self, limits: Limits) {
        self.change(|state, now| state.set_limits(limits, now));
        let report = self.report();
        self.parts.metrics.callback().rate(report.rate);
        tracing::info!(
            subscription = %self.name,
            concurrency = report.concurrency,
            rate = report.rate,
            "limits changed"
        );
    }

    /// How it stands.
    pub(super) fn report(&self) -> CallbackReport {
        self.locked(|inner, now| inner.state.report(now))
    }

    fn set_paused(&self, is_paused: bool) {
        if self.change(|state, _| state.set_paused(is_paused)) {
            let what = if is_paused { "paused" } else { "resumed" };
            tracing::info!(subscription = %self.name, "{what} by an operator");
        }
    }

    fn at_once_or_place(&self, is_first: bool, key: &InboxKey) -> Result<Admission<'_>, Place<'_>> {
        let granted = self.locked(|inner, now| inner.state.at_once(is_first, now));
        match granted {
            Some(grant) => Ok(Admission::new(self, grant, key)),
            None => {
                let (ticket, turn) = self.change(|state, _| state.enter(is_first, key.clone()));
                Err(Place { callback: self, ticket, turn, is_over: false })
            }
        }
    }

    fn answered(&self, grant: Grant, answer: Answer<'_>) -> Judged {
        let jitter = &*self.parts.jitter;
        let is_draining = self.parts.draining.is_cancelled();
        let (effects, rests) = self.change(|state, now| {
            let effects = match is_draining {
                true => state.answered_draining(grant, answer.verdict),
                false => state.answered(grant, answer, now, jitter),
            };
            (effects, !state.breaker.is_closed())
        });
        let Effects { breaker, counts, was_probe } = effects;
        let metrics = self.parts.metrics.callback();
        if was_probe {
            metrics.probe(breaker == Some(Change::Closed));
        }
        if !counts {
            metrics.attempt_taken_back();
        }
        Judged { counts_as_attempt: counts, rests }
    }

    /// Only for what gives nobody a turn.
    fn locked<T>(&self, ask: impl FnOnce(&mut Inner, Instant) -> T) -> T {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        ask(&mut inner, Instant::now())
    }

    /// Changes something, then gives turns to whom they are due and shows what has become of it.
    fn change<T>(&self, change: impl FnOnce(&mut State, Instant) -> T) -> T {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let changed = change(&mut inner.state, now);
        inner.state.grant(now);
        self.show(&mut inner, now);
        let due = inner.state.due_at(now);
        if due.is_some_and(|due| inner.armed.is_none_or(|armed| due < armed)) {
            inner.armed = due;
            self.earlier.notify_one();
        }
        changed
    }

    /// With the lock held, so that turns are shown in their order.
    fn show(&self, inner: &mut Inner, now: Instant) {
        let metrics = self.parts.metrics.callback();
        if let Some((was, is)) = inner.state.turn(now) {
            metrics.state(is.as_str());
            inner.told.turn(self, was, is, &inner.state, now);
        }
        let limit = inner.state.limit();
        if std::mem::replace(&mut inner.shown_limit, limit) != limit {
            metrics.limit(limit);
        }
        self.flow.replace(inner.state.flow(now));
    }
}

/// Waits until something may be taken, and answers how much.
///
/// # Cancel safety
/// Cancel-safe.
pub(super) async fn may_take(flow: &Shown<Flow>) -> Flow {
    flow.wait_for(|flow| flow != Flow::Nothing).await
}

/// A place in the queue.
struct Place<'a> {
    callback: &'a Callback,
    ticket: u64,
    turn: oneshot::Receiver<Grant>,
    is_over: bool,
}

impl<'a> Place<'a> {
    async fn turn(mut self, key: &InboxKey) -> Admission<'a> {
        // The sender is in the queue until it is used or this place is left.
        let granted = (&mut self.turn).await;
        self.is_over = true;
        match granted {
            Ok(grant) => Admission::new(self.callback, grant, key),
            Err(_) => std::future::pending().await,
        }
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        let (ticket, turn) = (self.ticket, &mut self.turn);
        self.callback.change(|state, now| match turn.try_recv() {
            // Its turn came, and nobody was there any more to take it.
            Ok(grant) => state.gave_back(grant, now),
            Err(_) => state.leave(ticket),
        });
    }
}

/// The right to call the application once. Dropped without an answer, it gives everything back.
pub(super) struct Admission<'a> {
    callback: &'a Callback,
    grant: Grant,
    key: InboxKey,
    is_over: bool,
}

impl<'a> Admission<'a> {
    fn new(callback: &'a Callback, grant: Grant, key: &InboxKey) -> Self {
        Self { callback, grant, key: key.clone(), is_over: false }
    }

    /// The application has answered, or failed to, `took` after the attempt began. `path`: the
    /// route's; `None` is the callback's own.
    pub(super) fn answered(
        mut self,
        path: Option<&Arc<str>>,
        verdict: &Verdict,
        took: Duration,
    ) -> Judged {
        self.is_over = true;
        let answer = Answer { key: &self.key, path, verdict, took };
        self.callback.answered(self.grant, answer)
    }
}

impl Drop for Admission<'_> {
    fn drop(&mut self) {
        if !self.is_over {
            let grant = self.grant;
            self.callback.change(|state, now| state.gave_back(grant, now));
        }
    }
}
