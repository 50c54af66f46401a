//! Which offset of a partition may be committed.
//!
//! Purpose: offsets are received in ascending order and settled in any; the committable one is
//! the lowest unsettled, or, when all are settled, the one behind the last received.
//!
//! Invariants: the committable offset never passes an unsettled one (I5) and never goes back.
//! Offsets need not be contiguous: transaction markers, aborted records and compaction leave
//! gaps that block nothing. Settling twice, or what was never received, changes nothing.
//!
//! What it does not do: no I/O, no clock, no locks, and no memory of earlier assignments (a
//! new one begins a new tracker).

use std::collections::VecDeque;

/// One partition's offsets from the lowest unsettled one up. `T` is kept beside each (the time
/// of its arrival).
#[derive(Debug, Clone, Default)]
pub struct OffsetTracker<T> {
    /// Ascending; the first is never settled.
    entries: VecDeque<Entry<T>>,
    /// One past the highest offset known to be behind us.
    position: Option<i64>,
    /// How many entries are at the engine.
    handed_out: usize,
}

#[derive(Debug, Clone, Copy)]
struct Entry<T> {
    offset: i64,
    state: EntryState,
    beside: T,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum EntryState {
    Waiting,
    HandedOut,
    Settled,
}

/// What an offset that was read is to this tracker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Received {
    /// The next one: it is tracked now.
    New,
    /// Not above what was read before: the log was truncated or made again. Nothing changed;
    /// what follows needs a tracker of its own.
    Rewound,
}

impl<T: Copy> OffsetTracker<T> {
    /// Nothing received yet.
    pub fn new() -> Self {
        Self { entries: VecDeque::new(), position: None, handed_out: 0 }
    }

    /// Reading begins at `position`: nothing below it is wanted, and it may be committed.
    pub fn start_at(&mut self, position: i64) {
        self.position.get_or_insert(position);
    }

    /// An offset was read from the broker.
    pub fn receive(&mut self, offset: i64, beside: T) -> Received {
        if self.position.is_some_and(|position| offset < position) {
            return Received::Rewound;
        }
        self.entries.push_back(Entry { offset, state: EntryState::Waiting, beside });
        self.position = Some(offset + 1);
        Received::New
    }

    /// The broker has nothing to deliver below `position`: what is between the last received
    /// offset and it are markers and aborted records.
    pub fn advance(&mut self, position: i64) {
        if self.position.is_some_and(|known| known < position) {
            self.position = Some(position);
        }
    }

    /// A waiting offset goes to the engine. False if it was not waiting.
    pub fn hand_out(&mut self, offset: i64) -> bool {
        let changed = self.change(offset, EntryState::Waiting, EntryState::HandedOut);
        self.handed_out += usize::from(changed);
        changed
    }

    /// The engine gave an offset back: it waits again. False if it was not handed out.
    pub fn give_back(&mut self, offset: i64) -> bool {
        let changed = self.change(offset, EntryState::HandedOut, EntryState::Waiting);
        self.handed_out -= usize::from(changed);
        changed
    }

    /// The engine is done with an offset. False if it was not handed out.
    pub fn settle(&mut self, offset: i64) -> bool {
        let changed = self.change(offset, EntryState::HandedOut, EntryState::Settled);
        self.handed_out -= usize::from(changed);
        while self.entries.front().is_some_and(|entry| entry.state == EntryState::Settled) {
            self.entries.pop_front();
        }
        changed
    }

    /// What may be committed: the offset of the next record that is not settled. `None` before
    /// anything was received.
    pub fn committable(&self) -> Option<i64> {
        self.entries.front().map(|entry| entry.offset).or(self.position)
    }

    /// One past the highest offset received.
    #[cfg(test)]
    pub fn position(&self) -> Option<i64> {
        self.position
    }

    /// How many records are tracked from the lowest unsettled one up, settled ones among them
    /// included.
    pub fn span(&self) -> usize {
        self.entries.len()
    }

    /// How many are at the engine.
    pub fn handed_out(&self) -> usize {
        self.handed_out
    }

    /// What is kept beside the lowest unsettled offset.
    pub fn oldest(&self) -> Option<T> {
        self.entries.front().map(|entry| entry.beside)
    }

    fn change(&mut self, offset: i64, from: EntryState, to: EntryState) -> bool {
        let Ok(index) = self.entries.binary_search_by_key(&offset, |entry| entry.offset) else {
            return false;
        };
        let changes = self.entries[index].state == from;
        if changes {
            self.entries[index].state = to;
        }
        changes
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone)]
    enum Step {
        Receive { gap: i64 },
        Rewind { back: i64 },
        Advance { by: i64 },
        HandOut(usize),
        GiveBack(usize),
        Settle(usize),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            4 => (0..4_i64).prop_map(|gap| Step::Receive { gap }),
            1 => (0..5_i64).prop_map(|back| Step::Rewind { back }),
            1 => (0..4_i64).prop_map(|by| Step::Advance { by }),
            4 => (0..40_usize).prop_map(Step::HandOut),
            2 => (0..40_usize).prop_map(Step::GiveBack),
            4 => (0..40_usize).prop_map(Step::Settle),
        ];
        prop::collection::vec(step, 0..200)
    }

    /// Everything ever received, in the plainest form.
    #[derive(Default)]
    struct Model {
        all: BTreeMap<i64, EntryState>,
        position: Option<i64>,
    }

    impl Model {
        fn pick(&self, index: usize) -> i64 {
            // Sometimes an offset that was never received.
            self.all.keys().nth(index).copied().unwrap_or(index as i64)
        }

        fn change(&mut self, offset: i64, from: EntryState, to: EntryState) -> bool {
            match self.all.get_mut(&offset) {
                Some(state) if *state == from => {
                    *state = to;
                    true
                }
                _ => false,
            }
        }

        fn lowest_unsettled(&self) -> Option<i64> {
            let mut unsettled = self.all.iter().filter(|(_, state)| **state != EntryState::Settled);
            unsettled.next().map(|(offset, _)| *offset)
        }
    }

    proptest! {
        #[test]
        fn behaves_as_the_model(first in 0..100_i64, steps in steps()) {
            use EntryState::{HandedOut, Settled, Waiting};
            let mut tracker = OffsetTracker::new();
            let mut model = Model::default();
            let mut committed = None;
            for step in steps {
                match step {
                    Step::Receive { gap } => {
                        let offset = model.position.unwrap_or(first) + gap;
                        prop_assert_eq!(tracker.receive(offset, offset), Received::New);
                        model.all.insert(offset, Waiting);
                        model.position = Some(offset + 1);
                    }
                    Step::Rewind { back } => if let Some(position) = model.position {
                        let offset = position - 1 - back;
                        prop_assert_eq!(tracker.receive(offset, offset), Received::Rewound);
                    },
                    Step::Advance { by } => {
                        let to = model.position.unwrap_or(first) + by;
                        tracker.advance(to);
                        model.position = model.position.map(|_| to);
                    }
                    Step::HandOut(index) => {
                        let offset = model.pick(index);
                        let expected = model.change(offset, Waiting, HandedOut);
                        prop_assert_eq!(tracker.hand_out(offset), expected);
                    }
                    Step::GiveBack(index) => {
                        let offset = model.pick(index);
                        let expected = model.change(offset, HandedOut, Waiting);
                        prop_assert_eq!(tracker.give_back(offset), expected);
                    }
                    Step::Settle(index) => {
                        let offset = model.pick(index);
                        let expected = model.change(offset, HandedOut, Settled);
                        prop_assert_eq!(tracker.settle(offset), expected);
                    }
                }
                let lowest = model.lowest_unsettled();
                let committable = tracker.committable();
                prop_assert_eq!(committable, lowest.or(model.position));
                prop_assert!(committable >= committed, "never goes back");
                committed = committable;
                prop_assert_eq!(tracker.oldest(), lowest);
                prop_assert_eq!(tracker.position(), model.position);
                let span = lowest.map_or(0, |lowest| model.all.range(lowest..).count());
                prop_assert_eq!(tracker.span(), span);
                let out = model.all.values().filter(|state| **state == HandedOut).count();
                prop_assert_eq!(tracker.handed_out(), out);
            }
        }
    }

    #[test]
    fn where_reading_begins_may_be_committed() {
        let mut tracker = OffsetTracker::<()>::new();
        tracker.start_at(7);
        assert_eq!(tracker.committable(), Some(7));
        assert_eq!(tracker.receive(7, ()), Received::New);
        assert_eq!(tracker.committable(), Some(7), "not past what is unsettled");
    }

    #[test]
    fn gaps_do_not_block() {
        let mut tracker = OffsetTracker::new();
        for offset in [3, 7, 20] {
            assert_eq!(tracker.receive(offset, ()), Received::New);
            assert!(tracker.hand_out(offset));
        }
        assert!(tracker.settle(7));
        assert_eq!(tracker.committable(), Some(3));
        assert!(tracker.settle(3));
        assert_eq!(tracker.committable(), Some(20));
        assert!(tracker.settle(20));
        assert_eq!(tracker.committable(), Some(21));
        tracker.advance(22);
        assert_eq!(tracker.committable(), Some(22), "a marker at the end");
    }
}
