//! Which messages are the same: by bytes, alike on every database and both brokers.

use std::collections::{BTreeMap, BTreeSet};

use futures::future::join_all;
use inboxd_conformance::app::{App, Post};
use inboxd_conformance::{ensure, eventually};

use crate::support::{
    Broker, BrokerKind, Database, DatabaseKind, Message, PATIENCE, Sidecar, config, stop_all,
    subscription,
};

const NO_KEYS: &str = "";
/// Every database, each behind another kind of broker.
const CELLS: [(DatabaseKind, BrokerKind); 3] = [
    (DatabaseKind::Sqlite, BrokerKind::RabbitClassic),
    (DatabaseKind::Postgres, BrokerKind::Kafka),
    (DatabaseKind::MariaDb, BrokerKind::RabbitQuorum),
];

/// The database, what was accepted of each id, and what is recorded of each id.
#[derive(Debug, PartialEq, Eq)]
struct Found {
    accepted: BTreeMap<String, usize>,
    rows: BTreeSet<String>,
    dead: BTreeMap<String, usize>,
}

/// Publishes to a fresh queue or topic and waits until `outcomes` have been counted; answers
/// what came of it.
async fn deliver(
    (database, broker): (DatabaseKind, BrokerKind),
    keys: &str,
    messages: Vec<Message>,
    outcomes: &[(&str, u64)],
) -> Found {
    let app = App::start().await;
    let database = Database::new(database);
    let broker = Broker::new(broker).await;
    let group = broker.name.clone();
    let config = config(&broker, &database, &group, &app.url("/"), keys, "");
    let sidecar = Sidecar::start(&config);
    broker.publish(messages).await;
    counted(&sidecar, "orders", outcomes).await;
    stop_all(&broker, &group, &mut [sidecar]).await;
    Found {
        accepted: accepted(&app.ledger().all()),
        rows: database.rows(&group).await,
        dead: database.dead(&group).await,
    }
}

fn accepted(posts: &[Post]) -> BTreeMap<String, usize> {
    let mut accepted = BTreeMap::new();
    for post in posts {
        assert!(post.is_accepted());
        *accepted.entry(post.id.clone()).or_default() += 1;
    }
    accepted
}

/// Waits until the subscription's deliveries have come to exactly this. The outcome `duplicates`
/// stands for either kind of them.
async fn counted(sidecar: &Sidecar, subscription: &str, outcomes: &[(&str, u64)]) {
    eventually(PATIENCE, async || {
        let mut found = Vec::new();
        for (outcome, _) in outcomes {
            let kinds = match *outcome {
                "duplicates" => ["duplicate", "duplicate_in_flight"].as_slice(),
                single => &[single],
            };
            let mut sum = 0;
            for kind in kinds {
                sum += sidecar.outcomes_of(subscription, kind).await;
            }
            found.push((*outcome, sum));
        }
        ensure(
            found == outcomes,
            format!("{found:?} instead of {outcomes:?}; log:\n{}", sidecar.log()),
        )
    })
    .await;
}

fn once<'a>(ids: impl IntoIterator<Item = &'a String>) -> BTreeMap<String, usize> {
    ids.into_iter().map(|id| (id.clone(), 1)).collect()
}

/// Pairs and triples that some collation, padding, normal form or length makes equal.
fn look_alikes() -> Vec<String> {
    let long = "x".repeat(511);
    let mut ids: Vec<String> = ["bar", "bar ", "bar  ", " bar", "bar\t", "BAR", "Bar", "b\u{e4}r"]
        .map(String::from)
        .to_vec();
    // One letter composed and decomposed, without its accent, in both cases.
    ids.extend(["caf\u{e9}", "cafe\u{301}", "cafe", "CAF\u{c9}"].map(String::from));
    ids.extend(["stra\u{df}e", "strasse", "\u{131}", "i", "I", "\u{130}"].map(String::from));
    ids.extend(["1", "01", "1.0", "1e0", "-0", "0"].map(String::from));
    ids.extend(
        ["a%b", "a_b", "a\\b", "a'b", "a\"b", "a\u{1f980}b", "a\u{fffd}b"].map(String::from),
    );
    // Cut at the column's width they would be one.
    ids.extend([format!("{long}1"), format!("{long}2")]);
    ids
}

/// N1.
#[tokio::test(flavor = "multi_thread")]
async fn ids_are_told_apart_by_their_bytes_on_every_database() {
    let ids = look_alikes();
    let mut messages: Vec<Message> = Vec::new();
    // A header has no limit of 255 bytes, as AMQP's property has.
    messages.extend(ids.iter().map(|id| Message::bare(id.clone()).header("message-id", id)));
    messages.extend(messages.clone());
    let count = ids.len() as u64;
    let outcomes = [("processed", count), ("duplicates", count)];
    let found =
        join_all(CELLS.map(|cell| deliver(cell, NO_KEYS, messages.clone(), &outcomes))).await;
    for (found, cell) in found.iter().zip(CELLS) {
        assert_eq!(found.accepted, once(&ids), "{cell:?}");
        assert_eq!(found.rows, ids.iter().cloned().collect(), "{cell:?}");
        assert!(found.dead.is_empty(), "{cell:?}");
    }
}

/// N1, of consumer ids.
#[tokio::test(flavor = "multi_thread")]
async fn consumer_ids_are_told_apart_by_their_bytes_on_every_database() {
    join_all(DatabaseKind::ALL.map(|kind| async move {
        let app = App::start().await;
        let database = Database::new(kind);
        let first = Broker::new(BrokerKind::RabbitClassic).await;
        let consumers = ["Billing", "billing", "billing ", "b\u{ed}lling"].map(|id| {
            // Unique on the shared server.
            format!("{}-{id}", first.name)
        });
        let mut config = format!("{}\n{}", database.config(), first.config());
        let mut queues = vec![];
        for (at, consumer) in consumers.iter().enumerate() {
            let queue = first.sibling().await;
            let callback = app.url(&at.to_string());
            config += &subscription(&format!("s{at}"), &queue, consumer, &callback, NO_KEYS);
            queues.push(queue);
        }
        let mut sidecar = Sidecar::start(&config);
        for queue in &queues {
            queue.publish([Message::id("m1"), Message::id("m1")]).await;
        }
        for at in 0..consumers.len() {
            counted(&sidecar, &format!("s{at}"), &[("processed", 1), ("duplicates", 1)]).await;
        }
        let posts = app.ledger().all();
        let told: BTreeSet<_> =
            posts.iter().map(|post| (post.consumer_id.clone(), post.path.clone())).collect();
        let expected =
            consumers.iter().enumerate().map(|(at, id)| (id.clone(), format!("/{at}"))).collect();
        assert_eq!(told, expected, "{kind:?}");
        for consumer in &consumers {
            assert_eq!(database.rows(consumer).await.len(), 1, "{kind:?}: {consumer:?}");
        }
        assert!(sidecar.stop().await.success());
    }))
    .await;
}

/// N2: what a column cannot hold is kept as a hash of its bytes.
#[tokio::test(flavor = "multi_thread")]
async fn ids_that_a_column_cannot_hold_have_one_outcome_on_every_database() {
    let long = "y".repeat(513);
    let raw: [&[u8]; 9] = [
        b"a\0b",
        b"ab",
        b"a\0",
        b"a",
        b"\xff\xfe",
        b"\xff",
        b"\xc0\x80",
        long.as_bytes(),
        // Would be the stored form of another id, if it were taken as it is.
        b"sha256:55f21c9b2a8d0a7a1a8f4b35ec6d2fd9a0f8df36ab3f2d4c1ba1b3b4b6cb2b01",
    ];
    let mut messages: Vec<Message> = Vec::new();
    messages.extend(raw.map(|id| Message::bare(id.to_vec()).header("message-id", id)));
    messages.extend(messages.clone());
    let outcomes = [("processed", 9), ("duplicates", 9), ("dead_lettered", 0)];
    let found =
        join_all(CELLS.map(|cell| deliver(cell, NO_KEYS, messages.clone(), &outcomes))).await;

    let stored: Vec<String> = raw
        .iter()
        .map(|id| match *id {
            b"ab" | b"a" => String::from_utf8(id.to_vec()).expect("ASCII"),
            other => {
                format!("sha256:{}", hex::encode(<sha2::Sha256 as sha2::Digest>::digest(other)))
            }
        })
        .collect();
    for (found, cell) in found.iter().zip(CELLS) {
        assert_eq!(found.accepted, once(&stored), "{cell:?}");
        assert_eq!(found.rows, stored.iter().cloned().collect(), "{cell:?}");
    }
}

/// N2: a NUL in AMQP's own property.
#[tokio::test(flavor = "multi_thread")]
async fn a_nul_byte_in_the_property_does_not_make_two_ids_one() {
    let messages = ["a\0b", "ab", "a\0b"].map(Message::id).to_vec();
    let cell = (DatabaseKind::Postgres, BrokerKind::RabbitClassic);
    let found = deliver(cell, NO_KEYS, messages, &[("processed", 2), ("duplicates", 1)]).await;
    assert_eq!(found.accepted.len(), 2, "{found:?}");
    assert!(found.accepted.contains_key("ab"));
}

/// N3: the ids of four messages say nothing; their bodies are all different but for two.
fn blank_ids() -> Vec<Message> {
    let blank = |id: &str, body: &'static str| Message::bare(body).header("message-id", id);
    vec![
        blank("", "one"),
        blank("", "two"),
        blank("  ", "three"),
        blank("\t", "four"),
        blank(" ", "four"),
    ]
}

/// N3.
#[tokio::test(flavor = "multi_thread")]
async fn blank_ids_are_never_one_id() {
    let refused =
        "message_id = [\"property\", \"header:message-id\"]\non_missing_id = \"dead_letter\"";
    let outcomes = [("processed", 0), ("duplicates", 0), ("dead_lettered", 5)];
    let found = join_all(CELLS.map(|cell| deliver(cell, refused, blank_ids(), &outcomes))).await;
    for (found, cell) in found.iter().zip(CELLS) {
        assert!(found.accepted.is_empty() && found.rows.is_empty(), "{cell:?}: {found:?}");
        assert_eq!(found.dead.len(), 5, "{cell:?}: each is kept: {found:?}");
    }

    let forwarded =
        "message_id = [\"property\", \"header:message-id\"]\non_missing_id = \"forward\"";
    let outcomes = [("unidentified", 5), ("duplicates", 0), ("dead_lettered", 0)];
    let found = join_all(CELLS.map(|cell| deliver(cell, forwarded, blank_ids(), &outcomes))).await;
    for (found, cell) in found.iter().zip(CELLS) {
        assert_eq!(found.accepted.len(), 5, "{cell:?}: {found:?}");
        assert!(found.dead.is_empty(), "{cell:?}");
    }
}

/// N3: AMQP's property is there, and empty.
#[tokio::test(flavor = "multi_thread")]
async fn an_empty_property_is_no_id() {
    let mut messages = vec![Message::id("m1")];
    messages.extend(["", "", " "].map(|id| Message::bare("body").header("n", id)));
    for (message, id) in messages.iter_mut().skip(1).zip(["", "", " "]) {
        message.id = Some(id.to_owned());
    }
    let cell = (DatabaseKind::Sqlite, BrokerKind::RabbitClassic);
    let found = deliver(cell, NO_KEYS, messages, &[("processed", 1), ("dead_lettered", 3)]).await;
    assert_eq!(found.accepted, once(&["m1".to_owned()]));
    assert_eq!(found.dead.len(), 3);
}

/// N4.
#[tokio::test(flavor = "multi_thread")]
async fn messages_without_an_id_meet_the_policy_between_good_ones() {
    let messages = || {
        vec![
            Message::id("m1").partition(0),
            Message::bare("no id").partition(0),
            Message::bare("no id").partition(0),
            Message::id("m2").partition(0),
        ]
    };
    let rabbitmq = async {
        let cell = (DatabaseKind::Postgres, BrokerKind::RabbitClassic);
        let outcomes = [("processed", 2), ("duplicates", 0), ("dead_lettered", 2)];
        let found = deliver(cell, NO_KEYS, messages(), &outcomes).await;
        assert_eq!(found.accepted, once(&["m1".to_owned(), "m2".to_owned()]));
        assert_eq!(found.dead.len(), 2, "{found:?}");
    };
    // A record has a position, which is an id.
    let kafka = async {
        let cell = (DatabaseKind::MariaDb, BrokerKind::Kafka);
        let outcomes = [("processed", 4), ("duplicates", 0), ("dead_lettered", 0)];
        let found = deliver(cell, NO_KEYS, messages(), &outcomes).await;
        assert_eq!(found.accepted.len(), 4, "{found:?}");
    };
    let kafka_without_positions = async {
        let cell = (DatabaseKind::Sqlite, BrokerKind::Kafka);
        let outcomes = [("processed", 2), ("duplicates", 0), ("dead_lettered", 2)];
        let found =
            deliver(cell, "message_id = [\"header:message-id\"]", messages(), &outcomes).await;
        assert_eq!(found.accepted.len(), 2, "{found:?}");
        assert_eq!(found.dead.len(), 2, "{found:?}");
    };
    tokio::join!(rabbitmq, kafka, kafka_without_positions);
}

const POSITIONS: &str = "message_id = [\"kafka-position\"]";

fn records(count: i32, body: &str) -> impl Iterator<Item = Message> {
    let body = body.to_owned();
    (0..count).map(move |n| Message::bare(format!("{body} {n}")).partition(n % 4))
}

async fn made_again(topic: &Broker) {
    topic.delete_topic().await;
    topic.create_topic(4).await;
}

/// N5: the topic is made again while nobody consumes.
#[tokio::test(flavor = "multi_thread")]
async fn records_of_a_topic_that_was_made_again_are_new_ones() {
    join_all(DatabaseKind::ALL.map(|kind| async move {
        let app = App::start().await;
        let database = Database::new(kind);
        let topic = Broker::new(BrokerKind::Kafka).await;
        let group = topic.name.clone();
        let config = config(&topic, &database, &group, &app.url("/"), POSITIONS, "");
        let mut sidecar = Sidecar::start(&config);
        topic.publish(records(12, "first")).await;
        counted(&sidecar, "orders", &[("processed", 12)]).await;
        assert!(sidecar.stop().await.success());
        made_again(&topic).await;
        topic.publish(records(12, "second")).await;
        sidecar.start_again();
        counted(&sidecar, "orders", &[("processed", 12), ("duplicates", 0)]).await;
        let accepted = accepted(&app.ledger().all());
        assert_eq!(accepted.len(), 24, "{kind:?}: {accepted:?}");
        stop_all(&topic, &group, &mut [sidecar]).await;
    }))
    .await;
}

/// N5: the topic is made again under a running consumer. That offsets start over is seen when
/// the log ends below where reading had come to.
#[tokio::test(flavor = "multi_thread")]
async fn a_topic_made_again_under_a_running_consumer_is_consumed_from_its_beginning() {
    let app = App::start().await;
    let database = Database::new(DatabaseKind::Postgres);
    let topic = Broker::new(BrokerKind::Kafka).await;
    let group = topic.name.clone();
    let config = config(&topic, &database, &group, &app.url("/"), POSITIONS, "");
    let sidecar = Sidecar::start(&config);
    topic.publish(records(12, "first")).await;
    counted(&sidecar, "orders", &[("processed", 12)]).await;
    made_again(&topic).await;
    topic.publish(records(4, "second")).await;
    eventually(PATIENCE, async || {
        let distinct = app.ledger().accepted_distinct();
        ensure(distinct == 16, format!("{distinct} accepted; log:\n{}", sidecar.log()))
    })
    .await;
    assert!(app.ledger().accepted_more_than_once().is_empty());
    stop_all(&topic, &group, &mut [sidecar]).await;
}

/// N6.
#[tokio::test(flavor = "multi_thread")]
async fn the_same_id_with_another_body_is_a_conflict_that_is_seen_and_kept() {
    join_all(CELLS.map(|(kind, broker)| async move {
        let app = App::start().await;
        let database = Database::new(kind);
        let broker = Broker::new(broker).await;
        let group = broker.name.clone();
        let config = config(&broker, &database, &group, &app.url("/"), NO_KEYS, "");
        let mut sidecar = Sidecar::start(&config);
        broker.publish([Message::id("m1").body("one")]).await;
        counted(&sidecar, "orders", &[("processed", 1)]).await;
        // The other body twice: one dead letter. The first one once more: a plain duplicate.
        broker.publish(["two", "two", "one", "three"].map(|b| Message::id("m1").body(b))).await;
        counted(&sidecar, "orders", &[("id_conflict", 3), ("duplicates", 1)]).await;
        assert_eq!(app.ledger().begun(), 1, "{kind:?}");
        assert_eq!(sidecar.metric("inboxd_id_conflicts_total", &["orders"]).await, 3.0);
        assert!(sidecar.log().contains("same message id with another content"));
        assert_eq!(database.dead(&group).await["m1"], 2, "{kind:?}: one for each other body");

        // The same while the first is at the application.
        app.hold();
        broker.publish(["one", "two"].map(|b| Message::id("m2").body(b).partition(0))).await;
        eventually(PATIENCE, async || {
            let held = sidecar.in_flight().await;
            ensure(held == 2 && app.ledger().begun() == 2, format!("{held} in flight"))
        })
        .await;
        app.let_go();
        counted(&sidecar, "orders", &[("processed", 2), ("id_conflict", 4)]).await;
        assert_eq!(app.ledger().begun_of("m2"), 1, "{kind:?}");
        assert_eq!(database.dead(&group).await["m2"], 1, "{kind:?}");
        assert_eq!(database.rows(&group).await.len(), 2);
        stop_all(&broker, &group, std::slice::from_mut(&mut sidecar)).await;
    }))
    .await;
}

/// N7: one inbox, one consumer, one event on both brokers under every name of its attributes.
#[tokio::test(flavor = "multi_thread")]
async fn a_cloud_event_is_the_same_event_on_both_brokers() {
    let app = App::start().await;
    let database = Database::new(DatabaseKind::Postgres);
    let mut rabbitmq = Broker::new(BrokerKind::RabbitClassic).await;
    let mut kafka = Broker::new(BrokerKind::Kafka).await;
    (rabbitmq.label, kafka.label) = ("rabbit", "log");
    let consumer = kafka.name.clone();
    let config = [
        database.config(),
        rabbitmq.config(),
        kafka.config(),
        subscription("queue", &rabbitmq, &consumer, &app.url("/"), NO_KEYS),
        subscription("topic", &kafka, &consumer, &app.url("/"), NO_KEYS),
    ]
    .join("\n");
    let mut sidecar = Sidecar::start(&config);
    let event = |id: &str, source: &str, event: &str| {
        Message::bare("the event").header(id, event).header(source, "/shop").partition(0)
    };
    let on_kafka = [("ce_id", "ce_source"), ("CE_Id", "Ce_Source"), ("ce-id", "ce-source")];
    let on_rabbitmq = [
        ("cloudEvents:id", "cloudEvents:source"),
        ("cloudEvents_id", "cloudEvents_source"),
        ("CLOUDEVENTS:ID", "cloudevents:SOURCE"),
        ("Ce-Id", "CE-source"),
    ];
    kafka.publish(on_kafka.map(|(id, source)| event(id, source, "e1"))).await;
    counted(&sidecar, "topic", &[("processed", 1), ("duplicates", 2)]).await;
    rabbitmq.publish(on_rabbitmq.map(|(id, source)| event(id, source, "e1"))).await;
    counted(&sidecar, "queue", &[("processed", 0), ("duplicates", 4)]).await;
    // And the other way round.
    rabbitmq.publish(on_rabbitmq.map(|(id, source)| event(id, source, "e2"))).await;
    counted(&sidecar, "queue", &[("processed", 1), ("duplicates", 7)]).await;
    kafka.publish(on_kafka.map(|(id, source)| event(id, source, "e2"))).await;
    counted(&sidecar, "topic", &[("processed", 1), ("duplicates", 5)]).await;
    // The whole event as JSON; its time is another each time it is published.
    let structured = |time: &str| {
        let event = format!(
            r#"{{"specversion":"1.0","id":"e3","source":"/shop","type":"t","time":"{time}","data":1}}"#
        );
        Message::bare(event).content_type("application/cloudevents+json; charset=UTF-8")
    };
    kafka.publish([structured("2026-01-01T00:00:00Z")]).await;
    counted(&sidecar, "topic", &[("processed", 2), ("duplicates", 5)]).await;
    rabbitmq.publish([structured("2026-01-01T00:00:01Z")]).await;
    counted(&sidecar, "queue", &[("processed", 1), ("duplicates", 8), ("id_conflict", 0)]).await;
    assert_eq!(app.ledger().begun(), 3);
    assert_eq!(database.rows(&consumer).await.len(), 3);
    assert!(sidecar.stop().await.success());
}

/// Two queues, two callbacks; the consumer ids and the first line are the test's choice.
async fn two_applications(
    database: &Database,
    queues: &[Broker; 2],
    consumers: [&str; 2],
    app: &App,
    first_line: &str,
) -> Sidecar {
    let config = [
        first_line.to_owned(),
        database.config(),
        queues[0].config(),
        subscription("billing", &queues[0], consumers[0], &app.url("/billing"), NO_KEYS),
        subscription("mail", &queues[1], consumers[1], &app.url("/mail"), NO_KEYS),
    ]
    .join("\n");
    Sidecar::start(&config)
}

/// N8.
#[tokio::test(flavor = "multi_thread")]
async fn one_id_reaches_both_applications_unless_a_consumer_id_is_shared_on_purpose() {
    let database = Database::new(DatabaseKind::Sqlite);
    let first = Broker::new(BrokerKind::RabbitClassic).await;
    let queues = [first.sibling().await, first];
    let paths = |app: &App| {
        let posts = app.ledger().all();
        posts.into_iter().map(|post| post.path).collect::<BTreeSet<_>>()
    };

    let app = App::start().await;
    let mut sidecar = two_applications(&database, &queues, ["billing", "mail"], &app, "").await;
    for queue in &queues {
        queue.publish([Message::id("m1")]).await;
    }
    counted(&sidecar, "billing", &[("processed", 1)]).await;
    counted(&sidecar, "mail", &[("processed", 1)]).await;
    assert_eq!(paths(&app), ["/billing", "/mail"].map(String::from).into());
    assert!(sidecar.stop().await.success());

    let app = App::start().await;
    let mut sidecar = two_applications(&database, &queues, ["both", "both"], &app, "").await;
    let status = sidecar.ended().await;
    assert_eq!(status.code(), Some(78), "{}", sidecar.log());
    for word in ["subscription.mail.consumer_id", "subscription.billing", "shared_consumer_ids"] {
        assert!(sidecar.log().contains(word), "{word} is not named:\n{}", sidecar.log());
    }

    let shared = "shared_consumer_ids = [\"both\"]";
    let mut sidecar = two_applications(&database, &queues, ["both", "both"], &app, shared).await;
    for queue in &queues {
        queue.publish([Message::id("m2")]).await;
    }
    let sum = async |outcome| {
        sidecar.outcomes_of("billing", outcome).await + sidecar.outcomes_of("mail", outcome).await
    };
    eventually(PATIENCE, async || {
        let duplicates = sum("duplicate").await + sum("duplicate_in_flight").await;
        let found = (sum("processed").await, duplicates);
        ensure(found == (1, 1), format!("{found:?}; log:\n{}", sidecar.log()))
    })
    .await;
    assert_eq!(app.ledger().begun(), 1);
    assert!(sidecar.stop().await.success());
}

/// A newcomer's queue without ids, on the real broker: nothing is settled, and the reason said.
#[tokio::test(flavor = "multi_thread")]
async fn a_queue_without_ids_is_left_alone_until_it_is_said_what_an_id_is() {
    let app = App::start().await;
    let database = Database::new(DatabaseKind::Sqlite);
    let broker = Broker::new(BrokerKind::RabbitClassic).await;
    let group = broker.name.clone();
    let body = r#"{"event_id": 7, "total": 3}"#;
    broker.publish((0..20).map(|_| Message::bare(body).header("x-shop", "a"))).await;
    let without = config(&broker, &database, &group, &app.url("/"), NO_KEYS, "");
    let mut sidecar = Sidecar::start(&without);
    sidecar.readiness(503, "json:/event_id").await;
    assert!(sidecar.log().contains("x-shop"), "{}", sidecar.log());
    assert_eq!(app.ledger().begun(), 0);
    assert!(sidecar.stop().await.success());
    eventually(PATIENCE, async || {
        let left = broker.left(&group).await;
        ensure(left == 20, format!("{left} left"))
    })
    .await;
    assert!(database.dead(&group).await.is_empty());

    let keys = "message_id = [\"json:/event_id\"]";
    let with = config(&broker, &database, &group, &app.url("/"), keys, "");
    let sidecar = Sidecar::start(&with);
    counted(&sidecar, "orders", &[("processed", 1), ("duplicates", 19)]).await;
    stop_all(&broker, &group, &mut [sidecar]).await;
}
