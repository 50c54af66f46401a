//! The suite that every source passes, on classic and quorum queues and in order.

use async_trait::async_trait;
use inboxd_conformance::net::Proxy;
use inboxd_conformance::source::{Abilities, SourceHarness, SourcePlace, TestMessage, run};
use inboxd_contract::Source;
use inboxd_rabbitmq::{QueueKind, RabbitMqConfig};
use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable};

use crate::support::{Publisher, behind_proxy, shared, start};

struct RabbitMq {
    adapter: &'static str,
    kind: QueueKind,
    ordered: bool,
}

struct Place {
    publisher: Publisher,
    proxy: Proxy,
    config: RabbitMqConfig,
}

#[async_trait]
impl SourceHarness for RabbitMq {
    fn adapter(&self) -> &'static str {
        self.adapter
    }

    fn abilities(&self) -> Abilities {
        Abilities {
            streams_max: 1,
            tombstones: false,
            keys: false,
            repeated_headers: false,
            null_header_values: true,
            binary_header_names: false,
            release_returns_here: true,
            // An ordered release opens a new channel, and acks of that moment are lost with the old.
            settles_singly: !self.ordered,
            loss_fences: true,
            competing: !self.ordered,
            rebalances: false,
        }
    }

    async fn fresh(&self, _: usize) -> Box<dyn SourcePlace> {
        let publisher = Publisher::shared().await;
        let (proxy, mut config) = behind_proxy(&shared()).await;
        publisher.declare(&config.queue, self.kind).await;
        config.ordered = self.ordered;
        config.prefetch = 20;
        Box::new(Place { publisher, proxy, config })
    }
}

#[async_trait]
impl SourcePlace for Place {
    async fn publish(&self, _: usize, messages: &[TestMessage]) {
        for message in messages {
            let mut headers = FieldTable::default();
            for (name, value) in &message.headers {
                let name = std::str::from_utf8(name).expect("names are text here");
                let value = match value {
                    Some(value) => AMQPValue::LongString(value.to_vec().into()),
                    None => AMQPValue::Void,
                };
                headers.insert(name.into(), value);
            }
            let properties = BasicProperties::default()
                .with_message_id(message.id.as_str().into())
                .with_headers(headers);
            let body = message.body.as_deref().expect("no tombstones here");
            self.publisher.publish_with(&self.config.queue, body, properties).await;
        }
    }

    async fn open(&self) -> Box<dyn Source> {
        start(&self.config)
    }

    async fn sever(&self) {
        self.proxy.sever();
    }

    async fn hang(&self) {
        self.proxy.black_hole();
    }

    async fn set_reachable(&self, reachable: bool) {
        match reachable {
            true => self.proxy.heal(),
            false => self.proxy.cut(),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_classic_queue_conforms() {
    run(RabbitMq { adapter: "rabbitmq-classic", kind: QueueKind::Classic, ordered: false }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_quorum_queue_conforms() {
    run(RabbitMq { adapter: "rabbitmq-quorum", kind: QueueKind::Quorum, ordered: false }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ordered_classic_queue_conforms() {
    run(RabbitMq { adapter: "rabbitmq-ordered", kind: QueueKind::Classic, ordered: true }).await;
}
