//! What the server is, and whether the guarantees can stand on it.

use std::collections::HashMap;

use inboxd_contract::{ErrorCode, StoreError};
use sqlx::Row;
use sqlx::mysql::MySqlConnection;

use crate::error::store_error;

/// The first versions that know SKIP LOCKED, NOWAIT and defaults that are expressions.
const MARIADB_MIN: (u32, u32, u32) = (10, 6, 0);
const MYSQL_MIN: (u32, u32, u32) = (8, 0, 13);
/// Below it, batches and bodies would hardly fit.
const PACKET_BYTES_MIN: u64 = 1_024 * 1_024;

/// What was read from the server at connect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Server {
    /// `MariaDB 10.11.6` or `MySQL 8.4.2`.
    pub(crate) name: String,
    /// `max_allowed_packet`.
    pub(crate) packet_bytes_max: u64,
    /// False: a commit may be forgotten when the host crashes.
    pub(crate) durable: bool,
}

impl Server {
    /// Asks the server and refuses one that cannot do it.
    pub(crate) async fn inspect(
        connection: &mut MySqlConnection,
        allow_weak_durability: bool,
    ) -> Result<Self, StoreError> {
        let variables = variables(connection)
            .await
            .map_err(|error| store_error("asking the server for its settings", error))?;
        let text = |name: &str| variables.get(name).map_or("", String::as_str);
        let packet_bytes_max = integer(text("max_allowed_packet"));
        let flush = integer(text("innodb_flush_log_at_trx_commit"));
        let name = check_version(text("version"))?;
        let synced = text("log_bin") != "ON" || integer(text("sync_binlog")) == 1;
        let durable = check_durability(&name, flush, synced, allow_weak_durability)?;
        if text("log_bin") == "ON" && text("binlog_format") == "STATEMENT" {
            return Err(StoreError::permanent(
                "the server has binlog_format = STATEMENT, with which it refuses writes at READ \
                 COMMITTED; set it to ROW or MIXED",
            ));
        }
        if packet_bytes_max < PACKET_BYTES_MIN {
            return Err(StoreError::permanent(format!(
                "the server's max_allowed_packet is {packet_bytes_max}; set it to at least \
                 {PACKET_BYTES_MIN}, and above the largest body"
            )));
        }
        Ok(Self { name, packet_bytes_max, durable })
    }
}

/// Asked for by SHOW: a variable that a version no longer has is absent and no error.
async fn variables(
    connection: &mut MySqlConnection,
) -> Result<HashMap<String, String>, sqlx::Error> {
    let rows = sqlx::query(
        "SHOW GLOBAL VARIABLES WHERE Variable_name IN ('version', 'max_allowed_packet', \
         'innodb_flush_log_at_trx_commit', 'log_bin', 'binlog_format', 'sync_binlog')",
    )
    .fetch_all(connection)
    .await?;
    rows.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).collect()
}

/// 0 for what is no number: refused as too small, or as not durable.
fn integer(text: &str) -> u64 {
    text.parse().unwrap_or(0)
}

/// `synced`: there is no binary log, or it is flushed with each commit. Without that a crash rolls
/// back what the log has not got, whatever InnoDB flushed.
fn check_durability(
    name: &str,
    flush: u64,
    synced: bool,
    allow_weak: bool,
) -> Result<bool, StoreError> {
    // 3 is MariaDB's: as 1, with more flushes.
    let durable = matches!(flush, 1 | 3) && synced;
    if durable || allow_weak {
        return Ok(durable);
    }
    Err(StoreError::permanent(format!(
        "{name} has innodb_flush_log_at_trx_commit = {flush}{binlog}: a crash of its host forgets \
         commits whose messages were acknowledged, and they would be lost. Set both to 1, or \
         accept the loss with allow_weak_durability = true",
        binlog = if synced { "" } else { " and a binary log without sync_binlog = 1" }
    ))
    .with_code(ErrorCode::DatabaseNotDurable))
}

/// `VERSION()` as `MariaDB x.y.z` or `MySQL x.y.z`, if it is new enough.
fn check_version(version: &str) -> Result<String, StoreError> {
    let product = if version.contains("MariaDB") { "MariaDB" } else { "MySQL" };
    let least = if product == "MariaDB" { MARIADB_MIN } else { MYSQL_MIN };
    let number: String = version.chars().take_while(|c| c.is_ascii_digit() || *c == '.').collect();
    let mut parts = number.split('.').map(|part| part.parse::<u32>().unwrap_or(0));
    let mut next = || parts.next().unwrap_or(0);
    let found = (next(), next(), next());
    if found < least {
        return Err(StoreError::permanent(format!(
            "{product} {number} is too old: MariaDB from 10.6 and MySQL from 8.0.13 on know \
             SKIP LOCKED, which keeps one locked message from stalling others"
        )));
    }
    Ok(format!("{product} {number}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_told_apart() {
        let name = |version| check_version(version).map_err(|error| error.to_string());
        assert_eq!(name("10.11.6-MariaDB-0+deb12u1").unwrap(), "MariaDB 10.11.6");
        assert_eq!(name("8.4.2").unwrap(), "MySQL 8.4.2");
        assert_eq!(name("8.0.36-0ubuntu0.22.04.1").unwrap(), "MySQL 8.0.36");
        assert!(name("5.7.44-log").unwrap_err().contains("too old"));
        assert!(name("10.5.23-MariaDB").unwrap_err().contains("10.6"));
        assert!(name("8.0.12").is_err());
    }

    #[test]
    fn a_server_that_does_not_flush_is_refused_unless_allowed() {
        assert!(check_durability("MySQL 8.4.2", 1, true, false).unwrap());
        assert!(check_durability("MariaDB 10.11.6", 3, true, false).unwrap());
        let error = check_durability("MySQL 8.4.2", 2, true, false).unwrap_err().to_string();
        assert!(error.contains("innodb_flush_log_at_trx_commit = 2"), "{error}");
        assert!(!check_durability("MySQL 8.4.2", 0, true, true).unwrap());
        let unsynced = check_durability("MySQL 8.4.2", 1, false, false).unwrap_err().to_string();
        assert!(unsynced.contains("sync_binlog"), "{unsynced}");
    }
}
