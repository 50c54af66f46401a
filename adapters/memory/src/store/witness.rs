//! What an oracle needs of a database: every change told at its commit, and deliberate flaws.

use std::fmt;

use inboxd_contract::{
    Attempt, Claim, ClaimAnswer, ClaimRequest, Completion, DeadLetter, OwnerId, Release, Settled,
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
    },
    /// A claim was given up.
    Released {
        /// What was asked.
        release: &'a Release,
        /// What was answered.
        answer: &'a Settled,
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

/// A rule of claiming that the database breaks on purpose, to show that somebody notices.
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
}
