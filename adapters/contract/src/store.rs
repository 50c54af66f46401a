//! The inbox: the proof of what was processed, claims, and parked copies.
//!
//! The rules that every adapter keeps (design, section 3): claim first, then look, in two
//! snapshots; tokens decide who holds a claim; each change of a claimed message is one
//! transaction that begins with the write that removes or changes the claim by its token;
//! all times are compared by the database's clock and answered as durations; no
//! statement waits for a lock longer than a fifth of the lease; one bad or
//! locked member of a batch never spoils or stalls the others.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use uuid::Uuid;

use crate::{
    Actor, Arrival, Arrived, AuditEntry, DeadReason, Envelope, Fingerprint, InboxKey, LaneId,
    ParkedCopy, ParkedFilter, ParkedRow, ParkedSeq, ParkedState, Parking, Replay, Replayed,
    Reschedule, StoreError, TakeDue, TakenBatch, Unpark,
};

/// A fencing token: random, made by the client before the call, never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Token(pub Uuid);

/// One process life: stable name plus a random id, at most 128 bytes.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct OwnerId(pub Arc<str>);

impl fmt::Display for OwnerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A claim as its holder names it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Claim {
    /// What is claimed.
    pub key: InboxKey,
    /// By which token.
    pub token: Token,
}

/// Asks for a claim.
#[derive(Debug, Clone)]
pub struct ClaimRequest {
    /// The claim wanted; repeated with the same token when an answer was lost.
    pub claim: Claim,
    /// Of the delivery at hand; decides which parked rows are copies of it.
    pub fingerprint: Option<Fingerprint>,
    /// [`crate::Origin::position`] of the delivery at hand.
    pub position: Option<String>,
    /// The lane to ask about; `None`: it does not matter whether one is blocked.
    pub lane_id: Option<LaneId>,
}

/// What the claiming statement came to, read back by token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hold {
    /// The row carries the request's token.
    Held {
        /// Attempts so far, this one included.
        attempts: u32,
    },
    /// Another token holds an unexpired claim.
    Other {
        /// Until it expires, by the database's clock.
        expires_in: Duration,
    },
}

/// A dead row of `inbox_parked`, as the look finds it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeadRow {
    /// Its fingerprint.
    pub fingerprint: Option<Fingerprint>,
    /// The position it was delivered from, where the broker has positions.
    pub position: Option<String>,
    /// Discarded by an operator: the row stays, the body is gone.
    pub discarded: bool,
}

/// What the look at `inbox_messages` and `inbox_parked` found for one key.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Look {
    /// The row of `inbox_messages`: `Some(fingerprint)` if it exists.
    pub processed: Option<Option<Fingerprint>>,
    /// Dead and discarded rows, any fingerprint.
    pub dead: Vec<DeadRow>,
    /// The fingerprints of due rows.
    pub due: Vec<Option<Fingerprint>>,
    /// The lane that was asked about has a row that is not discarded.
    pub lane_blocked: bool,
}

/// The answer to a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClaimAnswer {
    /// Held: forward it.
    Fresh {
        /// Attempts so far, this one included.
        attempts: u32,
    },
    /// Its row exists; nothing is held.
    Processed {
        /// The row's fingerprint.
        fingerprint: Option<Fingerprint>,
    },
    /// A dead letter has this id.
    Dead {
        /// The dead letter's fingerprint.
        fingerprint: Option<Fingerprint>,
        /// `Some(attempts)`: another copy than the one that was set aside; held, to be
        /// forwarded once more. `None`: the same position, or another fingerprint; not held.
        held: Option<u32>,
    },
    /// A due copy exists; nothing is held, and the claim's row keeps its attempts.
    Parked {
        /// That copy's fingerprint.
        fingerprint: Option<Fingerprint>,
    },
    /// A message before it in its lane is parked; nothing is held.
    LaneBlocked {
        /// Attempts made before.
        attempts: u32,
    },
    /// Somebody else is at it.
    Busy {
        /// When to look again at the latest.
        wait: Duration,
    },
}

impl ClaimAnswer {
    /// The one place where hold and look become an answer. Where the answer does not
    /// hold and `hold` was [`Hold::Held`], the store removes the claim in the same transaction;
    /// with [`ClaimAnswer::Parked`] it frees it and takes the attempt back, so that a worker that
    /// died keeps its count.
    pub fn resolve(request: &ClaimRequest, hold: Hold, look: &Look) -> Self {
        if let Some(fingerprint) = &look.processed {
            return Self::Processed { fingerprint: fingerprint.clone() };
        }
        let same = |other: &&Option<Fingerprint>| {
            !Fingerprint::conflict(other.as_ref(), request.fingerprint.as_ref())
        };
        if let Some(due) = look.due.iter().find(same).or(look.due.first()) {
            return Self::Parked { fingerprint: due.clone() };
        }
        let attempts = match hold {
            Hold::Held { attempts } => attempts,
            Hold::Other { expires_in } => return Self::Busy { wait: expires_in },
        };
        let copy_of = |row: &&DeadRow| {
            !Fingerprint::conflict(row.fingerprint.as_ref(), request.fingerprint.as_ref())
        };
        match (look.dead.iter().find(copy_of), look.dead.first()) {
            (Some(row), _) => {
                let same = row.position.is_some() && row.position == request.position;
                if !same && look.lane_blocked {
                    return Self::LaneBlocked { attempts: attempts.saturating_sub(1) };
                }
                Self::Dead {
                    fingerprint: row.fingerprint.clone(),
                    held: (!same).then_some(attempts),
                }
            }
            (None, Some(row)) => Self::Dead { fingerprint: row.fingerprint.clone(), held: None },
            (None, None) if look.lane_blocked => {
                Self::LaneBlocked { attempts: attempts.saturating_sub(1) }
            }
            (None, None) => Self::Fresh { attempts },
        }
    }

    /// The request's token holds the claim.
    pub fn is_held(&self) -> bool {
        matches!(self, Self::Fresh { .. } | Self::Dead { held: Some(_), .. })
    }
}

/// What is recorded of a message beside its key; all of it may be absent. Text that is not
/// UTF-8, has a NUL or is longer than 256 bytes is left out by the engine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MessageRecord {
    /// Tells contents of one id apart.
    pub fingerprint: Option<Fingerprint>,
    /// Who produced it.
    pub producer: Option<String>,
    /// Its type.
    pub message_type: Option<String>,
    /// Correlation id.
    pub correlation_id: Option<String>,
    /// Causation id.
    pub causation_id: Option<String>,
}

/// Moves a claimed message to `inbox_messages`.
#[derive(Debug, Clone)]
pub struct Completion {
    /// The claim that is removed.
    pub claim: Claim,
    /// What is recorded.
    pub record: MessageRecord,
    /// A dead letter of the same fingerprint (or without one) exists and goes with it.
    pub supersedes_dead: bool,
    /// The due row that it was taken from, which goes with it; where the row of `inbox_messages`
    /// existed already, too.
    pub parked: Option<ParkedSeq>,
}

/// Commits a full copy of a message to `inbox_parked` with state dead. A row with
/// the same (consumer id, message id, fingerprint), due ones included, is updated and keeps its
/// `seq`.
#[derive(Debug, Clone)]
pub struct DeadLetter {
    /// The message.
    pub key: InboxKey,
    /// The claim that is removed; `None` where none is needed (id conflict, no id): then the
    /// letter is written in any case, and the answer is [`Settled::Done`].
    pub token: Option<Token>,
    /// The subscription's name.
    pub subscription: Arc<str>,
    /// The lane's key, where it has one.
    pub lane: Option<Vec<u8>>,
    /// The lane that it blocks until it is replayed or discarded; `None`: it blocks nothing.
    pub lane_id: Option<LaneId>,
    /// How long ago it was received first; an older time in the row stays.
    pub first_ago: Duration,
    /// The message; its body too, unless `body_kept` is false.
    pub envelope: Arc<Envelope>,
    /// False: too large; the row keeps size and SHA-256 (in `last_error`) but no body.
    pub body_kept: bool,
    /// Tells contents of one id apart.
    pub fingerprint: Option<Fingerprint>,
    /// Attempts made.
    pub attempts: u32,
    /// The last HTTP status.
    pub last_status: Option<u16>,
    /// What went wrong last; at most 2,048 bytes, no NUL.
    pub last_error: Option<String>,
    /// Why.
    pub reason: DeadReason,
}

/// What a store knows of one message, for a person. Ages and durations are by the database's clock.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Explanation {
    /// Its row of `inbox_messages`.
    pub message: Option<ExplainedMessage>,
    /// Its row of `inbox_claims`.
    pub claim: Option<ExplainedClaim>,
    /// The newest [`EXPLAINED_COPIES_MAX`] of its rows of `inbox_parked`, oldest first.
    pub copies: Vec<ExplainedCopy>,
    /// How many rows of `inbox_parked` it has.
    pub copies_total: u64,
}

/// How long bringing the tables up to date may take, the wait for a replica that does it included.
pub const MIGRATE_MAX: Duration = Duration::from_secs(300);

/// Parked rows that an explanation has at most: a key may have any number of them.
pub const EXPLAINED_COPIES_MAX: usize = 20;

/// A row of `inbox_messages`, whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExplainedMessage {
    /// What was recorded beside the key.
    pub record: MessageRecord,
    /// How long ago.
    pub processed_ago: Duration,
}

/// A row of `inbox_claims`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExplainedClaim {
    /// Whose.
    pub owner: OwnerId,
    /// Attempts so far.
    pub attempts: u32,
    /// Until it runs out; `None` where it has run out or was given up.
    pub expires_in: Option<Duration>,
}

/// A row of `inbox_parked`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExplainedCopy {
    /// The row without its body, which is not read.
    pub copy: ParkedCopy,
    /// Bytes of the body that is kept; `None` where none is.
    pub body_bytes: Option<u64>,
    /// What it is.
    pub state: ParkedState,
    /// Until it is due; zero when it is, `None` where it is not a due row.
    pub due_in: Option<Duration>,
    /// How long ago it was written, or came into its present state.
    pub parked_ago: Duration,
}

/// How much a store holds, for metrics. Cheap at any size: row counts may be the database's
/// estimate.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StoreStats {
    /// Rows of `inbox_messages`.
    pub messages: Option<u64>,
    /// Rows of `inbox_claims`.
    pub claims: Option<u64>,
    /// Dead rows of `inbox_parked`.
    pub dead: Option<u64>,
    /// Due rows of `inbox_parked`.
    pub due: Option<u64>,
    /// How long the due row that was received first has been there; `None` without one.
    pub oldest_due: Option<Duration>,
    /// Age of the oldest row of `inbox_messages`; `None` without one.
    pub oldest_message: Option<Duration>,
    /// Age of the oldest dead row; `None` without one.
    pub oldest_dead: Option<Duration>,
}

/// Gives a claim up.
#[derive(Debug, Clone)]
pub struct Release {
    /// The claim; its row stays, expired and free, and keeps the attempts but not the token, so
    /// that a renewal already on its way revives nothing.
    pub claim: Claim,
    /// Takes the attempt back that the claim (or the last count) added: no verdict came of it.
    pub attempt_back: bool,
}

/// What a write by token came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Settled {
    /// Committed.
    Done,
    /// The claim was held and is removed, but the row of `inbox_messages` existed already.
    AlreadyProcessed {
        /// That row's fingerprint.
        fingerprint: Option<Fingerprint>,
    },
    /// No claim with this token: lost, or our own commit whose answer was lost. What is there now.
    Lost(Look),
}

/// What counting a further attempt came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Attempt {
    /// Still held; the attempts now, this one included.
    Counted(u32),
    /// No claim with this token.
    Lost(Look),
}

/// How long rows are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SweepPolicy {
    /// Rows of `inbox_messages` older than this are deleted.
    pub retention: Duration,
    /// Dead and discarded rows older than this are deleted.
    pub dead_retention: Duration,
    /// Claims expired longer than this are deleted, their attempts with them.
    pub idle_claims: Duration,
    /// Rows per statement.
    pub batch: u32,
}

/// What a sweep did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SweepReport {
    /// False: another instance is at it, nothing was done.
    pub ran: bool,
    /// Rows deleted from `inbox_messages`.
    pub messages: u64,
    /// Rows deleted from `inbox_parked`.
    pub dead: u64,
    /// Rows deleted from `inbox_claims`.
    pub claims: u64,
}

/// What a store can hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreLimits {
    /// The largest body of a parked row, beside the row's other columns.
    pub body_bytes_max: u64,
}

/// Small durable facts beside the inbox (the inbox's own id, a Kafka topic's epoch).
/// Keys and values are short text (at most 255 and 1,024 bytes).
#[async_trait]
pub trait Notes: Send + Sync {
    /// The value, if there is one.
    async fn note(&self, key: &str) -> Result<Option<String>, StoreError>;
    /// Stores `value` if there is none; answers what is stored then. Atomic across instances.
    async fn note_once(&self, key: &str, value: &str) -> Result<String, StoreError>;
    /// Stores `value` in any case.
    async fn set_note(&self, key: &str, value: &str) -> Result<(), StoreError>;
}

/// The inbox. Batches answer member by member, in the order asked, with as many answers as
/// there were members. Each call is durable on the primary when it answers.
///
/// # Cancel safety
/// Dropping a future in the middle leaves the database as if the call had happened or not
/// happened; a connection whose transaction was cut is not reused dirty.
#[async_trait]
pub trait InboxStore: Notes + 'static {
    /// What it can hold.
    fn limits(&self) -> StoreLimits;

    /// One line for the start-up log: which database, where, what to know (no secrets).
    fn describe(&self) -> String;

    /// Claims by `owner` for `lease`, then looks. +1 attempt with each claim taken, not when
    /// repeated with its own token. Of several requests with one key in a batch the
    /// first is served and the others are [`ClaimAnswer::Busy`].
    async fn claim(
        &self,
        owner: &OwnerId,
        lease: Duration,
        requests: &[ClaimRequest],
    ) -> Vec<Result<ClaimAnswer, StoreError>>;

    /// Extends claims to `lease` from now, on a connection of its own, skipping locked rows.
    /// Answers the tokens that were extended. A claim that expired but was not taken over is
    /// extended too.
    async fn renew(&self, lease: Duration, claims: &[Claim]) -> Result<Vec<Token>, StoreError>;

    /// +1 attempt for claims still held.
    async fn count_attempts(&self, claims: &[Claim]) -> Vec<Result<Attempt, StoreError>>;

    /// Claim removed and row inserted, or nothing.
    async fn complete(&self, completions: &[Completion]) -> Vec<Result<Settled, StoreError>>;

    /// Claim removed and dead letter written, or nothing.
    async fn dead_letter(&self, letters: &[DeadLetter]) -> Vec<Result<Settled, StoreError>>;

    /// Claims freed at once.
    async fn release(&self, releases: &[Release]) -> Vec<Result<Settled, StoreError>>;

    /// Claims removed and full copies written with state due, or nothing.
    async fn park(&self, parkings: &[Parking]) -> Vec<Result<Settled, StoreError>>;

    /// Full copies of unclaimed messages, absent ones inserted in the order given: one
    /// transaction, all of it or nothing. Of two with one key the second meets the first.
    async fn arrive(&self, arrivals: &[Arrival]) -> Result<Vec<Arrived>, StoreError>;

    /// Claims due rows by `owner` for `lease`, then looks. A row whose key is claimed by somebody,
    /// or with a row before it in its lane that is not discarded (but for those of the same
    /// answer), is not taken; rows that others are just taking are passed over. +1 attempt with
    /// each claim: one more than the row or a claim that ran out had, whichever had more.
    ///
    /// An answer that is lost leaves claims that run out.
    async fn take_due(
        &self,
        owner: &OwnerId,
        lease: Duration,
        request: &TakeDue,
    ) -> Result<TakenBatch, StoreError>;

    /// Claims removed and rows due again later, or nothing.
    async fn reschedule(&self, reschedules: &[Reschedule]) -> Vec<Result<Settled, StoreError>>;

    /// Claims and their due rows removed, or nothing.
    async fn unpark(&self, unparks: &[Unpark]) -> Vec<Result<Settled, StoreError>>;

    /// Parked rows in the order of `seq`, without bodies: those after `after`, at most `limit`.
    async fn list_parked(
        &self,
        filter: &ParkedFilter,
        after: Option<ParkedSeq>,
        limit: u32,
    ) -> Result<Vec<ParkedRow>, StoreError>;

    /// How many rows that are, counted up to `most`.
    async fn count_parked(&self, filter: &ParkedFilter, most: u64) -> Result<u64, StoreError>;

    /// One parked row, with its body.
    async fn parked_row(&self, seq: ParkedSeq) -> Result<Option<ParkedRow>, StoreError>;

    /// Makes dead rows due again, each on its own; each that becomes due leaves an entry in the
    /// audit. A claim of its key that nobody holds is removed, its attempts with it.
    async fn replay(&self, replays: &[Replay], actor: &Actor) -> Vec<Result<Replayed, StoreError>>;

    /// Empties the bodies of dead rows, which are discarded then; each leaves an entry in the
    /// audit. False: no dead row has this seq.
    async fn discard(&self, rows: &[ParkedSeq], actor: &Actor) -> Vec<Result<bool, StoreError>>;

    /// The newest entries of the audit, newest first: those before `before`, at most `limit`. Kept
    /// as long as dead letters are.
    async fn audit(&self, before: Option<i64>, limit: u32) -> Result<Vec<AuditEntry>, StoreError>;

    /// The look alone: no claim. For tests and for messages whose claim was lost.
    async fn look(&self, keys: &[InboxKey]) -> Result<Vec<Look>, StoreError>;

    /// All parked rows of one message, whole, oldest first.
    async fn parked(&self, key: &InboxKey) -> Result<Vec<ParkedCopy>, StoreError>;

    /// What is known of one message, for a person.
    async fn explain(&self, key: &InboxKey) -> Result<Explanation, StoreError>;

    /// How much it holds.
    async fn stats(&self) -> Result<StoreStats, StoreError>;

    /// Deletes what is older than the policy says, in small batches, on one instance at a time.
    async fn sweep(&self, policy: &SweepPolicy) -> Result<SweepReport, StoreError>;

    /// The database answers and can be written to.
    async fn ping(&self) -> Result<(), StoreError>;

    /// Closes connections.
    async fn close(&self);
}
