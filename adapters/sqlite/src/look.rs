//! Reading: what is known of a message, and parked copies.

use std::time::Duration;

use bytes::Bytes;
use inboxd_contract::{
    CopyReason, DeadRow, Envelope, ErrorClass, Fingerprint, InboxKey, Look, ParkedCopy, StoreError,
};
use serde_json::{Value, json};
use sqlx::Row;
use sqlx::sqlite::{SqliteConnection, SqliteRow};

use crate::SqliteStore;
use crate::error::store_error;
use crate::sql::Sql;

/// The claim row of a key.
pub(crate) struct ClaimRow {
    pub(crate) token: Option<String>,
    pub(crate) attempts: u32,
    pub(crate) expires_in: Duration,
}

/// Everything that one look finds for one key.
#[derive(Default)]
pub(crate) struct Seen {
    pub(crate) look: Look,
    pub(crate) claim: Option<ClaimRow>,
}

/// `batch` is an array of `len` arrays that begin with consumer id and message id; a fourth value
/// is the lane that is asked about.
pub(crate) async fn look(
    connection: &mut SqliteConnection,
    sql: &Sql,
    batch: &str,
    len: usize,
) -> Result<Vec<Seen>, sqlx::Error> {
    let rows = sql.look.query().bind(batch).fetch_all(connection).await?;
    let mut seen: Vec<Seen> = std::iter::repeat_with(Seen::default).take(len).collect();
    for row in &rows {
        let index: i64 = row.try_get(0)?;
        let slot = usize::try_from(index).ok().and_then(|index| seen.get_mut(index));
        if let Some(slot) = slot {
            read_seen(row, slot)?;
        }
    }
    Ok(seen)
}

fn read_seen(row: &SqliteRow, seen: &mut Seen) -> Result<(), sqlx::Error> {
    if row.try_get::<bool, _>(1)? {
        seen.look.processed = Some(fingerprint(row.try_get(2)?));
    }
    if let Some(state) = row.try_get::<Option<String>, _>(5)? {
        let fingerprint = fingerprint(row.try_get(3)?);
        match state.as_str() {
            "due" => seen.look.due.push(fingerprint),
            state => seen.look.dead.push(DeadRow {
                fingerprint,
                position: row.try_get(4)?,
                discarded: state == "discarded",
            }),
        }
    }
    seen.look.lane_blocked = row.try_get(9)?;
    if let Some(attempts) = row.try_get::<Option<u32>, _>(7)? {
        let left: i64 = row.try_get(8)?;
        seen.claim = Some(ClaimRow {
            token: row.try_get(6)?,
            attempts,
            expires_in: Duration::from_millis(u64::try_from(left).unwrap_or(0)),
        });
    }
    Ok(())
}

pub(crate) fn fingerprint(stored: Option<String>) -> Option<Fingerprint> {
    stored.as_deref().and_then(Fingerprint::from_stored)
}

impl SqliteStore {
    pub(crate) async fn look_batch(&self, keys: &[InboxKey]) -> Result<Vec<Look>, StoreError> {
        let wanted = |key: &InboxKey| json!([key.consumer_id.as_str(), key.message_id.as_str()]);
        let batch = Value::Array(keys.iter().map(wanted).collect()).to_string();
        let failed = |error| store_error("looking messages up", error);
        let mut connection = self.readers.acquire().await.map_err(failed)?;
        let seen = look(&mut connection, &self.sql, &batch, keys.len()).await.map_err(failed)?;
        Ok(seen.into_iter().map(|seen| seen.look).collect())
    }

    pub(crate) async fn parked_copies(
        &self,
        key: &InboxKey,
    ) -> Result<Vec<ParkedCopy>, StoreError> {
        let query = self
            .sql
            .parked
            .query()
            .bind(key.consumer_id.as_str().to_owned())
            .bind(key.message_id.as_str().to_owned());
        let failed = |error| store_error("reading parked copies", error);
        let rows = query.fetch_all(&self.readers).await.map_err(failed)?;
        rows.iter().map(read_parked).collect()
    }
}

pub(crate) fn read_parked(row: &SqliteRow) -> Result<ParkedCopy, StoreError> {
    let failed = |error| store_error("reading a parked copy", error);
    let envelope: String = row.try_get(1).map_err(failed)?;
    let body: Option<Vec<u8>> = row.try_get(2).map_err(failed)?;
    let reason: String = row.try_get(8).map_err(failed)?;
    let unreadable = |error: Box<dyn std::error::Error + Send + Sync>| {
        StoreError::new(ErrorClass::Permanent, "reading a parked copy", error)
    };
    Ok(ParkedCopy {
        subscription: row.try_get(0).map_err(failed)?,
        envelope: Envelope::from_stored(&envelope, body.map(Bytes::from))
            .map_err(|error| unreadable(error.into()))?,
        fingerprint: fingerprint(row.try_get(3).map_err(failed)?),
        lane: row.try_get(4).map_err(failed)?,
        attempts: row.try_get(5).map_err(failed)?,
        last_status: row.try_get(6).map_err(failed)?,
        last_error: row.try_get(7).map_err(failed)?,
        reason: reason.parse::<CopyReason>().map_err(|error| unreadable(error.into()))?,
    })
}
