//! Calling the application.

use std::time::Duration;

use async_trait::async_trait;
use strum::{EnumIter, IntoStaticStr};

use crate::{Envelope, InboxKey};

/// One attempt at the application.
#[derive(Debug, Clone, Copy)]
pub struct ForwardRequest<'a> {
    /// The message.
    pub envelope: &'a Envelope,
    /// Its key: the same on every attempt.
    pub key: &'a InboxKey,
    /// The subscription's name.
    pub subscription: &'a str,
    /// 1 for the first attempt ever made for this message.
    pub attempt: u32,
    /// The ordering key of the message's lane, where it has one.
    pub ordering_key: Option<&'a [u8]>,
    /// The bound on the whole attempt, response included.
    pub timeout: Duration,
}

/// Why an attempt is to be made again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EnumIter, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum RetryReason {
    /// No connection: refused, unreachable, name not resolved. Nothing was sent.
    Unreachable,
    /// A phase took longer than its bound; the application may still be at it.
    Timeout,
    /// The connection broke after something was sent: the answer is unknown.
    Disconnected,
    /// 429 or 503.
    Overloaded,
    /// 409: the application is still at it.
    Busy,
    /// Another 5xx, 408, 425.
    ServerError,
    /// 401, 403, 404, 405, 3xx, TLS failure: the endpoint is wrong, not the message.
    Endpoint,
    /// 410: the endpoint is gone; the subscription pauses.
    Gone,
}

/// What one attempt came to. A verdict, not a `Result`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// The application accepted the message.
    Accepted {
        /// The HTTP status.
        status: u16,
    },
    /// The application will never accept this message.
    Refused {
        /// The HTTP status.
        status: u16,
        /// What it said, bounded.
        detail: String,
    },
    /// Try again.
    Retry {
        /// Why.
        reason: RetryReason,
        /// The HTTP status, where there was a response.
        status: Option<u16>,
        /// The application's wish (`Retry-After`), capped.
        after: Option<Duration>,
        /// For the log, bounded.
        detail: String,
    },
    /// The application asked to have it again later (section 7 of the design).
    Park {
        /// The HTTP status.
        status: u16,
    },
    /// The application asked to drop it: recorded as processed.
    Drop {
        /// The HTTP status.
        status: u16,
    },
}

impl Verdict {
    /// The metric label.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Accepted { .. } => "accepted",
            Self::Refused { .. } => "refused",
            Self::Retry { .. } => "retry",
            Self::Park { .. } => "park",
            Self::Drop { .. } => "drop",
        }
    }
}

/// Sends messages to one callback.
#[async_trait]
pub trait Forwarder: Send + Sync + 'static {
    /// Makes exactly one attempt: no retries of its own.
    ///
    /// # Cancel safety
    /// Dropping the future abandons the request; the application may have seen it.
    async fn forward(&self, request: ForwardRequest<'_>) -> Verdict;

    /// Whether the callback's host accepts a connection. Sends no request.
    async fn probe(&self) -> Result<(), String>;
}
