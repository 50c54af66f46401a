//! What a run is made of: all of it drawn from one seed before the run begins.
//!
//! A plan can be made smaller (fewer messages, fewer disturbances, gentler application and store)
//! without drawing anything again: that is how a failing seed is shrunk.

use std::time::Duration;

use inboxd::engine::{
    FingerprintOf, OnIdConflict, OnMissingId, OnUnrouted, Ordering, RetrySettings, RouteSettings,
    SubscriptionSettings,
};
use inboxd_memory::{MemoryBrokerOptions, MemoryKind};
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom as _;
use rand::{Rng as _, SeedableRng as _};

use super::base;
use super::parking::{Failing, LetterProfile, Operator};

pub const MS: Duration = Duration::from_millis(1);
pub const SECOND: Duration = Duration::from_secs(1);

/// Bodies above this are dead letters without a body.
pub const BODY_BYTES_MAX: u64 = 120;

/// Types of messages.
pub const KINDS: [&str; 3] = ["created", "changed", "unheard-of"];

/// One message that somebody publishes.
#[derive(Debug, Clone)]
pub struct Publication {
    pub at: Duration,
    pub stream: usize,
    pub id: Option<String>,
    pub lane: Option<String>,
    /// The message's type; routes know the first two of [`KINDS`].
    pub kind: &'static str,
    pub body: String,
}

/// Something that happens to the world once.
#[derive(Debug, Clone)]
pub enum Disturbance {
    /// SIGKILL of a process; the broker notices after `linger`.
    Crash { slot: usize, linger: Duration, back_after: Duration },
    /// The process dies at its n-th step from here on, wherever that is.
    CrashAtStep { slot: usize, steps: i64, linger: Duration, back_after: Duration },
    /// SIGTERM with this grace period.
    Drain { slot: usize, grace: Duration, back_after: Duration },
    /// SIGSTOP and SIGCONT; a member of a group may be expelled meanwhile.
    Freeze { slot: usize, time: Duration, expelled: bool },
    /// The same at its n-th step from here on, so also between a check and what it is for.
    FreezeAtStep { slot: usize, steps: i64, time: Duration, expelled: bool },
    /// One more connection lost.
    Sever { slot: usize },
    /// The broker cannot be reached.
    BrokerAway { time: Duration },
    /// The broker hangs; what was settled meanwhile is lost with the connections.
    BrokerHangs { time: Duration, severed: bool },
    /// A stream is handed over gracefully.
    Revoke { stream: usize },
    /// A member is thrown out of its group.
    Expel { slot: usize },
    /// The database cannot be reached.
    DatabaseAway { time: Duration },
    /// Somebody else's transaction holds a lock on a message's claim or row, then rolls back.
    Lock { id: String, of_claim: bool, time: Duration },
    /// The database's clock is moved; forwards is what leases cannot protect from.
    ClockMoves { micros: i64 },
    /// Connections to the application are refused.
    ApplicationAway { time: Duration },
    /// Somebody has the oldest dead letter forwarded again, or discards it.
    Operator { replay: bool },
}

impl Disturbance {
    /// Which process it happens to, where it is one.
    pub fn slot(&self) -> Option<usize> {
        match *self {
            Self::Crash { slot, .. }
            | Self::CrashAtStep { slot, .. }
            | Self::Drain { slot, .. }
            | Self::Freeze { slot, .. }
            | Self::FreezeAtStep { slot, .. }
            | Self::Sever { slot }
            | Self::Expel { slot } => Some(slot),
            _ => None,
        }
    }
}

/// How likely each kind of answer is, in thousandths.
#[derive(Debug, Clone, Default)]
pub struct ApplicationProfile {
    pub server_error: u32,
    pub busy: u32,
    pub overloaded: u32,
    pub gone: u32,
    pub endpoint: u32,
    pub refused: u32,
    pub dropped: u32,
    pub parked: u32,
    pub answer_lost: u32,
    pub broken: u32,
    pub hangs: u32,
    pub panics: u32,
    pub very_slow: u32,
    /// Not an answer: just then somebody locks the message's claim for longer than a lease.
    pub locked: u32,
    pub slow_max: Duration,
}

/// How likely each fault of a call is, in thousandths.
#[derive(Debug, Clone, Default)]
pub struct StoreProfile {
    pub before_commit: u32,
    pub after_commit: u32,
    pub slow: u32,
    pub hangs: u32,
    pub delay_max: Duration,
}

/// One run.
#[derive(Debug, Clone)]
pub struct Plan {
    pub seed: u64,
    pub broker: MemoryBrokerOptions,
    pub instances: usize,
    pub settings: SubscriptionSettings,
    pub publications: Vec<Publication>,
    pub disturbances: Vec<(Duration, Disturbance)>,
    pub application: ApplicationProfile,
    pub store: StoreProfile,
    pub letters: LetterProfile,
    pub failing: Vec<Failing>,
    pub operator: Operator,
    /// When everything that disturbs ends.
    pub chaos: Duration,
}

impl Plan {
    pub fn draw(seed: u64) -> Self {
        let mut draw = Draw(SmallRng::seed_from_u64(seed));
        let ordering = *draw.one_of(&[
            Ordering::None,
            Ordering::None,
            Ordering::Key,
            Ordering::Key,
            Ordering::Partition,
        ]);
        let broker = draw.broker(ordering);
        let instances = draw.0.random_range(1..=3);
        let settings = draw.settings(ordering);
        let chaos = draw.between(5 * SECOND, 60 * SECOND);
        let publications = draw.publications(&broker, &settings, chaos);
        let disturbances = draw.disturbances(&broker, instances, &publications, chaos, &settings);
        let application = draw.application(&settings);
        let store = draw.store();
        let mut plan = Self {
            seed,
            broker,
            instances,
            settings,
            publications,
            disturbances,
            application,
            store,
            letters: LetterProfile::default(),
            failing: Vec::new(),
            operator: Operator::Discards,
            chaos,
        };
        match draw.0.random_range(0..100) {
            0..20 => plan.contend(&mut draw),
            20..30 => plan.stand_still(&mut draw),
            30..40 => plan.claim_slowly(&mut draw),
            _ => {}
        }
        plan.park(&mut Draw(SmallRng::seed_from_u64(seed ^ 0x0070_6172_6b65_6421)));
        plan
    }

    /// Claims whose answers are late, and that wait for their turn at the application.
    fn claim_slowly(&mut self, draw: &mut Draw) {
        self.instances = self.instances.max(2);
        self.settings.lease = 2 * SECOND;
        self.settings.callback_timeout = 30 * SECOND;
        self.settings.in_flight_max = self.settings.in_flight_max.max(4);
        self.settings.in_flight_bytes_max = 1 << 20;
        self.broker.prefetch = self.broker.prefetch.map(|prefetch| prefetch.max(4));
        self.settings.concurrency = *draw.one_of(&[1, 1, 2]);
        self.application.slow_max = self.settings.lease.mul_f32(0.6);
        self.store.slow = 350;
        self.store.before_commit = 200;
    }

    /// Processes stand still at any step for longer than a lease, while others go on.
    fn stand_still(&mut self, draw: &mut Draw) {
        self.instances = self.instances.max(2);
        self.settings.lease = *draw.one_of(&[2 * SECOND, 5 * SECOND]);
        self.settings.in_flight_max = self.settings.in_flight_max.max(4);
        for first in &self.publications {
            if draw.chance(50) {
                continue;
            }
            let slot = draw.0.random_range(0..self.instances);
            let steps = draw.0.random_range(0..8);
            let lease = self.settings.lease;
            let time = draw.between(lease.mul_f32(0.6), 3 * lease);
            let what = Disturbance::FreezeAtStep { slot, steps, time, expelled: true };
            self.disturbances.push((first.at, what));
        }
        self.disturbances.sort_by_key(|(at, _)| *at);
    }

    /// Every message twice, and claims that run out while they are locked: processes take over
    /// from each other all the time.
    fn contend(&mut self, draw: &mut Draw) {
        self.instances = self.instances.max(draw.0.random_range(2..=3));
        if draw.chance(70) {
            // Where what one gives back goes to another at once.
            self.settings.ordering = Ordering::None;
            self.broker = MemoryBrokerOptions::queue("s");
            self.publications.iter_mut().for_each(|publication| publication.stream = 0);
            self.disturbances.retain(|(_, what)| !matches!(what, Disturbance::Revoke { .. }));
        }
        self.settings.lease = 2 * SECOND;
        self.settings.hold_max = SECOND;
        self.settings.in_flight_max = self.settings.in_flight_max.max(4);
        self.application.server_error = 350;
        self.application.locked = 250;
        self.application.slow_max = SECOND.min(self.settings.callback_timeout.mul_f32(0.8));
        let mut twins = Vec::new();
        for first in &self.publications {
            if first.id.is_none() || draw.chance(50) {
                continue;
            }
            let at = first.at + draw.between(Duration::ZERO, 300 * MS);
            let stream = draw.0.random_range(0..self.broker.streams);
            twins.push(Publication { at, stream, ..first.clone() });
            let at = first.at + draw.between(Duration::ZERO, SECOND);
            let time = draw.between(SECOND, 3 * self.settings.lease);
            let id = first.id.clone().unwrap_or_default();
            self.disturbances.push((at, Disturbance::Lock { id, of_claim: true, time }));
        }
        self.publications.extend(twins);
        self.publications.sort_by_key(|publication| publication.at);
        self.disturbances.sort_by_key(|(at, _)| *at);
    }

    /// The time in which everything must drain once nothing disturbs.
    pub fn calm(&self) -> Duration {
        let settings = &self.settings;
        let longest = settings.retry.cap + settings.park.cap + settings.breaker.probe_cap;
        300 * SECOND + 4 * (settings.lease + settings.callback_timeout + longest)
    }
}

/// Where a type is routed to.
pub fn path_of(kind: &str) -> String {
    format!("/{kind}")
}

pub struct Draw(SmallRng);

impl Draw {
    pub fn one_of<'a, T>(&mut self, choices: &'a [T]) -> &'a T {
        choices.choose(&mut self.0).expect("there are choices")
    }

    pub fn between(&mut self, least: Duration, most: Duration) -> Duration {
        self.0.random_range(least..=most)
    }

    pub fn chance(&mut self, percent: u32) -> bool {
        self.0.random_range(0..100) < percent
    }

    /// A rate in thousandths, present in so many of a hundred runs.
    pub fn rate(&mut self, percent: u32, most: u32) -> u32 {
        if self.chance(percent) { self.0.random_range(1..=most) } else { 0 }
    }

    pub fn number(&mut self, least: usize, most: usize) -> usize {
        self.0.random_range(least..=most)
    }

    fn broker(&mut self, ordering: Ordering) -> MemoryBrokerOptions {
        let mut options = if self.chance(50) {
            let streams = self.0.random_range(1..=3);
            MemoryBrokerOptions::log("s", streams)
        } else {
            let mut queue = MemoryBrokerOptions::queue("s");
            queue.prefetch = Some(*self.one_of(&[1, 4, 16, 64]));
            queue.exclusive = ordering != Ordering::None;
            if !queue.exclusive && self.chance(50) {
                queue.shuffle_seed = Some(self.0.random());
            }
            queue
        };
        options.reconnect_after = self.between(10 * MS, SECOND);
        options.drain_max = self.between(500 * MS, 10 * SECOND);
        options
    }

    fn settings(&mut self, ordering: Ordering) -> SubscriptionSettings {
        let mut settings = base::settings();
        settings.ordering = ordering;
        settings.lease = *self.one_of(&[2 * SECOND, 5 * SECOND, 15 * SECOND]);
        settings.hold_max = *self.one_of(&[SECOND, 10 * SECOND, 600 * SECOND]);
        settings.callback_timeout = *self.one_of(&[SECOND, 5 * SECOND, 30 * SECOND]);
        settings.concurrency = *self.one_of(&[1, 2, 4, 16]);
        settings.in_flight_max = *self.one_of(&[1, 2, 4, 16, 1_024]);
        settings.in_flight_bytes_max = *self.one_of(&[1, 600, 2_000, 1 << 20]);
        settings.body_bytes_max = BODY_BYTES_MAX;
        settings.retry = RetrySettings {
            initial: self.between(10 * MS, 500 * MS),
            factor: 2.0,
            cap: *self.one_of(&[SECOND, 5 * SECOND, 30 * SECOND]),
            ..settings.retry
        };
        settings.identity.on_missing =
            *self.one_of(&[OnMissingId::DeadLetter, OnMissingId::Forward]);
        settings.identity.on_missing_is_explicit = self.chance(70);
        settings.identity.on_conflict =
            *self.one_of(&[OnIdConflict::DeadLetter, OnIdConflict::Duplicate]);
        if self.chance(30) {
            let route = |kind: &&str| RouteSettings {
                name: (*kind).into(),
                message_type: Some((*kind).into()),
                routing_key: None,
                header: None,
                path: path_of(kind).into(),
            };
            settings.routes = KINDS[..2].iter().map(route).collect();
            settings.on_unrouted =
                *self.one_of(&[OnUnrouted::DeadLetter, OnUnrouted::Ignore, OnUnrouted::Forward]);
        }
        if self.chance(15) {
            settings.identity.fingerprint = FingerprintOf::Off;
        }
        settings
    }

    fn publications(
        &mut self,
        broker: &MemoryBrokerOptions,
        settings: &SubscriptionSettings,
        chaos: Duration,
    ) -> Vec<Publication> {
        let count = *self.one_of(&[3_usize, 8, 20, 40]);
        let lanes = self.0.random_range(1..=4);
        let (twins, conflicts, missing, large) =
            (self.rate(60, 400), self.rate(30, 150), self.rate(30, 150), self.rate(30, 100));
        // A newcomer without ids waits for an operator, by design.
        let missing = if settings.identity.on_missing_is_explicit { missing } else { 0 };
        let bursts = self.0.random_range(1..=4);
        let starts: Vec<Duration> =
            (0..bursts).map(|_| self.between(Duration::ZERO, chaos.mul_f32(0.8))).collect();
        let mut made: Vec<Publication> = Vec::new();
        for number in 0..count {
            let at = *self.one_of(&starts) + self.between(Duration::ZERO, 2 * SECOND);
            let stream = self.0.random_range(0..broker.streams);
            let kind = self.0.random_range(0..1_000);
            let with_id: Vec<_> = made.iter().filter(|earlier| earlier.id.is_some()).collect();
            let earlier = with_id.choose(&mut self.0).map(|earlier| (*earlier).clone());
            let lane = Some(format!("lane{}", self.0.random_range(0..lanes)));
            let lane = if self.chance(90) { lane } else { None };
            let kind_of_message = *self.one_of(&KINDS);
            let fresh = Publication {
                at,
                stream,
                id: Some(format!("m{number}")),
                lane,
                kind: kind_of_message,
                body: format!("body {number}"),
            };
            made.push(match earlier {
                // Usually soon after the first, as a publisher that got no confirm does.
                Some(twin) if kind < twins => {
                    let soon = twin.at + self.between(Duration::ZERO, 300 * MS);
                    Publication { at: if self.chance(60) { soon } else { at }, stream, ..twin }
                }
                Some(other) if kind < twins + conflicts => {
                    Publication { at, stream, body: format!("other body {number}"), ..other }
                }
                _ if kind < twins + conflicts => fresh,
                _ if kind < twins + conflicts + missing => {
                    Publication { id: None, kind: KINDS[0], ..fresh }
                }
                _ if kind < twins + conflicts + missing + large => {
                    Publication { body: format!("large body {number:0>200}"), ..fresh }
                }
                _ => fresh,
            });
        }
        made.sort_by_key(|publication| publication.at);
        made
    }

    fn disturbances(
        &mut self,
        broker: &MemoryBrokerOptions,
        instances: usize,
        publications: &[Publication],
        chaos: Duration,
        settings: &SubscriptionSettings,
    ) -> Vec<(Duration, Disturbance)> {
        // A few kinds in each run, often: what is rare everywhere is found nowhere.
        let kinds: Vec<u32> = (0..12).filter(|_| self.chance(25)).collect();
        let log = broker.kind == MemoryKind::Log;
        let mut all = Vec::new();
        let count = if kinds.is_empty() { 0 } else { self.0.random_range(1..=10) };
        for _ in 0..count {
            let at = self.between(Duration::ZERO, chaos);
            let slot = self.0.random_range(0..instances);
            let linger =
                if self.chance(30) { self.between(SECOND, 8 * SECOND) } else { Duration::ZERO };
            let back_after = self.between(10 * MS, 5 * SECOND);
            let time = self.between(100 * MS, 2 * settings.lease);
            let what = match *self.one_of(&kinds) {
                0 => Disturbance::Crash { slot, linger, back_after },
                1 => {
                    let steps = self.0.random_range(1..=60);
                    Disturbance::CrashAtStep { slot, steps, linger, back_after }
                }
                2 => {
                    let grace = *self.one_of(&[Duration::ZERO, 500 * MS, 5 * SECOND, 30 * SECOND]);
                    Disturbance::Drain { slot, grace, back_after }
                }
                3 if self.chance(50) => {
                    let (steps, expelled) = (self.0.random_range(1..=60), self.chance(50));
                    Disturbance::FreezeAtStep { slot, steps, time, expelled }
                }
                3 => Disturbance::Freeze { slot, time, expelled: self.chance(50) },
                4 => Disturbance::Sever { slot },
                5 => Disturbance::BrokerAway { time: self.between(10 * MS, 5 * SECOND) },
                6 => Disturbance::BrokerHangs {
                    time: self.between(10 * MS, 5 * SECOND),
                    severed: self.chance(70),
                },
                7 if log => Disturbance::Revoke { stream: self.0.random_range(0..broker.streams) },
                8 if log => Disturbance::Expel { slot },
                9 => Disturbance::DatabaseAway { time },
                10 if self.chance(50) => {
                    let lease = i64::try_from(settings.lease.as_micros()).unwrap_or(i64::MAX);
                    let back = self.0.random_range(0..=lease);
                    let micros = if self.chance(80) { -back } else { back };
                    Disturbance::ClockMoves { micros }
                }
                10 | 11 => {
                    let id = self.one_of(publications).id.clone().unwrap_or_default();
                    Disturbance::Lock { id, of_claim: self.chance(50), time }
                }
                _ => Disturbance::ApplicationAway { time },
            };
            all.push((at, what));
        }
        all.sort_by_key(|(at, _)| *at);
        all
    }

    fn application(&mut self, settings: &SubscriptionSettings) -> ApplicationProfile {
        // Slower than the timeout is what `very_slow` and `hangs` are for.
        let slow_max = *self.one_of(&[2 * MS, 50 * MS, SECOND, settings.lease]);
        let slow_max = slow_max.min(settings.callback_timeout.mul_f32(0.8));
        ApplicationProfile {
            server_error: self.rate(35, 400),
            busy: self.rate(20, 200),
            overloaded: self.rate(20, 200),
            gone: self.rate(8, 60),
            endpoint: self.rate(10, 100),
            refused: self.rate(35, 200),
            dropped: self.rate(20, 100),
            parked: self.rate(10, 100),
            answer_lost: self.rate(25, 200),
            broken: self.rate(20, 200),
            hangs: self.rate(15, 60),
            panics: self.rate(10, 60),
            very_slow: self.rate(25, 150),
            locked: 0,
            slow_max,
        }
    }

    fn store(&mut self) -> StoreProfile {
        StoreProfile {
            before_commit: self.rate(30, 200),
            after_commit: self.rate(35, 250),
            slow: self.rate(25, 150),
            hangs: self.rate(8, 20),
            delay_max: *self.one_of(&[Duration::ZERO, MS, 20 * MS]),
        }
    }
}
