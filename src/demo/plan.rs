//! What is published, in which order: a pure function of the number of messages and a seed.
//!
//! Invariants: each id is published once or twice, never more; about a third of the records
//! are second copies, half of them right behind the first (concurrent), half of them
//! much later (republished); both copies have the same bytes.

use std::collections::BTreeMap;

use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

/// How many other ids at least come between an id and its republished copy.
const REPUBLISHED_AFTER_MIN: u32 = 50;
/// How many at most, where there are as many.
const REPUBLISHED_AFTER_MAX: u32 = 3_000;

/// Why a record is in the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Copy {
    /// The first of its id.
    First,
    /// The same id right behind the first, often on another partition.
    Concurrent,
    /// The same id again, after many others.
    Republished,
}

/// One record to publish.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Record {
    /// The id's number, from 0.
    pub(super) number: u32,
    /// Which copy of its id.
    pub(super) copy: Copy,
    /// Where it goes.
    pub(super) partition: i32,
}

/// All records, in the order in which they are published.
#[derive(Debug)]
pub(super) struct Plan {
    records: Vec<Record>,
    distinct: u32,
    seed: u64,
}

impl Plan {
    /// Draws a plan of `messages` records over `partitions` partitions.
    pub(super) fn draw(messages: u32, partitions: i32, seed: u64) -> Self {
        let mut random = SmallRng::seed_from_u64(seed);
        let copies = messages / 3;
        let distinct = messages - copies;
        let mut kinds = vec![Copy::First; distinct as usize];
        kinds[..copies as usize].fill(Copy::Republished);
        kinds[..copies as usize / 2].fill(Copy::Concurrent);
        kinds.shuffle(&mut random);

        let mut records = Vec::with_capacity(messages as usize);
        // The id before which a copy is published → the ids of the copies.
        let mut later: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for (number, kind) in (0..distinct).zip(kinds) {
            let mut publish = |number, copy| {
                records.push(Record { number, copy, partition: random.random_range(0..partitions) })
            };
            publish(number, Copy::First);
            for again in later.remove(&number).unwrap_or_default() {
                publish(again, Copy::Republished);
            }
            match kind {
                Copy::First => {}
                Copy::Concurrent => publish(number, Copy::Concurrent),
                Copy::Republished => {
                    let after = random.random_range(REPUBLISHED_AFTER_MIN..=REPUBLISHED_AFTER_MAX);
                    later.entry((number + after).min(distinct)).or_default().push(number);
                }
            }
        }
        // Those whose place would be behind the last id.
        for number in later.into_values().flatten() {
            records.push(Record {
                number,
                copy: Copy::Republished,
                partition: random.random_range(0..partitions),
            });
        }
        Self { records, distinct, seed }
    }

    /// The records in order.
    pub(super) fn records(&self) -> &[Record] {
        &self.records
    }

    /// How many different ids there are; their numbers are below it.
    pub(super) fn distinct(&self) -> u32 {
        self.distinct
    }

    /// How many records are this kind of copy.
    pub(super) fn count(&self, copy: Copy) -> u64 {
        self.records.iter().filter(|record| record.copy == copy).count() as u64
    }

    /// The body of an id: the same for each of its copies.
    pub(super) fn body(&self, number: u32) -> String {
        let mut random = SmallRng::seed_from_u64(self.seed ^ u64::from(number).rotate_left(32));
        let customer: u32 = random.random_range(1..5_000);
        let cents: u32 = random.random_range(100..100_000);
        format!(r#"{{"order":{number},"customer":{customer},"amount_cents":{cents}}}"#)
    }
}

/// The message id of a number.
pub(super) fn message_id(number: u32) -> String {
    format!("order-{number:06}")
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn plan() -> Plan {
        Plan::draw(20_000, 8, 7)
    }

    #[test]
    fn a_third_are_second_copies_half_of_them_of_each_kind() {
        let plan = plan();
        assert_eq!(plan.records().len(), 20_000);
        assert_eq!(plan.distinct(), 13_334);
        assert_eq!(plan.count(Copy::First), 13_334);
        assert_eq!(plan.count(Copy::Concurrent), 3_333);
        assert_eq!(plan.count(Copy::Republished), 3_333);
    }

    #[test]
    fn every_id_comes_first_as_its_first_copy_and_at_most_twice() {
        let mut seen: HashMap<u32, u32> = HashMap::new();
        for record in plan().records() {
            let times = seen.entry(record.number).or_default();
            assert_eq!(*times == 0, record.copy == Copy::First);
            *times += 1;
            assert!(*times <= 2);
        }
        assert_eq!(seen.len(), 13_334);
        assert_eq!(seen.keys().max(), Some(&13_333));
    }

    #[test]
    fn concurrent_copies_are_back_to_back_and_republished_ones_far_behind() {
        let plan = plan();
        let mut first_at = HashMap::new();
        let mut on_another_partition = 0;
        for (at, record) in plan.records().iter().enumerate() {
            match record.copy {
                Copy::First => drop(first_at.insert(record.number, (at, record.partition))),
                Copy::Concurrent => {
                    let (first, partition) = first_at[&record.number];
                    assert!(at - first <= 1 + plan.republished_between(first, at));
                    on_another_partition += u32::from(partition != record.partition);
                }
                // The last ids have no room behind them.
                Copy::Republished if record.number + 3_000 < plan.distinct() => {
                    assert!(at - first_at[&record.number].0 >= 50);
                }
                Copy::Republished => {}
            }
        }
        assert!(on_another_partition > 2_000);
    }

    impl Plan {
        fn republished_between(&self, first: usize, last: usize) -> usize {
            let between = &self.records[first..last];
            between.iter().filter(|record| record.copy == Copy::Republished).count()
        }
    }

    #[test]
    fn a_seed_draws_the_same_plan_again_and_another_one_does_not() {
        assert_eq!(plan().records(), plan().records());
        assert_ne!(plan().records(), Plan::draw(20_000, 8, 8).records());
        assert_eq!(plan().body(5), plan().body(5));
        assert_ne!(plan().body(5), plan().body(6));
    }
}
