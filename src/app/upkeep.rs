//! What the inbox needs beside messages: old rows deleted, and its readiness known.

use std::sync::Arc;
use std::time::Duration;

use inboxd_contract::{ErrorCode, InboxStore, SweepPolicy};
use rand::Rng as _;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::admin::Dependency;
use crate::causes::chain;
use crate::config::DatabaseConfig;
use crate::telemetry::Metrics;

const PING_EVERY: Duration = Duration::from_secs(2);
const PING_WITHIN: Duration = Duration::from_secs(5);
/// Row counts are for graphs.
const STATS_EVERY: Duration = Duration::from_secs(30);
/// A claim that expired so long ago carries attempts of a message that no broker holds back.
const IDLE_CLAIMS: Duration = Duration::from_secs(24 * 60 * 60);
const ROWS_PER_STATEMENT: u32 = 1_000;

/// The tasks; stopped together.
pub(super) struct Upkeep {
    stop: CancellationToken,
    tasks: Vec<JoinHandle<()>>,
}

impl Upkeep {
    pub(super) fn start(
        store: Arc<dyn InboxStore>,
        config: &DatabaseConfig,
        metrics: Metrics,
        database: Dependency,
    ) -> Self {
        let stop = CancellationToken::new();
        let policy = SweepPolicy {
            retention: config.retention,
            dead_retention: config.dead_retention,
            idle_claims: IDLE_CLAIMS,
            batch: ROWS_PER_STATEMENT,
        };
        let sweeps = sweep(store.clone(), policy, config.sweep_interval, metrics.clone());
        let tasks = vec![
            spawn(&stop, sweeps),
            spawn(&stop, count(store.clone(), metrics)),
            spawn(&stop, ping(store, database)),
        ];
        Self { tasks, stop }
    }

    /// Stops them where they are: a sweep that is cut has deleted whole batches.
    pub(super) async fn stop(self) {
        self.stop.cancel();
        for task in self.tasks {
            if let Err(error) = task.await {
                tracing::error!(code = %ErrorCode::Bug, %error, "upkeep ended by a panic");
            }
        }
    }
}

fn spawn(
    stop: &CancellationToken,
    work: impl Future<Output = ()> + Send + 'static,
) -> JoinHandle<()> {
    let stop = stop.clone();
    tokio::spawn(async move {
        tokio::select! {
            biased;
            () = stop.cancelled() => {}
            () = work => {}
        }
    })
}

async fn sweep(
    store: Arc<dyn InboxStore>,
    policy: SweepPolicy,
    interval: Duration,
    metrics: Metrics,
) {
    loop {
        // Replicas that start together do not sweep together.
        let wait = interval.mul_f64(rand::rng().random_range(0.9..1.1));
        tokio::time::sleep(wait).await;
        match store.sweep(&policy).await {
            Ok(report) => {
                metrics.sweep(&report);
                tracing::debug!(?report, "swept");
            }
            Err(error) => {
                metrics.sweep_failed();
                tracing::warn!(code = %ErrorCode::SweepFailed, cause = %chain(&error), "old rows were not deleted; trying again later");
            }
        }
    }
}

/// How much the inbox holds. What cannot be known now is not shown.
async fn count(store: Arc<dyn InboxStore>, metrics: Metrics) {
    loop {
        match tokio::time::timeout(PING_WITHIN, store.stats()).await {
            Ok(Ok(stats)) => metrics.inbox(Some(&stats)),
            Ok(Err(error)) => {
                tracing::debug!(cause = %chain(&error), "rows are not counted now");
                metrics.inbox(None);
            }
            Err(_) => metrics.inbox(None),
        }
        tokio::time::sleep(STATS_EVERY).await;
    }
}

async fn ping(store: Arc<dyn InboxStore>, database: Dependency) {
    loop {
        match tokio::time::timeout(PING_WITHIN, store.ping()).await {
            Ok(Ok(())) => database.set(true, ""),
            Ok(Err(error)) => database.fail(error.code(), &chain(&error)),
            Err(_) => database
                .fail(ErrorCode::DatabaseUnavailable, &format!("no answer within {PING_WITHIN:?}")),
        }
        tokio::time::sleep(PING_EVERY).await;
    }
}
