//! The application, and the network between it and a process.
//!
//! It decides when it decides, whether or not anybody still listens; what it decided is in the
//! oracle's ledger at that moment.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use async_trait::async_trait;
use inboxd_contract::{ForwardRequest, Forwarder, InboxKey, RetryReason, Verdict};
use inboxd_memory::MemoryDatabase;
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};

use super::chance::Chance;
use super::life::Life;
use super::oracle::Oracle;
use super::parking::{Failing, FailsBy};
use super::plan::ApplicationProfile;

/// How long it takes at most when nothing disturbs it.
const CALM_MAX: Duration = Duration::from_millis(200);

const WIRE_MAX: Duration = Duration::from_millis(2);

/// What all processes share of it.
pub struct Application {
    pub chance: Chance,
    pub profile: ApplicationProfile,
    /// Until everything is calm.
    pub failing: Vec<Failing>,
    pub oracle: Oracle,
    pub calm: Arc<AtomicBool>,
    pub database: Arc<MemoryDatabase>,
    pub lease: Duration,
    /// Connections are refused.
    pub away: AtomicBool,
}

/// What it will do with one POST.
struct Reply {
    after: Duration,
    verdict: Verdict,
    heard: bool,
    panics: bool,
}

impl Application {
    fn draw(&self, key: &InboxKey, callback_timeout: Duration) -> Option<Reply> {
        let (chance, profile) = (&self.chance, &self.profile);
        let after = chance.up_to(profile.slow_max);
        let verdict = Verdict::Accepted { status: 200 };
        let mut reply = Reply { after, verdict, heard: true, panics: false };
        if self.calm.load(SeqCst) {
            reply.after = reply.after.min(CALM_MAX);
            return Some(reply);
        }
        let failing = self.failing.iter().find(|failing| failing.id == key.message_id.as_str());
        match failing.map(|failing| failing.how) {
            Some(FailsBy::Hanging) => return None,
            Some(FailsBy::Status(status)) => {
                reply.verdict = Verdict::of_status(status, None, format!("status {status}"));
                return Some(reply);
            }
            None => {}
        }
        if chance.hits(profile.hangs) {
            return None;
        }
        if chance.hits(profile.very_slow) {
            reply.after = chance.up_to(callback_timeout * 2);
        }
        reply.heard = !chance.hits(profile.answer_lost);
        reply.panics = chance.hits(profile.panics);
        let wait = Some(chance.up_to(Duration::from_secs(5)));
        let status = |status, after| Verdict::of_status(status, after, format!("status {status}"));
        let choices = [
            (profile.server_error, status(500, None)),
            (profile.busy, status(409, None)),
            (profile.overloaded, status(429, wait)),
            (profile.gone, status(410, None)),
            (profile.endpoint, status(404, None)),
            (profile.refused, status(422, None)),
            (profile.dropped, Verdict::Drop { status: 200 }),
            (profile.parked, Verdict::Park { status: 200 }),
            (profile.broken, retry(RetryReason::Disconnected)),
        ];
        for (rate, verdict) in choices {
            if chance.hits(rate) {
                reply.verdict = verdict;
                break;
            }
        }
        Some(reply)
    }
}

impl Application {
    /// Somebody else's transaction holds the claim while its result is to be recorded.
    async fn lock_claim(&self, key: &InboxKey) {
        if self.calm.load(SeqCst) || !self.chance.hits(self.profile.locked) {
            return;
        }
        self.oracle.stats(|stats| stats.locks += 1);
        let lock = self.database.lock_claim(key);
        sleep(self.lease + self.chance.up_to(self.lease)).await;
        lock.rollback();
    }
}

fn retry(reason: RetryReason) -> Verdict {
    Verdict::Retry { reason, status: None, after: None, detail: String::new() }
}

/// One process's way to the application.
pub struct SimForwarder {
    pub life: Arc<Life>,
    pub application: Arc<Application>,
}

/// Tells the oracle if the caller went away.
struct Caller {
    life: Arc<Life>,
    oracle: Oracle,
    post: usize,
    answered: bool,
}

impl Drop for Caller {
    fn drop(&mut self) {
        if !self.answered {
            self.oracle.abandoned(&self.life, self.post);
        }
    }
}

#[async_trait]
impl Forwarder for SimForwarder {
    async fn forward(&self, request: ForwardRequest<'_>) -> Verdict {
        let oracle = &self.application.oracle;
        let post = oracle.forward_called(&self.life, &request);
        let mut caller =
            Caller { life: self.life.clone(), oracle: oracle.clone(), post, answered: false };
        self.life.pass("before a POST").await;
        let answer = timeout(request.timeout, self.exchange(post, &request)).await;
        let verdict = answer.unwrap_or_else(|_| retry(RetryReason::Timeout));
        self.life.pass("after a POST").await;
        caller.answered = true;
        oracle.answered(&self.life, post, &verdict);
        verdict
    }

    async fn probe(&self) -> Result<(), String> {
        self.life.gate().await;
        let is_well = !self.application.away.load(SeqCst);
        self.application.oracle.probed(&self.life, is_well);
        match is_well {
            true => Ok(()),
            false => Err("connection refused".into()),
        }
    }
}

impl SimForwarder {
    async fn exchange(&self, post: usize, request: &ForwardRequest<'_>) -> Verdict {
        let application = &self.application;
        sleep(application.chance.up_to(WIRE_MAX)).await;
        self.life.gate().await;
        if application.away.load(SeqCst) {
            return retry(RetryReason::Unreachable);
        }
        application.oracle.begun(post, request.attempt);
        self.life.pass("POST sent").await;
        let Some(reply) = application.draw(request.key, request.timeout) else {
            return std::future::pending().await;
        };
        let (answer, heard) = oneshot::channel();
        let (oracle, key) = (application.oracle.clone(), request.key.clone());
        let locks = application.clone();
        tokio::spawn(async move {
            sleep(reply.after).await;
            tokio::spawn(async move { locks.lock_claim(&key).await });
            oracle.decided(post, &reply.verdict, reply.heard);
            if reply.heard {
                let _ = answer.send(reply.verdict);
            }
        });
        if reply.panics {
            application.oracle.stats(|stats| stats.panics += 1);
            // Its claim runs out by itself.
            self.life.release_failed.store(true, SeqCst);
            // Without a message on stderr: it is meant.
            std::panic::resume_unwind(Box::new("the forwarder panics, as the seed says"));
        }
        heard.await.unwrap_or_else(|_| retry(RetryReason::Disconnected))
    }
}
