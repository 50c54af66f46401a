//! D8: the database's clock counts, in whatever zone it is shown.

use inboxd_conformance::servers::{Kind, OwnServer};
use inboxd_conformance::store::zones;
use inboxd_contract::InboxStore;

use crate::harness::Database;

/// The server's default is another one for each store, and the process is in Tokyo.
#[tokio::test]
async fn time_zones_change_no_retention_and_no_lease() {
    if !zones::in_tokyo("zones::time_zones_change_no_retention_and_no_lease") {
        return;
    }
    let server = OwnServer::start_with(Kind::MySql, "default_time_zone='+03:00'").await;
    let database = Database::on(server.url()).await;
    let one = database.open().await;
    database.admin("SET GLOBAL time_zone = '+09:00'").await;
    let other = database.open().await;
    zones::retention_and_leases_hold(&one, &other, async |table, column, key, by| {
        let sql = format!(
            "UPDATE {table} SET {column} = {column} - INTERVAL {} SECOND \
             WHERE consumer_id = ? AND message_id = ?",
            by.as_secs()
        );
        assert_eq!(database.with_key(&sql, key).await, 1, "{table}");
    })
    .await;
    one.close().await;
    other.close().await;
}
