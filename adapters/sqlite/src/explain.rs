//! What is known: of one message, for a person; of all, for metrics.

use std::time::Duration;

use inboxd_contract::{
    EXPLAINED_COPIES_MAX, ExplainedClaim, ExplainedCopy, ExplainedMessage, Explanation, InboxKey,
    MessageRecord, OwnerId, ParkedState, StoreError, StoreStats,
};
use sqlx::Row;
use sqlx::sqlite::SqliteRow;

use crate::SqliteStore;
use crate::error::store_error;
use crate::look::{fingerprint, read_parked};

impl SqliteStore {
    /// Everything about one key. Claim, copies, row: the order in which they take each other's
    /// place, so that what completes meanwhile is seen twice rather than not at all.
    pub(crate) async fn explain_one(&self, key: &InboxKey) -> Result<Explanation, StoreError> {
        let failed = |error| store_error("explaining a message", error);
        let mut connection = self.readers.acquire().await.map_err(failed)?;
        let of_key = |statement: &crate::sql::Statement| {
            let consumer_id = key.consumer_id.as_str().to_owned();
            statement.query().bind(consumer_id).bind(key.message_id.as_str().to_owned())
        };
        let claim = of_key(&self.sql.explain_claim).fetch_optional(&mut *connection).await;
        let claim = claim.map_err(failed)?;
        let limit = i64::try_from(EXPLAINED_COPIES_MAX).unwrap_or(i64::MAX);
        let parked = of_key(&self.sql.explain_parked).bind(limit);
        let parked = parked.fetch_all(&mut *connection).await.map_err(failed)?;
        let message = of_key(&self.sql.explain_message).fetch_optional(&mut *connection).await;
        let message = message.map_err(failed)?;
        Ok(Explanation {
            message: message.as_ref().map(read_message).transpose().map_err(failed)?,
            claim: claim.as_ref().map(read_claim).transpose().map_err(failed)?,
            copies: parked.iter().map(read_copy).collect::<Result<_, _>>()?,
            copies_total: parked
                .first()
                .map_or(Ok(0), |row| row.try_get(12).map(unsigned))
                .map_err(failed)?,
        })
    }

    /// How much there is.
    pub(crate) async fn stats_now(&self) -> Result<StoreStats, StoreError> {
        let failed = |error| store_error("counting rows", error);
        let mut connection = self.readers.acquire().await.map_err(failed)?;
        let row = self.sql.stats.query().fetch_one(&mut *connection).await.map_err(failed)?;
        read_stats(&row).map_err(failed)
    }
}

fn read_stats(row: &SqliteRow) -> Result<StoreStats, sqlx::Error> {
    let count = |column: usize| -> Result<_, sqlx::Error> {
        Ok(row.try_get::<Option<i64>, _>(column)?.map(|rows| u64::try_from(rows).unwrap_or(0)))
    };
    Ok(StoreStats {
        messages: count(0)?,
        claims: count(1)?,
        dead: count(2)?,
        due: count(3)?,
        oldest_message: row.try_get::<Option<i64>, _>(4)?.map(millis),
        oldest_dead: row.try_get::<Option<i64>, _>(5)?.map(millis),
        oldest_due: row.try_get::<Option<i64>, _>(6)?.map(millis),
    })
}

fn read_message(row: &SqliteRow) -> Result<ExplainedMessage, sqlx::Error> {
    Ok(ExplainedMessage {
        record: MessageRecord {
            fingerprint: fingerprint(row.try_get(0)?),
            producer: row.try_get(1)?,
            message_type: row.try_get(2)?,
            correlation_id: row.try_get(3)?,
            causation_id: row.try_get(4)?,
        },
        processed_ago: millis(row.try_get(5)?),
    })
}

fn read_claim(row: &SqliteRow) -> Result<ExplainedClaim, sqlx::Error> {
    let left = millis(row.try_get(2)?);
    Ok(ExplainedClaim {
        owner: OwnerId(row.try_get::<String, _>(0)?.into()),
        attempts: row.try_get(1)?,
        expires_in: (!left.is_zero()).then_some(left),
    })
}

fn read_copy(row: &SqliteRow) -> Result<ExplainedCopy, StoreError> {
    let failed = |error| store_error("reading a parked copy", error);
    Ok(ExplainedCopy {
        copy: read_parked(row)?,
        body_bytes: row.try_get::<Option<i64>, _>(11).map_err(failed)?.map(unsigned),
        state: state(&row.try_get::<String, _>(9).map_err(failed)?)?,
        due_in: row.try_get::<Option<i64>, _>(13).map_err(failed)?.map(millis),
        parked_ago: millis(row.try_get(10).map_err(failed)?),
    })
}

pub(crate) fn state(stored: &str) -> Result<ParkedState, StoreError> {
    stored.parse().map_err(|_| StoreError::permanent("a parked row's state is unknown"))
}

pub(crate) fn unsigned(count: i64) -> u64 {
    u64::try_from(count).unwrap_or(0)
}

pub(crate) fn millis(millis: i64) -> Duration {
    Duration::from_millis(u64::try_from(millis).unwrap_or(0))
}
