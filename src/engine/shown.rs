//! A value that is shown to whoever waits for it to change.
//!
//! Invariant: waiters wake in the order in which they began to wait. `tokio::sync::watch` spreads
//! them at random, and a seed of the simulator would not replay.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// The value; clones show the same one.
#[derive(Clone)]
pub(super) struct Shown<T> {
    inner: Arc<Inner<T>>,
}

struct Inner<T> {
    value: Mutex<T>,
    changed: Notify,
}

impl<T: Copy + PartialEq> Shown<T> {
    pub(super) fn new(value: T) -> Self {
        Self { inner: Arc::new(Inner { value: Mutex::new(value), changed: Notify::new() }) }
    }

    fn value(&self) -> MutexGuard<'_, T> {
        self.inner.value.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn get(&self) -> T {
        *self.value()
    }

    /// Shows another value; answers the one before.
    pub(super) fn replace(&self, value: T) -> T {
        let before = std::mem::replace(&mut *self.value(), value);
        if before != value {
            self.inner.changed.notify_waiters();
        }
        before
    }

    /// Waits for a value, and answers it.
    ///
    /// # Cancel safety
    /// Cancel-safe.
    pub(super) async fn wait_for(&self, is_wanted: impl Fn(T) -> bool) -> T {
        loop {
            let changed = self.inner.changed.notified();
            let value = self.get();
            if is_wanted(value) {
                return value;
            }
            changed.await;
        }
    }
}
