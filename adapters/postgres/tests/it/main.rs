//! The store on a real PostgreSQL: the suite, and what only PostgreSQL has.

mod failover;
mod harness;
mod migrations;
mod pooler;
mod server;
mod taking;
mod wire;
mod zones;

use std::sync::Arc;

use harness::Harness;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn store_conforms() {
    let harness = Arc::new(Harness::new().await);
    inboxd_conformance::store::run(Arc::clone(&harness) as _).await;
    harness.drop_schemas().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn store_parks() {
    let harness = Arc::new(Harness::new().await);
    inboxd_conformance::store::run_parking(Arc::clone(&harness) as _).await;
    harness.drop_schemas().await;
}
