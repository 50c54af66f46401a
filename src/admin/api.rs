//! What operators ask of a running process: `/v1/messages/{id}`, `/v1/messages?id=`, `/v1/drain`, `/v1/status`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use axum::extract::{Query, State};
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use inboxd_contract::decode_percent;
use serde::{Deserialize, Serialize};

use super::DependencyState;
use super::message::MessageReport;
use super::problem::Problem;

const MESSAGES: &str = "/v1/messages/";
const DRAIN_MAX: Duration = Duration::from_secs(60 * 60);

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
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DrainAnswer {
    /// Nothing is in flight, everything is settled, and no broker's consumer is left.
    pub drained: bool,
    /// What still runs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub running: Vec<Running>,
}

/// What still runs of one subscription.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Running {
    /// Its name.
    pub subscription: String,
    /// Deliveries under way; 0: its source is being closed.
    pub in_flight: usize,
    /// The oldest few.
    pub oldest: Vec<RunningMessage>,
}

/// A message that still runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunningMessage {
    /// Its id.
    pub message_id: String,
    /// What it waits for, in words.
    pub waits: String,
}

/// `/v1/status`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Of the binary.
    pub version: String,
    /// Since the process began to listen.
    pub uptime_s: u64,
    /// The process life, as claims name it; not there before the database is.
    #[serde(skip_serializing_if = "Option::is_none")]
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

/// The inbox, in `/v1/status`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DatabaseStatus {
    /// Which one and where; not there before it was opened.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// Whether it can be used.
    #[serde(flatten)]
    pub state: DependencyState,
}

/// One subscription, in `/v1/status`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
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
}

pub(super) fn router(operator: Arc<dyn Operator>) -> Router {
    Router::new()
        .route("/v1/messages", get(message))
        .route("/v1/messages/{*id}", get(message))
        .route("/v1/drain", post(drain))
        .route("/v1/status", get(status))
        .with_state(operator)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct MessageQuery {
    /// Whether it is there; its bytes may be no text, and are taken from the query as it came.
    id: Option<serde::de::IgnoredAny>,
    consumer_id: Option<String>,
    subscription: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DrainQuery {
    timeout: Option<String>,
}

async fn message(
    State(operator): State<Arc<dyn Operator>>,
    uri: Uri,
    query: Result<Query<MessageQuery>, axum::extract::rejection::QueryRejection>,
) -> Result<Response, Problem> {
    let Query(query) = query.map_err(|error| bad_request(error.body_text()))?;
    let which = match (query.consumer_id, query.subscription) {
        (None, None) => Which::All,
        (Some(id), None) => Which::ConsumerId(id),
        (None, Some(name)) => Which::Subscription(name),
        (Some(_), Some(_)) => {
            return Err(bad_request("give consumer_id or subscription, not both"));
        }
    };
    // As it came: an id may have bytes that are no text, and slashes.
    let asked = match (uri.path().strip_prefix(MESSAGES), query.id) {
        (Some(id), None) => decode_percent(id),
        (None, Some(_)) => decode_percent(asked_in(uri.query().unwrap_or_default())),
        _ => return Err(bad_request("give the id in the path or as ?id=, once")),
    };
    match operator.explain(&asked, which).await {
        Ok(report) if report.is_known() => Ok(Json(report).into_response()),
        Ok(report) => {
            let detail = "nothing is known of this message; the report says what that means";
            let problem = Problem::new(StatusCode::NOT_FOUND, "unknown_message", detail);
            Ok(problem.with("report", report).into_response())
        }
        Err(ExplainError::Asked(detail)) => Err(bad_request(detail)),
        Err(ExplainError::Inbox(detail)) => {
            Err(Problem::new(StatusCode::SERVICE_UNAVAILABLE, "inbox_unavailable", detail))
        }
    }
}

/// The value of `id` as it came.
fn asked_in(query: &str) -> &str {
    query.split('&').find_map(|pair| pair.strip_prefix("id=")).unwrap_or_default()
}

async fn drain(
    State(operator): State<Arc<dyn Operator>>,
    query: Result<Query<DrainQuery>, axum::extract::rejection::QueryRejection>,
) -> Result<Response, Problem> {
    let Query(query) = query.map_err(|error| bad_request(error.body_text()))?;
    let patience = match query.timeout {
        Some(text) => humantime::parse_duration(&text)
            .map_err(|_| bad_request("timeout is a duration with its unit, such as 20s"))?,
        None => operator.drain_patience(),
    };
    if patience > DRAIN_MAX {
        return Err(bad_request("timeout is at most 1h"));
    }
    let answer = operator.drain(patience).await;
    if answer.drained {
        return Ok(Json(answer).into_response());
    }
    let detail = "not everything ended in time; the drain goes on, and may be asked again";
    let problem = Problem::new(StatusCode::GATEWAY_TIMEOUT, "still_draining", detail);
    Ok(problem.with("drained", false).with("running", answer.running).into_response())
}

async fn status(State(operator): State<Arc<dyn Operator>>) -> Json<Status> {
    Json(operator.status())
}

fn bad_request(detail: impl Into<String>) -> Problem {
    Problem::new(StatusCode::BAD_REQUEST, "bad_request", detail)
}
