//! What cases of parking share: a subscription of their own, copies, and short forms of the calls.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use inboxd_contract::{
    Arrival, Arrived, Claim, ClaimAnswer, ClaimRequest, Completion, ConsumerId, DeadLetter,
    Envelope, InboxKey, InboxStore, LaneId, NewCopy, OwnerId, ParkReason, ParkedFilter, ParkedRow,
    Parking, Reschedule, Settled, StreamId, TakeDue, Taken, TakenBatch, Token, Unpark,
};
use uuid::Uuid;

use super::context::{
    Context, LEASE, at, claim_one, completion, dead_letter, fingerprint_of, key, letter, new_claim,
    only, patiently, request,
};

pub const HOUR: Duration = Duration::from_secs(3_600);
/// The machine may be slow; the difference of two time zones is larger.
pub const SLACK: Duration = Duration::from_secs(60);

/// A subscription that no other case has, so that nobody else takes its rows.
pub struct Subscription<'a> {
    pub context: &'a Context,
    pub name: Arc<str>,
}

impl<'a> Subscription<'a> {
    pub fn new(context: &'a Context) -> Self {
        Self { context, name: format!("s{}", Uuid::new_v4().simple()).into() }
    }

    /// The lane of this ordering key.
    pub fn lane(&self, lane: &str) -> LaneId {
        LaneId::new(&consumer(), &self.name, &StreamId("orders".into()), lane.as_bytes())
    }

    /// A copy that is due at once, in no lane.
    pub fn copy(&self, key: &InboxKey) -> NewCopy {
        NewCopy {
            subscription: Arc::clone(&self.name),
            lane: None,
            lane_id: None,
            envelope: Arc::new(Envelope::new(at(7), Some(Bytes::from_static(b"body")))),
            fingerprint: Some(fingerprint_of(key)),
            attempts: 0,
            delay: Duration::ZERO,
            last_status: None,
            last_error: None,
            reason: ParkReason::Stored,
            first_ago: Duration::ZERO,
        }
    }

    pub fn arrival(&self, key: &InboxKey) -> Arrival {
        Arrival { key: key.clone(), copy: self.copy(key) }
    }

    pub fn arrival_in(&self, key: &InboxKey, lane: &str) -> Arrival {
        let mut arrival = self.arrival(key);
        arrival.copy.lane = Some(lane.as_bytes().to_vec());
        arrival.copy.lane_id = Some(self.lane(lane));
        arrival
    }

    pub async fn arrive(&self, arrivals: &[Arrival]) -> Vec<Arrived> {
        let arrived = patiently(async || self.context.a.arrive(arrivals).await).await;
        assert_eq!(arrived.len(), arrivals.len(), "an answer for each");
        arrived
    }

    /// These arrive, and none was there before.
    pub async fn parked(&self, arrivals: &[Arrival]) {
        let arrived = self.arrive(arrivals).await;
        assert!(arrived.iter().all(|arrived| *arrived == Arrived::Parked), "{arrived:?}");
    }

    /// A fresh message that is due now, in no lane.
    pub async fn due(&self, name: &str) -> InboxKey {
        let key = key(name);
        self.parked(&[self.arrival(&key)]).await;
        key
    }

    /// Fresh messages that are due now, one after the other in one lane.
    pub async fn due_in(&self, lane: &str, count: usize) -> Vec<InboxKey> {
        let keys: Vec<_> = (0..count).map(|index| key(&format!("{lane}{index}"))).collect();
        let arrivals: Vec<_> = keys.iter().map(|key| self.arrival_in(key, lane)).collect();
        self.parked(&arrivals).await;
        keys
    }

    /// Asks for so many rows, each lane's head alone, beginning with any lane.
    pub fn asking(&self, rows: usize) -> TakeDue {
        TakeDue {
            consumer_id: consumer(),
            subscription: Arc::clone(&self.name),
            tokens: (0..rows).map(|_| Token(Uuid::new_v4())).collect(),
            run_max: 1,
            bytes_max: 1 << 30,
            lanes_from: LaneId(*Uuid::new_v4().as_bytes()),
        }
    }

    /// Asks for a run of each lane too.
    pub fn asking_runs(&self, rows: usize, run_max: usize) -> TakeDue {
        TakeDue { run_max, ..self.asking(rows) }
    }

    pub async fn take_a(&self, request: &TakeDue) -> TakenBatch {
        take(&*self.context.a, &self.context.owner_a, request).await
    }

    pub async fn take_b(&self, request: &TakeDue) -> TakenBatch {
        take(&*self.context.b, &self.context.owner_b, request).await
    }

    /// The keys of what instance b gets of up to 16 rows.
    pub async fn keys_for_b(&self) -> Vec<InboxKey> {
        keys_of(&self.take_b(&self.asking(16)).await)
    }

    /// A fresh message in the hands of a worker of instance a.
    pub async fn taken_by_a(&self, name: &str) -> Taken {
        self.due(name).await;
        only(self.take_a(&self.asking(1)).await.rows)
    }

    /// A claim on the message that its holder parks: the attempt failed.
    pub fn parking(&self, claim: &Claim) -> Parking {
        let copy = NewCopy { attempts: 1, reason: ParkReason::Failed, ..self.copy(&claim.key) };
        Parking { claim: claim.clone(), copy }
    }

    /// A dead letter of this subscription.
    pub fn letter(&self, claim: &Claim) -> DeadLetter {
        DeadLetter {
            subscription: Arc::clone(&self.name),
            fingerprint: Some(fingerprint_of(&claim.key)),
            ..letter(claim)
        }
    }

    /// A fresh message that the application refused.
    pub async fn dead(&self, name: &str) -> InboxKey {
        let claim = self.context.held_by_a(name).await;
        let letter = self.letter(&claim);
        assert_eq!(dead_letter(&*self.context.a, &letter).await, Settled::Done);
        claim.key
    }

    /// All rows of this subscription, in the order of `seq`.
    pub async fn rows(&self) -> Vec<ParkedRow> {
        self.listed(&self.filter()).await
    }

    /// Everything of this subscription.
    pub fn filter(&self) -> ParkedFilter {
        ParkedFilter { subscription: Some(self.name.to_string()), ..ParkedFilter::default() }
    }

    pub async fn listed(&self, filter: &ParkedFilter) -> Vec<ParkedRow> {
        self.context.b.list_parked(filter, None, 1_000).await.expect("a list is answered")
    }

    /// The one row of this key.
    pub async fn row(&self, key: &InboxKey) -> ParkedRow {
        let filter = ParkedFilter { message_id: Some(key.message_id.clone()), ..self.filter() };
        only(self.listed(&filter).await)
    }
}

/// The consumer id of all fresh keys.
pub fn consumer() -> ConsumerId {
    ConsumerId::new("conformance").expect("it is valid")
}

pub async fn take(store: &dyn InboxStore, owner: &OwnerId, request: &TakeDue) -> TakenBatch {
    let batch = patiently(async || store.take_due(owner, LEASE, request).await).await;
    assert!(batch.rows.len() <= request.tokens.len(), "a token for each row at most");
    for row in &batch.rows {
        assert!(request.tokens.contains(&row.claim.token), "its claim has a token of the request");
    }
    batch
}

pub fn keys_of(batch: &TakenBatch) -> Vec<InboxKey> {
    batch.rows.iter().map(|row| row.claim.key.clone()).collect()
}

/// Both in one order, for what has none.
pub fn assert_same_keys(left: Vec<InboxKey>, right: &[InboxKey]) {
    let (mut left, mut right) = (left, right.to_vec());
    left.sort();
    right.sort();
    assert_eq!(left, right);
}

/// A claim by instance b for a copy of this message that has just been delivered.
pub async fn claim_copy(context: &Context, claim: &Claim, lane_id: Option<LaneId>) -> ClaimAnswer {
    let ask =
        ClaimRequest { fingerprint: Some(fingerprint_of(&claim.key)), lane_id, ..request(claim) };
    patiently(async || claim_one(&*context.b, &context.owner_b, ask.clone()).await).await
}

/// The same, by a fresh token.
pub async fn claim_anew(context: &Context, key: &InboxKey, lane_id: Option<LaneId>) -> ClaimAnswer {
    claim_copy(context, &new_claim(key), lane_id).await
}

pub async fn park(store: &dyn InboxStore, parking: &Parking) -> Settled {
    patiently(async || only(store.park(std::slice::from_ref(parking)).await)).await
}

/// What a worker says of an accepted message.
pub fn finished(taken: &Taken) -> Completion {
    Completion { parked: Some(taken.seq), ..completion(&taken.claim) }
}

pub async fn finish(store: &dyn InboxStore, taken: &Taken) -> Settled {
    patiently(async || only(store.complete(&[finished(taken)]).await)).await
}

/// What a worker says of a message that failed: once more in an hour.
pub fn put_off(taken: &Taken) -> Reschedule {
    Reschedule {
        claim: taken.claim.clone(),
        seq: taken.seq,
        delay: HOUR,
        last_status: Some(500),
        last_error: Some(String::from("down \u{2615}")),
        attempt_back: false,
    }
}

pub async fn reschedule(store: &dyn InboxStore, reschedule: &Reschedule) -> Settled {
    patiently(async || only(store.reschedule(std::slice::from_ref(reschedule)).await)).await
}

pub async fn unpark(store: &dyn InboxStore, taken: &Taken) -> Settled {
    let unpark = [Unpark { claim: taken.claim.clone(), seq: taken.seq }];
    patiently(async || only(store.unpark(&unpark).await)).await
}
