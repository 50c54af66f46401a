//! Whole situations, without faults drawn: an application that is away for long, and messages that
//! fail for long beside many that do not. Paused time.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use inboxd::admin::HealthRegistry;
use inboxd::engine::{
    DeliveryMode, Hub, HubSettings, Ordering, RetrySettings, Subscription, SubscriptionSettings,
};
use inboxd::telemetry::Metrics;
use inboxd_contract::{InboxKey, OwnerId};
use inboxd_memory::{
    MemoryBroker, MemoryBrokerOptions, MemoryDatabase, MemoryForwarder, MemoryPost, MemoryStore,
    Reply,
};
use tokio::time::{Instant, sleep, sleep_until};

use super::base;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
/// Simulated hours end sooner than this, or something is stuck.
const PATIENCE: Duration = Duration::from_secs(7_200);

/// What several processes share.
struct World {
    broker: MemoryBroker,
    database: Arc<MemoryDatabase>,
    application: MemoryForwarder,
    settings: SubscriptionSettings,
    processes: Vec<(Arc<Hub>, Subscription, Metrics)>,
}

impl World {
    fn new(streams: usize, application: MemoryForwarder, settings: SubscriptionSettings) -> Self {
        Self {
            broker: MemoryBroker::new(MemoryBrokerOptions::log("s", streams)),
            database: MemoryDatabase::new(),
            application,
            settings,
            processes: Vec::new(),
        }
    }

    fn start(&mut self) {
        let number = self.processes.len();
        let metrics = Metrics::new();
        let health = HealthRegistry::new(30 * SECOND);
        let hub_settings = HubSettings {
            owner: OwnerId(format!("p{number}").into()),
            lease: self.settings.lease,
            retention: 14 * 86_400 * SECOND,
            random_seed: number as u64,
        };
        let store = Arc::new(MemoryStore::new(self.database.clone()));
        let hub = Hub::start(store, hub_settings, metrics.clone());
        let name = self.settings.name.to_string();
        let subscription = Subscription::start(
            &hub,
            self.settings.clone(),
            Box::new(self.broker.source()),
            Arc::new(self.application.clone()),
            None,
            metrics.subscription(&name),
            health.subscription(&name),
        );
        self.processes.push((hub, subscription, metrics));
    }

    /// Waits until so many messages are processed and nothing is left anywhere.
    async fn processed(&self, count: usize) {
        let deadline = Instant::now() + PATIENCE;
        let is_done = || {
            self.broker.unsettled() == 0
                && self.database.due().is_empty()
                && self.database.processed().len() == count
        };
        while !is_done() {
            let (unsettled, due) = (self.broker.unsettled(), self.database.due().len());
            let processed = self.database.processed().len();
            assert!(
                Instant::now() < deadline,
                "{unsettled} unsettled, {due} parked, {processed} of {count} processed"
            );
            sleep(250 * MS).await;
        }
        assert!(self.database.dead().is_empty(), "nothing is a dead letter");
    }

    /// The sum of a counter over all processes, of the lines that have this label.
    fn counted(&self, name: &str, label: &str) -> u64 {
        let lines = |metrics: &Metrics| {
            let text = metrics.encode();
            let of = |line: &&str| line.starts_with(name) && line.contains(label);
            let value = |line: &str| line.rsplit(' ').next()?.parse::<u64>().ok();
            text.lines().filter(of).filter_map(value).sum::<u64>()
        };
        self.processes.iter().map(|(_, _, metrics)| lines(metrics)).sum()
    }
}

fn paused() -> tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_time().start_paused(true).build().expect("a runtime without I/O starts")
}

/// Three members, 1,000 messages queued, and nobody there for ten minutes: no dead letter, no
/// attempt, everything delivered, once, and all three are members still.
#[test]
fn an_application_that_is_away_for_ten_minutes_costs_nothing() {
    for delivery in [DeliveryMode::Direct, DeliveryMode::Stored] {
        paused().block_on(away(delivery));
    }
}

async fn away(delivery: DeliveryMode) {
    let settings = SubscriptionSettings {
        delivery,
        ordering: Ordering::Key,
        in_flight_max: 64,
        ..base::settings()
    };
    let application = MemoryForwarder::new(|_| Reply::after(5 * MS, 200));
    let mut world = World::new(3, application, settings);
    (0..3).for_each(|_| world.start());
    world.broker.publish(0, base::keyed("first", "k"));
    world.processed(1).await;
    let members = world.broker.instances();
    world.application.set_reachable(false);
    for n in 0..1_000 {
        let message = base::keyed(&format!("m{n}"), &format!("k{}", n % 50));
        world.broker.publish(n % 50 % 3, message);
    }
    sleep(600 * SECOND).await;
    assert_eq!(world.application.begun(), 1, "{delivery:?}: nobody was there");
    assert_eq!(world.broker.instances(), members, "{delivery:?}: nobody left");
    assert!(world.database.dead().is_empty(), "{delivery:?}");
    world.application.set_reachable(true);
    world.processed(1_001).await;
    let posts = world.application.posts();
    assert_eq!(posts.len(), 1_001, "{delivery:?}: each once");
    let burned: Vec<_> = posts.iter().filter(|post| post.attempt != 1).collect();
    assert!(burned.is_empty(), "{delivery:?}: an attempt is counted: {burned:?}");
    assert_eq!(world.broker.instances(), members, "{delivery:?}: nobody left");
    assert_eq!(world.counted("inboxd_deliveries_total", "released"), 0, "{delivery:?}");
    in_order(&posts);
}

/// Each lane's messages are accepted in the order of their numbers.
fn in_order(posts: &[MemoryPost]) {
    let mut last: BTreeMap<Vec<u8>, u64> = BTreeMap::new();
    let mut lanes: BTreeMap<Vec<u8>, u64> = BTreeMap::new();
    let accepted = posts.iter().filter(|post| post.status == Some(200));
    for post in accepted {
        let Some(lane) = post.ordering_key.clone() else { continue };
        let number: u64 = post.key.message_id.as_str()[1..].parse().unwrap_or(0);
        if let Some(before) = last.insert(lane.clone(), number) {
            assert!(before < number, "m{number} comes after m{before} in {lane:?}");
        }
        *lanes.entry(lane).or_default() += 1;
    }
    assert!(!lanes.is_empty(), "there are lanes");
}

/// Concurrency 64 and 50 ms each are 1,280 messages a second; so many arrive that 80 % of it is
/// used.
const CONCURRENCY: usize = 64;
const SERVICE: Duration = Duration::from_millis(50);
const PER_TICK: usize = 64;
const TICK: Duration = Duration::from_millis(62);

/// How 1 % of the messages fail, until the application heals.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fails {
    Not,
    AtOnce,
    Hanging,
}

struct Run {
    fails: Fails,
    ordering: Ordering,
    count: usize,
}

impl Run {
    /// One of a hundred; with lanes of ten messages, the third of every tenth lane.
    fn fails(n: usize) -> bool {
        n % 100 == 42
    }

    /// Neither failing, nor behind one in its lane.
    fn is_healthy(&self, n: usize) -> bool {
        let behind = self.ordering == Ordering::Key && (42..50).contains(&(n % 100));
        !(Self::fails(n) || behind)
    }

    /// Messages a second of those that never fail nor wait for one that does.
    async fn throughput(&self) -> f64 {
        let settings = SubscriptionSettings {
            ordering: self.ordering,
            concurrency: CONCURRENCY,
            callback_timeout: 5 * SERVICE,
            retry: RetrySettings { attempts_max: 3, initial: 100 * MS, ..RetrySettings::IN_PLACE },
            park: RetrySettings {
                initial: SECOND,
                cap: 10 * SECOND,
                attempts_max: 1_000,
                ..RetrySettings::PARKED
            },
            ..base::settings()
        };
        let application = MemoryForwarder::new(|_| Reply::after(SERVICE, 200));
        let mut world = World::new(1, application, settings);
        world.start();
        world.broker.publish(0, base::keyed("m0", "first"));
        world.processed(1).await;
        let began = Instant::now();
        let mut next = began;
        for n in 1..=self.count {
            let id = format!("m{n}");
            match (Self::fails(n), self.fails) {
                (true, Fails::AtOnce) => {
                    world.application.fail(&base::key(&id), Reply::status(500));
                }
                (true, Fails::Hanging) => world.application.fail(&base::key(&id), Reply::Hang),
                _ => {}
            }
            world.broker.publish(0, base::keyed(&id, &format!("k{}", n / 10)));
            if n % PER_TICK == 0 {
                next += TICK;
                sleep_until(next).await;
            }
        }
        sleep(5 * SECOND).await;
        world.application.heal();
        world.processed(self.count + 1).await;
        let posts = world.application.posts();
        self.check(&posts);
        let number = |key: &InboxKey| key.message_id.as_str()[1..].parse().unwrap_or(0);
        let healthy = posts.iter().filter(|post| self.is_healthy(number(&post.key)));
        let times: Vec<Instant> = healthy.filter_map(|post| post.answered_at).collect();
        let last = times.iter().max().copied().unwrap_or(began);
        times.len() as f64 / (last - began).as_secs_f64()
    }

    /// Each was accepted once, those that failed did fail, and lanes kept their order.
    fn check(&self, posts: &[MemoryPost]) {
        let accepted = posts.iter().filter(|post| post.status == Some(200)).count();
        assert_eq!(accepted, self.count + 1);
        let failed = posts.len() - accepted;
        let failing = (1..=self.count).filter(|n| Self::fails(*n)).count();
        match self.fails {
            Fails::Not => assert_eq!(failed, 0),
            _ => assert!(failed >= 3 * failing, "{failed} failures of {failing} messages"),
        }
        if self.ordering == Ordering::Key {
            in_order(posts);
        }
    }
}

/// 1 % of the messages fail for long, at once or hanging: the others keep 95 % of what they had
/// without them, and all of them arrive in the end. `INBOXD_SIM_MESSAGES` says how many there are.
fn healthy_ones_keep_their_throughput(ordering: Ordering) {
    let count = std::env::var("INBOXD_SIM_MESSAGES").ok().and_then(|text| text.parse().ok());
    let count = count.unwrap_or(20_000);
    let run = |fails| paused().block_on(Run { fails, ordering, count }.throughput());
    let alone = run(Fails::Not);
    for fails in [Fails::AtOnce, Fails::Hanging] {
        let beside = run(fails);
        println!("{ordering:?}, {count} messages, {fails:?}: {beside:.0}/s of {alone:.0}/s");
        assert!(beside >= 0.95 * alone, "{fails:?}: {beside:.0}/s of {alone:.0}/s");
    }
}

#[test]
fn messages_that_fail_for_long_take_nobody_s_place() {
    healthy_ones_keep_their_throughput(Ordering::None);
}

#[test]
fn messages_that_fail_for_long_hold_up_their_lanes_alone() {
    healthy_ones_keep_their_throughput(Ordering::Key);
}
