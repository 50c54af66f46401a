//! When the application fails, end to end: it goes away with a thousand messages queued, breaks for
//! some of them, fails for ever, and dead letters whose target is not there.

use std::time::{Duration, Instant};

use inboxd_conformance::app::{Answer, App};
use inboxd_conformance::{ensure, eventually};
use lapin::options::{ExchangeDeclareOptions, QueueBindOptions};
use lapin::types::FieldTable;

use crate::support::{
    Broker, BrokerKind, Database, DatabaseKind, Message, PATIENCE, Sidecar, config, stop_all,
};

const QUEUED: usize = 1_000;
/// How long the application is away; `scripts/crash --full` has 60 s.
const AWAY_S: &str = "INBOXD_TEST_AWAY_S";
const AWAY_S_DEFAULT: u64 = 6;

fn away() -> Duration {
    let seconds = std::env::var(AWAY_S).ok().map(|text| text.parse().expect("seconds"));
    Duration::from_secs(seconds.unwrap_or(AWAY_S_DEFAULT))
}

/// L2: no dead letter, no attempt that counts, everything delivered, and the broker's membership or
/// connection is the same as before.
#[tokio::test(flavor = "multi_thread")]
async fn an_application_that_goes_away_with_a_thousand_queued_costs_nothing() {
    tokio::join!(
        goes_away(BrokerKind::RabbitQuorum, DatabaseKind::Postgres),
        goes_away(BrokerKind::Kafka, DatabaseKind::MariaDb),
    );
}

async fn goes_away(kind: BrokerKind, store: DatabaseKind) {
    let mut app = App::start().await;
    let database = Database::new(store);
    let broker = Broker::new(kind).await;
    let group = broker.name.clone();
    let keys = "breaker = { probe_cap = \"1s\" }\nretry = { attempts_max = 1 }\n\
                park = { attempts_max = 1 }\nlease = \"5s\"";
    let mut sidecar = Sidecar::start(&config(&broker, &database, &group, &app.url("/"), keys, ""));
    broker.publish([Message::id("before")]).await;
    accepted(&app, 1, &sidecar).await;
    let links = ["inboxd_source_rebalances_total", "inboxd_source_reconnects_total"];
    let before = [sidecar.metric(links[0], &[]).await, sidecar.metric(links[1], &[]).await];

    app.stop().await;
    broker.publish((0..QUEUED).map(|n| Message::id(format!("m{n}")))).await;
    let until = Instant::now() + away();
    eventually(PATIENCE, async || {
        let open = sidecar.metric("inboxd_callback_state", &["state=\"open\""]).await;
        ensure(open == 1.0, format!("{kind:?}: it does not rest\n{}", sidecar.log()))
    })
    .await;
    let tried = app.ledger().begun();
    while Instant::now() < until {
        tokio::time::sleep(Duration::from_millis(200)).await;
        let held = sidecar.in_flight().await;
        assert!(held <= 1_024, "{kind:?}: {held} in flight");
    }
    assert_eq!(app.ledger().begun(), tried, "nobody listened");
    assert!(sidecar.is_running());
    app.restart().await;

    accepted(&app, QUEUED + 1, &sidecar).await;
    eventually(PATIENCE, async || {
        let rows = database.rows(&group).await.len();
        ensure(rows == QUEUED + 1, format!("{kind:?}: {rows} rows\n{}", sidecar.log()))
    })
    .await;
    let after = [sidecar.metric(links[0], &[]).await, sidecar.metric(links[1], &[]).await];
    assert_eq!(after, before, "{kind:?}: {links:?}\n{}", sidecar.log());
    assert!(database.dead(&group).await.is_empty(), "{kind:?}\n{}", sidecar.log());
    let burned: Vec<_> = app
        .ledger()
        .all()
        .iter()
        .filter(|post| post.attempt != 1)
        .map(|post| post.id.clone())
        .collect();
    assert!(burned.is_empty(), "{kind:?}: attempts counted of {burned:?}\n{}", sidecar.log());
    assert!(app.ledger().accepted_more_than_once().is_empty());
    stop_all(&broker, &group, std::slice::from_mut(&mut sidecar)).await;
}

async fn accepted(app: &App, at_least: usize, sidecar: &Sidecar) {
    eventually(PATIENCE, async || {
        let accepted = app.ledger().accepted_distinct();
        ensure(accepted >= at_least, format!("{accepted} accepted; log:\n{}", sidecar.log()))
    })
    .await;
}

/// R7: five messages that fail with the prefetch of five give their places up, and fifty good ones
/// flow.
#[tokio::test(flavor = "multi_thread")]
async fn five_messages_that_fail_do_not_keep_the_prefetch_from_fifty_good_ones() {
    let app = App::start().await;
    for n in 0..5 {
        app.plan(&format!("bad{n}"), vec![Answer::status(503); 1_000]);
    }
    let database = Database::new(DatabaseKind::Sqlite);
    let broker = Broker::new(BrokerKind::RabbitQuorum).await.with_source_keys("prefetch = 5");
    let group = broker.name.clone();
    let keys = "retry = { attempts_max = 1 }\npark = { initial = \"10m\", jitter = \"none\" }";
    let mut sidecar = Sidecar::start(&config(&broker, &database, &group, &app.url("/"), keys, ""));
    broker.publish((0..5).map(|n| Message::id(format!("bad{n}")))).await;
    broker.publish((0..50).map(|n| Message::id(format!("good{n}")))).await;
    accepted(&app, 50, &sidecar).await;
    eventually(PATIENCE, async || {
        let parked = database.parked(&group).await;
        ensure(parked.len() == 5, format!("parked: {parked:?}\n{}", sidecar.log()))
    })
    .await;
    assert_eq!(sidecar.outcomes("parked").await, 5);
    stop_all(&broker, &group, std::slice::from_mut(&mut sidecar)).await;
}

/// K4: a message that always fails becomes a dead letter after a bounded number of attempts, though
/// the process dies again and again.
#[tokio::test(flavor = "multi_thread")]
async fn attempts_are_counted_over_restarts() {
    let app = App::start().await;
    app.set_default(Answer::status(500));
    let database = Database::new(DatabaseKind::Postgres);
    let broker = Broker::new(BrokerKind::Kafka).await;
    let group = broker.name.clone();
    let keys = "lease = \"1s\"\nretry = { initial = \"10ms\", cap = \"10ms\", attempts_max = 2 }\n\
                park = { initial = \"300ms\", factor = 1, jitter = \"none\", attempts_max = 7 }\n\
                breaker = { failures = 0 }";
    let mut sidecar = Sidecar::start(&config(&broker, &database, &group, &app.url("/"), keys, ""));
    broker.publish([Message::id("m1")]).await;
    let mut kills = 0;
    for posts in [2, 4] {
        eventually(PATIENCE, async || ensure(app.ledger().begun_of("m1") >= posts, sidecar.log()))
            .await;
        sidecar.kill().await;
        kills += 1;
        sidecar.start_again();
    }
    eventually(PATIENCE, async || {
        let dead = database.dead(&group).await;
        ensure(dead.get("m1") == Some(&1), format!("dead: {dead:?}\n{}", sidecar.log()))
    })
    .await;
    let begun = app.ledger().begun_of("m1");
    assert!((7 - kills..=7).contains(&begun), "{begun} POSTs\n{}", sidecar.log());
    let attempts: Vec<_> = app.ledger().posts("m1").iter().map(|post| post.attempt).collect();
    assert!(attempts.is_sorted() && attempts.last() == Some(&7), "{attempts:?}");
    // What the dead members had is delivered once more when Kafka has noticed.
    eventually(PATIENCE, async || {
        let left = broker.left(&group).await;
        ensure(left == 0, format!("{left} left on the broker\n{}", sidecar.log()))
    })
    .await;
    stop_all(&broker, &group, std::slice::from_mut(&mut sidecar)).await;
}

/// R5: an exchange for dead letters that routes them nowhere. The original stays unsettled, nothing
/// more is taken, and everything goes on once somebody binds a queue.
#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_that_nobody_takes_stays_where_it_is_until_somebody_does() {
    let app = App::start().await;
    app.plan("bad", [Answer::status(422)]);
    let database = Database::new(DatabaseKind::Postgres);
    let broker = Broker::new(BrokerKind::RabbitQuorum).await;
    let letters = broker.sibling().await;
    let group = broker.name.clone();
    let exchange = format!("{}-exchange", letters.name);
    let connection = broker.amqp().await;
    let channel = connection.create_channel().await.expect("a channel");
    channel
        .exchange_declare(
            exchange.as_str().into(),
            lapin::ExchangeKind::Fanout,
            ExchangeDeclareOptions { durable: true, ..Default::default() },
            FieldTable::default(),
        )
        .await
        .expect("an exchange");
    let keys = format!("dead_letter = {{ to = \"broker\", exchange = \"{exchange}\" }}");
    let mut sidecar = Sidecar::start(&config(&broker, &database, &group, &app.url("/"), &keys, ""));
    broker.publish([Message::id("bad")]).await;
    sidecar.readiness(503, "no queue").await;
    broker.publish([Message::id("good")]).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(app.ledger().accepted_total(), 0, "more was taken\n{}", sidecar.log());
    assert_eq!(app.ledger().begun_of("bad"), 1, "{}", sidecar.log());
    assert!(database.dead(&group).await.is_empty(), "{}", sidecar.log());

    channel
        .queue_bind(
            letters.name.as_str().into(),
            exchange.as_str().into(),
            "".into(),
            QueueBindOptions::default(),
            FieldTable::default(),
        )
        .await
        .expect("bound");
    accepted(&app, 1, &sidecar).await;
    eventually(PATIENCE, async || {
        let (dead, copies) = (database.dead(&group).await, letters.left("").await);
        ensure(
            dead.get("bad") == Some(&1) && copies == 1,
            format!("dead: {dead:?}, {copies} copies\n{}", sidecar.log()),
        )
    })
    .await;
    sidecar.ready().await;
    assert_eq!(app.ledger().begun_of("bad"), 1, "{}", sidecar.log());
    stop_all(&broker, &group, std::slice::from_mut(&mut sidecar)).await;
    connection.close(0, "".into()).await.expect("closed");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_target_of_dead_letters_that_is_not_there_is_found_before_the_start() {
    let app = App::start().await;
    let database = Database::new(DatabaseKind::Sqlite);
    let broker = Broker::new(BrokerKind::Kafka).await;
    let group = broker.name.clone();
    let keys = |topic: &str| format!("dead_letter = {{ to = \"both\", topic = \"{topic}\" }}");
    let missing = format!("{group}-missing");
    for (topic, code) in [(broker.sibling().await.name, 0), (missing, 69)] {
        let text = config(&broker, &database, &group, &app.url("/"), &keys(&topic), "");
        let sidecar = Sidecar::start(&text);
        let told = sidecar.command("check", &["--connect"]).await;
        assert_eq!(told.code, Some(code), "{told:?}");
        let shown = format!("{}{}", told.out, told.err);
        assert!(shown.contains(&format!("topic {topic} for dead letters")), "{shown}");
    }
}
