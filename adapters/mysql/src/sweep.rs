//! Deleting what is old: a lock by name keeps it to one instance at a time, each batch is a
//! transaction of its own, and rows that somebody else has locked are left for the next time.

use std::time::Duration;

use inboxd_contract::{StoreError, SweepPolicy, SweepReport};
use sqlx::Row;
use sqlx::mysql::{MySqlConnection, MySqlRow};

use crate::MysqlStore;
use crate::claims::micros;
use crate::error::is_conflict;
use crate::sql::query;

/// Rows per statement at most, whatever the policy says: each is named in it.
const BATCH_MAX: u32 = 1_000;

/// A table that is swept.
struct Swept {
    table: &'static str,
    /// Its key's columns.
    key: &'static str,
    /// One key in an IN list.
    tuple: &'static str,
    column: &'static str,
    further: &'static str,
}

const MESSAGES: Swept = Swept {
    table: "{p}inbox_messages",
    key: "consumer_id, message_id",
    tuple: "(?, ?)",
    column: "processed_at",
    further: "",
};
const CLAIMS: Swept = Swept {
    table: "{p}inbox_claims",
    key: "consumer_id, message_id",
    tuple: "(?, ?)",
    column: "expires_at",
    further: "",
};
const DEAD: Swept = Swept {
    table: "{p}inbox_parked",
    key: "seq",
    tuple: "(?)",
    column: "parked_at",
    further: "AND state = 'dead'",
};
const DISCARDED: Swept = Swept { further: "AND state = 'discarded'", ..DEAD };
const AUDIT: Swept =
    Swept { table: "{p}inbox_audit", key: "id", tuple: "(?)", column: "acted_at", further: "" };

impl MysqlStore {
    pub(crate) async fn sweep_once(&self, policy: &SweepPolicy) -> Result<SweepReport, StoreError> {
        let batch = policy.batch.clamp(1, BATCH_MAX);
        // Holds the lock, and nothing else, until the sweep is over: if this future is dropped,
        // its connection closes, which frees the lock. The transaction stays open, so that a
        // pooler cannot give the session away meanwhile.
        let lock = async {
            let mut session = self.sweeping.begin().await?;
            let taken: Option<i64> = sqlx::query("SELECT GET_LOCK(?, 0)")
                .bind(&self.sweep_lock)
                .fetch_one(session.connection())
                .await?
                .try_get(0)?;
            Ok((taken == Some(1)).then_some(session))
        };
        let Some(mut session) = self.sweeping.in_time("taking the sweep's lock", lock).await?
        else {
            return Ok(SweepReport::default());
        };
        let report = async {
            self.sweep_table(&AUDIT, policy.dead_retention, batch).await?;
            Ok(SweepReport {
                ran: true,
                messages: self.sweep_table(&MESSAGES, policy.retention, batch).await?,
                dead: self.sweep_table(&DEAD, policy.dead_retention, batch).await?
                    + self.sweep_table(&DISCARDED, policy.dead_retention, batch).await?,
                claims: self.sweep_table(&CLAIMS, policy.idle_claims, batch).await?,
            })
        }
        .await;
        let free = async {
            let freed = sqlx::query("SELECT RELEASE_LOCK(?)")
                .bind(&self.sweep_lock)
                .fetch_one(session.connection())
                .await
                .map(drop);
            session.end(freed).await
        };
        let freed = self.sweeping.in_time("giving the sweep's lock back", free).await;
        let report = report?;
        freed?;
        Ok(report)
    }

    /// One transaction per batch, until one is not full.
    async fn sweep_table(
        &self,
        swept: &Swept,
        age: Duration,
        batch: u32,
    ) -> Result<u64, StoreError> {
        let mut deleted = 0;
        loop {
            let work = async {
                let mut transaction = self.main.begin().await?;
                let connection = transaction.connection();
                let result = self.sweep_batch(connection, swept, age, batch).await;
                transaction.end(result).await
            };
            // What is in the way now is swept the next time.
            let work = async {
                match work.await {
                    Err(error) if is_conflict(&error) => Ok(0),
                    result => result,
                }
            };
            let rows = self.main.in_time("sweeping old rows", work).await?;
            deleted += rows;
            if rows < u64::from(batch) {
                return Ok(deleted);
            }
        }
    }

    async fn sweep_batch(
        &self,
        connection: &mut MySqlConnection,
        swept: &Swept,
        age: Duration,
        batch: u32,
    ) -> Result<u64, sqlx::Error> {
        let Swept { table, key, tuple, column, further } = swept;
        let select = self.sql.with_prefix(&format!(
            "SELECT {key} FROM {table} WHERE {column} < UTC_TIMESTAMP(3) - INTERVAL ? MICROSECOND \
             {further} ORDER BY {column} LIMIT ? FOR UPDATE SKIP LOCKED"
        ));
        let rows: Vec<MySqlRow> =
            query(select).bind(micros(age)).bind(batch).fetch_all(&mut *connection).await?;
        if rows.is_empty() {
            return Ok(0);
        }
        let delete = self.sql.with_prefix(&format!(
            "DELETE t FROM {table} AS t FORCE INDEX (PRIMARY) WHERE ({key}) IN ({})",
            vec![*tuple; rows.len()].join(", ")
        ));
        let mut delete = query(delete);
        for row in &rows {
            delete = match row.len() {
                1 => delete.bind(row.try_get::<i64, _>(0)?),
                _ => delete.bind(row.try_get::<Vec<u8>, _>(0)?).bind(row.try_get::<Vec<u8>, _>(1)?),
            };
        }
        delete.persistent(false).execute(connection).await?;
        Ok(rows.len() as u64)
    }
}
