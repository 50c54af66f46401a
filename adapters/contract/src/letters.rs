//! Where copies of dead letters go beside the table.

use std::time::Duration;

use async_trait::async_trait;

use crate::{DeadReason, Envelope, ErrorCode, InboxKey};

/// A dead letter as it is published. The message's own key, headers and body go out byte for
/// byte; the rest in headers whose names begin with `inbox-`, which a publisher's own never
/// override.
#[derive(Debug, Clone, Copy)]
pub struct LetterCopy<'a> {
    /// The message.
    pub envelope: &'a Envelope,
    /// Its key.
    pub key: &'a InboxKey,
    /// The subscription's name.
    pub subscription: &'a str,
    /// Why it is dead.
    pub reason: DeadReason,
    /// Attempts made.
    pub attempts: u32,
    /// The last HTTP status.
    pub last_status: Option<u16>,
    /// What went wrong last.
    pub last_error: Option<&'a str>,
    /// How long ago it was received first.
    pub first_ago: Duration,
}

/// A copy was not published, or it is not known whether it was.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}")]
pub struct PublishError {
    /// What was attempted and what came of it, for an operator.
    pub what: String,
    /// The broker will never take this very message (its size): trying again cannot help.
    pub refused: bool,
    /// What it is for an operator.
    pub code: ErrorCode,
}

/// Publishes copies of dead letters. Any number of calls at once.
#[async_trait]
pub trait DeadLetterTarget: Send + Sync + 'static {
    /// One line for the log: which broker, which topic or exchange (no secrets).
    fn describe(&self) -> String;

    /// One try. `Ok`: the broker has confirmed the copy *and* routed it somewhere. Ends within a
    /// bound of its own, whatever the broker does.
    ///
    /// # Cancel safety
    /// Dropped in the middle, the copy may be published or not.
    async fn publish(&self, letter: LetterCopy<'_>) -> Result<(), PublishError>;

    /// Ends by `deadline` whatever the broker does.
    async fn close(&self, deadline: Duration);
}
