//! What a MySQL or MariaDB store is connected with.

use std::str::FromStr;
use std::time::Duration;

use inboxd_contract::{ErrorClass, StoreError};
use secrecy::{ExposeSecret, SecretString};
use sqlx::mysql::MySqlConnectOptions;

/// The longest table prefix or database name, in bytes.
const IDENTIFIER_BYTES_MAX: usize = 41;
/// These servers count lock waits in whole seconds, and one may last a fifth of the lease.
const LEASE_MIN: Duration = Duration::from_secs(5);

/// Where the database is and how it is used.
#[derive(Debug, Clone)]
pub struct MysqlConfig {
    /// `mysql://user:password@host:port/database`, with the parameters of sqlx (`ssl-mode`,
    /// `ssl-ca`, `ssl-cert`, `ssl-key`, `socket`).
    pub url: SecretString,
    /// With more rights, for migrations alone; `None`: the same as `url`.
    pub migrate_url: Option<SecretString>,
    /// Connections at most, beside one for renewals.
    pub pool_max: u32,
    /// The lease that claims will have, at least 5 s; a lock is waited for a fifth of it.
    pub lease: Duration,
    /// Put before each table's name: `[a-z_][a-z0-9_]{0,40}` or empty.
    pub table_prefix: String,
    /// Instead of the database that the URL names: `[a-z_][a-z0-9_]{0,40}`.
    pub database: Option<String>,
    /// Accepts a server that does not flush its log at each commit: a crash of its host may
    /// then forget what was acknowledged.
    pub allow_weak_durability: bool,
}

impl MysqlConfig {
    /// The defaults for a URL.
    pub fn new(url: SecretString) -> Self {
        Self {
            url,
            migrate_url: None,
            pool_max: 4,
            lease: Duration::from_secs(15),
            table_prefix: String::new(),
            database: None,
            allow_weak_durability: false,
        }
    }

    /// Checks what can be checked without the server.
    pub(crate) fn validate(&self) -> Result<(), StoreError> {
        if self.lease < LEASE_MIN {
            return Err(StoreError::permanent(format!(
                "a lease of {:?} is too short for MySQL and MariaDB: they count lock waits in \
                 whole seconds, so a lease there is at least {LEASE_MIN:?}",
                self.lease
            )));
        }
        if !self.table_prefix.is_empty() {
            validate_identifier("table prefix", &self.table_prefix)?;
        }
        if let Some(database) = &self.database {
            validate_identifier("database", database)?;
        }
        Ok(())
    }

    /// Whole seconds of the longest wait for a lock.
    pub(crate) fn lock_wait_s(&self) -> u64 {
        (self.lease.as_secs() / 5).max(1)
    }

    /// Options for the everyday connections, and for migrations.
    pub(crate) fn options(&self) -> Result<MySqlConnectOptions, StoreError> {
        self.parse(&self.url)
    }

    pub(crate) fn migrate_options(&self) -> Result<MySqlConnectOptions, StoreError> {
        self.parse(self.migrate_url.as_ref().unwrap_or(&self.url))
    }

    fn parse(&self, url: &SecretString) -> Result<MySqlConnectOptions, StoreError> {
        let unfit = "the database URL; write mysql://user:password@host:port/database";
        let mut options = MySqlConnectOptions::from_str(url.expose_secret())
            .map_err(|error| StoreError::new(ErrorClass::Permanent, unfit, error))?;
        if let Some(database) = &self.database {
            options = options.database(database);
        }
        if options.get_database().is_none_or(str::is_empty) {
            return Err(StoreError::permanent(
                "the database URL names no database; write mysql://user:password@host:port/database",
            ));
        }
        // Few statements, but each in one text per size of batch.
        Ok(options.charset("utf8mb4").statement_cache_capacity(256))
    }
}

fn validate_identifier(what: &str, name: &str) -> Result<(), StoreError> {
    let fits = !name.is_empty()
        && name.len() <= IDENTIFIER_BYTES_MAX
        && !name.starts_with(|first: char| first.is_ascii_digit())
        && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_');
    if fits {
        return Ok(());
    }
    Err(StoreError::permanent(format!(
        "the {what} {name:?} is not an identifier; use a to z, 0 to 9 and _, not a digit first, \
         at most {IDENTIFIER_BYTES_MAX} characters"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(url: &str) -> MysqlConfig {
        MysqlConfig::new(SecretString::from(url))
    }

    #[test]
    fn secrets_are_not_shown() {
        let config = config("mysql://u:hunter2@h/db");
        assert!(!format!("{config:?}").contains("hunter2"));
        let error = self::config("mysql://u:hunter2@h:port/db").options().unwrap_err();
        assert!(!format!("{error} {error:?}").contains("hunter2"));
    }

    #[test]
    fn a_short_lease_a_missing_database_and_bad_names_are_refused() {
        let good = config("mysql://u@h/db");
        assert!(good.validate().is_ok() && good.options().is_ok());
        let lease = MysqlConfig { lease: Duration::from_secs(4), ..good.clone() };
        assert!(lease.validate().unwrap_err().to_string().contains("at least 5s"));
        assert!(config("mysql://u@h").options().is_err());
        assert!(config("mysql://u@h/").options().is_err());
        for bad in ["1a", "A_", "a-b", "a`b", &"a".repeat(42)] {
            let prefix = MysqlConfig { table_prefix: bad.to_owned(), ..good.clone() };
            assert!(prefix.validate().is_err(), "{bad}");
            let database = MysqlConfig { database: Some(bad.to_owned()), ..good.clone() };
            assert!(database.validate().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_lock_is_waited_for_a_fifth_of_the_lease_at_most() {
        for (lease_s, wait_s) in [(5, 1), (9, 1), (15, 3), (61, 12)] {
            let lease = Duration::from_secs(lease_s);
            let config = MysqlConfig { lease, ..config("mysql://u@h/db") };
            assert_eq!(config.lock_wait_s(), wait_s, "{lease_s}");
        }
    }
}
