//! What `inboxd check --connect` finds at the broker.
//!
//! Purpose: looks over a connection of its own, says what it sees and what to do about it.
//!
//! Invariants: it consumes nothing and creates nothing; each question has a bound, and all of them
//! together. No text has a secret.
//!
//! What it cannot see: AMQP tells no arguments; some are found out by [`crate::probe`], those set by
//! a policy never.

use std::collections::BTreeMap;
use std::time::Duration;

use inboxd_contract::{ErrorCode, Finding};
use lapin::Queue;
use lapin::options::QueueDeclareOptions;
use lapin::types::{AMQPValue, FieldTable};
use tokio::time::timeout;

use crate::config::{QueueKind, RabbitMqConfig, quorum_needs_single_active};
use crate::letter_config::RabbitMqBroker;
use crate::link::{self, Link, Purpose, Socket};
use crate::probe::{self, Found};
use crate::trouble::{Trouble, channel_reply};

const POLITE: Duration = Duration::from_secs(1);
const NOT_FOUND: u16 = 404;
const SINGLE_ACTIVE: &str = "x-single-active-consumer";
const DELIVERY_LIMIT: &str = "x-delivery-limit";
const DEAD_LETTERS: &str = "x-dead-letter-exchange";
/// A quorum queue's messages should survive so many restarts of their consumer.
const DELIVERY_LIMIT_LOW: i64 = 5;

/// Looks at the broker and the queue, within `within`. Never consumes, declares or changes
/// anything. Must be called within a tokio runtime.
pub async fn inspect(config: &RabbitMqConfig, within: Duration) -> Vec<Finding> {
    let subject = format!("RabbitMQ at {}", hosts(config));
    if let Err(error) = config.validate() {
        return vec![Finding::problem(
            subject,
            error.to_string(),
            "mend the setting that is named",
        )];
    }
    let late = || {
        let what = format!("no answer within {within:?}");
        vec![Finding::problem(
            subject,
            what,
            "check that the broker is well, and the network to it",
        )]
    };
    timeout(within, look(config, within)).await.unwrap_or_else(|_| late())
}

fn hosts(config: &RabbitMqConfig) -> String {
    let hosts = config.hosts.iter().map(|(host, port)| format!("{host}:{port}"));
    hosts.collect::<Vec<_>>().join(", ")
}

async fn look(config: &RabbitMqConfig, within: Duration) -> Vec<Finding> {
    let mut config = config.clone();
    // All hosts have their turn in time.
    let share = within.mul_f64(0.8) / u32::try_from(config.hosts.len()).unwrap_or(u32::MAX).max(1);
    config.connect_timeout = config.connect_timeout.min(share);
    let broker = RabbitMqBroker::of_source(&config);
    let mut failed = Vec::new();
    for turn in 0..config.hosts.len() {
        let (host, port) = &config.hosts[turn];
        match link::connect(&broker, turn, &Socket::default(), Purpose::Consume).await {
            Ok(link) => {
                let others = failed.into_iter().map(|(subject, trouble)| {
                    let (what, remedy) = told(&trouble);
                    Finding::warning(subject, what, remedy)
                });
                let mut findings: Vec<_> = others.collect();
                findings.push(server(&config, &link));
                findings.extend(queue(&config, &link).await);
                // So that the broker logs no lost connection.
                let _ = timeout(POLITE, link.connection.close(200, "looked".into())).await;
                return findings;
            }
            Err(trouble) => failed.push((format!("RabbitMQ at {host}:{port}"), trouble)),
        }
    }
    let problems = failed.into_iter().map(|(subject, trouble)| {
        let (what, remedy) = told(&trouble);
        Finding::problem(subject, what, remedy)
    });
    problems.collect()
}

/// What a trouble is and what to do about it, without what the source would do.
pub(crate) fn told(trouble: &Trouble) -> (String, &'static str) {
    let what = trouble.reason.trim_end_matches("; trying again").to_owned();
    let remedy = match trouble.code {
        ErrorCode::SourceLoginRefused => "give the right user and password",
        ErrorCode::SourceForbidden => "create the vhost, and give the user permissions in it",
        ErrorCode::SourceTls => {
            "give the authority's certificate as tls.ca_file, and the right port"
        }
        ErrorCode::FrameUndecodable => "give the port of AMQP 0-9-1",
        // Where nobody listens the reason is another one.
        _ if trouble.reason.contains("aborted") || trouble.reason.contains("reset") => {
            "give the port of AMQP, if this one is another protocol's; else see the broker's log"
        }
        _ => "start the broker, or give the right host and port",
    };
    (what, remedy)
}

fn server(config: &RabbitMqConfig, link: &Link) -> Finding {
    let server = link.aside.server().unwrap_or_default();
    let (vhost, user) = (&config.vhost, &config.user);
    let what = format!("{} {}, vhost '{vhost}', user '{user}'", server.product, server.version);
    Finding::info(format!("RabbitMQ at {}", link.peer), what)
}

async fn queue(config: &RabbitMqConfig, link: &Link) -> Vec<Finding> {
    let subject = format!("queue {}", config.queue);
    let counted = match counted(config, link).await {
        Ok(counted) => counted,
        Err(error) => return vec![missing(config, subject, &error)],
    };
    let (ready, consumers) = (counted.message_count(), counted.consumer_count());
    let (found, learnt) = match probe::look(&link.connection, &config.queue).await {
        Ok(looked) => looked,
        Err(_) => (Found::Unknown, BTreeMap::new()),
    };
    let kind = match found {
        Found::Classic => "a classic queue",
        Found::Quorum => "a quorum queue",
        Found::Stream => "a stream",
        Found::Unknown => "of a kind that is not told (that takes the right to configure it)",
    };
    let arguments: Vec<_> = learnt.iter().map(|(name, value)| shown(name, value)).collect();
    let with = match arguments.is_empty() {
        true => String::new(),
        false => format!("; {}", arguments.join(", ")),
    };
    let what = format!("{kind}, {ready} messages ready, {consumers} consumers{with}");
    let mut findings = vec![Finding::info(subject.clone(), what)];
    findings.extend(order(config, link, &subject, found, &learnt, consumers).await);
    findings.extend(limits(config, &subject, found, &learnt));
    findings.extend(declared(config, &subject, found, &learnt));
    findings
}

async fn counted(config: &RabbitMqConfig, link: &Link) -> Result<Queue, lapin::Error> {
    let channel = link.connection.create_channel().await?;
    let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
    channel.queue_declare(config.queue.as_str().into(), options, FieldTable::default()).await
}

fn missing(config: &RabbitMqConfig, subject: String, error: &lapin::Error) -> Finding {
    let vhost = &config.vhost;
    match channel_reply(error) {
        Some((NOT_FOUND, _)) if config.declare.is_some() => {
            Finding::info(subject, format!("is not in vhost '{vhost}' yet; the source declares it"))
        }
        Some((NOT_FOUND, _)) => Finding::problem(
            subject,
            format!("does not exist in vhost '{vhost}'"),
            "create it, check its name and the vhost, or let the source declare it",
        ),
        Some(_) => {
            let trouble = Trouble::opening(error, config, Duration::ZERO);
            Finding::problem(subject, trouble.reason, "give the user the right to read the queue")
        }
        None => Finding::problem(subject, Trouble::lost(error).reason, "check the broker's log"),
    }
}

/// Who else may have the queue.
async fn order(
    config: &RabbitMqConfig,
    link: &Link,
    subject: &str,
    found: Found,
    learnt: &BTreeMap<String, AMQPValue>,
    consumers: u32,
) -> Option<Finding> {
    if found == Found::Stream {
        let remedy = "give a classic or a quorum queue";
        return Some(Finding::problem(subject, "streams are not consumed here", remedy));
    }
    let wanted = (SINGLE_ACTIVE, AMQPValue::Boolean(true));
    let asked = probe::has(&link.connection, &config.queue, learnt, wanted).await;
    let single_active = asked.ok().flatten();
    match (config.single_active_consumer, single_active) {
        (true, Some(false)) => {
            return Some(Finding::problem(
                subject,
                "was not declared with x-single-active-consumer, and the source says it was",
                "declare it so, or remove single_active_consumer",
            ));
        }
        (false, Some(true)) if config.ordered => {
            return Some(Finding::problem(
                subject,
                "has a single active consumer, so no consumer can have it alone",
                "say single_active_consumer = true",
            ));
        }
        _ => {}
    }
    if !config.ordered || config.single_active_consumer {
        return None;
    }
    let remedy = "declare the queue with x-single-active-consumer and say \
                  single_active_consumer = true, or use ordering = none";
    match (found, config.queue_kind) {
        (Found::Quorum, _) => {
            Some(Finding::problem(subject, quorum_needs_single_active(&config.queue), remedy))
        }
        (Found::Unknown, None) if config.declare.is_none() => Some(Finding::problem(
            subject,
            "cannot be shown to have one consumer: its kind is not told",
            "say queue_kind = classic if it is one, or give the right to configure the queue",
        )),
        _ if consumers > 0 => Some(Finding::info(
            subject,
            "another consumer has it: a source in order stands by until that one is gone",
        )),
        _ => None,
    }
}

/// How often a message may be handed over.
fn limits(
    config: &RabbitMqConfig,
    subject: &str,
    found: Found,
    learnt: &BTreeMap<String, AMQPValue>,
) -> Option<Finding> {
    if found != Found::Quorum {
        return None;
    }
    let prefetch = config.prefetch;
    let lost = match learnt.contains_key(DEAD_LETTERS) {
        true => "dead-lettered by the broker",
        false => "dropped by the broker, unless a policy gives the queue a dead-letter exchange",
    };
    match learnt.get(DELIVERY_LIMIT) {
        None => Some(Finding::info(
            subject,
            format!(
                "its delivery limit is not told (RabbitMQ 4 has 20 unless something else is set): a \
                 restart counts for each of the up to {prefetch} messages that are handed over, and \
                 what is over the limit is {lost}"
            ),
        )),
        Some(AMQPValue::LongLongInt(limit)) if *limit <= DELIVERY_LIMIT_LOW => {
            Some(Finding::warning(
                subject,
                format!(
                    "has a delivery limit of {limit}: a restart counts for each of the up to \
                     {prefetch} messages that are handed over, and what is over the limit is {lost}"
                ),
                "raise x-delivery-limit, or lower prefetch, and give the queue a dead-letter exchange",
            ))
        }
        Some(_) => None,
    }
}

/// What the source would declare, against what is there.
fn declared(
    config: &RabbitMqConfig,
    subject: &str,
    found: Found,
    learnt: &BTreeMap<String, AMQPValue>,
) -> Option<Finding> {
    let declare = config.declare.as_ref()?;
    let same = match found {
        Found::Classic => declare.kind == QueueKind::Classic,
        Found::Quorum => declare.kind == QueueKind::Quorum,
        Found::Stream => false,
        Found::Unknown => true,
    };
    let table = declare.table();
    let named = |name: &String| table.inner().contains_key(name.as_str());
    let unsaid: Vec<_> = learnt.keys().filter(|name| !named(name)).cloned().collect();
    let what = if !same {
        "is there, of another kind than the source declares".to_owned()
    } else if !unsaid.is_empty() {
        format!("is there, with arguments that the source does not declare: {}", unsaid.join(", "))
    } else {
        return None;
    };
    Some(Finding::problem(subject, what, "declare what is there, or do not declare"))
}

fn shown(name: &str, value: &AMQPValue) -> String {
    match value {
        AMQPValue::LongString(text) => {
            format!("{name} {}", String::from_utf8_lossy(text.as_bytes()))
        }
        AMQPValue::Boolean(value) => format!("{name} {value}"),
        AMQPValue::LongLongInt(value) => format!("{name} {value}"),
        _ => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use inboxd_contract::Severity;

    use super::*;

    /// Where the broker tells it.
    #[test]
    fn a_low_delivery_limit_is_a_warning() {
        let config = RabbitMqConfig::new("h", 1, "q");
        let severity = |found, limit: Option<i64>| {
            let limit = limit.map(|limit| (DELIVERY_LIMIT.into(), AMQPValue::LongLongInt(limit)));
            limits(&config, "q", found, &limit.into_iter().collect()).map(|found| found.severity)
        };
        assert_eq!(severity(Found::Quorum, Some(3)), Some(Severity::Warning));
        assert_eq!(severity(Found::Quorum, Some(20)), None);
        assert_eq!(severity(Found::Quorum, None), Some(Severity::Info));
        assert_eq!(severity(Found::Classic, None), None);
    }
}
