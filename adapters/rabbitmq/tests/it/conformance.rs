//! The suite that every source passes, on classic and quorum queues and in order.

use async_trait::async_trait;
use inboxd_conformance::net::Proxy;
use inboxd_conformance::source::{Abilities, SourceHarness, SourcePlace, TestMessage, run};
use inboxd_contract::Source;
use inboxd_rabbitmq::{QueueKind, RabbitMqConfig};
use tokio::sync::Mutex;

use crate::raw::{HEADERS, MESSAGE_ID, RawPublisher, long, short};
use crate::support::{Publisher, behind_proxy, shared, start};

struct RabbitMq {
    adapter: &'static str,
    kind: QueueKind,
    ordered: bool,
}

struct Place {
    publisher: Mutex<RawPublisher>,
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
            repeated_headers: true,
            null_header_values: true,
            binary_header_names: true,
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
        let direct = shared();
        let (proxy, mut config) = behind_proxy(&direct).await;
        publisher.declare(&config.queue, self.kind).await;
        config.ordered = self.ordered;
        config.prefetch = 20;
        let publisher = Mutex::new(RawPublisher::connect(&direct).await);
        Box::new(Place { publisher, proxy, config })
    }
}

#[async_trait]
impl SourcePlace for Place {
    async fn publish(&self, _: usize, messages: &[TestMessage]) {
        let mut publisher = self.publisher.lock().await;
        for message in messages {
            let mut table = Vec::new();
            for (name, value) in &message.headers {
                table.extend(short(name));
                match value {
                    Some(value) => table.extend([b"S".to_vec(), long(value)].concat()),
                    None => table.push(b'V'),
                }
            }
            let properties = [long(&table), short(message.id.as_bytes())].concat();
            let body = message.body.as_deref().expect("no tombstones here");
            let queue = (&b""[..], self.config.queue.as_bytes());
            publisher.publish(queue, HEADERS | MESSAGE_ID, &properties, body).await;
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
