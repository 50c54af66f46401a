//! Deliberate faults of the engine, for the simulator to find. With the feature `mutations` alone,
//! which no release build can have.
//!
//! Invariants: at most one is on, in one thread alone; with none on, nothing differs.

use std::cell::Cell;

#[cfg(not(debug_assertions))]
compile_error!("the feature `mutations` breaks guarantees on purpose: it is for tests alone");

/// What is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::EnumIter)]
pub enum Mutation {
    /// Acks what was accepted, and commits its row afterwards.
    AckBeforeCommit,
    /// Commits the row, and calls the application afterwards.
    MarkBeforeAnswer,
    /// A delivery that is to go back to the broker does not.
    ForgetReleaseOnCancel,
    /// An attempt that is given up keeps its claim.
    KeepClaimOnGiveUp,
    /// A second delivery of an undecided message is a duplicate.
    UndecidedTwinIsDuplicate,
    /// A dead letter is written after its delivery was acked.
    AckBeforeDeadLetter,
    /// A lane goes on while its message is at the application.
    LanePassesEarly,
    /// The same id with another content is a duplicate, whatever the policy.
    IgnoreConflict,
    /// A settled delivery keeps its part of the budget.
    KeepPermit,
    /// An attempt begins whatever is left of its lease.
    IgnoreLease,
    /// A lease counts from the answer, not from the question.
    LeaseFromAnswer,
    /// An attempt begins although the partition or channel is closed.
    IgnoreFence,
    /// A leader that decided nothing leaves its followers waiting.
    ForgetFollowers,
    /// An attempt that was not made stays counted.
    KeepAttempt,
    /// What the application decided is asked again when the claim was lost.
    ForgetDecision,
    /// A message without an id is acked, and nothing is kept of it.
    AckUnidentified,
    /// More POSTs at once than were allowed.
    IgnoreConcurrency,
    /// A claim is renewed although its attempt is over.
    RenewForEver,
    /// Acks what is to be parked, and commits its copy afterwards.
    AckBeforePark,
    /// A message is parked as if it had never been tried.
    ForgetAttemptsOnPark,
    /// A message is forwarded whatever of its lane is parked.
    IgnoreBlockedLane,
    /// What arrives together is written in the opposite order.
    ArriveBackwards,
    /// A dead letter is recorded and acked before the broker has it.
    RecordBeforePublish,
    /// A parked message that was processed leaves its row.
    CompleteKeepsRow,
    /// A worker forwards what it took although it was processed meanwhile.
    WorkerIgnoresRow,
    /// However often the application is not there, it is called.
    BreakerNeverOpens,
}

thread_local! {
    static ON: Cell<Option<Mutation>> = const { Cell::new(None) };
}

/// Breaks this from now on in this thread, or nothing.
pub fn set(mutation: Option<Mutation>) {
    ON.set(mutation);
}

/// Whether this is broken.
pub fn is_on(mutation: Mutation) -> bool {
    ON.get() == Some(mutation)
}
