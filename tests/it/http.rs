//! The way to the application: connections that end at the wrong moment, answers that are lost,
//! proxies in the environment.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use inboxd_conformance::app::{Answer, App, Post};
use inboxd_conformance::net::{Act, Direction, Proxy};
use inboxd_conformance::{ensure, eventually};

use crate::support::{
    Broker, BrokerKind, Database, DatabaseKind, Message, PATIENCE, Sidecar, config, stop_all,
};

const RETRY_SOON: &str = "retry = { initial = \"20ms\", cap = \"100ms\" }";
const MESSAGES: usize = 20;

/// H1: a kept connection is closed just when it is used for the second time.
async fn keep_alive_race(broker: BrokerKind, database: DatabaseKind) {
    let app = App::start().await;
    let proxy = Proxy::start(app.addr()).await;
    let cuts = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&cuts);
    let mut used = HashSet::new();
    proxy.hook_each(move |connection, direction, chunk| {
        let begins = direction == Direction::ToServer && chunk.starts_with(b"POST ");
        if begins && !used.insert(connection) {
            counted.fetch_add(1, SeqCst);
            return Act::CutAfter(0);
        }
        Act::Pass
    });
    let database = Database::new(database);
    let broker = Broker::new(broker).await;
    let group = broker.name.clone();
    let callback = format!("http://{}/orders", proxy.addr);
    let keys = format!("concurrency = 1\n{RETRY_SOON}");
    let sidecar = Sidecar::start(&config(&broker, &database, &group, &callback, &keys, ""));
    sidecar.ready().await;
    broker.publish((0..MESSAGES).map(|n| Message::id(format!("m{n}")))).await;
    // Some are parked between two tries, where others keep the slots for those.
    eventually(PATIENCE, async || {
        let rows = database.rows(&group).await.len();
        ensure(rows == MESSAGES, format!("{rows} rows; log:\n{}", sidecar.log()))
    })
    .await;

    let cuts = cuts.load(SeqCst);
    assert!(cuts >= MESSAGES / 4, "{cuts} races: connections are not kept");
    let posts = app.ledger().all();
    assert_eq!(posts.len(), MESSAGES, "what was cut never came through");
    for post in &posts {
        assert_eq!(post.headers_named("idempotency-key"), [format!("\"{}\"", post.id)]);
    }
    let again: u32 = posts.iter().map(|post| post.attempt - 1).sum();
    assert_eq!(again as usize, cuts, "each race costs its message one attempt, none is hidden");
    assert!(database.dead(&group).await.is_empty());
    stop_all(&broker, &group, &mut [sidecar]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_is_closed_when_it_is_used_again_costs_one_attempt() {
    tokio::join!(
        keep_alive_race(BrokerKind::RabbitQuorum, DatabaseKind::Postgres),
        keep_alive_race(BrokerKind::Kafka, DatabaseKind::Sqlite),
    );
}

/// H2: the application commits and its answer is lost, before and after a restart.
async fn lost_answers(broker: BrokerKind, database: DatabaseKind) {
    let app = App::start().await;
    let lost = Arc::new(AtomicBool::new(true));
    let decides = Arc::clone(&lost);
    app.plan_with(move |_: &Post| decides.load(SeqCst).then(|| Answer::lost(200)));
    let database = Database::new(database);
    let broker = Broker::new(broker).await;
    let group = broker.name.clone();
    let mut sidecar =
        Sidecar::start(&config(&broker, &database, &group, &app.url("/orders"), RETRY_SOON, ""));
    sidecar.ready().await;
    let message = Message::id("order 1%")
        .body("paid: €5")
        .header("Idempotency-Key", "\"of the publisher\"")
        .header("Inbox-Message-Id", "forged");
    broker.publish([message]).await;
    eventually(PATIENCE, async || ensure(app.ledger().begun_of("order 1%") >= 2, sidecar.log()))
        .await;
    assert!(database.rows(&group).await.is_empty(), "no answer, no row");

    let status = sidecar.stop().await;
    assert!(status.success(), "{status}:\n{}", sidecar.log());
    let before = app.ledger().begun();
    sidecar.start_again();
    eventually(PATIENCE, async || ensure(app.ledger().begun() > before, sidecar.log())).await;
    lost.store(false, SeqCst);
    eventually(PATIENCE, async || {
        let rows = database.rows(&group).await;
        ensure(rows.contains("order 1%"), format!("{rows:?}; log:\n{}", sidecar.log()))
    })
    .await;

    let posts = app.ledger().all();
    assert!(posts.len() >= 3);
    for post in &posts {
        assert_eq!(post.headers_named("inbox-message-id"), ["order%201%25"]);
        assert_eq!(post.headers_named("idempotency-key"), ["\"order%201%25\""]);
        let copied = post.headers_named("inbox-header-idempotency-key");
        assert_eq!(copied, ["\"of the publisher\""], "{:?}", post.headers);
        assert_eq!(post.headers_named("inbox-header-inbox-message-id"), ["forged"]);
        assert_eq!(post.body.as_deref(), Some("paid: €5".as_bytes()));
    }
    let attempts: Vec<_> = posts.iter().map(|post| post.attempt).collect();
    assert!(attempts.is_sorted_by(|a, b| a < b), "attempts are counted on: {attempts:?}");
    stop_all(&broker, &group, &mut [sidecar]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_answer_brings_the_same_key_and_body_again_also_after_a_restart() {
    tokio::join!(
        lost_answers(BrokerKind::RabbitClassic, DatabaseKind::MariaDb),
        lost_answers(BrokerKind::Kafka, DatabaseKind::Postgres),
    );
}

/// H5: the environment names a proxy.
async fn through_a_proxy(broker: BrokerKind, variables: &[&str]) {
    let app = App::start().await;
    // Whatever comes here comes to the application too, but as a proxy is asked.
    let proxy = Proxy::start(app.addr()).await;
    let address = format!("http://{}", proxy.addr);
    let environment: Vec<_> = variables.iter().map(|name| (*name, address.as_str())).collect();
    let database = Database::new(DatabaseKind::Sqlite);
    let broker = Broker::new(broker).await;
    let group = broker.name.clone();

    let direct = config(&broker, &database, &group, &app.url("/orders"), "", "");
    let mut sidecar = Sidecar::start_with(&direct, &environment);
    broker.publish([Message::id("direct")]).await;
    eventually(PATIENCE, async || ensure(app.ledger().accepted("direct") == 1, sidecar.log()))
        .await;
    assert_eq!(proxy.accepted(), 0, "{variables:?}: loopback is reached directly");
    assert!(sidecar.stop().await.success());

    let callback = "http://orders.invalid/hook";
    let elsewhere = config(&broker, &database, &group, callback, "", "");
    let sidecar = Sidecar::start_with(&elsewhere, &environment);
    broker.publish([Message::id("proxied")]).await;
    eventually(PATIENCE, async || ensure(app.ledger().accepted("proxied") == 1, sidecar.log()))
        .await;
    assert!(proxy.accepted() > 0);
    let post = app.ledger().posts("proxied").remove(0);
    assert_eq!(post.header("host").as_deref(), Some("orders.invalid"));
    stop_all(&broker, &group, &mut [sidecar]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_proxy_in_the_environment_is_not_for_loopback() {
    tokio::join!(
        through_a_proxy(BrokerKind::RabbitClassic, &["HTTP_PROXY", "http_proxy"]),
        through_a_proxy(BrokerKind::Kafka, &["ALL_PROXY", "all_proxy"]),
    );
}

/// A server that says nothing costs the timeout and one attempt, not the message.
#[tokio::test(flavor = "multi_thread")]
async fn an_application_that_hangs_costs_an_attempt() {
    let app = App::start().await;
    app.plan("m1", [Answer::status(200).after(Duration::from_secs(60))]);
    let database = Database::new(DatabaseKind::Sqlite);
    let broker = Broker::new(BrokerKind::RabbitClassic).await;
    let group = broker.name.clone();
    let keys = format!("callback_timeout = \"300ms\"\nconnect_timeout = \"300ms\"\n{RETRY_SOON}");
    let sidecar = Sidecar::start(&config(&broker, &database, &group, &app.url("/"), &keys, ""));
    broker.publish([Message::id("m1"), Message::id("m2")]).await;
    eventually(PATIENCE, async || {
        let rows = database.rows(&group).await;
        ensure(rows.len() == 2, format!("{rows:?}; log:\n{}", sidecar.log()))
    })
    .await;
    let posts = app.ledger().posts("m1");
    assert_eq!(posts.iter().map(|post| post.attempt).collect::<Vec<_>>(), [1, 2]);
    assert_eq!(app.ledger().begun_of("m2"), 1, "others flow meanwhile");
    let timeouts = sidecar.metric("inboxd_forward_retries_total", &["reason=\"timeout\""]).await;
    assert_eq!(timeouts as u64, 1, "{:?}", sidecar.get("/metrics").await);
    stop_all(&broker, &group, &mut [sidecar]).await;
}
