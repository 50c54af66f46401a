//! Single flight: of several deliveries with one key in this process, one is at it and the
//! others wait for what it comes to.
//!
//! Invariants: followers are told "processed" only after the leader's row is known to be
//! committed; a leader that ends in any other way, a panic included, leaves the key undecided
//! and one of the followers leads next. Leading never waits for a lane: it is taken with the
//! lane's turn in hand, so that lanes and flights cannot wait for each other in a ring.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use inboxd_contract::{Fingerprint, InboxKey};
use tokio::sync::oneshot;

/// How a flight ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FlightEnd {
    /// The row is committed.
    Processed {
        /// The row's fingerprint.
        fingerprint: Option<Fingerprint>,
    },
    /// Not decided: enter again.
    Undecided,
}

type Followers = Vec<oneshot::Sender<FlightEnd>>;

/// All flights of one process.
#[derive(Clone, Default)]
pub struct Flights(Arc<Mutex<HashMap<InboxKey, Followers>>>);

/// What entering came to.
pub enum Entry {
    /// First: do the work.
    Leader(Leader),
    /// Somebody is at it: wait.
    Follower(oneshot::Receiver<FlightEnd>),
}

/// The one that is at it.
pub struct Leader {
    flights: Flights,
    key: InboxKey,
    /// The key is given up: from then on it may be somebody else's.
    ended: bool,
}

impl Flights {
    /// Leads, or follows whoever leads.
    pub fn enter(&self, key: &InboxKey) -> Entry {
        let mut flights = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(followers) = flights.get_mut(key) {
            let (sender, receiver) = oneshot::channel();
            followers.push(sender);
            return Entry::Follower(receiver);
        }
        flights.insert(key.clone(), Vec::new());
        Entry::Leader(Leader { flights: self.clone(), key: key.clone(), ended: false })
    }

    fn end(&self, key: &InboxKey, end: &FlightEnd) {
        let followers = self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(key);
        for follower in followers.into_iter().flatten() {
            let _ = follower.send(end.clone());
        }
    }
}

impl Leader {
    /// The row is committed: everybody who waited is a duplicate.
    pub fn processed(mut self, fingerprint: Option<Fingerprint>) {
        self.ended = true;
        self.flights.end(&self.key, &FlightEnd::Processed { fingerprint });
    }
}

impl Drop for Leader {
    fn drop(&mut self) {
        if !self.ended && !broken!(ForgetFollowers) {
            self.flights.end(&self.key, &FlightEnd::Undecided);
        }
    }
}
