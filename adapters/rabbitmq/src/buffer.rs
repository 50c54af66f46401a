//! Deliveries that came and were not handed over yet.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use inboxd_contract::{Acker, Delivery, Fence, Room, StreamId};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::content;
use crate::wire::Raw;

/// A delivery as it came. Dropped, it is released.
#[derive(Debug)]
pub(crate) struct Arrival {
    pub(crate) queue: Arc<str>,
    pub(crate) raw: Raw,
    pub(crate) redelivered: bool,
    pub(crate) body: Vec<u8>,
    pub(crate) stream: StreamId,
    pub(crate) fence: Fence,
    pub(crate) acker: Acker,
    pub(crate) received_at: Instant,
}

impl Arrival {
    fn into_delivery(self) -> Delivery {
        let Self { queue, raw, redelivered, body, stream, fence, acker, received_at } = self;
        let envelope = Arc::new(content::envelope(&queue, raw, redelivered, body));
        Delivery { envelope, stream, fence, acker, received_at }
    }
}

/// In order of arrival. Bounded by the prefetch: the broker sends no more than that unsettled, and
/// what is in here is unsettled; what a lost channel left is cleared with it. Kept as on the wire:
/// many small headers are many times larger once they are read, and count then, in the engine's
/// budget.
#[derive(Debug, Default)]
pub(crate) struct Buffer {
    deliveries: Mutex<VecDeque<Arrival>>,
    came: Notify,
    /// Somebody has asked for deliveries.
    wanted: watch::Sender<bool>,
}

impl Buffer {
    /// Appends one.
    pub(crate) fn push(&self, delivery: Arrival) {
        self.lock().push_back(delivery);
        self.came.notify_one();
    }

    /// Drops all; each is released by that.
    pub(crate) fn clear(&self) {
        // Dropped outside the lock: a drop calls out.
        let all = std::mem::take(&mut *self.lock());
        drop(all);
    }

    /// What fits the room, at least one; waits for it. `give_up` ends the waiting.
    ///
    /// # Cancel safety
    /// Cancel-safe: nothing is awaited once something is taken.
    pub(crate) async fn take<T>(
        &self,
        room: Room,
        give_up: impl Fn() -> Option<T>,
    ) -> Result<Vec<Delivery>, T> {
        self.wanted.send_if_modified(|wanted| !std::mem::replace(wanted, true));
        loop {
            let came = self.came.notified();
            let taken = self.take_now(room);
            if !taken.is_empty() {
                return Ok(taken);
            }
            if let Some(reason) = give_up() {
                return Err(reason);
            }
            came.await;
        }
    }

    /// Whether anybody has asked for deliveries yet.
    pub(crate) fn is_wanted(&self) -> bool {
        *self.wanted.borrow()
    }

    /// Waits until somebody has.
    pub(crate) async fn wanted(&self) {
        // The sender lives as long as this.
        let _ = self.wanted.subscribe().wait_for(|wanted| *wanted).await;
    }

    /// Makes a waiting taker ask again whether to give up.
    pub(crate) fn wake(&self) {
        self.came.notify_one();
    }

    fn take_now(&self, room: Room) -> Vec<Delivery> {
        let mut deliveries = self.lock();
        let mut bytes = 0;
        let mut taken = Vec::new();
        while taken.len() < room.deliveries && (taken.is_empty() || bytes < room.bytes) {
            let Some(delivery) = deliveries.pop_front() else { break };
            // Its channel has just gone; it comes again by the next one.
            if delivery.fence.is_lost() {
                continue;
            }
            let delivery = delivery.into_delivery();
            bytes += delivery.envelope.bytes();
            taken.push(delivery);
        }
        taken
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Arrival>> {
        self.deliveries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
