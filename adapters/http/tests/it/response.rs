//! Responses of every shape: bounded in time and bytes, and judged by their status alone.

use std::time::{Duration, SystemTime};

use inboxd_conformance::{ensure, eventually};
use inboxd_contract::{RetryReason, Verdict};
use inboxd_http::{HttpConfig, HttpForwarder};
use tokio::time::Instant;

use crate::support::{ACCEPTED, AMPLE, Connection, Message, OK, Raw, config, forwarder, reason};

const SHORT: Duration = Duration::from_millis(300);

async fn verdict_of(response: impl Into<Vec<u8>>) -> Verdict {
    let raw = Raw::answering(response).await;
    Message::new("m").send(&forwarder(raw.url())).await
}

#[tokio::test]
async fn a_2xx_whose_body_never_ends_is_accepted_within_its_bound() {
    let raw = Raw::start(|mut connection: Connection| async move {
        if connection.read().await.is_some() {
            connection.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").await;
            connection.write(b"1\r\nx\r\n").await;
            connection.until_closed().await;
        }
    })
    .await;
    let begun = Instant::now();
    assert_eq!(Message::new("m").send(&forwarder(raw.url())).await, ACCEPTED);
    assert!(begun.elapsed() < AMPLE / 2, "{:?}", begun.elapsed());
}

#[tokio::test]
async fn an_endless_body_is_read_to_a_bound_and_its_connection_dropped() {
    let raw = Raw::start(|mut connection: Connection| async move {
        if connection.read().await.is_some() {
            connection.write(b"HTTP/1.1 422 No\r\ntransfer-encoding: chunked\r\n\r\n").await;
            // Ends when the client has closed: writes fail then.
            let chunk = format!("1000\r\n{}\r\n", "x".repeat(4096));
            while tokio::io::AsyncWriteExt::write_all(&mut connection.stream, chunk.as_bytes())
                .await
                .is_ok()
            {}
        }
    })
    .await;
    match Message::new("m").send(&forwarder(raw.url())).await {
        Verdict::Refused { status: 422, detail } => assert!(detail.len() <= 1024),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_head_that_trickles_in_ends_at_the_bound() {
    let raw = Raw::start(|mut connection: Connection| async move {
        if connection.read().await.is_none() {
            return;
        }
        for byte in
            b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nx: ".iter().chain([b'y'; 10_000].iter())
        {
            connection.write(&[*byte]).await;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    let verdict = Message::new("m").within(SHORT).send(&forwarder(raw.url())).await;
    assert_eq!(reason(&verdict), Some(RetryReason::Timeout), "{verdict:?}");
}

#[tokio::test]
async fn a_refusal_whose_body_trickles_in_is_a_refusal_at_the_bound() {
    let raw = Raw::start(|mut connection: Connection| async move {
        if connection.read().await.is_some() {
            connection.write(b"HTTP/1.1 400 Bad\r\ncontent-length: 100\r\n\r\nmissing field").await;
            connection.until_closed().await;
        }
    })
    .await;
    let verdict = Message::new("m").within(SHORT).send(&forwarder(raw.url())).await;
    let expected = Verdict::Refused { status: 400, detail: "missing field".to_owned() };
    assert_eq!(verdict, expected);
}

#[tokio::test]
async fn the_configured_bound_holds_where_the_requests_is_longer() {
    let raw = Raw::start(|mut connection: Connection| async move {
        connection.read().await;
        connection.until_closed().await;
    })
    .await;
    let config = HttpConfig { callback_timeout: SHORT, ..config(raw.url()) };
    let verdict = Message::new("m").send(&HttpForwarder::new(config).unwrap()).await;
    assert_eq!(reason(&verdict), Some(RetryReason::Timeout), "{verdict:?}");
}

#[tokio::test]
async fn what_a_refusal_says_is_kept_bounded_and_printable() {
    let body = format!("bad\r\n\u{1b}[31m\0{}", "x".repeat(5_000));
    let response = format!("HTTP/1.1 422 No\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    match verdict_of(response).await {
        Verdict::Refused { status: 422, detail } => {
            assert!(detail.starts_with("bad   [31m xxx"), "{detail}");
            assert!(detail.len() <= 1024);
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn huge_response_headers_do_not_harm() {
    let line = |index: usize| format!("x-{index}: {}\r\n", "y".repeat(1_000));
    let many: String = (0..90).map(line).collect();
    let response = format!("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n{many}\r\n");
    assert_eq!(verdict_of(response).await, ACCEPTED);

    let too_many: String = (0..5_000).map(line).collect();
    let response = format!("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n{too_many}\r\n");
    let verdict = verdict_of(response).await;
    // An answer that cannot be read is an unknown one.
    assert_eq!(reason(&verdict), Some(RetryReason::Disconnected), "{verdict:?}");
}

#[tokio::test]
async fn what_is_no_http_is_an_unknown_answer() {
    for garbage in ["", "220 mail ready\r\n", "HTTP/1.1 abc\r\n\r\n", "\0\0\0\0\0\0\r\n\r\n"] {
        let garbage = garbage.to_owned();
        let raw = Raw::start(move |mut connection: Connection| {
            let garbage = garbage.clone();
            async move {
                connection.read().await;
                connection.write(garbage.as_bytes()).await;
            }
        })
        .await;
        let verdict = Message::new("m").send(&forwarder(raw.url())).await;
        assert_eq!(reason(&verdict), Some(RetryReason::Disconnected), "{verdict:?}");
    }
}

#[tokio::test]
async fn interim_responses_are_passed_over() {
    let early = "HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n";
    let response = format!("{early}HTTP/1.1 201 Created\r\ncontent-length: 0\r\n\r\n");
    assert_eq!(verdict_of(response).await, Verdict::Accepted { status: 201 });
}

#[tokio::test]
async fn an_old_server_that_closes_to_end_its_body_is_understood() {
    let raw = Raw::start(|mut connection: Connection| async move {
        connection.read().await;
        connection.write(b"HTTP/1.0 200 OK\r\n\r\nfine").await;
    })
    .await;
    assert_eq!(Message::new("m").send(&forwarder(raw.url())).await, ACCEPTED);
}

#[tokio::test]
async fn odd_statuses_are_faults_of_the_server() {
    for status in [600, 999] {
        let verdict = verdict_of(format!("HTTP/1.1 {status} ?\r\ncontent-length: 0\r\n\r\n")).await;
        assert_eq!(reason(&verdict), Some(RetryReason::ServerError), "{status}: {verdict:?}");
    }
}

#[tokio::test]
async fn redirects_are_not_followed() {
    let elsewhere = Raw::answering(OK).await;
    for status in [301, 302, 303, 307, 308] {
        let location = elsewhere.url();
        let head =
            format!("HTTP/1.1 {status} M\r\nlocation: {location}\r\ncontent-length: 0\r\n\r\n");
        let verdict = verdict_of(head).await;
        assert_eq!(reason(&verdict), Some(RetryReason::Endpoint), "{verdict:?}");
    }
    assert!(elsewhere.requests().is_empty());
}

#[tokio::test]
async fn retry_after_may_be_a_date_and_garbage_is_ignored() {
    async fn after(value: &str) -> Option<Duration> {
        let head = "HTTP/1.1 503 Busy\r\ncontent-length: 0\r\nretry-after:";
        match verdict_of(format!("{head} {value}\r\n\r\n")).await {
            Verdict::Retry { reason: RetryReason::Overloaded, after, .. } => after,
            other => panic!("{other:?}"),
        }
    }
    let date = |at: SystemTime| httpdate::fmt_http_date(at);
    let soon = after(&date(SystemTime::now() + Duration::from_secs(20))).await.unwrap();
    assert!(soon <= Duration::from_secs(20), "{soon:?}");
    let far = after(&date(SystemTime::now() + Duration::from_secs(86_400))).await;
    assert_eq!(far, Some(Duration::from_secs(30)));
    let past = after(&date(SystemTime::now() - Duration::from_secs(60))).await;
    assert_eq!(past, Some(Duration::ZERO));
    for garbage in ["soon", "-5", "1e9", ""] {
        assert_eq!(after(garbage).await, None, "{garbage}");
    }
}

#[tokio::test]
async fn a_verdict_before_the_body_was_taken_counts() {
    // 413 as servers send it: at once, while the body is still on its way.
    let raw = Raw::start(|mut connection: Connection| async move {
        use tokio::io::AsyncReadExt;
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let Ok(byte) = connection.stream.read_u8().await else { return };
            head.push(byte);
        }
        connection.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n").await;
        connection.until_closed().await;
    })
    .await;
    let mut message = Message::new("m");
    message.envelope.body = Some(vec![7; 4 * 1024 * 1024].into());
    let verdict = message.send(&forwarder(raw.url())).await;
    assert!(matches!(verdict, Verdict::Refused { status: 413, .. }), "{verdict:?}");
}

#[tokio::test]
async fn a_connection_is_used_again_after_its_response_was_read() {
    let raw = Raw::start(|mut connection: Connection| async move {
        while connection.read().await.is_some() {
            let body = format!("{}", connection.index);
            let head = "HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n";
            connection.write(format!("{head}{body}").as_bytes()).await;
        }
    })
    .await;
    let proxy = inboxd_conformance::net::Proxy::start(raw.addr).await;
    let forwarder = forwarder(format!("http://{}/", proxy.addr));
    for _ in 0..20 {
        assert_eq!(Message::new("m").send(&forwarder).await, ACCEPTED);
    }
    assert!(proxy.accepted() <= 2, "{} connections for 20 requests", proxy.accepted());
    drop(forwarder);
    eventually(AMPLE, async || ensure(proxy.connections() == 0, proxy.connections())).await;
}
