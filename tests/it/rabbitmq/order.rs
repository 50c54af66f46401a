//! Order on a queue: one consumer has it, others stand by and go on in its place.

use std::collections::BTreeMap;
use std::time::Duration;

use inboxd_conformance::app::{Answer, App, Ledger};
use inboxd_conformance::{ensure, eventually};
use lapin::types::AMQPValue;

use super::{Tap, outcomes, phase, queue_with};
use crate::support::{
    Broker, BrokerKind, Database, DatabaseKind, Message, PATIENCE, Sidecar, config, stop_all,
};

const MS: Duration = Duration::from_millis(1);
const MESSAGES: usize = 120;
const KEYS: usize = 4;
const BY_PARTITION: &str = "ordering = \"partition\"\nlease = \"2s\"";
const BY_KEY: &str = "ordering = \"key\"\nordering_key = \"header:key\"\nlease = \"2s\"";
const SINGLE: &str = "single_active_consumer = true";

fn single_active() -> [(&'static str, AMQPValue); 1] {
    [("x-single-active-consumer", AMQPValue::Boolean(true))]
}

/// `k2/017`: its key and its place.
fn messages() -> impl Iterator<Item = Message> {
    (0..MESSAGES).map(|n| {
        let key = format!("k{}", n % KEYS);
        Message::id(format!("{key}/{n:03}")).key(key)
    })
}

/// In every lane POSTs began in the queue's order; what was at the application at a kill may
/// have begun once more. Answers how many did.
fn begun_in_order(ledger: &Ledger, by_key: bool) -> usize {
    let mut lanes: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for post in ledger.all() {
        let (key, place) = post.id.split_once('/').expect("a key and a place");
        let lane = if by_key { key } else { "all" };
        lanes.entry(lane.to_owned()).or_default().push(place.to_owned());
    }
    let mut again = 0;
    for (lane, places) in lanes {
        again += places.windows(2).filter(|pair| pair[0] == pair[1]).count();
        assert!(places.is_sorted(), "lane {lane}: {places:?}");
    }
    assert_eq!(ledger.accepted_distinct(), MESSAGES);
    again
}

async fn accepted(app: &App, at_least: usize, sidecars: &[Sidecar]) {
    eventually(PATIENCE, async || {
        let accepted = app.ledger().accepted_distinct();
        let logs: String = sidecars.iter().map(Sidecar::log).collect();
        ensure(accepted >= at_least, format!("{accepted} of {at_least} accepted; log:\n{logs}"))
    })
    .await;
}

/// How the first of two replicas goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Leaves {
    Killed,
    Stopped,
}

/// Two replicas on one queue; the first goes in the middle, the second goes on in order.
async fn taken_over(broker: Broker, ordering: &str, leaves: Leaves) {
    let (by_key, single) = (ordering == BY_KEY, broker.source_keys == SINGLE);
    let what = format!("{:?}, {ordering}, {leaves:?}", broker.kind);
    let app = App::start().await;
    app.set_default(Answer::status(200).after(10 * MS));
    let database = Database::new(DatabaseKind::Postgres);
    let group = broker.name.clone();
    let config = config(&broker, &database, &group, &app.url("/"), ordering, "");
    let mut first = Sidecar::start(&config);
    first.ready().await;
    let second = Sidecar::start(&config);
    second.ready().await;
    if !single {
        // It is ready all the same, and says what it waits for.
        second.readiness(200, "another consumer has queue").await;
        assert_eq!(phase(&second, "standby").await, 1, "{what}");
    }
    broker.publish(messages()).await;
    accepted(&app, MESSAGES / 3, std::slice::from_ref(&first)).await;
    match leaves {
        Leaves::Killed => first.kill().await,
        Leaves::Stopped => {
            let status = first.stop().await;
            assert!(status.success(), "{what}: {status}\n{}", first.log());
        }
    }
    assert!(app.ledger().accepted_distinct() < MESSAGES, "{what}: all were through before");
    accepted(&app, MESSAGES, std::slice::from_ref(&second)).await;
    assert_eq!(phase(&second, "ready").await, 1, "{what}");
    let again = begun_in_order(app.ledger(), by_key);
    let most = match leaves {
        Leaves::Killed if by_key => KEYS,
        Leaves::Killed => 1,
        Leaves::Stopped => 0,
    };
    assert!(again <= most, "{what}: {again} began once more");
    stop_all(&broker, &group, &mut [second]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_stands_by_and_keeps_the_order_when_the_other_is_killed() {
    tokio::join!(
        taken_over(Broker::new(BrokerKind::RabbitClassic).await, BY_PARTITION, Leaves::Killed),
        taken_over(Broker::new(BrokerKind::RabbitClassic).await, BY_KEY, Leaves::Killed),
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_that_stands_by_goes_on_in_order_behind_one_that_stops() {
    tokio::join!(
        taken_over(Broker::new(BrokerKind::RabbitClassic).await, BY_PARTITION, Leaves::Stopped),
        taken_over(Broker::new(BrokerKind::RabbitClassic).await, BY_KEY, Leaves::Stopped),
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_keep_the_order_of_a_single_active_consumer_queue() {
    let queue = async |kind| queue_with(kind, &single_active()).await.with_source_keys(SINGLE);
    tokio::join!(
        taken_over(queue(BrokerKind::RabbitQuorum).await, BY_PARTITION, Leaves::Killed),
        taken_over(queue(BrokerKind::RabbitQuorum).await, BY_KEY, Leaves::Stopped),
        taken_over(queue(BrokerKind::RabbitClassic).await, BY_KEY, Leaves::Killed),
    );
}

/// What a quorum queue cannot promise by itself is refused, before anything is forwarded.
#[tokio::test(flavor = "multi_thread")]
async fn order_on_a_quorum_queue_must_be_said_to_have_one_active_consumer() {
    let run = async |broker: Broker, ordering: &str, code: i32| {
        let app = App::start().await;
        let database = Database::new(DatabaseKind::Sqlite);
        let group = broker.name.clone();
        let mut sidecar =
            Sidecar::start(&config(&broker, &database, &group, &app.url("/"), ordering, ""));
        let status = sidecar.ended().await;
        let log = sidecar.log();
        assert_eq!(status.code(), Some(code), "{log}");
        assert!(log.contains("single_active_consumer"), "{log}");
        assert_eq!(app.ledger().begun(), 0);
    };
    let existing = async || {
        let broker = Broker::new(BrokerKind::RabbitQuorum).await;
        broker.publish([Message::id("k0/000")]).await;
        broker
    };
    // It was declared so, and the configuration does not say it.
    let unsaid = queue_with(BrokerKind::RabbitQuorum, &single_active()).await;
    let declared = Broker::named(BrokerKind::RabbitQuorum, unsaid.url())
        .with_source_keys("declare = \"quorum\"");
    tokio::join!(
        run(existing().await, BY_PARTITION, 69),
        run(existing().await, BY_KEY, 69),
        run(unsaid, BY_KEY, 69),
        // Known before the broker is asked: a matter of the configuration.
        run(declared, BY_PARTITION, 78),
    );
}

/// Attempts that fail delay their lane, and nobody passes.
#[tokio::test(flavor = "multi_thread")]
async fn an_order_holds_over_failures_and_a_lost_connection() {
    let run = async |ordering: &str| {
        let app = App::start().await;
        app.set_default(Answer::status(200).after(5 * MS));
        app.plan("k1/041", [Answer::status(503), Answer::lost(500), Answer::status(500)]);
        let database = Database::new(DatabaseKind::Sqlite);
        let broker = Broker::new(BrokerKind::RabbitClassic).await;
        let (proxy, url) = super::proxied(&broker).await;
        let group = broker.name.clone();
        let keys = format!("{ordering}\nretry = {{ initial = \"20ms\", cap = \"50ms\" }}");
        let config = config(&broker, &database, &group, &app.url("/"), &keys, "");
        let config = config.replace(broker.url(), &url);
        let sidecar = Sidecar::start(&config);
        sidecar.ready().await;
        broker.publish(messages()).await;
        for third in 1..3 {
            accepted(&app, third * MESSAGES / 3, std::slice::from_ref(&sidecar)).await;
            proxy.sever();
        }
        accepted(&app, MESSAGES, std::slice::from_ref(&sidecar)).await;
        let again = begun_in_order(app.ledger(), ordering == BY_KEY);
        assert_eq!(again, 3, "the failures alone began once more");
        outcomes(&sidecar, "processed", MESSAGES as u64).await;
        let tap = Tap::open(&broker).await;
        assert_eq!(tap.count().await.1, 1, "one consumer");
        tap.close().await;
        stop_all(&broker, &group, &mut [sidecar]).await;
    };
    tokio::join!(run(BY_PARTITION), run(BY_KEY));
}
