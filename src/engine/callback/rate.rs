//! How many POSTs begin in a second: a bucket of tokens that fills evenly.
//!
//! Invariants: over any stretch of time no more begin than the rate allows and the bucket holds;
//! a token that was not used comes back. A change holds at once. What it does not do: wait. Who
//! waits and in which order is decided in one place, with the other conditions of a POST, by the
//! same clock (tokio's, so that paused time drives it): a crate for rate limits has a queue and a
//! clock of its own, and a rate that is set once.

use std::time::Duration;

use tokio::time::Instant;

/// What the bucket holds, as time: how much may begin at once after a while without any.
const BURST_SECONDS: f64 = 0.05;
/// The least rate: one POST in about three hours. Nothing at all is a pause.
const RATE_MIN: f64 = 0.000_1;
/// The least time to the next token.
const WAIT_MIN: Duration = Duration::from_micros(1);
/// What is lost in adding up fractions.
const EPSILON: f64 = 1e-6;

#[derive(Debug)]
pub(super) struct Rate {
    per_second: Option<f64>,
    tokens: f64,
    /// When `tokens` was right.
    at: Instant,
}

impl Rate {
    pub(super) fn new(per_second: Option<f64>, now: Instant) -> Self {
        Self { per_second: usable(per_second), tokens: 1.0, at: now }
    }

    pub(super) fn per_second(&self) -> Option<f64> {
        self.per_second
    }

    /// From now on.
    pub(super) fn set(&mut self, per_second: Option<f64>, now: Instant) {
        self.fill(now);
        self.per_second = usable(per_second);
        self.tokens = self.tokens.min(self.capacity());
    }

    /// A POST may begin.
    pub(super) fn has(&mut self, now: Instant) -> bool {
        self.fill(now);
        self.per_second.is_none() || self.tokens >= 1.0 - EPSILON
    }

    /// One begins.
    pub(super) fn take(&mut self) {
        if self.per_second.is_some() {
            self.tokens = (self.tokens - 1.0).max(0.0);
        }
    }

    /// One that was to begin did not.
    pub(super) fn give_back(&mut self) {
        self.tokens = (self.tokens + 1.0).min(self.capacity());
    }

    /// When the next may begin; `None`: it does not depend on time.
    pub(super) fn next_at(&mut self, now: Instant) -> Option<Instant> {
        let rate = self.per_second?;
        self.fill(now);
        let missing = 1.0 - EPSILON - self.tokens;
        // Never now while there is none: who waits for it would not be woken.
        let wait = Duration::from_secs_f64((missing / rate).max(0.0)).max(WAIT_MIN);
        Some(if missing <= 0.0 { now } else { now + wait })
    }

    fn capacity(&self) -> f64 {
        self.per_second.map_or(1.0, |rate| (rate * BURST_SECONDS).max(1.0))
    }

    fn fill(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.at).as_secs_f64();
        let rate = self.per_second.unwrap_or(0.0);
        self.tokens = (self.tokens + passed * rate).min(self.capacity());
        self.at = now;
    }
}

fn usable(per_second: Option<f64>) -> Option<f64> {
    per_second.filter(|rate| rate.is_finite()).map(|rate| rate.max(RATE_MIN))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many begin within `during`, if as many as possible do.
    async fn begun(rate: &mut Rate, during: Duration) -> usize {
        let (end, mut begun) = (Instant::now() + during, 0);
        loop {
            while rate.has(Instant::now()) {
                rate.take();
                begun += 1;
                assert!(begun < 1_000_000, "no rate at all");
            }
            let next = rate.next_at(Instant::now()).unwrap();
            if next >= end {
                tokio::time::sleep_until(end).await;
                return begun;
            }
            tokio::time::sleep_until(next).await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn as_many_begin_as_the_rate_says_slow_or_fast() {
        for (per_second, during, least, most) in
            [(0.5, 60, 29, 31), (10.0, 10, 98, 101), (5_000.0, 2, 9_900, 10_250)]
        {
            let mut rate = Rate::new(Some(per_second), Instant::now());
            let begun = begun(&mut rate, Duration::from_secs(during)).await;
            assert!((least..=most).contains(&begun), "{per_second}/s for {during} s: {begun}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_long_rest_saves_up_little() {
        let mut rate = Rate::new(Some(100.0), Instant::now());
        tokio::time::advance(Duration::from_secs(3_600)).await;
        let mut at_once = 0;
        while rate.has(Instant::now()) {
            rate.take();
            at_once += 1;
        }
        assert_eq!(at_once, 5);
    }

    #[tokio::test(start_paused = true)]
    async fn a_change_holds_at_once_and_what_was_not_used_comes_back() {
        let now = Instant::now();
        let mut rate = Rate::new(Some(1.0), now);
        rate.take();
        assert!(!rate.has(now));
        rate.give_back();
        assert!(rate.has(now));
        rate.take();
        rate.set(Some(100.0), now);
        let next = rate.next_at(now).unwrap() - now;
        assert!((9..=10).contains(&next.as_millis()), "{next:?}");
        rate.set(None, now);
        assert!(rate.has(now));
        assert_eq!(rate.next_at(now), None);
        rate.set(Some(f64::NAN), now);
        assert_eq!(rate.per_second(), None);
    }
}
