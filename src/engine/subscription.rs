//! One subscription: its source, its application, and the deliveries between them.
//!
//! Invariants: every delivery's task is tracked and awaited, or cut when the grace period
//! ends; a forward that is cut keeps its claim until it runs out; the source is closed last, so
//! that heartbeats, polling and acks go on while forwards finish.

use std::panic::AssertUnwindSafe;
use std::sync::atomic::AtomicI64;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::FutureExt as _;
use inboxd_contract::{Forwarder, Source, SourceError, SourceStatus};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::budget::Budget;
use super::hub::Hub;
use super::intake::{Intake, IntakeEnd};
use super::lanes::Lanes;
use super::settings::SubscriptionSettings;
use crate::admin::SubscriptionHealth;
use crate::telemetry::SubscriptionMetrics;

/// Kept back from the grace period for cutting, last acks and closing.
const CLOSE_MARGIN: Duration = Duration::from_secs(3);

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
    pub(super) budget: Budget,
    /// Claims taken and not yet POSTed once: the next batch is claimed while one is under way.
    pub(super) claim_slots: Semaphore,
    /// POSTs under way.
    pub(super) post_slots: Semaphore,
    /// Nothing more is taken from the source.
    pub(super) intake_stop: CancellationToken,
    /// Nothing new starts.
    pub(super) draining: CancellationToken,
    /// What still runs is cut.
    pub(super) cut: CancellationToken,
    pub(super) releasable: bool,
    /// Deliveries held beyond `hold_max`.
    pub(super) held: AtomicI64,
    /// The application answered 410: nothing more is taken until it answers otherwise.
    pub(super) gone: watch::Sender<bool>,
    pub(super) tasks: TaskTracker,
}

impl Shared {
    /// The subscription cannot go on: nothing new starts, and whoever waits is told.
    pub(super) fn fail(&self, reason: &str, ended: &watch::Sender<Option<String>>) {
        self.health.failed(reason);
        self.draining.cancel();
        ended.send_replace(Some(reason.to_owned()));
    }

    /// Pauses the subscription on 410, and lets it go on when the endpoint is back.
    pub(super) fn endpoint_gone(&self, gone: bool) {
        let changed = self.gone.send_if_modified(|was| std::mem::replace(was, gone) != gone);
        if !changed {
            return;
        }
        self.metrics.paused(gone);
        if gone {
            let reason = "the callback answered 410 Gone: nothing more is taken until it answers \
                          otherwise; put the endpoint back or change `callback`";
            tracing::error!(subscription = %self.settings.name, reason, "paused");
            self.health.set_paused(Some(reason.to_owned()));
        } else {
            tracing::info!(subscription = %self.settings.name, "the callback is back; going on");
            self.health.set_paused(None);
        }
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

/// A running subscription.
pub struct Subscription {
    shared: Arc<Shared>,
    intake: Mutex<Option<JoinHandle<Option<IntakeEnd>>>>,
    watcher: JoinHandle<()>,
    ended: watch::Receiver<Option<String>>,
}

impl Subscription {
    /// Starts to consume as soon as the callback's host accepts a connection.
    pub fn start(
        hub: &Arc<Hub>,
        mut settings: SubscriptionSettings,
        source: Box<dyn Source>,
        forwarder: Arc<dyn Forwarder>,
        metrics: SubscriptionMetrics,
        health: SubscriptionHealth,
    ) -> Self {
        // What is forwarded must also fit into a dead letter.
        settings.body_bytes_max = settings.body_bytes_max.min(hub.store().limits().body_bytes_max);
        let shared = Arc::new(Shared {
            hub: hub.clone(),
            forwarder,
            lanes: Lanes::default(),
            budget: Budget::new(settings.in_flight_max, settings.in_flight_bytes_max),
            claim_slots: Semaphore::new(settings.concurrency * 2),
            post_slots: Semaphore::new(settings.concurrency),
            intake_stop: CancellationToken::new(),
            draining: CancellationToken::new(),
            cut: CancellationToken::new(),
            releasable: source.traits().releasable,
            held: AtomicI64::new(0),
            gone: watch::Sender::new(false),
            tasks: TaskTracker::new(),
            metrics: metrics.clone(),
            health: health.clone(),
            settings,
        });
        let watcher = tokio::spawn(watch_status(source.status(), metrics, health));
        let (end, ended) = watch::channel(None);
        let intake = tokio::spawn(run_intake(shared.clone(), source, end));
        Self { shared, intake: Mutex::new(Some(intake)), watcher, ended }
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
        self.shared.tasks.len()
    }

    /// Takes nothing more from now on; [`Subscription::drain`] does so too.
    pub fn stop(&self) {
        self.shared.intake_stop.cancel();
    }

    /// Starts nothing new, lets forwards finish and commit until shortly before
    /// `deadline`, cuts the rest, then closes the source. A second call does nothing.
    pub async fn drain(&self, deadline: Instant) -> DrainReport {
        self.stop();
        let intake = self.intake.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(intake) = intake else { return DrainReport { cut: 0, closed: Ok(()) } };
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
        let cut = self.finish(deadline).await;
        let closed = match source {
            Some(source) => {
                let left = deadline.saturating_duration_since(Instant::now());
                source.close(left.max(Duration::from_millis(200))).await
            }
            None => Ok(()),
        };
        self.watcher.abort();
        self.shared.health.retire();
        DrainReport { cut, closed }
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
        let intake = self.intake.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(intake) = intake {
            intake.abort();
        }
    }
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
        tracing::error!(subscription = %shared.settings.name, "{reason}");
        shared.fail(reason, &ended);
    }
    end
}

async fn watch_status(
    mut status: watch::Receiver<SourceStatus>,
    metrics: SubscriptionMetrics,
    health: SubscriptionHealth,
) {
    loop {
        let now = status.borrow_and_update().clone();
        health.source_status(&now);
        metrics.source_status(&now);
        if status.changed().await.is_err() {
            return;
        }
    }
}
