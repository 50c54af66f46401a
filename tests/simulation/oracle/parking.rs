//! `inbox_parked` as the commits tell it, what workers do, and dead letters on the broker.

use inboxd::engine::{DeadLetterTo, DeliveryMode, OnDeadLetter, OnMissingId};
use inboxd_contract::{
    Arrival, Arrived, Envelope, LaneId, LetterCopy, NewCopy, ParkedSeq, ParkedState, Parking,
    PublishError, Replay, Replayed, RetryReason, Taken,
};
use inboxd_memory::MemoryLetter;

use super::*;

/// A row of `inbox_parked`.
pub(super) struct ModelCopy {
    pub(super) key: InboxKey,
    pub(super) fingerprint: Option<Fingerprint>,
    pub(super) place: Place,
    pub(super) state: ParkedState,
    pub(super) lane_id: Option<LaneId>,
    pub(super) attempts: u32,
}

impl ModelCopy {
    fn agrees(&self, key: &InboxKey, fingerprint: Option<&Fingerprint>) -> bool {
        self.key == *key && !Fingerprint::conflict(self.fingerprint.as_ref(), fingerprint)
    }
}

/// Everything about parking.
#[derive(Default)]
pub(super) struct Parked {
    pub(super) copies: BTreeMap<ParkedSeq, ModelCopy>,
    /// Which row a token was taken for.
    pub(super) taken: BTreeMap<Token, ParkedSeq>,
    /// Whose lane it is.
    lanes: BTreeMap<LaneId, (usize, Vec<u8>)>,
    /// What was ever a dead letter: order is given up for it.
    pub(super) ever_dead: BTreeSet<(InboxKey, Option<Fingerprint>)>,
    pub(super) ever_dead_places: BTreeSet<Place>,
    /// Records that an operator had forwarded again: order is given up for them.
    replayed: BTreeSet<Place>,
    /// Ids that replays were given, and for which record.
    pub(super) aliases: BTreeMap<InboxKey, Place>,
    /// Records that the broker has as dead letters, and those it will never take.
    published: BTreeSet<Place>,
    refused: BTreeSet<Place>,
    /// When a record was handed over first.
    first_at: BTreeMap<InboxKey, Instant>,
}

impl Parked {
    pub(super) fn delivered(&mut self, key: &InboxKey) {
        self.first_at.entry(key.clone()).or_insert_with(Instant::now);
    }

    /// Rows that are dead letters of this content go.
    pub(super) fn make_way(&mut self, key: &InboxKey, fingerprint: Option<&Fingerprint>) {
        self.copies
            .retain(|_, copy| copy.state == ParkedState::Due || !copy.agrees(key, fingerprint));
    }

    pub(super) fn is_worker(&self, token: Option<Token>) -> bool {
        token.is_some_and(|token| self.taken.contains_key(&token))
    }
}

impl State {
    /// A parked copy of this very record exists, of any state.
    pub(super) fn has_copy(&self, place: Place, is: impl Fn(ParkedState) -> bool) -> bool {
        let record = &self.copies[&place];
        let duplicate = self.plan.settings.identity.on_conflict == OnIdConflict::Duplicate;
        self.parked.copies.values().filter(|copy| is(copy.state)).any(|copy| match &record.key {
            Some(key) => copy.key == *key && (duplicate || copy.fingerprint == record.fingerprint),
            None => copy.place == place,
        })
    }

    /// It was replayed under an id of its own, which is processed or parked.
    pub(super) fn has_alias(&self, place: Place) -> bool {
        let record = &self.copies[&place];
        self.parked.aliases.iter().any(|(alias, of)| {
            let other = &self.copies[of];
            let same = *of == place
                || record.key.is_some()
                    && other.key == record.key
                    && other.fingerprint == record.fingerprint;
            same && (self.rows.contains_key(alias)
                || self.parked.copies.values().any(|copy| copy.key == *alias))
        })
    }

    /// What comes after it in its lane may go.
    pub(super) fn is_decided(&self, place: Place) -> bool {
        let record = &self.copies[&place];
        let duplicate = self.plan.settings.identity.on_conflict == OnIdConflict::Duplicate;
        let dead = match &record.key {
            Some(key) => {
                let mut dead = self.parked.ever_dead.iter();
                dead.any(|(of, print)| of == key && (duplicate || *print == record.fingerprint))
            }
            None => self.parked.ever_dead_places.contains(&place),
        };
        let row = match &record.key {
            Some(key) => self.rows.get(key).is_some_and(|row| {
                duplicate || !Fingerprint::conflict(row.as_ref(), record.fingerprint.as_ref())
            }),
            None => self.evidence(place).0,
        };
        // A copy of it waits in another lane: there is its place.
        let elsewhere = record.key.as_ref().is_some_and(|key| {
            let mut copies = self.parked.copies.values();
            copies.any(|copy| {
                let other = &self.copies[&copy.place];
                let agrees = copy.agrees(key, record.fingerprint.as_ref());
                (agrees || duplicate && copy.key == *key)
                    && (copy.place.0 != place.0 || other.lane != record.lane)
            })
        });
        // Not forwarded at all: where all others are stored, nothing waits for it.
        let settings = &self.plan.settings;
        let is_large = record.body.len() as u64 > settings.body_bytes_max;
        let is_lost =
            record.key.is_none() && settings.identity.on_missing == OnMissingId::DeadLetter;
        let aside = settings.delivery == DeliveryMode::Stored
            && (self.route(place).is_none() || is_large || is_lost);
        dead || row || aside || elsewhere || self.is_replayed(place) || self.has_alias(place)
    }

    /// Order is given up for it.
    pub(super) fn is_replayed(&self, place: Place) -> bool {
        let record = &self.copies[&place];
        self.parked.replayed.iter().any(|other| {
            *other == place || record.key.is_some() && self.copies[other].key == record.key
        })
    }

    /// A dead letter that blocks what comes after it in this lane.
    pub(super) fn halting(&self, place: Place, lane: &[u8]) -> Option<&ModelCopy> {
        self.parked.copies.values().find(|copy| {
            copy.state == ParkedState::Dead
                && copy.place.1 < place.1
                && copy.lane_id.is_some_and(|id| {
                    self.parked
                        .lanes
                        .get(&id)
                        .is_some_and(|(of, key)| *of == place.0 && key == lane)
                })
        })
    }
}

impl Oracle {
    pub(super) fn copy_written(
        &self,
        state: &mut State,
        key: &InboxKey,
        copy: &NewCopy,
        seq: Option<ParkedSeq>,
    ) {
        let place = place_of(&copy.envelope.origin);
        self.check_whole(state, key, &copy.envelope);
        if let Some(id) = copy.lane_id {
            self.check_lane_id(state, id, place);
        }
        let Some(seq) = seq else { return };
        state.parked.make_way(key, copy.fingerprint.as_ref());
        let model = ModelCopy {
            key: key.clone(),
            fingerprint: copy.fingerprint.clone(),
            place,
            state: ParkedState::Due,
            lane_id: copy.lane_id,
            attempts: copy.attempts,
        };
        if state.copies[&place].key.is_none() {
            state.generated.insert(key.clone(), place);
        }
        state.parked.copies.insert(seq, model);
    }

    fn check_whole(&self, state: &mut State, key: &InboxKey, envelope: &Envelope) {
        let place = place_of(&envelope.origin);
        if envelope.body.as_deref() != Some(state.copies[&place].body.as_bytes()) {
            self.fail(state, format_args!("I9: the copy of {} is not whole", key.message_id));
        }
    }

    /// A lane of the database is one lane of the broker.
    fn check_lane_id(&self, state: &mut State, id: LaneId, place: Place) {
        let Some(lane) = state.copies[&place].lane.clone() else {
            return self.fail(state, format_args!("I6: {place:?} waits in a lane and has none"));
        };
        let known = state.parked.lanes.entry(id).or_insert_with(|| (place.0, lane.clone()));
        if *known != (place.0, lane) {
            self.fail(state, format_args!("I6: {place:?} waits in the lane of others"));
        }
    }

    pub(super) fn parked(
        &self,
        state: &mut State,
        parking: &Parking,
        answer: &Settled,
        seq: Option<ParkedSeq>,
    ) {
        let Parking { claim, copy } = parking;
        let id = &claim.key.message_id;
        self.trace.add("db", format_args!("parking of {id} ({:?}): {answer:?}", copy.reason));
        if matches!(answer, Settled::Lost(_)) {
            return;
        }
        self.must_hold(state, &claim.key, claim.token, "parks");
        state.claims.remove(&claim.key);
        state.fates.insert(claim.token, Fate::Recorded);
        state.failure_is_recorded(&claim.key, claim.token);
        if seq.is_none() {
            // A copy that another delivery brought meanwhile stays, with its own count.
            state.begins_anew(&claim.key);
        }
        if *answer == Settled::Done {
            state.stats.parked += 1;
            self.copy_written(state, &claim.key, copy, seq);
        }
    }

    pub(super) fn arrived(
        &self,
        state: &mut State,
        arrival: &Arrival,
        answer: &Arrived,
        seq: Option<ParkedSeq>,
    ) {
        let (key, copy) = (&arrival.key, &arrival.copy);
        let (id, place) = (&key.message_id, place_of(&copy.envelope.origin));
        self.trace
            .add("db", format_args!("arrival of {place:?} {id} ({:?}): {answer:?}", copy.reason));
        if *answer == Arrived::Parked {
            state.stats.arrived += 1;
            self.copy_written(state, key, copy, seq);
        }
    }

    pub(super) fn taken(
        &self,
        state: &mut State,
        now: i64,
        owner: &OwnerId,
        taken: &Taken,
        expires_at: i64,
    ) {
        let Taken { claim, seq, attempts, .. } = taken;
        let id = &claim.key.message_id;
        self.trace.add("db", format_args!("{owner} takes {seq} {id}, attempt {attempts}"));
        state.stats.taken += 1;
        self.claimed(state, now, owner, &claim.key, claim.token, true, expires_at);
        // Until its answer is known to be there.
        state.attempts.entry(claim.key.clone()).or_default().may_skip += 1;
        state.parked.taken.insert(claim.token, *seq);
        let known = state.parked.copies.get(seq);
        let Some(known) = known.filter(|copy| copy.state == ParkedState::Due) else {
            return self.fail(state, format_args!("I4: {id} is taken and is not parked any more"));
        };
        if *attempts <= known.attempts {
            let had = known.attempts;
            return self.fail(
                state,
                format_args!("I9: {id} is taken for attempt {attempts} and had {had} before"),
            );
        }
        let Some(lane) = known.lane_id else { return };
        let ahead = state.parked.copies.range(..*seq).find(|(_, copy)| {
            let in_hand = state
                .claims
                .get(&copy.key)
                .is_some_and(|claim| claim.owner == *owner && state.parked.is_worker(claim.token));
            copy.lane_id == Some(lane) && copy.state != ParkedState::Discarded && !in_hand
        });
        if let Some(ahead) = ahead.map(|(ahead, _)| *ahead) {
            self.fail(state, format_args!("I6: {seq} {id} is taken before {ahead} of its lane"));
        }
    }

    pub(super) fn replayed(&self, state: &mut State, replay: &Replay, answer: &Replayed) {
        self.trace.add("db", format_args!("replay of {}: {answer:?}", replay.seq));
        let Replayed::Due(id) = answer else { return };
        state.stats.replayed += 1;
        let Some(copy) = state.parked.copies.get_mut(&replay.seq) else { return };
        if copy.key.message_id != *id {
            copy.key.message_id = id.clone();
            state.parked.aliases.insert(copy.key.clone(), copy.place);
        }
        copy.state = ParkedState::Due;
        copy.attempts = 0;
        state.parked.replayed.insert(copy.place);
        let attempts = state.attempts.entry(copy.key.clone()).or_default();
        attempts.last_begun = 0;
        attempts.failed = 0;
    }

    pub(super) fn discarded(&self, state: &mut State, seq: ParkedSeq) {
        self.trace.add("db", format_args!("{seq} is discarded"));
        if let Some(copy) = state.parked.copies.get_mut(&seq) {
            copy.state = ParkedState::Discarded;
        }
    }

    /// The rules of a dead letter, at its commit.
    pub(super) fn letter_written(
        &self,
        state: &mut State,
        letter: &inboxd_contract::DeadLetter,
        seq: Option<ParkedSeq>,
    ) {
        let (key, place) = (&letter.key, place_of(&letter.envelope.origin));
        let id = &key.message_id;
        self.check_reason(state, letter);
        let to = state.plan.settings.dead_letter_to;
        let on_broker = state.parked.published.contains(&place);
        if to != DeadLetterTo::Table && !on_broker && !state.parked.refused.contains(&place) {
            self.fail(
                state,
                format_args!("I1: the dead letter of {id} is recorded and not published"),
            );
        }
        let may_lack =
            letter.reason == DeadReason::BodyTooLarge || to == DeadLetterTo::Broker && on_broker;
        if !letter.body_kept && !may_lack {
            self.fail(state, format_args!("I9: the dead letter of {id} has no body"));
        }
        if letter.lane_id.is_some() && state.plan.settings.on_dead_letter == OnDeadLetter::Continue
        {
            self.fail(state, format_args!("the dead letter of {id} blocks its lane"));
        }
        if let Some(lane) = letter.lane_id {
            self.check_lane_id(state, lane, place);
        }
        let Some(seq) = seq else { return };
        let model = ModelCopy {
            key: key.clone(),
            fingerprint: letter.fingerprint.clone(),
            place,
            state: ParkedState::Dead,
            lane_id: letter.lane_id,
            attempts: letter.attempts,
        };
        state.parked.copies.insert(seq, model);
        state.parked.ever_dead.insert((key.clone(), letter.fingerprint.clone()));
        state.parked.ever_dead_places.insert(place);
    }

    /// Attempts and age make a dead letter at their bounds, not before.
    fn check_reason(&self, state: &mut State, letter: &inboxd_contract::DeadLetter) {
        let id = &letter.key.message_id;
        let park = &state.plan.settings.park;
        let known = state.attempts.get(&letter.key);
        match letter.reason {
            DeadReason::AttemptsExhausted => {
                let says = known.is_some_and(|known| known.says_of_the_message);
                let (attempts, most) = (letter.attempts, park.attempts_max);
                if attempts < most {
                    self.fail(
                        state,
                        format_args!(
                            "I9: {id} is a dead letter after {attempts} attempts of {most}"
                        ),
                    );
                } else if !says {
                    self.fail(
                        state,
                        format_args!(
                            "I9: {id} is a dead letter after a failure that says nothing of it"
                        ),
                    );
                }
            }
            DeadReason::TooOld if state.clock_jumped_at.is_none() => {
                let age = state.parked.first_at.get(&letter.key).map(Instant::elapsed);
                let most = park.elapsed_max;
                if age.is_some_and(|age| age + Duration::from_millis(1) < most) {
                    self.fail(
                        state,
                        format_args!(
                            "I9: {id} is a dead letter at an age of {age:?}, below {most:?}"
                        ),
                    );
                }
            }
            _ => {}
        }
    }

    // The broker of dead letters.

    /// It has a copy, confirmed and routed.
    pub fn letter_published(&self, letter: &MemoryLetter) {
        let mut state = lock(&self.state);
        state.stats.letters_published += 1;
        let place = place_of(&letter.envelope.origin);
        self.trace.add("letter", format_args!("{place:?} {} is published", letter.key.message_id));
        self.check_whole(&mut state, &letter.key, &letter.envelope);
        state.parked.published.insert(place);
    }

    /// The publisher hears of it.
    pub fn letter_answered(
        &self,
        life: &Life,
        letter: LetterCopy<'_>,
        answer: &Result<(), PublishError>,
    ) {
        let mut state = lock(&self.state);
        let place = place_of(&letter.envelope.origin);
        if let Err(error) = answer {
            state.stats.letters_failed += 1;
            self.trace.add(&life.name, format_args!("the dead letter of {place:?}: {error}"));
            if error.refused {
                state.parked.refused.insert(place);
            }
        }
    }

    // The breaker.

    /// A process asked whether the application is there.
    pub fn probed(&self, life: &Life, is_well: bool) {
        let mut state = lock(&self.state);
        state.stats.probes += 1;
        if is_well {
            state.life(life).probes_ok += 1;
        }
        let said = if is_well { "it is there" } else { "it is away" };
        self.trace.add(&life.name, format_args!("probes the application: {said}"));
    }

    /// What a process heard, for its breaker and the message's count.
    pub(super) fn heard(&self, state: &mut State, life: &Life, post: usize, verdict: &Verdict) {
        let Post { attempt, token, .. } = state.posts[post];
        let key = state.posts[post].key.clone();
        let settings = &state.plan.settings;
        let (bound, concurrency) = (settings.breaker.failures, settings.concurrency);
        let reason = match verdict {
            Verdict::Retry { reason, .. } => Some(*reason),
            _ => None,
        };
        let nothing = matches!(
            reason,
            Some(
                RetryReason::Unreachable
                    | RetryReason::Overloaded
                    | RetryReason::Endpoint
                    | RetryReason::Gone
            )
        );
        let failed = matches!(verdict, Verdict::Retry { .. } | Verdict::Park { .. });
        let known = state.attempts.entry(key.clone()).or_default();
        // What another instance was answered for good does not undo what this one heard.
        if failed {
            known.says_of_the_message = !nothing;
        }
        if nothing {
            // While the callback rests it is made again under the same number.
            known.last_begun = known.last_begun.min(attempt.saturating_sub(1));
        }
        known.unrecorded = token.filter(|_| failed && !nothing);
        let record = state.life(life);
        if reason != Some(RetryReason::Unreachable) {
            record.unreached = 0;
            record.probes_ok = 0;
            return;
        }
        record.unreached += 1;
        let most = bound as usize + concurrency + record.probes_ok;
        let unreached = record.unreached;
        if bound == 0 || unreached <= bound as usize + concurrency {
            return;
        }
        if unreached > most {
            self.fail(
                state,
                format_args!(
                    "breaker: {unreached} messages were sent in a row although nobody is there, its bound is {bound}"
                ),
            );
        }
        // The breaker is open: this attempt is none.
        state.attempts.entry(key).or_default().repeats = Some(attempt);
    }
}
