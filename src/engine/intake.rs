//! Takes deliveries from the source: identity, a permit, then a place in a lane.
//!
//! Invariants: one intake per subscription, so that places in lanes are taken in broker order;
//! at most one delivery at a time waits here for bytes of the budget; nothing is taken before
//! the callback was reached once, or while it rests; what was taken and not started is given
//! back only after the source was told to stop (an ordered source would start over otherwise).

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use inboxd_contract::{
    Arrival, DeadReason, Delivery, ErrorCode, InboxKey, LaneId, MessageId, Origin, Outcome,
    ParkReason, Room, Source, SourceError, SourcePhase,
};
use tokio::sync::watch;

use super::budget::Permit;
use super::callback::{self, Flow};
use super::horizon;
use super::identity::{self, Identity};
use super::journey::{self, Course, Item};
use super::lanes::LaneKey;
use super::letter;
use super::message::Message;
use super::newcomer::{self, Newcomer};
use super::routes::{self, Routed};
use super::settings::{OnBlockedLane, OnDeadLetter, OnMissingId};
use super::subscription::Shared;
use super::target;

/// The intake shows that it is alive at least this often, whatever it waits for.
const TURN_EVERY: Duration = Duration::from_secs(1);
/// Larger bodies are looked at off the runtime.
pub(super) const INLINE_BYTES_MAX: usize = 256 * 1024;

/// How the intake ended.
pub(super) struct IntakeEnd {
    /// Given back to be stopped and closed; `None` after a permanent error.
    pub(super) source: Option<Box<dyn Source>>,
    /// To be dropped when the source has stopped taking.
    pub(super) not_started: NotStarted,
}

/// Deliveries that go back.
pub(super) struct NotStarted {
    _taken: VecDeque<Delivery>,
    _newcomer: Newcomer,
}

/// The intake of one subscription.
pub(super) struct Intake {
    shared: Arc<Shared>,
    source: Box<dyn Source>,
    newcomer: Newcomer,
    /// Of the last batch, in order; bounded by the room that was asked for.
    taken: VecDeque<Delivery>,
}

/// What the intake has waited for.
enum Next {
    Batch(Vec<Delivery>),
    /// The callback rests, or dead letters wait for their target: wait until that is over.
    Away,
    /// The source became ready for the first time.
    FirstReady,
    /// Deliveries without an id are held and no more come.
    Quiet,
}

impl Intake {
    pub(super) fn new(shared: Arc<Shared>, source: Box<dyn Source>) -> Self {
        let newcomer = Newcomer::new(&shared, source.traits().unsettled_max);
        Self { shared, source, newcomer, taken: VecDeque::new() }
    }

    /// Runs until the intake is stopped or the source ends with a permanent error, which
    /// is told to `ended`.
    pub(super) async fn run(mut self, ended: watch::Sender<Option<String>>) -> IntakeEnd {
        let shared = self.shared.clone();
        let stopped = turning(&shared, async {
            tokio::select! {
                biased;
                () = shared.intake_stop.cancelled() => Ok(()),
                result = self.take() => result,
            }
        });
        let source = match stopped.await {
            Ok(()) => Some(self.source),
            Err(error) => {
                let cause = std::error::Error::source(&error).map(ToString::to_string);
                let code = error.code.unwrap_or(ErrorCode::SourceEnded);
                tracing::error!(%code, subscription = %shared.settings.name, %error, cause, "the source has ended");
                shared.fail(code, &error.to_string(), &ended);
                None
            }
        };
        let not_started = NotStarted { _taken: self.taken, _newcomer: self.newcomer };
        IntakeEnd { source, not_started }
    }

    async fn take(&mut self) -> Result<(), SourceError> {
        let flow = self.shared.callback.flow();
        callback::may_take(&flow).await;
        self.newcomer.learn(&self.shared).await;
        let letters_wait = self.shared.letters.away();
        let mut status = self.source.status();
        let mut horizon_is_known = false;
        loop {
            target::wait_while_away(&self.shared).await;
            let taking = callback::may_take(&flow).await;
            if self.newcomer.must_pause(&self.shared.budget) {
                self.newcomer.pause(&self.shared, None).await;
                continue;
            }
            let mut room = self.shared.budget.room().await;
            if taking == Flow::One {
                room = Room { deliveries: 1, ..room };
            }
            let patience = match self.newcomer.is_holding() {
                true => newcomer::QUIET,
                false => Duration::MAX,
            };
            let next = tokio::time::timeout(patience, self.source.next_batch(room));
            let next = tokio::select! {
                biased;
                _ = status.wait_for(|status| status.phase == SourcePhase::Ready),
                    if !horizon_is_known => Next::FirstReady,
                _ = flow.wait_for(|flow| flow != taking) => Next::Away,
                _ = letters_wait.wait_for(|waiting| waiting) => Next::Away,
                batch = next => match batch {
                    Ok(batch) => Next::Batch(batch?),
                    Err(_) => Next::Quiet,
                },
            };
            match next {
                Next::Batch(batch) => {
                    // What is stored on arrival is taken by a worker, which says so.
                    if !batch.is_empty() && !self.shared.stores() {
                        self.shared.callback.one_was_taken();
                    }
                    self.taken.extend(batch);
                }
                Next::Away => {}
                Next::FirstReady => {
                    horizon_is_known = true;
                    self.ask_for_the_horizon();
                }
                Next::Quiet => self.newcomer.pause(&self.shared, None).await,
            }
            self.start_taken().await;
        }
    }

    /// The answer is logged when it comes; nothing waits for it.
    fn ask_for_the_horizon(&self) {
        let (shared, answer) = (self.shared.clone(), self.source.redelivery_horizon());
        self.shared.tasks.spawn(async move {
            tokio::select! {
                biased;
                horizons = answer => horizon::tell(shared.hub.retention(), &horizons),
                () = shared.draining.cancelled() => {}
            }
        });
    }

    async fn start_taken(&mut self) {
        while let Some(delivery) = self.taken.front() {
            let sight = look_at(&self.shared, delivery).await;
            let bytes = delivery.envelope.bytes();
            if sight.identity.message_id.is_some() {
                for (delivery, permit) in self.newcomer.an_id_was_seen(&self.shared).await {
                    let sight = look_at(&self.shared, &delivery).await;
                    self.without_id(delivery, sight, permit);
                }
            } else if self.newcomer.is_holding() && !self.shared.budget.has(bytes) {
                // Only what is held could make room.
                self.newcomer.pause(&self.shared, Some(&delivery.fence)).await;
            }
            let permit = tokio::select! {
                biased;
                permit = self.shared.budget.take(bytes) => Some(permit),
                () = delivery.fence.closed() => None,
            };
            let Some(delivery) = self.taken.pop_front() else { return };
            match permit {
                Some(permit) => self.accept(delivery, sight, permit),
                None => self.shared.metrics.outcome(Outcome::Released),
            }
        }
    }

    fn accept(&mut self, delivery: Delivery, sight: Sight, permit: Permit) {
        let Some(message_id) = sight.identity.message_id.clone() else {
            if let Some((delivery, permit)) = self.newcomer.hold(delivery, permit) {
                self.without_id(delivery, sight, permit);
            }
            return;
        };
        let course = self.course(&delivery, &sight, Course::Forward);
        self.start(delivery, message_id, sight, permit, course);
    }

    fn course(&self, delivery: &Delivery, sight: &Sight, forward: Course) -> Course {
        match &sight.routed {
            _ if self.is_too_large(delivery) => Course::DeadLetter(DeadReason::BodyTooLarge),
            Routed::Callback | Routed::Path(_) => forward,
            Routed::Ignored => Course::Ignore,
            Routed::Nowhere => Course::DeadLetter(DeadReason::Unrouted),
        }
    }

    fn is_too_large(&self, delivery: &Delivery) -> bool {
        delivery.envelope.body.as_ref().map_or(0, |body| body.len() as u64)
            > self.shared.settings.body_bytes_max
    }

    /// The policy for a delivery without an id. Where its position is an identity, the id made
    /// for it is the same when it is delivered again.
    fn without_id(&self, delivery: Delivery, sight: Sight, permit: Permit) {
        let message_id = match &delivery.envelope.origin {
            Origin::Kafka { partition, offset, position_scope: Some(scope), .. } => {
                MessageId::generated(&format!("{scope}/{partition}/{offset}"))
            }
            _ => MessageId::generated(&self.shared.hub.uuid().to_string()),
        };
        let course = match self.shared.settings.identity.on_missing {
            _ if self.is_too_large(&delivery) => Course::DeadLetter(DeadReason::BodyTooLarge),
            OnMissingId::Forward => self.course(&delivery, &sight, Course::ForwardUnidentified),
            OnMissingId::DeadLetter => Course::DeadLetter(DeadReason::Unidentified),
        };
        self.start(delivery, message_id, sight, permit, course);
    }

    fn start(
        &self,
        delivery: Delivery,
        message_id: MessageId,
        sight: Sight,
        permit: Permit,
        course: Course,
    ) {
        let shared = self.shared.clone();
        let Sight { identity, lane, routed } = sight;
        let is_stored = shared.stores() && course.forwards();
        let path = match routed {
            Routed::Path(path) => Some(path),
            Routed::Callback | Routed::Ignored | Routed::Nowhere => None,
        };
        let settings = &shared.settings;
        let lane_id = lane
            .as_deref()
            .map(|key| LaneId::new(&settings.consumer_id, &settings.name, &delivery.stream, key));
        // What passes a blocked lane blocks none; where all are stored, places are all there is.
        let skips = settings.on_blocked_lane == OnBlockedLane::Skip && !shared.stores();
        // Those that are stored get their place in the lane from the arrivals; where a dead letter
        // blocks its lane they go one by one, since one written meanwhile has to stand before them.
        let halts = settings.on_dead_letter == OnDeadLetter::Halt && lane.is_some();
        let arrives_now = is_stored && !halts;
        let ticket = lane.clone().filter(|_| !arrives_now);
        let ticket =
            ticket.map(|key| shared.lanes.enter(LaneKey { stream: delivery.stream.clone(), key }));
        shared.metrics.in_flight(1, permit.bytes() as i64);
        let key = InboxKey { consumer_id: settings.consumer_id.clone(), message_id };
        let envelope = delivery.envelope.clone();
        let message = Message {
            trace: shared.metrics.delivery(&envelope, &key),
            progress: shared.table.enter(key.clone(), envelope.clone(), delivery.received_at),
            key,
            fingerprint: identity.fingerprint,
            envelope,
            lane,
            lane_id: lane_id.filter(|_| !skips),
            received_at: delivery.received_at,
            first_before: Duration::ZERO,
        };
        let arriving = arrives_now.then(|| {
            let copy = letter::copy(&shared, &message, ParkReason::Stored);
            let arrival = Arrival { key: message.key.clone(), copy };
            shared.arrivals.enter(arrival, delivery.fence.clone())
        });
        let item = Item { message, delivery, ticket, permit, course, path, arriving };
        let task = shared.clone();
        shared.tasks.spawn(async move {
            let bytes = item.permit.bytes() as i64;
            tokio::select! {
                biased;
                () = task.cut.cancelled() => {
                    task.metrics.outcome(Outcome::Released);
                    task.metrics.in_flight(-1, -bytes);
                }
                () = journey::process(task.clone(), item) => {}
            }
        });
    }
}

/// What is to be known of a delivery before it is started.
struct Sight {
    identity: Identity,
    lane: Option<Vec<u8>>,
    routed: Routed,
}

async fn look_at(shared: &Shared, delivery: &Delivery) -> Sight {
    let see =
        |settings: &super::SubscriptionSettings, envelope: &inboxd_contract::Envelope| Sight {
            identity: identity::identify(&settings.identity, envelope),
            lane: identity::lane_key(settings.ordering, &settings.key_from, envelope),
            routed: routes::route(settings, envelope),
        };
    if delivery.envelope.bytes() <= INLINE_BYTES_MAX {
        return see(&shared.settings, &delivery.envelope);
    }
    let (settings, envelope) = (shared.settings.clone(), delivery.envelope.clone());
    match tokio::task::spawn_blocking(move || see(&settings, &envelope)).await {
        Ok(sight) => sight,
        Err(error) => std::panic::resume_unwind(error.into_panic()),
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
