//! Tries what a configuration names, without consuming, delivering or writing anything.
//!
//! Invariants: everything is tried at once and each thing within the same bound; one that hangs
//! hides no other.

use std::time::Duration;

use futures::future::{BoxFuture, FutureExt as _, join_all};
use inboxd_contract::{Finding, Severity};

use super::{AppError, letters, sources, store};
use crate::causes::chain;
use crate::config::{Config, SubscriptionConfig};
use crate::telemetry::Telemetry;

/// For inspections that keep to the bound themselves and know more of what hangs.
const MARGIN: Duration = Duration::from_secs(2);

/// The subject of what a start would refuse.
const CONFIGURATION: &str = "configuration";

/// What was found about one part of a configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checked {
    /// `database`, or `subscription` and its name.
    pub part: String,
    /// In the order of what was tried.
    pub findings: Vec<Finding>,
}

impl Checked {
    /// Something of it cannot be used.
    pub fn has_problem(&self) -> bool {
        self.findings.iter().any(|finding| finding.severity == Severity::Problem)
    }

    /// `inboxd run` would refuse the configuration because of it.
    pub fn is_refused(&self) -> bool {
        let refused = |finding: &Finding| {
            finding.severity == Severity::Problem && finding.subject == CONFIGURATION
        };
        self.findings.iter().any(refused)
    }
}

/// What a start would refuse beyond the configuration's own rules: what only the libraries that
/// values are meant for know, and files that they read. Connects to nothing; parts without a
/// problem are left out.
pub fn check_start(config: &Config) -> Vec<Checked> {
    let telemetry = Telemetry::check(&config.telemetry)
        .map_err(|error| AppError::Config { key: error.name.clone(), source: error.into() });
    let mut parts = vec![("telemetry".to_owned(), vec![telemetry])];
    for subscription in &config.subscriptions {
        let results = vec![
            sources::validate(subscription),
            sources::http_forwarder(subscription).map(drop),
            letters::validate(subscription),
        ];
        parts.push((format!("subscription {}", subscription.settings.name), results));
    }
    parts
        .into_iter()
        .map(|(part, results)| {
            let errors = results.into_iter().filter_map(Result::err);
            Checked { part, findings: errors.map(|error| refused(&error)).collect() }
        })
        .filter(Checked::has_problem)
        .collect()
}

/// Tries the database, and source, callback and target of dead letters of each subscription.
pub async fn check(config: &Config, within: Duration) -> Vec<Checked> {
    let mut parts: Vec<BoxFuture<'_, Checked>> = vec![
        async move {
            let findings = bounded("database", within, database(config)).await;
            Checked { part: "database".to_owned(), findings }
        }
        .boxed(),
    ];
    for subscription in &config.subscriptions {
        parts.push(
            async move {
                let (source, callback, letters) = futures::join!(
                    bounded(
                        "source",
                        within + MARGIN,
                        sources::inspect(config, subscription, within)
                    ),
                    bounded("callback", within, callback(subscription)),
                    bounded(
                        "dead letters",
                        within + MARGIN,
                        letters::inspect(subscription, within)
                    ),
                );
                let findings = source.into_iter().chain(callback).chain(letters).collect();
                Checked { part: format!("subscription {}", subscription.settings.name), findings }
            }
            .boxed(),
        );
    }
    join_all(parts).await
}

async fn bounded(
    subject: &str,
    within: Duration,
    inspection: impl Future<Output = Vec<Finding>>,
) -> Vec<Finding> {
    tokio::time::timeout(within, inspection).await.unwrap_or_else(|_| {
        let remedy = "see whether it hangs or a firewall drops packets, or give it more time with \
                      --timeout";
        vec![Finding::problem(subject, format!("no answer within {within:?}"), remedy)]
    })
}

async fn callback(subscription: &SubscriptionConfig) -> Vec<Finding> {
    match sources::http_forwarder(subscription) {
        Ok(forwarder) => forwarder.inspect().await,
        Err(error) => vec![refused(&error)],
    }
}

async fn database(config: &Config) -> Vec<Finding> {
    store::inspect(&config.database, config.lease).await
}

/// What only the library that it is meant for can refuse.
pub(super) fn refused(error: &AppError) -> Finding {
    let remedy = "correct it; `inboxd run` would end with exit code 78";
    Finding::problem(CONFIGURATION, chain(error), remedy)
}

/// The inbox cannot be looked into.
pub(super) fn unusable(error: &AppError) -> Finding {
    match error {
        AppError::Store(cause) => Finding::problem(
            "database",
            chain(cause),
            match cause.is_transient() {
                true => "see whether it runs, and whether database.url has the right host and port",
                false => "see to what it says, and to database.url, user and password",
            },
        ),
        other => refused(other),
    }
}
