//! What the simulator relies on beyond the suite: parking under the fault plan.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use inboxd_contract::{
    Actor, Arrival, Arrived, Claim, ClaimAnswer, ClaimRequest, ConsumerId, Envelope, InboxKey,
    InboxStore, LaneId, MessageId, NewCopy, Origin, OwnerId, ParkReason, Parking, Replay, Replayed,
    Reschedule, Settled, StoreError, StreamId, TakeDue, Taken, Token, Unpark,
};
use inboxd_memory::{
    FaultPoint, MemoryChange, MemoryDatabase, MemoryStore, MemoryWitness, ScriptedFaults,
    StoreCall, StoreFault,
};
use uuid::Uuid;

const LEASE: Duration = Duration::from_secs(15);

fn consumer() -> ConsumerId {
    ConsumerId::new("c").expect("valid")
}

fn key(id: &str) -> InboxKey {
    let message_id = MessageId::from_bytes(id.as_bytes()).expect("not blank");
    InboxKey { consumer_id: consumer(), message_id }
}

fn lane(name: &str) -> LaneId {
    LaneId::new(&consumer(), "s", &StreamId("q".into()), name.as_bytes())
}

fn owner() -> OwnerId {
    OwnerId("a".into())
}

fn copy(position: u64, lane_id: Option<LaneId>) -> NewCopy {
    let origin = Origin::Memory { stream: "q".into(), position };
    NewCopy {
        subscription: "s".into(),
        lane: lane_id.map(|_| b"k".to_vec()),
        lane_id,
        envelope: Arc::new(Envelope::new(origin, Some(Bytes::from_static(b"body")))),
        fingerprint: None,
        attempts: 1,
        delay: Duration::ZERO,
        last_status: None,
        last_error: None,
        reason: ParkReason::Failed,
        first_ago: Duration::ZERO,
    }
}

async fn claim(store: &MemoryStore, id: &str) -> Claim {
    let claim = Claim { key: key(id), token: Token(Uuid::new_v4()) };
    let request =
        ClaimRequest { claim: claim.clone(), fingerprint: None, position: None, lane_id: None };
    let answer = store.claim(&owner(), LEASE, &[request]).await.remove(0).expect("an answer");
    assert!(answer.is_held(), "{answer:?}");
    claim
}

async fn park(store: &MemoryStore, claim: Claim, delay: Duration) -> Result<Settled, StoreError> {
    let copy = NewCopy { delay, ..copy(0, None) };
    store.park(&[Parking { claim, copy }]).await.remove(0)
}

async fn arrive(store: &MemoryStore, ids: &[&str], in_lane: Option<LaneId>) -> Vec<Arrived> {
    let arrival = |(position, id): (usize, &&str)| Arrival {
        key: key(id),
        copy: copy(position as u64, in_lane),
    };
    let arrivals: Vec<_> = ids.iter().enumerate().map(arrival).collect();
    store.arrive(&arrivals).await.expect("they arrive")
}

fn asks(tokens: usize, run_max: usize) -> TakeDue {
    TakeDue {
        consumer_id: consumer(),
        subscription: "s".into(),
        tokens: (0..tokens).map(|_| Token(Uuid::new_v4())).collect(),
        run_max,
        bytes_max: 1 << 20,
        lanes_from: LaneId([0; 16]),
    }
}

async fn take(store: &MemoryStore, tokens: usize, run_max: usize) -> Vec<Taken> {
    let request = asks(tokens, run_max);
    store.take_due(&owner(), LEASE, &request).await.expect("a batch").rows
}

fn ids(rows: &[Taken]) -> Vec<&str> {
    rows.iter().map(|row| row.claim.key.message_id.as_str()).collect()
}

#[tokio::test(start_paused = true)]
async fn parking_fails_before_and_after_its_commit() {
    let database = MemoryDatabase::new();
    let faults = Arc::new(ScriptedFaults::default());
    let store = MemoryStore::with_faults(Arc::clone(&database), faults.clone());
    let claim = claim(&store, "m").await;
    faults.push(StoreCall::Park, StoreFault::at(FaultPoint::BeforeCommit));
    faults.push(StoreCall::Park, StoreFault::at(FaultPoint::AfterCommit));
    assert!(park(&store, claim.clone(), LEASE).await.unwrap_err().is_transient());
    assert_eq!((database.due().len(), database.claims_held()), (0, 1));
    assert!(park(&store, claim.clone(), LEASE).await.unwrap_err().is_transient());
    assert_eq!((database.due().len(), database.claims_held()), (1, 0));
    let Settled::Lost(look) = park(&store, claim, LEASE).await.unwrap() else {
        panic!("the claim went with the commit whose answer was lost");
    };
    assert_eq!(look.due, [None]);
}

#[tokio::test(start_paused = true)]
async fn arrivals_are_all_or_none_and_found_again() {
    let database = MemoryDatabase::new();
    let faults = Arc::new(ScriptedFaults::default());
    let store = MemoryStore::with_faults(Arc::clone(&database), faults.clone());
    faults.push(StoreCall::Arrive, StoreFault::at(FaultPoint::AfterCommit));
    let arrivals = [Arrival { key: key("m"), copy: copy(0, None) }];
    assert!(store.arrive(&arrivals).await.unwrap_err().is_transient());
    assert_eq!(store.arrive(&arrivals).await.unwrap(), [Arrived::Known { fingerprint: None }]);
    assert_eq!(database.due().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn attempts_follow_a_row_through_lost_answers_deaths_and_delays() {
    let database = MemoryDatabase::new();
    let store = MemoryStore::new(Arc::clone(&database));
    let held = claim(&store, "m").await;
    assert_eq!(park(&store, held, Duration::from_secs(60)).await.unwrap(), Settled::Done);
    assert!(take(&store, 4, 1).await.is_empty(), "it is not due yet");
    tokio::time::advance(Duration::from_secs(60)).await;
    let first = take(&store, 4, 1).await.remove(0);
    assert_eq!((first.attempts, first.copy.attempts), (2, 1));
    assert!(take(&store, 4, 1).await.is_empty(), "it is held");
    // Its worker dies: the count is in the claim alone.
    tokio::time::advance(LEASE).await;
    let second = take(&store, 4, 1).await.remove(0);
    assert_eq!((second.attempts, second.copy.attempts), (3, 1));
    let later = |taken: &Taken, attempt_back| Reschedule {
        claim: taken.claim.clone(),
        seq: taken.seq,
        attempt_back,
        delay: Duration::ZERO,
        last_status: Some(500),
        last_error: Some("no".into()),
    };
    let lost = store.reschedule(&[later(&first, false)]).await.remove(0).unwrap();
    assert!(matches!(lost, Settled::Lost(_)), "a worker that was taken for dead changes nothing");
    let done = store.reschedule(&[later(&second, false)]).await.remove(0).unwrap();
    assert_eq!(done, Settled::Done);
    let third = take(&store, 4, 1).await.remove(0);
    assert_eq!((third.attempts, third.copy.last_status), (4, Some(500)));
    store.reschedule(&[later(&third, true)]).await.remove(0).unwrap();
    let fourth = take(&store, 4, 1).await.remove(0);
    assert_eq!(fourth.attempts, 4, "the attempt was not made");
    let unpark = Unpark { claim: fourth.claim, seq: fourth.seq };
    assert_eq!(store.unpark(&[unpark]).await.remove(0).unwrap(), Settled::Done);
    assert!(database.due().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_delivery_that_meets_its_parked_copy_leaves_the_count_of_a_dead_worker() {
    let store = MemoryStore::new(MemoryDatabase::new());
    let held = claim(&store, "m").await;
    park(&store, held, Duration::ZERO).await.unwrap();
    assert_eq!(take(&store, 1, 1).await[0].attempts, 2);
    tokio::time::advance(LEASE).await;
    let request = ClaimRequest {
        claim: Claim { key: key("m"), token: Token(Uuid::new_v4()) },
        fingerprint: None,
        position: None,
        lane_id: None,
    };
    let answer = store.claim(&owner(), LEASE, &[request]).await.remove(0).unwrap();
    assert_eq!(answer, ClaimAnswer::Parked { fingerprint: None });
    assert_eq!(take(&store, 1, 1).await[0].attempts, 3);
}

#[tokio::test(start_paused = true)]
async fn workers_take_heads_or_runs_and_every_lane_has_its_turn() {
    let store = MemoryStore::new(MemoryDatabase::new());
    let mut lanes = [lane("x"), lane("y")];
    lanes.sort();
    arrive(&store, &["a1", "a2", "a3"], Some(lanes[0])).await;
    arrive(&store, &["b1", "b2"], Some(lanes[1])).await;
    arrive(&store, &["n1", "n2"], None).await;
    let request = TakeDue { lanes_from: lanes[1], ..asks(3, 2) };
    let batch = store.take_due(&owner(), LEASE, &request).await.unwrap();
    assert_eq!(ids(&batch.rows), ["n1", "b1", "b2"]);
    assert_eq!(batch.next_in, Some(Duration::ZERO), "there is more");
    let batch = store.take_due(&owner(), LEASE, &asks(9, 2)).await.unwrap();
    assert_eq!(ids(&batch.rows), ["n2", "a1", "a2"]);
    assert_eq!(batch.next_in, None, "what is left waits for what is held");
}

#[tokio::test(start_paused = true)]
async fn a_blocked_lane_is_answered_and_a_discarded_row_blocks_nothing() {
    let database = MemoryDatabase::new();
    let store = MemoryStore::new(Arc::clone(&database));
    arrive(&store, &["m1"], Some(lane("x"))).await;
    let request = |lane_id| ClaimRequest {
        claim: Claim { key: key("m2"), token: Token(Uuid::new_v4()) },
        fingerprint: None,
        position: None,
        lane_id,
    };
    let mut answers = Vec::new();
    for lane_id in [Some(lane("x")), Some(lane("y"))] {
        answers.push(store.claim(&owner(), LEASE, &[request(lane_id)]).await.remove(0).unwrap());
        database.expire_claims();
    }
    assert_eq!(
        answers,
        [ClaimAnswer::LaneBlocked { attempts: 0 }, ClaimAnswer::Fresh { attempts: 1 }]
    );
    database.discard(&key("m1"));
    let answer = store.claim(&owner(), LEASE, &[request(Some(lane("x")))]).await.remove(0).unwrap();
    assert_eq!(answer, ClaimAnswer::Fresh { attempts: 2 });
}

#[derive(Default)]
struct Told(Mutex<Vec<&'static str>>);

impl MemoryWitness for Told {
    fn changed(&self, _now: i64, change: MemoryChange<'_>) {
        let what = match change {
            MemoryChange::Claimed { .. } => "claimed",
            MemoryChange::Parked { .. } => "parked",
            MemoryChange::Arrived { .. } => "arrived",
            MemoryChange::Taken { .. } => "taken",
            MemoryChange::Rescheduled { .. } => "rescheduled",
            MemoryChange::Unparked { .. } => "unparked",
            MemoryChange::DeadLettered { .. } => "dead-lettered",
            MemoryChange::Replayed { .. } => "replayed",
            MemoryChange::Discarded { .. } => "discarded",
            _ => "something else",
        };
        self.0.lock().expect("no panic").push(what);
    }
}

#[tokio::test(start_paused = true)]
async fn a_witness_is_told_of_everything() {
    let database = MemoryDatabase::new();
    let store = MemoryStore::new(Arc::clone(&database));
    let told = Arc::new(Told::default());
    database.watch(told.clone());
    let held = claim(&store, "m").await;
    park(&store, held, Duration::ZERO).await.unwrap();
    let taken = take(&store, 1, 1).await.remove(0);
    let letter = inboxd_contract::DeadLetter {
        key: taken.claim.key.clone(),
        token: Some(taken.claim.token),
        subscription: "s".into(),
        lane: None,
        lane_id: None,
        first_ago: Duration::ZERO,
        envelope: Arc::new(taken.copy.envelope.clone()),
        body_kept: true,
        fingerprint: None,
        attempts: 2,
        last_status: Some(422),
        last_error: None,
        reason: inboxd_contract::DeadReason::Refused,
    };
    store.dead_letter(&[letter]).await.remove(0).unwrap();
    let actor = Actor::new("me");
    let replay = Replay {
        seq: taken.seq,
        delay: Duration::ZERO,
        allow_processed: false,
        fresh: Uuid::new_v4(),
    };
    let replayed = store.replay(std::slice::from_ref(&replay), &actor).await.remove(0).unwrap();
    assert_eq!(replayed, Replayed::Due(taken.claim.key.message_id.clone()));
    assert_eq!(store.replay(&[replay], &actor).await.remove(0).unwrap(), Replayed::NotDead);
    let again = take(&store, 1, 1).await.remove(0);
    assert_eq!((again.seq, again.attempts), (taken.seq, 1), "attempts start anew");
    store.unpark(&[Unpark { claim: again.claim, seq: again.seq }]).await.remove(0).unwrap();
    arrive(&store, &["n"], None).await;
    database.discard(&key("n"));
    assert_eq!(
        *told.0.lock().expect("no panic"),
        [
            "claimed",
            "parked",
            "taken",
            "dead-lettered",
            "replayed",
            "replayed",
            "taken",
            "unparked",
            "arrived"
        ]
    );
    assert_eq!(store.audit(None, 10).await.unwrap().len(), 1);
}
