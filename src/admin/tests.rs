//! The listener as its peers see it, honest ones and others.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use inboxd_contract::{Actor, ParkedState};
use secrecy::SecretString;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::Instant;

use super::*;
use crate::telemetry::Metrics;

/// Answers as it is told, and keeps what it was asked.
#[derive(Default)]
struct Fake {
    asked: Mutex<Vec<(Vec<u8>, Which)>>,
    drains: Mutex<Vec<Duration>>,
    changes: Mutex<Vec<(String, Change, String)>>,
    pages: Mutex<Vec<ParkedAsk>>,
    replays: Mutex<Vec<(ReplayAsk, String)>>,
    discards: Mutex<Vec<(DiscardAsk, String)>>,
    audits: Mutex<Vec<(Option<i64>, u32)>>,
}

#[async_trait]
impl Operator for Fake {
    async fn explain(&self, asked: &[u8], which: Which) -> Result<MessageReport, ExplainError> {
        self.asked.lock().unwrap().push((asked.to_vec(), which));
        match asked {
            b"broken" => Err(ExplainError::Inbox("the database is away".into())),
            b"odd" => Err(ExplainError::Asked("there is no subscription \"x\"".into())),
            _ => Ok(MessageReport {
                asked: String::from_utf8_lossy(asked).into_owned(),
                retention_ms: 1,
                consumers: Vec::new(),
            }),
        }
    }

    async fn drain(&self, patience: Duration) -> DrainAnswer {
        self.drains.lock().unwrap().push(patience);
        let oldest = vec![RunningMessage { message_id: "m1".into(), waits: "at work".into() }];
        let running = Running { subscription: "orders".into(), in_flight: 1, oldest };
        DrainAnswer { drained: false, running: vec![running] }
    }

    fn drain_patience(&self) -> Duration {
        Duration::from_secs(25)
    }

    fn status(&self) -> Status {
        let state = DependencyState { ready: true, code: None, reason: String::new() };
        Status {
            version: "0".into(),
            uptime_s: 1,
            owner: None,
            phase: "running".into(),
            ready: true,
            database: DatabaseStatus { description: None, state },
            subscriptions: [("orders".to_owned(), standing())].into(),
        }
    }

    fn change(
        &self,
        name: &str,
        change: Change,
        actor: &Actor,
    ) -> Result<SubscriptionStatus, ChangeError> {
        if name != "orders" {
            return Err(ChangeError::Unknown { name: name.into(), known: "orders".into() });
        }
        self.changes.lock().unwrap().push((name.into(), change, actor.as_str().into()));
        Ok(standing())
    }

    async fn parked(&self, ask: &ParkedAsk) -> Result<ParkedPage, LettersError> {
        self.pages.lock().unwrap().push(ask.clone());
        Ok(ParkedPage { rows: Vec::new(), next: Some(7), matching: None })
    }

    async fn letter(&self, seq: i64) -> Result<Option<LetterWhole>, LettersError> {
        match seq {
            1 => Ok(None),
            _ => Err(LettersError::Inbox("the database is away".into())),
        }
    }

    async fn letter_body(&self, seq: i64) -> Result<Option<Option<Bytes>>, LettersError> {
        Ok(match seq {
            1 => None,
            2 => Some(None),
            _ => Some(Some(Bytes::from_static(b"<script>"))),
        })
    }

    async fn replay(&self, ask: &ReplayAsk, actor: &Actor) -> Result<ReplayAnswer, LettersError> {
        self.replays.lock().unwrap().push((ask.clone(), actor.as_str().into()));
        Ok(ReplayAnswer { dry_run: ask.dry_run, ..ReplayAnswer::default() })
    }

    async fn discard(
        &self,
        ask: &DiscardAsk,
        actor: &Actor,
    ) -> Result<DiscardAnswer, LettersError> {
        self.discards.lock().unwrap().push((ask.clone(), actor.as_str().into()));
        Ok(DiscardAnswer { dry_run: ask.dry_run, ..DiscardAnswer::default() })
    }

    async fn audit(&self, before: Option<i64>, limit: u32) -> Result<AuditPage, LettersError> {
        self.audits.lock().unwrap().push((before, limit));
        Ok(AuditPage::default())
    }
}

fn standing() -> SubscriptionStatus {
    SubscriptionStatus {
        consumer_id: "billing".into(),
        phase: "ready".into(),
        ready: true,
        reasons: Vec::new(),
        in_flight: 0,
        reconnects: 0,
        callback: None,
    }
}

const TOKEN: &str = "geheim-und-lang-genug";

async fn start(token: Option<&SecretString>) -> (AdminServer, Arc<Fake>) {
    let health = HealthRegistry::new(Duration::from_secs(60));
    let endpoints = Endpoints { health, metrics: Metrics::new() };
    let fake = Arc::new(Fake::default());
    let address = ([127, 0, 0, 1], 0).into();
    let server =
        AdminServer::start(address, endpoints, Some(fake.clone()), token, None).await.unwrap();
    (server, fake)
}

/// Sends these bytes and reads until the peer closes.
async fn send(server: &AdminServer, request: &str) -> String {
    let mut stream = TcpStream::connect(server.address()).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    // A peer that closes with something unread resets the connection; what it said is here.
    let _ = stream.read_to_end(&mut answer).await;
    String::from_utf8_lossy(&answer).into_owned()
}

/// One request with these headers beside `Host`.
async fn ask(server: &AdminServer, line: &str, headers: &str) -> String {
    let head = "Host: localhost\r\nConnection: close";
    send(server, &format!("{line} HTTP/1.1\r\n{head}\r\n{headers}\r\n")).await
}

fn assert_problem(answer: &str, status: u16, code: &str) {
    assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{answer}");
    assert!(answer.contains("content-type: application/problem+json"), "{answer}");
    assert!(answer.contains(&format!("\"type\":\"urn:inboxd:problem:{code}\"")), "{answer}");
    assert!(answer.contains(&format!("\"code\":\"{code}\"")), "{answer}");
}

#[tokio::test]
async fn a_loopback_listener_answers_to_loopbacks_names_alone() {
    let (server, _) = start(None).await;
    let with_host = |host: &str| format!("GET /livez HTTP/1.1\r\nConnection: close\r\n{host}\r\n");
    for good in ["localhost:7461", "LOCALHOST", "127.0.0.1:1", "[::1]:7461"] {
        let answer = send(&server, &with_host(&format!("Host: {good}\r\n"))).await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{good}: {answer}");
    }
    for bad in ["evil.test", "localhost.evil.test:7461", "10.0.0.1", "a b", "\u{e9}"] {
        let answer = send(&server, &with_host(&format!("Host: {bad}\r\n"))).await;
        assert_problem(&answer, 421, "wrong_host");
    }
    let two = send(&server, &with_host("Host: localhost\r\nHost: evil.test\r\n")).await;
    assert_problem(&two, 400, "bad_request");
    let absolute = "GET http://evil.test/livez HTTP/1.1\r\nHost: localhost\r\n\
                    Connection: close\r\n\r\n";
    assert_problem(&send(&server, absolute).await, 421, "wrong_host");
    // What a probe of long ago sends.
    let old = send(&server, "GET /livez HTTP/1.0\r\n\r\n").await;
    assert!(old.starts_with("HTTP/1.0 200"), "{old}");
}

#[tokio::test]
async fn a_page_of_another_site_asks_nothing_where_no_token_is_asked_for() {
    let (server, _) = start(None).await;
    let foreign = [
        "Origin: http://evil.test",
        "Origin: null",
        "Origin: https://localhost",
        "Sec-Fetch-Site: cross-site",
        "Sec-Fetch-Site: same-site",
    ];
    for path in ["/v1/status", "/v1/messages/a", "/v1/messages?id=a"] {
        for header in foreign {
            let answer = ask(&server, &format!("GET {path}"), &format!("{header}\r\n")).await;
            assert_problem(&answer, 403, "browser");
        }
    }
    for header in
        ["Origin: http://localhost", "Sec-Fetch-Site: none", "Sec-Fetch-Site: same-origin"]
    {
        let answer = ask(&server, "GET /v1/messages/a", &format!("{header}\r\n")).await;
        assert_problem(&answer, 404, "unknown_message");
    }
    let probe = ask(&server, "GET /livez", "Sec-Fetch-Site: cross-site\r\n").await;
    assert!(probe.starts_with("HTTP/1.1 200"), "{probe}");
}

#[tokio::test]
async fn a_browser_changes_nothing_where_no_token_is_asked_for() {
    let (server, fake) = start(None).await;
    for header in ["Origin: http://localhost:7461", "Origin: null", "Sec-Fetch-Site: same-origin"] {
        let answer = ask(&server, "POST /v1/drain", &format!("{header}\r\n")).await;
        assert_problem(&answer, 403, "browser");
    }
    assert!(fake.drains.lock().unwrap().is_empty());
    let answer = ask(&server, "POST /v1/drain", "").await;
    assert_problem(&answer, 504, "still_draining");
    assert!(answer.contains("\"oldest\":[{\"message_id\":\"m1\",\"waits\":\"at work\"}]"));
    assert_eq!(*fake.drains.lock().unwrap(), [Duration::from_secs(25)]);
    assert_problem(&ask(&server, "GET /v1/drain", "").await, 405, "wrong_method");
    let answer = ask(&server, "POST /v1/drain?timeout=soon", "").await;
    assert_problem(&answer, 400, "bad_request");
    assert_problem(&ask(&server, "POST /v1/drain?timeout=2h", "").await, 422, "senseless");
    assert_problem(&ask(&server, "POST /v1/drain?tiemout=1s", "").await, 400, "bad_request");
}

#[tokio::test]
async fn nothing_passes_the_token_by() {
    let (server, fake) = start(Some(&TOKEN.into())).await;
    let good = format!("Authorization: Bearer {TOKEN}\r\n");
    for line in ["POST /v1/drain", "GET /v1/messages/a", "GET /nothing", "PUT /livez", "GET /"] {
        let twice = format!("{good}{good}");
        for headers in ["", "Authorization: Bearer \r\n", &twice] {
            let answer = ask(&server, line, headers).await;
            assert_problem(&answer, 401, "unauthorized");
            assert!(answer.contains("www-authenticate: Bearer"), "{answer}");
        }
    }
    // A second request behind the first, and one behind a body that is not read.
    let line = "POST /v1/drain HTTP/1.1\r\nHost: localhost\r\n";
    let close = "Connection: close\r\n";
    let behind = format!("{line}{good}\r\n{line}{close}\r\n");
    let answer = send(&server, &behind).await;
    assert_eq!((answer.matches("504 Gateway").count(), answer.matches("401 Un").count()), (1, 1));
    let inner = format!("{line}{close}\r\n");
    let length = inner.len();
    let hidden = format!("{line}{good}Content-Length: {length}\r\n\r\n{inner}");
    let answer = send(&server, &format!("{hidden}{line}{close}\r\n")).await;
    assert!(!answer.contains("HTTP/1.1 200"), "{answer}");
    let drains = fake.drains.lock().unwrap().len();
    assert_eq!(drains, 2, "those with the token alone:\n{answer}");
    let both = format!("{line}Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n");
    send(&server, &both).await;
    assert_eq!(fake.drains.lock().unwrap().len(), 2);
    let answer = ask(&server, "GET /livez", &good).await;
    assert!(answer.starts_with("HTTP/1.1 200") && !answer.contains("www-auth"), "{answer}");
    assert!(answer.contains("cache-control: no-store"), "{answer}");
}

#[tokio::test]
async fn heads_and_bodies_are_bounded() {
    let (server, _) = start(None).await;
    let long = format!("X: {}\r\n", "a".repeat(20_000));
    assert!(ask(&server, "GET /livez", &long).await.starts_with("HTTP/1.1 431"));
    let many: String = (0..100).map(|n| format!("X-{n}: a\r\n")).collect();
    assert!(ask(&server, "GET /livez", &many).await.starts_with("HTTP/1.1 431"));
    let path = format!("GET /{}", "a".repeat(20_000));
    let answer = ask(&server, &path, "").await;
    assert!(answer.starts_with("HTTP/1.1 4"), "{answer}");
    let answer = ask(&server, "POST /v1/drain", "Content-Length: 70000\r\n").await;
    assert_problem(&answer, 413, "body_too_large");
}

#[tokio::test]
async fn what_is_not_there_is_a_problem_with_a_code() {
    let (server, _) = start(None).await;
    assert_problem(&ask(&server, "GET /", "").await, 404, "no_such_path");
    assert_problem(&ask(&server, "GET /v1/messages/", "").await, 404, "no_such_path");
    assert_problem(&ask(&server, "DELETE /v1/messages/a", "").await, 405, "wrong_method");
    let answer = ask(&server, "TRACE /v1/subscriptions/orders/limits", "").await;
    assert_problem(&answer, 405, "wrong_method");
    assert!(answer.to_lowercase().contains("allow: patch\r\n"), "{answer}");
    let options = ask(&server, "OPTIONS /v1/status", "").await;
    assert!(options.starts_with("HTTP/1.1 204"), "{options}");
    assert!(options.to_lowercase().contains("allow: get,head\r\n"), "{options}");
    let head = ask(&server, "HEAD /v1/status", "").await;
    assert!(head.starts_with("HTTP/1.1 200") && head.ends_with("\r\n\r\n"), "{head}");
}

/// One request with a body.
async fn send_json(server: &AdminServer, line: &str, headers: &str, body: &str) -> String {
    let length = format!("Content-Length: {}\r\n\r\n{body}", body.len());
    let head = "Host: localhost\r\nConnection: close\r\nContent-Type: application/json";
    send(server, &format!("{line} HTTP/1.1\r\n{head}\r\n{headers}{length}")).await
}

#[tokio::test]
async fn every_route_is_described_and_what_it_does_not_know_is_refused_by_name() {
    let (server, _) = start(None).await;
    let answer = ask(&server, "GET /v1/openapi.json", "").await;
    let document: serde_json::Value =
        serde_json::from_str(answer.split("\r\n\r\n").nth(1).unwrap()).unwrap();
    assert_eq!(document["openapi"], "3.1.0");
    let mut methods = 0;
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            methods += 1;
            let path = path.replace("{name}", "orders").replace("{seq}", "2").replace("{id}", "a");
            let line = format!("{} {path}?nothing=1", method.to_uppercase());
            let answer = send_json(&server, &line, "", "{}").await;
            assert_problem(&answer, 400, "bad_request");
            assert!(answer.contains("\"field\":\"nothing\""), "{answer}");
            for status in operation["responses"].as_object().unwrap().keys() {
                assert!(status.parse::<u16>().is_ok(), "{status}");
            }
        }
    }
    assert!(methods >= 16, "{methods}");
    // Every reference arrives.
    for reference in document.to_string().split("#/components/schemas/").skip(1) {
        let name = reference.split('"').next().unwrap();
        assert!(document["components"]["schemas"][name].is_object(), "{name}");
    }
}

#[tokio::test]
async fn rows_are_asked_for_by_what_they_have() {
    let (server, fake) = start(None).await;
    let query = "consumer_id=b&id=a%2Fb&reason=refused&since=2026-01-01T00:00:00Z&\
                 until=2026-01-02T00:00:00%2B01:00&error=no+field&after=5&limit=3&count=true";
    let answer = ask(&server, &format!("GET /v1/dead-letters?{query}"), "").await;
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("\"next\":7"), "{answer}");
    let asked = fake.pages.lock().unwrap().pop().unwrap();
    assert_eq!(asked.states, [ParkedState::Dead]);
    assert_eq!((asked.after, asked.limit, asked.count), (Some(5), 3, true));
    let filter = asked.filter;
    assert_eq!(
        (filter.consumer_id.as_deref(), filter.id.as_deref()),
        (Some("b"), Some(&b"a/b"[..]))
    );
    assert_eq!(filter.error.as_deref(), Some("no field"));
    let between = filter.until.unwrap().duration_since(filter.since.unwrap()).unwrap();
    assert_eq!(between, Duration::from_secs(23 * 3_600));
    ask(&server, "GET /v1/parked", "").await;
    let asked = fake.pages.lock().unwrap().pop().unwrap();
    assert_eq!((asked.states, asked.limit), (vec![ParkedState::Due], 100));
    ask(&server, "GET /v1/parked?state=any", "").await;
    assert!(fake.pages.lock().unwrap().pop().unwrap().states.is_empty());
    for (query, status) in [
        ("limit=201", 400),
        ("reason=stored", 400),
        ("state=due", 400),
        ("since=2026-01-02T00:00:00Z&until=2026-01-01T00:00:00Z", 422),
    ] {
        let answer = ask(&server, &format!("GET /v1/dead-letters?{query}"), "").await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{query}: {answer}");
    }
    ask(&server, "GET /v1/audit?before=9&limit=2", "").await;
    assert_eq!(*fake.audits.lock().unwrap(), [(Some(9), 2)]);
}

#[tokio::test]
async fn a_letter_is_shown_and_its_body_is_no_page() {
    let (server, _) = start(None).await;
    for (path, status, code) in [
        ("1", 404, "unknown_letter"),
        ("9", 503, "inbox_unavailable"),
        ("0", 400, "bad_request"),
        ("x", 400, "bad_request"),
        ("1?raw=true", 404, "unknown_letter"),
        ("2?raw=true", 404, "no_body"),
    ] {
        let answer = ask(&server, &format!("GET /v1/dead-letters/{path}"), "").await;
        assert_problem(&answer, status, code);
    }
    let raw = ask(&server, "GET /v1/dead-letters/3?raw=true", "").await;
    assert!(raw.contains("content-type: application/octet-stream"), "{raw}");
    assert!(raw.contains("content-disposition: attachment") && raw.ends_with("<script>"), "{raw}");
}

#[tokio::test]
async fn who_changes_something_is_told_to_whom_it_concerns() {
    let (server, fake) = start(None).await;
    let actor = "Inbox-Actor: alice@laptop\r\n";
    for (line, change) in [
        ("POST /v1/subscriptions/orders/pause", Change::Pause),
        ("POST /v1/subscriptions/orders/resume", Change::Resume),
    ] {
        let answer = ask(&server, line, actor).await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        let (_, changed, who) = fake.changes.lock().unwrap().pop().unwrap();
        assert_eq!((changed, who.as_str()), (change, "alice@laptop (127.0.0.1)"));
    }
    let answer = ask(&server, "POST /v1/subscriptions/bills/pause", "").await;
    assert_problem(&answer, 404, "unknown_subscription");
    let limits = "PATCH /v1/subscriptions/orders/limits";
    for (body, concurrency, rate) in [
        ("{\"concurrency\": 4}", Some(4), None),
        ("{\"rate\": null}", None, Some(None)),
        ("{\"rate\": 2.5, \"concurrency\": 1}", Some(1), Some(Some(2.5))),
    ] {
        let answer = send_json(&server, limits, "", body).await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        let (_, changed, who) = fake.changes.lock().unwrap().pop().unwrap();
        assert_eq!((changed, who.as_str()), (Change::Limits { concurrency, rate }, "127.0.0.1"));
    }
    for body in ["{}", "{\"concurrency\": 0}", "{\"rate\": 0}", "{\"speed\": 1}", "[]", ""] {
        assert_problem(&send_json(&server, limits, "", body).await, 400, "bad_request");
    }
    for bad in ["Inbox-Actor: a\r\nInbox-Actor: b\r\n", "Inbox-Actor: \u{e9}\r\n"] {
        let answer = ask(&server, "POST /v1/subscriptions/orders/pause", bad).await;
        assert_problem(&answer, 400, "bad_request");
    }
    assert!(fake.changes.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_replay_says_which_and_never_means_everything_by_mistake() {
    let (server, fake) = start(None).await;
    let replay = "POST /v1/dead-letters/replay";
    for body in [
        "{}",
        "{\"limit\": 5}",
        "{\"all\": false}",
        "{\"all\": true, \"reason\": \"refused\"}",
        "{\"seqs\": [1], \"reason\": \"refused\"}",
        "{\"seqs\": [1], \"all\": true}",
        "{\"seqs\": [1], \"after\": 3}",
        "{\"all\": true, \"delay_ms\": 3}",
    ] {
        assert_problem(&send_json(&server, replay, "", body).await, 422, "senseless");
    }
    assert!(fake.replays.lock().unwrap().is_empty());
    let body = "{\"all\": true, \"rate\": 5, \"delay_ms\": 400, \"after\": 3, \"dry_run\": true}";
    let answer = send_json(&server, replay, "", body).await;
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("\"dry_run\":true"), "{answer}");
    let (asked, _) = fake.replays.lock().unwrap().pop().unwrap();
    let filter = LetterFilter::default();
    let wanted = ReplayAsk {
        selection: Selection::Filter { filter, after: Some(3), limit: 100 },
        dry_run: true,
        rate: Some(5.0),
        delay: Duration::from_millis(400),
        allow_processed: false,
    };
    assert_eq!(asked, wanted);
    let body = "{\"seqs\": [3, 1], \"allow_processed\": true}";
    send_json(&server, replay, "", body).await;
    let (asked, _) = fake.replays.lock().unwrap().pop().unwrap();
    assert_eq!((asked.selection, asked.allow_processed), (Selection::Seqs(vec![3, 1]), true));
    send_json(&server, "POST /v1/dead-letters/discard", "", "{\"error\": \"no\"}").await;
    assert!(!fake.discards.lock().unwrap().pop().unwrap().0.dry_run);
}

#[tokio::test]
async fn a_body_is_json_and_bounded_however_it_comes() {
    let (server, _) = start(None).await;
    let line = "POST /v1/dead-letters/replay";
    let plain = "Content-Type: text/plain\r\nContent-Length: 2\r\n\r\n{}";
    let head = "Host: localhost\r\nConnection: close\r\n";
    let answer = send(&server, &format!("{line} HTTP/1.1\r\n{head}{plain}")).await;
    assert_problem(&answer, 415, "wrong_content_type");
    let json = format!("{head}Content-Type: application/json; charset=utf-8\r\n");
    let chunk = format!("8000\r\n{}\r\n", " ".repeat(0x8000));
    let chunked = format!("Transfer-Encoding: chunked\r\n\r\n{}0\r\n\r\n", chunk.repeat(3));
    let answer = send(&server, &format!("{line} HTTP/1.1\r\n{json}{chunked}")).await;
    assert_problem(&answer, 413, "body_too_large");
}

#[tokio::test(start_paused = true)]
async fn a_body_that_does_not_come_is_not_waited_for() {
    let (server, _) = start(None).await;
    let head = "Host: localhost\r\nConnection: close\r\nContent-Type: application/json";
    let length = "Content-Length: 9\r\n\r\n{";
    let line = "POST /v1/dead-letters/replay HTTP/1.1";
    let answer = send(&server, &format!("{line}\r\n{head}\r\n{length}")).await;
    assert_problem(&answer, 408, "body_late");
}

#[tokio::test]
async fn a_message_is_asked_for_by_its_bytes() {
    let (server, fake) = start(None).await;
    let answer =
        ask(&server, "GET /v1/messages/a%2Fb%00%ff/c%2541?consumer_id=bill%C3%A9", "").await;
    assert_problem(&answer, 404, "unknown_message");
    assert!(answer.contains("\"report\":{"), "{answer}");
    let asked = fake.asked.lock().unwrap().pop().unwrap();
    assert_eq!(asked, (b"a/b\0\xff/c%41".to_vec(), Which::ConsumerId("bill\u{e9}".into())));
    ask(&server, "GET /v1/messages/a?subscription=orders", "").await;
    let asked = fake.asked.lock().unwrap().pop().unwrap();
    assert_eq!(asked.1, Which::Subscription("orders".into()));
    for (id, bytes) in [("..", &b".."[..]), (".", b"."), ("a%26+%ff%2541", b"a&+\xff%41")] {
        ask(&server, &format!("GET /v1/messages?consumer_id=b&id={id}"), "").await;
        let asked = fake.asked.lock().unwrap().pop().unwrap();
        assert_eq!(asked, (bytes.to_vec(), Which::ConsumerId("b".into())));
    }
    for wrong in ["/v1/messages", "/v1/messages/a?id=b", "/v1/messages?id=a&id=b"] {
        assert_problem(&ask(&server, &format!("GET {wrong}"), "").await, 400, "bad_request");
    }
    let both = "GET /v1/messages/a?subscription=a&consumer_id=b";
    assert_problem(&ask(&server, both, "").await, 422, "senseless");
    assert_problem(&ask(&server, "GET /v1/messages/a?x=1", "").await, 400, "bad_request");
    assert_problem(&ask(&server, "GET /v1/messages/odd", "").await, 422, "senseless");
    let away = ask(&server, "GET /v1/messages/broken", "").await;
    assert_problem(&away, 503, "inbox_unavailable");
}

#[tokio::test(start_paused = true)]
async fn who_sends_no_head_is_let_go_and_meanwhile_keeps_no_more_than_its_share() {
    let (server, _) = start(None).await;
    let begun = Instant::now();
    let mut silent = Vec::new();
    for _ in 0..64 {
        let mut stream = TcpStream::connect(server.address()).await.unwrap();
        stream.write_all(b"GET /livez HTTP/1.1\r\nHost: loc").await.unwrap();
        silent.push(stream);
    }
    let answer = ask(&server, "GET /livez", "").await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let waited = begun.elapsed();
    assert!(waited >= Duration::from_secs(10), "the listener is full until then: {waited:?}");
    assert!(waited < Duration::from_secs(60), "{waited:?}");
    for mut stream in silent {
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest).await;
        assert!(!String::from_utf8_lossy(&rest).contains("200 OK"));
    }
}
