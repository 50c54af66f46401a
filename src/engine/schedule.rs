//! When a message that failed is tried again, and when no more.
//!
//! Invariants: what says nothing of the message (an endpoint that is away, wrong or overloaded)
//! never makes a dead letter before `park.elapsed_max`; a message that fails always comes to an
//! end, by attempts or by age.

use std::time::Duration;

use inboxd_contract::{DeadReason, RetryReason};

use super::settings::{RetrySettings, SubscriptionSettings};

/// The longest `last_error` that is stored, in bytes.
const ERROR_BYTES_MAX: usize = 2_048;

/// What a failed attempt says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Failed {
    /// To be tried again, for this reason.
    Retry(RetryReason),
    /// The application asked to have it later.
    Asked,
}

impl Failed {
    /// Another message might have fared otherwise.
    fn is_of_the_message(self) -> bool {
        match self {
            Self::Asked => true,
            Self::Retry(reason) => match reason {
                RetryReason::Timeout
                | RetryReason::Disconnected
                | RetryReason::Busy
                | RetryReason::ServerError => true,
                RetryReason::Unreachable
                | RetryReason::Overloaded
                | RetryReason::Endpoint
                | RetryReason::Gone => false,
            },
        }
    }
}

/// Whether a message that failed after so many attempts, first received so long ago, is dead.
pub(super) fn death(
    park: &RetrySettings,
    attempts: u32,
    first_ago: Duration,
    failed: Failed,
) -> Option<DeadReason> {
    if first_ago >= park.elapsed_max {
        return Some(DeadReason::TooOld);
    }
    (attempts >= park.attempts_max && failed.is_of_the_message())
        .then_some(DeadReason::AttemptsExhausted)
}

/// The bound of the delay with which a message is parked after so many attempts.
pub(super) fn parking_bound(settings: &SubscriptionSettings, attempts: u32) -> Duration {
    bound(&settings.park, attempts.saturating_sub(settings.retry.attempts_max))
}

/// The same for one that a worker has tried: as often as it would be in place it is tried soon.
pub(super) fn worker_bound(settings: &SubscriptionSettings, attempts: u32) -> Duration {
    match attempts < settings.retry.attempts_max {
        true => bound(&settings.retry, attempts.saturating_sub(1)),
        false => parking_bound(settings, attempts),
    }
}

fn bound(schedule: &RetrySettings, step: u32) -> Duration {
    let factor = f64::from(schedule.factor).max(1.0);
    let exponent = i32::try_from(step).unwrap_or(i32::MAX);
    let seconds = schedule.initial.as_secs_f64() * factor.powi(exponent);
    match seconds.is_finite() && seconds < schedule.cap.as_secs_f64() {
        true => Duration::from_secs_f64(seconds),
        false => schedule.cap,
    }
}

/// An error as a column takes it.
pub(super) fn stored_error(text: &str) -> String {
    let mut clean: String = text.chars().filter(|c| *c != '\0').collect();
    if clean.len() > ERROR_BYTES_MAX {
        clean.truncate(clean.floor_char_boundary(ERROR_BYTES_MAX));
    }
    clean
}

#[cfg(test)]
mod tests {
    use strum::IntoEnumIterator as _;

    use super::*;

    const DAY: Duration = Duration::from_secs(86_400);

    #[test]
    fn the_endpoint_s_own_failures_kill_no_message_before_its_age_does() {
        let park = RetrySettings { attempts_max: 3, elapsed_max: DAY, ..RetrySettings::PARKED };
        for reason in RetryReason::iter() {
            let failed = Failed::Retry(reason);
            assert_eq!(death(&park, 2, Duration::ZERO, failed), None, "{reason:?}");
            let exhausted = failed.is_of_the_message().then_some(DeadReason::AttemptsExhausted);
            assert_eq!(death(&park, 3, Duration::ZERO, failed), exhausted, "{reason:?}");
            assert_eq!(death(&park, 1, DAY, failed), Some(DeadReason::TooOld), "{reason:?}");
        }
        use RetryReason::{Endpoint, Gone, Overloaded, Unreachable};
        for reason in [Unreachable, Overloaded, Endpoint, Gone] {
            assert!(!Failed::Retry(reason).is_of_the_message(), "{reason:?}");
        }
    }

    #[test]
    fn delays_grow_to_their_cap_whatever_the_numbers() {
        let schedule = RetrySettings::PARKED;
        assert_eq!(bound(&schedule, 0), schedule.initial);
        assert_eq!(bound(&schedule, 1), schedule.initial * 2);
        for step in [20, 1_000, u32::MAX] {
            assert_eq!(bound(&schedule, step), schedule.cap);
        }
    }

    #[test]
    fn an_error_is_cut_between_two_characters() {
        let long = format!("a\0{}", "é".repeat(2_000));
        let stored = stored_error(&long);
        assert_eq!(stored.len(), 2_047);
        assert!(!stored.contains('\0'));
    }
}
