//! What is known of one message: asked of the store, and of the engine where there is one.

use std::time::{Duration, SystemTime};

use inboxd_contract::{ConsumerId, InboxKey, InboxStore, MessageId};

use super::{AppError, CLOSE_WITHIN, operator, store};
use crate::admin::{
    Answering, ConsumerReport, ExplainError, MessageReport, State, Which, readings,
};
use crate::causes::chain;
use crate::config::Config;
use crate::engine::Flight;

/// A database that hangs must not hang who asks.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);

/// Asks the database itself, as it is: nothing is migrated, locked or written. What a running
/// sidecar has in hand is not known then.
///
/// # Errors
/// What was asked makes no sense, or the database cannot be read.
pub async fn explain_from_database(
    config: &Config,
    asked: &[u8],
    which: &Which,
) -> Result<MessageReport, ExplainError> {
    let targets = targets(&operator::consumers(config), which)?;
    let unread = |error: AppError| match &error {
        AppError::Store(cause) => ExplainError::Inbox(chain(cause)),
        _ => ExplainError::Inbox(error.to_string()),
    };
    let opened = store::open_to_read(&config.database, config.lease);
    let store = tokio::time::timeout(ANSWER_WITHIN, opened)
        .await
        .map_err(|_| ExplainError::Inbox(format!("no answer within {ANSWER_WITHIN:?}")))?
        .map_err(unread)?;
    let answering =
        Answering { owner: None, now: SystemTime::now(), retention: config.database.retention };
    let report = gather(&*store, &answering, &targets, asked, |_, _| Vec::new()).await;
    let _ = tokio::time::timeout(CLOSE_WITHIN, store.close()).await;
    report
}

/// A consumer id that is asked about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) consumer_id: ConsumerId,
    /// The names of its subscriptions.
    pub(super) subscriptions: Vec<String>,
}

/// The consumer ids that are meant, of all `consumers` (subscription and consumer id).
pub(super) fn targets(
    consumers: &[(String, ConsumerId)],
    which: &Which,
) -> Result<Vec<Target>, ExplainError> {
    let mut all: Vec<Target> = Vec::new();
    for (subscription, consumer_id) in consumers {
        match all.iter_mut().find(|target| target.consumer_id == *consumer_id) {
            Some(target) => target.subscriptions.push(subscription.clone()),
            None => all.push(Target {
                consumer_id: consumer_id.clone(),
                subscriptions: vec![subscription.clone()],
            }),
        }
    }
    match which {
        Which::All if all.is_empty() => Err(ExplainError::Asked(
            "the configuration has no subscription: name a consumer id".to_owned(),
        )),
        Which::All => Ok(all),
        Which::Subscription(name) => {
            all.retain(|target| target.subscriptions.contains(name));
            if all.is_empty() {
                let names: Vec<_> = consumers.iter().map(|(name, _)| name.as_str()).collect();
                let names = names.join(", ");
                return Err(ExplainError::Asked(format!(
                    "there is no subscription {name:?}; there are: {names}"
                )));
            }
            Ok(all)
        }
        Which::ConsumerId(id) => {
            let consumer_id =
                ConsumerId::new(id).map_err(|error| ExplainError::Asked(error.to_string()))?;
            all.retain(|target| target.consumer_id == consumer_id);
            // One that the configuration no longer names may still have rows.
            if all.is_empty() {
                all.push(Target { consumer_id, subscriptions: Vec::new() });
            }
            Ok(all)
        }
    }
}

/// Asks about each target and each way in which the id can be read. Of the ways that are not
/// known, one is told, and only where no other is.
pub(super) async fn gather(
    store: &dyn InboxStore,
    answering: &Answering<'_>,
    targets: &[Target],
    asked: &[u8],
    flights: impl Fn(&Target, &MessageId) -> Vec<(String, Flight)>,
) -> Result<MessageReport, ExplainError> {
    let readings = readings(asked);
    if readings.is_empty() {
        return Err(ExplainError::Asked("a message id is not blank".to_owned()));
    }
    let mut consumers = Vec::new();
    for target in targets {
        let mut reports = Vec::new();
        for (message_id, read_as) in &readings {
            let key = InboxKey {
                consumer_id: target.consumer_id.clone(),
                message_id: message_id.clone(),
            };
            let flights = flights(target, message_id);
            let explanation = match tokio::time::timeout(ANSWER_WITHIN, store.explain(&key)).await {
                Ok(Ok(explanation)) => explanation,
                Ok(Err(error)) => return Err(ExplainError::Inbox(chain(&error))),
                Err(_) => {
                    return Err(ExplainError::Inbox(format!(
                        "the database did not answer within {ANSWER_WITHIN:?}"
                    )));
                }
            };
            reports.push(ConsumerReport::new(
                answering,
                (&target.consumer_id, &target.subscriptions),
                (message_id, *read_as),
                &explanation,
                &flights,
            ));
        }
        if reports.iter().any(|report| report.state != State::Unknown) {
            reports.retain(|report| report.state != State::Unknown);
        } else {
            reports.truncate(1);
        }
        consumers.extend(reports);
    }
    Ok(MessageReport {
        asked: String::from_utf8_lossy(asked).into_owned(),
        retention_ms: u64::try_from(answering.retention.as_millis()).unwrap_or(u64::MAX),
        consumers,
    })
}
