//! `inboxd explain`: what is known of one message, while the sidecar runs and when it does not.

use std::time::Duration;

use inboxd_conformance::app::{Answer, App};
use inboxd_conformance::{ensure, eventually};
use serde_json::Value;

use crate::support::{
    Broker, BrokerKind, Database, DatabaseKind, Message, PATIENCE, Sidecar, Told, config,
    subscription,
};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

/// Nothing that steers a terminal is printed.
fn assert_harmless(told: &Told) {
    let bad = |character: char| character.is_control() && character != '\n';
    assert!(!told.out.contains(bad) && !told.err.contains(bad), "{told:?}");
}

async fn explained(sidecar: &Sidecar, arguments: &[&str], code: i32) -> String {
    let told = sidecar.command("explain", arguments).await;
    assert_eq!(told.code, Some(code), "{told:?}; log:\n{}", sidecar.log());
    assert_harmless(&told);
    told.out
}

/// Waits until the words about a message contain these.
async fn says(sidecar: &Sidecar, id: &str, words: &[&str]) -> String {
    let mut last = String::new();
    eventually(PATIENCE, async || {
        let told = sidecar.command("explain", &[id]).await;
        assert_harmless(&told);
        last = told.out.clone();
        let all = words.iter().all(|words| told.out.contains(words));
        ensure(all, format!("{words:?} in {told:?}; log:\n{}", sidecar.log()))
    })
    .await;
    last
}

async fn tells_what_became_of_messages(kind: BrokerKind, database: DatabaseKind) {
    let app = App::start().await;
    let database = Database::new(database);
    let broker = Broker::new(kind).await;
    let group = broker.name.clone();
    let keys = "retry.cap = \"60s\"";
    let config = config(&broker, &database, &group, &app.url("/"), keys, "");
    let mut sidecar = Sidecar::start(&config);
    sidecar.ready().await;

    app.plan("bad\u{1b}[2J", [Answer::status(422).body("no\u{1b}[31m such field")]);
    app.plan("later", [Answer::status(503).header("retry-after", "60")]);
    let trace = format!("00-{TRACE}-00f067aa0ba902b7-01");
    broker
        .publish([
            Message::id("order 1/\u{fc}"),
            Message::id("bad\u{1b}[2J")
                .header("traceparent", &trace)
                .content_type("application/json"),
            Message::id("later"),
            Message::id(".."),
        ])
        .await;

    // As the publisher has it, and as the application has it.
    says(&sidecar, "order 1/\u{fc}", &["processed ", "Z)", "acked as a duplicate"]).await;
    let decoded = explained(&sidecar, &["order%201%2F%C3%BC"], 0).await;
    assert!(decoded.contains("read percent-decoded: order 1/\u{fc}"), "{decoded}");
    let json = explained(&sidecar, &["order 1/\u{fc}", "--json"], 0).await;
    let report: Value = serde_json::from_str(&json).expect("JSON");
    let consumer = &report["consumers"][0];
    assert_eq!(consumer["state"], "processed", "{report}");
    assert_eq!(consumer["read_as"], "given", "{report}");
    assert_eq!(consumer["subscriptions"], serde_json::json!(["orders"]), "{report}");
    let ago = consumer["processed"]["ago_ms"].as_u64().expect("an age");
    assert!(ago < 120_000, "{report}");

    let dead = says(&sidecar, "bad\u{1b}[2J", &["dead letter since", "last status 422"]).await;
    let origin = match kind {
        BrokerKind::Kafka => format!("kafka:{group}/"),
        _ => format!("rabbitmq:{group}"),
    };
    for part in ["the application refused it", "such field", TRACE, "application/json", &origin] {
        assert!(dead.contains(part), "{part} in {dead}");
    }
    assert!(dead.contains("body of 15 bytes"), "{dead}");

    // What a path would fold away.
    says(&sidecar, "..", &["processed "]).await;

    // What this process is doing with a message right now.
    let waits =
        says(&sidecar, "later", &["this process is working on it", "before attempt 2"]).await;
    assert!(waits.contains("503") && waits.contains("claimed by this process"), "{waits}");
    app.hold();
    broker.publish([Message::id("held")]).await;
    says(&sidecar, "held", &["at the callback for", "attempt 1"]).await;
    app.let_go();
    says(&sidecar, "held", &["processed "]).await;

    let unknown = explained(&sidecar, &["never"], 1).await;
    assert!(unknown.contains("not known") && unknown.contains("14 d"), "{unknown}");
    let other = explained(&sidecar, &["held", "--consumer-id", "somebody-else"], 1).await;
    assert!(other.contains("no subscription of this configuration"), "{other}");
    let missing = explained(&sidecar, &["held", "--subscription", "bills"], 69).await;
    assert!(missing.is_empty(), "{missing}");

    // The database alone, when nobody answers for it.
    assert!(sidecar.stop().await.success(), "{}", sidecar.log());
    let rows = database.rows(&group).await;
    let alone = explained(&sidecar, &["order 1/\u{fc}"], 0).await;
    assert!(alone.contains("processed ") && alone.contains("no sidecar answers"), "{alone}");
    let released = explained(&sidecar, &["later"], 0).await;
    assert!(released.contains("nobody has a claim on it now; 1 attempt"), "{released}");
    explained(&sidecar, &["never"], 1).await;
    assert_eq!(database.rows(&group).await, rows);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_is_explained_to_a_person_at_night() {
    tokio::join!(
        tells_what_became_of_messages(BrokerKind::RabbitQuorum, DatabaseKind::Postgres),
        tells_what_became_of_messages(BrokerKind::Kafka, DatabaseKind::MariaDb),
        tells_what_became_of_messages(BrokerKind::RabbitClassic, DatabaseKind::Sqlite),
    );
}

/// Two replicas and one id: who waits says for whom.
#[tokio::test(flavor = "multi_thread")]
async fn a_replica_that_waits_names_the_one_that_has_the_claim() {
    let app = App::start().await;
    app.hold();
    let database = Database::new(DatabaseKind::Postgres);
    let broker = Broker::new(BrokerKind::RabbitClassic).await.with_source_keys("prefetch = 1");
    let group = broker.name.clone();
    let config = config(&broker, &database, &group, &app.url("/"), "concurrency = 1", "");
    let mut replicas = [Sidecar::start(&config), Sidecar::start(&config)];
    for replica in &replicas {
        replica.ready().await;
    }
    broker.publish([Message::id("m1"), Message::id("m1")]).await;
    let mut texts = Vec::new();
    eventually(PATIENCE, async || {
        texts.clear();
        for replica in &replicas {
            texts.push(replica.command("explain", &["m1"]).await.out);
        }
        let at_work = texts.iter().filter(|text| text.contains("at the callback")).count();
        let waiting = texts.iter().filter(|text| text.contains("for a claim that ")).count();
        ensure((at_work, waiting) == (1, 1), format!("{texts:?}"))
    })
    .await;
    let waiting = texts.iter().find(|text| text.contains("for a claim that ")).expect("one waits");
    let holder = waiting.split("for a claim that ").nth(1).expect("named");
    let holder = holder.split_whitespace().next().expect("an owner").to_owned();
    let pids: Vec<_> = replicas.iter().map(|replica| replica.pid().to_string()).collect();
    assert!(pids.iter().any(|pid| holder.contains(&format!("/{pid}/"))), "{holder} of {pids:?}");
    app.let_go();
    for replica in &mut replicas {
        says(replica, "m1", &["processed "]).await;
        assert!(replica.stop().await.success(), "{}", replica.log());
    }
    assert_eq!(app.ledger().accepted("m1"), 1);
}

/// Several subscriptions: all are asked, or the one that is named.
#[tokio::test(flavor = "multi_thread")]
async fn each_consumer_id_answers_for_itself() {
    let app = App::start().await;
    let database = Database::new(DatabaseKind::Sqlite);
    let orders = Broker::new(BrokerKind::RabbitClassic).await;
    let bills = orders.sibling().await;
    let config = format!(
        "{}\n{}",
        config(&orders, &database, &orders.name, &app.url("/orders"), "", ""),
        subscription("bills", &bills, &bills.name, &app.url("/bills"), ""),
    );
    let mut sidecar = Sidecar::start(&config);
    sidecar.ready().await;
    orders.publish([Message::id("m1")]).await;
    let both = says(&sidecar, "m1", &["processed "]).await;
    let (known, unknown) =
        (format!("consumer id {}", orders.name), format!("consumer id {}", bills.name));
    assert!(both.contains(&known) && both.contains(&unknown), "{both}");
    assert!(both.contains("not known"), "{both}");
    explained(&sidecar, &["m1", "--subscription", "bills"], 1).await;
    let one = explained(&sidecar, &["m1", "--consumer-id", &orders.name], 0).await;
    assert!(!one.contains(&unknown), "{one}");

    let (status, body) = sidecar.get("/v1/messages/m1?subscription=orders").await.expect("served");
    assert_eq!(status, 200, "{body}");
    let (status, body) = sidecar.get("/v1/messages/m2").await.expect("served");
    assert_eq!(status, 404, "{body}");
    assert!(body.contains("urn:inboxd:problem:unknown_message"), "{body}");
    let begun = std::time::Instant::now();
    assert!(sidecar.stop().await.success(), "{}", sidecar.log());
    assert!(begun.elapsed() < Duration::from_secs(20));
}
