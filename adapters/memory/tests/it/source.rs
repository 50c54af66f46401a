use std::time::Duration;

use async_trait::async_trait;
use inboxd_conformance::source::{Abilities, SourceHarness, SourcePlace, TestMessage, run};
use inboxd_contract::{Envelope, Header, Origin, Room, Source};
use inboxd_memory::{MemoryBroker, MemoryBrokerOptions, MemoryKind};
use tokio::time::Instant;

struct Memory(MemoryKind);

struct Place(MemoryBroker);

fn envelope(message: &TestMessage) -> Envelope {
    let origin = Origin::Memory { stream: "".into(), position: 0 };
    let mut envelope = Envelope::new(origin, message.body.clone());
    envelope.headers.push(Header::new("message-id", message.id.clone()));
    let headers = message.headers.iter();
    envelope
        .headers
        .extend(headers.map(|(name, value)| Header { name: name.clone(), value: value.clone() }));
    envelope.key = message.key.clone();
    envelope.fill_from_headers();
    envelope
}

#[async_trait]
impl SourceHarness for Memory {
    fn adapter(&self) -> &'static str {
        match self.0 {
            MemoryKind::Queue => "memory-queue",
            MemoryKind::Log => "memory-log",
        }
    }

    fn abilities(&self) -> Abilities {
        let queue = self.0 == MemoryKind::Queue;
        Abilities {
            streams_max: if queue { 1 } else { 8 },
            tombstones: true,
            keys: true,
            repeated_headers: true,
            null_header_values: true,
            binary_header_names: true,
            release_returns_here: true,
            settles_singly: queue,
            loss_fences: queue,
            competing: queue,
            rebalances: !queue,
        }
    }

    async fn fresh(&self, streams: usize) -> Box<dyn SourcePlace> {
        let options = match self.0 {
            MemoryKind::Queue => MemoryBrokerOptions::queue("memory"),
            MemoryKind::Log => MemoryBrokerOptions::log("memory", streams),
        };
        Box::new(Place(MemoryBroker::new(options)))
    }
}

#[async_trait]
impl SourcePlace for Place {
    async fn publish(&self, stream: usize, messages: &[TestMessage]) {
        for message in messages {
            self.0.publish(stream, envelope(message));
        }
    }

    async fn open(&self) -> Box<dyn Source> {
        Box::new(self.0.source())
    }

    async fn sever(&self) {
        self.0.sever();
    }

    async fn hang(&self) {
        self.0.set_hanging(true);
    }

    async fn set_reachable(&self, reachable: bool) {
        self.0.set_reachable(reachable);
    }
}

#[tokio::test(start_paused = true)]
async fn a_queue_in_memory_conforms() {
    run(Memory(MemoryKind::Queue)).await;
}

#[tokio::test(start_paused = true)]
async fn a_log_in_memory_conforms() {
    run(Memory(MemoryKind::Log)).await;
}

const ROOM: Room = Room { deliveries: 10, bytes: 1 << 20 };

fn message(id: &str) -> Envelope {
    envelope(&TestMessage::new(id))
}

/// Acks made while the broker hangs are on the wire: a cut loses them.
#[tokio::test(start_paused = true)]
async fn acks_on_the_wire_are_lost_with_the_connection() {
    let broker = MemoryBroker::new(MemoryBrokerOptions::queue("q"));
    broker.publish(0, message("m"));
    let mut source = broker.source();
    let delivery = source.next_batch(ROOM).await.expect("a batch").remove(0);
    broker.set_hanging(true);
    delivery.acker.ack();
    assert_eq!(broker.unsettled(), 1);
    broker.sever();
    broker.set_hanging(false);
    let again = source.next_batch(ROOM).await.expect("a batch");
    assert_eq!(again.len(), 1);
    again.into_iter().for_each(|delivery| delivery.acker.ack());
    assert_eq!((broker.unsettled(), broker.held()), (0, 0));
}

/// A drain that takes too long ends with the fence lost, and what is unsettled comes again.
#[tokio::test(start_paused = true)]
async fn a_drain_has_an_end() {
    let broker = MemoryBroker::new(MemoryBrokerOptions::log("t", 1));
    broker.publish(0, message("m0"));
    broker.publish(0, message("m1"));
    let mut source = broker.source();
    let held = source.next_batch(ROOM).await.expect("a batch");
    let began = Instant::now();
    broker.revoke(0);
    held[0].fence.closed().await;
    assert!(!held[0].fence.is_lost());
    held[0].fence.lost().await;
    assert!(began.elapsed() >= Duration::from_secs(10), "it may drain until then");
    held.into_iter().for_each(|delivery| delivery.acker.ack());
    assert_eq!(broker.unsettled(), 2, "acks after the fence go nowhere");
    let again = source.next_batch(ROOM).await.expect("a batch");
    assert_eq!(again.len(), 2);
}

/// An expelled owner's acks above a hole are not committed.
#[tokio::test(start_paused = true)]
async fn what_was_acked_above_a_hole_comes_again_after_an_expulsion() {
    let broker = MemoryBroker::new(MemoryBrokerOptions::log("t", 1));
    for n in 0..3 {
        broker.publish(0, message(&format!("m{n}")));
    }
    let mut source = broker.source();
    let mut held = source.next_batch(ROOM).await.expect("a batch");
    held.pop().expect("three").acker.ack();
    held.remove(0).acker.ack();
    broker.expel(source.instance());
    assert!(held[0].fence.is_lost());
    let again = source.next_batch(ROOM).await.expect("a batch");
    let positions: Vec<_> =
        again.iter().map(|delivery| delivery.envelope.origin.to_string()).collect();
    assert_eq!(positions, ["memory:t/0/1", "memory:t/0/2"]);
}
