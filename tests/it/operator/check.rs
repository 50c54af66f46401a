//! `inboxd check`: problems before a start, and with `--connect` what cannot be used.

use inboxd_conformance::app::App;
use serde_json::Value;

use crate::support::{
    Broker, BrokerKind, Database, DatabaseKind, Sidecar, Told, config, subscription,
};

async fn check(config: &str, arguments: &[&str]) -> Told {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("inboxd.toml");
    std::fs::write(&path, config).expect("written");
    let output = tokio::process::Command::new(env!("CARGO_BIN_EXE_inboxd"))
        .arg("check")
        .arg("--config")
        .arg(&path)
        .args(arguments)
        .output()
        .await
        .expect("the command ends");
    Told {
        code: output.status.code(),
        out: String::from_utf8(output.stdout).expect("text"),
        err: String::from_utf8(output.stderr).expect("text"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_configuration_is_checked_without_connecting_to_anything() {
    let good = "[broker.main]\nkind = \"rabbitmq\"\nurl = \"nowhere.invalid\"\n\
                [subscription.orders]\ncallback = \"http://nowhere.invalid/\"\n\
                source = { broker = \"main\", queue = \"q\" }\n";
    let told = check(good, &[]).await;
    assert_eq!(told.code, Some(0), "{told:?}");
    assert!(told.out.contains("no problem: subscription orders"), "{told:?}");

    let bad = format!("{good}colour = \"red\"\n[admin]\nlisten = \"everywhere\"\n");
    let told = check(&bad, &[]).await;
    assert_eq!(told.code, Some(78), "{told:?}");
    assert!(told.out.contains("inboxd.toml:7") && told.out.contains("inboxd.toml:9"), "{told:?}");
    let told = check(&bad, &["--format", "json"]).await;
    assert_eq!(told.code, Some(78), "{told:?}");
    let document: Value = serde_json::from_str(&told.out).expect("JSON");
    assert_eq!(document["ok"], false);
    assert_eq!(document["problems"].as_array().map(Vec::len), Some(2), "{document}");
}

#[tokio::test(flavor = "multi_thread")]
async fn everything_that_is_named_is_tried_and_nothing_is_touched() {
    let app = App::start().await;
    let absent = App::not_started();
    let database = Database::new(DatabaseKind::Postgres);
    let (queue, mut topic) =
        (Broker::new(BrokerKind::RabbitQuorum).await, Broker::new(BrokerKind::Kafka).await);
    topic.label = "records";
    let fine = format!(
        "{}\n{}\n{}",
        config(&queue, &database, &queue.name, &app.url("/"), "", ""),
        topic.config(),
        subscription("records", &topic, &topic.name, &app.url("/"), ""),
    );
    // The tables are there once a sidecar has run.
    let mut sidecar = Sidecar::start(&fine);
    sidecar.ready().await;
    assert!(sidecar.stop().await.success(), "{}", sidecar.log());
    let told = check(&fine, &["--connect"]).await;
    assert_eq!(told.code, Some(0), "{told:?}");
    for part in ["database\n", "subscription orders\n", "subscription records\n"] {
        assert!(told.out.contains(part), "{told:?}");
    }
    let asked = app.ledger().all();
    let is_empty = |post: &inboxd_conformance::app::Post| {
        post.method == "OPTIONS" && post.id.is_empty() && post.body_len == 0
    };
    assert_eq!(asked.len(), 2, "one question for each callback: {asked:?}");
    assert!(asked.iter().all(is_empty), "no message was made up: {asked:?}");

    let broken = format!(
        "{fine}\n{}\n[broker.away]\nkind = \"rabbitmq\"\nurl = \"amqp://guest:geheim@127.0.0.1:1/\"\n",
        subscription("absent", &queue, "absent", &absent.url("/"), "").replace("main", "away"),
    );
    let told = check(&broken, &["--connect", "--timeout", "5s", "--format", "json"]).await;
    assert_eq!(told.code, Some(69), "{told:?}");
    assert!(!told.out.contains("geheim"), "{told:?}");
    let document: Value = serde_json::from_str(&told.out).expect("JSON");
    let with_problems: Vec<_> = document["parts"]
        .as_array()
        .expect("parts")
        .iter()
        .filter(|part| part.to_string().contains("\"problem\""))
        .filter_map(|part| part["part"].as_str())
        .collect();
    assert_eq!(with_problems, ["subscription absent"], "{document}");
}

/// A database that is not used yet is no problem, one that cannot be logged in to is.
#[tokio::test(flavor = "multi_thread")]
async fn a_fresh_database_is_fine_and_a_wrong_login_is_not() {
    let app = App::start().await;
    let queue = Broker::new(BrokerKind::RabbitClassic).await;
    for kind in DatabaseKind::ALL {
        let database = Database::new(kind);
        let fresh = config(&queue, &database, &queue.name, &app.url("/"), "", "");
        let told = check(&fresh, &["--connect"]).await;
        assert_eq!(told.code, Some(0), "{kind:?}: {told:?}");
        let words = match kind {
            DatabaseKind::Sqlite => "the start makes it",
            _ => "`inboxd migrate` makes them",
        };
        assert!(told.out.contains(words), "{kind:?}: {told:?}");
    }
    for scheme in ["postgres", "mysql"] {
        let away = format!(
            "[database]\nurl = \"{scheme}://inbox:geheim@127.0.0.1:1/inbox\"\n{}\n{}",
            queue.config(),
            subscription("orders", &queue, &queue.name, &app.url("/"), ""),
        );
        // In less time than a pool would try again for.
        for extra in ["", "prepared_statements = false\n"] {
            let away = away.replacen("/inbox\"\n", &format!("/inbox\"\n{extra}"), 1);
            if scheme == "mysql" && !extra.is_empty() {
                continue;
            }
            let told = check(&away, &["--connect", "--timeout", "4s"]).await;
            assert!(told.out.contains("Connection refused"), "{told:?}");
        }
        let told = check(&away, &["--connect"]).await;
        assert_eq!(told.code, Some(69), "{told:?}");
        assert!(told.out.contains("problem  database"), "{told:?}");
        assert!(!told.out.contains("geheim"), "{told:?}");
    }
    let nowhere = format!(
        "[database]\nurl = \"sqlite:/nowhere/at/all/inbox.db\"\n{}\n{}",
        queue.config(),
        subscription("orders", &queue, &queue.name, &app.url("/"), ""),
    );
    let told = check(&nowhere, &["--connect"]).await;
    assert_eq!(told.code, Some(69), "{told:?}");
    assert!(told.out.contains("there is no directory /nowhere/at/all"), "{told:?}");
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), "no database at all ".repeat(100)).expect("written");
    let other = nowhere.replacen("/nowhere/at/all/inbox.db", file.path().to_str().unwrap(), 1);
    let told = check(&other, &["--connect"]).await;
    assert_eq!(told.code, Some(69), "{told:?}");
    assert!(told.out.contains("file is not a database"), "{told:?}");
}

/// What only a library can refuse is told without connecting, as `inboxd run` would tell it.
#[test]
fn what_a_start_would_refuse_is_told_without_connecting() {
    let dir = tempfile::tempdir().unwrap();
    let bad_pem = dir.path().join("ca.pem");
    std::fs::write(&bad_pem, "no certificate\n").unwrap();
    let config = format!(
        "[broker.main]\nkind = \"kafka\"\nurl = \"127.0.0.1:1\"\n\
         [broker.main.properties]\n\"no.such.property\" = \"1\"\n\
         [subscription.orders]\ncallback = \"https://127.0.0.1:1/\"\n\
         source = {{ topics = [\"orders\"], group = \"billing\" }}\n\
         tls = {{ ca_file = \"{}\" }}\n",
        bad_pem.display()
    );
    let file = dir.path().join("inboxd.toml");
    std::fs::write(&file, config).unwrap();
    let refused = |wanted: &[&str]| {
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_inboxd"))
            .args(["check", "--config"])
            .arg(&file)
            .env("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4318")
            .output()
            .unwrap();
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8(text).unwrap();
        assert_eq!(output.status.code(), Some(78), "{text}");
        for wanted in wanted {
            assert!(text.contains(wanted), "no {wanted} in:\n{text}");
        }
    };
    refused(&["inboxd.toml:5", "no.such.property", "inboxd.toml:9", "ca.pem"]);
    // Then what is not of the configuration.
    let config = std::fs::read_to_string(&file).unwrap();
    let config = config.replace("\"no.such.property\" = \"1\"\n", "");
    let config = config.lines().filter(|line| !line.starts_with("tls"));
    std::fs::write(&file, config.collect::<Vec<_>>().join("\n")).unwrap();
    refused(&["OTEL_EXPORTER_OTLP_ENDPOINT"]);
}

/// `inboxd check | head`, and a full disk: the verdict stands, and nothing panics.
#[test]
fn a_standard_output_that_takes_nothing_is_no_panic() {
    let run = |output: std::process::Stdio| {
        let child = std::process::Command::new(env!("CARGO_BIN_EXE_inboxd"))
            .args(["check", "--source", "amqp://h/?queue=q", "--callback", "http://h/"])
            .stdout(output)
            .stderr(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let output = child.wait_with_output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    assert_eq!(run(writer.into()), (Some(0), String::new()));
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let (code, said) = run(full.into());
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("standard output cannot be written to"), "{said}");
}
