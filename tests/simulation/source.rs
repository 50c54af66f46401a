//! The source as one process sees it: deliveries, fences and acks pass the gate, and the oracle
//! sees every settlement.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use inboxd_contract::{
    Acker, Delivery, Fence, FenceHandle, HorizonAnswer, Origin, Room, Settle, Settlement, Source,
    SourceError, SourceStatus, SourceTraits,
};
use inboxd_memory::MemorySource;
use tokio::sync::watch;

use super::life::Life;
use super::oracle::{Oracle, Place};
use super::trace::lock;

/// Sources of dead processes that the broker still takes for living.
pub type Lingering = Arc<Mutex<Vec<(String, MemorySource)>>>;

pub struct SimSource {
    life: Arc<Life>,
    oracle: Oracle,
    /// `None` only while it is closed or dropped.
    inner: Option<MemorySource>,
    /// Taken from the broker, not yet handed to the engine.
    taken: VecDeque<Delivery>,
    lingering: Lingering,
    name: String,
    status: watch::Receiver<SourceStatus>,
    traits: SourceTraits,
}

impl SimSource {
    pub fn new(life: Arc<Life>, oracle: Oracle, inner: MemorySource, lingering: Lingering) -> Self {
        let (status, traits) = (inner.status(), inner.traits());
        let name = life.name.clone();
        let taken = VecDeque::new();
        Self { life, oracle, inner: Some(inner), taken, lingering, name, status, traits }
    }

    fn inner(&mut self) -> &mut MemorySource {
        self.inner.as_mut().expect("the source is there until it is closed or dropped")
    }

    /// The engine's side of a delivery.
    fn dress(&self, delivery: Delivery) -> Delivery {
        let place = place_of(&delivery.envelope.origin);
        let fence = relay(self.life.clone(), delivery.fence.clone());
        let serial = self.oracle.delivered(&self.life, place, &delivery, fence.clone());
        let acker = Acker::new(SimSettle {
            life: self.life.clone(),
            oracle: self.oracle.clone(),
            place,
            serial,
            inner: delivery.acker,
        });
        Delivery {
            envelope: delivery.envelope,
            stream: delivery.stream,
            fence,
            acker,
            received_at: delivery.received_at,
        }
    }
}

pub fn place_of(origin: &Origin) -> Place {
    let Origin::Memory { stream, position } = origin else {
        unreachable!("the simulator's broker is in memory");
    };
    let number = stream.rsplit('/').next().and_then(|number| number.parse().ok());
    (number.expect("streams are called name/number"), *position)
}

/// What the process sees of a fence: nothing while it stands still.
fn relay(life: Arc<Life>, outer: Fence) -> Fence {
    let handle = FenceHandle::open();
    let fence = handle.fence();
    tokio::spawn(async move {
        outer.closed().await;
        life.gate().await;
        if !outer.is_lost() {
            handle.drain();
            outer.lost().await;
            life.gate().await;
        }
        handle.lose();
    });
    fence
}

/// A process that dies says nothing to the broker; what it held stays with it for `linger`.
impl Drop for SimSource {
    fn drop(&mut self) {
        if self.life.is_dead()
            && let Some(inner) = self.inner.take()
        {
            for delivery in self.taken.drain(..) {
                self.life.bury(delivery.acker);
            }
            if !self.life.linger().is_zero() {
                lock(&self.lingering).push((self.name.clone(), inner));
            }
        }
    }
}

struct SimSettle {
    life: Arc<Life>,
    oracle: Oracle,
    place: Place,
    serial: u64,
    inner: Acker,
}

impl Settle for SimSettle {
    fn settle(self: Box<Self>, settlement: Settlement) {
        let dies_before = self.life.step("before a settlement");
        if self.life.is_dead() && settlement == Settlement::Release {
            // The memory of a dead process is gone: nothing is given back.
            return self.life.bury(self.inner);
        }
        self.oracle.settled(&self.life, self.place, self.serial, settlement);
        if dies_before {
            return self.life.bury(self.inner);
        }
        match settlement {
            Settlement::Ack => self.inner.ack(),
            Settlement::Release => self.inner.release(),
        }
        self.life.step("after a settlement");
    }
}

#[async_trait]
impl Source for SimSource {
    fn traits(&self) -> SourceTraits {
        self.traits
    }

    fn status(&self) -> watch::Receiver<SourceStatus> {
        self.status.clone()
    }

    async fn next_batch(&mut self, room: Room) -> Result<Vec<Delivery>, SourceError> {
        self.life.gate().await;
        if self.taken.is_empty() {
            let batch = self.inner().next_batch(room).await?;
            self.taken.extend(batch);
        }
        // Taken, but not handed over: what is dropped here is kept for the next call.
        self.life.pass("took deliveries").await;
        let mut batch = Vec::new();
        let mut bytes = 0;
        while let Some(delivery) = self.taken.front() {
            if !batch.is_empty() && (batch.len() >= room.deliveries || bytes >= room.bytes) {
                break;
            }
            bytes += delivery.envelope.bytes();
            batch.extend(self.taken.pop_front());
        }
        Ok(batch.into_iter().map(|delivery| self.dress(delivery)).collect())
    }

    fn redelivery_horizon(&self) -> HorizonAnswer {
        match &self.inner {
            Some(inner) => inner.redelivery_horizon(),
            None => Box::pin(async { Vec::new() }),
        }
    }

    async fn stop_taking(&mut self) {
        self.life.pass("stop taking").await;
        self.inner().stop_taking().await;
        // What the source holds itself goes back.
        self.taken.clear();
    }

    async fn close(mut self: Box<Self>, deadline: Duration) -> Result<(), SourceError> {
        self.life.pass("close").await;
        match self.inner.take() {
            Some(inner) => Box::new(inner).close(deadline).await,
            None => Ok(()),
        }
    }
}
