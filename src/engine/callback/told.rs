//! What an operator is told of a callback that rests.
//!
//! Invariants: its beginning and its end are told once in a while, however often they take
//! turns; an end is told exactly if its beginning was.

use inboxd_contract::ErrorCode;
use tokio::time::Instant;

use super::state::State;
use super::{Callback, CallbackState};
use crate::engine::trouble::EVERY;

#[derive(Debug, Default)]
pub(super) struct Told {
    /// When a rest was told last, by its state.
    open: Option<Instant>,
    health: Option<Instant>,
    starting: bool,
    gone: Option<Instant>,
    end_is_owed: bool,
}

impl Told {
    pub(super) fn turn(
        &mut self,
        callback: &Callback,
        was: CallbackState,
        is: CallbackState,
        state: &State,
        now: Instant,
    ) {
        use CallbackState::{Closed, Gone, Health, Open, Paused, Probing, Starting};
        let parts = &callback.parts;
        if matches!(was, Closed | Starting | Paused) && matches!(is, Open | Gone | Health) {
            parts.metrics.callback().opened(is.as_str());
        }
        if was == Paused || was == Gone {
            parts.metrics.paused(is == Paused || is == Gone);
        }
        if was == Gone {
            parts.health.set_paused(None);
        }
        let subscription = &*callback.name;
        let why = state.why();
        match is {
            Paused => parts.metrics.paused(true),
            Gone => {
                parts.metrics.paused(true);
                let reason = "the callback answered 410 Gone: nothing more is taken until it \
                              answers otherwise; put the endpoint back or change `callback`";
                let code = ErrorCode::CallbackGone;
                if is_due(&mut self.gone, now) {
                    self.end_is_owed = true;
                    tracing::error!(%code, subscription, reason, "paused");
                }
                parts.health.set_paused(Some((code, reason.to_owned())));
            }
            Health if is_due(&mut self.health, now) => {
                self.end_is_owed = true;
                tracing::warn!(
                    code = %ErrorCode::CallbackUnhealthy,
                    subscription,
                    why,
                    "the application's health URL fails: nothing is taken until it answers well"
                );
            }
            Open if was != Probing && is_due(&mut self.open, now) => {
                self.end_is_owed = true;
                tracing::warn!(
                    code = %ErrorCode::CallbackBreakerOpen,
                    subscription,
                    why,
                    "failures in a row: nothing is taken until a probe succeeds"
                );
            }
            Closed if std::mem::take(&mut self.end_is_owed) => {
                tracing::info!(subscription, "the callback is back; going on");
            }
            Health | Open | Closed | Probing | Starting => {}
        }
    }

    /// The host was never reached: told once.
    pub(super) fn not_reached(&mut self, callback: &Callback, reason: &str) {
        if !std::mem::replace(&mut self.starting, true) {
            tracing::info!(
                code = %ErrorCode::CallbackUnreachable,
                subscription = %callback.name,
                reason,
                "waiting for the callback's host before anything is consumed"
            );
        }
    }
}

fn is_due(told: &mut Option<Instant>, now: Instant) -> bool {
    let is_due = told.is_none_or(|told| now >= told + EVERY);
    if is_due {
        *told = Some(now);
    }
    is_due
}
