//! The MySQL and MariaDB store on a real server: the suite of all stores, and what is its alone.

mod conflicts;
mod harness;
mod own;
mod parking;
mod short;
mod zones;

use std::sync::Arc;

use harness::MysqlHarness;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn store_conformance() {
    let harness = Arc::new(MysqlHarness::new().await);
    inboxd_conformance::store::run(harness).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parking_conformance() {
    let harness = Arc::new(MysqlHarness::new().await);
    inboxd_conformance::store::run_parking(harness).await;
}
