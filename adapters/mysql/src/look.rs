//! Reading: what is known of a message, and parked copies.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use bytes::Bytes;
use inboxd_contract::{
    CopyReason, DeadRow, Envelope, ErrorClass, Fingerprint, InboxKey, LaneId, Look, ParkedCopy,
    StoreError,
};
use sqlx::Row;
use sqlx::mysql::{MySqlConnection, MySqlRow};

use crate::MysqlStore;
use crate::claims::{KeyBytes, bind_keys, key_bytes};
use crate::error::store_error;
use crate::sql::{Sql, padded, query};

/// The claim row of a key.
#[derive(Clone)]
pub(crate) struct ClaimRow {
    pub(crate) token: Option<Vec<u8>>,
    pub(crate) attempts: u32,
    pub(crate) expires_in: Duration,
}

/// Everything that one look finds for one key.
#[derive(Clone, Default)]
pub(crate) struct Seen {
    pub(crate) look: Look,
    pub(crate) claim: Option<ClaimRow>,
}

/// Consumer and message id in two columns from `at` on.
pub(crate) fn key_of_row(row: &MySqlRow, at: usize) -> Result<KeyBytes, sqlx::Error> {
    Ok((row.try_get(at)?, row.try_get(at + 1)?))
}

/// What the tables say of each key, by one statement, one snapshot.
pub(crate) async fn look(
    connection: &mut MySqlConnection,
    sql: &Sql,
    keys: &[&InboxKey],
) -> Result<Vec<Seen>, sqlx::Error> {
    look_with_lanes(connection, sql, keys, &[]).await
}

/// The same, with the lane that each key asks about; `lanes` is as long as `keys`, or empty.
pub(crate) async fn look_with_lanes(
    connection: &mut MySqlConnection,
    sql: &Sql,
    keys: &[&InboxKey],
    lanes: &[Option<LaneId>],
) -> Result<Vec<Seen>, sqlx::Error> {
    if keys.is_empty() {
        return Ok(Vec::new());
    }
    let mut asked: Vec<LaneId> = lanes.iter().copied().flatten().collect();
    asked.sort_unstable();
    asked.dedup();
    let mut select = query(sql.look(keys.len(), !asked.is_empty()));
    for _ in 0..3 {
        select = bind_keys(select, padded(keys).copied());
    }
    // As many as keys, so that there is one text for a number of keys.
    let places = if asked.is_empty() { 0 } else { keys.len().next_power_of_two() };
    for lane in asked.iter().cycle().take(places) {
        select = select.bind(lane.0.to_vec());
    }
    let rows = select.fetch_all(connection).await?;
    let mut found: HashMap<KeyBytes, Seen> = HashMap::new();
    let mut parked: Vec<(KeyBytes, i64, &MySqlRow)> = Vec::new();
    let mut blocked: HashSet<LaneId> = HashSet::new();
    for row in &rows {
        let key = key_of_row(row, 1)?;
        match row.try_get::<i64, _>(0)? {
            0 => found.entry(key).or_default().claim = Some(read_claim(row)?),
            1 => found.entry(key).or_default().look.processed = Some(fingerprint(row, 3)?),
            2 => parked.push((key, row.try_get(8)?, row)),
            _ => blocked.extend(lane_id(row, 1)?),
        }
    }
    parked.sort_by_key(|(_, seq, _)| *seq);
    for (key, _, row) in parked {
        let look = &mut found.entry(key).or_default().look;
        match text(row, 7)?.as_deref() {
            Some("due") => look.due.push(fingerprint(row, 3)?),
            _ => look.dead.push(read_dead(row)?),
        }
    }
    // Cloned, since a key may be asked for twice.
    let seen = keys.iter().map(|key| found.get(&key_bytes(key)).cloned().unwrap_or_default());
    let mut seen: Vec<Seen> = seen.collect();
    for (seen, lane) in seen.iter_mut().zip(lanes) {
        seen.look.lane_blocked = lane.is_some_and(|lane| blocked.contains(&lane));
    }
    Ok(seen)
}

pub(crate) fn lane_id(row: &MySqlRow, at: usize) -> Result<Option<LaneId>, sqlx::Error> {
    let bytes: Option<Vec<u8>> = row.try_get(at)?;
    let lane = bytes.map(<[u8; 16]>::try_from).transpose();
    lane.map(|lane| lane.map(LaneId))
        .map_err(|_| sqlx::Error::Decode("a lane has not 16 bytes".into()))
}

fn read_claim(row: &MySqlRow) -> Result<ClaimRow, sqlx::Error> {
    let left: i64 = row.try_get(5)?;
    Ok(ClaimRow {
        token: row.try_get(3)?,
        attempts: u32::try_from(row.try_get::<i64, _>(4)?).unwrap_or(0),
        expires_in: Duration::from_micros(u64::try_from(left).unwrap_or(0)),
    })
}

fn read_dead(row: &MySqlRow) -> Result<DeadRow, sqlx::Error> {
    Ok(DeadRow {
        fingerprint: fingerprint(row, 3)?,
        position: text(row, 6)?,
        discarded: text(row, 7)?.as_deref() == Some("discarded"),
    })
}

pub(crate) fn fingerprint(row: &MySqlRow, at: usize) -> Result<Option<Fingerprint>, sqlx::Error> {
    Ok(text(row, at)?.as_deref().and_then(Fingerprint::from_stored))
}

/// Text from a column of whatever character set, ids' binary ones included.
pub(crate) fn text(row: &MySqlRow, at: usize) -> Result<Option<String>, sqlx::Error> {
    let bytes: Option<Vec<u8>> = row.try_get(at)?;
    bytes
        .map(|bytes| String::from_utf8(bytes).map_err(|error| sqlx::Error::Decode(error.into())))
        .transpose()
}

impl MysqlStore {
    pub(crate) async fn look_batch(&self, keys: &[InboxKey]) -> Result<Vec<Look>, StoreError> {
        let keys: Vec<&InboxKey> = keys.iter().collect();
        let mut looks = Vec::with_capacity(keys.len());
        for chunk in keys.chunks(self.chunk_max) {
            let work = async {
                let mut transaction = self.main.begin().await?;
                let result = look(transaction.connection(), &self.sql, chunk).await;
                transaction.end(result).await
            };
            let seen = self.main.in_time("looking messages up", work).await?;
            looks.extend(seen.into_iter().map(|seen| seen.look));
        }
        Ok(looks)
    }

    pub(crate) async fn parked_copies(
        &self,
        key: &InboxKey,
    ) -> Result<Vec<ParkedCopy>, StoreError> {
        let work = async {
            let mut transaction = self.main.begin().await?;
            let select = bind_keys(query(self.sql.parked()), std::iter::once(key));
            let result = select.fetch_all(transaction.connection()).await;
            transaction.end(result).await
        };
        let rows = self.main.in_time("reading parked copies", work).await?;
        rows.iter().map(read_parked).collect()
    }
}

pub(crate) fn read_parked(row: &MySqlRow) -> Result<ParkedCopy, StoreError> {
    let failed = |error| store_error("reading a parked copy", error);
    let required =
        |at: usize| Ok::<_, StoreError>(text(row, at).map_err(failed)?.unwrap_or_default());
    let body: Option<Vec<u8>> = row.try_get(2).map_err(failed)?;
    let unreadable = |error: Box<dyn std::error::Error + Send + Sync>| {
        StoreError::new(ErrorClass::Permanent, "reading a parked copy", error)
    };
    Ok(ParkedCopy {
        subscription: required(0)?,
        envelope: Envelope::from_stored(&required(1)?, body.map(Bytes::from))
            .map_err(|error| unreadable(error.into()))?,
        fingerprint: fingerprint(row, 3).map_err(failed)?,
        lane: row.try_get(4).map_err(failed)?,
        attempts: u32::try_from(row.try_get::<i32, _>(5).map_err(failed)?).unwrap_or(0),
        last_status: row.try_get(6).map_err(failed)?,
        last_error: text(row, 7).map_err(failed)?,
        reason: required(8)?.parse::<CopyReason>().map_err(|error| unreadable(error.into()))?,
    })
}
