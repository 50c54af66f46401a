//! What is known: of one message, for a person; of all, for metrics.

use std::time::Duration;

use inboxd_contract::{
    ExplainedClaim, ExplainedCopy, ExplainedMessage, Explanation, InboxKey, MessageRecord, OwnerId,
    ParkedState, StoreError, StoreStats,
};
use sqlx::Row;
use sqlx::mysql::MySqlRow;

use crate::MysqlStore;
use crate::claims::bind_keys;
use crate::error::store_error;
use crate::look::{fingerprint, read_parked, text};
use crate::sql::query;

impl MysqlStore {
    /// Everything about one key. Claim, copies, row: the order in which they take each other's
    /// place, so that what completes meanwhile is seen twice rather than not at all.
    pub(crate) async fn explain_one(&self, key: &InboxKey) -> Result<Explanation, StoreError> {
        let work = async {
            let mut transaction = self.main.begin().await?;
            let mut rows = Vec::new();
            let statements =
                [self.sql.explain_claim(), self.sql.explain_parked(), self.sql.explain_message()];
            for statement in statements {
                let select = bind_keys(query(statement), std::iter::once(key));
                match select.fetch_all(transaction.connection()).await {
                    Ok(found) => rows.push(found),
                    Err(error) => return transaction.end(Err(error)).await,
                }
            }
            transaction.end(Ok(rows)).await
        };
        let rows = self.main.in_time("explaining a message", work).await?;
        let failed = |error| store_error("explaining a message", error);
        let [claims, parked, messages] = rows.as_slice() else {
            return Err(StoreError::transient("explaining a message: too few answers"));
        };
        Ok(Explanation {
            message: messages.first().map(read_message).transpose().map_err(failed)?,
            claim: claims.first().map(read_claim).transpose().map_err(failed)?,
            copies: parked.iter().map(read_copy).collect::<Result<_, _>>()?,
            copies_total: parked
                .first()
                .map_or(Ok(0), |row| row.try_get(12).map(unsigned))
                .map_err(failed)?,
        })
    }

    /// How much there is.
    pub(crate) async fn stats_now(&self) -> Result<StoreStats, StoreError> {
        let work = async {
            let mut transaction = self.main.begin().await?;
            let row = query(self.sql.stats()).fetch_one(transaction.connection()).await;
            transaction.end(row).await
        };
        let row = self.main.in_time("counting rows", work).await?;
        read_stats(&row).map_err(|error| store_error("counting rows", error))
    }
}

fn read_stats(row: &MySqlRow) -> Result<StoreStats, sqlx::Error> {
    let count = |column: usize| -> Result<_, sqlx::Error> {
        Ok(row.try_get::<Option<i64>, _>(column)?.map(|rows| u64::try_from(rows).unwrap_or(0)))
    };
    Ok(StoreStats {
        messages: count(0)?,
        claims: count(1)?,
        dead: count(2)?,
        due: count(3)?,
        oldest_message: row.try_get::<Option<i64>, _>(4)?.map(micros),
        oldest_dead: row.try_get::<Option<i64>, _>(5)?.map(micros),
        oldest_due: row.try_get::<Option<i64>, _>(6)?.map(micros),
    })
}

fn read_message(row: &MySqlRow) -> Result<ExplainedMessage, sqlx::Error> {
    Ok(ExplainedMessage {
        record: MessageRecord {
            fingerprint: fingerprint(row, 0)?,
            producer: text(row, 1)?,
            message_type: text(row, 2)?,
            correlation_id: text(row, 3)?,
            causation_id: text(row, 4)?,
        },
        processed_ago: micros(row.try_get(5)?),
    })
}

fn read_claim(row: &MySqlRow) -> Result<ExplainedClaim, sqlx::Error> {
    let left = micros(row.try_get(2)?);
    Ok(ExplainedClaim {
        owner: OwnerId(text(row, 0)?.unwrap_or_default().into()),
        attempts: u32::try_from(row.try_get::<i32, _>(1)?).unwrap_or(0),
        expires_in: (!left.is_zero()).then_some(left),
    })
}

fn read_copy(row: &MySqlRow) -> Result<ExplainedCopy, StoreError> {
    let failed = |error| store_error("reading a parked copy", error);
    Ok(ExplainedCopy {
        copy: read_parked(row)?,
        body_bytes: row.try_get::<Option<i64>, _>(11).map_err(failed)?.map(unsigned),
        state: state(row, 9)?,
        due_in: row.try_get::<Option<i64>, _>(13).map_err(failed)?.map(micros),
        parked_ago: micros(row.try_get(10).map_err(failed)?),
    })
}

pub(crate) fn state(row: &MySqlRow, at: usize) -> Result<ParkedState, StoreError> {
    let stored = text(row, at).map_err(|error| store_error("reading a parked copy", error))?;
    let unknown = |_| StoreError::permanent("a parked row's state is unknown");
    stored.unwrap_or_default().parse().map_err(unknown)
}

pub(crate) fn unsigned(count: i64) -> u64 {
    u64::try_from(count).unwrap_or(0)
}

pub(crate) fn micros(micros: i64) -> Duration {
    Duration::from_micros(u64::try_from(micros).unwrap_or(0))
}
