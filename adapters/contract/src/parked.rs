//! Parked messages: full copies that are forwarded later, or kept as dead letters.
//!
//! A row of `inbox_parked` is *due* (a worker forwards it), *dead* or *discarded*. Its `seq` is
//! its key and its place within a lane. A due row is changed and removed only by who holds
//! the claim of its key; a dead one by operators and by a delivery of the same id.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use sha2::{Digest as _, Sha256};
use strum::{EnumIter, EnumString, IntoStaticStr};
use uuid::Uuid;

use crate::{
    Claim, ConsumerId, Envelope, Fingerprint, InboxKey, Look, MessageId, StreamId, Token,
    length_prefixed,
};

/// The key of a parked row; grows with each row, and is the order within a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParkedSeq(pub i64);

impl fmt::Display for ParkedSeq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A lane, the same on every instance and after every restart: the first 16 bytes of a SHA-256
/// of consumer id, subscription, stream and ordering key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LaneId(pub [u8; 16]);

impl LaneId {
    /// The lane of `key` within what the broker orders by.
    pub fn new(
        consumer_id: &ConsumerId,
        subscription: &str,
        stream: &StreamId,
        key: &[u8],
    ) -> Self {
        let parts = [consumer_id.as_str(), subscription, &stream.0];
        let mut hash = Sha256::new();
        for part in parts {
            hash.update(length_prefixed(part.as_bytes(), b""));
        }
        hash.update(key);
        let mut lane = [0; 16];
        lane.copy_from_slice(&hash.finalize()[..16]);
        Self(lane)
    }
}

/// What a parked row is.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, EnumIter, IntoStaticStr, EnumString,
)]
#[strum(serialize_all = "snake_case")]
pub enum ParkedState {
    /// A worker forwards it at its time.
    Due,
    /// A dead letter.
    Dead,
    /// A dead letter that an operator gave up: the row stays, the body is gone.
    Discarded,
}

impl ParkedState {
    /// As it is stored.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// Why a message is parked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EnumIter, IntoStaticStr, EnumString)]
#[strum(serialize_all = "snake_case")]
pub enum ParkReason {
    /// The attempts in place, or their time, are used up.
    Failed,
    /// The application asked for it.
    Asked,
    /// A message of its lane before it is parked.
    LaneBlocked,
    /// Every message is: `delivery = "stored"`.
    Stored,
    /// It was held for `hold_max`.
    HeldTooLong,
    /// The broker has handed it over half as often as it will.
    DeliveryLimit,
    /// An operator had a dead letter forwarded again.
    Replayed,
}

/// Why a message is a dead letter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EnumIter, IntoStaticStr, EnumString)]
#[strum(serialize_all = "snake_case")]
pub enum DeadReason {
    /// The application refused it.
    Refused,
    /// The same id with another fingerprint.
    IdConflict,
    /// It carries no message id.
    Unidentified,
    /// Its type has no route.
    Unrouted,
    /// Its body is larger than `body_bytes_max`.
    BodyTooLarge,
    /// `park.attempts_max` attempts came to nothing.
    AttemptsExhausted,
    /// It has been parked for `park.elapsed_max`.
    TooOld,
}

/// The reason in a row: of one that is due, or of one that is dead or discarded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CopyReason {
    /// Of a due row.
    Parked(ParkReason),
    /// Of a dead or discarded row.
    Dead(DeadReason),
}

impl CopyReason {
    /// As it is stored.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Parked(reason) => reason.into(),
            Self::Dead(reason) => reason.into(),
        }
    }
}

impl FromStr for CopyReason {
    type Err = strum::ParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse().map(Self::Dead).or_else(|_| text.parse().map(Self::Parked))
    }
}

impl From<DeadReason> for CopyReason {
    fn from(reason: DeadReason) -> Self {
        Self::Dead(reason)
    }
}

impl From<ParkReason> for CopyReason {
    fn from(reason: ParkReason) -> Self {
        Self::Parked(reason)
    }
}

impl PartialEq<DeadReason> for CopyReason {
    fn eq(&self, reason: &DeadReason) -> bool {
        *self == Self::Dead(*reason)
    }
}

impl PartialEq<ParkReason> for CopyReason {
    fn eq(&self, reason: &ParkReason) -> bool {
        *self == Self::Parked(*reason)
    }
}

/// Commits a full copy of a claimed message with state due, and removes the claim.
///
/// A dead row of the same fingerprint (or without one) gives way to it and the copy takes the last
/// place of its lane; a due row of the same fingerprint that came meanwhile stays as it is.
#[derive(Debug, Clone)]
pub struct Parking {
    /// The claim that is removed, first.
    pub claim: Claim,
    /// The copy.
    pub copy: NewCopy,
}

/// A message that is to be parked.
#[derive(Debug, Clone)]
pub struct NewCopy {
    /// The subscription's name.
    pub subscription: Arc<str>,
    /// The ordering key, where it has one.
    pub lane: Option<Vec<u8>>,
    /// The lane that it waits in and blocks.
    pub lane_id: Option<LaneId>,
    /// The message, with its body.
    pub envelope: Arc<Envelope>,
    /// Tells contents of one id apart.
    pub fingerprint: Option<Fingerprint>,
    /// Attempts made.
    pub attempts: u32,
    /// Until it is due, from now on.
    pub delay: Duration,
    /// The last HTTP status.
    pub last_status: Option<u16>,
    /// What went wrong last; at most 2,048 bytes, no NUL.
    pub last_error: Option<String>,
    /// Why.
    pub reason: ParkReason,
    /// How long ago it was received first.
    pub first_ago: Duration,
}

/// Commits a full copy of a message that nobody has claimed: absent, it is inserted;
/// nothing is decided. The answers are looked for first, in the same transaction.
#[derive(Debug, Clone)]
pub struct Arrival {
    /// The message.
    pub key: InboxKey,
    /// The copy. Its position is that of its envelope's origin.
    pub copy: NewCopy,
}

/// What an arrival came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Arrived {
    /// The copy is there now, at the last place of its lane.
    Parked,
    /// Its row of `inbox_messages` exists; nothing was written.
    Processed {
        /// The row's fingerprint.
        fingerprint: Option<Fingerprint>,
    },
    /// A due copy exists; nothing was written.
    Known {
        /// That copy's fingerprint.
        fingerprint: Option<Fingerprint>,
    },
    /// A dead letter from the same position, or of another content; nothing was written.
    Dead {
        /// The dead letter's fingerprint.
        fingerprint: Option<Fingerprint>,
    },
}

/// What is to be done with an arrival, after the look.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ArrivalStep {
    /// Insert it.
    Insert,
    /// A dead letter of this content may have been published again on purpose: remove its rows
    /// that do not conflict, then insert.
    Replace,
    /// Nothing.
    Answer(Arrived),
}

impl Arrival {
    /// The one place where a look becomes what is done with an arrival.
    pub fn resolve(&self, look: &Look) -> ArrivalStep {
        let fingerprint = self.copy.fingerprint.as_ref();
        let same =
            |other: &Option<Fingerprint>| !Fingerprint::conflict(other.as_ref(), fingerprint);
        if let Some(fingerprint) = &look.processed {
            return ArrivalStep::Answer(Arrived::Processed { fingerprint: fingerprint.clone() });
        }
        if let Some(due) = look.due.iter().find(|due| same(due)).or(look.due.first()) {
            return ArrivalStep::Answer(Arrived::Known { fingerprint: due.clone() });
        }
        let dead = look.dead.iter().find(|row| same(&row.fingerprint)).or(look.dead.first());
        let Some(dead) = dead else { return ArrivalStep::Insert };
        let position = self.copy.envelope.origin.position();
        if same(&dead.fingerprint) && (position.is_none() || dead.position != position) {
            return ArrivalStep::Replace;
        }
        ArrivalStep::Answer(Arrived::Dead { fingerprint: dead.fingerprint.clone() })
    }
}

/// Asks for due rows of one subscription.
#[derive(Debug, Clone)]
pub struct TakeDue {
    /// Half of the deduplication key.
    pub consumer_id: ConsumerId,
    /// The subscription's name.
    pub subscription: Arc<str>,
    /// A token for each row at most; at least one.
    pub tokens: Vec<Token>,
    /// Rows of one lane at most: its head and what follows it without a gap, all due and free.
    /// At least 1.
    pub run_max: usize,
    /// Bytes of bodies; one row may overshoot.
    pub bytes_max: u64,
    /// Where lanes are begun with, so that none starves: anything, another each time.
    pub lanes_from: LaneId,
}

/// The answer to [`TakeDue`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TakenBatch {
    /// Rows of one lane stand in its order; rows of others may stand between them.
    pub rows: Vec<Taken>,
    /// When to ask again at the latest, where it is known: more may be due now (zero), or the next
    /// head that is free becomes due then.
    pub next_in: Option<Duration>,
}

/// A due row in hand: its key is claimed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Taken {
    /// The claim.
    pub claim: Claim,
    /// The row.
    pub seq: ParkedSeq,
    /// Attempts so far, the one that this claim is for included.
    pub attempts: u32,
    /// The lane that it waits in and blocks.
    pub lane_id: Option<LaneId>,
    /// The row's content; its attempts are those before this claim.
    pub copy: ParkedCopy,
    /// How long ago it was received first.
    pub first_ago: Duration,
    /// The row of `inbox_messages`, looked for after the claim: `Some(fingerprint)` if it exists.
    pub processed: Option<Option<Fingerprint>>,
}

/// Gives a taken row back, to be due later: the claim is removed, its attempts go into the row.
#[derive(Debug, Clone)]
pub struct Reschedule {
    /// The claim that is removed, first.
    pub claim: Claim,
    /// The row.
    pub seq: ParkedSeq,
    /// Takes the attempt back that the taking added: the application was not asked. Status and
    /// error of the row stay then.
    pub attempt_back: bool,
    /// Until it is due, from now on.
    pub delay: Duration,
    /// The last HTTP status.
    pub last_status: Option<u16>,
    /// What went wrong last; at most 2,048 bytes, no NUL.
    pub last_error: Option<String>,
}

/// Removes a taken row whose message is processed, and its claim.
#[derive(Debug, Clone)]
pub struct Unpark {
    /// The claim that is removed, first.
    pub claim: Claim,
    /// The row.
    pub seq: ParkedSeq,
}

/// A row of `inbox_parked`, its content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParkedCopy {
    /// The subscription it came through.
    pub subscription: String,
    /// The message, body included where it is kept.
    pub envelope: Envelope,
    /// Tells contents of one id apart.
    pub fingerprint: Option<Fingerprint>,
    /// The ordering key.
    pub lane: Option<Vec<u8>>,
    /// Attempts made.
    pub attempts: u32,
    /// The last HTTP status.
    pub last_status: Option<u16>,
    /// What went wrong last.
    pub last_error: Option<String>,
    /// Why.
    pub reason: CopyReason,
}

/// A row of `inbox_parked`, whole, for a person. Ages and durations are by the database's clock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParkedRow {
    /// The row.
    pub seq: ParkedSeq,
    /// The message.
    pub key: InboxKey,
    /// What it is.
    pub state: ParkedState,
    /// Its content; in lists without the body, which is not read.
    pub copy: ParkedCopy,
    /// The lane that it waits in and blocks.
    pub lane_id: Option<LaneId>,
    /// Bytes of the body that is kept; `None` where none is.
    pub body_bytes: Option<u64>,
    /// Until it is due; zero when it is, `None` where it is not a due row.
    pub due_in: Option<Duration>,
    /// How long ago it was received first.
    pub first_ago: Duration,
    /// How long ago it was written, or came into its present state.
    pub parked_ago: Duration,
}

/// Which parked rows. What is `None` or empty does not count.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ParkedFilter {
    /// Of this subscriber.
    pub consumer_id: Option<ConsumerId>,
    /// Of the subscription of this name.
    pub subscription: Option<String>,
    /// In one of these states.
    pub states: Vec<ParkedState>,
    /// This message.
    pub message_id: Option<MessageId>,
    /// For this reason.
    pub reason: Option<CopyReason>,
    /// With this text, byte for byte, in the last error.
    pub error_contains: Option<String>,
    /// In their state for at least so long.
    pub parked_at_least: Option<Duration>,
    /// In their state for at most so long.
    pub parked_at_most: Option<Duration>,
}

/// Makes a dead row due again. Attempts and age start anew (it would be
/// too old at once otherwise); row and lane keep their place.
///
/// A row that conflicts with what was processed, or whose reason is an id conflict, gets an id of
/// its own ([`MessageId::of_conflict`]), so that it never meets the row of the other content.
#[derive(Debug, Clone)]
pub struct Replay {
    /// The row.
    pub seq: ParkedSeq,
    /// Until it is due, from now on.
    pub delay: Duration,
    /// Forward it although this very message is processed: under an id of its own, made of
    /// `fresh`.
    pub allow_processed: bool,
    /// Random; never reused.
    pub fresh: Uuid,
}

/// What a replay came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Replayed {
    /// Due now, or after its delay, under this id.
    Due(MessageId),
    /// No dead row has this seq any more: replayed, discarded or deleted by somebody else.
    NotDead,
    /// The row keeps no body: it was too large, or only the broker has it.
    NoBody,
    /// This very message is processed, and that was not allowed for.
    Processed,
    /// A copy of the same content under the id that it would get is parked already.
    Exists,
}

/// Who changes dead letters, for the audit: at most 255 bytes, no control characters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Actor(Arc<str>);

impl Actor {
    /// Control characters are left out, and what is too long is cut.
    pub fn new(who: &str) -> Self {
        let mut clean: String = who.chars().filter(|c| !c.is_control()).collect();
        while clean.len() > 255 {
            clean.pop();
        }
        Self(clean.into())
    }

    /// As it is stored.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// What an operator did to a dead letter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EnumIter, IntoStaticStr, EnumString)]
#[strum(serialize_all = "snake_case")]
pub enum AuditAction {
    /// Had it forwarded again.
    Replay,
    /// Had it forwarded again although it was processed.
    ReplayProcessed,
    /// Gave it up.
    Discard,
}

/// An entry of the audit; written in the transaction that makes the change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditEntry {
    /// Grows with each entry.
    pub id: i64,
    /// How long ago.
    pub ago: Duration,
    /// Who.
    pub actor: String,
    /// What.
    pub action: AuditAction,
    /// The message, by the id it had.
    pub key: InboxKey,
    /// The row.
    pub seq: ParkedSeq,
    /// The id that it was replayed under, where that is another.
    pub replayed_as: Option<MessageId>,
}
