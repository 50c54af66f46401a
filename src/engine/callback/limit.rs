//! How many POSTs may be under way: a limit that follows how the application copes.
//!
//! Additive growth, multiplicative decrease, between 1 and `concurrency`, where it starts.
//! It falls on 429 and 503, and when the median of what was answered well takes far longer than
//! it did for long; each at most once for what was sent under one limit. Slow answers alone are a
//! hint and no refusal: they take it down to an eighth of `concurrency` and no further, since an
//! application that works in batches answers later under load and does more.
//!
//! Invariants: what was not answered (a timeout, a broken connection) and failures of single
//! messages (500) change nothing, so that a few messages that hang take nobody's place beyond
//! their own. After the breaker it starts from little and doubles with each round of answers,
//! also where it is not adaptive: the application has just come back.

use std::time::Duration;

use tokio::time::Instant;

/// What a refusal for overload leaves of the limit, and what slow answers do.
const AFTER_OVERLOAD: f64 = 0.7;
const AFTER_SLOWNESS: f64 = 0.8;
/// Slow: this many times the baseline, and so much more than it, in seconds.
const SLOW_FACTOR: f64 = 2.0;
const SLOW_MORE: f64 = 0.010;
/// How fast the baseline follows a median below and above it: what lasts becomes normal.
const FOLLOW_DOWN: f64 = 0.25;
const FOLLOW_UP: f64 = 1.0 / 32.0;
/// Answers that make a median.
const WINDOW_MIN: usize = 16;
const WINDOW_MAX: usize = 128;

#[derive(Debug)]
pub(super) struct Limit {
    adaptive: bool,
    /// `concurrency`: at least 1.
    most: f64,
    /// Between 1 and `most`.
    now: f64,
    /// Below that while it starts again.
    ramp: Option<f64>,
    /// Seconds.
    baseline: Option<f64>,
    /// Seconds of each good answer since the last median; at most [`WINDOW_MAX`].
    window: Vec<f64>,
    /// The last median was far above the baseline: no growth.
    is_slow: bool,
    /// What was sent before was sent under another limit.
    fell_at: Option<Instant>,
}

impl Limit {
    pub(super) fn new(concurrency: usize, adaptive: bool) -> Self {
        let most = concurrency.max(1) as f64;
        Self {
            adaptive,
            most,
            now: most,
            ramp: None,
            baseline: None,
            window: Vec::new(),
            is_slow: false,
            fell_at: None,
        }
    }

    /// POSTs that may be under way: at least 1.
    pub(super) fn get(&self) -> usize {
        (self.ramp.unwrap_or(f64::MAX).min(self.now).floor() as usize).max(1)
    }

    pub(super) fn most(&self) -> usize {
        self.most as usize
    }

    /// A limit that had not fallen moves with it.
    pub(super) fn set_most(&mut self, concurrency: usize) {
        let most = concurrency.max(1) as f64;
        if self.now >= self.most || !self.adaptive {
            self.now = most;
        }
        (self.most, self.now) = (most, self.now.min(most));
    }

    /// From little, up with what is answered.
    pub(super) fn start_again(&mut self) {
        self.ramp = Some(1.0);
        self.window.clear();
    }

    /// An answer to what was sent `took` ago that is no failure; `is_full`: as many were under
    /// way as may be.
    pub(super) fn answered(&mut self, took: Duration, is_full: bool, now: Instant) {
        if let Some(ramp) = &mut self.ramp {
            *ramp += 1.0;
            if *ramp >= self.now {
                self.ramp = None;
            }
            // The first answers of an application that comes back say nothing of its usual pace.
            return;
        }
        if !self.adaptive || self.is_of_before(took, now) {
            return;
        }
        if is_full && !self.is_slow {
            self.now = (self.now + 1.0 / self.now).min(self.most);
        }
        self.window.push(took.as_secs_f64());
        if self.window.len() >= (self.now as usize).clamp(WINDOW_MIN, WINDOW_MAX) {
            self.weigh(now);
        }
    }

    /// 429 or 503 to what was sent `took` ago.
    pub(super) fn overloaded(&mut self, took: Duration, now: Instant) {
        if self.adaptive && !self.is_of_before(took, now) {
            self.fall(AFTER_OVERLOAD, 1.0, now);
        }
    }

    fn is_of_before(&self, took: Duration, now: Instant) -> bool {
        self.fell_at.is_some_and(|fell_at| now.checked_sub(took).is_none_or(|sent| sent < fell_at))
    }

    fn weigh(&mut self, now: Instant) {
        let mut window = std::mem::take(&mut self.window);
        window.sort_unstable_by(f64::total_cmp);
        let median = window[window.len() / 2];
        let baseline = *self.baseline.get_or_insert(median);
        let follow = if median < baseline { FOLLOW_DOWN } else { FOLLOW_UP };
        self.baseline = Some(baseline + (median - baseline) * follow);
        self.is_slow = median > baseline * SLOW_FACTOR + SLOW_MORE;
        if self.is_slow {
            self.fall(AFTER_SLOWNESS, (self.most / 8.0).max(1.0), now);
        }
    }

    fn fall(&mut self, to: f64, least: f64, now: Instant) {
        let least = least.min(self.now);
        self.now = (self.now * to).max(least);
        self.fell_at = Some(now);
        self.window.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// So many rounds of as many answers as may be under way, each of which takes as long as
    /// `took` says for the limit.
    async fn rounds(limit: &mut Limit, rounds: usize, took: impl Fn(usize) -> Duration) {
        for _ in 0..rounds {
            let (under_way, took) = (limit.get(), took(limit.get()));
            tokio::time::advance(took).await;
            for _ in 0..under_way {
                limit.answered(took, true, Instant::now());
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn it_starts_at_concurrency_and_stays_while_all_is_well() {
        let mut limit = Limit::new(32, true);
        rounds(&mut limit, 100, |_| 10 * MS).await;
        assert_eq!(limit.get(), 32);
    }

    #[tokio::test(start_paused = true)]
    async fn a_round_of_refusals_for_overload_is_one_and_growth_is_by_one_a_round() {
        let mut limit = Limit::new(64, true);
        tokio::time::advance(10 * MS).await;
        for _ in 0..64 {
            limit.overloaded(10 * MS, Instant::now());
        }
        assert_eq!(limit.get(), 44);
        rounds(&mut limit, 5, |_| 10 * MS).await;
        assert!((48..=49).contains(&limit.get()), "{}", limit.get());
        rounds(&mut limit, 100, |_| 10 * MS).await;
        assert_eq!(limit.get(), 64);
    }

    #[tokio::test(start_paused = true)]
    async fn never_below_one_however_often_it_is_refused() {
        let mut limit = Limit::new(4, true);
        for _ in 0..50 {
            tokio::time::advance(MS).await;
            limit.overloaded(Duration::ZERO, Instant::now());
        }
        assert_eq!(limit.get(), 1);
        rounds(&mut limit, 200, |_| MS).await;
        assert_eq!(limit.get(), 4);
    }

    /// An application with four places: more at once only wait for one.
    #[tokio::test(start_paused = true)]
    async fn an_application_that_becomes_slow_gets_fewer_at_once_and_as_many_as_it_can_do() {
        let mut limit = Limit::new(64, true);
        rounds(&mut limit, 100, |_| 20 * MS).await;
        let queueing = |under_way: usize| 20 * MS * u32::try_from(under_way.div_ceil(4)).unwrap();
        rounds(&mut limit, 12, queueing).await;
        assert!((8..=24).contains(&limit.get()), "{}", limit.get());
        rounds(&mut limit, 400, |_| 20 * MS).await;
        assert_eq!(limit.get(), 64, "and it comes back with the pace");
    }

    #[tokio::test(start_paused = true)]
    async fn a_pace_that_lasts_becomes_the_usual_one() {
        let mut limit = Limit::new(32, true);
        rounds(&mut limit, 50, |_| 20 * MS).await;
        rounds(&mut limit, 20, |_| 200 * MS).await;
        assert_eq!(limit.get(), 4, "slowness alone takes it to an eighth");
        rounds(&mut limit, 2_000, |_| 200 * MS).await;
        assert_eq!(limit.get(), 32);
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_does_not_adapt_is_constant_but_for_its_start() {
        let mut limit = Limit::new(16, false);
        limit.overloaded(Duration::ZERO, Instant::now());
        rounds(&mut limit, 50, |_| 20 * MS).await;
        rounds(&mut limit, 50, |_| 2_000 * MS).await;
        assert_eq!(limit.get(), 16);
        limit.start_again();
        let mut seen = vec![limit.get()];
        for _ in 0..5 {
            rounds(&mut limit, 1, |_| MS).await;
            seen.push(limit.get());
        }
        assert_eq!(seen, [1, 2, 4, 8, 16, 16]);
    }

    #[test]
    fn concurrency_can_be_changed() {
        let mut limit = Limit::new(8, true);
        limit.set_most(16);
        assert_eq!((limit.get(), limit.most()), (16, 16), "one that has not fallen moves along");
        limit.set_most(0);
        assert_eq!((limit.get(), limit.most()), (1, 1));
    }
}
