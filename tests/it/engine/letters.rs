//! Dead letters on the broker: published and routed before the row and the ack.

use std::sync::Arc;
use std::time::Duration;

use inboxd::engine::{DeadLetterTo, SubscriptionSettings};
use inboxd_conformance::{ensure, eventually};
use inboxd_contract::{DeadReason, Outcome, RetryReason};
use inboxd_memory::{FaultPoint, LetterFault, MemoryLetters, StoreCall, StoreFault};

use super::world::*;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

fn to(to: DeadLetterTo) -> SubscriptionSettings {
    let mut settings = settings();
    settings.dead_letter_to = to;
    settings.retry.attempts_max = 2;
    settings.park.initial = SECOND;
    settings.park.cap = 2 * SECOND;
    settings
}

/// Refuses what is named `bad…`.
fn picky() -> Application {
    Application::new(|id, _| match id.starts_with("bad") {
        true => (MS, refused()),
        false => (MS, accepted()),
    })
}

#[tokio::test(start_paused = true)]
async fn a_dead_letter_goes_where_the_configuration_says() {
    for (where_to, published, has_body) in [
        (DeadLetterTo::Table, 0, true),
        (DeadLetterTo::Broker, 1, false),
        (DeadLetterTo::Both, 1, true),
    ] {
        let (world, letters) = (World::log(picky()), MemoryLetters::new());
        let instance = world.start_to(to(where_to), Some(Arc::new(letters.clone())));
        world.publish(["bad", "m1"]);
        world.drained().await;
        assert_eq!(letters.letters().len(), published, "{where_to:?}");
        let row = world.copies("bad").await.remove(0);
        assert_eq!(row.envelope.body.is_some(), has_body, "{where_to:?}");
        assert_eq!(row.reason, DeadReason::Refused);
        assert_eq!(instance.outcomes(Outcome::DeadLettered), 1);
        if let Some(letter) = letters.letters().first() {
            assert_eq!(letter.envelope.body.as_deref(), Some(&b"body of bad"[..]));
            assert_eq!((letter.attempts, letter.last_status), (1, Some(422)));
        }
    }
}

/// R5: the target is away, or routes nowhere.
#[tokio::test(start_paused = true)]
async fn while_the_target_is_away_nothing_more_is_taken_and_then_it_drains() {
    for fault in [LetterFault::Away, LetterFault::Unrouted, LetterFault::AnswerLost] {
        let (world, letters) = (World::log(picky()), MemoryLetters::new());
        letters.set_fault(Some(fault));
        let instance = world.start_to(to(DeadLetterTo::Broker), Some(Arc::new(letters.clone())));
        world.publish(["bad"]);
        eventually(PATIENCE, async || {
            let state = instance.health.readiness().dependencies;
            let told = state.get("dead-letters:orders").is_some_and(|letters| !letters.ready);
            ensure(told, format!("{state:?}"))
        })
        .await;
        world.publish(["m1", "m2"]);
        tokio::time::sleep(120 * SECOND).await;
        assert_eq!(world.broker.unsettled(), 3, "{fault:?}");
        assert_eq!(world.application.calls().len(), 1, "nothing more is taken: {fault:?}");
        assert_eq!(world.database.claims_held(), 1, "its lease is renewed: {fault:?}");
        assert!(world.database.dead().is_empty(), "the row comes after the copy: {fault:?}");
        letters.set_fault(None);
        world.drained().await;
        assert!(instance.health.readiness().dependencies["dead-letters:orders"].ready);
        assert_eq!(world.application.calls().len(), 3, "{fault:?}");
        assert_eq!(instance.figure("inboxd_dead_letters_waiting", ""), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn what_the_broker_will_never_take_is_kept_whole_in_the_table() {
    let (world, letters) = (World::log(picky()), MemoryLetters::new());
    letters.set_fault(Some(LetterFault::Refused));
    let _instance = world.start_to(to(DeadLetterTo::Broker), Some(Arc::new(letters.clone())));
    world.publish(["bad", "m1"]);
    world.drained().await;
    assert!(world.copies("bad").await[0].envelope.body.is_some());
    assert_eq!(world.application.accepted()["m1"], 1);
}

#[tokio::test(start_paused = true)]
async fn a_copy_is_published_once_whatever_the_database_does() {
    for point in [FaultPoint::AfterCommit, FaultPoint::BeforeCommit] {
        let (world, letters) = (World::log(picky()), MemoryLetters::new());
        let instance = world.start_to(to(DeadLetterTo::Both), Some(Arc::new(letters.clone())));
        for _ in 0..5 {
            instance.faults.push(StoreCall::DeadLetter, StoreFault::at(point));
        }
        world.publish(["bad"]);
        world.drained().await;
        assert_eq!(letters.letters().len(), 1, "{point:?}");
        assert_eq!(world.database.dead().len(), 1, "{point:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn workers_publish_what_dies_in_their_hands() {
    let application = Application::new(|_, _| (MS, retry(RetryReason::ServerError)));
    let (world, letters) = (World::log(application), MemoryLetters::new());
    let mut few = to(DeadLetterTo::Broker);
    few.park.attempts_max = 4;
    let instance = world.start_to(few, Some(Arc::new(letters.clone())));
    letters.set_fault(Some(LetterFault::Away));
    world.publish(["m1"]);
    world.drained().await;
    eventually(PATIENCE, async || {
        ensure(instance.figure("inboxd_dead_letters_waiting", "") == 1, "nothing waits")
    })
    .await;
    tokio::time::sleep(60 * SECOND).await;
    assert_eq!(world.application.calls_of("m1"), 4, "it is not asked again meanwhile");
    letters.set_fault(None);
    world.dead(1).await;
    assert_eq!(letters.letters().len(), 1);
    assert_eq!(letters.letters()[0].reason, DeadReason::AttemptsExhausted);
    assert_eq!(world.copies("m1").await[0].envelope.body, None);
    assert_eq!(world.application.calls_of("m1"), 4);
}

/// A delivery that the broker has taken back is neither published nor recorded.
#[tokio::test(start_paused = true)]
async fn nothing_is_recorded_for_what_the_broker_took_back() {
    let (world, letters) = (World::queue(picky()), MemoryLetters::new());
    letters.set_fault(Some(LetterFault::Away));
    let instance = world.start_to(to(DeadLetterTo::Both), Some(Arc::new(letters.clone())));
    world.publish(["bad"]);
    eventually(PATIENCE, async || {
        ensure(instance.figure("inboxd_dead_letters_waiting", "") == 1, "nothing waits")
    })
    .await;
    world.broker.sever();
    eventually(PATIENCE, async || {
        ensure(instance.outcomes(Outcome::Released) == 1, "it is still held")
    })
    .await;
    assert!(world.database.dead().is_empty() && letters.letters().is_empty());
    letters.set_fault(None);
    world.drained().await;
    assert_eq!(letters.letters().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_drain_does_not_wait_for_a_target_that_is_away() {
    let (world, letters) = (World::log(picky()), MemoryLetters::new());
    letters.set_fault(Some(LetterFault::Away));
    let instance = world.start_to(to(DeadLetterTo::Broker), Some(Arc::new(letters.clone())));
    world.publish(["bad"]);
    eventually(PATIENCE, async || {
        ensure(instance.figure("inboxd_dead_letters_waiting", "") == 1, "nothing waits")
    })
    .await;
    let begun = tokio::time::Instant::now();
    assert_eq!(instance.drain(60 * SECOND).await.cut, 0);
    assert!(begun.elapsed() < 30 * SECOND, "{:?}", begun.elapsed());
    assert_eq!(world.broker.unsettled(), 1);
    assert_eq!(world.database.claims_held(), 0);
}
