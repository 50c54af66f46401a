//! RabbitMQ, end to end: what happens to connections, queues, consumers and their order.

mod application;
mod order;
mod own_server;
mod queues;

use inboxd_conformance::net::Proxy;
use inboxd_conformance::{ensure, eventually};
use lapin::options::{QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Channel, Connection};
use url::Url;

use crate::support::{Broker, BrokerKind, PATIENCE, Sidecar};

/// The broker as the test sees the queue, past the sidecar.
struct Tap {
    queue: String,
    channel: Channel,
    connection: Connection,
}

impl Tap {
    async fn open(broker: &Broker) -> Self {
        let connection = broker.amqp().await;
        let channel = connection.create_channel().await.expect("a channel");
        Self { queue: broker.name.clone(), channel, connection }
    }

    /// Messages that no consumer holds, and consumers.
    async fn count(&self) -> (u32, u32) {
        let passive = QueueDeclareOptions { passive: true, ..Default::default() };
        let counted =
            self.channel.queue_declare(self.queue.as_str().into(), passive, FieldTable::default());
        let queue = counted.await.expect("the queue is there");
        (queue.message_count(), queue.consumer_count())
    }

    /// Waits for that count.
    async fn counts(&self, wanted: (u32, u32), sidecar: &Sidecar) {
        eventually(PATIENCE, async || {
            let count = self.count().await;
            ensure(count == wanted, format!("{count:?}, not {wanted:?}; log:\n{}", sidecar.log()))
        })
        .await;
    }

    async fn delete(&self) {
        let options = QueueDeleteOptions::default();
        self.channel.queue_delete(self.queue.as_str().into(), options).await.expect("deleted");
    }

    async fn close(self) {
        self.connection.close(0, "".into()).await.expect("closed");
    }
}

/// A queue that does not exist yet, and is then declared with these arguments.
async fn queue_with(kind: BrokerKind, arguments: &[(&str, AMQPValue)]) -> Broker {
    let broker = Broker::named(kind, &inboxd_conformance::servers::rabbitmq_url());
    let tap = Tap::open(&broker).await;
    let mut table = FieldTable::default();
    let quorum = kind == BrokerKind::RabbitQuorum;
    let queue_type = if quorum { "quorum" } else { "classic" };
    table.insert("x-queue-type".into(), text(queue_type));
    for (name, value) in arguments {
        table.insert((*name).into(), value.clone());
    }
    let options = QueueDeclareOptions { durable: true, ..Default::default() };
    tap.channel
        .queue_declare(broker.name.as_str().into(), options, table)
        .await
        .expect("a queue with arguments");
    tap.close().await;
    broker
}

fn text(value: &str) -> AMQPValue {
    AMQPValue::LongString(value.into())
}

/// A proxy before the broker, and the broker's address through it.
async fn proxied(broker: &Broker) -> (Proxy, String) {
    let mut url = Url::parse(broker.url()).expect("a URL");
    let host = url.host_str().expect("a host");
    let proxy = Proxy::start(format!("{host}:{}", url.port().unwrap_or(5672))).await;
    url.set_host(Some("127.0.0.1")).expect("a host");
    url.set_port(Some(proxy.port())).expect("a port");
    (proxy, url.into())
}

/// How often the source has begun to consume again.
async fn reconnects(sidecar: &Sidecar) -> u64 {
    sidecar.metric("inboxd_source_reconnects_total", &[]).await as u64
}

/// 1 while the source is in this phase.
async fn phase(sidecar: &Sidecar, phase: &str) -> u64 {
    sidecar.metric("inboxd_source_phase", &[&format!("phase=\"{phase}\"")]).await as u64
}

/// Waits until so many deliveries came to this outcome.
async fn outcomes(sidecar: &Sidecar, outcome: &str, wanted: u64) {
    eventually(PATIENCE, async || {
        let found = sidecar.outcomes(outcome).await;
        let log = sidecar.log();
        ensure(found == wanted, format!("{found} {outcome}, not {wanted}; log:\n{log}"))
    })
    .await;
}
