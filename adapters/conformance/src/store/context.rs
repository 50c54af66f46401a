//! What cases share: two instances, fresh keys, short forms of the calls.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use inboxd_contract::{
    Attempt, Claim, ClaimAnswer, ClaimRequest, Completion, ConsumerId, DeadLetter, DeadReason,
    Envelope, Fingerprint, InboxKey, InboxStore, Look, MessageId, MessageRecord, Origin, OwnerId,
    Release, Settled, StoreError, Token,
};
use uuid::Uuid;

use super::harness::{Row, StoreHarness};

/// Long enough that no case outlives it, so that only back-dating makes a claim expire.
pub const LEASE: Duration = Duration::from_secs(15);
/// What a call may take that meets a lock: a fifth of the lease, and slack for a busy machine.
pub const LOCK_BOUND: Duration = Duration::from_secs(3 + 5);

/// One adapter under test.
pub struct Context {
    pub harness: Arc<dyn StoreHarness>,
    /// One instance.
    pub a: Arc<dyn InboxStore>,
    /// Another one (the same where only one may exist).
    pub b: Arc<dyn InboxStore>,
    pub owner_a: OwnerId,
    pub owner_b: OwnerId,
}

impl Context {
    pub async fn new(harness: Arc<dyn StoreHarness>) -> Self {
        let a = harness.open().await;
        let b = harness.open().await;
        Self { harness, a, b, owner_a: owner("a"), owner_b: owner("b") }
    }

    pub async fn close(&self) {
        self.a.close().await;
        self.b.close().await;
    }

    /// Claims for instance a.
    pub async fn claim_a(&self, claim: &Claim) -> ClaimAnswer {
        patiently(async || claim_one(&*self.a, &self.owner_a, request(claim)).await).await
    }

    /// Claims for instance b.
    pub async fn claim_b(&self, claim: &Claim) -> ClaimAnswer {
        patiently(async || claim_one(&*self.b, &self.owner_b, request(claim)).await).await
    }

    /// A claim on a fresh key, held by instance a.
    pub async fn held_by_a(&self, name: &str) -> Claim {
        let claim = new_claim(&key(name));
        assert_eq!(self.claim_a(&claim).await, ClaimAnswer::Fresh { attempts: 1 });
        claim
    }

    /// A claim that instance a held and b took over: a's, and b's.
    pub async fn taken_over(&self, name: &str) -> (Claim, Claim) {
        let old = self.held_by_a(name).await;
        self.expire(&old.key).await;
        let new = new_claim(&old.key);
        assert_eq!(self.claim_b(&new).await, ClaimAnswer::Fresh { attempts: 2 }, "taken over");
        (old, new)
    }

    /// Makes a claim run out a second ago.
    pub async fn expire(&self, key: &InboxKey) {
        self.harness.backdate(Row::Claim(key), Duration::from_secs(1)).await;
    }

    /// A message that was processed.
    pub async fn processed(&self, name: &str) -> InboxKey {
        let claim = self.held_by_a(name).await;
        assert_eq!(complete(&*self.a, &claim).await, Settled::Done);
        claim.key
    }

    /// What the database says of a key.
    pub async fn look(&self, key: &InboxKey) -> Look {
        look(&*self.a, key).await
    }

    pub async fn claim_rows(&self, key: &InboxKey) -> u64 {
        self.harness.rows(Row::Claim(key)).await
    }

    pub async fn message_rows(&self, key: &InboxKey) -> u64 {
        self.harness.rows(Row::Message(key)).await
    }

    pub async fn parked_rows(&self, key: &InboxKey) -> u64 {
        self.harness.rows(Row::Parked(key)).await
    }
}

pub fn owner(name: &str) -> OwnerId {
    OwnerId(format!("{name}-{}", Uuid::new_v4()).into())
}

/// A key that no other case has.
pub fn key(name: &str) -> InboxKey {
    key_of("conformance", &format!("{}:{name}", Uuid::new_v4()))
}

pub fn key_of(consumer: &str, id: &str) -> InboxKey {
    InboxKey {
        consumer_id: ConsumerId::new(consumer).expect("the case names a valid consumer id"),
        message_id: MessageId::from_bytes(id.as_bytes()).expect("the case names a valid id"),
    }
}

/// An id that is too long for every store, as no engine would make it: the member that a
/// database refuses.
pub fn refused_key() -> InboxKey {
    let mut key = key("refused");
    key.message_id =
        MessageId::from_stored(&format!("{}{}", key.message_id.as_str(), "x".repeat(600)));
    key
}

pub fn new_claim(key: &InboxKey) -> Claim {
    Claim { key: key.clone(), token: Token(Uuid::new_v4()) }
}

pub fn request(claim: &Claim) -> ClaimRequest {
    ClaimRequest { claim: claim.clone(), fingerprint: None, position: None, lane_id: None }
}

pub fn requests(claims: &[Claim]) -> Vec<ClaimRequest> {
    claims.iter().map(request).collect()
}

pub fn completion(claim: &Claim) -> Completion {
    Completion {
        claim: claim.clone(),
        record: MessageRecord {
            fingerprint: Some(fingerprint_of(&claim.key)),
            ..MessageRecord::default()
        },
        supersedes_dead: false,
        parked: None,
    }
}

/// A fingerprint that belongs to this key and no other.
pub fn fingerprint_of(key: &InboxKey) -> Fingerprint {
    Fingerprint::of(format!("{}\0{}", key.consumer_id, key.message_id).as_bytes())
}

/// A letter for a claim that is held.
pub fn letter(claim: &Claim) -> DeadLetter {
    DeadLetter { token: Some(claim.token), ..loose_letter(&claim.key) }
}

/// A letter that needs no claim.
pub fn loose_letter(key: &InboxKey) -> DeadLetter {
    DeadLetter {
        key: key.clone(),
        token: None,
        subscription: "orders".into(),
        lane: None,
        lane_id: None,
        first_ago: Default::default(),
        envelope: Arc::new(Envelope::new(at(7), Some(Bytes::from_static(b"body")))),
        body_kept: true,
        fingerprint: None,
        attempts: 1,
        last_status: None,
        last_error: None,
        reason: DeadReason::Refused,
    }
}

/// An origin that has a position.
pub fn at(position: u64) -> Origin {
    Origin::Memory { stream: "orders".into(), position }
}

/// An origin that has none.
pub fn from_queue() -> Origin {
    Origin::RabbitMq {
        queue: "orders".into(),
        exchange: "".into(),
        routing_key: "orders".into(),
        redelivered: true,
        delivery_count: None,
    }
}

pub async fn claim_one(
    store: &dyn InboxStore,
    owner: &OwnerId,
    request: ClaimRequest,
) -> Result<ClaimAnswer, StoreError> {
    only(store.claim(owner, LEASE, &[request]).await)
}

pub async fn complete(store: &dyn InboxStore, claim: &Claim) -> Settled {
    patiently(async || only(store.complete(&[completion(claim)]).await)).await
}

pub async fn dead_letter(store: &dyn InboxStore, letter: &DeadLetter) -> Settled {
    patiently(async || only(store.dead_letter(std::slice::from_ref(letter)).await)).await
}

pub async fn count(store: &dyn InboxStore, claim: &Claim) -> Attempt {
    patiently(async || only(store.count_attempts(std::slice::from_ref(claim)).await)).await
}

pub async fn release(store: &dyn InboxStore, claim: &Claim, attempt_back: bool) -> Settled {
    let release = [Release { claim: claim.clone(), attempt_back }];
    patiently(async || only(store.release(&release).await)).await
}

/// Asks again where a lock was met: beside another call on the same row, a machine that stalls
/// may make any call wait too long. A lock that stays fails the case.
pub async fn patiently<T>(mut call: impl AsyncFnMut() -> Result<T, StoreError>) -> T {
    for _ in 0..20 {
        match call().await {
            Ok(answer) => return answer,
            Err(error) if error.locked => tokio::time::sleep(Duration::from_millis(20)).await,
            Err(error) => panic!("no error was due: {}", told(&error)),
        }
    }
    panic!("locked by somebody else all the time")
}

pub async fn look(store: &dyn InboxStore, key: &InboxKey) -> Look {
    let mut looks = store.look(std::slice::from_ref(key)).await.expect("a look is answered");
    assert_eq!(looks.len(), 1, "one look for one key");
    looks.remove(0)
}

/// The one answer of a batch of one.
pub fn only<T>(mut answers: Vec<T>) -> T {
    assert_eq!(answers.len(), 1, "one answer for one member");
    answers.remove(0)
}

/// All answers, none of them an error.
pub fn all_ok<T>(answers: Vec<Result<T, StoreError>>) -> Vec<T> {
    answers
        .into_iter()
        .map(|answer| answer.unwrap_or_else(|error| panic!("no error was due: {}", told(&error))))
        .collect()
}

/// An error with its source.
pub fn told(error: &StoreError) -> String {
    match &error.source {
        Some(source) => format!("{error} ({:?}, locked {}): {source}", error.class, error.locked),
        None => format!("{error} ({:?}, locked {})", error.class, error.locked),
    }
}

/// An error that says: locked by somebody else, try it alone later.
pub fn assert_locked<T: std::fmt::Debug>(answer: &Result<T, StoreError>) {
    match answer {
        Ok(answer) => panic!("locked by somebody else, and yet answered {answer:?}"),
        Err(error) => {
            assert!(error.locked && error.is_transient(), "not a lock: {}", told(error));
        }
    }
}
