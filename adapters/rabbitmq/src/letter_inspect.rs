//! What `inboxd check --connect` finds of an exchange for dead letters.
//!
//! Invariants: it publishes nothing that leads anywhere and creates nothing; each question has a
//! bound, and all of them together. No text has a secret.
//!
//! What it cannot see: the bindings of an exchange. AMQP has no question for them, so a copy that
//! leads nowhere is noticed when there is one.

use std::time::Duration;

use inboxd_contract::{ErrorCode, Finding};
use lapin::ExchangeKind;
use lapin::options::{ExchangeDeclareOptions, QueueDeclareOptions};
use lapin::types::FieldTable;
use tokio::time::timeout;

use crate::inspect::told;
use crate::letter_config::DeadLetterExchangeConfig;
use crate::link::{self, Link, Purpose, Socket};
use crate::trouble::{self, Trouble, channel_reply};

const POLITE: Duration = Duration::from_secs(1);

/// Looks at the exchange that dead letters are to go to, within `within`. Must be called within a
/// tokio runtime.
pub async fn inspect_dead_letters(
    config: &DeadLetterExchangeConfig,
    within: Duration,
) -> Vec<Finding> {
    let subject = match config.exchange.as_str() {
        "" => "the default exchange for dead letters".to_owned(),
        name => format!("exchange {name} for dead letters"),
    };
    if let Err(error) = config.validate() {
        return vec![Finding::problem(
            subject,
            error.to_string(),
            "mend the setting that is named",
        )];
    }
    let looking = timeout(within, look(config, &subject, within)).await;
    let finding = looking.unwrap_or_else(|_| {
        let code = ErrorCode::DeadLetterTargetAway;
        let what = format!("no answer within {within:?} ({code})");
        let remedy = "check that the broker is well, and the network to it";
        Finding::problem(subject, what, remedy)
    });
    vec![finding]
}

async fn look(config: &DeadLetterExchangeConfig, subject: &str, within: Duration) -> Finding {
    let mut broker = config.broker.clone();
    // All hosts have their turn in time.
    let share = within.mul_f64(0.8) / u32::try_from(broker.hosts.len()).unwrap_or(u32::MAX).max(1);
    broker.connect_timeout = broker.connect_timeout.min(share);
    let mut last = None;
    for turn in 0..broker.hosts.len() {
        match link::connect(&broker, turn, &Socket::default(), Purpose::Consume).await {
            Ok(link) => {
                let finding = match config.exchange.as_str() {
                    "" => queue(config, &link, subject).await,
                    name => exchange(config, &link, subject, name).await,
                };
                // So that the broker logs no lost connection.
                let _ = timeout(POLITE, link.connection.close(200, "looked".into())).await;
                return finding;
            }
            Err(trouble) => last = Some(trouble),
        }
    }
    let (what, remedy) = match &last {
        Some(trouble) => told(trouble),
        None => ("names no host".to_owned(), "give at least one"),
    };
    Finding::problem(subject, what, remedy)
}

async fn exchange(
    config: &DeadLetterExchangeConfig,
    link: &Link,
    subject: &str,
    name: &str,
) -> Finding {
    let options = ExchangeDeclareOptions { passive: true, ..ExchangeDeclareOptions::default() };
    let looked = async {
        let channel = link.connection.create_channel().await?;
        let table = FieldTable::default();
        channel.exchange_declare(name.into(), ExchangeKind::Direct, options, table).await
    };
    match looked.await {
        Ok(()) => Finding::info(
            subject,
            "is there; its bindings and the right to write are not told: a copy that leads to no queue \
             is an error, and its original waits",
        ),
        Err(error) => {
            missing(config, subject, &error, "does not exist", "create it and bind a queue to it")
        }
    }
}

/// The queue that the default exchange leads to.
async fn queue(config: &DeadLetterExchangeConfig, link: &Link, subject: &str) -> Finding {
    let name = config.routing_key.as_deref().unwrap_or_default();
    let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
    let looked = async {
        let channel = link.connection.create_channel().await?;
        channel.queue_declare(name.into(), options, FieldTable::default()).await
    };
    match looked.await {
        Ok(queue) => Finding::info(
            subject,
            format!("leads to queue '{name}', {} messages ready", queue.message_count()),
        ),
        Err(error) => {
            let what = format!("leads nowhere: queue '{name}' does not exist");
            missing(config, subject, &error, &what, "create the queue, or give another routing key")
        }
    }
}

fn missing(
    config: &DeadLetterExchangeConfig,
    subject: &str,
    error: &lapin::Error,
    what: &str,
    remedy: &str,
) -> Finding {
    let (user, vhost) = (&config.broker.user, &config.broker.vhost);
    let code = ErrorCode::DeadLetterTargetRefused;
    match channel_reply(error) {
        Some((trouble::NOT_FOUND, _)) => {
            Finding::problem(subject, format!("{what} in vhost '{vhost}' ({code})"), remedy)
        }
        Some((_, text)) => Finding::problem(
            subject,
            format!("is refused to user '{user}': {text} ({code})"),
            "give the user the right to it",
        ),
        None => Finding::problem(subject, Trouble::lost(error).reason, "check the broker's log"),
    }
}
