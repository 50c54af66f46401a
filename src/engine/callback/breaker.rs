//! The breaker: closed, open, probing.
//!
//! It opens after so many failures of the endpoint in a row. Failures that may be the message's
//! own doing (a timeout, a broken connection, 5xx) count once a message, and open it only if nothing
//! has worked for a moment: many messages that fail at once between two answers of the others
//! are no failure of the application. Any answer that shows a working one begins the row anew. While it is open, asking goes in two steps: the
//! callback's host (or its health URL) has to answer, then one message is let through, whose
//! answer decides. Which one rotates, so that a message that can only fail does not decide for
//! all: those that failed as probes in a way that may be their own, or their path's, are the last to
//! be chosen, behind a fresh one from the source, which is waited for a little.
//!
//! Invariants: pure, every instant is handed in; at most one probe is under way; what is remembered
//! of messages is bounded. What it does not do: wait, send, or decide about a message.

use std::collections::VecDeque;
use std::time::Duration;

use inboxd_contract::{InboxKey, RetryReason, Verdict};
use tokio::time::Instant;

use crate::engine::settings::BreakerSettings;

/// Messages that are remembered; an older one that fails again counts again.
const SUSPECTS_MAX: usize = 256;
/// What may be the messages' own doing opens it only if nothing has worked for so long.
const SUSPECT_AFTER: Duration = Duration::from_secs(1);
/// How long a message that is in hand may take to ask, before one is taken for the probe.
pub(super) const IN_HAND_WAIT: Duration = Duration::from_secs(1);
/// How long a fresh message is waited for, that included, before one is chosen that has failed already.
pub(super) const FRESH_WAIT: Duration = Duration::from_secs(2);

/// What an answer says of the endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Says {
    /// It works.
    Works,
    /// It does not, whatever the message.
    Fails,
    /// This path of it does not; others may.
    FailsHere,
    /// It does not, or the message makes it fail.
    FailsPerhaps,
    /// 410 is judged by path, elsewhere.
    Gone,
    /// 410 of one path of several.
    GoneHere,
}

impl Says {
    /// `paths`: how many the callback has.
    pub(super) fn of(verdict: &Verdict, paths: usize) -> Self {
        match verdict {
            Verdict::Accepted { .. }
            | Verdict::Refused { .. }
            | Verdict::Park { .. }
            | Verdict::Drop { .. } => Self::Works,
            Verdict::Retry { reason, .. } => match reason {
                RetryReason::Busy => Self::Works,
                RetryReason::Endpoint if paths > 1 => Self::FailsHere,
                RetryReason::Unreachable | RetryReason::Overloaded | RetryReason::Endpoint => {
                    Self::Fails
                }
                RetryReason::Timeout | RetryReason::Disconnected | RetryReason::ServerError => {
                    Self::FailsPerhaps
                }
                RetryReason::Gone if paths > 1 => Self::GoneHere,
                RetryReason::Gone => Self::Gone,
            },
        }
    }
}

/// Why it is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cause {
    Failures,
    /// Every path answered 410.
    Gone,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    Closed,
    /// Asked again at `probe_at`.
    Open {
        cause: Cause,
        probe_at: Instant,
    },
    /// The host or the health URL is being asked.
    Asking {
        cause: Cause,
    },
    /// It answered: the next message that comes decides. From `fresh_until` on any will do.
    Wanted {
        cause: Cause,
        fresh_until: Instant,
    },
    /// A message is at the application.
    Sent {
        cause: Cause,
    },
}

/// What has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    Opened,
    Closed,
    /// A probe failed.
    StaysOpen,
}

#[derive(Debug)]
pub(super) struct Breaker {
    settings: BreakerSettings,
    phase: Phase,
    /// In a row, as they count.
    failures: u32,
    /// Messages that failed in a way that may be their own, oldest first, since it worked last.
    suspects: VecDeque<InboxKey>,
    /// The bound of the next time between two probes.
    delay: Duration,
    closed_at: Option<Instant>,
    /// When an answer last showed a working application.
    worked_at: Option<Instant>,
}

impl Breaker {
    pub(super) fn new(settings: BreakerSettings) -> Self {
        let delay = settings.probe_initial;
        let suspects = VecDeque::new();
        Self {
            settings,
            phase: Phase::Closed,
            failures: 0,
            suspects,
            delay,
            closed_at: None,
            worked_at: None,
        }
    }

    pub(super) fn phase(&self) -> Phase {
        self.phase
    }

    pub(super) fn is_closed(&self) -> bool {
        self.phase == Phase::Closed
    }

    pub(super) fn cause(&self) -> Option<Cause> {
        match self.phase {
            Phase::Closed => None,
            Phase::Open { cause, .. }
            | Phase::Asking { cause }
            | Phase::Wanted { cause, .. }
            | Phase::Sent { cause } => Some(cause),
        }
    }

    /// A message that failed in a way that may be its own: the last to be chosen for a probe.
    pub(super) fn suspects(&self, key: &InboxKey) -> bool {
        self.suspects.contains(key)
    }

    /// An attempt that was no probe ended. `after`: the application's wish.
    pub(super) fn note(
        &mut self,
        key: &InboxKey,
        says: Says,
        after: Option<Duration>,
        now: Instant,
        jitter: impl Fn(Duration) -> Duration,
    ) -> Option<Change> {
        if broken!(BreakerNeverOpens) {
            return None;
        }
        match says {
            Says::Works => {
                self.worked_at = Some(now);
                match &mut self.phase {
                    Phase::Closed => {
                        self.failures = 0;
                        self.suspects.clear();
                    }
                    // What was sent before it opened is answered well: ask at once.
                    Phase::Open { cause: Cause::Failures, probe_at } => *probe_at = now,
                    _ => {}
                }
                return None;
            }
            Says::Gone | Says::GoneHere => return None,
            Says::Fails | Says::FailsHere => self.failures = self.failures.saturating_add(1),
            Says::FailsPerhaps => {
                if self.suspect(key) {
                    self.failures = self.failures.saturating_add(1);
                }
            }
        }
        let works = says == Says::FailsPerhaps
            && self.worked_at.is_some_and(|worked_at| now < worked_at + SUSPECT_AFTER);
        let is_enough =
            self.settings.failures > 0 && self.failures >= self.settings.failures && !works;
        (is_enough && self.is_closed()).then(|| {
            self.open(Cause::Failures, after, now, jitter);
            Change::Opened
        })
    }

    /// The probe that was sent ended.
    pub(super) fn probed(
        &mut self,
        key: &InboxKey,
        says: Says,
        still_gone: bool,
        after: Option<Duration>,
        now: Instant,
        jitter: impl Fn(Duration) -> Duration,
    ) -> Change {
        if says == Says::Works && !still_gone {
            self.close(now);
            return Change::Closed;
        }
        if matches!(says, Says::FailsPerhaps | Says::FailsHere | Says::GoneHere) {
            self.suspect(key);
        }
        let cause = if still_gone { Cause::Gone } else { Cause::Failures };
        self.open_again(cause, after, now, jitter);
        Change::StaysOpen
    }

    /// Opens it. A breaker that has just closed goes on where it was with its delays.
    pub(super) fn open(
        &mut self,
        cause: Cause,
        after: Option<Duration>,
        now: Instant,
        jitter: impl Fn(Duration) -> Duration,
    ) {
        let settled = self.settings.probe_cap;
        if self.closed_at.is_none_or(|closed_at| now >= closed_at + settled) {
            self.delay = self.settings.probe_initial;
        }
        self.open_again(cause, after, now, jitter);
    }

    fn open_again(
        &mut self,
        cause: Cause,
        after: Option<Duration>,
        now: Instant,
        jitter: impl Fn(Duration) -> Duration,
    ) {
        let cap = self.settings.probe_cap.max(self.settings.probe_initial);
        let half = self.delay / 2;
        // What the application asks for in 429 and 503 holds for its message alone as long as
        // others are answered: it may have said it of one tenant. Said in a row, it is said of
        // the application.
        let wished = after.unwrap_or_default().min(cap);
        let delay = (half + jitter(half)).max(wished);
        self.phase = Phase::Open { cause, probe_at: now + delay };
        self.delay = self.delay.saturating_mul(2).min(cap);
    }

    pub(super) fn close(&mut self, now: Instant) {
        self.phase = Phase::Closed;
        self.failures = 0;
        self.suspects.clear();
        self.closed_at = Some(now);
    }

    /// An attempt that was no probe has it that every path says 410.
    pub(super) fn gone(
        &mut self,
        now: Instant,
        jitter: impl Fn(Duration) -> Duration,
    ) -> Option<Change> {
        if self.is_closed() {
            self.open(Cause::Gone, None, now, jitter);
            return Some(Change::Opened);
        }
        self.set_cause(Cause::Gone);
        None
    }

    /// An attempt that was no probe has it that one path says 410 no more: what it said instead
    /// decides.
    pub(super) fn no_longer_gone(&mut self, says: Says, now: Instant) -> Option<Change> {
        if says == Says::Works {
            self.close(now);
            return Some(Change::Closed);
        }
        self.set_cause(Cause::Failures);
        None
    }

    fn set_cause(&mut self, to: Cause) {
        match &mut self.phase {
            Phase::Open { cause, .. }
            | Phase::Asking { cause }
            | Phase::Wanted { cause, .. }
            | Phase::Sent { cause } => *cause = to,
            Phase::Closed => {}
        }
    }

    /// Its next probe goes now: something has changed for the better.
    pub(super) fn hurry(&mut self, now: Instant) {
        if let Phase::Open { probe_at, .. } = &mut self.phase {
            *probe_at = now;
        }
    }

    /// It is time: the host or the health URL is asked.
    pub(super) fn asks(&mut self, now: Instant) -> bool {
        match self.phase {
            Phase::Open { cause, probe_at } if now >= probe_at => {
                self.phase = Phase::Asking { cause };
                true
            }
            _ => false,
        }
    }

    /// What it answered. `Some`: it stays open.
    pub(super) fn was_answered(
        &mut self,
        is_well: bool,
        now: Instant,
        jitter: impl Fn(Duration) -> Duration,
    ) -> Option<Change> {
        let Phase::Asking { cause } = self.phase else { return None };
        if is_well {
            self.phase = Phase::Wanted { cause, fresh_until: now + FRESH_WAIT };
            return None;
        }
        self.open_again(cause, None, now, jitter);
        Some(Change::StaysOpen)
    }

    /// A message was chosen.
    pub(super) fn sent(&mut self) {
        if let Phase::Wanted { cause, .. } = self.phase {
            self.phase = Phase::Sent { cause };
        }
    }

    /// It came back without having been sent, or without an answer: another one may go.
    pub(super) fn not_sent(&mut self, now: Instant) {
        if let Phase::Sent { cause } = self.phase {
            self.phase = Phase::Wanted { cause, fresh_until: now + FRESH_WAIT };
        }
    }

    /// True: it was none of them.
    fn suspect(&mut self, key: &InboxKey) -> bool {
        if self.suspects(key) {
            return false;
        }
        if self.suspects.len() >= SUSPECTS_MAX {
            self.suspects.pop_front();
        }
        self.suspects.push_back(key.clone());
        true
    }
}

#[cfg(test)]
mod tests {
    use inboxd_contract::{ConsumerId, MessageId};

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn key(id: &str) -> InboxKey {
        InboxKey {
            consumer_id: ConsumerId::new("c").unwrap(),
            message_id: MessageId::from_bytes(id.as_bytes()).unwrap(),
        }
    }

    /// Without jitter: the whole bound.
    fn whole(bound: Duration) -> Duration {
        bound
    }

    fn breaker() -> Breaker {
        Breaker::new(BreakerSettings { failures: 3, ..BreakerSettings::default() })
    }

    fn note(breaker: &mut Breaker, id: &str, says: Says) -> Option<Change> {
        breaker.note(&key(id), says, None, Instant::now(), whole)
    }

    fn probe_in(breaker: &Breaker) -> Duration {
        match breaker.phase() {
            Phase::Open { probe_at, .. } => probe_at.saturating_duration_since(Instant::now()),
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn many_that_fail_at_once_do_not_open_it_while_others_are_answered() {
        let mut breaker = breaker();
        for turn in 0..10 {
            assert_eq!(note(&mut breaker, "healthy", Says::Works), None);
            tokio::time::advance(SUSPECT_AFTER - SECOND / 1_000).await;
            for n in 0..20 {
                let failed = note(&mut breaker, &format!("{turn}/{n}"), Says::FailsPerhaps);
                assert_eq!(failed, None);
            }
        }
        tokio::time::advance(SECOND / 1_000).await;
        assert_eq!(note(&mut breaker, "one more", Says::FailsPerhaps), Some(Change::Opened));
    }

    /// Lets a probe go.
    async fn send(breaker: &mut Breaker) {
        tokio::time::advance(probe_in(breaker)).await;
        assert!(breaker.asks(Instant::now()));
        assert_eq!(breaker.was_answered(true, Instant::now(), whole), None);
        breaker.sent();
    }

    #[tokio::test(start_paused = true)]
    async fn failures_of_the_endpoint_in_a_row_open_it_one_message_s_too() {
        let mut breaker = breaker();
        assert_eq!(note(&mut breaker, "a", Says::Fails), None);
        assert_eq!(note(&mut breaker, "a", Says::Fails), None);
        assert_eq!(note(&mut breaker, "b", Says::Works), None, "the row begins anew");
        assert_eq!(note(&mut breaker, "a", Says::Fails), None);
        assert_eq!(note(&mut breaker, "a", Says::Gone), None, "410 is no part of it");
        assert_eq!(note(&mut breaker, "a", Says::Fails), None);
        assert_eq!(note(&mut breaker, "a", Says::Fails), Some(Change::Opened));
        assert_eq!(note(&mut breaker, "a", Says::Fails), None, "once");
    }

    #[tokio::test(start_paused = true)]
    async fn what_may_be_the_message_s_own_doing_counts_once_a_message() {
        let mut breaker = breaker();
        for _ in 0..50 {
            assert_eq!(note(&mut breaker, "poison", Says::FailsPerhaps), None);
        }
        assert_eq!(note(&mut breaker, "b", Says::FailsPerhaps), None);
        assert_eq!(note(&mut breaker, "c", Says::FailsPerhaps), Some(Change::Opened));
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_remembered_of_messages_is_bounded() {
        let settings = BreakerSettings { failures: u32::MAX, ..BreakerSettings::default() };
        let mut breaker = Breaker::new(settings);
        for n in 0..10_000 {
            note(&mut breaker, &format!("m{n}"), Says::FailsPerhaps);
        }
        assert_eq!(breaker.suspects.len(), SUSPECTS_MAX);
    }

    #[tokio::test(start_paused = true)]
    async fn zero_failures_mean_never() {
        let settings = BreakerSettings { failures: 0, ..BreakerSettings::default() };
        let mut breaker = Breaker::new(settings);
        for n in 0..100 {
            assert_eq!(note(&mut breaker, &format!("m{n}"), Says::Fails), None);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn probes_go_at_growing_distances_to_a_cap() {
        let mut breaker = breaker();
        breaker.open(Cause::Failures, None, Instant::now(), whole);
        for seconds in [1, 2, 4, 8, 16, 30, 30] {
            assert_eq!(probe_in(&breaker), SECOND * seconds);
            send(&mut breaker).await;
            let now = Instant::now();
            let change = breaker.probed(&key("a"), Says::Fails, false, None, now, whole);
            assert_eq!(change, Change::StaysOpen);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_host_that_refuses_is_asked_again_without_a_message() {
        let mut breaker = breaker();
        breaker.open(Cause::Failures, None, Instant::now(), whole);
        assert!(!breaker.asks(Instant::now()), "not yet");
        tokio::time::advance(SECOND).await;
        assert!(breaker.asks(Instant::now()));
        assert!(!breaker.asks(Instant::now()), "once");
        let change = breaker.was_answered(false, Instant::now(), whole);
        assert_eq!((change, probe_in(&breaker)), (Some(Change::StaysOpen), SECOND * 2));
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_opens_again_soon_goes_on_with_its_distances() {
        let mut breaker = breaker();
        breaker.open(Cause::Failures, None, Instant::now(), whole);
        send(&mut breaker).await;
        let close = |breaker: &mut Breaker| {
            breaker.probed(&key("a"), Says::Works, false, None, Instant::now(), whole)
        };
        assert_eq!(close(&mut breaker), Change::Closed);
        breaker.open(Cause::Failures, None, Instant::now(), whole);
        assert_eq!(probe_in(&breaker), SECOND * 2);
        send(&mut breaker).await;
        close(&mut breaker);
        tokio::time::advance(SECOND * 30).await;
        breaker.open(Cause::Failures, None, Instant::now(), whole);
        assert_eq!(probe_in(&breaker), SECOND);
    }

    #[tokio::test(start_paused = true)]
    async fn retry_after_holds_for_the_next_probe_up_to_the_cap() {
        let mut breaker = breaker();
        let mut open = |after| {
            breaker.open(Cause::Failures, Some(SECOND * after), Instant::now(), whole);
            probe_in(&breaker)
        };
        assert_eq!(open(20), SECOND * 20);
        assert_eq!(open(600), SECOND * 30);
    }

    #[tokio::test(start_paused = true)]
    async fn a_probe_that_was_never_sent_decides_nothing() {
        let mut breaker = breaker();
        breaker.open(Cause::Failures, None, Instant::now(), whole);
        send(&mut breaker).await;
        assert!(matches!(breaker.phase(), Phase::Sent { .. }));
        breaker.not_sent(Instant::now());
        assert!(matches!(breaker.phase(), Phase::Wanted { .. }));
    }

    #[tokio::test(start_paused = true)]
    async fn what_failed_as_a_probe_is_suspect_until_something_works() {
        let mut breaker = breaker();
        breaker.open(Cause::Failures, None, Instant::now(), whole);
        send(&mut breaker).await;
        breaker.probed(&key("poison"), Says::FailsPerhaps, false, None, Instant::now(), whole);
        assert!(breaker.suspects(&key("poison")) && !breaker.suspects(&key("other")));
        note(&mut breaker, "late", Says::Works);
        assert_eq!(probe_in(&breaker), Duration::ZERO, "who answers well is asked at once");
        assert!(breaker.suspects(&key("poison")));
        send(&mut breaker).await;
        breaker.probed(&key("other"), Says::Works, false, None, Instant::now(), whole);
        assert!(!breaker.suspects(&key("poison")));
    }
}
