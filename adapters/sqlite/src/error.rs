//! Errors of sqlx and SQLite as errors of the contract.

use inboxd_contract::{ErrorClass, StoreError};

/// SQLite's primary result codes (the low byte of the extended ones).
mod code {
    pub(super) const BUSY: i32 = 5;
    pub(super) const LOCKED: i32 = 6;
    pub(super) const NO_MEMORY: i32 = 7;
    pub(super) const READ_ONLY: i32 = 8;
    pub(super) const INTERRUPT: i32 = 9;
    pub(super) const IO: i32 = 10;
    pub(super) const FULL: i32 = 13;
    pub(super) const CANNOT_OPEN: i32 = 14;
    pub(super) const PROTOCOL: i32 = 15;
    pub(super) const SCHEMA: i32 = 17;
    pub(super) const TOO_BIG: i32 = 18;
    pub(super) const CONSTRAINT: i32 = 19;
    pub(super) const MISMATCH: i32 = 20;
    pub(super) const RANGE: i32 = 25;
}

fn primary_code(error: &sqlx::Error) -> Option<i32> {
    let code = error.as_database_error()?.code()?;
    code.parse::<i32>().ok().map(|code| code & 0xff)
}

/// Another connection holds the lock that this one wanted.
pub(crate) fn is_busy(error: &sqlx::Error) -> bool {
    matches!(primary_code(error), Some(code::BUSY | code::LOCKED))
}

/// `what`: what was attempted and on what.
pub(crate) fn store_error(what: impl Into<String>, error: sqlx::Error) -> StoreError {
    let class = match (&error, primary_code(&error)) {
        (_, Some(code)) => match code {
            // A full disk, lost permissions and a failing device are mended by an operator,
            // and the same write succeeds then.
            code::BUSY
            | code::LOCKED
            | code::NO_MEMORY
            | code::READ_ONLY
            | code::INTERRUPT
            | code::IO
            | code::FULL
            | code::CANNOT_OPEN
            | code::PROTOCOL
            | code::SCHEMA => ErrorClass::Transient,
            _ => ErrorClass::Permanent,
        },
        (
            sqlx::Error::Io(_)
            | sqlx::Error::PoolTimedOut
            | sqlx::Error::PoolClosed
            | sqlx::Error::WorkerCrashed,
            _,
        ) => ErrorClass::Transient,
        _ => ErrorClass::Bug,
    };
    let locked = is_busy(&error);
    let refused = matches!(
        primary_code(&error),
        Some(code::TOO_BIG | code::CONSTRAINT | code::MISMATCH | code::RANGE)
    );
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
