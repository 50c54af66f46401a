//! One subscription: its source, its application, and the deliveries between them.
//!
//! Invariants: every delivery's task is tracked and awaited, or cut when the grace period
//! ends; a forward that is cut keeps its claim until it runs out; the source is closed last, so
//! that heartbeats, polling and acks go on while forwards finish.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures::FutureExt as _;
use inboxd_contract::{
    ConsumerId, DeadLetterTarget, ErrorCode, Forwarder, InboxKey, MessageId, Source, SourceError,
    SourceStatus,
};
use tokio::sync::{MutexGuard, Semaphore, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::arrivals::{Arrivals, Writer};
use super::budget::Budget;
use super::callback::{Callback, CallbackParts, CallbackReport};
use super::hub::Hub;
use super::intake::{Intake, IntakeEnd};
use super::lanes::Lanes;
use super::progress::{Flight, Table};
use super::settings::{DeliveryMode, Limits, SubscriptionSettings};
use super::target::Letters;
use super::trouble::{CallbackTrouble, SourceTrouble};
use super::worker::{self, Due};
use crate::admin::SubscriptionHealth;
use crate::telemetry::SubscriptionMetrics;

/// Kept back from the grace period for cutting, last acks and closing.
const CLOSE_MARGIN: Duration = Duration::from_secs(3);

/// For the last settlements and the goodbye to the broker, where nothing presses.
const PATIENT_CLOSE: Duration = Duration::from_secs(10);

/// Even where no time is left.
const CLOSE_MIN: Duration = Duration::from_millis(200);

/// For telling the broker to send no more.
const STOP_TAKING_MAX: Duration = Duration::from_secs(2);

/// What the tasks of one subscription share.
pub(super) struct Shared {
    pub(super) hub: Arc<Hub>,
    pub(super) settings: SubscriptionSettings,
    pub(super) forwarder: Arc<dyn Forwarder>,
    pub(super) metrics: SubscriptionMetrics,
    pub(super) health: SubscriptionHealth,
    pub(super) lanes: Lanes,
    /// Where each delivery stands.
    pub(super) table: Table,
    pub(super) budget: Budget,
    /// Where messages are stored that are not claimed.
    pub(super) arrivals: Arrivals,
    /// When parked messages are to be asked for.
    pub(super) due: Arc<Due>,
    /// Where dead letters go beside the table.
    pub(super) letters: Letters,
    /// Claims taken and not yet POSTed once: the next batch is claimed while one is under way.
    pub(super) claim_slots: Semaphore,
    /// When the application is called.
    pub(super) callback: Arc<Callback>,
    /// How many of those were ever made.
    pub(super) claim_slots_made: AtomicUsize,
    /// Nothing more is taken from the source.
    pub(super) intake_stop: CancellationToken,
    /// Nothing new starts.
    pub(super) draining: CancellationToken,
    /// What still runs is cut.
    pub(super) cut: CancellationToken,
    pub(super) releasable: bool,
    pub(super) tasks: TaskTracker,
    /// What was said of an application that fails.
    pub(super) trouble: CallbackTrouble,
}

impl Shared {
    /// Every message is stored on arrival.
    pub(super) fn stores(&self) -> bool {
        self.settings.delivery == DeliveryMode::Stored
    }

    /// The subscription cannot go on: nothing new starts, and whoever waits is told.
    pub(super) fn fail(
        &self,
        code: ErrorCode,
        reason: &str,
        ended: &watch::Sender<Option<String>>,
    ) {
        self.health.failed(code, reason);
        self.draining.cancel();
        ended.send_replace(Some(reason.to_owned()));
    }
}

/// How a drain ended.
#[derive(Debug)]
pub struct DrainReport {
    /// Deliveries whose work was cut at the deadline.
    pub cut: usize,
    /// What the source said when it was closed.
    pub closed: Result<(), SourceError>,
}

/// How far a subscription has come on its way to its end.
enum Stage {
    /// The intake runs.
    Taking(JoinHandle<Option<IntakeEnd>>),
    /// Nothing more is taken and nothing new starts; the source is still to be closed.
    Stopped(Option<Box<dyn Source>>),
    Closed,
}

/// A running subscription.
pub struct Subscription {
    shared: Arc<Shared>,
    /// Held across the steps of ending, so that two who end it do each step once.
    stage: tokio::sync::Mutex<Stage>,
    status: watch::Receiver<SourceStatus>,
    watcher: JoinHandle<()>,
    /// Asks the callback's host or health URL. Ended with the source: what is at the application
    /// until then may still wait for its turn.
    driver: JoinHandle<()>,
    ended: watch::Receiver<Option<String>>,
}

impl Subscription {
    /// Starts to consume, and to forward what is parked, as soon as the callback's host accepts a
    /// connection. `letters`: where dead letters are published, where the settings ask for it.
    pub fn start(
        hub: &Arc<Hub>,
        mut settings: SubscriptionSettings,
        source: Box<dyn Source>,
        forwarder: Arc<dyn Forwarder>,
        letters: Option<Arc<dyn DeadLetterTarget>>,
        metrics: SubscriptionMetrics,
        health: SubscriptionHealth,
    ) -> Self {
        // What is forwarded must also fit into a dead letter.
        settings.body_bytes_max = settings.body_bytes_max.min(hub.store().limits().body_bytes_max);
        let (arrivals, queue) = Arrivals::new();
        let draining = CancellationToken::new();
        let jittering = hub.clone();
        let parts = CallbackParts {
            forwarder: forwarder.clone(),
            metrics: metrics.clone(),
            health: health.clone(),
            draining: draining.clone(),
            jitter: Box::new(move |bound| jittering.jitter(bound)),
        };
        let shared = Arc::new(Shared {
            callback: Callback::new(&settings, parts),
            arrivals,
            due: Arc::new(Due::new()),
            letters: Letters::new(letters, settings.dead_letter_to),
            hub: hub.clone(),
            forwarder,
            lanes: Lanes::default(),
            table: Table::default(),
            budget: Budget::new(settings.in_flight_max, settings.in_flight_bytes_max),
            claim_slots: Semaphore::new(settings.concurrency * 2),
            claim_slots_made: AtomicUsize::new(settings.concurrency * 2),
            intake_stop: CancellationToken::new(),
            draining,
            cut: CancellationToken::new(),
            releasable: source.traits().releasable,
            tasks: TaskTracker::new(),
            trouble: CallbackTrouble::default(),
            metrics,
            health,
            settings,
        });
        let status = source.status();
        let watcher = tokio::spawn(watch_status(status.clone(), shared.clone()));
        let driver = tokio::spawn(shared.callback.clone().run());
        let (end, ended) = watch::channel(None);
        let (due, draining) = (shared.due.clone(), shared.draining.clone());
        let writer = Writer { hub: hub.clone(), due, draining };
        spawn(&shared, writer.run(queue));
        spawn(&shared, worker::run(shared.clone()));
        let intake = tokio::spawn(run_intake(shared.clone(), source, end));
        Self {
            shared,
            stage: tokio::sync::Mutex::new(Stage::Taking(intake)),
            status,
            watcher,
            driver,
            ended,
        }
    }

    /// The subscription's name.
    pub fn name(&self) -> &str {
        &self.shared.settings.name
    }

    /// Waits until the source ended with a permanent error, and answers what it said.
    /// Never resolves otherwise.
    ///
    /// # Cancel safety
    /// Cancel-safe.
    pub async fn failed(&self) -> String {
        let mut ended = self.ended.clone();
        match ended.wait_for(Option::is_some).await {
            Ok(reason) => reason.clone().unwrap_or_default(),
            Err(_) => std::future::pending().await,
        }
    }

    /// Deliveries under way.
    pub fn in_flight(&self) -> usize {
        self.shared.table.len()
    }

    /// It was drained, and its source is closed.
    pub fn is_closed(&self) -> bool {
        self.stage.try_lock().is_ok_and(|stage| matches!(*stage, Stage::Closed))
    }

    /// The deliveries of one message that are under way here.
    pub fn flights(&self, message_id: &MessageId) -> Vec<Flight> {
        let consumer_id = self.shared.settings.consumer_id.clone();
        self.shared.table.of(&InboxKey { consumer_id, message_id: message_id.clone() })
    }

    /// The `max` deliveries under way that were received first.
    pub fn oldest_flights(&self, max: usize) -> Vec<Flight> {
        self.shared.table.oldest(max)
    }

    /// Half of the deduplication key.
    pub fn consumer_id(&self) -> &ConsumerId {
        &self.shared.settings.consumer_id
    }

    /// Where its source stands.
    pub fn source_status(&self) -> SourceStatus {
        self.status.borrow().clone()
    }

    /// Nothing more is taken from the source or of what is parked and no attempt begins, until
    /// [`Subscription::resume`]; what is at the application finishes. Forgotten by a restart.
    pub fn pause(&self) {
        self.shared.callback.pause();
    }

    /// Ends what [`Subscription::pause`] began.
    pub fn resume(&self) {
        self.shared.callback.resume();
    }

    /// Concurrency and rate from now on. Forgotten by a restart.
    pub fn set_limits(&self, limits: Limits) {
        self.shared.callback.set_limits(limits);
        // More of them than needed only claims earlier.
        let wanted = limits.concurrency.saturating_mul(2).min(Semaphore::MAX_PERMITS);
        let made = self.shared.claim_slots_made.fetch_max(wanted, Ordering::Relaxed);
        self.shared.claim_slots.add_permits(wanted.saturating_sub(made));
    }

    /// How its callback stands.
    pub fn callback_report(&self) -> CallbackReport {
        self.shared.callback.report()
    }

    /// Takes nothing more from now on; [`Subscription::drain`] does so too.
    pub fn stop(&self) {
        self.shared.intake_stop.cancel();
    }

    /// Starts nothing new, lets forwards finish and commit until shortly before
    /// `deadline`, cuts the rest, then closes the source. A second call finds it done.
    pub async fn drain(&self, deadline: Instant) -> DrainReport {
        self.stop_taking(deadline).await;
        let cut = self.finish(deadline).await;
        DrainReport { cut, closed: self.close(deadline).await }
    }

    /// Starts nothing new, lets forwards finish and commit for as long as they take, then closes
    /// the source. [`Subscription::drain`] may come in between, with its deadline.
    ///
    /// # Cancel safety
    /// Not cancel-safe while the source is being closed: what was settled last may be
    /// delivered again.
    pub async fn drain_patiently(&self) -> DrainReport {
        self.stop_taking(Instant::now() + PATIENT_CLOSE).await;
        self.shared.tasks.close();
        self.shared.tasks.wait().await;
        DrainReport { cut: 0, closed: self.close(Instant::now() + PATIENT_CLOSE).await }
    }

    /// `None`: somebody else is at the next step, for longer than there is time.
    async fn stage(&self, deadline: Instant) -> Option<MutexGuard<'_, Stage>> {
        tokio::time::timeout_at(deadline, self.stage.lock()).await.ok()
    }

    /// Ends the intake, tells the source, and gives back what was not started.
    async fn stop_taking(&self, deadline: Instant) {
        self.stop();
        let Some(mut stage) = self.stage(deadline).await else { return };
        let Stage::Taking(intake) = &mut *stage else { return };
        let end = intake.await.ok().flatten();
        let (mut source, not_started) =
            end.map_or((None, None), |end| (end.source, Some(end.not_started)));
        if let Some(source) = &mut source {
            // A broker that hangs must not eat the grace period of what is at the application.
            let _ = tokio::time::timeout(STOP_TAKING_MAX, source.stop_taking()).await;
        }
        // Only now: an ordered source that gets a delivery back while it still takes starts over.
        self.shared.draining.cancel();
        drop(not_started);
        *stage = Stage::Stopped(source);
    }

    /// Closes the source, whose settlements are carried out first.
    async fn close(&self, deadline: Instant) -> Result<(), SourceError> {
        let Some(mut stage) = self.stage(deadline).await else { return Ok(()) };
        let closed = match std::mem::replace(&mut *stage, Stage::Closed) {
            Stage::Stopped(Some(source)) => {
                let left = deadline.saturating_duration_since(Instant::now());
                source.close(left.max(CLOSE_MIN)).await
            }
            Stage::Stopped(None) | Stage::Taking(_) | Stage::Closed => Ok(()),
        };
        self.watcher.abort();
        self.driver.abort();
        self.shared.health.retire();
        closed
    }

    /// Waits for the tasks, then cuts what is left; answers how many that were.
    async fn finish(&self, deadline: Instant) -> usize {
        let tasks = &self.shared.tasks;
        tasks.close();
        let left = deadline.saturating_duration_since(Instant::now());
        let patience = left.saturating_sub(CLOSE_MARGIN.min(left / 4));
        if tokio::time::timeout(patience, tasks.wait()).await.is_ok() {
            return 0;
        }
        let cut = tasks.len();
        tracing::warn!(
            code = %ErrorCode::DrainCut,
            subscription = %self.name(),
            cut,
            "the grace period ends: what still runs is cut; its claims run out by themselves"
        );
        self.shared.cut.cancel();
        tasks.wait().await;
        cut
    }
}

/// Dropped without a drain, everything is cut: nothing is acked, claims run out by themselves.
impl Drop for Subscription {
    fn drop(&mut self) {
        self.shared.cut.cancel();
        self.watcher.abort();
        self.driver.abort();
        if let Stage::Taking(intake) = self.stage.get_mut() {
            intake.abort();
        }
    }
}

/// A task of the subscription's own, cut as deliveries are.
fn spawn(shared: &Shared, task: impl Future<Output = ()> + Send + 'static) {
    let cut = shared.cut.clone();
    shared.tasks.spawn(async move {
        tokio::select! {
            biased;
            () = cut.cancelled() => {}
            () = task => {}
        }
    });
}

/// A panic of the intake ends the subscription as a permanent error of its source does.
async fn run_intake(
    shared: Arc<Shared>,
    source: Box<dyn Source>,
    ended: watch::Sender<Option<String>>,
) -> Option<IntakeEnd> {
    let intake = Intake::new(shared.clone(), source).run(ended.clone());
    let end = AssertUnwindSafe(intake).catch_unwind().await.ok();
    if end.is_none() {
        let reason = "the intake panicked: a bug of inboxd; restart it and report the log";
        let code = ErrorCode::Bug;
        tracing::error!(%code, subscription = %shared.settings.name, "{reason}");
        shared.fail(code, reason, &ended);
    }
    end
}

async fn watch_status(mut status: watch::Receiver<SourceStatus>, shared: Arc<Shared>) {
    let mut trouble = SourceTrouble::default();
    loop {
        let now = status.borrow_and_update().clone();
        shared.health.source_status(&now);
        shared.metrics.source_status(&now);
        trouble.note(&shared.settings.name, &now);
        if status.changed().await.is_err() {
            return;
        }
    }
}
