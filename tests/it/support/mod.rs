//! What the end-to-end tests share: brokers, databases, the sidecar's process.

pub mod broker;
pub mod database;
pub mod sidecar;

pub use broker::{Broker, BrokerKind, Message};
pub use database::{Database, DatabaseKind};
pub use sidecar::Sidecar;

use std::time::Duration;

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
        "{database}\n{broker}\n[subscription.orders]\nconsumer_id = \"{consumer_id}\"\n\
         callback = \"{callback}\"\nsource = {source}\n{subscription}\n{rest}\n",
        database = database.config(),
        broker = broker.config(),
        source = broker.source(consumer_id),
    )
}
