//! What fails is parked and forwarded by workers: attempts, ages, restarts, lost answers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use inboxd::engine::{OnIdConflict, SubscriptionSettings};
use inboxd_conformance::{ensure, eventually};
use inboxd_contract::{DeadReason, Outcome, ParkReason, ParkedState, RetryReason, Verdict};
use inboxd_memory::{FaultPoint, MemoryTable, StoreCall, StoreFault};

use super::world::*;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

/// Three attempts in place, then once a few seconds.
fn soon() -> SubscriptionSettings {
    let mut settings = settings();
    settings.retry.attempts_max = 3;
    settings.park.initial = 2 * SECOND;
    settings.park.cap = 10 * SECOND;
    settings
}

/// Fails the first attempts of every message.
fn failing(attempts: u32, reason: RetryReason) -> Application {
    Application::new(move |_, attempt| match attempt <= attempts {
        true => (MS, retry(reason)),
        false => (MS, accepted()),
    })
}

#[tokio::test(start_paused = true)]
async fn what_fails_is_parked_and_acked_and_arrives_when_the_application_heals() {
    let world = World::queue(failing(5, RetryReason::ServerError));
    let instance = world.start_with(soon());
    world.publish(["m1", "m2"]);
    world.drained().await;
    assert_eq!(instance.outcomes(Outcome::Parked), 2);
    assert!(world.database.processed().is_empty(), "acked before it was processed");
    assert_eq!(world.copies("m1").await[0].reason, ParkReason::Failed);
    assert_eq!(instance.subscription.in_flight(), 0, "it holds nothing while it waits");
    world.processed(2).await;
    let attempts: Vec<u32> =
        world.application.calls().iter().filter(|c| c.id == "m1").map(|c| c.attempt).collect();
    assert_eq!(attempts, [1, 2, 3, 4, 5, 6], "every attempt has its own number");
    assert_eq!(world.database.rows_of(MemoryTable::Parked, &key("m1")), 0);
    assert_eq!(world.database.claims_held(), 0);
    world.publish(["m1"]);
    world.drained().await;
    assert_eq!((instance.settled("processed"), instance.settled("rescheduled")), (2, 4));
    assert_eq!(instance.outcomes(Outcome::Duplicate), 1);
}

#[tokio::test(start_paused = true)]
async fn what_is_parked_is_taken_by_whoever_lives() {
    let healed = Arc::new(AtomicBool::new(false));
    let state = healed.clone();
    let world = World::queue(Application::new(move |_, _| match state.load(SeqCst) {
        true => (MS, accepted()),
        false => (MS, retry(RetryReason::ServerError)),
    }));
    let instance = world.start_with(soon());
    world.publish(["m1"]);
    world.drained().await;
    let before = world.application.calls().last().unwrap().attempt;
    instance.crash();
    healed.store(true, SeqCst);
    let other = world.start_with(soon());
    world.processed(1).await;
    eventually(PATIENCE, async || ensure(other.settled("processed") == 1, "not counted")).await;
    let last = world.application.calls().last().unwrap().attempt;
    assert!(last > before, "attempts are kept: {last} after {before}");
}

/// K4: always 500, and a restart after each second attempt.
#[tokio::test(start_paused = true)]
async fn attempts_are_bounded_in_all_whatever_dies_in_between() {
    let world = World::queue(Application::new(|_, _| (MS, retry(RetryReason::ServerError))));
    let mut few = soon();
    few.park.attempts_max = 7;
    world.publish(["m1"]);
    for life in 0..20 {
        let instance = world.start_with(few.clone());
        let calls = world.application.calls().len();
        eventually(PATIENCE, async || {
            let made = world.application.calls().len() - calls;
            let is_dead = world.database.dead().len() == 1;
            ensure(made >= 2 || is_dead, format!("{made} in life {life}"))
        })
        .await;
        instance.crash();
        if world.database.dead().len() == 1 {
            break;
        }
    }
    let calls = world.application.calls();
    assert_eq!(world.database.dead().len(), 1, "{calls:?}");
    assert!(calls.len() <= 7, "{calls:?}");
    assert!(world.copies("m1").await[0].attempts <= 8);
    assert_eq!(world.copies("m1").await[0].reason, DeadReason::AttemptsExhausted);
}

#[tokio::test(start_paused = true)]
async fn what_is_always_refused_service_is_dead_by_age_alone() {
    for reason in [RetryReason::Overloaded, RetryReason::Endpoint, RetryReason::Unreachable] {
        let world = World::queue(Application::new(move |_, _| (MS, retry(reason))));
        let mut short = soon();
        short.park.attempts_max = 3;
        short.park.elapsed_max = 300 * SECOND;
        let begun = tokio::time::Instant::now();
        let _instance = world.start_with(short);
        world.publish(["m1"]);
        world.dead(1).await;
        assert!(begun.elapsed() >= 300 * SECOND, "{reason:?} after {:?}", begun.elapsed());
        assert_eq!(world.copies("m1").await[0].reason, DeadReason::TooOld, "{reason:?}");
        assert_eq!(world.broker.unsettled(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn the_application_asks_for_it_later() {
    let world = World::queue(Application::new(|_, attempt| match attempt {
        1 => (MS, Verdict::Park { status: 503 }),
        _ => (MS, accepted()),
    }));
    let instance = world.start_with(soon());
    world.publish(["m1"]);
    world.drained().await;
    assert_eq!(instance.outcomes(Outcome::Parked), 1);
    assert_eq!(world.application.calls_of("m1"), 1, "nothing is tried in place");
    assert_eq!(world.copies("m1").await[0].reason, ParkReason::Asked);
    world.processed(1).await;
}

/// What the application asks for is more than the time in place.
#[tokio::test(start_paused = true)]
async fn a_long_wait_is_spent_parked() {
    let world = World::queue(Application::new(|_, attempt| match attempt {
        1 => {
            let (reason, after) = (RetryReason::Overloaded, Some(300 * SECOND));
            (MS, Verdict::Retry { reason, status: Some(503), after, detail: String::new() })
        }
        _ => (MS, accepted()),
    }));
    let _instance = world.start_with(soon());
    world.publish(["m1"]);
    let begun = tokio::time::Instant::now();
    world.drained().await;
    assert!(begun.elapsed() < 10 * SECOND, "held for {:?}", begun.elapsed());
    world.processed(1).await;
    assert!(begun.elapsed() >= 300 * SECOND, "asked again after {:?}", begun.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_delivery_is_held_no_longer_than_hold_max() {
    // One message takes the only slot; the other waits for it.
    let world = World::log(Application::new(|id, _| match id {
        "slow" => (500 * SECOND, accepted()),
        _ => (MS, accepted()),
    }));
    let mut short = settings();
    short.concurrency = 1;
    short.callback_timeout = 1_000 * SECOND;
    short.hold_max = 60 * SECOND;
    let _instance = world.start_with(short);
    world.publish(["slow"]);
    world.called("slow", 1).await;
    world.publish(["m1", "m2", "m3"]);
    let begun = tokio::time::Instant::now();
    eventually(PATIENCE, async || {
        let left = world.broker.unsettled();
        ensure(left == 1, format!("{left} unsettled"))
    })
    .await;
    assert!(begun.elapsed() < 100 * SECOND, "{:?}", begun.elapsed());
    assert_eq!(world.copies("m3").await[0].reason, ParkReason::HeldTooLong);
    world.processed(4).await;
    let accepted = world.application.accepted();
    assert!(accepted.values().all(|times| *times == 1), "{accepted:?}");
}

/// N6, with the first content parked.
#[tokio::test(start_paused = true)]
async fn another_content_than_a_parked_one_is_an_id_conflict() {
    for policy in [OnIdConflict::DeadLetter, OnIdConflict::Duplicate] {
        let world = World::queue(failing(4, RetryReason::ServerError));
        let mut settings = soon();
        settings.identity.on_conflict = policy;
        let instance = world.start_with(settings);
        world.broker.publish(0, with_body("m1", b"one"));
        world.drained().await;
        world.broker.publish(0, with_body("m1", b"two"));
        world.broker.publish(0, with_body("m1", b"one"));
        world.drained().await;
        assert_eq!(instance.figure("inboxd_id_conflicts_total", ""), 1);
        let (conflicts, duplicates) = match policy {
            OnIdConflict::DeadLetter => (1, 1),
            OnIdConflict::Duplicate => (0, 2),
        };
        assert_eq!(instance.outcomes(Outcome::IdConflict), conflicts);
        assert_eq!(instance.outcomes(Outcome::ParkedDuplicate), duplicates);
        world.processed(1).await;
        assert_eq!(world.database.dead().len(), conflicts);
    }
}

/// N6, with the parked content overtaken by another one.
#[tokio::test(start_paused = true)]
async fn a_parked_message_whose_id_was_processed_with_another_content_is_a_conflict() {
    let world = World::queue(failing(3, RetryReason::ServerError));
    let instance = world.start_with(soon());
    world.broker.publish(0, with_body("m1", b"one"));
    world.drained().await;
    world.database.insert_message(&key("m1"));
    eventually(PATIENCE, async || {
        ensure(instance.settled("duplicate") == 1, "the row is still there")
    })
    .await;
    assert_eq!(world.database.rows_of(MemoryTable::Parked, &key("m1")), 0);
    assert_eq!(world.application.accepted().len(), 0, "what is processed is not forwarded");
}

#[tokio::test(start_paused = true)]
async fn a_twin_of_a_delivery_that_is_parked_is_a_duplicate_of_it() {
    let world = World::queue(failing(4, RetryReason::ServerError));
    let instance = world.start_with(soon());
    world.publish(["m1", "m1", "m1"]);
    world.drained().await;
    assert_eq!(instance.outcomes(Outcome::Parked), 1);
    assert_eq!(instance.outcomes(Outcome::ParkedDuplicate), 2);
    world.processed(1).await;
    assert_eq!(world.application.accepted()["m1"], 1);
}

/// R7: five that fail with a long backoff, prefetch five, then fifty good ones.
#[tokio::test(start_paused = true)]
async fn messages_that_fail_let_the_good_ones_pass() {
    let world = World::queue(Application::new(|id, attempt| match id.starts_with("bad") {
        true if attempt < 10 => (MS, retry(RetryReason::Overloaded)),
        _ => (MS, accepted()),
    }));
    let mut narrow = soon();
    narrow.in_flight_max = 5;
    narrow.breaker.failures = 0;
    let _instance = world.start_with(narrow);
    world.publish((0..5).map(|n| format!("bad{n}")));
    world.publish((0..50).map(|n| format!("good{n}")));
    let begun = tokio::time::Instant::now();
    world.drained().await;
    assert!(begun.elapsed() < 30 * SECOND, "{:?}", begun.elapsed());
    let good = world.application.accepted().keys().filter(|id| id.starts_with("good")).count();
    assert_eq!(good, 50);
    world.processed(55).await;
}

/// A3 for each call of a parked message's way: its answer is lost, or it fails.
#[tokio::test(start_paused = true)]
async fn lost_answers_and_failures_of_each_call_change_nothing() {
    use StoreCall::{Complete, Park, Reschedule, TakeDue};
    for call in [Park, TakeDue, Reschedule, Complete] {
        for point in [FaultPoint::AfterCommit, FaultPoint::BeforeCommit] {
            let world = World::queue(failing(4, RetryReason::ServerError));
            let instance = world.start_with(soon());
            for _ in 0..2 {
                instance.faults.push(call, StoreFault::at(point));
            }
            world.publish(["m1"]);
            world.processed(1).await;
            assert_eq!(instance.outcomes(Outcome::Parked), 1, "{call:?} {point:?}");
            eventually(PATIENCE, async || {
                let processed = instance.settled("processed");
                ensure(processed == 1, format!("{processed}: {call:?} {point:?}"))
            })
            .await;
            assert_eq!(world.application.accepted()["m1"], 1, "{call:?} {point:?}");
            assert_eq!(world.database.rows_of(MemoryTable::Parked, &key("m1")), 0);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_row_whose_claim_was_taken_over_is_left_to_the_other() {
    let world = World::queue(Application::new(|_, attempt| match attempt {
        1..=3 => (MS, retry(RetryReason::ServerError)),
        4 => (60 * SECOND, retry(RetryReason::ServerError)),
        _ => (MS, accepted()),
    }));
    let stalled = world.start_with(soon());
    world.publish(["m1"]);
    world.called("m1", 4).await;
    for _ in 0..1_000 {
        stalled.faults.push(StoreCall::Renew, StoreFault::at(FaultPoint::BeforeCommit));
    }
    let other = world.start_with(soon());
    world.processed(1).await;
    eventually(PATIENCE, async || {
        ensure(stalled.settled("claim_lost") == 1, "the first one is still at it")
    })
    .await;
    // Whoever asked first, the one that stalled not excepted.
    assert_eq!(stalled.settled("processed") + other.settled("processed"), 1);
    assert_eq!(world.database.rows_of(MemoryTable::Parked, &key("m1")), 0);
}

/// What is at the application finishes; what has not started goes back as it was.
#[tokio::test(start_paused = true)]
async fn a_drain_finishes_what_workers_have_begun_and_gives_the_rest_back() {
    let world = World::queue(Application::new(|_, attempt| match attempt {
        1..=3 => (MS, retry(RetryReason::ServerError)),
        _ => (5 * SECOND, accepted()),
    }));
    let mut narrow = soon();
    narrow.concurrency = 1;
    let instance = world.start_with(narrow);
    world.publish((0..4).map(|n| format!("m{n}")));
    world.drained().await;
    eventually(PATIENCE, async || {
        let taken = world.database.claims_held();
        ensure(taken >= 2, format!("{taken} taken"))
    })
    .await;
    let report = instance.drain(60 * SECOND).await;
    assert_eq!(report.cut, 0);
    let processed = world.database.processed().len();
    assert!(processed >= 1, "what had begun was finished");
    assert!(processed < 4, "what had not begun was");
    assert_eq!(world.database.claims_held(), 0);
    for id in (0..4).map(|n| format!("m{n}")) {
        let times = u32::try_from(world.application.calls_of(&id)).unwrap();
        if let Some(copy) = world.copies(&id).await.first() {
            assert_eq!(copy.attempts, times, "{id}");
        }
    }
    let _other = world.start_with(soon());
    world.processed(4).await;
    let accepted = world.application.accepted();
    assert!(accepted.values().all(|times| *times == 1), "{accepted:?}");
}

#[tokio::test(start_paused = true)]
async fn a_worker_s_attempt_that_panics_is_made_again() {
    let panicked = Arc::new(AtomicBool::new(false));
    let once = panicked.clone();
    let world = World::queue(Application::new(move |_, attempt| match attempt {
        1..=3 => (MS, retry(RetryReason::ServerError)),
        _ if !once.swap(true, SeqCst) => panic!("on purpose"),
        _ => (MS, accepted()),
    }));
    let instance = world.start_with(soon());
    world.publish(["m1"]);
    world.processed(1).await;
    assert!(panicked.load(SeqCst));
    assert_eq!(instance.figure("inboxd_attempt_panics_total", ""), 1);
}

/// What is refused when it is tried later is a dead letter in its place.
#[tokio::test(start_paused = true)]
async fn a_parked_message_that_is_refused_becomes_a_dead_letter_in_place() {
    let world = World::queue(Application::new(|_, attempt| match attempt {
        1..=3 => (MS, retry(RetryReason::ServerError)),
        _ => (MS, refused()),
    }));
    let instance = world.start_with(soon());
    world.publish(["m1"]);
    world.dead(1).await;
    assert_eq!(world.database.rows_in_state(&key("m1"), ParkedState::Due), 0);
    let copy = world.copies("m1").await.remove(0);
    assert_eq!((copy.reason, copy.last_status), (DeadReason::Refused.into(), Some(422)));
    assert_eq!(copy.attempts, 4);
    assert_eq!(copy.envelope.body.as_deref(), Some(&b"body of m1"[..]));
    eventually(PATIENCE, async || ensure(instance.settled("dead_lettered") == 1, "not counted"))
        .await;
}
