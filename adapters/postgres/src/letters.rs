//! Parked rows for operators: lists, replay, discarding, and the audit.

use std::time::Duration;

use inboxd_contract::{
    Actor, AuditAction, AuditEntry, ConsumerId, DeadReason, Fingerprint, InboxKey, MessageId,
    ParkReason, ParkedFilter, ParkedRow, ParkedSeq, ParkedState, Replay, Replayed,
};
use sqlx::postgres::PgRow;
use sqlx::{Postgres, QueryBuilder, Row};

use crate::batch::Operation;
use crate::claim::micros as as_micros;
use crate::error::Failure;
use crate::explain::{micros, unsigned};
use crate::look::{copy, look, state};
use crate::parked_sql::ParkedSql;
use crate::session::{LockWait, Sessions, Work};
use crate::sql::Sql;
use crate::take::lane;

fn unreadable(error: sqlx::Error) -> Failure {
    Failure::unreadable(String::from("PostgreSQL: a parked row is unreadable"), error)
}

fn key(row: &PgRow) -> Result<InboxKey, sqlx::Error> {
    let consumer = ConsumerId::new(row.try_get::<&str, _>("consumer_id")?);
    Ok(InboxKey {
        consumer_id: consumer.map_err(|error| sqlx::Error::Decode(error.into()))?,
        message_id: MessageId::from_stored(row.try_get("message_id")?),
    })
}

fn parked_row(row: &PgRow) -> Result<ParkedRow, sqlx::Error> {
    Ok(ParkedRow {
        seq: ParkedSeq(row.try_get("seq")?),
        key: key(row)?,
        state: state(row)?,
        copy: copy(row)?,
        lane_id: lane(row)?,
        body_bytes: row.try_get::<Option<i64>, _>("body_bytes")?.map(unsigned),
        due_in: row.try_get::<Option<i64>, _>("due_us")?.map(micros),
        first_ago: micros(row.try_get("first_us")?),
        parked_ago: micros(row.try_get("ago_us")?),
    })
}

/// Adds what the filter asks, so that the planner sees only that.
fn narrow(query: &mut QueryBuilder<Postgres>, filter: &ParkedFilter) {
    if let Some(consumer_id) = &filter.consumer_id {
        query.push(" AND p.consumer_id = ").push_bind(consumer_id.as_str().to_owned());
    }
    if let Some(subscription) = &filter.subscription {
        query.push(" AND p.subscription = ").push_bind(subscription.clone());
    }
    if !filter.states.is_empty() {
        let states: Vec<&str> = filter.states.iter().map(|state| state.as_str()).collect();
        query.push(" AND p.state = ANY (").push_bind(states).push(")");
        // There is an index of those.
        if !filter.states.contains(&ParkedState::Due) {
            query.push(" AND p.state <> 'due'");
        }
    }
    if let Some(message_id) = &filter.message_id {
        query.push(" AND p.message_id = ").push_bind(message_id.as_str().to_owned());
    }
    if let Some(reason) = &filter.reason {
        query.push(" AND p.reason = ").push_bind(reason.as_str());
    }
    if let Some(text) = &filter.error_contains {
        query.push(" AND strpos(p.last_error COLLATE \"C\", ").push_bind(text.clone());
        query.push(") > 0");
    }
    if let Some(age) = filter.parked_at_least {
        query.push(" AND p.parked_at <= statement_timestamp() - ").push_bind(as_micros(age));
        query.push(" * interval '1 microsecond'");
    }
    if let Some(age) = filter.parked_at_most {
        query.push(" AND p.parked_at >= statement_timestamp() - ").push_bind(as_micros(age));
        query.push(" * interval '1 microsecond'");
    }
}

/// A page of rows, without bodies.
pub(crate) async fn list(
    work: &mut Work,
    sql: &ParkedSql,
    filter: &ParkedFilter,
    after: Option<ParkedSeq>,
    limit: u32,
) -> Result<Vec<ParkedRow>, Failure> {
    let mut query = QueryBuilder::new(&*sql.list().0);
    narrow(&mut query, filter);
    if let Some(after) = after {
        query.push(" AND p.seq > ").push_bind(after.0);
    }
    query.push(" ORDER BY p.seq LIMIT ").push_bind(i64::from(limit));
    let rows = work.rows_once("listing parked rows", query.build()).await?;
    rows.iter().map(|row| parked_row(row).map_err(unreadable)).collect()
}

/// How many rows, up to so many.
pub(crate) async fn count(
    work: &mut Work,
    sql: &ParkedSql,
    filter: &ParkedFilter,
    most: u64,
) -> Result<u64, Failure> {
    let mut query = QueryBuilder::new(&*sql.count().0);
    narrow(&mut query, filter);
    query.push(" LIMIT ").push_bind(i64::try_from(most).unwrap_or(i64::MAX)).push(") AS found");
    let rows = work.rows_once("counting parked rows", query.build()).await?;
    let count = rows.first().map(|row| row.try_get::<i64, _>(0)).transpose();
    Ok(count.map_err(unreadable)?.map_or(0, unsigned))
}

/// One row, with its body.
pub(crate) async fn row(
    work: &mut Work,
    sql: &ParkedSql,
    seq: ParkedSeq,
) -> Result<Option<ParkedRow>, Failure> {
    let rows = work.rows("reading a parked row", sqlx::query(sql.row()).bind(seq.0)).await?;
    rows.first().map(parked_row).transpose().map_err(unreadable)
}

/// Entries of the audit, newest first.
pub(crate) async fn audit(
    work: &mut Work,
    sql: &ParkedSql,
    before: Option<i64>,
    limit: u32,
) -> Result<Vec<AuditEntry>, Failure> {
    let query = sqlx::query(sql.audit()).bind(before.unwrap_or(i64::MAX)).bind(i64::from(limit));
    let rows = work.rows("reading the audit", query).await?;
    let entry = |row: &PgRow| {
        let action: &str = row.try_get("action")?;
        let replayed_as: Option<&str> = row.try_get("replayed_as")?;
        Ok(AuditEntry {
            id: row.try_get("id")?,
            ago: micros(row.try_get("ago_us")?),
            actor: row.try_get("actor")?,
            action: action.parse().map_err(|_| {
                sqlx::Error::Decode(format!("an unknown action: {action:?}").into())
            })?,
            key: key(row)?,
            seq: ParkedSeq(row.try_get("seq")?),
            replayed_as: replayed_as.map(MessageId::from_stored),
        })
    };
    rows.iter().map(entry).collect::<Result<_, _>>().map_err(|error| {
        Failure::unreadable(String::from("PostgreSQL: an entry of the audit is unreadable"), error)
    })
}

/// Dead rows to be made due again: one transaction each.
pub(crate) struct Replaying<'a> {
    pub(crate) sessions: &'a Sessions,
    pub(crate) sql: &'a Sql,
    pub(crate) parked_sql: &'a ParkedSql,
    pub(crate) actor: &'a Actor,
}

impl Operation for Replaying<'_> {
    type Member = Replay;
    type Answer = Replayed;

    fn patience(&self) -> Duration {
        self.sessions.lock_patience()
    }

    async fn run(&self, members: &[&Replay], wait: LockWait) -> Result<Vec<Replayed>, Failure> {
        let call = async {
            let mut work = self.sessions.begin(wait).await?;
            let answers = self.replay_all(&mut work, members).await;
            work.end(answers).await
        };
        self.sessions.bounded("a replay", call).await
    }
}

/// A dead row, as far as a replay must know it.
struct Dead {
    key: InboxKey,
    fingerprint: Option<Fingerprint>,
    id_conflict: bool,
    body_kept: bool,
}

impl Replaying<'_> {
    async fn replay_all(
        &self,
        work: &mut Work,
        members: &[&Replay],
    ) -> Result<Vec<Replayed>, Failure> {
        let mut answers = Vec::with_capacity(members.len());
        for member in members {
            answers.push(self.replay(work, member).await?);
        }
        Ok(answers)
    }

    async fn replay(&self, work: &mut Work, replay: &Replay) -> Result<Replayed, Failure> {
        let query = sqlx::query(self.parked_sql.replay_row()).bind(replay.seq.0);
        let rows = work.rows("a replay", query).await?;
        let Some(row) = rows.first() else { return Ok(Replayed::NotDead) };
        let dead = dead(row).map_err(unreadable)?;
        if !dead.body_kept {
            return Ok(Replayed::NoBody);
        }
        let mut target = dead.key.clone();
        let mut processed = self.processed(work, &target).await?;
        let fingerprint = dead.fingerprint.as_ref();
        if let Some(own) = fingerprint {
            let differs =
                |other: &Option<Fingerprint>| Fingerprint::conflict(other.as_ref(), Some(own));
            if dead.id_conflict || processed.as_ref().is_some_and(differs) {
                target.message_id = dead.key.message_id.of_conflict(own);
                processed = self.processed(work, &target).await?;
            }
        }
        let mut action = AuditAction::Replay;
        if processed.is_some() {
            if !replay.allow_processed {
                return Ok(Replayed::Processed);
            }
            action = AuditAction::ReplayProcessed;
            target.message_id = dead.key.message_id.of_override(replay.fresh);
        }
        let other = sqlx::query(self.parked_sql.replay_other())
            .bind(target.consumer_id.as_str())
            .bind(target.message_id.as_str())
            .bind(replay.seq.0)
            .bind(fingerprint.map_or("", Fingerprint::as_str));
        if !work.rows("a replay", other).await?.is_empty() {
            return Ok(Replayed::Exists);
        }
        self.make_due(work, replay, &dead.key, &target, action).await?;
        Ok(Replayed::Due(target.message_id))
    }

    async fn processed(
        &self,
        work: &mut Work,
        key: &InboxKey,
    ) -> Result<Option<Option<Fingerprint>>, Failure> {
        let sights = look(work, self.sql, &[key]).await?;
        Ok(sights.into_iter().next().and_then(|sight| sight.look.processed))
    }

    async fn make_due(
        &self,
        work: &mut Work,
        replay: &Replay,
        key: &InboxKey,
        target: &InboxKey,
        action: AuditAction,
    ) -> Result<(), Failure> {
        let idle = sqlx::query(self.parked_sql.replay_claim())
            .bind(target.consumer_id.as_str())
            .bind(target.message_id.as_str());
        work.rows("a replay", idle).await?;
        let due = sqlx::query(self.parked_sql.replay())
            .bind(replay.seq.0)
            .bind(target.message_id.as_str())
            .bind(as_micros(replay.delay))
            .bind(<&'static str>::from(ParkReason::Replayed));
        work.rows("a replay", due).await?;
        let replayed_as = (target != key).then(|| target.message_id.as_str());
        let audit = sqlx::query(self.parked_sql.replay_audit())
            .bind(self.actor.as_str())
            .bind(<&'static str>::from(action))
            .bind(key.consumer_id.as_str())
            .bind(key.message_id.as_str())
            .bind(replay.seq.0)
            .bind(replayed_as);
        work.rows("a replay", audit).await?;
        Ok(())
    }
}

fn dead(row: &PgRow) -> Result<Dead, sqlx::Error> {
    let reason: &str = row.try_get("reason")?;
    Ok(Dead {
        key: key(row)?,
        fingerprint: Fingerprint::from_stored(row.try_get("fingerprint")?),
        id_conflict: reason == <&'static str>::from(DeadReason::IdConflict),
        body_kept: row.try_get("body_kept")?,
    })
}

/// Dead rows to be given up.
pub(crate) struct Discarding<'a> {
    pub(crate) sessions: &'a Sessions,
    pub(crate) parked_sql: &'a ParkedSql,
    pub(crate) actor: &'a Actor,
}

impl Operation for Discarding<'_> {
    type Member = ParkedSeq;
    type Answer = bool;

    fn patience(&self) -> Duration {
        self.sessions.lock_patience()
    }

    async fn run(&self, members: &[&ParkedSeq], wait: LockWait) -> Result<Vec<bool>, Failure> {
        let call = async {
            let mut work = self.sessions.begin(wait).await?;
            let answers = self.discard(&mut work, members).await;
            work.end(answers).await
        };
        self.sessions.bounded("discarding", call).await
    }
}

impl Discarding<'_> {
    async fn discard(&self, work: &mut Work, members: &[&ParkedSeq]) -> Result<Vec<bool>, Failure> {
        let query = sqlx::query(self.parked_sql.discard())
            .bind(members.iter().map(|seq| seq.0).collect::<Vec<_>>())
            .bind(self.actor.as_str())
            .bind(<&'static str>::from(AuditAction::Discard));
        let rows = work.rows("discarding", query).await?;
        let mut done = Vec::with_capacity(rows.len());
        for row in &rows {
            done.push(row.try_get::<i64, _>(0).map_err(unreadable)?);
        }
        // Of one that is named twice, the first is answered.
        let mut first = |seq: i64| {
            let place = done.iter().position(|done| *done == seq);
            place.map(|place| done.swap_remove(place)).is_some()
        };
        Ok(members.iter().map(|seq| first(seq.0)).collect())
    }
}
