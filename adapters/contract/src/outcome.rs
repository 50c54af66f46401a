//! What became of a delivery: a closed set, also the label of the delivery counter.

use strum::{EnumIter, IntoStaticStr};

/// The outcome of one delivery. Names are the metric's label values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, EnumIter, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum Outcome {
    /// Forwarded, accepted, and its row committed.
    Processed,
    /// Its row existed before.
    Duplicate,
    /// Another delivery of the same id in this process was processed meanwhile.
    DuplicateInFlight,
    /// The same id with another fingerprint.
    IdConflict,
    /// Committed to `inbox_parked` to be forwarded later.
    Parked,
    /// A parked copy existed already.
    ParkedDuplicate,
    /// Committed as a dead letter.
    DeadLettered,
    /// A copy of a dead letter from the same position of the log.
    DeadDuplicate,
    /// Carried no message id and was forwarded under a generated one.
    Unidentified,
    /// Its type has no route and the configuration ignores such messages.
    Unrouted,
    /// The application asked to drop it.
    Dropped,
    /// Given back to the broker.
    Released,
    /// The claim was taken over by another instance before the result was recorded.
    ClaimLost,
}

impl Outcome {
    /// The metric label.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}
