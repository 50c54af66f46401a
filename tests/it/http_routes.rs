//! Routes on both brokers: by type, whatever carries it, by header and by routing key; and what
//! becomes of a message that has none.

use inboxd_conformance::app::App;
use inboxd_conformance::{ensure, eventually};

use crate::support::{
    Broker, BrokerKind, Database, DatabaseKind, Message, PATIENCE, Sidecar, stop_all, subscription,
};

/// One subscription's routes, the same for each policy.
fn routes(broker: &Broker, on_unrouted: &str) -> String {
    let by_key = match broker.kind {
        BrokerKind::Kafka => String::new(),
        // The default exchange: the key is the queue's name.
        _ => format!(
            "route.c-key = {{ routing_key = \"{}*\", header = \"by=key\", path = \"/by-key\" }}\n",
            &broker.name[..broker.name.len() - 3]
        ),
    };
    format!(
        "on_unrouted = \"{on_unrouted}\"\n\
         route.a-type = {{ type = \"order.*\", path = \"/orders/v1?of=type\" }}\n\
         route.b-header = {{ header = \"Tenant=acme-*\", path = \"/acme\" }}\n{by_key}"
    )
}

fn of_type(id: &str, message_type: &str) -> Message {
    Message::id(id).header("message-type", message_type)
}

/// A CloudEvent with its attributes as this broker carries them.
fn event(kind: BrokerKind, id: &str, event_type: &str) -> Message {
    let prefix = if kind == BrokerKind::Kafka { "ce_" } else { "cloudEvents:" };
    let mut message = Message::id(id).content_type("application/json");
    for (name, value) in
        [("specversion", "1.0"), ("id", id), ("source", "/shop"), ("type", event_type)]
    {
        message = message.header(&format!("{prefix}{name}"), value);
    }
    message
}

fn structured(id: &str, event_type: &str) -> Message {
    let body = format!(
        "{{\"specversion\":\"1.0\",\"id\":\"{id}\",\"source\":\"/s\",\"type\":\"{event_type}\"}}"
    );
    Message::id(id).content_type("application/cloudevents+json; charset=utf-8").body(body)
}

/// What is published to each subscription, and the path that it is sent to; none: it has no route.
fn messages(kind: BrokerKind) -> Vec<(Message, Option<&'static str>)> {
    let orders = Some("/orders/v1?of=type");
    let mut messages = vec![
        (of_type("typed", "order.created"), orders),
        (event(kind, "event", "order.paid"), orders),
        (structured("structured", "order.sent"), orders),
        // The first route that matches wins, in the order of their names.
        (of_type("both", "order.x").header("tenant", "acme-1"), orders),
        (Message::id("headed").header("tenant", "acme-2"), Some("/acme")),
        (of_type("other", "orders.created"), None),
        (Message::id("untyped").header("tenant", "other"), None),
    ];
    let by_key = (kind != BrokerKind::Kafka).then_some("/by-key");
    messages.push((Message::id("keyed").header("by", "key"), by_key));
    messages
}

const POLICIES: [(&str, &str); 3] =
    [("kept", "dead_letter"), ("ignored", "ignore"), ("forwarded", "forward")];

async fn routed(kind: BrokerKind, database: DatabaseKind) {
    let app = App::start().await;
    let database = Database::new(database);
    let first = Broker::new(kind).await;
    let brokers = [first.sibling().await, first.sibling().await, first];
    let mut file = format!("{}\n{}\n", database.config(), brokers[0].config());
    for ((name, policy), broker) in POLICIES.iter().zip(&brokers) {
        let callback = app.url(&format!("/{name}?own=1"));
        file += &subscription(name, broker, &broker.name, &callback, &routes(broker, policy));
    }
    let sidecar = Sidecar::start(&file);
    sidecar.ready().await;
    for broker in &brokers {
        broker.publish(messages(kind).into_iter().map(|(message, _)| message)).await;
    }
    let unrouted = messages(kind).iter().filter(|(_, path)| path.is_none()).count() as u64;
    let routed = messages(kind).len() as u64 - unrouted;
    eventually(PATIENCE, async || {
        let mut found = Vec::new();
        for (name, _) in POLICIES {
            for outcome in ["processed", "dead_lettered", "unrouted"] {
                found.push(sidecar.outcomes_of(name, outcome).await);
            }
        }
        let kept = [routed, unrouted, 0];
        let expected = [kept, [routed, 0, unrouted], [routed + unrouted, 0, 0]].concat();
        ensure(found == expected, format!("{found:?}, not {expected:?}; log:\n{}", sidecar.log()))
    })
    .await;

    for ((name, policy), broker) in POLICIES.iter().zip(&brokers) {
        let (rows, dead) = (database.rows(&broker.name).await, database.dead(&broker.name).await);
        for (message, path) in messages(kind) {
            let id = message.id.unwrap();
            let posts: Vec<_> = app.ledger().posts(&id).into_iter().collect();
            let own: Vec<_> = posts.iter().filter(|post| post.consumer_id == broker.name).collect();
            let callback = format!("/{name}?own=1");
            let expected = match (path, *policy) {
                (Some(path), _) => Some(path.to_owned()),
                (None, "forward") => Some(callback),
                (None, _) => None,
            };
            let paths: Vec<_> = own.iter().map(|post| post.path.clone()).collect();
            assert_eq!(paths, expected.iter().cloned().collect::<Vec<_>>(), "{name}: {id}");
            let is_kept = path.is_none() && *policy == "dead_letter";
            assert_eq!((rows.contains(&id), dead.contains_key(&id)), (!is_kept, is_kept), "{id}");
        }
    }
    let parked = database.table("inbox_parked");
    let reasons = format!("SELECT COUNT(*) FROM {parked} WHERE reason = 'unrouted'");
    assert_eq!(database.session().await.number(&reasons).await as u64, unrouted);

    // Whatever route a copy has, it is a duplicate.
    let posts = app.ledger().begun();
    let copies = || {
        let bare = ["typed", "headed"].map(|id| of_type(id, "nobody's"));
        bare.into_iter().chain([of_type("untyped", "order.late")])
    };
    for broker in &brokers {
        broker.publish(copies()).await;
    }
    eventually(PATIENCE, async || {
        for (name, expected) in [("kept", 2), ("ignored", 3), ("forwarded", 3)] {
            let found = sidecar.outcomes_of(name, "duplicate").await
                + sidecar.outcomes_of(name, "duplicate_in_flight").await;
            ensure(found == expected, format!("{name}: {found}; log:\n{}", sidecar.log()))?;
        }
        // What was kept for want of a route has one now: published again, it is forwarded.
        let processed = sidecar.outcomes_of("kept", "processed").await;
        ensure(processed == routed + 1, format!("{processed}; log:\n{}", sidecar.log()))
    })
    .await;
    assert_eq!(app.ledger().begun(), posts + 1);
    assert_eq!(app.ledger().posts("untyped").last().unwrap().path, "/orders/v1?of=type");
    let mut sidecars = [sidecar];
    stop_all(&brokers[0], &brokers[0].name, &mut sidecars).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_go_where_their_route_leads_and_those_without_one_by_the_policy() {
    tokio::join!(
        routed(BrokerKind::RabbitClassic, DatabaseKind::Postgres),
        routed(BrokerKind::Kafka, DatabaseKind::Sqlite),
    );
}

#[tokio::test]
async fn a_route_that_leads_nowhere_is_refused_at_start() {
    let database = Database::new(DatabaseKind::Sqlite);
    let broker = Broker::named(BrokerKind::Kafka, "127.0.0.1:9");
    for (route, says) in [
        ("{ type = \"a\", path = \"http://evil.test/\" }", "route.bad.path"),
        ("{ type = \"a\", path = \"//evil.test/\" }", "route.bad.path"),
        ("{ type = \"a\", path = \"/a\\r\\nHost: b\" }", "route.bad.path"),
        ("{ path = \"/all\" }", "route.bad.type"),
        ("{ routing_key = \"a\", path = \"/a\" }", "route.bad.routing_key"),
    ] {
        let keys = format!("route.bad = {route}");
        let callback = "http://127.0.0.1:9/";
        let file = format!(
            "{}\n{}\n{}",
            database.config(),
            broker.config(),
            subscription("orders", &broker, "billing", callback, &keys)
        );
        let mut sidecar = Sidecar::start(&file);
        assert_eq!(sidecar.ended().await.code(), Some(78), "{route}: {}", sidecar.log());
        assert!(sidecar.log().contains(says), "{route}: {}", sidecar.log());
    }
}
