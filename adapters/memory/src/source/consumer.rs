//! One instance that consumes from a broker in memory.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use inboxd_contract::{
    Acker, Delivery, ErrorClass, HorizonAnswer, Room, Settle, Settlement, Source, SourceError,
    SourceStatus, SourceTraits,
};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

use super::{MemoryKind, Shared};

/// How often an instance shows that it turns, at least.
const TURN: Duration = Duration::from_millis(500);

/// A source over a [`super::MemoryBroker`].
#[derive(Debug)]
pub struct MemorySource {
    shared: Arc<Shared>,
    id: u64,
    status: watch::Receiver<SourceStatus>,
    /// Connects and shows that it turns; ended with the source.
    turning: JoinHandle<()>,
}

impl MemorySource {
    pub(super) fn start(shared: Arc<Shared>) -> Self {
        let (sender, status) = watch::channel(SourceStatus::connecting());
        let id = shared.lock().join(sender);
        let turning = tokio::spawn(turn(Arc::clone(&shared), id));
        Self { shared, id, status, turning }
    }

    /// The id by which the broker knows this instance.
    pub fn instance(&self) -> u64 {
        self.id
    }

    fn leave(&self) {
        self.turning.abort();
        self.shared.change(|state| state.leave(self.id));
    }
}

/// A source that is dropped without close has crashed.
impl Drop for MemorySource {
    fn drop(&mut self) {
        self.leave();
    }
}

async fn turn(shared: Arc<Shared>, id: u64) {
    let reconnect_after = shared.options.reconnect_after;
    loop {
        let changed = shared.changed.notified();
        tokio::pin!(changed);
        changed.as_mut().enable();
        let brought = shared.lock().turn(id, reconnect_after);
        if brought {
            // A connection or an assignment: `next_batch` may have something to take.
            shared.changed.notify_waiters();
        }
        tokio::select! {
            biased;
            () = changed => sleep(reconnect_after).await,
            () = sleep(TURN) => {}
        }
    }
}

/// Settles one hand-over.
struct HandOver {
    shared: Arc<Shared>,
    instance: u64,
    place: (usize, u64, u64),
}

impl Settle for HandOver {
    fn settle(self: Box<Self>, settlement: Settlement) {
        self.shared.change(|state| state.settle(self.instance, self.place, settlement));
    }
}

#[async_trait]
impl Source for MemorySource {
    fn traits(&self) -> SourceTraits {
        SourceTraits {
            releasable: self.shared.options.kind == MemoryKind::Queue
                && !self.shared.options.exclusive,
            unsettled_max: self.shared.options.prefetch,
        }
    }

    fn status(&self) -> watch::Receiver<SourceStatus> {
        self.status.clone()
    }

    async fn next_batch(&mut self, room: Room) -> Result<Vec<Delivery>, SourceError> {
        loop {
            let changed = self.shared.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            // Nothing is awaited between the taking and the answer: cancel-safe.
            let taken = self.shared.lock().take(self.id, room);
            if !taken.is_empty() {
                let deliveries = taken.into_iter().map(|taken| Delivery {
                    envelope: taken.envelope,
                    stream: taken.stream,
                    fence: taken.fence,
                    acker: Acker::new(HandOver {
                        shared: Arc::clone(&self.shared),
                        instance: self.id,
                        place: (taken.stream_index, taken.position, taken.serial),
                    }),
                    received_at: Instant::now(),
                });
                return Ok(deliveries.collect());
            }
            changed.await;
        }
    }

    fn redelivery_horizon(&self) -> HorizonAnswer {
        let options = &self.shared.options;
        let answer = vec![(options.name.clone(), options.horizon.clone())];
        Box::pin(async { answer })
    }

    async fn stop_taking(&mut self) {
        self.shared.change(|state| state.stop_taking(self.id));
    }

    async fn close(self: Box<Self>, deadline: Duration) -> Result<(), SourceError> {
        let answered = async {
            loop {
                let changed = self.shared.changed.notified();
                tokio::pin!(changed);
                changed.as_mut().enable();
                if self.shared.lock().answers(self.id) {
                    return;
                }
                changed.await;
            }
        };
        let answered = timeout(deadline, answered).await;
        self.leave();
        answered.map_err(|elapsed| {
            let what = format!("the broker in memory did not answer within {deadline:?}");
            SourceError::new(ErrorClass::Transient, what, elapsed)
        })
    }
}
