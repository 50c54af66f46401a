//! What operators ask of the running process, and the drain that they may ask for.
//!
//! Invariants: a drain is carried out once, by one task of the process, whoever asks and goes
//! away; it is never undone: the process takes nothing more until it is started again.
//!
//! What is left when the process dies during a drain is what is left when it dies at any time:
//!
//! | died after | what comes of it |
//! |---|---|
//! | the source was told to stop, the waiting given back | delivered again elsewhere |
//! | a POST under way ended, its row committed | delivered again, a duplicate, acked |
//! | everything settled, the source not closed | Kafka: what was settled since the last commit is delivered again, duplicates; RabbitMQ: acks that had not arrived, the same |
//! | the source was closed | nothing is delivered again |

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use bytes::Bytes;
use futures::future::join_all;
use inboxd_contract::{Actor, ConsumerId, InboxStore, MessageId, OwnerId, SourcePhase};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::dead_letters::DeadLetters;
use super::explain::{self, Target};
use crate::admin::{
    self, Answering, AuditPage, CallbackStatus, Change, ChangeError, DatabaseStatus,
    DependencyState, DiscardAnswer, DiscardAsk, DrainAnswer, ExplainError, HealthRegistry,
    LetterWhole, LettersError, MessageReport, ParkedAsk, ParkedPage, Readiness, ReplayAnswer,
    ReplayAsk, RunningMessage, Status, SubscriptionStatus, Which,
};
use crate::config::Config;
use crate::engine::{CallbackState, Flight, Limits, Subscription};

const DRAINING: &str = "draining on request: nothing more is taken, what is in flight ends";
const DRAINED: &str = "drained on request: nothing is taken until the process is started again";
const NOT_OPEN: &str = "the database is not open yet; /readyz says why";
/// Messages told of each subscription that does not end.
const OLDEST_TOLD: usize = 5;

/// What is asked about and told to drain.
pub(super) struct Operator {
    started_at: Instant,
    health: HealthRegistry,
    /// Subscriptions and their consumer ids, in the order of the configuration.
    consumers: Vec<(String, ConsumerId)>,
    retention: Duration,
    drain_patience: Duration,
    store: OnceLock<Arc<dyn InboxStore>>,
    running: OnceLock<Running>,
    /// Who paused which subscription.
    paused_by: Mutex<BTreeMap<String, String>>,
    drain_wanted: CancellationToken,
    drained: watch::Sender<bool>,
}

struct Running {
    owner: OwnerId,
    subscriptions: Arc<[Subscription]>,
}

impl Operator {
    pub(super) fn new(config: &Config, health: HealthRegistry) -> Arc<Self> {
        Arc::new(Self {
            started_at: Instant::now(),
            health,
            consumers: consumers(config),
            retention: config.database.retention,
            drain_patience: config.shutdown_grace,
            store: OnceLock::new(),
            running: OnceLock::new(),
            paused_by: Mutex::default(),
            drain_wanted: CancellationToken::new(),
            drained: watch::Sender::new(false),
        })
    }

    /// The inbox is open.
    pub(super) fn has_store(&self, store: &Arc<dyn InboxStore>) {
        let _ = self.store.set(store.clone());
    }

    /// Subscriptions were started.
    pub(super) fn has_started(&self, owner: &OwnerId, subscriptions: &Arc<[Subscription]>) {
        let running = Running { owner: owner.clone(), subscriptions: subscriptions.clone() };
        let _ = self.running.set(running);
    }

    /// Resolves when a drain is asked for.
    ///
    /// # Cancel safety
    /// Cancel-safe.
    pub(super) async fn drain_wanted(&self) {
        self.drain_wanted.cancelled().await;
    }

    /// A drain is asked for before anything was taken.
    pub(super) fn never_started(&self) {
        self.end_drain();
    }

    /// Waits for the wish and carries it out.
    pub(super) async fn carry_out_drain(self: Arc<Self>) {
        self.drain_wanted().await;
        let Some(running) = self.running.get() else { return self.end_drain() };
        self.health.set_draining(DRAINING);
        tracing::info!("{DRAINING}");
        for subscription in &*running.subscriptions {
            subscription.stop();
        }
        join_all(running.subscriptions.iter().map(|subscription| async move {
            let report = subscription.drain_patiently().await;
            super::tell_drained(subscription.name(), &report);
        }))
        .await;
        self.end_drain();
    }

    fn end_drain(&self) {
        self.health.set_draining(DRAINED);
        tracing::info!("{DRAINED}");
        self.drained.send_replace(true);
    }

    fn subscriptions(&self) -> &[Subscription] {
        self.running.get().map_or(&[], |running| &running.subscriptions)
    }

    fn flights(&self, target: &Target, message_id: &MessageId) -> Vec<(String, Flight)> {
        let of = self
            .subscriptions()
            .iter()
            .filter(|subscription| *subscription.consumer_id() == target.consumer_id);
        of.flat_map(|subscription| {
            let flights = subscription.flights(message_id).into_iter();
            flights.map(|flight| (subscription.name().to_owned(), flight))
        })
        .collect()
    }

    fn dead_letters(&self) -> Result<DeadLetters<'_>, LettersError> {
        match self.store.get() {
            Some(store) => Ok(DeadLetters::of(&**store)),
            None => Err(LettersError::Inbox(NOT_OPEN.to_owned())),
        }
    }

    fn phase(&self, readiness: &Readiness) -> &'static str {
        match () {
            () if *self.drained.borrow() => "drained",
            () if readiness.draining => "draining",
            () if self.running.get().is_none() => "starting",
            () => "running",
        }
    }

    fn paused_by(&self) -> MutexGuard<'_, BTreeMap<String, String>> {
        // Nothing panics while it holds the lock.
        self.paused_by.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn callback_status(&self, subscription: &Subscription) -> CallbackStatus {
        let mut status = CallbackStatus::from(subscription.callback_report());
        if status.state == CallbackState::Paused.as_str()
            && let Some(who) = self.paused_by().get(subscription.name())
        {
            status.why = format!("paused by {who}");
        }
        status
    }

    fn subscription_status(
        &self,
        name: &str,
        consumer_id: &ConsumerId,
        readiness: &Readiness,
    ) -> SubscriptionStatus {
        let of_it = ["subscription", "source", "callback"];
        let dependencies = of_it
            .iter()
            .filter_map(|kind| readiness.dependencies.get_key_value(&format!("{kind}:{name}")));
        let unready: Vec<_> = dependencies.filter(|(_, state)| !state.ready).collect();
        let subscription =
            self.subscriptions().iter().find(|subscription| subscription.name() == name);
        let source = subscription.map(Subscription::source_status);
        let phase = match source.as_ref().map(|source| &source.phase) {
            None => "starting",
            Some(_) if subscription.is_some_and(Subscription::is_closed) => "closed",
            Some(SourcePhase::Connecting) => "connecting",
            Some(SourcePhase::Ready) => "ready",
            Some(SourcePhase::Standby) => "standby",
            Some(SourcePhase::Failing) => "failing",
            Some(SourcePhase::Closed) => "closed",
        };
        SubscriptionStatus {
            consumer_id: consumer_id.to_string(),
            phase: phase.to_owned(),
            ready: subscription.is_some() && unready.is_empty() && phase != "closed",
            reasons: unready
                .iter()
                .map(|(name, state)| format!("{name}: {}", state.reason))
                .collect(),
            in_flight: subscription.map_or(0, Subscription::in_flight),
            reconnects: source.map_or(0, |source| source.reconnects),
            callback: subscription.map(|subscription| self.callback_status(subscription)),
        }
    }
}

#[async_trait]
impl admin::Operator for Operator {
    async fn explain(&self, asked: &[u8], which: Which) -> Result<MessageReport, ExplainError> {
        let targets = explain::targets(&self.consumers, &which)?;
        let Some(store) = self.store.get() else {
            return Err(ExplainError::Inbox(NOT_OPEN.to_owned()));
        };
        let answering = Answering {
            owner: self.running.get().map(|running| &running.owner),
            now: SystemTime::now(),
            retention: self.retention,
        };
        explain::gather(&**store, &answering, &targets, asked, |target, message_id| {
            self.flights(target, message_id)
        })
        .await
    }

    async fn drain(&self, patience: Duration) -> DrainAnswer {
        let mut drained = self.drained.subscribe();
        self.drain_wanted.cancel();
        if tokio::time::timeout(patience, drained.wait_for(|drained| *drained)).await.is_ok() {
            return DrainAnswer { drained: true, running: Vec::new() };
        }
        let running = self.subscriptions().iter().filter(|subscription| !subscription.is_closed());
        let running = running.map(|subscription| admin::Running {
            subscription: subscription.name().to_owned(),
            in_flight: subscription.in_flight(),
            oldest: subscription
                .oldest_flights(OLDEST_TOLD)
                .into_iter()
                .map(|flight| RunningMessage {
                    message_id: flight.key.message_id.to_string(),
                    waits: admin::waits(&flight, None),
                })
                .collect(),
        });
        DrainAnswer { drained: false, running: running.collect() }
    }

    fn drain_patience(&self) -> Duration {
        self.drain_patience
    }

    fn status(&self) -> Status {
        let readiness = self.health.readiness();
        let database = readiness.dependencies.get("database").cloned();
        let subscriptions: BTreeMap<_, _> = self
            .consumers
            .iter()
            .map(|(name, id)| (name.clone(), self.subscription_status(name, id, &readiness)))
            .collect();
        Status {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_s: self.started_at.elapsed().as_secs(),
            owner: self.running.get().map(|running| running.owner.to_string()),
            phase: self.phase(&readiness).to_owned(),
            ready: readiness.ready,
            database: DatabaseStatus {
                description: self.store.get().map(|store| store.describe()),
                state: database.unwrap_or(DependencyState {
                    ready: false,
                    code: None,
                    reason: String::new(),
                }),
            },
            subscriptions,
        }
    }

    fn change(
        &self,
        name: &str,
        change: Change,
        actor: &Actor,
    ) -> Result<SubscriptionStatus, ChangeError> {
        let Some((name, consumer_id)) = self.consumers.iter().find(|(known, _)| known == name)
        else {
            let known: Vec<_> = self.consumers.iter().map(|(name, _)| name.as_str()).collect();
            let known = known.join(", ");
            return Err(ChangeError::Unknown { name: name.to_owned(), known });
        };
        let subscription = self.subscriptions().iter().find(|running| running.name() == name);
        let subscription = subscription.filter(|subscription| !subscription.is_closed());
        let Some(subscription) = subscription else {
            let why =
                format!("subscription {name} has not begun yet, or has ended: /readyz says why");
            return Err(ChangeError::NotRunning(why));
        };
        match change {
            Change::Pause => {
                self.paused_by().insert(name.clone(), actor.as_str().to_owned());
                subscription.pause();
            }
            Change::Resume => {
                subscription.resume();
                self.paused_by().remove(name);
            }
            Change::Limits { concurrency, rate } => {
                let now = subscription.callback_report();
                subscription.set_limits(Limits {
                    concurrency: concurrency.unwrap_or(now.concurrency),
                    rate: rate.unwrap_or(now.rate),
                });
            }
        }
        Ok(self.subscription_status(name, consumer_id, &self.health.readiness()))
    }

    async fn parked(&self, ask: &ParkedAsk) -> Result<ParkedPage, LettersError> {
        self.dead_letters()?.list(ask).await
    }

    async fn letter(&self, seq: i64) -> Result<Option<LetterWhole>, LettersError> {
        self.dead_letters()?.show(seq).await
    }

    async fn letter_body(&self, seq: i64) -> Result<Option<Option<Bytes>>, LettersError> {
        self.dead_letters()?.body(seq).await
    }

    async fn replay(&self, ask: &ReplayAsk, actor: &Actor) -> Result<ReplayAnswer, LettersError> {
        self.dead_letters()?.replay(ask, actor).await
    }

    async fn discard(
        &self,
        ask: &DiscardAsk,
        actor: &Actor,
    ) -> Result<DiscardAnswer, LettersError> {
        self.dead_letters()?.discard(ask, actor).await
    }

    async fn audit(&self, before: Option<i64>, limit: u32) -> Result<AuditPage, LettersError> {
        self.dead_letters()?.audit(before, limit).await
    }
}

/// Subscriptions and their consumer ids, in the order of the configuration.
pub(super) fn consumers(config: &Config) -> Vec<(String, ConsumerId)> {
    let settings = config.subscriptions.iter().map(|subscription| &subscription.settings);
    settings.map(|settings| (settings.name.to_string(), settings.consumer_id.clone())).collect()
}
