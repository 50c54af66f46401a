//! What needs a broker of one's own: closed connections, a short `consumer_timeout`, the
//! broker's own figures, restarts. One server serves all of it, since starting it takes long.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use inboxd_conformance::app::{Answer, App};
use inboxd_conformance::servers::{Kind, OwnServer};
use inboxd_conformance::{ensure, eventually};
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::{BasicProperties, Channel, Confirmation, Connection, ConnectionProperties};
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::{Tap, outcomes, proxied, reconnects};
use crate::support::{
    Broker, BrokerKind, Database, DatabaseKind, Message, PATIENCE, Sidecar, config, stop_all,
    subscription,
};

const MS: Duration = Duration::from_millis(1);
/// An answer that does not come within a test.
const NEVER: Duration = Duration::from_secs(600);

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_closes_connections_times_out_and_restarts() {
    let mut server = OwnServer::start_with(Kind::RabbitMq, "consumer_timeout = 3000\n").await;
    a_closed_connection_leads_to_no_second_post(&server).await;
    tokio::join!(
        no_more_than_the_prefetch_is_unacked(&server),
        a_consumer_timeout_is_recovered_from(&server),
    );
    three_restarts_lose_nothing(&mut server).await;
}

/// R1: the connection goes while the application works on m1 and m2. The answer to m1 comes
/// afterwards: its old tag, which is m2's on the new channel, is not used there.
async fn a_closed_connection_leads_to_no_second_post(server: &OwnServer) {
    let app = App::start().await;
    let database = Database::new(DatabaseKind::Sqlite);
    let broker = Broker::at(BrokerKind::RabbitClassic, server.url()).await;
    let group = broker.name.clone();
    let mut sidecar = Sidecar::start(&config(&broker, &database, &group, &app.url("/"), "", ""));
    broker.publish([Message::id("m0")]).await;
    outcomes(&sidecar, "processed", 1).await;
    app.plan("m2", [Answer::status(200).after(NEVER)]);
    app.hold();
    broker.publish([Message::id("m1"), Message::id("m2")]).await;
    eventually(PATIENCE, async || ensure(app.ledger().open().len() == 2, sidecar.log())).await;

    server.control(&["close_all_connections", "for a test"]).await;
    eventually(PATIENCE, async || {
        let state = (reconnects(&sidecar).await, sidecar.in_flight().await);
        ensure(state == (1, 4), format!("{state:?}; log:\n{}", sidecar.log()))
    })
    .await;
    app.let_go();
    outcomes(&sidecar, "duplicate_in_flight", 1).await;
    outcomes(&sidecar, "processed", 2).await;
    let held = format!("{group}\t1");
    eventually(PATIENCE, async || {
        let queues = server.control(&["list_queues", "name", "messages_unacknowledged"]).await;
        ensure(queues.contains(&held), format!("{queues}, not m2 alone; {}", sidecar.log()))
    })
    .await;
    assert_eq!(reconnects(&sidecar).await, 1, "the broker refused an ack: {}", sidecar.log());
    sidecar.kill().await;

    let tap = Tap::open(&broker).await;
    tap.counts((1, 0), &sidecar).await;
    sidecar.start_again();
    eventually(PATIENCE, async || ensure(app.ledger().accepted("m2") == 1, sidecar.log())).await;
    assert_eq!(app.ledger().begun_of("m1"), 1, "a second POST");
    stop_all(&broker, &group, std::slice::from_mut(&mut sidecar)).await;
}

/// A delivery held too long costs the channel. Its message is forwarded once, others flow.
async fn a_consumer_timeout_is_recovered_from(server: &OwnServer) {
    // How often channels look for it; not a matter of the configuration file.
    let tick = "application:set_env(rabbit, channel_tick_interval, 500).";
    server.control(&["eval", tick]).await;
    let app = App::start().await;
    let database = Database::new(DatabaseKind::Sqlite);
    let broker = Broker::at(BrokerKind::RabbitClassic, server.url()).await;
    let group = broker.name.clone();
    let mut sidecar = Sidecar::start(&config(&broker, &database, &group, &app.url("/"), "", ""));
    sidecar.ready().await;
    app.hold();
    broker.publish([Message::id("slow")]).await;
    eventually(PATIENCE, async || {
        let again = reconnects(&sidecar).await;
        ensure(again >= 1 && sidecar.in_flight().await == 2, sidecar.log())
    })
    .await;
    assert!(sidecar.log().contains("timeout"), "it says why:\n{}", sidecar.log());
    app.let_go();
    broker.publish((0..10).map(|n| Message::id(format!("m{n}")))).await;
    outcomes(&sidecar, "processed", 11).await;
    assert!(sidecar.duplicates().await >= 1, "{}", sidecar.log());
    assert_eq!(app.ledger().begun(), 11, "one POST each");
    sidecar.ready().await;
    stop_all(&broker, &group, std::slice::from_mut(&mut sidecar)).await;
}

/// R11: measured where it counts, in the broker, all the time until the queue is empty.
async fn no_more_than_the_prefetch_is_unacked(server: &OwnServer) {
    let app = App::start().await;
    app.set_default(Answer::status(200).after(5 * MS));
    let database = Database::new(DatabaseKind::Sqlite);
    let broker = Broker::at(BrokerKind::RabbitClassic, server.url()).await;
    let broker = broker.with_source_keys("prefetch = 5");
    let (proxy, url) = proxied(&broker).await;
    let group = broker.name.clone();
    broker.publish((0..1_000).map(|n| Message::id(format!("m{n}")))).await;
    let config = format!(
        "{}{}{}",
        database.config(),
        broker.config_with(&url),
        subscription("orders", &broker, &group, &app.url("/"), "concurrency = 50")
    );
    app.hold();
    let mut sidecar = Sidecar::start(&config);
    eventually(PATIENCE, async || ensure(sidecar.in_flight().await == 5, sidecar.log())).await;
    let started = server.dir().join("sampling");
    let eval = format!(
        "Name = rabbit_misc:r(<<\"/\">>, queue, <<\"{group}\">>), \
         {{ok, Queue}} = rabbit_amqqueue:lookup(Name), \
         ok = file:write_file(\"{}\", <<>>), \
         Sample = fun(Again, Most, Times) -> \
             [{{_, All}}, {{_, Unacked}}] = \
                 rabbit_amqqueue:info(Queue, [messages, messages_unacknowledged]), \
             case All of \
                 0 -> {{most, Most, samples, Times}}; \
                 _ -> timer:sleep(5), Again(Again, max(Most, Unacked), Times + 1) \
             end \
         end, \
         Sample(Sample, 0, 0).",
        started.display()
    );
    let arguments = ["eval", &eval];
    let sampled = server.control(&arguments);
    let flow = async {
        eventually(PATIENCE, async || ensure(started.exists(), "no samples yet")).await;
        app.let_go();
        for round in 1..=2 {
            eventually(PATIENCE, async || {
                let accepted = app.ledger().accepted_total();
                ensure(accepted >= 300 * round, format!("{accepted}\n{}", sidecar.log()))
            })
            .await;
            proxy.sever();
        }
        eventually(PATIENCE, async || {
            let accepted = app.ledger().accepted_distinct();
            ensure(accepted == 1_000, format!("{accepted}\n{}", sidecar.log()))
        })
        .await;
    };
    let (sampled, ()) = tokio::join!(sampled, flow);
    assert!(sampled.contains("{most,5,"), "the most that was unacked: {sampled}");
    assert!(reconnects(&sidecar).await >= 2, "{}", sidecar.log());
    assert!(app.ledger().accepted_more_than_once().is_empty());
    stop_all(&broker, &group, std::slice::from_mut(&mut sidecar)).await;
}

/// R2: three restarts under 50 messages a second on a classic and on a quorum queue.
async fn three_restarts_lose_nothing(server: &mut OwnServer) {
    let app = App::start().await;
    let database = Database::new(DatabaseKind::Postgres);
    let classic = Broker::at(BrokerKind::RabbitClassic, server.url()).await;
    let quorum = Broker::at(BrokerKind::RabbitQuorum, server.url()).await;
    let queues = [&classic, &quorum];
    let config = format!(
        "{}{}{}{}",
        database.config(),
        classic.config(),
        subscription("classic", &classic, &classic.name, &app.url("/classic"), ""),
        subscription("quorum", &quorum, &quorum.name, &app.url("/quorum"), ""),
    );
    // Killed within minutes of a quorum queue's declaration, RabbitMQ 3.10 forgets that it has a
    // member of it, which it keeps in such a table, and never serves the queue again.
    server.control(&["eval", "[dets:sync(Table) || Table <- dets:all()]."]).await;
    let mut sidecar = Sidecar::start(&config);
    sidecar.ready().await;
    let enough = CancellationToken::new();
    let publishing = queues.map(|queue| {
        let (url, name) = (queue.url().to_owned(), queue.name.clone());
        tokio::spawn(publish_until(url, name, enough.clone()))
    });

    for round in 0..3 {
        let before = app.ledger().accepted_total();
        eventually(PATIENCE, async || {
            let accepted = app.ledger().accepted_total();
            ensure(accepted >= before + 40, format!("{accepted}; log:\n{}", sidecar.log()))
        })
        .await;
        if round == 1 {
            server.stop().await
        } else {
            server.kill().await
        }
        sidecar.readiness(503, "RabbitMQ").await;
        server.restart().await;
        let back = Instant::now();
        for queue in queues {
            let tap = Tap::open(queue).await;
            eventually(PATIENCE, async || {
                let consumers = tap.count().await.1;
                ensure(consumers == 1, format!("{consumers} consumers\n{}", sidecar.log()))
            })
            .await;
            tap.close().await;
        }
        assert!(back.elapsed() < Duration::from_secs(30), "{:?}", back.elapsed());
        sidecar.ready().await;
    }
    enough.cancel();
    for (queue, publishing) in queues.into_iter().zip(publishing) {
        let published = publishing.await.expect("the publisher");
        assert!(published.len() > 100, "only {} were published", published.len());
        eventually(PATIENCE, async || {
            let rows = database.rows(&queue.name).await;
            let missing: Vec<_> = published.difference(&rows).collect();
            ensure(missing.is_empty(), format!("{missing:?} missing; {}", sidecar.log()))
        })
        .await;
        let tap = Tap::open(queue).await;
        tap.counts((0, 1), &sidecar).await;
        tap.close().await;
    }
    // The sidecar lived all the time: what came again was suppressed.
    let twice = app.ledger().accepted_more_than_once();
    assert!(twice.is_empty(), "{twice:?}");
    let status = sidecar.stop().await;
    assert!(status.success(), "{status}:\n{}", sidecar.log());
    for queue in queues {
        assert_eq!(queue.left(&queue.name).await, 0);
    }
}

/// Publishes 50 messages a second, each again until it is confirmed; the ids of them.
async fn publish_until(url: String, queue: String, enough: CancellationToken) -> BTreeSet<String> {
    let mut published = BTreeSet::new();
    let mut connected: Option<(Connection, Arc<Channel>)> = None;
    let mut ticks = interval(20 * MS);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    while !enough.is_cancelled() {
        ticks.tick().await;
        let id = format!("{queue}/{}", published.len());
        loop {
            if connected.is_none() {
                connected = timeout(Duration::from_secs(5), connect(&url)).await.ok().flatten();
            }
            if let Some((_, channel)) = &connected
                && confirmed(channel, &queue, &id).await
            {
                break;
            }
            connected = None;
            sleep(100 * MS).await;
        }
        published.insert(id);
    }
    published
}

async fn connect(url: &str) -> Option<(Connection, Arc<Channel>)> {
    let connection = Connection::connect(url, ConnectionProperties::default()).await.ok()?;
    let channel = connection.create_channel().await.ok()?;
    channel.confirm_select(ConfirmSelectOptions::default()).await.ok()?;
    Some((connection, Arc::new(channel)))
}

async fn confirmed(channel: &Channel, queue: &str, id: &str) -> bool {
    let properties = BasicProperties::default().with_delivery_mode(2).with_message_id(id.into());
    let options = BasicPublishOptions { mandatory: true, ..Default::default() };
    let confirm = async {
        let published =
            channel.basic_publish("".into(), queue.into(), options, id.as_bytes(), properties);
        published.await.ok()?.await.ok()
    };
    let confirm = timeout(Duration::from_secs(5), confirm).await;
    matches!(confirm, Ok(Some(Confirmation::Ack(None))))
}
