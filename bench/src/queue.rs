//! A queue of RabbitMQ of this run's own.

use anyhow::Context as _;
use inboxd_conformance::servers;
use lapin::options::{
    BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions, QueueDeleteOptions,
};
use lapin::types::FieldTable;
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties};

/// Messages between two waits for the broker's confirmations.
const CONFIRM_EVERY: u64 = 1_000;

pub(crate) struct Queue {
    pub(crate) name: String,
    connection: Connection,
    channel: Channel,
}

impl Queue {
    /// Declares it: durable, classic.
    pub(crate) async fn declare() -> anyhow::Result<Self> {
        let connection = connect().await?;
        let channel = connection.create_channel().await?;
        let name = servers::unique("bench");
        let options = QueueDeclareOptions { durable: true, ..Default::default() };
        channel.queue_declare(name.as_str().into(), options, FieldTable::default()).await?;
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        Ok(Self { name, connection, channel })
    }

    /// The flag `--source` for it.
    pub(crate) fn source(&self, prefetch: u16) -> String {
        let url = servers::rabbitmq_url();
        let separator = if url.contains('?') { '&' } else { '?' };
        format!("{url}{separator}queue={}&prefetch={prefetch}", self.name)
    }

    /// Publishes persistent messages with ids of their own.
    pub(crate) async fn publish(&self, messages: u64, body: &[u8]) -> anyhow::Result<()> {
        for sent in 1..=messages {
            self.send(body).await?;
            if sent % CONFIRM_EVERY == 0 {
                self.channel.wait_for_confirms().await?;
            }
        }
        self.confirmed().await
    }

    /// Publishes one persistent message with an id of its own; not confirmed yet.
    pub(crate) async fn send(&self, body: &[u8]) -> anyhow::Result<()> {
        let id = uuid::Uuid::new_v4().to_string();
        let properties =
            BasicProperties::default().with_message_id(id.as_str().into()).with_delivery_mode(2);
        let options = BasicPublishOptions::default();
        self.channel
            .basic_publish("".into(), self.name.as_str().into(), options, body, properties)
            .await?;
        Ok(())
    }

    /// Waits until the broker has confirmed what was sent.
    pub(crate) async fn confirmed(&self) -> anyhow::Result<()> {
        self.channel.wait_for_confirms().await?;
        Ok(())
    }

    /// Deletes it.
    pub(crate) async fn delete(self) -> anyhow::Result<()> {
        self.channel.queue_delete(self.name.as_str().into(), QueueDeleteOptions::default()).await?;
        self.connection.close(0, "".into()).await?;
        Ok(())
    }
}

/// A connection to the test server.
pub(crate) async fn connect() -> anyhow::Result<Connection> {
    let url = servers::rabbitmq_url();
    Connection::connect(&url, ConnectionProperties::default()).await.context("RabbitMQ")
}
