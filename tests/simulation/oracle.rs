//! What must hold, checked as it happens from three sides: the broker's (what is handed over,
//! acked, forgotten), the database's (every commit), the application's (every POST).
//!
//! The oracle has its own model of the claims and rows, made from the commits alone; it asks
//! neither the engine nor the adapters.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use inboxd::engine::{FingerprintOf, OnIdConflict, OnUnrouted, Ordering};
use inboxd_contract::{
    Attempt, DeadReason, Delivery, Fence, Fingerprint, ForwardRequest, InboxKey, MessageId,
    OwnerId, Settled, Settlement, Token, Verdict,
};
use inboxd_memory::{FaultPoint, MemoryBrokerWitness, MemoryChange, MemoryWitness, StoreCall};
use tokio::time::Instant;

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
    serial: u64,
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
    letters: BTreeSet<(InboxKey, Option<Fingerprint>)>,
    letter_keys: BTreeSet<InboxKey>,
    letter_places: BTreeSet<Place>,
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
            letters: BTreeSet::new(),
            letter_keys: BTreeSet::new(),
            letter_places: BTreeSet::new(),
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
                format_args!(
                    "I1: {place:?} {name} is acked without a committed row or dead letter of it"
                ),
            );
        }
    }

    // The application's side.

    /// The engine has decided to POST; answers the POST's number.
    pub fn forward_called(&self, life: &Arc<Life>, request: &ForwardRequest<'_>) -> usize {
        let mut state = lock(&self.state);
        let place = place_of(&request.envelope.origin);
        let key = request.key.clone();
        let copy = &state.copies[&place];
        let (lane, fingerprint) = (copy.lane.clone(), copy.fingerprint.clone());
        let own_key = copy.key.clone();
        let name = state.name(place);
        self.trace
            .add(&life.name, format_args!("forwards {place:?} {name} attempt {}", request.attempt));
        if own_key.is_none() {
            state.generated.insert(key.clone(), place);
        } else if own_key.as_ref() != Some(&key) {
            self.fail(&mut state, format_args!("I9: {name} is forwarded as {}", key.message_id));
        }
        let held = state.life(life).held.iter().rev().find(|(_, held)| held.place == place);
        let held =
            held.map(|(serial, held)| (*serial, Some(held.seen.clone()), Some(held.outer.clone())));
        let (serial, seen, fence) = held.unwrap_or((0, None, None));
        self.check_start(&mut state, life, &name, &key, seen.as_ref());
        self.check_lane(&mut state, life, place, lane.as_deref(), &name);
        self.check_attempt(&mut state, &key, request.attempt, &name);
        let route = state.route(place);
        if route.as_ref().map(Option::as_deref) != Some(request.path) {
            self.fail(
                &mut state,
                format_args!("{name} is forwarded to {:?}, its route is {route:?}", request.path),
            );
        }
        let again = state
            .posts
            .iter()
            .any(|post| Arc::ptr_eq(&post.life, life) && post.serial == serial && post.heard);
        if again {
            self.fail(
                &mut state,
                format_args!("what the application decided about {name} is asked again"),
            );
        }
        let token = state.claims.get(&key).and_then(|claim| claim.token);
        let concurrency = state.plan.settings.concurrency;
        let open_posts = &mut state.life(life).open_posts;
        *open_posts += 1;
        let open_posts = *open_posts;
        if open_posts > concurrency {
            self.fail(
                &mut state,
                format_args!("I7: {open_posts} POSTs at once, bound {concurrency}"),
            );
        }
        state.stats.posts += 1;
        state.posts.push(Post {
            key,
            place,
            lane,
            life: life.clone(),
            serial,
            token,
            fingerprint,
            begun_at: None,
            open: true,
            accepted: false,
            refused: false,
            heard: false,
            fence,
        });
        state.posts.len() - 1
    }

    /// I3, I4 and the fence, at the moment of the decision.
    fn check_start(
        &self,
        state: &mut State,
        life: &Life,
        name: &str,
        key: &InboxKey,
        fence: Option<&Fence>,
    ) {
        let now = self.database_now(state);
        // Leases protect as far as the database's clock goes as fast as ours.
        let excused = state.clock_jumped_at.is_some_and(|at| {
            at.elapsed() <= 2 * state.plan.settings.lease + Duration::from_secs(1)
        });
        if excused {
            state.stats.excused_by_clock += 1;
        } else if state.rows.contains_key(key) {
            self.fail(state, format_args!("I3: {name} is forwarded although its row is committed"));
        } else {
            let held = state.claims.get(key).is_some_and(|claim| {
                claim.owner == life.owner && claim.token.is_some() && claim.expires_at > now
            });
            if !held {
                self.fail(state, format_args!("I3: {name} is forwarded without a claim in force"));
            }
        }
        if fence.is_none_or(|fence| !fence.is_open()) {
            self.fail(state, format_args!("{name} is forwarded although its fence is closed"));
        }
    }

    fn database_now(&self, state: &State) -> i64 {
        i64::try_from(self.begun_at.elapsed().as_micros()).unwrap_or(i64::MAX) + state.clock_shift
    }

    /// I6: everything before it in its lane is decided, and nobody else of the lane is at it.
    fn check_lane(
        &self,
        state: &mut State,
        life: &Arc<Life>,
        place: Place,
        lane: Option<&[u8]>,
        name: &str,
    ) {
        let Some(lane) = lane else { return };
        let earlier: Vec<u64> = state.lanes[&(place.0, lane.to_vec())]
            .iter()
            .copied()
            .filter(|position| *position < place.1)
            .collect();
        let open = earlier.into_iter().find(|position| !state.is_proven((place.0, *position)));
        if let Some(position) = open {
            self.fail(
                state,
                format_args!(
                    "I6: {name} at {} is forwarded before {position} of its lane is decided",
                    place.1
                ),
            );
        }
        let other = state.posts.iter().find(|post| {
            let same_life = Arc::ptr_eq(&post.life, life);
            // Across instances only as far as the broker says whose the stream is.
            let lost = post.life.is_dead() || post.fence.as_ref().is_none_or(Fence::is_lost);
            post.open
                && post.place.0 == place.0
                && post.lane.as_deref() == Some(lane)
                && (same_life || !lost)
        });
        if let Some(other) = other.map(|other| other.place) {
            self.fail(
                state,
                format_args!("I6: {name} is forwarded while {other:?} of its lane is"),
            );
        }
    }

    /// Attempts grow with each POST, and by one where nothing was lost.
    fn check_attempt(&self, state: &mut State, key: &InboxKey, attempt: u32, name: &str) {
        let excused = state.clock_jumped_at.is_some();
        let known = state.attempts.entry(key.clone()).or_default();
        let (last, highest) = (known.last_begun, known.highest);
        let skipped = attempt.saturating_sub(highest + 1);
        let skips = skipped > known.may_skip;
        known.may_skip = known.may_skip.saturating_sub(skipped);
        known.highest = highest.max(attempt);
        if attempt <= last && !excused {
            self.fail(state, format_args!("I9: {name}: attempt {attempt} after attempt {last}"));
        }
        if skips {
            self.fail(
                state,
                format_args!("I9: {name}: attempt {attempt} after {highest} skips one"),
            );
        }
    }

    /// The application has the request.
    pub fn begun(&self, post: usize, attempt: u32) {
        let mut state = lock(&self.state);
        let key = state.posts[post].key.clone();
        state.posts[post].begun_at = Some(Instant::now());
        let last = state.attempts.entry(key.clone()).or_default();
        last.last_begun = attempt.max(last.last_begun);
        if state.rows.contains_key(&key) {
            // Between the last check and the write: the documented window.
            state.stats.residual += 1;
            self.trace.add("app", format_args!("#{post} begins in the residual window"));
        }
    }

    pub fn decided(&self, post: usize, verdict: &Verdict, heard: bool) {
        let mut state = lock(&self.state);
        let taken = matches!(verdict, Verdict::Accepted { .. } | Verdict::Drop { .. });
        state.posts[post].accepted = taken;
        state.posts[post].refused = matches!(verdict, Verdict::Refused { .. });
        state.stats.accepted += u64::from(taken);
        state.stats.answers_lost += u64::from(!heard);
        let name = state.name(state.posts[post].place);
        let what = verdict.as_str();
        self.trace.add(
            "app",
            format_args!(
                "#{post} {name}: {what}{}",
                if heard { "" } else { ", the answer is lost" }
            ),
        );
    }

    /// The caller has its verdict.
    pub fn answered(&self, life: &Life, post: usize, verdict: &Verdict) {
        let mut state = lock(&self.state);
        state.posts[post].open = false;
        state.posts[post].heard = !matches!(verdict, Verdict::Retry { .. } | Verdict::Park { .. });
        state.life(life).open_posts -= 1;
        let what = verdict.as_str();
        self.trace.add(&life.name, format_args!("hears of #{post}: {what}"));
    }

    /// The caller is gone: crashed, cut, or panicked.
    pub fn abandoned(&self, life: &Life, post: usize) {
        let mut state = lock(&self.state);
        state.posts[post].open = false;
        state.life(life).open_posts -= 1;
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

impl State {
    fn life(&mut self, life: &Life) -> &mut LifeRecord {
        self.lives.entry((life.slot, life.number)).or_default()
    }

    fn attempts_may_skip(&mut self, places: &[Place]) {
        for place in places {
            if let Some(key) = self.copies[place].key.clone() {
                self.attempts.entry(key).or_default().may_skip += 1;
            }
        }
    }

    fn name(&self, place: Place) -> String {
        match self.copies.get(&place).map(|copy| &copy.key) {
            Some(Some(key)) => key.message_id.as_str().chars().take(40).collect(),
            Some(None) => "(no id)".into(),
            None => "(unknown)".into(),
        }
    }

    /// The path that a record is forwarded to, `Some(None)` being the callback's own; `None`: it is
    /// not forwarded at all.
    fn route(&self, place: Place) -> Option<Option<String>> {
        let settings = &self.plan.settings;
        let kind = self.copies[&place].kind;
        if settings.routes.is_empty() {
            return Some(None);
        }
        match KINDS[..2].contains(&kind) {
            true => Some(Some(path_of(kind))),
            false => (settings.on_unrouted == OnUnrouted::Forward).then_some(None),
        }
    }

    /// The configuration ignores such messages, and one with this content exists.
    fn is_ignored(&self, key: &InboxKey, fingerprint: Option<&Fingerprint>) -> bool {
        self.plan.settings.on_unrouted == OnUnrouted::Ignore
            && self.copies.iter().any(|(place, copy)| {
                copy.key.as_ref() == Some(key)
                    && copy.fingerprint.as_ref() == fingerprint
                    && self.route(*place).is_none()
            })
    }

    /// Whether a row, and whether a dead letter of this record's message exists.
    fn evidence(&self, place: Place) -> (bool, bool) {
        let copy = &self.copies[&place];
        match &copy.key {
            Some(key) => (self.rows.contains_key(key), self.letter_keys.contains(key)),
            None => {
                let mut made = self.generated.iter().filter(|(_, of)| **of == place);
                (
                    made.any(|(key, _)| self.rows.contains_key(key)),
                    self.letter_places.contains(&place),
                )
            }
        }
    }

    /// A proof of this very record is committed.
    fn is_proven(&self, place: Place) -> bool {
        let copy = &self.copies[&place];
        let Some(key) = &copy.key else {
            let (row, letter) = self.evidence(place);
            return row || letter;
        };
        let duplicate = self.plan.settings.identity.on_conflict == OnIdConflict::Duplicate;
        let row = self.rows.get(key).is_some_and(|row| {
            duplicate || !Fingerprint::conflict(row.as_ref(), copy.fingerprint.as_ref())
        });
        row || self.letters.contains(&(key.clone(), copy.fingerprint.clone()))
    }

    /// An accepted POST may be followed by another: its answer was not heard, its process ended,
    /// or its claim was taken over.
    fn explains_another(&self, post: usize) -> bool {
        let post = &self.posts[post];
        let cut = self.lives.get(&(post.life.slot, post.life.number)).is_none_or(|life| life.cut);
        let ended = post.life.is_dead() || cut;
        let lost = post.token.is_none_or(|token| self.fates.get(&token) == Some(&Fate::TakenOver));
        !post.heard || ended || lost || self.clock_jumped_at.is_some()
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

impl MemoryWitness for Oracle {
    fn changed(&self, now: i64, change: MemoryChange<'_>) {
        let mut state = lock(&self.state);
        let state = &mut *state;
        match change {
            MemoryChange::Claimed { owner, request, answer, expires_at } => {
                let (key, token) = (&request.claim.key, request.claim.token);
                self.trace
                    .add("db", format_args!("claim of {} by {owner}: {answer:?}", key.message_id));
                self.claimed(state, now, owner, key, token, answer.is_held(), expires_at);
                if matches!(answer, inboxd_contract::ClaimAnswer::Busy { .. }) {
                    state.stats.busy += 1;
                }
            }
            MemoryChange::Renewed { claim, expires_at } => match state.claims.get_mut(&claim.key) {
                Some(model) if model.token == Some(claim.token) => {
                    model.expires_at = expires_at;
                    let owner = model.owner.clone();
                    self.must_be_at_work(state, &claim.key, &owner);
                }
                _ => self.fail(
                    state,
                    format_args!("I4: a lost claim of {} is renewed", claim.key.message_id),
                ),
            },
            MemoryChange::Counted { claim, answer } => {
                if let Attempt::Counted(attempts) = answer {
                    self.must_hold(state, &claim.key, claim.token, "counts");
                    self.trace
                        .add("db", format_args!("attempt {attempts} of {}", claim.key.message_id));
                }
            }
            MemoryChange::Completed { completion, answer } => {
                self.completed(
                    state,
                    &completion.claim.key,
                    completion.claim.token,
                    completion.record.fingerprint.as_ref(),
                    answer,
                );
                if completion.supersedes_dead && matches!(answer, Settled::Done) {
                    let fingerprint = completion.record.fingerprint.clone();
                    let key = &completion.claim.key;
                    state.letters.retain(|(of, letter)| {
                        of != key || Fingerprint::conflict(letter.as_ref(), fingerprint.as_ref())
                    });
                }
            }
            MemoryChange::DeadLettered { letter, answer } => {
                self.dead_lettered(state, letter, answer)
            }
            MemoryChange::Released { release, answer } => {
                let key = &release.claim.key;
                if *answer == Settled::Done {
                    self.trace.add("db", format_args!("release of {}", key.message_id));
                    self.must_hold(state, key, release.claim.token, "releases");
                    state.fates.insert(release.claim.token, Fate::Released);
                    if let Some(model) = state.claims.get_mut(key) {
                        model.token = None;
                    }
                }
            }
        }
    }
}

impl Oracle {
    #[expect(clippy::too_many_arguments, reason = "the columns of a claim")]
    fn claimed(
        &self,
        state: &mut State,
        now: i64,
        owner: &OwnerId,
        key: &InboxKey,
        token: Token,
        held: bool,
        expires_at: i64,
    ) {
        let before = state.claims.get(key);
        let other = before.and_then(|claim| claim.token.filter(|other| *other != token));
        let in_force = before.is_some_and(|claim| claim.expires_at > now);
        if let Some(other) = other
            && (held || !in_force)
        {
            if in_force {
                self.fail(
                    state,
                    format_args!(
                        "I4: the claim of {} is taken by {owner} while another is in force",
                        key.message_id
                    ),
                );
            }
            state.stats.takeovers += 1;
            state.attempts.entry(key.clone()).or_default().may_skip += 1;
            state.fates.insert(other, Fate::TakenOver);
        }
        if held {
            let model = ModelClaim { owner: owner.clone(), token: Some(token), expires_at };
            state.claims.insert(key.clone(), model);
        } else if other.is_none() || !in_force {
            // Taken for the look and removed again.
            state.claims.remove(key);
        }
    }

    /// A claim is renewed while its message is under way, and not much longer.
    fn must_be_at_work(&self, state: &mut State, key: &InboxKey, owner: &OwnerId) {
        let patience = state.plan.settings.lease;
        let Some(at) = state.last_held.get(&(owner.0.to_string(), key.clone())) else { return };
        let long_ago = at.elapsed() > patience;
        let number = owner.0.rsplit('.').next().and_then(|number| number.parse::<u64>().ok());
        let life = state.lives.iter().find(|((_, other), _)| Some(*other) == number);
        let held = life.is_some_and(|(_, life)| {
            let mut places = life.held.values().map(|held| held.place);
            places.any(|place| state.copies[&place].key.as_ref() == Some(key))
        });
        if long_ago && !held {
            self.fail(
                state,
                format_args!(
                    "I8: {owner} renews its claim of {}, which it gave back long ago",
                    key.message_id
                ),
            );
        }
    }

    fn must_hold(&self, state: &mut State, key: &InboxKey, token: Token, what: &str) {
        if state.claims.get(key).and_then(|claim| claim.token) != Some(token) {
            self.fail(
                state,
                format_args!("I4: a holder whose claim is lost {what} {}", key.message_id),
            );
        }
    }

    fn completed(
        &self,
        state: &mut State,
        key: &InboxKey,
        token: Token,
        fingerprint: Option<&Fingerprint>,
        answer: &Settled,
    ) {
        self.trace.add("db", format_args!("completion of {}: {answer:?}", key.message_id));
        if matches!(answer, Settled::Lost(_)) {
            return;
        }
        self.must_hold(state, key, token, "completes");
        let owner = state.claims.remove(key).map(|claim| claim.owner);
        state.fates.insert(token, Fate::Recorded);
        if *answer != Settled::Done {
            return;
        }
        let accepted = state.posts.iter().any(|post| {
            post.key == *key && post.accepted && post.fingerprint.as_ref() == fingerprint
        });
        if !accepted && !state.is_ignored(key, fingerprint) {
            self.fail(
                state,
                format_args!(
                    "I2: the row of {} is committed before the application accepted or dropped it",
                    key.message_id
                ),
            );
        }
        state.rows.insert(key.clone(), fingerprint.cloned());
        let of = state.lives.iter_mut().find(|((slot, number), _)| {
            owner.as_ref().is_some_and(|owner| *owner.0 == *format!("i{slot}.{number}"))
        });
        if let Some((_, life)) = of {
            life.rows_inserted += 1;
        }
    }

    fn dead_lettered(
        &self,
        state: &mut State,
        letter: &inboxd_contract::DeadLetter,
        answer: &Settled,
    ) {
        let key = &letter.key;
        self.trace.add(
            "db",
            format_args!("dead letter of {} ({:?}): {answer:?}", key.message_id, letter.reason),
        );
        if matches!(answer, Settled::Lost(_)) {
            return;
        }
        if let Some(token) = letter.token {
            self.must_hold(state, key, token, "dead-letters");
            state.claims.remove(key);
            state.fates.insert(token, Fate::Recorded);
        }
        if *answer != Settled::Done {
            return;
        }
        let place = place_of(&letter.envelope.origin);
        state.stats.dead_letters += 1;
        let refused = state.posts.iter().any(|post| post.key == *key && post.refused);
        if letter.reason == DeadReason::Refused && !refused {
            self.fail(
                state,
                format_args!("{} is a dead letter that nobody refused", key.message_id),
            );
        }
        let copy = &state.copies[&place];
        let kept = letter.envelope.body.as_deref() == Some(copy.body.as_bytes());
        if letter.body_kept && !kept {
            self.fail(
                state,
                format_args!("I9: the dead letter of {} is not whole", key.message_id),
            );
        }
        state.letters.insert((key.clone(), letter.fingerprint.clone()));
        state.letter_keys.insert(key.clone());
        state.letter_places.insert(place);
        // With its claim the message loses its attempts.
        state.attempts.entry(key.clone()).or_default().last_begun = 0;
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
