//! Where a group begins under `start = latest`.
//!
//! Purpose: `latest` passes over what a topic held when the group first saw it, and nothing else.
//! It decides once: only for a partition that was there at that time and has no committed offset;
//! where it begins is committed like what is settled, so that a restart before the first record
//! passes nothing over. What came later (partitions, topics that a pattern matches) is read from
//! its beginning, and so is what retention has overtaken.
//!
//! Invariants: how many partitions a topic had is noted once in the database, before the group is
//! joined, so that all members and all later lives agree. Nothing is assigned whose beginning
//! could not be decided.
//!
//! What it does not see: a topic deleted and made again while nobody ran; it begins again like one
//! that is seen for the first time, at the end.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use inboxd_contract::{Notes, StoreError};
use rdkafka::client::{Client, ClientContext};
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::KafkaError;
use rdkafka::metadata::Metadata;
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use regex::Regex;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::context::Context;
use crate::identity::bounded;

const CLUSTER_TIMEOUT: Duration = Duration::from_millis(200);
const METADATA_TIMEOUT: Duration = Duration::from_secs(2);
const NOTES_TIMEOUT: Duration = Duration::from_secs(10);
const ASK_TIMEOUT: Duration = Duration::from_secs(3);
const RETRY: Duration = Duration::from_secs(1);
const PATTERN_SEEN: &str = "seen";

/// How many partitions each topic had when the group first saw it.
pub(crate) type FirstSeen = HashMap<String, i32>;

/// Finds out what is to be found out before the group is joined.
pub(crate) struct Beginning {
    group: String,
    topics: Vec<String>,
    notes: Option<(Arc<dyn Notes>, Handle)>,
    noting: Option<JoinHandle<Result<FirstSeen, StoreError>>>,
    not_before: Instant,
}

impl Beginning {
    /// Without notes, what is seen first is forgotten with the process.
    pub(crate) fn new(
        group: String,
        topics: Vec<String>,
        notes: Option<(Arc<dyn Notes>, Handle)>,
    ) -> Self {
        Self { group, topics, notes, noting: None, not_before: Instant::now() }
    }

    /// `Ok(None)`: not known yet. An error says why; it is tried again.
    pub(crate) fn turn<C: ClientContext>(
        &mut self,
        client: &Client<C>,
    ) -> Result<Option<FirstSeen>, String> {
        if Instant::now() < self.not_before {
            return Ok(None);
        }
        let answer = self.try_turn(client);
        if answer.is_err() {
            self.not_before = Instant::now() + RETRY;
        }
        answer
    }

    fn try_turn<C: ClientContext>(
        &mut self,
        client: &Client<C>,
    ) -> Result<Option<FirstSeen>, String> {
        let Some((notes, runtime)) = &self.notes else {
            return Ok(Some(present(&look(client)?)));
        };
        match self.noting.take() {
            None => {
                let cluster = client
                    .fetch_cluster_id(CLUSTER_TIMEOUT)
                    .ok_or("the cluster has not told its id yet")?;
                let present = present(&look(client)?);
                let prefix = format!("kafka-first:{cluster}/{}", self.group);
                let noting = note(Arc::clone(notes), prefix, self.topics.clone(), present);
                self.noting = Some(runtime.spawn(async {
                    let noted = tokio::time::timeout(NOTES_TIMEOUT, noting).await;
                    noted.unwrap_or_else(|_| {
                        Err(StoreError::transient("the database did not answer in time"))
                    })
                }));
                Ok(None)
            }
            Some(noting) if !noting.is_finished() => {
                self.noting = Some(noting);
                Ok(None)
            }
            Some(noting) => match runtime.block_on(noting) {
                Ok(Ok(seen)) => Ok(Some(seen)),
                Ok(Err(error)) => Err(error.to_string()),
                Err(_) => Err("the question was given up".into()),
            },
        }
    }
}

impl Drop for Beginning {
    fn drop(&mut self) {
        if let Some(noting) = &self.noting {
            noting.abort();
        }
    }
}

fn look<C: ClientContext>(client: &Client<C>) -> Result<Metadata, String> {
    let metadata = client.fetch_metadata(None, METADATA_TIMEOUT);
    metadata.map_err(|error| format!("the topics are not known yet: {error}"))
}

fn present(metadata: &Metadata) -> FirstSeen {
    let topics = metadata.topics().iter();
    topics
        .map(|topic| {
            let count = i32::try_from(topic.partitions().len()).unwrap_or(i32::MAX);
            (topic.name().to_owned(), count)
        })
        .collect()
}

/// Notes each topic's count, unless one was noted before.
async fn note(
    notes: Arc<dyn Notes>,
    prefix: String,
    topics: Vec<String>,
    present: FirstSeen,
) -> Result<FirstSeen, StoreError> {
    let mut seen = FirstSeen::new();
    for topic in topics {
        if !topic.starts_with('^') {
            let count = present.get(&topic).copied().unwrap_or(0);
            let count = first(&*notes, &prefix, &topic, count).await?;
            seen.insert(topic, count);
            continue;
        }
        let pattern = bounded(format!("{prefix}/{topic}"));
        let seen_before = notes.note(&pattern).await?.is_some();
        // librdkafka has accepted it; where the two differ, a topic is taken for a later one.
        let matching = Regex::new(&topic).ok();
        let matches = |name: &str| matching.as_ref().is_some_and(|regex| regex.is_match(name));
        for (name, count) in present.iter().filter(|(name, _)| matches(name)) {
            let count = if seen_before { 0 } else { *count };
            seen.insert(name.clone(), first(&*notes, &prefix, name, count).await?);
        }
        // Last, so that a life that ended in between is made up for.
        notes.note_once(&pattern, PATTERN_SEEN).await?;
    }
    Ok(seen)
}

async fn first(
    notes: &dyn Notes,
    prefix: &str,
    topic: &str,
    count: i32,
) -> Result<i32, StoreError> {
    let stored = notes.note_once(&bounded(format!("{prefix}/{topic}")), &count.to_string()).await?;
    Ok(stored.parse().unwrap_or(count))
}

/// A partition that begins at this offset.
pub(crate) type Begun = HashMap<(String, i32), i64>;

/// Sets, in a list that is to be assigned, where partitions without a committed offset begin, and
/// answers those. `begun` is what was decided earlier in this process.
pub(crate) fn decide(
    consumer: &BaseConsumer<Context>,
    list: &mut TopicPartitionList,
    seen: &FirstSeen,
    begun: &Begun,
) -> Result<Begun, KafkaError> {
    let committed = consumer.committed_offsets(list.clone(), ASK_TIMEOUT)?;
    let mut ends = TopicPartitionList::new();
    for element in committed.elements() {
        element.error()?;
        let (topic, partition) = (element.topic(), element.partition());
        let was_there = seen.get(topic).is_some_and(|count| partition < *count);
        if element.offset() == Offset::Invalid && was_there {
            ends.add_partition_offset(topic, partition, Offset::End)?;
        }
    }
    let mut decided = Begun::new();
    if ends.count() == 0 {
        return Ok(decided);
    }
    for element in consumer.offsets_for_times(ends, ASK_TIMEOUT)?.elements() {
        element.error()?;
        let Offset::Offset(end) = element.offset() else {
            return Err(KafkaError::OffsetFetch(
                rdkafka::error::RDKafkaErrorCode::UnknownPartition,
            ));
        };
        let place = (element.topic().to_owned(), element.partition());
        let at = begins(begun.get(&place).copied(), end);
        list.set_partition_offset(&place.0, place.1, Offset::Offset(at))?;
        decided.insert(place, at);
    }
    Ok(decided)
}

/// Where a partition without a committed offset begins: at its end, or, where that was decided
/// before and the commit did not come about, where it was; a log that ends below that is another
/// one, and read from its beginning.
fn begins(decided: Option<i64>, end: i64) -> i64 {
    match decided {
        None => end,
        Some(decided) if decided <= end => decided,
        Some(_) => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_beginning_is_decided_once() {
        assert_eq!(begins(None, 7), 7);
        assert_eq!(begins(Some(5), 7), 5, "its commit was lost");
        assert_eq!(begins(Some(9), 7), 0, "made again");
    }
}
