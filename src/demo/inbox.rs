//! Looks into the inbox's database from beside the sidecar, without its lock and its code.

use std::collections::HashSet;
use std::path::Path;

use anyhow::Context;
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{ConnectOptions, Connection};

/// The ids that have a row, so are processed.
pub(super) async fn processed(database: &Path) -> anyhow::Result<HashSet<String>> {
    let query = "SELECT message_id FROM inbox_messages WHERE consumer_id = 'demo'";
    Ok(ids(database, query).await?.into_iter().collect())
}

/// The ids that are parked: acked, and still to be forwarded.
pub(super) async fn parked(database: &Path) -> anyhow::Result<Vec<String>> {
    ids(database, "SELECT message_id FROM inbox_parked WHERE state = 'due'").await
}

async fn ids(database: &Path, query: &'static str) -> anyhow::Result<Vec<String>> {
    let read = async {
        let options = SqliteConnectOptions::new().filename(database).read_only(true);
        let mut connection = options.connect().await?;
        let ids = sqlx::query_scalar(query).fetch_all(&mut connection).await?;
        connection.close().await?;
        Ok::<_, sqlx::Error>(ids)
    };
    read.await.with_context(|| format!("reading the inbox {}", database.display()))
}
