//! Errors of sqlx and the server as errors of the contract.

use inboxd_contract::{ErrorClass, StoreError};
use sqlx::mysql::MySqlDatabaseError;

/// The server's error number.
pub(crate) fn number(error: &sqlx::Error) -> Option<u16> {
    let error = error.as_database_error()?;
    error.try_downcast_ref::<MySqlDatabaseError>().map(MySqlDatabaseError::number)
}

/// Somebody else was in the way: a lock (1205; 3572 is MySQL's for NOWAIT), a deadlock (1213),
/// a record that changed meanwhile (1020), or a row that was inserted between our look and our
/// insert (1062).
const CONFLICTS: [u16; 5] = [1020, 1062, 1205, 1213, 3572];

pub(crate) fn is_conflict(error: &sqlx::Error) -> bool {
    number(error).is_some_and(|number| CONFLICTS.contains(&number))
}

/// The server does not take writes (--read-only, a read-only transaction, a standby).
const READ_ONLY: [u16; 3] = [1290, 1792, 1836];

pub(crate) fn is_read_only(error: &sqlx::Error) -> bool {
    number(error).is_some_and(|number| READ_ONLY.contains(&number))
}

/// Errors after which a connection is of no use: shutting down, packet too large, a statement that
/// another server prepared, killed, moved, idle for too long (4031 is MySQL's for that).
const BREAKING: [u16; 6] = [1053, 1153, 1243, 1927, 3032, 4031];

/// The connection is gone or of no use any more; another one may do.
pub(crate) fn is_broken(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Io(_) | sqlx::Error::Protocol(_) | sqlx::Error::WorkerCrashed => true,
        error => {
            is_read_only(error) || number(error).is_some_and(|number| BREAKING.contains(&number))
        }
    }
}

/// A value too long, out of range, not of the column's text, or a row or packet too large.
fn is_refused_value(error: &sqlx::Error) -> bool {
    matches!(number(error), Some(1118 | 1153 | 1264 | 1366 | 1406))
}

fn class_of(error: &sqlx::Error) -> ErrorClass {
    match number(error) {
        Some(number) => class_of_number(number),
        None => match error {
            sqlx::Error::Io(_)
            | sqlx::Error::Tls(_)
            | sqlx::Error::Protocol(_)
            | sqlx::Error::PoolTimedOut
            | sqlx::Error::PoolClosed
            | sqlx::Error::WorkerCrashed
            | sqlx::Error::BeginFailed => ErrorClass::Transient,
            _ => ErrorClass::Bug,
        },
    }
}

fn class_of_number(number: u16) -> ErrorClass {
    match number {
        _ if CONFLICTS.contains(&number) || READ_ONLY.contains(&number) => ErrorClass::Transient,
        // Disk or memory short, tables full: an operator mends it.
        1021 | 1037 | 1038 | 1041 | 1114 | 1135 | 1206
        // Too many connections, hosts blocked, users limited.
        | 1040 | 1129 | 1203 | 1226 | 1637
        // Not ready, shutting down, cut, interrupted.
        | 1047 | 1053 | 1077 | 1079 | 1080 | 1152 | 1158 | 1159 | 1160 | 1161 | 1184 | 1317
        | 1927 | 1969 | 3024 | 3032 | 3168 | 3169 | 4031
        // A definition changed, a prepared statement is gone (a pooler changed servers).
        | 1243 | 1412 | 1615
        // Errors of storage and of the log.
        | 1026 | 1030 | 1180 | 1196 | 3100 | 3101 => ErrorClass::Transient,
        _ => ErrorClass::Permanent,
    }
}

/// What to do about a connection that is refused.
pub(crate) fn hint(error: &sqlx::Error) -> Option<&'static str> {
    if let sqlx::Error::Tls(cause) = error {
        let refused = cause.to_string().contains("does not support TLS");
        return refused.then_some(
            "let it have a certificate, or give database.url ssl-mode=DISABLED where the network is \
             trusted",
        );
    }
    match number(error)? {
        1049 => Some("create the database, or give the name of another in database.url"),
        1044 | 1045 => Some("give the right user and password in database.url"),
        _ => None,
    }
}

/// `what`: what was attempted and on what.
pub(crate) fn store_error(what: impl Into<String>, error: sqlx::Error) -> StoreError {
    let class = class_of(&error);
    let locked = is_conflict(&error);
    let refused = class == ErrorClass::Permanent && is_refused_value(&error);
    StoreError { locked, refused, ..StoreError::new(class, what, error) }
}

/// The same error for every member of a batch: errors of sqlx are not `Clone`, so the text
/// of the source stands for it.
pub(crate) fn repeat(error: &StoreError) -> StoreError {
    StoreError {
        class: error.class,
        what: error.what.clone(),
        locked: error.locked,
        refused: error.refused,
        code: error.code,
        source: error.source.as_ref().map(|source| source.to_string().into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_say_whether_to_try_again() {
        for number in [1040, 1053, 1205, 1213, 1290, 1927, 3032, 4031] {
            assert_eq!(class_of_number(number), ErrorClass::Transient, "{number}");
        }
        for number in [1044, 1045, 1142, 1146, 1153, 1406] {
            assert_eq!(class_of_number(number), ErrorClass::Permanent, "{number}");
        }
        assert!(BREAKING.contains(&4031), "its connection was closed for being idle");
    }
}
