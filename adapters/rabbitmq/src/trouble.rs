//! What went wrong, in words an operator can act on.
//!
//! The broker's reply *codes* decide; its texts are shown, and read in one place only: to tell a queue
//! that cannot be had alone from a missing right, which share a code.

use std::fmt;
use std::io;
use std::time::Duration;

use inboxd_contract::{ErrorCode, SourcePhase};
use lapin::{Error, ErrorKind};

use crate::config::RabbitMqConfig;
use crate::letter_config::RabbitMqBroker;

pub(crate) const ACCESS_REFUSED: u16 = 403;
pub(crate) const NOT_FOUND: u16 = 404;
const RESOURCE_LOCKED: u16 = 405;
pub(crate) const PRECONDITION_FAILED: u16 = 406;
const NOT_ALLOWED: u16 = 530;

/// What to do about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Remedy {
    /// Connect again, with backoff.
    Reconnect,
    /// Open a channel on the same connection, after so long.
    Reopen(Duration),
    /// Nothing but another configuration or set-up helps.
    GiveUp,
}

/// One trouble.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Trouble {
    /// How the source stands meanwhile.
    pub(crate) phase: SourcePhase,
    /// What, where, and what to do.
    pub(crate) reason: String,
    /// What it is for an operator.
    pub(crate) code: ErrorCode,
    /// What the source does.
    pub(crate) remedy: Remedy,
    /// A frame could not be decoded.
    pub(crate) undecodable: bool,
    /// The queue is not there: when it is again, it may be another.
    pub(crate) queue_is_gone: bool,
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)
    }
}

impl Trouble {
    /// The source mends it by itself.
    pub(crate) fn passing(remedy: Remedy, reason: impl Into<String>) -> Self {
        let reason = reason.into();
        Self {
            phase: SourcePhase::Connecting,
            reason,
            code: ErrorCode::SourceUnreachable,
            remedy,
            undecodable: false,
            queue_is_gone: false,
        }
    }

    /// An operator must know; the source goes on trying.
    pub(crate) fn failing(code: ErrorCode, remedy: Remedy, reason: impl Into<String>) -> Self {
        Self { phase: SourcePhase::Failing, code, ..Self::passing(remedy, reason) }
    }

    /// The same, and the queue is not there.
    pub(crate) fn queue_is_gone(mut self) -> Self {
        self.queue_is_gone = true;
        self
    }

    /// The source cannot go on.
    pub(crate) fn permanent(code: ErrorCode, reason: impl Into<String>) -> Self {
        Self::failing(code, Remedy::GiveUp, reason)
    }

    /// A connection could not be made.
    pub(crate) fn connecting(error: &Error, config: &RabbitMqBroker, peer: &str) -> Self {
        let (user, vhost) = (&config.user, &config.vhost);
        match error.kind() {
            ErrorKind::ProtocolError(refusal) => {
                let text = refusal.get_message();
                let (code, reason) = match refusal.get_id() {
                    ACCESS_REFUSED => (
                        ErrorCode::SourceLoginRefused,
                        format!(
                            "RabbitMQ at {peer} refuses the login of user '{user}': check user and \
                             password ({text})"
                        ),
                    ),
                    NOT_ALLOWED => (
                        ErrorCode::SourceForbidden,
                        format!(
                            "RabbitMQ at {peer} does not let user '{user}' into vhost '{vhost}': \
                             check that the vhost exists and that the user has permissions in it \
                             ({text})"
                        ),
                    ),
                    _ => (
                        ErrorCode::SourceUnreachable,
                        format!("RabbitMQ at {peer} refuses the connection: {text}"),
                    ),
                };
                Self::failing(code, Remedy::Reconnect, reason)
            }
            ErrorKind::IOError(error) if is_tls(error) => Self::failing(
                ErrorCode::SourceTls,
                Remedy::Reconnect,
                format!(
                    "TLS with RabbitMQ at {peer} fails: {error}; check that the port speaks TLS, that \
                     the host is named in its certificate, and tls.ca_file, cert_file, key_file"
                ),
            ),
            ErrorKind::IOError(error) => Self::passing(
                Remedy::Reconnect,
                format!("cannot connect to RabbitMQ at {peer}: {error}; trying again"),
            ),
            // Its words are a parser's.
            ErrorKind::ParsingError(_) | ErrorKind::InvalidProtocolVersion(_) => {
                let speaks = match config.tls {
                    Some(_) => "behind TLS",
                    None => "without TLS",
                };
                Self::failing(
                    ErrorCode::FrameUndecodable,
                    Remedy::Reconnect,
                    format!(
                        "what answers at {peer} does not speak AMQP 0-9-1 {speaks}: check host, port \
                         and TLS (RabbitMQ listens on 5672, with TLS on 5671, and 15672 is its HTTP \
                         API); trying again"
                    ),
                )
            }
            _ => Self::passing(
                Remedy::Reconnect,
                format!("cannot connect to RabbitMQ at {peer}: {error}; trying again"),
            ),
        }
    }

    /// Another consumer has the queue.
    pub(crate) fn standby(config: &RabbitMqConfig, wait: Duration) -> Self {
        let queue = &config.queue;
        let reason = format!(
            "another consumer has queue '{queue}'; ready to take over, looking again every {wait:?}"
        );
        Self { phase: SourcePhase::Standby, ..Self::passing(Remedy::Reopen(wait), reason) }
    }

    /// A channel could not be opened, or the queue not consumed.
    pub(crate) fn opening(error: &Error, config: &RabbitMqConfig, standby: Duration) -> Self {
        let (queue, vhost, user) = (&config.queue, &config.vhost, &config.user);
        let Some((code, text)) = channel_reply(error) else {
            return Self::lost(error);
        };
        let later = Remedy::Reopen(standby);
        match code {
            NOT_FOUND => Self::failing(
                ErrorCode::QueueMissing,
                Remedy::Reopen(Duration::from_secs(1)),
                format!(
                    "queue '{queue}' does not exist in vhost '{vhost}': create it, or let the source \
                     declare it; looking again every second ({text})"
                ),
            )
            .queue_is_gone(),
            // Nobody had it a moment ago: another came first, or no consumer may have it alone.
            ACCESS_REFUSED if text.contains("in exclusive use") => Self::failing(
                ErrorCode::OrderRefused,
                later,
                format!(
                    "queue '{queue}' cannot be had alone: if it was declared with \
                     x-single-active-consumer, say single_active_consumer = true; if another \
                     consumer was quicker, this one stands by ({text})"
                ),
            ),
            ACCESS_REFUSED => Self::failing(
                ErrorCode::SourceForbidden,
                later,
                format!(
                    "user '{user}' may not consume from queue '{queue}' in vhost '{vhost}': {text}"
                ),
            ),
            RESOURCE_LOCKED => Self::failing(
                ErrorCode::QueueRefused,
                later,
                format!("queue '{queue}' belongs to another connection alone: {text}"),
            ),
            PRECONDITION_FAILED => Self::permanent(
                ErrorCode::QueueRefused,
                format!(
                    "queue '{queue}' exists with other properties than the source declares: \
                     {text}; declare the same ones, or do not declare"
                ),
            ),
            _ => Self::failing(
                ErrorCode::QueueRefused,
                later,
                format!("RabbitMQ refuses queue '{queue}': {text}"),
            ),
        }
    }

    /// A connection or channel that worked is gone.
    pub(crate) fn lost(error: &Error) -> Self {
        match error.kind() {
            ErrorKind::ParsingError(_) => Self {
                undecodable: true,
                ..Self::passing(
                    Remedy::Reconnect,
                    "a frame from RabbitMQ could not be decoded; connecting again",
                )
            },
            ErrorKind::ProtocolError(reply) if error.is_amqp_soft_error() => Self::passing(
                Remedy::Reopen(Duration::ZERO),
                format!("RabbitMQ closed the channel: {}; opening another", reply.get_message()),
            ),
            ErrorKind::InvalidChannelState(..) | ErrorKind::InvalidChannel(_) => Self::passing(
                Remedy::Reopen(Duration::ZERO),
                "the channel is closed; opening another",
            ),
            _ => Self::passing(
                Remedy::Reconnect,
                format!("the connection to RabbitMQ is lost: {error}; connecting again"),
            ),
        }
    }

    /// The same again and again.
    pub(crate) fn undecodable(queue: &str, times: u32, wait: Duration) -> Self {
        Self {
            undecodable: true,
            ..Self::failing(
                ErrorCode::FrameUndecodable,
                Remedy::Reconnect,
                format!(
                    "what RabbitMQ sends for queue '{queue}' cannot be decoded ({times} times in a \
                     row): check that the port is an AMQP 0-9-1 one of RabbitMQ, and what the last \
                     message taken from the queue carries; trying again every {wait:?}"
                ),
            )
        }
    }
}

/// Code and text of a channel's end, where the broker gave one.
pub(crate) fn channel_reply(error: &Error) -> Option<(u16, String)> {
    match error.kind() {
        ErrorKind::ProtocolError(reply) if error.is_amqp_soft_error() => {
            Some((reply.get_id(), reply.get_message().to_string()))
        }
        _ => None,
    }
}

fn is_tls(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|inner| inner.is::<rustls::Error>())
}
