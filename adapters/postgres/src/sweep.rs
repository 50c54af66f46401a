//! Deleting what is old: small batches, one transaction each, one instance at a time.

use std::time::Duration;

use inboxd_contract::{SweepPolicy, SweepReport};
use sqlx::{AssertSqlSafe, Row};
use std::sync::Arc;

use crate::claim::{micros, unreadable};
use crate::error::Failure;
use crate::parked_sql::ParkedSql;
use crate::session::{LockWait, Sessions};
use crate::sql::Sql;

/// Sweeps until nothing old is left, or another instance has taken the lock in between.
pub(crate) async fn sweep(
    sessions: &Sessions,
    sql: &Sql,
    parked_sql: &ParkedSql,
    lock_name: &str,
    policy: &SweepPolicy,
) -> Result<SweepReport, Failure> {
    let mut report = SweepReport::default();
    let sweeper = Sweeper { sessions, sql, lock_name, batch: policy.batch.max(1) };
    let messages = sweeper.table(&|| sql.sweep_messages(), policy.retention).await?;
    report.ran = messages.is_some();
    let Some(count) = messages else { return Ok(report) };
    report.messages = count;
    let dead = sweeper.table(&|| sql.sweep_parked(), policy.dead_retention).await?;
    report.dead = dead.unwrap_or(0);
    // What was done to dead letters is kept as long as they are.
    sweeper.table(&|| parked_sql.sweep_audit(), policy.dead_retention).await?;
    let claims = sweeper.table(&|| sql.sweep_claims(), policy.idle_claims).await?;
    report.claims = claims.unwrap_or(0);
    Ok(report)
}

struct Sweeper<'a> {
    sessions: &'a Sessions,
    sql: &'a Sql,
    lock_name: &'a str,
    batch: u32,
}

type Statement<'a> = &'a (dyn Fn() -> AssertSqlSafe<Arc<str>> + Sync);

impl Sweeper<'_> {
    /// All of one table. `None`: another instance is at it.
    async fn table(&self, sql: Statement<'_>, age: Duration) -> Result<Option<u64>, Failure> {
        let mut deleted = 0;
        let mut ran = false;
        loop {
            let Some(count) = self.batch(sql, age).await? else {
                return Ok(ran.then_some(deleted));
            };
            ran = true;
            deleted += count;
            if count < u64::from(self.batch) {
                return Ok(Some(deleted));
            }
        }
    }

    /// One batch: how many rows went. The lock ends with the transaction, so that no pooler and
    /// no crash can leave it behind.
    async fn batch(&self, sql: Statement<'_>, age: Duration) -> Result<Option<u64>, Failure> {
        let call = async {
            let mut work = self.sessions.begin(LockWait::Whole).await?;
            let query = sqlx::query(self.sql.sweep_lock()).bind(self.lock_name);
            let taken = work.rows("the sweep's lock", query).await?;
            let taken = match taken.first() {
                Some(row) => row.try_get::<bool, _>(0).map_err(unreadable)?,
                None => false,
            };
            if !taken {
                work.rollback().await;
                return Ok(None);
            }
            let query = sqlx::query(sql()).bind(micros(age)).bind(i64::from(self.batch));
            let rows = work.rows("the sweep", query).await;
            let rows = work.end(rows).await?;
            Ok(Some(rows.len() as u64))
        };
        self.sessions.bounded("the sweep", call).await
    }
}
