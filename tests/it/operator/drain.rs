//! `inboxd drain` and `POST /v1/drain`: what is in flight ends, the rest goes to the others, and
//! the process stays until it is told to go.

use std::time::{Duration, Instant};

use inboxd_conformance::app::App;
use inboxd_conformance::{ensure, eventually};

use crate::support::{
    Broker, BrokerKind, Database, DatabaseKind, Message, PATIENCE, Sidecar, config, stop_all,
};

async fn drains_on_request(kind: BrokerKind) {
    let app = App::start().await;
    app.hold();
    let database = Database::new(DatabaseKind::Postgres);
    let broker = Broker::new(kind).await;
    let group = broker.name.clone();
    let config = config(&broker, &database, &group, &app.url("/"), "concurrency = 1", "");
    let mut sidecar = Sidecar::start(&config);
    sidecar.ready().await;
    broker.publish([Message::id("m1").partition(0)]).await;
    eventually(PATIENCE, async || ensure(app.ledger().begun() == 1, sidecar.log())).await;
    // One that waits and must not start here any more.
    broker.publish([Message::id("m2").partition(0)]).await;
    eventually(PATIENCE, async || {
        let in_flight = sidecar.in_flight().await;
        ensure(in_flight == 2, format!("{in_flight} in flight; log:\n{}", sidecar.log()))
    })
    .await;

    let told = sidecar.command("drain", &["--timeout", "1s"]).await;
    assert_eq!(told.code, Some(1), "{told:?}");
    assert!(told.out.contains("m1: at the callback for"), "{told:?}");
    sidecar.readiness(503, "draining on request").await;
    let status = sidecar.get("/v1/status").await.expect("served").1;
    assert!(status.contains("\"phase\":\"draining\""), "{status}");
    assert!(sidecar.is_running());

    let (first, second, ()) = tokio::join!(
        sidecar.command("drain", &["--timeout", "60s"]),
        sidecar.command("drain", &[]),
        async {
            tokio::time::sleep(Duration::from_millis(300)).await;
            app.let_go();
        },
    );
    assert_eq!((first.code, second.code), (Some(0), Some(0)), "{first:?} {second:?}");
    assert!(first.out.starts_with("drained"), "{first:?}");
    assert_eq!(app.ledger().begun_of("m2"), 0, "nothing new started");
    assert_eq!(database.rows(&group).await.into_iter().collect::<Vec<_>>(), ["m1"]);

    // Settled and handed over although the process lives: m2 is for the others.
    let asked_again = Instant::now();
    assert_eq!(sidecar.command("drain", &[]).await.code, Some(0));
    assert!(asked_again.elapsed() < Duration::from_secs(15), "{:?}", asked_again.elapsed());
    eventually(PATIENCE, async || {
        let left = broker.left(&group).await;
        ensure(left == 1, format!("{left} left: m1 is acked, m2 went back"))
    })
    .await;
    let mut other = Sidecar::start(&config);
    broker.publish([Message::id("m3").partition(0)]).await;
    eventually(PATIENCE, async || {
        let accepted = app.ledger().accepted_ids();
        ensure(accepted.len() == 3, format!("{accepted:?}; log:\n{}", other.log()))
    })
    .await;
    assert_eq!(sidecar.get("/livez").await.map(|(status, _)| status), Some(200));
    sidecar.readiness(503, "drained on request").await;
    assert_eq!(sidecar.outcomes("processed").await, 1, "the drained one takes nothing");

    let asked = Instant::now();
    let status = sidecar.stop().await;
    assert_eq!(status.code(), Some(0), "{}", sidecar.log());
    assert!(asked.elapsed() < Duration::from_secs(10), "{:?}", asked.elapsed());
    stop_all(&broker, &group, std::slice::from_mut(&mut other)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_ends_what_is_in_flight_and_hands_the_rest_over() {
    tokio::join!(drains_on_request(BrokerKind::RabbitQuorum), drains_on_request(BrokerKind::Kafka),);
}

/// SIGTERM does not wait for a drain that waits for an application: the grace period decides.
#[tokio::test(flavor = "multi_thread")]
async fn a_signal_ends_a_drain_that_cannot_end() {
    let app = App::start().await;
    app.hold();
    let database = Database::new(DatabaseKind::Sqlite);
    let broker = Broker::new(BrokerKind::RabbitClassic).await;
    let group = broker.name.clone();
    let config = config(&broker, &database, &group, &app.url("/"), "", "");
    let mut sidecar = Sidecar::start(&format!("shutdown_grace = \"1s\"\n{config}"));
    sidecar.ready().await;
    broker.publish([Message::id("m1")]).await;
    eventually(PATIENCE, async || ensure(app.ledger().begun() == 1, sidecar.log())).await;
    assert_eq!(sidecar.command("drain", &["--timeout", "200ms"]).await.code, Some(1));
    assert_eq!(sidecar.stop().await.code(), Some(0), "{}", sidecar.log());
    assert!(database.rows(&group).await.is_empty(), "nothing unfinished is recorded");
    let gone = sidecar.command("drain", &[]).await;
    assert_eq!(gone.code, Some(69), "{gone:?}");
    assert!(gone.err.contains("no sidecar answers"), "{gone:?}");
}

/// Asked for while the database is not there yet, a drain means that nothing is ever taken.
#[tokio::test(flavor = "multi_thread")]
async fn a_drain_before_the_start_is_a_start_that_takes_nothing() {
    let app = App::start().await;
    let database = Database::new(DatabaseKind::Postgres);
    let proxy = inboxd_conformance::net::Proxy::start(database.address()).await;
    proxy.cut();
    let database = database.through(proxy.addr);
    let broker = Broker::new(BrokerKind::RabbitClassic).await;
    let group = broker.name.clone();
    broker.publish([Message::id("m1")]).await;
    let config = config(&broker, &database, &group, &app.url("/"), "", "");
    let mut sidecar = Sidecar::start(&config);
    sidecar.not_ready("database").await;
    let status = sidecar.get("/v1/status").await.expect("served").1;
    assert!(status.contains("\"phase\":\"starting\""), "{status}");
    assert_eq!(sidecar.command("drain", &[]).await.code, Some(0));
    proxy.heal();
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(app.ledger().begun(), 0, "{}", sidecar.log());
    assert_eq!(sidecar.stop().await.code(), Some(0), "{}", sidecar.log());
    assert_eq!(broker.left(&group).await, 1);
}
