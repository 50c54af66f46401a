//! Store and forward: everything is stored on arrival and acked, workers forward it.

use std::time::Duration;

use bytes::Bytes;
use inboxd::engine::{DeliveryMode, OnMissingId, Ordering, SubscriptionSettings};
use inboxd_conformance::{ensure, eventually};
use inboxd_contract::{DeadReason, Outcome, ParkReason, RetryReason};
use inboxd_memory::{FaultPoint, StoreCall, StoreFault};

use super::world::*;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

fn stored(ordering: Ordering) -> SubscriptionSettings {
    let mut settings = settings();
    settings.delivery = DeliveryMode::Stored;
    settings.ordering = ordering;
    settings.park.initial = 2 * SECOND;
    settings.park.cap = 5 * SECOND;
    settings
}

fn of_lane(world: &World, prefix: &str) -> Vec<String> {
    let calls = world.application.calls().into_iter();
    calls.filter(|c| c.accepted && c.id.starts_with(prefix)).map(|c| c.id).collect()
}

#[tokio::test(start_paused = true)]
async fn everything_is_acked_before_the_application_has_it() {
    let world = World::log(Application::new(|_, _| (10 * SECOND, accepted())));
    let instance = world.start_with(stored(Ordering::None));
    world.publish((0..100).map(|n| format!("m{n}")));
    let begun = tokio::time::Instant::now();
    world.drained().await;
    assert!(begun.elapsed() < 5 * SECOND, "{:?}", begun.elapsed());
    assert_eq!(instance.outcomes(Outcome::Parked), 100);
    assert_eq!(world.copies("m99").await[0].reason, ParkReason::Stored);
    world.processed(100).await;
    let accepted = world.application.accepted();
    assert!(accepted.values().all(|times| *times == 1), "{accepted:?}");
    assert!(world.database.due().is_empty());
    world.publish(["m7"]);
    world.drained().await;
    assert_eq!(instance.outcomes(Outcome::Duplicate), 1);
}

#[tokio::test(start_paused = true)]
async fn each_lane_is_forwarded_in_order_whatever_fails() {
    for ordering in [Ordering::Key, Ordering::Partition] {
        let world = World::log(Application::new(|id, attempt| match attempt {
            1..=3 if id.ends_with('3') => (MS, retry(RetryReason::ServerError)),
            _ => (7 * MS, accepted()),
        }));
        let (_one, _two) = (world.start_with(stored(ordering)), world.start_with(stored(ordering)));
        let mut expected = [Vec::new(), Vec::new()];
        for number in 0..60 {
            let lane = number % 2;
            let id = format!("{}{number}", ["a", "b"][lane]);
            world.broker.publish(lane, keyed(&id, ["a", "b"][lane]));
            expected[lane].push(id);
        }
        world.processed(60).await;
        for (lane, ids) in ["a", "b"].iter().zip(expected) {
            assert_eq!(of_lane(&world, lane), ids, "{ordering:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn order_outlives_restarts_and_a_change_of_the_way() {
    let world = World::log(Application::new(|_, _| (300 * MS, accepted())));
    let mut number = 0;
    let mut expected = Vec::new();
    for life in 0..4 {
        let mut settings = stored(Ordering::Key);
        if life % 2 == 1 {
            settings.delivery = DeliveryMode::Direct;
        }
        let instance = world.start_with(settings);
        for _ in 0..10 {
            let id = format!("a{number:02}");
            world.broker.publish(0, keyed(&id, "a"));
            expected.push(id);
            number += 1;
        }
        let calls = world.application.calls().len();
        eventually(PATIENCE, async || {
            ensure(world.application.calls().len() >= calls + 3, "too few calls")
        })
        .await;
        instance.crash();
    }
    let _last = world.start_with(stored(Ordering::Key));
    world.processed(expected.len()).await;
    let mut seen = of_lane(&world, "a");
    // A death at the application is the window in which one is forwarded once more.
    seen.dedup();
    assert_eq!(seen, expected);
}

/// Whatever happens to the arrivals, each is there once, in order.
#[tokio::test(start_paused = true)]
async fn arrivals_outlive_every_failure_of_the_database() {
    for point in [FaultPoint::AfterCommit, FaultPoint::BeforeCommit] {
        let world = World::log(Application::accepting());
        let instance = world.start_with(stored(Ordering::Partition));
        for _ in 0..5 {
            instance.faults.push(StoreCall::Arrive, StoreFault::at(point));
        }
        let ids: Vec<_> = (0..30).map(|n| format!("m{n}")).collect();
        world.publish(&ids);
        world.processed(30).await;
        assert_eq!(of_lane(&world, "m"), ids, "{point:?}");
        assert_eq!(instance.outcomes(Outcome::Parked), 30, "{point:?}");
    }
    let world = World::log(Application::accepting());
    world.database.set_available(false);
    let _instance = world.start_with(stored(Ordering::Partition));
    world.publish((0..10).map(|n| format!("m{n}")));
    tokio::time::sleep(60 * SECOND).await;
    assert_eq!(world.broker.unsettled(), 10, "nothing is acked without its copy");
    world.database.set_available(true);
    world.processed(10).await;
    world.drained().await;
}

#[tokio::test(start_paused = true)]
async fn an_arrival_that_is_locked_stops_no_other_lane() {
    let world = World::log(Application::accepting());
    let lock = world.database.lock_claim(&key("m1"));
    let instance = world.start_with(stored(Ordering::Key));
    for (id, lane) in [("m0", "a"), ("m1", "b"), ("m2", "b"), ("m3", "c")] {
        world.broker.publish(0, keyed(id, lane));
    }
    world.processed(2).await;
    tokio::time::sleep(10 * SECOND).await;
    assert_eq!(world.application.calls_of("m2"), 0, "it is behind the locked one");
    drop(lock);
    world.processed(4).await;
    world.drained().await;
    assert_eq!(instance.outcomes(Outcome::Parked), 4);
    assert_eq!(of_lane(&world, "m"), ["m0", "m3", "m1", "m2"]);
}

#[tokio::test(start_paused = true)]
async fn copies_of_what_is_stored_dead_or_processed_are_told_apart() {
    let world = World::queue(Application::new(|id, _| match id {
        "bad" => (MS, refused()),
        _ => (SECOND, accepted()),
    }));
    let instance = world.start_with(stored(Ordering::None));
    world.publish(["m1"]);
    world.drained().await;
    world.publish(["m1"]);
    world.broker.publish(0, with_body("m1", b"another"));
    world.drained().await;
    assert_eq!(instance.outcomes(Outcome::ParkedDuplicate), 1);
    assert_eq!(instance.outcomes(Outcome::IdConflict), 1);
    world.processed(1).await;
    world.publish(["bad"]);
    world.dead(2).await;
    eventually(PATIENCE, async || ensure(instance.settled("dead_lettered") == 1, "not counted"))
        .await;
    world.broker.publish(0, with_body("m1", b"a third"));
    world.drained().await;
    assert_eq!(instance.outcomes(Outcome::IdConflict), 2);
}

#[tokio::test(start_paused = true)]
async fn what_is_not_forwarded_goes_its_way_as_in_direct_delivery() {
    let world = World::log(Application::accepting());
    let mut settings = stored(Ordering::None);
    settings.identity.on_missing = OnMissingId::Forward;
    settings.identity.on_missing_is_explicit = true;
    settings.body_bytes_max = 100;
    let instance = world.start_with(settings);
    world.broker.publish(0, with_body("large", &[b'x'; 200]));
    world.broker.publish(0, bare(b"no id"));
    world.drained().await;
    assert_eq!(world.copies("large").await[0].reason, DeadReason::BodyTooLarge);
    world.processed(1).await;
    assert_eq!(instance.outcomes(Outcome::DeadLettered), 1);
    assert_eq!(instance.outcomes(Outcome::Parked), 1);
}

#[tokio::test(start_paused = true)]
async fn a_drain_stores_what_was_taken_and_leaves_the_rest() {
    let world = World::log(Application::new(|_, _| (5 * SECOND, accepted())));
    let mut few = stored(Ordering::Key);
    few.concurrency = 2;
    let instance = world.start_with(few);
    for number in 0..20 {
        world.broker.publish(0, keyed(&format!("m{number:02}"), "a"));
    }
    world.called("m01", 1).await;
    let report = instance.drain(30 * SECOND).await;
    assert_eq!(report.cut, 0);
    assert_eq!(world.database.processed().len(), 2);
    assert_eq!(world.database.claims_held(), 0);
    let copy = world.copies("m05").await.remove(0);
    assert_eq!(copy.attempts, 0, "what was not started counts nothing");
    let _other = world.start_with(stored(Ordering::Key));
    world.processed(20).await;
    let seen = of_lane(&world, "m");
    assert!(seen.is_sorted() && seen.len() == 20, "{seen:?}");
}

/// Messages that hang whenever they are tried leave the healthy ones their slots and their room.
#[tokio::test(start_paused = true)]
async fn messages_that_fail_for_long_leave_the_others_their_room() {
    let world = World::log(Application::new(|id, _| match id.starts_with("bad") {
        true => (20 * SECOND, retry(RetryReason::Timeout)),
        false => (10 * MS, accepted()),
    }));
    let mut settings = stored(Ordering::None);
    settings.breaker.failures = 0;
    settings.park.attempts_max = 1_000;
    settings.park.initial = MS;
    settings.park.cap = MS;
    let instance = world.start_with(settings);
    world.publish((0..200).map(|n| format!("bad{n}")));
    // Each has been tried once; from now on they are due all the time.
    eventually(PATIENCE, async || {
        let tried = world.application.calls().iter().filter(|call| call.attempt > 1).count();
        ensure(tried >= 4, format!("{tried} further attempts"))
    })
    .await;
    eventually(PATIENCE, async || {
        let firsts = world.application.calls().iter().filter(|call| call.attempt == 1).count();
        ensure(firsts == 200, format!("{firsts} first attempts"))
    })
    .await;
    tokio::time::sleep(25 * SECOND).await;
    let begun = tokio::time::Instant::now();
    world.publish((0..500).map(|n| format!("good{n}")));
    world.processed(500).await;
    assert!(begun.elapsed() < 15 * SECOND, "{:?}", begun.elapsed());
    assert!(instance.settled("released") > 0);
}

#[tokio::test(start_paused = true)]
async fn bodies_are_kept_byte_for_byte() {
    let world = World::log(Application::new(|_, _| (MS, retry(RetryReason::ServerError))));
    let _instance = world.start_with(stored(Ordering::None));
    let body: Vec<u8> = (0..=255).collect();
    world.broker.publish(0, with_body("m1", &body));
    world.drained().await;
    assert_eq!(world.copies("m1").await[0].envelope.body, Some(Bytes::from(body)));
}
