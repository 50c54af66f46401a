//! What is known: of one message, for a person; of all, for metrics.

use std::time::Duration;

use inboxd_contract::{
    EXPLAINED_COPIES_MAX, ExplainedClaim, ExplainedCopy, ExplainedMessage, Explanation,
    Fingerprint, InboxKey, MessageRecord, OwnerId, StoreStats,
};
use sqlx::Row;
use sqlx::postgres::PgRow;

use crate::error::Failure;
use crate::look::{copy, state};
use crate::session::Work;
use crate::sql::Sql;

/// Everything about one key. Claim, copies, row: the order in which they take each other's place,
/// so that what completes meanwhile is seen twice rather than not at all.
pub(crate) async fn explain(
    work: &mut Work,
    sql: &Sql,
    key: &InboxKey,
) -> Result<Explanation, Failure> {
    let (consumer, id) = (key.consumer_id.as_str(), key.message_id.as_str());
    let doing = "explaining a message";
    let limit = i64::try_from(EXPLAINED_COPIES_MAX).unwrap_or(i64::MAX);
    let claims = sqlx::query(sql.explain_claim()).bind(consumer).bind(id);
    let claims = work.rows(doing, claims).await?;
    let parked = sqlx::query(sql.explain_parked()).bind(consumer).bind(id).bind(limit);
    let parked = work.rows(doing, parked).await?;
    let messages = sqlx::query(sql.explain_message()).bind(consumer).bind(id);
    let messages = work.rows(doing, messages).await?;
    let read = || {
        Ok(Explanation {
            message: messages.first().map(message).transpose()?,
            claim: claims.first().map(claim).transpose()?,
            copies: parked.iter().map(explained_copy).collect::<Result<_, _>>()?,
            copies_total: parked.first().map_or(Ok(0), |row| count(row, "total"))?,
        })
    };
    read().map_err(|error: sqlx::Error| {
        Failure::unreadable(format!("PostgreSQL: a row of {id} is unreadable"), error)
    })
}

/// How much there is.
pub(crate) async fn stats(work: &mut Work, sql: &Sql) -> Result<StoreStats, Failure> {
    let rows = work.rows("counting rows", sqlx::query(sql.stats())).await?;
    let Some(row) = rows.first() else { return Ok(StoreStats::default()) };
    let read = || {
        let count = |name| -> Result<_, sqlx::Error> {
            Ok(row.try_get::<Option<i64>, _>(name)?.map(|rows| u64::try_from(rows).unwrap_or(0)))
        };
        Ok(StoreStats {
            messages: count("messages")?,
            claims: count("claims")?,
            dead: count("dead")?,
            oldest_message: row.try_get::<Option<i64>, _>("oldest_message_us")?.map(micros),
            oldest_dead: row.try_get::<Option<i64>, _>("oldest_dead_us")?.map(micros),
            due: count("due")?,
            oldest_due: row.try_get::<Option<i64>, _>("oldest_due_us")?.map(micros),
        })
    };
    read().map_err(|error: sqlx::Error| {
        Failure::unreadable("PostgreSQL: counts of rows are unreadable".to_owned(), error)
    })
}

fn message(row: &PgRow) -> Result<ExplainedMessage, sqlx::Error> {
    let fingerprint: Option<&str> = row.try_get("fingerprint")?;
    Ok(ExplainedMessage {
        record: MessageRecord {
            fingerprint: fingerprint.and_then(Fingerprint::from_stored),
            producer: row.try_get("producer")?,
            message_type: row.try_get("message_type")?,
            correlation_id: row.try_get("correlation_id")?,
            causation_id: row.try_get("causation_id")?,
        },
        processed_ago: micros(row.try_get("ago_us")?),
    })
}

fn claim(row: &PgRow) -> Result<ExplainedClaim, sqlx::Error> {
    let left = micros(row.try_get("left_us")?);
    Ok(ExplainedClaim {
        owner: OwnerId(row.try_get::<String, _>("owner")?.into()),
        attempts: u32::try_from(row.try_get::<i32, _>("attempts")?).unwrap_or(0),
        expires_in: (!left.is_zero()).then_some(left),
    })
}

fn explained_copy(row: &PgRow) -> Result<ExplainedCopy, sqlx::Error> {
    Ok(ExplainedCopy {
        copy: copy(row)?,
        body_bytes: row.try_get::<Option<i64>, _>("body_bytes")?.map(unsigned),
        state: state(row)?,
        due_in: row.try_get::<Option<i64>, _>("due_us")?.map(micros),
        parked_ago: micros(row.try_get("ago_us")?),
    })
}

fn count(row: &PgRow, name: &str) -> Result<u64, sqlx::Error> {
    row.try_get(name).map(unsigned)
}

pub(crate) fn unsigned(count: i64) -> u64 {
    u64::try_from(count).unwrap_or(0)
}

/// A duration as the statements answer it; what has passed is zero.
pub(crate) fn micros(micros: i64) -> Duration {
    Duration::from_micros(u64::try_from(micros).unwrap_or(0))
}
