//! Parking: full copies that are due, of claimed messages and of arrivals.
//!
//! | died after | what is left | what comes of it |
//! |---|---|---|
//! | anything before the commit | the claim, no copy | the claim runs out; the broker delivers again |
//! | the commit, before the answer | the copy, no claim | asked again: `Lost`, and a due row; acked |

use std::collections::{HashMap, HashSet};

use inboxd_contract::{
    Arrival, ArrivalStep, Arrived, Claim, Fingerprint, InboxKey, NewCopy, Parking, Settled,
    StoreError,
};
use sqlx::mysql::MySqlConnection;

use crate::MysqlStore;
use crate::batch::Answers;
use crate::claims::{bind_keys, drop_claims, look_if, micros};
use crate::error::is_conflict;
use crate::look::look;
use crate::settle::{Copied, ROW_OVERHEAD_BYTES, Taken, drop_dead, find, fingerprint_bytes, taken};
use crate::sql::{Patience, Sql, query};

/// Parkings of one transaction at most: each has statements of its own.
const PARKINGS_MAX: usize = 32;
/// Rows of one insert at most.
const ROWS_MAX: usize = 64;
/// Tries of arrivals that others are in the way of.
const TRIES: usize = 5;

impl MysqlStore {
    fn check_new(&self, key: &InboxKey, copy: &NewCopy) -> Result<u64, StoreError> {
        self.check_copy(
            key,
            &Copied {
                subscription: &copy.subscription,
                last_error: copy.last_error.as_deref(),
                lane: copy.lane.as_deref(),
                envelope: &copy.envelope,
                body: copy.envelope.body.as_ref(),
            },
        )
    }

    pub(crate) async fn park_batch(
        &self,
        parkings: &[Parking],
    ) -> Vec<Result<Settled, StoreError>> {
        let mut answers = Answers::new(parkings.len());
        for (index, parking) in parkings.iter().enumerate() {
            if let Err(error) = self.check_new(&parking.claim.key, &parking.copy) {
                answers.set(index, Err(error));
            }
        }
        let run = |chosen: Vec<usize>, patience| {
            let chosen: Vec<&Parking> = chosen.into_iter().map(|index| &parkings[index]).collect();
            async move {
                let work = async {
                    let mut transaction = self.main.begin().await?;
                    let connection = transaction.connection();
                    let result = park_in(connection, &self.sql, &chosen, patience).await;
                    transaction.end(result).await
                };
                self.main.in_time("parking messages", work).await
            }
        };
        // In the order asked, which is that of the rows.
        let chunk_max = self.chunk_max.min(PARKINGS_MAX);
        answers.run(answers.open(), chunk_max, self.lock_wait, run).await;
        answers.finish()
    }

    pub(crate) async fn arrive_batch(
        &self,
        arrivals: &[Arrival],
    ) -> Result<Vec<Arrived>, StoreError> {
        let mut sizes = Vec::with_capacity(arrivals.len());
        for Arrival { key, copy } in arrivals {
            sizes.push(self.check_new(key, copy)?);
        }
        if arrivals.is_empty() {
            return Ok(Vec::new());
        }
        let packet = self.packet_bytes_max.saturating_sub(ROW_OVERHEAD_BYTES);
        let work = async {
            let mut tries_left = TRIES;
            loop {
                tries_left -= 1;
                let mut transaction = self.main.begin().await?;
                let connection = transaction.connection();
                let chunk_max = self.chunk_max;
                let result =
                    arrive_in(connection, &self.sql, arrivals, &sizes, packet, chunk_max).await;
                match transaction.end(result).await {
                    // Somebody else inserted one of them meanwhile: it is looked for again.
                    Err(error) if is_conflict(&error) && tries_left > 0 => {}
                    result => return result,
                }
            }
        };
        self.main.in_time("parking arrivals", work).await
    }
}

async fn park_in(
    connection: &mut MySqlConnection,
    sql: &Sql,
    parkings: &[&Parking],
    patience: Patience,
) -> Result<Vec<Settled>, sqlx::Error> {
    let keys: Vec<&InboxKey> = parkings.iter().map(|parking| &parking.claim.key).collect();
    let found = find(connection, sql, &keys, patience).await?;
    let mut served = HashSet::new();
    let mut outcomes = Vec::with_capacity(parkings.len());
    let (mut claims, mut copies): (Vec<&Claim>, Vec<_>) = (Vec::new(), Vec::new());
    for Parking { claim, copy } in parkings {
        let mut outcome = taken(&found, &claim.key, claim.token.0.as_bytes());
        // Whoever is named twice is served once.
        if !matches!(outcome, Taken::Lost) && !served.insert(claim.token) {
            outcome = Taken::Lost;
        }
        match outcome {
            Taken::Held => {
                claims.push(claim);
                copies.push((&claim.key, copy));
            }
            Taken::HeldButProcessed(_) => claims.push(claim),
            Taken::Lost => {}
        }
        outcomes.push(outcome);
    }
    drop_claims(connection, sql, &claims).await?;
    for (key, copy) in copies {
        drop_dead(connection, sql, key, copy.fingerprint.as_ref()).await?;
        insert(connection, sql, &[(key, copy)], true).await?;
    }
    let lost = outcomes.iter().any(|outcome| matches!(outcome, Taken::Lost));
    let mut seen = look_if(connection, sql, &keys, lost).await?;
    Ok(outcomes
        .into_iter()
        .map(|outcome| {
            let seen = seen.next().unwrap_or_default();
            match outcome {
                Taken::Held => Settled::Done,
                Taken::HeldButProcessed(fingerprint) => Settled::AlreadyProcessed { fingerprint },
                Taken::Lost => Settled::Lost(seen.look),
            }
        })
        .collect())
}

async fn arrive_in(
    connection: &mut MySqlConnection,
    sql: &Sql,
    arrivals: &[Arrival],
    sizes: &[u64],
    packet: u64,
    chunk_max: usize,
) -> Result<Vec<Arrived>, sqlx::Error> {
    let keys: Vec<&InboxKey> = arrivals.iter().map(|arrival| &arrival.key).collect();
    let mut looks = Vec::with_capacity(keys.len());
    for chunk in keys.chunks(chunk_max) {
        looks.extend(look(connection, sql, chunk).await?);
    }
    let mut answers = Vec::with_capacity(arrivals.len());
    let mut rows: Vec<(&InboxKey, &NewCopy)> = Vec::new();
    let mut row_sizes = Vec::new();
    // What is inserted for a key by those before.
    let mut before: HashMap<&InboxKey, Vec<Option<Fingerprint>>> = HashMap::new();
    for ((arrival, seen), size) in arrivals.iter().zip(&mut looks).zip(sizes) {
        let Arrival { key, copy } = arrival;
        seen.look.due.extend(before.get(key).into_iter().flatten().cloned());
        let step = arrival.resolve(&seen.look);
        if let ArrivalStep::Answer(answer) = step {
            answers.push(answer);
            continue;
        }
        if step == ArrivalStep::Replace {
            drop_dead(connection, sql, key, copy.fingerprint.as_ref()).await?;
        }
        before.entry(key).or_default().push(copy.fingerprint.clone());
        rows.push((key, copy));
        row_sizes.push(*size);
        answers.push(Arrived::Parked);
    }
    let mut rest = rows.as_slice();
    let mut sizes = row_sizes.as_slice();
    while !rest.is_empty() {
        let len = fitting(sizes, packet);
        insert(connection, sql, &rest[..len], false).await?;
        (rest, sizes) = (&rest[len..], &sizes[len..]);
    }
    Ok(answers)
}

/// How many rows go into one statement: a power of two, as many as a packet holds.
fn fitting(sizes: &[u64], packet: u64) -> usize {
    /// Beside body, envelope and lane: ids, error, position.
    const ROW_BYTES: u64 = 32 * 1_024;
    let mut bytes = 0_u64;
    let fits = sizes.iter().take(ROWS_MAX).take_while(|size| {
        bytes = bytes.saturating_add(**size).saturating_add(ROW_BYTES);
        bytes <= packet
    });
    // A power of two at most, so that few texts are prepared.
    let count = fits.count().max(1);
    1 << count.ilog2()
}

/// One statement: the rows get their numbers in this order.
async fn insert(
    connection: &mut MySqlConnection,
    sql: &Sql,
    rows: &[(&InboxKey, &NewCopy)],
    existing_stays: bool,
) -> Result<(), sqlx::Error> {
    let mut insert = query(sql.insert_due(rows.len(), existing_stays));
    for (key, copy) in rows {
        let envelope = &copy.envelope;
        insert = bind_keys(insert.bind(&*copy.subscription), std::iter::once(*key))
            .bind(fingerprint_bytes(copy.fingerprint.as_ref()))
            .bind(envelope.origin.position())
            .bind(copy.lane.as_deref())
            .bind(copy.lane_id.map(|lane| lane.0.to_vec()))
            .bind(envelope.to_stored())
            .bind(i32::try_from(copy.attempts).unwrap_or(i32::MAX))
            .bind(micros(copy.delay))
            .bind(copy.last_status)
            .bind(copy.last_error.as_deref())
            .bind(<&'static str>::from(copy.reason))
            .bind(micros(copy.first_ago))
            .bind(envelope.body.as_deref());
    }
    insert.execute(connection).await.map(drop)
}
