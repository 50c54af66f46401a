//! What operators see of parked rows, and do to dead letters. Each change leaves its entry in the
//! audit, in the same transaction.

use std::sync::Arc;

use futures::FutureExt;
use inboxd_contract::{
    Actor, AuditAction, AuditEntry, ConsumerId, DeadReason, ErrorClass, Fingerprint, InboxKey,
    LaneId, MessageId, ParkedFilter, ParkedRow, ParkedSeq, Replay, Replayed, StoreError,
};
use sqlx::Row;
use sqlx::sqlite::{SqliteArguments, SqliteConnection, SqliteRow};

use crate::SqliteStore;
use crate::batch::Answers;
use crate::claims::millis as ms;
use crate::error::store_error;
use crate::explain::{millis, state, unsigned};
use crate::look::{fingerprint, read_parked};
use crate::sql::Sql;

type Query = sqlx::query::Query<'static, sqlx::Sqlite, SqliteArguments>;

impl SqliteStore {
    pub(crate) async fn list_rows(
        &self,
        filter: &ParkedFilter,
        after: Option<ParkedSeq>,
        limit: u32,
    ) -> Result<Vec<ParkedRow>, StoreError> {
        let (mut conditions, values) = Conditions::of(filter);
        conditions.push(String::from("p.seq > ?"));
        let statement = self.sql.copies.list(&conditions.join(" AND "), "?");
        let query = values.bind(statement.query());
        let query = query.bind(after.map_or(i64::MIN, |seq| seq.0)).bind(limit);
        let rows = query.fetch_all(&self.readers).await;
        let rows = rows.map_err(|error| store_error("listing parked messages", error))?;
        rows.iter().map(read_row).collect()
    }

    pub(crate) async fn count_rows(
        &self,
        filter: &ParkedFilter,
        most: u64,
    ) -> Result<u64, StoreError> {
        let (mut conditions, values) = Conditions::of(filter);
        conditions.push(String::from("true"));
        let statement = self.sql.copies.count(&conditions.join(" AND "), "?");
        let query = values.bind(statement.query());
        let row = query.bind(i64::try_from(most).unwrap_or(i64::MAX)).fetch_one(&self.readers);
        let count = row.await.and_then(|row| row.try_get(0));
        count.map(unsigned).map_err(|error| store_error("counting parked messages", error))
    }

    pub(crate) async fn one_row(&self, seq: ParkedSeq) -> Result<Option<ParkedRow>, StoreError> {
        let query = self.sql.copies.row.query().bind(seq.0);
        let row = query.fetch_optional(&self.readers).await;
        let row = row.map_err(|error| store_error("reading a parked message", error))?;
        row.as_ref().map(read_row).transpose()
    }

    pub(crate) async fn replay_batch(
        &self,
        replays: &[Replay],
        actor: &Actor,
    ) -> Vec<Result<Replayed, StoreError>> {
        let mut answers = Answers::new(replays.len());
        let run = |chosen: Vec<usize>| {
            let chosen: Vec<Replay> = chosen.into_iter().map(|i| replays[i].clone()).collect();
            let (sql, actor) = (Arc::clone(&self.sql), actor.clone());
            self.writer.transaction("replaying dead letters", move |connection| {
                async move {
                    let mut replayed = Vec::with_capacity(chosen.len());
                    for replay in &chosen {
                        replayed.push(replay_in(connection, &sql, replay, &actor).await?);
                    }
                    Ok(replayed)
                }
                .boxed()
            })
        };
        answers.run(answers.open(), run).await;
        answers.finish()
    }

    pub(crate) async fn discard_batch(
        &self,
        rows: &[ParkedSeq],
        actor: &Actor,
    ) -> Vec<Result<bool, StoreError>> {
        let mut answers = Answers::new(rows.len());
        let run = |chosen: Vec<usize>| {
            let chosen: Vec<ParkedSeq> = chosen.into_iter().map(|index| rows[index]).collect();
            let (sql, actor) = (Arc::clone(&self.sql), actor.clone());
            self.writer.transaction("discarding dead letters", move |connection| {
                async move {
                    let mut discarded = Vec::with_capacity(chosen.len());
                    for seq in chosen {
                        discarded.push(discard_in(connection, &sql, seq, &actor).await?);
                    }
                    Ok(discarded)
                }
                .boxed()
            })
        };
        answers.run(answers.open(), run).await;
        answers.finish()
    }

    pub(crate) async fn audit_entries(
        &self,
        before: Option<i64>,
        limit: u32,
    ) -> Result<Vec<AuditEntry>, StoreError> {
        let query = self.sql.copies.audit.query().bind(before.unwrap_or(i64::MAX)).bind(limit);
        let rows = query.fetch_all(&self.readers).await;
        let rows = rows.map_err(|error| store_error("reading the audit", error))?;
        rows.iter().map(read_entry).collect()
    }
}

/// The values of conditions, in the order of their parameters.
enum Value {
    Text(String),
    Number(i64),
}

struct Conditions(Vec<Value>);

impl Conditions {
    fn of(filter: &ParkedFilter) -> (Vec<String>, Self) {
        let mut texts = Vec::new();
        let mut values = Vec::new();
        let mut add = |text: &str, value: Option<Value>| {
            if let Some(value) = value {
                texts.push(text.to_owned());
                values.push(value);
            }
        };
        let text = |text: &str| Value::Text(text.to_owned());
        let number = |duration| Value::Number(ms(duration));
        // By the index where that names one message; else the order of seq is worth more.
        let one_message = filter.consumer_id.is_some() && filter.message_id.is_some();
        let (consumer, state) = match one_message {
            true => ("p.consumer_id = ?", "+p.state = ?"),
            false => ("+p.consumer_id = ?", "p.state = ?"),
        };
        add(consumer, filter.consumer_id.as_ref().map(|id| text(id.as_str())));
        add("p.message_id = ?", filter.message_id.as_ref().map(|id| text(id.as_str())));
        add("p.subscription = ?", filter.subscription.as_deref().map(text));
        add("p.reason = ?", filter.reason.map(|reason| text(reason.as_str())));
        // By bytes: no wildcards, no folding.
        let error = filter.error_contains.as_deref().filter(|wanted| !wanted.is_empty());
        add("instr(CAST(p.last_error AS BLOB), CAST(? AS BLOB)) > 0", error.map(text));
        add("{now} - p.parked_at >= ?", filter.parked_at_least.map(number));
        add("{now} - p.parked_at <= ?", filter.parked_at_most.map(number));
        match filter.states.as_slice() {
            [] => {}
            [only] => add(state, Some(text(only.as_str()))),
            states => {
                let names: Vec<String> =
                    states.iter().map(|state| format!("'{}'", state.as_str())).collect();
                // Not by the index, which has several orders of seq then.
                texts.push(format!("+p.state IN ({})", names.join(", ")));
            }
        }
        (texts, Self(values))
    }

    fn bind(self, query: Query) -> Query {
        self.0.into_iter().fold(query, |query, value| match value {
            Value::Text(text) => query.bind(text),
            Value::Number(number) => query.bind(number),
        })
    }
}

fn unreadable(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> StoreError {
    StoreError::new(ErrorClass::Permanent, "reading a parked message", error)
}

pub(crate) fn read_row(row: &SqliteRow) -> Result<ParkedRow, StoreError> {
    let failed = |error| store_error("reading a parked message", error);
    let number = |at: usize| row.try_get::<i64, _>(at).map_err(failed);
    let optional = |at: usize| row.try_get::<Option<i64>, _>(at).map_err(failed);
    let consumer_id: String = row.try_get(10).map_err(failed)?;
    let message_id: String = row.try_get(11).map_err(failed)?;
    let state_text: String = row.try_get(12).map_err(failed)?;
    let lane_id: Option<Vec<u8>> = row.try_get(13).map_err(failed)?;
    let lane_id = lane_id.map(<[u8; 16]>::try_from).transpose();
    let lane_id = lane_id.map_err(|_| unreadable("a lane has not 16 bytes"))?;
    Ok(ParkedRow {
        seq: ParkedSeq(number(9)?),
        key: InboxKey {
            consumer_id: ConsumerId::new(&consumer_id).map_err(unreadable)?,
            message_id: MessageId::from_stored(&message_id),
        },
        state: state(&state_text)?,
        copy: read_parked(row)?,
        lane_id: lane_id.map(LaneId),
        body_bytes: optional(14)?.map(unsigned),
        due_in: optional(15)?.map(millis),
        first_ago: millis(number(16)?),
        parked_ago: millis(number(17)?),
    })
}

fn read_entry(row: &SqliteRow) -> Result<AuditEntry, StoreError> {
    let failed = |error| store_error("reading the audit", error);
    let number = |at: usize| row.try_get::<i64, _>(at).map_err(failed);
    let text = |at: usize| row.try_get::<String, _>(at).map_err(failed);
    Ok(AuditEntry {
        id: number(0)?,
        ago: millis(number(1)?),
        actor: text(2)?,
        action: text(3)?.parse().map_err(unreadable)?,
        key: InboxKey {
            consumer_id: ConsumerId::new(&text(4)?).map_err(unreadable)?,
            message_id: MessageId::from_stored(&text(5)?),
        },
        seq: ParkedSeq(number(6)?),
        replayed_as: row
            .try_get::<Option<String>, _>(7)
            .map_err(failed)?
            .map(|id| MessageId::from_stored(&id)),
    })
}

async fn replay_in(
    connection: &mut SqliteConnection,
    sql: &Sql,
    replay: &Replay,
    actor: &Actor,
) -> Result<Replayed, sqlx::Error> {
    let query = sql.copies.dead_row.query().bind(replay.seq.0);
    let Some(row) = query.fetch_optional(&mut *connection).await? else {
        return Ok(Replayed::NotDead);
    };
    if !row.try_get::<bool, _>(4)? {
        return Ok(Replayed::NoBody);
    }
    let consumer: String = row.try_get(0)?;
    let before = MessageId::from_stored(&row.try_get::<String, _>(1)?);
    let own = fingerprint(row.try_get(2)?);
    let conflicts = row.try_get::<String, _>(3)? == <&str>::from(DeadReason::IdConflict);

    let mut processed = processed(connection, sql, &consumer, &before).await?;
    let differs = |other: &Option<Fingerprint>| Fingerprint::conflict(other.as_ref(), own.as_ref());
    let mut id = before.clone();
    if let Some(own) = &own
        && (conflicts || processed.as_ref().is_some_and(differs))
    {
        id = before.of_conflict(own);
        processed = self::processed(connection, sql, &consumer, &id).await?;
    }
    let mut action = AuditAction::Replay;
    if processed.is_some() {
        if !replay.allow_processed {
            return Ok(Replayed::Processed);
        }
        action = AuditAction::ReplayProcessed;
        id = before.of_override(replay.fresh);
    }
    let own = own.as_ref().map_or("", Fingerprint::as_str).to_owned();
    let same = sql.copies.same.query().bind(consumer.clone()).bind(id.as_str().to_owned());
    if same.bind(own).bind(replay.seq.0).fetch_optional(&mut *connection).await?.is_some() {
        return Ok(Replayed::Exists);
    }
    let idle = sql.copies.forget_idle.query().bind(consumer.clone());
    idle.bind(id.as_str().to_owned()).execute(&mut *connection).await?;
    let update = sql.copies.replay.query().bind(replay.seq.0).bind(id.as_str().to_owned());
    update.bind(ms(replay.delay)).execute(&mut *connection).await?;
    let replayed_as = (id != before).then(|| id.as_str().to_owned());
    let entry = Entry { action, consumer, message: before.as_str().to_owned(), replayed_as };
    record_audit(connection, sql, actor, replay.seq, entry).await?;
    Ok(Replayed::Due(id))
}

/// The row of `inbox_messages`: `Some(fingerprint)` if it exists.
async fn processed(
    connection: &mut SqliteConnection,
    sql: &Sql,
    consumer: &str,
    id: &MessageId,
) -> Result<Option<Option<Fingerprint>>, sqlx::Error> {
    let query = sql.copies.processed.query().bind(consumer.to_owned());
    let row = query.bind(id.as_str().to_owned()).fetch_optional(connection).await?;
    row.map(|row| Ok(fingerprint(row.try_get(0)?))).transpose()
}

async fn discard_in(
    connection: &mut SqliteConnection,
    sql: &Sql,
    seq: ParkedSeq,
    actor: &Actor,
) -> Result<bool, sqlx::Error> {
    let discarded = sql.copies.discard.query().bind(seq.0).fetch_optional(&mut *connection).await?;
    let Some(row) = discarded else { return Ok(false) };
    let entry = Entry {
        action: AuditAction::Discard,
        consumer: row.try_get(0)?,
        message: row.try_get(1)?,
        replayed_as: None,
    };
    record_audit(connection, sql, actor, seq, entry).await?;
    Ok(true)
}

struct Entry {
    action: AuditAction,
    consumer: String,
    message: String,
    replayed_as: Option<String>,
}

async fn record_audit(
    connection: &mut SqliteConnection,
    sql: &Sql,
    actor: &Actor,
    seq: ParkedSeq,
    entry: Entry,
) -> Result<(), sqlx::Error> {
    sql.copies
        .record_audit
        .query()
        .bind(actor.as_str().to_owned())
        .bind(<&'static str>::from(entry.action))
        .bind(entry.consumer)
        .bind(entry.message)
        .bind(seq.0)
        .bind(entry.replayed_as)
        .execute(connection)
        .await
        .map(drop)
}
