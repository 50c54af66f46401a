//! What goes wrong with a call, and who says so.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// A call of the store, as a fault plan tells them apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StoreCall {
    /// A batch of claims.
    Claim,
    /// A renewal.
    Renew,
    /// A batch of further attempts.
    CountAttempts,
    /// A batch of completions.
    Complete,
    /// A batch of dead letters.
    DeadLetter,
    /// A batch of releases.
    Release,
    /// A batch of messages to be parked.
    Park,
    /// A batch of arrivals.
    Arrive,
    /// Taking due rows.
    TakeDue,
    /// A batch of taken rows given back.
    Reschedule,
    /// A batch of taken rows whose messages are processed.
    Unpark,
    /// A batch of replays.
    Replay,
    /// A batch of dead letters given up.
    Discard,
    /// A look, reading parked rows or the audit.
    Look,
    /// A sweep.
    Sweep,
    /// A ping.
    Ping,
    /// Reading or writing a note.
    Note,
}

/// Where a call breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FaultPoint {
    /// It does not.
    #[default]
    Never,
    /// Nothing was committed, and the caller gets a transient error.
    BeforeCommit,
    /// All was committed, and the caller gets a transient error: its answer is lost.
    AfterCommit,
}

/// How one call fares.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StoreFault {
    /// Where it breaks.
    pub point: FaultPoint,
    /// Until the step: a slow way there.
    pub delay_before: Duration,
    /// From the step to the answer: a slow way back.
    pub delay_after: Duration,
}

impl StoreFault {
    /// Breaks at `point`, without delay.
    pub fn at(point: FaultPoint) -> Self {
        Self { point, ..Self::default() }
    }
}

/// A fault plan: asked once per call, in the order of calls.
pub trait StoreFaults: Send + Sync {
    /// How this call fares.
    fn next(&self, call: StoreCall) -> StoreFault;
}

/// Nothing goes wrong.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoFaults;

impl StoreFaults for NoFaults {
    fn next(&self, _call: StoreCall) -> StoreFault {
        StoreFault::default()
    }
}

impl<F: Fn(StoreCall) -> StoreFault + Send + Sync> StoreFaults for F {
    fn next(&self, call: StoreCall) -> StoreFault {
        self(call)
    }
}

/// Faults that a test lines up: each waits for the next call of its kind and is used once.
#[derive(Debug, Default)]
pub struct ScriptedFaults {
    /// In the order in which they were pushed; bounded by what the test pushes.
    script: Mutex<VecDeque<(StoreCall, StoreFault)>>,
}

impl ScriptedFaults {
    /// The next call of this kind that no earlier fault is for fares so.
    pub fn push(&self, call: StoreCall, fault: StoreFault) {
        self.script.lock().unwrap_or_else(PoisonError::into_inner).push_back((call, fault));
    }

    /// How many faults have not been used.
    pub fn left(&self) -> usize {
        self.script.lock().unwrap_or_else(PoisonError::into_inner).len()
    }
}

impl StoreFaults for ScriptedFaults {
    fn next(&self, call: StoreCall) -> StoreFault {
        let mut script = self.script.lock().unwrap_or_else(PoisonError::into_inner);
        script
            .iter()
            .position(|(of, _)| *of == call)
            .and_then(|index| script.remove(index))
            .map_or_else(StoreFault::default, |(_, fault)| fault)
    }
}
