//! Connects, opens channels, and goes on after whatever ended them.
//!
//! One task per source. Everything it waits for has a bound, but for deliveries and wishes.
//! A loop that fails at once is slowed down by an exponential backoff with jitter; it is reset by
//! a session that lasted.
//!
//! Consuming begins when the source is first asked for deliveries; until then the queue is only looked
//! at. What the broker sends and nobody takes would go back at the end, and that costs it one of a
//! quorum queue's delivery limit: restarts while the application is away would use it up.

use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use inboxd_contract::{SourceError, SourcePhase, SourceStatus};
use rand::Rng as _;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};
use tracing::{debug, info};

use crate::buffer::Buffer;
use crate::config::{QueueKind, RabbitMqConfig};
use crate::counts::Counts;
use crate::depth;
use crate::letter_config::RabbitMqBroker;
use crate::link::{self, Link, Purpose, Socket};
use crate::session::{self, Ended, Session, Wish};
use crate::trouble::{Remedy, Trouble};

/// How often the loop shows that it turns.
const TURN: Duration = Duration::from_millis(500);
const BACKOFF_FIRST: Duration = Duration::from_millis(100);
const BACKOFF_CAP: Duration = Duration::from_secs(5);
/// A session that lasted so long was a good one.
const GOOD_LIFE: Duration = Duration::from_secs(10);
/// From here on a wait that is asked for is kept to, without backoff.
const EVEN_PACE: Duration = Duration::from_secs(1);
/// How often the queue is looked at while nothing is wanted.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// The bound on taking leave of a connection.
const POLITE: Duration = Duration::from_secs(1);
/// Between attempts while the same frame cannot be decoded.
const UNDECODABLE_WAIT: Duration = Duration::from_secs(30);
/// So many in a row are no accident.
const UNDECODABLE_TIMES: u32 = 2;

/// What source and supervisor share.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    /// What was delivered and not handed over.
    pub(crate) buffer: Arc<Buffer>,
    /// What happened so far.
    pub(crate) counts: Arc<Counts>,
    /// The present connection's socket.
    pub(crate) socket: Socket,
    /// Why the source cannot go on.
    permanent: Mutex<Option<Trouble>>,
}

impl Shared {
    /// Why the source cannot go on, if so.
    pub(crate) fn permanent(&self) -> Option<SourceError> {
        let permanent = self.permanent.lock().unwrap_or_else(PoisonError::into_inner);
        permanent
            .as_ref()
            .map(|trouble| SourceError::permanent(&trouble.reason).with_code(trouble.code))
    }
}

/// The loop's state.
pub(crate) struct Supervisor {
    pub(crate) config: Arc<RabbitMqConfig>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) wishes: mpsc::Receiver<Wish>,
    pub(crate) status: watch::Sender<SourceStatus>,
    pub(crate) closed: oneshot::Sender<Result<(), SourceError>>,
}

/// Runs the loop and shows that it turns.
pub(crate) async fn run(supervisor: Supervisor) {
    let Supervisor { config, shared, wishes, status, closed } = supervisor;
    let status = Arc::new(status);
    let (showing, counts) = (Arc::clone(&status), Arc::clone(&shared.counts));
    let life = Life {
        config,
        shared,
        wishes,
        status,
        taking: true,
        turn: 0,
        opened: 0,
        failures: 0,
        undecodable: 0,
        kind: None,
    };
    let mut ticks = interval(TURN);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let living = life.live();
    tokio::pin!(living);
    let answer = loop {
        tokio::select! {
            answer = &mut living => break answer,
            _ = ticks.tick() => showing.send_modify(|status| {
                status.turned_at = Instant::now();
                status.counts = counts.of_status();
            }),
        }
    };
    showing.send_modify(|status| {
        status.phase = SourcePhase::Closed;
        status.reason = "closed".into();
        status.counts = counts.of_status();
        status.code = None;
    });
    // Whoever asked may have stopped waiting.
    let _ = closed.send(answer);
}

struct Life {
    config: Arc<RabbitMqConfig>,
    shared: Arc<Shared>,
    wishes: mpsc::Receiver<Wish>,
    status: Arc<watch::Sender<SourceStatus>>,
    taking: bool,
    /// Whose turn it is among the hosts.
    turn: usize,
    /// Sessions that were opened.
    opened: u64,
    /// Attempts in a row that came to nothing.
    failures: u32,
    /// Sessions in a row that ended by a frame that could not be decoded.
    undecodable: u32,
    /// The queue's kind, once found out.
    kind: Option<QueueKind>,
}

/// The source is to close: what to answer.
type Leave = Result<(), SourceError>;

impl Life {
    async fn live(mut self) -> Leave {
        loop {
            if !self.taking {
                // Nothing of before the loss can be settled, and nothing new is wanted.
                return self.wait_for_close().await;
            }
            let (config, socket) = (Arc::clone(&self.config), self.shared.socket.clone());
            let broker = RabbitMqBroker::of_source(&config);
            let connecting = link::connect(&broker, self.turn, &socket, Purpose::Consume);
            let trouble = match self.unless_closed(connecting).await {
                Err(leave) => return leave,
                Ok(Err(trouble)) => trouble,
                Ok(Ok(link)) => match self.use_link(link).await {
                    Err(leave) => return leave,
                    Ok(trouble) => trouble,
                },
            };
            self.turn += 1;
            if let Err(leave) = self.pause(trouble).await {
                return leave;
            }
        }
    }

    /// Uses a connection until it is of no more use, then takes its leave.
    async fn use_link(&mut self, link: Link) -> Result<Trouble, Leave> {
        // On the way to this connection the queue may have become another.
        self.kind = None;
        let (config, status) = (Arc::clone(&self.config), Arc::clone(&self.status));
        let ended = tokio::select! {
            ended = self.use_channels(&link) => ended,
            () = depth::watch(&link.connection, &config, &status) => Err(Ok(())),
        };
        if link.connection.status().connected() {
            // So that the broker logs no lost connection; nothing hangs on it.
            let _ = timeout(POLITE, link.connection.close(200, "leaving".into())).await;
        }
        ended
    }

    /// One channel after the other.
    async fn use_channels(&mut self, link: &Link) -> Result<Trouble, Leave> {
        while self.taking {
            let (config, shared) = (Arc::clone(&self.config), Arc::clone(&self.shared));
            let opened = match self.look_until_wanted(link).await? {
                Err(trouble) => Err(trouble),
                Ok(()) if !self.taking => break,
                Ok(()) => {
                    let mut kind = self.kind;
                    let opening = Session::open(&config, &shared, link, &mut kind);
                    let opened = self.unless_closed(opening).await?;
                    self.kind = kind;
                    opened
                }
            };
            let trouble = match opened {
                Err(trouble) => trouble,
                Ok(session) if self.taking => self.use_session(session).await?,
                Ok(session) => {
                    // Asked to stop in between: as if it had never been. Not by a cancel, which
                    // is what dropping the session would send.
                    link.cut();
                    drop(session);
                    break;
                }
            };
            if trouble.queue_is_gone {
                self.kind = None;
            }
            match trouble.remedy {
                Remedy::Reopen(_) if link.connection.status().connected() => {
                    self.pause(trouble).await?;
                }
                _ => return Ok(trouble),
            }
        }
        // Nothing of before can be settled any more, and nothing new is wanted.
        Err(self.wait_for_close().await)
    }

    /// Until the source is asked for deliveries or to stop.
    async fn look_until_wanted(&mut self, link: &Link) -> Result<Result<(), Trouble>, Leave> {
        let (config, buffer) = (Arc::clone(&self.config), Arc::clone(&self.shared.buffer));
        while self.taking && !buffer.is_wanted() {
            let mut kind = self.kind;
            let looked = self.unless_closed(session::look(&config, link, &mut kind)).await?;
            self.kind = kind;
            if let Err(trouble) = looked {
                return Ok(Err(trouble));
            }
            self.failures = 0;
            self.ready();
            // Either way the loop asks again.
            let _ = self.unless_closed(timeout(LOOK_EVERY, buffer.wanted())).await?;
        }
        Ok(Ok(()))
    }

    async fn use_session(&mut self, session: Session) -> Result<Trouble, Leave> {
        let began = Instant::now();
        self.opened += 1;
        self.ready();
        let (ended, taking) = session.run(&mut self.wishes).await;
        self.taking &= taking;
        if began.elapsed() >= GOOD_LIFE {
            self.failures = 0;
            self.undecodable = 0;
        }
        match ended {
            Ended::Closed(answer) => Err(answer),
            Ended::Trouble(trouble) => Ok(trouble),
        }
    }

    fn ready(&self) {
        let (queue, undecodable) = (&self.config.queue, self.undecodable);
        if self.opened > 1 {
            info!(%queue, reconnects = self.opened - 1, "consuming again");
        }
        self.status.send_modify(|status| {
            status.reconnects = self.opened.saturating_sub(1);
            if undecodable < UNDECODABLE_TIMES {
                status.phase = SourcePhase::Ready;
                status.reason = String::new();
                status.code = None;
            }
        });
    }

    /// Tells of a trouble, then waits as long as it asks for.
    async fn pause(&mut self, trouble: Trouble) -> Result<(), Leave> {
        self.failures = self.failures.saturating_add(1);
        let mut wait = backoff(self.failures);
        let mut trouble = trouble;
        if trouble.undecodable {
            self.undecodable = self.undecodable.saturating_add(1);
            if self.undecodable >= UNDECODABLE_TIMES {
                let (queue, times) = (&self.config.queue, self.undecodable);
                trouble = Trouble::undecodable(queue, times, UNDECODABLE_WAIT);
                wait = UNDECODABLE_WAIT;
            }
        }
        if let Remedy::Reopen(least) = trouble.remedy {
            // A queue that is looked for, or stood by for, is looked for at an even pace.
            wait = if least < EVEN_PACE { wait.max(least) } else { least };
        }
        self.tell(&trouble);
        if trouble.remedy == Remedy::GiveUp {
            *self.shared.permanent.lock().unwrap_or_else(PoisonError::into_inner) = Some(trouble);
            self.shared.buffer.wake();
            return Err(self.wait_for_close().await);
        }
        self.unless_closed(sleep(wait)).await
    }

    fn tell(&self, trouble: &Trouble) {
        let queue = &self.config.queue;
        let told = self.status.send_if_modified(|status| {
            let news = status.phase != trouble.phase || status.reason != trouble.reason;
            status.phase = trouble.phase.clone();
            status.reason.clone_from(&trouble.reason);
            status.code = (trouble.phase != SourcePhase::Standby).then_some(trouble.code);
            news
        });
        // Said once, not at every attempt.
        if told && trouble.phase == SourcePhase::Standby {
            info!(%queue, reason = %trouble, "standing by");
        } else if told {
            // The engine tells the operator, by the subscription's name.
            debug!(%queue, reason = %trouble, "not consuming");
        }
    }

    /// Runs something bounded, unless the source is closed meanwhile.
    async fn unless_closed<T>(&mut self, running: impl Future<Output = T>) -> Result<T, Leave> {
        tokio::pin!(running);
        loop {
            tokio::select! {
                done = &mut running => return Ok(done),
                wish = self.wishes.recv() => match wish {
                    Some(Wish::StopTaking(done)) => {
                        self.taking = false;
                        let _ = done.send(());
                    }
                    Some(Wish::Close(_)) | None => return Err(Ok(())),
                },
            }
        }
    }

    async fn wait_for_close(&mut self) -> Leave {
        loop {
            match self.wishes.recv().await {
                Some(Wish::StopTaking(done)) => {
                    self.taking = false;
                    let _ = done.send(());
                }
                Some(Wish::Close(_)) | None => return Ok(()),
            }
        }
    }
}

/// Exponential with jitter: between half of it and all of it.
pub(crate) fn backoff(failures: u32) -> Duration {
    let doubled = BACKOFF_FIRST.saturating_mul(1 << failures.saturating_sub(1).min(10));
    doubled.min(BACKOFF_CAP).mul_f64(rand::rng().random_range(0.5..=1.0))
}
