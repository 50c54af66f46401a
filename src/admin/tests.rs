//! The listener as its peers see it, honest ones and others.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
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
        unreachable!("no test asks")
    }
}

const TOKEN: &str = "geheim-und-lang-genug";

async fn start(token: Option<&SecretString>) -> (AdminServer, Arc<Fake>) {
    let health = HealthRegistry::new(Duration::from_secs(60));
    let endpoints = Endpoints { health, metrics: Metrics::new() };
    let fake = Arc::new(Fake::default());
    let address = ([127, 0, 0, 1], 0).into();
    let server = AdminServer::start(address, endpoints, Some(fake.clone()), token).await.unwrap();
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
    assert_problem(&ask(&server, "POST /v1/drain?timeout=2h", "").await, 400, "bad_request");
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
    assert_problem(&ask(&server, both, "").await, 400, "bad_request");
    assert_problem(&ask(&server, "GET /v1/messages/a?x=1", "").await, 400, "bad_request");
    assert_problem(&ask(&server, "GET /v1/messages/odd", "").await, 400, "bad_request");
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
