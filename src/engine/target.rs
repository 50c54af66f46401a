//! Dead letters on the broker: published, confirmed and routed before their row is written and
//! their delivery acked.
//!
//! Invariants: a letter is published for as long as it takes, or until its message may not be
//! settled here any more; while one waits for the target, nothing more is taken from the source
//! and from `inbox_parked`; what the broker will never take is kept whole in the table; where
//! only the broker was to have it, the row keeps no body.
//!
//! | died after | what is left | what comes of it |
//! |---|---|---|
//! | publishing, before the confirm | perhaps the copy | decided anew: published again |
//! | the confirm | the copy on the broker | decided anew: published again, then the row |
//! | the row's commit | copy and row | acked as `dead_duplicate` where the broker has positions |

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use inboxd_contract::{DeadLetter, DeadLetterTarget, LetterCopy, PublishError};

use super::hub::Hub;
use super::message::Gate;
use super::settings::{DeadLetterTo, RetrySettings};
use super::shown::Shown;
use super::subscription::Shared;

const PUBLISH_RETRY: RetrySettings = RetrySettings {
    initial: Duration::from_millis(100),
    cap: Duration::from_secs(5),
    ..RetrySettings::IN_PLACE
};

/// Where the dead letters of a subscription go beside the table.
pub(super) struct Letters {
    target: Option<Arc<dyn DeadLetterTarget>>,
    to: DeadLetterTo,
    /// Letters that the target has not taken yet and that are tried again.
    waiting: Mutex<usize>,
    /// There are such.
    away: Shown<bool>,
}

/// A letter among those that wait, as long as it lives.
struct Waiting<'a>(&'a Shared);

impl Letters {
    /// Without a target everything goes to the table.
    pub(super) fn new(target: Option<Arc<dyn DeadLetterTarget>>, to: DeadLetterTo) -> Self {
        Self { target, to, waiting: Mutex::default(), away: Shown::new(false) }
    }

    /// True while letters wait for the target.
    pub(super) fn away(&self) -> Shown<bool> {
        self.away.clone()
    }

    fn target(&self) -> Option<&Arc<dyn DeadLetterTarget>> {
        self.target.as_ref().filter(|_| self.to != DeadLetterTo::Table)
    }

    /// Publishes a letter where that is configured, and answers what the row is to hold. `None`:
    /// the message may not be settled here any more, or nothing new may start while the target
    /// is away.
    ///
    /// # Cancel safety
    /// Dropped in the middle, the copy may be published or not.
    pub(super) async fn publish(
        &self,
        shared: &Shared,
        gate: Gate<'_>,
        letter: DeadLetter,
    ) -> Option<DeadLetter> {
        let Some(target) = self.target() else { return Some(letter) };
        if broken!(RecordBeforePublish) {
            return Some(self.row_of(letter));
        }
        let away = self.away();
        let mut delays = Hub::backoff(&PUBLISH_RETRY);
        let mut waiting = None;
        loop {
            let copy = LetterCopy {
                envelope: &letter.envelope,
                key: &letter.key,
                subscription: &letter.subscription,
                reason: letter.reason,
                attempts: letter.attempts,
                last_status: letter.last_status,
                last_error: letter.last_error.as_deref(),
                first_ago: letter.first_ago,
            };
            failpoint!(LetterBegins);
            let error = match gate.unless_lost(target.publish(copy)).await? {
                Ok(()) => {
                    failpoint!(LetterPublished);
                    shared.metrics.letter_published();
                    self.is_back(shared);
                    return Some(self.row_of(letter));
                }
                Err(error) if error.refused => {
                    let PublishError { what, code, .. } = &error;
                    tracing::error!(%code, key = ?letter.key, what, "the broker will never take this dead letter; the table keeps it whole");
                    self.is_back(shared);
                    return Some(letter);
                }
                Err(error) => error,
            };
            if gate.is_stopped() {
                return None;
            }
            waiting.get_or_insert_with(|| Waiting::new(shared));
            self.is_away(shared, target, &error);
            let bound = delays.next().unwrap_or(PUBLISH_RETRY.cap);
            let delay = shared.hub.jitter(bound).max(Duration::from_millis(20));
            let woken = async {
                tokio::select! {
                    biased;
                    _ = away.wait_for(|away| !away) => {}
                    () = tokio::time::sleep(delay) => {}
                }
            };
            gate.unless_stopped(woken).await?;
        }
    }

    /// What the table keeps of a letter that the broker has.
    fn row_of(&self, mut letter: DeadLetter) -> DeadLetter {
        letter.body_kept &= self.to == DeadLetterTo::Both;
        letter
    }

    fn is_away(&self, shared: &Shared, target: &Arc<dyn DeadLetterTarget>, error: &PublishError) {
        let reason = format!("{}: {}", target.describe(), error.what);
        shared.health.set_dead_letters(Some((error.code, &reason)));
        if !self.away.replace(true) {
            let code = error.code;
            tracing::error!(%code, subscription = %shared.settings.name, reason, "dead letters cannot be published; nothing more is taken until they can");
        }
    }

    fn is_back(&self, shared: &Shared) {
        if self.away.replace(false) {
            shared.health.set_dead_letters(None);
            tracing::info!(subscription = %shared.settings.name, "dead letters are published again; going on");
        }
    }

    fn count(&self) -> std::sync::MutexGuard<'_, usize> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<'a> Waiting<'a> {
    fn new(shared: &'a Shared) -> Self {
        *shared.letters.count() += 1;
        shared.metrics.letters_waiting(1);
        Self(shared)
    }
}

/// With the last one nobody is left who would find out that the target is back.
impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let Self(shared) = self;
        shared.metrics.letters_waiting(-1);
        let mut count = shared.letters.count();
        *count -= 1;
        if *count == 0 {
            drop(count);
            shared.letters.is_back(shared);
        }
    }
}

/// Waits while letters wait for their target.
///
/// # Cancel safety
/// Cancel-safe.
pub(super) async fn wait_while_away(shared: &Shared) {
    shared.letters.away().wait_for(|away| !away).await;
}
