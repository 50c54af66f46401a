//! Notices that a topic was deleted and made again under a running consumer.
//!
//! Purpose: reading goes on by offsets alone. A log that was made again and ends below where
//! reading had come to is read from its beginning, because that offset does not exist. One that
//! has grown beyond it looks like the old log, and its first records would never be read. The
//! topic's id tells the two apart.
//!
//! Invariants: asked without waiting, so that polling goes on; each partition of a topic that was
//! made again is set back once, and tried again alone where that fails; an id that another has
//! followed is never believed again, for brokers learn of a new topic one after the other.
//!
//! Besides, the same answers tell which of the topics that are named are not there.
//!
//! What it does not see: a topic made again before its id was known, or where the cluster tells
//! none; the few records that are read between the making and the next answer, which are read
//! once more.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use inboxd_contract::ErrorCode;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::KafkaError;
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use tokio::time::Instant;

use crate::context::Context;
use crate::raw::{PendingTopicIds, TopicIdError, TopicIds};
use crate::shared::Shared;

/// Between two questions while all is known.
const EVERY: Duration = Duration::from_secs(5);
/// While a topic's id is not known yet, or a partition could not be set back.
const SOON: Duration = Duration::from_secs(1);
/// Each question without an answer doubles the time to the next, this often at most.
const DOUBLINGS_MAX: u32 = 3;
const ASK_TIMEOUT: Duration = Duration::from_secs(5);
const SEEK_TIMEOUT: Duration = Duration::from_millis(500);

/// See the module.
pub(crate) struct Incarnations {
    /// The topics that are named, patterns left out.
    named: Vec<String>,
    /// A pattern may match others.
    pattern: bool,
    asked: Option<PendingTopicIds>,
    known: HashMap<Arc<str>, String>,
    /// Ids that others have followed.
    gone: HashMap<Arc<str>, HashSet<String>>,
    /// Partitions that are to be set back yet.
    back: BTreeSet<(Arc<str>, i32)>,
    back_from: Instant,
    next: Instant,
    unanswered: u32,
}

impl Incarnations {
    /// `topics` are names, and patterns that begin with `^`.
    pub(crate) fn new(topics: &[String]) -> Self {
        let (patterns, named): (Vec<_>, Vec<_>) =
            topics.iter().cloned().partition(|topic| topic.starts_with('^'));
        Self {
            named,
            pattern: !patterns.is_empty(),
            asked: None,
            known: HashMap::new(),
            gone: HashMap::new(),
            back: BTreeSet::new(),
            back_from: Instant::now(),
            next: Instant::now(),
            unanswered: 0,
        }
    }

    /// The ids that topics are known to have.
    pub(crate) fn known(&mut self) -> &mut HashMap<Arc<str>, String> {
        &mut self.known
    }

    /// Asks now and then, and acts on the answer.
    pub(crate) fn turn(&mut self, consumer: &BaseConsumer<Context>, shared: &Shared) {
        self.go_back(consumer, shared);
        if let Some(asked) = &self.asked {
            let Some(answer) = asked.poll(Duration::ZERO) else { return };
            self.asked = None;
            match answer {
                Ok(ids) => {
                    self.unanswered = 0;
                    self.next = Instant::now() + EVERY;
                    self.note_missing(&ids, shared);
                    self.hear(ids, shared);
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
        let mut topics: BTreeSet<Arc<str>> = assigned.into_iter().map(|(topic, _)| topic).collect();
        self.known.retain(|topic, _| topics.contains(topic));
        topics.extend(self.named.iter().map(|topic| Arc::from(topic.as_str())));
        self.next = Instant::now() + SOON;
        if !topics.is_empty() {
            let topics: Vec<&str> = topics.iter().map(|topic| &**topic).collect();
            self.asked = Some(PendingTopicIds::send(consumer.client(), &topics, ASK_TIMEOUT));
        }
    }

    /// Says which topics that are named are not there.
    fn note_missing(&self, ids: &TopicIds, shared: &Shared) {
        let missing: BTreeMap<String, String> = self
            .named
            .iter()
            .filter_map(|topic| match ids.get(topic) {
                Some(Err(TopicIdError::NotThere(_))) => {
                    Some((topic.clone(), "it does not exist".into()))
                }
                Some(Err(TopicIdError::Forbidden(words))) => Some((topic.clone(), words.clone())),
                _ => None,
            })
            .collect();
        let nothing_there = !self.pattern && missing.len() == self.named.len();
        let (new, group) = {
            let health = &mut shared.lock().health;
            (health.missing(missing, nothing_there), health.group().to_owned())
        };
        // With nothing left to consume the source is not ready, which is told with its reason.
        for (topic, why) in new.into_iter().filter(|_| !nothing_there) {
            tracing::warn!(
                code = ErrorCode::TopicMissing.as_str(),
                group,
                topic,
                why,
                "a topic that is named cannot be consumed; the others are, and this one as soon as \
                 it can be"
            );
        }
    }

    fn hear(&mut self, ids: TopicIds, shared: &Shared) {
        let assigned = shared.lock().partitions.assigned();
        for (topic, id) in ids {
            // Deleted and not made again yet, or nothing that we may know.
            let Ok(id) = id else { continue };
            let mut ours = assigned.iter().filter(|(of, _)| **of == *topic).peekable();
            let Some((topic, _)) = ours.peek() else { continue };
            let topic = Arc::clone(topic);
            if self.gone.get(&topic).is_some_and(|gone| gone.contains(&id)) {
                continue;
            }
            let before = self.known.insert(Arc::clone(&topic), id.clone());
            if before.as_ref() == Some(&id) {
                continue;
            }
            shared.counters.count_topic_id();
            if let Some(before) = before {
                tracing::warn!(
                    code = ErrorCode::TopicRemade.as_str(),
                    topic = &*topic,
                    "the topic was made again; its partitions are read from their beginning"
                );
                self.gone.entry(topic).or_default().insert(before);
                self.back.extend(ours.cloned());
            }
        }
    }

    /// Sets back what is to be; what cannot be now is tried again.
    fn go_back(&mut self, consumer: &BaseConsumer<Context>, shared: &Shared) {
        if self.back.is_empty() || Instant::now() < self.back_from {
            return;
        }
        let assigned: BTreeSet<_> = shared.lock().partitions.assigned().into_iter().collect();
        self.back.retain(|place| assigned.contains(place));
        if self.back.is_empty() {
            return;
        }
        self.back_from = Instant::now() + SOON;
        let done = match set_back(consumer, &self.back) {
            Ok(done) => done,
            Err(error) => {
                tracing::warn!(
                    code = ErrorCode::TopicRemade.as_str(),
                    %error,
                    "partitions of a topic that was made again cannot be set back; trying again"
                );
                return;
            }
        };
        for (topic, partition) in done {
            shared.start_over(&topic, partition);
            self.back.remove(&(Arc::from(topic), partition));
        }
        if let Some((topic, partition)) = self.back.first() {
            tracing::warn!(
                code = ErrorCode::TopicRemade.as_str(),
                topic = &**topic,
                partition,
                left = self.back.len(),
                "not all partitions of a topic that was made again are set back; trying again"
            );
        }
    }
}

/// Those that could be set back.
fn set_back(
    consumer: &BaseConsumer<Context>,
    places: &BTreeSet<(Arc<str>, i32)>,
) -> Result<Vec<(String, i32)>, KafkaError> {
    let mut list = TopicPartitionList::with_capacity(places.len());
    for (topic, partition) in places {
        list.add_partition_offset(topic, *partition, Offset::Beginning)?;
    }
    let answered = consumer.seek_partitions(list, SEEK_TIMEOUT)?;
    let elements = answered.elements();
    let done = elements.iter().filter(|element| element.error().is_ok());
    Ok(done.map(|element| (element.topic().to_owned(), element.partition())).collect())
}
