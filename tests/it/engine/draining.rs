//! SIGTERM, as the engine sees it (L1, I8).

use std::time::Duration;

use inboxd_conformance::{ensure, eventually};
use inboxd_contract::{Outcome, RetryReason};

use super::world::*;

const MS: Duration = Duration::from_millis(1);
const GRACE: Duration = Duration::from_secs(30);

#[tokio::test(start_paused = true)]
async fn what_is_at_the_application_finishes_and_is_acked() {
    let world = World::queue(Application::new(|_, _| (8_000 * MS, accepted())));
    let mut one = settings();
    one.concurrency = 1;
    let instance = world.start_with(one);
    world.publish(["m1", "m2", "m3"]);
    world.called("m1", 1).await;
    let report = instance.drain(GRACE).await;
    assert_eq!(report.cut, 0);
    assert!(report.closed.is_ok());
    assert_eq!(world.application.calls().len(), 1, "nothing new started");
    assert_eq!(instance.outcomes(Outcome::Processed), 1);
    assert_eq!(world.broker.unsettled(), 2, "what had not started went back");
    assert_eq!(world.database.claims_held(), 0, "and its claims are free");
}

#[tokio::test(start_paused = true)]
async fn an_attempt_without_a_verdict_is_taken_back() {
    let world =
        World::queue(Application::new(|_, _| (5_000 * MS, retry(RetryReason::Unreachable))));
    let instance = world.start();
    world.publish(["m1"]);
    world.called("m1", 1).await;
    let report = instance.drain(GRACE).await;
    assert_eq!(report.cut, 0);
    let _again = world.start();
    world.called("m1", 2).await;
    assert_eq!(world.application.calls()[1].attempt, 1, "the refused connection did not count");
}

#[tokio::test(start_paused = true)]
async fn a_forward_that_is_cut_keeps_its_claim_until_it_runs_out() {
    let world = World::queue(Application::new(|_, attempt| match attempt {
        1 => (300_000 * MS, accepted()),
        _ => (MS, accepted()),
    }));
    let instance = world.start();
    world.publish(["m1"]);
    world.called("m1", 1).await;
    let begun = tokio::time::Instant::now();
    let report = instance.drain(GRACE).await;
    assert_eq!(report.cut, 1);
    assert!(begun.elapsed() <= GRACE);
    assert_eq!(world.database.claims_held(), 1);
    instance.hub.close().await;
    let other = world.start();
    let taken_over = tokio::time::Instant::now();
    world.drained().await;
    assert!(taken_over.elapsed() >= LEASE / 3, "the lease was waited for");
    assert_eq!(other.outcomes(Outcome::Processed), 1);
    assert_eq!(world.application.calls_of("m1"), 2);
}

#[tokio::test(start_paused = true)]
async fn a_delivery_in_backoff_goes_back_at_once() {
    let world = World::queue(Application::new(|_, _| (MS, retry(RetryReason::ServerError))));
    let mut slow = settings();
    slow.retry.initial = Duration::from_secs(25);
    let instance = world.start_with(slow);
    world.publish(["m1"]);
    world.called("m1", 1).await;
    let begun = tokio::time::Instant::now();
    assert_eq!(instance.drain(GRACE).await.cut, 0);
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    assert_eq!(world.broker.unsettled(), 1);
    assert_eq!(instance.outcomes(Outcome::Released), 1);
}

#[tokio::test(start_paused = true)]
async fn a_drain_while_the_database_is_away_ends_within_the_grace_period() {
    let world = World::queue(Application::accepting());
    let instance = world.start();
    world.publish(["m0"]);
    world.drained().await;
    world.database.set_available(false);
    world.publish(["m1"]);
    eventually(PATIENCE, async || ensure(world.broker.held() == 1, "not taken yet".to_owned()))
        .await;
    let begun = tokio::time::Instant::now();
    instance.drain(GRACE).await;
    assert!(begun.elapsed() <= GRACE);
    assert_eq!(world.broker.unsettled(), 1);
}
