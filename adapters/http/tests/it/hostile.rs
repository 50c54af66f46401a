//! Applications that answer as no application should: floods, bombs, lies about lengths, answers
//! that never end. Each costs one attempt at most, bounded in time and memory.

use std::time::Duration;

use inboxd_contract::{RetryReason, Verdict};
use inboxd_http::{Dialect, HttpConfig, HttpForwarder};
use tokio::io::AsyncWriteExt;
use tokio::time::Instant;

use crate::support::{ACCEPTED, AMPLE, Connection, Message, Raw, config, forwarder, reason};

const SHORT: Duration = Duration::from_millis(300);

/// Writes `head`, then `again` until the client has gone away.
async fn endless(head: &'static str, again: String) -> Raw {
    Raw::start(move |mut connection: Connection| {
        let again = again.clone();
        async move {
            if connection.read().await.is_some() {
                connection.write(head.as_bytes()).await;
                while connection.stream.write_all(again.as_bytes()).await.is_ok() {}
            }
        }
    })
    .await
}

async fn verdict_of(raw: &Raw) -> Verdict {
    let begun = Instant::now();
    let verdict = Message::new("m").within(SHORT).send(&forwarder(raw.url())).await;
    assert!(begun.elapsed() < AMPLE / 2, "{:?}", begun.elapsed());
    verdict
}

#[tokio::test]
async fn a_flood_of_interim_responses_ends_at_the_bound() {
    for interim in
        ["HTTP/1.1 100 Continue\r\n\r\n", "HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"]
    {
        let verdict = verdict_of(&endless("", interim.repeat(50)).await).await;
        let expected = [Some(RetryReason::Timeout), Some(RetryReason::Disconnected)];
        assert!(expected.contains(&reason(&verdict)), "{verdict:?}");
    }
}

#[tokio::test]
async fn response_headers_without_end_are_cut() {
    let line = format!("x: {}\r\n", "y".repeat(8_000));
    let one_line = "y".repeat(8_000);
    for (head, again) in [("HTTP/1.1 200 OK\r\n", line), ("HTTP/1.1 200 OK\r\nx: ", one_line)] {
        let verdict = verdict_of(&endless(head, again).await).await;
        let expected = [Some(RetryReason::Timeout), Some(RetryReason::Disconnected)];
        assert!(expected.contains(&reason(&verdict)), "{verdict:?}");
    }
}

#[tokio::test]
async fn trailers_and_chunk_extensions_without_end_do_not_hold_an_accepted_message() {
    let head = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
    let trailers: &'static str =
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ntrailer: x\r\n\r\n0\r\n";
    for (head, again) in [
        (trailers, format!("x: {}\r\n", "y".repeat(4_000))),
        (head, "y".repeat(4_000)),
        (head, format!("1;{}\r\nx\r\n", "e=1;".repeat(1_000))),
        (head, "1\r\nx\r\n".to_owned()),
    ] {
        assert_eq!(verdict_of(&endless(head, again).await).await, ACCEPTED);
    }
}

#[tokio::test]
async fn a_length_that_lies_costs_the_connection_and_not_the_answer() {
    for head in [
        "HTTP/1.1 200 OK\r\ncontent-length: 9223372036854775807\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\nshort",
        "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nfar more than two bytes",
        "HTTP/1.1 204 No Content\r\ncontent-length: 5\r\n\r\nhello",
    ] {
        let raw = Raw::answering(head).await;
        let forwarder = forwarder(raw.url());
        for attempt in 1..=2 {
            let mut message = Message::new("m").within(SHORT);
            message.attempt = attempt;
            let verdict = message.send(&forwarder).await;
            let accepted = matches!(verdict, Verdict::Accepted { .. });
            // What was left of the first answer may break the second request, never accept it.
            let broken = attempt == 2 && reason(&verdict) == Some(RetryReason::Disconnected);
            assert!(accepted || broken, "{head}: {verdict:?}");
        }
    }
    for head in [
        "HTTP/1.1 200 OK\r\ncontent-length: 18446744073709551615\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello!",
        "HTTP/1.1 200 OK\r\ncontent-length: five\r\n\r\n",
    ] {
        let verdict = verdict_of(&Raw::answering(head).await).await;
        assert_eq!(reason(&verdict), Some(RetryReason::Disconnected), "{head}: {verdict:?}");
    }
}

#[tokio::test]
async fn an_answer_before_it_was_asked_for_is_nobody_s() {
    // A second answer on a connection, for a request that is not sent yet.
    let raw = Raw::start(|mut connection: Connection| async move {
        connection.read().await;
        let answer = "HTTP/1.1 422 No\r\ncontent-length: 0\r\n\r\n";
        connection.write(answer.repeat(3).as_bytes()).await;
        connection.until_closed().await;
    })
    .await;
    let forwarder = forwarder(raw.url());
    let first = Message::new("first").within(SHORT).send(&forwarder).await;
    assert!(matches!(first, Verdict::Refused { status: 422, .. }), "{first:?}");
    let second = Message::new("second").within(SHORT).send(&forwarder).await;
    assert_eq!(raw.requests().len(), 2, "the second had a connection of its own: {second:?}");
}

#[tokio::test]
async fn a_dapr_answer_that_trickles_in_without_end_is_tried_again_at_the_bound() {
    let raw = Raw::start(|mut connection: Connection| async move {
        if connection.read().await.is_none() {
            return;
        }
        connection.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").await;
        while connection.stream.write_all(b"1\r\n{\r\n").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    let config = HttpConfig { dialect: Dialect::Dapr, ..config(raw.url()) };
    let verdict = Message::new("m").within(SHORT).send(&HttpForwarder::new(config).unwrap()).await;
    assert_eq!(reason(&verdict), Some(RetryReason::Disconnected), "{verdict:?}");
}
