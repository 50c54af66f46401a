//! What the database, the application and the network do to a delivery.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use inboxd::engine::{HeaderPattern, OnUnrouted, RouteSettings, Stage};
use inboxd_conformance::{ensure, eventually};
use inboxd_contract::{Outcome, RetryReason, Verdict};
use inboxd_memory::{FaultPoint, MemoryTable, StoreCall, StoreFault};

use super::world::*;

const MS: Duration = Duration::from_millis(1);

#[tokio::test(start_paused = true)]
async fn a_message_is_forwarded_recorded_and_acked_once() {
    let world = World::queue(Application::accepting());
    let instance = world.start();
    world.publish(["m1", "m2", "m1"]);
    world.drained().await;
    assert_eq!(
        world.application.accepted().into_iter().collect::<Vec<_>>(),
        [("m1".to_owned(), 1), ("m2".to_owned(), 1)]
    );
    assert_eq!(instance.outcomes(Outcome::Processed), 2);
    let duplicates =
        instance.outcomes(Outcome::Duplicate) + instance.outcomes(Outcome::DuplicateInFlight);
    assert_eq!(duplicates, 1);
    assert_eq!(world.database.claims_held(), 0);
}

/// A1: the second copy is no duplicate while the first is undecided.
#[tokio::test(start_paused = true)]
async fn a_twin_of_an_undecided_delivery_waits_for_its_outcome() {
    let world = World::queue(Application::new(|_, attempt| match attempt {
        1 => (3_000 * MS, retry(RetryReason::ServerError)),
        _ => (MS, accepted()),
    }));
    let instance = world.start();
    world.publish(["m1", "m1"]);
    world.called("m1", 1).await;
    tokio::time::advance(2_000 * MS).await;
    assert_eq!(world.broker.unsettled(), 2, "nothing is acked while the first is undecided");
    world.drained().await;
    assert_eq!(world.application.accepted()["m1"], 1);
    assert_eq!(instance.outcomes(Outcome::Processed), 1);
    assert_eq!(instance.outcomes(Outcome::DuplicateInFlight), 1);
}

/// A1 with two instances: the other one finds the message claimed and waits.
#[tokio::test(start_paused = true)]
async fn two_instances_do_not_work_at_one_message_at_once() {
    let world = World::log(Application::new(|_, attempt| match attempt {
        1 => (3_000 * MS, retry(RetryReason::ServerError)),
        _ => (MS, accepted()),
    }));
    let (one, two) = (world.start(), world.start());
    world.broker.publish(0, message("m1"));
    world.broker.publish(1, message("m1"));
    world.drained().await;
    assert_eq!(world.application.accepted()["m1"], 1);
    let sum = |outcome| one.outcomes(outcome) + two.outcomes(outcome);
    assert_eq!(sum(Outcome::Processed), 1);
    assert_eq!(sum(Outcome::Duplicate) + sum(Outcome::DuplicateInFlight), 1);
}

/// A2: nothing is lost or taken for a duplicate while the database is away.
#[tokio::test(start_paused = true)]
async fn everything_arrives_after_the_database_was_away() {
    for away in [500 * MS, 5_000 * MS, 120_000 * MS] {
        let world = World::queue(Application::new(|_, _| (50 * MS, accepted())));
        let mut few = settings();
        few.concurrency = 2;
        let instance = world.start_with(few);
        world.publish((0..20).map(|n| format!("m{n}")));
        world.called("m4", 1).await;
        world.database.set_available(false);
        tokio::time::sleep(away).await;
        let acked = 20 - world.broker.unsettled();
        assert_eq!(acked, world.database.processed().len(), "acked without a row");
        world.database.set_available(true);
        world.drained().await;
        let accepted = world.application.accepted();
        assert_eq!(accepted.len(), 20);
        assert!(accepted.values().all(|times| *times == 1), "{accepted:?}");
        assert_eq!(instance.outcomes(Outcome::Duplicate), 0);
    }
}

/// A3: the commit succeeds and its reply is lost.
#[tokio::test(start_paused = true)]
async fn a_completion_whose_answer_was_lost_is_found() {
    let world = World::queue(Application::accepting());
    let instance = world.start();
    instance.faults.push(StoreCall::Complete, StoreFault::at(FaultPoint::AfterCommit));
    world.publish(["m1"]);
    world.drained().await;
    assert_eq!(world.application.calls_of("m1"), 1);
    assert_eq!(instance.outcomes(Outcome::Processed), 1);
    assert_eq!(instance.outcomes(Outcome::ClaimLost), 0);
}

/// A3: the database is cut before the commit: the acceptance is kept and recorded later.
#[tokio::test(start_paused = true)]
async fn what_was_accepted_is_recorded_when_the_database_is_back() {
    let world = World::queue(Application::accepting());
    let instance = world.start();
    for _ in 0..5 {
        instance.faults.push(StoreCall::Complete, StoreFault::at(FaultPoint::BeforeCommit));
    }
    world.publish(["m1"]);
    world.drained().await;
    assert_eq!(instance.faults.left(), 0);
    assert_eq!(world.application.calls_of("m1"), 1);
    assert_eq!(world.database.rows_of(MemoryTable::Messages, &key("m1")), 1);
}

/// Rule 4: a claim whose answer was lost is asked for again with its own token.
#[tokio::test(start_paused = true)]
async fn a_claim_whose_answer_was_lost_counts_one_attempt() {
    let world = World::queue(Application::accepting());
    let instance = world.start();
    instance.faults.push(StoreCall::Claim, StoreFault::at(FaultPoint::AfterCommit));
    world.publish(["m1"]);
    world.drained().await;
    let calls = world.application.calls();
    assert_eq!(calls, [Call { id: "m1".into(), attempt: 1, accepted: true }]);
}

/// I3: no forward begins without time left on the lease.
#[tokio::test(start_paused = true)]
async fn an_attempt_does_not_begin_on_a_lease_that_ran_out() {
    let world = World::queue(Application::new(|_, attempt| match attempt {
        1 => (MS, retry(RetryReason::ServerError)),
        _ => (MS, accepted()),
    }));
    let mut slow = settings();
    slow.retry.initial = Duration::from_secs(40);
    slow.retry.cap = Duration::from_secs(40);
    let instance = world.start_with(slow);
    world.publish(["m1"]);
    world.called("m1", 1).await;
    for _ in 0..40 {
        instance.faults.push(StoreCall::Renew, StoreFault::at(FaultPoint::BeforeCommit));
    }
    world.drained().await;
    let accepted = world.application.accepted();
    assert_eq!(accepted["m1"], 1);
    assert!(instance.faults.left() < 40, "no renewal was tried");
}

/// Rule 7: another instance took over and processed it; the late one finds its row.
#[tokio::test(start_paused = true)]
async fn a_holder_whose_claim_was_taken_over_completes_nothing() {
    let world = World::queue(Application::new(|_, attempt| match attempt {
        1 => (60_000 * MS, accepted()),
        _ => (MS, accepted()),
    }));
    let stalled = world.start();
    world.publish(["m1"]);
    world.called("m1", 1).await;
    // Its renewals do not arrive any more, as when the process is stopped.
    for _ in 0..100 {
        stalled.faults.push(StoreCall::Renew, StoreFault::at(FaultPoint::BeforeCommit));
    }
    let other = world.start();
    world.broker.publish(0, message("m1"));
    world.drained().await;
    let by_one = stalled.outcomes(Outcome::Processed) + other.outcomes(Outcome::Processed);
    assert_eq!(by_one, 1, "the row was written once");
    assert_eq!(world.database.rows_of(MemoryTable::Messages, &key("m1")), 1);
    assert_eq!(world.database.claims_held(), 0);
}

/// I2, I1: refused messages are dead letters, and acked only then.
#[tokio::test(start_paused = true)]
async fn a_refused_message_is_kept_as_a_dead_letter_and_the_others_flow() {
    let world = World::log(Application::new(|id, _| match id {
        "bad" => (MS, refused()),
        _ => (MS, accepted()),
    }));
    let instance = world.start();
    instance.faults.push(StoreCall::DeadLetter, StoreFault::at(FaultPoint::AfterCommit));
    world.publish(["m1", "bad", "m2"]);
    world.drained().await;
    assert_eq!(world.database.dead(), [key("bad")]);
    assert_eq!(world.database.processed().len(), 2);
    assert_eq!(instance.outcomes(Outcome::DeadLettered), 1);
    assert_eq!(world.application.calls_of("bad"), 1);
}

/// R6: a panic settles nothing and stops nobody.
#[tokio::test(start_paused = true)]
async fn an_attempt_that_panics_is_made_again() {
    let panics = Arc::new(AtomicUsize::new(0));
    let seen = panics.clone();
    let world = World::queue(Application::new(move |id, _| {
        if id.starts_with("bad") && seen.fetch_add(1, SeqCst) < 5 {
            panic!("the forwarder panics, as the test asks");
        }
        (MS, accepted())
    }));
    let instance = world.start();
    world.publish((0..5).map(|n| format!("bad{n}")));
    world.publish((0..20).map(|n| format!("m{n}")));
    world.drained().await;
    assert!(panics.load(SeqCst) >= 5);
    assert_eq!(instance.outcomes(Outcome::Processed), 25);
    assert!(world.application.accepted().values().all(|times| *times == 1));
}

/// Refused connections and 5xx never end a message; the backoff stays at its cap.
#[tokio::test(start_paused = true)]
async fn an_application_that_is_away_for_an_hour_loses_nothing() {
    let up = Arc::new(AtomicBool::new(false));
    let state = up.clone();
    let world = World::log(Application::new(move |_, _| match state.load(SeqCst) {
        true => (MS, accepted()),
        false => (MS, retry(RetryReason::Unreachable)),
    }));
    let instance = world.start();
    world.publish((0..50).map(|n| format!("m{n}")));
    tokio::time::sleep(Duration::from_secs(3_600)).await;
    assert!(world.database.processed().is_empty() && world.database.dead().is_empty());
    up.store(true, SeqCst);
    world.processed(50).await;
    world.drained().await;
    assert!(world.database.dead().is_empty());
    let accepted = world.application.accepted();
    assert!(accepted.values().all(|times| *times == 1), "{accepted:?}");
    assert_eq!(instance.outcomes(Outcome::Released), 0);
}

/// An unordered queue gets a delivery back that waited for `hold_max` for another one of its id.
#[tokio::test(start_paused = true)]
async fn a_delivery_held_too_long_is_released_where_that_does_no_harm() {
    let world = World::queue(Application::new(|_, _| (Duration::from_secs(500), accepted())));
    let mut short = settings();
    short.hold_max = Duration::from_secs(60);
    let instance = world.start_with(short);
    world.publish(["m1", "m1"]);
    world.drained().await;
    assert!(instance.outcomes(Outcome::Released) >= 1);
    assert_eq!(world.application.calls_of("m1"), 1);
}

/// 410: the subscription pauses, loudly, and goes on when the endpoint is back.
#[tokio::test(start_paused = true)]
async fn an_endpoint_that_is_gone_pauses_the_subscription() {
    let gone = Arc::new(AtomicBool::new(true));
    let state = gone.clone();
    let world = World::log(Application::new(move |_, _| match state.load(SeqCst) {
        true => (MS, retry(RetryReason::Gone)),
        false => (MS, accepted()),
    }));
    let instance = world.start();
    world.publish(["m1"]);
    world.called("m1", 1).await;
    instance.paused().await;
    world.publish(["m2"]);
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(world.application.calls_of("m2"), 0, "nothing is taken while it is paused");
    gone.store(false, SeqCst);
    world.drained().await;
    assert!(instance.health.readiness().ready);
}

/// A refused connection is no answer, and nothing is taken for it.
#[tokio::test(start_paused = true)]
async fn an_endpoint_that_is_gone_is_not_back_by_being_away() {
    let away = Arc::new(AtomicBool::new(false));
    let state = away.clone();
    let world = World::log(Application::new(move |_, _| match state.load(SeqCst) {
        true => (MS, retry(RetryReason::Unreachable)),
        false => (MS, retry(RetryReason::Gone)),
    }));
    let instance = world.start();
    world.publish(["m1"]);
    world.called("m1", 1).await;
    instance.paused().await;
    away.store(true, SeqCst);
    let calls = world.application.calls_of("m1");
    world.called("m1", calls + 2).await;
    instance.paused().await;
    world.publish(["m2"]);
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(world.application.calls_of("m2"), 0, "nothing is taken while it is paused");
}

/// 410 from one route holds up no other.
#[tokio::test(start_paused = true)]
async fn a_route_that_is_gone_pauses_nothing() {
    let world = World::log(Application::new(|id, _| match id.starts_with("gone") {
        true => (MS, retry(RetryReason::Gone)),
        false => (MS, accepted()),
    }));
    let mut routed = settings();
    routed.on_unrouted = OnUnrouted::Forward;
    routed.routes.push(RouteSettings {
        name: "gone".into(),
        message_type: None,
        routing_key: None,
        header: Some(HeaderPattern { name: "id".into(), value: "gone*".into() }),
        path: "/gone".into(),
    });
    let instance = world.start_with(routed);
    world.publish(["m0"]);
    world.called("m0", 1).await;
    world.publish(["gone"]);
    world.called("gone", 3).await;
    world.publish((1..20).map(|n| format!("m{n}")));
    eventually(PATIENCE, async || {
        let processed = instance.outcomes(Outcome::Processed);
        ensure(processed == 20, format!("{processed} processed"))
    })
    .await;
    assert!(instance.health.readiness().dependencies["subscription:orders"].ready);
}

/// What never went to the application is told to be on its way into the database.
#[tokio::test(start_paused = true)]
async fn a_dead_letter_on_its_way_to_the_database_waits_for_it() {
    let world = World::queue(Application::accepting());
    let mut strict = settings();
    strict.body_bytes_max = 4;
    let instance = world.start_with(strict);
    let slow = StoreFault { delay_before: Duration::from_secs(5), ..StoreFault::default() };
    instance.faults.push(StoreCall::DeadLetter, slow);
    world.publish(["m1"]);
    eventually(PATIENCE, async || {
        let flights = instance.subscription.flights(&key("m1").message_id);
        let is_recorded = flights.iter().any(|flight| flight.stage == Stage::Record);
        ensure(is_recorded, format!("{flights:?}"))
    })
    .await;
    world.drained().await;
}

/// Retry-After is honoured.
#[tokio::test(start_paused = true)]
async fn the_application_says_when_to_come_again() {
    let world = World::queue(Application::new(|_, attempt| match attempt {
        1 => {
            let after = Some(Duration::from_secs(20));
            let reason = RetryReason::Overloaded;
            (MS, Verdict::Retry { reason, status: Some(503), after, detail: String::new() })
        }
        _ => (MS, accepted()),
    }));
    let _instance = world.start();
    world.publish(["m1"]);
    world.called("m1", 1).await;
    let begun = tokio::time::Instant::now();
    world.called("m1", 2).await;
    assert!(begun.elapsed() >= Duration::from_secs(20));
}

/// One locked member stalls nobody.
#[tokio::test(start_paused = true)]
async fn a_locked_message_waits_alone() {
    let world = World::queue(Application::accepting());
    let lock = world.database.lock_message(&key("m1"));
    let instance = world.start();
    world.publish((0..20).map(|n| format!("m{n}")));
    eventually(PATIENCE, async || {
        let left = world.broker.unsettled();
        ensure(left <= 1, format!("{left} unsettled"))
    })
    .await;
    assert_eq!(instance.outcomes(Outcome::Processed), 19);
    drop(lock);
    world.drained().await;
    assert_eq!(world.application.accepted()["m1"], 1);
}

/// What the application accepted is recorded, not asked again, though the claim was lost and
/// whoever took it over died.
#[tokio::test(start_paused = true)]
async fn an_acceptance_outlives_the_claim_it_was_made_under() {
    let world = World::log(Application::new(|_, attempt| match attempt {
        1 => (60_000 * MS, accepted()),
        _ => (10_000_000 * MS, retry(RetryReason::Timeout)),
    }));
    let stalled = world.start();
    world.publish(["m1"]);
    world.called("m1", 1).await;
    for _ in 0..1_000 {
        stalled.faults.push(StoreCall::Renew, StoreFault::at(FaultPoint::BeforeCommit));
    }
    let other = world.start();
    world.broker.publish(1, message("m1"));
    world.called("m1", 2).await;
    other.crash();
    eventually(PATIENCE, async || {
        let rows = world.database.rows_of(MemoryTable::Messages, &key("m1"));
        ensure(rows == 1, "no row yet")
    })
    .await;
    world.drained().await;
    assert_eq!(world.application.calls_of("m1"), 2);
}

/// 410 while nothing is under way any more: one delivery at a time asks whether it is back.
#[tokio::test(start_paused = true)]
async fn an_endpoint_that_is_gone_is_asked_again_when_everything_is_parked() {
    let gone = Arc::new(AtomicBool::new(true));
    let state = gone.clone();
    let world = World::queue(Application::new(move |_, _| match state.load(SeqCst) {
        true => (MS, retry(RetryReason::Gone)),
        false => (MS, accepted()),
    }));
    let mut short = settings();
    short.hold_max = Duration::from_secs(60);
    let instance = world.start_with(short);
    world.publish(["m1", "m2"]);
    eventually(PATIENCE, async || {
        let parked = instance.outcomes(Outcome::Parked);
        ensure(parked == 2, format!("{parked} parked"))
    })
    .await;
    assert_eq!(world.broker.unsettled(), 0);
    tokio::time::sleep(Duration::from_secs(300)).await;
    gone.store(false, SeqCst);
    world.processed(2).await;
}
