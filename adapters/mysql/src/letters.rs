//! What operators see of parked rows, and do to dead letters. Each change leaves its entry in the
//! audit, in the same transaction.

use inboxd_contract::{
    Actor, AuditAction, AuditEntry, ConsumerId, DeadReason, ErrorClass, Fingerprint, InboxKey,
    MessageId, ParkedFilter, ParkedRow, ParkedSeq, Replay, Replayed, StoreError,
};
use sqlx::Row;
use sqlx::mysql::{MySqlConnection, MySqlRow};

use crate::MysqlStore;
use crate::batch::Answers;
use crate::claims::{bind_keys, micros as us};
use crate::error::store_error;
use crate::explain::{micros, state, unsigned};
use crate::look::{fingerprint, lane_id, read_parked, text};
use crate::settle::fingerprint_bytes;
use crate::sql::{Bound, Patience, Sql, query};

impl MysqlStore {
    pub(crate) async fn list_rows(
        &self,
        filter: &ParkedFilter,
        after: Option<ParkedSeq>,
        limit: u32,
    ) -> Result<Vec<ParkedRow>, StoreError> {
        let conditions = Conditions::of(filter);
        let select = query(self.sql.list(&conditions.texts, conditions.index));
        let select = conditions.bind(select).bind(after.map_or(i64::MIN, |seq| seq.0)).bind(limit);
        let rows = self.read("listing parked messages", select).await?;
        rows.iter().map(read_row).collect()
    }

    pub(crate) async fn count_rows(
        &self,
        filter: &ParkedFilter,
        most: u64,
    ) -> Result<u64, StoreError> {
        let conditions = Conditions::of(filter);
        let select = query(self.sql.count_rows(&conditions.texts, conditions.index));
        let select = conditions.bind(select).bind(i64::try_from(most).unwrap_or(i64::MAX));
        let what = "counting parked messages";
        let rows = self.read(what, select).await?;
        let count = rows.first().map_or(Ok(0), |row| row.try_get::<i64, _>(0));
        count.map(unsigned).map_err(|error| store_error(what, error))
    }

    pub(crate) async fn one_row(&self, seq: ParkedSeq) -> Result<Option<ParkedRow>, StoreError> {
        let select = query(self.sql.row()).bind(seq.0);
        let rows = self.read("reading a parked message", select).await?;
        rows.first().map(read_row).transpose()
    }

    pub(crate) async fn audit_entries(
        &self,
        before: Option<i64>,
        limit: u32,
    ) -> Result<Vec<AuditEntry>, StoreError> {
        let select = query(self.sql.audit()).bind(before.unwrap_or(i64::MAX)).bind(limit);
        let rows = self.read("reading the audit", select).await?;
        rows.iter().map(read_entry).collect()
    }

    async fn read(
        &self,
        what: &'static str,
        select: Bound<'_>,
    ) -> Result<Vec<MySqlRow>, StoreError> {
        let work = async {
            let mut transaction = self.main.begin().await?;
            let rows = select.fetch_all(transaction.connection()).await;
            transaction.end(rows).await
        };
        self.main.in_time(what, work).await
    }

    pub(crate) async fn replay_batch(
        &self,
        replays: &[Replay],
        actor: &Actor,
    ) -> Vec<Result<Replayed, StoreError>> {
        let mut answers = Answers::new(replays.len());
        let run = |chosen: Vec<usize>, patience| async move {
            let work = async {
                let mut replayed = Vec::with_capacity(chosen.len());
                for index in chosen {
                    let mut transaction = self.main.begin().await?;
                    let connection = transaction.connection();
                    let replay = &replays[index];
                    let result = replay_in(connection, &self.sql, replay, actor, patience).await;
                    replayed.push(transaction.end(result).await?);
                }
                Ok(replayed)
            };
            self.main.in_time("replaying dead letters", work).await
        };
        answers.run(answers.open(), 1, self.lock_wait, run).await;
        answers.finish()
    }

    pub(crate) async fn discard_batch(
        &self,
        rows: &[ParkedSeq],
        actor: &Actor,
    ) -> Vec<Result<bool, StoreError>> {
        let mut answers = Answers::new(rows.len());
        let run = |chosen: Vec<usize>, patience| async move {
            let work = async {
                let mut discarded = Vec::with_capacity(chosen.len());
                for index in chosen {
                    let mut transaction = self.main.begin().await?;
                    let connection = transaction.connection();
                    let result =
                        discard_in(connection, &self.sql, rows[index], actor, patience).await;
                    discarded.push(transaction.end(result).await?);
                }
                Ok(discarded)
            };
            self.main.in_time("discarding dead letters", work).await
        };
        answers.run(answers.open(), 1, self.lock_wait, run).await;
        answers.finish()
    }
}

enum Value {
    Bytes(Vec<u8>),
    Text(String),
    Number(i64),
}

/// A filter's conditions, and their values in the order of their parameters.
struct Conditions {
    texts: Vec<String>,
    values: Vec<Value>,
    /// Which index gives the rows in the order of seq, or those of one message.
    index: &'static str,
}

impl Conditions {
    fn of(filter: &ParkedFilter) -> Self {
        let mut texts = vec![String::from("TRUE")];
        let mut values = Vec::new();
        let mut add = |text: &str, value: Option<Value>| {
            if let Some(value) = value {
                texts.push(text.to_owned());
                values.push(value);
            }
        };
        let bytes = |text: &str| Value::Bytes(text.as_bytes().to_vec());
        let owned = |text: &str| Value::Text(text.to_owned());
        let number = |duration| Value::Number(us(duration));
        add("p.consumer_id = ?", filter.consumer_id.as_ref().map(|id| bytes(id.as_str())));
        add("p.message_id = ?", filter.message_id.as_ref().map(|id| bytes(id.as_str())));
        add("p.subscription = ?", filter.subscription.as_deref().map(owned));
        add("p.reason = ?", filter.reason.map(|reason| owned(reason.as_str())));
        // By bytes: no wildcards, no folding.
        let error = filter.error_contains.as_deref().filter(|wanted| !wanted.is_empty());
        add("LOCATE(?, CAST(p.last_error AS BINARY)) > 0", error.map(bytes));
        let age = "TIMESTAMPDIFF(MICROSECOND, p.parked_at, UTC_TIMESTAMP(3))";
        add(&format!("{age} >= ?"), filter.parked_at_least.map(number));
        add(&format!("{age} <= ?"), filter.parked_at_most.map(number));
        let names: Vec<String> =
            filter.states.iter().map(|state| format!("'{}'", state.as_str())).collect();
        if !names.is_empty() {
            texts.push(format!("p.state IN ({})", names.join(", ")));
        }
        let one_message = filter.consumer_id.is_some() && filter.message_id.is_some();
        let index = match names.len() {
            _ if one_message => "FORCE INDEX (inbox_parked_message)",
            1 => "FORCE INDEX (inbox_parked_state)",
            _ => "FORCE INDEX (PRIMARY)",
        };
        Self { texts, values, index }
    }

    fn bind<'q>(self, query: Bound<'q>) -> Bound<'q> {
        self.values.into_iter().fold(query, |query, value| match value {
            Value::Bytes(bytes) => query.bind(bytes),
            Value::Text(text) => query.bind(text),
            Value::Number(number) => query.bind(number),
        })
    }
}

fn unreadable(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> StoreError {
    StoreError::new(ErrorClass::Permanent, "reading a parked message", error)
}

/// Consumer and message id in two columns from `at` on.
fn read_key(row: &MySqlRow, at: usize) -> Result<InboxKey, StoreError> {
    let failed = |error| store_error("reading a parked message", error);
    let required =
        |at: usize| Ok::<_, StoreError>(text(row, at).map_err(failed)?.unwrap_or_default());
    Ok(InboxKey {
        consumer_id: ConsumerId::new(&required(at)?).map_err(unreadable)?,
        message_id: MessageId::from_stored(&required(at + 1)?),
    })
}

pub(crate) fn read_row(row: &MySqlRow) -> Result<ParkedRow, StoreError> {
    let failed = |error| store_error("reading a parked message", error);
    let number = |at: usize| row.try_get::<i64, _>(at).map_err(failed);
    let optional = |at: usize| row.try_get::<Option<i64>, _>(at).map_err(failed);
    Ok(ParkedRow {
        seq: ParkedSeq(number(9)?),
        key: read_key(row, 10)?,
        state: state(row, 12)?,
        copy: read_parked(row)?,
        lane_id: lane_id(row, 13).map_err(failed)?,
        body_bytes: optional(14)?.map(unsigned),
        due_in: optional(15)?.map(micros),
        first_ago: micros(number(16)?),
        parked_ago: micros(number(17)?),
    })
}

fn read_entry(row: &MySqlRow) -> Result<AuditEntry, StoreError> {
    let failed = |error| store_error("reading the audit", error);
    let number = |at: usize| row.try_get::<i64, _>(at).map_err(failed);
    let words = |at: usize| text(row, at).map_err(failed);
    Ok(AuditEntry {
        id: number(0)?,
        ago: micros(number(1)?),
        actor: words(2)?.unwrap_or_default(),
        action: words(3)?.unwrap_or_default().parse().map_err(unreadable)?,
        key: read_key(row, 4)?,
        seq: ParkedSeq(number(6)?),
        replayed_as: words(7)?.map(|id| MessageId::from_stored(&id)),
    })
}

async fn replay_in(
    connection: &mut MySqlConnection,
    sql: &Sql,
    replay: &Replay,
    actor: &Actor,
    patience: Patience,
) -> Result<Replayed, sqlx::Error> {
    let select = query(sql.lock_dead(patience)).bind(replay.seq.0);
    let Some(row) = select.fetch_optional(&mut *connection).await? else {
        return Ok(Replayed::NotDead);
    };
    if !row.try_get::<bool, _>(4)? {
        return Ok(Replayed::NoBody);
    }
    let before = read_key(&row, 0).map_err(|error| sqlx::Error::Decode(error.into()))?;
    let own = fingerprint(&row, 2)?;
    let conflicts = text(&row, 3)?.as_deref() == Some(<&str>::from(DeadReason::IdConflict));

    let mut key = before.clone();
    let mut processed = processed(connection, sql, &key).await?;
    let differs = |other: &Option<Fingerprint>| Fingerprint::conflict(other.as_ref(), own.as_ref());
    if let Some(own) = &own
        && (conflicts || processed.as_ref().is_some_and(differs))
    {
        key.message_id = before.message_id.of_conflict(own);
        processed = self::processed(connection, sql, &key).await?;
    }
    let mut action = AuditAction::Replay;
    if processed.is_some() {
        if !replay.allow_processed {
            return Ok(Replayed::Processed);
        }
        action = AuditAction::ReplayProcessed;
        key.message_id = before.message_id.of_override(replay.fresh);
    }
    let of_key = |text: String| bind_keys(query(text), std::iter::once(&key));
    let same = of_key(sql.same()).bind(fingerprint_bytes(own.as_ref())).bind(replay.seq.0);
    if same.fetch_optional(&mut *connection).await?.is_some() {
        return Ok(Replayed::Exists);
    }
    // A claim that somebody has locked is somebody's.
    if of_key(sql.lock_idle()).fetch_optional(&mut *connection).await?.is_some() {
        of_key(sql.drop_claim()).execute(&mut *connection).await?;
    }
    let id = key.message_id.as_str().as_bytes();
    let update = query(sql.replay()).bind(id).bind(us(replay.delay)).bind(replay.seq.0);
    update.execute(&mut *connection).await?;
    let replayed_as = (key.message_id != before.message_id).then_some(&key.message_id);
    record_audit(connection, sql, actor, action, (&before, replay.seq), replayed_as).await?;
    Ok(Replayed::Due(key.message_id))
}

/// The row of `inbox_messages`: `Some(fingerprint)` if it exists.
async fn processed(
    connection: &mut MySqlConnection,
    sql: &Sql,
    key: &InboxKey,
) -> Result<Option<Option<Fingerprint>>, sqlx::Error> {
    let select = bind_keys(query(sql.processed()), std::iter::once(key));
    let row = select.fetch_optional(connection).await?;
    row.map(|row| fingerprint(&row, 0)).transpose()
}

async fn discard_in(
    connection: &mut MySqlConnection,
    sql: &Sql,
    seq: ParkedSeq,
    actor: &Actor,
    patience: Patience,
) -> Result<bool, sqlx::Error> {
    let select = query(sql.lock_dead(patience)).bind(seq.0);
    let Some(row) = select.fetch_optional(&mut *connection).await? else { return Ok(false) };
    let key = read_key(&row, 0).map_err(|error| sqlx::Error::Decode(error.into()))?;
    query(sql.discard()).bind(seq.0).execute(&mut *connection).await?;
    record_audit(connection, sql, actor, AuditAction::Discard, (&key, seq), None).await?;
    Ok(true)
}

async fn record_audit(
    connection: &mut MySqlConnection,
    sql: &Sql,
    actor: &Actor,
    action: AuditAction,
    (key, seq): (&InboxKey, ParkedSeq),
    replayed_as: Option<&MessageId>,
) -> Result<(), sqlx::Error> {
    let insert = query(sql.record_audit())
        .bind(actor.as_str().as_bytes())
        .bind(<&'static str>::from(action));
    bind_keys(insert, std::iter::once(key))
        .bind(seq.0)
        .bind(replayed_as.map(|id| id.as_str().as_bytes()))
        .execute(connection)
        .await
        .map(drop)
}
