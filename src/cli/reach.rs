//! Dead letters by way of the running sidecar, or of the database where none runs.

use std::time::{Duration, SystemTime};

use inboxd_contract::{Actor, encode_percent};
use reqwest::Method;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use super::client::{Answer, AskError, Client};
use crate::admin::{
    AuditPage, DiscardAnswer, DiscardAsk, LetterFilter, LetterWhole, ParkedAsk, ParkedPage,
    ReplayAnswer, ReplayAsk, Selection,
};
use crate::app::{self, OpenedStore};
use crate::config::Config;

/// The sidecar gives its database a minute for what it changes.
const ANSWER_WITHIN: Duration = Duration::from_secs(90);

/// Who is asked.
pub(super) enum Reach {
    /// A running sidecar.
    Sidecar(Client),
    /// The database itself.
    Database {
        /// It.
        store: OpenedStore,
        /// Why no sidecar is asked.
        no_sidecar: String,
    },
}

/// What a command does to the database.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// It reads.
    Look,
    /// It changes rows: a database that is one file must be nobody else's.
    Change,
}

/// Why a command comes to nothing, in words.
type Reason = String;

impl Reach {
    /// The sidecar of this configuration if one answers, else its database.
    pub(super) async fn of(config: &Config, purpose: Purpose) -> Result<Self, Reason> {
        let client = Client::of(&config.admin, ANSWER_WITHIN).map_err(|error| error.to_string())?;
        let no_sidecar = match client {
            Some(client) => match client.ask(Method::GET, "/v1/status").await {
                Ok(Answer { status: 200, .. }) => return Ok(Self::Sidecar(client)),
                Ok(answer) => return Err(format!("{}: {}", client.base(), answer.detail())),
                Err(AskError::Nobody(base)) => format!("no sidecar answers at {base}"),
                Err(AskError::Failed(reason)) => return Err(reason),
            },
            None => "admin.listen is off".to_owned(),
        };
        let store = match purpose {
            Purpose::Look => app::open_to_look(config).await,
            Purpose::Change => app::open_to_change(config).await,
        };
        match store {
            Ok(store) => Ok(Self::Database { store, no_sidecar }),
            Err(reason) => Err(format!("{no_sidecar}, and the database cannot be used: {reason}")),
        }
    }

    /// What to say of where an answer comes from.
    pub(super) fn told(&self) -> Option<String> {
        match self {
            Self::Sidecar(_) => None,
            Self::Database { no_sidecar, .. } => {
                Some(format!("{no_sidecar}: the database was asked itself"))
            }
        }
    }

    /// Lets go of the database.
    pub(super) async fn close(self) {
        if let Self::Database { store, .. } = self {
            store.close().await;
        }
    }

    pub(super) async fn list(&self, path: &str, ask: &ParkedAsk) -> Result<ParkedPage, Reason> {
        match self {
            Self::Sidecar(client) => get(client, &format!("{path}?{}", query(ask))).await,
            Self::Database { store, .. } => told(store.dead_letters().list(ask).await),
        }
    }

    pub(super) async fn show(&self, seq: i64) -> Result<Option<LetterWhole>, Reason> {
        match self {
            Self::Sidecar(client) => {
                let path = format!("/v1/dead-letters/{seq}");
                let answer = client.ask(Method::GET, &path).await.map_err(words)?;
                match answer.status {
                    404 => Ok(None),
                    _ => read(client, answer).map(Some),
                }
            }
            Self::Database { store, .. } => told(store.dead_letters().show(seq).await),
        }
    }

    /// `Ok(None)`: there is no such row, or it keeps no body.
    pub(super) async fn body(&self, seq: i64) -> Result<Option<Vec<u8>>, Reason> {
        match self {
            Self::Sidecar(client) => {
                let path = format!("/v1/dead-letters/{seq}?raw=true");
                match client.bytes(&path).await.map_err(words)? {
                    Ok(body) => Ok(Some(body)),
                    Err(answer) if answer.status == 404 => Ok(None),
                    Err(answer) => Err(answer.detail()),
                }
            }
            Self::Database { store, .. } => {
                let body = told(store.dead_letters().body(seq).await)?;
                Ok(body.flatten().map(Into::into))
            }
        }
    }

    pub(super) async fn replay(
        &self,
        ask: &ReplayAsk,
        actor: &str,
    ) -> Result<ReplayAnswer, Reason> {
        match self {
            Self::Sidecar(client) => {
                let mut body = selected(&ask.selection, ask.dry_run);
                body.insert("allow_processed".into(), ask.allow_processed.into());
                if let Some(rate) = ask.rate {
                    body.insert("rate".into(), rate.into());
                    let delay = u64::try_from(ask.delay.as_millis()).unwrap_or(u64::MAX);
                    body.insert("delay_ms".into(), delay.into());
                }
                change(client, "/v1/dead-letters/replay", actor, body).await
            }
            Self::Database { store, .. } => {
                told(store.dead_letters().replay(ask, &at_database(actor)).await)
            }
        }
    }

    pub(super) async fn discard(
        &self,
        ask: &DiscardAsk,
        actor: &str,
    ) -> Result<DiscardAnswer, Reason> {
        match self {
            Self::Sidecar(client) => {
                let body = selected(&ask.selection, ask.dry_run);
                change(client, "/v1/dead-letters/discard", actor, body).await
            }
            Self::Database { store, .. } => {
                told(store.dead_letters().discard(ask, &at_database(actor)).await)
            }
        }
    }

    pub(super) async fn audit(&self, before: Option<i64>, limit: u32) -> Result<AuditPage, Reason> {
        match self {
            Self::Sidecar(client) => {
                let before = before.map(|before| format!("&before={before}")).unwrap_or_default();
                get(client, &format!("/v1/audit?limit={limit}{before}")).await
            }
            Self::Database { store, .. } => told(store.dead_letters().audit(before, limit).await),
        }
    }
}

fn at_database(actor: &str) -> Actor {
    Actor::new(&format!("{actor} (database)"))
}

fn told<T>(answer: Result<T, crate::admin::LettersError>) -> Result<T, Reason> {
    answer.map_err(|error| error.to_string())
}

fn words(error: AskError) -> Reason {
    error.to_string()
}

async fn get<T: DeserializeOwned>(client: &Client, path: &str) -> Result<T, Reason> {
    let answer = client.ask(Method::GET, path).await.map_err(words)?;
    read(client, answer)
}

async fn change<T: DeserializeOwned>(
    client: &Client,
    path: &str,
    actor: &str,
    body: Map<String, Value>,
) -> Result<T, Reason> {
    let body = Value::Object(body);
    let answer = client.change(Method::POST, path, actor, Some(&body)).await.map_err(words)?;
    read(client, answer)
}

/// The answer that a 200 carries.
pub(super) fn read<T: DeserializeOwned>(client: &Client, answer: Answer) -> Result<T, Reason> {
    if answer.status != 200 {
        return Err(answer.detail());
    }
    serde_json::from_value(answer.body)
        .map_err(|_| format!("{} answers otherwise: is it of this version?", client.base()))
}

fn at(time: SystemTime) -> String {
    humantime::format_rfc3339_millis(time).to_string()
}

fn query(ask: &ParkedAsk) -> String {
    let filter = &ask.filter;
    let mut pairs = vec![("limit", ask.limit.to_string().into_bytes())];
    let mut add = |name, value: Option<Vec<u8>>| pairs.extend(value.map(|value| (name, value)));
    add("consumer_id", filter.consumer_id.clone().map(Into::into));
    add("subscription", filter.subscription.clone().map(Into::into));
    add("id", filter.id.clone());
    add("reason", filter.reason.clone().map(Into::into));
    add("since", filter.since.map(|since| at(since).into()));
    add("until", filter.until.map(|until| at(until).into()));
    add("error", filter.error.clone().map(Into::into));
    add("after", ask.after.map(|after| after.to_string().into()));
    add("count", ask.count.then(|| b"true".to_vec()));
    let state = match ask.states.as_slice() {
        [one] => one.as_str(),
        _ => "any",
    };
    add("state", Some(state.as_bytes().to_vec()));
    let pairs = pairs.into_iter().map(|(name, value)| format!("{name}={}", encode_percent(&value)));
    pairs.collect::<Vec<_>>().join("&")
}

fn selected(selection: &Selection, dry_run: bool) -> Map<String, Value> {
    let mut body = Map::new();
    body.insert("dry_run".into(), dry_run.into());
    match selection {
        Selection::Seqs(seqs) => {
            body.insert("seqs".into(), json!(seqs));
        }
        Selection::Filter { filter, after, limit } => {
            let LetterFilter { consumer_id, subscription, id, reason, since, until, error } =
                filter;
            let mut add = |name: &str, value: Option<Value>| {
                body.extend(value.map(|value| (name.to_owned(), value)));
            };
            add("all", filter.is_empty().then_some(Value::Bool(true)));
            add("consumer_id", consumer_id.clone().map(Value::from));
            add("subscription", subscription.clone().map(Value::from));
            // In a body it is text; other bytes go percent-encoded, as the application has them.
            add(
                "id",
                id.as_ref().map(|id| match std::str::from_utf8(id) {
                    Ok(id) => id.into(),
                    Err(_) => encode_percent(id).to_string().into(),
                }),
            );
            add("reason", reason.clone().map(Value::from));
            add("since", since.map(|since| at(since).into()));
            add("until", until.map(|until| at(until).into()));
            add("error", error.clone().map(Value::from));
            add("after", after.map(Value::from));
            add("limit", Some((*limit).into()));
        }
    }
    body
}
