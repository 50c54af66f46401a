//! The embedded broker: librdkafka's mock cluster, which speaks Kafka's protocol on loopback.
//!
//! It belongs to the producer that fills it, and ends with it. Its logs are in memory and
//! bounded: a partition silently drops its oldest records above 5 MiB, so that the demo's
//! largest number of messages is set to stay far below that.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::future_producer::DeliveryFuture;
use rdkafka::producer::{FutureProducer, FutureRecord, Producer};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use rdkafka::types::RDKafkaErrorCode;

/// The topic.
pub(super) const TOPIC: &str = "orders";
/// The consumer group.
pub(super) const GROUP: &str = "demo";
/// Partitions of the topic.
pub(super) const PARTITIONS: i32 = 8;

/// How long the cluster may take to answer; it answers within milliseconds.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);
/// Between two tries to hand a record to a producer whose queue is full.
const QUEUE_FULL_PAUSE: Duration = Duration::from_millis(2);

/// The cluster and its producer.
pub(super) struct Broker {
    producer: FutureProducer,
    /// Only asks for the group's offsets: never subscribes.
    observer: Arc<BaseConsumer>,
    address: String,
}

impl Broker {
    /// Starts a cluster of one broker with the topic.
    pub(super) fn start() -> anyhow::Result<Self> {
        let producer: FutureProducer = ClientConfig::new()
            .set("test.mock.num.brokers", "1")
            .set("enable.idempotence", "true")
            .set("linger.ms", "2")
            .create()
            .context("starting the embedded broker")?;
        let address = {
            let cluster = producer.client().mock_cluster().context("the broker did not start")?;
            cluster
                .create_topic(TOPIC, PARTITIONS, 1)
                .context("making the topic at the embedded broker")?;
            cluster.bootstrap_servers()
        };
        let observer = ClientConfig::new()
            .set("bootstrap.servers", &address)
            .set("group.id", GROUP)
            .set("enable.auto.commit", "false")
            .create()
            .context("connecting to the embedded broker")?;
        Ok(Self { producer, observer: Arc::new(observer), address })
    }

    /// `host:port`.
    pub(super) fn address(&self) -> &str {
        &self.address
    }

    /// Hands a record to the producer; records of one partition keep the order of calls.
    pub(super) async fn publish(
        &self,
        partition: i32,
        id: &str,
        body: &str,
    ) -> anyhow::Result<DeliveryFuture> {
        let headers = OwnedHeaders::new()
            .insert(Header { key: "message-id", value: Some(id) })
            .insert(Header { key: "content-type", value: Some("application/json") });
        let mut record =
            FutureRecord::<(), str>::to(TOPIC).partition(partition).payload(body).headers(headers);
        loop {
            match self.producer.send_result(record) {
                Ok(delivery) => return Ok(delivery),
                Err((error, back))
                    if error.rdkafka_error_code() == Some(RDKafkaErrorCode::QueueFull) =>
                {
                    record = back;
                    tokio::time::sleep(QUEUE_FULL_PAUSE).await;
                }
                Err((error, _)) => return Err(error).context("publishing"),
            }
        }
    }

    /// How many records the group has committed, over all partitions.
    pub(super) async fn committed(&self) -> anyhow::Result<u64> {
        let observer = Arc::clone(&self.observer);
        let offsets = tokio::task::spawn_blocking(move || {
            let mut wanted = TopicPartitionList::new();
            wanted.add_partition_range(TOPIC, 0, PARTITIONS - 1);
            observer.committed_offsets(wanted, ANSWER_WITHIN)
        })
        .await?
        .context("asking the embedded broker for the group's offsets")?;
        let committed = offsets.elements().into_iter().map(|partition| match partition.offset() {
            Offset::Offset(next) => u64::try_from(next).unwrap_or(0),
            _ => 0,
        });
        Ok(committed.sum())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_is_published_is_in_the_topic_and_nothing_is_committed_yet() {
        let broker = Broker::start().unwrap();
        let delivery = broker.publish(3, "order-000001", "{}").await.unwrap();
        let delivered = delivery.await.unwrap().map_err(|(error, _)| error).unwrap();
        assert_eq!((delivered.partition, delivered.offset), (3, 0));
        assert_eq!(broker.committed().await.unwrap(), 0);

        let mut position = TopicPartitionList::new();
        position.add_partition_offset(TOPIC, 3, Offset::Offset(1)).unwrap();
        let observer = &broker.observer;
        observer.commit(&position, rdkafka::consumer::CommitMode::Sync).unwrap();
        assert_eq!(broker.committed().await.unwrap(), 1);
    }
}
