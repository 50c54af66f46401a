//! The consumer's thread.
//!
//! Purpose: polls always, so that a slow application never costs the membership. What was read
//! goes into the bounded queue behind [`crate::shared`]. While that is full the thread first
//! waits a moment (a pause throws away what librdkafka has fetched ahead), then pauses all
//! partitions and goes on polling; it never seeks (but in a topic that was made again), so a
//! resumed partition goes on behind the last record polled.
//!
//! Invariants: every call of librdkafka but the construction happens here, and each is bounded;
//! the loop shows that it turns at least once a second.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use inboxd_contract::{Envelope, ErrorCode, Notes, Origin};
use rdkafka::Message;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::KafkaError;
use rdkafka::message::BorrowedMessage;
use rdkafka::topic_partition_list::TopicPartitionList;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::beginning::Beginning;
use crate::commit::{self, Between, Sent};
use crate::context::{Context, Settings};
use crate::identity::{Identity, Outcome};
use crate::incarnation::Incarnations;
use crate::partitions::{Epoch, Kept, Record};
use crate::raw;
use crate::shared::{End, Shared};
use crate::source;

const PUBLISH_EVERY: Duration = Duration::from_millis(500);
/// How long a full queue is waited for before partitions are paused.
const FULL_FOR: Duration = Duration::from_millis(250);
const POLL: Duration = Duration::from_millis(100);
/// While paused: how soon a resume follows.
const POLL_STALLED: Duration = Duration::from_millis(20);
const POLLS_IN_A_ROW: usize = 256;
/// Between leaving the group and joining it again.
const REJOIN: Duration = Duration::from_secs(1);

/// See the module. Fields are dropped in order: queues of pending answers before their client.
pub(crate) struct Worker {
    sent: Option<Sent>,
    incarnations: Incarnations,
    identity: Option<Identity>,
    consumer: BaseConsumer<Context>,
    shared: Arc<Shared>,
    settings: Arc<Settings>,
    /// To be subscribed to once `wait_until_asked` allows it; empty once they are.
    topics: Vec<String>,
    /// What they are; for joining anew.
    all_topics: Vec<String>,
    wait_until_asked: bool,
    /// What is to be known before the group is joined, under `start = latest`.
    beginning: Option<Beginning>,
    not_joining_before: Instant,
    /// The source cannot go on, and the group was left.
    failed: bool,
    next_commit: Instant,
    published: Instant,
    /// The queue to the engine was full for a while: everything is paused.
    stalled: bool,
    /// The last topic read, to share its name among records.
    topic: Arc<str>,
}

/// How the group is joined.
pub(crate) struct Joining {
    pub(crate) topics: Vec<String>,
    /// Only when deliveries are asked for.
    pub(crate) wait_until_asked: bool,
    /// Only when this is known.
    pub(crate) beginning: Option<Beginning>,
}

impl Worker {
    /// Of `named` topics those that are not there are told; with `identified`, positions are.
    pub(crate) fn new(
        consumer: BaseConsumer<Context>,
        shared: Arc<Shared>,
        settings: Arc<Settings>,
        identified: Option<(Arc<dyn Notes>, Handle)>,
        joining: Joining,
        named: &[String],
    ) -> Self {
        let Joining { topics, wait_until_asked, beginning } = joining;
        let now = Instant::now();
        Self {
            sent: None,
            incarnations: Incarnations::new(named),
            consumer,
            next_commit: now + settings.commit_interval,
            shared,
            settings,
            identity: identified.map(|(notes, runtime)| Identity::new(notes, runtime)),
            all_topics: topics.clone(),
            topics,
            wait_until_asked,
            beginning,
            not_joining_before: now,
            failed: false,
            published: now,
            stalled: false,
            topic: Arc::from(""),
        }
    }

    /// Until the source ends. Sends how the last commit went, when the consumer is gone.
    pub(crate) fn run(mut self, done: oneshot::Sender<Result<(), String>>) {
        let _watch = PanicWatch(Arc::clone(&self.shared));
        let end = loop {
            if let Some(end) = self.shared.lock().end {
                break end;
            }
            if self.published.elapsed() >= PUBLISH_EVERY {
                self.published = Instant::now();
                self.shared.publish();
            }
            self.leave_when_failed();
            self.join();
            self.commit();
            self.incarnations.turn(&self.consumer, &self.shared);
            self.identify();
            self.watch_room();
            self.pause_and_resume();
            self.poll();
        };
        let result = self.leave(end);
        // Nobody waits for it after a drop.
        let _ = done.send(result);
    }

    /// A source that cannot go on must not keep partitions from members that can.
    fn leave_when_failed(&mut self) {
        if !self.failed && self.shared.lock().failure.is_some() {
            self.failed = true;
            self.topics.clear();
            self.beginning = None;
            self.consumer.unsubscribe();
        }
    }

    /// Subscribes when it is time to.
    fn join(&mut self) {
        if std::mem::take(&mut self.shared.lock().rejoin) {
            self.consumer.unsubscribe();
            self.topics.clone_from(&self.all_topics);
            self.not_joining_before = Instant::now() + REJOIN;
        }
        let asked = !self.wait_until_asked || self.shared.lock().asked;
        if self.topics.is_empty() || !asked || Instant::now() < self.not_joining_before {
            return;
        }
        if let Some(beginning) = &mut self.beginning {
            match beginning.turn(self.consumer.client()) {
                Ok(Some(seen)) => self.shared.lock().first_seen = seen,
                Ok(None) => return,
                Err(why) => {
                    tracing::info!(why, "where to begin is not known yet; asking again");
                    return;
                }
            }
            self.beginning = None;
        }
        let topics = std::mem::take(&mut self.topics);
        if let Err(error) = source::subscribe(&self.consumer, &topics) {
            self.shared.fail(format!("{}: {error}", source::cannot_subscribe(&topics)));
        }
    }

    fn commit(&mut self) {
        if self.sent.as_ref().is_some_and(|sent| sent.is_over(&self.shared)) {
            self.sent = None;
        }
        if self.sent.is_none() && self.next_commit <= Instant::now() {
            let metadata = self.settings.metadata.as_deref();
            self.sent = Sent::send(self.consumer.client(), &self.shared, metadata);
            self.next_commit = Instant::now() + self.settings.commit_interval;
        }
    }

    /// Finds out what makes positions an identity, where that is asked for.
    fn identify(&mut self) {
        let Some(identity) = &mut self.identity else { return };
        let known = self.incarnations.known();
        match identity.turn(self.consumer.client(), &self.shared, known) {
            Outcome::Nothing => {}
            Outcome::Found => self.shared.notify_arrived(),
            Outcome::Failed(why) => self.shared.fail_as(ErrorCode::PositionsLost, why),
        }
    }

    fn watch_room(&mut self) {
        if self.stalled {
            self.stalled = !self.shared.lock().partitions.is_half_empty();
        } else if self.shared.lock().partitions.is_full() {
            self.shared
                .wait_while(FULL_FOR, |state| state.partitions.is_full() && state.end.is_none());
            self.stalled = self.shared.lock().partitions.is_full();
        }
    }

    fn pause_and_resume(&mut self) {
        let (pause, resume) = self.shared.lock().partitions.to_pause(self.stalled);
        self.set_paused(&pause, true);
        self.set_paused(&resume, false);
    }

    fn set_paused(&mut self, epochs: &[Epoch], paused: bool) {
        if epochs.is_empty() {
            return;
        }
        let mut list = TopicPartitionList::with_capacity(epochs.len());
        let mut state = self.shared.lock();
        for (topic, partition) in epochs.iter().filter_map(|epoch| state.partitions.name(*epoch)) {
            list.add_partition(&topic, partition);
        }
        state.partitions.set_paused(epochs, paused);
        drop(state);
        let done = if paused { self.consumer.pause(&list) } else { self.consumer.resume(&list) };
        if let Err(error) = done {
            tracing::warn!(%error, paused, "partitions cannot be paused or resumed; trying again");
            self.shared.lock().partitions.set_paused(epochs, !paused);
            return;
        }
        tracing::debug!(paused, partitions = epochs.len(), "back-pressure");
        for (topic, partition) in refused(&list) {
            // One that was revoked meanwhile is not ours any more; another is tried again.
            tracing::debug!(topic, partition, paused, "a partition cannot be paused or resumed");
            self.shared.lock().partitions.not_paused(&topic, partition, paused);
        }
    }

    fn poll(&mut self) {
        let mut timeout = if self.stalled { POLL_STALLED } else { POLL };
        for _ in 0..POLLS_IN_A_ROW {
            match self.consumer.poll(timeout) {
                Some(Ok(message)) => {
                    if *self.topic != *message.topic() {
                        self.topic = Arc::from(message.topic());
                    }
                    if receive(&self.shared, &self.topic, &message) == Kept::Held {
                        return;
                    }
                }
                Some(Err(error)) => self.note(&error),
                None => return,
            }
            if self.shared.lock().partitions.is_full() {
                return;
            }
            timeout = Duration::ZERO;
        }
    }

    /// Errors were told to the context already; a fatal one ends the source.
    fn note(&self, error: &KafkaError) {
        let Some((code, words)) = self.consumer.client().fatal_error() else {
            tracing::debug!(%error, "consumer");
            return;
        };
        if self.shared.lock().failure.is_none() {
            self.shared.fail(format!(
                "this member cannot go on in its group: {words} ({code}); with a static membership, \
                 make sure that each member has a `group.instance.id` of its own, then restart"
            ));
        }
    }

    /// Commits, leaves the group and frees the consumer.
    fn leave(self, end: End) -> Result<(), String> {
        let Self { sent, incarnations, identity, consumer, shared, settings, .. } = self;
        drop((sent, incarnations, identity));
        shared.lock().partitions.stop_taking();
        let committed = match end {
            End::Drop => Ok(()),
            End::Close(deadline) => {
                let left = deadline.saturating_duration_since(Instant::now());
                let metadata = settings.metadata.as_deref();
                // Some of the time is left for leaving.
                let timeout = left.mul_f64(0.6);
                let poll = || drop(consumer.poll(POLL_STALLED));
                let between = Between::Poll(&poll);
                commit::within(consumer.client(), &shared, None, metadata, timeout, between)
            }
        };
        let mut state = shared.lock();
        state.partitions.lose_all();
        state.health.close();
        drop(state);
        shared.publish();
        drop(consumer);
        committed.map_err(|error| format!("the last offsets were not committed: {error}"))
    }
}

/// Tells the engine if the thread dies of a bug.
struct PanicWatch(Arc<Shared>);

impl Drop for PanicWatch {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail("the Kafka consumer's thread panicked: this is a bug of inboxd".into());
        }
    }
}

/// The partitions of a list whose own answer is an error.
fn refused(list: &TopicPartitionList) -> Vec<(String, i32)> {
    let elements = list.elements();
    let refused = elements.iter().filter(|element| element.error().is_err());
    refused.map(|element| (element.topic().to_owned(), element.partition())).collect()
}

fn receive(shared: &Shared, topic: &Arc<str>, message: &BorrowedMessage<'_>) -> Kept {
    let (partition, offset) = (message.partition(), message.offset());
    let origin =
        Origin::Kafka { topic: Arc::clone(topic), partition, offset, position_scope: None };
    let mut envelope = Envelope::new(origin, message.payload().map(Bytes::copy_from_slice));
    envelope.key = message.key().map(Bytes::copy_from_slice);
    envelope.headers = raw::headers(message);
    envelope.fill_from_headers();
    let timestamp = message.timestamp().to_millis();
    let received_at = Instant::now();
    shared.receive(Record { topic, partition, offset, timestamp, envelope, received_at })
}

#[cfg(test)]
mod tests {
    use rdkafka::ClientConfig;

    use super::*;

    /// The call succeeds as a whole whatever becomes of its members.
    #[test]
    fn a_partition_that_is_not_paused_is_noticed_though_the_call_succeeds() {
        let consumer: BaseConsumer =
            ClientConfig::new().set("group.id", "g").create().expect("a consumer");
        let mut list = TopicPartitionList::new();
        list.add_partition("not ours", 3);
        consumer.pause(&list).expect("as a whole");
        assert_eq!(refused(&list), [("not ours".to_owned(), 3)]);
    }
}
