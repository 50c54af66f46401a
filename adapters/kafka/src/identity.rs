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
//! handed out. An id that another has followed is stored as gone, and a broker that still tells
//! it is not believed. One topic that cannot be identified holds up none but its own partitions.
//! Nothing here waits for the database: questions go on behind, and each turn looks for answers.
//!
//! What it does not see: without topic ids, a topic made again that has grown beyond its mark. A
//! broker that tells an id that is out of date before anybody has seen its successor is believed
//! until [`crate::incarnation`] is told the successor, and reads the topic from its beginning.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use futures::stream::{self, StreamExt as _};
use inboxd_contract::{Notes, StoreError};
use rdkafka::client::{Client, ClientContext};
use sha2::{Digest, Sha256};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::partitions::Epoch;
use crate::raw::{PendingTopicIds, TopicIdError, TopicIds};
use crate::shared::Shared;

const CLUSTER_TIMEOUT: Duration = Duration::from_millis(200);
const IDS_TIMEOUT: Duration = Duration::from_secs(2);
const END_TIMEOUT: Duration = Duration::from_millis(500);
/// What a turn may spend on asking for ends of logs, but for the last question.
const TURN: Duration = Duration::from_millis(300);
const NOTE_TIMEOUT: Duration = Duration::from_secs(5);
const NOTE_KEY_BYTES_MAX: usize = 255;
/// Questions to the database at once.
const AT_ONCE: usize = 4;
const RETRY: Duration = Duration::from_secs(1);
/// Questions without an answer before a topic that never had an id gets an epoch.
const ASKED_MAX: u32 = 2;
const HAS_ID: &str = "topic-id";
const GONE: &str = "gone";

/// What a turn came to.
pub(crate) enum Outcome {
    Nothing,
    /// Something may be handed out that could not before.
    Found,
    /// The source must not go on.
    Failed(String),
}

/// Why a scope is not known.
#[derive(Debug)]
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

/// A topic's scope.
#[derive(Debug, Clone)]
struct Found {
    scope: Arc<str>,
    /// The topic's id, if the scope is made of it.
    id: Option<String>,
}

/// A partition of a topic without an id, whose mark is to be looked at.
struct Guarded {
    epoch: Epoch,
    topic: Arc<str>,
    scope: Arc<str>,
    partition: i32,
    end: i64,
}

/// What is stored or asked behind the source's back, and comes to these answers.
type Answers<T> = JoinHandle<Vec<T>>;
type ScopeOf = (Arc<str>, Result<Found, Missing>);
type MarkStored = (Epoch, i64, Result<(), Missing>);

/// How far the search for scopes has come.
enum Search {
    Idle,
    /// The brokers were asked for the topics' ids.
    Ids(BTreeSet<Arc<str>>, PendingTopicIds),
    /// The database was asked what the topics have.
    Scopes(Answers<ScopeOf>),
    /// The ends of logs are asked for, one after the other.
    Ends(Vec<Guarded>, Vec<Guarded>),
    /// The database was asked for the marks.
    Marks(Answers<(Guarded, Result<i64, Missing>)>),
}

/// See the module.
pub(crate) struct Identity {
    notes: Arc<dyn Notes>,
    runtime: Handle,
    cluster: Option<String>,
    /// Questions for a topic's id without an answer.
    asked: HashMap<Arc<str>, u32>,
    /// Topics that could not be identified, when to ask again, and why.
    withheld: BTreeMap<Arc<str>, (Instant, String)>,
    search: Search,
    /// Marks that are being stored.
    marking: Option<Answers<MarkStored>>,
    /// Nothing is asked before.
    not_before: Instant,
}

impl Identity {
    /// `runtime` is where the notes' connections live.
    pub(crate) fn new(notes: Arc<dyn Notes>, runtime: Handle) -> Self {
        Self {
            notes,
            runtime,
            cluster: None,
            asked: HashMap::new(),
            withheld: BTreeMap::new(),
            search: Search::Idle,
            marking: None,
            not_before: Instant::now(),
        }
    }

    /// Finds scopes and moves marks that are waited for. `known` are the ids that topics are
    /// known to have; what is learnt here is added. Blocks for a second at most.
    pub(crate) fn turn<C: ClientContext>(
        &mut self,
        client: &Client<C>,
        shared: &Shared,
        known: &mut HashMap<Arc<str>, String>,
    ) -> Outcome {
        let mut found = self.mark(shared);
        match self.find(client, shared, known) {
            Ok(some) => found |= some,
            Err(Missing::Later(why)) => {
                self.not_before = Instant::now() + RETRY;
                tracing::info!(why, "positions are not identified yet; asking again");
            }
            Err(Missing::Never(why)) => return Outcome::Failed(why),
        }
        if found { Outcome::Found } else { Outcome::Nothing }
    }

    /// Stores marks beside the reading. True if some were stored.
    fn mark(&mut self, shared: &Shared) -> bool {
        if let Some(stored) = take_finished(&self.runtime, &mut self.marking) {
            let mut any = false;
            for (epoch, mark, result) in stored {
                match result {
                    Ok(()) => {
                        shared.lock().partitions.set_mark(epoch, mark);
                        any = true;
                    }
                    Err(Missing::Later(why) | Missing::Never(why)) => {
                        self.not_before = Instant::now() + RETRY;
                        tracing::info!(why, "a high-water mark is not stored yet; trying again");
                    }
                }
            }
            return any;
        }
        if self.marking.is_some() || Instant::now() < self.not_before {
            return false;
        }
        let unmarked = shared.lock().partitions.unmarked();
        if !unmarked.is_empty() {
            let notes = Arc::clone(&self.notes);
            self.marking = Some(self.runtime.spawn(async move {
                let notes = &*notes;
                let storing = unmarked.into_iter().map(async |(epoch, scope, partition, mark)| {
                    let key = mark_key(&scope, partition);
                    let stored = within(notes.set_note(&key, &mark.to_string())).await;
                    (epoch, mark, stored)
                });
                stream::iter(storing).buffer_unordered(AT_ONCE).collect().await
            }));
        }
        false
    }

    /// One step of the search for scopes. True if some were found.
    fn find<C: ClientContext>(
        &mut self,
        client: &Client<C>,
        shared: &Shared,
        known: &mut HashMap<Arc<str>, String>,
    ) -> Result<bool, Missing> {
        match std::mem::replace(&mut self.search, Search::Idle) {
            Search::Idle => self.begin(client, shared).map(|()| false),
            Search::Ids(topics, pending) => {
                match pending.poll(Duration::ZERO) {
                    None => self.search = Search::Ids(topics, pending),
                    Some(ids) => self.ask_scopes(topics, ids, known),
                }
                Ok(false)
            }
            Search::Scopes(asked) => {
                let mut asked = Some(asked);
                let scopes = take_finished(&self.runtime, &mut asked);
                if let Some(asked) = asked {
                    self.search = Search::Scopes(asked);
                }
                match scopes {
                    Some(scopes) => self.hear_scopes(shared, scopes, known),
                    None => Ok(false),
                }
            }
            Search::Ends(left, known) => {
                self.ask_ends(client, shared, left, known);
                Ok(false)
            }
            Search::Marks(asked) => {
                let mut asked = Some(asked);
                let marks = take_finished(&self.runtime, &mut asked);
                if let Some(asked) = asked {
                    self.search = Search::Marks(asked);
                }
                match marks {
                    Some(marks) => self.hear_marks(shared, marks),
                    None => Ok(false),
                }
            }
        }
    }

    /// Asks for the ids of topics whose scope is wanted.
    fn begin<C: ClientContext>(
        &mut self,
        client: &Client<C>,
        shared: &Shared,
    ) -> Result<(), Missing> {
        let now = Instant::now();
        if now < self.not_before {
            return Ok(());
        }
        let unscoped = shared.lock().partitions.unscoped();
        let wanted: BTreeSet<Arc<str>> = unscoped.into_iter().map(|(_, topic, _)| topic).collect();
        let before = self.withheld.len();
        self.withheld.retain(|topic, _| wanted.contains(topic));
        if self.withheld.len() < before {
            self.tell(shared);
        }
        let waits = |topic: &Arc<str>| self.withheld.get(topic).is_some_and(|(at, _)| now < *at);
        let topics: BTreeSet<_> = wanted.into_iter().filter(|topic| !waits(topic)).collect();
        if topics.is_empty() {
            return Ok(());
        }
        if self.cluster.is_none() {
            self.cluster = client.fetch_cluster_id(CLUSTER_TIMEOUT);
        }
        if self.cluster.is_none() {
            return Err(Missing::Later("the cluster has not told its id".into()));
        }
        let names: Vec<&str> = topics.iter().map(|topic| &**topic).collect();
        let pending = PendingTopicIds::send(client, &names, IDS_TIMEOUT);
        self.search = Search::Ids(topics, pending);
        Ok(())
    }

    /// The brokers have answered; what they told is compared with what is stored.
    fn ask_scopes(
        &mut self,
        topics: BTreeSet<Arc<str>>,
        ids: Result<TopicIds, TopicIdError>,
        known: &HashMap<Arc<str>, String>,
    ) {
        let Some(cluster) = self.cluster.clone() else { return };
        let mut questions = Vec::new();
        for topic in topics {
            let id = match &ids {
                Err(why) => Err(why.clone()),
                Ok(ids) => ids.get(&*topic).cloned().unwrap_or_else(|| {
                    Err(TopicIdError::NoAnswer("it is not in the answer".into()))
                }),
            };
            let asked = self.asked.entry(Arc::clone(&topic)).or_default();
            *asked = if id.is_ok() { 0 } else { asked.saturating_add(1) };
            let give_up = match &id {
                Err(TopicIdError::NoId(_) | TopicIdError::Forbidden(_)) => true,
                Err(TopicIdError::NotThere(_)) => false,
                Err(TopicIdError::NoAnswer(_)) | Ok(_) => *asked >= ASKED_MAX,
            };
            questions.push(Question { known: known.get(&topic).cloned(), topic, id, give_up });
        }
        let notes = Arc::clone(&self.notes);
        self.search = Search::Scopes(self.runtime.spawn(async move {
            let (notes, cluster) = (&*notes, &*cluster);
            let asking = questions.into_iter().map(async |question| {
                let scope = scope(notes, cluster, &question).await;
                (question.topic, scope)
            });
            stream::iter(asking).buffer_unordered(AT_ONCE).collect().await
        }));
    }

    /// Scopes made of ids are good as they are; those of epochs have marks to look at.
    fn hear_scopes(
        &mut self,
        shared: &Shared,
        scopes: Vec<ScopeOf>,
        known: &mut HashMap<Arc<str>, String>,
    ) -> Result<bool, Missing> {
        let unscoped = shared.lock().partitions.unscoped();
        let (mut guarded, mut any) = (Vec::new(), false);
        for (topic, found) in scopes {
            let Found { scope, id } = match found {
                Ok(found) => found,
                Err(Missing::Never(why)) => return Err(Missing::Never(why)),
                Err(Missing::Later(why)) => {
                    self.withhold(shared, &topic, why);
                    continue;
                }
            };
            if self.withheld.remove(&topic).is_some() {
                self.tell(shared);
            }
            if let Some(id) = &id
                && known.insert(Arc::clone(&topic), id.clone()).is_none()
            {
                shared.counters.count_topic_id();
            }
            let ours = unscoped.iter().filter(|(_, of, _)| *of == topic);
            for (epoch, topic, partition) in ours.cloned() {
                let scope = Arc::clone(&scope);
                if id.is_some() {
                    shared.lock().partitions.set_scope(epoch, scope, None);
                    any = true;
                } else {
                    guarded.push(Guarded { epoch, topic, scope, partition, end: 0 });
                }
            }
        }
        if !guarded.is_empty() {
            self.search = Search::Ends(guarded, Vec::new());
        }
        Ok(any)
    }

    /// Asks for ends of logs for as long as a turn may take.
    fn ask_ends<C: ClientContext>(
        &mut self,
        client: &Client<C>,
        shared: &Shared,
        mut left: Vec<Guarded>,
        mut known: Vec<Guarded>,
    ) {
        let began = Instant::now();
        while began.elapsed() < TURN
            && let Some(mut guarded) = left.pop()
        {
            let Guarded { topic, partition, .. } = &guarded;
            match client.fetch_watermarks(topic, *partition, END_TIMEOUT) {
                Ok((_, end)) => {
                    guarded.end = end;
                    known.push(guarded);
                }
                Err(error) => {
                    let why = format!("the end of {topic}/{partition}: {error}");
                    self.withhold(shared, topic, why);
                }
            }
        }
        if !left.is_empty() {
            self.search = Search::Ends(left, known);
        } else if !known.is_empty() {
            let notes = Arc::clone(&self.notes);
            self.search = Search::Marks(self.runtime.spawn(async move {
                let notes = &*notes;
                let checking = known.into_iter().map(async |guarded| {
                    let mark = check_mark(notes, &guarded).await;
                    (guarded, mark)
                });
                stream::iter(checking).buffer_unordered(AT_ONCE).collect().await
            }));
        }
    }

    fn hear_marks(
        &mut self,
        shared: &Shared,
        marks: Vec<(Guarded, Result<i64, Missing>)>,
    ) -> Result<bool, Missing> {
        let mut any = false;
        for (guarded, mark) in marks {
            match mark {
                Ok(mark) => {
                    let scope = Arc::clone(&guarded.scope);
                    shared.lock().partitions.set_scope(guarded.epoch, scope, Some(mark));
                    any = true;
                }
                Err(Missing::Later(why)) => self.withhold(shared, &guarded.topic, why),
                Err(never) => return Err(never),
            }
        }
        Ok(any)
    }

    /// A topic's partitions stay paused until it can be identified; the others go on.
    fn withhold(&mut self, shared: &Shared, topic: &Arc<str>, why: String) {
        let again = Instant::now() + RETRY;
        let told = self.withheld.insert(Arc::clone(topic), (again, why.clone()));
        if told.is_none_or(|(_, before)| before != why) {
            tracing::warn!(
                topic = &**topic,
                why,
                "the positions of a topic cannot be identified: its records wait; asking again"
            );
            self.tell(shared);
        }
    }

    fn tell(&self, shared: &Shared) {
        let withheld =
            self.withheld.iter().map(|(topic, (_, why))| (topic.to_string(), why.clone()));
        shared.lock().health.withheld(withheld.collect());
    }
}

impl Drop for Identity {
    fn drop(&mut self) {
        if let Some(marking) = &self.marking {
            marking.abort();
        }
        match &self.search {
            Search::Scopes(asked) => asked.abort(),
            Search::Marks(asked) => asked.abort(),
            Search::Idle | Search::Ids(..) | Search::Ends(..) => {}
        }
    }
}

/// What a task came to, once it has; a task that died is as if it had never been.
fn take_finished<T>(runtime: &Handle, slot: &mut Option<Answers<T>>) -> Option<Vec<T>> {
    let finished = slot.take_if(|task| task.is_finished())?;
    Some(runtime.block_on(finished).unwrap_or_default())
}

/// A topic whose scope is asked for.
struct Question {
    topic: Arc<str>,
    /// What the brokers said.
    id: Result<String, TopicIdError>,
    /// The id that it is known to have.
    known: Option<String>,
    /// No id is to be waited for.
    give_up: bool,
}

/// A topic's scope, by what the brokers said and what is stored.
async fn scope(notes: &dyn Notes, cluster: &str, question: &Question) -> Result<Found, Missing> {
    let Question { topic, id, known, give_up } = question;
    let key = topic_key(cluster, topic);
    let stored = within(notes.note(&key)).await?;
    let kind = match (stored, id) {
        (Some(kind), _) if kind != HAS_ID => kind,
        (stored, Ok(id)) => {
            // Another member may have been first, and could not read it.
            let kind = match stored {
                Some(kind) => kind,
                None => within(notes.note_once(&key, HAS_ID)).await?,
            };
            if kind == HAS_ID {
                if known.as_ref().is_some_and(|known| known != id) {
                    return Err(out_of_date(topic));
                }
                follow(notes, cluster, topic, id).await?;
                let scope = format!("{cluster}/{id}").into();
                return Ok(Found { scope, id: Some(id.clone()) });
            }
            kind
        }
        (stored, Err(why)) => {
            let words = why.words();
            if stored.is_some() || !*give_up {
                return Err(Missing::Later(format!("the id of topic {topic}: {words}")));
            }
            tracing::warn!(
                topic = &**topic,
                why = words,
                "the topic's id cannot be read: an epoch stands for it, and a mark guards it"
            );
            let fresh = format!("epoch-{}", uuid::Uuid::new_v4().simple());
            let kind = within(notes.note_once(&key, &fresh)).await?;
            if kind == HAS_ID {
                return Err(Missing::Later(format!("the id of topic {topic}: {words}")));
            }
            kind
        }
    };
    Ok(Found { scope: format!("{cluster}/{kind}").into(), id: None })
}

/// Stores which id a topic has, and that the one before is gone. Brokers learn of a new topic one
/// after the other: one that still tells the old id is not believed.
async fn follow(notes: &dyn Notes, cluster: &str, topic: &str, id: &str) -> Result<(), Missing> {
    let gone = |id: &str| bounded(format!("kafka-gone:{cluster}/{topic}/{id}"));
    if within(notes.note(&gone(id))).await?.is_some() {
        return Err(out_of_date(topic));
    }
    let key = bounded(format!("kafka-id:{cluster}/{topic}"));
    match within(notes.note_once(&key, id)).await? {
        same if same == id => Ok(()),
        before => {
            within(notes.set_note(&gone(&before), GONE)).await?;
            within(notes.set_note(&key, id)).await
        }
    }
}

fn out_of_date(topic: &str) -> Missing {
    Missing::Later(format!(
        "a broker tells an id of topic {topic} that belongs to a topic of that name that was deleted"
    ))
}

/// Compares the partition's end with the stored mark, and answers the mark.
async fn check_mark(notes: &dyn Notes, guarded: &Guarded) -> Result<i64, Missing> {
    let Guarded { topic, scope, partition, end, .. } = guarded;
    let key = mark_key(scope, *partition);
    let stored = within(notes.note(&key)).await?;
    let marked: i64 = stored.as_deref().and_then(|text| text.parse().ok()).unwrap_or(0);
    if *end < marked {
        return Err(Missing::Never(format!(
            "{topic}/{partition} ends at offset {end}, but offset {marked} was reached before: \
             the topic was deleted and made again, or truncated. Ids made of positions would \
             take its new records for old ones. Choose another `message_id`, or another \
             consumer id, or remove the note `{}`",
            topic_key(scope.split('/').next().unwrap_or(scope), topic)
        )));
    }
    if *end > marked {
        within(notes.set_note(&key, &end.to_string())).await?;
    }
    Ok(*end)
}

async fn within<T>(question: impl Future<Output = Result<T, StoreError>>) -> Result<T, Missing> {
    match tokio::time::timeout(NOTE_TIMEOUT, question).await {
        Ok(answer) => Ok(answer?),
        Err(_) => Err(Missing::Later("the database did not answer in time".into())),
    }
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
