//! The lock file: the proof that no other life uses the database.
//!
//! An exclusive `flock` on `<database>.lock`, held for the store's life and gone with the
//! process, however it ends. The file stays: removing it would let two holders lock two files
//! of one name. Its content, the holder's process id, is for people; the lock alone decides.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};

use inboxd_contract::{ErrorClass, ErrorCode, StoreError};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

/// Held as long as the database is ours.
#[derive(Debug)]
pub(crate) struct OwnerLock {
    /// Unlocks when dropped.
    _file: Flock<File>,
}

impl OwnerLock {
    /// Takes the lock, without waiting. Blocks on the disk: not for the runtime's threads.
    pub(crate) fn take(database: &Path) -> Result<Self, StoreError> {
        let path = lock_path(database);
        let failed = |error: std::io::Error| {
            StoreError::new(
                ErrorClass::Permanent,
                format!(
                    "opening the lock file {}; the directory must exist and be writable",
                    path.display()
                ),
                error,
            )
        };
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(failed)?;
        // For people, and possibly torn by a crash.
        let mut holder = Vec::new();
        Read::by_ref(&mut file).take(64).read_to_end(&mut holder).map_err(failed)?;
        let holder = String::from_utf8_lossy(&holder).into_owned();
        let mut file = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(file) => file,
            Err((_, Errno::EWOULDBLOCK)) => return Err(taken(database, &path, holder.trim())),
            Err((_, errno)) => return Err(failed(errno.into())),
        };
        file.set_len(0).map_err(failed)?;
        file.rewind().map_err(failed)?;
        writeln!(file, "{}", std::process::id()).map_err(failed)?;
        Ok(Self { _file: file })
    }
}

fn lock_path(database: &Path) -> PathBuf {
    let mut path = database.as_os_str().to_owned();
    path.push(".lock");
    path.into()
}

fn taken(database: &Path, lock: &Path, holder: &str) -> StoreError {
    let holder = if holder.is_empty() { "unknown" } else { holder };
    StoreError::permanent(format!(
        "the SQLite database {} is in use by another instance (pid {holder}, lock file {}); one \
         SQLite inbox serves one instance: stop the other one, give this one a file of its own, \
         or use PostgreSQL or MySQL for several instances",
        database.display(),
        lock.display()
    ))
    .with_code(ErrorCode::InboxInUse)
}
