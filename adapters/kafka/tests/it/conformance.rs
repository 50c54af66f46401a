//! The suite that every source passes, on real Kafka and on librdkafka's mock cluster.

use async_trait::async_trait;
use bytes::Bytes;
use inboxd_conformance::source::{Abilities, SourceHarness, SourcePlace, TestMessage, run};
use inboxd_contract::Source;

use crate::front::FrontedBroker;
use crate::mock::Mock;
use crate::produce::{Out, Producer};
use crate::support::{config, create_topic, start};

struct KafkaHarness {
    adapter: &'static str,
    brokers: String,
    producer: Producer,
    mock: Option<Mock>,
}

struct KafkaPlace {
    front: FrontedBroker,
    producer: Producer,
    topic: String,
    group: String,
}

#[async_trait]
impl SourceHarness for KafkaHarness {
    fn adapter(&self) -> &'static str {
        self.adapter
    }

    fn abilities(&self) -> Abilities {
        Abilities {
            streams_max: 8,
            tombstones: true,
            keys: true,
            repeated_headers: true,
            null_header_values: true,
            binary_header_names: true,
            release_returns_here: true,
            settles_singly: false,
            loss_fences: false,
            competing: false,
            rebalances: true,
        }
    }

    fn concurrency(&self) -> usize {
        8
    }

    async fn fresh(&self, streams: usize) -> Box<dyn SourcePlace> {
        let topic = inboxd_conformance::servers::unique("suite");
        let partitions = i32::try_from(streams).expect("few");
        match &self.mock {
            None => create_topic(&self.brokers, &topic, partitions).await,
            Some(mock) => mock.create_topic(&topic, partitions).await,
        }
        Box::new(KafkaPlace {
            front: FrontedBroker::start(&self.brokers).await,
            producer: self.producer.clone(),
            group: format!("g-{topic}"),
            topic,
        })
    }
}

#[async_trait]
impl SourcePlace for KafkaPlace {
    async fn publish(&self, stream: usize, messages: &[TestMessage]) {
        let records: Vec<_> = messages
            .iter()
            .map(|message| {
                let id = Bytes::copy_from_slice(message.id.as_bytes());
                let mut headers = vec![(Bytes::from_static(b"message-id"), Some(id))];
                headers.extend(message.headers.iter().cloned());
                Out {
                    partition: i32::try_from(stream).expect("few"),
                    key: message.key.clone(),
                    headers,
                    body: message.body.clone(),
                }
            })
            .collect();
        self.producer.produce(&self.topic, &records).await;
    }

    async fn open(&self) -> Box<dyn Source> {
        let mut config = config(&self.front.address(), &self.topic, &self.group);
        // The mock cluster's joins take whole seconds; librdkafka begins one anew that a
        // refresh of the metadata falls into, for ever if both keep step.
        config.properties.remove("topic.metadata.refresh.interval.ms");
        start(config)
    }

    async fn sever(&self) {
        self.front.proxy.sever();
    }

    async fn hang(&self) {
        self.front.proxy.black_hole();
    }

    async fn set_reachable(&self, reachable: bool) {
        match reachable {
            true => self.front.proxy.heal(),
            false => self.front.proxy.cut(),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn passes_the_suite_on_kafka() {
    let brokers = inboxd_conformance::servers::kafka_url();
    let producer = Producer::new(&brokers, &[]);
    run(KafkaHarness { adapter: "kafka", brokers, producer, mock: None }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn passes_the_suite_on_the_mock_cluster() {
    let mock = Mock::start();
    let brokers = mock.brokers.clone();
    let producer = Producer::new(&brokers, &[]);
    run(KafkaHarness { adapter: "kafka-mock", brokers, producer, mock: Some(mock) }).await;
}
