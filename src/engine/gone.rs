//! 410 Gone: which paths of the callback said it last, and whether the subscription pauses.
//!
//! Invariants: it pauses only while every path that messages can go to answered 410 last, so that
//! one route that is gone holds up no other, seen or not; what is no answer (a refused connection, a timeout)
//! changes nothing; a pause and its end are told once in a while, however often they take turns.
//! What it does not do: retry. Messages of a path that is gone are tried again as any others.

use std::sync::Arc;

use inboxd_contract::{RetryReason, Verdict};
use tokio::time::Instant;

use super::settings::{OnUnrouted, SubscriptionSettings};
use super::trouble::EVERY;

/// What each path said. Bounded by the routes of the configuration.
pub(super) struct Endpoints {
    /// How many there are.
    count: usize,
    /// `None` is the callback's own path.
    paths: Vec<(Option<Arc<str>>, bool)>,
    is_paused: bool,
    /// When a pause was told last.
    told: Option<Instant>,
    /// The end of the pause is still to be told.
    end_is_owed: bool,
}

/// The subscription pauses or goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Turn {
    pub(super) is_paused: bool,
    /// Say so.
    pub(super) tell: bool,
}

impl Endpoints {
    pub(super) fn new(settings: &SubscriptionSettings) -> Self {
        let mut paths: Vec<_> = settings.routes.iter().map(|route| Some(&*route.path)).collect();
        if paths.is_empty() || settings.on_unrouted == OnUnrouted::Forward {
            paths.push(None);
        }
        paths.sort_unstable();
        paths.dedup();
        Self::of(paths.len())
    }

    /// Paths that messages can go to.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Every one of them said 410 last.
    pub(super) fn is_paused(&self) -> bool {
        self.is_paused
    }

    fn of(count: usize) -> Self {
        Self { count, paths: Vec::new(), is_paused: false, told: None, end_is_owed: false }
    }

    /// A call of this path came to this; `Some` where that pauses the subscription or ends its
    /// pause.
    pub(super) fn note(&mut self, path: Option<&Arc<str>>, verdict: &Verdict) -> Option<Turn> {
        let is_gone = match verdict {
            Verdict::Retry { reason: RetryReason::Gone, .. } => true,
            Verdict::Retry { status: None, .. } => return None,
            _ => false,
        };
        match self.paths.iter_mut().find(|(known, _)| known.as_ref() == path) {
            Some((_, was_gone)) => *was_gone = is_gone,
            None => self.paths.push((path.cloned(), is_gone)),
        }
        let is_paused = self.paths.iter().filter(|(_, is_gone)| *is_gone).count() >= self.count;
        if std::mem::replace(&mut self.is_paused, is_paused) == is_paused {
            return None;
        }
        let now = Instant::now();
        let tell = match is_paused {
            true => self.told.is_none_or(|told| now >= told + EVERY),
            false => std::mem::take(&mut self.end_is_owed),
        };
        if is_paused && tell {
            (self.told, self.end_is_owed) = (Some(now), true);
        }
        Some(Turn { is_paused, tell })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAUSED: Option<Turn> = Some(Turn { is_paused: true, tell: true });
    const BACK: Option<Turn> = Some(Turn { is_paused: false, tell: true });

    fn retry(reason: RetryReason, status: Option<u16>) -> Verdict {
        Verdict::Retry { reason, status, after: None, detail: String::new() }
    }

    fn gone() -> Verdict {
        retry(RetryReason::Gone, Some(410))
    }

    #[tokio::test(start_paused = true)]
    async fn only_an_answer_ends_the_pause() {
        let mut endpoints = Endpoints::of(1);
        assert_eq!(endpoints.note(None, &gone()), PAUSED);
        assert_eq!(endpoints.note(None, &gone()), None);
        assert_eq!(endpoints.note(None, &retry(RetryReason::Unreachable, None)), None);
        assert_eq!(endpoints.note(None, &retry(RetryReason::Timeout, None)), None);
        assert_eq!(endpoints.note(None, &retry(RetryReason::ServerError, Some(500))), BACK);
    }

    #[tokio::test(start_paused = true)]
    async fn one_path_that_is_gone_pauses_nothing_while_another_answers() {
        let (mut endpoints, refunds) = (Endpoints::of(2), Arc::<str>::from("/refunds"));
        let accepted = Verdict::Accepted { status: 200 };
        // The other was not called yet: it is not gone for that.
        assert_eq!(endpoints.note(Some(&refunds), &gone()), None);
        assert_eq!(endpoints.note(None, &accepted), None);
        for _ in 0..10 {
            assert_eq!(endpoints.note(Some(&refunds), &gone()), None);
            assert_eq!(endpoints.note(None, &accepted), None);
        }
        assert_eq!(endpoints.note(None, &gone()), PAUSED, "all of them");
        assert_eq!(endpoints.note(Some(&refunds), &accepted), BACK, "one is enough");
    }

    #[tokio::test(start_paused = true)]
    async fn a_path_that_cannot_decide_is_told_once_in_a_while() {
        let mut endpoints = Endpoints::of(1);
        let accepted = Verdict::Accepted { status: 200 };
        assert_eq!(endpoints.note(None, &gone()), PAUSED);
        assert_eq!(endpoints.note(None, &accepted), BACK);
        assert_eq!(endpoints.note(None, &gone()), Some(Turn { is_paused: true, tell: false }));
        assert_eq!(endpoints.note(None, &accepted), Some(Turn { is_paused: false, tell: false }));
        tokio::time::advance(EVERY).await;
        assert_eq!(endpoints.note(None, &gone()), PAUSED);
    }
}
