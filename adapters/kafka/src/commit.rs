//! Committing offsets with metadata.
//!
//! Invariants: only what [`Partitions::commits`] names is committed, so never past an unsettled
//! record. A refused or unanswered commit is counted, logged and tried again later; it is
//! never fatal: what was settled above the committed offset comes again and is suppressed.
//!
//! [`Partitions::commits`]: crate::partitions::Partitions::commits

use std::time::Duration;

use rdkafka::client::{Client, ClientContext};
use rdkafka::error::RDKafkaErrorCode as Code;
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use tokio::time::Instant;

use crate::partitions::{Commit, Epoch};
use crate::raw::{CommittedPartition, PendingCommit};
use crate::shared::Shared;

/// A commit without an answer for this long is given up and made again.
const ANSWER_MAX: Duration = Duration::from_secs(30);
const RETRY: Duration = Duration::from_millis(50);

/// Offsets were not committed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CommitError {
    #[error("the broker did not answer in time")]
    NoAnswer,
    #[error("the broker refused: {0}")]
    Refused(Code),
}

/// What goes on between two tries of [`within`].
pub(crate) enum Between<'a> {
    /// Nothing: we are inside a rebalance's callback.
    Wait,
    /// This, which polls: a rebalance that is in the way goes on.
    Poll(&'a dyn Fn()),
}

impl Between<'_> {
    /// Whether the same may succeed after it.
    fn mends(&self, error: &CommitError) -> bool {
        let CommitError::Refused(code) = error else { return false };
        match code {
            Code::RebalanceInProgress
            | Code::CoordinatorLoadInProgress
            | Code::CoordinatorNotAvailable
            | Code::NotCoordinator
            | Code::WaitingForCoordinator
            | Code::BrokerTransportFailure
            | Code::RequestTimedOut => true,
            // The group goes on without us until we have joined again.
            Code::IllegalGeneration | Code::UnknownMemberId => matches!(self, Self::Poll(_)),
            _ => false,
        }
    }

    fn pass(&self) {
        match self {
            Self::Wait => std::thread::sleep(RETRY),
            Self::Poll(poll) => poll(),
        }
    }
}

/// A commit on its way.
pub(crate) struct Sent {
    pending: PendingCommit,
    commits: Vec<Commit>,
    at: Instant,
}

impl Sent {
    /// Sends what is to be committed; `None` if nothing is, or it was refused at once.
    pub(crate) fn send<C: ClientContext>(
        client: &Client<C>,
        shared: &Shared,
        metadata: Option<&str>,
    ) -> Option<Self> {
        let commits = shared.lock().partitions.commits(None);
        if commits.is_empty() {
            return None;
        }
        match PendingCommit::send(client, &list(&commits, metadata)) {
            Ok(pending) => Some(Self { pending, commits, at: Instant::now() }),
            Err(code) => {
                note(shared, &CommitError::Refused(code));
                None
            }
        }
    }

    /// Takes the answer if it is there. True: this commit is over.
    pub(crate) fn is_over(&self, shared: &Shared) -> bool {
        match self.pending.answer(Duration::ZERO) {
            Some(answer) => {
                let _ = take(shared, &self.commits, answer);
                true
            }
            None if self.at.elapsed() > ANSWER_MAX => {
                note(shared, &CommitError::NoAnswer);
                true
            }
            None => false,
        }
    }
}

/// Commits what is settled (of these epochs, or of all) and waits for the answer, trying
/// again what passes.
pub(crate) fn within<C: ClientContext>(
    client: &Client<C>,
    shared: &Shared,
    only: Option<&[Epoch]>,
    metadata: Option<&str>,
    timeout: Duration,
    between: Between<'_>,
) -> Result<(), CommitError> {
    let deadline = Instant::now() + timeout;
    loop {
        let commits = shared.lock().partitions.commits(only);
        if commits.is_empty() {
            return Ok(());
        }
        let left = deadline.saturating_duration_since(Instant::now());
        let result = match PendingCommit::send(client, &list(&commits, metadata)) {
            Ok(pending) => match pending.answer(left) {
                Some(answer) => take(shared, &commits, answer),
                None => Err(CommitError::NoAnswer),
            },
            Err(code) => Err(CommitError::Refused(code)),
        };
        match result {
            Ok(()) => return Ok(()),
            Err(error) if between.mends(&error) && Instant::now() < deadline => between.pass(),
            Err(error) => {
                note(shared, &error);
                return Err(error);
            }
        }
    }
}

/// Keeps what the broker confirmed; the first refusal is the result.
fn take(
    shared: &Shared,
    commits: &[Commit],
    answer: Result<Vec<CommittedPartition>, Code>,
) -> Result<(), CommitError> {
    let partitions = match answer {
        Ok(partitions) => partitions,
        Err(code) => {
            let error = CommitError::Refused(code);
            note(shared, &error);
            return Err(error);
        }
    };
    let mut result = Ok(());
    let mut state = shared.lock();
    for committed in partitions {
        match committed.error {
            Some(code) => result = Err(CommitError::Refused(code)),
            None => commits
                .iter()
                .filter(|commit| {
                    *commit.topic == *committed.topic && commit.partition == committed.partition
                })
                .for_each(|commit| state.partitions.committed(commit)),
        }
    }
    drop(state);
    if let Err(error) = &result {
        note(shared, error);
    }
    result
}

fn note(shared: &Shared, error: &CommitError) {
    shared.counters.count_commit_error();
    tracing::info!(%error, "offsets were not committed now; they will be with the next commit");
}

fn list(commits: &[Commit], metadata: Option<&str>) -> TopicPartitionList {
    let mut list = TopicPartitionList::with_capacity(commits.len());
    for commit in commits {
        let mut element = list.add_partition(&commit.topic, commit.partition);
        // Offsets that were read from the broker are never negative.
        if element.set_offset(Offset::Offset(commit.offset)).is_ok()
            && let Some(metadata) = metadata
        {
            element.set_metadata(metadata);
        }
    }
    list
}
