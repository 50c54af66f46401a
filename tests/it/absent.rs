//! Nothing is consumed before the callback's host has accepted a connection: a replica whose
//! application is away takes nothing from one that could work.

use inboxd_conformance::app::App;
use inboxd_conformance::{ensure, eventually};

use crate::support::{
    Broker, BrokerKind, Database, DatabaseKind, Message, PATIENCE, Sidecar, config,
};

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_without_its_application_keeps_nothing_from_the_others() {
    for kind in [BrokerKind::Kafka, BrokerKind::RabbitQuorum] {
        let mut absent = App::not_started();
        let present = App::start().await;
        let database = Database::new(DatabaseKind::Postgres);
        let broker = Broker::new(kind).await;
        let group = broker.name.clone();
        let configured =
            |app: &App| config(&broker, &database, &group, &app.url("/orders"), "", "");
        let waiting = Sidecar::start(&configured(&absent));
        waiting.readiness(503, "callback:orders").await;
        let working = Sidecar::start(&configured(&present));
        broker.publish((0..40).map(|n| Message::id(format!("m{n}")).key(format!("k{n}")))).await;
        eventually(PATIENCE, async || {
            let accepted = present.ledger().accepted_distinct();
            ensure(accepted == 40, format!("{kind:?}: {accepted}\n{}", working.log()))
        })
        .await;
        absent.restart().await;
        waiting.ready().await;
    }
}
