//! Where the committed offset is: below what is unsettled, above everything else.

use inboxd_conformance::app::{Answer, App};
use inboxd_conformance::{ensure, eventually};
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{BaseRecord, Producer as _, ThreadedProducer};

use super::{accepted, committed, configured, drained, nothing_twice, spread, stop, topic};
use crate::support::{Broker, Database, DatabaseKind, Message, PATIENCE, Sidecar};

/// K1: the first record fails for ever; its sidecar is told to stop while it waits for the next
/// try, and a second member comes and goes.
#[tokio::test(flavor = "multi_thread")]
async fn the_committed_offset_never_passes_a_record_that_fails() {
    let app = App::start().await;
    app.plan_with(|post| (post.id == "m0").then(|| Answer::status(500)));
    let database = Database::new(DatabaseKind::Postgres);
    let broker = topic(1).await;
    // It is never parked: that would settle it.
    let keys = "lease = \"2s\"\npark = { attempts_max = 1_000 }\n\
                retry = { initial = \"400ms\", factor = 1, attempts_max = 1_000, elapsed_max = \"1h\" }";
    let config = configured(&broker, &database, &app, keys, &[]);
    let mut first = Sidecar::start(&config);
    broker.publish(spread("m", 10, 1)).await;
    accepted(&app, 9, &[&first]).await;
    let tried = async |times: usize, sidecar: &Sidecar| {
        eventually(PATIENCE, async || {
            let ledger = app.ledger();
            let waits = ledger.begun_of("m0") >= times && ledger.open().is_empty();
            ensure(waits, format!("{} POSTs; log:\n{}", ledger.begun_of("m0"), sidecar.log()))
        })
        .await;
    };
    let unpassed = async || {
        let offset = committed(&broker, 0).await;
        assert!(offset.unwrap_or(0) == 0, "{offset:?} passes the record at 0");
    };
    tried(2, &first).await;
    stop(&mut first).await;
    unpassed().await;

    let so_far = app.ledger().begun_of("m0");
    first.start_again();
    tried(so_far + 1, &first).await;
    let mut second = Sidecar::start(&config);
    second.ready().await;
    unpassed().await;
    stop(&mut second).await;
    unpassed().await;
    // The one that is left, and after it one that takes over, still have it.
    let so_far = app.ledger().begun_of("m0");
    tried(so_far + 2, &first).await;
    second.start_again();
    second.ready().await;
    first.kill().await;
    unpassed().await;
    let so_far = app.ledger().begun_of("m0");
    tried(so_far + 2, &second).await;
    unpassed().await;

    app.plan_with(|_| None);
    accepted(&app, 10, &[&first, &second]).await;
    drained(PATIENCE, &broker, &[&second]).await;
    nothing_twice(&app);
    stop(&mut second).await;
    assert_eq!(committed(&broker, 0).await, Some(10));
}

/// K9: one transaction after the other, by turns committed and aborted.
fn transactions(broker: &Broker, count: usize) -> impl Fn() + Send + use<> {
    let (topic, mut config) = (broker.name.clone(), broker.kafka());
    config.set("transactional.id", &topic);
    move || {
        let producer: ThreadedProducer<_> = config.create().expect("a producer");
        producer.init_transactions(PATIENCE).expect("ready");
        for number in 0..count {
            let commits = number % 2 == 0;
            let word = if commits { "committed" } else { "aborted" };
            producer.begin_transaction().expect("begun");
            for record in 0..3 {
                let id = format!("{word}-{number}-{record}");
                let headers =
                    OwnedHeaders::new().insert(Header { key: "message-id", value: Some(&id) });
                let record: BaseRecord<'_, str, str> =
                    BaseRecord::to(&topic).payload(id.as_str()).partition(0).headers(headers);
                producer.send(record).map_err(|(error, _)| error).expect("taken");
            }
            // What is not sent yet would not come to be aborted.
            producer.flush(PATIENCE).expect("all delivered");
            let ended = match commits {
                true => producer.commit_transaction(PATIENCE),
                false => producer.abort_transaction(PATIENCE),
            };
            ended.expect("ended");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn only_committed_transactions_are_forwarded_and_the_lag_goes_to_zero() {
    let app = App::start().await;
    let database = Database::new(DatabaseKind::Sqlite);
    let broker = topic(1).await;
    let mut sidecar = Sidecar::start(&configured(&broker, &database, &app, "", &[]));
    tokio::task::spawn_blocking(transactions(&broker, 10)).await.expect("produced");
    accepted(&app, 15, &[&sidecar]).await;
    drained(PATIENCE, &broker, &[&sidecar]).await;
    eventually(PATIENCE, async || {
        let lag = sidecar.metric("inboxd_partition_lag_records", &[]).await;
        ensure(lag == 0.0, format!("a lag of {lag}"))
    })
    .await;
    // Three records and a marker for each transaction.
    assert_eq!(committed(&broker, 0).await, Some(40));
    assert!(app.ledger().all().iter().all(|post| post.id.starts_with("committed-")));
    assert_eq!(app.ledger().begun(), 15);
    stop(&mut sidecar).await;
}

/// K10: single records, before a stop and during it.
#[tokio::test(flavor = "multi_thread")]
async fn stopping_between_single_records_skips_none() {
    let app = App::start().await;
    let database = Database::new(DatabaseKind::Sqlite);
    let broker = topic(1).await;
    let mut sidecar = Sidecar::start(&configured(&broker, &database, &app, "", &[]));
    let mut count = 0;
    for round in 0..5 {
        broker.publish([Message::id(format!("{round}-while-it-runs"))]).await;
        count += 1;
        accepted(&app, count, &[&sidecar]).await;
        stop(&mut sidecar).await;
        assert_eq!(committed(&broker, 0).await, i64::try_from(count).ok(), "last + 1");
        broker.publish([Message::id(format!("{round}-while-it-does-not"))]).await;
        count += 1;
        sidecar.start_again();
        accepted(&app, count, &[&sidecar]).await;
    }
    drained(PATIENCE, &broker, &[&sidecar]).await;
    stop(&mut sidecar).await;
    assert_eq!(committed(&broker, 0).await, Some(10));
    assert_eq!(app.ledger().begun(), 10, "each once");
}

/// A null body is something else than an empty one, and says so.
#[tokio::test(flavor = "multi_thread")]
async fn tombstones_are_forwarded_as_such() {
    let app = App::start().await;
    let database = Database::new(DatabaseKind::Sqlite);
    let broker = topic(1).await;
    let mut sidecar = Sidecar::start(&configured(&broker, &database, &app, "", &[]));
    let (name, config) = (broker.name.clone(), broker.kafka());
    let produce = move || {
        let producer: ThreadedProducer<_> = config.create().expect("a producer");
        for (id, body) in [("null", None), ("empty", Some("")), ("full", Some("text"))] {
            let headers = OwnedHeaders::new().insert(Header { key: "message-id", value: Some(id) });
            let mut record: BaseRecord<'_, str, str> =
                BaseRecord::to(&name).key("customer-7").partition(0).headers(headers);
            if let Some(body) = body {
                record = record.payload(body);
            }
            producer.send(record).map_err(|(error, _)| error).expect("taken");
        }
        producer.flush(PATIENCE).expect("all delivered");
    };
    tokio::task::spawn_blocking(produce).await.expect("produced");
    accepted(&app, 3, &[&sidecar]).await;
    let mut seen: Vec<_> = app.ledger().all();
    seen.sort_by(|a, b| a.id.cmp(&b.id));
    let seen: Vec<_> = seen
        .iter()
        .map(|post| (&*post.id, post.header("inbox-tombstone"), post.body.clone()))
        .collect();
    let expected = [
        ("empty", None, Some("".into())),
        ("full", None, Some("text".into())),
        ("null", Some("true".to_owned()), Some("".into())),
    ];
    assert_eq!(seen, expected);
    drained(PATIENCE, &broker, &[&sidecar]).await;
    stop(&mut sidecar).await;
}

/// Replicas with an inbox each do not deduplicate each other's messages: said loudly.
#[tokio::test(flavor = "multi_thread")]
async fn an_offset_committed_beside_another_inbox_is_warned_of() {
    const WARNING: &str = "committed by a member with ANOTHER inbox";
    let app = App::start().await;
    let broker = topic(1).await;
    let inboxes = [Database::new(DatabaseKind::Sqlite), Database::new(DatabaseKind::Sqlite)];
    let [ours, theirs] = &inboxes;
    let mut one = Sidecar::start(&configured(&broker, ours, &app, "", &[]));
    broker.publish([Message::id("m1")]).await;
    accepted(&app, 1, &[&one]).await;
    stop(&mut one).await;
    one.start_again();
    broker.publish([Message::id("m2")]).await;
    accepted(&app, 2, &[&one]).await;
    stop(&mut one).await;
    assert!(!one.log().contains(WARNING), "our own is no other's:\n{}", one.log());

    let mut other = Sidecar::start(&configured(&broker, theirs, &app, "", &[]));
    broker.publish([Message::id("m3")]).await;
    accepted(&app, 3, &[&other]).await;
    eventually(PATIENCE, async || ensure(other.log().contains(WARNING), other.log())).await;
    let log = other.log();
    let line = log.lines().find(|line| line.contains(WARNING)).expect("found");
    assert!(line.contains("WARN") && line.contains(&broker.name), "{line}");
    stop(&mut other).await;
}
