//! What goes over the wire: statements per message, answers that are lost, a peer that is silent.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use inboxd_conformance::net::{Act, Direction, Proxy};
use inboxd_contract::{ClaimAnswer, InboxStore, Settled};
use inboxd_postgres::{PostgresConfig, PostgresStore};

use crate::failover::{claim, new_claim};
use crate::harness::{Harness, config};
use crate::server::completion;

/// A proxy before the shared server, and a store behind it with one connection.
async fn behind_proxy(harness: &Harness) -> (Proxy, PostgresStore) {
    let url = url::Url::parse(&harness.url).expect("a URL");
    let host = url.host_str().expect("a host");
    let proxy = Proxy::start(format!("{host}:{}", url.port().unwrap_or(5432))).await;
    let mut through = url.clone();
    through.set_host(Some("127.0.0.1")).expect("a host");
    through.set_port(Some(proxy.port())).expect("a port");
    through.query_pairs_mut().append_pair("sslmode", "disable");
    let config = PostgresConfig {
        pool_max: 1,
        lease: Duration::from_secs(1),
        ..config(through.as_str(), &harness.schema)
    };
    (proxy, PostgresStore::connect(config).expect("a valid configuration"))
}

/// Statements that a client sends: simple queries whole, executions of prepared ones.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct Sent {
    simple: Vec<String>,
    executed: usize,
    /// Round trips but for the pool's own check: each simple query or Sync after an Execute.
    round_trips: usize,
}

/// Reads messages of the protocol (type, length, body) from chunks.
fn read_messages(buffer: &mut Vec<u8>, sent: &mut Sent) {
    while buffer.len() >= 5 {
        let length = u32::from_be_bytes([buffer[1], buffer[2], buffer[3], buffer[4]]) as usize;
        if buffer.len() < 1 + length {
            return;
        }
        let message: Vec<u8> = buffer.drain(..1 + length).collect();
        match message[0] {
            b'Q' => {
                let text = String::from_utf8_lossy(&message[5..message.len() - 1]);
                sent.simple.push(text.split_whitespace().next().unwrap_or("").to_owned());
                sent.round_trips += 1;
            }
            b'E' => {
                sent.executed += 1;
                sent.round_trips += 1;
            }
            _ => {}
        }
    }
}

/// The numbers of docs/store-statements.md.
#[tokio::test]
async fn one_message_costs_one_claim_and_one_completion() {
    let harness = Harness::new().await;
    let (proxy, store) = behind_proxy(&harness).await;
    // Connected, and all statements prepared.
    let first = new_claim();
    assert!(claim(&store, &first).await.expect("claimed").is_held());
    store.complete(&[completion(&first)]).await.remove(0).expect("completed");

    let sent = Arc::new(Mutex::new(Sent::default()));
    let seen = Arc::clone(&sent);
    let mut buffer = Vec::new();
    proxy.hook(move |direction, chunk| {
        if direction == Direction::ToServer {
            buffer.extend_from_slice(chunk);
            read_messages(&mut buffer, &mut seen.lock().expect("no panic"));
        }
        Act::Pass
    });
    let take = || std::mem::take(&mut *sent.lock().expect("no panic"));

    let one = new_claim();
    assert!(claim(&store, &one).await.expect("claimed").is_held());
    let begin_commit = vec![String::from("BEGIN"), String::from("COMMIT")];
    let expected = Sent { simple: begin_commit.clone(), executed: 2, round_trips: 4 };
    assert_eq!(take(), expected, "a claim: claim and look");

    store.complete(&[completion(&one)]).await.remove(0).expect("completed");
    let expected = Sent { simple: begin_commit.clone(), executed: 1, round_trips: 3 };
    assert_eq!(take(), expected, "a completion: one statement");

    let again = claim(&store, &new_claim_of(&one)).await.expect("claimed");
    assert_eq!(again, ClaimAnswer::Processed { fingerprint: None });
    let expected = Sent { simple: begin_commit, executed: 3, round_trips: 5 };
    assert_eq!(take(), expected, "a duplicate: claim, look, and away with the claim");
    store.close().await;
    harness.drop_schemas().await;
}

fn new_claim_of(claim: &inboxd_contract::Claim) -> inboxd_contract::Claim {
    inboxd_contract::Claim { key: claim.key.clone(), ..new_claim() }
}

/// From the next COMMIT on, the server's answers do not arrive.
fn lose_answer_of_next_commit(proxy: &Proxy) {
    let mut committing = false;
    proxy.hook(move |direction, chunk| {
        if direction == Direction::ToServer {
            committing |= chunk.windows(7).any(|window| window == b"COMMIT\0");
            return Act::Pass;
        }
        if committing { Act::CutAfter(0) } else { Act::Pass }
    });
}

#[tokio::test]
async fn commit_whose_answer_is_lost_is_found_again() {
    let harness = Harness::new().await;
    let (proxy, store) = behind_proxy(&harness).await;
    let one = new_claim();
    lose_answer_of_next_commit(&proxy);
    let error = claim(&store, &one).await.expect_err("its answer is lost");
    assert!(error.is_transient(), "{error}");
    proxy.heal();
    let answer = claim(&store, &one).await.expect("claimed");
    assert_eq!(answer, ClaimAnswer::Fresh { attempts: 1 }, "ours, and counted once");

    lose_answer_of_next_commit(&proxy);
    let error = store.complete(&[completion(&one)]).await.remove(0).expect_err("lost");
    assert!(error.is_transient(), "{error}");
    proxy.heal();
    match store.complete(&[completion(&one)]).await.remove(0).expect("answered") {
        Settled::Lost(look) => assert_eq!(look.processed, Some(None), "our own commit"),
        other => panic!("committed before, and now {other:?}"),
    }
    store.close().await;
    harness.drop_schemas().await;
}

#[tokio::test]
async fn silent_peer_is_given_up() {
    let harness = Harness::new().await;
    let (proxy, store) = behind_proxy(&harness).await;
    store.ping().await.expect("writable");
    proxy.black_hole();
    let started = Instant::now();
    let error = store.ping().await.expect_err("nothing answers");
    assert!(error.is_transient(), "{error}");
    assert!(started.elapsed() < Duration::from_secs(20), "took {:?}", started.elapsed());
    proxy.sever();
    proxy.heal();
    store.ping().await.expect("a new connection");
    store.close().await;
    harness.drop_schemas().await;
}
