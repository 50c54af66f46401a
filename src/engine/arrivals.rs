//! Stores messages that nobody has claimed: those of `delivery = "stored"` as they arrive, and in
//! direct delivery those behind a parked message of their lane.
//!
//! Invariants: one writer per subscription and one transaction at a time, in the order of
//! entering, so that places in a lane (`seq`) follow the broker's order; what is behind a member
//! that cannot be written now waits with it where it is of the same lane or message, and passes
//! it otherwise; an answer is given after the commit alone; nothing is written for a delivery
//! whose fence is lost.
//!
//! | died after | what is left | what comes of it |
//! |---|---|---|
//! | entering | nothing | delivered again |
//! | the commit | the due copy | forwarded by a worker; delivered again, `parked_duplicate`, acked |
//! | the ack | the due copy | forwarded by a worker |

use std::collections::VecDeque;
use std::sync::Arc;

use inboxd_contract::{Arrival, Arrived, Fence, Fingerprint, StoreError};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use super::hub::Hub;
use super::worker::Due;

/// Members of one transaction.
const BATCH_MAX: usize = 64;
/// Bytes of one transaction; one member may overshoot.
const BATCH_BYTES_MAX: usize = 1 << 20;

/// What an arrival came to.
#[derive(Debug)]
pub(super) enum Answer {
    Arrived(Arrived),
    /// The database will never take it.
    Refused(StoreError),
    /// Nothing is known to be written: the delivery goes back.
    Stopped,
}

/// Where arrivals are handed in.
pub(super) struct Arrivals {
    /// Bounded by the budget: each member belongs to a delivery that holds its permit until the
    /// answer.
    queue: mpsc::UnboundedSender<Waiting>,
}

/// Arrivals that wait for the writer.
pub(super) type Queue = mpsc::UnboundedReceiver<Waiting>;

pub(super) struct Waiting {
    arrival: Arrival,
    fence: Fence,
    answer: oneshot::Sender<Answer>,
}

impl Waiting {
    fn bytes(&self) -> usize {
        self.arrival.copy.envelope.bytes()
    }

    /// Must not pass the other.
    fn is_behind(&self, other: &Self) -> bool {
        let lane = self.arrival.copy.lane_id;
        self.arrival.key == other.arrival.key
            || lane.is_some() && lane == other.arrival.copy.lane_id
    }
}

impl Arrivals {
    pub(super) fn new() -> (Self, Queue) {
        let (queue, waiting) = mpsc::unbounded_channel();
        (Self { queue }, waiting)
    }

    /// Takes the next place, at once. The receiver fails if the writer has ended.
    pub(super) fn enter(&self, arrival: Arrival, fence: Fence) -> oneshot::Receiver<Answer> {
        let (answer, receiver) = oneshot::channel();
        // Without a writer the answer's sender is dropped, which says so.
        drop(self.queue.send(Waiting { arrival, fence, answer }));
        receiver
    }
}

/// The one writer of a subscription.
pub(super) struct Writer {
    pub(super) hub: Arc<Hub>,
    pub(super) due: Arc<Due>,
    pub(super) draining: CancellationToken,
}

/// How a transaction ended.
enum Written {
    /// Every member has its answer.
    All,
    /// None was written; to be tried again one by one, or later.
    None { members: Vec<Waiting>, error: StoreError },
}

impl Writer {
    /// Writes until nothing more is to start and nothing waits.
    pub(super) async fn run(self, mut queue: Queue) {
        // What a lock or a mishap of their own keeps from being written, with all that stands
        // behind them; in order. Bounded as the queue is.
        let mut stuck: VecDeque<Waiting> = VecDeque::new();
        let mut failures = 0;
        loop {
            let batch = self.next(&mut queue, &mut stuck).await;
            if batch.is_empty() && stuck.is_empty() {
                return;
            }
            if !batch.is_empty() {
                self.write(batch, &mut stuck, &mut failures).await;
            }
            self.write_stuck(&mut stuck, &mut failures).await;
        }
    }

    /// The next members in order, but for those behind one that is stuck, which join it. Empty:
    /// look at what is stuck, or end.
    async fn next(&self, queue: &mut Queue, stuck: &mut VecDeque<Waiting>) -> Vec<Waiting> {
        let mut batch = Vec::new();
        let mut bytes = 0;
        let mut next = match stuck.is_empty() {
            false => queue.try_recv().ok(),
            true => tokio::select! {
                biased;
                next = queue.recv() => next,
                () = self.draining.cancelled() => None,
            },
        };
        while let Some(waiting) = next {
            if stuck.iter().any(|other| waiting.is_behind(other)) {
                stuck.push_back(waiting);
            } else {
                bytes += waiting.bytes();
                batch.push(waiting);
            }
            next = match batch.len() < BATCH_MAX && bytes < BATCH_BYTES_MAX {
                true => queue.try_recv().ok(),
                false => None,
            };
        }
        if broken!(ArriveBackwards) {
            batch.reverse();
        }
        batch
    }

    /// Writes a batch for as long as it takes. Where one member spoils it, each is written on its
    /// own, and those that cannot be now are stuck.
    async fn write(&self, batch: Vec<Waiting>, stuck: &mut VecDeque<Waiting>, failures: &mut u32) {
        let mut batch = batch;
        let mut doubtful = false;
        loop {
            let Written::None { members, error } = self.try_once(batch, &mut doubtful).await else {
                *failures = 0;
                return;
            };
            if self.draining.is_cancelled() {
                return give_back(members);
            }
            if error.is_transient() && !error.locked {
                *failures += 1;
                self.wait(*failures).await;
                batch = members;
                continue;
            }
            for waiting in members {
                if stuck.iter().any(|other| waiting.is_behind(other)) {
                    stuck.push_back(waiting);
                    continue;
                }
                self.write_alone(waiting, stuck, false).await;
            }
            return;
        }
    }

    /// Tries what is stuck once more, each on its own; those behind one that still is wait.
    async fn write_stuck(&self, stuck: &mut VecDeque<Waiting>, failures: &mut u32) {
        if stuck.is_empty() {
            return;
        }
        *failures += 1;
        self.wait(*failures).await;
        if self.draining.is_cancelled() {
            return give_back(std::mem::take(stuck));
        }
        for waiting in std::mem::take(stuck) {
            if stuck.iter().any(|other| waiting.is_behind(other)) {
                stuck.push_back(waiting);
            } else {
                // Its last try may have been committed.
                self.write_alone(waiting, stuck, true).await;
            }
        }
        if stuck.is_empty() {
            *failures = 0;
        }
    }

    /// One try for one member.
    async fn write_alone(&self, waiting: Waiting, stuck: &mut VecDeque<Waiting>, doubtful: bool) {
        let mut doubtful = doubtful;
        let written = self.try_once(vec![waiting], &mut doubtful).await;
        let Written::None { members, error } = written else { return };
        let Some(waiting) = members.into_iter().next() else { return };
        if error.refused {
            drop(waiting.answer.send(Answer::Refused(error)));
        } else {
            stuck.push_back(waiting);
        }
    }

    async fn try_once(&self, batch: Vec<Waiting>, doubtful: &mut bool) -> Written {
        let (batch, lost): (Vec<_>, Vec<_>) =
            batch.into_iter().partition(|waiting| !waiting.fence.is_lost());
        give_back(lost);
        if batch.is_empty() {
            return Written::All;
        }
        let arrivals: Vec<Arrival> = batch.iter().map(|waiting| waiting.arrival.clone()).collect();
        failpoint!(ArriveBegins);
        let answers = match self.hub.arrive(&arrivals).await {
            Ok(answers) if answers.len() == batch.len() => answers,
            Ok(_) => {
                let error = StoreError::transient("the store did not answer each arrival");
                *doubtful = true;
                return Written::None { members: batch, error };
            }
            Err(error) => {
                *doubtful |= !error.locked;
                return Written::None { members: batch, error };
            }
        };
        failpoint!(ArriveCommitted);
        let mut is_new = false;
        for (waiting, arrived) in batch.into_iter().zip(answers) {
            let fingerprint = waiting.arrival.copy.fingerprint.as_ref();
            let arrived = match arrived {
                // Our own commit, whose answer was lost.
                Arrived::Known { fingerprint: known }
                    if *doubtful && !Fingerprint::conflict(known.as_ref(), fingerprint) =>
                {
                    Arrived::Parked
                }
                arrived => arrived,
            };
            is_new |= arrived == Arrived::Parked;
            drop(waiting.answer.send(Answer::Arrived(arrived)));
        }
        if is_new {
            self.due.now();
        }
        Written::All
    }

    async fn wait(&self, failures: u32) {
        tokio::select! {
            biased;
            () = tokio::time::sleep(self.hub.patience(failures)) => {}
            () = self.draining.cancelled() => {}
        }
    }
}

fn give_back(members: impl IntoIterator<Item = Waiting>) {
    for waiting in members {
        drop(waiting.answer.send(Answer::Stopped));
    }
}
