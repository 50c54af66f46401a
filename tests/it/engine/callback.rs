//! An application that is away, sick, overloaded or wrong, and what an operator does (L2, L4).

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use inboxd::engine::{CallbackState, DeliveryMode, Limits, SubscriptionSettings};
use inboxd_conformance::{ensure, eventually};
use inboxd_contract::{Outcome, RetryReason, Verdict};
use tokio::time::Instant;

use super::world::*;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

/// Every message was accepted at its first attempt as far as the application was told.
fn no_attempt_was_burned(world: &World) {
    let burned: Vec<Call> =
        world.application.calls().into_iter().filter(|call| call.attempt != 1).collect();
    assert!(burned.is_empty(), "{burned:?}");
}

fn all_arrived(world: &World, count: usize) {
    assert_eq!(world.application.accepted().len(), count);
    assert_eq!(world.database.processed().len(), count);
    assert!(world.database.dead().is_empty());
}

/// L2: away for a minute with 1,000 queued.
#[tokio::test(start_paused = true)]
async fn an_application_that_is_away_costs_no_attempt_and_takes_nothing() {
    for delivery in [DeliveryMode::Direct, DeliveryMode::Stored] {
        let settings = SubscriptionSettings { delivery, in_flight_max: 64, ..settings() };
        let world = World::queue(Application::accepting());
        let instance = world.start_with(settings);
        instance.callback(CallbackState::Closed).await;
        world.application.set_away(true);
        world.publish((0..1_000).map(|n| format!("m{n}")));
        instance.callback(CallbackState::Open).await;
        tokio::time::sleep(5 * SECOND).await;
        let unsettled = world.broker.unsettled();
        let (held, calls) = (world.broker.held(), world.application.calls().len());
        tokio::time::sleep(55 * SECOND).await;
        assert_eq!(world.broker.held(), held, "{delivery:?}: nothing more is taken");
        assert_eq!(world.broker.unsettled(), unsettled, "{delivery:?}: nor settled");
        assert_eq!(world.application.calls().len(), calls, "{delivery:?}");
        assert!(instance.health.readiness().ready, "elsewhere it could do nothing better");
        world.application.set_away(false);
        world.drained().await;
        world.processed(1_000).await;
        all_arrived(&world, 1_000);
        no_attempt_was_burned(&world);
    }
}

/// As long as an outage at night: what is in hand is parked at `hold_max`, and nothing is dead.
#[tokio::test(start_paused = true)]
async fn an_application_that_is_away_for_an_hour_loses_nothing() {
    let world = World::log(Application::accepting());
    let mut settings = settings();
    settings.in_flight_max = 64;
    let instance = world.start_with(settings);
    world.application.set_away(true);
    world.publish((0..200).map(|n| format!("m{n}")));
    tokio::time::sleep(3_600 * SECOND).await;
    assert_ne!(instance.subscription.callback_report().state, CallbackState::Closed);
    world.application.set_away(false);
    world.drained().await;
    world.processed(200).await;
    all_arrived(&world, 200);
    no_attempt_was_burned(&world);
}

/// L4: refused for 5 s, then 404 for 10 s, then well.
#[tokio::test(start_paused = true)]
async fn an_application_that_starts_in_steps_gets_everything() {
    let begun = Instant::now();
    let world = World::queue(Application::new(move |_, _| match begun.elapsed().as_secs() {
        0..15 => (MS, retry(RetryReason::Endpoint)),
        _ => (MS, accepted()),
    }));
    world.application.set_away(true);
    world.publish((0..100).map(|n| format!("m{n}")));
    let _instance = world.start();
    tokio::time::sleep(5 * SECOND).await;
    world.application.set_away(false);
    world.drained().await;
    world.processed(100).await;
    all_arrived(&world, 100);
}

/// K2's second half: 503 for a minute.
#[tokio::test(start_paused = true)]
async fn an_overloaded_application_is_left_alone_and_then_fed_slowly() {
    let begun = Instant::now();
    let busy = Arc::new(Mutex::new((0_usize, Vec::new())));
    let seen = busy.clone();
    let world = World::log(Application::new(move |_, _| {
        if begun.elapsed() < 60 * SECOND {
            return (MS, retry(RetryReason::Overloaded));
        }
        let seen = seen.clone();
        let mut now = seen.lock().unwrap();
        now.0 += 1;
        let at_once = now.0;
        now.1.push(at_once);
        drop(now);
        tokio::spawn(async move {
            tokio::time::sleep(100 * MS).await;
            seen.lock().unwrap().0 -= 1;
        });
        (100 * MS, accepted())
    }));
    world.publish((0..300).map(|n| format!("m{n}")));
    let instance = world.start();
    tokio::time::sleep(60 * SECOND).await;
    let refused = world.application.calls().len();
    assert!(refused < 60, "{refused} POSTs to an application that says 503");
    world.processed(300).await;
    all_arrived(&world, 300);
    let at_once = busy.lock().unwrap().1.clone();
    assert_eq!(&at_once[..3], [1, 1, 2], "one, then two: {:?}", &at_once[..40]);
    assert!(at_once[..20].iter().all(|at_once| *at_once <= 16), "{:?}", &at_once[..20]);
    assert_eq!(at_once.iter().max(), Some(&16));
    assert_eq!(instance.figure("inboxd_callback_openings_total", ",reason=\"open\""), 1);
}

#[tokio::test(start_paused = true)]
async fn one_message_that_can_only_fail_opens_nothing_and_ends() {
    let world = World::queue(Application::new(|id, _| match id {
        "poison" => (MS, retry(RetryReason::ServerError)),
        _ => (5 * MS, accepted()),
    }));
    let mut few = settings();
    few.park.attempts_max = 8;
    few.park.initial = SECOND;
    let instance = world.start_with(few);
    world.publish(["poison"]);
    world.dead(1).await;
    assert_eq!(world.application.calls_of("poison"), 8);
    assert_eq!(instance.figure("inboxd_callback_openings_total", ",reason=\"open\""), 0);
}

/// As many as open the breaker, and nothing else at first: the healthy ones get through, and those
/// end.
#[tokio::test(start_paused = true)]
async fn many_messages_that_can_only_fail_do_not_keep_it_open() {
    let world = World::queue(Application::new(|id, _| match id.starts_with("poison") {
        true => (MS, retry(RetryReason::ServerError)),
        false => (5 * MS, accepted()),
    }));
    let mut few = settings();
    few.park.attempts_max = 8;
    few.park.initial = SECOND;
    few.park.cap = 10 * SECOND;
    few.breaker.probe_cap = 4 * SECOND;
    let instance = world.start_with(few);
    world.publish((0..20).map(|n| format!("poison{n}")));
    instance.callback(CallbackState::Open).await;
    world.publish((0..50).map(|n| format!("m{n}")));
    let published = Instant::now();
    world.processed(50).await;
    assert!(published.elapsed() < 120 * SECOND, "{:?}", published.elapsed());
    world.dead(20).await;
    for n in 0..20 {
        let calls = world.application.calls_of(&format!("poison{n}"));
        assert_eq!(calls, 8, "poison{n}");
    }
}

#[tokio::test(start_paused = true)]
async fn further_attempts_never_take_more_than_their_share() {
    let under_way = Arc::new((AtomicUsize::new(0), AtomicUsize::new(0)));
    let seen = under_way.clone();
    let world = World::queue(Application::new(move |id, attempt| {
        if !id.starts_with("hangs") {
            return (10 * MS, accepted());
        }
        if attempt > 1 {
            let now = seen.0.fetch_add(1, SeqCst) + 1;
            seen.1.fetch_max(now, SeqCst);
            let seen = seen.clone();
            tokio::spawn(async move {
                tokio::time::sleep(2 * SECOND).await;
                seen.0.fetch_sub(1, SeqCst);
            });
        }
        (2 * SECOND, retry(RetryReason::Timeout))
    }));
    let mut few = settings();
    few.breaker.failures = 0;
    few.park.attempts_max = 6;
    few.park.initial = SECOND;
    let instance = world.start_with(few);
    world.publish((0..40).map(|n| format!("hangs{n}")));
    for round in 0..20 {
        world.publish((0..50).map(|n| format!("m{round}-{n}")));
        tokio::time::sleep(SECOND).await;
    }
    world.processed(1_000).await;
    world.dead(40).await;
    assert_eq!(under_way.1.load(SeqCst), 2, "16 / 8");
    assert!(instance.outcomes(Outcome::Parked) == 40, "none waited in place for the others");
}

#[tokio::test(start_paused = true)]
async fn a_rate_holds_and_can_be_lifted() {
    let world = World::queue(Application::accepting());
    let mut slow = settings();
    slow.rate = Some(10.0);
    let instance = world.start_with(slow);
    world.publish((0..200).map(|n| format!("m{n}")));
    tokio::time::sleep(10 * SECOND).await;
    let calls = world.application.calls().len();
    assert!((95..=101).contains(&calls), "{calls} in ten seconds");
    instance.subscription.set_limits(Limits { concurrency: 4, rate: None });
    tokio::time::sleep(SECOND).await;
    assert_eq!(world.database.processed().len(), 200);
    let report = instance.subscription.callback_report();
    assert_eq!((report.concurrency, report.rate), (4, None));
}

#[tokio::test(start_paused = true)]
async fn an_operator_pauses_and_resumes() {
    let world = World::queue(Application::new(|_, _| (SECOND, accepted())));
    let instance = world.start();
    world.publish(["m0"]);
    world.called("m0", 1).await;
    instance.subscription.pause();
    world.publish((1..50).map(|n| format!("m{n}")));
    tokio::time::sleep(300 * SECOND).await;
    assert_eq!(world.database.processed().len(), 1, "what was at the application has finished");
    assert_eq!(world.application.calls().len(), 1);
    assert_eq!(world.broker.held(), 0, "nothing is taken");
    assert!(instance.health.readiness().ready, "it was asked for");
    instance.subscription.resume();
    world.processed(50).await;
}

#[tokio::test(start_paused = true)]
async fn a_health_url_gates_from_the_start_and_while_it_runs() {
    let world = World::log(Application::accepting().healthy(false));
    world.publish(["m0"]);
    let instance = world.start();
    tokio::time::sleep(60 * SECOND).await;
    assert_eq!((world.broker.held(), world.application.calls().len()), (0, 0));
    assert!(!instance.health.readiness().ready, "it was never reached");
    world.application.set_healthy(true);
    world.processed(1).await;
    world.application.set_healthy(false);
    instance.callback(CallbackState::Health).await;
    world.publish((1..50).map(|n| format!("m{n}")));
    tokio::time::sleep(60 * SECOND).await;
    assert_eq!((world.broker.held(), world.application.calls().len()), (0, 1));
    assert!(instance.health.readiness().ready);
    world.application.set_healthy(true);
    let begun = Instant::now();
    world.processed(50).await;
    assert!(begun.elapsed() < 3 * SECOND, "{:?}", begun.elapsed());
}

/// What is parked waits like everything else, and no attempt of it is counted.
#[tokio::test(start_paused = true)]
async fn what_is_parked_rests_with_the_callback() {
    let sick = Arc::new(AtomicBool::new(true));
    let state = sick.clone();
    let world = World::queue(Application::new(move |_, _| match state.load(SeqCst) {
        true => (MS, retry(RetryReason::ServerError)),
        false => (MS, accepted()),
    }));
    let mut soon = settings();
    soon.retry.attempts_max = 1;
    soon.park.initial = SECOND;
    soon.park.cap = 2 * SECOND;
    soon.breaker.failures = 5;
    let instance = world.start_with(soon);
    world.publish((0..4).map(|n| format!("m{n}")));
    world.drained().await;
    world.application.set_away(true);
    world.publish(["m4"]);
    instance.callback(CallbackState::Open).await;
    sick.store(false, SeqCst);
    let calls = world.application.calls().len();
    tokio::time::sleep(120 * SECOND).await;
    assert_eq!(world.application.calls().len(), calls);
    let before: Vec<u32> = (0..4).map(|n| last_attempt(&world, &format!("m{n}"))).collect();
    world.application.set_away(false);
    world.processed(5).await;
    for (n, before) in before.into_iter().enumerate() {
        assert_eq!(last_attempt(&world, &format!("m{n}")), before + 1, "m{n}: none was burned");
    }
}

fn last_attempt(world: &World, id: &str) -> u32 {
    world
        .application
        .calls()
        .iter()
        .filter(|call| call.id == id)
        .map(|call| call.attempt)
        .max()
        .unwrap_or_default()
}

/// A drain does not wait for an application that is away.
#[tokio::test(start_paused = true)]
async fn a_drain_while_the_breaker_is_open_ends_at_once() {
    let world = World::queue(Application::accepting());
    let instance = world.start();
    instance.callback(CallbackState::Closed).await;
    world.application.set_away(true);
    world.publish((0..30).map(|n| format!("m{n}")));
    instance.callback(CallbackState::Open).await;
    let begun = Instant::now();
    let report = instance.drain(30 * SECOND).await;
    assert_eq!(report.cut, 0);
    assert!(begun.elapsed() < 2 * SECOND, "{:?}", begun.elapsed());
    assert_eq!(world.database.claims_held(), 0);
    world.application.set_away(false);
    let _again = world.start();
    world.processed(30).await;
    no_attempt_was_burned(&world);
}

/// An answer to what was sent before it opened shows that the application is back.
#[tokio::test(start_paused = true)]
async fn retry_after_of_an_overloaded_application_holds_for_its_probe() {
    let begun = Instant::now();
    let world = World::queue(Application::new(move |_, _| {
        if begun.elapsed() >= 20 * SECOND {
            return (MS, accepted());
        }
        let (reason, after) = (RetryReason::Overloaded, Some(20 * SECOND - begun.elapsed()));
        (MS, Verdict::Retry { reason, status: Some(503), after, detail: String::new() })
    }));
    let instance = world.start();
    world.publish((0..30).map(|n| format!("m{n}")));
    instance.callback(CallbackState::Open).await;
    let calls = world.application.calls().len();
    tokio::time::sleep_until(begun + 19 * SECOND).await;
    let more = world.application.calls().len() - calls;
    assert!(more <= 6, "{more}: what was under way when it opened");
    world.processed(30).await;
    eventually(PATIENCE, async || {
        let state = instance.subscription.callback_report().state;
        ensure(state == CallbackState::Closed, format!("{state:?}"))
    })
    .await;
}
