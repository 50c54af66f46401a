//! What an operator is told of a source or an application that is in trouble.
//!
//! Invariants: a trouble is told when it begins, once in a while as long as it lasts, and when
//! it is over; never once a message. What it does not do: decide anything.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use inboxd_contract::{ErrorCode, RetryReason, SourcePhase, SourceStatus, Verdict};
use tokio::time::Instant;

/// Between two lines about one trouble that lasts, and the time without it after which it is over.
pub(super) const EVERY: Duration = Duration::from_secs(30);
/// Reasons of one trouble of a source that are told as they change; later ones once in a while.
const REASONS_AT_ONCE: u32 = 3;

/// The troubles of one application: by path and code, so that a path that fails and one that
/// answers do not take turns in the log. Bounded by the routes of the configuration times the
/// codes.
#[derive(Default)]
pub(super) struct CallbackTrouble(Mutex<Vec<Told>>);

/// What was said last of one path and code.
#[derive(Debug, Clone)]
struct Told {
    path: Option<Arc<str>>,
    code: ErrorCode,
    at: Instant,
    /// Attempts that came to the same since then.
    untold: u64,
    /// The last of them.
    last: Instant,
}

impl CallbackTrouble {
    /// One attempt at this path (`None`: the callback's own) came to this. `is_paused`: 410 is
    /// told with the pause.
    pub(super) fn note(
        &self,
        subscription: &str,
        path: Option<&Arc<str>>,
        verdict: &Verdict,
        is_paused: bool,
    ) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let (Verdict::Retry { status, detail, .. }, Some(code)) = (verdict, code_of(verdict))
        else {
            let answers = matches!(verdict, Verdict::Accepted { .. } | Verdict::Refused { .. });
            if answers && answer_ends(&mut all, path, now) {
                tracing::info!(
                    subscription,
                    path = path.map(|path| &**path),
                    "the application answers again"
                );
            }
            return;
        };
        if code == ErrorCode::CallbackGone && is_paused {
            return;
        }
        let known = all.iter_mut().find(|told| told.code == code && told.path.as_ref() == path);
        let untold = match known {
            Some(told) if now < told.at + EVERY => {
                (told.untold, told.last) = (told.untold + 1, now);
                return;
            }
            Some(told) => {
                (told.at, told.last) = (now, now);
                std::mem::take(&mut told.untold)
            }
            None => {
                all.push(Told { path: path.cloned(), code, at: now, untold: 0, last: now });
                0
            }
        };
        drop(all);
        tracing::warn!(
            %code,
            subscription,
            path = path.map(|path| &**path),
            status,
            detail,
            untold,
            "the application does not take messages; each is tried again"
        );
    }
}

/// An answer at this path; true: its troubles are over, since there was none for a while.
fn answer_ends(all: &mut Vec<Told>, path: Option<&Arc<str>>, now: Instant) -> bool {
    let of_path = |told: &Told| told.path.as_ref() == path;
    let Some(last) = all.iter().filter(|told| of_path(told)).map(|told| told.last).max() else {
        return false;
    };
    let is_over = now >= last + EVERY;
    if is_over {
        all.retain(|told| !of_path(told));
    }
    is_over
}

/// What an operator may have to mend; an application that is only busy is none of it.
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
        (RetryReason::Gone, _) => Some(ErrorCode::CallbackGone),
        (RetryReason::Overloaded | RetryReason::Busy, _) => None,
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
            (None, Some(_)) if matches!(now.phase, SourcePhase::Ready | SourcePhase::Standby) => {
                self.0 = None;
                tracing::info!(subscription, "the source's trouble is over");
            }
            // Without a code on its way to a first connection, or between two.
            (None, _) => {}
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
        let note = |verdict: &Verdict| trouble.note("orders", None, verdict, false);
        let told = || trouble.0.lock().unwrap().first().cloned();
        note(&retry(RetryReason::ServerError, Some(500)));
        let first = told().unwrap();
        note(&retry(RetryReason::ServerError, Some(500)));
        assert_eq!((told().unwrap().at, told().unwrap().untold), (first.at, 1));
        tokio::time::advance(EVERY).await;
        note(&retry(RetryReason::ServerError, Some(500)));
        assert_ne!(told().unwrap().at, first.at);
        note(&Verdict::Accepted { status: 200 });
        assert!(told().is_some(), "it may only have been this one");
        tokio::time::advance(EVERY).await;
        note(&retry(RetryReason::Busy, Some(409)));
        assert!(told().is_some(), "a busy answer ends nothing");
        note(&Verdict::Accepted { status: 200 });
        assert!(told().is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn paths_and_codes_that_take_turns_are_told_once_each() {
        let trouble = CallbackTrouble::default();
        let begun = Instant::now();
        let path: Arc<str> = "/refunds".into();
        for _ in 0..20 {
            trouble.note("orders", Some(&path), &retry(RetryReason::Endpoint, Some(404)), false);
            trouble.note("orders", None, &Verdict::Accepted { status: 200 }, false);
            trouble.note("orders", None, &retry(RetryReason::ServerError, Some(500)), false);
            trouble.note("orders", None, &retry(RetryReason::Unreachable, None), false);
            trouble.note("orders", None, &retry(RetryReason::Gone, Some(410)), true);
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        let told = trouble.0.lock().unwrap().clone();
        assert_eq!(told.len(), 3, "{told:?}");
        assert!(told.iter().all(|told| told.at == begun && told.untold == 19), "{told:?}");

        tokio::time::advance(EVERY).await;
        trouble.note("orders", None, &Verdict::Accepted { status: 200 }, false);
        let left = trouble.0.lock().unwrap().clone();
        assert_eq!(left.len(), 1, "the other path has not answered: {left:?}");
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
        assert_eq!(say(None, "").as_deref(), Some("lost"), "it has not connected");
        status.phase = SourcePhase::Ready;
        trouble.note("orders", &status);
        assert_eq!(told(&trouble), None);
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
