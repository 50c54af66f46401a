//! Both brokers × three stores: 10,000 messages, 30 % of them duplicates, SIGKILL of a replica
//! at a random moment and restart. Nothing is lost, and an id is accepted twice only
//! if a POST of it had begun and no row existed at a kill.

use std::collections::BTreeSet;
use std::time::Duration;

use inboxd_conformance::app::{Answer, App};
use inboxd_conformance::{ensure, eventually};
use rand::rngs::SmallRng;
use rand::seq::SliceRandom as _;
use rand::{Rng as _, SeedableRng as _};

use crate::support::{Broker, BrokerKind, Database, DatabaseKind, Message, Sidecar, config};

const PUBLISHED: usize = 10_000;
const DISTINCT: usize = 7_000;
const PATIENCE: Duration = Duration::from_secs(180);

/// 7,000 ids, 3,000 of them once more: some at once, some later.
fn messages(random: &mut SmallRng) -> Vec<Message> {
    let mut ids: Vec<usize> = (0..DISTINCT).collect();
    ids.shuffle(random);
    let mut published = Vec::with_capacity(PUBLISHED);
    let again = PUBLISHED - DISTINCT;
    for (place, id) in ids.iter().enumerate() {
        published.push(*id);
        if place < again / 2 {
            published.push(*id);
        } else if place < again {
            published.insert(random.random_range(0..published.len()), *id);
        }
    }
    published
        .into_iter()
        .map(|id| Message::id(format!("m{id}")).key(format!("k{}", id % 97)))
        .collect()
}

/// In this life of the sidecar.
async fn duplicates_seen(sidecar: &Sidecar) -> u64 {
    sidecar.outcomes("duplicate").await + sidecar.outcomes("duplicate_in_flight").await
}

async fn run(broker_kind: BrokerKind, database_kind: DatabaseKind) {
    let seed = rand::random();
    println!("seed {seed}");
    let mut random = SmallRng::seed_from_u64(seed);
    let app = App::start().await;
    let mut faults = SmallRng::seed_from_u64(seed);
    app.plan_with(move |_| match faults.random_range(0..100) {
        0 => Some(Answer::status(503)),
        1 => Some(Answer::status(200).after(Duration::from_millis(100))),
        _ => None,
    });
    let database = Database::new(database_kind);
    let broker = Broker::new(broker_kind).await;
    let group = broker.name.clone();
    let config = config(
        &broker,
        &database,
        &group,
        &app.url("/orders"),
        "retry = { initial = \"20ms\" }\nlease = \"6s\"",
        "",
    );
    let replicas = if database_kind == DatabaseKind::Sqlite { 1 } else { 2 };
    let mut sidecars: Vec<_> = (0..replicas).map(|_| Sidecar::start(&config)).collect();
    broker.publish(messages(&mut random)).await;

    let kill_at = random.random_range(DISTINCT / 10..DISTINCT * 8 / 10);
    eventually(PATIENCE, async || {
        let accepted = app.ledger().accepted_total();
        ensure(accepted >= kill_at, format!("{accepted} accepted\n{}", sidecars[0].log()))
    })
    .await;
    let victim = random.random_range(0..replicas);
    let mut duplicates = duplicates_seen(&sidecars[victim]).await;
    sidecars[victim].kill().await;
    let rows = database.rows(&group).await;
    let in_flight: BTreeSet<_> = app
        .ledger()
        .all()
        .into_iter()
        .map(|post| post.id)
        .filter(|id| !rows.contains(id))
        .collect();
    sidecars[victim].start_again();

    eventually(PATIENCE, async || {
        let accepted = app.ledger().accepted_distinct();
        ensure(accepted == DISTINCT, format!("{accepted} accepted\n{}", sidecars[victim].log()))
    })
    .await;
    eventually(PATIENCE, async || {
        let rows = database.rows(&group).await.len();
        ensure(rows == DISTINCT, format!("{rows} rows"))
    })
    .await;
    for sidecar in &mut sidecars {
        duplicates += duplicates_seen(sidecar).await;
        let status = sidecar.stop().await;
        assert!(status.success(), "{status}:\n{}", sidecar.log());
    }
    // What was in flight at the stop is redelivered as a duplicate: one more life drains it.
    let mut last = Sidecar::start(&config);
    eventually(PATIENCE, async || {
        let left = broker.left(&group).await;
        ensure(left == 0, format!("{left} left on the broker\n{}", last.log()))
    })
    .await;
    let twice = app.ledger().accepted_more_than_once();
    let other: Vec<_> = twice.keys().filter(|id| !in_flight.contains(*id)).collect();
    println!(
        "{broker_kind:?} x {database_kind:?}: {PUBLISHED} published, {DISTINCT} distinct, \
         {duplicates} duplicates seen, {} POSTs, {} in flight at the kill, {} accepted again",
        app.ledger().begun(),
        in_flight.len(),
        twice.len()
    );
    assert!(other.is_empty(), "accepted twice, not in flight at the kill: {other:?}");
    assert!(duplicates > 0, "no duplicate was seen");
    assert!(last.stop().await.success(), "{}", last.log());
    assert_eq!(broker.left(&group).await, 0);
    assert!(database.dead(&group).await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn rabbitmq_and_sqlite() {
    run(BrokerKind::RabbitClassic, DatabaseKind::Sqlite).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rabbitmq_and_postgres() {
    run(BrokerKind::RabbitQuorum, DatabaseKind::Postgres).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rabbitmq_and_mariadb() {
    run(BrokerKind::RabbitClassic, DatabaseKind::MariaDb).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn kafka_and_sqlite() {
    run(BrokerKind::Kafka, DatabaseKind::Sqlite).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn kafka_and_postgres() {
    run(BrokerKind::Kafka, DatabaseKind::Postgres).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn kafka_and_mariadb() {
    run(BrokerKind::Kafka, DatabaseKind::MariaDb).await;
}
