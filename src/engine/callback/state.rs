//! Everything that decides whether an attempt may begin, in one place under one lock.
//!
//! Invariants: attempts get their turn in the order they asked, first attempts and others in a row
//! each, the older of the two heads first; one that waits for a retry slot holds up no first
//! attempt; never more are under way than `concurrency`, nor more further attempts than their
//! share; while the callback rests, only a probe goes. What it does not do: ask the application,
//! or know what time it is.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use inboxd_contract::{InboxKey, RetryReason, Verdict};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::breaker::{Breaker, Cause, Change, FRESH_WAIT, IN_HAND_WAIT, Phase, Says};
use super::limit::Limit;
use super::rate::Rate;
use super::report::{CallbackReport, CallbackState};
use crate::engine::gone::{Endpoints, Turn};
use crate::engine::settings::{Limits, SubscriptionSettings};

/// Between two tries at a host that was never reached, or whose health URL fails.
const ASK_EVERY_MIN: Duration = Duration::from_millis(200);
const ASK_EVERY_MAX: Duration = Duration::from_secs(2);
/// A health URL has failed when it failed so often in a row: one that is late once stops nothing.
const HEALTH_FAILURES: u32 = 2;
/// A message that was asked of the source for a probe, and has not come, is asked for again.
const ONE_AGAIN: Duration = Duration::from_secs(2);

/// What may be taken from the source and by the workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::engine) enum Flow {
    /// As much as there is room for.
    Free,
    /// One message, to find out whether the application is back.
    One,
    Nothing,
}

/// What an attempt is told when its turn has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Grant {
    pub(super) is_probe: bool,
    pub(super) is_first: bool,
}

struct Waiter {
    ticket: u64,
    key: InboxKey,
    turn: oneshot::Sender<Grant>,
}

/// What one attempt came to, for whom, and how long it took.
#[derive(Clone, Copy)]
pub(super) struct Answer<'a> {
    pub(super) key: &'a InboxKey,
    pub(super) path: Option<&'a Arc<str>>,
    pub(super) verdict: &'a Verdict,
    pub(super) took: Duration,
}

/// What an answer changed.
#[derive(Debug, Default)]
pub(super) struct Effects {
    pub(super) breaker: Option<Change>,
    /// What was counted for the attempt stands.
    pub(super) counts: bool,
    /// Its answer decided.
    pub(super) was_probe: bool,
}

pub(super) type Jitter = dyn Fn(Duration) -> Duration + Send + Sync;

pub(super) struct State {
    has_health: bool,
    health_interval: Duration,
    paths: usize,
    breaker_is_on: bool,
    is_paused: bool,
    /// The host has accepted a connection, or the health URL has answered well, once.
    was_reached: bool,
    health_failures: u32,
    /// When the host or the health URL is asked next, breaker aside.
    ask_at: Instant,
    ask_delay: Duration,
    is_asking: bool,
    pub(super) breaker: Breaker,
    endpoints: Endpoints,
    limit: Limit,
    rate: Rate,
    in_use: usize,
    further_in_use: usize,
    firsts: VecDeque<Waiter>,
    further: VecDeque<Waiter>,
    next_ticket: u64,
    /// One message was taken for a probe: no other is asked for before.
    one_again_at: Option<Instant>,
    /// What failed last; bounded by the adapter.
    why: String,
    shown: CallbackState,
    since: Instant,
}

impl State {
    pub(super) fn new(settings: &SubscriptionSettings, has_health: bool, now: Instant) -> Self {
        let endpoints = Endpoints::new(settings);
        let concurrency = settings.concurrency + usize::from(broken!(IgnoreConcurrency));
        Self {
            has_health,
            health_interval: settings.health_interval,
            paths: endpoints.count(),
            breaker_is_on: settings.breaker.failures > 0,
            is_paused: false,
            was_reached: false,
            health_failures: 0,
            ask_at: now,
            ask_delay: ASK_EVERY_MIN,
            is_asking: false,
            breaker: Breaker::new(settings.breaker),
            endpoints,
            limit: Limit::new(concurrency, settings.adaptive),
            rate: Rate::new(settings.rate, now),
            in_use: 0,
            further_in_use: 0,
            firsts: VecDeque::new(),
            further: VecDeque::new(),
            next_ticket: 0,
            one_again_at: None,
            why: String::new(),
            shown: CallbackState::Starting,
            since: now,
        }
    }

    // What it comes to.

    fn is_healthy(&self) -> bool {
        self.health_failures < HEALTH_FAILURES
    }

    fn is_shut(&self) -> bool {
        self.is_paused || !self.was_reached || !self.is_healthy()
    }

    fn state(&self) -> CallbackState {
        match self.breaker.phase() {
            _ if self.is_paused => CallbackState::Paused,
            _ if !self.was_reached => CallbackState::Starting,
            _ if !self.is_healthy() => CallbackState::Health,
            Phase::Closed => CallbackState::Closed,
            _ if self.breaker.cause() == Some(Cause::Gone) => CallbackState::Gone,
            Phase::Open { .. } | Phase::Asking { .. } => CallbackState::Open,
            Phase::Wanted { .. } | Phase::Sent { .. } => CallbackState::Probing,
        }
    }

    /// The state before and now, if it is another than it was when this was asked last.
    pub(super) fn turn(&mut self, now: Instant) -> Option<(CallbackState, CallbackState)> {
        let state = self.state();
        if state == self.shown {
            return None;
        }
        if state == CallbackState::Closed {
            self.why.clear();
        }
        self.since = now;
        Some((std::mem::replace(&mut self.shown, state), state))
    }

    pub(super) fn flow(&self, now: Instant) -> Flow {
        if self.is_shut() {
            return Flow::Nothing;
        }
        match self.breaker.phase() {
            Phase::Closed => Flow::Free,
            Phase::Wanted { fresh_until, .. } => {
                // Those that wait have failed already, or none of those in hand has come.
                let is_due = self.waits() || now >= asks_source_at(fresh_until);
                let is_asked = self.one_again_at.is_some_and(|at| now < at);
                match is_due && !is_asked && !self.has_fresh_waiter() {
                    true => Flow::One,
                    false => Flow::Nothing,
                }
            }
            _ => Flow::Nothing,
        }
    }

    fn waits(&self) -> bool {
        !self.firsts.is_empty() || !self.further.is_empty()
    }

    pub(super) fn report(&self, now: Instant) -> CallbackReport {
        let next_probe_at = match self.breaker.phase() {
            _ if self.is_paused => None,
            _ if self.is_asking => Some(now),
            _ if !self.was_reached || !self.is_healthy() => Some(self.ask_at),
            Phase::Open { probe_at, .. } => Some(probe_at),
            Phase::Asking { .. } | Phase::Wanted { .. } | Phase::Sent { .. } => Some(now),
            Phase::Closed => self.has_health.then_some(self.ask_at),
        };
        CallbackReport {
            state: self.state(),
            since: now.saturating_duration_since(self.since),
            why: match self.is_paused {
                true => "paused by an operator".to_owned(),
                false => self.why.clone(),
            },
            limit: self.limit.get(),
            concurrency: self.limit.most(),
            rate: self.rate.per_second(),
            in_use: self.in_use,
            waiting: self.firsts.len() + self.further.len(),
            next_probe_in: next_probe_at.map(|at| at.saturating_duration_since(now)),
        }
    }

    pub(super) fn limit(&self) -> usize {
        self.limit.get()
    }

    pub(super) fn why(&self) -> &str {
        &self.why
    }

    // What an operator does.

    /// True: it changed something.
    pub(super) fn set_paused(&mut self, is_paused: bool) -> bool {
        std::mem::replace(&mut self.is_paused, is_paused) != is_paused
    }

    pub(super) fn set_limits(&mut self, limits: Limits, now: Instant) {
        self.limit.set_most(limits.concurrency);
        self.rate.set(limits.rate, now);
    }

    // Turns.

    /// Further attempts that may be under way at once: healthy messages keep the rest.
    fn further_max(&self) -> usize {
        (self.limit.get() / 8).max(1)
    }

    /// A further attempt would get its slot at once, or waits for nothing but the callback.
    pub(super) fn has_further_slot(&self) -> bool {
        self.is_shut()
            || !self.breaker.is_closed()
            || self.further_in_use + self.further.len() < self.further_max()
    }

    /// A turn at once, where nobody waits before.
    pub(super) fn at_once(&mut self, is_first: bool, now: Instant) -> Option<Grant> {
        let is_free = self.firsts.is_empty()
            && self.further.is_empty()
            && !self.is_shut()
            && self.breaker.is_closed()
            && self.in_use < self.limit.get()
            && (is_first || self.further_in_use < self.further_max())
            && self.rate.has(now);
        let grant = Grant { is_probe: false, is_first };
        is_free.then(|| {
            self.take(grant);
            grant
        })
    }

    fn take(&mut self, grant: Grant) {
        self.in_use += 1;
        self.further_in_use += usize::from(!grant.is_first);
        self.rate.take();
    }

    pub(super) fn enter(
        &mut self,
        is_first: bool,
        key: InboxKey,
    ) -> (u64, oneshot::Receiver<Grant>) {
        let (turn, receiver) = oneshot::channel();
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        let queue = if is_first { &mut self.firsts } else { &mut self.further };
        queue.push_back(Waiter { ticket, key, turn });
        (ticket, receiver)
    }

    pub(super) fn leave(&mut self, ticket: u64) {
        self.firsts.retain(|waiter| waiter.ticket != ticket);
        self.further.retain(|waiter| waiter.ticket != ticket);
    }

    /// Gives turns to whom they are due. To be called after each change.
    pub(super) fn grant(&mut self, now: Instant) {
        while let Some((queue_is_first, place, is_probe)) = self.next(now) {
            let queue = if queue_is_first { &mut self.firsts } else { &mut self.further };
            let Some(waiter) = queue.remove(place) else { return };
            let grant = Grant { is_probe, is_first: queue_is_first };
            // One that has just left gets none.
            if waiter.turn.send(grant).is_err() {
                continue;
            }
            self.take(grant);
            if is_probe {
                self.breaker.sent();
                self.one_again_at = None;
            }
        }
    }

    fn next(&mut self, now: Instant) -> Option<(bool, usize, bool)> {
        if self.is_shut() || !self.waits() {
            return None;
        }
        let (is_first, place, is_probe) = match self.breaker.phase() {
            Phase::Closed if self.in_use < self.limit.get() => {
                let further_may = self.further_in_use < self.further_max();
                (self.is_first_next(further_may)?, 0, false)
            }
            Phase::Wanted { fresh_until, .. } if self.in_use < self.limit.most() => {
                let (is_first, place) = self.probe(now >= fresh_until)?;
                (is_first, place, true)
            }
            _ => return None,
        };
        self.rate.has(now).then_some((is_first, place, is_probe))
    }

    fn is_first_next(&self, further_may: bool) -> Option<bool> {
        let first = self.firsts.front().map(|waiter| waiter.ticket);
        let further = self.further.front().map(|waiter| waiter.ticket).filter(|_| further_may);
        match (first, further) {
            (None, None) => None,
            (Some(first), Some(further)) => Some(first < further),
            (first, _) => Some(first.is_some()),
        }
    }

    /// Whose answer decides: the oldest that has not failed yet, or, `any`, the oldest.
    fn probe(&self, any: bool) -> Option<(bool, usize)> {
        let fresh = |queue: &VecDeque<Waiter>| {
            queue.iter().position(|waiter| !self.breaker.suspects(&waiter.key))
        };
        if let Some(place) = fresh(&self.firsts) {
            return Some((true, place));
        }
        if let Some(place) = fresh(&self.further) {
            return Some((false, place));
        }
        if any { Some((self.is_first_next(true)?, 0)) } else { None }
    }

    fn has_fresh_waiter(&self) -> bool {
        self.probe(false).is_some()
    }

    pub(super) fn is_gone(&self) -> bool {
        self.endpoints.is_paused()
    }

    /// A message was taken for a probe: it is on its way.
    pub(super) fn one_was_taken(&mut self, now: Instant) {
        self.one_again_at = Some(now + ONE_AGAIN);
    }

    /// An attempt that had its turn ended without an answer.
    pub(super) fn gave_back(&mut self, grant: Grant, now: Instant) {
        self.free(grant);
        self.rate.give_back();
        if grant.is_probe {
            self.breaker.not_sent(now);
        }
    }

    fn free(&mut self, grant: Grant) {
        self.in_use -= 1;
        self.further_in_use -= usize::from(!grant.is_first);
    }

    // What the application says.

    /// An answer while the process drains decides nothing but this: the application was told to
    /// stop together with us.
    pub(super) fn answered_draining(&mut self, grant: Grant, verdict: &Verdict) -> Effects {
        self.free(grant);
        let counts = reason(verdict) != Some(RetryReason::Unreachable);
        Effects { counts, ..Effects::default() }
    }

    pub(super) fn answered(
        &mut self,
        grant: Grant,
        answer: Answer<'_>,
        now: Instant,
        jitter: &Jitter,
    ) -> Effects {
        let Answer { key, path, verdict, took } = answer;
        let is_full = self.in_use >= self.limit.get();
        self.free(grant);
        let says = Says::of(verdict, self.paths);
        let reason = reason(verdict);
        let after = match verdict {
            Verdict::Retry { reason: RetryReason::Overloaded, after, .. } => *after,
            _ => None,
        };
        if let Verdict::Retry { status, detail, .. } = verdict
            && says != Says::Works
        {
            self.why = words(reason, *status, detail);
        }
        let gone = self.endpoints.note(path, verdict);
        // A probe during which it was closed or opened anew is an answer like any other.
        let decides = grant.is_probe && matches!(self.breaker.phase(), Phase::Sent { .. });
        let change = match gone {
            _ if decides => {
                let still_gone = self.endpoints.is_paused();
                Some(self.breaker.probed(key, says, still_gone, after, now, jitter))
            }
            Some(Turn { is_paused: true, .. }) => self.breaker.gone(now, jitter),
            Some(Turn { is_paused: false, .. }) => self.breaker.no_longer_gone(says, now),
            None => self.breaker.note(key, says, after, now, jitter),
        };
        if change == Some(Change::Closed) {
            self.limit.start_again();
        }
        match says {
            Says::Works => self.limit.answered(took, is_full, now),
            _ if reason == Some(RetryReason::Overloaded) => self.limit.overloaded(took, now),
            _ => {}
        }
        let says_nothing = !matches!(says, Says::Works | Says::FailsPerhaps);
        let counts = !says_nothing
            || self.breaker.is_closed()
                && !(self.breaker_is_on && reason == Some(RetryReason::Unreachable));
        Effects { breaker: change, counts, was_probe: decides }
    }

    // Asking the host or the health URL.

    /// When it is to be asked next.
    fn asks_at(&self) -> Option<Instant> {
        if self.is_asking {
            return None;
        }
        let by_breaker = match self.breaker.phase() {
            Phase::Open { probe_at, .. } if !self.is_shut() => Some(probe_at),
            _ => None,
        };
        let otherwise = (self.has_health || !self.was_reached).then_some(self.ask_at);
        by_breaker.into_iter().chain(otherwise).min()
    }

    /// True: it is to be asked now, by whom this was told, who says what the answer was.
    pub(super) fn asks(&mut self, now: Instant) -> bool {
        if self.asks_at().is_none_or(|at| now < at) {
            return false;
        }
        self.is_asking = true;
        if !self.is_shut() {
            self.breaker.asks(now);
        }
        true
    }

    /// What it answered.
    pub(super) fn was_answered(
        &mut self,
        answer: Result<(), String>,
        now: Instant,
        jitter: &Jitter,
    ) -> Option<Change> {
        self.is_asking = false;
        let is_well = answer.is_ok();
        let change = self.breaker.was_answered(is_well, now, jitter);
        match answer {
            Ok(()) => {
                let was_away = !self.was_reached || !self.is_healthy();
                (self.was_reached, self.health_failures) = (true, 0);
                self.ask_delay = ASK_EVERY_MIN;
                self.ask_at = now + self.health_interval;
                if was_away {
                    self.breaker.hurry(now);
                }
            }
            Err(reason) => {
                self.why = reason;
                if self.has_health {
                    self.health_failures = self.health_failures.saturating_add(1);
                }
                self.ask_at = now + self.ask_delay;
                self.ask_delay = (self.ask_delay * 2).min(ASK_EVERY_MAX);
            }
        }
        change
    }

    /// When something is due although nothing happens until then; `None`: never.
    pub(super) fn due_at(&mut self, now: Instant) -> Option<Instant> {
        let next_token = if self.waits() { self.rate.next_at(now) } else { None };
        let (source, fresh, again) = match self.breaker.phase() {
            Phase::Wanted { fresh_until, .. } => {
                (Some(asks_source_at(fresh_until)), Some(fresh_until), self.one_again_at)
            }
            _ => (None, None, None),
        };
        let later = [next_token, source, fresh, again].into_iter().flatten().filter(|at| now < *at);
        later.chain(self.asks_at()).min()
    }
}

fn asks_source_at(fresh_until: Instant) -> Instant {
    fresh_until - (FRESH_WAIT - IN_HAND_WAIT)
}

fn reason(verdict: &Verdict) -> Option<RetryReason> {
    match verdict {
        Verdict::Retry { reason, .. } => Some(*reason),
        _ => None,
    }
}

/// What an attempt came to, for a person.
fn words(reason: Option<RetryReason>, status: Option<u16>, detail: &str) -> String {
    let reason: &str = reason.map_or("", Into::into);
    match status {
        Some(status) if detail.is_empty() => format!("{status} ({reason})"),
        Some(status) => format!("{status} ({reason}): {detail}"),
        None if detail.is_empty() => reason.to_owned(),
        None => format!("{reason}: {detail}"),
    }
}
