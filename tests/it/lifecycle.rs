//! Starting, draining and ending; several subscriptions of which some cannot work; flags
//! alone.

use std::process::Stdio;
use std::time::{Duration, Instant};

use inboxd_conformance::app::{Answer, App};
use inboxd_conformance::net::Proxy;
use inboxd_conformance::{ensure, eventually};
use nix::sys::signal::Signal;
use url::Url;

use crate::support::{
    Broker, BrokerKind, Database, DatabaseKind, Message, PATIENCE, Sidecar, config, stop_all,
    subscription,
};

const SECOND: Duration = Duration::from_secs(1);

/// L1: SIGTERM while the application is at work.
async fn drains(broker: BrokerKind, database: DatabaseKind) {
    let app = App::start().await;
    app.hold();
    let database = Database::new(database);
    let broker = Broker::new(broker).await;
    let group = broker.name.clone();
    let config = config(&broker, &database, &group, &app.url("/"), "concurrency = 1", "");
    let mut sidecar = Sidecar::start(&config);
    sidecar.ready().await;
    broker.publish([Message::id("m1").partition(0)]).await;
    eventually(PATIENCE, async || ensure(app.ledger().begun() == 1, sidecar.log())).await;
    // One that waits for its turn and must not start.
    broker.publish([Message::id("m2").partition(0)]).await;
    eventually(PATIENCE, async || {
        let in_flight = sidecar.in_flight().await;
        ensure(in_flight == 2, format!("{in_flight} in flight; log:\n{}", sidecar.log()))
    })
    .await;

    let asked = Instant::now();
    sidecar.signal(Signal::SIGTERM);
    sidecar.readiness(503, "\"draining\":true").await;
    assert_eq!(sidecar.get("/livez").await.map(|(status, _)| status), Some(200));
    let (status, metrics) = sidecar.get("/metrics").await.expect("served to the end");
    assert_eq!((status, metrics.contains("inboxd_in_flight_deliveries")), (200, true));
    tokio::time::sleep(2 * SECOND).await;
    assert!(sidecar.is_running(), "it waits for the POST:\n{}", sidecar.log());
    assert_eq!(app.ledger().open().len(), 1);
    app.let_go();
    let status = sidecar.ended().await;
    assert_eq!(status.code(), Some(0), "{}", sidecar.log());
    assert!(asked.elapsed() < 20 * SECOND, "it did not wait for the end of the grace period");

    let posts = app.ledger().all();
    let seen: Vec<_> = posts.iter().map(|post| (&*post.id, post.attempt, post.status)).collect();
    assert_eq!(seen, [("m1", 1, Some(200))], "one whole POST and no other");
    assert_eq!(database.rows(&group).await.into_iter().collect::<Vec<_>>(), ["m1"]);
    eventually(PATIENCE, async || {
        let left = broker.left(&group).await;
        ensure(left == 1, format!("{left} left: m1 is acked, m2 went back"))
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signal_lets_the_post_end_and_acks_it() {
    tokio::join!(
        drains(BrokerKind::RabbitQuorum, DatabaseKind::Postgres),
        drains(BrokerKind::RabbitClassic, DatabaseKind::Sqlite),
        drains(BrokerKind::Kafka, DatabaseKind::MariaDb),
    );
}

/// The grace period is over, or a second signal comes: nothing unsettled is acked, and the
/// message comes again.
async fn ends_though_the_application_hangs(broker: BrokerKind, second_signal: bool) {
    let app = App::start().await;
    app.plan("m1", [Answer::status(200).after(60 * SECOND)]);
    let database = Database::new(DatabaseKind::Sqlite);
    let broker = Broker::new(broker).await;
    let group = broker.name.clone();
    let grace = if second_signal { "60s" } else { "1s" };
    // The claim that was cut has to run out, or, on SQLite, is cleared at the next start.
    let config = format!(
        "shutdown_grace = \"{grace}\"\n{}",
        config(&broker, &database, &group, &app.url("/"), "", "")
    );
    let mut sidecar = Sidecar::start(&config);
    sidecar.ready().await;
    broker.publish([Message::id("m1")]).await;
    eventually(PATIENCE, async || ensure(app.ledger().begun() == 1, sidecar.log())).await;
    let asked = Instant::now();
    sidecar.signal(Signal::SIGTERM);
    let expected = if second_signal {
        sidecar.readiness(503, "\"draining\":true").await;
        tokio::time::sleep(Duration::from_millis(200)).await;
        sidecar.signal(Signal::SIGTERM);
        143
    } else {
        0
    };
    let status = sidecar.ended().await;
    assert_eq!(status.code(), Some(expected), "{status}:\n{}", sidecar.log());
    assert!(asked.elapsed() < 15 * SECOND, "{:?}", asked.elapsed());
    assert!(database.rows(&group).await.is_empty());

    sidecar.start_again();
    eventually(PATIENCE, async || {
        let rows = database.rows(&group).await;
        ensure(rows.contains("m1"), format!("{rows:?}; log:\n{}", sidecar.log()))
    })
    .await;
    assert_eq!(app.ledger().begun_of("m1"), 2);
    stop_all(&broker, &group, &mut [sidecar]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_grace_period_ends_what_hangs_and_a_second_signal_ends_at_once() {
    tokio::join!(
        ends_though_the_application_hangs(BrokerKind::RabbitClassic, true),
        ends_though_the_application_hangs(BrokerKind::Kafka, true),
        ends_though_the_application_hangs(BrokerKind::RabbitQuorum, false),
        ends_though_the_application_hangs(BrokerKind::Kafka, false),
    );
}

/// `host:port` of a broker's server.
fn address(broker: &Broker) -> String {
    match broker.kind {
        BrokerKind::Kafka => broker.url().split(',').next().expect("a server").to_owned(),
        _ => {
            let url = Url::parse(broker.url()).expect("a URL");
            format!("{}:{}", url.host_str().expect("a host"), url.port().unwrap_or(5672))
        }
    }
}

/// The broker's URL with another address.
fn at(broker: &Broker, proxy: &Proxy) -> String {
    match broker.kind {
        BrokerKind::Kafka => proxy.addr.to_string(),
        _ => {
            let mut url = Url::parse(broker.url()).expect("a URL");
            url.set_ip_host(proxy.addr.ip()).expect("a host");
            url.set_port(Some(proxy.port())).expect("a port");
            url.into()
        }
    }
}

/// L3: the broker is not there at first. For Kafka the proxy stands before the first contact.
async fn broker_comes_later(broker: BrokerKind) {
    let app = App::start().await;
    let database = Database::new(DatabaseKind::Sqlite);
    let broker = Broker::new(broker).await;
    let group = broker.name.clone();
    broker.publish([Message::id("m1")]).await;
    let proxy = Proxy::start(address(&broker)).await;
    proxy.cut();
    let config = format!(
        "{}\n{}\n{}",
        database.config(),
        broker.config_with(&at(&broker, &proxy)),
        subscription("orders", &broker, &group, &app.url("/"), ""),
    );
    let mut sidecar = Sidecar::start(&config);
    sidecar.readiness(503, "\"source:orders\":{\"ready\":false,\"reason\":\"").await;
    // Long enough for several tries, and for all that does not depend on the broker.
    let until = Instant::now() + 4 * SECOND;
    while Instant::now() < until {
        let (status, body) = sidecar.get("/readyz").await.expect("served from the start");
        assert_eq!(status, 503, "ready without a broker: {body}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    assert!(sidecar.is_running(), "{}", sidecar.log());
    assert_eq!(sidecar.get("/livez").await.map(|(status, _)| status), Some(200));
    let body = sidecar.get("/readyz").await.expect("served").1;
    assert!(body.contains("\"database\":{\"ready\":true}"), "{body}");

    proxy.heal();
    let healed = Instant::now();
    eventually(30 * SECOND, async || {
        let accepted = app.ledger().accepted("m1");
        ensure(
            accepted == 1,
            format!("{:?}; log:\n{}", sidecar.get("/readyz").await, sidecar.log()),
        )
    })
    .await;
    println!("{:?}: consumed {:?} after its broker came", broker.kind, healed.elapsed());
    sidecar.ready().await;
    stop_all(&broker, &group, &mut [sidecar]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_comes_later_is_consumed_within_half_a_minute() {
    tokio::join!(
        broker_comes_later(BrokerKind::RabbitQuorum),
        broker_comes_later(BrokerKind::Kafka),
    );
}

/// One broker is away, one speaks another protocol, one application is not there, one hangs:
/// each is named, and what has nothing to do with them flows.
#[tokio::test(flavor = "multi_thread")]
async fn subscriptions_of_one_process_do_not_hold_each_other_up() {
    let (app, hanging) = (App::start().await, App::start().await);
    let absent = App::not_started();
    hanging.hold();
    let database = Database::new(DatabaseKind::Postgres);
    let flowing = Broker::new(BrokerKind::RabbitClassic).await;
    let mut records = Broker::new(BrokerKind::Kafka).await;
    records.label = "records";
    let (held, waiting) = (flowing.sibling().await, flowing.sibling().await);
    let proxy = Proxy::start(address(&flowing)).await;
    proxy.cut();
    let mut away = flowing.sibling().await;
    away.label = "away";
    let mut odd = flowing.sibling().await;
    odd.label = "odd";
    let odd_url = format!("amqp://guest:guest@{}/", app.addr());
    let tables = [
        database.config(),
        flowing.config(),
        records.config(),
        away.config_with(&at(&away, &proxy)),
        odd.config_with(&odd_url),
        subscription("flowing", &flowing, &flowing.name, &app.url("/flowing"), ""),
        subscription("records", &records, &records.name, &app.url("/records"), ""),
        subscription("away", &away, &away.name, &app.url("/away"), ""),
        subscription("odd", &odd, &odd.name, &app.url("/odd"), ""),
        subscription("held", &held, &held.name, &hanging.url("/held"), ""),
        subscription("waiting", &waiting, &waiting.name, &absent.url("/waiting"), ""),
    ];
    let config = format!("shutdown_grace = \"2s\"\n{}", tables.join("\n"));
    let mut sidecar = Sidecar::start(&config);
    held.publish((0..40).map(|n| Message::id(format!("held-{n}")))).await;
    waiting.publish([Message::id("waiting")]).await;
    away.publish([Message::id("away")]).await;
    eventually(PATIENCE, async || {
        let posts = hanging.ledger().begun();
        ensure(posts == 16, format!("{posts} POSTs hang; log:\n{}", sidecar.log()))
    })
    .await;
    for (n, broker) in [&flowing, &records].into_iter().enumerate() {
        broker.publish((0..50).map(|m| Message::id(format!("{n}-{m}")))).await;
    }
    eventually(PATIENCE, async || {
        let rows =
            database.rows(&flowing.name).await.len() + database.rows(&records.name).await.len();
        ensure(rows == 100, format!("{rows} rows; log:\n{}", sidecar.log()))
    })
    .await;
    for name in ["source:away", "source:odd", "callback:waiting"] {
        sidecar.readiness(503, &format!("\"{name}\":{{\"ready\":false,\"reason\":\"")).await;
    }
    for name in ["database", "source:flowing", "source:records", "source:held", "callback:held"] {
        sidecar.readiness(503, &format!("\"{name}\":{{\"ready\":true")).await;
    }
    // The reasons say where.
    sidecar.readiness(503, &absent.addr().to_string()).await;
    sidecar.readiness(503, &proxy.addr.to_string()).await;
    assert_eq!(sidecar.get("/livez").await.map(|(status, _)| status), Some(200));
    assert_eq!(sidecar.outcomes_of("flowing", "processed").await, 50);
    assert_eq!(sidecar.outcomes_of("held", "processed").await, 0);

    // The broker that was away comes, and so does the application.
    proxy.heal();
    eventually(PATIENCE, async || ensure(app.ledger().accepted("away") == 1, sidecar.log())).await;
    let mut absent = absent;
    absent.restart().await;
    eventually(PATIENCE, async || ensure(absent.ledger().accepted("waiting") == 1, sidecar.log()))
        .await;
    let status = sidecar.stop().await;
    assert!(status.success(), "what hangs does not keep it: {status}\n{}", sidecar.log());
    assert!(database.rows(&held.name).await.is_empty());
    eventually(PATIENCE, async || {
        let left = held.left(&held.name).await;
        ensure(left == 40, format!("{left} of 40 went back"))
    })
    .await;
}

/// Readiness says why: a database that goes away, an application that was never there.
#[tokio::test(flavor = "multi_thread")]
async fn readiness_names_what_is_missing_and_comes_back() {
    let mut app = App::not_started();
    let database = Database::new(DatabaseKind::MariaDb);
    let proxy = Proxy::start(database.address()).await;
    let database = database.through(proxy.addr);
    let broker = Broker::new(BrokerKind::RabbitQuorum).await;
    let group = broker.name.clone();
    broker.publish([Message::id("m1")]).await;
    let sidecar = Sidecar::start(&config(&broker, &database, &group, &app.url("/"), "", ""));
    sidecar.readiness(503, "\"callback:orders\":{\"ready\":false,\"reason\":\"").await;
    sidecar.readiness(503, "\"database\":{\"ready\":true}").await;
    assert_eq!(broker.left(&group).await, 1, "nothing is consumed before the application is there");
    app.restart().await;
    sidecar.ready().await;
    eventually(PATIENCE, async || ensure(app.ledger().accepted("m1") == 1, sidecar.log())).await;

    proxy.cut();
    sidecar.readiness(503, "\"database\":{\"ready\":false,\"reason\":\"").await;
    sidecar.readiness(503, "\"code\":\"database_unavailable\"").await;
    assert_eq!(sidecar.get("/livez").await.map(|(status, _)| status), Some(200));
    proxy.heal();
    sidecar.ready().await;
    assert_eq!(sidecar.get("/elsewhere").await.map(|(status, _)| status), Some(404));
    stop_all(&broker, &group, &mut [sidecar]).await;
}

/// A login that is refused: named with the user, and without the secret.
#[tokio::test(flavor = "multi_thread")]
async fn a_refused_login_is_named_without_its_secret() {
    let app = App::start().await;
    let database = Database::new(DatabaseKind::Sqlite);
    let broker = Broker::new(BrokerKind::RabbitClassic).await;
    let mut url = Url::parse(broker.url()).expect("a URL");
    url.set_username("nobody").expect("a user");
    url.set_password(Some("hunter2-geheim")).expect("a password");
    let config = format!(
        "{}\n{}\n{}",
        database.config(),
        broker.config_with(url.as_str()),
        subscription("orders", &broker, &broker.name, &app.url("/"), ""),
    );
    let mut sidecar = Sidecar::start_with(&config, &[("RUST_LOG", "debug")]);
    sidecar.readiness(503, "nobody").await;
    let (_, body) = sidecar.get("/readyz").await.expect("served");
    assert!(sidecar.stop().await.success(), "{}", sidecar.log());
    for told in [body, sidecar.log()] {
        assert!(told.contains("\"code\":\"source_login_refused\""), "{told}");
        assert!(!told.contains("hunter2-geheim"), "a secret is shown: {told}");
    }
}

/// What is waited for at the start does not keep the process from ending: a database, a broker,
/// an application.
#[tokio::test(flavor = "multi_thread")]
async fn a_signal_ends_a_start_that_waits() {
    let (app, absent) = (App::start().await, App::not_started());
    let sqlite = Database::new(DatabaseKind::Sqlite);
    let postgres = Database::new(DatabaseKind::Postgres);
    let (queue, topic) =
        (Broker::new(BrokerKind::RabbitQuorum).await, Broker::new(BrokerKind::Kafka).await);
    let mut proxies = Vec::new();
    for address in [postgres.address(), address(&queue), address(&topic)] {
        let proxy = Proxy::start(address).await;
        proxy.cut();
        proxies.push(proxy);
    }
    let postgres = postgres.through(proxies[0].addr);
    let with = |database: &Database, broker: &Broker, table: String, app: &App| {
        let subscription = subscription("orders", broker, &broker.name, &app.url("/"), "");
        format!("{}\n{table}\n{subscription}", database.config())
    };
    let away = [
        ("database", with(&postgres, &queue, queue.config(), &app)),
        ("source:orders", with(&sqlite, &queue, queue.config_with(&at(&queue, &proxies[1])), &app)),
        ("source:orders", with(&sqlite, &topic, topic.config_with(&at(&topic, &proxies[2])), &app)),
        ("callback:orders", with(&sqlite, &topic, topic.config(), &absent)),
    ];
    for (missing, config) in away {
        let mut sidecar = Sidecar::start(&config);
        sidecar.readiness(503, &format!("\"{missing}\":{{\"ready\":false,\"reason\":\"")).await;
        let asked = Instant::now();
        let status = sidecar.stop().await;
        assert_eq!(status.code(), Some(0), "{missing}: {}", sidecar.log());
        assert!(asked.elapsed() < 10 * SECOND, "{missing}: {:?}", asked.elapsed());
        println!("{missing}: {:?}", asked.elapsed());
    }
}

/// Flags alone, with a database beside the process's directory or anywhere.
#[tokio::test(flavor = "multi_thread")]
async fn flags_alone_are_enough() {
    let app = App::start().await;
    let directory = tempfile::tempdir().expect("a temporary directory");
    let local = App::start_unix(directory.path().join("app.sock")).await;
    let queue = Broker::new(BrokerKind::RabbitQuorum).await;
    let topic = Broker::new(BrokerKind::Kafka).await;
    let from_rabbitmq = format!("{}?queue={}&prefetch=64", queue.url(), queue.name);
    let from_kafka = format!("kafka://{}/{}?group={}", topic.url(), topic.name, topic.name);
    let (by_tcp, by_socket) = (app.url("/orders"), local.url("/orders"));
    let mut one = Sidecar::start_flags(&["--source", &from_rabbitmq, "--callback", &by_tcp]);
    let (database, _) = Database::own(DatabaseKind::Postgres).await;
    let mut other = Sidecar::start_flags(&[
        "--source",
        &from_kafka,
        "--callback",
        &by_socket,
        "--database",
        database.url(),
        "--consumer-id",
        "billing",
    ]);
    queue.publish([Message::id("from RabbitMQ"), Message::id("from RabbitMQ")]).await;
    topic.publish([Message::id("from Kafka"), Message::id("from Kafka")]).await;
    eventually(PATIENCE, async || {
        let mut seen = Vec::new();
        for sidecar in [&one, &other] {
            let processed = sidecar.outcomes_of("default", "processed").await;
            let again = sidecar.outcomes_of("default", "duplicate").await
                + sidecar.outcomes_of("default", "duplicate_in_flight").await;
            seen.push((processed, again));
        }
        ensure(seen == [(1, 1), (1, 1)], format!("{seen:?}\n{}\n{}", one.log(), other.log()))
    })
    .await;
    let consumers = [(&app, "from RabbitMQ"), (&local, "from Kafka")].map(|(app, id)| {
        let post = app.ledger().posts(id).remove(0);
        assert_eq!(post.path, "/orders");
        post.consumer_id
    });
    assert_eq!(consumers, [queue.name.as_str(), "billing"], "the queue's name, or what is said");
    for sidecar in [&mut one, &mut other] {
        sidecar.ready().await;
        let status = sidecar.stop().await;
        assert!(status.success(), "{}", sidecar.log());
    }
    eventually(PATIENCE, async || {
        let left = (queue.left(&queue.name).await, topic.left(&topic.name).await);
        ensure(left == (0, 0), format!("{left:?} left"))
    })
    .await;
}

/// `migrate` makes the tables, again and from several processes at once, and ends.
#[tokio::test(flavor = "multi_thread")]
async fn migrate_makes_the_tables_and_ends() {
    for kind in DatabaseKind::ALL {
        let (database, _) = Database::own(kind).await;
        let migrate = || {
            tokio::process::Command::new(env!("CARGO_BIN_EXE_inboxd"))
                .args(["migrate", "--database", database.url()])
                .stdin(Stdio::null())
                .kill_on_drop(true)
                .output()
        };
        // SQLite is one process's alone.
        if kind != DatabaseKind::Sqlite {
            for output in [tokio::join!(migrate(), migrate(), migrate())]
                .into_iter()
                .flat_map(|(first, second, third)| [first, second, third])
            {
                let output = output.expect("run");
                assert!(output.status.success(), "{kind:?}: {output:?}");
            }
        }
        let output = migrate().await.expect("run");
        assert!(output.status.success(), "{kind:?}: {output:?}");
        let mut session = database.session().await;
        for table in ["inbox_messages", "inbox_claims", "inbox_parked"] {
            assert_eq!(session.number(&format!("SELECT COUNT(*) FROM {table}")).await, 0);
        }
    }
}
