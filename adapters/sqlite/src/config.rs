//! What a SQLite store is opened with.

use std::path::{Path, PathBuf};
use std::time::Duration;

use inboxd_contract::StoreError;

/// The longest table prefix, in bytes.
const PREFIX_BYTES_MAX: usize = 41;

/// Where the database is and how it is used.
#[derive(Debug, Clone)]
pub struct SqliteConfig {
    /// The database file; made if it is missing, its directory is not.
    pub path: PathBuf,
    /// The lease that claims will have; waits for the write lock last at most a fifth of it.
    pub lease: Duration,
    /// Put before each table's name: `[a-z_][a-z0-9_]{0,40}` or empty.
    pub table_prefix: String,
    /// Connections that only read, beside the one that writes.
    pub readers_max: u32,
    /// True (default): the lock file beside the database proves that no other life uses it,
    /// and claims of former lives are freed at once. False is for tests that play two
    /// instances on one database: no lock file, nothing is freed.
    pub exclusive: bool,
}

impl SqliteConfig {
    /// The defaults for a database file.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            lease: Duration::from_secs(15),
            table_prefix: String::new(),
            readers_max: 3,
            exclusive: true,
        }
    }

    /// From `sqlite:inbox.db`, `sqlite:///var/lib/inboxd/inbox.db` or a bare path.
    ///
    /// # Errors
    /// Permanent: no path, a database in memory, or parameters after `?`.
    pub fn from_url(url: &str) -> Result<Self, StoreError> {
        let path = url
            .strip_prefix("sqlite://")
            .or_else(|| url.strip_prefix("sqlite:"))
            .or_else(|| url.strip_prefix("file:"))
            .unwrap_or(url);
        if path.is_empty() {
            return Err(StoreError::permanent(
                "the database URL names no file; write sqlite:inbox.db or \
                 sqlite:///var/lib/inboxd/inbox.db",
            ));
        }
        if path.contains('?') {
            return Err(StoreError::permanent(format!(
                "the database URL {url:?} has parameters, and SQLite's takes none; leave out \
                 everything from the ? on"
            )));
        }
        Ok(Self::new(path))
    }

    /// Checks what can be checked without touching the disk.
    pub(crate) fn validate(&self) -> Result<(), StoreError> {
        if self.path.as_os_str() == ":memory:" {
            return Err(StoreError::permanent(
                "a SQLite database in memory keeps no proof over a restart; name a file",
            ));
        }
        if self.path.to_str().is_none() || self.path.file_name().is_none() {
            return Err(StoreError::permanent(format!(
                "{} cannot be a SQLite database; name a file by a path that is UTF-8",
                self.path.display()
            )));
        }
        if self.lease < Duration::from_millis(100) {
            return Err(StoreError::permanent(format!(
                "a lease of {:?} leaves no time for one write; the least is 100ms",
                self.lease
            )));
        }
        validate_prefix(&self.table_prefix)
    }

    /// The absolute path, with links followed, so that one file has one lock.
    pub(crate) fn resolve(&self) -> Result<PathBuf, StoreError> {
        let io = |path: &Path, error: std::io::Error| {
            StoreError::new(
                inboxd_contract::ErrorClass::Permanent,
                format!(
                    "finding the directory of the SQLite database {}; make it first, and let \
                     this process write to it",
                    path.display()
                ),
                error,
            )
        };
        let absolute = std::path::absolute(&self.path).map_err(|error| io(&self.path, error))?;
        // Made before its name is resolved, so that a link to a file that is not there yet has one
        // name, and one lock file, for everybody. That it cannot be made is told by the opening.
        let _ = std::fs::OpenOptions::new().append(true).create(true).open(&absolute);
        if let Ok(existing) = absolute.canonicalize() {
            return Ok(existing);
        }
        let (Some(directory), Some(name)) = (absolute.parent(), absolute.file_name()) else {
            return Ok(absolute);
        };
        Ok(directory.canonicalize().map_err(|error| io(&absolute, error))?.join(name))
    }
}

fn validate_prefix(prefix: &str) -> Result<(), StoreError> {
    let fits = prefix.len() <= PREFIX_BYTES_MAX
        && !prefix.starts_with(|first: char| first.is_ascii_digit())
        && prefix.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_');
    if fits {
        return Ok(());
    }
    Err(StoreError::permanent(format!(
        "the table prefix {prefix:?} is not an identifier; use a to z, 0 to 9 and _, not a digit \
         first, at most {PREFIX_BYTES_MAX} characters"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_and_paths_name_a_file() {
        for (url, path) in [
            ("sqlite:inbox.db", "inbox.db"),
            ("sqlite://inbox.db", "inbox.db"),
            ("sqlite:///var/lib/inbox.db", "/var/lib/inbox.db"),
            ("inbox.db", "inbox.db"),
        ] {
            assert_eq!(SqliteConfig::from_url(url).unwrap().path, Path::new(path), "{url}");
        }
        assert!(SqliteConfig::from_url("sqlite:").is_err());
        assert!(SqliteConfig::from_url("sqlite:a.db?mode=ro").is_err());
        assert!(SqliteConfig::from_url("sqlite::memory:").unwrap().validate().is_err());
    }

    #[test]
    fn a_prefix_is_an_identifier_or_refused() {
        for good in ["", "app_", "_x", "a1_"] {
            assert!(validate_prefix(good).is_ok(), "{good}");
        }
        for bad in ["1a", "A_", "a-b", "a b", "a;b", "\"", "é", &"a".repeat(42)] {
            assert!(validate_prefix(bad).is_err(), "{bad}");
        }
    }
}
