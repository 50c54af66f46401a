//! The store in memory: the suite, and its fault plan.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use inboxd_conformance::store::{Guard, Row, StoreHarness, StoreTraits};
use inboxd_contract::{
    Claim, ClaimAnswer, ClaimRequest, Completion, ConsumerId, InboxKey, InboxStore, MessageId,
    MessageRecord, OwnerId, ParkedSeq, ParkedState, Settled, StoreError, Token,
};
use inboxd_memory::{
    FaultPoint, MemoryDatabase, MemoryLock, MemoryStore, MemoryTable, ScriptedFaults, StoreCall,
    StoreFault,
};

struct Harness(Arc<MemoryDatabase>);

struct Open(MemoryLock);

#[async_trait]
impl Guard for Open {
    async fn commit(self: Box<Self>) {
        self.0.commit();
    }

    async fn rollback(self: Box<Self>) {
        self.0.rollback();
    }
}

fn table_and_key(row: Row<'_>) -> (MemoryTable, &InboxKey) {
    match row {
        Row::Claim(key) => (MemoryTable::Claims, key),
        Row::Message(key) => (MemoryTable::Messages, key),
        Row::Parked(key) => (MemoryTable::Parked, key),
    }
}

#[async_trait]
impl StoreHarness for Harness {
    fn adapter(&self) -> &'static str {
        "memory"
    }

    fn traits(&self) -> StoreTraits {
        StoreTraits { row_locks: true, instances: 8, sweep_lock: true, migrations: false }
    }

    async fn open(&self) -> Arc<dyn InboxStore> {
        Arc::new(MemoryStore::new(Arc::clone(&self.0)))
    }

    async fn backdate(&self, row: Row<'_>, age: Duration) {
        let (table, key) = table_and_key(row);
        self.0.backdate(table, key, age);
    }

    async fn rows(&self, row: Row<'_>) -> u64 {
        let (table, key) = table_and_key(row);
        self.0.rows_of(table, key) as u64
    }

    async fn discard(&self, key: &InboxKey) {
        self.0.discard(key);
    }

    async fn hold_uncommitted_message(&self, key: &InboxKey) -> Box<dyn Guard> {
        Box::new(Open(self.0.lock_message(key)))
    }

    async fn hold_open_completion(&self, claim: &Claim) -> Box<dyn Guard> {
        Box::new(Open(self.0.lock_completion(&claim.key)))
    }

    async fn lock_claim(&self, key: &InboxKey) -> Box<dyn Guard> {
        Box::new(Open(self.0.lock_claim(key)))
    }

    async fn backdate_due(&self, key: &InboxKey, age: Duration) {
        self.0.backdate_due(key, age);
    }

    async fn backdate_first(&self, key: &InboxKey, age: Duration) {
        self.0.set_first_ago(key, age);
    }

    async fn backdate_audit(&self, seq: ParkedSeq, age: Duration) {
        self.0.backdate_audit(seq, age);
    }

    async fn rows_in_state(&self, key: &InboxKey, state: ParkedState) -> u64 {
        self.0.rows_in_state(key, state) as u64
    }

    async fn lock_parked(&self, key: &InboxKey) -> Box<dyn Guard> {
        Box::new(Open(self.0.lock_parked(key)))
    }

    async fn hold_sweep_lock(&self) -> Box<dyn Guard> {
        Box::new(Open(self.0.lock_sweep()))
    }
}

#[tokio::test(start_paused = true)]
async fn store_conforms() {
    inboxd_conformance::store::run(Arc::new(Harness(MemoryDatabase::new()))).await;
}

#[tokio::test(start_paused = true)]
async fn parking_conforms() {
    inboxd_conformance::store::run_parking(Arc::new(Harness(MemoryDatabase::new()))).await;
}

const LEASE: Duration = Duration::from_secs(15);

fn claim() -> Claim {
    let key = InboxKey {
        consumer_id: ConsumerId::new("billing").unwrap(),
        message_id: MessageId::from_bytes(b"m1").unwrap(),
    };
    Claim { key, token: Token(uuid::Uuid::new_v4()) }
}

async fn ask(store: &MemoryStore, claim: &Claim) -> Result<ClaimAnswer, StoreError> {
    let request =
        ClaimRequest { claim: claim.clone(), fingerprint: None, position: None, lane_id: None };
    store.claim(&OwnerId("a".into()), LEASE, &[request]).await.remove(0)
}

async fn complete(store: &MemoryStore, claim: &Claim) -> Result<Settled, StoreError> {
    let completion = Completion {
        claim: claim.clone(),
        record: MessageRecord::default(),
        supersedes_dead: false,
        parked: None,
    };
    store.complete(&[completion]).await.remove(0)
}

#[tokio::test(start_paused = true)]
async fn failure_before_commit_changes_nothing_and_after_commit_everything() {
    let database = MemoryDatabase::new();
    let faults = Arc::new(ScriptedFaults::default());
    let store = MemoryStore::with_faults(Arc::clone(&database), faults.clone());
    let claim = claim();

    faults.push(StoreCall::Claim, StoreFault::at(FaultPoint::BeforeCommit));
    faults.push(StoreCall::Claim, StoreFault::at(FaultPoint::AfterCommit));
    assert!(ask(&store, &claim).await.unwrap_err().is_transient());
    assert_eq!(database.rows_of(MemoryTable::Claims, &claim.key), 0);
    assert!(ask(&store, &claim).await.unwrap_err().is_transient());
    assert_eq!(database.rows_of(MemoryTable::Claims, &claim.key), 1);
    let answer = ask(&store, &claim).await.unwrap();
    assert_eq!(answer, ClaimAnswer::Fresh { attempts: 1 }, "its answer was lost, it is ours");

    faults.push(StoreCall::Complete, StoreFault::at(FaultPoint::AfterCommit));
    assert!(complete(&store, &claim).await.unwrap_err().is_transient());
    let Settled::Lost(look) = complete(&store, &claim).await.unwrap() else {
        panic!("the claim went with the commit whose answer was lost");
    };
    assert_eq!(look.processed, Some(None));
    assert_eq!(faults.left(), 0);
}

#[tokio::test(start_paused = true)]
async fn rows_outlive_their_instances_and_outages() {
    let database = MemoryDatabase::new();
    let claim = claim();
    let first = MemoryStore::new(Arc::clone(&database));
    assert!(ask(&first, &claim).await.unwrap().is_held());
    drop(first);

    let second = MemoryStore::new(Arc::clone(&database));
    database.set_available(false);
    assert!(second.ping().await.unwrap_err().is_transient());
    assert!(complete(&second, &claim).await.unwrap_err().is_transient());
    database.set_available(true);
    second.ping().await.unwrap();
    assert_eq!(complete(&second, &claim).await.unwrap(), Settled::Done);
    assert_eq!(database.processed(), [claim.key]);
}

#[tokio::test(start_paused = true)]
async fn lease_runs_out_by_the_clock_of_tokio() {
    let database = MemoryDatabase::new();
    let store = MemoryStore::new(Arc::clone(&database));
    let (first, second) = (claim(), claim());
    assert!(ask(&store, &first).await.unwrap().is_held());
    tokio::time::advance(LEASE - Duration::from_millis(1)).await;
    let answer = ask(&store, &second).await.unwrap();
    assert_eq!(answer, ClaimAnswer::Busy { wait: Duration::from_millis(1) });
    tokio::time::advance(Duration::from_millis(1)).await;
    assert_eq!(ask(&store, &second).await.unwrap(), ClaimAnswer::Fresh { attempts: 2 });
    database.expire_claims();
    assert_eq!(database.claims_held(), 0);
}
