//! D8: times in the file are counted in UTC, in whatever zone the process is.

use inboxd_conformance::store::{StoreHarness, zones};

use crate::harness::SqliteHarness;

#[tokio::test]
async fn time_zones_change_no_retention_and_no_lease() {
    if !zones::in_tokyo("zones::time_zones_change_no_retention_and_no_lease") {
        return;
    }
    let harness = SqliteHarness::new().await;
    let (one, other) = (harness.open().await, harness.open().await);
    zones::retention_and_leases_hold(&*one, &*other, async |table, column, key, by| {
        let sql = format!(
            "UPDATE {table} SET {column} = {column} - {} \
             WHERE consumer_id = ?1 AND message_id = ?2",
            by.as_millis()
        );
        assert_eq!(harness.with_key(sql, key).await, 1, "{table}");
    })
    .await;
    one.close().await;
    other.close().await;
}
