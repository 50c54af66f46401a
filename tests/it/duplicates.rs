//! Copies of one message, a database that goes away, processes that die: each message is
//! accepted, and a duplicate is only what was processed before.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use futures::future::join_all;
use inboxd_conformance::app::{Answer, App};
use inboxd_conformance::net::{Act, Direction, Proxy};
use inboxd_conformance::servers::{Kind, OwnServer};
use inboxd_conformance::{ensure, eventually};
use lapin::options::{BasicConsumeOptions, BasicQosOptions};
use lapin::types::FieldTable;

use crate::support::{
    Broker, BrokerKind, Database, DatabaseKind, Message, PATIENCE, Sidecar, all_consume, config,
    stop_all, sum_of,
};

const MS: Duration = Duration::from_millis(1);
const RETRY_SOON: &str = "retry = { initial = \"50ms\", cap = \"200ms\" }";

/// A1: the first copy fails while the second is there already; `prefetch` is RabbitMQ's.
async fn a_copy_waits(kind: BrokerKind, database: DatabaseKind, replicas: usize, prefetch: u32) {
    let app = App::start().await;
    let database = Database::new(database);
    let mut broker = Broker::new(kind).await;
    if kind != BrokerKind::Kafka {
        broker.source_keys = format!("prefetch = {prefetch}");
    }
    let group = broker.name.clone();
    let config = config(&broker, &database, &group, &app.url("/"), RETRY_SOON, "");
    let mut sidecars: Vec<_> = (0..replicas).map(|_| Sidecar::start(&config)).collect();
    all_consume(&broker, &sidecars).await;
    let before = sum_of(&sidecars, "processed").await;
    let what = format!("{kind:?}, {:?}, {replicas} replicas", database.kind);

    app.plan("m1", [Answer::status(500)]);
    app.hold();
    // Partitions that two members of a group of four do not share.
    broker.publish([Message::id("m1").partition(0), Message::id("m1").partition(3)]).await;
    eventually(PATIENCE, async || {
        let mut held = Vec::new();
        for sidecar in &sidecars {
            held.push(sidecar.in_flight().await);
        }
        let each = 2 / replicas as u64;
        let log = sidecars[0].log();
        let state = format!("{what}: {held:?} in flight; log:\n{log}");
        ensure(held.iter().all(|held| *held == each), state)
    })
    .await;
    eventually(PATIENCE, async || ensure(app.ledger().begun_of("m1") == 1, "no POST")).await;
    for sidecar in &sidecars {
        assert_eq!(sidecar.duplicates().await, 0, "a duplicate of what is undecided");
    }
    app.let_go();

    eventually(PATIENCE, async || {
        let processed = sum_of(&sidecars, "processed").await - before;
        let duplicates =
            sum_of(&sidecars, "duplicate").await + sum_of(&sidecars, "duplicate_in_flight").await;
        let state = format!("{what}: {processed} processed, {duplicates} duplicates");
        ensure((processed, duplicates) == (1, 1), state)
    })
    .await;
    let statuses: Vec<_> = app.ledger().posts("m1").iter().map(|post| post.status).collect();
    assert_eq!(statuses, [Some(500), Some(200)]);
    assert!(database.rows(&group).await.contains("m1"));
    stop_all(&broker, &group, &mut sidecars).await;
}

/// A1.
#[tokio::test(flavor = "multi_thread")]
async fn a_copy_of_an_undecided_message_waits_for_its_outcome_in_one_process() {
    tokio::join!(
        a_copy_waits(BrokerKind::RabbitClassic, DatabaseKind::Sqlite, 1, 2),
        a_copy_waits(BrokerKind::Kafka, DatabaseKind::Postgres, 1, 2),
    );
}

/// A1.
#[tokio::test(flavor = "multi_thread")]
async fn a_copy_of_an_undecided_message_waits_for_its_outcome_in_another_process() {
    tokio::join!(
        a_copy_waits(BrokerKind::RabbitQuorum, DatabaseKind::MariaDb, 2, 1),
        a_copy_waits(BrokerKind::Kafka, DatabaseKind::Postgres, 2, 1),
    );
}

/// How a database is away.
#[derive(Debug, Clone, Copy)]
enum Away {
    /// Connections are reset and refused.
    Cut,
    /// Connections stay, and nothing comes through.
    Silent,
    /// SQLite: another process has the whole file.
    Locked,
}

/// A2: away for so long in the middle of twenty messages.
async fn database_away(broker: BrokerKind, database: DatabaseKind, away: Away, time: Duration) {
    let what = format!("{broker:?}, {database:?}, {away:?}, {time:?}");
    let app = App::start().await;
    app.set_default(Answer::status(200).after(50 * MS));
    let database = Database::new(database);
    let mut proxy = None;
    let database = match away {
        Away::Locked => database,
        Away::Cut | Away::Silent => {
            let started = Proxy::start(database.address()).await;
            let through = database.through(started.addr);
            proxy = Some(started);
            through
        }
    };
    let broker = Broker::new(broker).await;
    let group = broker.name.clone();
    let keys = format!("concurrency = 2\n{RETRY_SOON}");
    let config = config(&broker, &database, &group, &app.url("/"), &keys, "");
    let sidecar = Sidecar::start(&config);
    sidecar.ready().await;
    broker.publish((0..20).map(|n| Message::id(format!("m{n}")))).await;
    eventually(PATIENCE, async || {
        ensure(app.ledger().accepted_total() >= 5, format!("{what}: {}", sidecar.log()))
    })
    .await;
    match (&proxy, away) {
        (Some(proxy), Away::Cut) => proxy.cut(),
        (Some(proxy), _) => proxy.black_hole(),
        (None, _) => {
            let mut lock = database.session().await;
            lock.execute("PRAGMA busy_timeout = 20000; BEGIN EXCLUSIVE").await;
            tokio::time::sleep(time).await;
            lock.execute("ROLLBACK").await;
        }
    }
    if let Some(proxy) = proxy {
        tokio::time::sleep(time).await;
        if broker.kind == BrokerKind::Kafka {
            let acked = 20 - broker.left(&group).await as usize;
            let rows = database.rows(&group).await.len();
            assert!(acked <= rows, "{what}: {acked} acked, {rows} rows");
        }
        proxy.heal();
        everything_arrives(&what, &app, &broker, &database, sidecar).await;
    } else {
        everything_arrives(&what, &app, &broker, &database, sidecar).await;
    }
}

async fn everything_arrives(
    what: &str,
    app: &App,
    broker: &Broker,
    database: &Database,
    sidecar: Sidecar,
) {
    let group = &broker.name;
    eventually(PATIENCE, async || {
        let (accepted, rows) = (app.ledger().accepted_distinct(), database.rows(group).await.len());
        let log = sidecar.log();
        ensure((accepted, rows) == (20, 20), format!("{what}: {accepted}, {rows} rows\n{log}"))
    })
    .await;
    let twice = app.ledger().accepted_more_than_once();
    assert!(twice.is_empty(), "{what}: accepted twice: {twice:?}\n{}", sidecar.log());
    assert_eq!(sidecar.duplicates().await, 0, "{what}: all ids are distinct");
    stop_all(broker, group, &mut [sidecar]).await;
}

/// A2; the 120 s of the case are in the engine's tests, in paused time.
#[tokio::test(flavor = "multi_thread")]
async fn everything_arrives_after_the_database_was_away() {
    use {BrokerKind::*, DatabaseKind::*};
    join_all([
        database_away(RabbitClassic, Postgres, Away::Cut, 500 * MS),
        database_away(Kafka, Postgres, Away::Cut, 5_000 * MS),
        database_away(RabbitQuorum, MariaDb, Away::Cut, 5_000 * MS),
        database_away(RabbitClassic, Sqlite, Away::Locked, 5_000 * MS),
    ])
    .await;
}

/// A2.
#[tokio::test(flavor = "multi_thread")]
async fn everything_arrives_after_the_database_was_silent() {
    use {BrokerKind::*, DatabaseKind::*};
    join_all([
        database_away(RabbitClassic, Postgres, Away::Silent, 2_000 * MS),
        database_away(Kafka, MariaDb, Away::Silent, 2_000 * MS),
    ])
    .await;
}

/// A2: the server itself dies and comes back with what it had committed.
#[tokio::test(flavor = "multi_thread")]
async fn everything_arrives_after_the_database_server_was_killed() {
    let mut server = OwnServer::start(Kind::Postgres).await;
    let app = App::start().await;
    app.set_default(Answer::status(200).after(50 * MS));
    let database = Database::at(DatabaseKind::Postgres, server.url());
    let broker = Broker::new(BrokerKind::RabbitClassic).await;
    let keys = format!("concurrency = 2\n{RETRY_SOON}");
    let config = config(&broker, &database, &broker.name, &app.url("/"), &keys, "");
    let sidecar = Sidecar::start(&config);
    sidecar.ready().await;
    broker.publish((0..20).map(|n| Message::id(format!("m{n}")))).await;
    eventually(PATIENCE, async || ensure(app.ledger().accepted_total() >= 5, sidecar.log())).await;
    server.kill().await;
    sidecar.not_ready("database").await;
    server.restart().await;
    everything_arrives("killed", &app, &broker, &database, sidecar).await;
}

/// A database behind a proxy, and one message that goes through it.
struct Cut {
    app: App,
    proxy: Arc<Proxy>,
    database: Database,
    broker: Broker,
    group: String,
    sidecar: Sidecar,
}

impl Cut {
    /// Consumes, with the shortest lease that each database takes.
    async fn start(broker: BrokerKind, database: DatabaseKind) -> Self {
        let app = App::start().await;
        let database = Database::new(database);
        let proxy = Arc::new(Proxy::start(database.address()).await);
        let database = database.through(proxy.addr);
        let mut broker = Broker::new(broker).await;
        if broker.kind == BrokerKind::Kafka {
            broker.source_keys = "commit_interval = \"50ms\"".into();
        }
        let lease = if database.kind == DatabaseKind::MariaDb { 5 } else { 2 };
        let keys = format!("lease = \"{lease}s\"\n{RETRY_SOON}");
        let group = broker.name.clone();
        let sidecar = Sidecar::start(&config(&broker, &database, &group, &app.url("/"), &keys, ""));
        sidecar.ready().await;
        Self { app, proxy, database, broker, group, sidecar }
    }

    /// From the moment the application has `m1`, the database is gone.
    fn cut_when_posted(&self) {
        let proxy = self.proxy.clone();
        self.app.plan_with(move |post| {
            if post.id == "m1" && post.attempt == 1 {
                proxy.cut();
            }
            None
        });
    }

    /// The reply to the commit that records the first POST is lost, and its connection with it;
    /// `then_silent`: nothing is answered afterwards either. True once that has happened.
    fn lose_the_reply_when_posted(&self, then_silent: bool) -> Arc<AtomicBool> {
        let lost = Arc::new(AtomicBool::new(false));
        let (seen, proxy) = (lost.clone(), self.proxy.clone());
        self.app.plan_with(move |post| {
            if post.id == "m1" && post.attempt == 1 {
                let seen = seen.clone();
                // The statement's text is sent, since it is used for the first time.
                let (mut recording, mut committing) = (HashSet::new(), HashSet::new());
                proxy.hook_each(move |connection, direction, bytes| match direction {
                    Direction::ToServer => {
                        let has = |word: &[u8]| bytes.windows(word.len()).any(|at| at == word);
                        if has(b"INSERT") && has(b"inbox_messages") {
                            recording.insert(connection);
                        } else if has(b"COMMIT") && recording.contains(&connection) {
                            committing.insert(connection);
                        }
                        Act::Pass
                    }
                    Direction::ToClient if seen.load(SeqCst) => match then_silent {
                        true => Act::Swallow,
                        false => Act::Pass,
                    },
                    Direction::ToClient if committing.contains(&connection) => {
                        seen.store(true, SeqCst);
                        Act::CutAfter(0)
                    }
                    Direction::ToClient => Act::Pass,
                });
            }
            None
        });
        lost
    }

    async fn accepted(&self, times: usize) {
        eventually(PATIENCE, async || {
            ensure(self.app.ledger().accepted("m1") == times, self.sidecar.log())
        })
        .await;
    }

    /// The row is there, and nothing but it.
    async fn processed(mut self) {
        eventually(PATIENCE, async || {
            let rows = self.database.rows(&self.group).await;
            ensure(rows.contains("m1"), format!("no row; log:\n{}", self.sidecar.log()))
        })
        .await;
        eventually(PATIENCE, async || {
            let held = self.sidecar.in_flight().await;
            ensure(held == 0, format!("{held} in flight; log:\n{}", self.sidecar.log()))
        })
        .await;
        stop_all(&self.broker, &self.group, std::slice::from_mut(&mut self.sidecar)).await;
        assert!(self.database.claims(&self.group).await.is_empty());
        assert!(self.database.dead(&self.group).await.is_empty());
    }
}

/// A3.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_accepted_while_the_database_is_gone_is_recorded_when_it_is_back() {
    let run = async |broker, database| {
        let cut = Cut::start(broker, database).await;
        cut.cut_when_posted();
        cut.broker.publish([Message::id("m1")]).await;
        cut.accepted(1).await;
        // Longer than the interval of offset commits and than a coalesced ack may wait.
        tokio::time::sleep(500 * MS).await;
        assert!(cut.database.rows(&cut.group).await.is_empty());
        assert_eq!(cut.sidecar.outcomes("processed").await, 0);
        if broker == BrokerKind::Kafka {
            assert_eq!(cut.broker.left(&cut.group).await, 1, "acked without a row");
        }
        cut.proxy.heal();
        let app = cut.app.ledger().clone();
        cut.processed().await;
        assert_eq!(app.begun_of("m1"), 1, "the application is not asked again");
    };
    tokio::join!(
        run(BrokerKind::Kafka, DatabaseKind::Postgres),
        run(BrokerKind::RabbitClassic, DatabaseKind::MariaDb),
    );
}

/// A3: the window that a sidecar alone cannot close: the same key says so.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_accepted_and_never_recorded_is_sent_again_with_the_same_key() {
    let run = async |broker, database| {
        let mut cut = Cut::start(broker, database).await;
        cut.cut_when_posted();
        cut.broker.publish([Message::id("m1")]).await;
        cut.accepted(1).await;
        cut.sidecar.kill().await;
        cut.proxy.heal();
        cut.sidecar.start_again();
        cut.accepted(2).await;
        let app = cut.app.ledger().clone();
        cut.processed().await;
        let posts = app.posts("m1");
        assert_eq!(posts.len(), 2);
        assert_eq!(posts[0].header("idempotency-key").as_deref(), Some("\"m1\""));
        assert_eq!(posts[0].header("idempotency-key"), posts[1].header("idempotency-key"));
        assert_eq!(posts[0].body_sha256, posts[1].body_sha256);
        assert_eq!((posts[0].attempt, posts[1].attempt), (1, 2));
    };
    tokio::join!(
        run(BrokerKind::RabbitClassic, DatabaseKind::Postgres),
        run(BrokerKind::Kafka, DatabaseKind::MariaDb),
    );
}

/// A3.
#[tokio::test(flavor = "multi_thread")]
async fn a_commit_whose_reply_was_lost_is_found_and_not_repeated() {
    let run = async |broker, database| {
        let cut = Cut::start(broker, database).await;
        let lost = cut.lose_the_reply_when_posted(false);
        cut.broker.publish([Message::id("m1")]).await;
        cut.accepted(1).await;
        eventually(PATIENCE, async || {
            let processed = cut.sidecar.outcomes("processed").await;
            ensure(processed == 1, format!("not processed; log:\n{}", cut.sidecar.log()))
        })
        .await;
        assert!(lost.load(SeqCst), "no reply was lost");
        assert_eq!(cut.sidecar.outcomes("claim_lost").await, 0);
        let app = cut.app.ledger().clone();
        cut.processed().await;
        assert_eq!(app.begun_of("m1"), 1);
    };
    tokio::join!(
        run(BrokerKind::RabbitClassic, DatabaseKind::Postgres),
        run(BrokerKind::Kafka, DatabaseKind::MariaDb),
    );
}

/// A3: nobody lives to learn of the commit; the next life finds a duplicate.
#[tokio::test(flavor = "multi_thread")]
async fn a_commit_that_nobody_heard_of_makes_the_redelivery_a_duplicate() {
    let run = async |broker, database| {
        let mut cut = Cut::start(broker, database).await;
        let lost = cut.lose_the_reply_when_posted(true);
        cut.broker.publish([Message::id("m1")]).await;
        eventually(PATIENCE, async || ensure(lost.load(SeqCst), cut.sidecar.log())).await;
        cut.sidecar.kill().await;
        cut.proxy.heal();
        assert_eq!(cut.database.rows(&cut.group).await.len(), 1, "the commit had gone through");
        cut.app.plan_with(|_| None);
        cut.sidecar.start_again();
        eventually(PATIENCE, async || {
            let settled = cut.broker.left(&cut.group).await == 0;
            ensure(settled && cut.sidecar.in_flight().await == 0, cut.sidecar.log())
        })
        .await;
        let app = cut.app.ledger().clone();
        cut.processed().await;
        assert_eq!(app.begun_of("m1"), 1);
    };
    tokio::join!(
        run(BrokerKind::RabbitClassic, DatabaseKind::Postgres),
        run(BrokerKind::Kafka, DatabaseKind::MariaDb),
    );
}

/// A4.
#[tokio::test(flavor = "multi_thread")]
async fn members_of_a_batch_have_fates_of_their_own() {
    join_all(DatabaseKind::ALL.map(|kind| async move {
        let app = App::start().await;
        app.plan("m5", [Answer::status(422)]);
        let database = Database::new(kind);
        let broker = Broker::new(BrokerKind::RabbitClassic).await;
        let group = broker.name.clone();
        let config = config(&broker, &database, &group, &app.url("/"), RETRY_SOON, "");
        let mut sidecar = Sidecar::start(&config);
        broker.publish([Message::id("m7")]).await;
        eventually(PATIENCE, async || {
            ensure(sidecar.outcomes("processed").await == 1, sidecar.log())
        })
        .await;
        stop_all(&broker, &group, std::slice::from_mut(&mut sidecar)).await;
        app.ledger().clear();

        // All are there when consuming begins: they are claimed together.
        let ids = [1, 2, 3, 4, 5, 6, 7, 8, 3, 9, 10];
        broker.publish(ids.map(|n| Message::id(format!("m{n}")))).await;
        sidecar.start_again();
        eventually(PATIENCE, async || {
            let processed = sidecar.outcomes("processed").await;
            let (duplicates, dead) =
                (sidecar.duplicates().await, sidecar.outcomes("dead_lettered").await);
            let state = format!("{kind:?}: {processed}, {duplicates} duplicates, {dead} dead");
            ensure(
                (processed, duplicates, dead) == (8, 2, 1),
                format!("{state}; log:\n{}", sidecar.log()),
            )
        })
        .await;
        assert_eq!(app.ledger().begun(), 9, "{kind:?}: one POST for each id that is not known");
        assert_eq!(app.ledger().begun_of("m7"), 0);
        assert_eq!(database.dead(&group).await.into_keys().collect::<Vec<_>>(), ["m5"]);
        assert_eq!(database.rows(&group).await.len(), 9);
        stop_all(&broker, &group, &mut [sidecar]).await;
    }))
    .await;
}

/// A5.
#[tokio::test(flavor = "multi_thread")]
async fn the_redelivered_flag_decides_nothing() {
    let app = App::start().await;
    let database = Database::new(DatabaseKind::Sqlite);
    let broker = Broker::new(BrokerKind::RabbitClassic).await;
    let group = broker.name.clone();
    // True on what nobody has handled: a consumer took it and went away.
    broker.publish([Message::id("m1")]).await;
    let connection = broker.amqp().await;
    let channel = connection.create_channel().await.expect("a channel");
    channel.basic_qos(1, BasicQosOptions::default()).await.expect("a prefetch");
    let mut consumer = channel
        .basic_consume(
            group.as_str().into(),
            "goes-away".into(),
            BasicConsumeOptions::default(),
            FieldTable::default(),
        )
        .await
        .expect("a consumer");
    let taken = futures::StreamExt::next(&mut consumer).await.expect("taken").expect("a delivery");
    assert!(!taken.redelivered);
    connection.close(0, "".into()).await.expect("closed");

    let mut sidecar =
        Sidecar::start(&config(&broker, &database, &group, &app.url("/"), RETRY_SOON, ""));
    eventually(PATIENCE, async || ensure(sidecar.outcomes("processed").await == 1, sidecar.log()))
        .await;
    let posts = app.ledger().posts("m1");
    assert_eq!(posts.len(), 1);
    assert_eq!(posts[0].header("inbox-redelivered").as_deref(), Some("true"));

    // False on what was handled: it is published again.
    broker.publish([Message::id("m1"), Message::id("m2")]).await;
    eventually(PATIENCE, async || {
        let duplicates = sidecar.duplicates().await;
        ensure(duplicates == 1 && app.ledger().accepted("m2") == 1, sidecar.log())
    })
    .await;
    let fresh = app.ledger().posts("m2");
    assert_eq!(fresh[0].header("inbox-redelivered").as_deref(), Some("false"));
    assert_eq!(app.ledger().begun_of("m1"), 1);
    stop_all(&broker, &group, std::slice::from_mut(&mut sidecar)).await;
}

/// A6.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_killed_node_held_reaches_the_application_through_another() {
    let run = async |kind, database, keys: &str| {
        let app = App::start().await;
        let database = Database::new(database);
        let broker = Broker::new(kind).await.with_source_keys(keys);
        let group = broker.name.clone();
        let lease = if database.kind == DatabaseKind::MariaDb { 5 } else { 2 };
        let subscription = format!("lease = \"{lease}s\"\nconcurrency = 40\n{RETRY_SOON}");
        let config = config(&broker, &database, &group, &app.url("/"), &subscription, "");
        let mut sidecars = vec![Sidecar::start(&config), Sidecar::start(&config)];
        all_consume(&broker, &sidecars).await;
        app.hold();
        broker.publish((0..40).map(|n| Message::id(format!("m{n}")).partition(n % 4))).await;
        eventually(PATIENCE, async || {
            let held = [sidecars[0].in_flight().await, sidecars[1].in_flight().await];
            let begun = app.ledger().open().len();
            ensure(held[0] > 0 && held[1] > 0 && begun == 40, format!("{held:?}, {begun} begun"))
        })
        .await;
        let mut killed = sidecars.remove(0);
        killed.kill().await;
        app.let_go();
        eventually(PATIENCE, async || {
            let rows = database.rows(&group).await;
            let missing: Vec<_> =
                (0..40).map(|n| format!("m{n}")).filter(|id| !rows.contains(id)).collect();
            let log = sidecars[0].log();
            ensure(missing.is_empty(), format!("{missing:?} missing; log:\n{log}"))
        })
        .await;
        let accepted = app.ledger().accepted_ids();
        assert!((0..40).all(|n| accepted.contains(&format!("m{n}"))));
        stop_all(&broker, &group, &mut sidecars).await;
    };
    tokio::join!(
        run(BrokerKind::RabbitClassic, DatabaseKind::Postgres, "prefetch = 200"),
        run(BrokerKind::Kafka, DatabaseKind::MariaDb, ""),
    );
}
