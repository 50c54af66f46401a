//! Queues that are deleted, declared otherwise, or behind a connection that is half open.

use std::time::{Duration, Instant};

use inboxd_conformance::app::App;
use inboxd_conformance::{ensure, eventually};
use lapin::types::AMQPValue;

use super::{Tap, outcomes, phase, proxied, queue_with, reconnects, text};
use crate::support::{
    Broker, BrokerKind, Database, DatabaseKind, Message, PATIENCE, Sidecar, config, stop_all,
    subscription,
};

const MS: Duration = Duration::from_millis(1);

/// R3: noticed within 5 s, in readiness, metric and log; consumed again when it is back.
async fn a_deleted_queue(kind: BrokerKind) {
    let app = App::start().await;
    let database = Database::new(DatabaseKind::Sqlite);
    let broker = Broker::new(kind).await;
    let group = broker.name.clone();
    let mut sidecar = Sidecar::start(&config(&broker, &database, &group, &app.url("/"), "", ""));
    broker.publish([Message::id("m1")]).await;
    outcomes(&sidecar, "processed", 1).await;
    sidecar.ready().await;

    let tap = Tap::open(&broker).await;
    tap.delete().await;
    let deleted = Instant::now();
    sidecar.readiness(503, &group).await;
    let noticed = deleted.elapsed();
    assert!(noticed < Duration::from_secs(5), "{kind:?}: noticed after {noticed:?}");
    sidecar.readiness(503, "does not exist").await;
    sidecar.readiness(503, "\"code\":\"queue_missing\"").await;
    assert_eq!(phase(&sidecar, "failing").await, 1);
    assert_eq!(phase(&sidecar, "ready").await, 0);
    let log = sidecar.log();
    assert!(log.contains("does not exist"), "{log}");
    assert_eq!(sidecar.get("/livez").await.expect("it listens").0, 200, "{log}");

    broker.declare().await;
    broker.publish([Message::id("m2")]).await;
    outcomes(&sidecar, "processed", 2).await;
    sidecar.ready().await;
    assert!(reconnects(&sidecar).await >= 1);
    assert_eq!(tap.count().await.1, 1, "one consumer");
    tap.close().await;
    stop_all(&broker, &group, std::slice::from_mut(&mut sidecar)).await;
}

/// R3.
#[tokio::test(flavor = "multi_thread")]
async fn a_queue_that_is_deleted_is_noticed_and_consumed_again() {
    tokio::join!(
        a_deleted_queue(BrokerKind::RabbitClassic),
        a_deleted_queue(BrokerKind::RabbitQuorum),
    );
}

/// R10: the name alone is enough, whatever arguments a queue has.
#[tokio::test(flavor = "multi_thread")]
async fn queues_with_arguments_of_their_own_are_consumed_by_name() {
    let common = [
        ("x-dead-letter-exchange", text("amq.fanout")),
        ("x-max-length", AMQPValue::LongInt(1_000)),
        ("x-expires", AMQPValue::LongInt(600_000)),
    ];
    let limit = [&common[..], &[("x-delivery-limit", AMQPValue::LongInt(10))]].concat();
    let priority = [&common[..], &[("x-max-priority", AMQPValue::ShortShortUInt(3))]].concat();
    let run = async |kind, arguments: &[_], keys: &str| {
        let app = App::start().await;
        let database = Database::new(DatabaseKind::Sqlite);
        let broker = queue_with(kind, arguments).await;
        let group = broker.name.clone();
        let mut sidecar =
            Sidecar::start(&config(&broker, &database, &group, &app.url("/"), keys, ""));
        broker.publish([Message::id("m1")]).await;
        outcomes(&sidecar, "processed", 1).await;
        assert_eq!(app.ledger().begun_of("m1"), 1);
        stop_all(&broker, &group, std::slice::from_mut(&mut sidecar)).await;
    };
    tokio::join!(
        run(BrokerKind::RabbitQuorum, &limit, ""),
        run(BrokerKind::RabbitClassic, &priority, ""),
        // Its kind is found out, since an order depends on it.
        run(BrokerKind::RabbitClassic, &common, "ordering = \"partition\""),
    );
}

/// R10: declared otherwise than it exists: one clear error, exit code 69, no loop.
#[tokio::test(flavor = "multi_thread")]
async fn a_queue_that_exists_otherwise_ends_the_process_with_one_error() {
    let run = async |kind, declare: &str, arguments: &[_]| {
        let app = App::start().await;
        let database = Database::new(DatabaseKind::Sqlite);
        let broker = queue_with(kind, arguments).await;
        let broker = broker.with_source_keys(&format!("declare = \"{declare}\""));
        let (proxy, url) = proxied(&broker).await;
        let config = format!(
            "{}{}{}",
            database.config(),
            broker.config_with(&url),
            subscription("orders", &broker, &broker.name, &app.url("/"), "")
        );
        broker.publish([Message::id("m1")]).await;
        let mut sidecar = Sidecar::start(&config);
        let status = sidecar.ended().await;
        let log = sidecar.log();
        assert_eq!(status.code(), Some(69), "{log}");
        assert!(log.contains("exists with other properties"), "{log}");
        assert!(log.contains("\"code\":\"queue_refused\""), "{log}");
        let errors = log.lines().filter(|line| line.contains("the source has ended")).count();
        assert_eq!(errors, 1, "{log}");
        assert_eq!(proxy.accepted(), 1, "it does not go on trying: {log}");
        assert_eq!((app.ledger().begun(), broker.left("").await), (0, 1));
    };
    let length = [("x-max-length", AMQPValue::LongInt(1_000))];
    tokio::join!(
        run(BrokerKind::RabbitClassic, "quorum", &[]),
        run(BrokerKind::RabbitQuorum, "classic", &[]),
        run(BrokerKind::RabbitQuorum, "quorum", &length),
    );
}

/// R10: of several subscriptions, only the one with the mismatch ends; the process says so.
#[tokio::test(flavor = "multi_thread")]
async fn a_mismatch_of_one_subscription_leaves_the_others_alone() {
    let app = App::start().await;
    let database = Database::new(DatabaseKind::Sqlite);
    let good = Broker::new(BrokerKind::RabbitClassic).await;
    let other = good.sibling().await.with_source_keys("declare = \"quorum\"");
    let config = format!(
        "{}{}{}{}",
        database.config(),
        good.config(),
        subscription("good", &good, &good.name, &app.url("/"), ""),
        subscription("other", &other, &other.name, &app.url("/"), ""),
    );
    let mut sidecar = Sidecar::start(&config);
    sidecar.readiness(503, "exists with other properties").await;
    good.publish([Message::id("m1")]).await;
    eventually(PATIENCE, async || ensure(app.ledger().accepted("m1") == 1, sidecar.log())).await;
    assert!(sidecar.is_running());
    let status = sidecar.stop().await;
    assert!(status.success(), "{status}:\n{}", sidecar.log());
}

/// R12: packets are dropped both ways while the application works on a message.
#[tokio::test(flavor = "multi_thread")]
async fn a_half_open_connection_is_noticed_within_two_and_a_half_heartbeats() {
    let app = App::start().await;
    let database = Database::new(DatabaseKind::Sqlite);
    let broker = Broker::new(BrokerKind::RabbitClassic).await;
    let (proxy, url) = proxied(&broker).await;
    let group = broker.name.clone();
    let config = format!(
        "{}{}heartbeat = \"2s\"\n{}",
        database.config(),
        broker.config_with(&url),
        subscription("orders", &broker, &group, &app.url("/"), "")
    );
    let mut sidecar = Sidecar::start(&config);
    sidecar.ready().await;
    app.hold();
    broker.publish([Message::id("m1")]).await;
    eventually(PATIENCE, async || ensure(app.ledger().begun() == 1, sidecar.log())).await;

    proxy.black_hole();
    let began = Instant::now();
    sidecar.readiness(503, "RabbitMQ").await;
    let noticed = began.elapsed();
    // Five seconds, and one for a busy machine.
    assert!(noticed < Duration::from_secs(6), "noticed after {noticed:?}; {}", sidecar.log());
    assert_eq!(phase(&sidecar, "ready").await, 0);
    assert_eq!(sidecar.get("/livez").await.expect("it listens").0, 200);
    app.let_go();
    outcomes(&sidecar, "processed", 1).await;

    // The broker notices by its own heartbeats, and the message comes again.
    proxy.heal();
    proxy.sever();
    outcomes(&sidecar, "duplicate", 1).await;
    assert_eq!(app.ledger().begun_of("m1"), 1);
    broker.publish([Message::id("m2")]).await;
    outcomes(&sidecar, "processed", 2).await;
    sidecar.ready().await;
    // An idle connection with so short a heartbeat stays.
    let before = proxy.accepted();
    tokio::time::sleep(5_500 * MS).await;
    assert_eq!(proxy.accepted(), before, "{}", sidecar.log());
    stop_all(&broker, &group, std::slice::from_mut(&mut sidecar)).await;
}
