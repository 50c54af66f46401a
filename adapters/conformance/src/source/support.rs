//! What the cases share: taking with a deadline, ids, markers.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use inboxd_contract::{Delivery, Room, Source, SourcePhase, SourceStatus};
use tokio::sync::watch;
use tokio::task::JoinError;
use tokio::time::timeout;

use super::{SourceHarness, SourcePlace, TestMessage};

/// How long a case waits for what must happen.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);
/// The deadline given to `close` where the broker answers.
pub(super) const CLOSE: Duration = Duration::from_secs(20);
/// Room for anything.
pub(super) const WIDE: Room = Room { deliveries: 1_000, bytes: 64 << 20 };

/// A harness and one fresh place of it.
pub(super) struct Bench {
    /// In what the adapter differs.
    pub(super) abilities: super::Abilities,
    /// The place.
    pub(super) place: Box<dyn SourcePlace>,
    /// Its streams.
    pub(super) streams: usize,
}

impl Bench {
    /// A fresh place with up to `streams` streams.
    pub(super) async fn new(harness: &Arc<dyn SourceHarness>, streams: usize) -> Self {
        let abilities = harness.abilities();
        let streams = streams.min(abilities.streams_max).max(1);
        Self { abilities, place: harness.fresh(streams).await, streams }
    }

    /// Publishes plain messages with these ids to stream 0.
    pub(super) async fn publish(&self, ids: &[&str]) {
        self.publish_to(0, ids).await;
    }

    /// Publishes plain messages with these ids.
    pub(super) async fn publish_to(&self, stream: usize, ids: &[&str]) {
        let messages: Vec<_> = ids.iter().map(|id| TestMessage::new(*id)).collect();
        self.place.publish(stream, &messages).await;
    }

    /// Publishes `prefix0..prefixN` to stream 0 and answers the ids.
    pub(super) async fn publish_many(&self, prefix: &str, count: usize) -> Vec<String> {
        let ids: Vec<_> = (0..count).map(|n| format!("{prefix}{n}")).collect();
        let messages: Vec<_> = ids.iter().map(TestMessage::new).collect();
        self.place.publish(0, &messages).await;
        ids
    }

    /// Acks everything that still comes on stream 0, up to a message published now, and closes.
    /// What comes is not looked at: it may have been acked in vain just before a loss.
    pub(super) async fn settle_to_end(&self, mut source: Box<dyn Source>) {
        self.publish(&["end"]).await;
        loop {
            let delivery = take(&mut source, 1).await.remove(0);
            let end = id(&delivery) == "end";
            delivery.acker.ack();
            if end {
                return close(source).await;
            }
        }
    }

    /// Asserts that nothing is left: a marker published now is the next that comes to a
    /// new source, which is then closed.
    pub(super) async fn assert_all_settled(&self) {
        for stream in 0..self.streams {
            self.publish_to(stream, &["marker"]).await;
        }
        let mut source = self.place.open().await;
        for delivery in take(&mut source, self.streams).await {
            assert_eq!(id(&delivery), "marker", "a settled message was delivered again");
            delivery.acker.ack();
        }
        close(source).await;
    }
}

/// The id of a delivery.
pub(super) fn id(delivery: &Delivery) -> String {
    let envelope = &delivery.envelope;
    let bytes = envelope.property_id.as_ref().or_else(|| envelope.header("message-id"));
    String::from_utf8_lossy(bytes.map_or(b"(no id)", |bytes| bytes)).into_owned()
}

/// The ids of deliveries.
pub(super) fn ids(deliveries: &[Delivery]) -> Vec<String> {
    deliveries.iter().map(id).collect()
}

/// Exactly `count` deliveries, in the order of arrival.
pub(super) async fn take(source: &mut Box<dyn Source>, count: usize) -> Vec<Delivery> {
    let mut taken: Vec<Delivery> = Vec::new();
    while taken.len() < count {
        let room = Room { deliveries: count - taken.len(), bytes: 64 << 20 };
        match timeout(PATIENCE, source.next_batch(room)).await {
            Ok(Ok(batch)) => taken.extend(batch),
            Ok(Err(error)) => panic!("the source gave up: {error}"),
            Err(_) => panic!(
                "{} of {count} deliveries came ({:?}); status {:?}",
                taken.len(),
                ids(&taken),
                source.status().borrow().clone()
            ),
        }
    }
    assert_eq!(taken.len(), count, "a batch was larger than the room");
    taken
}

/// Takes until all of `wanted` have come (others may come between) and answers everything.
pub(super) async fn take_until(source: &mut Box<dyn Source>, wanted: &[&str]) -> Vec<Delivery> {
    let mut taken = Vec::new();
    while !wanted.iter().all(|wanted| taken.iter().any(|delivery| id(delivery) == *wanted)) {
        taken.extend(take(source, 1).await);
    }
    taken
}

/// Closes and expects the broker's answer.
pub(super) async fn close(source: Box<dyn Source>) {
    within("close", source.close(CLOSE)).await.expect("close answers");
}

/// Waits for the status to be in a phase that is `wanted`.
pub(super) async fn phase(
    mut status: watch::Receiver<SourceStatus>,
    wanted: fn(&SourcePhase) -> bool,
    what: &str,
) {
    let reached = timeout(PATIENCE, status.wait_for(|status| wanted(&status.phase))).await;
    if !reached.is_ok_and(|answer| answer.is_ok()) {
        panic!("{what}: status stayed {:?}", status.borrow().clone());
    }
}

/// Bounds what must happen.
pub(super) async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    match timeout(PATIENCE, future).await {
        Ok(value) => value,
        Err(_) => panic!("{what} did not happen within {PATIENCE:?}"),
    }
}

/// The words of a panic.
pub(super) fn panic_text(error: JoinError) -> String {
    match error.try_into_panic() {
        Ok(payload) => payload
            .downcast_ref::<String>()
            .cloned()
            .or_else(|| payload.downcast_ref::<&str>().map(|text| (*text).to_owned()))
            .unwrap_or_else(|| "panicked".to_owned()),
        Err(error) => error.to_string(),
    }
}
