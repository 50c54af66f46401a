//! What the configuration adds to the contract: Dapr's answers, a status map, signatures, and
//! paths of routes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use inboxd_contract::{ForwardRequest, Forwarder as _, RetryReason, Verdict};
use inboxd_http::{Clock, Dialect, HttpConfig, HttpForwarder, Meaning};

use crate::support::{ACCEPTED, AMPLE, Connection, Message, OK, Raw, config, reason};

const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";

fn made(config: HttpConfig) -> HttpForwarder {
    HttpForwarder::new(config).expect("a valid configuration")
}

async fn dapr(response: impl Into<Vec<u8>>) -> Verdict {
    let raw = Raw::answering(response).await;
    Message::new("m").send(&made(HttpConfig { dialect: Dialect::Dapr, ..config(raw.url()) })).await
}

fn ok(headers: &str, body: &str) -> String {
    format!("HTTP/1.1 200 OK\r\n{headers}content-length: {}\r\n\r\n{body}", body.len())
}

#[tokio::test]
async fn dapr_s_body_decides_and_retry_after_holds() {
    assert_eq!(dapr(ok("", "")).await, ACCEPTED);
    assert_eq!(dapr(ok("", r#"{"status":"SUCCESS"}"#)).await, ACCEPTED);
    assert_eq!(dapr(ok("", r#"{"status":"DROP"}"#)).await, Verdict::Drop { status: 200 });
    match dapr(ok("retry-after: 3\r\n", r#"{"status":"RETRY"}"#)).await {
        Verdict::Retry { reason: RetryReason::Busy, status: Some(200), after, .. } => {
            assert_eq!(after, Some(Duration::from_secs(3)));
        }
        other => panic!("{other:?}"),
    }
    let late = format!(r#"{{"padding":"{}","status":"DROP"}}"#, "x".repeat(60_000));
    assert_eq!(dapr(ok("", &late)).await, Verdict::Drop { status: 200 });
}

#[tokio::test]
async fn an_answer_of_dapr_s_that_cannot_be_read_is_tried_again() {
    let whole = r#"{"status":"SUCCESS"}"#;
    let long = format!(r#"{{"padding":"{}"}}"#, "x".repeat(70_000));
    for (response, expected) in [
        (ok("content-encoding: gzip\r\n", "\u{1f}x"), RetryReason::ServerError),
        (ok("", &long), RetryReason::Disconnected),
        (ok("", r#"{"status":"SUCCESS""#), RetryReason::ServerError),
        (ok("", r#"{"status":"LATER"}"#), RetryReason::ServerError),
    ] {
        assert_eq!(reason(&dapr(response.clone()).await), Some(expected), "{response:.80}");
    }
    // The connection breaks in the middle of the body, and one never ends.
    for breaks in [true, false] {
        let raw = Raw::start(move |mut connection: Connection| async move {
            if connection.read().await.is_some() {
                connection.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n").await;
                connection.write(whole.as_bytes()).await;
                if !breaks {
                    connection.until_closed().await;
                }
            }
        })
        .await;
        let forwarder = made(HttpConfig { dialect: Dialect::Dapr, ..config(raw.url()) });
        let verdict = Message::new("m").within(Duration::from_millis(300)).send(&forwarder).await;
        assert_eq!(reason(&verdict), Some(RetryReason::Disconnected));
    }
}

#[tokio::test]
async fn a_status_map_is_over_the_table() {
    let raw = Raw::answering(&b"HTTP/1.1 404 No\r\ncontent-length: 7\r\n\r\nno such"[..]).await;
    let mut config = config(raw.url());
    config.status_map = vec![(404..=404, Meaning::Refused), (400..=499, Meaning::Retry)];
    let verdict = Message::new("m").send(&made(config)).await;
    assert_eq!(verdict, Verdict::Refused { status: 404, detail: "no such".into() });
}

/// What a mapped status decides was said with the head: a body that never ends changes nothing.
#[tokio::test]
async fn a_status_that_is_mapped_to_done_does_not_wait_for_the_body() {
    let raw = Raw::start(|mut connection: Connection| async move {
        if connection.read().await.is_some() {
            connection.write(b"HTTP/1.1 409 Known\r\ncontent-length: 100\r\n\r\nx").await;
            connection.until_closed().await;
        }
    })
    .await;
    let begun = tokio::time::Instant::now();
    for (meaning, expected) in [
        (Meaning::Accepted, Verdict::Accepted { status: 409 }),
        (Meaning::Drop, Verdict::Drop { status: 409 }),
    ] {
        let mut config = config(raw.url());
        config.status_map = vec![(409..=409, meaning)];
        assert_eq!(Message::new("m").send(&made(config)).await, expected);
    }
    assert!(begun.elapsed() < AMPLE / 2, "{:?}", begun.elapsed());
}

#[tokio::test]
async fn each_attempt_is_signed_for_its_own_time_and_the_id_stays() {
    let raw = Raw::answering(OK).await;
    let seconds = Arc::new(AtomicU64::new(1_614_265_330));
    let now = Arc::clone(&seconds);
    let mut config = config(raw.url());
    config.signing_secrets = vec![SECRET.into(), SECRET.into()];
    config.clock =
        Clock::new(move || SystemTime::UNIX_EPOCH + Duration::from_secs(now.load(Relaxed)));
    let forwarder = made(config);
    let mut message = Message::new("msg_p5jXN8AQM9LWM0D4loKWxJek");
    message.envelope.body = Some(Bytes::from_static(br#"{"test": 2432232314}"#));
    // A message cannot bring a signature of its own.
    message.header(b"webhook-signature", b"v1,forged");
    assert_eq!(message.send(&forwarder).await, ACCEPTED);
    seconds.fetch_add(600, Relaxed);
    assert_eq!(message.send(&forwarder).await, ACCEPTED);
    // Large enough to be signed elsewhere.
    message.envelope.body = Some(Bytes::from(vec![0xff; 1024 * 1024]));
    assert_eq!(message.send(&forwarder).await, ACCEPTED);
    message.envelope.body = None;
    assert_eq!(message.send(&forwarder).await, ACCEPTED);

    let requests = raw.requests();
    let published = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=";
    let twice = format!("{published} {published}");
    assert_eq!(requests[0].value("webhook-signature"), Some(&*twice));
    let stamps: Vec<_> = requests.iter().map(|one| one.value("webhook-timestamp")).collect();
    assert_eq!(stamps[..2], [Some("1614265330"), Some("1614265930")]);
    let signatures: std::collections::HashSet<_> =
        requests.iter().map(|one| one.value("webhook-signature")).collect();
    assert_eq!(signatures.len(), 4);
    for request in &requests {
        assert_eq!(request.value("webhook-id"), Some("msg_p5jXN8AQM9LWM0D4loKWxJek"));
    }
}

#[tokio::test]
async fn a_bad_secret_fails_at_the_start_and_is_not_shown() {
    let mut config = config("http://127.0.0.1:1/");
    config.signing_secrets = vec!["whsec_dG9vc2hvcnQ=".into()];
    let error = HttpForwarder::new(config).err().expect("refused").to_string();
    assert!(error.contains("signing") && !error.contains("dG9vc2hvcnQ"), "{error}");
}

#[tokio::test]
async fn a_route_s_path_takes_the_place_of_the_callback_s_and_never_its_host() {
    let raw = Raw::answering(OK).await;
    let forwarder = made(config(format!("http://{}/orders?key=1", raw.addr)));
    let message = Message::new("m");
    for (path, expected) in [
        (None, "/orders?key=1"),
        (Some("/refunds"), "/refunds"),
        (Some("/refunds?x=%20y"), "/refunds?x=%20y"),
        (Some("//elsewhere.test/x"), "//elsewhere.test/x"),
    ] {
        let request = ForwardRequest {
            envelope: &message.envelope,
            key: &message.key,
            subscription: "orders",
            attempt: 1,
            ordering_key: None,
            timeout: AMPLE,
            path,
            trace: None,
        };
        assert_eq!(forwarder.forward(request).await, ACCEPTED);
        let last = raw.requests().pop().expect("a request");
        assert_eq!(last.lines()[0], format!("POST {expected} HTTP/1.1"));
        assert_eq!(last.value("host"), Some(&*raw.addr.to_string()));
    }
}
