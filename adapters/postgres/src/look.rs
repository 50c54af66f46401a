//! The look: what is there for each key, in one snapshot.

use std::time::Duration;

use bytes::Bytes;
use inboxd_contract::{DeadRow, Envelope, Fingerprint, InboxKey, Look, ParkedCopy, ParkedState};
use sqlx::Row;
use sqlx::postgres::PgRow;

use crate::error::Failure;
use crate::session::Work;
use crate::sql::Sql;

/// What the look found, with the claim's remaining time.
#[derive(Debug, Clone, Default)]
pub(crate) struct Sight {
    pub(crate) look: Look,
    /// Zero where there is no claim, or one that has run out.
    pub(crate) claim_left: Duration,
}

/// The two halves of keys as arrays.
pub(crate) fn split_keys<'a>(
    keys: impl Iterator<Item = &'a InboxKey>,
) -> (Vec<&'a str>, Vec<&'a str>) {
    keys.map(|key| (key.consumer_id.as_str(), key.message_id.as_str())).unzip()
}

/// Looks at all keys; answers in their order.
pub(crate) async fn look(
    work: &mut Work,
    sql: &Sql,
    keys: &[&InboxKey],
) -> Result<Vec<Sight>, Failure> {
    look_at_lanes(work, sql, keys, vec![None; keys.len()]).await
}

/// The same, and whether lanes are blocked: one for each key, or none.
pub(crate) async fn look_at_lanes(
    work: &mut Work,
    sql: &Sql,
    keys: &[&InboxKey],
    lanes: Vec<Option<&[u8]>>,
) -> Result<Vec<Sight>, Failure> {
    let (consumers, messages) = split_keys(keys.iter().copied());
    let query = sqlx::query(sql.look()).bind(consumers).bind(messages).bind(lanes);
    let rows = work.rows("the look", query).await?;
    let mut sights = vec![Sight::default(); keys.len()];
    for row in &rows {
        read(row, &mut sights).map_err(|error| {
            Failure::unreadable(String::from("PostgreSQL: a row of the look is unreadable"), error)
        })?;
    }
    Ok(sights)
}

fn read(row: &PgRow, sights: &mut [Sight]) -> Result<(), sqlx::Error> {
    let place: i64 = row.try_get("place")?;
    let sight = usize::try_from(place - 1).ok().and_then(|index| sights.get_mut(index));
    let Some(sight) = sight else { return Err(sqlx::Error::RowNotFound) };
    if row.try_get::<bool, _>("processed")? {
        let fingerprint: Option<&str> = row.try_get("message_fingerprint")?;
        sight.look.processed = Some(fingerprint.and_then(Fingerprint::from_stored));
    }
    if let Some(fingerprint) = row.try_get::<Option<&str>, _>("parked_fingerprint")? {
        let fingerprint = Fingerprint::from_stored(fingerprint);
        match state(row)? {
            ParkedState::Due => sight.look.due.push(fingerprint),
            dead => sight.look.dead.push(DeadRow {
                fingerprint,
                position: row.try_get("position")?,
                discarded: dead == ParkedState::Discarded,
            }),
        }
    }
    sight.look.lane_blocked = row.try_get::<Option<bool>, _>("lane_blocked")? == Some(true);
    let left_us: i64 = row.try_get::<Option<i64>, _>("left_us")?.unwrap_or(0);
    sight.claim_left = Duration::from_micros(u64::try_from(left_us).unwrap_or(0));
    Ok(())
}

pub(crate) fn state(row: &PgRow) -> Result<ParkedState, sqlx::Error> {
    let state: &str = row.try_get("state")?;
    let unknown = |_| sqlx::Error::Decode(format!("an unknown state: {state:?}").into());
    state.parse().map_err(unknown)
}

/// All parked rows of one key.
pub(crate) async fn parked(
    work: &mut Work,
    sql: &Sql,
    key: &InboxKey,
) -> Result<Vec<ParkedCopy>, Failure> {
    let query =
        sqlx::query(sql.parked()).bind(key.consumer_id.as_str()).bind(key.message_id.as_str());
    let rows = work.rows("reading parked rows", query).await?;
    rows.iter()
        .map(|row| {
            copy(row).map_err(|error| {
                let what = format!("PostgreSQL: a parked row of {} is unreadable", key.message_id);
                Failure::unreadable(what, error)
            })
        })
        .collect()
}

pub(crate) fn copy(row: &PgRow) -> Result<ParkedCopy, sqlx::Error> {
    let body: Option<Vec<u8>> = row.try_get("body")?;
    let envelope = Envelope::from_stored(row.try_get("envelope")?, body.map(Bytes::from))
        .map_err(|error| sqlx::Error::Decode(error.into()))?;
    let reason: &str = row.try_get("reason")?;
    Ok(ParkedCopy {
        subscription: row.try_get("subscription")?,
        envelope,
        fingerprint: Fingerprint::from_stored(row.try_get("fingerprint")?),
        lane: row.try_get("lane")?,
        attempts: u32::try_from(row.try_get::<i32, _>("attempts")?).unwrap_or(0),
        last_status: row
            .try_get::<Option<i32>, _>("last_status")?
            .and_then(|status| u16::try_from(status).ok()),
        last_error: row.try_get("last_error")?,
        reason: reason
            .parse()
            .map_err(|_| sqlx::Error::Decode(format!("an unknown reason: {reason:?}").into()))?,
    })
}
