//! A topic of Kafka of this run's own.

use std::time::Duration;

use anyhow::Context as _;
use inboxd_conformance::servers;
use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{BaseRecord, Producer as _, ThreadedProducer};

const PARTITIONS: i32 = 4;

pub(crate) struct Topic {
    pub(crate) name: String,
}

impl Topic {
    /// Makes it.
    pub(crate) async fn create() -> anyhow::Result<Self> {
        let name = servers::unique("bench");
        let admin: AdminClient<_> = client().create()?;
        let topic = NewTopic::new(&name, PARTITIONS, TopicReplication::Fixed(1));
        for result in admin.create_topics([&topic], &AdminOptions::new()).await.context("Kafka")? {
            result.map_err(|(topic, error)| anyhow::anyhow!("{topic}: {error}"))?;
        }
        Ok(Self { name })
    }

    /// The flag `--source` for it.
    pub(crate) fn source(&self, group: &str) -> String {
        format!("kafka://{}/{}?group={group}", servers::kafka_url(), self.name)
    }

    /// Produces records with ids of their own.
    pub(crate) async fn produce(&self, records: u64, body: &'static [u8]) -> anyhow::Result<()> {
        let name = self.name.clone();
        tokio::task::spawn_blocking(move || produce(&name, records, body)).await?
    }

    /// Deletes it.
    pub(crate) async fn delete(self) -> anyhow::Result<()> {
        let admin: AdminClient<_> = client().create()?;
        admin.delete_topics(&[&self.name], &AdminOptions::new()).await?;
        Ok(())
    }
}

/// What every client of the test server is made of.
pub(crate) fn client() -> ClientConfig {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", servers::kafka_url());
    config
}

fn produce(topic: &str, records: u64, body: &[u8]) -> anyhow::Result<()> {
    let producer: ThreadedProducer<_> = client().create()?;
    for number in 0..records {
        let id = uuid::Uuid::new_v4().to_string();
        let headers = OwnedHeaders::new().insert(Header { key: "message-id", value: Some(&id) });
        let partition = i32::try_from(number % PARTITIONS as u64)?;
        let mut record: BaseRecord<'_, str, [u8]> =
            BaseRecord::to(topic).payload(body).headers(headers).partition(partition);
        while let Err((error, again)) = producer.send(record) {
            if error.rdkafka_error_code() != Some(rdkafka::types::RDKafkaErrorCode::QueueFull) {
                return Err(error.into());
            }
            std::thread::sleep(Duration::from_millis(5));
            record = again;
        }
    }
    producer.flush(Duration::from_secs(60))?;
    Ok(())
}
