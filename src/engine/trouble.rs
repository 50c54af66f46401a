//! What an operator is told of a source or an application that is in trouble.
//!
//! Invariants: a trouble is told when it begins, once in a while as long as it lasts, and when
//! it is over; never once a message. What it does not do: decide anything.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use inboxd_contract::{ErrorCode, RetryReason, SourcePhase, SourceStatus, Verdict};
use tokio::time::Instant;

/// Between two lines about an application whose trouble lasts.
const EVERY: Duration = Duration::from_secs(30);
/// Reasons of one trouble of a source that are told as they change; later ones once in a while.
const REASONS_AT_ONCE: u32 = 3;

/// The trouble of one application.
#[derive(Default)]
pub(super) struct CallbackTrouble(Mutex<Option<Told>>);

/// What was said last.
#[derive(Debug, Clone, Copy)]
struct Told {
    code: ErrorCode,
    at: Instant,
    untold: u64,
}

impl CallbackTrouble {
    /// One attempt came to this.
    pub(super) fn note(&self, subscription: &str, verdict: &Verdict) {
        let trouble = code_of(verdict);
        let mut told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (Verdict::Retry { status, detail, .. }, Some(code)) = (verdict, trouble) else {
            let answers = matches!(verdict, Verdict::Accepted { .. } | Verdict::Refused { .. });
            if answers && told.take().is_some() {
                tracing::info!(subscription, "the application answers again");
            }
            return;
        };
        let now = Instant::now();
        match &mut *told {
            Some(told) if told.code == code && now < told.at + EVERY => told.untold += 1,
            _ => {
                let untold = told.map_or(0, |told| told.untold);
                *told = Some(Told { code, at: now, untold: 0 });
                drop(told);
                tracing::warn!(
                    %code,
                    subscription,
                    status,
                    detail,
                    untold,
                    "the application does not take messages; each is tried again"
                );
            }
        }
    }
}

/// What an operator may have to mend; an application that is only busy is none of it, and 410
/// pauses the subscription, which says so itself.
fn code_of(verdict: &Verdict) -> Option<ErrorCode> {
    let Verdict::Retry { reason, status, .. } = verdict else { return None };
    match (reason, status) {
        (RetryReason::Unreachable, _) => Some(ErrorCode::CallbackUnreachable),
        (RetryReason::Timeout | RetryReason::Disconnected | RetryReason::ServerError, _) => {
            Some(ErrorCode::CallbackFailing)
        }
        // Without an answer it was the handshake.
        (RetryReason::Endpoint, None) => Some(ErrorCode::CallbackTls),
        (RetryReason::Endpoint, Some(_)) => Some(ErrorCode::CallbackWrong),
        (RetryReason::Overloaded | RetryReason::Busy | RetryReason::Gone, _) => None,
    }
}

impl Reason {
    fn is_enough(&self, words: &str) -> bool {
        self.words == words || self.lines >= REASONS_AT_ONCE && self.at.elapsed() < EVERY
    }
}

/// The trouble of one source, as it was told last.
#[derive(Default)]
pub(super) struct SourceTrouble(Option<Reason>);

struct Reason {
    code: ErrorCode,
    words: String,
    at: Instant,
    /// Lines since the trouble began.
    lines: u32,
}

impl SourceTrouble {
    /// Tells that it began, changed or is over. To be called with each status.
    pub(super) fn note(&mut self, subscription: &str, now: &SourceStatus) {
        if now.phase == SourcePhase::Closed {
            // Its trouble is not over: it is not asked any more.
            return;
        }
        let reason = &now.reason;
        match (now.code, &self.0) {
            (None, None) => {}
            (None, Some(_)) => {
                self.0 = None;
                tracing::info!(subscription, "the source's trouble is over");
            }
            (Some(code), Some(told)) if told.code == code && told.is_enough(reason) => {}
            (Some(code), told) => {
                let lines = told.as_ref().map_or(1, |told| told.lines + 1);
                tracing::warn!(%code, subscription, reason, "the source is not ready");
                self.0 = Some(Reason { code, words: reason.clone(), at: Instant::now(), lines });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn retry(reason: RetryReason, status: Option<u16>) -> Verdict {
        Verdict::Retry { reason, status, after: None, detail: String::new() }
    }

    #[test]
    fn what_an_operator_mends_has_a_code_and_a_busy_application_has_none() {
        let code = |reason, status| code_of(&retry(reason, status));
        assert_eq!(code(RetryReason::Endpoint, Some(404)), Some(ErrorCode::CallbackWrong));
        assert_eq!(code(RetryReason::Endpoint, None), Some(ErrorCode::CallbackTls));
        assert_eq!(code(RetryReason::Unreachable, None), Some(ErrorCode::CallbackUnreachable));
        assert_eq!(code(RetryReason::ServerError, Some(500)), Some(ErrorCode::CallbackFailing));
        assert_eq!(code(RetryReason::Busy, Some(409)), None);
        assert_eq!(code_of(&Verdict::Accepted { status: 200 }), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_trouble_is_told_once_in_a_while_and_its_end() {
        let trouble = CallbackTrouble::default();
        let told = || *trouble.0.lock().unwrap();
        trouble.note("orders", &retry(RetryReason::ServerError, Some(500)));
        let first = told().unwrap();
        trouble.note("orders", &retry(RetryReason::ServerError, Some(500)));
        assert_eq!((told().unwrap().at, told().unwrap().untold), (first.at, 1));
        tokio::time::advance(EVERY).await;
        trouble.note("orders", &retry(RetryReason::ServerError, Some(500)));
        assert_ne!(told().unwrap().at, first.at);
        trouble.note("orders", &retry(RetryReason::Busy, Some(409)));
        assert!(told().is_some(), "a busy answer ends nothing");
        trouble.note("orders", &Verdict::Accepted { status: 200 });
        assert!(told().is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn a_source_s_trouble_is_told_when_it_begins_changes_and_ends() {
        let mut trouble = SourceTrouble::default();
        let told = |trouble: &SourceTrouble| trouble.0.as_ref().map(|told| told.words.clone());
        let mut status = SourceStatus::connecting();
        trouble.note("orders", &status);
        assert_eq!(told(&trouble), None, "a first connection is no trouble");
        let mut say = |code, reason: &str| {
            status.code = code;
            status.reason = reason.into();
            trouble.note("orders", &status);
            told(&trouble)
        };
        assert_eq!(say(Some(ErrorCode::QueueMissing), "cancelled").as_deref(), Some("cancelled"));
        assert_eq!(say(Some(ErrorCode::QueueMissing), "no queue").as_deref(), Some("no queue"));
        for words in ["a", "b", "c"] {
            say(Some(ErrorCode::QueueMissing), words);
        }
        assert_eq!(say(Some(ErrorCode::QueueMissing), "d").as_deref(), Some("a"), "enough");
        tokio::time::advance(EVERY).await;
        assert_eq!(say(Some(ErrorCode::QueueMissing), "d").as_deref(), Some("d"));
        let other = Some(ErrorCode::SourceUnreachable);
        assert_eq!(say(other, "lost").as_deref(), Some("lost"), "another code is told at once");
        assert_eq!(say(None, ""), None);
    }

    #[test]
    fn a_source_that_is_closed_in_its_trouble_is_not_said_to_be_well() {
        let mut trouble = SourceTrouble::default();
        let mut status = SourceStatus::connecting();
        status.code = Some(ErrorCode::SourceUnreachable);
        trouble.note("orders", &status);
        status.code = None;
        status.phase = SourcePhase::Closed;
        trouble.note("orders", &status);
        assert!(trouble.0.is_some());
    }
}
