//! A publisher, a broker's address, and what the tests wait for.

use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt as _;
use inboxd_conformance::net::Proxy;
use inboxd_conformance::{ensure, eventually, servers};
use inboxd_contract::{Delivery, Room, Source, SourcePhase, SourceStatus};
use inboxd_rabbitmq::{QueueKind, RabbitMqConfig, RabbitMqSource};
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Confirmation, Connection, ConnectionProperties};
use tokio::sync::watch;
use tokio::time::timeout;

/// How long a test waits for what must happen.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// The deadline given to a close that is answered.
pub const CLOSE: Duration = Duration::from_secs(20);

/// The shared server's configuration, with a new queue's name.
pub fn shared() -> RabbitMqConfig {
    RabbitMqConfig::from_uri(&servers::rabbitmq_url(), servers::unique("q")).expect("a URI")
}

/// The same broker behind a proxy.
pub async fn behind_proxy(config: &RabbitMqConfig) -> (Proxy, RabbitMqConfig) {
    let (host, port) = &config.hosts[0];
    let proxy = Proxy::start(format!("{host}:{port}")).await;
    let mut config = config.clone();
    config.hosts = vec![("127.0.0.1".into(), proxy.port())];
    (proxy, config)
}

/// A connection past the source, with one confirming channel.
pub struct Publisher {
    pub channel: Channel,
    _connection: Connection,
}

impl Publisher {
    pub async fn connect(uri: &str) -> Self {
        let connection = Connection::connect(uri, ConnectionProperties::default());
        let connection = connection.await.expect("the broker answers");
        let channel = connection.create_channel().await.expect("a channel");
        channel.confirm_select(ConfirmSelectOptions::default()).await.expect("confirms");
        Self { channel, _connection: connection }
    }

    pub async fn shared() -> Self {
        Self::connect(&servers::rabbitmq_url()).await
    }

    /// Declares a durable queue that goes away by itself some time after the test.
    pub async fn declare(&self, queue: &str, kind: QueueKind) {
        self.declare_with(queue, kind, &[]).await;
    }

    pub async fn declare_with(
        &self,
        queue: &str,
        kind: QueueKind,
        arguments: &[(&str, AMQPValue)],
    ) {
        let mut table = FieldTable::default();
        table.insert("x-queue-type".into(), AMQPValue::LongString(kind.as_str().into()));
        table.insert("x-expires".into(), AMQPValue::LongInt(600_000));
        for (name, value) in arguments {
            table.insert((*name).into(), value.clone());
        }
        let options = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
        self.channel.queue_declare(queue.into(), options, table).await.expect("declared");
    }

    pub async fn publish_with(&self, queue: &str, body: &[u8], properties: BasicProperties) {
        let confirm = self
            .channel
            .basic_publish(
                "".into(),
                queue.into(),
                BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() },
                body,
                properties.with_delivery_mode(2),
            )
            .await
            .expect("published");
        let confirmed = timeout(PATIENCE, confirm).await.expect("in time").expect("confirmed");
        assert_eq!(confirmed, Confirmation::Ack(None), "routed");
    }

    /// Messages whose id and body are `ids`.
    pub async fn publish(&self, queue: &str, ids: &[&str]) {
        for id in ids {
            let properties = BasicProperties::default().with_message_id((*id).into());
            self.publish_with(queue, id.as_bytes(), properties).await;
        }
    }

    /// Messages ready in the queue and consumers of it.
    pub async fn count(&self, queue: &str) -> (u32, u32) {
        let passive = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
        let counted = self.channel.queue_declare(queue.into(), passive, FieldTable::default());
        let counted = counted.await.expect("the queue is there");
        (counted.message_count(), counted.consumer_count())
    }
}

/// Waits until so many messages are ready and so many consumers there.
pub async fn counts(publisher: &Publisher, queue: &str, expected: (u32, u32)) {
    eventually(PATIENCE, async || {
        let counted = publisher.count(queue).await;
        ensure(counted == expected, format!("{counted:?} instead of {expected:?}"))
    })
    .await;
}

/// Started, and not asked for deliveries yet.
pub fn start_unasked(config: &RabbitMqConfig) -> Box<dyn Source> {
    Box::new(RabbitMqSource::start(config.clone()).expect("a valid configuration"))
}

/// Started and asked for deliveries once, so that it consumes.
pub fn start(config: &RabbitMqConfig) -> Box<dyn Source> {
    let mut source = start_unasked(config);
    let asked = source.next_batch(Room { deliveries: 1, bytes: 1 }).now_or_never();
    assert!(asked.is_none(), "nothing can have come yet");
    source
}

pub fn id(delivery: &Delivery) -> String {
    let id = delivery.envelope.property_id.clone().unwrap_or(Bytes::from_static(b"(none)"));
    String::from_utf8_lossy(&id).into_owned()
}

pub fn ids(deliveries: &[Delivery]) -> Vec<String> {
    deliveries.iter().map(id).collect()
}

pub async fn take(source: &mut Box<dyn Source>, count: usize) -> Vec<Delivery> {
    let mut taken = Vec::new();
    while taken.len() < count {
        let room = Room { deliveries: count - taken.len(), bytes: 64 << 20 };
        match timeout(PATIENCE, source.next_batch(room)).await {
            Ok(batch) => taken.extend(batch.expect("a batch")),
            Err(_) => {
                panic!("{:?} came of {count}: {:?}", ids(&taken), source.status().borrow().clone())
            }
        }
    }
    taken
}

pub fn ack(deliveries: Vec<Delivery>) {
    deliveries.into_iter().for_each(|delivery| delivery.acker.ack());
}

/// Waits for a status and answers it.
pub async fn status(
    mut status: watch::Receiver<SourceStatus>,
    wanted: impl FnMut(&SourceStatus) -> bool,
) -> SourceStatus {
    let reached = timeout(PATIENCE, status.wait_for(wanted)).await;
    if let Ok(Ok(reached)) = reached.as_ref().map(|answer| answer.as_ref()) {
        return (**reached).clone();
    }
    drop(reached);
    panic!("the status stayed {:?}", status.borrow().clone());
}

pub async fn phase(source: &dyn Source, wanted: SourcePhase) -> SourceStatus {
    status(source.status(), |status| status.phase == wanted).await
}

pub async fn close(source: Box<dyn Source>) {
    timeout(PATIENCE, source.close(CLOSE)).await.expect("in time").expect("answered");
}
