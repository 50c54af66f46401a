//! Bringing the tables up to date: append-only scripts, recorded in `<prefix>inbox_migrations`.
//!
//! All of it is one write transaction, so that several instances may start at once.

use futures::FutureExt;
use futures::future::BoxFuture;
use inboxd_contract::{ErrorCode, StoreError};
use sha2::{Digest, Sha256};
use sqlx::sqlite::SqliteConnection;
use sqlx::{AssertSqlSafe, Row};

use crate::connection::Writer;
use std::collections::BTreeMap;
use std::sync::Arc;

/// One script. A released one never changes.
#[derive(Debug)]
struct Migration {
    version: i64,
    name: &'static str,
    /// Binaries that do not know it must not work on the database.
    breaking: bool,
    sql: &'static str,
}

const MIGRATIONS: &[Migration] = &[
    Migration {
        version: 1,
        name: "inbox",
        breaking: false,
        sql: include_str!("../../../migrations/sqlite/0001_inbox.sql"),
    },
    Migration {
        version: 2,
        name: "parking",
        // An older binary does not see due rows, and would forward their messages again.
        breaking: true,
        sql: include_str!("../../../migrations/sqlite/0002_parking.sql"),
    },
];

/// A row of the table of migrations.
struct Applied {
    name: String,
    checksum: String,
    breaking: bool,
}

/// Applies what is missing; refuses a database that a newer, breaking migration has changed.
pub(crate) async fn migrate(writer: &Arc<Writer>, prefix: &str) -> Result<(), StoreError> {
    let place = writer.path().display().to_string();
    let prefix = prefix.to_owned();
    let verdict = writer
        .transaction("migrating the SQLite database", move |connection| {
            run(connection, prefix).boxed()
        })
        .await?;
    verdict.map_err(|what| {
        StoreError::permanent(format!("the SQLite database {place} {what}"))
            .with_code(ErrorCode::DatabaseNewer)
    })
}

/// `Ok(Err(_))`: the database must not be used, and why.
fn run(
    connection: &mut SqliteConnection,
    prefix: String,
) -> BoxFuture<'_, Result<Result<(), String>, sqlx::Error>> {
    async move {
        let table = format!("{prefix}inbox_migrations");
        sqlx::raw_sql(AssertSqlSafe(format!(
            "CREATE TABLE IF NOT EXISTS {table} (version INTEGER PRIMARY KEY, name TEXT NOT NULL, \
             checksum TEXT NOT NULL, breaking INTEGER NOT NULL, applied_at INTEGER NOT NULL) STRICT"
        )))
        .execute(&mut *connection)
        .await?;
        let applied = applied(connection, &table).await?;
        if let Err(what) = check(&applied) {
            return Ok(Err(what));
        }
        for migration in MIGRATIONS {
            if applied.contains_key(&migration.version) {
                continue;
            }
            let script = migration.sql.replace("{p}", &prefix);
            sqlx::raw_sql(AssertSqlSafe(script)).execute(&mut *connection).await?;
            sqlx::query(AssertSqlSafe(format!(
                "INSERT INTO {table} VALUES (?1, ?2, ?3, ?4, \
                 CAST(unixepoch('subsec') * 1000 AS INTEGER))"
            )))
            .bind(migration.version)
            .bind(migration.name)
            .bind(checksum(migration.sql))
            .bind(migration.breaking)
            .execute(&mut *connection)
            .await?;
            tracing::info!(version = migration.version, name = migration.name, "migrated");
        }
        Ok(Ok(()))
    }
    .boxed()
}

async fn applied(
    connection: &mut SqliteConnection,
    table: &str,
) -> Result<BTreeMap<i64, Applied>, sqlx::Error> {
    let rows = sqlx::query(AssertSqlSafe(format!(
        "SELECT version, name, checksum, breaking FROM {table}"
    )))
    .fetch_all(connection)
    .await?;
    rows.iter()
        .map(|row| {
            let applied = Applied {
                name: row.try_get(1)?,
                checksum: row.try_get(2)?,
                breaking: row.try_get(3)?,
            };
            Ok((row.try_get(0)?, applied))
        })
        .collect()
}

fn check(applied: &BTreeMap<i64, Applied>) -> Result<(), String> {
    for (version, row) in applied {
        match MIGRATIONS.iter().find(|migration| migration.version == *version) {
            Some(known) if checksum(known.sql) != row.checksum => {
                return Err(format!(
                    "had migration {version} ({}) applied from another text than this binary \
                     has; restore the database or use the binary that made it",
                    row.name
                ));
            }
            Some(_) => {}
            None if row.breaking => {
                return Err(format!(
                    "has the newer migration {version} ({}), which this binary cannot work \
                     with; use a newer inboxd",
                    row.name
                ));
            }
            None => {
                tracing::info!(version, name = row.name, "the database is newer than this binary");
            }
        }
    }
    Ok(())
}

fn checksum(sql: &str) -> String {
    hex::encode(Sha256::digest(sql))
}
