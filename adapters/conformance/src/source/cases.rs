//! The list of cases, and those about handing over.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use inboxd_contract::{Room, StreamId};
use tokio::time::timeout;

use super::support::{Bench, WIDE, close, id, ids, take, within};
use super::{Abilities, SourceHarness, TestMessage, content, loss, settling};

type Running = Pin<Box<dyn Future<Output = ()> + Send>>;

/// One case.
pub(super) struct Case {
    pub(super) name: &'static str,
    pub(super) applies: fn(&Abilities) -> bool,
    pub(super) run: fn(Arc<dyn SourceHarness>) -> Running,
}

macro_rules! case {
    ($module:ident :: $name:ident) => {
        case!($module::$name, |_| true)
    };
    ($module:ident :: $name:ident, $applies:expr) => {
        Case {
            name: stringify!($name),
            applies: $applies,
            run: |harness| Box::pin($module::$name(harness)),
        }
    };
}

use self as handing;

/// All cases, the slow ones first.
pub(super) const CASES: &[Case] = &[
    case!(loss::a_severed_connection_is_mended_and_old_acks_are_not_used, |a| a.loss_fences),
    case!(loss::a_severed_connection_is_mended_and_the_assignment_stays, |a| !a.loss_fences),
    case!(loss::a_severed_connection_loses_no_message),
    case!(loss::status_follows_the_connection),
    case!(loss::close_is_bounded_when_the_broker_hangs),
    case!(loss::close_is_bounded_when_the_broker_was_never_there),
    case!(loss::a_rebalance_drains_before_it_hands_over, |a| a.rebalances),
    case!(settling::acked_out_of_order_then_crashed),
    case!(settling::released_comes_again),
    case!(settling::a_dropped_batch_comes_again_in_order),
    case!(settling::acked_does_not_come_again),
    case!(settling::unacked_comes_again_after_close),
    case!(settling::stop_taking_keeps_acks_and_gives_the_rest_back),
    case!(settling::what_stop_taking_gives_back_goes_to_others, |a| a.competing),
    case!(settling::fences_are_open_until_the_source_leaves),
    case!(settling::a_crash_loses_the_fences),
    case!(settling::competing_sources_share_without_overlap, |a| a.competing),
    case!(handing::order_is_kept_within_each_stream),
    case!(handing::a_batch_fits_the_room),
    case!(handing::next_batch_is_cancel_safe),
    case!(handing::unsettled_max_is_kept),
    case!(handing::the_loop_shows_that_it_turns),
    case!(handing::the_redelivery_horizon_is_answered),
    case!(content::bodies_are_kept_to_the_byte),
    case!(content::a_tombstone_is_not_an_empty_body, |a| a.tombstones),
    case!(content::header_values_are_bytes),
    case!(content::headers_repeat_in_order, |a| a.repeated_headers),
    case!(content::a_null_header_is_not_an_empty_one, |a| a.null_header_values),
    case!(content::header_names_are_bytes, |a| a.binary_header_names),
    case!(content::well_known_headers_fill_the_envelope),
    case!(content::keys_are_bytes, |a| a.keys),
];

/// What is published to a stream comes in that order, and streams are told apart.
pub(super) async fn order_is_kept_within_each_stream(harness: Arc<dyn SourceHarness>) {
    const PER_STREAM: usize = 30;
    let bench = Bench::new(&harness, 3).await;
    for stream in 0..bench.streams {
        let messages: Vec<_> =
            (0..PER_STREAM).map(|n| TestMessage::new(format!("{stream}-{n:03}"))).collect();
        bench.place.publish(stream, &messages).await;
    }
    let mut source = bench.place.open().await;
    let mut seen: std::collections::BTreeMap<StreamId, Vec<String>> = Default::default();
    let mut positions = std::collections::HashSet::new();
    for _ in 0..bench.streams * PER_STREAM {
        // One at a time settled, so that a bound on unsettled deliveries is never met.
        let delivery = take(&mut source, 1).await.remove(0);
        if let Some(position) = delivery.envelope.origin.position() {
            assert!(positions.insert(position), "a position names one message only");
        }
        seen.entry(delivery.stream.clone()).or_default().push(id(&delivery));
        delivery.acker.ack();
    }
    assert_eq!(seen.len(), bench.streams, "as many streams as the place has");
    for (stream, ids) in seen {
        let mut sorted = ids.clone();
        sorted.sort();
        assert_eq!(ids, sorted, "order within {stream}");
        assert!(ids.iter().all(|id| id[..1] == ids[0][..1]), "{stream} is one stream: {ids:?}");
    }
    close(source).await;
    bench.assert_all_settled().await;
}

/// Neither count nor bytes of a batch pass the room, but for one delivery's overshoot.
pub(super) async fn a_batch_fits_the_room(harness: Arc<dyn SourceHarness>) {
    let bench = Bench::new(&harness, 1).await;
    let body = bytes::Bytes::from(vec![b'x'; 10_000]);
    let messages: Vec<_> = (0..24)
        .map(|n| TestMessage { body: Some(body.clone()), ..TestMessage::new(format!("m{n:02}")) })
        .collect();
    bench.place.publish(0, &messages).await;
    let mut source = bench.place.open().await;
    let mut came = Vec::new();
    while came.len() < messages.len() {
        let narrow_bytes = came.len() >= 12;
        let room = match narrow_bytes {
            false => Room { deliveries: 3, bytes: usize::MAX },
            true => Room { deliveries: 1_000, bytes: 15_000 },
        };
        let batch = within("a batch", source.next_batch(room)).await.expect("a batch");
        assert!(!batch.is_empty(), "a batch is never empty");
        let largest = if narrow_bytes { 2 } else { 3 };
        assert!(batch.len() <= largest, "{} deliveries for {room:?}", batch.len());
        for delivery in batch {
            came.push(id(&delivery));
            delivery.acker.ack();
        }
    }
    let expected: Vec<_> = messages.into_iter().map(|message| message.id).collect();
    assert_eq!(came, expected);
    close(source).await;
}

/// The future is dropped over and over, before and while messages come: none is lost, none
/// comes twice, order holds.
pub(super) async fn next_batch_is_cancel_safe(harness: Arc<dyn SourceHarness>) {
    const COUNT: usize = 200;
    let bench = Bench::new(&harness, 1).await;
    let mut source = bench.place.open().await;
    let room = Room { deliveries: 2, ..WIDE };
    let mut came = Vec::new();
    let mut expected = Vec::new();
    let collect = async {
        let mut turn = 0_u64;
        while came.len() < COUNT {
            turn += 1;
            if expected.len() < COUNT && turn.is_multiple_of(3) {
                expected.extend(bench.publish_many(&format!("p{turn}-"), 10).await);
            }
            // Dropped after one poll, or after a moment.
            let batch = match turn % 2 {
                0 => futures::FutureExt::now_or_never(source.next_batch(room)),
                _ => timeout(Duration::from_micros(turn % 7 * 400), source.next_batch(room))
                    .await
                    .ok(),
            };
            match batch {
                Some(batch) => {
                    for delivery in batch.expect("a batch") {
                        came.push(id(&delivery));
                        delivery.acker.ack();
                    }
                }
                None => tokio::time::sleep(Duration::from_micros(200)).await,
            }
        }
    };
    if timeout(super::support::PATIENCE, collect).await.is_err() {
        panic!("{} of {COUNT} came", came.len());
    }
    assert_eq!(came, expected);
    close(source).await;
    bench.assert_all_settled().await;
}

/// A source that says how many deliveries may be unsettled hands over no more than that, and
/// goes on when one is settled.
pub(super) async fn unsettled_max_is_kept(harness: Arc<dyn SourceHarness>) {
    let bench = Bench::new(&harness, 1).await;
    let mut source = bench.place.open().await;
    let Some(most) = source.traits().unsettled_max else {
        return close(source).await;
    };
    bench.publish_many("m", most + 2).await;
    let mut held = take(&mut source, most).await;
    let beyond = timeout(Duration::from_millis(300), source.next_batch(WIDE)).await;
    if let Ok(batch) = beyond {
        panic!("{:?} came beyond {most}", batch.map(|batch| ids(&batch)));
    }
    held.remove(0).acker.ack();
    let next = take(&mut source, 1).await;
    assert_eq!(ids(&next), [format!("m{most}")]);
    close(source).await;
}

/// `turned_at` moves while nothing happens.
pub(super) async fn the_loop_shows_that_it_turns(harness: Arc<dyn SourceHarness>) {
    let bench = Bench::new(&harness, 1).await;
    let source = bench.place.open().await;
    let mut status = source.status();
    for _ in 0..3 {
        let before = status.borrow().turned_at;
        let moved = status.wait_for(|status| status.turned_at > before);
        within("a turn of the loop", moved).await.expect("the source lives");
    }
    close(source).await;
}

/// The question about the broker's horizon has an answer.
pub(super) async fn the_redelivery_horizon_is_answered(harness: Arc<dyn SourceHarness>) {
    let bench = Bench::new(&harness, 1).await;
    bench.publish(&["m"]).await;
    let mut source = bench.place.open().await;
    let first = take(&mut source, 1).await;
    let answer = timeout(Duration::from_secs(15), source.redelivery_horizon()).await;
    let answer = answer.expect("the horizon is answered within a few seconds");
    assert!(!answer.is_empty() && answer.iter().all(|(name, _)| !name.is_empty()), "{answer:?}");
    drop(first);
    close(source).await;
}
