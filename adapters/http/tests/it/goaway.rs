//! HTTP/2 servers that say goodbye after every request: case H6.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use http::Response;
use inboxd_contract::{RetryReason, Verdict};
use inboxd_http::{HttpConfig, HttpForwarder};
use tokio::net::{TcpListener, TcpStream};

use crate::support::{ACCEPTED, Message, config, reason};

/// Answers the first request of a connection with 200 and says GOAWAY; refuses what else came.
async fn server(answered: Arc<AtomicUsize>) -> (SocketAddr, tokio::task::JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let task = tokio::spawn(async move {
        let mut running = tokio::task::JoinSet::new();
        while let Ok((stream, _)) = listener.accept().await {
            running.spawn(serve(stream, Arc::clone(&answered)));
        }
    });
    (addr, task)
}

async fn serve(stream: TcpStream, answered: Arc<AtomicUsize>) {
    let Ok(mut connection) = h2::server::handshake(stream).await else { return };
    if let Some(Ok((_request, mut respond))) = connection.accept().await {
        let response = Response::builder().status(200).body(()).unwrap();
        if let Ok(mut body) = respond.send_response(response, false) {
            let _ = body.send_data(Bytes::new(), true);
            answered.fetch_add(1, Ordering::SeqCst);
        }
        connection.graceful_shutdown();
    }
    while let Some(Ok((_request, mut respond))) = connection.accept().await {
        respond.send_reset(h2::Reason::REFUSED_STREAM);
    }
}

async fn until_accepted(forwarder: &HttpForwarder, id: usize) -> Vec<Verdict> {
    let mut verdicts = Vec::new();
    for attempt in 1..=50 {
        let mut message = Message::new(&format!("m{id}"));
        message.attempt = attempt;
        verdicts.push(message.send(forwarder).await);
        if verdicts.last() == Some(&ACCEPTED) {
            break;
        }
    }
    verdicts
}

#[tokio::test]
async fn everything_is_delivered_though_each_request_is_the_last_of_its_connection() {
    let answered = Arc::new(AtomicUsize::new(0));
    let (addr, task) = server(Arc::clone(&answered)).await;
    let config =
        HttpConfig { http2_prior_knowledge: true, ..config(format!("http://{addr}/orders")) };
    let forwarder = HttpForwarder::new(config).unwrap();
    for id in 0..10 {
        check(until_accepted(&forwarder, id).await);
    }
    let at_once = (10..30).map(|id| until_accepted(&forwarder, id));
    futures::future::join_all(at_once).await.into_iter().for_each(check);
    assert!(answered.load(Ordering::SeqCst) >= 30);
    task.abort();
}

/// Accepted in the end, and nothing on the way that would make a dead letter of it.
fn check(verdicts: Vec<Verdict>) {
    let (last, before) = verdicts.split_last().unwrap();
    assert_eq!(last, &ACCEPTED);
    let transient = [RetryReason::Disconnected, RetryReason::Unreachable];
    let fine = |verdict| reason(verdict).is_some_and(|reason| transient.contains(&reason));
    assert!(before.iter().all(fine), "{before:?}");
}
