//! Parking, arrivals, and what workers do to due rows, one step at a time.

use std::collections::BTreeSet;
use std::time::Duration;

use inboxd_contract::{
    Arrival, ArrivalStep, Arrived, Claim, DeadLetter, Envelope, InboxKey, LaneId, NewCopy, OwnerId,
    ParkedCopy, ParkedSeq, ParkedState, Parking, Reschedule, Settled, StoreError, TakeDue, Taken,
    TakenBatch, Token, Unpark,
};

use super::copies::ParkedRow;
use super::rows::{ClaimRow, Rows, micros};
use super::witness::{MemoryChange, MemoryFlaw};

impl Rows {
    pub(super) fn park(&mut self, parking: &Parking) -> Result<Settled, StoreError> {
        let (answer, seq) = self.park_one(parking)?;
        self.tell(MemoryChange::Parked { parking, answer: &answer, seq });
        Ok(answer)
    }

    fn park_one(&mut self, parking: &Parking) -> Result<(Settled, Option<ParkedSeq>), StoreError> {
        let Parking { claim, copy } = parking;
        self.admit(&claim.key)?;
        if !self.has(MemoryFlaw::ParkWithoutToken) && !self.holds(&claim.key, claim.token) {
            return Ok((Settled::Lost(self.look(&claim.key, None)), None));
        }
        if !self.has(MemoryFlaw::ParkKeepsClaim) {
            self.claims.remove(&claim.key);
        }
        if self.messages.contains_key(&claim.key) {
            return Ok((self.already_processed(&claim.key), None));
        }
        self.make_way(&claim.key, copy);
        let meets = self.copies.same(&claim.key, copy.fingerprint.as_ref()).is_some();
        let seq = (!meets).then(|| self.insert_copy(&claim.key, copy));
        Ok((Settled::Done, seq))
    }

    /// Removes dead letters of this content.
    fn make_way(&mut self, key: &InboxKey, copy: &NewCopy) {
        let fingerprint = copy.fingerprint.as_ref();
        self.copies.remove_of(key, |row| !row.is_due() && row.agrees(fingerprint));
    }

    fn insert_copy(&mut self, key: &InboxKey, copy: &NewCopy) -> ParkedSeq {
        let seq = self.copies.next_seq();
        let row = ParkedRow {
            seq,
            key: key.clone(),
            state: ParkedState::Due,
            position: copy.envelope.origin.position(),
            copy: ParkedCopy {
                subscription: copy.subscription.to_string(),
                envelope: Envelope::clone(&copy.envelope),
                fingerprint: copy.fingerprint.clone(),
                lane: copy.lane.clone(),
                attempts: copy.attempts,
                last_status: copy.last_status,
                last_error: copy.last_error.clone(),
                reason: copy.reason.into(),
            },
            lane_id: copy.lane_id,
            body_kept: true,
            due_at: self.now + micros(copy.delay),
            first_at: self.now - micros(copy.first_ago),
            parked_at: self.now,
        };
        self.copies.put(row);
        seq
    }

    /// One transaction: all of them, or an error and nothing.
    pub(super) fn arrive(&mut self, arrivals: &[Arrival]) -> Result<Vec<Arrived>, StoreError> {
        // Somebody who is just parking one of them has begun with its claim.
        for Arrival { key, .. } in arrivals {
            self.admit(key)?;
        }
        let mut order: Vec<usize> = (0..arrivals.len()).collect();
        if self.has(MemoryFlaw::ArriveBackwards) {
            order.reverse();
        }
        let mut answers = vec![Arrived::Parked; arrivals.len()];
        for index in order {
            let arrival = &arrivals[index];
            let look = self.look(&arrival.key, None);
            let mut seq = None;
            answers[index] = match arrival.resolve(&look) {
                ArrivalStep::Answer(answer) => answer,
                step => {
                    if step == ArrivalStep::Replace {
                        self.make_way(&arrival.key, &arrival.copy);
                    }
                    seq = Some(self.insert_copy(&arrival.key, &arrival.copy));
                    Arrived::Parked
                }
            };
            self.tell(MemoryChange::Arrived { arrival, answer: &answers[index], seq });
        }
        Ok(answers)
    }

    pub(super) fn take_due(
        &mut self,
        owner: &OwnerId,
        lease: Duration,
        request: &TakeDue,
    ) -> TakenBatch {
        let (mut runs, mut later) = self.candidates(request);
        let mut tokens = request.tokens.iter();
        let mut batch = TakenBatch::default();
        let mut bytes = 0;
        runs.reverse();
        while let Some(run) = runs.pop() {
            for seq in run {
                let Some(row) = self.copies.get(seq).filter(|row| self.is_free(&row.key)) else {
                    break;
                };
                let token = (bytes < request.bytes_max).then(|| tokens.next()).flatten();
                let Some(token) = token else {
                    later = Some(Duration::ZERO);
                    runs.clear();
                    break;
                };
                bytes += row.copy.envelope.body.as_ref().map_or(0, |body| body.len() as u64);
                let taken = self.take_one(owner, lease, *token, seq);
                batch.rows.extend(taken);
            }
        }
        batch.next_in = later;
        batch
    }

    /// What may be taken now, run by run, and when the next head is due that is not yet.
    fn candidates(&self, request: &TakeDue) -> (Vec<Vec<ParkedSeq>>, Option<Duration>) {
        let blind = self.has(MemoryFlaw::TakeBlocked);
        let mut alone = Vec::new();
        let mut lanes: BTreeSet<LaneId> = BTreeSet::new();
        let mut later = None;
        for row in self.copies.due(&request.consumer_id, &request.subscription) {
            let lane = row.lane_id.filter(|_| !blind);
            if row.due_at > self.now {
                let first = |lane| self.copies.lane(lane).next().map(|head| head.seq);
                let head = lane.as_ref().is_none_or(|lane| first(lane) == Some(row.seq));
                if head && self.is_free(&row.key) {
                    later = u64::try_from(row.due_at - self.now).ok().map(Duration::from_micros);
                    break;
                }
                continue;
            }
            match lane {
                Some(lane) => drop(lanes.insert(lane)),
                None if self.is_open(row) => alone.push(vec![row.seq]),
                None => {}
            }
        }
        let from = request.lanes_from;
        let around = lanes.range(from..).chain(lanes.range(..from));
        let runs = around.map(|lane| self.run(lane, request)).filter(|run| !run.is_empty());
        (alternate(alone, runs), later)
    }

    /// A lane's head and what follows it without a gap.
    fn run(&self, lane: &LaneId, request: &TakeDue) -> Vec<ParkedSeq> {
        self.copies
            .lane(lane)
            .take_while(|row| {
                row.is_due()
                    && row.due_at <= self.now
                    && self.is_open(row)
                    && row.key.consumer_id == request.consumer_id
                    && *row.copy.subscription == *request.subscription
            })
            .take(request.run_max)
            .map(|row| row.seq)
            .collect()
    }

    /// Nobody has the row or its key.
    fn is_open(&self, row: &ParkedRow) -> bool {
        self.is_free(&row.key) && !self.locked_copies.contains(&row.seq)
    }

    /// Nobody holds the key's claim, and nobody has it locked.
    fn is_free(&self, key: &InboxKey) -> bool {
        let held = |row: &ClaimRow| row.token.is_some() && row.expires_at > self.now;
        !self.claims.get(key).is_some_and(held) && !self.locked_claims.contains(key)
    }

    fn take_one(
        &mut self,
        owner: &OwnerId,
        lease: Duration,
        token: Token,
        seq: ParkedSeq,
    ) -> Option<Taken> {
        let row = self.copies.get(seq)?.clone();
        let counted = self.claims.get(&row.key).map_or(0, |claim| claim.attempts);
        let attempts = row.copy.attempts.max(counted) + 1;
        let expires_at = self.now + micros(lease);
        let claim = ClaimRow { owner: owner.clone(), token: Some(token), attempts, expires_at };
        self.claims.insert(row.key.clone(), claim);
        let look = self.look(&row.key, None);
        let taken = Taken {
            claim: Claim { key: row.key, token },
            seq,
            attempts,
            lane_id: row.lane_id,
            copy: row.copy,
            first_ago: self.ago(row.first_at),
            processed: look.processed,
        };
        self.tell(MemoryChange::Taken { owner, taken: &taken, expires_at });
        Some(taken)
    }

    pub(super) fn reschedule(&mut self, reschedule: &Reschedule) -> Result<Settled, StoreError> {
        let answer = self.reschedule_one(reschedule)?;
        self.tell(MemoryChange::Rescheduled { reschedule, answer: &answer });
        Ok(answer)
    }

    fn reschedule_one(&mut self, reschedule: &Reschedule) -> Result<Settled, StoreError> {
        let Claim { key, token } = &reschedule.claim;
        self.admit(key)?;
        if !self.has(MemoryFlaw::RescheduleWithoutToken) && !self.holds(key, *token) {
            return Ok(Settled::Lost(self.look(key, None)));
        }
        self.admit_copy(reschedule.seq)?;
        let counted = self.claims.remove(key).map_or(0, |row| row.attempts);
        let Some(mut row) = self.due_row(key, reschedule.seq) else { return Ok(Settled::Done) };
        let counted = counted.saturating_sub(u32::from(reschedule.attempt_back));
        if !self.has(MemoryFlaw::RescheduleForgetsAttempts) {
            row.copy.attempts = row.copy.attempts.max(counted);
        }
        row.due_at = self.now + micros(reschedule.delay);
        if !reschedule.attempt_back {
            row.copy.last_status = reschedule.last_status;
            row.copy.last_error = reschedule.last_error.clone();
        }
        self.copies.put(row);
        Ok(Settled::Done)
    }

    /// Takes out a due row, if it is this key's.
    fn due_row(&mut self, key: &InboxKey, seq: ParkedSeq) -> Option<ParkedRow> {
        self.copies.get(seq).filter(|row| row.key == *key && row.is_due())?;
        self.copies.remove(seq)
    }

    pub(super) fn unpark(&mut self, unpark: &Unpark) -> Result<Settled, StoreError> {
        let Claim { key, token } = &unpark.claim;
        self.admit(key)?;
        let answer = match self.holds(key, *token) {
            true => {
                self.admit_copy(unpark.seq)?;
                self.claims.remove(key);
                self.due_row(key, unpark.seq);
                Settled::Done
            }
            false => Settled::Lost(self.look(key, None)),
        };
        self.tell(MemoryChange::Unparked { unpark, answer: &answer });
        Ok(answer)
    }

    /// Completion of a taken row.
    pub(super) fn remove_taken(&mut self, key: &InboxKey, parked: Option<ParkedSeq>) {
        if let Some(seq) = parked
            && !self.has(MemoryFlaw::CompleteKeepsCopy)
        {
            self.due_row(key, seq);
        }
    }

    /// A dead letter takes the place of any row of its content.
    pub(super) fn write_letter(&mut self, letter: &DeadLetter) -> ParkedSeq {
        let existing = self.copies.same(&letter.key, letter.fingerprint.as_ref());
        let existing = existing.map(|row| (row.seq, row.first_at));
        let first_at = self.now - micros(letter.first_ago);
        let mut envelope = Envelope::clone(&letter.envelope);
        if !letter.body_kept {
            envelope.body = None;
        }
        let seq = existing.map_or_else(|| self.copies.next_seq(), |(seq, _)| seq);
        let row = ParkedRow {
            seq,
            key: letter.key.clone(),
            state: ParkedState::Dead,
            position: letter.envelope.origin.position(),
            copy: ParkedCopy {
                subscription: letter.subscription.to_string(),
                envelope,
                fingerprint: letter.fingerprint.clone(),
                lane: letter.lane.clone(),
                attempts: letter.attempts,
                last_status: letter.last_status,
                last_error: letter.last_error.clone(),
                reason: letter.reason.into(),
            },
            lane_id: letter.lane_id,
            body_kept: letter.body_kept,
            due_at: self.now,
            first_at: existing.map_or(first_at, |(_, older)| older.min(first_at)),
            parked_at: self.now,
        };
        self.copies.put(row);
        seq
    }

    /// Since then, on the database's clock.
    pub(super) fn ago(&self, at: i64) -> Duration {
        Duration::from_micros(u64::try_from(self.now - at).unwrap_or(0))
    }
}

/// One of these, one of those.
fn alternate<T>(left: Vec<T>, right: impl Iterator<Item = T>) -> Vec<T> {
    let (mut left, mut right) = (left.into_iter(), right.fuse());
    let mut both = Vec::new();
    loop {
        let (one, other) = (left.next(), right.next());
        if one.is_none() && other.is_none() {
            return both;
        }
        both.extend(one);
        both.extend(other);
    }
}
