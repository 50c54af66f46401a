//! The tables and the rules of claiming, one step at a time.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use inboxd_contract::{
    Attempt, Claim, ClaimAnswer, ClaimRequest, Completion, DeadLetter, Fingerprint, Hold, InboxKey,
    LaneId, Look, MESSAGE_ID_BYTES_MAX, OwnerId, ParkedSeq, Release, Settled, StoreError, Token,
};
use tokio::time::Instant;

use super::copies::Copies;
use super::operator::AuditRow;
use super::witness::{MemoryChange, MemoryFlaw, MemoryWitness};

/// The longest text of a record, as the columns of the databases have it.
const RECORD_BYTES_MAX: usize = 256;

/// A duration on the database's clock.
pub(super) fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX / 4)
}

#[derive(Debug)]
pub(super) struct ClaimRow {
    /// Whose it was last; only for people who look.
    pub(super) owner: OwnerId,
    /// `None`: released.
    pub(super) token: Option<Token>,
    pub(super) attempts: u32,
    pub(super) expires_at: i64,
}

#[derive(Debug)]
pub(super) struct MessageRow {
    pub(super) fingerprint: Option<Fingerprint>,
    pub(super) processed_at: i64,
}

/// Everything that is stored, and the locks that others hold on it.
#[derive(Debug)]
pub(super) struct Rows {
    started: Instant,
    /// Microseconds since `started`: the database's clock, read once per step.
    pub(super) now: i64,
    pub(super) claims: BTreeMap<InboxKey, ClaimRow>,
    pub(super) messages: BTreeMap<InboxKey, MessageRow>,
    pub(super) copies: Copies,
    /// In the order of time.
    pub(super) audit: Vec<AuditRow>,
    pub(super) last_audit: i64,
    pub(super) notes: BTreeMap<String, String>,
    pub(super) locked_claims: BTreeSet<InboxKey>,
    pub(super) open_messages: BTreeSet<InboxKey>,
    pub(super) locked_copies: BTreeSet<ParkedSeq>,
    pub(super) sweep_locked: bool,
    /// Told every change.
    pub(super) witness: Option<Arc<dyn MemoryWitness>>,
    /// Broken on purpose.
    pub(super) flaw: Option<MemoryFlaw>,
    /// Microseconds by which the clock was moved.
    pub(super) shift: i64,
}

impl Rows {
    pub(super) fn new() -> Self {
        Self {
            started: Instant::now(),
            now: 0,
            claims: BTreeMap::new(),
            messages: BTreeMap::new(),
            copies: Copies::default(),
            audit: Vec::new(),
            last_audit: 0,
            notes: BTreeMap::new(),
            locked_claims: BTreeSet::new(),
            open_messages: BTreeSet::new(),
            locked_copies: BTreeSet::new(),
            sweep_locked: false,
            witness: None,
            flaw: None,
            shift: 0,
        }
    }

    pub(super) fn read_clock(&mut self) {
        self.now = micros(self.started.elapsed()) + self.shift;
    }

    pub(super) fn tell(&self, change: MemoryChange<'_>) {
        if let Some(witness) = &self.witness {
            witness.changed(self.now, change);
        }
    }

    pub(super) fn has(&self, flaw: MemoryFlaw) -> bool {
        self.flaw == Some(flaw)
    }

    /// Claims that have not run out and were not released.
    pub(super) fn held(&self) -> impl Iterator<Item = &ClaimRow> {
        let now = self.now;
        self.claims.values().filter(move |row| row.token.is_some() && row.expires_at > now)
    }

    pub(super) fn insert_message(
        &mut self,
        key: &InboxKey,
        fingerprint: Option<Fingerprint>,
    ) -> bool {
        if self.messages.contains_key(key) {
            return false;
        }
        let row = MessageRow { fingerprint, processed_at: self.now };
        self.messages.insert(key.clone(), row);
        true
    }

    /// What a database would refuse, and a lock that somebody else holds.
    pub(super) fn admit(&self, key: &InboxKey) -> Result<(), StoreError> {
        let bytes = key.message_id.as_str().len();
        if bytes > MESSAGE_ID_BYTES_MAX {
            return Err(StoreError::refused(format!(
                "a message id has {bytes} bytes, and at most {MESSAGE_ID_BYTES_MAX} fit"
            )));
        }
        if self.locked_claims.contains(key) {
            return Err(StoreError::locked(format!("the claim of {} is locked", key.message_id)));
        }
        Ok(())
    }

    /// A lock that somebody else holds on a parked row.
    pub(super) fn admit_copy(&self, seq: ParkedSeq) -> Result<(), StoreError> {
        match self.locked_copies.contains(&seq) {
            true => Err(StoreError::locked(format!("parked row {seq} is locked"))),
            false => Ok(()),
        }
    }

    pub(super) fn claim(
        &mut self,
        owner: &OwnerId,
        lease: Duration,
        requests: &[ClaimRequest],
        looks: Option<&[Look]>,
    ) -> Vec<Result<ClaimAnswer, StoreError>> {
        let mut seen = BTreeSet::new();
        let mut answers = Vec::with_capacity(requests.len());
        for (index, request) in requests.iter().enumerate() {
            answers.push(if seen.insert(&request.claim.key) {
                let look = looks.and_then(|looks| looks.get(index));
                self.claim_one(owner, lease, request, look)
            } else {
                Ok(ClaimAnswer::Busy { wait: lease })
            });
        }
        answers
    }

    fn claim_one(
        &mut self,
        owner: &OwnerId,
        lease: Duration,
        request: &ClaimRequest,
        seen: Option<&Look>,
    ) -> Result<ClaimAnswer, StoreError> {
        let Claim { key, token } = &request.claim;
        self.admit(key)?;
        let hold = self.take(owner, lease, &request.claim);
        let lane = request.lane_id.filter(|_| !self.has(MemoryFlaw::IgnoreBlockedLane));
        let look = seen.cloned().unwrap_or_else(|| self.look(key, lane.as_ref()));
        let answer = ClaimAnswer::resolve(request, hold, &look);
        if !answer.is_held() && self.holds(key, *token) {
            self.let_go(key, &answer);
        }
        let expires_at = self.now + micros(lease);
        self.tell(MemoryChange::Claimed { owner, request, answer: &answer, expires_at });
        Ok(answer)
    }

    /// A claim that was taken for the look alone.
    fn let_go(&mut self, key: &InboxKey, answer: &ClaimAnswer) {
        let now = self.now;
        match self.claims.get_mut(key) {
            // A worker that died with the row in hand left its count there.
            Some(row) if matches!(answer, ClaimAnswer::Parked { .. }) && row.attempts > 1 => {
                row.attempts -= 1;
                row.token = None;
                row.expires_at = now;
            }
            _ => drop(self.claims.remove(key)),
        }
    }

    fn take(&mut self, owner: &OwnerId, lease: Duration, claim: &Claim) -> Hold {
        let seize = self.has(MemoryFlaw::TakeOverUnexpired);
        let now = self.now;
        let expires_at = now + micros(lease);
        let row = self.claims.entry(claim.key.clone()).or_insert_with(|| ClaimRow {
            owner: owner.clone(),
            token: None,
            attempts: 0,
            expires_at: now,
        });
        let own = row.token == Some(claim.token);
        if !own && row.token.is_some() && row.expires_at > now && !seize {
            let left = u64::try_from(row.expires_at - now).unwrap_or(0);
            return Hold::Other { expires_in: Duration::from_micros(left) };
        }
        if !own {
            row.attempts += 1;
        }
        row.owner = owner.clone();
        row.token = Some(claim.token);
        row.expires_at = expires_at;
        Hold::Held { attempts: row.attempts }
    }

    pub(super) fn holds(&self, key: &InboxKey, token: Token) -> bool {
        self.claims.get(key).is_some_and(|row| row.token == Some(token))
    }

    pub(super) fn renew(&mut self, lease: Duration, claims: &[Claim]) -> Vec<Token> {
        let expires_at = self.now + micros(lease);
        let mut renewed = Vec::new();
        if self.has(MemoryFlaw::RenewByOwner) {
            self.renew_by_owner(expires_at, claims);
        }
        for claim in claims {
            if self.locked_claims.contains(&claim.key) {
                continue;
            }
            if let Some(row) = self.claims.get_mut(&claim.key)
                && row.token == Some(claim.token)
            {
                row.expires_at = expires_at;
                renewed.push(claim.token);
                self.tell(MemoryChange::Renewed { claim, expires_at });
            }
        }
        renewed
    }

    fn renew_by_owner(&mut self, expires_at: i64, claims: &[Claim]) {
        let named = |claim: &Claim| Some(self.claims.get(&claim.key)?.owner.clone());
        let owners: Vec<OwnerId> = claims.iter().filter_map(named).collect();
        let mut extended = Vec::new();
        for (key, row) in &mut self.claims {
            if let Some(token) = row.token
                && owners.contains(&row.owner)
            {
                row.expires_at = expires_at;
                extended.push(Claim { key: key.clone(), token });
            }
        }
        for claim in &extended {
            self.tell(MemoryChange::Renewed { claim, expires_at });
        }
    }

    pub(super) fn count(&mut self, claim: &Claim) -> Result<Attempt, StoreError> {
        self.admit(&claim.key)?;
        let answer = match self.claims.get_mut(&claim.key) {
            Some(row) if row.token == Some(claim.token) => {
                row.attempts += 1;
                Attempt::Counted(row.attempts)
            }
            _ => Attempt::Lost(self.look(&claim.key, None)),
        };
        self.tell(MemoryChange::Counted { claim, answer: &answer });
        Ok(answer)
    }

    pub(super) fn complete(&mut self, completion: &Completion) -> Result<Settled, StoreError> {
        let answer = self.complete_one(completion)?;
        self.tell(MemoryChange::Completed { completion, answer: &answer });
        Ok(answer)
    }

    fn complete_one(&mut self, completion: &Completion) -> Result<Settled, StoreError> {
        let Completion { claim, record, supersedes_dead, parked } = completion;
        self.admit(&claim.key)?;
        for text in [&record.producer, &record.message_type] {
            if text.as_ref().is_some_and(|text| text.len() > RECORD_BYTES_MAX) {
                return Err(StoreError::refused(format!(
                    "a record's text has more than {RECORD_BYTES_MAX} bytes"
                )));
            }
        }
        let fenced = !self.has(MemoryFlaw::CompleteWithoutToken);
        if fenced && !self.holds(&claim.key, claim.token) {
            return Ok(Settled::Lost(self.look(&claim.key, None)));
        }
        parked.map_or(Ok(()), |seq| self.admit_copy(seq))?;
        if self.open_messages.contains(&claim.key) {
            return Err(StoreError::locked("the message's row is not committed yet"));
        }
        if !self.has(MemoryFlaw::CompleteKeepsClaim) {
            self.claims.remove(&claim.key);
        }
        if *supersedes_dead {
            let fingerprint = record.fingerprint.as_ref();
            self.copies.remove_of(&claim.key, |row| !row.is_due() && row.agrees(fingerprint));
        }
        self.remove_taken(&claim.key, *parked);
        if self.insert_message(&claim.key, record.fingerprint.clone()) {
            return Ok(Settled::Done);
        }
        Ok(self.already_processed(&claim.key))
    }

    pub(super) fn already_processed(&self, key: &InboxKey) -> Settled {
        let fingerprint = self.messages.get(key).and_then(|row| row.fingerprint.clone());
        Settled::AlreadyProcessed { fingerprint }
    }

    pub(super) fn dead_letter(&mut self, letter: &DeadLetter) -> Result<Settled, StoreError> {
        let (answer, seq) = self.dead_letter_one(letter)?;
        self.tell(MemoryChange::DeadLettered { letter, answer: &answer, seq });
        Ok(answer)
    }

    fn dead_letter_one(
        &mut self,
        letter: &DeadLetter,
    ) -> Result<(Settled, Option<ParkedSeq>), StoreError> {
        if letter.token.is_some() || letter.key.message_id.as_str().len() > MESSAGE_ID_BYTES_MAX {
            self.admit(&letter.key)?;
        }
        if let Some(token) = letter.token {
            let fenced = !self.has(MemoryFlaw::DeadLetterWithoutToken);
            if fenced && !self.holds(&letter.key, token) {
                return Ok((Settled::Lost(self.look(&letter.key, None)), None));
            }
            if let Some(row) = self.copies.same(&letter.key, letter.fingerprint.as_ref()) {
                self.admit_copy(row.seq)?;
            }
            self.claims.remove(&letter.key);
            if self.messages.contains_key(&letter.key) {
                return Ok((self.already_processed(&letter.key), None));
            }
        }
        Ok((Settled::Done, Some(self.write_letter(letter))))
    }

    pub(super) fn release(&mut self, release: &Release) -> Result<Settled, StoreError> {
        let Claim { key, token } = &release.claim;
        self.admit(key)?;
        let now = self.now;
        let fenced = !self.has(MemoryFlaw::ReleaseWithoutToken);
        let back = release.attempt_back && !self.has(MemoryFlaw::KeepAttempts);
        let answer = match self.claims.get_mut(key) {
            Some(row) if row.token == Some(*token) || !fenced => {
                row.token = None;
                row.expires_at = now;
                row.attempts = row.attempts.saturating_sub(u32::from(back));
                Settled::Done
            }
            _ => Settled::Lost(self.look(key, None)),
        };
        self.tell(MemoryChange::Released { release, answer: &answer });
        Ok(answer)
    }

    pub(super) fn look(&self, key: &InboxKey, lane: Option<&LaneId>) -> Look {
        let mut look = Look {
            processed: self.messages.get(key).map(|row| row.fingerprint.clone()),
            lane_blocked: lane.is_some_and(|lane| self.copies.is_blocked(lane)),
            ..Look::default()
        };
        for row in self.copies.of(key) {
            match row.is_due() {
                true => look.due.push(row.copy.fingerprint.clone()),
                false => look.dead.push(row.dead_row()),
            }
        }
        look
    }
}
