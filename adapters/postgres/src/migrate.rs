//! Migrations: append-only, in one transaction, one replica at a time.

use inboxd_contract::{ErrorCode, Fingerprint, MIGRATE_MAX, StoreError};
use sqlx::postgres::{PgArguments, PgConnectOptions, PgConnection};
use sqlx::query::Query;
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, Postgres, Row, SqlSafeStr};
use tokio::time::timeout;

use crate::config::PostgresConfig;
use crate::error::Failure;

struct Migration {
    version: i32,
    name: &'static str,
    /// With `{t}` for schema and prefix, `{p}` for the prefix.
    sql: &'static str,
    /// An older binary cannot work on a database that has it.
    breaking: bool,
}

const MIGRATIONS: &[Migration] = &[
    Migration {
        version: 1,
        name: "inbox",
        sql: include_str!("../../../migrations/postgres/0001_inbox.sql"),
        breaking: true,
    },
    Migration {
        version: 2,
        name: "parking",
        sql: include_str!("../../../migrations/postgres/0002_parking.sql"),
        breaking: true,
    },
];

struct Applied {
    version: i32,
    name: String,
    checksum: String,
    breaking: bool,
}

/// Brings the schema up to date; does nothing where it is.
pub(crate) async fn migrate(
    config: &PostgresConfig,
    options: &PgConnectOptions,
) -> Result<(), StoreError> {
    // A server that accepts and then says nothing must not keep the start from trying again.
    let connect = timeout(config.acquire_timeout, options.connect()).await;
    let mut connection = connect
        .map_err(|_| Failure::timed_out("connecting to migrate", config.acquire_timeout))?
        .map_err(|error| Failure::of("connecting to migrate", error))?;
    let Ok(result) = timeout(MIGRATE_MAX, in_transaction(config, &mut connection)).await else {
        return Err(Failure::timed_out("the migration", MIGRATE_MAX).into());
    };
    // Closing the connection undoes what did not end in COMMIT.
    if let Ok(Err(error)) = timeout(config.acquire_timeout, connection.close()).await {
        tracing::debug!(%error, "closing the connection of the migration");
    }
    result
}

async fn in_transaction(
    config: &PostgresConfig,
    connection: &mut PgConnection,
) -> Result<(), StoreError> {
    // Replicas that start together wait for the first one, which may take its time.
    let begin = "BEGIN ISOLATION LEVEL READ COMMITTED; \
                 SET LOCAL lock_timeout = '60s'; \
                 SET LOCAL synchronous_commit = on";
    execute(connection, begin.to_owned()).await?;
    check_encoding(connection).await?;
    let qualifier = config.table_qualifier();
    let lock = "SELECT pg_advisory_xact_lock(hashtextextended($1, 0))";
    query(lock)
        .bind(format!("inboxd migrate {qualifier}"))
        .execute(&mut *connection)
        .await
        .map_err(|error| Failure::of("waiting for another migration", error))?;
    if let Some(schema) = &config.schema {
        create_schema(connection, schema).await?;
    }
    create_record(connection, &qualifier).await?;
    let applied = applied(connection, &qualifier).await?;
    check(&applied)?;
    for migration in MIGRATIONS {
        if applied.iter().all(|applied| applied.version != migration.version) {
            apply(connection, config, &qualifier, migration).await?;
        }
    }
    execute(connection, String::from("COMMIT")).await
}

/// Not kept prepared: a transaction pooler would not know it again.
fn query(sql: impl SqlSafeStr) -> Query<'static, Postgres, PgArguments> {
    sqlx::query(sql).persistent(false)
}

async fn execute(connection: &mut PgConnection, sql: String) -> Result<(), StoreError> {
    sqlx::raw_sql(AssertSqlSafe(sql))
        .execute(&mut *connection)
        .await
        .map_err(|error| Failure::of("a migration", error))?;
    Ok(())
}

/// Ids are compared by their bytes, and those are UTF-8.
async fn check_encoding(connection: &mut PgConnection) -> Result<(), StoreError> {
    let row = query("SELECT current_setting('server_encoding')")
        .fetch_one(&mut *connection)
        .await
        .map_err(|error| Failure::of("reading the encoding", error))?;
    let encoding: String =
        row.try_get(0).map_err(|error| Failure::of("reading the encoding", error))?;
    if encoding == "UTF8" {
        return Ok(());
    }
    Err(StoreError::permanent(format!(
        "the database's encoding is {encoding}, and message ids need UTF8: \
         create it with ENCODING 'UTF8'"
    )))
}

async fn create_schema(connection: &mut PgConnection, schema: &str) -> Result<(), StoreError> {
    let there = query("SELECT 1 FROM pg_namespace WHERE nspname = $1")
        .bind(schema)
        .fetch_optional(&mut *connection)
        .await
        .map_err(|error| Failure::of("looking for the schema", error))?;
    // CREATE SCHEMA IF NOT EXISTS wants the right to create even where it exists.
    if there.is_none() {
        execute(connection, format!("CREATE SCHEMA \"{schema}\"")).await?;
    }
    Ok(())
}

async fn create_record(connection: &mut PgConnection, qualifier: &str) -> Result<(), StoreError> {
    let there = query("SELECT to_regclass($1) IS NOT NULL")
        .bind(format!("{qualifier}inbox_migrations"))
        .fetch_one(&mut *connection)
        .await
        .and_then(|row| row.try_get::<bool, _>(0))
        .map_err(|error| Failure::of("looking for the table of migrations", error))?;
    if there {
        return Ok(());
    }
    let sql = format!(
        "CREATE TABLE {qualifier}inbox_migrations (
             version    integer PRIMARY KEY,
             name       text NOT NULL,
             checksum   text NOT NULL,
             breaking   boolean NOT NULL,
             applied_at timestamptz NOT NULL DEFAULT now()
         )"
    );
    execute(connection, sql).await
}

async fn applied(
    connection: &mut PgConnection,
    qualifier: &str,
) -> Result<Vec<Applied>, StoreError> {
    let sql = format!(
        "SELECT version, name, checksum, breaking FROM {qualifier}inbox_migrations ORDER BY version"
    );
    let read = |row: &sqlx::postgres::PgRow| -> Result<Applied, sqlx::Error> {
        Ok(Applied {
            version: row.try_get(0)?,
            name: row.try_get(1)?,
            checksum: row.try_get(2)?,
            breaking: row.try_get(3)?,
        })
    };
    let rows = query(AssertSqlSafe(sql)).fetch_all(&mut *connection).await;
    let applied = rows.and_then(|rows| rows.iter().map(read).collect());
    Ok(applied.map_err(|error| Failure::of("reading the migrations", error))?)
}

/// What was applied is what this binary knows, or newer and harmless.
fn check(applied: &[Applied]) -> Result<(), StoreError> {
    for applied in applied {
        let known = MIGRATIONS.iter().find(|known| known.version == applied.version);
        let Applied { version, name, checksum, breaking } = applied;
        match known {
            Some(known) if Fingerprint::of(known.sql.as_bytes()).as_str() != checksum => {
                return Err(StoreError::permanent(format!(
                    "migration {version} ({name}) was applied with other contents than this \
                     binary has: it belongs to another build"
                ))
                .with_code(ErrorCode::DatabaseNewer));
            }
            None if *breaking => {
                return Err(StoreError::permanent(format!(
                    "the database has migration {version} ({name}), which this binary does not \
                     know and which is marked breaking: run a newer inboxd"
                ))
                .with_code(ErrorCode::DatabaseNewer));
            }
            Some(_) | None => {}
        }
    }
    Ok(())
}

async fn apply(
    connection: &mut PgConnection,
    config: &PostgresConfig,
    qualifier: &str,
    migration: &Migration,
) -> Result<(), StoreError> {
    let sql = migration.sql.replace("{t}", qualifier).replace("{p}", &config.table_prefix);
    execute(connection, sql).await?;
    let record = format!(
        "INSERT INTO {qualifier}inbox_migrations (version, name, checksum, breaking)
         VALUES ($1, $2, $3, $4)"
    );
    query(AssertSqlSafe(record))
        .bind(migration.version)
        .bind(migration.name)
        .bind(Fingerprint::of(migration.sql.as_bytes()).as_str())
        .bind(migration.breaking)
        .execute(&mut *connection)
        .await
        .map_err(|error| Failure::of("recording a migration", error))?;
    tracing::info!(version = migration.version, name = migration.name, "migration applied");
    Ok(())
}
