//! What an application's answers come to, from the configuration to the row: H3, the status map
//! and Dapr's contract.

use std::collections::BTreeSet;

use inboxd_conformance::app::{Answer, App};
use inboxd_conformance::{ensure, eventually};

use crate::support::{
    Broker, BrokerKind, Database, DatabaseKind, Message, PATIENCE, Sidecar, config, stop_all,
};

const RETRY_SOON: &str = "retry = { initial = \"20ms\", cap = \"100ms\" }";

async fn rows_are(database: &Database, group: &str, expected: &BTreeSet<String>, of: &Sidecar) {
    eventually(PATIENCE, async || {
        let rows = database.rows(group).await;
        ensure(rows == *expected, format!("{rows:?}; log:\n{}", of.log()))
    })
    .await;
}

fn names<'a>(names: impl IntoIterator<Item = &'a str>) -> BTreeSet<String> {
    names.into_iter().map(str::to_owned).collect()
}

/// H3: 400, twenty good ones, 422; then the callback's name does not resolve. A name that stops
/// resolving while a process runs needs a resolver of the test's own, which a test that leaves its
/// machine alone cannot have: here the process is started anew with a name that does not resolve,
/// and anew with one that does. That each attempt of a running one is tried again is shown where
/// the forwarder is tested.
async fn bad_ones_between_good_ones(broker: BrokerKind, database: DatabaseKind) {
    let app = App::start().await;
    app.plan("bad-first", [Answer::status(400).body("no article")]);
    app.plan("bad-last", [Answer::status(422)]);
    let database = Database::new(database);
    let broker = Broker::new(broker).await;
    let group = broker.name.clone();
    let started = |callback: &str| {
        Sidecar::start(&config(&broker, &database, &group, callback, RETRY_SOON, ""))
    };

    let mut sidecar = started(&app.url("/orders"));
    let good: Vec<_> = (0..20).map(|n| format!("good-{n}")).collect();
    let all = ["bad-first"]
        .into_iter()
        .chain(good.iter().map(String::as_str))
        .chain(["bad-last"])
        .map(Message::id);
    broker.publish(all).await;
    let mut processed: BTreeSet<_> = good.iter().cloned().collect();
    rows_are(&database, &group, &processed, &sidecar).await;
    eventually(PATIENCE, async || {
        let dead: BTreeSet<_> = database.dead(&group).await.into_keys().collect();
        ensure(dead == names(["bad-first", "bad-last"]), format!("{dead:?}"))
    })
    .await;
    assert_eq!(app.ledger().begun(), 22, "refused once is refused");
    assert!(sidecar.stop().await.success());

    let mut lost = started("http://orders.invalid/orders");
    broker.publish((0..5).map(|n| Message::id(format!("later-{n}")))).await;
    lost.readiness(503, "orders.invalid").await;
    assert_eq!(database.dead(&group).await.len(), 2, "a name is no reason for a dead letter");
    assert!(lost.stop().await.success(), "{}", lost.log());

    let sidecar = started(&app.url("/orders"));
    processed.extend((0..5).map(|n| format!("later-{n}")));
    rows_are(&database, &group, &processed, &sidecar).await;
    assert_eq!(database.dead(&group).await.len(), 2);
    stop_all(&broker, &group, &mut [sidecar]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_messages_are_kept_good_ones_flow_and_an_unknown_host_is_waited_for() {
    tokio::join!(
        bad_ones_between_good_ones(BrokerKind::RabbitQuorum, DatabaseKind::Sqlite),
        bad_ones_between_good_ones(BrokerKind::Kafka, DatabaseKind::Postgres),
    );
}

/// Codes over classes over the table; the rest is the table's.
async fn mapped(broker: BrokerKind, database: DatabaseKind) {
    let app = App::start().await;
    app.plan("gone", [Answer::status(404)]);
    app.plan("odd", [Answer::status(418), Answer::status(422)]);
    app.plan("broken", [Answer::status(501).body("not for us")]);
    app.plan("known", [Answer::status(409)]);
    app.plan("plain", [Answer::status(200).body("{\"status\":\"RETRY\"}")]);
    app.plan("down", [Answer::status(503)]);
    let database = Database::new(database);
    let broker = Broker::new(broker).await;
    let group = broker.name.clone();
    let map = "status_map = { 404 = \"drop\", 4xx = \"retry\", 501 = \"refused\", \
               409 = \"accepted\" }";
    let keys = format!("{RETRY_SOON}\n{map}");
    let sidecar =
        Sidecar::start(&config(&broker, &database, &group, &app.url("/orders"), &keys, ""));
    let ids = ["gone", "odd", "broken", "known", "plain", "down"];
    broker.publish(ids.map(Message::id)).await;
    let processed = names(["gone", "odd", "known", "plain", "down"]);
    rows_are(&database, &group, &processed, &sidecar).await;
    eventually(PATIENCE, async || {
        let dead: Vec<_> = database.dead(&group).await.into_keys().collect();
        ensure(dead == ["broken"], format!("{dead:?}; log:\n{}", sidecar.log()))
    })
    .await;
    let posts = ids.map(|id| app.ledger().begun_of(id));
    assert_eq!(posts, [1, 3, 1, 1, 1, 2], "404, 418 and 422, 501, 409, a 2xx, 503");
    assert_eq!(sidecar.outcomes("dropped").await, 1);
    // One that found no slot for its next attempt was parked, and processed from there.
    let acked = sidecar.outcomes("processed").await + sidecar.outcomes("parked").await;
    assert_eq!(acked, 4);

    broker.publish(["gone", "known"].map(Message::id)).await;
    eventually(PATIENCE, async || {
        let duplicates = sidecar.duplicates().await;
        ensure(duplicates == 2, format!("{duplicates}; log:\n{}", sidecar.log()))
    })
    .await;
    assert_eq!(app.ledger().begun(), 9, "what was dropped has a row like any other");
    stop_all(&broker, &group, &mut [sidecar]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_status_map_is_over_the_response_table() {
    tokio::join!(
        mapped(BrokerKind::RabbitClassic, DatabaseKind::MariaDb),
        mapped(BrokerKind::Kafka, DatabaseKind::Sqlite),
    );
}

fn answer(body: &str) -> Answer {
    Answer::status(200).header("content-type", "application/json").body(body.to_owned())
}

async fn as_dapr(broker: BrokerKind, database: DatabaseKind) {
    let app = App::start().await;
    app.plan("success", [answer("{\"status\":\"SUCCESS\"}")]);
    app.plan("empty", [answer("")]);
    app.plan("again", [answer("{\"status\":\"RETRY\"}"), answer("{\"status\":\"RETRY\"}")]);
    app.plan("strange", [answer("{\"status\":\"LATER\"}"), answer("{}")]);
    app.plan("parked", [answer("{\"status\":\"PARK\"}"), answer("{\"status\":\"SUCCESS\"}")]);
    app.plan("dropped", [answer("{\"status\":\"DROP\"}")]);
    app.plan("refused", [Answer::status(422).body("{\"status\":\"SUCCESS\"}")]);
    let database = Database::new(database);
    let broker = Broker::new(broker).await;
    let group = broker.name.clone();
    let keys = format!("{RETRY_SOON}\ncontract = \"dapr\"");
    let sidecar =
        Sidecar::start(&config(&broker, &database, &group, &app.url("/orders"), &keys, ""));
    let ids = ["success", "empty", "again", "strange", "parked", "dropped", "refused"];
    broker.publish(ids.map(Message::id)).await;
    let processed = names(["success", "empty", "again", "strange", "parked", "dropped"]);
    rows_are(&database, &group, &processed, &sidecar).await;
    eventually(PATIENCE, async || {
        let dead: Vec<_> = database.dead(&group).await.into_keys().collect();
        ensure(dead == ["refused"], format!("{dead:?}; log:\n{}", sidecar.log()))
    })
    .await;
    let posts = ids.map(|id| app.ledger().begun_of(id));
    assert_eq!(posts, [1, 1, 3, 2, 2, 1, 1]);
    assert_eq!(sidecar.outcomes("dropped").await, 1);
    stop_all(&broker, &group, &mut [sidecar]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn with_dapr_s_contract_the_body_of_a_2xx_decides() {
    tokio::join!(
        as_dapr(BrokerKind::RabbitClassic, DatabaseKind::Postgres),
        as_dapr(BrokerKind::Kafka, DatabaseKind::MariaDb),
    );
}
