//! Parking: full copies that are due, of claimed messages and of arrivals.
//!
//! | died after | what is left | what comes of it |
//! |---|---|---|
//! | anything before the commit | the claim, no copy | the claim runs out; the broker delivers again |
//! | the commit, before the answer | the copy, no claim | asked again: `Lost`, and a due row; acked |

use std::sync::Arc;

use futures::FutureExt;
use inboxd_contract::{
    Arrival, ArrivalStep, Arrived, Fingerprint, InboxKey, NewCopy, Parking, Settled, StoreError,
};
use serde_json::{Value, json};
use sqlx::sqlite::SqliteConnection;

use crate::SqliteStore;
use crate::batch::Answers;
use crate::claims::millis;
use crate::look::look;
use crate::settle::{check_copy, drop_dead, take_for_copy};
use crate::sql::Sql;

fn check(key: &InboxKey, copy: &NewCopy) -> Result<(), StoreError> {
    let body = copy.envelope.body.as_ref();
    check_copy(key, body, &copy.subscription, copy.last_error.as_deref())
}

impl SqliteStore {
    pub(crate) async fn park_batch(
        &self,
        parkings: &[Parking],
    ) -> Vec<Result<Settled, StoreError>> {
        let mut answers = Answers::new(parkings.len());
        for (index, parking) in parkings.iter().enumerate() {
            if let Err(error) = check(&parking.claim.key, &parking.copy) {
                answers.set(index, Err(error));
            }
        }
        let run = |chosen: Vec<usize>| {
            let chosen: Vec<Parking> = chosen.into_iter().map(|i| parkings[i].clone()).collect();
            let sql = Arc::clone(&self.sql);
            self.writer.transaction("parking messages", move |connection| {
                async move {
                    let mut settled = Vec::with_capacity(chosen.len());
                    for parking in &chosen {
                        settled.push(park_in(connection, &sql, parking).await?);
                    }
                    Ok(settled)
                }
                .boxed()
            })
        };
        answers.run(answers.open(), run).await;
        answers.finish()
    }

    pub(crate) async fn arrive_batch(
        &self,
        arrivals: &[Arrival],
    ) -> Result<Vec<Arrived>, StoreError> {
        for arrival in arrivals {
            check(&arrival.key, &arrival.copy)?;
        }
        if arrivals.is_empty() {
            return Ok(Vec::new());
        }
        let (sql, arrivals) = (Arc::clone(&self.sql), arrivals.to_vec());
        self.writer
            .transaction("parking arrivals", move |connection| {
                arrive_in(connection, sql, arrivals).boxed()
            })
            .await
    }
}

async fn park_in(
    connection: &mut SqliteConnection,
    sql: &Sql,
    parking: &Parking,
) -> Result<Settled, sqlx::Error> {
    let Parking { claim, copy } = parking;
    if let Some(settled) = take_for_copy(connection, sql, claim).await? {
        return Ok(settled);
    }
    drop_dead(connection, sql, &claim.key, copy.fingerprint.as_ref()).await?;
    insert(connection, sql, &claim.key, copy).await?;
    Ok(Settled::Done)
}

async fn arrive_in(
    connection: &mut SqliteConnection,
    sql: Arc<Sql>,
    arrivals: Vec<Arrival>,
) -> Result<Vec<Arrived>, sqlx::Error> {
    let member = |arrival: &Arrival| {
        json!([arrival.key.consumer_id.as_str(), arrival.key.message_id.as_str()])
    };
    let batch = Value::Array(arrivals.iter().map(member).collect()).to_string();
    // The write lock is ours since BEGIN: what the look finds stays so, but for what we change.
    let mut looks = look(connection, &sql, &batch, arrivals.len()).await?;
    let mut answers = Vec::with_capacity(arrivals.len());
    for (index, arrival) in arrivals.iter().enumerate() {
        let Arrival { key, copy } = arrival;
        let step = arrival.resolve(&looks[index].look);
        if let ArrivalStep::Answer(answer) = step {
            answers.push(answer);
            continue;
        }
        if step == ArrivalStep::Replace {
            drop_dead(connection, &sql, key, copy.fingerprint.as_ref()).await?;
        }
        insert(connection, &sql, key, copy).await?;
        answers.push(Arrived::Parked);
        for (later, seen) in arrivals.iter().zip(&mut looks).skip(index + 1) {
            if later.key == *key {
                seen.look.due.push(copy.fingerprint.clone());
            }
        }
    }
    Ok(answers)
}

/// A due row that exists already stays as it is.
async fn insert(
    connection: &mut SqliteConnection,
    sql: &Sql,
    key: &InboxKey,
    copy: &NewCopy,
) -> Result<(), sqlx::Error> {
    let envelope = &copy.envelope;
    sql.copies
        .insert
        .query()
        .bind(copy.subscription.to_string())
        .bind(key.consumer_id.as_str().to_owned())
        .bind(key.message_id.as_str().to_owned())
        .bind(copy.fingerprint.as_ref().map_or("", Fingerprint::as_str).to_owned())
        .bind(envelope.origin.position())
        .bind(copy.lane.clone())
        .bind(copy.lane_id.map(|lane| lane.0.to_vec()))
        .bind(envelope.to_stored())
        .bind(copy.attempts)
        .bind(millis(copy.delay))
        .bind(copy.last_status)
        .bind(copy.last_error.clone())
        .bind(<&'static str>::from(copy.reason))
        .bind(millis(copy.first_ago))
        .bind(envelope.body.as_ref().map(|body| body.to_vec()))
        .execute(connection)
        .await
        .map(drop)
}
