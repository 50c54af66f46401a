//! Completing and dead-lettering: the claim goes and the row comes, or nothing.

use std::collections::HashSet;
use std::sync::Arc;

use futures::FutureExt;
use inboxd_contract::{Claim, Completion, DeadLetter, Fingerprint, Settled, StoreError};
use serde_json::{Value, json};
use sqlx::Row;
use sqlx::sqlite::SqliteConnection;

use crate::batch::{Answers, check_key, check_record};
use crate::claims::{members, token_text};
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
        .map(|completion| taken.remove(&token_text(completion.claim.token)))
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
        .map(|(completion, _)| superseded_by(completion))
        .collect();
    if !superseded.is_empty() {
        let superseded = Value::Array(superseded).to_string();
        sql.drop_dead.query().bind(superseded).execute(&mut *connection).await?;
    }

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

async fn take_claims(
    connection: &mut SqliteConnection,
    sql: &Sql,
    batch: &str,
) -> Result<HashSet<String>, sqlx::Error> {
    let rows = sql.take_claims.query().bind(batch).fetch_all(connection).await?;
    rows.iter().map(|row| row.try_get(0)).collect()
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

fn superseded_by(completion: &Completion) -> Value {
    json!([
        completion.claim.key.consumer_id.as_str(),
        completion.claim.key.message_id.as_str(),
        completion.record.fingerprint.as_ref().map_or("", Fingerprint::as_str),
    ])
}

fn check_letter(letter: &DeadLetter) -> Result<(), StoreError> {
    check_key(&letter.key)?;
    let body_bytes = letter.envelope.body.as_ref().map_or(0, |body| body.len());
    if letter.body_kept && body_bytes as u64 > BODY_BYTES_MAX {
        return Err(StoreError::refused(format!(
            "a dead letter's body of {body_bytes} bytes is larger than SQLite takes \
             ({BODY_BYTES_MAX})"
        )));
    }
    let error = letter.last_error.as_deref().unwrap_or_default();
    if error.contains('\0') || letter.subscription.contains('\0') {
        return Err(StoreError::refused("a dead letter's text has a NUL, which no column holds"));
    }
    Ok(())
}

async fn dead_letter_in(
    connection: &mut SqliteConnection,
    sql: &Sql,
    letter: &DeadLetter,
) -> Result<Settled, sqlx::Error> {
    if let Some(token) = letter.token {
        let claim = Claim { key: letter.key.clone(), token };
        let batch = members(std::iter::once(&claim));
        let held = !take_claims(connection, sql, &batch).await?.is_empty();
        let seen = look(connection, sql, &batch, 1).await?.pop().unwrap_or_default();
        if !held {
            return Ok(Settled::Lost(seen.look));
        }
        if let Some(fingerprint) = seen.look.processed {
            return Ok(Settled::AlreadyProcessed { fingerprint });
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
        .bind(envelope.to_stored())
        .bind(letter.attempts)
        .bind(letter.last_status)
        .bind(letter.last_error.clone())
        .bind(<&'static str>::from(letter.reason))
        .bind(body.map(|body| body.to_vec()))
        .execute(connection)
        .await?;
    Ok(Settled::Done)
}
