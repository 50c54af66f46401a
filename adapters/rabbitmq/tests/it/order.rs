//! Ordered subscriptions: one consumer, stand-by, and order over every hand-over.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use inboxd_conformance::net::{Act, Direction, Proxy};
use inboxd_conformance::{ensure, eventually};
use inboxd_contract::{Room, SourcePhase};
use inboxd_rabbitmq::{QueueKind, RabbitMqConfig};
use lapin::options::QueueDeleteOptions;
use lapin::types::AMQPValue;
use tokio::time::timeout;

use crate::support::{
    PATIENCE, Publisher, ack, behind_proxy, close, ids, phase, shared, start, status, take,
};

fn ordered() -> RabbitMqConfig {
    RabbitMqConfig { ordered: true, ..shared() }
}

async fn publish_ten(publisher: &Publisher, queue: &str) {
    publisher.publish(queue, &["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]).await;
}

/// A replica stands by while another has the queue, and takes over in order, after a close and
/// after a crash.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_stands_by_and_takes_over_in_order() {
    let (publisher, config) = (Publisher::shared().await, ordered());
    publisher.declare(&config.queue, QueueKind::Classic).await;
    publish_ten(&publisher, &config.queue).await;
    let mut first = start(&config);
    let mut held = take(&mut first, 4).await;
    assert_eq!(ids(&held), ["0", "1", "2", "3"]);
    let mut second = start(&config);
    let standby = phase(&*second, SourcePhase::Standby).await;
    assert!(standby.reason.contains("another consumer"), "{}", standby.reason);
    held.drain(..2).for_each(|delivery| delivery.acker.ack());
    close(first).await;

    let held_by_second = take(&mut second, 3).await;
    assert_eq!(ids(&held_by_second), ["2", "3", "4"]);
    assert_eq!(second.status().borrow().phase, SourcePhase::Ready);
    let mut third = start(&config);
    phase(&*third, SourcePhase::Standby).await;
    drop(second);
    let all = take(&mut third, 8).await;
    assert_eq!(ids(&all), ["2", "3", "4", "5", "6", "7", "8", "9"], "after a crash too");
    ack(all);
    close(third).await;
}

/// A delivery that is given back comes again in its place: everything from it on anew.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_given_back_comes_again_in_its_place() {
    let (publisher, config) = (Publisher::shared().await, ordered());
    publisher.declare(&config.queue, QueueKind::Classic).await;
    publish_ten(&publisher, &config.queue).await;
    let mut source = start(&config);
    let mut held = take(&mut source, 4).await.into_iter();
    held.next().expect("four").acker.ack();
    let released = held.next().expect("four");
    let fence = released.fence.clone();
    drop(released);
    timeout(PATIENCE, fence.lost()).await.expect("the channel goes");
    let all = take(&mut source, 9).await;
    assert_eq!(ids(&all), ["1", "2", "3", "4", "5", "6", "7", "8", "9"]);
    ack(all);
    close(source).await;
}

/// Order holds over a lost connection with deliveries unsettled.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn order_holds_over_a_lost_connection() {
    let publisher = Publisher::shared().await;
    let (proxy, config) = behind_proxy(&ordered()).await;
    publisher.declare(&config.queue, QueueKind::Classic).await;
    publish_ten(&publisher, &config.queue).await;
    let mut source = start(&config);
    let held = take(&mut source, 5).await;
    proxy.sever();
    timeout(PATIENCE, held[0].fence.lost()).await.expect("lost with the connection");
    let all = take(&mut source, 10).await;
    assert_eq!(ids(&all), ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]);
    ack(held);
    ack(all);
    close(source).await;
}

/// A quorum queue takes part in order only as a single-active-consumer queue, and must be said to
/// be one; whatever other arguments it has.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_quorum_queue_must_be_said_to_have_one_active_consumer() {
    let (publisher, mut config) = (Publisher::shared().await, ordered());
    let arguments = [
        ("x-single-active-consumer", AMQPValue::Boolean(true)),
        ("x-max-length", AMQPValue::LongInt(1_000)),
        ("x-dead-letter-exchange", AMQPValue::LongString("amq.fanout".into())),
    ];
    publisher.declare_with(&config.queue, QueueKind::Quorum, &arguments).await;
    publish_ten(&publisher, &config.queue).await;
    let mut refused = start(&config);
    let room = Room { deliveries: 1, bytes: 1 };
    let error = timeout(PATIENCE, refused.next_batch(room)).await.expect("in time");
    let error = error.expect_err("refused").to_string();
    assert!(error.contains("is a quorum queue"), "{error}");
    assert!(error.contains("single_active_consumer"), "{error}");
    close(refused).await;

    config.single_active_consumer = true;
    let mut first = start(&config);
    let mut held = take(&mut first, 3).await;
    let mut second = start(&config);
    phase(&*second, SourcePhase::Ready).await;
    held.remove(0).acker.ack();
    close(first).await;
    let all = take(&mut second, 9).await;
    assert_eq!(ids(&all), ["1", "2", "3", "4", "5", "6", "7", "8", "9"]);
    ack(all);
    close(second).await;
}

/// A single-active-consumer queue cannot be had alone: what to say is said.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_classic_queue_with_one_active_consumer_must_be_said_to_be_one() {
    let (publisher, mut config) = (Publisher::shared().await, ordered());
    let arguments = [("x-single-active-consumer", AMQPValue::Boolean(true))];
    publisher.declare_with(&config.queue, QueueKind::Classic, &arguments).await;
    let source = start(&config);
    let failing = phase(&*source, SourcePhase::Failing).await;
    assert!(failing.reason.contains("single_active_consumer = true"), "{}", failing.reason);
    close(source).await;
    config.single_active_consumer = true;
    let source = start(&config);
    phase(&*source, SourcePhase::Ready).await;
    close(source).await;
}

/// What the source sends, by class and method, in order.
fn recorded(proxy: &Proxy) -> Arc<Mutex<Vec<(u16, u16)>>> {
    let methods = Arc::new(Mutex::new(Vec::new()));
    let recording = Arc::clone(&methods);
    let mut streams: HashMap<usize, Vec<u8>> = HashMap::new();
    proxy.hook_each(move |connection, direction, bytes| {
        if direction == Direction::ToServer {
            let stream = streams.entry(connection).or_default();
            stream.extend_from_slice(bytes);
            if stream.starts_with(b"AMQP") && stream.len() >= 8 {
                stream.drain(..8);
            }
            while stream.len() >= 8 && !stream.starts_with(b"AMQP") {
                let size = u32::from_be_bytes([stream[3], stream[4], stream[5], stream[6]]);
                let end = 8 + usize::try_from(size).expect("small");
                if stream.len() < end {
                    break;
                }
                let frame: Vec<u8> = stream.drain(..end).collect();
                if frame[0] == 1 {
                    let method = (
                        u16::from_be_bytes([frame[7], frame[8]]),
                        u16::from_be_bytes([frame[9], frame[10]]),
                    );
                    recording.lock().expect("no panic").push(method);
                }
            }
        }
        Act::Pass
    });
    methods
}

const BASIC_CONSUME: (u16, u16) = (60, 20);
const BASIC_CANCEL: (u16, u16) = (60, 30);
const CHANNEL_CLOSE: (u16, u16) = (20, 40);

/// A close that is not answered in time, on a connection that works, cancels no consumer: what is
/// unacked would come behind what the next consumer gets.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ordered_source_that_closes_too_late_cancels_nothing() {
    let publisher = Publisher::shared().await;
    for _ in 0..5 {
        let (proxy, config) = behind_proxy(&ordered()).await;
        let methods = recorded(&proxy);
        publisher.declare(&config.queue, QueueKind::Classic).await;
        publish_ten(&publisher, &config.queue).await;
        let mut source = start(&config);
        let held = take(&mut source, 4).await;
        proxy.drop_replies();
        let late = source.close(Duration::from_millis(300)).await;
        assert!(late.is_err(), "nothing is answered");
        drop(held);
        let gone = async || ensure(proxy.connections() == 0, proxy.connections());
        eventually(PATIENCE, gone).await;
        let methods = methods.lock().expect("no panic").clone();
        assert!(methods.contains(&BASIC_CONSUME), "{methods:?}");
        assert!(!methods.contains(&BASIC_CANCEL), "{methods:?}");
    }
}

/// The broker cancels a consumer: its channel is closed before there is another, so that what it
/// held is back in its place.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_consumers_channel_is_closed_before_there_is_another() {
    let publisher = Publisher::shared().await;
    let (proxy, config) = behind_proxy(&ordered()).await;
    let methods = recorded(&proxy);
    let queue = config.queue.as_str();
    publisher.declare(queue, QueueKind::Classic).await;
    publisher.publish(queue, &["m"]).await;
    let mut source = start(&config);
    let held = take(&mut source, 1).await;
    let deleted = publisher.channel.queue_delete(queue.into(), QueueDeleteOptions::default());
    deleted.await.expect("deleted");
    timeout(PATIENCE, held[0].fence.lost()).await.expect("lost with the consumer");
    publisher.declare(queue, QueueKind::Classic).await;
    publisher.publish(queue, &["again"]).await;
    assert_eq!(ids(&take(&mut source, 1).await), ["again"]);
    let methods = methods.lock().expect("no panic").clone();
    let mut consumes = (0..methods.len()).filter(|index| methods[*index] == BASIC_CONSUME);
    let (first, second) = (consumes.next().expect("two"), consumes.next().expect("two"));
    assert!(methods[first..second].contains(&CHANNEL_CLOSE), "{methods:?}");
    assert_eq!(proxy.accepted(), 1, "on the same connection");
    drop(source);
}

/// While the connection was away the queue has become another: that is seen.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_queues_kind_is_looked_at_again_on_a_new_connection() {
    let publisher = Publisher::shared().await;
    let (proxy, config) = behind_proxy(&ordered()).await;
    let queue = config.queue.as_str();
    publisher.declare(queue, QueueKind::Classic).await;
    let mut source = start(&config);
    phase(&*source, SourcePhase::Ready).await;
    proxy.cut();
    status(source.status(), |status| status.phase != SourcePhase::Ready).await;
    let deleted = publisher.channel.queue_delete(queue.into(), QueueDeleteOptions::default());
    deleted.await.expect("deleted");
    publisher.declare(queue, QueueKind::Quorum).await;
    proxy.heal();
    let room = Room { deliveries: 1, bytes: 1 };
    let refused = timeout(PATIENCE, source.next_batch(room)).await.expect("in time");
    let error = refused.expect_err("no order on such a queue").to_string();
    assert!(error.contains("is a quorum queue"), "{error}");
    close(source).await;
}
