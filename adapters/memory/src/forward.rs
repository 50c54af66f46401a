//! A forwarder whose application is a closure.
//!
//! Invariants: time is tokio's, so that paused time works; nothing runs beside the caller's
//! future; the record is deterministic where the caller is. As with a real application, a
//! request that the caller gives up is answered all the same, at the time the plan says: what
//! was accepted when nobody listened any more is in the record.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use inboxd_contract::{ForwardRequest, Forwarder, InboxKey, Origin, RetryReason, Verdict};
use tokio::time::{Instant, sleep, sleep_until};

/// What the application does with one POST.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// Answers; the response table decides what it means.
    Answer {
        /// After so much time.
        delay: Duration,
        /// The HTTP status.
        status: u16,
        /// `Retry-After`.
        after: Option<Duration>,
    },
    /// Answers, but the connection breaks before the answer arrives.
    LostAnswer {
        /// After so much time.
        delay: Duration,
        /// The HTTP status that nobody hears.
        status: u16,
    },
    /// Breaks the connection without having decided anything.
    Broken {
        /// After so much time.
        delay: Duration,
    },
    /// Never answers.
    Hang,
}

impl Reply {
    /// This status at once.
    pub fn status(status: u16) -> Self {
        Self::Answer { delay: Duration::ZERO, status, after: None }
    }

    /// This status after so much time.
    pub fn after(delay: Duration, status: u16) -> Self {
        Self::Answer { delay, status, after: None }
    }

    /// When the caller hears of it, and what the application has decided by then.
    fn timing(&self) -> (Option<Duration>, Option<u16>) {
        match *self {
            Self::Answer { delay, status, .. } | Self::LostAnswer { delay, status } => {
                (Some(delay), Some(status))
            }
            Self::Broken { delay } => (Some(delay), None),
            Self::Hang => (None, None),
        }
    }

    fn verdict(&self) -> Verdict {
        match *self {
            Self::Answer { status, after, .. } => {
                Verdict::of_status(status, after, format!("status {status}"))
            }
            Self::LostAnswer { .. } | Self::Broken { .. } | Self::Hang => {
                retry(RetryReason::Disconnected, "the connection broke before an answer")
            }
        }
    }
}

/// One POST that the application got.
#[derive(Debug, Clone)]
pub struct MemoryPost {
    /// Its place in the record, from 0.
    pub index: usize,
    /// The message.
    pub key: InboxKey,
    /// The subscription's name.
    pub subscription: String,
    /// `Inbox-Attempt`.
    pub attempt: u32,
    /// The ordering key.
    pub ordering_key: Option<Vec<u8>>,
    /// The body; `None` is a tombstone.
    pub body: Option<Bytes>,
    /// Which copy of the message it was.
    pub origin: Origin,
    /// When it began.
    pub begun_at: Instant,
    /// When the application decides, which may be later than now; `None`: never.
    pub answered_at: Option<Instant>,
    /// What it decides.
    pub status: Option<u16>,
}

impl MemoryPost {
    /// The application had accepted it (2xx) by then.
    pub fn is_accepted_by(&self, instant: Instant) -> bool {
        let accepted = self.status.is_some_and(|status| (200..300).contains(&status));
        accepted && self.answered_at.is_some_and(|answered_at| answered_at <= instant)
    }
}

type Plan = Box<dyn FnMut(&MemoryPost) -> Reply + Send>;

struct Shared {
    plan: Mutex<Plan>,
    posts: Mutex<Vec<MemoryPost>>,
    /// Messages that fail whatever the plan says, until they are healed.
    failing: Mutex<BTreeMap<InboxKey, Reply>>,
    reachable: AtomicBool,
    /// `Some`: there is a health URL, and what it answers.
    health: Mutex<Option<bool>>,
    probes: AtomicUsize,
    retry_after_cap: Duration,
}

/// The forwarder; clones share plan and record.
#[derive(Clone)]
pub struct MemoryForwarder {
    shared: Arc<Shared>,
}

impl fmt::Debug for MemoryForwarder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryForwarder").field("posts", &self.lock().len()).finish_non_exhaustive()
    }
}

impl MemoryForwarder {
    /// Asks `plan` about every POST, in the order in which they begin.
    pub fn new(plan: impl FnMut(&MemoryPost) -> Reply + Send + 'static) -> Self {
        Self {
            shared: Arc::new(Shared {
                plan: Mutex::new(Box::new(plan)),
                posts: Mutex::new(Vec::new()),
                failing: Mutex::default(),
                reachable: AtomicBool::new(true),
                health: Mutex::new(None),
                probes: AtomicUsize::new(0),
                retry_after_cap: Duration::from_secs(30),
            }),
        }
    }

    /// Answers 200 to everything, at once.
    pub fn accepting() -> Self {
        Self::new(|_| Reply::status(200))
    }

    /// Replaces the plan.
    pub fn set_plan(&self, plan: impl FnMut(&MemoryPost) -> Reply + Send + 'static) {
        *self.shared.plan.lock().unwrap_or_else(PoisonError::into_inner) = Box::new(plan);
    }

    /// Every POST of this message is answered so, whatever the plan says, until it is healed.
    pub fn fail(&self, key: &InboxKey, reply: Reply) {
        self.failing().insert(key.clone(), reply);
    }

    /// The plan answers for every message again.
    pub fn heal(&self) {
        self.failing().clear();
    }

    /// There is a health URL from now on, and it answers so; `None`: there is none.
    pub fn set_health(&self, healthy: Option<bool>) {
        *self.shared.health.lock().unwrap_or_else(PoisonError::into_inner) = healthy;
    }

    /// How often it was probed.
    pub fn probes(&self) -> usize {
        self.shared.probes.load(Ordering::SeqCst)
    }

    /// False: connections are refused, nothing is recorded.
    pub fn set_reachable(&self, reachable: bool) {
        self.shared.reachable.store(reachable, Ordering::SeqCst);
    }

    /// Every POST in the order in which they began.
    pub fn posts(&self) -> Vec<MemoryPost> {
        self.lock().clone()
    }

    /// How many POSTs have begun.
    pub fn begun(&self) -> usize {
        self.lock().len()
    }

    /// How often one message was accepted until now.
    pub fn accepted(&self, key: &InboxKey) -> usize {
        let now = Instant::now();
        self.lock().iter().filter(|post| post.key == *key && post.is_accepted_by(now)).count()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<MemoryPost>> {
        self.shared.posts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn failing(&self) -> MutexGuard<'_, BTreeMap<InboxKey, Reply>> {
        self.shared.failing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn health(&self) -> Option<bool> {
        *self.shared.health.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the POST and what will become of it.
    fn begin(&self, request: &ForwardRequest<'_>) -> Reply {
        let now = Instant::now();
        let mut posts = self.lock();
        let mut post = MemoryPost {
            index: posts.len(),
            key: request.key.clone(),
            subscription: request.subscription.to_owned(),
            attempt: request.attempt,
            ordering_key: request.ordering_key.map(<[u8]>::to_vec),
            body: request.envelope.body.clone(),
            origin: request.envelope.origin.clone(),
            begun_at: now,
            answered_at: None,
            status: None,
        };
        let failing = self.failing().get(&post.key).cloned();
        let mut plan = self.shared.plan.lock().unwrap_or_else(PoisonError::into_inner);
        let reply = failing.unwrap_or_else(|| plan(&post));
        let (delay, status) = reply.timing();
        post.answered_at = delay.map(|delay| now + delay);
        post.status = status;
        posts.push(post);
        reply
    }
}

#[async_trait]
impl Forwarder for MemoryForwarder {
    async fn forward(&self, request: ForwardRequest<'_>) -> Verdict {
        if !self.shared.reachable.load(Ordering::SeqCst) {
            return retry(RetryReason::Unreachable, "connection refused");
        }
        let reply = self.begin(&request);
        match reply.timing().0.filter(|delay| *delay < request.timeout) {
            Some(delay) => {
                sleep_until(Instant::now() + delay).await;
                self.capped(reply.verdict())
            }
            None => {
                sleep(request.timeout).await;
                retry(RetryReason::Timeout, "no answer in time")
            }
        }
    }

    async fn probe(&self) -> Result<(), String> {
        self.shared.probes.fetch_add(1, Ordering::SeqCst);
        tokio::task::yield_now().await;
        match (self.shared.reachable.load(Ordering::SeqCst), self.health()) {
            (false, _) => Err("connection refused".to_owned()),
            (true, Some(false)) => Err("the health URL answers 503".to_owned()),
            (true, _) => Ok(()),
        }
    }

    fn has_health(&self) -> bool {
        self.health().is_some()
    }
}

impl MemoryForwarder {
    fn capped(&self, verdict: Verdict) -> Verdict {
        match verdict {
            Verdict::Retry { reason, status, after, detail } => {
                let after = after.map(|after| after.min(self.shared.retry_after_cap));
                Verdict::Retry { reason, status, after, detail }
            }
            other => other,
        }
    }
}

fn retry(reason: RetryReason, detail: &str) -> Verdict {
    Verdict::Retry { reason, status: None, after: None, detail: detail.to_owned() }
}
