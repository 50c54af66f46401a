//! What an oracle needs of a database: every change told at its commit, and deliberate flaws.

use std::fmt;

use inboxd_contract::{
    Arrival, Arrived, Attempt, Claim, ClaimAnswer, ClaimRequest, Completion, DeadLetter, InboxKey,
    OwnerId, ParkedSeq, Parking, Release, Replay, Replayed, Reschedule, Settled, Taken, Unpark,
};

/// One member of one call, as it was committed.
#[derive(Debug)]
pub enum MemoryChange<'a> {
    /// A claim was asked for.
    Claimed {
        /// By whom.
        owner: &'a OwnerId,
        /// What was asked.
        request: &'a ClaimRequest,
        /// What was answered.
        answer: &'a ClaimAnswer,
        /// When the claim runs out where the answer holds, on the database's clock.
        expires_at: i64,
    },
    /// A claim was extended.
    Renewed {
        /// The row's own key and token.
        claim: &'a Claim,
        /// When it runs out now.
        expires_at: i64,
    },
    /// A further attempt was to be counted.
    Counted {
        /// For which claim.
        claim: &'a Claim,
        /// What was answered.
        answer: &'a Attempt,
    },
    /// A completion.
    Completed {
        /// What was asked.
        completion: &'a Completion,
        /// What was answered.
        answer: &'a Settled,
    },
    /// A dead letter.
    DeadLettered {
        /// What was asked.
        letter: &'a DeadLetter,
        /// What was answered.
        answer: &'a Settled,
        /// The row that was written.
        seq: Option<ParkedSeq>,
    },
    /// A claim was given up.
    Released {
        /// What was asked.
        release: &'a Release,
        /// What was answered.
        answer: &'a Settled,
    },
    /// A claimed message was to be parked.
    Parked {
        /// What was asked.
        parking: &'a Parking,
        /// What was answered.
        answer: &'a Settled,
        /// The row that was written.
        seq: Option<ParkedSeq>,
    },
    /// A message that nobody had claimed was to be parked.
    Arrived {
        /// What was asked.
        arrival: &'a Arrival,
        /// What was answered.
        answer: &'a Arrived,
        /// The row that was written.
        seq: Option<ParkedSeq>,
    },
    /// A due row was taken.
    Taken {
        /// By whom.
        owner: &'a OwnerId,
        /// What was taken.
        taken: &'a Taken,
        /// When the claim runs out, on the database's clock.
        expires_at: i64,
    },
    /// A taken row was to be due later.
    Rescheduled {
        /// What was asked.
        reschedule: &'a Reschedule,
        /// What was answered.
        answer: &'a Settled,
    },
    /// A taken row was to go.
    Unparked {
        /// What was asked.
        unpark: &'a Unpark,
        /// What was answered.
        answer: &'a Settled,
    },
    /// A dead row was to be due again.
    Replayed {
        /// What was asked.
        replay: &'a Replay,
        /// What was answered.
        answer: &'a Replayed,
    },
    /// A dead row is discarded.
    Discarded {
        /// The row.
        seq: ParkedSeq,
        /// Its message.
        key: &'a InboxKey,
    },
}

/// Sees every change in the order of commits.
pub trait MemoryWitness: Send + Sync {
    /// Called within the step that changes, at `now` on the database's clock (microseconds). Must
    /// not call the database.
    fn changed(&self, now: i64, change: MemoryChange<'_>);
}

impl fmt::Debug for dyn MemoryWitness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MemoryWitness")
    }
}

/// A rule of claiming or parking that the database breaks on purpose, to show that somebody notices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryFlaw {
    /// Looks before it claims, with time in between.
    LookBeforeClaim,
    /// Completions do not check the token.
    CompleteWithoutToken,
    /// Dead letters do not check the token.
    DeadLetterWithoutToken,
    /// A release frees the claim of whoever has it.
    ReleaseWithoutToken,
    /// A renewal extends every claim of the owner of those that are named.
    RenewByOwner,
    /// A claim that has not run out is taken over all the same.
    TakeOverUnexpired,
    /// A release never takes an attempt back.
    KeepAttempts,
    /// A completion leaves the claim.
    CompleteKeepsClaim,
    /// Parking leaves the claim.
    ParkKeepsClaim,
    /// Parking does not check the token.
    ParkWithoutToken,
    /// Rows are taken that are not the heads of their lanes.
    TakeBlocked,
    /// No lane is ever blocked for a claim.
    IgnoreBlockedLane,
    /// A row is given back by whoever names it.
    RescheduleWithoutToken,
    /// A row that is given back has the attempts it had.
    RescheduleForgetsAttempts,
    /// A completion leaves the due row.
    CompleteKeepsCopy,
    /// The arrivals of a batch come in the opposite order.
    ArriveBackwards,
}
