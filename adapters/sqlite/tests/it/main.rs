//! The SQLite store on real files: the suite of all stores, and what is SQLite's alone.

mod contention;
mod harness;
mod lifecycle;
mod parking;
mod statements;
mod zones;

use std::sync::Arc;

use harness::SqliteHarness;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn store_conformance() {
    let harness = Arc::new(SqliteHarness::new().await);
    inboxd_conformance::store::run(harness).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parking_conformance() {
    let harness = Arc::new(SqliteHarness::new().await);
    inboxd_conformance::store::run_parking(harness).await;
}
