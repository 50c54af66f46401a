//! Notices that a topic was deleted and made again under a running consumer.
//!
//! Purpose: reading goes on by offsets alone. A log that was made again and ends below where
//! reading had come to is read from its beginning, because that offset does not exist. One that
//! has grown beyond it looks like the old log, and its first records would never be read. The
//! topic's id tells the two apart.
//!
//! Invariants: asked without waiting, so that polling goes on; a topic's new id is believed only
//! when all its partitions have been set back.
//!
//! What it does not see: a topic made again before its id was known, or where the cluster tells
//! none; the few records that are read between the making and the next answer, which are read
//! once more.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use inboxd_contract::ErrorCode;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::topic_partition_list::Offset;
use tokio::time::Instant;

use crate::context::Context;
use crate::raw::{PendingTopicIds, TopicIds};
use crate::shared::Shared;

/// Between two questions while all is known.
const EVERY: Duration = Duration::from_secs(5);
/// While a topic's id is not known yet, or could not be acted upon.
const SOON: Duration = Duration::from_secs(1);
/// Each question without an answer doubles the time to the next, this often at most.
const DOUBLINGS_MAX: u32 = 7;
const ASK_TIMEOUT: Duration = Duration::from_secs(5);
const SEEK_TIMEOUT: Duration = Duration::from_secs(2);

/// See the module.
pub(crate) struct Incarnations {
    asked: Option<PendingTopicIds>,
    known: HashMap<Arc<str>, String>,
    next: Instant,
    unanswered: u32,
}

impl Incarnations {
    pub(crate) fn new() -> Self {
        Self { asked: None, known: HashMap::new(), next: Instant::now(), unanswered: 0 }
    }

    /// Asks now and then, and acts on the answer.
    pub(crate) fn turn(&mut self, consumer: &BaseConsumer<Context>, shared: &Shared) {
        if let Some(asked) = &self.asked {
            let Some(answer) = asked.poll(Duration::ZERO) else { return };
            self.asked = None;
            match answer {
                Ok(ids) => {
                    self.unanswered = 0;
                    let all = self.hear(ids, consumer, shared);
                    self.next = Instant::now() + if all { EVERY } else { SOON };
                }
                Err(why) => {
                    let wait = EVERY.saturating_mul(1 << self.unanswered.min(DOUBLINGS_MAX));
                    self.unanswered = self.unanswered.saturating_add(1);
                    self.next = Instant::now() + wait;
                    tracing::debug!(?why, "the topics' ids were not told");
                }
            }
        } else if self.next <= Instant::now() {
            self.ask(consumer, shared);
        }
    }

    fn ask(&mut self, consumer: &BaseConsumer<Context>, shared: &Shared) {
        let assigned = shared.lock().partitions.assigned();
        let topics: BTreeSet<Arc<str>> = assigned.into_iter().map(|(topic, _)| topic).collect();
        self.known.retain(|topic, _| topics.contains(topic));
        self.next = Instant::now() + SOON;
        if !topics.is_empty() {
            let topics: Vec<&str> = topics.iter().map(|topic| &**topic).collect();
            self.asked = Some(PendingTopicIds::send(consumer.client(), &topics, ASK_TIMEOUT));
        }
    }

    /// True if there is nothing left to be asked again soon.
    fn hear(&mut self, ids: TopicIds, consumer: &BaseConsumer<Context>, shared: &Shared) -> bool {
        let mut all = true;
        for (topic, id) in ids {
            // Deleted and not made again yet, or nothing that we may know.
            let Ok(id) = id else { continue };
            match self.known.get(&*topic) {
                Some(known) if *known == id => continue,
                Some(_) if !begin_again(&topic, consumer, shared) => all = false,
                _ => {
                    self.known.insert(topic.into(), id);
                    shared.counters.count_topic_id();
                }
            }
        }
        all
    }
}

/// Sets all partitions of a topic back to their beginning. False if one could not be.
fn begin_again(topic: &str, consumer: &BaseConsumer<Context>, shared: &Shared) -> bool {
    let assigned = shared.lock().partitions.assigned();
    let mut all = true;
    for (_, partition) in assigned.into_iter().filter(|(assigned, _)| **assigned == *topic) {
        match consumer.seek(topic, partition, Offset::Beginning, SEEK_TIMEOUT) {
            Ok(()) => {
                shared.start_over(topic, partition);
                tracing::warn!(
                    code = ErrorCode::TopicRemade.as_str(),
                    topic,
                    partition,
                    "the topic was made again; read from its beginning"
                );
            }
            Err(error) => {
                all = false;
                tracing::warn!(code = ErrorCode::TopicRemade.as_str(), topic, partition, %error, "the topic was made again; trying to go back");
            }
        }
    }
    all
}
