//! Keeps leases alive while their attempts are under way.
//!
//! Invariants: a lease is valid, on the monotonic clock, for its length from *before* the call
//! that took or renewed it was sent, so that it ends here no later than in the database; an
//! attempt that ends in any way leaves the set at once (the guard's drop), so that no orphan
//! lives for ever; nothing is inferred from a renewal that did not answer.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use inboxd_contract::{Claim, ErrorCode, InboxStore, StoreError, Token};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Claims named in one renewal.
const RENEWAL_MEMBERS_MAX: usize = 512;

struct Held {
    claim: Claim,
    valid_until: Instant,
}

type HeldSet = Arc<Mutex<BTreeMap<Token, Held>>>;

/// The claims of one process.
#[derive(Clone)]
pub struct Keeper {
    held: HeldSet,
    lease: Duration,
}

/// A claim in the keeper's care; dropping it ends the renewals, not the claim.
pub struct Lease {
    held: HeldSet,
    claim: Claim,
}

impl Keeper {
    /// An empty set.
    pub fn new(lease: Duration) -> Self {
        Self { held: HeldSet::default(), lease }
    }

    /// Takes a claim into care. `sent_at`: when the claiming call was sent.
    pub fn hold(&self, claim: Claim, sent_at: Instant) -> Lease {
        let held = Held { claim: claim.clone(), valid_until: sent_at + self.lease };
        lock(&self.held).insert(claim.token, held);
        Lease { held: self.held.clone(), claim }
    }

    /// Renews at a third of the lease until `stop`.
    pub async fn run(self, store: Arc<dyn InboxStore>, stop: CancellationToken) {
        let mut interval = tokio::time::interval(self.lease / 3);
        interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                _ = interval.tick() => {}
            }
            let claims: Vec<Claim> =
                lock(&self.held).values().map(|held| held.claim.clone()).collect();
            for chunk in claims.chunks(RENEWAL_MEMBERS_MAX) {
                tokio::select! {
                    biased;
                    () = stop.cancelled() => return,
                    () = self.renew(&*store, chunk) => {}
                }
            }
        }
    }

    /// Renews these now. Claims that were not extended keep the validity they had.
    pub async fn renew(&self, store: &dyn InboxStore, claims: &[Claim]) {
        let sent_at = Instant::now();
        // A connection that hangs must not keep the next renewal from a fresh one.
        let renewal = tokio::time::timeout(self.lease / 3, store.renew(self.lease, claims)).await;
        let renewal = renewal
            .unwrap_or_else(|_| Err(StoreError::transient("the database did not answer in time")));
        match renewal {
            Ok(tokens) => {
                let mut held = lock(&self.held);
                for token in tokens {
                    if let Some(held) = held.get_mut(&token) {
                        held.valid_until = sent_at + self.lease;
                    }
                }
            }
            Err(error) => {
                tracing::warn!(code = %ErrorCode::LeasesNotRenewed, claims = claims.len(), %error, "leases could not be renewed");
            }
        }
    }
}

impl Lease {
    /// The claim.
    pub fn claim(&self) -> &Claim {
        &self.claim
    }

    /// A forward may begin.
    pub fn has_time_left(&self) -> bool {
        lock(&self.held)
            .get(&self.claim.token)
            .is_some_and(|held| held.valid_until > Instant::now())
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if broken!(RenewForEver) {
            return;
        }
        lock(&self.held).remove(&self.claim.token);
    }
}

fn lock(held: &HeldSet) -> std::sync::MutexGuard<'_, BTreeMap<Token, Held>> {
    held.lock().unwrap_or_else(PoisonError::into_inner)
}
