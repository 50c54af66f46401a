//! What makes (partition, offset) an identity: the cluster and the topic's id.
//!
//! Purpose: a topic that is deleted and made again begins at offset 0, so a position names a
//! message only together with the topic's incarnation. Kafka gives each an id. Where it cannot
//! be read, an epoch is stored at first sight, together with a high-water mark of each
//! partition: an end of the log below the mark means that the topic was made again, and
//! the source refuses to go on, for its new records would be taken for old ones.
//!
//! Invariants: which of the two a topic has is stored at first sight and stays, so that a slow
//! answer never gives old messages new ids. A mark is stored before a record at or above it is
//! handed out.
//!
//! What it does not see: without topic ids, a topic made again that has grown beyond its mark.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use inboxd_contract::{Notes, StoreError};
use rdkafka::client::{Client, ClientContext};
use sha2::{Digest, Sha256};
use tokio::runtime::Handle;
use tokio::time::Instant;

use crate::partitions::Epoch;
use crate::raw::{self, TopicIdError};
use crate::shared::Shared;

const ASK_TIMEOUT: Duration = Duration::from_secs(2);
const NOTE_TIMEOUT: Duration = Duration::from_secs(5);
const NOTE_KEY_BYTES_MAX: usize = 255;
const RETRY: Duration = Duration::from_secs(1);
/// Questions without an answer before a topic that never had an id gets an epoch.
const ASKED_MAX: u32 = 2;
const HAS_ID: &str = "topic-id";

/// What a turn came to.
pub(crate) enum Outcome {
    Nothing,
    /// Something may be handed out that could not before.
    Found,
    /// The source must not go on.
    Failed(String),
}

/// Why a partition's scope is not known.
enum Missing {
    /// Asked again later.
    Later(String),
    /// Permanent.
    Never(String),
}

impl From<StoreError> for Missing {
    fn from(error: StoreError) -> Self {
        Self::Later(error.to_string())
    }
}

/// See the module.
pub(crate) struct Identity {
    notes: Arc<dyn Notes>,
    runtime: Handle,
    cluster: Option<String>,
    cluster_asked: u32,
    /// Questions for a topic's id without an answer.
    asked: HashMap<Arc<str>, u32>,
    not_before: Instant,
}

impl Identity {
    /// `runtime` is where the notes' connections live.
    pub(crate) fn new(notes: Arc<dyn Notes>, runtime: Handle) -> Self {
        Self {
            notes,
            runtime,
            cluster: None,
            cluster_asked: 0,
            asked: HashMap::new(),
            not_before: Instant::now(),
        }
    }

    /// Finds scopes and moves marks that are waited for. Blocks for a few seconds at most.
    pub(crate) fn turn<C: ClientContext>(
        &mut self,
        client: &Client<C>,
        shared: &Shared,
    ) -> Outcome {
        if Instant::now() < self.not_before {
            return Outcome::Nothing;
        }
        let (unscoped, unmarked) = {
            let state = shared.lock();
            (state.partitions.unscoped(), state.partitions.unmarked())
        };
        if unscoped.is_empty() && unmarked.is_empty() {
            return Outcome::Nothing;
        }
        let done = self.mark(shared, unmarked).and_then(|()| self.find(client, shared, unscoped));
        match done {
            Ok(()) => Outcome::Found,
            Err(Missing::Later(why)) => {
                self.not_before = Instant::now() + RETRY;
                tracing::info!(why, "positions are not identified yet; asking again");
                Outcome::Nothing
            }
            Err(Missing::Never(why)) => Outcome::Failed(why),
        }
    }

    fn mark(
        &self,
        shared: &Shared,
        unmarked: Vec<(Epoch, Arc<str>, i32, i64)>,
    ) -> Result<(), Missing> {
        for (epoch, scope, partition, mark) in unmarked {
            let key = mark_key(&scope, partition);
            self.ask(self.notes.set_note(&key, &mark.to_string()))?;
            shared.lock().partitions.set_mark(epoch, mark);
        }
        Ok(())
    }

    fn find<C: ClientContext>(
        &mut self,
        client: &Client<C>,
        shared: &Shared,
        unscoped: Vec<(Epoch, Arc<str>, i32)>,
    ) -> Result<(), Missing> {
        if unscoped.is_empty() {
            return Ok(());
        }
        let cluster = self.cluster(client)?;
        let topics: BTreeSet<Arc<str>> =
            unscoped.iter().map(|(_, topic, _)| topic.clone()).collect();
        let mut scopes = HashMap::new();
        for topic in topics {
            let scope = self.scope(client, &cluster, &topic)?;
            scopes.insert(topic, scope);
        }
        for (epoch, topic, partition) in unscoped {
            let Some((scope, has_id)) = scopes.get(&topic) else { continue };
            let marked = match has_id {
                true => None,
                false => Some(self.check_mark(client, &topic, scope, partition)?),
            };
            shared.lock().partitions.set_scope(epoch, Arc::clone(scope), marked);
        }
        Ok(())
    }

    fn cluster<C: ClientContext>(&mut self, client: &Client<C>) -> Result<String, Missing> {
        if let Some(cluster) = &self.cluster {
            return Ok(cluster.clone());
        }
        let cluster = client.fetch_cluster_id(ASK_TIMEOUT);
        self.cluster_asked += 1;
        match cluster {
            Some(cluster) => {
                self.cluster = Some(cluster.clone());
                Ok(cluster)
            }
            None => Err(Missing::Later(format!(
                "the cluster has not told its id ({} questions)",
                self.cluster_asked
            ))),
        }
    }

    /// A topic's scope, and whether it is made of the topic's id.
    fn scope<C: ClientContext>(
        &mut self,
        client: &Client<C>,
        cluster: &str,
        topic: &Arc<str>,
    ) -> Result<(Arc<str>, bool), Missing> {
        let key = topic_key(cluster, topic);
        let known = self.ask(self.notes.note(&key))?;
        let epoch = match known.as_deref() {
            Some(HAS_ID) | None => {
                let why = match topic_id(client, topic) {
                    Ok(id) => {
                        self.asked.remove(topic);
                        let kind = match known {
                            Some(kind) => kind,
                            None => self.ask(self.notes.note_once(&key, HAS_ID))?,
                        };
                        if kind == HAS_ID {
                            return Ok((format!("{cluster}/{id}").into(), true));
                        }
                        // Another member could not read it, and was first.
                        return Ok((format!("{cluster}/{kind}").into(), false));
                    }
                    Err(why) => why,
                };
                let asked = self.asked.entry(Arc::clone(topic)).or_default();
                *asked += 1;
                let give_up = *asked >= ASKED_MAX || matches!(why, TopicIdError::Refused(_));
                let (TopicIdError::NoAnswer(words) | TopicIdError::Refused(words)) = why;
                if known.is_some() || !give_up {
                    return Err(Missing::Later(format!("the id of topic {topic}: {words}")));
                }
                tracing::warn!(
                    topic = &**topic,
                    why = words,
                    "the topic's id cannot be read: an epoch stands for it, and a mark guards it"
                );
                let fresh = format!("epoch-{}", uuid::Uuid::new_v4().simple());
                self.ask(self.notes.note_once(&key, &fresh))?
            }
            Some(epoch) => epoch.to_owned(),
        };
        Ok((format!("{cluster}/{epoch}").into(), epoch == HAS_ID))
    }

    /// Compares the partition's end with the stored mark, and answers the mark.
    fn check_mark<C: ClientContext>(
        &self,
        client: &Client<C>,
        topic: &str,
        scope: &str,
        partition: i32,
    ) -> Result<i64, Missing> {
        let key = mark_key(scope, partition);
        let stored = self.ask(self.notes.note(&key))?;
        let (_, end) = client
            .fetch_watermarks(topic, partition, ASK_TIMEOUT)
            .map_err(|error| Missing::Later(format!("the end of {topic}/{partition}: {error}")))?;
        let marked: i64 = stored.as_deref().and_then(|text| text.parse().ok()).unwrap_or(0);
        if end < marked {
            return Err(Missing::Never(format!(
                "{topic}/{partition} ends at offset {end}, but offset {marked} was reached before: \
                 the topic was deleted and made again, or truncated. Ids made of positions would \
                 take its new records for old ones. Choose another `message_id`, or another \
                 consumer id, or remove the note `{}`",
                topic_key(scope.split('/').next().unwrap_or(scope), topic)
            )));
        }
        if end > marked {
            self.ask(self.notes.set_note(&key, &end.to_string()))?;
        }
        Ok(end)
    }

    fn ask<T>(&self, question: impl Future<Output = Result<T, StoreError>>) -> Result<T, Missing> {
        let answer =
            self.runtime.block_on(async { tokio::time::timeout(NOTE_TIMEOUT, question).await });
        match answer {
            Ok(answer) => Ok(answer?),
            Err(_) => Err(Missing::Later("the database did not answer in time".into())),
        }
    }
}

fn topic_id<C: ClientContext>(client: &Client<C>, topic: &str) -> Result<String, TopicIdError> {
    let mut ids = raw::topic_ids(client, &[topic], ASK_TIMEOUT)?;
    ids.remove(topic).unwrap_or_else(|| Err(TopicIdError::NoAnswer("not in the answer".into())))
}

fn topic_key(cluster: &str, topic: &str) -> String {
    bounded(format!("kafka-topic:{cluster}/{topic}"))
}

fn mark_key(scope: &str, partition: i32) -> String {
    bounded(format!("kafka-mark:{scope}/{partition}"))
}

/// A key that is too long for a note is replaced by its hash.
pub(crate) fn bounded(key: String) -> String {
    match key.len() <= NOTE_KEY_BYTES_MAX {
        true => key,
        false => format!("kafka:{}", hex::encode(Sha256::digest(key))),
    }
}
