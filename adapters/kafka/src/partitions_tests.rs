//! Assignments, releases and turns, without a broker.

use super::*;

const ROOM: Room = Room { deliveries: 100, bytes: 1 << 20 };

struct Bench {
    partitions: Partitions,
    now: Instant,
    timestamp: i64,
}

impl Bench {
    fn new() -> Self {
        let partitions = Partitions::new(1 << 20, 1_000);
        Self { partitions, now: Instant::now(), timestamp: 0 }
    }

    fn receive(&mut self, number: i32, offset: i64) -> Kept {
        let origin =
            Origin::Kafka { topic: "t".into(), partition: number, offset, position_scope: None };
        let envelope = Envelope::new(origin, None);
        self.partitions.receive(Record {
            topic: "t",
            partition: number,
            offset,
            timestamp: Some(self.timestamp),
            envelope,
            received_at: self.now,
        })
    }

    fn receive_all(&mut self, number: i32, offsets: std::ops::Range<i64>) {
        for offset in offsets {
            assert_eq!(self.receive(number, offset), Kept::Waits);
        }
    }

    fn take(&mut self, deliveries: usize) -> Vec<Taken> {
        self.partitions.take(Room { deliveries, ..ROOM }, self.now).0
    }

    fn settle(&mut self, taken: Taken, settlement: Settlement) -> bool {
        self.partitions.settle(taken.epoch, taken.record, settlement, self.now)
    }

    fn commits(&self) -> Vec<i64> {
        let commits = self.partitions.commits(None).into_iter();
        commits.map(|commit| commit.offset).collect()
    }
}

fn offsets(taken: &[Taken]) -> Vec<i64> {
    taken.iter().map(|taken| taken.record.offset).collect()
}

#[test]
fn a_release_comes_again_later_before_what_is_behind_it() {
    let mut bench = Bench::new();
    bench.partitions.assign("t", 0, Scope::NotAsked);
    bench.receive_all(0, 0..5);
    let mut taken = bench.take(4);
    assert!(bench.settle(taken.pop().expect("3"), Settlement::Release));
    assert!(bench.settle(taken.remove(1), Settlement::Release));
    assert!(bench.take(10).is_empty(), "not at once");
    let (_, due) = bench.partitions.take(ROOM, bench.now);
    assert_eq!(due, Some(bench.now + RELEASE_DELAY));
    bench.now += RELEASE_DELAY;
    let again = bench.take(10);
    assert_eq!(offsets(&again), [1, 3, 4]);
    assert_eq!(again[0].record.releases, 1);
    // Each further time it waits longer.
    for taken in again {
        bench.settle(taken, Settlement::Release);
    }
    bench.now += RELEASE_DELAY;
    assert!(bench.take(10).is_empty());
    bench.now += RELEASE_DELAY;
    assert_eq!(offsets(&bench.take(10)), [1, 3, 4]);
}

#[test]
fn an_acker_of_an_earlier_assignment_settles_nothing() {
    let mut bench = Bench::new();
    bench.partitions.assign("t", 0, Scope::NotAsked);
    bench.receive(0, 7);
    let old = bench.take(1).remove(0);
    let fence = old.fence.fence();
    bench.partitions.assign("t", 0, Scope::NotAsked);
    assert!(fence.is_lost());
    bench.receive(0, 7);
    assert!(!bench.settle(old, Settlement::Ack));
    assert_eq!(bench.commits(), [7]);
    let new = bench.take(1).remove(0);
    bench.settle(new, Settlement::Ack);
    assert_eq!(bench.commits(), [8]);
}

#[test]
fn a_drain_drops_what_waits_and_counts_what_is_out() {
    let mut bench = Bench::new();
    bench.partitions.assign("t", 0, Scope::NotAsked);
    bench.receive_all(0, 0..3);
    let mut taken = bench.take(2);
    let epoch = bench.partitions.drain("t", 0).expect("assigned");
    assert!(taken[0].fence.fence().is_lost() || !taken[0].fence.fence().is_open());
    assert!(bench.take(10).is_empty());
    assert_eq!(bench.partitions.handed_out(&[epoch]), 2);
    assert!(!bench.settle(taken.pop().expect("1"), Settlement::Release));
    bench.settle(taken.pop().expect("0"), Settlement::Ack);
    assert_eq!(bench.partitions.handed_out(&[epoch]), 0);
    assert_eq!(bench.commits(), [1]);
    bench.partitions.lose("t", 0);
    assert!(bench.commits().is_empty());
    assert!(!bench.partitions.is_full() && bench.partitions.waiting == 0);
}

#[test]
fn a_log_that_starts_over_gets_a_fence_and_a_tracker_of_its_own() {
    let mut bench = Bench::new();
    bench.partitions.assign("t", 0, Scope::NotAsked);
    bench.receive_all(0, 10..13);
    let old = bench.take(2);
    assert_eq!(bench.receive(0, 3), Kept::StartedOver);
    assert!(old[0].fence.fence().is_lost());
    assert_eq!(offsets(&bench.take(10)), [3], "what waited of the old log is gone");
    for taken in old {
        bench.settle(taken, Settlement::Ack);
    }
    assert_eq!(bench.commits(), [3]);
}

#[test]
fn the_last_record_read_twice_is_one_record() {
    let mut bench = Bench::new();
    bench.partitions.assign("t", 0, Scope::NotAsked);
    bench.receive_all(0, 0..2);
    assert_eq!(bench.receive(0, 1), Kept::Ignored);
    let taken = bench.take(10);
    assert_eq!(offsets(&taken), [0, 1]);
    assert!(taken[0].fence.fence().is_open());
    // Another record with that offset is of another log.
    bench.timestamp += 1;
    assert_eq!(bench.receive(0, 1), Kept::StartedOver);
    assert!(taken[0].fence.fence().is_lost());
}

#[test]
fn partitions_take_turns() {
    let mut bench = Bench::new();
    for number in 0..2 {
        bench.partitions.assign("t", number, Scope::NotAsked);
        bench.receive_all(number, 0..4);
    }
    let mut streams = Vec::new();
    while let [taken] = bench.take(1).as_slice() {
        streams.push(taken.stream.to_string());
    }
    assert_eq!(streams.len(), 8);
    assert_ne!(streams[0], streams[1]);
}

#[test]
fn nothing_is_handed_out_before_its_scope_and_mark_are_stored() {
    let mut bench = Bench::new();
    let epoch = bench.partitions.assign("t", 0, Scope::Wanted);
    for offset in 0..3 {
        assert_eq!(bench.receive(0, offset), Kept::Held);
    }
    assert!(bench.take(10).is_empty());
    // It is paused, and fills nothing that others need.
    assert_eq!(bench.partitions.to_pause(false), (vec![epoch], vec![]));
    bench.partitions.set_paused(&[epoch], true);
    assert_eq!(bench.partitions.waiting, 0);
    bench.partitions.set_scope(epoch, "c/e".into(), Some(2));
    assert_eq!(bench.partitions.waiting, 3);
    assert_eq!(bench.partitions.to_pause(false), (vec![], vec![epoch]));
    let taken = bench.take(10);
    assert_eq!(offsets(&taken), [0, 1]);
    let Origin::Kafka { position_scope, .. } = &taken[0].record.envelope.origin else {
        panic!("kafka")
    };
    assert_eq!(position_scope.as_deref(), Some("c/e"));
    assert_eq!(bench.partitions.unmarked(), [(epoch, "c/e".into(), 0, 3)]);
    bench.partitions.set_mark(epoch, 3);
    assert_eq!(offsets(&bench.take(10)), [2]);
    assert_eq!((bench.partitions.waiting, bench.partitions.waiting_bytes), (0, 0));
}

#[test]
fn a_wide_span_is_paused_until_its_lowest_is_settled() {
    let mut bench = Bench::new();
    bench.partitions.span_max = 3;
    let epoch = bench.partitions.assign("t", 0, Scope::NotAsked);
    bench.receive_all(0, 0..4);
    assert_eq!(bench.partitions.to_pause(false), (vec![epoch], vec![]));
    bench.partitions.set_paused(&[epoch], true);
    let mut taken = bench.take(4);
    bench.settle(taken.pop().expect("3"), Settlement::Ack);
    assert_eq!(bench.partitions.to_pause(false), (vec![], vec![]));
    bench.settle(taken.remove(0), Settlement::Ack);
    assert_eq!(bench.partitions.to_pause(false), (vec![], vec![epoch]));
}

#[test]
fn what_is_read_after_a_stop_is_never_committed() {
    let mut bench = Bench::new();
    bench.partitions.assign("t", 0, Scope::NotAsked);
    bench.receive_all(0, 10..11);
    let taken = bench.take(1).pop().expect("10");
    bench.partitions.stop_taking();
    for offset in 11..14 {
        assert_eq!(bench.receive(0, offset), Kept::Ignored);
    }
    let report = r#"{"topics":{"t":{"partitions":{"0":{"partition":0,"app_offset":14,
        "committed_offset":-1001,"hi_offset":14,"ls_offset":14}}}}}"#;
    let statistics: Statistics = serde_json::from_str(report).expect("a report");
    for _ in 0..3 {
        bench.partitions.observe(&statistics, true);
    }
    bench.settle(taken, Settlement::Ack);
    bench.partitions.observe(&statistics, true);
    assert_eq!(bench.commits(), [11]);
}
