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
    /// The path and query that the message's route names, instead of the callback's own.
    pub path: Option<&'a str>,
    /// The trace context of the forward's own span; `None` passes the message's own on.
    pub trace: Option<&'a TraceContext>,
}

/// A W3C trace context, in the form of its headers, valid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceContext {
    /// `traceparent`.
    pub traceparent: String,
    /// `tracestate`, where there is one.
    pub tracestate: Option<String>,
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
    /// The response table of the HTTP contract: what a status means where nothing else
    /// overrides it. `after` goes with verdicts to try again, `detail` with those and refusals.
    ///
    /// 407 comes from a proxy on the way and says nothing of the message: it counts as an
    /// endpoint's fault. What is no final status of HTTP (1xx, 600 and above) is the server's.
    pub fn of_status(status: u16, after: Option<Duration>, detail: String) -> Self {
        let reason = match status {
            200..=299 => return Self::Accepted { status },
            300..=399 | 401 | 403 | 404 | 405 | 407 => RetryReason::Endpoint,
            408 | 425 => RetryReason::ServerError,
            409 => RetryReason::Busy,
            410 => RetryReason::Gone,
            429 | 503 => RetryReason::Overloaded,
            400..=499 => return Self::Refused { status, detail },
            _ => RetryReason::ServerError,
        };
        Self::Retry { reason, status: Some(status), after, detail }
    }

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

    /// Whether the application can be called: it answers a health URL with a 2xx where one is
    /// configured, else its host accepts a connection (and no request is sent).
    async fn probe(&self) -> Result<(), String>;

    /// A health URL is configured: what it answers gates consumption while running, too.
    fn has_health(&self) -> bool {
        false
    }
}
