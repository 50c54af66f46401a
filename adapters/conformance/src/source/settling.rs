//! Cases about acks, releases, crashes and leaving.

use std::sync::Arc;

use super::support::{Bench, CLOSE, close, id, ids, take, take_until, within};
use super::{SourceHarness, TestMessage};

/// Acked deliveries are gone, however quickly the source is closed behind the acks.
pub(super) async fn acked_does_not_come_again(harness: Arc<dyn SourceHarness>) {
    let bench = Bench::new(&harness, 1).await;
    let expected = bench.publish_many("m", 100).await;
    let mut source = bench.place.open().await;
    let mut came = Vec::new();
    let mut pair = Vec::new();
    while came.len() < expected.len() {
        let delivery = take(&mut source, 1).await.remove(0);
        came.push(id(&delivery));
        // Settled in pairs, the later one first.
        pair.push(delivery);
        if pair.len() == 2 {
            pair.drain(..).rev().for_each(|delivery| delivery.acker.ack());
        }
    }
    assert_eq!(came, expected);
    close(source).await;
    bench.assert_all_settled().await;
}

/// What was handed over and not settled comes again, in order, and an acker of before
/// settles nothing of what came again.
pub(super) async fn unacked_comes_again_after_close(harness: Arc<dyn SourceHarness>) {
    let bench = Bench::new(&harness, 1).await;
    bench.publish(&["m0", "m1", "m2", "m3", "m4"]).await;
    let mut first = bench.place.open().await;
    let mut held = take(&mut first, 5).await;
    held.drain(..2).for_each(|delivery| delivery.acker.ack());
    close(first).await;

    let mut second = bench.place.open().await;
    let again = take(&mut second, 3).await;
    assert_eq!(ids(&again), ["m2", "m3", "m4"], "the unsettled ones are delivered again");
    held.into_iter().for_each(|delivery| delivery.acker.ack());
    drop(again);
    close(second).await;

    let mut third = bench.place.open().await;
    let again = take_until(&mut third, &["m2", "m3", "m4"]).await;
    again.into_iter().for_each(|delivery| delivery.acker.ack());
    close(third).await;
    bench.assert_all_settled().await;
}

/// Released, and dropped without a word: both come again; their acked neighbours do
/// not, where each ack stands for itself.
pub(super) async fn released_comes_again(harness: Arc<dyn SourceHarness>) {
    let bench = Bench::new(&harness, 1).await;
    bench.publish(&["m0", "m1", "m2", "m3"]).await;
    let mut source = bench.place.open().await;
    let mut held = take(&mut source, 4).await.into_iter();
    let mut next = || held.next().expect("four were taken");
    next().acker.ack();
    next().acker.release();
    next().acker.ack();
    drop(next());

    if !bench.abilities.release_returns_here {
        close(source).await;
        source = bench.place.open().await;
    }
    let again = take_until(&mut source, &["m1", "m3"]).await;
    let mut came = ids(&again);
    if bench.abilities.settles_singly {
        came.sort();
        assert_eq!(came, ["m1", "m3"], "what was acked does not come again");
    } else {
        assert!(!came.contains(&"m0".to_owned()), "below the lowest unsettled: {came:?}");
    }
    again.into_iter().for_each(|delivery| delivery.acker.ack());
    close(source).await;
    bench.assert_all_settled().await;
}

/// A whole batch dropped (a panicked engine) comes again, each member once it is owned anew.
pub(super) async fn a_dropped_batch_comes_again_in_order(harness: Arc<dyn SourceHarness>) {
    let bench = Bench::new(&harness, 1).await;
    bench.publish(&["m0", "m1", "m2"]).await;
    let mut first = bench.place.open().await;
    drop(take(&mut first, 3).await);
    close(first).await;
    let mut second = bench.place.open().await;
    let again = take(&mut second, 3).await;
    assert_eq!(ids(&again), ["m0", "m1", "m2"]);
    again.into_iter().for_each(|delivery| delivery.acker.ack());
    close(second).await;
    bench.assert_all_settled().await;
}

/// Acked out of order, then the source is dropped without close: the unsettled ones come
/// again; an ack above a hole must not have covered the hole.
pub(super) async fn acked_out_of_order_then_crashed(harness: Arc<dyn SourceHarness>) {
    let bench = Bench::new(&harness, 1).await;
    let all = ["m0", "m1", "m2", "m3", "m4", "m5"];
    bench.publish(&all).await;
    let mut first = bench.place.open().await;
    let mut kept = Vec::new();
    for delivery in take(&mut first, 6).await.into_iter().rev() {
        match id(&delivery).as_str() {
            "m0" | "m3" => kept.push(delivery),
            _ => delivery.acker.ack(),
        }
    }
    drop(first);
    let mut second = bench.place.open().await;
    let again = take_until(&mut second, &["m0", "m3"]).await;
    let came = ids(&again);
    assert!(came.iter().all(|id| all.contains(&id.as_str())), "{came:?}");
    drop(kept);
    again.into_iter().for_each(|delivery| delivery.acker.ack());
    // The acks of the first life may have been lost with it.
    bench.settle_to_end(second).await;
    bench.assert_all_settled().await;
}

/// After `stop_taking` acks count, and what was not handed over is for the next owner.
pub(super) async fn stop_taking_keeps_acks_and_gives_the_rest_back(
    harness: Arc<dyn SourceHarness>,
) {
    let bench = Bench::new(&harness, 1).await;
    let all = bench.publish_many("m", 20).await;
    let mut first = bench.place.open().await;
    let held = take(&mut first, 3).await;
    within("stop_taking", first.stop_taking()).await;
    for delivery in held {
        assert!(delivery.fence.is_open(), "what is under way may finish");
        delivery.acker.ack();
    }
    close(first).await;
    let mut second = bench.place.open().await;
    let mut came = Vec::new();
    while came.len() < all.len() - 3 {
        let delivery = take(&mut second, 1).await.remove(0);
        came.push(id(&delivery));
        delivery.acker.ack();
    }
    assert_eq!(came, all[3..]);
    close(second).await;
    bench.assert_all_settled().await;
}

/// Where several sources share a stream, what one gives back reaches another before the
/// first has closed.
pub(super) async fn what_stop_taking_gives_back_goes_to_others(harness: Arc<dyn SourceHarness>) {
    let bench = Bench::new(&harness, 1).await;
    bench.publish_many("m", 20).await;
    let mut first = bench.place.open().await;
    let held = take(&mut first, 1).await;
    within("stop_taking", first.stop_taking()).await;
    let mut second = bench.place.open().await;
    let mut came = std::collections::BTreeSet::new();
    while came.len() < 19 {
        let delivery = take(&mut second, 1).await.remove(0);
        assert!(came.insert(id(&delivery)), "{} came twice", id(&delivery));
        delivery.acker.ack();
    }
    assert!(!came.contains("m0"), "what is under way stays");
    held.into_iter().for_each(|delivery| delivery.acker.ack());
    close(first).await;
    close(second).await;
    bench.assert_all_settled().await;
}

/// A fence is open while the source has what it stands for, and lost when it left.
pub(super) async fn fences_are_open_until_the_source_leaves(harness: Arc<dyn SourceHarness>) {
    let bench = Bench::new(&harness, 1).await;
    bench.publish(&["m"]).await;
    let mut source = bench.place.open().await;
    let held = take(&mut source, 1).await.remove(0);
    assert!(held.fence.is_open() && !held.fence.is_lost());
    let fence = held.fence.clone();
    held.acker.ack();
    assert!(fence.is_open(), "an ack closes nothing");
    within("close", source.close(CLOSE)).await.expect("close answers");
    within("the fence's end", fence.closed()).await;
    within("the fence's end", fence.lost()).await;
    assert!(!fence.is_open() && fence.is_lost());
}

/// A source dropped without close leaves no open fence behind.
pub(super) async fn a_crash_loses_the_fences(harness: Arc<dyn SourceHarness>) {
    let bench = Bench::new(&harness, 1).await;
    bench.publish(&["m"]).await;
    let mut source = bench.place.open().await;
    let held = take(&mut source, 1).await.remove(0);
    drop(source);
    within("the fence's end", held.fence.lost()).await;
    held.acker.ack();
    let mut next = bench.place.open().await;
    let again = take(&mut next, 1).await.remove(0);
    assert_eq!(id(&again), "m", "an ack after the end counts for nothing");
    again.acker.ack();
    close(next).await;
}

/// Two sources on one queue: each message at one of them.
pub(super) async fn competing_sources_share_without_overlap(harness: Arc<dyn SourceHarness>) {
    let bench = Bench::new(&harness, 1).await;
    let (mut one, mut other) = (bench.place.open().await, bench.place.open().await);
    let mut came = std::collections::BTreeSet::new();
    let messages: Vec<_> = (0..40).map(|n| TestMessage::new(format!("m{n}"))).collect();
    bench.place.publish(0, &messages).await;
    let room = inboxd_contract::Room { deliveries: 1, bytes: 1 << 20 };
    while came.len() < messages.len() {
        let batch = within("a delivery", async {
            tokio::select! {
                batch = one.next_batch(room) => batch,
                batch = other.next_batch(room) => batch,
            }
        });
        for delivery in batch.await.expect("a batch") {
            assert!(came.insert(id(&delivery)), "{} came twice", id(&delivery));
            delivery.acker.ack();
        }
    }
    close(one).await;
    close(other).await;
    bench.assert_all_settled().await;
}
