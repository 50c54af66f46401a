//! D8: the database's clock counts, in whatever zone it is shown.

use inboxd_conformance::store::zones;
use inboxd_contract::InboxStore;
use inboxd_postgres::{PostgresConfig, PostgresStore};
use sqlx::{AssertSqlSafe, Connection, PgConnection};

use crate::failover::OwnDatabase;

/// The database's default is another one for each store, and the process is in Tokyo.
#[tokio::test]
async fn time_zones_change_no_retention_and_no_lease() {
    if !zones::in_tokyo("zones::time_zones_change_no_retention_and_no_lease") {
        return;
    }
    let mut database = OwnDatabase::create().await;
    let name = database.name.clone();
    let mut stores = Vec::new();
    for zone in ["<+03>-03", "Asia/Tokyo"] {
        database.execute(format!("ALTER DATABASE {name} SET timezone = '{zone}'")).await;
        let config = PostgresConfig::new(database.url.as_str().into());
        let store = PostgresStore::connect(config).expect("a valid configuration");
        store.migrate().await.expect("migrated");
        stores.push(store);
    }
    zones::retention_and_leases_hold(&stores[0], &stores[1], async |table, column, key, by| {
        let sql = format!(
            "UPDATE {table} SET {column} = {column} - interval '{} seconds' \
             WHERE consumer_id = $1 AND message_id = $2",
            by.as_secs()
        );
        let mut connection = PgConnection::connect(&database.url).await.expect("connected");
        let done = sqlx::query(AssertSqlSafe(sql))
            .bind(key.consumer_id.as_str())
            .bind(key.message_id.as_str())
            .execute(&mut connection)
            .await
            .expect("moved");
        assert_eq!(done.rows_affected(), 1, "{table}");
        connection.close().await.expect("closed");
    })
    .await;
    for store in stores {
        store.close().await;
    }
    database.drop().await;
}
