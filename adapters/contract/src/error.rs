//! Errors that cross the adapter boundary, each with a class that says what to do.

use std::error::Error;

use crate::ErrorCode;

/// What a caller may do about an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorClass {
    /// Try again with backoff: connection loss, deadlock, lock timeout, read-only after failover.
    Transient,
    /// Trying the same again cannot succeed: a value the server refuses, a missing table.
    Permanent,
    /// The code is wrong.
    Bug,
}

type BoxedError = Box<dyn Error + Send + Sync>;

/// A store could not do what it was asked.
#[derive(Debug, thiserror::Error)]
#[error("{what}")]
pub struct StoreError {
    /// What to do about it.
    pub class: ErrorClass,
    /// What was attempted and on what, for an operator. Never repeats the source.
    pub what: String,
    /// The member met a lock held by somebody else: retry it alone, later.
    pub locked: bool,
    /// The store will not take this member's values, whoever asks and whenever: too long, too
    /// large, a byte that no column holds. Always permanent.
    pub refused: bool,
    /// What it is for an operator, where the class does not say it.
    pub code: Option<ErrorCode>,
    /// The underlying error.
    #[source]
    pub source: Option<BoxedError>,
}

impl StoreError {
    /// An error with its source.
    pub fn new(class: ErrorClass, what: impl Into<String>, source: impl Into<BoxedError>) -> Self {
        Self {
            class,
            what: what.into(),
            locked: false,
            refused: false,
            code: None,
            source: Some(source.into()),
        }
    }

    /// A transient error without a source.
    pub fn transient(what: impl Into<String>) -> Self {
        Self {
            class: ErrorClass::Transient,
            what: what.into(),
            locked: false,
            refused: false,
            code: None,
            source: None,
        }
    }

    /// A permanent error without a source.
    pub fn permanent(what: impl Into<String>) -> Self {
        Self {
            class: ErrorClass::Permanent,
            what: what.into(),
            locked: false,
            refused: false,
            code: None,
            source: None,
        }
    }

    /// The member's values are refused.
    pub fn refused(what: impl Into<String>) -> Self {
        Self { refused: true, ..Self::permanent(what) }
    }

    /// A member met a lock of somebody else.
    pub fn locked(what: impl Into<String>) -> Self {
        Self {
            class: ErrorClass::Transient,
            what: what.into(),
            locked: true,
            refused: false,
            code: None,
            source: None,
        }
    }

    /// The same error, known to be of this kind.
    pub fn with_code(self, code: ErrorCode) -> Self {
        Self { code: Some(code), ..self }
    }

    /// What it is for an operator.
    pub fn code(&self) -> ErrorCode {
        self.code.unwrap_or(ErrorCode::of_store(self.class))
    }

    /// True if trying again may succeed.
    pub fn is_transient(&self) -> bool {
        self.class == ErrorClass::Transient
    }
}

/// A source cannot go on, or cannot start. What a source can mend by itself
/// (reconnection, a missing queue) is no error but a [`crate::SourceStatus`].
#[derive(Debug, thiserror::Error)]
#[error("{what}")]
pub struct SourceError {
    /// What to do about it.
    pub class: ErrorClass,
    /// What was attempted, where, and the remedy. Never repeats the source.
    pub what: String,
    /// What it is for an operator; a subscription that ends by it has ended in any case.
    pub code: Option<ErrorCode>,
    /// The underlying error.
    #[source]
    pub source: Option<BoxedError>,
}

impl SourceError {
    /// A permanent error: the configuration or the broker's set-up must change.
    pub fn permanent(what: impl Into<String>) -> Self {
        Self { class: ErrorClass::Permanent, what: what.into(), code: None, source: None }
    }

    /// An error with its source.
    pub fn new(class: ErrorClass, what: impl Into<String>, source: impl Into<BoxedError>) -> Self {
        Self { class, what: what.into(), code: None, source: Some(source.into()) }
    }

    /// The same error, known to be of this kind.
    pub fn with_code(self, code: ErrorCode) -> Self {
        Self { code: Some(code), ..self }
    }
}
