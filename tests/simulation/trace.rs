//! What happened in a run, line by line, in paused time.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::time::Instant;

/// Locks; a run that panicked has failed already.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The lines of one run; clones share them.
#[derive(Clone)]
pub struct Trace {
    begun_at: Instant,
    lines: Arc<Mutex<Vec<String>>>,
}

impl Trace {
    pub fn new() -> Self {
        Self { begun_at: Instant::now(), lines: Arc::default() }
    }

    /// Adds `who` did `what`, now.
    pub fn add(&self, who: &str, what: fmt::Arguments<'_>) {
        let now = self.begun_at.elapsed();
        let line = format!("{:>11.6}  {who:<6} {what}", now.as_secs_f64());
        lock(&self.lines).push(line);
    }

    pub fn take(&self) -> Vec<String> {
        std::mem::take(&mut *lock(&self.lines))
    }
}
