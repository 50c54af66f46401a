//! What the tests share: topics, groups, taking with a deadline.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

use async_trait::async_trait;
use inboxd_contract::{Delivery, Notes, Room, Source, SourcePhase, StoreError};
use inboxd_kafka::{KafkaConfig, KafkaSource};
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use tokio::time::timeout;

use crate::produce::{Out, Producer};

/// How long a test waits for what must happen.
pub const PATIENCE: Duration = Duration::from_secs(60);
pub const CLOSE: Duration = Duration::from_secs(20);
/// Room for anything.
pub const WIDE: Room = Room { deliveries: 1_000, bytes: 64 << 20 };

/// Notes in memory.
#[derive(Default)]
pub struct Memory {
    notes: Mutex<BTreeMap<String, String>>,
    /// Keys that contain this cannot be asked for.
    pub refused: Mutex<Option<String>>,
    /// How long each answer takes.
    pub slow: Mutex<Duration>,
}

impl Memory {
    pub fn with(&self, change: impl FnOnce(&mut BTreeMap<String, String>)) {
        change(&mut self.notes.lock().expect("no panic"));
    }

    pub fn all(&self) -> BTreeMap<String, String> {
        self.notes.lock().expect("no panic").clone()
    }

    async fn ask(&self, key: &str) -> Result<(), StoreError> {
        let slow = *self.slow.lock().expect("no panic");
        if !slow.is_zero() {
            tokio::time::sleep(slow).await;
        }
        match &*self.refused.lock().expect("no panic") {
            Some(part) if key.contains(part) => Err(StoreError::transient(format!("not {key}"))),
            _ => Ok(()),
        }
    }
}

#[async_trait]
impl Notes for Memory {
    async fn note(&self, key: &str) -> Result<Option<String>, StoreError> {
        self.ask(key).await?;
        Ok(self.notes.lock().expect("no panic").get(key).cloned())
    }

    async fn note_once(&self, key: &str, value: &str) -> Result<String, StoreError> {
        self.ask(key).await?;
        let mut notes = self.notes.lock().expect("no panic");
        Ok(notes.entry(key.to_owned()).or_insert_with(|| value.to_owned()).clone())
    }

    async fn set_note(&self, key: &str, value: &str) -> Result<(), StoreError> {
        self.ask(key).await?;
        self.notes.lock().expect("no panic").insert(key.to_owned(), value.to_owned());
        Ok(())
    }
}

/// A topic and a group of its own on one cluster.
#[derive(Clone)]
pub struct Place {
    pub brokers: String,
    pub topic: String,
    pub group: String,
    pub producer: Producer,
}

impl Place {
    /// On the shared Kafka.
    pub async fn new(partitions: i32) -> Self {
        Self::on(&inboxd_conformance::servers::kafka_url(), partitions).await
    }

    /// On this cluster.
    pub async fn on(brokers: &str, partitions: i32) -> Self {
        let topic = inboxd_conformance::servers::unique("kafka");
        create_topic(brokers, &topic, partitions).await;
        Self {
            brokers: brokers.to_owned(),
            group: format!("g-{topic}"),
            topic,
            producer: Producer::new(brokers, &[]),
        }
    }

    /// What a source of this place is told.
    pub fn config(&self) -> KafkaConfig {
        let mut config = config(&self.brokers, &self.topic, &self.group);
        config.commit_interval = Duration::from_millis(100);
        config
    }

    /// One more member.
    pub fn open(&self) -> Box<KafkaSource> {
        start(self.config())
    }

    /// Produces plain records with these ids.
    pub async fn produce(&self, partition: i32, ids: &[impl AsRef<str>]) {
        let records: Vec<_> = ids.iter().map(|id| Out::new(partition, id.as_ref())).collect();
        self.producer.produce(&self.topic, &records).await;
    }

    /// The group's committed offset of a partition, with its metadata.
    pub async fn committed(&self, partition: i32) -> Option<(i64, String)> {
        let this = self.clone();
        blocking(move || {
            let consumer = this.plain_consumer();
            let mut list = TopicPartitionList::new();
            list.add_partition(&this.topic, partition);
            let committed = consumer.committed_offsets(list, PATIENCE).expect("an answer");
            let element = committed.elements().pop().expect("the partition");
            match element.offset() {
                Offset::Offset(offset) => Some((offset, element.metadata().to_owned())),
                _ => None,
            }
        })
        .await
    }

    /// Commits an offset as another member of the group would, with any metadata.
    pub async fn commit_elsewhere(&self, partition: i32, offset: i64, metadata: &str) {
        let (this, metadata) = (self.clone(), metadata.to_owned());
        blocking(move || {
            let mut list = TopicPartitionList::new();
            let mut element = list.add_partition(&this.topic, partition);
            element.set_offset(Offset::Offset(offset)).expect("an offset");
            element.set_metadata(metadata);
            let consumer = this.plain_consumer();
            consumer.commit(&list, rdkafka::consumer::CommitMode::Sync).expect("committed");
        })
        .await;
    }

    /// Waits for the committed offset to be `offset`.
    pub async fn wait_committed(&self, partition: i32, offset: i64) {
        inboxd_conformance::eventually(PATIENCE, async || {
            let committed = self.committed(partition).await.map(|(offset, _)| offset);
            inboxd_conformance::ensure(committed == Some(offset), format!("{committed:?}"))
        })
        .await;
    }

    fn plain_consumer(&self) -> BaseConsumer {
        ClientConfig::new()
            .set("bootstrap.servers", &self.brokers)
            .set("group.id", &self.group)
            .create()
            .expect("a consumer can be made")
    }
}

/// A configuration with the short times of tests.
pub fn config(brokers: &str, topic: &str, group: &str) -> KafkaConfig {
    let mut config = KafkaConfig::new(brokers, [topic], group);
    config.properties = properties(&[
        ("session.timeout.ms", "6000"),
        ("heartbeat.interval.ms", "500"),
        ("topic.metadata.refresh.interval.ms", "1000"),
        ("reconnect.backoff.max.ms", "500"),
    ]);
    config
}

pub fn properties(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

pub fn start(config: KafkaConfig) -> Box<KafkaSource> {
    Box::new(KafkaSource::start(config).expect("a valid configuration"))
}

pub fn admin(brokers: &str) -> AdminClient<DefaultClientContext> {
    ClientConfig::new().set("bootstrap.servers", brokers).create().expect("an admin client")
}

pub async fn create_topic(brokers: &str, topic: &str, partitions: i32) {
    let topic = NewTopic::new(topic, partitions, TopicReplication::Fixed(1));
    let admin = admin(brokers);
    let options = AdminOptions::new().operation_timeout(Some(PATIENCE));
    let created = admin.create_topics([&topic], &options).await.expect("an answer");
    created.into_iter().for_each(|topic| drop(topic.expect("the topic is created")));
    blocking(move || drop(admin)).await;
}

pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(work).await.expect("no panic")
}

/// The id of a delivery.
pub fn id(delivery: &Delivery) -> String {
    let bytes = delivery.envelope.header("message-id").expect("an id");
    String::from_utf8_lossy(bytes).into_owned()
}

pub fn ids(deliveries: &[Delivery]) -> Vec<String> {
    deliveries.iter().map(id).collect()
}

/// Exactly `count` deliveries.
pub async fn take(source: &mut KafkaSource, count: usize) -> Vec<Delivery> {
    let mut taken = Vec::new();
    while taken.len() < count {
        let room = Room { deliveries: count - taken.len(), ..WIDE };
        match timeout(PATIENCE, source.next_batch(room)).await {
            Ok(batch) => taken.extend(batch.expect("the source goes on")),
            Err(_) => {
                let status = source.status().borrow().clone();
                panic!("{:?} of {count} came; {status:?}", ids(&taken));
            }
        }
    }
    taken
}

/// Takes and acks.
pub async fn settle(source: &mut KafkaSource, count: usize) -> Vec<String> {
    let taken = take(source, count).await;
    let ids = ids(&taken);
    taken.into_iter().for_each(|delivery| delivery.acker.ack());
    ids
}

pub async fn close(source: Box<KafkaSource>) {
    source.close(CLOSE).await.expect("the broker answers");
}

/// Waits until the source is a member of its group.
pub async fn ready(source: &KafkaSource) {
    let mut status = source.status();
    let ready = timeout(PATIENCE, status.wait_for(|s| s.phase == SourcePhase::Ready)).await;
    if ready.is_err() {
        panic!("not ready: {:?}", source.status().borrow().clone());
    }
}

/// `prefix0..prefixN`.
pub fn numbered(prefix: &str, count: usize) -> Vec<String> {
    (0..count).map(|n| format!("{prefix}{n}")).collect()
}
