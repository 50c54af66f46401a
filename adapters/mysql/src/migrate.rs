//! Bringing the tables up to date: append-only scripts, recorded in `<prefix>inbox_migrations`.
//!
//! DDL commits by itself on these servers, so each script can run again, and a lock by name
//! (`GET_LOCK`) lets one instance at a time do it. Where nothing is missing, nothing is locked and
//! no right to change tables is needed.

use std::collections::BTreeMap;
use std::time::Duration;

use inboxd_contract::{ErrorCode, StoreError};
use sha2::{Digest, Sha256};
use sqlx::mysql::{MySqlConnectOptions, MySqlConnection};
use sqlx::{AssertSqlSafe, Connection, Row};

use crate::error::{number, store_error};
use crate::transaction::connect;

/// How long an instance waits for another one that is migrating.
const LOCK_WAIT: Duration = Duration::from_secs(60);
/// The server's error for a table that is not there.
const NO_SUCH_TABLE: u16 = 1146;

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
        sql: include_str!("../../../migrations/mysql/0001_inbox.sql"),
    },
    Migration {
        version: 2,
        name: "parking",
        // An older binary does not see due rows, and would forward their messages again.
        breaking: true,
        sql: include_str!("../../../migrations/mysql/0002_parking.sql"),
    },
];

/// A row of the table of migrations.
struct Applied {
    name: String,
    checksum: String,
    breaking: bool,
}

/// Applies what is missing; refuses a database that a newer, breaking migration has changed.
/// `lock` is the lock's name.
pub(crate) async fn migrate(
    options: &MySqlConnectOptions,
    prefix: &str,
    lock: &str,
) -> Result<(), StoreError> {
    let failed = |error| store_error("migrating the database", error);
    let mut connection = connect(options).await.map_err(failed)?;
    let known = applied(&mut connection, prefix).await.map_err(failed)?;
    check(&known)?;
    if MIGRATIONS.iter().any(|migration| !known.contains_key(&migration.version)) {
        take_lock(&mut connection, lock).await?;
        // Somebody may have done it while we waited.
        apply_missing(&mut connection, prefix).await?;
    }
    // Closing frees the lock, in every case.
    connection.close().await.map_err(failed)
}

async fn take_lock(connection: &mut MySqlConnection, lock: &str) -> Result<(), StoreError> {
    let failed = |error| store_error("locking the database for its migration", error);
    let taken: Option<i64> = sqlx::query("SELECT GET_LOCK(?, ?)")
        .bind(lock)
        .bind(LOCK_WAIT.as_secs())
        .fetch_one(connection)
        .await
        .and_then(|row| row.try_get(0))
        .map_err(failed)?;
    if taken == Some(1) {
        return Ok(());
    }
    Err(StoreError::transient(format!(
        "another instance has been migrating the database for more than {LOCK_WAIT:?} (it holds \
         the lock {lock})"
    )))
}

async fn apply_missing(connection: &mut MySqlConnection, prefix: &str) -> Result<(), StoreError> {
    let failed = |error| store_error("migrating the database", error);
    let known = applied(connection, prefix).await.map_err(failed)?;
    check(&known)?;
    let table = format!("{prefix}inbox_migrations");
    sqlx::raw_sql(AssertSqlSafe(format!(
        "CREATE TABLE IF NOT EXISTS {table} (version BIGINT NOT NULL PRIMARY KEY, \
         name VARCHAR(255) NOT NULL, checksum VARCHAR(64) NOT NULL, breaking BOOLEAN NOT NULL, \
         applied_at DATETIME(3) NOT NULL) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 \
         COLLATE = utf8mb4_bin"
    )))
    .execute(&mut *connection)
    .await
    .map_err(failed)?;
    for migration in MIGRATIONS {
        if known.contains_key(&migration.version) {
            continue;
        }
        let what = || format!("applying migration {} ({})", migration.version, migration.name);
        let script = migration.sql.replace("{p}", prefix);
        sqlx::raw_sql(AssertSqlSafe(script))
            .execute(&mut *connection)
            .await
            .map_err(|error| store_error(what(), error))?;
        sqlx::query(AssertSqlSafe(format!(
            "INSERT INTO {table} VALUES (?, ?, ?, ?, UTC_TIMESTAMP(3))"
        )))
        .bind(migration.version)
        .bind(migration.name)
        .bind(checksum(migration.sql))
        .bind(migration.breaking)
        .execute(&mut *connection)
        .await
        .map_err(|error| store_error(what(), error))?;
        tracing::info!(version = migration.version, name = migration.name, "migrated");
    }
    Ok(())
}

async fn applied(
    connection: &mut MySqlConnection,
    prefix: &str,
) -> Result<BTreeMap<i64, Applied>, sqlx::Error> {
    let select = AssertSqlSafe(format!(
        "SELECT version, name, checksum, breaking FROM {prefix}inbox_migrations"
    ));
    let rows = match sqlx::query(select).fetch_all(connection).await {
        Err(error) if number(&error) == Some(NO_SUCH_TABLE) => return Ok(BTreeMap::new()),
        rows => rows?,
    };
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

fn check(applied: &BTreeMap<i64, Applied>) -> Result<(), StoreError> {
    for (version, row) in applied {
        match MIGRATIONS.iter().find(|migration| migration.version == *version) {
            Some(known) if checksum(known.sql) != row.checksum => {
                return Err(StoreError::permanent(format!(
                    "the database had migration {version} ({}) applied from another text than \
                     this binary has; restore it or use the binary that made it",
                    row.name
                ))
                .with_code(ErrorCode::DatabaseNewer));
            }
            Some(_) => {}
            None if row.breaking => {
                return Err(StoreError::permanent(format!(
                    "the database has the newer migration {version} ({}), which this binary \
                     cannot work with; use a newer inboxd",
                    row.name
                ))
                .with_code(ErrorCode::DatabaseNewer));
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
