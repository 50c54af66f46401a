//! What goes over the wire: statements per message, answers that are lost, a peer that is silent.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use inboxd_conformance::net::{Act, Direction, Proxy};
use inboxd_contract::{
    Arrival, ClaimAnswer, Completion, Envelope, InboxKey, InboxStore, LaneId, NewCopy, Origin,
    OwnerId, ParkReason, Parking, Reschedule, Settled, TakeDue, Unpark,
};
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

/// From now on, what is sent is counted; answers it, and begins anew.
fn counted(proxy: &Proxy) -> impl Fn() -> Sent {
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
    move || std::mem::take(&mut *sent.lock().expect("no panic"))
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

    let take = counted(&proxy);

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

fn copy(lane: Option<LaneId>) -> NewCopy {
    let origin = Origin::Memory { stream: "orders".into(), position: 1 };
    NewCopy {
        subscription: "orders".into(),
        lane: None,
        lane_id: lane,
        envelope: Arc::new(Envelope::new(origin, None)),
        fingerprint: None,
        attempts: 0,
        delay: Duration::ZERO,
        last_status: None,
        last_error: None,
        reason: ParkReason::Stored,
        first_ago: Duration::ZERO,
    }
}

fn asking(key: &InboxKey) -> TakeDue {
    TakeDue {
        consumer_id: key.consumer_id.clone(),
        subscription: "orders".into(),
        tokens: (0..8).map(|_| new_claim().token).collect(),
        run_max: 8,
        bytes_max: 1 << 20,
        lanes_from: LaneId([7; 16]),
    }
}

/// The numbers of docs/store-statements.md.
#[tokio::test]
async fn parked_messages_cost_what_is_told() {
    let harness = Harness::new().await;
    let (proxy, store) = behind_proxy(&harness).await;
    store.ping().await.expect("writable");
    let take = counted(&proxy);
    let expect = |doing: &str, executed: usize| {
        let simple = vec![String::from("BEGIN"), String::from("COMMIT")];
        assert_eq!(take(), Sent { simple, executed, round_trips: executed + 2 }, "{doing}");
    };
    let owner = OwnerId("a".into());
    let lease = Duration::from_secs(1);

    let claims: Vec<_> = (0..3).map(|_| new_claim()).collect();
    assert!(claim(&store, &claims[0]).await.expect("claimed").is_held());
    take();
    let parking = Parking { claim: claims[0].clone(), copy: copy(None) };
    store.park(&[parking]).await.remove(0).expect("parked");
    expect("parking: removal of the claim, look, copy", 3);
    let again = claim(&store, &new_claim_of(&claims[0])).await.expect("claimed");
    assert_eq!(again, ClaimAnswer::Parked { fingerprint: None });
    expect("a copy of a parked message: claim, look, and away with the claim", 3);

    let batch = store.take_due(&owner, lease, &asking(&claims[0].key)).await.expect("taken");
    let taken = &batch.rows[0];
    expect("taking: rows, heads of lanes, claim, and the look that reads them", 4);
    let later = Reschedule {
        claim: taken.claim.clone(),
        seq: taken.seq,
        attempt_back: false,
        delay: Duration::ZERO,
        last_status: None,
        last_error: None,
    };
    store.reschedule(&[later]).await.remove(0).expect("put off");
    expect("putting off: one statement", 1);
    let batch = store.take_due(&owner, lease, &asking(&claims[0].key)).await.expect("taken");
    let taken = &batch.rows[0];
    take();
    let done = Completion { parked: Some(taken.seq), ..completion(&taken.claim) };
    store.complete(&[done]).await.remove(0).expect("completed");
    expect("a completion with its row: one statement, and the removal of the row", 2);
    let batch = store.take_due(&owner, lease, &asking(&claims[0].key)).await.expect("taken");
    assert!(batch.rows.is_empty());
    expect("taking where nothing is due: rows, heads of lanes", 2);

    let lane = Some(LaneId([1; 16]));
    let arrivals =
        [&claims[1], &claims[2]].map(|claim| Arrival { key: claim.key.clone(), copy: copy(lane) });
    store.arrive(&arrivals).await.expect("arrived");
    expect("arrivals: look, copies", 2);
    let batch = store.take_due(&owner, lease, &asking(&claims[1].key)).await.expect("taken");
    assert_eq!(batch.rows.len(), 2);
    expect("taking with a run: also what follows the heads, and its locks", 6);
    let taken = &batch.rows[0];
    let gone = Unpark { claim: taken.claim.clone(), seq: taken.seq };
    store.unpark(&[gone]).await.remove(0).expect("removed");
    expect("removing the row of a processed message: claim, row", 2);
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
