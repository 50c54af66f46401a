//! Bad input at start: the binary ends with exit code 78 and names key, value and remedy, all
//! mistakes at once, and no secret.

use std::process::Stdio;

use tempfile::TempDir;
use tokio::process::Command;

use crate::support::PATIENCE;

const CALLBACK: &str = "http://127.0.0.1:9/orders";
const SECRET: &str = "hunter2-geheim";
const REFUSED: i32 = 78;

/// What a start that does not come to be says.
struct Ended {
    code: Option<i32>,
    text: String,
}

async fn inboxd(arguments: &[&str], environment: &[(&str, &str)], file: Option<&str>) -> Ended {
    let dir: TempDir = tempfile::tempdir().expect("a temporary directory");
    let mut command = Command::new(env!("CARGO_BIN_EXE_inboxd"));
    command.args(arguments);
    if let Some(file) = file {
        std::fs::write(dir.path().join("inboxd.toml"), file).expect("written");
        command.args(["--config", "inboxd.toml"]);
    }
    let command = command
        .current_dir(dir.path())
        .envs(environment.iter().copied())
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(PATIENCE, command)
        .await
        .unwrap_or_else(|_| panic!("inboxd {arguments:?} {file:?} was not refused"))
        .expect("inboxd can be run");
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8(text).expect("what it says is text");
    let files: Vec<_> = std::fs::read_dir(dir.path())
        .expect("a directory")
        .map(|entry| entry.expect("an entry").file_name())
        .filter(|name| name != "inboxd.toml")
        .collect();
    assert!(files.is_empty(), "it began to work: {files:?}");
    Ended { code: output.status.code(), text }
}

/// Refused; `says` are parts of one line: what was set where, what is wrong, what to do.
#[track_caller]
fn assert_refused(ended: &Ended, says: &[&str]) {
    assert_eq!(ended.code, Some(REFUSED), "{}", ended.text);
    let found = ended.text.lines().any(|line| says.iter().all(|part| line.contains(part)));
    assert!(found, "no line with {says:?} in:\n{}", ended.text);
    assert!(ended.text.contains("config_refused"), "{}", ended.text);
    assert!(!ended.text.contains(SECRET), "a secret is shown:\n{}", ended.text);
    assert!(!ended.text.contains("panicked"), "{}", ended.text);
}

async fn run_flags(source: &str, further: &[&str]) -> Ended {
    let arguments = ["run", "--source", source, "--callback", CALLBACK, "--admin", "off"];
    inboxd(&[&arguments[..], further].concat(), &[], None).await
}

/// A file with this in the tables `database` and `subscription.orders`.
async fn run_file(database: &str, subscription: &str) -> Ended {
    let file = format!(
        "[admin]\nlisten = \"off\"\n[database]\n{database}\n\
         [broker.main]\nkind = \"rabbitmq\"\nurl = \"127.0.0.1:9\"\n\
         user = \"inbox\"\npassword = \"{SECRET}\"\n\
         [subscription.orders]\nconsumer_id = \"billing\"\n{subscription}\n"
    );
    inboxd(&["run"], &[], Some(&file)).await
}

const GOOD: &str =
    "callback = \"http://127.0.0.1:9/\"\nsource = { broker = \"main\", queue = \"q\" }";

#[tokio::test]
async fn what_could_lose_messages_is_refused_in_flags() {
    let with = |rest: &str| format!("amqp://inbox:{SECRET}@127.0.0.1:9/%2f?queue=orders&{rest}");
    for (rest, says) in [
        ("prefetch=0", ["source.prefetch (--source)", "0 is below the least, 1", "set"]),
        (
            "message_id=delivery-tag",
            ["default.message_id (--source)", "a delivery tag", "use what the publisher sets"],
        ),
    ] {
        assert_refused(&run_flags(&with(rest), &[]).await, &says);
    }
    let mysql = format!("mysql://inbox:{SECRET}@127.0.0.1:9/inbox");
    let ended = run_flags(&with("lease=4s"), &["--database", &mysql]).await;
    assert_refused(&ended, &["lease", "4s", "at least 5s"]);
    let ended = run_flags(&with("prefetch=1"), &["--database", "sqlite::memory:"]).await;
    assert_refused(&ended, &["database.url (--database)", "memory"]);
}

#[tokio::test]
async fn what_could_lose_messages_is_refused_in_the_file() {
    let source = |rest: &str| {
        format!(
            "callback = \"{CALLBACK}\"\nsource = {{ broker = \"main\", queue = \"q\", {rest} }}"
        )
    };
    let ended = run_file("", &source("prefetch = 0")).await;
    assert_refused(&ended, &["orders.source.prefetch (inboxd.toml:", "0 is below the least, 1"]);
    let tag = format!("{GOOD}\nmessage_id = [\"property\", \"delivery-tag\"]");
    let says = ["orders.message_id (inboxd.toml:", "a delivery tag", "use what the publisher sets"];
    assert_refused(&run_file("", &tag).await, &says);
    let ended = run_file("retention = \"10s\"", GOOD).await;
    assert_refused(&ended, &["database.retention (inboxd.toml:4)", "below the lease, 15s"]);
    let mysql = format!("url = \"mysql://inbox:{SECRET}@127.0.0.1:9/inbox\"");
    let ended = run_file(&mysql, &format!("{GOOD}\nlease = \"4s\"")).await;
    assert_refused(&ended, &["lease", "4s", "at least 5s"]);
}

#[tokio::test]
async fn two_subscriptions_of_one_name_or_one_consumer_id_are_refused() {
    let second = |name: &str, callback: &str| {
        format!(
            "{GOOD}\n[subscription.{name}]\nconsumer_id = \"billing\"\ncallback = \"{callback}\"\n\
             source = {{ broker = \"main\", queue = \"r\" }}"
        )
    };
    let ended = run_file("", &second("orders", "http://127.0.0.1:9/")).await;
    assert_refused(&ended, &["inboxd.toml", "duplicate key"]);

    let other = second("mails", "http://127.0.0.1:9/mails");
    let says = ["consumer_id (inboxd.toml:", "billing", "shared_consumer_ids = [\"billing\"]"];
    assert_refused(&run_file("", &other).await, &says);

    // Said so: taken; it is another problem that ends this start.
    let file = format!(
        "shared_consumer_ids = [\"billing\"]\n[admin]\nlisten = \"off\"\n[database]\n\
         url = \"postgres://127.0.0.1/inbox\"\nsweep_interval = \"0s\"\n\
         [broker.main]\nkind = \"rabbitmq\"\nurl = \"127.0.0.1:9\"\n\
         [subscription.orders]\nconsumer_id = \"billing\"\n{other}\n"
    );
    let ended = inboxd(&["run"], &[], Some(&file)).await;
    assert_refused(&ended, &["database.sweep_interval (inboxd.toml:", "0s"]);
    assert!(ended.text.contains("has a problem"), "only that one: {}", ended.text);
}

#[tokio::test]
async fn bad_flags_are_refused_with_their_name_value_and_remedy() {
    let good = "kafka://127.0.0.1:9/orders?group=billing";
    for (source, says) in [
        ("kafka://127.0.0.1:9/orders?group=g&colour=red", ["--source", "colour", ""]),
        ("kafka://127.0.0.1:9/orders?group=g&lease=soon", ["default.lease (--source)", "soon", ""]),
        (
            "kafka://127.0.0.1:9/orders?group=g&lease=99d",
            ["default.lease (--source)", "99d", "10m"],
        ),
        (
            "kafka://127.0.0.1:9/orders?group=g&body_bytes_max=many",
            ["default.body_bytes_max (--source)", "many", "MiB"],
        ),
        (
            "kafka://127.0.0.1:9/orders?group=g&in_flight_bytes_max=1kB",
            ["default.in_flight_bytes_max (--source)", "1kB", "64 KiB"],
        ),
        ("kafka://127.0.0.1:99999/orders?group=g", ["--source", "a port is no number", "65535"]),
        ("redis://127.0.0.1/orders", ["--source", "redis", "amqp"]),
        (
            "kafka://127.0.0.1:9/orders",
            ["default.source.group (--source)", "set the consumer group", "consumer_id"],
        ),
        ("amqp://127.0.0.1:9/", ["default.source.queue (--source)", "missing", "name the queue"]),
    ] {
        assert_refused(&run_flags(source, &[]).await, &says);
    }
    for (flags, says) in [
        (
            ["--database", "oracle://inbox:hunter2-geheim@h/x"],
            ["database.url (--database)", "oracle"],
        ),
        (["--admin", "somewhere"], ["admin.listen (--admin)", "somewhere"]),
        (["--consumer-id", ""], ["consumer_id (--consumer-id)", "must not be blank"]),
    ] {
        let arguments = ["run", "--source", good, "--callback", CALLBACK];
        let ended = inboxd(&[&arguments[..], &flags].concat(), &[], None).await;
        assert_refused(&ended, &says);
    }
    for (callback, says) in [
        ("ftp://127.0.0.1/", ["callback (--callback)", "ftp", "http://"]),
        ("http://inbox:hunter2-geheim@127.0.0.1/", ["callback (--callback)", "", ""]),
        ("unix:relative.sock", ["callback (--callback)", "unix:", ""]),
    ] {
        let arguments = ["run", "--source", good, "--callback", callback, "--admin", "off"];
        assert_refused(&inboxd(&arguments, &[], None).await, &says);
    }
    let variable = [("INBOXD__SUBSCRIPTION__DEFAULT__CONCURRENCY", "many")];
    let arguments = ["run", "--source", good, "--callback", CALLBACK, "--admin", "off"];
    let says = ["default.concurrency (INBOXD__SUBSCRIPTION__DEFAULT__CONCURRENCY)", "many"];
    assert_refused(&inboxd(&arguments, &variable, None).await, &says);
}

#[tokio::test]
async fn many_mistakes_of_a_file_are_told_at_once_each_with_its_line() {
    let file = format!(
        r#"shutdown_grace = "1ms"
colour = "red"
[admin]
token = "{SECRET}"
[database]
url = "postgres://inbox:{SECRET}@h:port/x"
retention = "forever"
pool_max = 0
[broker.main]
kind = "kafka"
url = "amqp://inbox:{SECRET}@h/"
passwort = "{SECRET}"
[subscription.orders]
callback = "ftp://h"
concurency = 3
body_bytes_max = "1 parsec"
source = {{ broker = "other", queue = "q", prefetch = 0 }}
"#
    );
    let ended = inboxd(&["run"], &[], Some(&file)).await;
    for says in [
        ["shutdown_grace (inboxd.toml:1)", "1ms", "100ms"],
        ["colour (inboxd.toml:2)", "no such key", "remove it"],
        ["database.url (inboxd.toml:6)", "port", "postgres://"],
        ["database.retention (inboxd.toml:7)", "forever", "14d"],
        ["database.pool_max (inboxd.toml:8)", "0", "1"],
        ["broker.main.passwort (inboxd.toml:12)", "no such key", "password"],
        ["subscription.orders.callback (inboxd.toml:14)", "ftp", "http://"],
        ["subscription.orders.concurency (inboxd.toml:15)", "no such key", "concurrency"],
        ["subscription.orders.body_bytes_max (inboxd.toml:16)", "1 parsec", "MiB"],
        ["subscription.orders.source.broker (inboxd.toml:17)", "[broker.other]", "main"],
        ["subscription.orders.source.prefetch (inboxd.toml:17)", "0 is below", "from 1 to"],
    ] {
        assert_refused(&ended, &says);
    }
}

/// A port that is taken and a file that is not there are told just as well.
#[tokio::test]
async fn what_cannot_be_read_is_named() {
    let ended = inboxd(&["run", "--config", "nowhere.toml"], &[], None).await;
    assert_refused(&ended, &["nowhere.toml"]);
    let ended = inboxd(&["migrate", "--database-file", "nowhere.url"], &[], None).await;
    assert_refused(&ended, &["--database-file", "nowhere.url"]);
    let ended = inboxd(&["run"], &[], Some("[subscription")).await;
    assert_refused(&ended, &["inboxd.toml:1"]);
    let none = inboxd(&["run"], &[], None).await;
    assert_refused(&none, &["--source", "--callback"]);

    // A command line that is none is the shell's affair.
    let ended = inboxd(&["run", "--colour", "red"], &[], None).await;
    assert_eq!(ended.code, Some(2), "{}", ended.text);

    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("an address").to_string();
    let source = "kafka://127.0.0.1:9/orders?group=billing";
    let arguments = ["run", "--source", source, "--callback", CALLBACK, "--admin", &address];
    let ended = inboxd(&arguments, &[], None).await;
    assert_eq!(ended.code, Some(1), "{}", ended.text);
    assert!(ended.text.contains("admin cannot be listened on"), "{}", ended.text);
}
