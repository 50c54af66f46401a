//! Connections that fail in every phase: cases H1 and H2, and what must not be mistaken for
//! them.

use std::time::Duration;

use inboxd_conformance::app::{Answer, App};
use inboxd_conformance::net::{Proxy, ReservedPort};
use inboxd_conformance::{ensure, eventually};
use inboxd_contract::{Forwarder, RetryReason, Verdict};
use inboxd_http::{HttpConfig, HttpConfigError, HttpForwarder};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpSocket, TcpStream};

use crate::support::{ACCEPTED, AMPLE, Connection, Message, OK, Raw, config, forwarder, reason};

const SHORT: Duration = Duration::from_millis(300);

#[tokio::test]
async fn a_kept_connection_that_dies_when_it_is_used_again_is_retried_with_the_same_key() {
    // H1: the first connection answers once, takes the second request and closes.
    let raw = Raw::start(|mut connection: Connection| async move {
        connection.read().await;
        connection.write(OK).await;
        if connection.index == 0 {
            connection.read().await;
            return;
        }
        while connection.read().await.is_some() {
            connection.write(OK).await;
        }
    })
    .await;
    let forwarder = forwarder(raw.url());
    assert_eq!(Message::new("first").send(&forwarder).await, ACCEPTED);
    let mut message = Message::new("second");
    let verdict = message.send(&forwarder).await;
    assert_eq!(reason(&verdict), Some(RetryReason::Disconnected), "{verdict:?}");
    message.attempt = 2;
    assert_eq!(message.send(&forwarder).await, ACCEPTED);

    let requests = raw.requests();
    assert_eq!(requests.len(), 3);
    assert_eq!(requests[1].value("idempotency-key"), Some("\"second\""));
    assert_eq!(requests[2].value("idempotency-key"), Some("\"second\""));
    assert_eq!(requests[1].body, requests[2].body);
    let attempts: Vec<_> = requests[1..].iter().map(|r| r.value("inbox-attempt")).collect();
    assert_eq!(attempts, [Some("1"), Some("2")]);
}

#[tokio::test]
async fn a_connection_that_was_closed_while_idle_is_replaced() {
    let raw = Raw::start(|mut connection: Connection| async move {
        connection.read().await;
        connection.write(OK).await;
    })
    .await;
    let proxy = Proxy::start(raw.addr).await;
    let forwarder = forwarder(format!("http://{}/", proxy.addr));
    for sent in 1..=5 {
        assert_eq!(Message::new("m").send(&forwarder).await, ACCEPTED);
        // Only once its end has come through: before that it is the race of the other test.
        eventually(AMPLE, async || ensure(proxy.connections() == 0, proxy.connections())).await;
        assert_eq!(proxy.accepted(), sent);
    }
}

#[tokio::test]
async fn a_lost_answer_comes_again_with_the_same_key_and_body_also_from_a_new_process() {
    // H2: accepted and lost, then retried; a forwarder made anew stands for a restart.
    let app = App::start().await;
    app.plan("m", [Answer::lost(200), Answer::lost(200)]);
    let mut message = Message::with_headers([(&b"Idempotency-Key"[..], &b"\"theirs\""[..])]);
    for attempt in 1..=2 {
        message.attempt = attempt;
        let verdict = message.send(&forwarder(app.url("/orders"))).await;
        assert_eq!(reason(&verdict), Some(RetryReason::Disconnected), "{verdict:?}");
    }
    message.attempt = 3;
    assert_eq!(message.send(&forwarder(app.url("/orders"))).await, ACCEPTED);

    let posts = app.ledger().posts("m");
    assert_eq!(posts.len(), 3);
    assert!(posts.iter().all(|post| post.headers_named("idempotency-key") == ["\"m\""]));
    assert!(posts.iter().all(|post| post.body_sha256 == posts[0].body_sha256));
    assert_eq!(app.ledger().accepted("m"), 3);
}

#[tokio::test]
async fn a_connection_cut_in_every_part_of_an_exchange_is_disconnected() {
    let raw = Raw::answering(OK).await;
    let proxy = Proxy::start(raw.addr).await;
    let url = format!("http://{}/", proxy.addr);
    for cut in [1, OK.len() - 1] {
        proxy.cut_after_reply_bytes(cut);
        let verdict = Message::new("m").send(&forwarder(&url)).await;
        assert_eq!(reason(&verdict), Some(RetryReason::Disconnected), "{cut}: {verdict:?}");
    }
    proxy.cut_after_request_bytes(20);
    let verdict = Message::new("m").send(&forwarder(&url)).await;
    assert_eq!(reason(&verdict), Some(RetryReason::Disconnected), "{verdict:?}");
    assert_eq!(Message::new("m").send(&forwarder(&url)).await, ACCEPTED);
}

#[tokio::test]
async fn a_head_that_came_is_the_answer_though_the_body_is_cut() {
    let response = |status| format!("HTTP/1.1 {status} X\r\ncontent-length: 100\r\n\r\n12345");
    for (status, expected) in
        [(200, ACCEPTED), (400, Verdict::Refused { status: 400, detail: "12345".to_owned() })]
    {
        let raw = Raw::start(move |mut connection: Connection| async move {
            connection.read().await;
            connection.write(response(status).as_bytes()).await;
        })
        .await;
        assert_eq!(Message::new("m").send(&forwarder(raw.url())).await, expected);
    }
}

#[tokio::test]
async fn a_server_that_says_goodbye_before_it_answers_is_disconnected() {
    let raw = Raw::start(|mut connection: Connection| async move {
        connection.read().await;
        let _ = connection.stream.shutdown().await;
        connection.until_closed().await;
    })
    .await;
    let verdict = Message::new("m").send(&forwarder(raw.url())).await;
    assert_eq!(reason(&verdict), Some(RetryReason::Disconnected), "{verdict:?}");
}

#[tokio::test]
async fn a_peer_that_fell_silent_is_a_timeout() {
    let raw = Raw::answering(OK).await;
    let proxy = Proxy::start(raw.addr).await;
    let forwarder = forwarder(format!("http://{}/", proxy.addr));
    assert_eq!(Message::new("m").send(&forwarder).await, ACCEPTED);
    proxy.black_hole();
    let verdict = Message::new("m").within(SHORT).send(&forwarder).await;
    assert_eq!(reason(&verdict), Some(RetryReason::Timeout), "{verdict:?}");
    proxy.heal();
    eventually(AMPLE, async || {
        let verdict = Message::new("m").send(&forwarder).await;
        ensure(verdict == ACCEPTED, format!("{verdict:?}"))
    })
    .await;
}

#[tokio::test]
async fn a_refused_connection_is_unreachable() {
    let port = ReservedPort::new().unwrap();
    let forwarder = forwarder(format!("http://{}/", port.addr()));
    let verdict = Message::new("m").send(&forwarder).await;
    assert_eq!(reason(&verdict), Some(RetryReason::Unreachable), "{verdict:?}");
    assert!(forwarder.probe().await.unwrap_err().contains("refused"));
}

#[tokio::test]
async fn a_name_that_does_not_resolve_is_unreachable() {
    // RFC 6761 promises that this one never does.
    let connect_timeout = Duration::from_secs(2);
    let config = HttpConfig { connect_timeout, ..config("http://inboxd.invalid/") };
    let forwarder = HttpForwarder::new(config).unwrap();
    let verdict = Message::new("m").send(&forwarder).await;
    assert_eq!(reason(&verdict), Some(RetryReason::Unreachable), "{verdict:?}");
    assert!(forwarder.probe().await.is_err());
}

#[tokio::test]
async fn a_connection_that_is_never_taken_ends_at_its_own_bound() {
    // A full backlog: further handshakes are not answered.
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = socket.listen(1).unwrap();
    let addr = listener.local_addr().unwrap();
    let mut waiting = Vec::new();
    while let Ok(Ok(stream)) = tokio::time::timeout(SHORT, TcpStream::connect(addr)).await {
        waiting.push(stream);
    }
    let config = HttpConfig { connect_timeout: SHORT, ..config(format!("http://{addr}/")) };
    let forwarder = HttpForwarder::new(config).unwrap();
    let verdict = Message::new("m").send(&forwarder).await;
    assert_eq!(reason(&verdict), Some(RetryReason::Unreachable), "{verdict:?}");
    assert!(forwarder.probe().await.unwrap_err().contains("within"));
}

#[tokio::test]
async fn a_socket_path_without_a_server_is_unreachable() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("none.sock");
    let forwarder = forwarder(format!("unix:{}:/orders", path.display()));
    let verdict = Message::new("m").send(&forwarder).await;
    assert_eq!(reason(&verdict), Some(RetryReason::Unreachable), "{verdict:?}");
    assert!(forwarder.probe().await.is_err());
}

#[tokio::test]
async fn credentials_of_the_url_and_fixed_headers_are_sent_and_never_printed() {
    let raw = Raw::answering(OK).await;
    let url = format!("http://me:s%65cret@{}/orders", raw.addr);
    let config = HttpConfig {
        fixed_headers: vec![("X-Api-Key".to_owned(), "key-value".to_owned().into())],
        ..config(url)
    };
    assert!(!format!("{config:?}").contains("secret"), "{config:?}");
    let forwarder = HttpForwarder::new(config).unwrap();
    assert_eq!(Message::new("m").send(&forwarder).await, ACCEPTED);
    let request = raw.request();
    assert_eq!(request.value("authorization"), Some("Basic bWU6c2VjcmV0"));
    assert_eq!(request.value("x-api-key"), Some("key-value"));
    assert!(!request.lines()[0].contains("me"));
}

#[tokio::test]
async fn a_fixed_header_cannot_break_framing_or_the_contract() {
    for name in ["content-length", "transfer-encoding", "Inbox-Attempt", "idempotency-key", "a b"] {
        let fixed_headers = vec![(name.to_owned(), "1".to_owned().into())];
        let refused =
            HttpForwarder::new(HttpConfig { fixed_headers, ..config("http://127.0.0.1:1/") });
        assert!(matches!(refused, Err(HttpConfigError::FixedHeader(_))), "{name}");
    }
}

#[tokio::test]
async fn settings_that_cannot_work_are_refused_with_a_remedy() {
    let good = || config("http://127.0.0.1:1/");
    let zero = HttpConfig { connect_timeout: Duration::ZERO, ..good() };
    let open = HttpConfig {
        headers: inboxd_http::HeaderPolicy { prefix: String::new(), ..Default::default() },
        ..good()
    };
    let broken = HttpConfig {
        headers: inboxd_http::HeaderPolicy { prefix: "a b".to_owned(), ..Default::default() },
        ..good()
    };
    for (config, word) in [(zero, "connect_timeout"), (open, "allow list"), (broken, "prefix")] {
        let error = HttpForwarder::new(config).err().unwrap().to_string();
        assert!(error.contains(word), "{error}");
    }
}
