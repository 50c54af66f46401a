//! L5: a collector that is not there costs no message anything and delays no exit.

use std::time::{Duration, Instant};

use inboxd_conformance::app::App;
use inboxd_conformance::net::ReservedPort;
use inboxd_conformance::{ensure, eventually};
use tokio::net::TcpListener;
use tokio::process::Command;

use super::{Collector, SOON, table};
use crate::support::{
    Broker, BrokerKind, Database, DatabaseKind, Message, PATIENCE, Sidecar, config,
};

const COUNT: usize = 300;
/// The sidecar's grace period; what the test asks for leaves room for a busy machine.
const GRACE: Duration = Duration::from_secs(5);

/// Delivers on one processor with this collector, then stops; answers what was dropped.
async fn delivers_and_stops(endpoint: &str) -> f64 {
    let app = App::start().await;
    let broker = Broker::new(BrokerKind::RabbitClassic).await;
    let database = Database::new(DatabaseKind::Sqlite);
    let telemetry = format!(
        "shutdown_grace = \"5s\"\n{}\n[telemetry]\nendpoint = \"{endpoint}\"\n\
         metrics_interval = \"1s\"\ntimeout = \"30s\"\n",
        config(&broker, &database, &broker.name, &app.url("/"), "", "")
    );
    // Fewer than there are spans.
    let mut sidecar = Sidecar::start_with(&telemetry, &[SOON, ("OTEL_BSP_MAX_QUEUE_SIZE", "64")]);
    let pid = sidecar.pid().to_string();
    let pinned = Command::new("taskset").args(["-a", "-p", "-c", "0", &pid]).output().await;
    let pinned = pinned.expect("taskset, of util-linux, is there");
    assert!(pinned.status.success(), "{pinned:?}");
    sidecar.ready().await;
    broker.publish((0..COUNT).map(|number| Message::id(format!("m-{number}")))).await;
    eventually(PATIENCE, async || {
        ensure(sidecar.outcomes("processed").await == COUNT as u64, sidecar.log())
    })
    .await;
    assert_eq!(app.ledger().begun(), COUNT, "each was forwarded once");
    let dropped = sidecar.metric("inboxd_telemetry_spans_dropped_total", &[]).await;

    let asked = Instant::now();
    let status = sidecar.stop().await;
    let took = asked.elapsed();
    assert_eq!(status.code(), Some(0), "{status}:\n{}", sidecar.log());
    assert!(took < GRACE, "{took:?}:\n{}", sidecar.log());
    let told = sidecar.log().matches("telemetry_not_sent").count();
    assert!(told <= 2, "once for each signal, not {told} times:\n{}", sidecar.log());
    dropped
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collector_that_accepts_and_never_answers_delays_nothing() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let endpoint = format!("http://{}", listener.local_addr().expect("its address"));
    let silent = tokio::spawn(async move {
        let mut kept = Vec::new();
        while let Ok((stream, _)) = listener.accept().await {
            kept.push(stream);
        }
    });
    let dropped = delivers_and_stops(&endpoint).await;
    assert!(dropped > 0.0, "the queue is bounded, and what it drops is counted");
    silent.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collector_that_refuses_connections_delays_nothing() {
    let port = ReservedPort::new().expect("a free port");
    delivers_and_stops(&format!("http://{}", port.addr())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collector_whose_name_does_not_resolve_delays_nothing() {
    delivers_and_stops("http://collector.invalid:4318").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_left_at_the_end_reaches_a_collector_that_answers() {
    let (collector, app) = (Collector::start().await, App::start().await);
    let broker = Broker::new(BrokerKind::RabbitClassic).await;
    let database = Database::new(DatabaseKind::Sqlite);
    let config = config(&broker, &database, &broker.name, &app.url("/"), "", &table(&collector));
    // No batch leaves before the end.
    let mut sidecar = Sidecar::start_with(&config, &[("OTEL_BSP_SCHEDULE_DELAY", "600000")]);
    broker.publish((0..20).map(|number| Message::id(format!("m-{number}")))).await;
    eventually(PATIENCE, async || ensure(sidecar.outcomes("processed").await == 20, sidecar.log()))
        .await;
    assert!(collector.spans().is_empty());
    assert_eq!(sidecar.stop().await.code(), Some(0));
    assert_eq!(collector.spans().len(), 40, "{}", sidecar.log());
}
