//! `start = latest`: what it passes over, and what it must not.

use std::sync::Arc;

use inboxd_contract::{Notes, Source};
use inboxd_kafka::{KafkaSource, StartAt};
use rdkafka::admin::{AdminOptions, NewPartitions};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};

use crate::produce::{Out, Producer};
use crate::support::{
    Memory, Place, admin, blocking, close, create_topic, numbered, ready, settle, start,
};

fn latest(place: &Place, notes: &Arc<Memory>) -> Box<KafkaSource> {
    let mut config = place.config();
    config.start = StartAt::Latest;
    config.notes = Some(Arc::clone(notes) as Arc<dyn Notes>);
    start(config)
}

/// The topic has so many partitions from now on, and the last has this record.
async fn grow(place: &Place, partitions: usize, id: &str) {
    let admin = admin(&place.brokers);
    let more = NewPartitions::new(&place.topic, partitions);
    let grown = admin.create_partitions([&more], &AdminOptions::new()).await.expect("an answer");
    grown.into_iter().for_each(|topic| drop(topic.expect("it grows")));
    blocking(move || drop(admin)).await;
    // One that has not seen the topic yet.
    let last = i32::try_from(partitions - 1).expect("few");
    Producer::new(&place.brokers, &[]).produce(&place.topic, &[Out::new(last, id)]).await;
}

/// What retention does, at once.
pub async fn delete_records_before(place: &Place, partition: i32, offset: i64) {
    let admin = admin(&place.brokers);
    let mut list = TopicPartitionList::new();
    list.add_partition_offset(&place.topic, partition, Offset::Offset(offset)).expect("an offset");
    let deleted = admin.delete_records(&list, &AdminOptions::new()).await.expect("an answer");
    deleted.elements().iter().for_each(|element| element.error().expect("deleted"));
    blocking(move || drop(admin)).await;
}

/// Where it begins is kept before anything came: a restart passes nothing over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn latest_passes_over_what_was_there_and_nothing_that_comes_while_it_is_away() {
    let (place, notes) = (Place::new(2).await, Arc::new(Memory::default()));
    place.produce(0, &numbered("old", 3)).await;
    let source = latest(&place, &notes);
    ready(&source).await;
    place.wait_committed(0, 3).await;
    place.wait_committed(1, 0).await;
    close(source).await;
    place.produce(0, &["while away"]).await;
    let mut source = latest(&place, &notes);
    assert_eq!(settle(&mut source, 1).await, ["while away"]);
    assert_eq!(source.counters().started_over(), 0);
    place.wait_committed(0, 4).await;
    close(source).await;
}

/// Retention has overtaken a committed offset: what is left of the log is read, and it is said.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_retention_has_overtaken_is_read_from_what_is_left() {
    for at in [StartAt::Latest, StartAt::Earliest] {
        let place = Place::new(1).await;
        place.produce(0, &numbered("m", 10)).await;
        place.commit_elsewhere(0, 2, "").await;
        delete_records_before(&place, 0, 6).await;
        let mut config = place.config();
        config.start = at;
        let mut source = start(config);
        assert_eq!(settle(&mut source, 4).await, numbered("m", 10)[6..], "{at:?}");
        assert_eq!(source.counters().started_over(), 1);
        let told = source.status();
        inboxd_conformance::eventually(crate::support::PATIENCE, async || {
            let counts = told.borrow().counts;
            inboxd_conformance::ensure(counts.started_over == 1, format!("{counts:?}"))
        })
        .await;
        place.wait_committed(0, 10).await;
        close(source).await;
    }
}

/// Partitions that a topic did not have at first are read from their beginning, whether they come
/// while the source runs or while it is away.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn partitions_that_come_later_are_read_from_their_beginning() {
    let (place, notes) = (Place::new(1).await, Arc::new(Memory::default()));
    place.produce(0, &["old"]).await;
    let mut source = latest(&place, &notes);
    place.wait_committed(0, 1).await;
    grow(&place, 2, "first of the second").await;
    assert_eq!(settle(&mut source, 1).await, ["first of the second"]);
    close(source).await;

    grow(&place, 3, "first of the third").await;
    let mut source = latest(&place, &notes);
    assert_eq!(settle(&mut source, 1).await, ["first of the third"]);
    close(source).await;
}

/// So are topics that a pattern matches later.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn topics_that_a_pattern_matches_later_are_read_from_their_beginning() {
    let (mut place, notes) = (Place::new(1).await, Arc::new(Memory::default()));
    place.produce(0, &["old"]).await;
    let names: Vec<_> = ["-b", "-c"].map(|end| format!("{}{end}", place.topic)).into();
    let first = place.clone();
    place.topic = format!("^{}", place.topic);
    let mut source = latest(&place, &notes);
    first.wait_committed(0, 1).await;
    let later = async |name: &String| {
        create_topic(&first.brokers, name, 1).await;
        let later = Place { topic: name.clone(), ..first.clone() };
        later.produce(0, &[name]).await;
    };
    later(&names[0]).await;
    assert_eq!(settle(&mut source, 1).await, names[..1]);
    close(source).await;
    later(&names[1]).await;
    let mut source = latest(&place, &notes);
    assert_eq!(settle(&mut source, 1).await, names[1..]);
    close(source).await;
}
