//! What the end-to-end tests share: brokers, databases, the sidecar's process.

pub mod broker;
pub mod database;
pub mod raw;
pub mod sidecar;

pub use broker::{Broker, BrokerKind, Message};
pub use database::{Database, DatabaseKind, Session};
pub use sidecar::{Sidecar, Told};

use std::time::Duration;

use inboxd_conformance::{ensure, eventually};

/// How long a condition may take on a busy machine with two cores.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The configuration of one subscription named `orders`; `subscription` and `rest` are further
/// lines of TOML (keys of the subscription; whole tables).
pub fn config(
    broker: &Broker,
    database: &Database,
    consumer_id: &str,
    callback: &str,
    subscription: &str,
    rest: &str,
) -> String {
    format!(
        "{database}\n{broker}\n{orders}\n{rest}\n",
        database = database.config(),
        broker = broker.config(),
        orders = self::subscription("orders", broker, consumer_id, callback, subscription),
    )
}

/// One `[subscription.NAME]` table, for configurations with several of them; `keys` are further
/// lines of it. What is parked comes again soon and a callback that rests is probed often, unless they
/// say otherwise.
pub fn subscription(
    name: &str,
    broker: &Broker,
    consumer_id: &str,
    callback: &str,
    keys: &str,
) -> String {
    let source = broker.source(consumer_id);
    let soon: String = [
        ("park", "{ initial = \"200ms\", cap = \"1s\" }"),
        ("breaker", "{ probe_initial = \"200ms\", probe_cap = \"1s\" }"),
    ]
    .into_iter()
    .filter(|(table, _)| !keys.contains(table))
    .map(|(table, value)| format!("{table} = {value}\n"))
    .collect();
    format!(
        "[subscription.{name}]\nconsumer_id = \"{consumer_id}\"\ncallback = \"{callback}\"\n\
         source = {source}\n{soon}{keys}\n"
    )
}

/// The sum of an outcome over replicas.
pub async fn sum_of(sidecars: &[Sidecar], outcome: &str) -> u64 {
    let mut sum = 0;
    for sidecar in sidecars {
        sum += sidecar.outcomes(outcome).await;
    }
    sum
}

/// Publishes messages with ids `warm-up-…` until every replica has processed one (or parked it, where
/// the application fails), and waits until they are done with: from then on all of them consume.
pub async fn all_consume(broker: &Broker, sidecars: &[Sidecar]) {
    let mut published = 0;
    eventually(PATIENCE, async || {
        let mut idle = None;
        for sidecar in sidecars {
            if sidecar.outcomes("processed").await + sidecar.outcomes("parked").await == 0 {
                idle = Some(sidecar.log());
            }
        }
        let processed = sum_of(sidecars, "processed").await + sum_of(sidecars, "parked").await;
        if processed < published {
            return Err(format!("{processed} of {published} processed; {idle:?}"));
        }
        let Some(log) = idle else { return Ok(()) };
        let messages = (0..4).map(|partition| {
            published += 1;
            Message::id(format!("warm-up-{published}")).partition(partition)
        });
        broker.publish(messages).await;
        Err(format!("one consumes nothing; log:\n{log}"))
    })
    .await;
}

/// Stops all replicas: each ends well, and nothing is left on the broker.
pub async fn stop_all(broker: &Broker, group: &str, sidecars: &mut [Sidecar]) {
    for sidecar in sidecars.iter_mut() {
        let status = sidecar.stop().await;
        assert!(status.success(), "{status}:\n{}", sidecar.log());
    }
    eventually(PATIENCE, async || {
        let left = broker.left(group).await;
        let log = sidecars.iter().map(Sidecar::log).collect::<String>();
        ensure(left == 0, format!("{left} left on the broker; log:\n{log}"))
    })
    .await;
}
