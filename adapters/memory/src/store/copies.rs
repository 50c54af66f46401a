//! `inbox_parked` and its indices.

use std::collections::{BTreeMap, BTreeSet};

use inboxd_contract::{
    ConsumerId, DeadRow, Fingerprint, InboxKey, LaneId, ParkedCopy, ParkedSeq, ParkedState,
};

/// A row of `inbox_parked`. Times are microseconds of the database's clock.
#[derive(Debug, Clone)]
pub(super) struct ParkedRow {
    pub(super) seq: ParkedSeq,
    pub(super) key: InboxKey,
    pub(super) state: ParkedState,
    pub(super) position: Option<String>,
    pub(super) copy: ParkedCopy,
    pub(super) lane_id: Option<LaneId>,
    /// False: the body was never stored, or is gone.
    pub(super) body_kept: bool,
    /// Counts only while it is due.
    pub(super) due_at: i64,
    pub(super) first_at: i64,
    pub(super) parked_at: i64,
}

impl ParkedRow {
    pub(super) fn is_due(&self) -> bool {
        self.state == ParkedState::Due
    }

    /// Not of another content, as far as is known.
    pub(super) fn agrees(&self, fingerprint: Option<&Fingerprint>) -> bool {
        !Fingerprint::conflict(self.copy.fingerprint.as_ref(), fingerprint)
    }

    pub(super) fn dead_row(&self) -> DeadRow {
        DeadRow {
            fingerprint: self.copy.fingerprint.clone(),
            position: self.position.clone(),
            discarded: self.state == ParkedState::Discarded,
        }
    }
}

/// Whose due rows: a subscriber's subscription.
type Line = (ConsumerId, String);

/// All parked rows. Rows are changed by taking them out and putting them back, so that the indices
/// never differ from them.
#[derive(Debug, Default)]
pub(super) struct Copies {
    rows: BTreeMap<ParkedSeq, ParkedRow>,
    by_key: BTreeMap<InboxKey, BTreeSet<ParkedSeq>>,
    /// What blocks each lane: all of its rows that are not discarded.
    lanes: BTreeMap<LaneId, BTreeSet<ParkedSeq>>,
    /// Due rows by the time when they are.
    due: BTreeMap<Line, BTreeSet<(i64, ParkedSeq)>>,
    last: i64,
}

impl Copies {
    /// The key of the next new row.
    pub(super) fn next_seq(&mut self) -> ParkedSeq {
        self.last += 1;
        ParkedSeq(self.last)
    }

    /// Puts a row in, in the place of one with its seq.
    pub(super) fn put(&mut self, row: ParkedRow) {
        self.remove(row.seq);
        self.by_key.entry(row.key.clone()).or_default().insert(row.seq);
        if let Some(lane) = row.lane_id
            && row.state != ParkedState::Discarded
        {
            self.lanes.entry(lane).or_default().insert(row.seq);
        }
        if row.is_due() {
            let line = (row.key.consumer_id.clone(), row.copy.subscription.clone());
            self.due.entry(line).or_default().insert((row.due_at, row.seq));
        }
        self.rows.insert(row.seq, row);
    }

    pub(super) fn remove(&mut self, seq: ParkedSeq) -> Option<ParkedRow> {
        let row = self.rows.remove(&seq)?;
        drop_from(&mut self.by_key, &row.key, &seq);
        if let Some(lane) = &row.lane_id {
            drop_from(&mut self.lanes, lane, &seq);
        }
        let line = (row.key.consumer_id.clone(), row.copy.subscription.clone());
        drop_from(&mut self.due, &line, &(row.due_at, seq));
        Some(row)
    }

    pub(super) fn remove_of(&mut self, key: &InboxKey, which: impl Fn(&ParkedRow) -> bool) {
        let gone: Vec<_> = self.of(key).filter(|row| which(row)).map(|row| row.seq).collect();
        gone.into_iter().for_each(|seq| drop(self.remove(seq)));
    }

    pub(super) fn get(&self, seq: ParkedSeq) -> Option<&ParkedRow> {
        self.rows.get(&seq)
    }

    /// All rows in the order of `seq`.
    pub(super) fn all(&self) -> impl Iterator<Item = &ParkedRow> {
        self.rows.values()
    }

    /// The rows after this one in the order of `seq`.
    pub(super) fn after(&self, seq: Option<ParkedSeq>) -> impl Iterator<Item = &ParkedRow> {
        let after = seq.unwrap_or(ParkedSeq(i64::MIN));
        self.rows.range(after..).map(|(_, row)| row).filter(move |row| Some(row.seq) != seq)
    }

    /// The rows of a key in the order of `seq`.
    pub(super) fn of(&self, key: &InboxKey) -> impl Iterator<Item = &ParkedRow> {
        self.by_key.get(key).into_iter().flatten().filter_map(|seq| self.rows.get(seq))
    }

    /// What is unique: a key's row of this fingerprint, or of none.
    pub(super) fn same(
        &self,
        key: &InboxKey,
        fingerprint: Option<&Fingerprint>,
    ) -> Option<&ParkedRow> {
        self.of(key).find(|row| row.copy.fingerprint.as_ref() == fingerprint)
    }

    pub(super) fn is_blocked(&self, lane: &LaneId) -> bool {
        self.lanes.contains_key(lane)
    }

    /// The rows of a lane that are not discarded, in its order.
    pub(super) fn lane(&self, lane: &LaneId) -> impl Iterator<Item = &ParkedRow> {
        self.lanes.get(lane).into_iter().flatten().filter_map(|seq| self.rows.get(seq))
    }

    /// Due rows in the order of their times, those that are not due yet included.
    pub(super) fn due(
        &self,
        consumer: &ConsumerId,
        name: &str,
    ) -> impl Iterator<Item = &ParkedRow> {
        let rows = self.due.get(&(consumer.clone(), name.to_owned()));
        rows.into_iter().flatten().filter_map(|(_, seq)| self.rows.get(seq))
    }
}

fn drop_from<K: Ord, V: Ord>(index: &mut BTreeMap<K, BTreeSet<V>>, key: &K, value: &V) {
    if let Some(values) = index.get_mut(key) {
        values.remove(value);
        if values.is_empty() {
            index.remove(key);
        }
    }
}
