//! Kafka, end to end: offsets, membership and order of the whole path from the topic to the
//! application.

mod groups;
mod offsets;
mod order;
mod own_server;
mod stopped;

use std::time::Duration;

use inboxd_conformance::app::App;
use inboxd_conformance::{ensure, eventually, servers};
use rdkafka::TopicPartitionList;
use rdkafka::consumer::{BaseConsumer, Consumer as _};

use crate::support::{Broker, BrokerKind, Database, Message, PATIENCE, Sidecar, subscription};

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

/// A topic with this many partitions on the shared server.
async fn topic(partitions: i32) -> Broker {
    let broker = Broker::named(BrokerKind::Kafka, &servers::kafka_url());
    broker.create_topic(partitions).await;
    broker
}

/// A configuration whose subscription `orders` has these keys, and whose consumer these
/// librdkafka properties beside or instead of the usual ones of the tests; an empty value takes
/// a usual one away.
fn configured(
    broker: &Broker,
    database: &Database,
    app: &App,
    keys: &str,
    properties: &[(&str, &str)],
) -> String {
    let orders = subscription("orders", broker, &broker.name, &app.url("/"), keys);
    format!("{}\n{}\n{orders}", database.config(), with_properties(broker, properties))
}

fn with_properties(broker: &Broker, properties: &[(&str, &str)]) -> String {
    let usual = broker.config();
    let mut lines: Vec<String> = usual
        .lines()
        .filter(|line| !properties.iter().any(|(key, _)| line.starts_with(&format!("\"{key}\""))))
        .map(str::to_owned)
        .collect();
    let set = properties.iter().filter(|(_, value)| !value.is_empty());
    lines.extend(set.map(|(key, value)| format!("\"{key}\" = \"{value}\"")));
    lines.join("\n")
}

/// The committed offset of a partition of the group that has the topic's name.
async fn committed(broker: &Broker, partition: i32) -> Option<i64> {
    let (name, mut config) = (broker.name.clone(), broker.kafka());
    config.set("group.id", &name);
    let ask = move || {
        let consumer: BaseConsumer = config.create().expect("a consumer");
        let mut list = TopicPartitionList::new();
        list.add_partition(&name, partition);
        let committed = consumer.committed_offsets(list, PATIENCE).expect("an answer");
        let offset = committed.elements().first().expect("the partition").offset();
        offset.to_raw().filter(|offset| *offset >= 0)
    };
    tokio::task::spawn_blocking(ask).await.expect("no panic")
}

/// Waits until the application has accepted so many different messages.
async fn accepted(app: &App, at_least: usize, sidecars: &[&Sidecar]) {
    eventually(PATIENCE, async || {
        let accepted = app.ledger().accepted_distinct();
        let logs: String = sidecars.iter().map(|sidecar| sidecar.log()).collect();
        ensure(accepted >= at_least, format!("{accepted} of {at_least} accepted; log:\n{logs}"))
    })
    .await;
}

/// Waits until nothing is left above the committed offsets.
async fn drained(within: Duration, broker: &Broker, sidecars: &[&Sidecar]) {
    eventually(within, async || {
        let left = broker.left(&broker.name).await;
        let logs: String = sidecars.iter().map(|sidecar| sidecar.log()).collect();
        ensure(left == 0, format!("{left} left; log:\n{logs}"))
    })
    .await;
}

/// Ids `prefix0`… spread over the partitions of a topic.
fn spread(prefix: &str, count: usize, partitions: i32) -> Vec<Message> {
    (0..partitions)
        .cycle()
        .take(count)
        .enumerate()
        .map(|(n, partition)| Message::id(format!("{prefix}{n}")).partition(partition))
        .collect()
}

/// SIGTERM; it ends well.
async fn stop(sidecar: &mut Sidecar) {
    let status = sidecar.stop().await;
    assert_eq!(status.code(), Some(0), "{status}:\n{}", sidecar.log());
}

fn nothing_twice(app: &App) {
    let twice = app.ledger().accepted_more_than_once();
    assert!(twice.is_empty(), "accepted more than once: {twice:?}");
}
