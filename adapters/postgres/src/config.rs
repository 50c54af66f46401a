//! Where the database is and how it is used.

use std::str::FromStr;
use std::time::Duration;

use secrecy::{ExposeSecret, SecretString};
use sqlx::ConnectOptions;
use sqlx::postgres::PgConnectOptions;

/// With the longest index name behind it, this stays within PostgreSQL's 63 bytes.
const PREFIX_BYTES_MAX: usize = 32;
const SCHEMA_BYTES_MAX: usize = 41;
const LEASE_MIN: Duration = Duration::from_millis(500);

/// The configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PostgresConfigError {
    /// A schema or prefix is not a plain identifier.
    #[error(
        "database.{key} {value:?} is not usable: begin with a-z or _, go on with a-z, 0-9 or _, \
         at most {max} characters"
    )]
    Identifier {
        /// Which key.
        key: &'static str,
        /// Its value.
        value: String,
        /// The longest allowed.
        max: usize,
    },
    /// The URL cannot be read. Its text is not repeated: it may hold a password.
    #[error("database.{key} is not a PostgreSQL URL (postgres://user@host:5432/database)")]
    Url {
        /// Which key.
        key: &'static str,
    },
    /// No connection at all.
    #[error("database.pool_max must be at least 1")]
    PoolMax,
    /// The lock timeout is a fifth of it.
    #[error("a lease of {0:?} is too short for PostgreSQL, the least is {LEASE_MIN:?}")]
    Lease(Duration),
}

/// How a [`crate::PostgresStore`] connects.
#[derive(Debug, Clone)]
pub struct PostgresConfig {
    /// `postgres://user:password@host:port/database?sslmode=…`
    pub url: SecretString,
    /// Connections for everything but renewals, which have one of their own. At least 1.
    pub pool_max: u32,
    /// The schema that holds the tables; made by the migration where it is missing. `None`: what
    /// the search path says.
    pub schema: Option<String>,
    /// In front of every table's name; may be empty.
    pub table_prefix: String,
    /// The shortest lease that claims will be asked for; no lock is waited for longer
    /// than a fifth of it.
    pub lease: Duration,
    /// Migrates as somebody else, who may create tables. `None`: by `url`.
    pub migrate_url: Option<SecretString>,
    /// How long a call waits for a connection (made anew, if need be).
    pub acquire_timeout: Duration,
    /// False: behind a pooler in transaction mode that does not know prepared statements
    /// (PgBouncer before 1.21, or with `max_prepared_statements = 0`).
    pub prepared_statements: bool,
}

impl PostgresConfig {
    /// The defaults: a pool of 4, no schema, no prefix, a lease of 15 s.
    pub fn new(url: SecretString) -> Self {
        Self {
            url,
            pool_max: 4,
            schema: None,
            table_prefix: String::new(),
            lease: Duration::from_secs(15),
            migrate_url: None,
            acquire_timeout: Duration::from_secs(5),
            prepared_statements: true,
        }
    }

    pub(crate) fn validate(&self) -> Result<(), PostgresConfigError> {
        if let Some(schema) = &self.schema {
            identifier("schema", schema, SCHEMA_BYTES_MAX)?;
        }
        if !self.table_prefix.is_empty() {
            identifier("table_prefix", &self.table_prefix, PREFIX_BYTES_MAX)?;
        }
        if self.pool_max == 0 {
            return Err(PostgresConfigError::PoolMax);
        }
        if self.lease < LEASE_MIN {
            return Err(PostgresConfigError::Lease(self.lease));
        }
        Ok(())
    }

    pub(crate) fn connect_options(&self) -> Result<PgConnectOptions, PostgresConfigError> {
        options("url", &self.url)
    }

    pub(crate) fn migrate_options(&self) -> Result<PgConnectOptions, PostgresConfigError> {
        match &self.migrate_url {
            Some(url) => options("migrate_url", url),
            None => self.connect_options(),
        }
    }

    /// What stands in front of a table's name: quoted schema and dot, and the prefix.
    pub(crate) fn table_qualifier(&self) -> String {
        match &self.schema {
            Some(schema) => format!("\"{schema}\".{}", self.table_prefix),
            None => self.table_prefix.clone(),
        }
    }
}

fn options(key: &'static str, url: &SecretString) -> Result<PgConnectOptions, PostgresConfigError> {
    let options = PgConnectOptions::from_str(url.expose_secret())
        .map_err(|_| PostgresConfigError::Url { key })?;
    let options = match options.get_application_name() {
        Some(_) => options,
        None => options.application_name("inboxd"),
    };
    // A pooler refuses start-up parameters it does not know, and nothing here is a float.
    Ok(options.extra_float_digits(None).disable_statement_logging())
}

fn identifier(key: &'static str, value: &str, max: usize) -> Result<(), PostgresConfigError> {
    let first = value.bytes().next();
    let fits = value.len() <= max
        && first.is_some_and(|byte| byte.is_ascii_lowercase() || byte == b'_')
        && value
            .bytes()
            .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_');
    if fits {
        return Ok(());
    }
    Err(PostgresConfigError::Identifier { key, value: value.to_owned(), max })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> PostgresConfig {
        PostgresConfig::new(SecretString::from("postgres://inbox:secret@localhost/inbox"))
    }

    #[test]
    fn identifiers_are_plain() {
        for good in ["a", "_", "inbox", "a1_", &"x".repeat(32)] {
            let config = PostgresConfig { table_prefix: good.to_owned(), ..config() };
            assert!(config.validate().is_ok(), "{good}");
        }
        for bad in ["1a", "A", "a-b", "a\"b", "a;", "a b", "é", &"x".repeat(33)] {
            let config = PostgresConfig { table_prefix: bad.to_owned(), ..config() };
            let error = config.validate().unwrap_err().to_string();
            assert!(error.contains("table_prefix"), "{error}");
        }
        let empty = PostgresConfig { schema: Some(String::new()), ..config() };
        assert!(empty.validate().unwrap_err().to_string().contains("schema"));
    }

    #[test]
    fn limits_are_checked() {
        assert!(PostgresConfig { pool_max: 0, ..config() }.validate().is_err());
        assert!(PostgresConfig { lease: Duration::ZERO, ..config() }.validate().is_err());
        assert!(config().validate().is_ok());
    }

    #[test]
    fn secrets_are_not_shown() {
        assert!(!format!("{:?}", config()).contains("secret@"));
        let url = SecretString::from("mysql://inbox:secret@localhost/inbox");
        if let Err(error) = options("url", &url) {
            assert!(!format!("{error} {error:?}").contains("secret"));
        }
    }
}
