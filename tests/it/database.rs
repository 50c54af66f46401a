//! What a database does to those who use it: locks, deadlocks, time limits, a server that
//! turns read-only. Nothing of it costs a message or makes one of two.

use std::time::Duration;

use futures::future::join_all;
use inboxd_conformance::app::{Answer, App};
use inboxd_conformance::servers::{Kind, OwnServer};
use inboxd_conformance::{ensure, eventually};
use tokio_util::sync::CancellationToken;

use crate::support::{
    Broker, BrokerKind, Database, DatabaseKind, Message, PATIENCE, Session, Sidecar, all_consume,
    config, stop_all,
};

const MS: Duration = Duration::from_millis(1);
const RETRY_SOON: &str = "retry = { initial = \"50ms\", cap = \"200ms\" }";

fn ids(range: std::ops::Range<usize>) -> impl Iterator<Item = Message> {
    range.map(|n| Message::id(format!("m{n}")))
}

/// D1.
#[tokio::test(flavor = "multi_thread")]
async fn another_writer_of_the_sqlite_file_fails_no_message() {
    const COUNT: usize = 300;
    let app = App::start().await;
    app.set_default(Answer::status(200).after(5 * MS));
    let database = Database::new(DatabaseKind::Sqlite);
    let broker = Broker::new(BrokerKind::RabbitClassic).await;
    let group = broker.name.clone();
    let keys = format!("concurrency = 16\n{RETRY_SOON}");
    let sidecar = Sidecar::start(&config(&broker, &database, &group, &app.url("/"), &keys, ""));
    sidecar.ready().await;

    // This process is another one for SQLite.
    let mut writer = database.session().await;
    writer.execute("PRAGMA busy_timeout = 20000").await;
    let done = CancellationToken::new();
    let stop = done.clone();
    let writing = tokio::spawn(async move {
        let mut held = 0;
        while !stop.is_cancelled() {
            writer.execute("BEGIN IMMEDIATE").await;
            tokio::time::sleep(200 * MS).await;
            writer.execute("COMMIT").await;
            held += 1;
            tokio::time::sleep(100 * MS).await;
        }
        held
    });
    // In portions, so that the load lasts for some rounds of the lock.
    for part in 0..10 {
        broker.publish(ids(part * 30..(part + 1) * 30)).await;
        tokio::time::sleep(100 * MS).await;
    }
    eventually(PATIENCE, async || {
        let processed = sidecar.outcomes("processed").await;
        ensure(processed == COUNT as u64, format!("{processed}; log:\n{}", sidecar.log()))
    })
    .await;
    done.cancel();
    let held = writing.await.expect("the writer");
    assert!(held >= 3, "the lock was held {held} times");
    assert_eq!(app.ledger().begun(), COUNT, "each was forwarded once");
    assert_eq!(database.rows(&group).await.len(), COUNT);
    assert!(database.dead(&group).await.is_empty());
    assert_eq!(sidecar.outcomes("released").await, 0);
    assert!(!sidecar.log().contains("ERROR"), "{}", sidecar.log());
    stop_all(&broker, &group, &mut [sidecar]).await;
}

/// D2: the row is written by somebody else, in a transaction that ends after the POST.
async fn an_open_row(broker: BrokerKind, database: DatabaseKind, end: &str) {
    let what = format!("{database:?}, {end}");
    let app = App::start().await;
    let database = Database::new(database);
    let broker = Broker::new(broker).await;
    let group = broker.name.clone();
    let config = config(&broker, &database, &group, &app.url("/"), RETRY_SOON, "");
    let mut sidecar = Sidecar::start(&config);
    sidecar.ready().await;
    let mut other = database.session().await;
    let table = database.table("inbox_messages");
    other
        .execute(&format!(
            "BEGIN; INSERT INTO {table} (consumer_id, message_id) VALUES ('{group}', 'm1')"
        ))
        .await;
    broker.publish(ids(0..10)).await;
    eventually(PATIENCE, async || {
        let processed = sidecar.outcomes("processed").await;
        let posted = app.ledger().accepted("m1");
        let state = format!("{what}: {processed} processed, m1 posted {posted} times");
        ensure((processed, posted) == (9, 1), format!("{state}; log:\n{}", sidecar.log()))
    })
    .await;
    // Further ones flow too while its completion waits for the lock again and again.
    broker.publish(ids(10..20)).await;
    eventually(PATIENCE, async || {
        let processed = sidecar.outcomes("processed").await;
        ensure(processed == 19, format!("{what}: {processed}; log:\n{}", sidecar.log()))
    })
    .await;
    assert_eq!(sidecar.duplicates().await, 0, "{what}: nobody knows yet");
    other.execute(end).await;
    let expected = if end == "COMMIT" { (19, 1) } else { (20, 0) };
    eventually(PATIENCE, async || {
        let found = (sidecar.outcomes("processed").await, sidecar.duplicates().await);
        ensure(found == expected, format!("{what}: {found:?}; log:\n{}", sidecar.log()))
    })
    .await;
    assert_eq!(app.ledger().begun_of("m1"), 1, "{what}");
    assert!(database.dead(&group).await.is_empty(), "{what}");
    assert_eq!(database.rows(&group).await.len(), 20, "{what}");
    stop_all(&broker, &group, std::slice::from_mut(&mut sidecar)).await;
    assert!(database.claims(&group).await.is_empty(), "{what}");
}

/// D2.
#[tokio::test(flavor = "multi_thread")]
async fn a_row_of_another_open_transaction_holds_up_its_message_alone() {
    use {BrokerKind::*, DatabaseKind::*};
    tokio::join!(
        an_open_row(RabbitClassic, Postgres, "COMMIT"),
        an_open_row(Kafka, Postgres, "ROLLBACK"),
        an_open_row(Kafka, MariaDb, "COMMIT"),
        an_open_row(RabbitClassic, MariaDb, "ROLLBACK"),
    );
}

/// D3: many ids, three copies each, three replicas; the first forward of each id fails.
#[tokio::test(flavor = "multi_thread")]
async fn replicas_that_contend_for_the_same_ids_make_one_row_of_each() {
    const IDS: usize = 60;
    let run = async |kind: DatabaseKind| {
        let app = App::start().await;
        app.plan_with(|post| {
            (post.attempt == 1).then(|| Answer::status(500).after(Duration::from_millis(20)))
        });
        let database = Database::new(kind);
        let broker = Broker::new(BrokerKind::RabbitQuorum).await.with_source_keys("prefetch = 24");
        let group = broker.name.clone();
        let config = config(&broker, &database, &group, &app.url("/"), RETRY_SOON, "");
        let mut sidecars: Vec<_> = (0..3).map(|_| Sidecar::start(&config)).collect();
        all_consume(&broker, &sidecars).await;
        let copies = (0..IDS).flat_map(|n| [(); 3].map(|()| Message::id(format!("m{n}"))));
        broker.publish(copies).await;
        eventually(PATIENCE, async || {
            let rows = database.rows(&group).await;
            let rows = rows.iter().filter(|id| id.starts_with('m')).count();
            let parked = database.parked(&group).await;
            let mut open = broker.left(&group).await;
            for sidecar in &sidecars {
                open += sidecar.in_flight().await;
            }
            let logs: String = sidecars.iter().map(Sidecar::log).collect();
            ensure(
                rows == IDS && parked.is_empty() && open == 0,
                format!("{kind:?}: {rows} rows, parked {parked:?}, {open} open; logs:\n{logs}"),
            )
        })
        .await;
        let twice = app.ledger().accepted_more_than_once();
        assert!(twice.is_empty(), "{kind:?}: {twice:?}");
        assert!(database.dead(&group).await.is_empty(), "{kind:?}");
        for sidecar in &sidecars {
            assert!(!sidecar.log().contains("ERROR"), "{kind:?}:\n{}", sidecar.log());
        }
        stop_all(&broker, &group, &mut sidecars).await;
        assert!(database.claims(&group).await.is_empty(), "{kind:?}");
    };
    tokio::join!(run(DatabaseKind::MariaDb), run(DatabaseKind::Postgres));
}

/// What a transaction that spans the POST would show: one that is open and does nothing.
async fn idle_transactions(session: &mut Session, database: &str) -> i64 {
    let sql = match session {
        Session::Postgres(_) => format!(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = '{database}' \
             AND state LIKE 'idle in transaction%' AND state_change < now() - interval '500 ms'"
        ),
        Session::MariaDb(_) => format!(
            "SELECT count(*) FROM information_schema.innodb_trx AS open \
             JOIN information_schema.processlist AS client ON client.id = open.trx_mysql_thread_id \
             WHERE client.db = '{database}' AND open.trx_started < now() - INTERVAL 2 SECOND"
        ),
        // The write lock can be had. Whoever has it for a moment is waited for.
        Session::Sqlite(_) => {
            session.execute("PRAGMA busy_timeout = 500; BEGIN IMMEDIATE; ROLLBACK").await;
            return 0;
        }
    };
    session.number(&sql).await
}

/// D4.
#[tokio::test(flavor = "multi_thread")]
async fn no_transaction_is_open_while_the_application_works() {
    join_all(DatabaseKind::ALL.map(|kind| async move {
        let app = App::start().await;
        app.set_default(Answer::status(200).after(4_000 * MS));
        let (database, name) = Database::own(kind).await;
        if kind == DatabaseKind::Postgres {
            let limit = "SET idle_in_transaction_session_timeout = '1s'";
            database.session().await.execute(&format!("ALTER DATABASE {name} {limit}")).await;
        }
        let broker = Broker::new(BrokerKind::RabbitClassic).await;
        let group = broker.name.clone();
        let mut sidecar =
            Sidecar::start(&config(&broker, &database, &group, &app.url("/"), RETRY_SOON, ""));
        sidecar.ready().await;
        let mut session = database.session().await;
        broker.publish(ids(0..4)).await;
        eventually(PATIENCE, async || ensure(app.ledger().begun() == 4, sidecar.log())).await;
        while app.ledger().answered_count() == 0 {
            let idle = idle_transactions(&mut session, &name).await;
            assert_eq!(idle, 0, "{kind:?}: a transaction is open across the POST");
            tokio::time::sleep(100 * MS).await;
        }
        eventually(PATIENCE, async || {
            ensure(sidecar.outcomes("processed").await == 4, sidecar.log())
        })
        .await;
        assert_eq!(app.ledger().begun(), 4, "{kind:?}");
        let failed = sidecar.metric("inboxd_store_call_failures_total", &[]).await;
        assert_eq!(failed, 0.0, "{kind:?}: {}", sidecar.log());
        stop_all(&broker, &group, std::slice::from_mut(&mut sidecar)).await;
    }))
    .await;
}

/// A server that turned read-only under eleven messages: one at the application, ten to come.
struct ReadOnly {
    app: App,
    database: Database,
    broker: Broker,
    sidecar: Sidecar,
}

impl ReadOnly {
    /// Consumes; one message has been processed and another is at the application.
    async fn start(database: Database) -> Self {
        let app = App::start().await;
        let broker =
            Broker::new(BrokerKind::Kafka).await.with_source_keys("commit_interval = \"50ms\"");
        let config = config(&broker, &database, &broker.name, &app.url("/"), RETRY_SOON, "");
        let sidecar = Sidecar::start(&config);
        sidecar.ready().await;
        broker.publish(ids(0..1)).await;
        let one = Self { app, database, broker, sidecar };
        eventually(PATIENCE, async || {
            let left = one.broker.left(&one.broker.name).await;
            let processed = one.sidecar.outcomes("processed").await;
            let state = format!("{processed} processed, {left} left; {}", one.sidecar.log());
            ensure((processed, left) == (1, 0), state)
        })
        .await;
        one.app.hold();
        one.broker.publish(ids(1..2)).await;
        eventually(PATIENCE, async || ensure(one.app.ledger().begun() == 2, one.sidecar.log()))
            .await;
        one
    }

    /// While nothing can be written, nothing is forwarded, recorded or acked.
    async fn nothing_is_acked(&self) {
        // Open sessions learn of it when they are asked next, not at once.
        self.sidecar.not_ready("database").await;
        self.app.let_go();
        self.broker.publish(ids(2..12)).await;
        // Some rounds of trying again.
        tokio::time::sleep(2_000 * MS).await;
        assert_eq!(self.sidecar.outcomes("processed").await, 1, "{}", self.sidecar.log());
        assert_eq!(self.database.rows(&self.broker.name).await.len(), 1);
        assert_eq!(self.broker.left(&self.broker.name).await, 11);
        assert_eq!(self.app.ledger().begun(), 2, "nothing is forwarded without a claim");
        assert!(self.sidecar.get("/livez").await.is_some_and(|(status, _)| status == 200));
    }

    /// Everything arrives, with nobody's help.
    async fn recovers(self) {
        let Self { app, database, broker, sidecar } = self;
        eventually(PATIENCE, async || {
            let processed = sidecar.outcomes("processed").await;
            ensure(processed == 12, format!("{processed}; log:\n{}", sidecar.log()))
        })
        .await;
        sidecar.ready().await;
        assert_eq!(app.ledger().begun(), 12, "each was forwarded once");
        assert_eq!(database.rows(&broker.name).await.len(), 12);
        assert!(database.dead(&broker.name).await.is_empty());
        stop_all(&broker, &broker.name, &mut [sidecar]).await;
    }
}

/// D5: as behind a load balancer, sessions end, and those that follow reach a standby. When the
/// primary is back, sessions with the standby have to be given up.
#[tokio::test(flavor = "multi_thread")]
async fn a_fail_over_to_a_read_only_postgres_is_survived_and_left_again() {
    let (database, name) = Database::own(DatabaseKind::Postgres).await;
    let mut admin = Database::new(DatabaseKind::Postgres).session().await;
    let case = ReadOnly::start(database).await;
    admin
        .execute(&format!(
            "ALTER DATABASE {name} SET default_transaction_read_only = on; \
             SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'"
        ))
        .await;
    case.nothing_is_acked().await;
    admin.execute(&format!("ALTER DATABASE {name} RESET default_transaction_read_only")).await;
    case.recovers().await;
}

/// D5: demoted and promoted under open sessions.
#[tokio::test(flavor = "multi_thread")]
async fn a_postgres_that_is_read_only_for_a_while_is_waited_for() {
    let server = OwnServer::start(Kind::Postgres).await;
    let database = Database::at(DatabaseKind::Postgres, server.url());
    let mut admin = database.session().await;
    let case = ReadOnly::start(database).await;
    // ALTER SYSTEM runs in no transaction block.
    admin.execute("ALTER SYSTEM SET default_transaction_read_only = on").await;
    admin.execute("SELECT pg_reload_conf()").await;
    case.nothing_is_acked().await;
    admin.execute("ALTER SYSTEM RESET default_transaction_read_only").await;
    admin.execute("SELECT pg_reload_conf()").await;
    case.recovers().await;
}

/// D5.
#[tokio::test(flavor = "multi_thread")]
async fn a_mariadb_that_is_read_only_for_a_while_is_waited_for() {
    let server = OwnServer::start(Kind::MySql).await;
    // The administrator may write all the same; the sidecar's user may not.
    let mut admin = Database::at(DatabaseKind::MariaDb, server.url()).session().await;
    let mut url = url::Url::parse(server.url()).expect("a URL");
    let catalog = url.path().trim_start_matches('/').to_owned();
    admin
        .execute(&format!(
            "CREATE USER inbox@'%' IDENTIFIED BY 'inbox'; GRANT ALL ON {catalog}.* TO inbox@'%'"
        ))
        .await;
    url.set_username("inbox").expect("a user");
    url.set_password(Some("inbox")).expect("a password");
    let case = ReadOnly::start(Database::at(DatabaseKind::MariaDb, url.as_str())).await;
    admin.execute("SET GLOBAL read_only = 1").await;
    case.nothing_is_acked().await;
    admin.execute("SET GLOBAL read_only = 0").await;
    case.recovers().await;
}

/// D6: also in another life, and where the rows were written by another replica.
#[tokio::test(flavor = "multi_thread")]
async fn duplicates_are_duplicates_on_every_database() {
    join_all(DatabaseKind::ALL.map(|kind| async move {
        let app = App::start().await;
        let database = Database::new(kind);
        let broker = Broker::new(BrokerKind::RabbitClassic).await;
        let group = broker.name.clone();
        let config = config(&broker, &database, &group, &app.url("/"), RETRY_SOON, "");
        let mut sidecar = Sidecar::start(&config);
        broker.publish(ids(0..10)).await;
        eventually(PATIENCE, async || {
            ensure(sidecar.outcomes("processed").await == 10, sidecar.log())
        })
        .await;
        for life in 1..=2 {
            for round in 1..=2 {
                broker.publish(ids(0..10)).await;
                eventually(PATIENCE, async || {
                    let duplicates = sidecar.outcomes("duplicate").await;
                    let state = format!("{kind:?}: life {life}: {duplicates}");
                    ensure(duplicates == round * 10, format!("{state}\n{}", sidecar.log()))
                })
                .await;
            }
            stop_all(&broker, &group, std::slice::from_mut(&mut sidecar)).await;
            if life == 1 {
                sidecar.start_again();
            }
        }
        assert_eq!(app.ledger().begun(), 10, "{kind:?}");
        assert_eq!(database.rows(&group).await.len(), 10, "{kind:?}");
        assert!(!sidecar.log().contains("ERROR"), "{kind:?}:\n{}", sidecar.log());
    }))
    .await;
}
