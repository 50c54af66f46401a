//! Back-pressure: a permit, by count and by bytes, is taken before the next delivery is.
//!
//! Invariants: permits out never exceed either bound, but for one delivery larger than the
//! whole byte budget, which takes all of it, alone.

use std::sync::Arc;

use inboxd_contract::Room;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The bounds of one subscription.
pub struct Budget {
    count: Arc<Semaphore>,
    bytes: Arc<Semaphore>,
    bytes_max: u32,
}

/// The right to hold one delivery in memory.
pub struct Permit {
    _count: OwnedSemaphorePermit,
    bytes: OwnedSemaphorePermit,
}

impl Permit {
    /// Bytes of the budget that this delivery takes.
    pub fn bytes(&self) -> usize {
        self.bytes.num_permits()
    }
}

impl Budget {
    /// At most `count_max` deliveries and `bytes_max` bytes (up to 4 GiB).
    pub fn new(count_max: usize, bytes_max: usize) -> Self {
        let bytes_max = u32::try_from(bytes_max).unwrap_or(u32::MAX).max(1);
        Self {
            count: Arc::new(Semaphore::new(count_max.clamp(1, Semaphore::MAX_PERMITS))),
            bytes: Arc::new(Semaphore::new(bytes_max as usize)),
            bytes_max,
        }
    }

    /// Waits until one more delivery may be taken, and answers how many.
    ///
    /// # Cancel safety
    /// Cancel-safe: nothing is taken.
    pub async fn room(&self) -> Room {
        // The semaphores are never closed. Only the one intake takes permits, so what is
        // available now can only grow until it takes them.
        drop(self.count.acquire().await);
        drop(self.bytes.acquire().await);
        Room {
            deliveries: self.count.available_permits().max(1),
            bytes: self.bytes.available_permits().max(1),
        }
    }

    /// Takes a permit for a delivery of this size, waiting for bytes if it overshot.
    ///
    /// # Cancel safety
    /// Cancel-safe: nothing is taken when dropped.
    pub async fn take(&self, bytes: usize) -> Permit {
        let wanted = u32::try_from(bytes).unwrap_or(u32::MAX).clamp(1, self.bytes_max);
        let closed = "the budget's semaphores are never closed";
        let count = self.count.clone().acquire_owned().await.expect(closed);
        let bytes = self.bytes.clone().acquire_many_owned(wanted).await.expect(closed);
        Permit { _count: count, bytes }
    }

    /// True if a delivery of this size would get its permit at once.
    pub fn has(&self, bytes: usize) -> bool {
        self.count.available_permits() > 0
            && self.bytes.available_permits() >= bytes.clamp(1, self.bytes_max as usize)
    }

    /// True while nothing more can be taken.
    pub fn is_full(&self) -> bool {
        self.count.available_permits() == 0 || self.bytes.available_permits() == 0
    }
}
