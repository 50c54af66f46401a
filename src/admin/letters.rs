//! Parked rows and dead letters as operators ask for them, and what is done with them.
//!
//! Plain values: [`crate::app`] asks the store. Times are by the clock of who answers: the store
//! answers ages by the database's clock, which are taken from now.

use std::time::{Duration, SystemTime};

use inboxd_contract::{CopyReason, DeadReason, ParkReason, ParkedRow, ParkedState};
use serde::{Deserialize, Serialize};
use strum::IntoEnumIterator as _;
use utoipa::ToSchema;

use super::message::{at, lossy, millis, trace_id};

/// Rows of one page, and rows of one replay or discard.
pub const ROWS_MAX: u32 = 200;
/// Rows where nothing else is said.
pub const ROWS_DEFAULT: u32 = 100;
/// Rows are counted up to here.
pub const COUNT_MAX: u64 = 100_000;
/// More of a body is not told in JSON.
pub const BODY_SHOWN_MAX: usize = 256 * 1024;
/// The longest time over which a replay is spread.
pub const SPREAD_MAX: Duration = Duration::from_secs(30 * 86_400);

/// What a parked row is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RowState {
    /// A worker forwards it at its time.
    Due,
    /// A dead letter.
    Dead,
    /// A dead letter that an operator gave up: the row stays, the body is gone.
    Discarded,
}

impl From<ParkedState> for RowState {
    fn from(state: ParkedState) -> Self {
        match state {
            ParkedState::Due => Self::Due,
            ParkedState::Dead => Self::Dead,
            ParkedState::Discarded => Self::Discarded,
        }
    }
}

/// Which rows. What is not said does not count.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LetterFilter {
    /// Of this consumer id.
    pub consumer_id: Option<String>,
    /// Of the subscription of this name.
    pub subscription: Option<String>,
    /// Of this message, its id as its asker has it.
    pub id: Option<Vec<u8>>,
    /// For this reason, as it is stored.
    pub reason: Option<String>,
    /// In their state since then or later.
    pub since: Option<SystemTime>,
    /// In their state since then or earlier.
    pub until: Option<SystemTime>,
    /// With this text in the last error.
    pub error: Option<String>,
}

impl LetterFilter {
    /// It asks for everything.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// A page of rows that is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParkedAsk {
    /// Which.
    pub filter: LetterFilter,
    /// In one of these states.
    pub states: Vec<ParkedState>,
    /// Those behind this one.
    pub after: Option<i64>,
    /// So many at most.
    pub limit: u32,
    /// How many there are, too.
    pub count: bool,
}

/// A page of parked rows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ParkedPage {
    /// In the order of `seq`.
    #[schema(max_items = 200)]
    pub rows: Vec<ParkedItem>,
    /// Give it as `after` for the next page; not there on the last one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<i64>,
    /// How many rows the filter finds, where `count` was asked for; 100,000 is that many or more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub matching: Option<u64>,
}

/// A parked row without its body.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ParkedItem {
    /// Its key, and its place within a lane.
    pub seq: i64,
    /// What it is.
    pub state: RowState,
    /// Why.
    pub reason: String,
    /// Half of the deduplication key.
    pub consumer_id: String,
    /// The message's id in the form of the inbox.
    pub message_id: String,
    /// The subscription that it came through.
    pub subscription: String,
    /// Where it was delivered from, in the form of `Inbox-Origin`.
    pub origin: String,
    /// Attempts made.
    pub attempts: u32,
    /// The last HTTP status.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_status: Option<u16>,
    /// What went wrong last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
    /// The ordering key, where it has one; bytes that are no text are replaced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lane: Option<String>,
    /// Messages behind it in its lane wait for it.
    pub blocks_lane: bool,
    /// Until it is due, by the database's clock; 0 when it is, not there where no worker will
    /// forward it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub due_in_ms: Option<u64>,
    /// How long ago it was received first, by the database's clock.
    pub first_ago_ms: u64,
    /// When that was, by the clock of who answers.
    #[schema(format = "date-time")]
    pub first_at: String,
    /// How long ago it came into its state, by the database's clock.
    pub parked_ago_ms: u64,
    /// When that was, by the clock of who answers.
    #[schema(format = "date-time")]
    pub parked_at: String,
    /// Bytes of the body that is kept; not there where none is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub body_bytes: Option<u64>,
    /// As the publisher set it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content_type: Option<String>,
    /// Its type.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message_type: Option<String>,
    /// Of its `traceparent`, where that is valid.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trace_id: Option<String>,
    /// Tells contents of one id apart.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fingerprint: Option<String>,
}

impl ParkedItem {
    /// A row as it is told at `now`.
    pub fn new(row: &ParkedRow, now: SystemTime) -> Self {
        let copy = &row.copy;
        let text = |bytes: &Option<bytes::Bytes>| bytes.as_deref().map(lossy);
        Self {
            seq: row.seq.0,
            state: row.state.into(),
            reason: copy.reason.as_str().to_owned(),
            consumer_id: row.key.consumer_id.to_string(),
            message_id: row.key.message_id.to_string(),
            subscription: copy.subscription.clone(),
            origin: copy.envelope.origin.to_string(),
            attempts: copy.attempts,
            last_status: copy.last_status,
            last_error: copy.last_error.clone().filter(|error| !error.is_empty()),
            lane: copy.lane.as_deref().map(lossy),
            blocks_lane: row.lane_id.is_some() && row.state != ParkedState::Discarded,
            due_in_ms: row.due_in.map(millis),
            first_ago_ms: millis(row.first_ago),
            first_at: at(now, row.first_ago),
            parked_ago_ms: millis(row.parked_ago),
            parked_at: at(now, row.parked_ago),
            body_bytes: row.body_bytes,
            content_type: text(&copy.envelope.content_type),
            message_type: text(&copy.envelope.message_type),
            trace_id: trace_id(&copy.envelope),
            fingerprint: copy.fingerprint.as_ref().map(|print| print.as_str().to_owned()),
        }
    }
}

/// A parked row, whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LetterWhole {
    /// What lists tell of it.
    pub row: ParkedItem,
    /// The message's headers in their order.
    pub headers: Vec<LetterHeader>,
    /// Kafka's record key in base64.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key_base64: Option<String>,
    /// As the publisher set it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content_encoding: Option<String>,
    /// The W3C trace context as it came.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traceparent: Option<String>,
    /// Who produced it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub producer: Option<String>,
    /// Correlation id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub correlation_id: Option<String>,
    /// Causation id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub causation_id: Option<String>,
    /// The first 256 KiB of the body in base64; not there where none is kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub body_base64: Option<String>,
    /// The body has more: `?raw=true` gives all of it.
    pub body_cut: bool,
}

/// A header of a message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LetterHeader {
    /// Its name; bytes that are no text are replaced.
    pub name: String,
    /// Its value; bytes that are no text are replaced; not there where it is null.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
    /// The value in base64 where it is no text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value_base64: Option<String>,
}

/// Which dead letters something is done to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Selection {
    /// These rows.
    Seqs(Vec<i64>),
    /// What the filter finds.
    Filter {
        /// Which; not empty unless everything is meant.
        filter: LetterFilter,
        /// Those behind this one.
        after: Option<i64>,
        /// So many at most.
        limit: u32,
    },
}

/// A replay that is asked for.
#[derive(Debug, Clone, PartialEq)]
pub struct ReplayAsk {
    /// Which.
    pub selection: Selection,
    /// Nothing is changed; what would be is told.
    pub dry_run: bool,
    /// Messages that become due in a second; `None`: all at once.
    pub rate: Option<f64>,
    /// When the first becomes due.
    pub delay: Duration,
    /// Messages that are processed are forwarded all the same, under ids of their own.
    pub allow_processed: bool,
}

/// What a replay came to.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ReplayAnswer {
    /// Nothing was changed.
    pub dry_run: bool,
    /// How many came to what.
    pub counts: ReplayCounts,
    /// Each row, in the order of `seq` or as asked.
    #[schema(max_items = 200)]
    pub rows: Vec<ReplayedRow>,
    /// There are more: give its members with the next call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<ReplayNext>,
}

/// Where a replay goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ReplayNext {
    /// For `after`.
    pub after: i64,
    /// For `delay_ms`, so that the rate is kept from call to call.
    pub delay_ms: u64,
}

/// How many rows of a replay came to what.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ReplayCounts {
    /// Due again.
    pub due: u32,
    /// No dead letters any more.
    pub not_dead: u32,
    /// Without a body, so that nothing can be forwarded.
    pub no_body: u32,
    /// Processed, and not allowed for.
    pub processed: u32,
    /// A copy is parked already under the id that they would get.
    pub exists: u32,
    /// The database failed.
    pub failed: u32,
}

impl ReplayCounts {
    /// Counts one.
    pub fn add(&mut self, result: ReplayResult) {
        *match result {
            ReplayResult::Due => &mut self.due,
            ReplayResult::NotDead => &mut self.not_dead,
            ReplayResult::NoBody => &mut self.no_body,
            ReplayResult::Processed => &mut self.processed,
            ReplayResult::Exists => &mut self.exists,
            ReplayResult::Failed => &mut self.failed,
        } += 1;
    }
}

/// What became of one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ReplayResult {
    /// It is due, or will be after its time.
    Due,
    /// No dead letter has this seq (any more).
    NotDead,
    /// The row keeps no body: it was too large, or only the broker has it.
    NoBody,
    /// This very message is processed, and that was not allowed for.
    Processed,
    /// A copy of it is parked already under the id that it would get.
    Exists,
    /// The database failed; it may be due or not.
    Failed,
}

/// One row of a replay.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ReplayedRow {
    /// Which.
    pub seq: i64,
    /// The message; not there where rows were named by `seq` and are no dead letters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message_id: Option<String>,
    /// What became of it.
    pub result: ReplayResult,
    /// The id that it is forwarded under, where that is another.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replayed_as: Option<String>,
    /// Until it is due.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub due_in_ms: Option<u64>,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// A discard that is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiscardAsk {
    /// Which.
    pub selection: Selection,
    /// Nothing is changed; what would be is told.
    pub dry_run: bool,
}

/// What a discard came to.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiscardAnswer {
    /// Nothing was changed.
    pub dry_run: bool,
    /// How many came to what.
    pub counts: DiscardCounts,
    /// Each row, in the order of `seq` or as asked.
    #[schema(max_items = 200)]
    pub rows: Vec<DiscardedRow>,
    /// There are more: give it as `after` with the next call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<i64>,
}

/// How many rows of a discard came to what.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiscardCounts {
    /// Given up: the rows stay, the bodies are gone.
    pub discarded: u32,
    /// No dead letters any more.
    pub not_dead: u32,
    /// The database failed.
    pub failed: u32,
}

impl DiscardCounts {
    /// Counts one.
    pub fn add(&mut self, result: DiscardResult) {
        *match result {
            DiscardResult::Discarded => &mut self.discarded,
            DiscardResult::NotDead => &mut self.not_dead,
            DiscardResult::Failed => &mut self.failed,
        } += 1;
    }
}

/// What became of one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum DiscardResult {
    /// Given up.
    Discarded,
    /// No dead letter has this seq (any more).
    NotDead,
    /// The database failed; it may be discarded or not.
    Failed,
}

/// One row of a discard.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiscardedRow {
    /// Which.
    pub seq: i64,
    /// The message; not there where rows were named by `seq` and are no dead letters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message_id: Option<String>,
    /// What became of it.
    pub result: DiscardResult,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// A page of the audit.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AuditPage {
    /// Newest first.
    #[schema(max_items = 200)]
    pub entries: Vec<AuditItem>,
    /// Give it as `before` for older ones; not there on the last page.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<i64>,
}

/// What somebody did to a dead letter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AuditItem {
    /// Grows with each entry.
    pub id: i64,
    /// How long ago, by the database's clock.
    pub ago_ms: u64,
    /// When, by the clock of who answers.
    #[schema(format = "date-time")]
    pub at: String,
    /// Who.
    pub actor: String,
    /// What: `replay`, `replay_processed` or `discard`.
    pub action: String,
    /// Half of the deduplication key.
    pub consumer_id: String,
    /// The message, by the id it had.
    pub message_id: String,
    /// The row.
    pub seq: i64,
    /// The id that it was replayed under, where that is another.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replayed_as: Option<String>,
}

/// Why nothing can be said of dead letters, or done to them.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LettersError {
    /// What was asked makes no sense.
    #[error("{field}: {why}")]
    Asked {
        /// The field.
        field: &'static str,
        /// What is wrong with it.
        why: String,
    },
    /// The inbox cannot be used now, or at all.
    #[error("{0}")]
    Inbox(String),
}

impl LettersError {
    /// What was asked makes no sense, for this field.
    pub fn asked(field: &'static str, why: impl Into<String>) -> Self {
        Self::Asked { field, why: why.into() }
    }
}

/// The reasons of dead letters, as they are stored.
pub fn dead_reasons() -> Vec<&'static str> {
    DeadReason::iter().map(|reason| CopyReason::Dead(reason).as_str()).collect()
}

/// All reasons of parked rows, as they are stored.
pub fn all_reasons() -> Vec<&'static str> {
    let parked = ParkReason::iter().map(|reason| CopyReason::Parked(reason).as_str());
    parked.chain(dead_reasons()).collect()
}
