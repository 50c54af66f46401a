//! Completing and dead-lettering: the claim goes and the row comes, or nothing.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use bytes::Bytes;
use futures::FutureExt;
use inboxd_contract::{
    Claim, Completion, DeadLetter, Fingerprint, InboxKey, ParkedSeq, Settled, StoreError,
};
use serde_json::{Value, json};
use sqlx::Row;
use sqlx::sqlite::SqliteConnection;

use crate::batch::{Answers, check_key, check_record};
use crate::claims::{members, millis, token_text};
use crate::look::look;
use crate::sql::Sql;
use crate::{BODY_BYTES_MAX, SqliteStore};

impl SqliteStore {
    pub(crate) async fn complete_batch(
        &self,
        completions: &[Completion],
    ) -> Vec<Result<Settled, StoreError>> {
        let mut answers = Answers::new(completions.len());
        for (index, completion) in completions.iter().enumerate() {
            let fits = check_key(&completion.claim.key).and(check_record(&completion.record));
            if let Err(error) = fits {
                answers.set(index, Err(error));
            }
        }
        let run = |chosen: Vec<usize>| {
            let chosen: Vec<Completion> =
                chosen.into_iter().map(|index| completions[index].clone()).collect();
            let sql = Arc::clone(&self.sql);
            self.writer.transaction("completing messages", move |connection| {
                complete_in(connection, sql, chosen).boxed()
            })
        };
        answers.run(answers.open(), run).await;
        answers.finish()
    }

    pub(crate) async fn dead_letter_batch(
        &self,
        letters: &[DeadLetter],
    ) -> Vec<Result<Settled, StoreError>> {
        let mut answers = Answers::new(letters.len());
        for (index, letter) in letters.iter().enumerate() {
            if let Err(error) = check_letter(letter) {
                answers.set(index, Err(error));
            }
        }
        let run = |chosen: Vec<usize>| {
            let chosen: Vec<DeadLetter> =
                chosen.into_iter().map(|index| letters[index].clone()).collect();
            let sql = Arc::clone(&self.sql);
            self.writer.transaction("writing dead letters", move |connection| {
                async move {
                    let mut settled = Vec::with_capacity(chosen.len());
                    for letter in &chosen {
                        settled.push(dead_letter_in(connection, &sql, letter).await?);
                    }
                    Ok(settled)
                }
                .boxed()
            })
        };
        answers.run(answers.open(), run).await;
        answers.finish()
    }
}

async fn complete_in(
    connection: &mut SqliteConnection,
    sql: Arc<Sql>,
    completions: Vec<Completion>,
) -> Result<Vec<Settled>, sqlx::Error> {
    let batch = members(completions.iter().map(|completion| &completion.claim));
    let mut taken = take_claims(connection, &sql, &batch).await?;
    // Whoever is named twice is served once.
    let held: Vec<bool> = completions
        .iter()
        .map(|completion| taken.remove(&token_text(completion.claim.token)).is_some())
        .collect();

    let records = completions.iter().zip(&held).filter(|(_, held)| **held);
    let records: Vec<Value> = records.map(|(completion, _)| record_of(completion)).collect();
    let mut inserted: HashSet<(String, String)> = HashSet::new();
    if !records.is_empty() {
        let records = Value::Array(records).to_string();
        let rows = sql.record.query().bind(records).fetch_all(&mut *connection).await?;
        for row in &rows {
            inserted.insert((row.try_get(0)?, row.try_get(1)?));
        }
    }
    let superseded: Vec<Value> = completions
        .iter()
        .zip(&held)
        .filter(|(completion, held)| **held && completion.supersedes_dead)
        .map(|(c, _)| superseded_by(&c.claim.key, c.record.fingerprint.as_ref()))
        .collect();
    if !superseded.is_empty() {
        let superseded = Value::Array(superseded).to_string();
        sql.drop_dead.query().bind(superseded).execute(&mut *connection).await?;
    }
    let parked = completions.iter().zip(&held).filter(|(_, held)| **held);
    let parked = parked.filter_map(|(c, _)| c.parked.map(|seq| due_member(&c.claim.key, seq)));
    drop_due(connection, &sql, parked.collect()).await?;

    let key_of = |claim: &Claim| {
        (claim.key.consumer_id.as_str().to_owned(), claim.key.message_id.as_str().to_owned())
    };
    let done: Vec<bool> = completions
        .iter()
        .zip(&held)
        .map(|(completion, held)| *held && inserted.contains(&key_of(&completion.claim)))
        .collect();
    if done.iter().all(|done| *done) {
        return Ok(vec![Settled::Done; completions.len()]);
    }
    let seen = look(connection, &sql, &batch, completions.len()).await?;
    Ok(done
        .into_iter()
        .zip(held)
        .zip(seen)
        .map(|((done, held), seen)| match (done, held) {
            (true, _) => Settled::Done,
            (false, true) => {
                Settled::AlreadyProcessed { fingerprint: seen.look.processed.flatten() }
            }
            (false, false) => Settled::Lost(seen.look),
        })
        .collect())
}

/// Removes claims by their tokens: those that were held, and their attempts.
pub(crate) async fn take_claims(
    connection: &mut SqliteConnection,
    sql: &Sql,
    batch: &str,
) -> Result<HashMap<String, u32>, sqlx::Error> {
    let rows = sql.take_claims.query().bind(batch).fetch_all(connection).await?;
    rows.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).collect()
}

/// `[seq, consumer, message]` of a due row that goes.
pub(crate) fn due_member(key: &InboxKey, seq: ParkedSeq) -> Value {
    json!([seq.0, key.consumer_id.as_str(), key.message_id.as_str()])
}

pub(crate) async fn drop_due(
    connection: &mut SqliteConnection,
    sql: &Sql,
    members: Vec<Value>,
) -> Result<(), sqlx::Error> {
    if members.is_empty() {
        return Ok(());
    }
    let members = Value::Array(members).to_string();
    sql.copies.drop_due.query().bind(members).execute(connection).await.map(drop)
}

/// Removes dead letters of a key that do not conflict with `fingerprint`.
pub(crate) async fn drop_dead(
    connection: &mut SqliteConnection,
    sql: &Sql,
    key: &InboxKey,
    fingerprint: Option<&Fingerprint>,
) -> Result<(), sqlx::Error> {
    let member = Value::Array(vec![superseded_by(key, fingerprint)]).to_string();
    sql.drop_dead.query().bind(member).execute(connection).await.map(drop)
}

fn record_of(completion: &Completion) -> Value {
    let record = &completion.record;
    json!([
        completion.claim.key.consumer_id.as_str(),
        completion.claim.key.message_id.as_str(),
        record.fingerprint.as_ref().map(Fingerprint::as_str),
        record.producer,
        record.message_type,
        record.correlation_id,
        record.causation_id,
    ])
}

fn superseded_by(key: &InboxKey, fingerprint: Option<&Fingerprint>) -> Value {
    json!([
        key.consumer_id.as_str(),
        key.message_id.as_str(),
        fingerprint.map_or("", Fingerprint::as_str),
    ])
}

fn check_letter(letter: &DeadLetter) -> Result<(), StoreError> {
    let body = letter.envelope.body.as_ref().filter(|_| letter.body_kept);
    check_copy(&letter.key, body, &letter.subscription, letter.last_error.as_deref())
}

/// A row that the columns hold to the byte.
pub(crate) fn check_copy(
    key: &InboxKey,
    body: Option<&Bytes>,
    subscription: &str,
    last_error: Option<&str>,
) -> Result<(), StoreError> {
    check_key(key)?;
    let body_bytes = body.map_or(0, Bytes::len);
    if body_bytes as u64 > BODY_BYTES_MAX {
        return Err(StoreError::refused(format!(
            "a body of {body_bytes} bytes is larger than SQLite takes ({BODY_BYTES_MAX})"
        )));
    }
    if last_error.unwrap_or_default().contains('\0') || subscription.contains('\0') {
        return Err(StoreError::refused("a copy's text has a NUL, which no column holds"));
    }
    Ok(())
}

/// Removes the claim of one copy that is to be written; `Some`: it is not to be written.
pub(crate) async fn take_for_copy(
    connection: &mut SqliteConnection,
    sql: &Sql,
    claim: &Claim,
) -> Result<Option<Settled>, sqlx::Error> {
    let batch = members(std::iter::once(claim));
    let held = !take_claims(connection, sql, &batch).await?.is_empty();
    let seen = look(connection, sql, &batch, 1).await?.pop().unwrap_or_default();
    if !held {
        return Ok(Some(Settled::Lost(seen.look)));
    }
    Ok(seen.look.processed.map(|fingerprint| Settled::AlreadyProcessed { fingerprint }))
}

async fn dead_letter_in(
    connection: &mut SqliteConnection,
    sql: &Sql,
    letter: &DeadLetter,
) -> Result<Settled, sqlx::Error> {
    if let Some(token) = letter.token {
        let claim = Claim { key: letter.key.clone(), token };
        if let Some(settled) = take_for_copy(connection, sql, &claim).await? {
            return Ok(settled);
        }
    }
    let envelope = &letter.envelope;
    let body = envelope.body.as_ref().filter(|_| letter.body_kept);
    sql.dead_letter
        .query()
        .bind(letter.subscription.to_string())
        .bind(letter.key.consumer_id.as_str().to_owned())
        .bind(letter.key.message_id.as_str().to_owned())
        .bind(letter.fingerprint.as_ref().map_or("", Fingerprint::as_str).to_owned())
        .bind(envelope.origin.position())
        .bind(letter.lane.clone())
        .bind(letter.lane_id.map(|lane| lane.0.to_vec()))
        .bind(envelope.to_stored())
        .bind(letter.attempts)
        .bind(letter.last_status)
        .bind(letter.last_error.clone())
        .bind(<&'static str>::from(letter.reason))
        .bind(millis(letter.first_ago))
        .bind(letter.body_kept)
        .bind(body.map(|body| body.to_vec()))
        .execute(connection)
        .await?;
    Ok(Settled::Done)
}
