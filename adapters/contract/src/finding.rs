//! What an inspection of a broker, a database or a callback found: for `inboxd check --connect`.

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// Good to know.
    Info,
    /// It works, and something may be lost or repeated because of it.
    Warning,
    /// It cannot work like this.
    Problem,
}

/// One thing that was found; texts without secrets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// About what: `queue orders`, `topic orders`, `PostgreSQL 16.4 at db:5432`.
    pub subject: String,
    /// What was found.
    pub what: String,
    /// What to do about it; empty for information.
    pub remedy: String,
}

impl Finding {
    /// Good to know.
    pub fn info(subject: impl Into<String>, what: impl Into<String>) -> Self {
        Self::new(Severity::Info, subject, what, "")
    }

    /// It works, and something may be lost or repeated because of it.
    pub fn warning(
        subject: impl Into<String>,
        what: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self::new(Severity::Warning, subject, what, remedy)
    }

    /// It cannot work like this.
    pub fn problem(
        subject: impl Into<String>,
        what: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self::new(Severity::Problem, subject, what, remedy)
    }

    fn new(
        severity: Severity,
        subject: impl Into<String>,
        what: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self { severity, subject: subject.into(), what: what.into(), remedy: remedy.into() }
    }
}
