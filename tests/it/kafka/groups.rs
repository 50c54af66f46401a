//! Membership: members come, go, and are slow, and nothing is lost, skipped or doubled.

use std::time::Instant;

use inboxd_conformance::app::{Answer, App};
use inboxd_conformance::{ensure, eventually};

use super::{
    MS, SECOND, accepted, configured, drained, nothing_twice, spread, stop, topic, with_properties,
};
use crate::support::{Broker, BrokerKind, Database, DatabaseKind, Message, PATIENCE, Sidecar};

/// Assignments and revocations that a sidecar has logged.
fn rebalances(sidecar: &Sidecar) -> Vec<String> {
    let log = sidecar.log();
    let lines = log.lines().filter(|line| line.contains("\"rebalance\""));
    lines.map(str::to_owned).collect()
}

/// K2: the application is slow beyond `max.poll.interval.ms`, then away for as long again.
#[tokio::test(flavor = "multi_thread")]
async fn a_slow_application_costs_no_membership() {
    const MESSAGES: usize = 400;
    let app = App::start().await;
    let began = Instant::now();
    app.plan_with(move |post| match began.elapsed() {
        _ if post.id == "m0" && post.attempt == 1 => Some(Answer::status(200).after(8 * SECOND)),
        early if early < 5 * SECOND => Some(Answer::status(503).after(SECOND)),
        away if away < 14 * SECOND => Some(Answer::status(503)),
        _ => None,
    });
    let database = Database::new(DatabaseKind::Postgres);
    let broker = Broker::new(BrokerKind::Kafka).await;
    let keys = "in_flight_max = 32\nretry = { initial = \"100ms\", cap = \"500ms\" }";
    let poll = [("max.poll.interval.ms", "6000")];
    let mut sidecar = Sidecar::start(&configured(&broker, &database, &app, keys, &poll));
    broker.publish(spread("m", MESSAGES, 4)).await;
    accepted(&app, MESSAGES, &[&sidecar]).await;
    assert!(began.elapsed() > 14 * SECOND, "the application was not away");
    drained(PATIENCE, &broker, &[&sidecar]).await;
    let seen = rebalances(&sidecar);
    assert_eq!(seen.len(), 1, "the first assignment and nothing else: {seen:#?}");
    assert_eq!(app.ledger().begun_of("m0"), 1);
    nothing_twice(&app);
    stop(&mut sidecar).await;
}

/// What is at the application when its partition moves outlives the wait for it (half of
/// `max.poll.interval.ms`): the next owner waits for the claim, and forwards nothing again.
#[tokio::test(flavor = "multi_thread")]
async fn a_post_that_outlives_the_hand_over_is_not_made_again() {
    let app = App::start().await;
    app.plan_with(|post| {
        post.id.starts_with("slow-").then(|| Answer::status(200).after(9 * SECOND))
    });
    let database = Database::new(DatabaseKind::Postgres);
    let broker = Broker::new(BrokerKind::Kafka).await;
    let poll = [("max.poll.interval.ms", "6000")];
    let config = configured(&broker, &database, &app, "lease = \"2s\"", &poll);
    let mut first = Sidecar::start(&config);
    broker.publish(spread("slow-", 4, 4)).await;
    eventually(PATIENCE, async || ensure(app.ledger().open().len() == 4, first.log())).await;
    let mut second = Sidecar::start(&config);
    second.ready().await;
    accepted(&app, 4, &[&first, &second]).await;
    drained(PATIENCE, &broker, &[&first, &second]).await;
    let moved = second.duplicates().await;
    assert!(moved > 0, "no partition moved:\n{}", second.log());
    assert_eq!(app.ledger().begun(), 4, "a second POST");
    broker.publish(spread("quick-", 8, 4)).await;
    accepted(&app, 12, &[&first, &second]).await;
    drained(PATIENCE, &broker, &[&first, &second]).await;
    nothing_twice(&app);
    stop(&mut first).await;
    stop(&mut second).await;
}

/// K3: four partitions wait for the application while a member joins and leaves, or is killed.
#[tokio::test(flavor = "multi_thread")]
async fn what_waited_for_the_application_flows_when_members_have_come_and_gone() {
    tokio::join!(come_and_gone(false), come_and_gone(true));
}

async fn come_and_gone(killed: bool) {
    const MESSAGES: usize = 400;
    let app = App::start().await;
    app.set_default(Answer::status(503));
    let database = Database::new(DatabaseKind::MariaDb);
    let broker = Broker::new(BrokerKind::Kafka).await;
    let keys =
        "in_flight_max = 32\nretry = { initial = \"100ms\", cap = \"500ms\" }\nlease = \"6s\"";
    let config = configured(&broker, &database, &app, keys, &[]);
    let rests = async |sidecar: &Sidecar| {
        eventually(PATIENCE, async || {
            let open = sidecar.metric("inboxd_callback_state", &["state=\"open\""]).await;
            ensure(open == 1.0, format!("it does not rest; log:\n{}", sidecar.log()))
        })
        .await;
    };
    let mut first = Sidecar::start(&config);
    broker.publish(spread("m", MESSAGES, 4)).await;
    rests(&first).await;
    let mut second = Sidecar::start(&config);
    rests(&second).await;
    match killed {
        true => second.kill().await,
        false => stop(&mut second).await,
    }
    rests(&first).await;
    assert_eq!(app.ledger().accepted_total(), 0);

    app.set_default(Answer::status(200));
    let recovered = Instant::now();
    accepted(&app, MESSAGES, &[&first]).await;
    drained(PATIENCE, &broker, &[&first]).await;
    let took = recovered.elapsed();
    assert!(took < 30 * SECOND, "{took:?}:\n{}", first.log());
    nothing_twice(&app);
    assert!(first.is_running(), "{}", first.log());
    stop(&mut first).await;
}

/// K5: three replicas, one after the other restarted while messages flow.
async fn rolling_restarts(properties: &[(&str, &str)], database: DatabaseKind) {
    const ROUND: usize = 60;
    let app = App::start().await;
    app.set_default(Answer::status(200).after(5 * MS));
    let database = Database::new(database);
    let broker = topic(6).await;
    let config = configured(&broker, &database, &app, "lease = \"6s\"", properties);
    let mut replicas: Vec<_> = (0..3).map(|_| Sidecar::start(&config)).collect();
    for replica in &replicas {
        replica.ready().await;
    }
    let mut published = 0;
    for round in 0..5 {
        broker.publish(spread(&format!("{round}-a-"), ROUND, 6)).await;
        let restarted = &mut replicas[round % 3];
        stop(restarted).await;
        broker.publish(spread(&format!("{round}-b-"), ROUND, 6)).await;
        restarted.start_again();
        restarted.ready().await;
        published += 2 * ROUND;
        for replica in &mut replicas {
            assert!(replica.is_running(), "one ended by itself:\n{}", replica.log());
        }
    }
    let all: Vec<_> = replicas.iter().collect();
    accepted(&app, published, &all).await;
    drained(PATIENCE, &broker, &all).await;
    nothing_twice(&app);
    assert_eq!(database.rows(&broker.name).await.len(), published);
    for replica in &mut replicas {
        stop(replica).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rolling_restarts_with_a_cooperative_assignor() {
    let assignor = [("partition.assignment.strategy", "cooperative-sticky")];
    rolling_restarts(&assignor, DatabaseKind::Postgres).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rolling_restarts_with_an_eager_assignor() {
    let assignor = [("partition.assignment.strategy", "range")];
    rolling_restarts(&assignor, DatabaseKind::MariaDb).await;
}

/// The session and its heartbeat are the broker's affair there.
#[tokio::test(flavor = "multi_thread")]
async fn rolling_restarts_with_the_new_group_protocol() {
    let protocol =
        [("group.protocol", "consumer"), ("session.timeout.ms", ""), ("heartbeat.interval.ms", "")];
    rolling_restarts(&protocol, DatabaseKind::Postgres).await;
}

/// K7: one record now and then, the statistics more often than that, and a second member that
/// comes and goes between them.
#[tokio::test(flavor = "multi_thread")]
async fn sparse_messages_are_forwarded_promptly() {
    let app = App::start().await;
    let database = Database::new(DatabaseKind::Postgres);
    let broker = topic(2).await;
    let properties = [("statistics.interval.ms", "200")];
    let config = configured(&broker, &database, &app, "", &properties);
    let mut sidecar = Sidecar::start(&config);
    let mut other = Sidecar::start(&config);
    sidecar.ready().await;
    other.ready().await;
    for number in 0..8 {
        match number {
            3 => stop(&mut other).await,
            6 => other.start_again(),
            _ => tokio::time::sleep(SECOND).await,
        }
        if number == 6 {
            other.ready().await;
        }
        let began = Instant::now();
        broker.publish([Message::id(format!("m{number}")).partition(number % 2)]).await;
        let count = usize::try_from(number + 1).expect("small");
        accepted(&app, count, &[&sidecar, &other]).await;
        let took = began.elapsed();
        assert!(took < 15 * SECOND, "m{number} took {took:?}:\n{}", sidecar.log());
    }
    drained(PATIENCE, &broker, &[&sidecar, &other]).await;
    assert_eq!(app.ledger().begun(), 8, "each once");
    stop(&mut other).await;
    stop(&mut sidecar).await;
}

/// K8: the topic that exists works at once, the other when it appears.
#[tokio::test(flavor = "multi_thread")]
async fn a_topic_that_is_missing_holds_up_no_other() {
    let app = App::start().await;
    let database = Database::new(DatabaseKind::Sqlite);
    let here = topic(1).await;
    let later = Broker::named(BrokerKind::Kafka, here.url());
    let config = format!(
        "{}\n{}\n[subscription.orders]\ncallback = \"{}\"\n\
         source = {{ broker = \"main\", topics = [\"{}\", \"{}\"], group = \"{}\" }}\n",
        database.config(),
        with_properties(&here, &[("topic.metadata.refresh.interval.ms", "1000")]),
        app.url("/"),
        here.name,
        later.name,
        here.name,
    );
    let mut sidecar = Sidecar::start(&config);
    here.publish([Message::id("here")]).await;
    accepted(&app, 1, &[&sidecar]).await;
    sidecar.ready().await;
    later.create_topic(1).await;
    later.publish([Message::id("there")]).await;
    accepted(&app, 2, &[&sidecar]).await;
    here.publish([Message::id("here again")]).await;
    accepted(&app, 3, &[&sidecar]).await;
    for topic in [&here, &later] {
        eventually(PATIENCE, async || {
            let left = topic.left(&here.name).await;
            ensure(left == 0, format!("{left} left; log:\n{}", sidecar.log()))
        })
        .await;
    }
    stop(&mut sidecar).await;
}
