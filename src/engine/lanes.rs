//! Lanes: messages of one lane pass one at a time, in the order they entered.
//!
//! Invariants: a place in the queue is taken synchronously by the one intake of a
//! subscription, so that the order is the broker's; exactly the head of a lane has its turn;
//! dropping a ticket, at any time, passes the turn on. A lane without tickets takes no memory.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use inboxd_contract::StreamId;
use tokio::sync::oneshot;

/// What is kept in order: a key within what the broker orders by.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct LaneKey {
    /// Topic and partition, or the queue.
    pub stream: StreamId,
    /// The ordering key.
    pub key: Vec<u8>,
}

struct Waiting {
    ticket: u64,
    /// Sent when the ticket becomes the head; `None` once it is.
    turn: Option<oneshot::Sender<()>>,
}

#[derive(Default)]
struct State {
    next_ticket: u64,
    lanes: HashMap<LaneKey, VecDeque<Waiting>>,
}

/// All lanes of one subscription.
#[derive(Clone, Default)]
pub struct Lanes(Arc<Mutex<State>>);

/// A place in a lane.
pub struct Ticket {
    lanes: Lanes,
    key: LaneKey,
    ticket: u64,
    turn: Option<oneshot::Receiver<()>>,
}

impl Lanes {
    /// Takes the last place of a lane.
    pub fn enter(&self, key: LaneKey) -> Ticket {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let ticket = state.next_ticket;
        state.next_ticket += 1;
        let lane = state.lanes.entry(key.clone()).or_default();
        let (sender, receiver) = oneshot::channel();
        let is_head = lane.is_empty();
        lane.push_back(Waiting { ticket, turn: (!is_head).then_some(sender) });
        Ticket { lanes: self.clone(), key, ticket, turn: (!is_head).then_some(receiver) }
    }

    /// Lanes that hold at least one ticket.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).lanes.len()
    }
}

impl Ticket {
    /// Waits until everything that entered before has left.
    ///
    /// # Cancel safety
    /// Cancel-safe: the place is kept.
    pub async fn turn(&mut self) {
        if let Some(receiver) = &mut self.turn {
            // The sender lives in the lane as long as this ticket does.
            let _ = receiver.await;
            self.turn = None;
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut state = self.lanes.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(lane) = state.lanes.get_mut(&self.key) else { return };
        let Some(place) = lane.iter().position(|waiting| waiting.ticket == self.ticket) else {
            return;
        };
        lane.remove(place);
        if lane.is_empty() {
            state.lanes.remove(&self.key);
        } else if place == 0
            && let Some(sender) = lane.front_mut().and_then(|head| head.turn.take())
        {
            let _ = sender.send(());
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    fn key(name: &str) -> LaneKey {
        LaneKey { stream: StreamId("topic/0".into()), key: name.as_bytes().to_vec() }
    }

    #[test]
    fn the_turn_passes_in_order_of_entering() {
        let lanes = Lanes::default();
        let mut first = lanes.enter(key("a"));
        let mut second = lanes.enter(key("a"));
        let mut other = lanes.enter(key("b"));
        assert!(first.turn().now_or_never().is_some());
        assert!(other.turn().now_or_never().is_some());
        assert!(second.turn().now_or_never().is_none());
        drop(first);
        assert!(second.turn().now_or_never().is_some());
    }

    #[test]
    fn one_that_leaves_from_the_middle_stops_nobody() {
        let lanes = Lanes::default();
        let first = lanes.enter(key("a"));
        let second = lanes.enter(key("a"));
        let mut third = lanes.enter(key("a"));
        drop(second);
        assert!(third.turn().now_or_never().is_none());
        drop(first);
        assert!(third.turn().now_or_never().is_some());
        drop(third);
        assert_eq!(lanes.len(), 0);
    }
}
