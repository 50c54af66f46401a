//! What records carry and how they come: codecs, transactions, one at a time, restarts.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use inboxd_contract::{RedeliveryHorizon, Source, SourcePhase, SourceStatus};
use rdkafka::producer::Producer as _;
use tokio::time::{Instant, timeout};

use crate::front::{CORRUPTED, FrontedBroker, OVERLONG};
use crate::produce::{Out, Producer};
use crate::support::{
    PATIENCE, Place, blocking, close, config, ids, numbered, properties, ready, settle, start, take,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_codec_is_read() {
    let place = Place::new(1).await;
    let mut source = place.open();
    for codec in ["none", "gzip", "snappy", "lz4", "zstd"] {
        let producer = Producer::new(&place.brokers, &[("compression.codec", codec)]);
        let body = Bytes::from(format!("{codec} ").repeat(20_000));
        let record = Out { body: Some(body.clone()), ..Out::new(0, codec) };
        producer.produce(&place.topic, &[record]).await;
        let came = take(&mut source, 1).await.remove(0);
        assert!(came.envelope.body.as_ref() == Some(&body), "{codec} changed the body");
        came.acker.ack();
    }
    close(source).await;
}

/// Records that come broken are counted, and the source is not ready; what is whole comes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn records_that_cannot_be_read_are_no_silence() {
    let place = Place::new(1).await;
    let front = FrontedBroker::start(&place.brokers).await;
    let mut config = config(&front.address(), &place.topic, &place.group);
    config.properties.insert("check.crcs".into(), "true".into());
    let mut source = start(config);
    place.produce(0, &["a"]).await;
    assert_eq!(settle(&mut source, 1).await, ["a"]);
    front.corrupts.store(true, Ordering::SeqCst);
    place.produce(0, &[CORRUPTED]).await;
    let failing = |status: &SourceStatus| {
        status.phase == SourcePhase::Failing && status.reason.contains("offset 1")
    };
    timeout(PATIENCE, source.status().wait_for(failing)).await.expect("said").expect("it lives");
    assert!(source.counters().unreadable() >= 1);
    front.corrupts.store(false, Ordering::SeqCst);
    place.produce(0, &["b"]).await;
    // Reading may have begun again with the oldest record.
    let mut came = BTreeSet::new();
    while came.len() < 3 {
        came.extend(settle(&mut source, 1).await);
        came.insert("a".into());
    }
    assert!(came.contains(CORRUPTED) && came.contains("b"), "{came:?}");
    close(source).await;
}

/// A record whose headers cannot be read comes with its body, and says what it lacks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn headers_that_cannot_be_read_are_named() {
    let place = Place::new(1).await;
    let front = FrontedBroker::start(&place.brokers).await;
    front.corrupts.store(true, Ordering::SeqCst);
    let mut source = start(config(&front.address(), &place.topic, &place.group));
    let name = Bytes::from_static(OVERLONG.as_bytes());
    let body = Some(Bytes::from_static(b"the body"));
    let broken = Out { headers: vec![(name, None)], body: body.clone(), ..Out::default() };
    place.producer.produce(&place.topic, &[broken, Out::new(0, "after")]).await;
    let came = take(&mut source, 2).await;
    let names: Vec<_> =
        came[0].envelope.headers.iter().map(|header| header.name.to_vec()).collect();
    assert_eq!(names, [b"x-malformed-headers"]);
    assert_eq!(came[0].envelope.body, body);
    assert_eq!(ids(&came[1..]), ["after"], "what is behind it flows");
    came.into_iter().for_each(|delivery| delivery.acker.ack());
    close(source).await;
}

/// K9: aborted records never come, markers block no commit and leave no lag.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_committed_transactions_are_seen_and_the_lag_goes_to_zero() {
    let place = Place::new(1).await;
    let mut source = place.open();
    let producer = Producer::new(&place.brokers, &[("transactional.id", &place.group)]);
    let transact = async |ids: Vec<String>, commit: bool| {
        let records: Vec<_> = ids.iter().map(|id| Out::new(0, id)).collect();
        let inner = producer.clone();
        blocking(move || inner.inner().begin_transaction().expect("begun")).await;
        producer.produce(&place.topic, &records).await;
        let inner = producer.clone();
        blocking(move || {
            let inner = inner.inner();
            if commit {
                inner.commit_transaction(PATIENCE)
            } else {
                inner.abort_transaction(PATIENCE)
            }
            .expect("ended");
        })
        .await;
    };
    let inner = producer.clone();
    blocking(move || inner.inner().init_transactions(PATIENCE).expect("ready")).await;
    transact(numbered("a", 3), true).await;
    transact(numbered("gone", 3), false).await;
    transact(numbered("b", 2), true).await;
    transact(numbered("gone", 2), false).await;
    assert_eq!(settle(&mut source, 5).await, ["a0", "a1", "a2", "b0", "b1"]);

    // 3 + 3 + 2 + 2 records and four markers.
    place.wait_committed(0, 14).await;
    let mut status = source.status();
    let caught_up = status
        .wait_for(|status| status.partitions.first().is_some_and(|report| report.lag == Some(0)));
    timeout(PATIENCE, caught_up).await.expect("no lag is left").expect("the source lives");
    transact(numbered("c", 1), true).await;
    assert_eq!(settle(&mut source, 1).await, ["c0"]);
    close(source).await;
}

/// K10: nothing skipped, committed = last + 1, five times over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopping_between_single_records_skips_none() {
    let place = Place::new(1).await;
    for round in 0..5 {
        let (before, after) = (format!("{round}-before"), format!("{round}-after"));
        let mut source = place.open();
        place.produce(0, &[&before]).await;
        let skipped = if round == 0 { 0 } else { 1 };
        let mut came = settle(&mut source, 1 + skipped).await;
        assert_eq!(came.pop(), Some(before));
        close(source).await;
        let committed = place.committed(0).await.map(|(offset, _)| offset);
        assert_eq!(committed, Some(2 * round + 1), "the last settled, plus one");
        place.produce(0, &[&after]).await;
    }
}

/// K7: with statistics each second and a rebalance in between, each record comes promptly.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn single_records_come_promptly_however_quiet_it_is() {
    let place = Place::new(1).await;
    let mut config = place.config();
    config.properties.extend(properties(&[("statistics.interval.ms", "1000")]));
    let mut source = start(config.clone());
    ready(&source).await;
    for round in 0..4 {
        tokio::time::sleep(Duration::from_millis(1_300)).await;
        let other = (round == 2).then(|| start(config.clone()));
        if let Some(other) = other {
            ready(&other).await;
            close(other).await;
            ready(&source).await;
        }
        let id = format!("r{round}");
        let began = Instant::now();
        place.produce(0, &[&id]).await;
        assert_eq!(settle(&mut source, 1).await, [id]);
        assert!(began.elapsed() < Duration::from_secs(10), "took {:?}", began.elapsed());
    }
    close(source).await;
}

/// A release hands the same record over again, before what is behind it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_released_comes_again_before_what_is_behind_it() {
    let place = Place::new(1).await;
    place.produce(0, &numbered("m", 6)).await;
    let mut source = place.open();
    let held = take(&mut source, 4).await;
    let mut released = 0;
    for delivery in held.into_iter().rev() {
        match delivery.envelope.origin.position().expect("a position").ends_with("/0") {
            true => delivery.acker.ack(),
            false => {
                released += 1;
                drop(delivery);
            }
        }
    }
    assert_eq!(released, 3);
    let again = take(&mut source, 5).await;
    assert_eq!(ids(&again), ["m1", "m2", "m3", "m4", "m5"]);
    let counted = |status: &SourceStatus| status.counts.releases == 3;
    timeout(PATIENCE, source.status().wait_for(counted)).await.expect("counted").expect("it lives");
    again.into_iter().for_each(|delivery| delivery.acker.ack());
    place.wait_committed(0, 6).await;
    close(source).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_horizon_is_the_topics_retention() {
    let place = Place::new(1).await;
    let source = place.open();
    ready(&source).await;
    let horizons = source.redelivery_horizon().await;
    let [(topic, horizon)] = horizons.try_into().expect("one topic");
    assert_eq!(topic, place.topic);
    assert!(
        matches!(horizon, RedeliveryHorizon::Limited(_) | RedeliveryHorizon::Unlimited),
        "{horizon:?}"
    );
    close(source).await;
}
