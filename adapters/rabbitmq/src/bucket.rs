//! A token bucket: how many releases may be told to the broker now.

use std::time::Duration;

use tokio::time::Instant;

/// Grants at most `per_second` a second, and as many at once after a pause of a second.
#[derive(Debug)]
pub(crate) struct TokenBucket {
    per_second: f64,
    tokens: f64,
    at: Instant,
}

impl TokenBucket {
    /// A full one.
    pub(crate) fn new(per_second: u32, now: Instant) -> Self {
        let per_second = f64::from(per_second.max(1));
        Self { per_second, tokens: per_second, at: now }
    }

    /// Takes up to `most` tokens.
    pub(crate) fn take(&mut self, most: usize, now: Instant) -> usize {
        let gained = now.saturating_duration_since(self.at).as_secs_f64() * self.per_second;
        self.tokens = (self.tokens + gained).min(self.per_second);
        self.at = now;
        let granted = (self.tokens.floor() as usize).min(most);
        self.tokens -= granted as f64;
        granted
    }

    /// When the next token is there.
    pub(crate) fn next_at(&self) -> Instant {
        let missing = (1.0 - self.tokens).max(0.0) / self.per_second;
        // A millisecond more, so that rounding never makes a loop that finds none.
        self.at + Duration::from_secs_f64(missing) + Duration::from_millis(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_and_then_the_rate() {
        let start = Instant::now();
        let mut bucket = TokenBucket::new(50, start);
        assert_eq!(bucket.take(500, start), 50);
        assert_eq!(bucket.take(500, start), 0);
        let next = bucket.next_at();
        assert!(next > start && next <= start + Duration::from_millis(30));
        assert_eq!(bucket.take(500, next), 1);
        let mut granted = 0;
        for tick in 1..=100 {
            granted += bucket.take(500, next + Duration::from_millis(tick * 10));
        }
        assert!((49..=51).contains(&granted), "{granted} in a second");
        assert_eq!(bucket.take(500, next + Duration::from_secs(3_600)), 50, "no more than a burst");
    }
}
