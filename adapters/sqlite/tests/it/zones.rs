//! D8: times in the file are counted in UTC, in whatever zone the process is.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use inboxd_conformance::store::{StoreHarness, zones};
use sqlx::{AssertSqlSafe, Connection, Row};

use crate::harness::{SqliteHarness, connect};

/// The next life may be in another zone: what stands in the file must not be of this one.
fn assert_about_now(millis: i64) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
    let told = Duration::from_millis(u64::try_from(millis).expect("after 1970"));
    assert!(told.abs_diff(now) < Duration::from_secs(120), "{told:?}, and it is {now:?}");
}

#[tokio::test]
async fn time_zones_change_no_retention_and_no_lease() {
    if !zones::in_tokyo("zones::time_zones_change_no_retention_and_no_lease") {
        return;
    }
    let harness = SqliteHarness::new().await;
    let (one, other) = (harness.open().await, harness.open().await);
    zones::retention_and_leases_hold(&*one, &*other, async |table, column, key, by| {
        let mut connection = connect(&harness.path()).await;
        let written =
            format!("SELECT {column} FROM {table} WHERE consumer_id = ?1 AND message_id = ?2");
        let written = sqlx::query(AssertSqlSafe(written))
            .bind(key.consumer_id.as_str())
            .bind(key.message_id.as_str())
            .fetch_one(&mut connection)
            .await
            .expect("written");
        assert_about_now(written.get(0));
        connection.close().await.expect("closed");

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
