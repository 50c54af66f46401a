//! A broker, a database, an application and any number of instances, all in memory.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use inboxd::admin::HealthRegistry;
use inboxd::engine::{
    BreakerSettings, CallbackState, DeadLetterTo, DeliveryMode, Extractor, FingerprintOf, Hub,
    HubSettings, IdentitySettings, KeyFrom, OnBlockedLane, OnDeadLetter, OnIdConflict, OnMissingId,
    OnUnrouted, Ordering, RetrySettings, Subscription, SubscriptionSettings,
};
use inboxd::telemetry::Metrics;
use inboxd_conformance::{ensure, eventually};
use inboxd_contract::{
    ConsumerId, DeadLetterTarget, Envelope, ForwardRequest, Forwarder, Header, InboxKey,
    InboxStore as _, MessageId, Origin, Outcome, OwnerId, ParkedCopy, RetryReason, Verdict,
};
use inboxd_memory::{
    MemoryBroker, MemoryBrokerOptions, MemoryDatabase, MemoryStore, ScriptedFaults,
};

pub const LEASE: Duration = Duration::from_secs(15);
/// Of paused time.
pub const PATIENCE: Duration = Duration::from_secs(3_600);

type Script = Box<dyn Fn(&str, u32) -> (Duration, Verdict) + Send + Sync>;

/// What the application saw: id, attempt, and whether it accepted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    pub id: String,
    pub attempt: u32,
    pub accepted: bool,
}

/// An application that decides at once and answers after a while, and that finishes what it
/// has begun although nobody listens any more.
#[derive(Clone)]
pub struct Application {
    calls: Arc<Mutex<Vec<Call>>>,
    script: Arc<Script>,
    /// Its host refuses connections.
    is_away: Arc<AtomicBool>,
    /// What its health URL says, where it has one.
    is_healthy: Option<Arc<AtomicBool>>,
}

impl Application {
    pub fn new(script: impl Fn(&str, u32) -> (Duration, Verdict) + Send + Sync + 'static) -> Self {
        Self {
            calls: Arc::default(),
            script: Arc::new(Box::new(script)),
            is_away: Arc::default(),
            is_healthy: None,
        }
    }

    pub fn accepting() -> Self {
        Self::new(|_, _| (Duration::from_millis(5), accepted()))
    }

    /// With a health URL.
    pub fn healthy(self, is_healthy: bool) -> Self {
        Self { is_healthy: Some(Arc::new(is_healthy.into())), ..self }
    }

    pub fn set_healthy(&self, is_healthy: bool) {
        self.is_healthy.as_ref().unwrap().store(is_healthy, SeqCst);
    }

    /// Its host refuses connections, or accepts them again.
    pub fn set_away(&self, is_away: bool) {
        self.is_away.store(is_away, SeqCst);
    }

    pub fn calls(&self) -> Vec<Call> {
        self.calls.lock().unwrap().clone()
    }

    pub fn calls_of(&self, id: &str) -> usize {
        self.calls().iter().filter(|call| call.id == id).count()
    }

    /// How often each id was accepted.
    pub fn accepted(&self) -> BTreeMap<String, usize> {
        let mut accepted = BTreeMap::new();
        for call in self.calls().into_iter().filter(|call| call.accepted) {
            *accepted.entry(call.id).or_default() += 1;
        }
        accepted
    }
}

#[async_trait]
impl Forwarder for Application {
    async fn forward(&self, request: ForwardRequest<'_>) -> Verdict {
        if self.is_away.load(SeqCst) {
            return retry(RetryReason::Unreachable);
        }
        let id = request.key.message_id.as_str().to_owned();
        let (delay, verdict) = (self.script)(&id, request.attempt);
        let accepted = matches!(verdict, Verdict::Accepted { .. });
        self.calls.lock().unwrap().push(Call { id, attempt: request.attempt, accepted });
        tokio::time::sleep(delay).await;
        verdict
    }

    async fn probe(&self) -> Result<(), String> {
        let is_healthy = self.is_healthy.as_ref().is_none_or(|healthy| healthy.load(SeqCst));
        match self.is_away.load(SeqCst) || !is_healthy {
            true => Err("connection refused".into()),
            false => Ok(()),
        }
    }

    fn has_health(&self) -> bool {
        self.is_healthy.is_some()
    }
}

pub fn accepted() -> Verdict {
    Verdict::Accepted { status: 200 }
}

pub fn retry(reason: RetryReason) -> Verdict {
    Verdict::Retry { reason, status: None, after: None, detail: String::new() }
}

pub fn refused() -> Verdict {
    Verdict::Refused { status: 422, detail: "no such article".into() }
}

/// The settings most tests start from.
pub fn settings() -> SubscriptionSettings {
    SubscriptionSettings {
        name: "orders".into(),
        consumer_id: ConsumerId::new("billing").unwrap(),
        ordering: Ordering::None,
        key_from: KeyFrom::Header("key".into()),
        identity: IdentitySettings {
            extractors: vec![Extractor::Header("id".into())],
            scope_by_producer: false,
            fingerprint: FingerprintOf::Body,
            on_missing: OnMissingId::DeadLetter,
            on_missing_is_explicit: false,
            on_conflict: OnIdConflict::DeadLetter,
        },
        delivery: DeliveryMode::Direct,
        concurrency: 16,
        adaptive: false,
        rate: None,
        in_flight_max: 1_024,
        in_flight_bytes_max: 1 << 20,
        body_bytes_max: 1 << 19,
        callback_timeout: Duration::from_secs(30),
        lease: LEASE,
        hold_max: Duration::from_secs(600),
        retry: RetrySettings {
            initial: Duration::from_millis(200),
            factor: 2.0,
            cap: Duration::from_secs(30),
            ..RetrySettings::IN_PLACE
        },
        park: RetrySettings::PARKED,
        on_blocked_lane: OnBlockedLane::default(),
        on_dead_letter: OnDeadLetter::default(),
        dead_letter_to: DeadLetterTo::default(),
        breaker: BreakerSettings::default(),
        health_interval: Duration::from_secs(5),
        routes: Vec::new(),
        on_unrouted: OnUnrouted::DeadLetter,
    }
}

/// A message whose body follows from its id.
pub fn message(id: &str) -> Envelope {
    with_body(id, format!("body of {id}").as_bytes())
}

pub fn with_body(id: &str, body: &[u8]) -> Envelope {
    let mut envelope = bare(body);
    envelope.headers.push(Header::new("id", id.to_owned()));
    envelope
}

pub fn bare(body: &[u8]) -> Envelope {
    let origin = Origin::Memory { stream: "".into(), position: 0 };
    Envelope::new(origin, Some(Bytes::copy_from_slice(body)))
}

pub fn keyed(id: &str, key: &str) -> Envelope {
    let mut envelope = message(id);
    envelope.headers.push(Header::new("key", key.to_owned()));
    envelope
}

pub fn key(id: &str) -> InboxKey {
    InboxKey {
        consumer_id: ConsumerId::new("billing").unwrap(),
        message_id: MessageId::from_bytes(id.as_bytes()).unwrap(),
    }
}

/// Broker and database, shared by the instances that are started.
pub struct World {
    pub broker: MemoryBroker,
    pub database: Arc<MemoryDatabase>,
    pub application: Application,
}

/// One process life.
pub struct Instance {
    pub hub: Arc<Hub>,
    pub subscription: Subscription,
    pub metrics: Metrics,
    pub health: HealthRegistry,
    pub faults: Arc<ScriptedFaults>,
}

impl World {
    /// A queue: what is released comes again.
    pub fn queue(application: Application) -> Self {
        Self::with(MemoryBrokerOptions::queue("orders"), application)
    }

    /// A log with two streams: offsets follow the lowest unsettled one.
    pub fn log(application: Application) -> Self {
        Self::with(MemoryBrokerOptions::log("orders", 2), application)
    }

    pub fn with(options: MemoryBrokerOptions, application: Application) -> Self {
        Self { broker: MemoryBroker::new(options), database: MemoryDatabase::new(), application }
    }

    pub fn publish(&self, ids: impl IntoIterator<Item = impl AsRef<str>>) {
        for id in ids {
            self.broker.publish(0, message(id.as_ref()));
        }
    }

    pub fn start(&self) -> Instance {
        self.start_with(settings())
    }

    pub fn start_with(&self, settings: SubscriptionSettings) -> Instance {
        self.start_to(settings, None)
    }

    /// With somewhere for dead letters to go.
    pub fn start_to(
        &self,
        settings: SubscriptionSettings,
        letters: Option<Arc<dyn DeadLetterTarget>>,
    ) -> Instance {
        let faults = Arc::new(ScriptedFaults::default());
        let store = Arc::new(MemoryStore::with_faults(self.database.clone(), faults.clone()));
        let metrics = Metrics::new();
        let health = HealthRegistry::new(Duration::from_secs(30));
        let owner = OwnerId(uuid::Uuid::new_v4().to_string().into());
        let hub_settings = HubSettings {
            owner,
            lease: settings.lease,
            retention: Duration::from_secs(14 * 86_400),
            random_seed: rand::random(),
        };
        let hub = Hub::start(store, hub_settings, metrics.clone());
        let name = settings.name.to_string();
        let subscription = Subscription::start(
            &hub,
            settings,
            Box::new(self.broker.source()),
            Arc::new(self.application.clone()),
            letters,
            metrics.subscription(&name),
            health.subscription(&name),
        );
        Instance { hub, subscription, metrics, health, faults }
    }

    /// Waits until everything published is settled.
    pub async fn drained(&self) {
        eventually(PATIENCE, async || {
            let left = self.broker.unsettled();
            ensure(left == 0, format!("{left} unsettled; {:?}", self.application.calls()))
        })
        .await;
    }

    /// Waits until so many messages are processed.
    pub async fn processed(&self, count: usize) {
        eventually(PATIENCE, async || {
            let processed = self.database.processed().len();
            ensure(processed == count, format!("{processed}; {:?}", self.application.calls()))
        })
        .await;
    }

    /// Waits until so many dead letters are there.
    pub async fn dead(&self, count: usize) {
        eventually(PATIENCE, async || {
            let dead = self.database.dead();
            ensure(dead.len() == count, format!("{dead:?}; {:?}", self.application.calls()))
        })
        .await;
    }

    /// The parked rows of a message.
    pub async fn copies(&self, id: &str) -> Vec<ParkedCopy> {
        MemoryStore::new(self.database.clone()).parked(&key(id)).await.unwrap()
    }

    /// Waits until the application was called so often for this id.
    pub async fn called(&self, id: &str, times: usize) {
        eventually(PATIENCE, async || {
            let calls = self.application.calls_of(id);
            ensure(calls >= times, format!("{id}: {calls} calls"))
        })
        .await;
    }
}

impl Instance {
    pub fn outcomes(&self, outcome: Outcome) -> usize {
        self.figure("inboxd_deliveries_total", &format!(",outcome=\"{}\"", outcome.as_str()))
    }

    /// What became of parked messages that were taken.
    pub fn settled(&self, result: &str) -> usize {
        self.figure("inboxd_parked_settled_total", &format!(",result=\"{result}\""))
    }

    pub fn figure(&self, name: &str, labels: &str) -> usize {
        let line = format!("{name}{{subscription=\"orders\"{labels}}} ");
        let text = self.metrics.encode();
        let value = text.lines().find_map(|found| found.strip_prefix(line.as_str()));
        value.unwrap_or_else(|| panic!("{line} in\n{text}")).parse().unwrap()
    }

    /// Waits until the subscription is paused.
    pub async fn paused(&self) {
        eventually(PATIENCE, async || {
            let readiness = self.health.readiness();
            let state = &readiness.dependencies["subscription:orders"];
            ensure(!state.ready, format!("{readiness:?}"))
        })
        .await;
    }

    /// Waits until its callback is in this state.
    pub async fn callback(&self, state: CallbackState) {
        eventually(PATIENCE, async || {
            let report = self.subscription.callback_report();
            ensure(report.state == state, format!("{report:?}"))
        })
        .await;
    }

    /// A crash: everything in memory is gone at once. The broker and the database stay.
    pub fn crash(self) {
        drop(self);
    }

    pub async fn drain(&self, grace: Duration) -> inboxd::engine::DrainReport {
        self.subscription.drain(tokio::time::Instant::now() + grace).await
    }
}
