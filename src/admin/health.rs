//! Liveness and readiness as facts that their owners keep up to date.
//!
//! Purpose: `/livez` and `/readyz` read what the loops and the dependencies last said;
//! nothing is asked of a broker or a database while a probe waits.
//!
//! Invariants: readiness goes back to false as easily as it became true; a dependency that
//! was named and has said nothing is not ready. Liveness is about inner loops alone:
//! a broken dependency never makes the process look dead. A loop that ended on purpose is
//! retired; one that ended otherwise stays, and goes stale.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use inboxd_contract::{ErrorCode, SourcePhase, SourceStatus};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use utoipa::ToSchema;

/// What the process knows of its own health. Cheap to clone: all clones are one registry.
#[derive(Clone)]
pub struct HealthRegistry(Arc<Inner>);

struct Inner {
    /// A loop that has not turned for this long is taken for stuck.
    stale_after: Duration,
    /// What heartbeats are measured from.
    started_at: Instant,
    /// Why nothing more is taken, once that is so.
    draining: Mutex<Option<String>>,
    /// By name; the names are the dependencies that `/readyz` lists.
    dependencies: Mutex<BTreeMap<String, DependencyState>>,
    /// By name; the value is the last turn in milliseconds since `started_at`.
    heartbeats: Mutex<BTreeMap<String, Arc<AtomicU64>>>,
}

/// Where one dependency stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DependencyState {
    /// It can be used now.
    pub ready: bool,
    /// Why not, or what to know; empty when there is nothing to say.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// What is the matter, by its stable code: `docs/errors.md`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<Cow<'static, str>>,
}

/// The answer of `/readyz`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Readiness {
    /// All dependencies are ready and the process is not draining.
    pub ready: bool,
    /// Nothing more is taken: the process was told to stop, or to drain.
    pub draining: bool,
    /// Why it drains; empty while it does not.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// Each dependency by name.
    pub dependencies: BTreeMap<String, DependencyState>,
}

/// The answer of `/livez`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Liveness {
    /// Every inner loop has turned lately.
    pub live: bool,
    /// Loops that have not, with the seconds since their last turn.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub stale_seconds: BTreeMap<String, u64>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while it holds one of these locks; the maps are whole in any case.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl HealthRegistry {
    /// An empty registry: ready, live. `stale_after` bounds the time between two turns of a loop.
    pub fn new(stale_after: Duration) -> Self {
        Self(Arc::new(Inner {
            stale_after,
            started_at: Instant::now(),
            draining: Mutex::default(),
            dependencies: Mutex::default(),
            heartbeats: Mutex::default(),
        }))
    }

    /// Names a dependency; until it is set it is not ready.
    pub fn dependency(&self, name: impl Into<String>) -> Dependency {
        let name = name.into();
        locked(&self.0.dependencies).entry(name.clone()).or_insert(DependencyState {
            ready: false,
            code: None,
            reason: "not tried yet".into(),
        });
        Dependency { registry: self.clone(), name: name.into() }
    }

    /// Names a loop; this counts as its first turn.
    pub fn heartbeat(&self, name: impl Into<String>) -> Heartbeat {
        let name = name.into();
        let last = Arc::clone(locked(&self.0.heartbeats).entry(name.clone()).or_default());
        let heartbeat = Heartbeat { registry: self.clone(), name: name.into(), last };
        heartbeat.turn();
        heartbeat
    }

    /// Names the dependencies of a subscription before it is started, so that nothing looks
    /// ready too early. Its loops do not turn yet and are not watched.
    pub fn announce_subscription(&self, name: &str) {
        drop(self.dependency(format!("source:{name}")));
        drop(self.dependency(format!("callback:{name}")));
    }

    /// The handle of one subscription, whose loops are watched from now on.
    pub fn subscription(&self, name: &str) -> SubscriptionHealth {
        let subscription = self.dependency(format!("subscription:{name}"));
        subscription.set(true, "");
        SubscriptionHealth {
            source: self.dependency(format!("source:{name}")),
            callback: self.dependency(format!("callback:{name}")),
            subscription,
            intake: self.heartbeat(format!("intake:{name}")),
            source_loop: self.heartbeat(format!("source:{name}")),
        }
    }

    /// Nothing more is taken, and why: not ready from now on.
    pub fn set_draining(&self, reason: &str) {
        *locked(&self.0.draining) = Some(reason.to_owned());
    }

    /// What `/readyz` says now.
    pub fn readiness(&self) -> Readiness {
        let reason = locked(&self.0.draining).clone();
        let draining = reason.is_some();
        let dependencies = locked(&self.0.dependencies).clone();
        let ready = !draining && dependencies.values().all(|dependency| dependency.ready);
        Readiness { ready, draining, reason: reason.unwrap_or_default(), dependencies }
    }

    /// What `/livez` says now.
    pub fn liveness(&self) -> Liveness {
        let now = self.0.started_at.elapsed();
        let stale_seconds: BTreeMap<_, _> = locked(&self.0.heartbeats)
            .iter()
            .filter_map(|(name, last)| {
                let age = now.saturating_sub(Duration::from_millis(last.load(Ordering::Relaxed)));
                (age > self.0.stale_after).then(|| (name.clone(), age.as_secs()))
            })
            .collect();
        Liveness { live: stale_seconds.is_empty(), stale_seconds }
    }
}

/// One dependency's handle.
#[derive(Clone)]
pub struct Dependency {
    registry: HealthRegistry,
    name: Arc<str>,
}

impl Dependency {
    /// Where it stands now. `reason` is read by operators: what, where, what to do.
    pub fn set(&self, ready: bool, reason: &str) {
        self.tell(ready, None, reason);
    }

    /// It cannot be used now, and this is the matter.
    pub fn fail(&self, code: ErrorCode, reason: &str) {
        self.tell(false, Some(code), reason);
    }

    fn tell(&self, ready: bool, code: Option<ErrorCode>, reason: &str) {
        let code = code.map(|code| Cow::Borrowed(code.as_str()));
        let mut dependencies = locked(&self.registry.0.dependencies);
        match dependencies.get_mut(&*self.name) {
            Some(state) if state.ready == ready && state.code == code && state.reason == reason => {
            }
            _ => {
                let state = DependencyState { ready, code, reason: reason.to_owned() };
                dependencies.insert(self.name.to_string(), state);
            }
        }
    }
}

/// One loop's handle.
#[derive(Clone)]
pub struct Heartbeat {
    registry: HealthRegistry,
    name: Arc<str>,
    last: Arc<AtomicU64>,
}

impl Heartbeat {
    /// The loop has turned now.
    pub fn turn(&self) {
        self.turned_at(Instant::now());
    }

    /// The loop has turned at this time.
    pub fn turned_at(&self, at: Instant) {
        let since = at.saturating_duration_since(self.registry.0.started_at);
        let millis = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
        self.last.fetch_max(millis, Ordering::Relaxed);
    }

    /// The loop ended on purpose and is no longer watched.
    pub fn retire(&self) {
        locked(&self.registry.0.heartbeats).remove(&*self.name);
    }
}

/// What the engine says about one subscription. Cheap to clone.
#[derive(Clone)]
pub struct SubscriptionHealth {
    source: Dependency,
    callback: Dependency,
    subscription: Dependency,
    intake: Heartbeat,
    source_loop: Heartbeat,
}

impl SubscriptionHealth {
    /// The subscription's inner loop has turned: at least a few times per `stale_after`, work
    /// or no work.
    pub fn turn(&self) {
        self.intake.turn();
    }

    /// Whether the source can be consumed from.
    pub fn set_source(&self, ready: bool, reason: &str) {
        self.source.set(ready, reason);
    }

    /// Readiness and liveness of the source, as it tells them.
    pub fn source_status(&self, status: &SourceStatus) {
        let ready = matches!(status.phase, SourcePhase::Ready | SourcePhase::Standby);
        self.source.tell(ready, status.code, &status.reason);
        self.source_loop.turned_at(status.turned_at);
    }

    /// Whether the application can be reached.
    pub fn set_callback(&self, ready: bool, reason: &str) {
        let code = (!ready).then_some(ErrorCode::CallbackUnreachable);
        self.callback.tell(ready, code, reason);
    }

    /// Paused, and why, until an operator acts; `None` when it goes on.
    pub fn set_paused(&self, reason: Option<(ErrorCode, String)>) {
        match reason {
            Some((code, reason)) => self.subscription.fail(code, &format!("paused: {reason}")),
            None => self.subscription.set(true, ""),
        }
    }

    /// Why dead letters cannot be published now; `None` when they are again.
    pub fn set_dead_letters(&self, trouble: Option<(ErrorCode, &str)>) {
        let Dependency { registry, name } = &self.subscription;
        let name = name.strip_prefix("subscription:").unwrap_or(name);
        let letters = registry.dependency(format!("dead-letters:{name}"));
        match trouble {
            Some((code, reason)) => letters.fail(code, reason),
            None => letters.set(true, ""),
        }
    }

    /// The subscription ended with an error: not ready for good, its loops no longer watched.
    pub fn failed(&self, code: ErrorCode, reason: &str) {
        self.subscription.fail(code, reason);
        self.retire();
    }

    /// The subscription's loops ended on purpose.
    pub fn retire(&self) {
        self.intake.retire();
        self.source_loop.retire();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STALE_AFTER: Duration = Duration::from_secs(10);

    #[test]
    fn a_dependency_is_not_ready_before_it_was_tried() {
        let registry = HealthRegistry::new(STALE_AFTER);
        assert!(registry.readiness().ready);
        let database = registry.dependency("database");
        assert!(!registry.readiness().ready);
        database.set(true, "");
        assert!(registry.readiness().ready);
    }

    #[test]
    fn readiness_goes_back_to_false_with_the_reason() {
        let registry = HealthRegistry::new(STALE_AFTER);
        let health = registry.subscription("orders");
        health.set_source(true, "");
        health.set_callback(true, "");
        assert!(registry.readiness().ready);
        health.set_source(false, "the queue orders does not exist");
        let readiness = registry.readiness();
        assert!(!readiness.ready);
        assert_eq!(
            readiness.dependencies["source:orders"].reason,
            "the queue orders does not exist"
        );
    }

    #[test]
    fn draining_is_not_ready_whatever_the_dependencies_say() {
        let registry = HealthRegistry::new(STALE_AFTER);
        registry.dependency("database").set(true, "");
        registry.set_draining("told to stop");
        let readiness = registry.readiness();
        assert!(!readiness.ready && readiness.draining);
    }

    #[test]
    fn a_paused_subscription_is_not_ready_until_it_goes_on() {
        let registry = HealthRegistry::new(STALE_AFTER);
        let health = registry.subscription("orders");
        health.set_source(true, "");
        health.set_callback(true, "");
        health.set_paused(Some((ErrorCode::IdsMissing, "no message carries an id".into())));
        assert!(!registry.readiness().ready);
        health.set_paused(None);
        assert!(registry.readiness().ready);
    }

    #[tokio::test(start_paused = true)]
    async fn a_subscription_that_waits_for_the_database_is_live_and_not_ready() {
        let registry = HealthRegistry::new(STALE_AFTER);
        registry.announce_subscription("orders");
        tokio::time::advance(STALE_AFTER * 2).await;
        assert!(registry.liveness().live && !registry.readiness().ready);
        let _started = registry.subscription("orders");
        assert!(registry.liveness().live);
        tokio::time::advance(STALE_AFTER * 2).await;
        assert!(!registry.liveness().live);
    }

    #[tokio::test(start_paused = true)]
    async fn a_standby_is_ready() {
        let registry = HealthRegistry::new(STALE_AFTER);
        let health = registry.subscription("orders");
        health.set_callback(true, "");
        let mut status = SourceStatus::connecting();
        status.phase = SourcePhase::Standby;
        health.source_status(&status);
        assert!(registry.readiness().ready);
        status.phase = SourcePhase::Failing;
        health.source_status(&status);
        assert!(!registry.readiness().ready);
    }

    #[tokio::test(start_paused = true)]
    async fn a_loop_that_does_not_turn_is_not_live_and_a_retired_one_is_not_asked() {
        let registry = HealthRegistry::new(STALE_AFTER);
        let turning = registry.heartbeat("turning");
        let stuck = registry.heartbeat("stuck");
        tokio::time::advance(Duration::from_secs(8)).await;
        turning.turn();
        assert!(registry.liveness().live);
        tokio::time::advance(Duration::from_secs(4)).await;
        let liveness = registry.liveness();
        assert!(!liveness.live);
        assert_eq!(liveness.stale_seconds, BTreeMap::from([("stuck".to_owned(), 12)]));
        stuck.retire();
        assert!(registry.liveness().live);
    }

    #[test]
    fn readiness_is_json_with_a_reason_per_dependency() {
        let registry = HealthRegistry::new(STALE_AFTER);
        registry.dependency("database").set(true, "");
        registry.dependency("source:orders").set(false, "not connected yet");
        registry.dependency("source:bills").fail(ErrorCode::QueueMissing, "no such queue");
        assert_eq!(
            serde_json::to_value(registry.readiness()).unwrap(),
            serde_json::json!({
                "ready": false,
                "draining": false,
                "dependencies": {
                    "database": {"ready": true},
                    "source:orders": {"ready": false, "reason": "not connected yet"},
                    "source:bills": {
                        "ready": false,
                        "code": "queue_missing",
                        "reason": "no such queue",
                    },
                },
            })
        );
    }
}
