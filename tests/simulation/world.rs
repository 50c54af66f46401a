//! One run: a broker, a database, an application and some processes, from the first publication to
//! the last check.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt as _;
use inboxd::admin::HealthRegistry;
use inboxd::engine::DeadLetterTo;
use inboxd::engine::{Hub, HubSettings, Subscription};
use inboxd::mutations::{self, Mutation};
use inboxd::telemetry::Metrics;
use inboxd_contract::{
    Actor, DeadLetterTarget, Envelope, Header, InboxStore as _, Origin, Outcome, ParkedFilter,
    ParkedRow, ParkedSeq, ParkedState, Replay, Replayed,
};
use inboxd_memory::{
    MemoryBroker, MemoryBrokerFlaw, MemoryDatabase, MemoryFlaw, MemoryLetters, MemoryLock,
    MemoryStore,
};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until};

use super::application::{Application, SimForwarder};
use super::chance::Chance;
use super::letters::{self, SimLetters};
use super::life::{Life, Signal, Signals};
use super::oracle::{Oracle, key_of, key_of_id};
use super::parking::Operator;
use super::plan::{Disturbance, Plan};
use super::report::Report;
use super::source::{Lingering, SimSource};
use super::store::{Faults, SimStore};
use super::trace::{Trace, lock};

/// What is broken on purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Broken {
    Nothing,
    Engine(Mutation),
    Store(MemoryFlaw),
    Broker(MemoryBrokerFlaw),
}

/// Runs a plan to its end, or to the first broken invariant.
pub fn run(plan: &Plan, broken: Broken) -> Report {
    mutations::set(match broken {
        Broken::Engine(mutation) => Some(mutation),
        _ => None,
    });
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime without I/O starts");
    let report = runtime.block_on(async {
        let mut world = World::new(plan, broken);
        world.run().await;
        world.report()
    });
    drop(runtime);
    mutations::set(None);
    report
}

/// A process that runs.
struct Process {
    life: Arc<Life>,
    /// By which the broker knows it.
    instance: u64,
    hub: Arc<Hub>,
    subscription: Arc<Subscription>,
    draining: Option<JoinHandle<()>>,
}

enum Action {
    Publish(usize),
    Disturb(usize),
    Start(usize),
    Thaw(Arc<Life>, u64),
    Leave(String),
    BrokerReachable,
    BrokerAnswers { severed: bool },
    DatabaseBack,
    Unlock(u64),
    ApplicationBack,
    Calm,
}

struct World {
    plan: Plan,
    broker: MemoryBroker,
    database: Arc<MemoryDatabase>,
    application: Arc<Application>,
    letters: MemoryLetters,
    oracle: Oracle,
    trace: Trace,
    chance: Chance,
    calm: Arc<AtomicBool>,
    begun_at: Instant,
    signals: Signals,
    heard: mpsc::UnboundedReceiver<Signal>,
    slots: Vec<Option<Process>>,
    back_after: Vec<Duration>,
    /// How long the next freeze at a step takes, and whether the broker expels the member.
    stands_still: Vec<(Duration, bool)>,
    next_number: u64,
    actions: BTreeMap<(Instant, u64), Action>,
    next_action: u64,
    locks: BTreeMap<u64, MemoryLock>,
    lingering: Lingering,
    /// Of every life, for the last comparison.
    metrics: Vec<(Arc<Life>, Metrics)>,
}

impl World {
    fn new(plan: &Plan, broken: Broken) -> Self {
        let trace = Trace::new();
        let (signals, heard) = mpsc::unbounded_channel();
        let oracle = Oracle::new(plan, trace.clone(), signals.clone());
        let chance = Chance::new(plan.seed ^ 0x005e_ed0f_c4a0_5ca1);
        let broker = MemoryBroker::new(plan.broker.clone());
        broker.watch(Arc::new(oracle.clone()));
        let database = MemoryDatabase::new();
        database.watch(Arc::new(oracle.clone()));
        match broken {
            Broken::Store(flaw) => database.set_flaw(Some(flaw)),
            Broken::Broker(flaw) => broker.set_flaw(Some(flaw)),
            Broken::Nothing | Broken::Engine(_) => {}
        }
        let calm = Arc::new(AtomicBool::new(false));
        let application = Arc::new(Application {
            chance: chance.clone(),
            profile: plan.application.clone(),
            failing: plan.failing.clone(),
            oracle: oracle.clone(),
            calm: calm.clone(),
            database: database.clone(),
            lease: plan.settings.lease,
            away: AtomicBool::new(false),
        });
        let letters =
            letters::broker(plan.letters.clone(), chance.clone(), calm.clone(), oracle.clone());
        Self {
            plan: plan.clone(),
            letters,
            broker,
            database,
            application,
            oracle,
            trace,
            chance,
            calm,
            begun_at: Instant::now(),
            signals,
            heard,
            slots: (0..plan.instances).map(|_| None).collect(),
            back_after: vec![Duration::ZERO; plan.instances],
            stands_still: vec![(Duration::ZERO, false); plan.instances],
            next_number: 0,
            actions: BTreeMap::new(),
            next_action: 0,
            locks: BTreeMap::new(),
            lingering: Arc::new(Mutex::default()),
            metrics: Vec::new(),
        }
    }

    fn report(self) -> Report {
        let Self { oracle, trace, begun_at, .. } = self;
        let mut stats = oracle.stats(std::mem::take);
        stats.runs = 1;
        stats.virtual_seconds = begun_at.elapsed().as_secs();
        Report { violation: oracle.violation(), trace: trace.take(), stats }
    }

    fn tell(&self, what: std::fmt::Arguments<'_>) {
        self.trace.add("world", what);
    }

    fn after(&mut self, delay: Duration, action: Action) {
        self.next_action += 1;
        self.actions.insert((Instant::now() + delay, self.next_action), action);
    }

    async fn run(&mut self) {
        for slot in 0..self.plan.instances {
            self.after(Duration::from_millis(slot as u64 * 7), Action::Start(slot));
        }
        for index in 0..self.plan.publications.len() {
            self.after(self.plan.publications[index].at, Action::Publish(index));
        }
        for index in 0..self.plan.disturbances.len() {
            self.after(self.plan.disturbances[index].0, Action::Disturb(index));
        }
        self.after(self.plan.chaos + Duration::from_secs(3), Action::Calm);
        while !self.calm.load(SeqCst) {
            if !self.turn(Duration::MAX).await {
                return;
            }
        }
        if self.drain_everything().await && self.stop_everything().await {
            self.check_the_end().await;
        }
    }

    /// Waits for the next action or signal, at most so long, and carries it out. False: an
    /// invariant is broken.
    async fn turn(&mut self, most: Duration) -> bool {
        let due = self.actions.keys().next().map(|(at, _)| *at);
        let until = Instant::now() + most.min(Duration::from_secs(86_400));
        let until = due.map_or(until, |due| due.min(until));
        tokio::select! {
            biased;
            signal = self.heard.recv() => match signal {
                Some(Signal::Violated) | None => return false,
                Some(Signal::Died { slot, number }) => self.died(slot, number),
                Some(Signal::Froze { slot, number }) => self.froze(slot, number),
                Some(Signal::Drained { slot, number, cut }) => self.drained(slot, number, cut),
            },
            () = sleep_until(until) => {
                let now = Instant::now();
                while let Some(first) = self.actions.first_entry() {
                    if first.key().0 > now {
                        break;
                    }
                    let action = first.remove();
                    self.act(action);
                }
            }
        }
        true
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Publish(index) => self.publish(index),
            Action::Disturb(index) => {
                let what = self.plan.disturbances[index].1.clone();
                // A smaller plan may have fewer processes.
                if what.slot().is_none_or(|slot| slot < self.slots.len()) {
                    self.tell(format_args!("{what:?}"));
                    self.disturb(what);
                }
            }
            Action::Start(slot) => self.start(slot),
            Action::Thaw(life, instance) => {
                self.trace.add(&life.name, format_args!("goes on"));
                life.thaw();
                self.broker.set_stopped(instance, false);
            }
            Action::Leave(name) => lock(&self.lingering).retain(|(of, _)| *of != name),
            Action::BrokerReachable => self.broker.set_reachable(true),
            Action::BrokerAnswers { severed } => {
                if severed {
                    self.broker.sever();
                }
                self.broker.set_hanging(false);
            }
            Action::DatabaseBack => self.database.set_available(true),
            Action::Unlock(number) => drop(self.locks.remove(&number)),
            Action::ApplicationBack => self.application.away.store(false, SeqCst),
            Action::Calm => self.begin_calm(),
        }
    }

    fn publish(&mut self, index: usize) {
        let publication = &self.plan.publications[index];
        let origin = Origin::Memory { stream: "".into(), position: 0 };
        let body = Bytes::from(publication.body.clone().into_bytes());
        let mut envelope = Envelope::new(origin, Some(body));
        envelope.message_type = Some(Bytes::from_static(publication.kind.as_bytes()));
        for (name, value) in [("id", &publication.id), ("key", &publication.lane)] {
            if let Some(value) = value {
                envelope.headers.push(Header::new(name, value.clone()));
            }
        }
        let position = self.broker.publish(publication.stream, envelope);
        let key = key_of(&self.plan, publication);
        self.oracle.published((publication.stream, position), publication, key);
        let id = publication.id.as_deref().unwrap_or("(no id)");
        self.tell(format_args!("publishes {id} to {}/{position}", publication.stream));
    }

    fn start(&mut self, slot: usize) {
        if self.slots[slot].is_some() {
            return;
        }
        let number = self.next_number;
        self.next_number += 1;
        let life = Life::new(slot, number, self.signals.clone(), self.trace.clone());
        self.trace.add(&life.name, format_args!("starts"));
        let settings = self.plan.settings.clone();
        let faults = Faults {
            life: life.clone(),
            chance: self.chance.clone(),
            profile: self.plan.store.clone(),
            lease: settings.lease,
            calm: self.calm.clone(),
            oracle: self.oracle.clone(),
        };
        let store = Arc::new(SimStore::new(life.clone(), self.database.clone(), faults));
        let metrics = Metrics::new();
        let health = HealthRegistry::new(Duration::from_secs(30));
        let hub_settings = HubSettings {
            owner: life.owner.clone(),
            lease: settings.lease,
            retention: Duration::from_secs(14 * 86_400),
            random_seed: self.chance.number(),
        };
        let hub = Hub::start(store, hub_settings, metrics.clone());
        let name = settings.name.to_string();
        let inner = self.broker.source();
        let instance = inner.instance();
        let source =
            SimSource::new(life.clone(), self.oracle.clone(), inner, self.lingering.clone());
        let letters = SimLetters {
            life: life.clone(),
            oracle: self.oracle.clone(),
            inner: self.letters.clone(),
        };
        let to_broker = settings.dead_letter_to != DeadLetterTo::Table;
        let target = to_broker.then(|| Arc::new(letters) as Arc<dyn DeadLetterTarget>);
        let forwarder = SimForwarder { life: life.clone(), application: self.application.clone() };
        let subscription = Subscription::start(
            &hub,
            settings,
            Box::new(source),
            Arc::new(forwarder),
            target,
            metrics.subscription(&name),
            health.subscription(&name),
        );
        self.metrics.push((life.clone(), metrics));
        let subscription = Arc::new(subscription);
        self.slots[slot] = Some(Process { life, instance, hub, subscription, draining: None });
    }

    fn life(&self, slot: usize) -> Option<Arc<Life>> {
        self.slots[slot].as_ref().map(|process| process.life.clone())
    }

    fn disturb(&mut self, what: Disturbance) {
        match what {
            Disturbance::Crash { slot, linger, back_after } => {
                let Some(life) = self.life(slot) else { return };
                self.back_after[slot] = back_after;
                life.die(linger);
                self.died(slot, life.number);
            }
            Disturbance::CrashAtStep { slot, steps, linger, back_after } => {
                let Some(life) = self.life(slot) else { return };
                self.back_after[slot] = back_after;
                life.die_after(steps, linger);
            }
            Disturbance::Drain { slot, grace, back_after } => {
                self.back_after[slot] = back_after;
                self.drain(slot, grace);
            }
            Disturbance::Freeze { slot, time, expelled } => {
                let Some(life) = self.life(slot) else { return };
                self.stands_still[slot] = (time, expelled);
                life.freeze();
                self.froze(slot, life.number);
            }
            Disturbance::FreezeAtStep { slot, steps, time, expelled } => {
                let Some(life) = self.life(slot) else { return };
                self.stands_still[slot] = (time, expelled);
                life.freeze_after(steps);
            }
            Disturbance::Sever { slot } => {
                self.oracle.stats(|stats| stats.severs += 1);
                if let Some(process) = &self.slots[slot] {
                    self.broker.sever_one(process.instance);
                }
            }
            Disturbance::BrokerAway { time } => {
                self.oracle.stats(|stats| stats.severs += 1);
                self.broker.set_reachable(false);
                self.after(time, Action::BrokerReachable);
            }
            Disturbance::BrokerHangs { time, severed } => {
                self.oracle.stats(|stats| stats.severs += u64::from(severed));
                self.broker.set_hanging(true);
                self.after(time, Action::BrokerAnswers { severed });
            }
            Disturbance::Revoke { stream } => {
                self.oracle.stats(|stats| stats.revokes += 1);
                self.broker.revoke(stream);
            }
            Disturbance::Expel { slot } => self.expel(slot),
            Disturbance::DatabaseAway { time } => {
                self.database.set_available(false);
                self.after(time, Action::DatabaseBack);
            }
            Disturbance::Lock { id, of_claim, time } => {
                let Some(key) = key_of_id(&self.plan, &id) else { return };
                self.oracle.stats(|stats| stats.locks += 1);
                let held = match of_claim {
                    true => self.database.lock_claim(&key),
                    false => self.database.lock_message(&key),
                };
                self.locks.insert(self.next_action, held);
                self.after(time, Action::Unlock(self.next_action));
            }
            Disturbance::ClockMoves { micros } => {
                self.database.shift_clock(micros);
                self.oracle.clock_moved(micros);
            }
            Disturbance::Operator { replay } => {
                let (database, fresh) = (self.database.clone(), self.fresh());
                tokio::spawn(async move { operate(database, replay, fresh).await });
            }
            Disturbance::ApplicationAway { time } => {
                self.application.away.store(true, SeqCst);
                self.after(time, Action::ApplicationBack);
            }
        }
    }

    fn froze(&mut self, slot: usize, number: u64) {
        let Some(process) = &self.slots[slot] else { return };
        if process.life.number != number {
            return;
        }
        let (life, instance) = (process.life.clone(), process.instance);
        self.oracle.stats(|stats| stats.freezes += 1);
        self.broker.set_stopped(instance, true);
        let (time, expelled) = self.stands_still[slot];
        // In the calm phase everything goes on at once.
        let time = if self.calm.load(SeqCst) { Duration::ZERO } else { time };
        self.after(time, Action::Thaw(life, instance));
        if expelled {
            self.expel(slot);
        }
    }

    fn expel(&mut self, slot: usize) {
        self.oracle.stats(|stats| stats.expels += 1);
        if let Some(process) = &self.slots[slot] {
            self.broker.expel(process.instance);
        }
    }

    /// The process is gone, whatever it was at.
    fn died(&mut self, slot: usize, number: u64) {
        let Some(process) = self.slots[slot].take_if(|process| process.life.number == number)
        else {
            return;
        };
        self.oracle.stats(|stats| stats.crashes += 1);
        self.oracle.ended(&process.life);
        let linger = process.life.linger();
        if let Some(draining) = &process.draining {
            draining.abort();
        }
        if !linger.is_zero() {
            self.after(linger, Action::Leave(process.life.name.clone()));
        }
        drop(process);
        self.after(self.back_after[slot].max(Duration::from_millis(10)), Action::Start(slot));
    }

    fn drain(&mut self, slot: usize, grace: Duration) {
        let signals = self.signals.clone();
        let Some(process) = &mut self.slots[slot] else { return };
        if process.draining.is_some() {
            return;
        }
        self.oracle.stats(|stats| stats.drains += 1);
        let (life, hub, subscription) =
            (process.life.clone(), process.hub.clone(), process.subscription.clone());
        self.trace.add(&life.name, format_args!("drains, grace {grace:?}"));
        process.draining = Some(tokio::spawn(async move {
            let report = subscription.drain(Instant::now() + grace).await;
            hub.close().await;
            let (slot, number) = (life.slot, life.number);
            let _ = signals.send(Signal::Drained { slot, number, cut: report.cut });
        }));
    }

    fn drained(&mut self, slot: usize, number: u64, cut: usize) {
        let Some(process) = self.slots[slot].take_if(|process| process.life.number == number)
        else {
            return;
        };
        let life = &process.life;
        self.trace.add(&life.name, format_args!("has drained, {cut} cut"));
        self.oracle.stats(|stats| stats.cut += cut as u64);
        if cut > 0 {
            self.oracle.was_cut(life);
        }
        let kept = self.database.claims_held_by(&life.owner);
        if cut == 0 && kept > 0 && !life.release_failed.load(SeqCst) {
            self.oracle.violated(format_args!(
                "I8: {} has drained and left {kept} claims in force, nothing cut",
                life.name
            ));
        }
        drop(process);
        self.after(self.back_after[slot].max(Duration::from_millis(10)), Action::Start(slot));
    }

    /// Everything that disturbs ends, and every process runs.
    fn begin_calm(&mut self) {
        self.tell(format_args!("CALM"));
        self.calm.store(true, SeqCst);
        self.actions.retain(|_, action| !matches!(action, Action::Disturb(_)));
        let late: Vec<usize> = self
            .actions
            .values()
            .filter_map(|action| match action {
                Action::Publish(index) => Some(*index),
                _ => None,
            })
            .collect();
        self.actions.retain(|_, action| !matches!(action, Action::Publish(_)));
        for index in late {
            self.publish(index);
        }
        self.broker.set_reachable(true);
        self.broker.set_hanging(false);
        self.database.set_available(true);
        self.application.away.store(false, SeqCst);
        self.locks.clear();
        for slot in 0..self.slots.len() {
            match &self.slots[slot] {
                Some(process) => {
                    process.life.spare();
                    process.life.thaw();
                    self.broker.set_stopped(process.instance, false);
                }
                None => self.after(Duration::from_millis(100), Action::Start(slot)),
            }
        }
    }

    /// False: an invariant is broken.
    async fn drain_everything(&mut self) -> bool {
        let deadline = Instant::now() + self.plan.calm();
        let mut replayed = BTreeSet::new();
        loop {
            let left = self.broker.unsettled();
            let at_work: usize =
                self.slots.iter().flatten().map(|process| process.subscription.in_flight()).sum();
            let draining = self.slots.iter().flatten().any(|process| process.draining.is_some());
            let parked = self.database.due().len();
            let replays = self.plan.operator == Operator::Replays;
            let fresh = self.fresh();
            let done = free_lanes(self.database.clone(), replays, &mut replayed, fresh).await;
            if done == 0
                && parked == 0
                && left == 0
                && at_work == 0
                && !draining
                && self.slots.iter().all(Option::is_some)
            {
                return true;
            }
            if Instant::now() >= deadline {
                self.oracle.violated(format_args!(
                    "I8: {left} messages are not settled, {parked} are parked and {at_work} tasks run at the end of the calm phase"
                ));
                return false;
            }
            for process in self.slots.iter().flatten() {
                if let Some(reason) = process.subscription.failed().now_or_never() {
                    self.oracle.violated(format_args!("{} failed: {reason}", process.life.name));
                    return false;
                }
            }
            if !self.turn(Duration::from_millis(200)).await {
                return false;
            }
        }
    }

    fn fresh(&self) -> uuid::Uuid {
        uuid::Uuid::from_u64_pair(self.chance.number(), self.chance.number())
    }

    /// Everything ends gracefully, at once. False: an invariant is broken.
    async fn stop_everything(&mut self) -> bool {
        for slot in 0..self.slots.len() {
            self.drain(slot, Duration::from_secs(30));
        }
        let deadline = Instant::now() + Duration::from_secs(60);
        while self.slots.iter().any(Option::is_some) {
            self.actions.retain(|_, action| !matches!(action, Action::Start(_)));
            if !self.turn(Duration::from_millis(500)).await {
                return false;
            }
            if Instant::now() > deadline {
                self.oracle.violated(format_args!("I8: a process without work does not end"));
                return false;
            }
        }
        true
    }

    async fn check_the_end(&mut self) {
        // What dead owners left runs out.
        let longest = self.plan.settings.lease * 2 + Duration::from_secs(1);
        sleep(longest).await;
        let held = self.database.claims_held();
        if held > 0 {
            self.oracle.violated(format_args!("I8: {held} claims never run out"));
        }
        self.oracle.check_end();
        self.check_metrics();
    }

    /// The engine's counters agree with what was seen from outside.
    fn check_metrics(&self) {
        for (life, metrics) in &self.metrics {
            let text = metrics.encode();
            let count = |outcome: Outcome| -> u64 {
                let label = format!("outcome=\"{}\"", outcome.as_str());
                let line = text.lines().find(|line| {
                    line.starts_with("inboxd_deliveries_total") && line.contains(&label)
                });
                let value = line.and_then(|line| line.rsplit(' ').next());
                value.and_then(|value| value.parse().ok()).unwrap_or(0)
            };
            let decided =
                [Outcome::Processed, Outcome::Dropped, Outcome::Unidentified, Outcome::Unrouted];
            let known = [Outcome::Duplicate, Outcome::DuplicateInFlight, Outcome::ClaimLost];
            let lettered = [Outcome::IdConflict, Outcome::DeadLettered, Outcome::DeadDuplicate];
            let sum = |of: &[Outcome]| of.iter().map(|outcome| count(*outcome)).sum::<u64>();
            let parked = sum(&[Outcome::Parked, Outcome::ParkedDuplicate]);
            let (decided, known, lettered) = (sum(&decided), sum(&known), sum(&lettered));
            let found = self.oracle.life(life, |record| {
                if decided + known + lettered + parked != record.acks {
                    return Some(format!("{} acks", record.acks));
                }
                if decided + known > record.acks_with_row {
                    return Some(format!("{} acks with a row", record.acks_with_row));
                }
                if lettered > record.acks_with_letter {
                    return Some(format!("{} acks with a dead letter", record.acks_with_letter));
                }
                if decided > record.rows_inserted + record.completions_unanswered {
                    return Some(format!("{} rows inserted", record.rows_inserted));
                }
                None
            });
            if let Some(found) = found {
                self.oracle.violated(format_args!(
                    "metrics of {}: {decided} processed, {known} known, {lettered} dead letters, {parked} parked; the oracle saw {found}",
                    life.name
                ));
            }
        }
    }
}

/// Somebody at the admin API has the oldest dead letter forwarded again, or discards it.
async fn operate(database: Arc<MemoryDatabase>, replay: bool, fresh: uuid::Uuid) {
    let store = MemoryStore::new(database);
    for row in dead(&store).await.into_iter().take(1) {
        match replay {
            true => drop(replay_row(&store, row.seq, fresh).await),
            false => drop(store.discard(&[row.seq], &Actor::new("simulated operator")).await),
        }
    }
}

/// Dead letters that block lanes are forwarded again, once, or discarded. Answers how many.
async fn free_lanes(
    database: Arc<MemoryDatabase>,
    replays: bool,
    replayed: &mut BTreeSet<ParkedSeq>,
    fresh: uuid::Uuid,
) -> usize {
    let store = MemoryStore::new(database);
    let mut done = 0;
    for row in dead(&store).await.into_iter().filter(|row| row.lane_id.is_some()) {
        done += 1;
        if replays && replayed.insert(row.seq) && replay_row(&store, row.seq, fresh).await {
            continue;
        }
        store.discard(&[row.seq], &Actor::new("simulated operator")).await;
    }
    done
}

async fn dead(store: &MemoryStore) -> Vec<ParkedRow> {
    let filter = ParkedFilter { states: vec![ParkedState::Dead], ..ParkedFilter::default() };
    store.list_parked(&filter, None, u32::MAX).await.unwrap_or_default()
}

/// True if it is due now.
async fn replay_row(store: &MemoryStore, seq: ParkedSeq, fresh: uuid::Uuid) -> bool {
    let asked = Replay { seq, delay: Duration::ZERO, allow_processed: false, fresh };
    let answers = store.replay(&[asked], &Actor::new("simulated operator")).await;
    matches!(answers.first(), Some(Ok(Replayed::Due(_))))
}
