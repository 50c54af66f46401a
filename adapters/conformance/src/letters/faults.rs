//! What is said of what does not arrive.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::future::join_all;
use inboxd_contract::{DeadLetterTarget, ErrorCode, PublishError};
use tokio::time::{Instant, timeout};

use super::cases::{Case, Letter, PATIENCE, case, copies};
use super::{LettersHarness, LettersPlace, SeenCopy};
use crate::eventually;

/// Beyond the bound of a try: a busy machine, a report that comes a little late.
const SLACK: Duration = Duration::from_secs(10);
const CLOSE: Duration = Duration::from_secs(2);

pub(super) const CASES: &[Case] = &[
    case!(away_is_an_error_and_back_is_none),
    case!(away_from_the_beginning_and_then_there),
    case!(a_broker_that_hangs_ends_a_try_in_time, |abilities| abilities.real),
    case!(what_was_answered_ok_is_there_whatever_happens, |abilities| abilities.real),
    case!(what_leads_nowhere_is_an_error_until_it_leads_somewhere, |abilities| abilities.routes),
    case!(what_is_too_large_is_refused_alone, |abilities| abilities.refuses_bytes.is_some()),
    case!(dropped_in_the_middle_it_goes_on),
    case!(closed_it_takes_nothing, |abilities| abilities.real),
    case!(it_closes_in_time_while_the_broker_hangs, |abilities| abilities.real),
    case!(it_closes_in_time_without_a_broker),
    case!(closing_waits_for_what_is_under_way),
];

/// Publishes until it succeeds, as the engine does.
async fn insist(letter: &Letter, target: &dyn DeadLetterTarget) {
    eventually(PATIENCE, async || letter.publish(target).await).await;
}

/// Publishes what must fail, within the bound of a try.
async fn failing(
    harness: &dyn LettersHarness,
    letter: &Letter,
    target: &dyn DeadLetterTarget,
) -> PublishError {
    let most = harness.publish_timeout() + SLACK;
    let answer = timeout(most, letter.publish(target)).await.expect("a try is bounded");
    let error = answer.expect_err("nothing can have been published");
    assert!(!error.what.is_empty());
    error
}

fn bodies(copies: &[SeenCopy]) -> BTreeSet<Bytes> {
    copies.iter().filter_map(|copy| copy.body.clone()).collect()
}

async fn away_is_an_error_and_back_is_none(harness: Arc<dyn LettersHarness>) {
    let place = harness.fresh().await;
    let target = place.target();
    Letter::new("before").publish(&*target).await.expect("published");
    place.set_reachable(false).await;
    let error = failing(&*harness, &Letter::new("lost"), &*target).await;
    assert_eq!((error.code, error.refused), (ErrorCode::DeadLetterTargetAway, false), "{error}");
    place.set_reachable(true).await;
    insist(&Letter::new("after"), &*target).await;
    let came = bodies(&copies(&*place, 2).await);
    assert!(came.contains(&b"before"[..]) && came.contains(&b"after"[..]), "{came:?}");
}

async fn away_from_the_beginning_and_then_there(harness: Arc<dyn LettersHarness>) {
    let place = harness.fresh().await;
    place.set_reachable(false).await;
    let target = place.target();
    let error = failing(&*harness, &Letter::new("m"), &*target).await;
    assert_eq!((error.code, error.refused), (ErrorCode::DeadLetterTargetAway, false), "{error}");
    place.set_reachable(true).await;
    insist(&Letter::new("m"), &*target).await;
    assert!(!copies(&*place, 1).await.is_empty());
}

async fn a_broker_that_hangs_ends_a_try_in_time(harness: Arc<dyn LettersHarness>) {
    let place = harness.fresh().await;
    let target = place.target();
    Letter::new("before").publish(&*target).await.expect("published");
    place.hang().await;
    let lost: Vec<_> = (0..5).map(|n| Letter::new(&format!("lost{n}"))).collect();
    let failures = join_all(lost.iter().map(|letter| failing(&*harness, letter, &*target))).await;
    for error in failures {
        assert_eq!(error.code, ErrorCode::DeadLetterTargetAway, "{error}");
        assert!(!error.refused, "{error}");
    }
    place.set_reachable(true).await;
    insist(&Letter::new("after"), &*target).await;
    let came = bodies(&copies(&*place, 2).await);
    assert!(came.contains(&b"after"[..]), "{came:?}");
}

/// The rule that an original is acked by, while connections break again and again.
async fn what_was_answered_ok_is_there_whatever_happens(harness: Arc<dyn LettersHarness>) {
    let place = harness.fresh().await;
    let target = place.target();
    let letters: Vec<_> = (0..60).map(|n| Letter::new(&format!("m{n}"))).collect();
    let publishing = join_all(letters.iter().enumerate().map(async |(n, letter)| {
        tokio::time::sleep(Duration::from_millis(10 * n as u64)).await;
        letter.publish(&*target).await.is_ok()
    }));
    let breaking = async {
        for _ in 0..3 {
            tokio::time::sleep(Duration::from_millis(120)).await;
            place.set_reachable(false).await;
            place.set_reachable(true).await;
        }
    };
    let (answers, ()) = futures::join!(publishing, breaking);
    let said = letters.iter().zip(&answers).filter(|(_, ok)| **ok);
    let said: BTreeSet<_> = said.filter_map(|(letter, _)| letter.envelope.body.clone()).collect();
    insist(&Letter::new("last"), &*target).await;
    eventually(PATIENCE, async || {
        let came = bodies(&place.copies().await);
        let missing: Vec<_> = said.difference(&came).collect();
        crate::ensure(missing.is_empty(), format!("answered with Ok, and not there: {missing:?}"))
    })
    .await;
}

async fn what_leads_nowhere_is_an_error_until_it_leads_somewhere(harness: Arc<dyn LettersHarness>) {
    let place = harness.fresh().await;
    let target = place.target();
    place.set_routed(false).await;
    for id in ["lost", "lost too"] {
        let error = failing(&*harness, &Letter::new(id), &*target).await;
        assert_eq!((error.code, error.refused), (ErrorCode::DeadLetterUnrouted, false), "{error}");
    }
    place.set_routed(true).await;
    Letter::new("m").publish(&*target).await.expect("routed");
    assert_eq!(bodies(&copies(&*place, 1).await), BTreeSet::from([Bytes::from_static(b"m")]));
}

async fn what_is_too_large_is_refused_alone(harness: Arc<dyn LettersHarness>) {
    let place = harness.fresh().await;
    let target = place.target();
    let mut large = Letter::new("large");
    let bytes = harness.abilities().refuses_bytes.expect("asked for");
    large.envelope.body = Some(vec![b'x'; bytes].into());
    let error = failing(&*harness, &large, &*target).await;
    assert_eq!((error.code, error.refused), (ErrorCode::DeadLetterTargetRefused, true), "{error}");
    // Beside others: they are not refused, and none is lost.
    let others: Vec<_> = (0..20).map(|n| Letter::new(&format!("m{n}"))).collect();
    let publishing = join_all(others.iter().map(|letter| letter.publish(&*target)));
    let (error, answers) = futures::join!(failing(&*harness, &large, &*target), publishing);
    assert!(!answers.iter().any(|answer| answer.as_ref().is_err_and(|error| error.refused)));
    // A connection that others broke says nothing of this message; the next try does.
    let error = if error.refused { error } else { failing(&*harness, &large, &*target).await };
    assert!(error.refused, "{error}");
    for letter in &others {
        insist(letter, &*target).await;
    }
    let came = bodies(&copies(&*place, others.len()).await);
    assert_eq!(came.len(), others.len(), "all but the large one");
}

async fn dropped_in_the_middle_it_goes_on(harness: Arc<dyn LettersHarness>) {
    let place = harness.fresh().await;
    let target = place.target();
    for step in 0..40 {
        let letter = Letter::new(&format!("dropped{step}"));
        let _ = timeout(Duration::from_micros(250 * step), letter.publish(&*target)).await;
    }
    insist(&Letter::new("m"), &*target).await;
    eventually(PATIENCE, async || {
        let came = place.copies().await;
        // What was dropped is there whole, or not at all.
        let named = came.iter().all(|copy| copy.stamps().contains_key("inbox-dead-reason"));
        assert!(named, "a copy without its headers: {came:?}");
        crate::ensure(bodies(&came).contains(&b"m"[..]), "not there yet")
    })
    .await;
}

async fn closed_it_takes_nothing(harness: Arc<dyn LettersHarness>) {
    let place = harness.fresh().await;
    let target = place.target();
    Letter::new("m").publish(&*target).await.expect("published");
    target.close(CLOSE).await;
    let error = failing(&*harness, &Letter::new("late"), &*target).await;
    assert!(!error.refused, "{error}");
    target.close(CLOSE).await;
}

async fn closes_in_time(place: &dyn LettersPlace) {
    let began = Instant::now();
    timeout(CLOSE + SLACK, place.target().close(CLOSE)).await.expect("in time");
    let took = began.elapsed();
    assert!(took < CLOSE + Duration::from_secs(2), "{took:?}");
}

async fn it_closes_in_time_while_the_broker_hangs(harness: Arc<dyn LettersHarness>) {
    let place = harness.fresh().await;
    let target = place.target();
    Letter::new("before").publish(&*target).await.expect("published");
    place.hang().await;
    let letter = Letter::new("lost");
    let publishing = letter.publish(&*target);
    let closing = closes_in_time(&*place);
    let most = harness.publish_timeout() + SLACK;
    let (answer, ()) = futures::join!(timeout(most, publishing), closing);
    answer.expect("a try is bounded").expect_err("nothing was confirmed");
}

async fn it_closes_in_time_without_a_broker(harness: Arc<dyn LettersHarness>) {
    let place = harness.fresh().await;
    place.set_reachable(false).await;
    let _ = failing(&*harness, &Letter::new("m"), &*place.target()).await;
    closes_in_time(&*place).await;
}

async fn closing_waits_for_what_is_under_way(harness: Arc<dyn LettersHarness>) {
    let place = harness.fresh().await;
    let target = place.target();
    Letter::new("first").publish(&*target).await.expect("published");
    let letters: Vec<_> = (0..20).map(|n| Letter::new(&format!("m{n}"))).collect();
    let publishing = join_all(letters.iter().map(|letter| letter.publish(&*target)));
    // Each has begun before the close does.
    let closing = async {
        tokio::task::yield_now().await;
        target.close(PATIENCE).await;
    };
    let (answers, ()) = futures::join!(publishing, closing);
    let published = answers.iter().filter(|answer| answer.is_ok()).count();
    assert_eq!(published, letters.len(), "{answers:?}");
    copies(&*place, letters.len() + 1).await;
}
