//! Log lines as a log collector takes them: one JSON object a line, whatever publishers send.

use inboxd_conformance::app::{Answer, App};
use inboxd_conformance::{ensure, eventually};
use serde_json::Value;

use crate::support::{
    Broker, BrokerKind, Database, DatabaseKind, Message, PATIENCE, Sidecar, config,
};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00f067aa0ba902b7";
const FORGED: &str = "x\r\n{\"level\":\"ERROR\",\"forged\":true}\n2026-12-01T00:00:00Z ERROR forged\u{1b}[31m\u{7}a\u{7f}b\u{9b}";

/// Publishes hostile messages that are all refused; answers the log in this format.
async fn refused(format: &str) -> String {
    let app = App::start().await;
    app.set_default(Answer::status(400).body(FORGED));
    let broker = Broker::new(BrokerKind::Kafka).await;
    let database = Database::new(DatabaseKind::Sqlite);
    let log = format!("[log]\nformat = \"{format}\"\n");
    let config = config(&broker, &database, &broker.name, &app.url("/"), "", &log);
    let sidecar = Sidecar::start_with(&config, &[]);
    let ids = [FORGED.to_owned(), format!("{FORGED}{}", "i".repeat(10_240)), "\u{202e}e".into()];
    broker
        .publish(ids.map(|id| {
            Message::id(id)
                .key(FORGED)
                .header("message-type", FORGED)
                .header(FORGED, FORGED)
                .header("traceparent", format!("00-{TRACE}-{PARENT}-01"))
        }))
        .await;
    eventually(PATIENCE, async || {
        ensure(sidecar.outcomes("dead_lettered").await == 3, sidecar.log())
    })
    .await;
    sidecar.log()
}

#[tokio::test(flavor = "multi_thread")]
async fn lines_about_a_message_carry_its_trace_and_nobody_forges_one_in_json() {
    let log = refused("json").await;
    let mut letters = 0;
    for line in log.lines() {
        let line: Value = serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
        assert!(line.get("forged").is_none(), "{line}");
        if line["code"] == "dead_letter" {
            letters += 1;
            assert_eq!((&line["trace_id"], &line["span_id"]), (&TRACE.into(), &PARENT.into()));
            assert!(line.to_string().len() < 8 * 1_024, "a bounded line: {line}");
        }
    }
    assert_eq!(letters, 3, "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_forges_a_line_or_a_colour_for_people() {
    let log = refused("human").await;
    assert_eq!(log.lines().filter(|line| line.contains("dead_letter")).count(), 3, "{log}");
    for line in log.lines() {
        let begins = line.get(..4).and_then(|year| year.parse::<u16>().ok());
        assert!(begins.is_some(), "a line that begins with no time: {line:?}");
        assert!(line.chars().all(|c| !c.is_control()), "{line:?}");
        assert!(!line.starts_with("2026-12-01T00:00:00Z ERROR forged"), "{line}");
        assert!(!line.contains(" ERROR inboxd"), "{line}");
    }
}
