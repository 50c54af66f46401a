//! The first queue that somebody points the sidecar at: its messages carry no id.

use inboxd_conformance::app::App;
use inboxd_conformance::{ensure, eventually};

use crate::support::{
    Broker, BrokerKind, Database, DatabaseKind, Message, PATIENCE, Sidecar, config, stop_all,
};

/// The subscription pauses; with what the reason advises, everything flows.
async fn messages_without_ids(broker: BrokerKind, count: usize) {
    let app = App::start().await;
    let database = Database::new(DatabaseKind::Sqlite);
    let broker = Broker::new(broker).await;
    let group = broker.name.clone();
    let with = |ids: &str| {
        config(&broker, &database, &group, &app.url("/"), &format!("message_id = [{ids}]"), "")
    };
    let explicit = "\"property\", \"header:message-id\", \"cloudevents\"";
    let mut sidecar = Sidecar::start(&with(explicit));
    let message = |n: usize| {
        Message::bare(format!("{{\"order\": {n}, \"event_id\": \"e{n}\"}}"))
            .header("tenant", "blue")
            .content_type("application/json")
    };
    broker.publish((0..count).map(message)).await;
    sidecar.readiness(503, "none of them carries a message id").await;
    let (_, body) = sidecar.get("/readyz").await.expect("served");
    let log = sidecar.log();
    let told = log.lines().find(|line| line.contains("none of them carries")).expect("logged");
    for part in ["tenant", "application/json", "event_id", "json:/event_id", "on_missing_id"] {
        assert!(body.contains(part), "{part} in {body}");
        assert!(told.contains(part), "{part} in {told}");
    }
    assert!(told.contains("\"level\":\"ERROR\"") && told.contains("paused"), "{told}");
    assert_eq!(sidecar.get("/livez").await.map(|(status, _)| status), Some(200));
    let paused = sidecar.metric("inboxd_subscription_paused", &["subscription=\"orders\""]).await;
    assert_eq!(paused as u64, 1);
    assert_eq!(app.ledger().begun(), 0);
    let status = sidecar.stop().await;
    assert!(status.success(), "{status}:\n{}", sidecar.log());
    assert!(database.rows(&group).await.is_empty() && database.dead(&group).await.is_empty());
    eventually(PATIENCE, async || {
        let left = broker.left(&group).await;
        ensure(left as usize == count, format!("{left} left: something was settled"))
    })
    .await;

    // What the reason advises.
    let sidecar = Sidecar::start(&with("\"json:/event_id\""));
    eventually(PATIENCE, async || {
        let rows = database.rows(&group).await;
        ensure(rows.len() == count, format!("{rows:?}; log:\n{}", sidecar.log()))
    })
    .await;
    assert!(database.rows(&group).await.contains("e0"));
    stop_all(&broker, &group, &mut [sidecar]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_without_ids_pauses_says_what_it_carries_and_settles_nothing() {
    tokio::join!(
        // Twenty are enough, fewer are waited for.
        messages_without_ids(BrokerKind::RabbitQuorum, 3),
        messages_without_ids(BrokerKind::Kafka, 20),
    );
}
