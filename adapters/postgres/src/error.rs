//! What a failure of the database means to the caller.

use std::error::Error;
use std::fmt;
use std::sync::Arc;

use inboxd_contract::{ErrorClass, StoreError};

/// A failure, shared by the members of a batch.
#[derive(Debug, Clone)]
pub(crate) struct Failure {
    pub(crate) class: ErrorClass,
    /// A lock of somebody else was met, or a deadlock.
    pub(crate) locked: bool,
    /// A value was refused: the members beside it are not to blame.
    refused: bool,
    what: String,
    source: Option<Arc<sqlx::Error>>,
}

impl Failure {
    /// What `sqlx` reported while `doing` something.
    pub(crate) fn of(doing: &str, error: sqlx::Error) -> Self {
        let (class, locked) = classify(&error);
        let refused = is_refused_value(&error);
        let what = match hint(&error) {
            Some(hint) => format!("PostgreSQL: {doing} failed; {hint}"),
            None => format!("PostgreSQL: {doing} failed"),
        };
        Self { class, locked, refused, what, source: Some(Arc::new(error)) }
    }

    /// The call took too long and its connection was closed.
    pub(crate) fn timed_out(doing: &str, after: std::time::Duration) -> Self {
        Self {
            class: ErrorClass::Transient,
            locked: false,
            refused: false,
            what: format!("PostgreSQL: {doing} had no answer within {after:?}"),
            source: None,
        }
    }

    /// Others of the batch were locked for so long that this one was not tried.
    pub(crate) fn out_of_patience() -> Self {
        Self {
            class: ErrorClass::Transient,
            locked: true,
            refused: false,
            what: String::from("PostgreSQL: too many members of the batch are locked"),
            source: None,
        }
    }

    /// What is stored is not what was expected.
    pub(crate) fn unreadable(what: String, error: sqlx::Error) -> Self {
        let source = Some(Arc::new(error));
        Self { class: ErrorClass::Permanent, locked: false, refused: false, what, source }
    }

    /// Another try with fewer members may help some of them. Then the connection is sound too.
    pub(crate) fn concerns_a_member(&self) -> bool {
        self.locked || self.refused
    }
}

impl From<Failure> for StoreError {
    fn from(failure: Failure) -> Self {
        Self {
            class: failure.class,
            what: failure.what,
            locked: failure.locked,
            refused: failure.refused,
            code: None,
            source: failure.source.map(|source| Box::new(Shared(source)) as _),
        }
    }
}

/// An error that several members of a batch have in common.
#[derive(Debug)]
struct Shared(Arc<sqlx::Error>);

impl fmt::Display for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The driver adds the line of the server's source.
        match self.0.as_database_error() {
            Some(error) => write!(f, "the server says: {}", error.message()),
            None => fmt::Display::fmt(&self.0, f),
        }
    }
}

impl Error for Shared {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match &*self.0 {
            sqlx::Error::Database(_) => None,
            error => error.source(),
        }
    }
}

/// The connection, the server or its resources are to blame, not the statement. A message that the
/// protocol does not allow is the statement's: it was meant for another one.
pub(crate) fn is_transient(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(|error| error.code());
    classify(error).0 == ErrorClass::Transient && code.as_deref() != Some("08P01")
}

fn classify(error: &sqlx::Error) -> (ErrorClass, bool) {
    use ErrorClass::{Bug, Permanent, Transient};
    match error {
        sqlx::Error::Database(database) => classify_code(database.code().as_deref()),
        sqlx::Error::Io(_)
        | sqlx::Error::Protocol(_)
        | sqlx::Error::PoolTimedOut
        | sqlx::Error::PoolClosed
        | sqlx::Error::WorkerCrashed
        | sqlx::Error::BeginFailed => (Transient, false),
        sqlx::Error::Tls(_) | sqlx::Error::Configuration(_) | sqlx::Error::Encode(_) => {
            (Permanent, false)
        }
        _ => (Bug, false),
    }
}

/// By SQLSTATE.
fn classify_code(code: Option<&str>) -> (ErrorClass, bool) {
    use ErrorClass::{Permanent, Transient};
    let Some(code) = code else { return (Permanent, false) };
    match code {
        // lock_not_available, deadlock_detected
        "55P03" | "40P01" => (Transient, true),
        // query_canceled; the plan of a statement changed by a migration; read-only after a
        // failover; sessions that the server ended
        "57014" | "0A000" | "25006" | "25P03" | "57P01" | "57P02" | "57P03" | "57P05" => {
            (Transient, false)
        }
        // Connection exceptions; rollbacks; out of resources (connections, memory, disk); system.
        _ if ["08", "40", "53", "58"].iter().any(|class| code.starts_with(class)) => {
            (Transient, false)
        }
        _ => (Permanent, false),
    }
}

/// Data exceptions, violated constraints, values beyond a limit.
fn is_refused_value(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Database(database) => database
            .code()
            .is_some_and(|code| ["22", "23", "54"].iter().any(|class| code.starts_with(class))),
        sqlx::Error::Encode(_) => true,
        _ => false,
    }
}

fn hint(error: &sqlx::Error) -> Option<&'static str> {
    if let sqlx::Error::Tls(cause) = error {
        let refused = cause.to_string().contains("does not support TLS");
        return refused.then_some(
            "let it have a certificate, or give database.url sslmode=disable where the network is \
             trusted",
        );
    }
    let code = error.as_database_error()?.code()?;
    match &*code {
        "3D000" => Some("create the database, or give the name of another in database.url"),
        "28P01" => Some("give the right user and password in database.url"),
        "28000" => Some("let the user in from here (pg_hba.conf), or give another in database.url"),
        "42P01" | "3F000" => Some("run `inboxd migrate`, or see database.schema and table_prefix"),
        "26000" | "42P05" => {
            Some("a transaction pooler does not keep prepared statements: see prepared_statements")
        }
        "42501" => Some("the database user lacks a right"),
        "25006" => Some("the database is read-only (a standby, or a failover under way)"),
        "53300" => Some("the server has no connection left"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_say_what_to_do() {
        for code in ["08006", "40001", "57P01", "57P03", "25006", "53300", "53100", "57014"] {
            assert_eq!(classify_code(Some(code)), (ErrorClass::Transient, false), "{code}");
        }
        for code in ["55P03", "40P01"] {
            assert_eq!(classify_code(Some(code)), (ErrorClass::Transient, true), "{code}");
        }
        for code in ["22021", "23514", "42P01", "42501", "28P01", "3D000"] {
            assert_eq!(classify_code(Some(code)), (ErrorClass::Permanent, false), "{code}");
        }
    }

    #[test]
    fn a_pool_that_is_exhausted_is_transient() {
        assert!(StoreError::from(Failure::of("a claim", sqlx::Error::PoolTimedOut)).is_transient());
    }
}
