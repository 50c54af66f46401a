//! Prefetch, releases, and half-open connections.

use std::time::{Duration, Instant};

use inboxd_contract::{Delivery, Room, SourcePhase};
use inboxd_rabbitmq::QueueKind;
use lapin::options::QueueDeleteOptions;
use tokio::time::{sleep, timeout};

use crate::support::{
    PATIENCE, Publisher, ack, behind_proxy, close, counts, ids, phase, shared, start,
    start_unasked, status, take,
};

/// R11: never more than the prefetch is unacked, before and after a reconnect, handed over or
/// buffered.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_more_than_the_prefetch_is_unacked() {
    let publisher = Publisher::shared().await;
    let (proxy, mut config) = behind_proxy(&shared()).await;
    config.prefetch = 5;
    publisher.declare(&config.queue, QueueKind::Classic).await;
    for n in 0..40 {
        publisher.publish(&config.queue, &[&format!("m{n}")]).await;
    }
    let mut source = start(&config);
    for round in 0..2 {
        let held = take(&mut source, 5).await;
        assert_eq!(held.len(), 5);
        // One acked, one more comes: never a sixth.
        // (The broker may take a moment to see that the old connection is gone.)
        counts(&publisher, &config.queue, (40 - round - 5, 1)).await;
        let more = source.next_batch(Room { deliveries: 10, bytes: 1 << 20 });
        assert!(timeout(Duration::from_millis(300), more).await.is_err(), "a sixth came");
        ack(held.into_iter().take(1).collect());
        let next = take(&mut source, 1).await;
        counts(&publisher, &config.queue, (40 - round - 6, 1)).await;
        proxy.sever();
        timeout(PATIENCE, next[0].fence.lost()).await.expect("lost with the connection");
    }
    close(source).await;
}

/// R12: packets dropped both ways are noticed within two and a half heartbeats.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_half_open_connection_is_noticed() {
    let publisher = Publisher::shared().await;
    let (proxy, mut config) = behind_proxy(&shared()).await;
    config.heartbeat = Duration::from_secs(2);
    publisher.declare(&config.queue, QueueKind::Classic).await;
    publisher.publish(&config.queue, &["m"]).await;
    let mut source = start(&config);
    let held = take(&mut source, 1).await;
    proxy.black_hole();
    let began = Instant::now();
    status(source.status(), |status| status.phase != SourcePhase::Ready).await;
    let noticed = began.elapsed();
    // Two and a half heartbeats, and two seconds for a busy machine.
    assert!(noticed < Duration::from_secs(7), "noticed after {noticed:?}");
    timeout(PATIENCE, held[0].fence.lost()).await.expect("the fence goes with it");
    proxy.cut();
    proxy.heal();
    let again = take(&mut source, 1).await;
    assert_eq!(ids(&again), ["m"]);
    ack(again);
    close(source).await;
}

/// R4's half: a message that is released over and over does not spin.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn releases_are_bounded_in_rate() {
    let publisher = Publisher::shared().await;
    let mut config = shared();
    config.releases_per_second = 4;
    publisher.declare(&config.queue, QueueKind::Classic).await;
    publisher.publish(&config.queue, &["m"]).await;
    let mut source = start(&config);
    take(&mut source, 1).await;
    let began = Instant::now();
    for _ in 0..10 {
        drop(take(&mut source, 1).await);
    }
    // A burst of four, then four a second: at least (11 - 4) / 4 seconds.
    assert!(began.elapsed() > Duration::from_millis(1_200), "{:?}", began.elapsed());
    status(source.status(), |status| status.counts.releases == 11).await;
    ack(take(&mut source, 1).await);
    close(source).await;
    counts(&publisher, &config.queue, (0, 0)).await;
}

/// Whoever drains gives back what has not started, then stops taking: each goes back once,
/// and does not come here again in between.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_given_back_before_a_stop_goes_back_once() {
    let publisher = Publisher::shared().await;
    let config = shared();
    publisher.declare(&config.queue, QueueKind::Quorum).await;
    for n in 0..10 {
        publisher.publish(&config.queue, &[&format!("m{n}")]).await;
    }
    let mut source = start(&config);
    for round in 1..=3 {
        let held = take(&mut source, 10).await;
        for delivery in &held {
            assert_eq!(delivery_count(delivery), round - 1);
        }
        drop(held);
        // What a busy machine may put between the two.
        sleep(Duration::from_millis(50)).await;
        source.stop_taking().await;
        close(source).await;
        source = start(&config);
    }
    let held = take(&mut source, 10).await;
    assert!(held.iter().all(|delivery| delivery_count(delivery) == 3));
    ack(held);
    close(source).await;
}

fn delivery_count(delivery: &Delivery) -> u32 {
    let headers = &delivery.envelope.headers;
    let count = headers.iter().find(|header| header.name.as_ref() == b"x-delivery-count");
    count.map_or(0, |header| {
        let value = header.value.as_deref().expect("a value");
        std::str::from_utf8(value).expect("text").parse().expect("a number")
    })
}

/// What nobody asked for stays in the queue, which is looked at all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_consumed_before_it_is_asked_for() {
    let publisher = Publisher::shared().await;
    let config = shared();
    let queue = config.queue.as_str();
    let mut source = start_unasked(&config);
    status(source.status(), |status| status.reason.contains("does not exist")).await;
    publisher.declare(queue, QueueKind::Quorum).await;
    publisher.publish(queue, &["m"]).await;
    phase(&*source, SourcePhase::Ready).await;
    assert_eq!(publisher.count(queue).await.1, 0, "it does not consume");
    let delete = publisher.channel.queue_delete(queue.into(), QueueDeleteOptions::default());
    delete.await.expect("deleted");
    phase(&*source, SourcePhase::Failing).await;
    publisher.declare(queue, QueueKind::Quorum).await;
    publisher.publish(queue, &["m"]).await;
    phase(&*source, SourcePhase::Ready).await;
    let came = take(&mut source, 1).await;
    assert_eq!((ids(&came), delivery_count(&came[0])), (vec!["m".to_owned()], 0));
    ack(came);
    close(source).await;

    // One that was never asked stops and closes as well.
    let mut source = start_unasked(&config);
    phase(&*source, SourcePhase::Ready).await;
    source.stop_taking().await;
    close(source).await;
}

/// A hundred acks under way when the source closes: all are answered, on both kinds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn close_right_behind_many_acks_loses_none() {
    for kind in [QueueKind::Classic, QueueKind::Quorum] {
        let publisher = Publisher::shared().await;
        let mut config = shared();
        config.prefetch = 200;
        publisher.declare(&config.queue, kind).await;
        for n in 0..200 {
            publisher.publish(&config.queue, &[&format!("m{n}")]).await;
        }
        let mut source = start(&config);
        phase(&*source, SourcePhase::Ready).await;
        let mut held = take(&mut source, 200).await;
        // Odd ones first: each of them is an ack of its own.
        for index in (0..held.len()).rev().filter(|index| index % 2 == 1) {
            held.swap_remove(index).acker.ack();
            tokio::task::yield_now().await;
        }
        ack(held);
        close(source).await;
        let queue = &config.queue;
        publisher.publish(queue, &["end"]).await;
        let mut source = start(&config);
        assert_eq!(ids(&take(&mut source, 1).await), ["end"], "{kind:?}");
        close(source).await;
        if kind == QueueKind::Classic {
            counts(&publisher, queue, (1, 0)).await;
        }
    }
}
