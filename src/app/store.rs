//! Opens the inbox, and waits for it where waiting helps.

use std::sync::Arc;
use std::time::Duration;

use inboxd_contract::{Finding, InboxStore, MIGRATE_MAX, StoreError};
use rand::Rng as _;
use tokio::time::Instant;

use super::check::unusable;
use super::{AppError, INBOX_ID};
use crate::admin::Dependency;
use crate::causes::chain;
use crate::config::{DatabaseConfig, DatabaseUrl};

/// How long `inboxd migrate` tries to reach a database; one that is reached has [`MIGRATE_MAX`].
const REACHED_WITHIN: Duration = Duration::from_secs(60);
const RETRY_FIRST: Duration = Duration::from_millis(200);
const RETRY_MAX: Duration = Duration::from_secs(5);

/// Opens and migrates; a database that is not there is waited for, with the reason told.
pub(super) async fn open(
    config: &DatabaseConfig,
    lease: Duration,
    database: &Dependency,
) -> Result<Arc<dyn InboxStore>, AppError> {
    let mut wait = RETRY_FIRST;
    loop {
        match try_open(config, lease).await {
            Ok(store) => {
                database.set(true, "");
                return Ok(store);
            }
            Err(AppError::Store(error)) if error.is_transient() => {
                let reason = chain(&error);
                let code = error.code();
                tracing::warn!(%code, reason, "the inbox cannot be opened yet; trying again");
                database.fail(code, &reason);
            }
            Err(error) => return Err(error),
        }
        wait = pause(wait).await;
    }
}

/// The same for a command, whose user waits: where the database cannot be reached for a minute, the
/// reason is the answer.
pub(super) async fn open_soon(
    config: &DatabaseConfig,
    lease: Duration,
) -> Result<Arc<dyn InboxStore>, AppError> {
    let last = Instant::now() + REACHED_WITHIN;
    let mut wait = RETRY_FIRST;
    loop {
        let opened = tokio::time::timeout(MIGRATE_MAX, try_open(config, lease)).await;
        match opened {
            Err(_) => {
                let what = format!("the tables were not up to date within {MIGRATE_MAX:?}");
                return Err(AppError::Store(StoreError::transient(what)));
            }
            Ok(Err(AppError::Store(error))) if error.is_transient() && Instant::now() < last => {
                let reason = chain(&error);
                tracing::warn!(code = %error.code(), reason, "the inbox cannot be opened yet; trying again");
            }
            Ok(opened) => return opened,
        }
        wait = pause(wait).await;
    }
}

/// Calls until the answer is no transient error.
pub(super) async fn persist<T, F>(what: &str, mut call: impl FnMut() -> F) -> Result<T, StoreError>
where
    F: Future<Output = Result<T, StoreError>>,
{
    let mut wait = RETRY_FIRST;
    loop {
        match call().await {
            Err(error) if error.is_transient() => {
                tracing::warn!(code = %error.code(), reason = chain(&error), "cannot {what} yet; trying again");
            }
            answer => return answer,
        }
        wait = pause(wait).await;
    }
}

/// Sleeps up to `wait`; answers the next bound.
async fn pause(wait: Duration) -> Duration {
    let share = rand::rng().random_range(0.5..1.0);
    tokio::time::sleep(wait.mul_f64(share)).await;
    (wait * 2).min(RETRY_MAX)
}

/// Opens a database as it is, once, to look into it.
pub(super) async fn open_to_read(
    config: &DatabaseConfig,
    lease: Duration,
) -> Result<Arc<dyn InboxStore>, AppError> {
    open_for(Use::Look, config, lease).await
}

/// Opens a database once, to change rows of it: migrated, and locked where it is one file.
pub(super) async fn open_to_change(
    config: &DatabaseConfig,
    lease: Duration,
) -> Result<Arc<dyn InboxStore>, AppError> {
    open_for(Use::Everything, config, lease).await
}

/// Looks at a database, of which nothing is changed.
pub(super) async fn inspect(config: &DatabaseConfig, lease: Duration) -> Vec<Finding> {
    if let DatabaseUrl::Sqlite(path) = &config.url
        && !path.exists()
    {
        return vec![no_file_yet(path)];
    }
    let store = match open_for(Use::Check, config, lease).await {
        Ok(store) => store,
        Err(error) => return vec![unusable(&error)],
    };
    let mut findings = Vec::new();
    // PostgreSQL is first connected to here; its ping reads, and knows a standby.
    if matches!(config.url, DatabaseUrl::Postgres(_))
        && let Err(error) = store.ping().await
    {
        findings.push(unusable(&AppError::Store(error)));
    } else {
        findings.push(tables(&*store).await);
    }
    store.close().await;
    findings
}

/// Whether the inbox's tables can be read; that one can log in is known.
async fn tables(store: &dyn InboxStore) -> Finding {
    match store.note(INBOX_ID).await {
        Ok(Some(id)) => Finding::info("database", format!("{}; inbox {id}", store.describe())),
        Ok(None) => Finding::info("database", format!("{}; not used yet", store.describe())),
        Err(error) if error.is_transient() => unusable(&AppError::Store(error)),
        Err(error) => Finding::warning(
            "database",
            format!("{}; its tables cannot be read: {}", store.describe(), chain(&error)),
            "where they are not there yet, the first start or `inboxd migrate` makes them; else \
             see to the user's rights, `schema` and `table_prefix`",
        ),
    }
}

/// A file that is not there is made at the start, its directory is not.
fn no_file_yet(path: &std::path::Path) -> Finding {
    let directory = path.parent().filter(|directory| !directory.as_os_str().is_empty());
    let directory = directory.unwrap_or(std::path::Path::new("."));
    let shown = path.display();
    if directory.is_dir() {
        return Finding::info("database", format!("{shown} is not there yet; the start makes it"));
    }
    Finding::problem(
        "database",
        format!("{shown} cannot be made: there is no directory {}", directory.display()),
        "make the directory first, and let inboxd write to it",
    )
}

/// What a store is opened for.
#[derive(Clone, Copy)]
enum Use {
    /// Migrated, and locked where the database is one file.
    Everything,
    /// Nothing is written, not even tables.
    Look,
    /// As to look, and what a start would refuse is refused.
    Check,
}

async fn try_open(
    config: &DatabaseConfig,
    lease: Duration,
) -> Result<Arc<dyn InboxStore>, AppError> {
    open_for(Use::Everything, config, lease).await
}

async fn open_for(
    purpose: Use,
    config: &DatabaseConfig,
    lease: Duration,
) -> Result<Arc<dyn InboxStore>, AppError> {
    match &config.url {
        DatabaseUrl::Sqlite(path) => sqlite(purpose, config, lease, path).await,
        DatabaseUrl::Postgres(url) => postgres(purpose, config, lease, url).await,
        DatabaseUrl::MySql(url) => mysql(purpose, config, lease, url).await,
    }
}

#[cfg(feature = "sqlite")]
async fn sqlite(
    purpose: Use,
    config: &DatabaseConfig,
    lease: Duration,
    path: &std::path::Path,
) -> Result<Arc<dyn InboxStore>, AppError> {
    use inboxd_sqlite::{SqliteConfig, SqliteStore};

    let mut sqlite = SqliteConfig::new(path);
    sqlite.lease = lease;
    sqlite.table_prefix = config.table_prefix.clone();
    sqlite.readers_max = config.pool_max;
    let store = match purpose {
        Use::Everything => SqliteStore::open(sqlite).await,
        Use::Look | Use::Check => SqliteStore::open_to_read(sqlite).await,
    };
    let store = store.map_err(AppError::Store)?;
    Ok(Arc::new(store))
}

#[cfg(not(feature = "sqlite"))]
async fn sqlite(
    _: Use,
    _: &DatabaseConfig,
    _: Duration,
    _: &std::path::Path,
) -> Result<Arc<dyn InboxStore>, AppError> {
    Err(AppError::Feature("sqlite"))
}

#[cfg(feature = "postgres")]
async fn postgres(
    purpose: Use,
    config: &DatabaseConfig,
    lease: Duration,
    url: &secrecy::SecretString,
) -> Result<Arc<dyn InboxStore>, AppError> {
    use inboxd_postgres::{PostgresConfig, PostgresStore};

    let mut postgres = PostgresConfig::new(url.clone());
    postgres.pool_max = config.pool_max;
    postgres.schema = config.schema.clone();
    postgres.table_prefix = config.table_prefix.clone();
    postgres.lease = lease;
    postgres.migrate_url = config.migrate_url.clone();
    postgres.prepared_statements = config.prepared_statements;
    let store = PostgresStore::connect(postgres).map_err(AppError::Store)?;
    let fit = match purpose {
        Use::Everything => store.migrate().await,
        Use::Look => Ok(()),
        Use::Check => store.check_pooler().await,
    };
    if let Err(error) = fit {
        store.close().await;
        return Err(AppError::Store(error));
    }
    Ok(Arc::new(store))
}

#[cfg(not(feature = "postgres"))]
async fn postgres(
    _: Use,
    _: &DatabaseConfig,
    _: Duration,
    _: &secrecy::SecretString,
) -> Result<Arc<dyn InboxStore>, AppError> {
    Err(AppError::Feature("postgres"))
}

#[cfg(feature = "mysql")]
async fn mysql(
    purpose: Use,
    config: &DatabaseConfig,
    lease: Duration,
    url: &secrecy::SecretString,
) -> Result<Arc<dyn InboxStore>, AppError> {
    use inboxd_mysql::{MysqlConfig, MysqlStore};

    let mut mysql = MysqlConfig::new(url.clone());
    mysql.pool_max = config.pool_max;
    mysql.database = config.schema.clone();
    mysql.table_prefix = config.table_prefix.clone();
    mysql.lease = lease;
    mysql.migrate_url = config.migrate_url.clone();
    mysql.allow_weak_durability = config.allow_weak_durability;
    let store = match purpose {
        Use::Everything => MysqlStore::connect(mysql).await,
        Use::Look | Use::Check => MysqlStore::open_to_read(mysql).await,
    };
    let store = store.map_err(AppError::Store)?;
    Ok(Arc::new(store))
}

#[cfg(not(feature = "mysql"))]
async fn mysql(
    _: Use,
    _: &DatabaseConfig,
    _: Duration,
    _: &secrecy::SecretString,
) -> Result<Arc<dyn InboxStore>, AppError> {
    Err(AppError::Feature("mysql"))
}
