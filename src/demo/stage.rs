//! The course of one run: publish and forward, kill, look at the inbox, start again, wait for the
//! end.

use std::collections::HashSet;
use std::ops::RangeInclusive;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use tokio::sync::watch;

use super::DemoOptions;
use super::application::Application;
use super::broker::{Broker, GROUP, PARTITIONS, TOPIC};
use super::inbox;
use super::ledger::{Ledger, Tally};
use super::plan::{Copy, Plan, message_id};
use super::progress::Progress;
use super::publisher;
use super::report::{Times, grouped};
use super::sidecar::{Counters, Running, Sidecar};

/// The kill comes when this share of the ids was accepted, in per cent.
const KILL_AT: RangeInclusive<u64> = 35..=65;
/// Without a record published or a POST begun for so long, something is stuck.
const STALLED_AFTER: Duration = Duration::from_secs(60);
/// After the kill, POSTs that were on their way arrive within this time.
const STRAGGLERS_WITHIN: Duration = Duration::from_millis(200);
/// Between two looks at the group's offsets.
const COMMITTED_EVERY: Duration = Duration::from_millis(200);
/// How long the group waits for the killed member, and so the demo: a third of what a real
/// broker allows at least, and enough where broker and member share a machine.
const SESSION_TIMEOUT_MS: u32 = 3_000;
/// How many ids a stall names.
const IDS_SHOWN_MAX: usize = 20;

/// All that takes part in one run.
pub(super) struct Stage {
    pub(super) plan: Arc<Plan>,
    pub(super) ledger: Ledger,
    pub(super) progress: Progress,
    broker: Broker,
    sidecar: Sidecar,
    /// Records that the broker has confirmed.
    published: watch::Sender<u64>,
    /// So many accepted ids bring the kill.
    kill_at: u64,
    _application: Application,
}

/// What happened, beside what the ledger has.
pub(super) struct Story {
    pub(super) rows_at_kill: HashSet<String>,
    pub(super) rows_at_end: HashSet<String>,
    pub(super) before_kill: Counters,
    pub(super) at_end: Counters,
    pub(super) times: Times,
}

impl Stage {
    /// Starts broker and application, and draws what is to happen.
    pub(super) async fn set(options: &DemoOptions, directory: &Path) -> anyhow::Result<Self> {
        let seed = options.seed.unwrap_or_else(|| rand::rng().random_range(0..1_000_000));
        let plan = Arc::new(Plan::draw(options.messages, PARTITIONS, seed));
        let distinct = u64::from(plan.distinct());
        let share = SmallRng::seed_from_u64(!seed).random_range(KILL_AT);
        let ledger = Ledger::new();
        let application = Application::start(plan.clone(), ledger.clone(), seed).await?;
        let broker = Broker::start()?;
        // Said outright: the default would ask the broker what makes a position an identity, and
        // this one does not answer.
        let source = format!(
            "kafka://{}/{TOPIC}?group={GROUP}&message_id=header:message-id\
             &properties.session.timeout.ms={SESSION_TIMEOUT_MS}\
             &properties.heartbeat.interval.ms={}",
            broker.address(),
            SESSION_TIMEOUT_MS / 6,
        );
        let sidecar = Sidecar::new(source, application.callback(), directory)?;
        let progress = Progress::new(u64::from(options.messages), distinct);
        progress.say(&format!(
            "{} messages: {} distinct ids, {} of them twice at once, {} again later; seed {seed}\n\
             broker at {}, application at {}, files in {}",
            grouped(u64::from(options.messages)),
            grouped(distinct),
            grouped(plan.count(Copy::Concurrent)),
            grouped(plan.count(Copy::Republished)),
            broker.address(),
            application.callback(),
            directory.display(),
        ));
        Ok(Self {
            plan,
            ledger,
            progress,
            broker,
            sidecar,
            published: watch::Sender::new(0),
            kill_at: distinct * share / 100,
            _application: application,
        })
    }

    /// Shows how it goes on, until it is dropped.
    pub(super) async fn show(&self) {
        self.progress.follow(self.published.subscribe(), self.ledger.watch()).await;
    }

    /// The whole run.
    pub(super) async fn act(&self) -> anyhow::Result<Story> {
        let publishing =
            publisher::publish(&self.plan, &self.broker, &self.ledger, &self.published);
        Ok(tokio::try_join!(publishing, self.forwarding())?.1)
    }

    async fn forwarding(&self) -> anyhow::Result<Story> {
        self.progress.say("sidecar: started; the consumer group forms in about 3 s");
        let (before_kill, killed_at) = self.first_life(self.sidecar.start()?).await?;
        let rows_at_kill = self.look_between().await?;
        let first = self.ledger.next_life().context("no POST before the kill")?;
        let (at_end, second) = self.second_life(self.sidecar.start()?).await?;
        let rows_at_end = inbox::processed(&self.sidecar.database()).await?;
        let times = Times {
            forwarding: (killed_at - first.0) + (second.1 - second.0),
            down: second.0 - killed_at,
            settled: before_kill.settled + at_end.settled,
        };
        Ok(Story { rows_at_kill, rows_at_end, before_kill, at_end, times })
    }

    /// Up to the kill: its counters right before, and when it was.
    async fn first_life(&self, mut sidecar: Running) -> anyhow::Result<(Counters, Instant)> {
        loop {
            let ready = |tally: &Tally| tally.accepted >= self.kill_at && tally.open > 0;
            self.until(&mut sidecar, ready).await?;
            let counters = sidecar.counters().await.context("reading the sidecar's metrics")?;
            let tally = self.ledger.tally();
            if tally.accepted >= u64::from(self.plan.distinct()) {
                bail!("everything was accepted before the kill; publish more: --messages");
            }
            // Reading took a moment: only a kill in the middle of POSTs is one.
            if tally.open > 0 {
                let killed_at = Instant::now();
                sidecar.kill().await?;
                self.progress.say(&format!(
                    "sidecar: SIGKILL, {} POSTs open, {} ids accepted so far",
                    tally.open,
                    grouped(tally.accepted)
                ));
                return Ok((counters, killed_at));
            }
        }
    }

    /// Between the kill and the restart: which ids have a row, once the application has finished
    /// what it was at.
    async fn look_between(&self) -> anyhow::Result<HashSet<String>> {
        let mut tally = self.ledger.watch();
        loop {
            tally.wait_for(|tally| tally.open == 0).await.context("the ledger is gone")?;
            if tokio::time::timeout(STRAGGLERS_WITHIN, tally.changed()).await.is_err() {
                break;
            }
        }
        let rows = inbox::processed(&self.sidecar.database()).await?;
        self.progress.say(&format!(
            "inbox: {} rows, {} ids accepted; sidecar: started again, it waits for the dead \
             member's session",
            grouped(rows.len() as u64),
            grouped(self.ledger.tally().accepted),
        ));
        Ok(rows)
    }

    /// From the restart until the group has committed every record and nothing is parked: the
    /// counters then, and the first POST and the last answer.
    async fn second_life(
        &self,
        mut sidecar: Running,
    ) -> anyhow::Result<(Counters, (Instant, Instant))> {
        self.until(&mut sidecar, |tally| tally.begun > 0 && tally.span.is_some()).await?;
        self.progress.say("sidecar: forwards again");
        let all = self.plan.records().len() as u64;
        while self.broker.committed().await? < all
            || !inbox::parked(&self.sidecar.database()).await?.is_empty()
        {
            tokio::select! {
                () = tokio::time::sleep(COMMITTED_EVERY) => {}
                error = sidecar.ended() => return Err(error),
            }
        }
        let counters = sidecar.counters().await.context("reading the sidecar's metrics")?;
        let span = self.ledger.tally().span.context("no POST after the restart")?;
        sidecar.stop().await?;
        Ok((counters, span))
    }

    /// Waits for the application's figures to come so far, unless the sidecar ends first.
    async fn until(
        &self,
        sidecar: &mut Running,
        condition: impl FnMut(&Tally) -> bool,
    ) -> anyhow::Result<()> {
        let mut tally = self.ledger.watch();
        tokio::select! {
            reached = tally.wait_for(condition) => reached.map(drop).context("the ledger is gone"),
            error = sidecar.ended() => Err(error),
        }
    }

    /// Returns when nothing has moved for too long, with what is missing.
    pub(super) async fn stalled(&self) -> anyhow::Error {
        let mut tally = self.ledger.watch();
        let mut published = self.published.subscribe();
        loop {
            let moved = async {
                tokio::select! {
                    moved = tally.changed() => moved.is_ok(),
                    moved = published.changed() => moved.is_ok(),
                }
            };
            if tokio::time::timeout(STALLED_AFTER, moved).await.is_err() {
                return anyhow!(
                    "nothing was published or forwarded for {STALLED_AFTER:?}; {}",
                    self.missing()
                );
            }
        }
    }

    /// What was not accepted yet of what may have been published.
    fn missing(&self) -> String {
        let posts = self.ledger.posts();
        let mut missing = (0..self.plan.distinct()).map(message_id).filter(|id| {
            !posts.get(id).is_some_and(|posts| posts.iter().any(super::ledger::Post::accepted))
        });
        let shown: Vec<_> = missing.by_ref().take(IDS_SHOWN_MAX).collect();
        format!("not accepted: {} and {} more", shown.join(", "), missing.count())
    }

    /// The error with the end of the sidecar's log.
    pub(super) fn with_log(&self, error: anyhow::Error) -> anyhow::Error {
        anyhow!(
            "{error:#}\nThe end of {}:\n{}",
            self.sidecar.log().display(),
            self.sidecar.log_tail()
        )
    }
}
