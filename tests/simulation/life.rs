//! One process life: it runs, stands still, or is dead.
//!
//! Everything that a life does to the outside passes its gate, so that a life that stands still
//! does nothing and hears nothing, and one that is dead never does anything again: whatever of its
//! tasks is left waits for ever.

use std::future::pending;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use inboxd_contract::{Acker, OwnerId};
use tokio::sync::{Notify, mpsc};

use super::trace::{Trace, lock};

/// What the world has to hear of.
#[derive(Debug)]
pub enum Signal {
    /// A life died at the step it was told to.
    Died { slot: usize, number: u64 },
    /// A life stands still at the step it was told to.
    Froze { slot: usize, number: u64 },
    /// A drain is over: cut deliveries.
    Drained { slot: usize, number: u64, cut: usize },
    /// An invariant is broken.
    Violated,
}

pub type Signals = mpsc::UnboundedSender<Signal>;

/// One process life.
pub struct Life {
    pub slot: usize,
    pub number: u64,
    pub name: String,
    pub owner: OwnerId,
    dead: AtomicBool,
    frozen: AtomicBool,
    thawed: Notify,
    /// Steps until it dies; below zero: never.
    steps_left: AtomicI64,
    /// Steps until it stands still; below zero: never.
    steps_to_freeze: AtomicI64,
    /// A crash goes unnoticed by the broker for so many milliseconds.
    linger_ms: AtomicU64,
    signals: Signals,
    trace: Trace,
    /// Ackers that a dead process can use no more; kept, since dropping them would settle.
    graveyard: Mutex<Vec<Acker>>,
    /// A release of claims may have failed.
    pub release_failed: AtomicBool,
}

impl Life {
    pub fn new(slot: usize, number: u64, signals: Signals, trace: Trace) -> Arc<Self> {
        let name = format!("i{slot}.{number}");
        Arc::new(Self {
            slot,
            number,
            owner: OwnerId(name.clone().into()),
            name,
            dead: AtomicBool::new(false),
            frozen: AtomicBool::new(false),
            thawed: Notify::new(),
            steps_left: AtomicI64::new(-1),
            steps_to_freeze: AtomicI64::new(-1),
            linger_ms: AtomicU64::new(0),
            signals,
            trace,
            graveyard: Mutex::default(),
            release_failed: AtomicBool::new(false),
        })
    }

    pub fn is_dead(&self) -> bool {
        self.dead.load(SeqCst)
    }

    /// How long the broker takes the dead for living.
    pub fn linger(&self) -> Duration {
        Duration::from_millis(self.linger_ms.load(SeqCst))
    }

    pub fn die(&self, linger: Duration) {
        self.linger_ms.store(linger.as_millis() as u64, SeqCst);
        self.dead.store(true, SeqCst);
        self.trace.add(&self.name, format_args!("DIES"));
    }

    /// Dies at the n-th step from here.
    pub fn die_after(&self, steps: i64, linger: Duration) {
        self.linger_ms.store(linger.as_millis() as u64, SeqCst);
        self.steps_left.store(steps, SeqCst);
    }

    /// Stands still at the n-th step from here.
    pub fn freeze_after(&self, steps: i64) {
        self.steps_to_freeze.store(steps, SeqCst);
    }

    /// Neither dies nor stands still at a step any more.
    pub fn spare(&self) {
        self.steps_to_freeze.store(-1, SeqCst);
        self.steps_left.store(-1, SeqCst);
    }

    pub fn freeze(&self) {
        self.frozen.store(true, SeqCst);
    }

    pub fn thaw(&self) {
        self.frozen.store(false, SeqCst);
        self.thawed.notify_waiters();
    }

    /// One step of the process: true if it dies here.
    pub fn step(&self, what: &str) -> bool {
        if self.is_dead() {
            return true;
        }
        let freezing = &self.steps_to_freeze;
        if freezing.load(SeqCst) >= 0 && freezing.fetch_sub(1, SeqCst) == 0 {
            self.trace.add(&self.name, format_args!("stands still at: {what}"));
            self.freeze();
            let _ = self.signals.send(Signal::Froze { slot: self.slot, number: self.number });
        }
        if self.steps_left.load(SeqCst) >= 0 && self.steps_left.fetch_sub(1, SeqCst) == 0 {
            self.trace.add(&self.name, format_args!("dies at: {what}"));
            self.dead.store(true, SeqCst);
            let signal = Signal::Died { slot: self.slot, number: self.number };
            let _ = self.signals.send(signal);
            return true;
        }
        false
    }

    /// Goes on as soon as the process runs; never where it is dead.
    pub async fn gate(&self) {
        loop {
            if self.is_dead() {
                pending::<()>().await;
            }
            if !self.frozen.load(SeqCst) {
                return;
            }
            self.thawed.notified().await;
        }
    }

    /// A step, and the gate behind it.
    pub async fn pass(&self, what: &str) {
        self.step(what);
        self.gate().await;
    }

    pub fn bury(&self, acker: Acker) {
        lock(&self.graveyard).push(acker);
    }
}
