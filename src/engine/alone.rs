//! Calls for one member, beside the batches: a member that meets a lock is tried on its own.
//!
//! Invariants: at most one such call is under way, since each may wait for a fifth of the lease on
//! a connection of the pool; of each consumer id at most one member waits for the turn, so that
//! one whose rows somebody locks in numbers delays another's by one call and not by all of them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use inboxd_contract::ConsumerId;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit};

/// The turns.
pub(super) struct Alone {
    turn: Semaphore,
    /// Never shrinks: consumer ids are as many as the configuration names.
    queues: Mutex<HashMap<ConsumerId, Arc<Semaphore>>>,
}

/// The right to make one call.
pub(super) struct Turn<'a> {
    // Passed on first, so that the next of the same consumer id stands behind the others.
    _turn: Option<SemaphorePermit<'a>>,
    _queue: Option<OwnedSemaphorePermit>,
}

impl Alone {
    pub(super) fn new() -> Self {
        Self { turn: Semaphore::new(1), queues: Mutex::default() }
    }

    /// Waits for a turn.
    ///
    /// # Cancel safety
    /// Cancel-safe: the place is lost.
    pub(super) async fn turn(&self, consumer_id: &ConsumerId) -> Turn<'_> {
        let queue = {
            let mut queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
            match queues.get(consumer_id) {
                Some(queue) => queue.clone(),
                None => {
                    let queue = Arc::new(Semaphore::new(1));
                    queues.insert(consumer_id.clone(), queue.clone());
                    queue
                }
            }
        };
        // Neither is ever closed.
        let queue = queue.acquire_owned().await.ok();
        Turn { _turn: self.turn.acquire().await.ok(), _queue: queue }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_consumer_id_with_many_members_delays_another_by_one_call() {
        let alone = Arc::new(Alone::new());
        let served = Arc::new(Mutex::new(Vec::new()));
        let gate = Arc::new(Semaphore::new(0));
        let call = |id: &str| {
            let consumer_id = ConsumerId::new(id).unwrap();
            let (alone, served, gate) = (alone.clone(), served.clone(), gate.clone());
            tokio::spawn(async move {
                let _turn = alone.turn(&consumer_id).await;
                let _step = gate.acquire().await;
                served.lock().unwrap().push(consumer_id.to_string());
            })
        };
        let mut calls: Vec<_> = (0..20).map(|_| call("many")).collect();
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        calls.push(call("one"));
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        gate.add_permits(1);
        for call in calls {
            call.await.unwrap();
        }
        let served = served.lock().unwrap();
        assert_eq!(served.iter().position(|id| id == "one"), Some(1), "{served:?}");
        assert_eq!(served.len(), 21);
    }
}
