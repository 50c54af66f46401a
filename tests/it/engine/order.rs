//! Lanes (I6), fences and crashes (I1, I5).

use std::collections::BTreeMap;
use std::time::Duration;

use inboxd::engine::Ordering;
use inboxd_contract::{Outcome, RetryReason};
use inboxd_memory::MemoryBrokerOptions;

use super::world::*;

const MS: Duration = Duration::from_millis(1);

/// Accepts, but every third first attempt fails.
fn shaky() -> Application {
    Application::new(|id, attempt| {
        let number: usize = id[1..].parse().unwrap();
        match attempt {
            1 if number.is_multiple_of(3) => (7 * MS, retry(RetryReason::ServerError)),
            _ => (Duration::from_millis((number % 5) as u64), accepted()),
        }
    })
}

fn accepted_by_key(world: &World, keys: usize) -> BTreeMap<usize, Vec<usize>> {
    let mut by_key: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for call in world.application.calls().into_iter().filter(|call| call.accepted) {
        let number: usize = call.id[1..].parse().unwrap();
        by_key.entry(number % keys).or_default().push(number);
    }
    by_key
}

#[tokio::test(start_paused = true)]
async fn messages_of_one_key_pass_one_at_a_time_in_broker_order() {
    let world = World::log(shaky());
    let mut keyed_settings = settings();
    keyed_settings.ordering = Ordering::Key;
    let _instance = world.start_with(keyed_settings);
    for number in 0..200 {
        world
            .broker
            .publish(number % 2, keyed(&format!("m{number}"), &format!("k{}", number % 10)));
    }
    world.drained().await;
    world.processed(200).await;
    for (key, numbers) in accepted_by_key(&world, 10) {
        assert!(numbers.is_sorted(), "key {key}: {numbers:?}");
        assert_eq!(numbers.len(), 20);
    }
}

#[tokio::test(start_paused = true)]
async fn partition_order_is_kept_over_a_retry_a_revoke_and_a_second_instance() {
    let world = World::with(MemoryBrokerOptions::log("orders", 2), shaky());
    let mut ordered = settings();
    ordered.ordering = Ordering::Partition;
    let (_one, _two) = (world.start_with(ordered.clone()), world.start_with(ordered));
    for number in 0..100 {
        world.broker.publish(number % 2, message(&format!("m{number}")));
        if number % 25 == 0 {
            tokio::time::sleep(50 * MS).await;
            world.broker.revoke(number % 2);
        }
    }
    world.drained().await;
    for (stream, numbers) in accepted_by_key(&world, 2) {
        assert!(numbers.is_sorted(), "stream {stream}: {numbers:?}");
        assert_eq!(numbers.len(), 50);
    }
}

#[tokio::test(start_paused = true)]
async fn one_failing_key_does_not_stop_another() {
    let world = World::log(Application::new(|id, attempt| match (id, attempt) {
        ("m0", 0..=8) => (MS, retry(RetryReason::ServerError)),
        _ => (MS, accepted()),
    }));
    let mut keyed_settings = settings();
    keyed_settings.ordering = Ordering::Key;
    let _instance = world.start_with(keyed_settings);
    for (id, key) in [("m0", "a"), ("m1", "a"), ("m2", "b")] {
        world.broker.publish(0, keyed(id, key));
    }
    world.processed(3).await;
    let order: Vec<_> =
        world.application.calls().into_iter().filter(|c| c.accepted).map(|c| c.id).collect();
    assert_eq!(order, ["m2", "m0", "m1"]);
}

/// R1, R8: connection lost while messages are at the application; the redelivery is a duplicate.
#[tokio::test(start_paused = true)]
async fn a_lost_connection_leads_to_no_second_post() {
    let world = World::queue(Application::new(|_, _| (2_000 * MS, accepted())));
    let instance = world.start();
    world.publish(["m1", "m2"]);
    world.called("m2", 1).await;
    world.broker.sever();
    world.drained().await;
    let accepted = world.application.accepted();
    assert!(accepted.values().all(|times| *times == 1), "{accepted:?}");
    assert_eq!(world.application.calls().len(), 2);
    assert!(instance.outcomes(Outcome::Processed) == 2);
}

/// Streams come and go while messages fail: nothing is lost, nothing is acked unprocessed.
#[tokio::test(start_paused = true)]
async fn crashes_expulsions_and_cuts_lose_nothing() {
    let world = World::log(shaky());
    let mut instances = vec![world.start(), world.start()];
    for number in 0..300 {
        world.broker.publish(number % 2, message(&format!("m{number}")));
        match number {
            60 => instances.swap_remove(0).crash(),
            90 => instances.push(world.start()),
            140 => world.broker.expel(world.broker.instances()[0]),
            200 => world.broker.sever(),
            _ => {}
        }
        if number % 10 == 0 {
            tokio::time::sleep(30 * MS).await;
        }
    }
    world.drained().await;
    world.processed(300).await;
    assert_eq!(world.application.accepted().len(), 300);
}
