//! The three tables and the rules of claiming, one step at a time.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use inboxd_contract::{
    Attempt, Claim, ClaimAnswer, ClaimRequest, Completion, DeadLetter, DeadRow,
    EXPLAINED_COPIES_MAX, Envelope, ExplainedClaim, ExplainedCopy, ExplainedMessage, Explanation,
    Fingerprint, Hold, InboxKey, Look, MESSAGE_ID_BYTES_MAX, MessageRecord, OwnerId, ParkedCopy,
    ParkedState, Release, Settled, StoreError, StoreStats, SweepPolicy, SweepReport, Token,
};
use tokio::time::Instant;

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

#[derive(Debug)]
pub(super) struct ParkedRow {
    pub(super) key: InboxKey,
    pub(super) position: Option<String>,
    pub(super) copy: ParkedCopy,
    pub(super) parked_at: i64,
    pub(super) discarded: bool,
}

/// Everything that is stored, and the locks that others hold on it.
#[derive(Debug)]
pub(super) struct Rows {
    started: Instant,
    /// Microseconds since `started`: the database's clock, read once per step.
    pub(super) now: i64,
    pub(super) claims: BTreeMap<InboxKey, ClaimRow>,
    pub(super) messages: BTreeMap<InboxKey, MessageRow>,
    /// In the order of parking.
    pub(super) parked: Vec<ParkedRow>,
    pub(super) notes: BTreeMap<String, String>,
    pub(super) locked_claims: BTreeSet<InboxKey>,
    pub(super) open_messages: BTreeSet<InboxKey>,
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
            parked: Vec::new(),
            notes: BTreeMap::new(),
            locked_claims: BTreeSet::new(),
            open_messages: BTreeSet::new(),
            sweep_locked: false,
            witness: None,
            flaw: None,
            shift: 0,
        }
    }

    pub(super) fn read_clock(&mut self) {
        self.now = micros(self.started.elapsed()) + self.shift;
    }

    fn tell(&self, change: MemoryChange<'_>) {
        if let Some(witness) = &self.witness {
            witness.changed(self.now, change);
        }
    }

    fn has(&self, flaw: MemoryFlaw) -> bool {
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
    fn admit(&self, key: &InboxKey) -> Result<(), StoreError> {
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
        let look = seen.cloned().unwrap_or_else(|| self.look(key));
        let answer = ClaimAnswer::resolve(request, hold, &look);
        if !answer.is_held() && self.holds(key, *token) {
            self.claims.remove(key);
        }
        let expires_at = self.now + micros(lease);
        self.tell(MemoryChange::Claimed { owner, request, answer: &answer, expires_at });
        Ok(answer)
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

    fn holds(&self, key: &InboxKey, token: Token) -> bool {
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
            _ => Attempt::Lost(self.look(&claim.key)),
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
        let Completion { claim, record, supersedes_dead, .. } = completion;
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
            return Ok(Settled::Lost(self.look(&claim.key)));
        }
        if self.open_messages.contains(&claim.key) {
            return Err(StoreError::locked("the message's row is not committed yet"));
        }
        if !self.has(MemoryFlaw::CompleteKeepsClaim) {
            self.claims.remove(&claim.key);
        }
        if *supersedes_dead {
            self.parked.retain(|row| {
                let fingerprint = row.copy.fingerprint.as_ref();
                row.key != claim.key
                    || Fingerprint::conflict(fingerprint, record.fingerprint.as_ref())
            });
        }
        if self.insert_message(&claim.key, record.fingerprint.clone()) {
            return Ok(Settled::Done);
        }
        Ok(self.already_processed(&claim.key))
    }

    fn already_processed(&self, key: &InboxKey) -> Settled {
        let fingerprint = self.messages.get(key).and_then(|row| row.fingerprint.clone());
        Settled::AlreadyProcessed { fingerprint }
    }

    pub(super) fn dead_letter(&mut self, letter: &DeadLetter) -> Result<Settled, StoreError> {
        let answer = self.dead_letter_one(letter)?;
        self.tell(MemoryChange::DeadLettered { letter, answer: &answer });
        Ok(answer)
    }

    fn dead_letter_one(&mut self, letter: &DeadLetter) -> Result<Settled, StoreError> {
        if letter.token.is_some() || letter.key.message_id.as_str().len() > MESSAGE_ID_BYTES_MAX {
            self.admit(&letter.key)?;
        }
        if let Some(token) = letter.token {
            let fenced = !self.has(MemoryFlaw::DeadLetterWithoutToken);
            if fenced && !self.holds(&letter.key, token) {
                return Ok(Settled::Lost(self.look(&letter.key)));
            }
            self.claims.remove(&letter.key);
            if self.messages.contains_key(&letter.key) {
                return Ok(self.already_processed(&letter.key));
            }
        }
        self.park(letter);
        Ok(Settled::Done)
    }

    fn park(&mut self, letter: &DeadLetter) {
        let mut envelope = Envelope::clone(&letter.envelope);
        if !letter.body_kept {
            envelope.body = None;
        }
        let row = ParkedRow {
            key: letter.key.clone(),
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
            parked_at: self.now,
            discarded: false,
        };
        let same = |other: &&mut ParkedRow| {
            other.key == letter.key && other.copy.fingerprint == letter.fingerprint
        };
        match self.parked.iter_mut().find(same) {
            Some(existing) => *existing = row,
            None => self.parked.push(row),
        }
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
            _ => Settled::Lost(self.look(key)),
        };
        self.tell(MemoryChange::Released { release, answer: &answer });
        Ok(answer)
    }

    pub(super) fn look(&self, key: &InboxKey) -> Look {
        Look {
            processed: self.messages.get(key).map(|row| row.fingerprint.clone()),
            dead: self
                .parked
                .iter()
                .filter(|row| row.key == *key)
                .map(|row| DeadRow {
                    fingerprint: row.copy.fingerprint.clone(),
                    position: row.position.clone(),
                    discarded: row.discarded,
                })
                .collect(),
            ..Look::default()
        }
    }

    pub(super) fn parked(&self, key: &InboxKey) -> Vec<ParkedCopy> {
        self.parked.iter().filter(|row| row.key == *key).map(|row| row.copy.clone()).collect()
    }

    pub(super) fn explain(&self, key: &InboxKey) -> Explanation {
        let ago = |at: i64| Duration::from_micros(u64::try_from(self.now - at).unwrap_or(0));
        let parked: Vec<_> = self.parked.iter().filter(|row| row.key == *key).collect();
        Explanation {
            message: self.messages.get(key).map(|row| ExplainedMessage {
                record: MessageRecord {
                    fingerprint: row.fingerprint.clone(),
                    ..MessageRecord::default()
                },
                processed_ago: ago(row.processed_at),
            }),
            claim: self.claims.get(key).map(|row| ExplainedClaim {
                owner: row.owner.clone(),
                attempts: row.attempts,
                expires_in: u64::try_from(row.expires_at - self.now)
                    .ok()
                    .filter(|left| *left > 0 && row.token.is_some())
                    .map(Duration::from_micros),
            }),
            copies_total: parked.len() as u64,
            copies: parked[parked.len().saturating_sub(EXPLAINED_COPIES_MAX)..]
                .iter()
                .map(|row| ExplainedCopy {
                    copy: ParkedCopy {
                        envelope: Envelope { body: None, ..row.copy.envelope.clone() },
                        ..row.copy.clone()
                    },
                    body_bytes: row.copy.envelope.body.as_ref().map(|body| body.len() as u64),
                    state: if row.discarded { ParkedState::Discarded } else { ParkedState::Dead },
                    due_in: None,
                    parked_ago: ago(row.parked_at),
                })
                .collect(),
        }
    }

    pub(super) fn stats(&self) -> StoreStats {
        let ago = |at: i64| Duration::from_micros(u64::try_from(self.now - at).unwrap_or(0));
        let dead = || self.parked.iter().filter(|row| !row.discarded);
        StoreStats {
            messages: Some(self.messages.len() as u64),
            claims: Some(self.claims.len() as u64),
            dead: Some(dead().count() as u64),
            oldest_message: self.messages.values().map(|row| row.processed_at).min().map(ago),
            oldest_dead: dead().map(|row| row.parked_at).min().map(ago),
            ..StoreStats::default()
        }
    }

    pub(super) fn sweep(&mut self, policy: &SweepPolicy) -> SweepReport {
        if self.sweep_locked {
            return SweepReport::default();
        }
        let before = |age: Duration| self.now - micros(age);
        let (messages, dead, claims) =
            (before(policy.retention), before(policy.dead_retention), before(policy.idle_claims));
        let counts = (self.messages.len(), self.parked.len(), self.claims.len());
        self.messages.retain(|_, row| row.processed_at >= messages);
        self.parked.retain(|row| row.parked_at >= dead);
        self.claims.retain(|_, row| row.expires_at >= claims);
        let gone = |before: usize, after: usize| (before - after) as u64;
        SweepReport {
            ran: true,
            messages: gone(counts.0, self.messages.len()),
            dead: gone(counts.1, self.parked.len()),
            claims: gone(counts.2, self.claims.len()),
        }
    }
}
