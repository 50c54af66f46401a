//! Lanes with something parked in them: each policy, across instances and restarts.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use inboxd::engine::{OnBlockedLane, OnDeadLetter, Ordering, Stage, SubscriptionSettings};
use inboxd_conformance::{ensure, eventually};
use inboxd_contract::{Outcome, ParkReason, RetryReason};

use super::world::*;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

fn keyed_by(policy: OnBlockedLane) -> SubscriptionSettings {
    let mut settings = settings();
    settings.ordering = Ordering::Key;
    settings.on_blocked_lane = policy;
    settings.retry.attempts_max = 2;
    settings.park.attempts_max = 1_000;
    settings.park.initial = 2 * SECOND;
    settings.park.cap = 5 * SECOND;
    settings
}

/// Fails what is named `bad…` until it is healed.
fn ill() -> (Application, Arc<AtomicBool>) {
    let healed = Arc::new(AtomicBool::new(false));
    let state = healed.clone();
    let application = Application::new(move |id, _| match id.starts_with("bad") {
        true if !state.load(SeqCst) => (MS, retry(RetryReason::ServerError)),
        _ => (MS, accepted()),
    });
    (application, healed)
}

fn accepted_in_order(world: &World) -> Vec<String> {
    world.application.calls().into_iter().filter(|call| call.accepted).map(|c| c.id).collect()
}

#[tokio::test(start_paused = true)]
async fn what_follows_a_parked_message_of_its_lane_is_parked_behind_it() {
    let (application, healed) = ill();
    let world = World::log(application);
    let instance = world.start_with(keyed_by(OnBlockedLane::Park));
    for id in ["bad", "a1", "a2", "a3"] {
        world.broker.publish(0, keyed(id, "a"));
    }
    world.broker.publish(0, keyed("b1", "b"));
    world.drained().await;
    assert_eq!(accepted_in_order(&world), ["b1"], "another lane goes on");
    assert_eq!(instance.outcomes(Outcome::Parked), 4);
    assert_eq!(world.copies("a2").await[0].reason, ParkReason::LaneBlocked);
    healed.store(true, SeqCst);
    world.broker.publish(0, keyed("a4", "a"));
    world.processed(6).await;
    let order: Vec<_> = accepted_in_order(&world).split_off(1);
    assert_eq!(order, ["bad", "a1", "a2", "a3", "a4"]);
    world.broker.publish(0, keyed("a5", "a"));
    world.processed(7).await;
    assert_eq!(instance.outcomes(Outcome::Processed), 2, "the lane is free again: b1 and a5");
}

#[tokio::test(start_paused = true)]
async fn a_lane_stays_in_order_over_restarts_and_instances() {
    let (application, healed) = ill();
    let world = World::log(application);
    let instance = world.start_with(keyed_by(OnBlockedLane::Park));
    for id in ["bad", "a1"] {
        world.broker.publish(0, keyed(id, "a"));
    }
    world.drained().await;
    instance.crash();
    for id in ["a2", "a3"] {
        world.broker.publish(0, keyed(id, "a"));
    }
    let _one = world.start_with(keyed_by(OnBlockedLane::Park));
    let _two = world.start_with(keyed_by(OnBlockedLane::Park));
    world.drained().await;
    healed.store(true, SeqCst);
    world.processed(4).await;
    assert_eq!(accepted_in_order(&world), ["bad", "a1", "a2", "a3"]);
}

#[tokio::test(start_paused = true)]
async fn where_order_is_given_up_a_parked_message_is_passed() {
    let (application, healed) = ill();
    let world = World::log(application);
    let _instance = world.start_with(keyed_by(OnBlockedLane::Skip));
    for id in ["bad", "a1", "a2"] {
        world.broker.publish(0, keyed(id, "a"));
    }
    world.drained().await;
    assert_eq!(accepted_in_order(&world), ["a1", "a2"]);
    healed.store(true, SeqCst);
    world.processed(3).await;
}

#[tokio::test(start_paused = true)]
async fn a_lane_that_halts_holds_what_follows_unsettled_and_says_so() {
    let (application, healed) = ill();
    let world = World::log(application);
    let mut halting = keyed_by(OnBlockedLane::Halt);
    halting.hold_max = 60 * SECOND;
    let instance = world.start_with(halting);
    for id in ["bad", "a1", "a2"] {
        world.broker.publish(0, keyed(id, "a"));
    }
    world.broker.publish(0, keyed("b1", "b"));
    eventually(PATIENCE, async || {
        let held = instance.figure("inboxd_held_deliveries", "");
        ensure(held == 1, format!("{held} held"))
    })
    .await;
    assert_eq!(accepted_in_order(&world), ["b1"]);
    assert_eq!(instance.outcomes(Outcome::Parked), 1, "the one that failed, and no other");
    let flights = instance.subscription.flights(&key("a1").message_id);
    assert!(matches!(flights[0].stage, Stage::LaneBlocked { .. }), "{flights:?}");
    healed.store(true, SeqCst);
    world.drained().await;
    assert_eq!(accepted_in_order(&world), ["b1", "bad", "a1", "a2"]);
    assert_eq!(instance.figure("inboxd_held_deliveries", ""), 0);
}

#[tokio::test(start_paused = true)]
async fn a_halted_lane_lets_a_drain_end() {
    let (application, _) = ill();
    let world = World::log(application);
    let instance = world.start_with(keyed_by(OnBlockedLane::Halt));
    for id in ["bad", "a1"] {
        world.broker.publish(0, keyed(id, "a"));
    }
    eventually(PATIENCE, async || ensure(instance.outcomes(Outcome::Parked) == 1, "not parked"))
        .await;
    let begun = tokio::time::Instant::now();
    assert_eq!(instance.drain(30 * SECOND).await.cut, 0);
    assert!(begun.elapsed() < 20 * SECOND, "{:?}", begun.elapsed());
    assert_eq!(world.broker.unsettled(), 1, "what waits goes back");
}

#[tokio::test(start_paused = true)]
async fn a_dead_letter_blocks_its_lane_where_it_is_told_to() {
    for policy in [OnDeadLetter::Continue, OnDeadLetter::Halt] {
        let world = World::log(Application::new(|id, _| match id {
            "bad" => (MS, refused()),
            _ => (MS, accepted()),
        }));
        let mut settings = keyed_by(OnBlockedLane::Park);
        settings.on_dead_letter = policy;
        let instance = world.start_with(settings);
        for id in ["bad", "a1", "a2"] {
            world.broker.publish(0, keyed(id, "a"));
        }
        world.broker.publish(0, keyed("b1", "b"));
        world.drained().await;
        if policy == OnDeadLetter::Halt {
            assert_eq!(accepted_in_order(&world), ["b1"]);
            assert_eq!(instance.outcomes(Outcome::Parked), 2);
            world.database.discard(&key("bad"));
        }
        world.processed(3).await;
        let order = accepted_in_order(&world);
        let of_lane: Vec<_> = order.iter().filter(|id| id.starts_with('a')).collect();
        assert_eq!(of_lane, ["a1", "a2"]);
    }
}

/// The same with the dead letter of a message that was parked before.
#[tokio::test(start_paused = true)]
async fn a_parked_message_that_dies_blocks_its_lane_where_it_is_told_to() {
    let (application, _) = ill();
    let world = World::log(application);
    let mut settings = keyed_by(OnBlockedLane::Park);
    settings.on_dead_letter = OnDeadLetter::Halt;
    settings.park.attempts_max = 4;
    let _instance = world.start_with(settings);
    for id in ["bad", "a1"] {
        world.broker.publish(0, keyed(id, "a"));
    }
    world.dead(1).await;
    tokio::time::sleep(60 * SECOND).await;
    assert_eq!(world.application.calls_of("a1"), 0);
    world.database.discard(&key("bad"));
    world.processed(1).await;
}
