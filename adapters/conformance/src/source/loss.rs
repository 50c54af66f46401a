//! Cases about lost connections, absent and hanging brokers, and rebalances.

use std::sync::Arc;
use std::time::Duration;

use inboxd_contract::{Delivery, Source, SourcePhase};
use tokio::time::Instant;

use super::SourceHarness;
use super::support::{Bench, WIDE, close, id, ids, phase, take, take_until, within};

fn ready(phase: &SourcePhase) -> bool {
    *phase == SourcePhase::Ready
}

/// The fence is lost, the source comes back alone and says so, what was unsettled comes again,
/// and acks of before the loss settle nothing.
pub(super) async fn a_severed_connection_is_mended_and_old_acks_are_not_used(
    harness: Arc<dyn SourceHarness>,
) {
    let bench = Bench::new(&harness, 1).await;
    bench.publish(&["m0", "m1", "m2"]).await;
    let mut source = bench.place.open().await;
    let old = take(&mut source, 3).await;
    assert_eq!(source.status().borrow().reconnects, 0);
    bench.place.sever().await;
    within("the fence's end", old[0].fence.lost()).await;

    let again = take_until(&mut source, &["m0", "m1", "m2"]).await;
    phase(source.status(), ready, "ready after the loss").await;
    assert!(source.status().borrow().reconnects >= 1, "the reconnection is counted");
    assert!(again.iter().all(|delivery| delivery.fence.is_open()), "a new fence");
    old.into_iter().for_each(|delivery| delivery.acker.ack());
    drop(again);
    close(source).await;

    let mut next = bench.place.open().await;
    let again = take_until(&mut next, &["m0", "m1", "m2"]).await;
    assert_eq!(again.len(), 3);
    again.into_iter().for_each(|delivery| delivery.acker.ack());
    close(next).await;
    bench.assert_all_settled().await;
}

/// The assignment outlives a short loss: acks of before it count, consumption goes on.
pub(super) async fn a_severed_connection_is_mended_and_the_assignment_stays(
    harness: Arc<dyn SourceHarness>,
) {
    let bench = Bench::new(&harness, 1).await;
    bench.publish(&["m0", "m1"]).await;
    let mut source = bench.place.open().await;
    let old = take(&mut source, 2).await;
    bench.place.sever().await;
    bench.publish(&["m2"]).await;
    let next = take(&mut source, 1).await;
    assert_eq!(ids(&next), ["m2"]);
    old.into_iter().chain(next).for_each(|delivery| delivery.acker.ack());
    close(source).await;
    bench.assert_all_settled().await;
}

/// Severed three times under way: every message comes, nothing is left unsettled.
pub(super) async fn a_severed_connection_loses_no_message(harness: Arc<dyn SourceHarness>) {
    let bench = Bench::new(&harness, 1).await;
    let mut source = bench.place.open().await;
    let mut came = std::collections::BTreeSet::new();
    let mut expected = Vec::new();
    for round in 0..3 {
        let ids = bench.publish_many(&format!("r{round}-"), 20).await;
        for _ in 0..5 {
            let delivery = take(&mut source, 1).await.remove(0);
            came.insert(id(&delivery));
            delivery.acker.ack();
        }
        bench.place.sever().await;
        expected.extend(ids);
    }
    while !expected.iter().all(|id| came.contains(id)) {
        for delivery in take(&mut source, 1).await {
            came.insert(id(&delivery));
            delivery.acker.ack();
        }
    }
    // What was acked just before a loss may come again.
    bench.settle_to_end(source).await;
    bench.assert_all_settled().await;
}

/// Not ready before the broker is there; ready; not ready while it is away; ready again.
pub(super) async fn status_follows_the_connection(harness: Arc<dyn SourceHarness>) {
    let bench = Bench::new(&harness, 1).await;
    bench.place.set_reachable(false).await;
    let mut source = bench.place.open().await;
    let early = source.status().borrow().phase.clone();
    assert!(matches!(early, SourcePhase::Connecting | SourcePhase::Failing), "{early:?}");
    // It tries in vain meanwhile; a loop that turns is not a source that is ready.
    let before = source.status().borrow().turned_at;
    let mut status = source.status();
    let turned = status.wait_for(|status| status.turned_at >= before + Duration::from_secs(2));
    within("turns of the loop", turned).await.expect("the source lives");
    assert_ne!(source.status().borrow().phase, SourcePhase::Ready, "no broker is there");

    bench.place.set_reachable(true).await;
    phase(source.status(), ready, "ready once the broker is there").await;
    assert_eq!(source.status().borrow().reason, "", "ready needs no reason");

    bench.place.set_reachable(false).await;
    phase(source.status(), |phase| !ready(phase), "not ready while the broker is away").await;
    assert_ne!(source.status().borrow().reason, "", "not being ready has a reason");
    bench.place.set_reachable(true).await;
    bench.publish(&["m"]).await;
    let came = take(&mut source, 1).await.remove(0);
    phase(source.status(), ready, "ready again").await;
    came.acker.ack();
    close(source).await;
    bench.assert_all_settled().await;
}

/// A broker that takes bytes and answers nothing does not hold up the end.
pub(super) async fn close_is_bounded_when_the_broker_hangs(harness: Arc<dyn SourceHarness>) {
    let bench = Bench::new(&harness, 1).await;
    bench.publish(&["m0", "m1"]).await;
    let mut source = bench.place.open().await;
    let held = take(&mut source, 2).await;
    bench.place.hang().await;
    held.into_iter().for_each(|delivery| delivery.acker.ack());
    assert_bounded_close(source).await;
}

/// Nor does one that was never there.
pub(super) async fn close_is_bounded_when_the_broker_was_never_there(
    harness: Arc<dyn SourceHarness>,
) {
    let bench = Bench::new(&harness, 1).await;
    bench.place.set_reachable(false).await;
    let source = bench.place.open().await;
    assert_bounded_close(source).await;
}

async fn assert_bounded_close(source: Box<dyn Source>) {
    let started = Instant::now();
    // Whether it counts as an error is the adapter's; that it ends is not.
    let _ = within("close", source.close(Duration::from_secs(1))).await;
    let took = started.elapsed();
    assert!(took < Duration::from_secs(8), "close(1 s) took {took:?}");
}

/// A second member takes a stream over: the first one's fences drain, what is under way is
/// finished and acked, and the second sees none of it.
pub(super) async fn a_rebalance_drains_before_it_hands_over(harness: Arc<dyn SourceHarness>) {
    let bench = Bench::new(&harness, 2).await;
    bench.publish_to(0, &["a0"]).await;
    bench.publish_to(1, &["b0"]).await;
    let mut first = bench.place.open().await;
    let mut held = take(&mut first, 2).await;
    let mut second = bench.place.open().await;
    let (first_seen, second_seen) = (&mut Vec::<String>::new(), &mut Vec::<String>::new());

    // Both take all the time, as engines do; held work is finished once its fence drains.
    let turn = async {
        while !held.is_empty() {
            let mut closed = None;
            for (index, delivery) in held.iter().enumerate() {
                if !delivery.fence.is_open() {
                    closed = Some(index);
                }
            }
            if let Some(index) = closed {
                let delivery = held.remove(index);
                assert!(!delivery.fence.is_lost(), "drains before it is lost");
                delivery.acker.ack();
                if second_streams(&held) {
                    break;
                }
            }
            tokio::select! {
                batch = first.next_batch(WIDE) => settle(batch.expect("a batch"), first_seen),
                batch = second.next_batch(WIDE) => settle(batch.expect("a batch"), second_seen),
                () = tokio::time::sleep(Duration::from_millis(10)) => {}
            }
        }
    };
    within("a drain", turn).await;
    held.into_iter().for_each(|delivery| delivery.acker.ack());

    bench.publish_to(0, &["a1"]).await;
    bench.publish_to(1, &["b1"]).await;
    let both = async {
        while first_seen.len() + second_seen.len() < 2 {
            tokio::select! {
                batch = first.next_batch(WIDE) => settle(batch.expect("a batch"), first_seen),
                batch = second.next_batch(WIDE) => settle(batch.expect("a batch"), second_seen),
            }
        }
    };
    within("both streams go on", both).await;
    let mut came = [first_seen.clone(), second_seen.clone()].concat();
    came.sort();
    assert_eq!(came, ["a1", "b1"], "what was acked in the drain does not come again");
    close(first).await;
    close(second).await;
    bench.assert_all_settled().await;
}

/// One of two was handed over; the other stays with the first member.
fn second_streams(held: &[Delivery]) -> bool {
    held.len() == 1 && held[0].fence.is_open()
}

fn settle(batch: Vec<Delivery>, seen: &mut Vec<String>) {
    for delivery in batch {
        seen.push(id(&delivery));
        delivery.acker.ack();
    }
}
