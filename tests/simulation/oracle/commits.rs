//! The database's side: every commit, in order.

use inboxd_contract::{Claim, ParkedSeq};

use super::*;

impl MemoryWitness for Oracle {
    fn changed(&self, now: i64, change: MemoryChange<'_>) {
        let mut state = lock(&self.state);
        let state = &mut *state;
        match change {
            MemoryChange::Claimed { owner, request, answer, expires_at } => {
                let (key, token) = (&request.claim.key, request.claim.token);
                self.trace
                    .add("db", format_args!("claim of {} by {owner}: {answer:?}", key.message_id));
                match answer {
                    ClaimAnswer::Parked { .. } => self.let_go(state, now, key, token),
                    _ => self.claimed(state, now, owner, key, token, answer.is_held(), expires_at),
                }
                if matches!(answer, ClaimAnswer::Busy { .. }) {
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
                    state.failure_is_recorded(&claim.key, claim.token);
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
                let settled = !matches!(answer, Settled::Lost(_));
                if completion.supersedes_dead && settled {
                    let fingerprint = completion.record.fingerprint.as_ref();
                    state.parked.make_way(&completion.claim.key, fingerprint);
                }
                self.unparked(state, completion.claim.token, completion.parked, settled);
            }
            MemoryChange::DeadLettered { letter, answer, seq } => {
                self.dead_lettered(state, letter, answer, seq)
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
            MemoryChange::Parked { parking, answer, seq } => {
                self.parked(state, parking, answer, seq);
            }
            MemoryChange::Arrived { arrival, answer, seq } => {
                self.arrived(state, arrival, answer, seq);
            }
            MemoryChange::Taken { owner, taken, expires_at } => {
                self.taken(state, now, owner, taken, expires_at);
            }
            MemoryChange::Rescheduled { reschedule, answer } => {
                let Claim { key, token } = &reschedule.claim;
                self.trace.add("db", format_args!("{} is put off: {answer:?}", key.message_id));
                if !matches!(answer, Settled::Lost(_)) {
                    state.stats.rescheduled += 1;
                    self.must_hold(state, key, *token, "puts off");
                    state.claims.remove(key);
                    state.fates.insert(*token, Fate::Recorded);
                    if !reschedule.attempt_back {
                        state.failure_is_recorded(key, *token);
                    }
                }
            }
            MemoryChange::Unparked { unpark, answer } => {
                let Claim { key, token } = &unpark.claim;
                self.trace.add("db", format_args!("{} goes: {answer:?}", key.message_id));
                if !matches!(answer, Settled::Lost(_)) {
                    self.must_hold(state, key, *token, "removes");
                    state.claims.remove(key);
                    state.fates.insert(*token, Fate::Recorded);
                    if !state.rows.contains_key(key) {
                        self.fail(state, format_args!("I1: {} goes unprocessed", key.message_id));
                    }
                    self.unparked(state, *token, Some(unpark.seq), true);
                }
            }
            MemoryChange::Replayed { replay, answer } => self.replayed(state, replay, answer),
            MemoryChange::Discarded { seq, .. } => self.discarded(state, seq),
        }
    }
}

impl Oracle {
    #[expect(clippy::too_many_arguments, reason = "the columns of a claim")]
    pub(super) fn claimed(
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
            // Taken for the look and removed again, and the attempts of other copies with it.
            state.claims.remove(key);
            state.begins_anew(key);
        }
    }

    /// A claim that was taken for the look, which found a parked copy.
    fn let_go(&self, state: &mut State, now: i64, key: &InboxKey, token: Token) {
        let Some(claim) = state.claims.get_mut(key) else { return };
        let other = claim.token.filter(|other| *other != token);
        if other.is_some() && claim.expires_at > now {
            return;
        }
        claim.token = None;
        if let Some(other) = other {
            state.stats.takeovers += 1;
            state.attempts.entry(key.clone()).or_default().may_skip += 1;
            state.fates.insert(other, Fate::TakenOver);
        }
    }

    /// A taken row leaves with what became of it.
    fn unparked(&self, state: &mut State, token: Token, seq: Option<ParkedSeq>, settled: bool) {
        if !settled {
            return;
        }
        let taken = state.parked.taken.get(&token).copied();
        if taken != seq {
            self.fail(state, format_args!("I4: row {taken:?} was taken and {seq:?} goes"));
        }
        if let Some(seq) = seq {
            state.parked.copies.remove(&seq);
        }
    }

    /// A claim is renewed while its message is under way, and not much longer.
    fn must_be_at_work(&self, state: &mut State, key: &InboxKey, owner: &OwnerId) {
        let patience = state.plan.settings.lease;
        if state.parked.is_worker(state.claims.get(key).and_then(|claim| claim.token)) {
            return;
        }
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

    pub(super) fn must_hold(&self, state: &mut State, key: &InboxKey, token: Token, what: &str) {
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
        seq: Option<ParkedSeq>,
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
        self.letter_written(state, letter, seq);
        // With its claim the message loses its attempts.
        state.begins_anew(key);
    }
}
