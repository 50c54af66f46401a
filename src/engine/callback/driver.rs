//! What happens although no attempt asks or answers: the host or the health URL is asked, tokens
//! of the rate come, a fresh message for a probe is waited for no longer.
//!
//! Invariants: one question at a time, bounded in time, and nothing waits for it that need not;
//! a question that panics has failed.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use inboxd_contract::ErrorCode;
use tokio::time::Instant;

use super::breaker::Change;
use super::{Callback, CallbackState};

/// The bound on one question where the adapter sets none.
const ASK_MAX: Duration = Duration::from_secs(30);

impl Callback {
    /// Runs until it is dropped.
    pub(in crate::engine) async fn run(self: Arc<Self>) {
        let mut question: Option<BoxFuture<'static, Result<(), String>>> = None;
        loop {
            if self.asks() {
                question = Some(self.clone().ask().boxed());
            }
            let due = self.arm();
            let answer = tokio::select! {
                biased;
                answer = async {
                    match &mut question {
                        Some(question) => question.await,
                        None => std::future::pending().await,
                    }
                } => Some(answer),
                () = self.earlier.notified() => None,
                () = async {
                    match due {
                        Some(due) => tokio::time::sleep_until(due).await,
                        None => std::future::pending().await,
                    }
                } => None,
            };
            if let Some(answer) = answer {
                question = None;
                self.was_answered(answer);
            }
        }
    }

    fn asks(&self) -> bool {
        self.change(|state, now| state.asks(now))
    }

    fn arm(&self) -> Option<Instant> {
        self.locked(|inner, now| {
            inner.armed = inner.state.due_at(now);
            inner.armed
        })
    }

    async fn ask(self: Arc<Self>) -> Result<(), String> {
        let asked = AssertUnwindSafe(self.parts.forwarder.probe()).catch_unwind();
        match tokio::time::timeout(ASK_MAX, asked).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) => {
                let reason = "the probe panicked";
                tracing::error!(code = %ErrorCode::Bug, subscription = %self.name, "{reason}");
                Err(reason.to_owned())
            }
            Err(_) => Err(format!("no answer within {ASK_MAX:?}")),
        }
    }

    fn was_answered(&self, answer: Result<(), String>) {
        let jitter = &*self.parts.jitter;
        let reason = answer.clone().err();
        let (change, state) = self.change(|state, now| {
            let change = state.was_answered(answer, now, jitter);
            (change, state.report(now).state)
        });
        if change == Some(Change::StaysOpen) {
            self.parts.metrics.callback().probe(false);
        }
        let health = &self.parts.health;
        match reason {
            None => health.set_callback(true, ""),
            Some(reason) if state == CallbackState::Starting => {
                health.set_callback(false, &reason);
                self.locked(|inner, _| inner.told.not_reached(self, &reason));
            }
            // Once it was reached the pod stays ready: it can do nothing better elsewhere.
            Some(_) => {}
        }
    }
}
