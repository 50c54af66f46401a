//! The wiring: from a configuration to a running process, and back to nothing.
//!
//! In order: listeners, so that probes are answered from the first moment; the store, waited
//! for as long as it takes; sources and forwarders; the engine; then a signal, and all of it in
//! reverse within the grace period. Every task has an owner here that stops it.
//!
//! What it does not do: decide anything about a message.

mod check;
mod dead_letters;
mod explain;
mod letters;
mod operator;
mod signals;
mod sources;
mod store;
mod upkeep;

use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use futures::stream::{FuturesUnordered, StreamExt as _};
use inboxd_contract::{DeadLetterTarget, ErrorCode, InboxStore, OwnerId, SourceError, StoreError};
use rand::Rng as _;
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;
use uuid::Uuid;

use crate::admin::{self, AdminServer, Endpoints, HealthRegistry};
use crate::config::Config;
use crate::engine::{DrainReport, Hub, HubSettings, Subscription};
use crate::telemetry::{Metrics, Telemetry};

pub use check::{Checked, check, check_start};
pub use dead_letters::{DeadLetters, OpenedStore, open_to_change, open_to_look};
pub use explain::explain_from_database;

use operator::Operator;
use signals::Signals;
use upkeep::Upkeep;

/// `EX_CONFIG`: the configuration is refused.
pub const EXIT_CONFIG: u8 = 78;
/// `EX_UNAVAILABLE`: a dependency cannot be used, and trying again does not help.
pub const EXIT_UNAVAILABLE: u8 = 69;
const EXIT_FAILURE: u8 = 1;

const STOPPING: &str = "told to stop: nothing more is taken, what is in flight ends";
const INBOX_ID: &str = "inbox_id";
const HOST_NAME_BYTES_MAX: usize = 64;
/// Kept back from the grace period for what comes after the subscriptions.
const GRACE_MARGIN: Duration = Duration::from_millis(2_000);
/// For each of dead letters' targets, the renewals' last call and the database's connections.
const CLOSE_WITHIN: Duration = Duration::from_millis(500);

type BoxedError = Box<dyn std::error::Error + Send + Sync>;

/// Why a command ended otherwise than asked.
#[derive(Debug, thiserror::Error)]
pub enum AppError {
    /// A value can only be refused by the library it is meant for.
    #[error("{key} is refused")]
    Config {
        /// The key, in the form of the file.
        key: String,
        /// What is wrong with it.
        #[source]
        source: BoxedError,
    },
    /// The inbox cannot be used.
    #[error("the inbox cannot be used")]
    Store(#[source] StoreError),
    /// Every subscription ended with an error.
    #[error("all subscriptions have ended: {0}")]
    AllEnded(String),
    /// An address cannot be listened on.
    #[error("{key} cannot be listened on: is the port taken? set {key}.listen to another")]
    Listen {
        /// `admin` or `health`.
        key: &'static str,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The operating system gives no signals.
    #[error("signals cannot be received")]
    Signals(#[source] std::io::Error),
    /// The binary was built without it.
    #[error("this binary was built without the feature {0}")]
    Feature(&'static str),
}

impl AppError {
    /// What it is for an operator.
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::Config { .. } | Self::Feature(_) => ErrorCode::ConfigRefused,
            Self::Store(error) => error.code(),
            Self::AllEnded(_) => ErrorCode::SourceEnded,
            Self::Listen { .. } => ErrorCode::ListenerRefused,
            Self::Signals(_) => ErrorCode::Bug,
        }
    }

    /// The process's exit code.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Config { .. } | Self::Feature(_) => EXIT_CONFIG,
            Self::Store(_) | Self::AllEnded(_) => EXIT_UNAVAILABLE,
            Self::Listen { .. } | Self::Signals(_) => EXIT_FAILURE,
        }
    }
}

/// Consumes until a signal, or until every subscription has ended with an error.
///
/// # Errors
/// What keeps it from starting, or that every subscription has ended.
pub async fn run(config: Config) -> Result<(), AppError> {
    #[cfg(feature = "failpoints")]
    crate::failpoints::arm().map_err(|error| AppError::Config {
        key: crate::failpoints::VARIABLE.to_owned(),
        source: error.into(),
    })?;
    let signals = Signals::listen().map_err(AppError::Signals)?;
    for notice in &config.notices {
        tracing::warn!("{notice}");
    }
    let health = HealthRegistry::new(config.stale_after);
    let metrics = Metrics::new();
    let endpoints = Endpoints { health: health.clone(), metrics: metrics.clone() };
    let telemetry = Telemetry::start(&config.telemetry, &metrics)
        .map_err(|error| AppError::Config { key: error.name.clone(), source: error.into() })?;
    let operator = Operator::new(&config, health.clone());
    // Named before anybody can ask, so that nothing looks ready too early.
    let database = health.dependency("database");
    for subscription in &config.subscriptions {
        health.announce_subscription(&subscription.settings.name);
    }
    let servers = listen(&config, &endpoints, &operator).await?;

    let store = tokio::select! {
        biased;
        () = signals.first() => None,
        () = drained_before_start(&operator, &signals) => None,
        store = store::open(&config.database, config.lease, &database) => Some(store?),
    };
    let ended = match store {
        Some(store) => {
            let upkeep = Upkeep::start(store.clone(), &config.database, metrics.clone(), database);
            operator.has_store(&store);
            let observers = Observers { health: &health, metrics: &metrics, telemetry: &telemetry };
            let ended = consume(&config, &store, &observers, &signals, &operator).await;
            health.set_draining(STOPPING);
            upkeep.stop().await;
            if tokio::time::timeout(CLOSE_WITHIN, store.close()).await.is_err() {
                tracing::debug!("the database's connections did not close in time");
            }
            ended
        }
        None => Ok(()),
    };
    let servers = join_all(servers.into_iter().map(AdminServer::close));
    tokio::join!(servers, telemetry.shutdown(CLOSE_WITHIN));
    if ended.is_ok() {
        tracing::info!("stopped");
    }
    ended
}

/// Creates or updates the tables.
///
/// # Errors
/// A database that refuses it, that cannot be reached for a minute, or where it takes too long.
pub async fn migrate(config: Config) -> Result<(), AppError> {
    let signals = Signals::listen().map_err(AppError::Signals)?;
    let store = tokio::select! {
        biased;
        () = signals.first() => return Ok(()),
        store = store::open_soon(&config.database, config.lease) => store?,
    };
    tracing::info!("the tables are up to date: {}", store.describe());
    store.close().await;
    Ok(())
}

async fn listen(
    config: &Config,
    endpoints: &Endpoints,
    operator: &Arc<Operator>,
) -> Result<Vec<AdminServer>, AppError> {
    let mut servers = Vec::new();
    let api: Arc<dyn admin::Operator> = operator.clone();
    let tls = admin_tls(config)?;
    let wanted = [
        ("admin", config.admin.listen, Some(api), config.admin.token.as_ref(), tls),
        ("health", config.health_listen, None, None, None),
    ];
    for (key, address, api, token, tls) in wanted {
        let Some(address) = address else { continue };
        let server = AdminServer::start(address, endpoints.clone(), api, token, tls)
            .await
            .map_err(|source| AppError::Listen { key, source })?;
        tracing::info!(address = %server.address(), "listening ({key})");
        servers.push(server);
    }
    Ok(servers)
}

/// TLS of the operators' listener, where it is wanted.
fn admin_tls(config: &Config) -> Result<Option<TlsAcceptor>, AppError> {
    let Some(tls) = &config.admin.tls else { return Ok(None) };
    let acceptor = admin::acceptor(&tls.cert_file, &tls.key_file);
    acceptor
        .map(Some)
        .map_err(|error| AppError::Config { key: "admin.tls".to_owned(), source: error.into() })
}

/// Resolves with the signal that follows a drain which was asked for before anything was taken.
async fn drained_before_start(operator: &Operator, signals: &Signals) {
    operator.drain_wanted().await;
    operator.never_started();
    signals.first().await;
}

/// Who is told of what happens.
struct Observers<'a> {
    health: &'a HealthRegistry,
    metrics: &'a Metrics,
    telemetry: &'a Telemetry,
}

/// Starts the subscriptions, waits for the end, and drains them.
async fn consume(
    config: &Config,
    store: &Arc<dyn InboxStore>,
    observers: &Observers<'_>,
    signals: &Signals,
    operator: &Arc<Operator>,
) -> Result<(), AppError> {
    let inbox_id = tokio::select! {
        biased;
        () = signals.first() => return Ok(()),
        () = drained_before_start(operator, signals) => return Ok(()),
        id = inbox_id(&**store) => id?,
    };
    tell_start(config, &**store, &inbox_id);
    let hub = Hub::start(store.clone(), hub_settings(config), observers.metrics.clone());
    let (subscriptions, targets) = match start(config, store, &inbox_id, &hub, observers) {
        Ok((subscriptions, targets)) => (Arc::<[Subscription]>::from(subscriptions), targets),
        Err(error) => {
            hub.close().await;
            return Err(error);
        }
    };
    operator.has_started(hub.owner(), &subscriptions);
    let mut asked_drain = tokio::spawn(operator.clone().carry_out_drain());
    let ended = tokio::select! {
        biased;
        () = signals.first() => Ok(()),
        reason = all_failed(&subscriptions) => Err(AppError::AllEnded(reason)),
    };
    observers.health.set_draining(STOPPING);
    let grace = config.shutdown_grace;
    drain(&subscriptions, grace - GRACE_MARGIN.min(grace / 10)).await;
    asked_drain.abort();
    let _ = (&mut asked_drain).await;
    // Nobody has a dead letter to publish any more.
    letters::close(&targets, CLOSE_WITHIN).await;
    if tokio::time::timeout(CLOSE_WITHIN, hub.close()).await.is_err() {
        tracing::debug!("a renewal of leases was cut");
    }
    ended
}

/// The inbox's own id: replicas that do not share it do not deduplicate together.
async fn inbox_id(store: &dyn InboxStore) -> Result<String, AppError> {
    let fresh = Uuid::new_v4().to_string();
    store::persist("read the inbox's id", || store.note_once(INBOX_ID, &fresh))
        .await
        .map_err(AppError::Store)
}

fn tell_start(config: &Config, store: &dyn InboxStore, inbox_id: &str) {
    let sum = |of: fn(&crate::engine::SubscriptionSettings) -> usize| -> usize {
        config.subscriptions.iter().map(|subscription| of(&subscription.settings)).sum()
    };
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        inbox_id,
        subscriptions = config.subscriptions.len(),
        in_flight_max = sum(|settings| settings.in_flight_max),
        in_flight_bytes_max = sum(|settings| settings.in_flight_bytes_max),
        "{}",
        store.describe()
    );
}

fn hub_settings(config: &Config) -> HubSettings {
    HubSettings {
        owner: owner(),
        lease: config.lease,
        retention: config.database.retention,
        random_seed: rand::rng().random(),
    }
}

/// One life of one process.
fn owner() -> OwnerId {
    let host = hostname::get().ok().and_then(|name| name.into_string().ok()).unwrap_or_default();
    let host: String =
        host.chars().filter(|c| c.is_ascii_graphic()).take(HOST_NAME_BYTES_MAX).collect();
    OwnerId(format!("{host}/{}/{}", std::process::id(), Uuid::new_v4().simple()).into())
}

/// Subscriptions, and the targets that are closed after them.
type Started = (Vec<Subscription>, Vec<Arc<dyn DeadLetterTarget>>);

fn start(
    config: &Config,
    store: &Arc<dyn InboxStore>,
    inbox_id: &str,
    hub: &Arc<Hub>,
    observers: &Observers<'_>,
) -> Result<Started, AppError> {
    // All are checked before one begins to consume.
    let parts = config
        .subscriptions
        .iter()
        .map(|subscription| Ok((sources::forwarder(subscription)?, letters::target(subscription)?)))
        .collect::<Result<Vec<_>, AppError>>()?;
    let targets = parts.iter().filter_map(|(_, target)| target.clone()).collect();
    let started = config.subscriptions.iter().zip(parts).map(|(subscription, parts)| {
        let (forwarder, target) = parts;
        let mut settings = subscription.settings.clone();
        settings.body_bytes_max = body_limit(&settings, &**store);
        let name = settings.name.clone();
        let source = sources::source(subscription, store, inbox_id)?;
        let tracer = sources::described(subscription)
            .and_then(|described| observers.telemetry.subscription(described));
        Ok(Subscription::start(
            hub,
            settings,
            source,
            forwarder,
            target,
            observers.metrics.subscription(&name).traced(tracer),
            observers.health.subscription(&name),
        ))
    });
    Ok((started.collect::<Result<_, AppError>>()?, targets))
}

/// Never above what the database takes beside a row's other columns.
fn body_limit(settings: &crate::engine::SubscriptionSettings, store: &dyn InboxStore) -> u64 {
    let limit = store.limits().body_bytes_max;
    if limit < settings.body_bytes_max {
        tracing::warn!(
            code = %ErrorCode::BodyLimitLowered,
            subscription = %settings.name,
            body_bytes_max = limit,
            "the database takes no larger bodies than this; larger ones become dead letters \
             without their body"
        );
    }
    settings.body_bytes_max.min(limit)
}

/// Resolves when every subscription has ended with an error, with what they said.
async fn all_failed(subscriptions: &[Subscription]) -> String {
    let mut failing: FuturesUnordered<_> = subscriptions
        .iter()
        .map(|subscription| async move { (subscription.name(), subscription.failed().await) })
        .collect();
    let mut reasons = Vec::new();
    while let Some((name, reason)) = failing.next().await {
        let left = failing.len();
        tracing::error!(
            code = %ErrorCode::SourceEnded,
            subscription = name,
            left,
            "the subscription has ended and is not started again: restart the process once the \
             cause, which the source has told, is mended"
        );
        reasons.push(format!("{name}: {reason}"));
    }
    if reasons.is_empty() {
        return pending().await;
    }
    reasons.join("; ")
}

async fn drain(subscriptions: &[Subscription], grace: Duration) {
    let deadline = Instant::now() + grace;
    for subscription in subscriptions {
        subscription.stop();
    }
    let in_flight: usize = subscriptions.iter().map(Subscription::in_flight).sum();
    tracing::info!(in_flight, ?grace, "draining: nothing new starts");
    join_all(subscriptions.iter().map(|subscription| async move {
        let name = subscription.name();
        let report = subscription.drain(deadline).await;
        tell_drained(name, &report);
    }))
    .await;
}

fn tell_drained(name: &str, report: &DrainReport) {
    match &report.closed {
        Ok(()) => tracing::info!(subscription = name, cut = report.cut, "drained"),
        Err(error) => tell_unclosed(name, report.cut, error),
    }
}

fn tell_unclosed(name: &str, cut: usize, error: &SourceError) {
    tracing::warn!(
        code = %ErrorCode::DrainCut,
        subscription = name,
        cut,
        %error,
        "drained, but the source did not close well: what was settled last may be delivered again, \
         and is suppressed then"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_tell_what_kind_of_end_it_was() {
        let config =
            AppError::Config { key: "subscription.a.callback".into(), source: "no".into() };
        assert_eq!(config.exit_code(), 78);
        assert_eq!(AppError::AllEnded("a: gone".into()).exit_code(), 69);
        assert_eq!(AppError::Store(StoreError::permanent("no right")).exit_code(), 69);
    }

    #[test]
    fn an_owner_fits_its_column_and_is_one_life() {
        let (one, other) = (owner(), owner());
        assert!(one.0.len() <= 128);
        assert_ne!(one, other);
    }

    #[tokio::test]
    async fn an_inbox_keeps_its_id() {
        let store = inboxd_memory::MemoryStore::new(inboxd_memory::MemoryDatabase::new());
        let first = inbox_id(&store).await.unwrap();
        assert_eq!(inbox_id(&store).await.unwrap(), first);
    }

    #[tokio::test]
    async fn without_subscriptions_nothing_has_failed() {
        let failed = tokio::time::timeout(Duration::from_millis(20), all_failed(&[]));
        assert!(failed.await.is_err());
    }
}
