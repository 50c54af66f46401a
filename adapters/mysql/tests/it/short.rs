//! Short forms of what tests do with a store.

use std::sync::Arc;
use std::time::Duration;

use inboxd_contract::{
    Claim, ClaimAnswer, ClaimRequest, Completion, ConsumerId, InboxKey, InboxStore, MessageId,
    OwnerId, Settled, StoreError, Token,
};
use uuid::Uuid;

pub const LEASE: Duration = Duration::from_secs(15);

pub fn key(id: &str) -> InboxKey {
    InboxKey {
        consumer_id: ConsumerId::new("billing").expect("a consumer id"),
        message_id: MessageId::from_bytes(id.as_bytes()).expect("a message id"),
    }
}

pub fn new_claim(id: &str) -> Claim {
    Claim { key: key(id), token: Token(Uuid::new_v4()) }
}

pub fn owner(name: &str) -> OwnerId {
    OwnerId(Arc::from(name))
}

pub fn requests(claims: &[Claim]) -> Vec<ClaimRequest> {
    let request = |claim: &Claim| ClaimRequest {
        claim: claim.clone(),
        fingerprint: None,
        position: None,
        lane_id: None,
    };
    claims.iter().map(request).collect()
}

pub fn completion(claim: &Claim) -> Completion {
    Completion {
        claim: claim.clone(),
        record: Default::default(),
        supersedes_dead: false,
        parked: None,
    }
}

pub async fn claim(store: &dyn InboxStore, claim: &Claim) -> Result<ClaimAnswer, StoreError> {
    let requests = requests(std::slice::from_ref(claim));
    store.claim(&owner("owner"), LEASE, &requests).await.remove(0)
}

pub async fn complete(store: &dyn InboxStore, claim: &Claim) -> Result<Settled, StoreError> {
    store.complete(&[completion(claim)]).await.remove(0)
}
