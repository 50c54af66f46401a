//! The traits and value types that inboxd's adapters implement.
//!
//! Purpose: one vocabulary between the engine and whatever it stands on. A
//! [`Source`] hands over deliveries, an [`InboxStore`] keeps the proof of what
//! was processed, a [`Forwarder`] calls the application.
//!
//! Invariants: no I/O here, and no adapter knows another. Identity, percent
//! encoding and fingerprints live here because they must be the same to the
//! byte for every broker and every database.

mod code;
mod encoding;
mod envelope;
mod error;
mod finding;
mod forward;
mod identity;
mod letter_headers;
mod letters;
mod outcome;
mod parked;
mod source;
mod store;
mod stored;
mod trace;

pub use code::ErrorCode;
pub use encoding::{decode_percent, encode_percent};
pub use envelope::{Envelope, Header, Origin};
pub use error::{ErrorClass, SourceError, StoreError};
pub use finding::{Finding, Severity};
pub use forward::{ForwardRequest, Forwarder, RetryReason, TraceContext, Verdict};
pub use identity::{
    CONSUMER_ID_BYTES_MAX, ConsumerId, Fingerprint, IdentityError, InboxKey, MESSAGE_ID_BYTES_MAX,
    MessageId, length_prefixed,
};
pub use letter_headers::{LETTER_ERROR_BYTES_MAX, kept_name};
pub use letters::{DeadLetterTarget, LetterCopy, PublishError};
pub use outcome::Outcome;
pub use parked::{
    Actor, Arrival, ArrivalStep, Arrived, AuditAction, AuditEntry, CopyReason, DeadReason, LaneId,
    NewCopy, ParkReason, ParkedCopy, ParkedFilter, ParkedRow, ParkedSeq, ParkedState, Parking,
    Replay, Replayed, Reschedule, TakeDue, Taken, TakenBatch, Unpark,
};
pub use source::{
    Acker, Delivery, Fence, FenceHandle, HorizonAnswer, PartitionReport, RedeliveryHorizon, Room,
    Settle, Settlement, Source, SourceCounts, SourcePhase, SourceStatus, SourceTraits, StreamId,
};
pub use store::{
    Attempt, Claim, ClaimAnswer, ClaimRequest, Completion, DeadLetter, DeadRow,
    EXPLAINED_COPIES_MAX, ExplainedClaim, ExplainedCopy, ExplainedMessage, Explanation, Hold,
    InboxStore, Look, MIGRATE_MAX, MessageRecord, Notes, OwnerId, Release, Settled, StoreLimits,
    StoreStats, SweepPolicy, SweepReport, Token,
};
pub use stored::StoredEnvelopeError;
pub use trace::{is_valid_traceparent, is_valid_tracestate};
