//! What the API asks of the process, and what is answered of it as a whole.

use std::collections::BTreeMap;
use std::time::Duration;

use async_trait::async_trait;
use inboxd_contract::Actor;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::DependencyState;
use super::letters::{
    AuditPage, DiscardAnswer, DiscardAsk, LetterWhole, LettersError, ParkedAsk, ParkedPage,
    ReplayAnswer, ReplayAsk,
};
use super::message::{MessageReport, millis};
use crate::engine::CallbackReport;

/// Of which consumer ids a message is asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Which {
    /// Of all that the configuration names.
    All,
    /// Of this one, whether the configuration names it or not.
    ConsumerId(String),
    /// Of that of this subscription.
    Subscription(String),
}

/// Why nothing can be said of a message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExplainError {
    /// What was asked makes no sense.
    #[error("{0}")]
    Asked(String),
    /// The inbox cannot be read now, or at all.
    #[error("{0}")]
    Inbox(String),
}

/// What a drain came to.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DrainAnswer {
    /// Nothing is in flight, everything is settled, and no broker's consumer is left.
    pub drained: bool,
    /// What still runs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub running: Vec<Running>,
}

/// What still runs of one subscription.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Running {
    /// Its name.
    pub subscription: String,
    /// Deliveries under way; 0: its source is being closed.
    pub in_flight: usize,
    /// The oldest few.
    pub oldest: Vec<RunningMessage>,
}

/// A message that still runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RunningMessage {
    /// Its id.
    pub message_id: String,
    /// What it waits for, in words.
    pub waits: String,
}

/// How things stand.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Status {
    /// Of the binary.
    pub version: String,
    /// Since the process began to listen.
    pub uptime_s: u64,
    /// The process life, as claims name it; not there before the database is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// `starting`, `running`, `draining` or `drained`.
    pub phase: String,
    /// Whether `/readyz` says yes.
    pub ready: bool,
    /// The inbox.
    pub database: DatabaseStatus,
    /// Each by its name.
    pub subscriptions: BTreeMap<String, SubscriptionStatus>,
}

/// The inbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DatabaseStatus {
    /// Which one and where; not there before it was opened.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// Whether it can be used.
    #[serde(flatten)]
    pub state: DependencyState,
}

/// One subscription.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SubscriptionStatus {
    /// Half of the deduplication key.
    pub consumer_id: String,
    /// `starting`, `connecting`, `ready`, `standby`, `failing` or `closed`.
    pub phase: String,
    /// Whether source, callback and the subscription itself are ready.
    pub ready: bool,
    /// Why not, and what to do.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reasons: Vec<String>,
    /// Deliveries under way.
    pub in_flight: usize,
    /// Connections to the broker after the first.
    pub reconnects: u64,
    /// The application, as this subscription sees it; not there before it was started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub callback: Option<CallbackStatus>,
}

/// A subscription's callback.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CallbackStatus {
    /// `paused`, `starting`, `gone` (410), `health` (its health URL fails), `open` (the breaker is),
    /// `probing` or `closed` (all is well).
    pub state: String,
    /// For how long.
    pub since_ms: u64,
    /// What was said last, or who paused it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub why: String,
    /// Concurrent POSTs that are allowed now.
    pub limit: usize,
    /// Concurrent POSTs that are allowed at most.
    pub concurrency: usize,
    /// POSTs begun in a second at most; not there where there is no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<f64>,
    /// POSTs under way.
    pub in_use: usize,
    /// Attempts that wait for their turn.
    pub waiting: usize,
    /// Until it is asked again; 0 while it is being asked, not there where nothing is to be asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_probe_in_ms: Option<u64>,
}

impl From<CallbackReport> for CallbackStatus {
    fn from(report: CallbackReport) -> Self {
        Self {
            state: report.state.as_str().to_owned(),
            since_ms: millis(report.since),
            why: report.why,
            limit: report.limit,
            concurrency: report.concurrency,
            rate: report.rate,
            in_use: report.in_use,
            waiting: report.waiting,
            next_probe_in_ms: report.next_probe_in.map(millis),
        }
    }
}

/// All subscriptions.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Subscriptions {
    /// Each by its name.
    pub subscriptions: BTreeMap<String, SubscriptionStatus>,
}

/// What is changed of a subscription while it runs, until the process is started again.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Change {
    /// Nothing is taken and nothing is sent.
    Pause,
    /// It goes on.
    Resume,
    /// Its limits; what is `None` stays.
    Limits {
        /// Concurrent POSTs.
        concurrency: Option<usize>,
        /// POSTs begun in a second; `Some(None)`: as many as there are.
        rate: Option<Option<f64>>,
    },
}

/// Why a subscription is not changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ChangeError {
    /// There is none of this name.
    #[error("there is no subscription {name:?}; there are: {known}")]
    Unknown {
        /// The name.
        name: String,
        /// Those that there are.
        known: String,
    },
    /// It has not begun, or it has ended.
    #[error("{0}")]
    NotRunning(String),
}

/// What the process can be asked. Cheap to call before the process is up.
#[async_trait]
pub trait Operator: Send + Sync + 'static {
    /// What is known of a message. `asked` is the id as its asker has it.
    async fn explain(&self, asked: &[u8], which: Which) -> Result<MessageReport, ExplainError>;

    /// Takes nothing more, and answers when nothing is left or `patience` is over. Whoever asks
    /// again asks about the same drain, which goes on in any case.
    async fn drain(&self, patience: Duration) -> DrainAnswer;

    /// How long a drain is waited for where nothing else is said.
    fn drain_patience(&self) -> Duration;

    /// How things stand.
    fn status(&self) -> Status;

    /// Changes a subscription; answers how it stands then.
    fn change(
        &self,
        name: &str,
        change: Change,
        actor: &Actor,
    ) -> Result<SubscriptionStatus, ChangeError>;

    /// A page of parked rows.
    async fn parked(&self, ask: &ParkedAsk) -> Result<ParkedPage, LettersError>;

    /// A parked row, whole.
    async fn letter(&self, seq: i64) -> Result<Option<LetterWhole>, LettersError>;

    /// The body of a parked row; `Some(None)`: it keeps none.
    async fn letter_body(&self, seq: i64) -> Result<Option<Option<bytes::Bytes>>, LettersError>;

    /// Makes dead letters due again.
    async fn replay(&self, ask: &ReplayAsk, actor: &Actor) -> Result<ReplayAnswer, LettersError>;

    /// Gives dead letters up.
    async fn discard(&self, ask: &DiscardAsk, actor: &Actor)
    -> Result<DiscardAnswer, LettersError>;

    /// What operators did to dead letters, newest first.
    async fn audit(&self, before: Option<i64>, limit: u32) -> Result<AuditPage, LettersError>;
}
