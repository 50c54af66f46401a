//! Takes deliveries from the source: a permit first, then identity, then a place in a lane.
//!
//! Invariants: one intake per subscription, so that places in lanes are taken in broker order;
//! at most one delivery at a time waits here for bytes of the budget; nothing is taken before
//! the callback's host has accepted a connection once.

use std::sync::Arc;
use std::time::Duration;

use inboxd_contract::{
    DeadReason, Delivery, InboxKey, MessageId, Outcome, Source, SourceError, SourcePhase,
};
use tokio::sync::watch;

use super::budget::Permit;
use super::horizon;
use super::identity::{self, Identity};
use super::journey::{self, Course, Item};
use super::lanes::LaneKey;
use super::newcomer::{self, Newcomer};
use super::settings::OnMissingId;
use super::subscription::Shared;

/// The intake shows that it is alive at least this often, whatever it waits for.
const TURN_EVERY: Duration = Duration::from_secs(1);
/// Larger bodies are hashed off the runtime.
const HASH_INLINE_BYTES_MAX: usize = 256 * 1024;
const PROBE_EVERY_MIN: Duration = Duration::from_millis(200);
const PROBE_EVERY_MAX: Duration = Duration::from_secs(2);

/// How the intake ended.
pub(super) struct IntakeEnd {
    /// Given back to be stopped and closed; `None` after a permanent error.
    pub(super) source: Option<Box<dyn Source>>,
}

/// What the intake has waited for.
enum Next {
    Batch(Vec<Delivery>),
    /// The endpoint is gone: wait until it is back.
    Gone,
    /// The source became ready for the first time.
    FirstReady,
    /// Deliveries without an id are held and no more come.
    Quiet,
}

/// The intake of one subscription.
pub(super) struct Intake {
    shared: Arc<Shared>,
    source: Box<dyn Source>,
    newcomer: Newcomer,
}

impl Intake {
    pub(super) fn new(shared: Arc<Shared>, source: Box<dyn Source>) -> Self {
        let newcomer = Newcomer::new(&shared.settings.identity, source.traits().unsettled_max);
        Self { shared, source, newcomer }
    }

    /// Runs until the subscription drains or the source ends with a permanent error, which
    /// is told to `ended`.
    pub(super) async fn run(mut self, ended: watch::Sender<Option<String>>) -> IntakeEnd {
        let shared = self.shared.clone();
        let stopped = turning(&shared, async {
            tokio::select! {
                biased;
                () = shared.draining.cancelled() => Ok(()),
                result = self.take() => result,
            }
        });
        match stopped.await {
            Ok(()) => {
                self.newcomer.forget();
                IntakeEnd { source: Some(self.source) }
            }
            Err(error) => {
                let cause = std::error::Error::source(&error).map(ToString::to_string);
                tracing::error!(subscription = %shared.settings.name, %error, cause, "the source has ended");
                shared.health.failed(&error.to_string());
                shared.draining.cancel();
                ended.send_replace(Some(error.to_string()));
                IntakeEnd { source: None }
            }
        }
    }

    async fn take(&mut self) -> Result<(), SourceError> {
        wait_for_callback(&self.shared).await;
        self.newcomer.learn(&self.shared).await;
        let mut gone = self.shared.gone.subscribe();
        let mut status = self.source.status();
        let mut horizon_is_known = false;
        loop {
            // The sender lives in `shared`.
            let _ = gone.wait_for(|gone| !gone).await;
            if self.newcomer.must_pause(&self.shared.budget) {
                self.newcomer.pause(&self.shared).await;
            }
            let room = self.shared.budget.room().await;
            let patience = match self.newcomer.is_holding() {
                true => newcomer::QUIET,
                false => Duration::MAX,
            };
            let next = tokio::time::timeout(patience, self.source.next_batch(room));
            let next = tokio::select! {
                batch = next => match batch {
                    Ok(batch) => Next::Batch(batch?),
                    Err(_) => Next::Quiet,
                },
                _ = gone.wait_for(|gone| *gone) => Next::Gone,
                _ = status.wait_for(|status| status.phase == SourcePhase::Ready),
                    if !horizon_is_known => Next::FirstReady,
            };
            let batch = match next {
                Next::Batch(batch) => batch,
                Next::Gone => continue,
                Next::FirstReady => {
                    horizon_is_known = true;
                    let horizons = self.source.redelivery_horizon().await;
                    horizon::tell(self.shared.hub.retention(), &horizons);
                    continue;
                }
                Next::Quiet => {
                    self.newcomer.pause(&self.shared).await;
                    continue;
                }
            };
            for delivery in batch {
                self.accept(delivery).await;
            }
        }
    }

    async fn accept(&mut self, delivery: Delivery) {
        let bytes = delivery.envelope.bytes();
        let permit = tokio::select! {
            biased;
            permit = self.shared.budget.take(bytes) => permit,
            () = delivery.fence.closed() => {
                self.shared.metrics.outcome(Outcome::Released);
                return;
            }
        };
        let identity = identify(&self.shared, &delivery).await;
        let Some(message_id) = identity.message_id.clone() else {
            match self.newcomer.hold(delivery, permit) {
                Some((delivery, permit)) => self.without_id(delivery, identity, permit),
                None => tracing::debug!("held: no message of this subscription carried an id yet"),
            }
            return;
        };
        for (delivery, permit) in self.newcomer.an_id_was_seen(&self.shared).await {
            let identity = identify(&self.shared, &delivery).await;
            self.without_id(delivery, identity, permit);
        }
        let course = if self.is_too_large(&delivery) {
            Course::DeadLetter(DeadReason::BodyTooLarge)
        } else {
            Course::Forward
        };
        self.start(delivery, message_id, identity, permit, course);
    }

    fn is_too_large(&self, delivery: &Delivery) -> bool {
        delivery.envelope.body.as_ref().map_or(0, |body| body.len() as u64)
            > self.shared.settings.body_bytes_max
    }

    /// The policy for a delivery without an id. Where the broker has positions, the id made for
    /// it is the same when it is delivered again.
    fn without_id(&self, delivery: Delivery, identity: Identity, permit: Permit) {
        let made = match delivery.envelope.origin.position() {
            Some(position) => format!("generated:{position}"),
            None => format!("generated:{}", self.shared.hub.uuid()),
        };
        let Some(message_id) = MessageId::from_bytes(made.as_bytes()) else {
            unreachable!("a generated id is not blank")
        };
        let course = match self.shared.settings.identity.on_missing {
            _ if self.is_too_large(&delivery) => Course::DeadLetter(DeadReason::BodyTooLarge),
            OnMissingId::Forward => Course::ForwardUnidentified,
            OnMissingId::DeadLetter => Course::DeadLetter(DeadReason::Unidentified),
        };
        self.start(delivery, message_id, identity, permit, course);
    }

    fn start(
        &self,
        delivery: Delivery,
        message_id: MessageId,
        identity: Identity,
        permit: Permit,
        course: Course,
    ) {
        let shared = self.shared.clone();
        let settings = &shared.settings;
        let lane = identity::lane_key(settings.ordering, &settings.key_from, &delivery.envelope);
        let ticket = lane
            .clone()
            .map(|key| shared.lanes.enter(LaneKey { stream: delivery.stream.clone(), key }));
        shared.metrics.in_flight(1, permit.bytes() as i64);
        let item = Item {
            key: InboxKey { consumer_id: settings.consumer_id.clone(), message_id },
            fingerprint: identity.fingerprint,
            lane,
            ticket,
            permit,
            course,
            delivery,
        };
        let task = shared.clone();
        shared.tasks.spawn(async move {
            let bytes = item.permit.bytes() as i64;
            tokio::select! {
                biased;
                () = task.cut.cancelled() => task.metrics.in_flight(-1, -bytes),
                () = journey::process(task.clone(), item) => {}
            }
        });
    }
}

async fn identify(shared: &Shared, delivery: &Delivery) -> Identity {
    let settings = &shared.settings.identity;
    if delivery.envelope.bytes() <= HASH_INLINE_BYTES_MAX {
        return identity::identify(settings, &delivery.envelope);
    }
    let (owned, envelope) = (settings.clone(), delivery.envelope.clone());
    let hashing = tokio::task::spawn_blocking(move || identity::identify(&owned, &envelope));
    hashing.await.unwrap_or_else(|_| identity::identify(settings, &delivery.envelope))
}

/// Waits until the callback's host accepts a connection. Sends no request.
async fn wait_for_callback(shared: &Shared) {
    let mut every = PROBE_EVERY_MIN;
    let mut told = false;
    loop {
        match shared.forwarder.probe().await {
            Ok(()) => {
                shared.health.set_callback(true, "");
                return;
            }
            Err(reason) => {
                shared.health.set_callback(false, &reason);
                if !std::mem::replace(&mut told, true) {
                    tracing::info!(
                        subscription = %shared.settings.name,
                        reason,
                        "waiting for the callback's host before anything is consumed"
                    );
                }
            }
        }
        tokio::time::sleep(every).await;
        every = (every * 2).min(PROBE_EVERY_MAX);
    }
}

/// Polls `future` and shows meanwhile that this task is alive.
async fn turning<T>(shared: &Shared, future: impl Future<Output = T>) -> T {
    let mut interval = tokio::time::interval(TURN_EVERY);
    tokio::pin!(future);
    loop {
        tokio::select! {
            biased;
            value = &mut future => return value,
            _ = interval.tick() => shared.health.turn(),
        }
    }
}
