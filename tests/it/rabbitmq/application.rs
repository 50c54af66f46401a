//! What comes of unacked deliveries when the application breaks, or the sidecar goes.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use inboxd_conformance::app::{Answer, App};
use inboxd_conformance::{ensure, eventually};
use lapin::types::AMQPValue;
use nix::sys::signal::Signal;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};

use super::{Tap, outcomes, queue_with};
use crate::support::{
    Broker, BrokerKind, Database, DatabaseKind, Message, PATIENCE, Sidecar, all_consume, config,
    stop_all,
};

/// An answer that does not come within a test.
const NEVER: Duration = Duration::from_secs(600);
/// Each message is for itself: no rest for the application.
const RETRY_SOON: &str = "retry = { initial = \"20ms\", cap = \"100ms\" }\n\
                          park = { initial = \"50ms\", cap = \"100ms\" }\nbreaker = { failures = 0 }";

/// What a handler that panics, and the server around it, may leave on the wire.
const FAULTS: [&[u8]; 8] = [
    b"",
    b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\n\r\n",
    b"\x00\x16\x03\x01 thread 'handler' panicked\r\n\r\n",
    b"HTTP/1.1 20",
    b"HTTP/1.1 OK\r\n\r\n",
    b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 500\r\n\r\n<html>",
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: soon\r\ntransfer-encoding: chunked\r\n\r\nzz",
    b"HTTP/1.1 500 A\r\ncontent-length: -1\r\n\r\n",
];
/// How many of them each `bad-…` message meets before it is answered.
const FAULTS_EACH: usize = 4;

type Seen = Arc<Mutex<BTreeMap<String, usize>>>;

/// An application that answers `bad-N…` with one fault after the other, then `…-refused` with
/// 422 and everything else with 200.
struct Broken {
    addr: SocketAddr,
    /// POSTs of each id.
    seen: Seen,
    serving: AbortHandle,
}

impl Broken {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let addr = listener.local_addr().expect("an address");
        let seen = Seen::default();
        let book = Arc::clone(&seen);
        let serving = tokio::spawn(async move {
            // Dropped with this task, it ends its connections.
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn(answer(stream, Arc::clone(&book)));
            }
        });
        Self { addr, seen, serving: serving.abort_handle() }
    }

    fn posts(&self, id: &str) -> usize {
        self.seen.lock().expect("no panic").get(id).copied().unwrap_or(0)
    }
}

impl Drop for Broken {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

/// One request, one answer, the end. What fails here is what a client that goes away does.
async fn answer(stream: TcpStream, seen: Seen) -> std::io::Result<()> {
    let mut stream = BufReader::new(stream);
    let (mut id, mut length) = (String::new(), 0);
    loop {
        let mut line = String::new();
        if stream.read_line(&mut line).await? == 0 {
            return Ok(());
        }
        let line = line.trim_end().to_ascii_lowercase();
        if line.is_empty() {
            break;
        }
        match line.split_once(": ") {
            Some(("inbox-message-id", value)) => value.clone_into(&mut id),
            Some(("content-length", value)) => length = value.parse().expect("a length"),
            _ => {}
        }
    }
    stream.read_exact(&mut vec![0; length]).await?;
    let before = {
        let mut seen = seen.lock().expect("no panic");
        let times = seen.entry(id.clone()).or_default();
        *times += 1;
        *times - 1
    };
    let which = id.strip_prefix("bad-").and_then(|rest| rest[..1].parse::<usize>().ok());
    let bytes: &[u8] = match which {
        Some(n) if before < FAULTS_EACH => FAULTS[(n + before * 2) % FAULTS.len()],
        Some(_) if id.ends_with("-refused") => {
            b"HTTP/1.1 422 No\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
        }
        _ => b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n",
    };
    stream.write_all(bytes).await?;
    if bytes.is_empty() {
        // A reset, not an end.
        stream.get_ref().set_zero_linger()?;
    }
    Ok(())
}

/// R6: five that break the application fill the prefetch; each comes to its end, and what is
/// behind them flows.
#[tokio::test(flavor = "multi_thread")]
async fn an_application_that_breaks_five_times_at_once_stops_nothing() {
    let run = async |kind, end: &str, outcome: &str| {
        let app = Broken::start().await;
        let database = Database::new(DatabaseKind::Sqlite);
        let broker = Broker::new(kind).await.with_source_keys("prefetch = 5");
        let group = broker.name.clone();
        let callback = format!("http://{}/", app.addr);
        let bad: Vec<_> = (0..5).map(|n| format!("bad-{n}{end}")).collect();
        broker.publish(bad.iter().map(Message::id)).await;
        broker.publish((0..20).map(|n| Message::id(format!("good-{n}")))).await;
        let mut sidecar =
            Sidecar::start(&config(&broker, &database, &group, &callback, RETRY_SOON, ""));
        eventually(PATIENCE, async || {
            let good = (0..20).filter(|n| app.posts(&format!("good-{n}")) > 0).count();
            ensure(good == 20, format!("{good} of 20; log:\n{}", sidecar.log()))
        })
        .await;
        // Those that no retry slot was free for were parked, and are forwarded by a worker.
        let dead_are = if outcome == "processed" { 0 } else { bad.len() };
        eventually(PATIENCE, async || {
            let (rows, dead) = (database.rows(&group).await.len(), database.dead(&group).await);
            ensure(
                (rows, dead.len()) == (25 - dead_are, dead_are),
                format!("{rows} rows, dead {dead:?}; log:\n{}", sidecar.log()),
            )
        })
        .await;
        for id in &bad {
            assert_eq!(app.posts(id), FAULTS_EACH + 1, "{id}");
        }
        let dead = database.dead(&group).await.into_keys().collect::<Vec<_>>();
        assert_eq!(dead, if outcome == "processed" { vec![] } else { bad });
        let panics = sidecar.metric("inboxd_attempt_panics_total", &[]).await;
        assert_eq!(panics, 0.0, "{}", sidecar.log());
        stop_all(&broker, &group, std::slice::from_mut(&mut sidecar)).await;
    };
    tokio::join!(
        run(BrokerKind::RabbitClassic, "", "processed"),
        run(BrokerKind::RabbitQuorum, "-refused", "dead_lettered"),
    );
}

/// R8: everything behind the first is acked, the first is not; the process dies.
#[tokio::test(flavor = "multi_thread")]
async fn acks_of_later_messages_do_not_take_the_first_along() {
    let run = async |kind| {
        let app = App::start().await;
        app.plan("m0", [Answer::status(200).after(NEVER)]);
        let database = Database::new(DatabaseKind::Sqlite);
        let broker = Broker::new(kind).await.with_source_keys("prefetch = 50");
        let group = broker.name.clone();
        let ids = || (0..40).map(|n| format!("m{n}"));
        broker.publish(ids().map(Message::id)).await;
        let mut sidecar =
            Sidecar::start(&config(&broker, &database, &group, &app.url("/"), "", ""));
        outcomes(&sidecar, "processed", 39).await;
        assert_eq!(sidecar.in_flight().await, 1);
        sidecar.kill().await;
        assert!(!database.rows(&group).await.contains("m0"));
        sidecar.start_again();
        eventually(PATIENCE, async || ensure(app.ledger().accepted("m0") == 1, sidecar.log()))
            .await;
        let again: Vec<_> = ids().filter(|id| app.ledger().begun_of(id) != 1).collect();
        assert_eq!(again, ["m0"], "{kind:?}");
        let redelivered = app.ledger().posts("m0")[1].header("inbox-redelivered");
        assert_eq!(redelivered.as_deref(), Some("true"));
        stop_all(&broker, &group, std::slice::from_mut(&mut sidecar)).await;
    };
    tokio::join!(run(BrokerKind::RabbitClassic), run(BrokerKind::RabbitQuorum));
}

/// SIGTERM: what has not started goes to the other replica at once, while the first lets its
/// POST finish.
#[tokio::test(flavor = "multi_thread")]
async fn a_replica_that_stops_hands_over_what_it_has_not_started() {
    let run = async |kind, database| {
        let app = App::start().await;
        let slow = Answer::status(200).after(Duration::from_secs(10));
        app.plan_with(move |post| (post.path == "/first").then(|| slow.clone()));
        let database = Database::new(database);
        let broker = Broker::new(kind).await.with_source_keys("prefetch = 20");
        let group = broker.name.clone();
        let keys = "concurrency = 1";
        let config = |route| config(&broker, &database, &group, &app.url(route), keys, "");
        let mut first = Sidecar::start(&config("/first"));
        first.ready().await;
        broker.publish((0..20).map(|n| Message::id(format!("m{n}")))).await;
        eventually(PATIENCE, async || {
            let held = (first.in_flight().await, app.ledger().begun());
            ensure(held == (20, 1), format!("{held:?}; log:\n{}", first.log()))
        })
        .await;
        let slow = app.ledger().all()[0].id.clone();
        let mut second = Sidecar::start(&config("/second"));
        all_consume(&broker, std::slice::from_ref(&second)).await;

        first.signal(Signal::SIGTERM);
        let others: Vec<_> = (0..20).map(|n| format!("m{n}")).filter(|id| *id != slow).collect();
        eventually(PATIENCE, async || {
            let accepted = others.iter().filter(|id| app.ledger().accepted(id) == 1).count();
            ensure(accepted == 19, format!("{accepted} of 19; log:\n{}", second.log()))
        })
        .await;
        assert_eq!(app.ledger().accepted(&slow), 0, "{kind:?}: only when the first had finished");
        assert!(first.is_running());
        let status = first.ended().await;
        assert!(status.success(), "{status}:\n{}", first.log());
        assert_eq!(app.ledger().accepted(&slow), 1);
        stop_all(&broker, &group, std::slice::from_mut(&mut second)).await;
        assert!((0..20).all(|n| app.ledger().begun_of(&format!("m{n}")) == 1), "one POST each");
    };
    tokio::join!(
        run(BrokerKind::RabbitClassic, DatabaseKind::Postgres),
        run(BrokerKind::RabbitQuorum, DatabaseKind::MariaDb),
    );
}

fn delivery_count(app: &App, id: &str) -> u32 {
    let posts = app.ledger().posts(id);
    let header = posts.last().and_then(|post| post.header("inbox-header-x-delivery-count"));
    header.map_or(0, |count| count.parse().expect("a number"))
}

async fn limited_queue() -> Broker {
    // Beyond it the broker throws a message away: there is no dead-letter exchange.
    queue_with(BrokerKind::RabbitQuorum, &[("x-delivery-limit", AMQPValue::LongInt(4))]).await
}

/// R4's half: restarts while there is no application, and attempts that fail, cost nothing of a
/// quorum queue's delivery limit.
#[tokio::test(flavor = "multi_thread")]
async fn an_absent_application_costs_nothing_of_the_delivery_limit() {
    let mut app = App::not_started();
    let database = Database::new(DatabaseKind::Sqlite);
    let broker = limited_queue().await;
    let group = broker.name.clone();
    let ids: Vec<_> = (0..20).map(|n| format!("m{n}")).collect();
    broker.publish(ids.iter().map(Message::id)).await;
    let config = config(&broker, &database, &group, &app.url("/"), RETRY_SOON, "");
    let mut sidecar = Sidecar::start(&config);
    for round in 0..6 {
        sidecar.readiness(503, "\"source:orders\":{\"ready\":true").await;
        if round % 2 == 0 {
            let status = sidecar.stop().await;
            assert!(status.success(), "{status}:\n{}", sidecar.log());
        } else {
            sidecar.kill().await;
        }
        sidecar.start_again();
    }
    // It is there and broken, goes away, and is back.
    app.set_default(Answer::status(503));
    app.restart().await;
    eventually(PATIENCE, async || ensure(app.ledger().begun() >= 60, sidecar.log())).await;
    app.stop().await;
    sidecar.ready().await;
    app.set_default(Answer::status(200));
    app.restart().await;
    eventually(PATIENCE, async || {
        let rows = database.rows(&group).await.len();
        ensure(rows == 20, format!("{rows} rows; log:\n{}", sidecar.log()))
    })
    .await;
    let counts: Vec<_> = ids.iter().map(|id| delivery_count(&app, id)).collect();
    assert_eq!(counts, [0; 20], "{}", sidecar.log());
    stop_all(&broker, &group, std::slice::from_mut(&mut sidecar)).await;
}

/// A restart costs what it holds one of the limit, started or not, and never more.
#[tokio::test(flavor = "multi_thread")]
async fn a_restart_costs_one_of_the_delivery_limit() {
    let app = App::start().await;
    let database = Database::new(DatabaseKind::Sqlite);
    let broker = limited_queue().await.with_source_keys("prefetch = 10");
    let group = broker.name.clone();
    let ids: Vec<_> = (0..10).map(|n| format!("m{n}")).collect();
    broker.publish(ids.iter().map(Message::id)).await;
    app.hold();
    let config = config(&broker, &database, &group, &app.url("/"), "concurrency = 2", "");
    let mut sidecar = Sidecar::start(&format!("shutdown_grace = \"1s\"\n{config}"));
    for round in 1..=3 {
        eventually(PATIENCE, async || {
            let begun = app.ledger().begun();
            ensure(sidecar.in_flight().await == 10 && begun >= 2 * round, sidecar.log())
        })
        .await;
        let status = sidecar.stop().await;
        assert!(status.success(), "{status}:\n{}", sidecar.log());
        let tap = Tap::open(&broker).await;
        tap.counts((10, 0), &sidecar).await;
        tap.close().await;
        sidecar.start_again();
    }
    app.let_go();
    outcomes(&sidecar, "processed", 10).await;
    let counts: Vec<_> = ids.iter().map(|id| delivery_count(&app, id)).collect();
    assert!(counts.iter().all(|count| *count <= 3), "{counts:?}");
    stop_all(&broker, &group, std::slice::from_mut(&mut sidecar)).await;
}
