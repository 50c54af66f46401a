//! What people see of the rows and do to dead letters.

use std::time::Duration;

use inboxd_contract::{
    Actor, AuditAction, AuditEntry, CopyReason, DeadReason, EXPLAINED_COPIES_MAX, Envelope,
    ExplainedClaim, ExplainedCopy, ExplainedMessage, Explanation, Fingerprint, InboxKey, MessageId,
    MessageRecord, ParkReason, ParkedCopy, ParkedFilter, ParkedRow as Shown, ParkedSeq,
    ParkedState, Replay, Replayed, StoreError, StoreStats, SweepPolicy, SweepReport,
};

use super::copies::ParkedRow;
use super::rows::{ClaimRow, Rows, micros};
use super::witness::MemoryChange;

/// An entry of the audit, by the database's clock.
#[derive(Debug)]
pub(super) struct AuditRow {
    id: i64,
    pub(super) at: i64,
    actor: String,
    action: AuditAction,
    key: InboxKey,
    pub(super) seq: ParkedSeq,
    replayed_as: Option<MessageId>,
}

fn without_body(copy: &ParkedCopy) -> ParkedCopy {
    let envelope = Envelope { body: None, ..copy.envelope.clone() };
    ParkedCopy { envelope, ..copy.clone() }
}

fn body_bytes(row: &ParkedRow) -> Option<u64> {
    row.copy.envelope.body.as_ref().map(|body| body.len() as u64)
}

impl Rows {
    fn due_in(&self, row: &ParkedRow) -> Option<Duration> {
        let left = u64::try_from(row.due_at - self.now).unwrap_or(0);
        row.is_due().then(|| Duration::from_micros(left))
    }

    fn shown(&self, row: &ParkedRow, body: bool) -> Shown {
        Shown {
            seq: row.seq,
            key: row.key.clone(),
            state: row.state,
            copy: if body { row.copy.clone() } else { without_body(&row.copy) },
            lane_id: row.lane_id,
            body_bytes: body_bytes(row),
            due_in: self.due_in(row),
            first_ago: self.ago(row.first_at),
            parked_ago: self.ago(row.parked_at),
        }
    }

    fn passes(&self, filter: &ParkedFilter, row: &ParkedRow) -> bool {
        let age = self.ago(row.parked_at);
        let error = || row.copy.last_error.as_deref().unwrap_or("");
        filter.consumer_id.as_ref().is_none_or(|id| *id == row.key.consumer_id)
            && filter.subscription.as_ref().is_none_or(|name| *name == row.copy.subscription)
            && (filter.states.is_empty() || filter.states.contains(&row.state))
            && filter.message_id.as_ref().is_none_or(|id| *id == row.key.message_id)
            && filter.reason.is_none_or(|reason| reason == row.copy.reason)
            && filter.error_contains.as_ref().is_none_or(|text| error().contains(text.as_str()))
            && filter.parked_at_least.is_none_or(|least| age >= least)
            && filter.parked_at_most.is_none_or(|most| age <= most)
    }

    pub(super) fn list_parked(
        &self,
        filter: &ParkedFilter,
        after: Option<ParkedSeq>,
        limit: u32,
    ) -> Vec<Shown> {
        let rows = self.copies.after(after).filter(|row| self.passes(filter, row));
        rows.take(limit as usize).map(|row| self.shown(row, false)).collect()
    }

    pub(super) fn count_parked(&self, filter: &ParkedFilter, most: u64) -> u64 {
        let rows = self.copies.all().filter(|row| self.passes(filter, row));
        rows.take(usize::try_from(most).unwrap_or(usize::MAX)).count() as u64
    }

    pub(super) fn parked_row(&self, seq: ParkedSeq) -> Option<Shown> {
        self.copies.get(seq).map(|row| self.shown(row, true))
    }

    pub(super) fn parked(&self, key: &InboxKey) -> Vec<ParkedCopy> {
        self.copies.of(key).map(|row| row.copy.clone()).collect()
    }

    pub(super) fn replay(
        &mut self,
        replay: &Replay,
        actor: &Actor,
    ) -> Result<Replayed, StoreError> {
        self.admit_copy(replay.seq)?;
        let answer = self.replay_one(replay, actor);
        self.tell(MemoryChange::Replayed { replay, answer: &answer });
        Ok(answer)
    }

    fn replay_one(&mut self, replay: &Replay, actor: &Actor) -> Replayed {
        let dead = |row: &&ParkedRow| row.state == ParkedState::Dead;
        let Some(row) = self.copies.get(replay.seq).filter(dead) else { return Replayed::NotDead };
        if !row.body_kept {
            return Replayed::NoBody;
        }
        let mut row = row.clone();
        let before = row.key.clone();
        let fingerprint = row.copy.fingerprint.clone();
        let differs = self.messages.get(&before).is_some_and(|processed| {
            Fingerprint::conflict(processed.fingerprint.as_ref(), fingerprint.as_ref())
        });
        if let Some(fingerprint) = &fingerprint
            && (differs || row.copy.reason == DeadReason::IdConflict)
        {
            row.key.message_id = before.message_id.of_conflict(fingerprint);
        }
        let mut action = AuditAction::Replay;
        if self.messages.contains_key(&row.key) {
            if !replay.allow_processed {
                return Replayed::Processed;
            }
            action = AuditAction::ReplayProcessed;
            row.key.message_id = before.message_id.of_override(replay.fresh);
        }
        let meets = self.copies.same(&row.key, fingerprint.as_ref());
        if meets.is_some_and(|other| other.seq != row.seq) {
            return Replayed::Exists;
        }
        self.forget_idle_claim(&row.key);
        let id = row.key.message_id.clone();
        let replayed_as = (id != before.message_id).then(|| id.clone());
        row.state = ParkedState::Due;
        row.copy.attempts = 0;
        row.copy.reason = CopyReason::Parked(ParkReason::Replayed);
        row.due_at = self.now + micros(replay.delay);
        row.first_at = self.now;
        row.parked_at = self.now;
        self.copies.put(row);
        self.audited(actor, action, before, replay.seq, replayed_as);
        Replayed::Due(id)
    }

    fn forget_idle_claim(&mut self, key: &InboxKey) {
        let idle = |claim: &ClaimRow| claim.token.is_none() || claim.expires_at <= self.now;
        if self.claims.get(key).is_some_and(idle) {
            self.claims.remove(key);
        }
    }

    fn audited(
        &mut self,
        actor: &Actor,
        action: AuditAction,
        key: InboxKey,
        seq: ParkedSeq,
        replayed_as: Option<MessageId>,
    ) {
        self.last_audit += 1;
        let actor = actor.as_str().to_owned();
        let (id, at) = (self.last_audit, self.now);
        self.audit.push(AuditRow { id, at, actor, action, key, seq, replayed_as });
    }

    pub(super) fn discard(&mut self, seq: ParkedSeq, actor: &Actor) -> Result<bool, StoreError> {
        self.admit_copy(seq)?;
        let dead = |row: &&ParkedRow| row.state == ParkedState::Dead;
        let Some(mut row) = self.copies.get(seq).filter(dead).cloned() else { return Ok(false) };
        let key = row.key.clone();
        row.state = ParkedState::Discarded;
        row.copy.envelope.body = None;
        row.body_kept = false;
        row.parked_at = self.now;
        self.copies.put(row);
        self.tell(MemoryChange::Discarded { seq, key: &key });
        self.audited(actor, AuditAction::Discard, key, seq, None);
        Ok(true)
    }

    pub(super) fn audit(&self, before: Option<i64>, limit: u32) -> Vec<AuditEntry> {
        let entries = self.audit.iter().rev().filter(|row| before.is_none_or(|id| row.id < id));
        let entry = |row: &AuditRow| AuditEntry {
            id: row.id,
            ago: self.ago(row.at),
            actor: row.actor.clone(),
            action: row.action,
            key: row.key.clone(),
            seq: row.seq,
            replayed_as: row.replayed_as.clone(),
        };
        entries.take(limit as usize).map(entry).collect()
    }

    pub(super) fn explain(&self, key: &InboxKey) -> Explanation {
        let copies: Vec<_> = self.copies.of(key).collect();
        Explanation {
            message: self.messages.get(key).map(|row| ExplainedMessage {
                record: MessageRecord {
                    fingerprint: row.fingerprint.clone(),
                    ..MessageRecord::default()
                },
                processed_ago: self.ago(row.processed_at),
            }),
            claim: self.claims.get(key).map(|row| ExplainedClaim {
                owner: row.owner.clone(),
                attempts: row.attempts,
                expires_in: u64::try_from(row.expires_at - self.now)
                    .ok()
                    .filter(|left| *left > 0 && row.token.is_some())
                    .map(Duration::from_micros),
            }),
            copies_total: copies.len() as u64,
            copies: copies[copies.len().saturating_sub(EXPLAINED_COPIES_MAX)..]
                .iter()
                .map(|row| ExplainedCopy {
                    copy: without_body(&row.copy),
                    body_bytes: body_bytes(row),
                    state: row.state,
                    due_in: self.due_in(row),
                    parked_ago: self.ago(row.parked_at),
                })
                .collect(),
        }
    }

    pub(super) fn stats(&self) -> StoreStats {
        let of = |state| self.copies.all().filter(move |row| row.state == state);
        let (dead, due) = (|| of(ParkedState::Dead), || of(ParkedState::Due));
        StoreStats {
            messages: Some(self.messages.len() as u64),
            claims: Some(self.claims.len() as u64),
            dead: Some(dead().count() as u64),
            due: Some(due().count() as u64),
            oldest_due: due().map(|row| row.first_at).min().map(|at| self.ago(at)),
            oldest_message: self
                .messages
                .values()
                .map(|row| row.processed_at)
                .min()
                .map(|at| self.ago(at)),
            oldest_dead: dead().map(|row| row.parked_at).min().map(|at| self.ago(at)),
        }
    }

    pub(super) fn sweep(&mut self, policy: &SweepPolicy) -> SweepReport {
        if self.sweep_locked {
            return SweepReport::default();
        }
        let before = |age: Duration| self.now - micros(age);
        let (messages, dead, claims) =
            (before(policy.retention), before(policy.dead_retention), before(policy.idle_claims));
        let counts = (self.messages.len(), self.claims.len());
        self.messages.retain(|_, row| row.processed_at >= messages);
        let old = |row: &&ParkedRow| !row.is_due() && row.parked_at < dead;
        let old: Vec<_> = self.copies.all().filter(old).map(|row| row.seq).collect();
        old.iter().for_each(|seq| drop(self.copies.remove(*seq)));
        self.claims.retain(|_, row| row.expires_at >= claims);
        self.audit.retain(|row| row.at >= dead);
        let gone = |before: usize, after: usize| (before - after) as u64;
        SweepReport {
            ran: true,
            messages: gone(counts.0, self.messages.len()),
            dead: old.len() as u64,
            claims: gone(counts.1, self.claims.len()),
        }
    }
}
