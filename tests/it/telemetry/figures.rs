//! `/metrics` as Prometheus and operators take it.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use inboxd_conformance::app::{Answer, App};
use inboxd_conformance::{ensure, eventually};
use inboxd_contract::{PartitionReport, SourceStatus, StreamId};
use opentelemetry_proto::tonic::metrics::v1::Metric;
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;

use super::{Collector, SOON, table};
use crate::support::{
    Broker, BrokerKind, Database, DatabaseKind, Message, PATIENCE, Sidecar, config,
};

/// From the package `prometheus`, where `scripts/services up` put it, or installed.
fn promtool() -> PathBuf {
    let cache = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache")));
    let fetched = cache.map(|cache| cache.join("inboxd-test/prometheus/usr/bin/promtool"));
    let installed: Vec<_> = std::env::var_os("PATH")
        .map(|path| std::env::split_paths(&path).map(|dir| dir.join("promtool")).collect())
        .unwrap_or_default();
    fetched
        .into_iter()
        .chain(installed)
        .find(|path| path.is_file())
        .expect("promtool is not here: run `scripts/services up`, or install Debian's `prometheus`")
}

/// What promtool says of this input.
async fn judged(arguments: &[&str], input: &str) -> String {
    let mut promtool = Command::new(promtool())
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("promtool starts");
    let mut stdin = promtool.stdin.take().expect("its input");
    stdin.write_all(input.as_bytes()).await.expect("it reads");
    drop(stdin);
    let output = promtool.wait_with_output().await.expect("promtool ends");
    let mut said = String::from_utf8_lossy(&output.stdout).into_owned();
    said.push_str(&String::from_utf8_lossy(&output.stderr));
    if !output.status.success() {
        said.push_str(&format!("{}", output.status));
    }
    said
}

/// Rows of the inbox are counted now and then: they show when they were, not when messages come.
const COUNTED_LATER: [&str; 2] = ["inboxd_inbox_", "inboxd.inbox_"];

fn series(text: &str) -> usize {
    let is_series =
        |line: &&str| !line.starts_with('#') && !COUNTED_LATER.iter().any(|p| line.starts_with(p));
    text.lines().filter(is_series).count()
}

/// The number of data points of the last export.
fn points(collector: &Collector) -> usize {
    let points = |metric: &Metric| match &metric.data {
        Some(Data::Sum(sum)) => sum.data_points.len(),
        Some(Data::Gauge(gauge)) => gauge.data_points.len(),
        Some(Data::Histogram(histogram)) => histogram.data_points.len(),
        _ => 0,
    };
    let metrics = collector.metrics();
    let counted = metrics.iter().filter(|m| !COUNTED_LATER.iter().any(|p| m.name.starts_with(p)));
    counted.map(points).sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_ids_keys_types_and_headers_leave_the_series_as_they_are() {
    const COUNT: usize = 10_000;
    let (collector, app) = (Collector::start().await, App::start().await);
    let broker = Broker::new(BrokerKind::Kafka).await;
    let database = Database::new(DatabaseKind::Sqlite);
    // Traces off: the names of metrics are what this is about.
    let telemetry = format!("{}traces = false\n", table(&collector));
    let config = config(&broker, &database, &broker.name, &app.url("/"), "", &telemetry);
    let sidecar = Sidecar::start_with(&config, &[SOON]);
    let message = |number: usize| {
        Message::id(format!("id-{number}"))
            .key(format!("key-{number}"))
            .partition((number % 4) as i32)
            .header("message-type", format!("type-{number}"))
            .header(&format!("header-{number}"), format!("value-{number}"))
    };
    let through = async |count: usize| {
        eventually(2 * PATIENCE, async || {
            ensure(sidecar.outcomes("processed").await == count as u64, sidecar.log())
        })
        .await;
        sidecar.get("/metrics").await.expect("metrics").1
    };
    broker.publish((0..40).map(message)).await;
    through(40).await;
    eventually(PATIENCE, async || {
        let text = sidecar.get("/metrics").await.unwrap_or_default().1;
        let known = text.matches("\ninboxd_partition_lag_records{").count();
        ensure(known == 4, format!("{known} partitions' lags are known"))
    })
    .await;
    let before = sidecar.get("/metrics").await.expect("metrics").1;
    let exports = collector.headers().len();
    eventually(PATIENCE, async || ensure(collector.headers().len() > exports + 1, "")).await;
    let points_before = points(&collector);
    broker.publish((40..COUNT).map(message)).await;
    let after = through(COUNT).await;
    assert_eq!(series(&after), series(&before), "{after}");
    assert!(!after.contains("id-77") && !after.contains("type-77"));
    let exports = collector.headers().len();
    eventually(PATIENCE, async || ensure(collector.headers().len() > exports + 1, "")).await;
    assert_eq!(points(&collector), points_before);
    assert!(points_before > 100, "{points_before}");

    // Real content, in both formats.
    let said = judged(&["check", "metrics"], &after).await;
    assert_eq!(said, "", "promtool's complaints");
}

#[tokio::test(flavor = "multi_thread")]
async fn promtool_finds_nothing_wrong_with_the_alerts_of_the_documentation() {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let rules = root.join("docs/alerts.yaml");
    let said = judged(&["check", "rules", &rules.display().to_string()], "").await;
    assert!(said.contains("SUCCESS") && !said.contains("FAILED"), "{said}");
    // Every metric that an alert names exists.
    let metrics = inboxd::telemetry::Metrics::new();
    let mut status = SourceStatus::connecting();
    status.partitions.push(PartitionReport {
        stream: StreamId("orders/0".into()),
        lag: Some(0),
        oldest_unsettled_at: None,
        paused: false,
    });
    metrics.subscription("orders").source_status(&status);
    let known = metrics.encode_for("").1;
    let text = std::fs::read_to_string(rules).expect("the rules");
    let expressions: Vec<_> = text.lines().filter(|line| line.contains("expr:")).collect();
    assert!(expressions.len() >= 5);
    for word in
        expressions.iter().flat_map(|line| line.split(|c: char| !c.is_alphanumeric() && c != '_'))
    {
        if word.starts_with("inboxd_") {
            let base = word.strip_suffix("_bucket").unwrap_or(word);
            assert!(known.contains(&format!("# TYPE {base} ")), "{word} does not exist");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_redeliveries_are_a_hundred_duplicates_and_no_error() {
    let app = App::start().await;
    let broker = Broker::new(BrokerKind::RabbitClassic).await;
    let database = Database::new(DatabaseKind::Sqlite);
    let config = config(&broker, &database, &broker.name, &app.url("/"), "", "");
    let sidecar = Sidecar::start_with(&config, &[]);
    let messages = || (0..100).map(|number| Message::id(format!("m-{number}")));
    broker.publish(messages()).await;
    eventually(PATIENCE, async || {
        ensure(sidecar.outcomes("processed").await == 100, sidecar.log())
    })
    .await;
    assert_eq!(sidecar.duplicates().await, 0);
    broker.publish(messages()).await;
    eventually(PATIENCE, async || ensure(sidecar.duplicates().await == 100, sidecar.log())).await;
    assert_eq!(app.ledger().begun(), 100);
    let log = sidecar.log();
    for level in ["\"ERROR\"", "\"WARN\"", "duplicate"] {
        assert!(!log.contains(level), "{level} in\n{log}");
    }
    for counter in [
        "inboxd_store_call_failures_total",
        "inboxd_forward_retries_total",
        "inboxd_id_conflicts_total",
        "inboxd_attempt_panics_total",
        "inboxd_claims_lost_total",
        "inboxd_sweeps_total",
    ] {
        assert_eq!(sidecar.metric(counter, &[]).await, 0.0, "{counter}");
    }
}

/// The part of O3 that needs no broker of its own.
#[tokio::test(flavor = "multi_thread")]
async fn the_age_of_a_blocked_partition_shows_and_that_of_the_others_does_not_grow() {
    let app = App::start().await;
    let broker = Broker::new(BrokerKind::Kafka).await;
    let database = Database::new(DatabaseKind::Sqlite);
    // It stays where it is: parked, it would block no partition.
    let keys = "ordering = \"partition\"\nbreaker = { failures = 0 }\n\
                retry = { cap = \"200ms\", attempts_max = 1_000 }\npark = { attempts_max = 1_000 }";
    let config = config(&broker, &database, &broker.name, &app.url("/"), keys, "");
    app.plan("blocked", std::iter::repeat_n(Answer::status(503), 1_000));
    let sidecar = Sidecar::start_with(&config, &[]);
    broker.publish([Message::id("blocked").partition(2)]).await;
    let age = async |partition: usize| {
        let label = format!("partition=\"{}/{partition}\"", broker.name);
        sidecar.metric("inboxd_partition_oldest_unsettled_seconds", &[&label]).await
    };
    eventually(PATIENCE, async || ensure(age(2).await > 2.0, sidecar.log())).await;
    broker
        .publish((0..40).map(|n| Message::id(format!("m-{n}")).partition([0, 1, 3][n % 3])))
        .await;
    eventually(PATIENCE, async || ensure(sidecar.outcomes("processed").await == 40, sidecar.log()))
        .await;
    eventually(PATIENCE, async || {
        let others = age(0).await + age(1).await + age(3).await;
        ensure(others == 0.0, format!("{others}\n{}", sidecar.log()))
    })
    .await;
    assert!(age(2).await > 2.0);
    assert_eq!(sidecar.get("/livez").await.map(|(status, _)| status), Some(200));
    tokio::time::timeout(Duration::from_secs(5), sidecar.ready()).await.expect("ready");
}
