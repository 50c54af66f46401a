//! The MySQL and MariaDB store on a real server: the suite of all stores, and what is its alone.

mod harness;

use std::sync::Arc;

use harness::MysqlHarness;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn store_conformance() {
    let harness = Arc::new(MysqlHarness::new().await);
    inboxd_conformance::store::run(harness.clone()).await;
    harness.drop_database().await;
}
