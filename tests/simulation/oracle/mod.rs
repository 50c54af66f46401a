//! What must hold, checked as it happens from three sides: the broker's (what is handed over,
//! acked, forgotten), the database's (every commit), the application's (every POST).
//!
//! The oracle has its own model of the claims and rows, made from the commits alone; it asks
//! neither the engine nor the adapters.

mod commits;
mod model;
mod parking;
mod posts;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use inboxd::engine::{FingerprintOf, OnIdConflict, OnUnrouted, Ordering};
use inboxd_contract::{
    Attempt, ClaimAnswer, DeadReason, Delivery, Fence, Fingerprint, ForwardRequest, InboxKey,
    MessageId, OwnerId, Settled, Settlement, Token, Verdict,
};
use inboxd_memory::{FaultPoint, MemoryBrokerWitness, MemoryChange, MemoryWitness, StoreCall};
use tokio::time::Instant;

use self::parking::Parked;
use super::life::{Life, Signal, Signals};
use super::plan::{KINDS, Plan, Publication, path_of};
use super::report::Stats;
use super::source::place_of;
use super::trace::{Trace, lock};

/// Stream and position: names one published record.
pub type Place = (usize, u64);

/// One published record.
struct Copy {
    key: Option<InboxKey>,
    fingerprint: Option<Fingerprint>,
    body: String,
    kind: &'static str,
    lane: Option<Vec<u8>>,
}

/// A claim as the commits tell it.
struct ModelClaim {
    owner: OwnerId,
    token: Option<Token>,
    expires_at: i64,
}

/// How a claim ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Recorded,
    Released,
    TakenOver,
}

/// One POST.
struct Post {
    key: InboxKey,
    place: Place,
    lane: Option<Vec<u8>>,
    life: Arc<Life>,
    /// Of the delivery; a worker's has none.
    serial: u64,
    attempt: u32,
    token: Option<Token>,
    fingerprint: Option<Fingerprint>,
    begun_at: Option<Instant>,
    /// The caller waits for the answer.
    open: bool,
    /// The application accepted or dropped it.
    accepted: bool,
    refused: bool,
    /// The caller heard a final verdict.
    heard: bool,
    /// The broker's own fence.
    fence: Option<Fence>,
}

/// What is known of a message's attempts.
#[derive(Default)]
struct Attempts {
    /// The number of the last POST that began; 0 again with a dead letter.
    last_begun: u32,
    /// The highest number that was to be POSTed.
    highest: u32,
    /// So many may have been counted without a POST.
    may_skip: u32,
    /// Failures since the last dead letter that say something of the message, each recorded.
    failed: u32,
    /// Such a failure was heard under this token and is not recorded.
    unrecorded: Option<Token>,
    /// The last failure was of that kind.
    says_of_the_message: bool,
    /// The next attempt has this number at most: nobody was there, and the breaker was open.
    repeats: Option<u32>,
}

/// A delivery that the engine has.
struct Held {
    place: Place,
    bytes: usize,
    /// As the process sees it.
    seen: Fence,
    /// As the broker has it.
    outer: Fence,
}

/// What one life holds and did.
#[derive(Default)]
pub struct LifeRecord {
    held: BTreeMap<u64, Held>,
    open_posts: usize,
    pub acks: u64,
    pub acks_with_row: u64,
    pub acks_with_letter: u64,
    pub rows_inserted: u64,
    pub completions_unanswered: u64,
    /// What went back, and when.
    released: Vec<(Place, Instant)>,
    pub cut: bool,
    /// Answers in a row that were none: nobody was there.
    unreached: usize,
    /// Probes since then that found somebody.
    probes_ok: usize,
}

struct State {
    plan: Plan,
    stats: Stats,
    violation: Option<String>,
    copies: BTreeMap<Place, Copy>,
    /// Places by stream and lane, in broker order.
    lanes: BTreeMap<(usize, Vec<u8>), Vec<u64>>,
    claims: BTreeMap<InboxKey, ModelClaim>,
    fates: BTreeMap<Token, Fate>,
    rows: BTreeMap<InboxKey, Option<Fingerprint>>,
    parked: Parked,
    /// Which record a generated id was made for.
    generated: BTreeMap<InboxKey, Place>,
    posts: Vec<Post>,
    attempts: BTreeMap<InboxKey, Attempts>,
    /// When a life held the last delivery of a message.
    last_held: BTreeMap<(String, InboxKey), Instant>,
    lives: BTreeMap<(usize, u64), LifeRecord>,
    next_serial: u64,
    clock_shift: i64,
    clock_jumped_at: Option<Instant>,
}

/// Shared by everything that sees something.
#[derive(Clone)]
pub struct Oracle {
    state: Arc<Mutex<State>>,
    trace: Trace,
    signals: Signals,
    begun_at: Instant,
}

impl Oracle {
    pub fn new(plan: &Plan, trace: Trace, signals: Signals) -> Self {
        let state = State {
            plan: plan.clone(),
            stats: Stats::default(),
            violation: None,
            copies: BTreeMap::new(),
            lanes: BTreeMap::new(),
            claims: BTreeMap::new(),
            fates: BTreeMap::new(),
            rows: BTreeMap::new(),
            parked: Parked::default(),
            generated: BTreeMap::new(),
            posts: Vec::new(),
            attempts: BTreeMap::new(),
            last_held: BTreeMap::new(),
            lives: BTreeMap::new(),
            next_serial: 0,
            clock_shift: 0,
            clock_jumped_at: None,
        };
        Self { state: Arc::new(Mutex::new(state)), trace, signals, begun_at: Instant::now() }
    }

    /// The first broken invariant ends the run.
    pub fn violated(&self, what: fmt::Arguments<'_>) {
        self.fail(&mut lock(&self.state), what);
    }

    fn fail(&self, state: &mut State, what: fmt::Arguments<'_>) {
        self.trace.add("oracle", format_args!("VIOLATION {what}"));
        if state.violation.is_none() {
            state.violation = Some(what.to_string());
            let _ = self.signals.send(Signal::Violated);
        }
    }

    pub fn violation(&self) -> Option<String> {
        lock(&self.state).violation.clone()
    }

    pub fn stats<T>(&self, change: impl FnOnce(&mut Stats) -> T) -> T {
        change(&mut lock(&self.state).stats)
    }

    pub fn life<T>(&self, life: &Life, change: impl FnOnce(&mut LifeRecord) -> T) -> T {
        change(lock(&self.state).life(life))
    }

    /// Calls that change attempts and may end without an answer.
    pub fn may_skip(&self, keys: &[InboxKey]) {
        let mut state = lock(&self.state);
        for key in keys {
            state.attempts.entry(key.clone()).or_default().may_skip += 1;
        }
    }

    /// The answer came.
    pub fn does_not_skip<'a>(&self, keys: impl Iterator<Item = &'a InboxKey>) {
        let mut state = lock(&self.state);
        for key in keys {
            let known = state.attempts.entry(key.clone()).or_default();
            known.may_skip = known.may_skip.saturating_sub(1);
        }
    }

    /// The life is dead: what it had claimed may never be POSTed.
    pub fn ended(&self, life: &Life) {
        let mut state = lock(&self.state);
        let held: Vec<Place> = state.life(life).held.values().map(|held| held.place).collect();
        state.attempts_may_skip(&held);
    }

    /// The same for what was cut just now.
    pub fn was_cut(&self, life: &Life) {
        let mut state = lock(&self.state);
        let record = state.life(life);
        record.cut = true;
        let now = Instant::now();
        let cut: Vec<Place> =
            record.released.iter().filter(|(_, at)| *at == now).map(|(place, _)| *place).collect();
        state.attempts_may_skip(&cut);
    }

    pub fn published(&self, place: Place, publication: &Publication, key: Option<InboxKey>) {
        let mut state = lock(&self.state);
        let of = &state.plan.settings.identity.fingerprint;
        let fingerprint =
            (*of == FingerprintOf::Body).then(|| Fingerprint::of(publication.body.as_bytes()));
        let lane = match state.plan.settings.ordering {
            Ordering::None => None,
            Ordering::Key => publication.lane.as_ref().map(|lane| lane.clone().into_bytes()),
            Ordering::Partition => Some(Vec::new()),
        };
        if let Some(lane) = &lane {
            state.lanes.entry((place.0, lane.clone())).or_default().push(place.1);
        }
        state.stats.messages += 1;
        let body = publication.body.clone();
        let kind = publication.kind;
        state.copies.insert(place, Copy { key, fingerprint, body, kind, lane });
    }

    pub fn clock_moved(&self, micros: i64) {
        let mut state = lock(&self.state);
        state.clock_shift += micros;
        if micros > 0 {
            state.clock_jumped_at = Some(Instant::now());
        }
    }

    pub fn store_failed(&self, life: &Life, call: StoreCall, point: FaultPoint) {
        let mut state = lock(&self.state);
        match point {
            FaultPoint::AfterCommit => state.stats.store_answers_lost += 1,
            _ => state.stats.store_failures += 1,
        }
        self.trace.add(&life.name, format_args!("store: {call:?} will fail {point:?}"));
    }

    // The broker's side.

    /// A delivery is handed to the engine; answers its serial.
    pub fn delivered(&self, life: &Life, place: Place, delivery: &Delivery, seen: Fence) -> u64 {
        let mut state = lock(&self.state);
        state.stats.deliveries += 1;
        state.next_serial += 1;
        let serial = state.next_serial;
        let bytes = delivery.envelope.bytes();
        state
            .life(life)
            .held
            .insert(serial, Held { place, bytes, seen, outer: delivery.fence.clone() });
        if let Some(key) = state.copies[&place].key.clone() {
            state.parked.delivered(&key);
        }
        self.trace.add(&life.name, format_args!("takes {place:?} {}", state.name(place)));
        let (count_max, bytes_max) =
            (state.plan.settings.in_flight_max, state.plan.settings.in_flight_bytes_max);
        let held = &state.life(life).held;
        let count = held.len();
        let sum: usize = held.values().map(|held| held.bytes).sum();
        let largest = held.values().map(|held| held.bytes).max().unwrap_or(0);
        if count > count_max || sum - largest > bytes_max {
            self.fail(
                &mut state,
                format_args!(
                    "I7: {count} deliveries of {sum} bytes held, bounds {count_max} and {bytes_max}"
                ),
            );
        }
        serial
    }

    /// The engine settles.
    pub fn settled(&self, life: &Life, place: Place, serial: u64, settlement: Settlement) {
        let mut state = lock(&self.state);
        state.life(life).held.remove(&serial);
        if let Some(key) = state.copies[&place].key.clone() {
            state.last_held.insert((life.name.clone(), key), Instant::now());
        }
        let name = state.name(place);
        self.trace.add(&life.name, format_args!("{settlement:?} {place:?} {name}"));
        if settlement == Settlement::Release {
            state.stats.releases += 1;
            state.life(life).released.push((place, Instant::now()));
            return;
        }
        let (row, letter) = state.evidence(place);
        let record = state.life(life);
        record.acks += 1;
        record.acks_with_row += u64::from(row);
        record.acks_with_letter += u64::from(letter);
        if !state.is_proven(place) {
            self.fail(
                &mut state,
                format_args!("I1: {place:?} {name} is acked without a committed row or copy of it"),
            );
        }
    }

    // At the end.

    /// Nothing is lost, and what was accepted twice has a reason.
    pub fn check_end(&self) {
        let mut state = lock(&self.state);
        let places: Vec<Place> = state.copies.keys().copied().collect();
        for place in places {
            if !state.is_proven(place) {
                let name = state.name(place);
                self.fail(&mut state, format_args!("I9: {place:?} {name} is lost"));
            }
        }
        let mut doubles = 0;
        let mut unexplained = Vec::new();
        let mut last: BTreeMap<&InboxKey, usize> = BTreeMap::new();
        for (number, post) in state.posts.iter().enumerate().filter(|(_, post)| post.accepted) {
            if let Some(before) = last.insert(&post.key, number) {
                doubles += 1;
                if !state.explains_another(before) {
                    unexplained.push((before, number));
                }
            }
        }
        state.stats.accepted_twice += doubles;
        for (before, after) in unexplained {
            let name = state.name(state.posts[after].place);
            self.fail(&mut state, format_args!(
                "{name} is accepted twice (#{before} and #{after}) without a crash, a lost answer or a lost lease"
            ));
        }
    }
}

impl MemoryBrokerWitness for Oracle {
    fn forgotten(&self, stream: usize, position: u64) {
        let mut state = lock(&self.state);
        let place = (stream, position);
        if !state.is_proven(place) {
            let name = state.name(place);
            self.fail(
                &mut state,
                format_args!("I5: the broker forgets {place:?} {name}, which is not settled"),
            );
        }
    }
}

/// The key of a publication that carries an id.
pub fn key_of(plan: &Plan, publication: &Publication) -> Option<InboxKey> {
    key_of_id(plan, publication.id.as_ref()?)
}

/// The key of an id.
pub fn key_of_id(plan: &Plan, id: &str) -> Option<InboxKey> {
    let message_id = MessageId::from_bytes(id.as_bytes())?;
    Some(InboxKey { consumer_id: plan.settings.consumer_id.clone(), message_id })
}
