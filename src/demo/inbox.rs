//! Looks into the inbox's database from beside the sidecar, without its lock and its code.

use std::collections::HashSet;
use std::path::Path;

use anyhow::Context;
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{ConnectOptions, Connection};

/// The ids that have a row, so are processed.
pub(super) async fn processed(database: &Path) -> anyhow::Result<HashSet<String>> {
    let read = async {
        let options = SqliteConnectOptions::new().filename(database).read_only(true);
        let mut connection = options.connect().await?;
        let ids: Vec<String> =
            sqlx::query_scalar("SELECT message_id FROM inbox_messages WHERE consumer_id = 'demo'")
                .fetch_all(&mut connection)
                .await?;
        connection.close().await?;
        Ok::<_, sqlx::Error>(ids.into_iter().collect())
    };
    read.await.with_context(|| format!("reading the inbox {}", database.display()))
}
