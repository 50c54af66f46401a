//! Identity as the engine acts on it: conflicts, missing ids, bodies that are too large.

use std::time::Duration;

use inboxd::engine::{OnIdConflict, OnMissingId};
use inboxd_conformance::{ensure, eventually};
use inboxd_contract::{ConsumerId, InboxStore as _, Outcome};
use inboxd_memory::{MemoryBrokerOptions, MemoryStore, MemoryTable};

use super::world::*;

/// N6: the same id with another body is kept as a dead letter, processed or in flight.
#[tokio::test(start_paused = true)]
async fn the_same_id_with_another_body_is_an_id_conflict() {
    let world = World::log(Application::accepting());
    let instance = world.start();
    world.broker.publish(0, with_body("m1", b"one"));
    world.broker.publish(1, with_body("m1", b"two"));
    world.drained().await;
    world.broker.publish(0, with_body("m1", b"three"));
    world.broker.publish(0, with_body("m1", b"one"));
    world.drained().await;
    assert_eq!(world.application.calls_of("m1"), 1);
    assert_eq!(instance.outcomes(Outcome::IdConflict), 2);
    assert_eq!(world.database.rows_of(MemoryTable::Parked, &key("m1")), 2);
    let store = MemoryStore::new(world.database.clone());
    let bodies: Vec<_> = store
        .parked(&key("m1"))
        .await
        .unwrap()
        .into_iter()
        .map(|copy| copy.envelope.body)
        .collect();
    assert!(bodies.contains(&Some("three".into())), "{bodies:?}");
}

#[tokio::test(start_paused = true)]
async fn a_conflict_may_be_taken_for_a_duplicate_and_is_counted_all_the_same() {
    let world = World::log(Application::accepting());
    let mut lenient = settings();
    lenient.identity.on_conflict = OnIdConflict::Duplicate;
    let instance = world.start_with(lenient);
    world.broker.publish(0, with_body("m1", b"one"));
    world.drained().await;
    world.broker.publish(0, with_body("m1", b"two"));
    world.drained().await;
    assert_eq!(instance.outcomes(Outcome::Duplicate), 1);
    assert!(world.database.dead().is_empty());
    assert!(instance.metrics.encode().contains("id_conflicts_total{subscription=\"orders\"} 1"));
}

/// Rule 3: a copy of a dead letter from the same position is acked; published again, it is
/// forwarded once more, and accepted, the dead letter goes.
#[tokio::test(start_paused = true)]
async fn a_dead_letter_that_is_published_again_gets_another_chance() {
    let healed = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let state = healed.clone();
    let world = World::log(Application::new(move |_, _| {
        match state.load(std::sync::atomic::Ordering::SeqCst) {
            true => (Duration::from_millis(1), accepted()),
            false => (Duration::from_millis(1), refused()),
        }
    }));
    let instance = world.start();
    world.publish(["m1"]);
    world.drained().await;
    assert_eq!(world.database.dead(), [key("m1")]);
    world.publish(["m1"]);
    world.drained().await;
    assert_eq!(world.application.calls_of("m1"), 2);
    assert_eq!(world.database.rows_of(MemoryTable::Parked, &key("m1")), 1);
    healed.store(true, std::sync::atomic::Ordering::SeqCst);
    world.publish(["m1"]);
    world.drained().await;
    assert!(world.database.dead().is_empty());
    assert_eq!(world.database.rows_of(MemoryTable::Messages, &key("m1")), 1);
    assert_eq!(instance.outcomes(Outcome::DeadLettered), 2);
}

/// N8: two consumer ids get the same message id; both forward it.
#[tokio::test(start_paused = true)]
async fn consumer_ids_do_not_suppress_one_another() {
    let world = World::log(Application::accepting());
    let _billing = world.start();
    let other = World {
        broker: inboxd_memory::MemoryBroker::new(MemoryBrokerOptions::log("orders", 1)),
        database: world.database.clone(),
        application: Application::accepting(),
    };
    let mut shipping = settings();
    shipping.consumer_id = ConsumerId::new("Billing").unwrap();
    let _shipping = other.start_with(shipping);
    world.publish(["m1"]);
    other.publish(["m1"]);
    world.drained().await;
    other.drained().await;
    assert_eq!(world.application.calls_of("m1"), 1);
    assert_eq!(other.application.calls_of("m1"), 1);
}

/// N3, N4: after one id was seen the policy for missing ids applies.
#[tokio::test(start_paused = true)]
async fn a_message_without_an_id_among_others_is_kept_as_a_dead_letter() {
    let world = World::log(Application::accepting());
    let instance = world.start();
    world.publish(["m1"]);
    world.broker.publish(0, bare(b"none"));
    world.broker.publish(0, with_body(" ", b"blank"));
    world.broker.publish(0, with_body("", b"empty"));
    world.publish(["m2"]);
    world.drained().await;
    assert_eq!(instance.outcomes(Outcome::Processed), 2);
    assert_eq!(instance.outcomes(Outcome::DeadLettered), 3);
    assert_eq!(world.database.dead().len(), 3);
}

#[tokio::test(start_paused = true)]
async fn messages_without_an_id_may_be_forwarded_each_on_its_own() {
    let world = World::queue(Application::accepting());
    let mut lenient = settings();
    lenient.identity.on_missing = OnMissingId::Forward;
    lenient.identity.on_missing_is_explicit = true;
    let instance = world.start_with(lenient);
    world.broker.publish(0, bare(b"same"));
    world.broker.publish(0, bare(b"same"));
    world.drained().await;
    assert_eq!(instance.outcomes(Outcome::Unidentified), 2);
    assert_eq!(world.application.calls().len(), 2);
}

/// The newcomer's pause: nothing is settled, and the reason says what one message carried.
#[tokio::test(start_paused = true)]
async fn a_queue_without_any_ids_pauses_the_subscription_and_settles_nothing() {
    for published in [1, 20, 100] {
        let world = World::queue(Application::accepting());
        let instance = world.start();
        for number in 0..published {
            world.broker.publish(0, bare(format!("{{\"event_id\": {number}}}").as_bytes()));
        }
        instance.paused().await;
        let reason = &instance.health.readiness().dependencies["subscription:orders"].reason;
        assert!(reason.contains("json:/event_id"), "{reason}");
        assert_eq!(world.broker.unsettled(), published);
        assert!(world.application.calls().is_empty());
        assert!(world.database.dead().is_empty());
    }
}

/// One id after a few without: the held ones meet the policy, and it is remembered.
#[tokio::test(start_paused = true)]
async fn the_first_id_ends_the_newcomer_s_wait_for_good() {
    let world = World::log(Application::accepting());
    let instance = world.start();
    world.broker.publish(0, bare(b"early"));
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(world.database.dead().is_empty());
    world.publish(["m1"]);
    world.drained().await;
    assert_eq!(world.database.dead().len(), 1);
    instance.crash();
    let again = world.start();
    world.broker.publish(0, bare(b"late"));
    world.drained().await;
    assert_eq!(again.outcomes(Outcome::DeadLettered), 1);
}

/// A body above `body_bytes_max` leaves a row with its size and hash, and is acked.
#[tokio::test(start_paused = true)]
async fn a_body_that_is_too_large_leaves_a_trace_and_blocks_nobody() {
    let world = World::log(Application::accepting());
    let instance = world.start();
    world.broker.publish(0, with_body("large", &vec![7; (1 << 19) + 1]));
    // Larger than the whole budget: taken alone.
    world.broker.publish(0, with_body("larger", &vec![7; (1 << 20) + 1]));
    world.publish(["m1"]);
    world.drained().await;
    assert_eq!(instance.outcomes(Outcome::DeadLettered), 2);
    assert_eq!(instance.outcomes(Outcome::Processed), 1);
    let store = MemoryStore::new(world.database.clone());
    let copy = store.parked(&key("large")).await.unwrap().remove(0);
    assert_eq!(copy.envelope.body, None);
    assert!(copy.last_error.unwrap().contains("524289 bytes"));
}

/// Of a conflict with a dead letter nothing is kept yet: it is never taken for a duplicate.
#[tokio::test(start_paused = true)]
async fn another_content_than_a_dead_letter_s_is_kept_whatever_the_policy() {
    let world = World::log(Application::new(|_, _| (Duration::from_millis(1), refused())));
    let mut lenient = settings();
    lenient.identity.on_conflict = OnIdConflict::Duplicate;
    let instance = world.start_with(lenient);
    world.broker.publish(0, with_body("m1", b"one"));
    world.drained().await;
    world.broker.publish(0, with_body("m1", b"two"));
    world.drained().await;
    assert_eq!(world.database.rows_of(MemoryTable::Parked, &key("m1")), 2);
    assert_eq!(instance.outcomes(Outcome::IdConflict), 1);
}

/// A copy without its body never replaces one that has it.
#[tokio::test(start_paused = true)]
async fn a_body_that_is_too_large_does_not_wipe_one_that_was_kept() {
    let world = World::log(Application::new(|_, _| (Duration::from_millis(1), refused())));
    let mut folding = settings();
    folding.identity.fingerprint = inboxd::engine::FingerprintOf::Off;
    let instance = world.start_with(folding);
    world.broker.publish(0, with_body("m1", b"kept"));
    world.drained().await;
    world.broker.publish(0, with_body("m1", &vec![7; (1 << 19) + 1]));
    world.drained().await;
    let store = MemoryStore::new(world.database.clone());
    let copies = store.parked(&key("m1")).await.unwrap();
    assert_eq!(copies.len(), 1);
    assert_eq!(copies[0].envelope.body.as_deref(), Some(b"kept".as_slice()));
    assert_eq!(instance.outcomes(Outcome::DeadDuplicate), 1);
}

/// Large bodies fill the byte budget before twenty deliveries are held.
#[tokio::test(start_paused = true)]
async fn a_newcomer_pauses_when_what_it_holds_takes_the_whole_budget() {
    let world = World::log(Application::accepting());
    let instance = world.start();
    for number in 0..10_u8 {
        world.broker.publish(0, bare(&vec![number; 200 * 1_024]));
    }
    instance.paused().await;
    assert_eq!(world.broker.unsettled(), 10);
}

/// The same, but the delivery that does not fit carries an id.
#[tokio::test(start_paused = true)]
async fn an_id_behind_a_full_budget_of_deliveries_without_one_is_seen() {
    let world = World::log(Application::accepting());
    let instance = world.start();
    for number in 0..5_u8 {
        world.broker.publish(0, bare(&vec![number; 200 * 1_024]));
    }
    world.broker.publish(0, with_body("m1", &vec![9; 200 * 1_024]));
    world.drained().await;
    assert_eq!(instance.outcomes(Outcome::Processed), 1);
    assert_eq!(instance.outcomes(Outcome::DeadLettered), 5);
}

/// A pause ends when the broker has taken back all that was held; here it comes again, and this
/// time one with an id follows.
#[tokio::test(start_paused = true)]
async fn a_newcomer_goes_on_when_the_broker_took_back_what_it_held() {
    let world = World::log(Application::accepting());
    let instance = world.start();
    world.broker.publish(0, bare(b"none"));
    instance.paused().await;
    let held = |count: u8| {
        let line =
            format!("inboxd_unidentified_held_deliveries{{subscription=\"orders\"}} {count}\n");
        ensure(instance.metrics.encode().contains(&line), instance.metrics.encode())
    };
    held(1).unwrap();
    world.broker.revoke(0);
    eventually(PATIENCE, async || {
        let readiness = instance.health.readiness();
        ensure(readiness.ready, format!("{readiness:?}"))
    })
    .await;
    world.broker.publish(1, message("m1"));
    world.drained().await;
    assert_eq!(instance.outcomes(Outcome::Processed), 1);
    assert_eq!(instance.outcomes(Outcome::DeadLettered), 1);
    held(0).unwrap();
}
