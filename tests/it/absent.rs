//! Nothing is consumed before the callback's host has accepted a connection: a replica whose
//! application is away takes nothing from one that could work.

use inboxd_conformance::app::{Answer, App};
use inboxd_conformance::{ensure, eventually};

use crate::support::{
    Broker, BrokerKind, Database, DatabaseKind, Message, PATIENCE, Sidecar, config, stop_all,
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

/// An application that comes up slowly: the port is closed, then its router knows no route yet,
/// then it works. It goes through the same again with messages under way.
#[tokio::test(flavor = "multi_thread")]
async fn an_application_that_is_closed_and_then_knows_no_route_loses_nothing() {
    tokio::join!(comes_up_slowly(BrokerKind::RabbitQuorum), comes_up_slowly(BrokerKind::Kafka));
}

async fn comes_up_slowly(kind: BrokerKind) {
    let mut app = App::not_started();
    app.set_default(Answer::status(404));
    let database = Database::new(DatabaseKind::Postgres);
    let broker = Broker::new(kind).await;
    let group = broker.name.clone();
    let retry = "retry = { initial = \"50ms\", cap = \"200ms\" }";
    let open = ["state=\"open\""];
    let mut sidecar =
        Sidecar::start(&config(&broker, &database, &group, &app.url("/orders"), retry, ""));
    for round in 0..2 {
        let ids: Vec<_> = (0..20).map(|n| format!("{round}-{n}")).collect();
        broker.publish(ids.iter().map(Message::id)).await;
        if round == 0 {
            sidecar.readiness(503, "callback:orders").await;
        } else {
            eventually(PATIENCE, async || {
                let rests = sidecar.metric("inboxd_callback_state", &open).await;
                ensure(rests == 1.0, format!("{kind:?}: it does not rest\n{}", sidecar.log()))
            })
            .await;
        }
        let before = app.ledger().begun();
        app.restart().await;
        eventually(PATIENCE, async || {
            let tried = app.ledger().begun() - before;
            ensure(tried >= 3, format!("{kind:?}: {tried} tried\n{}", sidecar.log()))
        })
        .await;
        assert_eq!(app.ledger().accepted_total(), round * 20);
        app.set_default(Answer::status(200));
        eventually(PATIENCE, async || {
            let accepted = app.ledger().accepted_distinct();
            let all = (round + 1) * 20;
            ensure(accepted == all, format!("{kind:?}: {accepted}\n{}", sidecar.log()))
        })
        .await;
        if round == 0 {
            sidecar.ready().await;
            app.stop().await;
            app.set_default(Answer::status(404));
        }
    }
    assert!(database.dead(&group).await.is_empty(), "{}", sidecar.log());
    let twice = app.ledger().accepted_more_than_once();
    assert!(twice.is_empty(), "{twice:?}");
    stop_all(&broker, &group, std::slice::from_mut(&mut sidecar)).await;
}
