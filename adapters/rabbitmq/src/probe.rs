//! What kind of queue a name stands for.
//!
//! AMQP has no question for it. The queue is declared with a type that does not exist, on a
//! channel of its own that the answer closes: on a queue that exists the broker compares first,
//! and names one argument that differs and its value. Until that is the type, the argument is
//! added and the question repeated. Nothing is ever created: where the queue went away meanwhile,
//! the broker refuses the type. It takes the right to configure the queue.

use std::time::Duration;

use lapin::options::QueueDeclareOptions;
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Connection, Error};
use tokio::time::timeout;

use crate::trouble::channel_reply;

const TYPE: &str = "x-queue-type";
const NO_TYPE: &str = "inboxd-asks";
const ANSWER: Duration = Duration::from_secs(5);
/// More arguments than queues have.
const QUESTIONS_MAX: usize = 24;

/// What was found out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Found {
    Classic,
    Quorum,
    Stream,
    Unknown,
}

/// One answer.
#[derive(Debug, PartialEq)]
enum Answer {
    Found(Found),
    /// Ask again with this argument.
    Differs(String, AMQPValue),
}

/// Asks for the kind of `queue`.
///
/// # Errors
/// Only of the connection; a refusal is [`Found::Unknown`].
pub(crate) async fn kind(connection: &Connection, queue: &str) -> Result<Found, Error> {
    let mut arguments = FieldTable::default();
    arguments.insert(TYPE.into(), AMQPValue::LongString(NO_TYPE.into()));
    for _ in 0..QUESTIONS_MAX {
        match ask(connection, queue, arguments.clone()).await? {
            Answer::Found(found) => return Ok(found),
            Answer::Differs(name, value) => arguments.insert(name.as_str().into(), value),
        };
    }
    Ok(Found::Unknown)
}

async fn ask(connection: &Connection, queue: &str, table: FieldTable) -> Result<Answer, Error> {
    let channel = connection.create_channel().await?;
    let options = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
    let declared = timeout(ANSWER, channel.queue_declare(queue.into(), options, table)).await;
    match declared {
        Ok(Err(error)) => match channel_reply(&error) {
            Some((_, text)) => Ok(read(&text)),
            None => Err(error),
        },
        Ok(Ok(_)) => {
            let _ = timeout(ANSWER, channel.close(200, "asked".into())).await;
            Ok(Answer::Found(Found::Unknown))
        }
        Err(_) => Ok(Answer::Found(Found::Unknown)),
    }
}

/// The broker's answer: `… inequivalent arg 'x-queue-type' for queue 'q' in vhost '/': received
/// 'inboxd-asks' but current is 'quorum'`.
fn read(text: &str) -> Answer {
    let unknown = Answer::Found(Found::Unknown);
    let argument =
        text.split_once("inequivalent arg '").and_then(|(_, rest)| rest.split_once('\''));
    let current = text.rsplit_once("but current is ").map(|(_, current)| current);
    let (Some((argument, _)), Some(current)) = (argument, current) else { return unknown };
    match (argument, value(current)) {
        // Quorum queues and streams are durable and not deleted automatically; others are classic.
        ("durable" | "auto_delete", _) => Answer::Found(Found::Classic),
        (TYPE, _) if current.starts_with("none") => Answer::Found(Found::Classic),
        (TYPE, Some(AMQPValue::LongString(kind))) => Answer::Found(match kind.as_bytes() {
            b"classic" => Found::Classic,
            b"quorum" => Found::Quorum,
            b"stream" => Found::Stream,
            _ => Found::Unknown,
        }),
        (TYPE, _) => unknown,
        (argument, Some(value)) => Answer::Differs(argument.to_owned(), value),
        (_, None) => unknown,
    }
}

/// `the value '600000' of type 'signedint'`, as far as it is a type that can be given back, or
/// `'quorum'` where it is text as that which was sent.
fn value(current: &str) -> Option<AMQPValue> {
    let Some((_, rest)) = current.split_once("the value '") else {
        let text = current.strip_prefix('\'')?.strip_suffix('\'')?;
        return Some(AMQPValue::LongString(text.into()));
    };
    let (value, kind) = rest.rsplit_once("' of type '")?;
    match kind.trim_end_matches('\'') {
        "longstr" => Some(AMQPValue::LongString(value.into())),
        "bool" => value.parse().ok().map(AMQPValue::Boolean),
        _ => value.parse().ok().map(AMQPValue::LongLongInt),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read() {
        let answer = |argument: &str, current: &str| {
            read(&format!(
                "PRECONDITION_FAILED - inequivalent arg '{argument}' for queue 'q' in vhost '/': \
                 received the value 'inboxd-asks' of type 'longstr' but current is {current}"
            ))
        };
        let kind = |current: &str| answer(TYPE, current);
        assert_eq!(kind("none"), Answer::Found(Found::Classic));
        let longstr = |kind: &str| format!("the value '{kind}' of type 'longstr'");
        assert_eq!(kind(&longstr("classic")), Answer::Found(Found::Classic));
        assert_eq!(kind(&longstr("quorum")), Answer::Found(Found::Quorum));
        assert_eq!(kind(&longstr("stream")), Answer::Found(Found::Stream));
        assert_eq!(kind("'quorum'"), Answer::Found(Found::Quorum));
        assert_eq!(kind(&longstr("other")), Answer::Found(Found::Unknown));
        assert_eq!(answer("durable", "'false'"), Answer::Found(Found::Classic));
        assert_eq!(
            answer("x-expires", "the value '600000' of type 'signedint'"),
            Answer::Differs("x-expires".into(), AMQPValue::LongLongInt(600_000))
        );
        assert_eq!(
            answer("x-single-active-consumer", "the value 'true' of type 'bool'"),
            Answer::Differs("x-single-active-consumer".into(), AMQPValue::Boolean(true))
        );
        assert_eq!(answer("x-odd", "[{a,1}]"), Answer::Found(Found::Unknown));
        let refused = "ACCESS_REFUSED - access to queue 'q' refused";
        assert_eq!(read(refused), Answer::Found(Found::Unknown));
    }
}
