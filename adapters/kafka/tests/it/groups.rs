//! Offsets and membership: what is committed while members come and go.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use inboxd_conformance::{ensure, eventually};
use inboxd_contract::{ErrorClass, Source, SourcePhase, SourceStatus};
use inboxd_kafka::{KafkaSource, StartAt};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

use crate::support::{
    CLOSE, PATIENCE, Place, WIDE, close, id, ids, numbered, ready, settle, start, take,
};

/// K1: whatever is settled above it, whoever joins and leaves.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_committed_offset_never_passes_an_unsettled_record() {
    let place = Place::new(1).await;
    place.produce(0, &numbered("m", 10)).await;
    let mut config = place.config();
    config.drain_deadline = Some(Duration::from_secs(1));
    let mut first = start(config.clone());
    let mut held = take(&mut first, 10).await;
    let stuck = held.remove(2);
    held.into_iter().for_each(|delivery| delivery.acker.ack());
    place.wait_committed(0, 2).await;

    // A second member comes and goes; the held record outlives the drain.
    let before = first.counters().rebalances();
    let second = start(config.clone());
    ready(&second).await;
    eventually(PATIENCE, async || {
        let rebalances = first.counters().rebalances();
        ensure(rebalances > before, format!("{rebalances} rebalances"))
    })
    .await;
    close(second).await;
    close(first).await;
    assert_eq!(place.committed(0).await.map(|(offset, _)| offset), Some(2));

    // An acker of an assignment that is over settles nothing.
    assert!(stuck.fence.is_lost());
    stuck.acker.ack();
    let mut third = place.open();
    assert_eq!(settle(&mut third, 8).await, numbered("m", 10)[2..]);
    close(third).await;
    assert_eq!(place.committed(0).await.map(|(offset, _)| offset), Some(10));
}

/// K2: polling goes on while nothing is taken, far beyond `max.poll.interval.ms`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stalled_engine_costs_no_membership_and_no_record() {
    const COUNT: usize = 5_000;
    let place = Place::new(2).await;
    let mut config = place.config();
    config.properties.insert("max.poll.interval.ms".into(), "6000".into());
    let mut source = start(config);
    ready(&source).await;
    for partition in 0..2 {
        place.produce(partition, &numbered(&format!("{partition}-"), COUNT)).await;
    }
    let mut status = source.status();
    let paused = status.wait_for(|status| {
        status.partitions.len() == 2 && status.partitions.iter().all(|report| report.paused)
    });
    timeout(PATIENCE, paused).await.expect("a full queue pauses").expect("the source lives");
    tokio::time::sleep(Duration::from_secs(8)).await;

    let mut came: [Vec<String>; 2] = Default::default();
    while came.iter().map(Vec::len).sum::<usize>() < 2 * COUNT {
        let batch = timeout(PATIENCE, source.next_batch(WIDE)).await;
        for delivery in batch.expect("records come").expect("the source goes on") {
            let id = id(&delivery);
            came[usize::from(id.starts_with('1'))].push(id);
            delivery.acker.ack();
        }
    }
    for (partition, came) in came.iter().enumerate() {
        assert_eq!(*came, numbered(&format!("{partition}-"), COUNT), "none skipped or doubled");
    }
    assert_eq!(source.counters().rebalances(), 1, "the first assignment and nothing else");
    let mut status = source.status();
    let resumed = status.wait_for(|status| {
        status.partitions.iter().all(|report| !report.paused && report.lag == Some(0))
    });
    timeout(PATIENCE, resumed).await.expect("none stays paused").expect("the source lives");
    close(source).await;
}

/// K3: partitions that are paused stay so for nobody: not for who comes, not for who is left.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_that_comes_and_goes_leaves_no_partition_paused() {
    const PARTITIONS: i32 = 4;
    const COUNT: usize = 1_500;
    let place = Place::new(PARTITIONS).await;
    let mut first = place.open();
    ready(&first).await;
    for partition in 0..PARTITIONS {
        place.produce(partition, &numbered(&format!("{partition}-"), COUNT)).await;
    }
    let paused = |source: &KafkaSource| {
        let partitions = source.status().borrow().partitions.clone();
        let paused = partitions.iter().filter(|report| report.paused).count();
        ensure(paused == partitions.len() && paused > 0, format!("{partitions:?}"))
    };
    eventually(PATIENCE, async || paused(&first)).await;
    let second = place.open();
    eventually(PATIENCE, async || {
        let count = second.status().borrow().partitions.len();
        ensure(count == 2, format!("{count} partitions"))
    })
    .await;
    eventually(PATIENCE, async || paused(&second)).await;
    close(second).await;

    let mut came = BTreeSet::new();
    while came.len() < PARTITIONS as usize * COUNT {
        let batch = timeout(PATIENCE, first.next_batch(WIDE)).await;
        for delivery in batch.expect("records come").expect("the source goes on") {
            assert!(came.insert(id(&delivery)), "{} came twice", id(&delivery));
            delivery.acker.ack();
        }
    }
    let mut status = first.status();
    let drained = status.wait_for(|status| {
        status.partitions.len() == PARTITIONS as usize
            && status.partitions.iter().all(|report| !report.paused && report.lag == Some(0))
    });
    timeout(PATIENCE, drained).await.expect("lag 0, none paused").expect("the source lives");
    close(first).await;
}

/// One member of a fleet: takes and acks until it is told to leave.
struct Member {
    stop: tokio_util::sync::CancellationToken,
    task: JoinHandle<()>,
}

impl Member {
    fn start(mut source: Box<KafkaSource>, seen: Arc<Mutex<BTreeSet<String>>>) -> Self {
        let stop = tokio_util::sync::CancellationToken::new();
        let stopped = stop.clone();
        let task = tokio::spawn(async move {
            loop {
                tokio::select! {
                    batch = source.next_batch(WIDE) => {
                        let batch = batch.expect("nobody gives up");
                        let mut held = Vec::new();
                        for delivery in batch {
                            seen.lock().expect("no panic").insert(id(&delivery));
                            held.push(delivery.acker);
                        }
                        // Settled a moment later, the last first.
                        tokio::time::sleep(Duration::from_millis(5)).await;
                        held.into_iter().rev().for_each(|acker| acker.ack());
                    }
                    () = stopped.cancelled() => break,
                }
            }
            source.stop_taking().await;
            // A commit that a rebalance refuses is no loss: the records come again.
            let _ = source.close(CLOSE).await;
        });
        Self { stop, task }
    }

    async fn leave(self) {
        self.stop.cancel();
        self.task.await.expect("nobody gives up");
    }
}

/// K5, for one assignor: three members, restarted one after another while records flow.
async fn rolling_restarts_lose_nothing(assignor: &str) {
    const PARTITIONS: i32 = 6;
    let place = Place::new(PARTITIONS).await;
    let seen = Arc::new(Mutex::new(BTreeSet::new()));
    let open = || {
        let mut config = place.config();
        config.properties.insert("partition.assignment.strategy".into(), assignor.into());
        Member::start(start(config), Arc::clone(&seen))
    };
    let mut members = vec![open(), open(), open()];
    let mut expected = BTreeSet::new();
    let mut ends = [0_i64; PARTITIONS as usize];
    for round in 0..5 {
        for partition in 0..PARTITIONS {
            let ids = numbered(&format!("{round}-{partition}-"), 20);
            place.produce(partition, &ids).await;
            ends[usize::try_from(partition).expect("small")] += 20;
            expected.extend(ids);
        }
        members.remove(0).leave().await;
        members.push(open());
    }
    eventually(PATIENCE, async || {
        let seen = seen.lock().expect("no panic");
        let missing = expected.difference(&seen).count();
        ensure(missing == 0, format!("{missing} of {} are missing", expected.len()))
    })
    .await;
    for (partition, end) in (0..).zip(ends) {
        place.wait_committed(partition, end).await;
    }
    for member in members {
        member.leave().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rolling_restarts_lose_nothing_with_cooperative_sticky() {
    rolling_restarts_lose_nothing("cooperative-sticky").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rolling_restarts_lose_nothing_with_range_and_roundrobin() {
    rolling_restarts_lose_nothing("range,roundrobin").await;
}

/// The second revoke of an eager assignor drains like the first of a cooperative one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_eager_revoke_waits_for_what_is_under_way() {
    let place = Place::new(2).await;
    place.produce(0, &["a"]).await;
    place.produce(1, &["b"]).await;
    let eager = || {
        let mut config = place.config();
        config.properties.insert("partition.assignment.strategy".into(), "range".into());
        start(config)
    };
    let mut first = eager();
    let held = take(&mut first, 2).await;
    let mut second = eager();
    for delivery in &held {
        timeout(PATIENCE, delivery.fence.closed()).await.expect("all partitions drain");
        assert!(!delivery.fence.is_lost(), "it drains before it is lost");
    }
    let fences: Vec<_> = held.iter().map(|delivery| delivery.fence.clone()).collect();
    held.into_iter().for_each(|delivery| delivery.acker.ack());
    for fence in fences {
        timeout(PATIENCE, fence.lost()).await.expect("then it is handed over");
    }
    place.wait_committed(0, 1).await;
    place.wait_committed(1, 1).await;
    ready(&second).await;
    place.produce(0, &["c"]).await;
    place.produce(1, &["d"]).await;
    let mut came = BTreeSet::new();
    while came.len() < 2 {
        let batch = tokio::select! {
            batch = first.next_batch(WIDE) => batch,
            batch = second.next_batch(WIDE) => batch,
            () = tokio::time::sleep(PATIENCE) => panic!("only {came:?} came"),
        };
        for delivery in batch.expect("nobody gives up") {
            came.insert(id(&delivery));
            delivery.acker.ack();
        }
    }
    assert_eq!(came, BTreeSet::from(["c".to_owned(), "d".to_owned()]));
    close(first).await;
    close(second).await;
}

/// A static member that restarts keeps its partitions; one that is replaced ends, loudly.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn static_members_keep_their_partitions_and_a_fenced_one_ends() {
    let place = Place::new(1).await;
    let open = || {
        let mut config = place.config();
        config.properties.insert("group.instance.id".into(), "one".into());
        start(config)
    };
    let mut first = open();
    place.produce(0, &["a"]).await;
    assert_eq!(settle(&mut first, 1).await, ["a"]);
    close(first).await;
    place.produce(0, &["b"]).await;
    let began = Instant::now();
    let mut second = open();
    assert_eq!(settle(&mut second, 1).await, ["b"]);
    assert!(began.elapsed() < Duration::from_secs(5), "no session had to run out");
    place.wait_committed(0, 2).await;

    let mut third = open();
    let fenced = timeout(PATIENCE, second.next_batch(WIDE)).await.expect("it does not hang");
    let error = fenced.expect_err("fenced");
    assert_eq!(error.class, ErrorClass::Permanent);
    assert!(error.to_string().contains("group.instance.id"), "{error}");
    place.produce(0, &["c"]).await;
    let came = take(&mut third, 1).await;
    assert_eq!(ids(&came), ["c"]);
    came.into_iter().for_each(|delivery| delivery.acker.ack());
    let _ = second.close(Duration::from_secs(5)).await;
    close(third).await;
}

/// The group protocol of Kafka 4, which a property asks for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_new_group_protocol_drains_and_commits_too() {
    let place = Place::new(2).await;
    place.produce(0, &["a"]).await;
    place.produce(1, &["b"]).await;
    let open = || {
        let mut config = place.config();
        config.properties.remove("session.timeout.ms");
        config.properties.remove("heartbeat.interval.ms");
        config.properties.insert("group.protocol".into(), "consumer".into());
        start(config)
    };
    let mut first = open();
    let mut held = take(&mut first, 2).await;
    ready(&first).await;
    let second = open();
    let moved = async {
        tokio::select! {
            () = held[0].fence.closed() => 0,
            () = held[1].fence.closed() => 1,
        }
    };
    let moved = held.remove(timeout(PATIENCE, moved).await.expect("one partition moves"));
    assert!(!moved.fence.is_lost(), "it drains before it is lost");
    let fence = moved.fence.clone();
    moved.acker.ack();
    timeout(PATIENCE, fence.lost()).await.expect("then it is handed over");
    held.remove(0).acker.ack();
    place.wait_committed(0, 1).await;
    place.wait_committed(1, 1).await;
    ready(&second).await;
    close(first).await;
    close(second).await;
}

/// A source that cannot go on keeps no partition from members that can, though it is not closed
/// yet and its session would last.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_that_has_failed_leaves_its_group() {
    let place = Place::new(1).await;
    let mut config = place.config();
    config.properties.insert("session.timeout.ms".into(), "45000".into());
    config.start = StartAt::Refuse;
    let mut failed = start(config);
    let error = timeout(PATIENCE, failed.next_batch(WIDE)).await.expect("in time");
    assert_eq!(error.expect_err("no offset is committed").class, ErrorClass::Permanent);
    place.produce(0, &["a"]).await;
    let mut other = place.open();
    let came = timeout(Duration::from_secs(30), settle(&mut other, 1)).await;
    assert_eq!(came.expect("before the session would have run out"), ["a"]);
    assert_eq!(failed.status().borrow().phase, SourcePhase::Failing);
    close(other).await;
    close(failed).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_without_partitions_is_ready() {
    let place = Place::new(1).await;
    let members: Vec<_> = (0..2).map(|_| place.open()).collect();
    for member in &members {
        ready(member).await;
    }
    let with = members.iter().filter(|member| !member.status().borrow().partitions.is_empty());
    assert!(with.count() <= 1, "one partition has one owner");
    for member in members {
        close(member).await;
    }
}

/// Members with an inbox each do not deduplicate each other's messages: said, not guessed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_offset_committed_beside_another_inbox_is_noticed() {
    let place = Place::new(2).await;
    place.commit_elsewhere(0, 0, "inbox-of-others").await;
    place.produce(0, &["a"]).await;
    let mut config = place.config();
    config.commit_metadata = Some("inbox-of-ours".into());
    let mut source = start(config.clone());
    assert_eq!(settle(&mut source, 1).await, ["a"]);
    let counted =
        |status: &SourceStatus| status.counts.foreign_commits == 1 && status.counts.rebalances >= 1;
    timeout(PATIENCE, source.status().wait_for(counted)).await.expect("told").expect("it lives");
    close(source).await;
    assert_eq!(place.committed(0).await, Some((1, "inbox-of-ours".into())));

    let source = start(config);
    ready(&source).await;
    assert_eq!(source.counters().foreign_commits(), 0, "our own is no other's");
    close(source).await;
}

/// I7: what is above an unsettled record is bounded.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partition_that_runs_ahead_of_an_unsettled_record_is_paused() {
    const SPAN: usize = 50;
    let place = Place::new(2).await;
    let mut config = place.config();
    config.offset_span_max = SPAN;
    // So that what is fetched ahead is little beside the span.
    config.in_flight_bytes_max = 64 << 10;
    let mut source = start(config);
    place.produce(0, &numbered("m", 1_000)).await;
    let stuck = take(&mut source, 1).await.remove(0);
    let mut above = 0;
    let mut status = source.status();
    while !status.borrow().partitions.iter().any(|report| report.paused) {
        if let Ok(batch) = timeout(Duration::from_millis(500), source.next_batch(WIDE)).await {
            for delivery in batch.expect("the source goes on") {
                above += 1;
                delivery.acker.ack();
            }
        }
    }
    // What was read before the pause still comes, and nothing more of this partition does.
    place.produce(1, &["of the other partition"]).await;
    loop {
        let delivery = take(&mut source, 1).await.remove(0);
        let last = id(&delivery) == "of the other partition";
        delivery.acker.ack();
        if last {
            break;
        }
        above += 1;
    }
    assert!(above < 900, "{above} came above the unsettled one");
    let report = status.borrow_and_update().partitions[0].clone();
    assert!(report.paused && report.oldest_unsettled_at.is_some(), "{report:?}");
    stuck.acker.ack();
    for _ in above..999 {
        settle(&mut source, 1).await;
    }
    place.wait_committed(0, 1_000).await;
    close(source).await;
}
