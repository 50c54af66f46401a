//! Queues that are missing, deleted, or declared otherwise.

use std::time::{Duration, Instant};

use inboxd_contract::{Room, SourcePhase};
use inboxd_rabbitmq::{ArgumentValue, DeclareOptions, QueueKind};
use lapin::options::QueueDeleteOptions;
use lapin::types::AMQPValue;
use tokio::time::{sleep, timeout};

use crate::support::{
    PATIENCE, Publisher, ack, behind_proxy, close, ids, phase, shared, start, status, take,
};

const ROOM: Room = Room { deliveries: 10, bytes: 1 << 20 };

/// R3: a deleted queue is noticed at once, with words, and consumed again when it is back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deleted_queue_is_noticed_and_consumed_again() {
    for kind in [QueueKind::Classic, QueueKind::Quorum] {
        let (publisher, config) = (Publisher::shared().await, shared());
        let queue = config.queue.as_str();
        publisher.declare(queue, kind).await;
        let mut source = start(&config);
        phase(&*source, SourcePhase::Ready).await;

        let deleted = publisher.channel.queue_delete(queue.into(), QueueDeleteOptions::default());
        deleted.await.expect("deleted");
        let began = Instant::now();
        let failing = status(source.status(), |status| status.phase != SourcePhase::Ready).await;
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
        assert_eq!(failing.phase, SourcePhase::Failing);
        assert!(failing.reason.contains(queue), "{}", failing.reason);
        status(source.status(), |status| status.reason.contains("does not exist")).await;

        publisher.declare(queue, kind).await;
        publisher.publish(queue, &["m"]).await;
        let came = take(&mut source, 1).await;
        assert_eq!(ids(&came), ["m"]);
        let ready = phase(&*source, SourcePhase::Ready).await;
        assert!(ready.reconnects >= 1, "a reopened channel is counted");
        status(source.status(), |status| status.counts.cancels == 1).await;
        ack(came);
        close(source).await;
    }
}

/// How many messages are ready is told while it can be asked, without harm to the consumer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_queues_depth_is_told_while_it_is_there() {
    let publisher = Publisher::shared().await;
    let mut config = shared();
    (config.prefetch, config.depth_interval) = (1, Duration::from_millis(100));
    let queue = config.queue.as_str();
    publisher.declare(queue, QueueKind::Classic).await;
    publisher.publish(queue, &["m0", "m1", "m2"]).await;
    let mut source = start(&config);
    let held = take(&mut source, 1).await;
    status(source.status(), |status| status.queue_depth == Some(2)).await;
    publisher.publish(queue, &["m3"]).await;
    status(source.status(), |status| status.queue_depth == Some(3)).await;
    let deleted = publisher.channel.queue_delete(queue.into(), QueueDeleteOptions::default());
    deleted.await.expect("deleted");
    status(source.status(), |status| status.queue_depth.is_none()).await;
    drop(held);
    publisher.declare(queue, QueueKind::Classic).await;
    publisher.publish(queue, &["m4", "m5"]).await;
    let held = take(&mut source, 1).await;
    assert_eq!(ids(&held), ["m4"]);
    status(source.status(), |status| status.queue_depth == Some(1)).await;
    ack(held);
    close(source).await;
}

/// R10: a queue with arguments of its own is consumed by its name alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_queue_with_arguments_is_consumed_by_its_name() {
    let (publisher, config) = (Publisher::shared().await, shared());
    let arguments = [
        ("x-dead-letter-exchange", AMQPValue::LongString("amq.fanout".into())),
        ("x-max-length", AMQPValue::LongInt(1_000)),
    ];
    publisher.declare_with(&config.queue, QueueKind::Quorum, &arguments).await;
    publisher.publish(&config.queue, &["m"]).await;
    let mut source = start(&config);
    ack(take(&mut source, 1).await);
    close(source).await;
}

/// R10: what is declared otherwise is one clear error, and no loop.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mismatch_is_one_clear_error() {
    let publisher = Publisher::shared().await;
    let (proxy, mut config) = behind_proxy(&shared()).await;
    publisher.declare(&config.queue, QueueKind::Classic).await;
    config.declare = Some(DeclareOptions::durable(QueueKind::Quorum));
    let mut source = start(&config);
    let error = timeout(PATIENCE, source.next_batch(ROOM)).await.expect("in time");
    let error = error.expect_err("a permanent error").to_string();
    assert!(error.contains(&config.queue) && error.contains("other properties"), "{error}");
    let failing = phase(&*source, SourcePhase::Failing).await;
    assert_eq!(failing.reason, error);
    let accepted = proxy.accepted();
    sleep(Duration::from_millis(1_500)).await;
    assert_eq!(proxy.accepted(), accepted, "it does not go on trying");
    close(source).await;
}

/// A queue is declared where the source was told to, with what it was told.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_queue_is_declared_when_told() {
    let (publisher, mut config) = (Publisher::shared().await, shared());
    let mut declare = DeclareOptions::durable(QueueKind::Classic);
    declare.arguments.push(("x-max-length".into(), ArgumentValue::Integer(1)));
    declare.arguments.push(("x-expires".into(), ArgumentValue::Integer(600_000)));
    config.declare = Some(declare);
    for _ in 0..2 {
        let source = start(&config);
        phase(&*source, SourcePhase::Ready).await;
        close(source).await;
    }
    publisher.publish(&config.queue, &["m0", "m1"]).await;
    let mut source = start(&config);
    assert_eq!(ids(&take(&mut source, 1).await), ["m1"], "of a length of one");
    close(source).await;
}
