//! Which topics and partitions are consumed, and from where.

use std::time::Duration;

use inboxd_contract::{ErrorClass, Source, SourcePhase, SourceStatus};
use inboxd_kafka::StartAt;
use rdkafka::admin::{AdminOptions, NewPartitions};
use tokio::time::timeout;

use crate::support::{
    PATIENCE, Place, WIDE, admin, close, config, create_topic, ids, ready, settle, start,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_to_start_is_chosen() {
    let place = Place::new(1).await;
    place.produce(0, &["old"]).await;
    let open = |at: StartAt| {
        let mut config = place.config();
        config.start = at;
        config.group = format!("{at:?}-{}", place.group);
        start(config)
    };
    let mut earliest = open(StartAt::Earliest);
    assert_eq!(settle(&mut earliest, 1).await, ["old"]);
    close(earliest).await;

    let mut refusing = open(StartAt::Refuse);
    let refused = timeout(PATIENCE, refusing.next_batch(WIDE)).await.expect("an answer");
    let error = refused.expect_err("no offset is committed");
    assert_eq!(error.class, ErrorClass::Permanent);
    assert!(error.to_string().contains("`start`"), "{error}");
    close(refusing).await;

    let mut latest = open(StartAt::Latest);
    ready(&latest).await;
    // Its place in the log is found a moment after it has joined.
    let mut round = 0;
    let came = loop {
        place.produce(0, &[format!("new{round}")]).await;
        round += 1;
        if let Ok(batch) = timeout(Duration::from_secs(1), latest.next_batch(WIDE)).await {
            break ids(&batch.expect("the source goes on"));
        }
    };
    assert!(!came.contains(&"old".to_owned()), "{came:?}");
    close(latest).await;
}

/// K8: the topic that exists works at once, the other when it appears.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_topic_that_is_missing_holds_up_no_other() {
    let place = Place::new(1).await;
    let missing = format!("{}-later", place.topic);
    let mut config = place.config();
    config.topics.push(missing.clone());
    let mut source = start(config);
    place.produce(0, &["here"]).await;
    assert_eq!(settle(&mut source, 1).await, ["here"]);
    // Ready, and says what is missing.
    let named = |status: &SourceStatus| {
        status.phase == SourcePhase::Ready && status.reason.contains(&missing)
    };
    timeout(PATIENCE, source.status().wait_for(named)).await.expect("named").expect("it lives");

    create_topic(&place.brokers, &missing, 1).await;
    let later = Place { topic: missing, ..place.clone() };
    later.produce(0, &["there"]).await;
    assert_eq!(settle(&mut source, 1).await, ["there"]);
    let over = |status: &SourceStatus| status.reason.is_empty();
    timeout(PATIENCE, source.status().wait_for(over)).await.expect("over").expect("it lives");
    close(source).await;
}

/// Where nothing that is named is there, the source is not ready, and begins by itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_whose_topics_are_all_missing_is_not_ready() {
    let place = Place::new(1).await;
    let missing = format!("{}-misspelt", place.topic);
    let mut source = start(config(&place.brokers, &missing, &place.group));
    let failing = |status: &SourceStatus| {
        status.phase == SourcePhase::Failing && status.reason.contains(&missing)
    };
    timeout(PATIENCE, source.status().wait_for(failing)).await.expect("said").expect("it lives");
    create_topic(&place.brokers, &missing, 1).await;
    let later = Place { topic: missing, ..place.clone() };
    later.produce(0, &["there"]).await;
    assert_eq!(settle(&mut source, 1).await, ["there"]);
    ready(&source).await;
    close(source).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn new_partitions_are_noticed() {
    let place = Place::new(1).await;
    let mut source = place.open();
    ready(&source).await;
    let admin = admin(&place.brokers);
    let more = NewPartitions::new(&place.topic, 2);
    let grown = admin.create_partitions([&more], &AdminOptions::new()).await.expect("an answer");
    grown.into_iter().for_each(|topic| drop(topic.expect("it grows")));
    place.produce(1, &["on the new one"]).await;
    assert_eq!(settle(&mut source, 1).await, ["on the new one"]);
    close(source).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_regular_expression_subscribes_to_what_matches_now_and_later() {
    let place = Place::new(1).await;
    let later = format!("{}-b", place.topic);
    let pattern = format!("^{}(-b)?$", place.topic);
    let mut source = start({
        let mut config = config(&place.brokers, &pattern, &place.group);
        config.commit_interval = Duration::from_millis(100);
        config
    });
    place.produce(0, &["a"]).await;
    assert_eq!(settle(&mut source, 1).await, ["a"]);
    create_topic(&place.brokers, &later, 1).await;
    let later = Place { topic: later, ..place.clone() };
    later.produce(0, &["b"]).await;
    assert_eq!(settle(&mut source, 1).await, ["b"]);
    let horizons = source.redelivery_horizon().await;
    let topics: Vec<_> = horizons.into_iter().map(|(topic, _)| topic).collect();
    assert_eq!(topics, [place.topic.clone(), later.topic.clone()]);
    close(source).await;
}
