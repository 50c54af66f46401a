//! What operators ask of a running process: the paths below `/v1`.
//!
//! Invariants: what a request carries is read by what its route declares, and by nothing else;
//! bodies are bounded in size and time; whatever changes something is logged with who asked.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::extract::{FromRequestParts, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use futures::StreamExt as _;
use inboxd_contract::{Actor, ParkedState, decode_percent};

use super::fields::{Field, Given, bad, bad_request, senseless};
use super::guard::BODY_BYTES_MAX;
use super::letters::{
    DiscardAsk, LetterFilter, LettersError, ParkedAsk, ROWS_DEFAULT, ReplayAsk, Selection,
};
use super::openapi;
use super::operator::{
    Change, ChangeError, ExplainError, Operator, Status, SubscriptionStatus, Subscriptions, Which,
};
use super::problem::Problem;
use super::routes::{body_of, path_of, query_of};

const MESSAGES: &str = "/v1/messages/";
const DRAIN_MAX: Duration = Duration::from_secs(60 * 60);
/// For a body to arrive as a whole.
const BODY_WITHIN: Duration = Duration::from_secs(10);
/// Who asks, in their own words.
pub const ACTOR_HEADER: &str = "inbox-actor";
/// Bytes of it.
pub const ACTOR_BYTES_MAX: usize = 200;

/// What every handler has.
#[derive(Clone)]
pub(super) struct Api {
    pub(super) operator: Arc<dyn Operator>,
    /// The OpenAPI document, as it is sent.
    pub(super) document: bytes::Bytes,
}

impl Api {
    pub(super) fn new(operator: Arc<dyn Operator>) -> Self {
        Self { operator, document: openapi::document().into() }
    }
}

type Answered = Result<Response, Problem>;

/// Who a request is from, by its connection.
#[derive(Debug, Clone, Copy)]
pub(super) struct Peer(pub(super) SocketAddr);

/// Who changes something: by the name that they give, and by address.
pub(super) struct Who(Actor);

impl<S: Sync> FromRequestParts<S> for Who {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        let peer = parts.extensions.get::<Peer>().map(|peer| peer.0.ip().to_string());
        let peer = peer.unwrap_or_else(|| "unknown address".to_owned());
        let mut names = parts.headers.get_all(ACTOR_HEADER).iter();
        let who = match (names.next(), names.next()) {
            (None, _) => peer,
            (Some(name), None) => format!("{} ({peer})", actor_name(name)?),
            (Some(_), Some(_)) => return Err(bad("Inbox-Actor", "it is given more than once")),
        };
        Ok(Self(Actor::new(&who)))
    }
}

fn actor_name(value: &HeaderValue) -> Result<&str, Problem> {
    let name = value.to_str().ok().filter(|name| {
        (1..=ACTOR_BYTES_MAX).contains(&name.len())
            && name.bytes().all(|byte| matches!(byte, b' '..=b'~'))
    });
    name.ok_or_else(|| {
        bad("Inbox-Actor", format!("it is 1 to {ACTOR_BYTES_MAX} visible characters of ASCII"))
    })
}

pub(super) async fn document(State(api): State<Api>, uri: Uri) -> Answered {
    Given::of_query(query_of("openapi"), uri.query())?;
    let json = HeaderValue::from_static("application/json");
    Ok(([(header::CONTENT_TYPE, json)], api.document).into_response())
}

pub(super) async fn status(State(api): State<Api>, uri: Uri) -> Result<Json<Status>, Problem> {
    Given::of_query(query_of("status"), uri.query())?;
    Ok(Json(api.operator.status()))
}

pub(super) async fn drain(State(api): State<Api>, Who(actor): Who, uri: Uri) -> Answered {
    let given = Given::of_query(query_of("drain"), uri.query())?;
    let patience = given.duration("timeout").unwrap_or_else(|| api.operator.drain_patience());
    if patience > DRAIN_MAX {
        return Err(senseless("timeout", "1h is the most"));
    }
    tracing::info!(actor = actor.as_str(), "an operator asks for a drain");
    let answer = api.operator.drain(patience).await;
    if answer.drained {
        return Ok(Json(answer).into_response());
    }
    let detail = "not everything ended in time; the drain goes on, and may be asked again";
    let problem = Problem::new(StatusCode::GATEWAY_TIMEOUT, "still_draining", detail);
    Ok(problem.with("drained", false).with("running", answer.running).into_response())
}

pub(super) async fn subscriptions(
    State(api): State<Api>,
    uri: Uri,
) -> Result<Json<Subscriptions>, Problem> {
    Given::of_query(query_of("subscriptions"), uri.query())?;
    Ok(Json(Subscriptions { subscriptions: api.operator.status().subscriptions }))
}

pub(super) async fn subscription(
    State(api): State<Api>,
    uri: Uri,
) -> Result<Json<SubscriptionStatus>, Problem> {
    Given::of_query(query_of("subscription"), uri.query())?;
    let name = name_in(&uri)?;
    let mut all = api.operator.status().subscriptions;
    match all.remove(&name) {
        Some(status) => Ok(Json(status)),
        None => {
            let known = all.into_keys().collect::<Vec<_>>().join(", ");
            Err(unchanged(ChangeError::Unknown { name, known }))
        }
    }
}

pub(super) async fn pause(State(api): State<Api>, Who(actor): Who, uri: Uri) -> Answered {
    Given::of_query(query_of("pause"), uri.query())?;
    change(&api, &name_in(&uri)?, Change::Pause, &actor)
}

pub(super) async fn resume(State(api): State<Api>, Who(actor): Who, uri: Uri) -> Answered {
    Given::of_query(query_of("resume"), uri.query())?;
    change(&api, &name_in(&uri)?, Change::Resume, &actor)
}

pub(super) async fn limits(
    State(api): State<Api>,
    Who(actor): Who,
    uri: Uri,
    request: Request,
) -> Answered {
    Given::of_query(query_of("limits"), uri.query())?;
    let name = name_in(&uri)?;
    let types = ["application/json", "application/merge-patch+json"];
    let given = Given::of_json(body_of("limits"), &body(request, &types).await?)?;
    if given.is_empty() {
        return Err(bad_request("give concurrency, rate or both"));
    }
    let concurrency = given.count("concurrency").and_then(|count| usize::try_from(count).ok());
    let change_to = Change::Limits { concurrency, rate: given.number("rate") };
    change(&api, &name, change_to, &actor)
}

fn change(api: &Api, name: &str, change: Change, actor: &Actor) -> Answered {
    let status = api.operator.change(name, change, actor).map_err(unchanged)?;
    let actor = actor.as_str();
    match change {
        Change::Pause => tracing::info!(actor, subscription = name, "an operator pauses it"),
        Change::Resume => tracing::info!(actor, subscription = name, "an operator resumes it"),
        Change::Limits { concurrency, rate } => {
            let rate = rate.map(|rate| rate.map_or("none".to_owned(), |rate| rate.to_string()));
            tracing::info!(
                actor,
                subscription = name,
                concurrency,
                rate,
                "an operator changes its limits"
            );
        }
    }
    Ok(Json(status).into_response())
}

fn unchanged(error: ChangeError) -> Problem {
    let (status, code) = match error {
        ChangeError::Unknown { .. } => (StatusCode::NOT_FOUND, "unknown_subscription"),
        ChangeError::NotRunning(_) => (StatusCode::CONFLICT, "not_running"),
    };
    Problem::new(status, code, error.to_string())
}

pub(super) async fn message(State(api): State<Api>, uri: Uri) -> Answered {
    let (given, asked) = match uri.path().strip_prefix(MESSAGES) {
        Some(id) => {
            // As it came: an id may have bytes that are no text, and slashes.
            let in_path = Given::of_path(&path_of("message_by_path")[0], decode_percent(id))?;
            (Given::of_query(query_of("message_by_path"), uri.query())?, in_path.id("id"))
        }
        None => {
            let given = Given::of_query(query_of("message"), uri.query())?;
            let asked = given.id("id");
            (given, asked)
        }
    };
    let which = match (given.text("consumer_id"), given.text("subscription")) {
        (None, None) => Which::All,
        (Some(id), None) => Which::ConsumerId(id),
        (None, Some(name)) => Which::Subscription(name),
        (Some(_), Some(_)) => {
            return Err(senseless("subscription", "give consumer_id or subscription, not both"));
        }
    };
    match api.operator.explain(&asked.unwrap_or_default(), which).await {
        Ok(report) if report.is_known() => Ok(Json(report).into_response()),
        Ok(report) => {
            let detail = "nothing is known of this message; the report says what that means";
            let problem = Problem::new(StatusCode::NOT_FOUND, "unknown_message", detail);
            Ok(problem.with("report", report).into_response())
        }
        Err(ExplainError::Asked(detail)) => {
            Err(Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "senseless", detail))
        }
        Err(ExplainError::Inbox(detail)) => Err(away(detail)),
    }
}

pub(super) async fn parked(State(api): State<Api>, uri: Uri) -> Answered {
    let given = Given::of_query(query_of("parked"), uri.query())?;
    rows(&api, &given, ParkedState::Due).await
}

pub(super) async fn dead_letters(State(api): State<Api>, uri: Uri) -> Answered {
    let given = Given::of_query(query_of("dead_letters"), uri.query())?;
    rows(&api, &given, ParkedState::Dead).await
}

/// `usual`: the state that is meant where none is said.
async fn rows(api: &Api, given: &Given, usual: ParkedState) -> Answered {
    let states = match (given.text("state").as_deref(), usual) {
        (Some("any"), ParkedState::Due) => Vec::new(),
        (Some("any"), _) => vec![ParkedState::Dead, ParkedState::Discarded],
        (Some(state), _) => vec![state.parse().unwrap_or(usual)],
        (None, _) => vec![usual],
    };
    let ask = ParkedAsk {
        filter: filter(given)?,
        states,
        after: given.integer("after"),
        limit: limit(given),
        count: given.flag("count"),
    };
    let page = api.operator.parked(&ask).await.map_err(unanswered)?;
    Ok(Json(page).into_response())
}

fn filter(given: &Given) -> Result<LetterFilter, Problem> {
    let (since, until) = (given.time("since"), given.time("until"));
    if let (Some(since), Some(until)) = (since, until)
        && until < since
    {
        return Err(senseless("until", "it is before since"));
    }
    Ok(LetterFilter {
        consumer_id: given.text("consumer_id"),
        subscription: given.text("subscription"),
        id: given.id("id"),
        reason: given.text("reason"),
        since,
        until,
        error: given.text("error"),
    })
}

fn limit(given: &Given) -> u32 {
    given.count("limit").and_then(|limit| u32::try_from(limit).ok()).unwrap_or(ROWS_DEFAULT)
}

pub(super) async fn dead_letter(State(api): State<Api>, uri: Uri) -> Answered {
    let given = Given::of_query(query_of("dead_letter"), uri.query())?;
    let field = &path_of("dead_letter")[0];
    let in_path = Given::of_path(field, decode_percent(segment(&uri)))?;
    let seq = in_path.integer(field.name).unwrap_or_default();
    let unknown = || {
        let detail = format!("no row has the seq {seq} (any more)");
        Problem::new(StatusCode::NOT_FOUND, "unknown_letter", detail)
    };
    if !given.flag("raw") {
        let letter = api.operator.letter(seq).await.map_err(unanswered)?;
        return Ok(Json(letter.ok_or_else(unknown)?).into_response());
    }
    let body = api.operator.letter_body(seq).await.map_err(unanswered)?;
    let body = body.ok_or_else(unknown)?.ok_or_else(|| {
        let detail = "the row keeps no body: it is a tombstone, was too large, was discarded, or \
                      only the broker has it";
        Problem::new(StatusCode::NOT_FOUND, "no_body", detail)
    })?;
    let mut response = Body::from(body).into_response();
    let headers = response.headers_mut();
    // Never the publisher's own type: this is for a file, not for a browser.
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    headers.insert(
        header::CONTENT_DISPOSITION,
        HeaderValue::from_str(&format!("attachment; filename=\"dead-letter-{seq}\""))
            .unwrap_or(HeaderValue::from_static("attachment")),
    );
    Ok(response)
}

pub(super) async fn replay(
    State(api): State<Api>,
    Who(actor): Who,
    uri: Uri,
    request: Request,
) -> Answered {
    Given::of_query(query_of("replay"), uri.query())?;
    let given = Given::of_json(body_of("replay"), &body(request, &["application/json"]).await?)?;
    let rate = given.number("rate").flatten();
    if given.count("delay_ms").is_some() && rate.is_none() {
        return Err(senseless("delay_ms", "it goes with a rate"));
    }
    let ask = ReplayAsk {
        selection: selection(&given)?,
        dry_run: given.flag("dry_run"),
        rate,
        delay: Duration::from_millis(given.count("delay_ms").unwrap_or_default()),
        allow_processed: given.flag("allow_processed"),
    };
    let answer = api.operator.replay(&ask, &actor).await.map_err(unanswered)?;
    if !answer.dry_run {
        tracing::info!(
            actor = actor.as_str(),
            due = answer.counts.due,
            rows = answer.rows.len(),
            allow_processed = ask.allow_processed,
            "an operator has dead letters forwarded again"
        );
    }
    Ok(Json(answer).into_response())
}

pub(super) async fn discard(
    State(api): State<Api>,
    Who(actor): Who,
    uri: Uri,
    request: Request,
) -> Answered {
    Given::of_query(query_of("discard"), uri.query())?;
    let given = Given::of_json(body_of("discard"), &body(request, &["application/json"]).await?)?;
    let ask = DiscardAsk { selection: selection(&given)?, dry_run: given.flag("dry_run") };
    let answer = api.operator.discard(&ask, &actor).await.map_err(unanswered)?;
    if !answer.dry_run {
        tracing::info!(
            actor = actor.as_str(),
            discarded = answer.counts.discarded,
            rows = answer.rows.len(),
            "an operator discards dead letters"
        );
    }
    Ok(Json(answer).into_response())
}

fn selection(given: &Given) -> Result<Selection, Problem> {
    let (seqs, filter) = (given.seqs("seqs"), filter(given)?);
    let (after, all) = (given.integer("after"), given.flag("all"));
    if !seqs.is_empty() {
        if !filter.is_empty() || all || after.is_some() || given.integer("limit").is_some() {
            return Err(senseless("seqs", "rows that are named need no filter beside them"));
        }
        return Ok(Selection::Seqs(seqs));
    }
    match (filter.is_empty(), all) {
        (true, false) => Err(senseless(
            "all",
            "give seqs or a filter; where every dead letter is meant, give all: true",
        )),
        (false, true) => Err(senseless("all", "it goes without a filter")),
        _ => Ok(Selection::Filter { filter, after, limit: limit(given) }),
    }
}

pub(super) async fn audit(State(api): State<Api>, uri: Uri) -> Answered {
    let given = Given::of_query(query_of("audit"), uri.query())?;
    let page = api.operator.audit(given.integer("before"), limit(&given)).await;
    Ok(Json(page.map_err(unanswered)?).into_response())
}

fn unanswered(error: LettersError) -> Problem {
    match error {
        LettersError::Asked { field, why } => senseless(field, why),
        LettersError::Inbox(detail) => away(detail),
    }
}

fn away(detail: String) -> Problem {
    Problem::new(StatusCode::SERVICE_UNAVAILABLE, "inbox_unavailable", detail)
}

/// The subscription that a path names.
fn name_in(uri: &Uri) -> Result<String, Problem> {
    let field: &Field = &path_of("subscription")[0];
    let given = Given::of_path(field, decode_percent(segment(uri)))?;
    Ok(given.text(field.name).unwrap_or_default())
}

/// The third segment of a path, as it came.
fn segment(uri: &Uri) -> &str {
    uri.path().split('/').nth(3).unwrap_or_default()
}

/// The body of a request, whole.
async fn body(request: Request, types: &[&str]) -> Result<Vec<u8>, Problem> {
    check_type(request.headers(), types)?;
    match tokio::time::timeout(BODY_WITHIN, whole(request.into_body())).await {
        Ok(body) => body,
        Err(_) => {
            let detail = format!("the body did not arrive within {BODY_WITHIN:?}");
            Err(Problem::new(StatusCode::REQUEST_TIMEOUT, "body_late", detail))
        }
    }
}

async fn whole(body: Body) -> Result<Vec<u8>, Problem> {
    let mut stream = body.into_data_stream();
    let mut whole = Vec::new();
    while let Some(chunk) = stream.next().await {
        let chunk = chunk.map_err(|_| bad_request("the body did not arrive as a whole"))?;
        if whole.len() + chunk.len() > BODY_BYTES_MAX {
            return Err(too_large());
        }
        whole.extend_from_slice(&chunk);
    }
    Ok(whole)
}

pub(super) fn too_large() -> Problem {
    let detail = format!("a request has at most {BODY_BYTES_MAX} bytes of body");
    Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", detail)
}

fn check_type(headers: &HeaderMap, types: &[&str]) -> Result<(), Problem> {
    let given = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let essence = given.and_then(|given| given.split(';').next()).map(str::trim);
    if essence.is_some_and(|given| types.iter().any(|known| given.eq_ignore_ascii_case(known))) {
        return Ok(());
    }
    let detail = format!("the body is JSON: Content-Type: {}", types.join(" or "));
    Err(Problem::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "wrong_content_type", detail))
}
