//! `inboxd dead-letters` and its API: found, judged, replayed and discarded at night, by way of
//! the sidecar and without one.

use std::time::Duration;

use inboxd_conformance::app::{Answer, App};
use inboxd_conformance::{ensure, eventually};
use serde_json::{Value, json};

use crate::support::{
    Broker, BrokerKind, Database, DatabaseKind, Message, PATIENCE, Sidecar, config,
};

/// A sidecar over SQLite and one broker, and its application.
struct Night {
    app: App,
    database: Database,
    broker: Broker,
    sidecar: Sidecar,
}

impl Night {
    async fn begins() -> Self {
        let app = App::start().await;
        let database = Database::new(DatabaseKind::Sqlite);
        let broker = Broker::new(BrokerKind::RabbitClassic).await;
        let config = config(&broker, &database, &broker.name, &app.url("/"), "", "");
        let sidecar = Sidecar::start(&config);
        sidecar.ready().await;
        Self { app, database, broker, sidecar }
    }

    /// These messages are refused once each, and are dead letters then.
    async fn refused(&self, ids: &[&str]) {
        let before = self.page("/v1/dead-letters?count=true").await["matching"].as_u64().unwrap();
        for id in ids {
            self.app.plan(id, [Answer::status(422).body("no\u{1b}[31m such field")]);
        }
        self.broker.publish(ids.iter().map(|id| Message::id(*id))).await;
        self.dead(before + ids.len() as u64).await;
    }

    /// Waits until there are so many dead letters.
    async fn dead(&self, count: u64) {
        eventually(PATIENCE, async || {
            let page = self.page("/v1/dead-letters?count=true").await;
            ensure(page["matching"] == count, format!("{page}; log:\n{}", self.sidecar.log()))
        })
        .await;
    }

    /// Waits until the application has accepted these.
    async fn accepted(&self, ids: &[&str]) {
        eventually(PATIENCE, async || {
            let accepted = self.app.ledger().accepted_ids();
            let all = ids.iter().all(|id| accepted.contains(*id));
            ensure(all, format!("{accepted:?}; log:\n{}", self.sidecar.log()))
        })
        .await;
    }

    async fn page(&self, path: &str) -> Value {
        let (status, body) = self.sidecar.get(path).await.expect("served");
        assert_eq!(status, 200, "{path}: {body}");
        serde_json::from_str(&body).expect("JSON")
    }

    async fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let url = format!("http://{}{path}", self.sidecar.admin());
        let client = reqwest::Client::builder().no_proxy().build().expect("a client");
        let answer = client.post(url).json(body).send().await.expect("an answer");
        (answer.status().as_u16(), answer.json().await.expect("JSON"))
    }

    /// The output of a command that ends with this code, and has nothing for a terminal in it.
    async fn says(&self, command: &str, arguments: &[&str], code: i32) -> String {
        let told = self.sidecar.command(command, arguments).await;
        assert_eq!(told.code, Some(code), "{arguments:?}: {told:?}");
        let bad = |character: char| character.is_control() && character != '\n';
        assert!(!told.out.contains(bad) && !told.err.contains(bad), "{told:?}");
        format!("{}{}", told.out, told.err)
    }

    async fn letters(&self, arguments: &[&str], code: i32) -> String {
        self.says("dead-letters", arguments, code).await
    }

    /// The only dead letter's seq.
    async fn seq(&self) -> i64 {
        let page = self.page("/v1/dead-letters").await;
        assert_eq!(page["rows"].as_array().map(Vec::len), Some(1), "{page}");
        page["rows"][0]["seq"].as_i64().expect("a seq")
    }

    async fn audit(&self) -> Vec<Value> {
        self.page("/v1/audit").await["entries"].as_array().expect("a list").clone()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_are_found_judged_replayed_and_discarded() {
    let mut night = Night::begins().await;
    // One after the other, so that the order is known.
    night.refused(&["bad\u{1b}[2J"]).await;
    night.refused(&["worse"]).await;

    let all = night.letters(&["list"], 0).await;
    assert!(all.contains("bad\\u{1b}[2J") && all.contains("2 shown of 2"), "{all}");
    assert!(all.contains("refused") && all.contains("last status 422"), "{all}");
    for (filter, found) in [
        (["--id", "worse"], true),
        (["--error", "such field"], true),
        (["--reason", "refused"], true),
        (["--since", "1h ago"], true),
        (["--until", "1h ago"], false),
        (["--reason", "too_old"], false),
        (["--error", "other"], false),
        (["--subscription", "bills"], false),
        (["--consumer-id", "bills"], false),
    ] {
        let list = night.letters(&["list", filter[0], filter[1]], 0).await;
        assert_eq!(list.contains("worse"), found, "{filter:?}: {list}");
    }
    let json: Value = serde_json::from_str(&night.letters(&["list", "--json"], 0).await).unwrap();
    let (bad, worse) = (json["rows"][0]["seq"].to_string(), json["rows"][1]["seq"].to_string());
    let first = night.letters(&["list", "--limit", "1"], 0).await;
    assert!(first.contains("1 shown of 2") && !first.contains("worse"), "{first}");
    let rest = night.letters(&["list", "--after", &bad], 0).await;
    assert!(rest.contains("worse") && !rest.contains("bad"), "{rest}");

    let shown = night.letters(&["show", &bad], 0).await;
    for part in ["such field", "came from: rabbitmq:", "received first: 20", "body: "] {
        assert!(shown.contains(part), "{part} in {shown}");
    }
    let whole = night.page(&format!("/v1/dead-letters/{bad}")).await;
    let raw = night.sidecar.get(&format!("/v1/dead-letters/{bad}?raw=true")).await.unwrap().1;
    // The body alone is given as it is.
    let body = night.sidecar.command("dead-letters", &["show", &bad, "--body", "-"]).await;
    assert_eq!((body.code, body.out), (Some(0), raw.clone()));
    assert_eq!(whole["row"]["body_bytes"], raw.len(), "{whole}");
    night.letters(&["show", "999999"], 1).await;

    // A dry run says what would be, and changes nothing.
    let dry = night.letters(&["replay", "--all", "--dry-run"], 0).await;
    assert!(dry.contains("2 would be forwarded again"), "{dry}");
    night.dead(2).await;
    assert!(night.audit().await.is_empty());
    // Nor does a command that does not say which.
    night.letters(&["replay"], 2).await;
    night.letters(&["discard", "--all"], 2).await;
    night.letters(&["replay", "--all", "--id", "worse"], 2).await;

    let replayed = night.letters(&["replay", "--id", "worse", "--actor", "alice"], 0).await;
    assert!(replayed.contains("1 will be forwarded again"), "{replayed}");
    night.accepted(&["worse"]).await;
    let again = night.letters(&["replay", &worse], 1).await;
    assert!(again.contains("no dead letter"), "{again}");

    let discarded = night.letters(&["discard", &bad, "--actor", "bob"], 0).await;
    assert!(discarded.contains("1 are discarded"), "{discarded}");
    night.dead(0).await;
    let kept = night.letters(&["list", "--discarded"], 0).await;
    assert!(kept.contains("discarded") && kept.contains("bad"), "{kept}");
    night.letters(&["show", &bad, "--body", "-"], 1).await;
    assert_eq!(night.app.ledger().begun_of("bad\u{1b}[2J"), 1, "nobody forwards it any more");

    let audit = night.audit().await;
    let told: Vec<_> =
        audit.iter().map(|entry| (entry["actor"].as_str(), entry["action"].as_str())).collect();
    let (bob, alice) = (Some("bob (127.0.0.1)"), Some("alice (127.0.0.1)"));
    assert_eq!(told, [(bob, Some("discard")), (alice, Some("replay"))]);
    let told = night.letters(&["audit"], 0).await;
    assert!(told.contains("bob (127.0.0.1) discard bad\\u{1b}[2J"), "{told}");
    assert!(night.sidecar.log().contains("alice (127.0.0.1)"), "who is in the log too");
    assert!(night.sidecar.stop().await.success(), "{}", night.sidecar.log());
}

/// Each message is forwarded once, whoever else replays it at the same time.
#[tokio::test(flavor = "multi_thread")]
async fn of_two_replays_at_once_each_message_is_in_one() {
    let mut night = Night::begins().await;
    let ids: Vec<_> = (0..20).map(|n| format!("m{n}")).collect();
    let ids: Vec<_> = ids.iter().map(String::as_str).collect();
    night.refused(&ids).await;
    let all = json!({"all": true});
    let (one, other) = tokio::join!(
        night.post("/v1/dead-letters/replay", &all),
        night.post("/v1/dead-letters/replay", &all),
    );
    assert_eq!((one.0, other.0), (200, 200), "{one:?} {other:?}");
    let due = |answer: &Value| answer["counts"]["due"].as_u64().unwrap();
    assert_eq!(due(&one.1) + due(&other.1), 20, "{one:?} {other:?}");
    night.accepted(&ids).await;
    assert_eq!(night.audit().await.len(), 20);
    for id in ids {
        assert_eq!(night.app.ledger().begun_of(id), 2, "{id}: refused once, accepted once");
    }
    assert!(night.sidecar.stop().await.success(), "{}", night.sidecar.log());
}

/// The rate is in the rows' times, so it outlives the command and the sidecar.
#[tokio::test(flavor = "multi_thread")]
async fn a_rate_is_spread_over_the_rows_and_a_page_goes_on_where_the_last_ended() {
    let mut night = Night::begins().await;
    night.refused(&["m0", "m1", "m2", "m3"]).await;
    let order = night.page("/v1/dead-letters").await;
    let order = order["rows"].as_array().expect("a list").iter();
    let order: Vec<_> = order.map(|row| row["message_id"].as_str().unwrap().to_owned()).collect();
    let body = json!({"reason": "refused", "rate": 0.01, "limit": 2});
    let (status, answer) = night.post("/v1/dead-letters/replay", &body).await;
    assert_eq!((status, &answer["counts"]["due"]), (200, &json!(2)), "{answer}");
    let next = &answer["next"];
    assert_eq!(next["delay_ms"], 200_000, "{answer}");
    let body = json!({
        "reason": "refused", "rate": 0.01, "after": next["after"], "delay_ms": next["delay_ms"],
    });
    let (status, answer) = night.post("/v1/dead-letters/replay", &body).await;
    assert_eq!((status, answer["next"].is_null()), (200, true), "{answer}");
    night.accepted(&[&order[0]]).await;
    eventually(PATIENCE, async || {
        let left = night.page("/v1/parked?count=true").await;
        ensure(left["matching"] == 3, format!("{left}"))
    })
    .await;
    let parked = night.page("/v1/parked").await;
    for (row, (id, due_by)) in parked["rows"]
        .as_array()
        .expect("a list")
        .iter()
        .zip(order[1..].iter().zip([100_000, 200_000, 300_000]))
    {
        let due_in = row["due_in_ms"].as_u64().expect("a time");
        let about = due_by - 60_000..=due_by;
        assert!(row["message_id"] == **id && about.contains(&due_in), "{order:?}: {parked}");
    }
    let list = night.says("parked", &["list"], 0).await;
    assert!(list.contains("due in ") && list.contains("replayed"), "{list}");
    let explained = night.says("explain", &[&order[1]], 0).await;
    assert!(explained.contains("an operator has it forwarded again"), "{explained}");
    let too_slow = json!({"seqs": [1, 2], "rate": 0.001, "delay_ms": 2_592_000_000_u64});
    assert_eq!(night.post("/v1/dead-letters/replay", &too_slow).await.0, 422);
    assert!(night.sidecar.stop().await.success(), "{}", night.sidecar.log());
}

/// A conflicting copy goes under an id of its own, and a processed one only when that is said.
#[tokio::test(flavor = "multi_thread")]
async fn a_conflict_gets_its_own_id_and_a_processed_message_wants_a_word() {
    let mut night = Night::begins().await;
    let publish = async |body: &'static str| {
        night.broker.publish([Message::id("m1").body(body)]).await;
    };
    publish("one").await;
    night.accepted(&["m1"]).await;
    publish("two").await;
    night.dead(1).await;
    let seq = night.seq().await.to_string();
    let replayed = night.letters(&["replay", &seq], 0).await;
    assert!(replayed.contains(" as m1~"), "{replayed}");
    let own = replayed.split(" as ").nth(1).unwrap().lines().next().unwrap().to_owned();
    night.accepted(&[&own]).await;
    night.dead(0).await;

    // Once more: it is processed under that id now.
    publish("two").await;
    night.dead(1).await;
    let seq = night.seq().await.to_string();
    for arguments in [["replay", &seq, "--dry-run"], ["replay", &seq, "--json"]] {
        let refused = night.letters(&arguments, 1).await;
        assert!(refused.contains("processed"), "{refused}");
    }
    night.dead(1).await;
    night.letters(&["replay", &seq, "--allow-processed", "--actor", "carol"], 0).await;
    eventually(PATIENCE, async || {
        let ids = night.app.ledger().accepted_ids();
        ensure(ids.len() == 3, format!("{ids:?}; log:\n{}", night.sidecar.log()))
    })
    .await;
    let entry = night.audit().await.remove(0);
    assert_eq!(entry["action"], "replay_processed", "{entry}");
    assert_eq!(entry["actor"], "carol (127.0.0.1)", "{entry}");
    assert!(entry["replayed_as"].as_str().unwrap().starts_with("m1~"), "{entry}");
    assert!(night.sidecar.stop().await.success(), "{}", night.sidecar.log());
}

/// With nobody to ask, the database itself; a SQLite file that a sidecar has is that one's alone.
#[tokio::test(flavor = "multi_thread")]
async fn without_a_sidecar_the_database_is_asked() {
    let mut night = Night::begins().await;
    night.refused(&["m1"]).await;
    night.refused(&["m2"]).await;
    let list = night.letters(&["list", "--admin", "off"], 0).await;
    assert!(list.contains("m1") && list.contains("the database was asked itself"), "{list}");
    let locked = night.letters(&["replay", "--all", "--admin", "off"], 69).await;
    assert!(locked.contains("in use by another instance"), "{locked}");
    assert!(night.sidecar.stop().await.success(), "{}", night.sidecar.log());
    let dry = night.letters(&["replay", "--all", "--dry-run"], 0).await;
    assert!(dry.contains("no sidecar answers"), "{dry}");
    let seq = serde_json::from_str::<Value>(&night.letters(&["list", "--json"], 0).await).unwrap();
    let seq = seq["rows"][0]["seq"].to_string();
    night.letters(&["discard", &seq, "--actor", "dave"], 0).await;
    let replayed = night.letters(&["replay", "--all"], 0).await;
    assert!(replayed.contains("1 will be forwarded again"), "{replayed}");
    let audit = night.letters(&["audit"], 0).await;
    assert!(audit.contains("dave (database) discard m1"), "{audit}");
    night.sidecar.start_again();
    night.accepted(&["m2"]).await;
    assert_eq!(night.app.ledger().begun_of("m1"), 1);
    let gone = night.database.dead(&night.broker.name).await;
    assert!(!gone.contains_key("m2"), "{gone:?}");
    assert!(night.sidecar.stop().await.success(), "{}", night.sidecar.log());
}

/// The message behind many: pages, and what is asked for in between.
#[tokio::test(flavor = "multi_thread")]
async fn a_long_list_is_replayed_in_bounded_calls() {
    let mut night = Night::begins().await;
    night.app.set_default(Answer::status(422));
    let ids: Vec<_> = (0..230).map(|n| format!("m{n}")).collect();
    night.broker.publish(ids.iter().map(Message::id)).await;
    night.dead(230).await;
    night.app.set_default(Answer::status(200));
    let replayed = night.letters(&["replay", "--since", "10m ago"], 0).await;
    assert!(replayed.contains("230 will be forwarded again"), "{replayed}");
    eventually(Duration::from_secs(60), async || {
        let accepted = night.app.ledger().accepted_total();
        ensure(accepted == 230, format!("{accepted}; log:\n{}", night.sidecar.log()))
    })
    .await;
    assert!(night.app.ledger().accepted_more_than_once().is_empty());
    assert!(night.sidecar.stop().await.success(), "{}", night.sidecar.log());
}
