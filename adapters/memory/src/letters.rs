//! A target of dead letters whose broker is a list.
//!
//! Invariants: a copy is in the list exactly if the broker has confirmed and routed it, whether or
//! not the publisher heard of that; every call gives way at least once before and once after that
//! moment, so that a future dropped in the middle has either published or not.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use inboxd_contract::{
    DeadLetterTarget, DeadReason, Envelope, ErrorCode, InboxKey, LetterCopy, PublishError,
};
use tokio::time::{Instant, sleep};

/// What goes wrong with a publication.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LetterFault {
    /// No broker answers within the target's own bound. Nothing is published.
    Away,
    /// The broker has the exchange and no queue for it. Nothing is published.
    Unrouted,
    /// The broker will never take this message. Nothing is published.
    Refused,
    /// It is published, and the confirmation is lost.
    AnswerLost,
}

/// A copy that the broker has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryLetter {
    /// The message.
    pub envelope: Envelope,
    /// Its key.
    pub key: InboxKey,
    /// The subscription's name.
    pub subscription: String,
    /// Why it is dead.
    pub reason: DeadReason,
    /// Attempts made.
    pub attempts: u32,
    /// The last HTTP status.
    pub last_status: Option<u16>,
    /// What went wrong last.
    pub last_error: Option<String>,
    /// How long ago it was received first.
    pub first_ago: Duration,
    /// When the broker had it.
    pub at: Instant,
}

type Plan = Box<dyn FnMut(&LetterCopy<'_>) -> (Duration, Option<LetterFault>) + Send>;
type Witness = Box<dyn Fn(&MemoryLetter) + Send + Sync>;

struct Shared {
    /// Asked about each publication that no scripted fault is for.
    plan: Mutex<Plan>,
    /// Used once each; bounded by what a test pushes.
    script: Mutex<VecDeque<LetterFault>>,
    letters: Mutex<Vec<MemoryLetter>>,
    tries: AtomicUsize,
    witness: Mutex<Option<Witness>>,
}

/// The target; clones share the broker.
#[derive(Clone)]
pub struct MemoryLetters {
    shared: Arc<Shared>,
}

impl fmt::Debug for MemoryLetters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryLetters").field("letters", &lock(&self.shared.letters).len()).finish()
    }
}

impl Default for MemoryLetters {
    fn default() -> Self {
        Self::new()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl MemoryLetters {
    /// A broker that takes everything.
    pub fn new() -> Self {
        Self {
            shared: Arc::new(Shared {
                plan: Mutex::new(Box::new(|_| (Duration::ZERO, None))),
                script: Mutex::default(),
                letters: Mutex::default(),
                tries: AtomicUsize::new(0),
                witness: Mutex::new(None),
            }),
        }
    }

    /// Asks `plan` about every publication: how long it takes, and what goes wrong.
    pub fn set_plan(
        &self,
        plan: impl FnMut(&LetterCopy<'_>) -> (Duration, Option<LetterFault>) + Send + 'static,
    ) {
        *lock(&self.shared.plan) = Box::new(plan);
    }

    /// Every publication from now on fares so.
    pub fn set_fault(&self, fault: Option<LetterFault>) {
        self.set_plan(move |_| (Duration::ZERO, fault));
    }

    /// The next publication that no earlier fault is for fares so.
    pub fn push_fault(&self, fault: LetterFault) {
        lock(&self.shared.script).push_back(fault);
    }

    /// Tells every further copy that the broker has, within the step that publishes it.
    pub fn watch(&self, witness: impl Fn(&MemoryLetter) + Send + Sync + 'static) {
        *lock(&self.shared.witness) = Some(Box::new(witness));
    }

    /// Every copy that the broker has, in the order of publication.
    pub fn letters(&self) -> Vec<MemoryLetter> {
        lock(&self.shared.letters).clone()
    }

    /// How often a publication was tried.
    pub fn tries(&self) -> usize {
        self.shared.tries.load(Ordering::SeqCst)
    }

    fn take(&self, letter: LetterCopy<'_>) {
        let letter = MemoryLetter {
            envelope: letter.envelope.clone(),
            key: letter.key.clone(),
            subscription: letter.subscription.to_owned(),
            reason: letter.reason,
            attempts: letter.attempts,
            last_status: letter.last_status,
            last_error: letter.last_error.map(str::to_owned),
            first_ago: letter.first_ago,
            at: Instant::now(),
        };
        if let Some(witness) = &*lock(&self.shared.witness) {
            witness(&letter);
        }
        lock(&self.shared.letters).push(letter);
    }
}

fn failed(what: &str, code: ErrorCode, refused: bool) -> PublishError {
    PublishError { what: what.to_owned(), refused, code }
}

#[async_trait]
impl DeadLetterTarget for MemoryLetters {
    fn describe(&self) -> String {
        String::from("memory: a list")
    }

    async fn publish(&self, letter: LetterCopy<'_>) -> Result<(), PublishError> {
        self.shared.tries.fetch_add(1, Ordering::SeqCst);
        let (delay, planned) = lock(&self.shared.plan)(&letter);
        let fault = lock(&self.shared.script).pop_front().or(planned);
        tokio::task::yield_now().await;
        sleep(delay).await;
        match fault {
            Some(LetterFault::Away) => {
                Err(failed("no broker answers", ErrorCode::DeadLetterTargetAway, false))
            }
            Some(LetterFault::Unrouted) => {
                Err(failed("no queue is bound", ErrorCode::DeadLetterUnrouted, false))
            }
            Some(LetterFault::Refused) => {
                Err(failed("it is too large", ErrorCode::DeadLetterTargetRefused, true))
            }
            Some(LetterFault::AnswerLost) => {
                self.take(letter);
                tokio::task::yield_now().await;
                Err(failed("the confirmation was lost", ErrorCode::DeadLetterTargetAway, false))
            }
            None => {
                self.take(letter);
                tokio::task::yield_now().await;
                Ok(())
            }
        }
    }

    async fn close(&self, _deadline: Duration) {}
}
