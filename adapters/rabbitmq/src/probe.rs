//! What kind of queue a name stands for.
//!
//! AMQP has no question for it. The queue is declared with a type that does not exist, on a
//! channel of its own that the answer closes: on a queue that exists the broker compares first,
//! and names one argument that differs and its value. Until that is the type, the argument is
//! added and the question repeated. Nothing is ever created: where the queue went away meanwhile,
//! the broker refuses the type. It takes the right to configure the queue.

use std::collections::BTreeMap;
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
    Ok(look(connection, queue).await?.0)
}

/// The kind, and those arguments of the queue that the broker compares before it.
///
/// # Errors
/// As [`kind`].
pub(crate) async fn look(
    connection: &Connection,
    queue: &str,
) -> Result<(Found, BTreeMap<String, AMQPValue>), Error> {
    let mut learnt = BTreeMap::new();
    for _ in 0..QUESTIONS_MAX {
        match ask(connection, queue, table(&learnt)).await? {
            Answer::Found(found) => return Ok((found, learnt)),
            Answer::Differs(name, value) => drop(learnt.insert(name, value)),
        };
    }
    Ok((Found::Unknown, learnt))
}

/// Whether the queue has this argument with this value, given what was learnt of it. `None`: the
/// broker compares its type before it.
///
/// # Errors
/// As [`kind`].
pub(crate) async fn has(
    connection: &Connection,
    queue: &str,
    learnt: &BTreeMap<String, AMQPValue>,
    (name, value): (&str, AMQPValue),
) -> Result<Option<bool>, Error> {
    let mut arguments = table(learnt);
    if learnt.get(name) == Some(&value) {
        return Ok(Some(true));
    }
    arguments.insert(name.into(), value);
    let refusal = refused(connection, queue, arguments).await?;
    let differs = refusal.as_deref().and_then(inequivalent).map(|(argument, _)| argument);
    Ok(match differs {
        Some(argument) if argument == name => Some(false),
        _ => None,
    })
}

/// With a type that no queue has: nothing is ever created.
fn table(learnt: &BTreeMap<String, AMQPValue>) -> FieldTable {
    let mut arguments = FieldTable::default();
    arguments.insert(TYPE.into(), AMQPValue::LongString(NO_TYPE.into()));
    for (name, value) in learnt {
        arguments.insert(name.as_str().into(), value.clone());
    }
    arguments
}

async fn ask(connection: &Connection, queue: &str, table: FieldTable) -> Result<Answer, Error> {
    let refusal = refused(connection, queue, table).await?;
    Ok(refusal.map_or(Answer::Found(Found::Unknown), |text| read(&text)))
}

/// How the broker refuses to declare the queue like this; `None` without an answer.
async fn refused(
    connection: &Connection,
    queue: &str,
    table: FieldTable,
) -> Result<Option<String>, Error> {
    let channel = connection.create_channel().await?;
    let options = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
    let declared = timeout(ANSWER, channel.queue_declare(queue.into(), options, table)).await;
    match declared {
        Ok(Err(error)) => match channel_reply(&error) {
            Some((_, text)) => Ok(Some(text)),
            None => Err(error),
        },
        Ok(Ok(_)) => {
            let _ = timeout(ANSWER, channel.close(200, "asked".into())).await;
            Ok(None)
        }
        Err(_) => Ok(None),
    }
}

/// The broker's answer: `… inequivalent arg 'x-queue-type' for queue 'q' in vhost '/': received
/// 'inboxd-asks' but current is 'quorum'`.
fn read(text: &str) -> Answer {
    let unknown = Answer::Found(Found::Unknown);
    let Some((argument, current)) = inequivalent(text) else { return unknown };
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

/// The argument that differs, and what is said of its value.
fn inequivalent(text: &str) -> Option<(&str, &str)> {
    let (_, rest) = text.split_once("inequivalent arg '")?;
    let (argument, _) = rest.split_once('\'')?;
    let (_, current) = text.rsplit_once("but current is ")?;
    Some((argument, current))
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
