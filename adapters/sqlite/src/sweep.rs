//! Deleting what is old, in small transactions that let other writes in between.

use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use inboxd_contract::{StoreError, SweepPolicy, SweepReport};

use crate::SqliteStore;
use crate::claims::millis;
use crate::sql::{Sql, Statement};

impl SqliteStore {
    pub(crate) async fn sweep_once(&self, policy: &SweepPolicy) -> Result<SweepReport, StoreError> {
        let Ok(_turn) = self.sweeping.try_lock() else {
            return Ok(SweepReport::default());
        };
        let batch = policy.batch.max(1);
        self.sweep_table(|sql| &sql.copies.sweep_audit, policy.dead_retention, batch).await?;
        Ok(SweepReport {
            ran: true,
            messages: self.sweep_table(|sql| &sql.sweep_messages, policy.retention, batch).await?,
            dead: self.sweep_table(|sql| &sql.sweep_dead, policy.dead_retention, batch).await?,
            claims: self.sweep_table(|sql| &sql.sweep_claims, policy.idle_claims, batch).await?,
        })
    }

    /// One transaction per batch, until one is not full.
    async fn sweep_table(
        &self,
        statement: fn(&Sql) -> &Statement,
        age: Duration,
        batch: u32,
    ) -> Result<u64, StoreError> {
        let mut deleted = 0;
        loop {
            let sql = Arc::clone(&self.sql);
            let rows = self
                .writer
                .transaction("sweeping old rows", move |connection| {
                    async move {
                        let query = statement(&sql).query().bind(millis(age)).bind(batch);
                        query.execute(connection).await
                    }
                    .boxed()
                })
                .await?
                .rows_affected();
            deleted += rows;
            if rows < u64::from(batch) {
                return Ok(deleted);
            }
        }
    }
}
