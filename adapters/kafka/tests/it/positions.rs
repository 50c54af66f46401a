//! N5: positions as identities, over topics that are deleted and made again.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use inboxd_conformance::{ensure, eventually};
use inboxd_contract::{Delivery, ErrorClass, Notes, Origin, Source, SourcePhase, SourceStatus};
use inboxd_kafka::{KafkaConfig, KafkaSource};
use rdkafka::admin::AdminOptions;
use tokio::time::timeout;

use crate::mock::Mock;
use crate::produce::{Out, Producer};
use crate::support::{
    Memory, PATIENCE, Place, WIDE, admin, blocking, close, config, create_topic, ids, numbered,
    ready, start, take,
};

fn identified(mut config: KafkaConfig, notes: &Arc<Memory>) -> Box<KafkaSource> {
    config.position_identity = true;
    config.notes = Some(Arc::clone(notes) as Arc<dyn Notes>);
    start(config)
}

fn scope(delivery: &Delivery) -> String {
    match &delivery.envelope.origin {
        Origin::Kafka { position_scope: Some(scope), .. } => scope.to_string(),
        origin => panic!("{origin:?} has no scope"),
    }
}

async fn delete_topic(place: &Place) {
    let admin = admin(&place.brokers);
    let options = AdminOptions::new().operation_timeout(Some(PATIENCE));
    let deleted = admin.delete_topics(&[&place.topic], &options).await.expect("an answer");
    deleted.into_iter().for_each(|topic| drop(topic.expect("the topic is deleted")));
    // The broker forgets a topic a moment after it has answered.
    eventually(PATIENCE, async || {
        let metadata = admin.inner().fetch_metadata(None, PATIENCE).expect("an answer");
        let there = metadata.topics().iter().any(|topic| topic.name() == place.topic);
        ensure(!there, "the topic is still there")
    })
    .await;
    blocking(move || drop(admin)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_topic_made_again_has_another_scope_and_all_its_records_come() {
    let place = Place::new(1).await;
    let notes = Arc::new(Memory::default());
    place.produce(0, &numbered("old", 3)).await;
    let mut source = identified(place.config(), &notes);
    let old = take(&mut source, 3).await;
    let first = scope(&old[0]);
    assert!(old.iter().all(|delivery| scope(delivery) == first));
    assert_eq!(first.split('/').count(), 2, "cluster and topic: {first}");
    old.into_iter().for_each(|delivery| delivery.acker.ack());
    close(source).await;

    // The same after a restart.
    place.produce(0, &["old3"]).await;
    let mut source = identified(place.config(), &notes);
    let same = take(&mut source, 1).await;
    assert_eq!(scope(&same[0]), first);
    same.into_iter().for_each(|delivery| delivery.acker.ack());
    close(source).await;

    delete_topic(&place).await;
    create_topic(&place.brokers, &place.topic, 1).await;
    place.produce(0, &numbered("new", 2)).await;
    let mut source = identified(place.config(), &notes);
    let new = take(&mut source, 2).await;
    assert_eq!(ids(&new), ["new0", "new1"]);
    assert_ne!(scope(&new[0]), first);
    new.into_iter().for_each(|delivery| delivery.acker.ack());
    close(source).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_topic_made_again_under_a_running_source_is_read_from_its_beginning() {
    let place = Place::new(1).await;
    let notes = Arc::new(Memory::default());
    place.produce(0, &numbered("old", 5)).await;
    let mut source = identified(place.config(), &notes);
    let old = take(&mut source, 5).await;
    let first = scope(&old[0]);
    old.into_iter().for_each(|delivery| delivery.acker.ack());
    place.wait_committed(0, 5).await;
    delete_topic(&place).await;
    create_topic(&place.brokers, &place.topic, 1).await;
    place.produce(0, &numbered("new", 2)).await;
    let new = take(&mut source, 2).await;
    assert_eq!(ids(&new), ["new0", "new1"]);
    assert_ne!(scope(&new[0]), first);
    new.into_iter().for_each(|delivery| delivery.acker.ack());
    close(source).await;
}

/// No offset goes back: the new log is as long as the old one, or longer, when it is seen.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_topic_made_again_that_has_grown_as_long_as_the_old_one_is_read_from_its_beginning() {
    for grown in [3, 5] {
        let place = Place::new(1).await;
        let notes = Arc::new(Memory::default());
        place.produce(0, &numbered("old", 3)).await;
        let mut source = identified(place.config(), &notes);
        let old = take(&mut source, 3).await;
        let first = scope(&old[0]);
        old.into_iter().for_each(|delivery| delivery.acker.ack());
        place.wait_committed(0, 3).await;
        let counters = source.counters();
        eventually(PATIENCE, async || ensure(counters.topic_ids() == 1, "no topic id")).await;
        delete_topic(&place).await;
        create_topic(&place.brokers, &place.topic, 1).await;
        place.produce(0, &numbered("new", grown)).await;
        // Those behind the old position may come before, too.
        let mut found = BTreeMap::new();
        while found.len() < grown {
            for delivery in take(&mut source, 1).await {
                found.insert(ids(std::slice::from_ref(&delivery)).remove(0), scope(&delivery));
                delivery.acker.ack();
            }
        }
        assert!(numbered("new", grown).iter().all(|id| found.contains_key(id)), "{found:?}");
        assert_ne!(found["new0"], first);
        close(source).await;
    }
}

/// The mock cluster answers no admin call, so an epoch stands for the topic's id.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_topic_ids_an_end_below_the_stored_mark_refuses_to_go_on() {
    let mock = Mock::start();
    let topic = inboxd_conformance::servers::unique("epoch");
    mock.create_topic(&topic, 1).await;
    let producer = Producer::new(&mock.brokers, &[]);
    let notes = Arc::new(Memory::default());
    let open = || {
        let mut config = config(&mock.brokers, &topic, &topic);
        config.commit_interval = Duration::from_millis(100);
        identified(config, &notes)
    };
    producer.produce(&topic, &[Out::new(0, "a")]).await;
    let mut source = open();
    let came = take(&mut source, 1).await;
    let epoch = scope(&came[0]);
    assert!(epoch.contains("/epoch-"), "{epoch}");
    came.into_iter().for_each(|delivery| delivery.acker.ack());
    // The mark goes ahead of what is handed out.
    producer.produce(&topic, &[Out::new(0, "b")]).await;
    let came = take(&mut source, 1).await;
    assert_eq!(scope(&came[0]), epoch);
    let marks = || {
        let notes = notes.all();
        notes.iter().filter(|(key, _)| key.contains("mark")).map(|(_, mark)| mark.clone()).collect()
    };
    let stored: Vec<String> = marks();
    assert_eq!(stored, ["2"]);
    came.into_iter().for_each(|delivery| delivery.acker.ack());
    close(source).await;

    // As if the topic had been longer once.
    notes.with(|notes| {
        for (key, value) in notes.iter_mut() {
            if key.contains("mark") {
                *value = "100".into();
            }
        }
    });
    let mut source = open();
    let refused = timeout(PATIENCE, source.next_batch(WIDE)).await.expect("an answer");
    let error = refused.expect_err("made again");
    assert_eq!(error.class, ErrorClass::Permanent);
    assert!(error.to_string().contains("made again"), "{error}");
    close(source).await;
}

/// Positions are only asked for where they are wanted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_scope_is_given_that_was_not_asked_for() {
    let place = Place::new(1).await;
    let mut source = place.open();
    ready(&source).await;
    place.produce(0, &["a"]).await;
    let came = take(&mut source, 1).await;
    let Origin::Kafka { position_scope, .. } = &came[0].envelope.origin else { panic!("kafka") };
    assert_eq!(*position_scope, None);
    close(source).await;
}

/// One topic that cannot be identified holds up its own records and no others, and is named.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_topic_that_cannot_be_identified_holds_up_no_other() {
    const COUNT: usize = 3_000;
    let (place, other) = (Place::new(1).await, Place::new(1).await);
    let notes = Arc::new(Memory::default());
    *notes.refused.lock().expect("no panic") = Some(place.topic.clone());
    // More than waits for the engine at most.
    place.produce(0, &numbered("held", COUNT)).await;
    let mut config = place.config();
    config.topics.push(other.topic.clone());
    let mut source = identified(config, &notes);
    let withheld = |status: &SourceStatus| {
        let paused = status.partitions.iter().filter(|report| report.paused).count();
        status.phase == SourcePhase::Ready && status.reason.contains(&place.topic) && paused == 1
    };
    timeout(PATIENCE, source.status().wait_for(withheld)).await.expect("said").expect("it lives");
    other.produce(0, &numbered("o", COUNT)).await;
    let mut came = Vec::new();
    while came.len() < COUNT {
        for delivery in take(&mut source, 1).await {
            came.extend(ids(std::slice::from_ref(&delivery)));
            delivery.acker.ack();
        }
    }
    assert_eq!(came, numbered("o", COUNT), "the other topic's, and nothing else");

    *notes.refused.lock().expect("no panic") = None;
    let held = take(&mut source, COUNT).await;
    assert_eq!(ids(&held), numbered("held", COUNT));
    assert!(held.iter().all(|delivery| !scope(delivery).is_empty()));
    held.into_iter().for_each(|delivery| delivery.acker.ack());
    let over = |status: &SourceStatus| {
        status.reason.is_empty() && status.partitions.iter().all(|report| !report.paused)
    };
    timeout(PATIENCE, source.status().wait_for(over)).await.expect("over").expect("it lives");
    close(source).await;
}

/// A broker that has not heard yet that a topic was made again tells the old id.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_id_that_another_has_followed_is_not_believed() {
    let place = Place::new(1).await;
    let notes = Arc::new(Memory::default());
    place.produce(0, &["old"]).await;
    let mut source = identified(place.config(), &notes);
    let old = take(&mut source, 1).await;
    let first = scope(&old[0]);
    drop(old);
    close(source).await;
    delete_topic(&place).await;
    create_topic(&place.brokers, &place.topic, 1).await;
    place.produce(0, &["new"]).await;
    let mut source = identified(place.config(), &notes);
    let new = take(&mut source, 1).await;
    assert_ne!(scope(&new[0]), first);
    close(source).await;
    let (_, id) = first.split_once('/').expect("cluster and topic");
    let gone = notes.all().into_keys().find(|key| key.contains("gone") && key.ends_with(id));
    assert!(gone.is_some(), "{:?}", notes.all());

    // As if what the brokers tell now were out of date.
    let (_, told) =
        scope(&new[0]).split_once('/').map(|(a, b)| (a.to_owned(), b.to_owned())).expect("two");
    let key = gone.map(|key| key.replace(id, &told)).expect("looked at above");
    drop(new);
    notes.with(|notes| drop(notes.insert(key.clone(), "gone".into())));
    let mut source = identified(place.config(), &notes);
    let told = |status: &SourceStatus| status.reason.contains("was deleted");
    timeout(PATIENCE, source.status().wait_for(told)).await.expect("said").expect("it lives");
    let nothing = timeout(Duration::from_millis(500), source.next_batch(WIDE)).await;
    assert!(nothing.is_err(), "nothing is handed out under an id that is out of date");
    notes.with(|notes| drop(notes.remove(&key)));
    assert_eq!(ids(&take(&mut source, 1).await), ["new"]);
    close(source).await;
}

/// A slow database, and more partitions than it can answer for in a second: the loop turns.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_database_stops_no_polling() {
    const PARTITIONS: i32 = 100;
    let mock = Mock::start();
    let topic = inboxd_conformance::servers::unique("slow");
    mock.create_topic(&topic, PARTITIONS).await;
    let records: Vec<_> = (0..PARTITIONS).map(|n| Out::new(n, &format!("m{n}"))).collect();
    Producer::new(&mock.brokers, &[]).produce(&topic, &records).await;
    let notes = Arc::new(Memory::default());
    *notes.slow.lock().expect("no panic") = Duration::from_millis(100);
    let mut source = identified(config(&mock.brokers, &topic, &topic), &notes);
    let (mut turned, mut longest) = (source.status().borrow().turned_at, Duration::ZERO);
    let mut came = 0;
    while came < PARTITIONS {
        let batch = timeout(Duration::from_millis(200), source.next_batch(WIDE)).await;
        for delivery in batch.into_iter().flat_map(|batch| batch.expect("the source goes on")) {
            came += 1;
            delivery.acker.ack();
        }
        let at = source.status().borrow().turned_at;
        longest = longest.max(at - turned);
        turned = at;
    }
    assert!(longest < Duration::from_secs(2), "the loop stood still for {longest:?}");
    close(source).await;
}
