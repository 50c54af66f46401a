//! A queue or a topic of the test's own, on the shared server or one of its own.

use std::time::Duration;

use bytes::Bytes;
use inboxd_conformance::servers;
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Connection, ConnectionProperties};
use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{BaseRecord, Producer as _, ThreadedProducer};

/// Kafka's own default is a little less than 1 MiB.
const KAFKA_MESSAGE_BYTES_MAX: &str = "33554432";

/// Which broker, and which kind of queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BrokerKind {
    RabbitClassic,
    RabbitQuorum,
    Kafka,
}

/// What is published.
#[derive(Debug, Clone, Default)]
pub struct Message {
    /// AMQP's message-id, or the header `message-id` on Kafka; `None`: neither.
    pub id: Option<String>,
    /// The record's key, or the header `key` on RabbitMQ.
    pub key: Option<String>,
    /// Kafka: the partition, instead of the one that the key chooses.
    pub partition: Option<i32>,
    pub body: Bytes,
    pub headers: Vec<(String, Bytes)>,
    /// Names of headers that are null: void on AMQP.
    pub null_headers: Vec<String>,
    /// AMQP's property, or the header `content-type` on Kafka.
    pub content_type: Option<String>,
    /// AMQP's property, or the header `content-encoding` on Kafka.
    pub content_encoding: Option<String>,
}

impl Message {
    /// With an id and a body derived from it, so that the same id has the same body.
    pub fn id(id: impl Into<String>) -> Self {
        let id = id.into();
        Self { body: format!("body of {id}").into(), id: Some(id), ..Self::default() }
    }

    /// Without an id.
    pub fn bare(body: impl Into<Bytes>) -> Self {
        Self { body: body.into(), ..Self::default() }
    }

    /// With an ordering key.
    pub fn key(mut self, key: impl Into<String>) -> Self {
        self.key = Some(key.into());
        self
    }

    /// Into this partition, where there are any.
    pub fn partition(mut self, partition: i32) -> Self {
        self.partition = Some(partition);
        self
    }

    /// With another body.
    pub fn body(mut self, body: impl Into<Bytes>) -> Self {
        self.body = body.into();
        self
    }

    /// With a header more: text on AMQP, whatever its bytes are.
    pub fn header(mut self, name: &str, value: impl AsRef<[u8]>) -> Self {
        self.headers.push((name.to_owned(), Bytes::copy_from_slice(value.as_ref())));
        self
    }

    /// With a header that is null.
    pub fn null_header(mut self, name: &str) -> Self {
        self.null_headers.push(name.to_owned());
        self
    }

    /// With a content type.
    pub fn content_type(mut self, content_type: &str) -> Self {
        self.content_type = Some(content_type.to_owned());
        self
    }
}

/// A queue or topic with a unique name.
pub struct Broker {
    pub kind: BrokerKind,
    pub name: String,
    /// Its name in the configuration.
    pub label: &'static str,
    /// Further keys of the `source` table, such as `prefetch = 5`.
    pub source_keys: String,
    url: String,
}

impl Broker {
    /// A fresh queue, or a fresh topic of four partitions, on the shared server.
    pub async fn new(kind: BrokerKind) -> Self {
        let url = match kind {
            BrokerKind::Kafka => servers::kafka_url(),
            _ => servers::rabbitmq_url(),
        };
        Self::at(kind, &url).await
    }

    /// The same on this server.
    pub async fn at(kind: BrokerKind, url: &str) -> Self {
        let broker = Self::named(kind, url);
        match kind {
            BrokerKind::Kafka => broker.create_topic(4).await,
            _ => broker.declare().await,
        }
        broker
    }

    /// A name that does not exist yet; see [`Broker::create_topic`] and [`Broker::declare`].
    pub fn named(kind: BrokerKind, url: &str) -> Self {
        Self {
            kind,
            name: servers::unique("orders"),
            label: "main",
            source_keys: String::new(),
            url: url.to_owned(),
        }
    }

    /// The same with further keys of the `source` table.
    pub fn with_source_keys(mut self, keys: &str) -> Self {
        self.source_keys = keys.to_owned();
        self
    }

    /// Another queue or topic on the same server, under the same name in the configuration.
    pub async fn sibling(&self) -> Self {
        Self { label: self.label, ..Self::at(self.kind, &self.url).await }
    }

    /// The server's address.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The `[broker.LABEL]` table; the label is `main` unless it was changed.
    pub fn config(&self) -> String {
        self.config_with(&self.url)
    }

    /// The same with another address, such as a proxy's.
    pub fn config_with(&self, url: &str) -> String {
        let label = self.label;
        match self.kind {
            BrokerKind::Kafka => format!(
                "[broker.{label}]\nkind = \"kafka\"\nurl = \"{url}\"\n[broker.{label}.properties]\n\
                 \"session.timeout.ms\" = \"6000\"\n\"heartbeat.interval.ms\" = \"500\"\n\
                 \"fetch.wait.max.ms\" = \"50\"\n\"max.poll.interval.ms\" = \"10000\"\n"
            ),
            _ => format!("[broker.{label}]\nkind = \"rabbitmq\"\nurl = \"{url}\"\n"),
        }
    }

    /// The inline table of a subscription's `source`.
    pub fn source(&self, group: &str) -> String {
        let mut keys = match self.kind {
            BrokerKind::Kafka => format!("topics = [\"{}\"], group = \"{group}\"", self.name),
            _ => format!("queue = \"{}\"", self.name),
        };
        if !self.source_keys.is_empty() {
            keys = format!("{keys}, {}", self.source_keys);
        }
        format!("{{ broker = \"{}\", {keys} }}", self.label)
    }

    /// Makes the topic.
    pub async fn create_topic(&self, partitions: i32) {
        let admin: AdminClient<_> = self.kafka().create().expect("an admin client");
        let topic = NewTopic::new(&self.name, partitions, TopicReplication::Fixed(1))
            .set("max.message.bytes", KAFKA_MESSAGE_BYTES_MAX);
        for result in admin.create_topics([&topic], &AdminOptions::new()).await.expect("Kafka") {
            result.expect("the topic is made");
        }
    }

    /// Deletes the topic.
    pub async fn delete_topic(&self) {
        let admin: AdminClient<_> = self.kafka().create().expect("an admin client");
        let topics = [self.name.as_str()];
        for result in admin.delete_topics(&topics, &AdminOptions::new()).await.expect("Kafka") {
            result.expect("the topic is deleted");
        }
    }

    /// Declares the queue.
    pub async fn declare(&self) {
        let connection = self.amqp().await;
        let channel = connection.create_channel().await.expect("a channel");
        let mut arguments = FieldTable::default();
        if self.kind == BrokerKind::RabbitQuorum {
            arguments.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
        }
        let options = QueueDeclareOptions { durable: true, ..Default::default() };
        channel
            .queue_declare(self.name.as_str().into(), options, arguments)
            .await
            .expect("a queue");
        connection.close(0, "".into()).await.expect("closed");
    }

    /// Publishes in this order and waits until the broker has confirmed all.
    pub async fn publish(&self, messages: impl IntoIterator<Item = Message>) {
        match self.kind {
            BrokerKind::Kafka => {
                let messages: Vec<_> = messages.into_iter().collect();
                let (name, config) = (self.name.clone(), self.kafka());
                tokio::task::spawn_blocking(move || produce(&name, &config, messages))
                    .await
                    .expect("published");
            }
            _ => self.publish_amqp(messages).await,
        }
    }

    async fn publish_amqp(&self, messages: impl IntoIterator<Item = Message>) {
        let connection = self.amqp().await;
        let channel = connection.create_channel().await.expect("a channel");
        channel.confirm_select(ConfirmSelectOptions::default()).await.expect("confirms");
        for message in messages {
            let mut headers = FieldTable::default();
            for (name, value) in &message.headers {
                headers.insert(name.as_str().into(), AMQPValue::LongString(value.to_vec().into()));
            }
            for name in &message.null_headers {
                headers.insert(name.as_str().into(), AMQPValue::Void);
            }
            if let Some(key) = &message.key {
                headers.insert("key".into(), AMQPValue::LongString(key.as_str().into()));
            }
            let mut properties =
                BasicProperties::default().with_headers(headers).with_delivery_mode(2);
            if let Some(id) = &message.id {
                properties = properties.with_message_id(id.as_str().into());
            }
            if let Some(content_type) = &message.content_type {
                properties = properties.with_content_type(content_type.as_str().into());
            }
            if let Some(content_encoding) = &message.content_encoding {
                properties = properties.with_content_encoding(content_encoding.as_str().into());
            }
            channel
                .basic_publish(
                    "".into(),
                    self.name.as_str().into(),
                    BasicPublishOptions::default(),
                    &message.body,
                    properties,
                )
                .await
                .expect("published");
        }
        channel.wait_for_confirms().await.expect("confirmed");
        connection.close(0, "".into()).await.expect("closed");
    }

    /// Messages that are not settled. On RabbitMQ those in the queue that no consumer holds
    /// (all, once the consumer is gone); on Kafka those above the group's committed offsets.
    pub async fn left(&self, group: &str) -> u64 {
        match self.kind {
            BrokerKind::Kafka => {
                let (name, mut config) = (self.name.clone(), self.kafka());
                config.set("group.id", group);
                tokio::task::spawn_blocking(move || lag(&name, &config)).await.expect("lag")
            }
            _ => {
                let connection = self.amqp().await;
                let channel = connection.create_channel().await.expect("a channel");
                let options = QueueDeclareOptions { passive: true, ..Default::default() };
                let queue = channel
                    .queue_declare(self.name.as_str().into(), options, FieldTable::default())
                    .await
                    .expect("the queue exists");
                connection.close(0, "".into()).await.expect("closed");
                queue.message_count().into()
            }
        }
    }

    /// A connection of the test's own to RabbitMQ.
    pub async fn amqp(&self) -> Connection {
        Connection::connect(&self.url, ConnectionProperties::default()).await.expect("RabbitMQ")
    }

    /// A client configuration for Kafka.
    pub fn kafka(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", &self.url);
        config.set("message.max.bytes", KAFKA_MESSAGE_BYTES_MAX);
        config
    }
}

fn produce(topic: &str, config: &ClientConfig, messages: Vec<Message>) {
    let producer: ThreadedProducer<_> = config.create().expect("a producer");
    for message in messages {
        let mut headers = OwnedHeaders::new();
        if let Some(id) = &message.id {
            headers = headers.insert(Header { key: "message-id", value: Some(id) });
        }
        for (name, value) in &message.headers {
            headers = headers.insert(Header { key: name, value: Some(&value[..]) });
        }
        for name in &message.null_headers {
            headers = headers.insert(Header { key: name, value: None::<&[u8]> });
        }
        for (key, value) in [
            ("content-type", &message.content_type),
            ("content-encoding", &message.content_encoding),
        ] {
            if let Some(value) = value {
                headers = headers.insert(Header { key, value: Some(value) });
            }
        }
        let mut record: BaseRecord<'_, str, [u8]> =
            BaseRecord::to(topic).payload(&message.body[..]).headers(headers);
        if let Some(key) = &message.key {
            record = record.key(key.as_str());
        }
        if let Some(partition) = message.partition {
            record = record.partition(partition);
        }
        while let Err((error, again)) = producer.send(record) {
            assert!(error.to_string().contains("Queue full"), "{error}");
            std::thread::sleep(Duration::from_millis(5));
            record = again;
        }
    }
    producer.flush(Duration::from_secs(60)).expect("all delivered");
}

fn lag(topic: &str, config: &ClientConfig) -> u64 {
    let patience = Duration::from_secs(20);
    let consumer: BaseConsumer = config.create().expect("a consumer");
    let metadata = consumer.fetch_metadata(Some(topic), patience).expect("metadata");
    let mut list = rdkafka::TopicPartitionList::new();
    for partition in metadata.topics()[0].partitions() {
        list.add_partition(topic, partition.id());
    }
    let committed = consumer.committed_offsets(list, patience).expect("committed offsets");
    let mut left = 0;
    for element in committed.elements() {
        let (low, high) =
            consumer.fetch_watermarks(topic, element.partition(), patience).expect("watermarks");
        let from = element.offset().to_raw().filter(|offset| *offset >= 0).unwrap_or(low);
        left += u64::try_from(high - from).unwrap_or(0);
    }
    left
}
