//! What happened to a source since it was made.

use std::sync::atomic::{AtomicU64, Ordering};

use inboxd_contract::SourceCounts;

/// Each only grows.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    cancels: AtomicU64,
    releases: AtomicU64,
}

impl Counts {
    /// The broker ended a consumer.
    pub(crate) fn cancelled(&self) {
        self.cancels.fetch_add(1, Ordering::Relaxed);
    }

    /// A delivery goes back.
    pub(crate) fn released(&self) {
        self.releases.fetch_add(1, Ordering::Relaxed);
    }

    /// As the status tells them.
    pub(crate) fn of_status(&self) -> SourceCounts {
        SourceCounts {
            cancels: self.cancels.load(Ordering::Relaxed),
            releases: self.releases.load(Ordering::Relaxed),
            ..SourceCounts::default()
        }
    }
}
