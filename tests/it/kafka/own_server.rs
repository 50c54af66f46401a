//! What needs a broker of one's own: it hangs, dies and comes back. One server serves all of it,
//! since starting it takes long.

use std::time::Instant;

use inboxd_conformance::app::App;
use inboxd_conformance::servers::{Kind, OwnServer};
use inboxd_conformance::{ensure, eventually};
use nix::sys::signal::Signal;

use super::{SECOND, accepted, configured, drained, spread, stop};
use crate::support::{Broker, BrokerKind, Database, DatabaseKind, PATIENCE, Sidecar};

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_hangs_and_dies_costs_no_message_and_keeps_nobody() {
    let mut server = OwnServer::start(Kind::Kafka).await;
    let world = World::new(&server).await;
    let mut sidecar = world.start();
    world.a_broker_that_hangs_is_noticed(&server, &sidecar).await;
    world.a_broker_that_was_killed_is_found_again(&mut server, &mut sidecar).await;
    world.a_broker_that_hangs_does_not_hold_up_the_end(&server, &mut sidecar).await;
    // Nothing was forwarded again in all of this.
    assert_eq!(world.app.ledger().begun(), world.app.ledger().accepted_distinct());
}

struct World {
    app: App,
    database: Database,
    broker: Broker,
}

impl World {
    async fn new(server: &OwnServer) -> Self {
        let broker = Broker::at(BrokerKind::Kafka, server.url()).await;
        Self { app: App::start().await, database: Database::new(DatabaseKind::Sqlite), broker }
    }

    fn start(&self) -> Sidecar {
        let config = configured(&self.broker, &self.database, &self.app, "", &[]);
        Sidecar::start(&format!("shutdown_grace = \"5s\"\n{config}"))
    }

    /// Publishes more, and waits until they are through.
    async fn more(&self, prefix: &str, sidecar: &Sidecar) {
        let accepted_before = self.app.ledger().accepted_distinct();
        self.broker.publish(spread(prefix, 20, 4)).await;
        accepted(&self.app, accepted_before + 20, &[sidecar]).await;
        drained(PATIENCE, &self.broker, &[sidecar]).await;
    }

    /// The broker stops answering while eight messages are at the application.
    async fn hangs_with_messages_under_way(&self, server: &OwnServer, sidecar: &Sidecar) {
        let before = self.app.ledger().accepted_distinct();
        self.app.hold();
        self.broker.publish(spread(&format!("{before}-under-way-"), 8, 4)).await;
        eventually(PATIENCE, async || ensure(self.app.ledger().open().len() == 8, sidecar.log()))
            .await;
        server.pause().await;
        self.app.let_go();
        accepted(&self.app, before + 8, &[sidecar]).await;
    }

    async fn a_broker_that_hangs_is_noticed(&self, server: &OwnServer, sidecar: &Sidecar) {
        self.more("first-", sidecar).await;
        self.hangs_with_messages_under_way(server, sidecar).await;
        sidecar.not_ready("source:orders").await;
        assert_eq!(sidecar.get("/livez").await.map(|(status, _)| status), Some(200));
        server.resume().await;
        sidecar.ready().await;
        self.more("after-the-hang-", sidecar).await;
    }

    async fn a_broker_that_was_killed_is_found_again(
        &self,
        server: &mut OwnServer,
        sidecar: &mut Sidecar,
    ) {
        server.kill().await;
        sidecar.not_ready("source:orders").await;
        server.restart().await;
        sidecar.ready().await;
        assert!(sidecar.is_running(), "{}", sidecar.log());
        self.more("after-the-kill-", sidecar).await;
    }

    /// K11: what was processed and could not be committed comes again, and is suppressed.
    async fn a_broker_that_hangs_does_not_hold_up_the_end(
        &self,
        server: &OwnServer,
        sidecar: &mut Sidecar,
    ) {
        self.hangs_with_messages_under_way(server, sidecar).await;
        let asked = Instant::now();
        sidecar.signal(Signal::SIGTERM);
        let status = sidecar.ended().await;
        let took = asked.elapsed();
        assert_eq!(status.code(), Some(0), "{status}:\n{}", sidecar.log());
        assert!(took < 10 * SECOND, "{took:?}:\n{}", sidecar.log());

        server.resume().await;
        sidecar.start_again();
        self.more("after-the-end-", sidecar).await;
        stop(sidecar).await;
    }
}
