//! On a server of the test's own: settings, failover, restart, and counting statements.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use inboxd_conformance::eventually;
use inboxd_conformance::servers::{Kind, OwnServer};
use inboxd_contract::{
    Actor, ClaimAnswer, ClaimRequest, Completion, DeadLetter, DeadReason, Envelope, ErrorClass,
    InboxStore, Origin, Parking, Release, Replay, Reschedule, Settled, StoreError, Unpark,
};
use inboxd_mysql::{MysqlConfig, MysqlStore};
use secrecy::SecretString;
use sqlx::Row as _;

use crate::harness::Database;
use crate::parking::{arrival, asking, lane, take};
use crate::short::{claim, complete, completion, key, new_claim};

/// What a server may need to come back, on a busy machine.
const RECOVERY: Duration = Duration::from_secs(60);

async fn refused(config: MysqlConfig) -> StoreError {
    let error = MysqlStore::connect(config).await.expect_err("refused");
    assert_eq!(error.class, ErrorClass::Permanent, "{error}: {:?}", error.source);
    error
}

fn told(error: StoreError) -> String {
    format!("{error}: {:?}", error.source)
}

#[tokio::test]
async fn a_server_that_may_forget_commits_is_refused_unless_allowed() {
    let server = OwnServer::start_with(Kind::MySql, "max_allowed_packet=1M").await;
    let database = Database::on(server.url()).await;
    database.admin("SET GLOBAL innodb_flush_log_at_trx_commit = 2").await;
    let error = refused(database.config()).await.to_string();
    assert!(error.contains("innodb_flush_log_at_trx_commit = 2"), "{error}");
    assert!(error.contains("allow_weak_durability"), "{error}");

    let config = MysqlConfig { allow_weak_durability: true, ..database.config() };
    let store = MysqlStore::connect(config).await.expect("allowed");
    assert!(store.describe().contains("may lose"), "{}", store.describe());
    store.close().await;

    database.admin("SET GLOBAL innodb_flush_log_at_trx_commit = 1").await;
    let short = MysqlConfig { lease: Duration::from_secs(4), ..database.config() };
    assert!(refused(short).await.to_string().contains("at least 5s"));
    let missing = MysqlConfig { database: Some(String::from("nowhere")), ..database.config() };
    refused(missing).await;

    let store = database.open().await;
    body_limits_follow_the_packet_size(&store).await;
    store.close().await;
}

/// A dead letter that needs no claim, with a body of so many bytes.
fn letter(id: &str, bytes: u64) -> DeadLetter {
    DeadLetter {
        key: key(id),
        token: None,
        subscription: "orders".into(),
        lane: None,
        lane_id: None,
        first_ago: Default::default(),
        envelope: Arc::new(Envelope::new(
            Origin::Memory { stream: "orders".into(), position: 1 },
            Some(Bytes::from(vec![0xff; usize::try_from(bytes).expect("fits")])),
        )),
        body_kept: true,
        fingerprint: None,
        attempts: 1,
        last_status: None,
        last_error: None,
        reason: DeadReason::Refused,
    }
}

/// The server was started with a packet of 1 MiB.
async fn body_limits_follow_the_packet_size(store: &MysqlStore) {
    let largest = store.limits().body_bytes_max;
    assert!(largest < 1_024 * 1_024, "{largest}");
    let letters = [letter("fits", largest), letter("does not", 1_024 * 1_024), letter("small", 1)];
    let mut answers = store.dead_letter(&letters).await;
    assert_eq!(answers.remove(0).expect("the limit is what fits"), Settled::Done);
    let error = answers.remove(0).expect_err("more than a packet");
    assert_eq!(error.class, ErrorClass::Permanent);
    assert!(error.to_string().contains("max_allowed_packet"), "{error}");
    assert_eq!(answers.remove(0).expect("the others go on"), Settled::Done);
    let copies = store.parked(&key("fits")).await.expect("read");
    assert_eq!(copies[0].envelope.body.as_ref().map(Bytes::len), usize::try_from(largest).ok());

    // A thousand members take several statements.
    let claims: Vec<_> =
        (0..1_000).map(|id| new_claim(&format!("{id}-{}", "x".repeat(490)))).collect();
    let requests = crate::short::requests(&claims);
    let owner = crate::short::owner("owner");
    for answer in store.claim(&owner, crate::short::LEASE, &requests).await {
        assert_eq!(answer.expect("fits"), ClaimAnswer::Fresh { attempts: 1 });
    }
    let completions: Vec<_> = claims.iter().map(completion).collect();
    for answer in store.complete(&completions).await {
        assert_eq!(answer.expect("fits"), Settled::Done);
    }
}

/// A user that `read_only` binds, unlike root.
async fn as_application(server: &OwnServer, database: &Database) -> MysqlConfig {
    database.admin("CREATE USER app@'127.0.0.1' IDENTIFIED BY 'secret'").await;
    database.admin(&format!("GRANT ALL ON {}.* TO app@'127.0.0.1'", database.name)).await;
    let url = server.url().replacen("root@", "app:secret@", 1);
    assert!(url.contains("app:secret@"), "the own server's user is root");
    MysqlConfig { url: SecretString::from(url), ..database.config() }
}

#[tokio::test]
async fn a_server_that_turns_read_only_or_dies_is_waited_for() {
    let mut server = OwnServer::start(Kind::MySql).await;
    let database = Database::on(server.url()).await;
    let store = MysqlStore::connect(as_application(&server, &database).await).await.expect("ok");
    let held = new_claim("m");
    assert!(claim(&store, &held).await.expect("answered").is_held());

    database.admin("SET GLOBAL read_only = 1").await;
    let error = complete(&store, &held).await.expect_err("read-only");
    assert!(error.is_transient(), "{}", told(error));
    let error = claim(&store, &new_claim("n")).await.expect_err("read-only");
    assert!(error.is_transient(), "{}", told(error));
    let error = store.ping().await.expect_err("it takes no writes");
    assert!(error.is_transient(), "{}", told(error));
    let looks = store.look(&[key("m")]).await.expect("reading works");
    assert_eq!(looks[0].processed, None, "nothing was recorded");
    database.admin("SET GLOBAL read_only = 0").await;
    store.ping().await.expect("it takes writes again");
    assert_eq!(complete(&store, &held).await.expect("answered"), Settled::Done);

    let held = new_claim("over a crash");
    assert!(claim(&store, &held).await.expect("answered").is_held());
    server.kill().await;
    server.restart().await;
    let settled = eventually(RECOVERY, async || match complete(&store, &held).await {
        Ok(settled) => Ok(settled),
        Err(error) => {
            assert!(error.is_transient(), "{}", told(error));
            Err("not back yet")
        }
    })
    .await;
    assert_eq!(settled, Settled::Done, "the claim was committed before the crash");
    store.close().await;
}

#[tokio::test]
async fn a_server_that_does_not_answer_is_given_up_and_used_again_when_it_does() {
    let server = OwnServer::start(Kind::MySql).await;
    let database = Database::on(server.url()).await;
    let store = database.open().await;
    let held = new_claim("m");
    assert!(claim(&store, &held).await.expect("answered").is_held());

    server.pause().await;
    let renewals = [held.clone()];
    let calls = async {
        tokio::join!(complete(&store, &held), store.renew(crate::short::LEASE, &renewals))
    };
    let (completed, renewed) =
        tokio::time::timeout(RECOVERY, calls).await.expect("no call waits for ever");
    server.resume().await;
    let error = completed.expect_err("not answered");
    assert!(error.is_transient(), "{}", told(error));
    assert!(renewed.expect_err("not answered").is_transient());

    // What was sent may have been done after all: then there is no claim any more, but a row.
    let settled = eventually(RECOVERY, async || complete(&store, &held).await).await;
    match settled {
        Settled::Done => {}
        Settled::Lost(look) if look.processed.is_some() => {}
        other => panic!("neither done now nor before: {other:?}"),
    }
    store.close().await;
}

/// Every row of the table in docs/store-statements.md.
#[tokio::test]
async fn one_message_costs_one_claim_and_one_completion() {
    let server = OwnServer::start(Kind::MySql).await;
    let database = Database::on(server.url()).await;
    let config = MysqlConfig { pool_max: 1, ..as_application(&server, &database).await };
    let store = MysqlStore::connect(config).await.expect("connected");
    database.admin("SET GLOBAL log_output = 'TABLE'").await;
    database.admin("SET GLOBAL general_log = 1").await;
    let spent = Spent { database: &database };

    let held = new_claim("m");
    spent.by(claim(&store, &held), &["INSERT INTO", "SELECT 0,"], 4).await;
    let find_and_drop = ["SELECT c.consumer_id,", "DELETE c", "INSERT INTO"];
    spent.by(complete(&store, &held), &find_and_drop, 5).await;
    spent.by(claim(&store, &new_claim("m")), &["INSERT INTO", "SELECT 0,", "DELETE c"], 5).await;
    spent.by(complete(&store, &held), &["SELECT c.consumer_id,", "SELECT 0,"], 4).await;

    let held = new_claim("n");
    assert!(claim(&store, &held).await.expect("answered").is_held());
    let one = std::slice::from_ref(&held);
    spent.by(store.count_attempts(one), &["SELECT c.consumer_id,", "UPDATE inbox_claims"], 4).await;
    let renewal = store.renew(crate::short::LEASE, one);
    spent.by(renewal, &["SELECT c.consumer_id,", "UPDATE inbox_claims"], 4).await;
    let letters = [DeadLetter { token: Some(held.token), ..letter("n", 1) }];
    spent.by(store.dead_letter(&letters), &find_and_drop, 5).await;
    let again = new_claim("n");
    assert!(claim(&store, &again).await.expect("answered").is_held());
    let completions = [Completion { supersedes_dead: true, ..completion(&again) }];
    let and_letter = [&find_and_drop[..], &["DELETE p"]].concat();
    spent.by(store.complete(&completions), &and_letter, 6).await;

    let held = new_claim("o");
    assert!(claim(&store, &held).await.expect("answered").is_held());
    let releases = [Release { claim: held, attempt_back: true }];
    spent.by(store.release(&releases), &["SELECT c.consumer_id,", "UPDATE inbox_claims"], 4).await;
    parking_costs(&store, &spent).await;
    database.admin("SET GLOBAL general_log = 0").await;
    crate::parking::rows_behind_a_head_cost_a_take_nothing(&database, &store).await;
    store.close().await;
}

/// The rows of parking, of the same table.
async fn parking_costs(store: &MysqlStore, spent: &Spent<'_>) {
    let lane_id = Some(lane(1));
    let held = new_claim("p");
    let request =
        ClaimRequest { lane_id, ..crate::short::requests(std::slice::from_ref(&held)).remove(0) };
    let owner = crate::short::owner("owner");
    let requests = [request];
    let claimed = store.claim(&owner, crate::short::LEASE, &requests);
    spent.by(claimed, &["INSERT INTO", "SELECT 0,"], 4).await;
    let parkings = [Parking { claim: held, copy: arrival("p", None).copy }];
    let find_and_drop = ["SELECT c.consumer_id,", "DELETE c"];
    let statements = [&find_and_drop[..], &["DELETE p", "INSERT INTO"]].concat();
    spent.by(store.park(&parkings), &statements, 6).await;
    let again = new_claim("p");
    let freed = ["INSERT INTO", "SELECT 0,", "UPDATE inbox_claims"];
    spent.by(claim(store, &again), &freed, 5).await;

    let request = asking(1, lane(0));
    let finding = ["SELECT p.lane_id", "SELECT p.seq,", "SELECT p.seq,"];
    let taking =
        ["SELECT p.seq,", "SELECT c.consumer_id,", "INSERT INTO", "SELECT p.subscription,"];
    let mut taken = Vec::new();
    let take = async { taken.push(take(store, &request).await.rows.remove(0)) };
    spent.by_transactions(take, &[&finding, &taking], 11).await;
    let row = taken.remove(0);
    let reschedules = [Reschedule {
        claim: row.claim,
        seq: row.seq,
        attempt_back: false,
        delay: Duration::ZERO,
        last_status: None,
        last_error: None,
    }];
    let later = [&find_and_drop[..], &["UPDATE inbox_parked"]].concat();
    spent.by(store.reschedule(&reschedules), &later, 5).await;
    let row = crate::parking::take(store, &request).await.rows.remove(0);
    let completions = [Completion { parked: Some(row.seq), ..completion(&row.claim) }];
    let and_row = [&find_and_drop[..], &["INSERT INTO", "DELETE p"]].concat();
    spent.by(store.complete(&completions), &and_row, 6).await;

    let arrivals = [arrival("q", None), arrival("r", None)];
    spent.by(store.arrive(&arrivals), &["SELECT 0,", "INSERT INTO"], 4).await;
    let rows = crate::parking::take(store, &asking(2, lane(0))).await.rows;
    let unparks = [Unpark { claim: rows[0].claim.clone(), seq: rows[0].seq }];
    let gone = [&find_and_drop[..], &["DELETE p"]].concat();
    spent.by(store.unpark(&unparks), &gone, 5).await;
    let id = rows[1].claim.key.message_id.to_string();
    let letters = [DeadLetter { token: Some(rows[1].claim.token), ..letter(&id, 1) }];
    let in_place = [&find_and_drop[..], &["INSERT INTO"]].concat();
    spent.by(store.dead_letter(&letters), &in_place, 5).await;

    let replays = [Replay {
        seq: rows[1].seq,
        delay: Duration::ZERO,
        allow_processed: false,
        fresh: uuid::Uuid::new_v4(),
    }];
    let actor = Actor::new("anna");
    let replay = [
        "SELECT p.consumer_id,",
        "SELECT fingerprint",
        "SELECT 1",
        "SELECT 1",
        "UPDATE inbox_parked",
        "INSERT INTO",
    ];
    spent.by(store.replay(&replays, &actor), &replay, 8).await;
    let row = crate::parking::take(store, &request).await.rows.remove(0);
    let letters = [DeadLetter { token: Some(row.claim.token), ..letter(&id, 1) }];
    store.dead_letter(&letters).await;
    let discard = ["SELECT p.consumer_id,", "UPDATE inbox_parked", "INSERT INTO"];
    spent.by(store.discard(&[row.seq], &actor), &discard, 5).await;
}

/// Counts at the server, by its general log, what the application's user has executed.
struct Spent<'a> {
    database: &'a Database,
}

impl Spent<'_> {
    /// `call` is one transaction of these statements (named by their first two words) between
    /// its beginning and its commit, in so many round trips.
    async fn by<T>(&self, call: impl Future<Output = T>, statements: &[&str], round_trips: usize) {
        self.by_transactions(call, &[statements], round_trips).await;
    }

    /// The same, of several transactions.
    async fn by_transactions<T>(
        &self,
        call: impl Future<Output = T>,
        transactions: &[&[&str]],
        round_trips: usize,
    ) {
        self.database.admin("TRUNCATE mysql.general_log").await;
        call.await;
        // The statements of the beginning are one entry. Others are not looked into: a token may
        // have any byte.
        let entries = self.entries().await;
        let statements = |entry: &String| match entry.starts_with("SET TRANSACTION") {
            true => entry.split(';').map(str::to_owned).collect(),
            false => vec![entry.clone()],
        };
        let two_words = |text: &str| text.split_whitespace().take(2).collect::<Vec<_>>().join(" ");
        let executed: Vec<String> =
            entries.iter().flat_map(statements).map(|text| two_words(&text)).collect();
        let begin = ["SET TRANSACTION", "SET SESSION", "START TRANSACTION"];
        let each = transactions.iter().flat_map(|own| [&begin[..], own, &["COMMIT"]].concat());
        assert_eq!(executed, each.collect::<Vec<_>>());
        assert_eq!(entries.len(), round_trips, "{entries:?}");
    }

    async fn entries(&self) -> Vec<String> {
        let mut connection = self.database.connect().await;
        let rows = sqlx::query(
            "SELECT CONVERT(argument USING utf8mb4) FROM mysql.general_log \
             WHERE user_host LIKE 'app%' AND command_type IN ('Query', 'Execute') \
             AND argument NOT LIKE 'SET sql_mode=%' AND argument NOT LIKE 'SET NAMES%'",
        )
        .fetch_all(&mut connection)
        .await
        .expect("the server's log");
        rows.iter().map(|row| row.get(0)).collect()
    }
}
