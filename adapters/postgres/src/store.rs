//! The store: the contract's calls, each handed to the module that does it.

use std::collections::HashSet;
use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use inboxd_contract::{
    Actor, Arrival, Arrived, Attempt, AuditEntry, Claim, ClaimAnswer, ClaimRequest, Completion,
    DeadLetter, ErrorClass, Explanation, InboxKey, InboxStore, Look, Notes, OwnerId, ParkedCopy,
    ParkedFilter, ParkedRow, ParkedSeq, Parking, Release, Replay, Replayed, Reschedule, Settled,
    StoreError, StoreLimits, StoreStats, SweepPolicy, SweepReport, TakeDue, TakenBatch, Token,
    Unpark,
};
use sqlx::Row;
use sqlx::postgres::{PgArguments, PgConnectOptions, PgRow};
use sqlx::query::Query;

use crate::arrive::Arriving;
use crate::batch::answer_each;
use crate::claim::{Claiming, Counting, renew, unreadable};
use crate::config::PostgresConfig;
use crate::dead::Burying;
use crate::error::Failure;
use crate::explain::{explain, stats};
use crate::letters::{self, Discarding, Replaying};
use crate::look::{look, parked};
use crate::migrate::migrate;
use crate::parked_sql::ParkedSql;
use crate::parking::{ParkingAll, Rescheduling, Unparking, body_bytes, portions};
use crate::pooler;
use crate::session::{LockWait, Sessions};
use crate::settle::{Completing, Releasing};
use crate::sql::Sql;
use crate::sweep::sweep;
use crate::take::Taking;

/// A field ends at 1 GiB, and so does a message of the protocol; half of it leaves room for
/// everything beside the body.
const BODY_BYTES_MAX: u64 = 512 * 1024 * 1024;

/// An inbox on PostgreSQL 13 or later.
pub struct PostgresStore {
    /// Everything but renewals.
    sessions: Sessions,
    /// Renewals: a pool of one, so that they never queue behind other calls.
    renewals: Sessions,
    sql: Sql,
    parked_sql: ParkedSql,
    /// Names the advisory lock of sweeps.
    sweep_lock: String,
    config: PostgresConfig,
    options: PgConnectOptions,
    migrate_options: PgConnectOptions,
}

impl fmt::Debug for PostgresStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.describe())
    }
}

impl PostgresStore {
    /// A store for this configuration. Connections are made when they are needed, so a database
    /// that is not there yet shows in [`PostgresStore::migrate`] or in the first call, as a
    /// transient error.
    ///
    /// # Errors
    /// Permanent: a value of the configuration is not usable; the message names it.
    pub fn connect(config: PostgresConfig) -> Result<Self, StoreError> {
        let checked = || {
            config.validate()?;
            Ok((config.connect_options()?, config.migrate_options()?))
        };
        let (options, migrate_options) =
            checked().map_err(|error: crate::PostgresConfigError| {
                StoreError::new(ErrorClass::Permanent, error.to_string(), error)
            })?;
        let qualifier = config.table_qualifier();
        Ok(Self {
            sessions: Sessions::new(&config, options.clone(), config.pool_max),
            renewals: Sessions::new(&config, options.clone(), 1),
            sql: Sql::new(&qualifier),
            parked_sql: ParkedSql::new(&qualifier),
            sweep_lock: format!("inboxd sweep {qualifier}"),
            options,
            migrate_options,
            config,
        })
    }

    /// Creates or updates the tables. Safe while other instances do the same; does nothing and
    /// needs no rights where all is up to date.
    ///
    /// # Errors
    /// Transient: the database is not there. Permanent: a right is missing, the database has a
    /// breaking migration that this binary does not know, or there is a pooler that needs
    /// [`PostgresConfig::prepared_statements`] to be false.
    pub async fn migrate(&self) -> Result<(), StoreError> {
        self.check_pooler().await?;
        migrate(&self.config, &self.migrate_options).await
    }

    /// Whether prepared statements, if they are to be used, outlive their transaction. Writes
    /// nothing.
    ///
    /// # Errors
    /// Transient: the database is not there. Permanent: there is a pooler in between that needs
    /// [`PostgresConfig::prepared_statements`] to be false.
    pub async fn check_pooler(&self) -> Result<(), StoreError> {
        match self.config.prepared_statements {
            true => pooler::check(&self.options, self.config.acquire_timeout).await,
            false => pooler::reach(&self.options, self.config.acquire_timeout).await,
        }
    }

    /// One statement in a transaction of its own.
    async fn one(
        &self,
        doing: &str,
        query: Query<'_, sqlx::Postgres, PgArguments>,
    ) -> Result<Vec<PgRow>, Failure> {
        let call = async {
            let mut work = self.sessions.begin(LockWait::Whole).await?;
            let rows = work.rows(doing, query).await;
            work.end(rows).await
        };
        self.sessions.bounded(doing, call).await
    }
}

/// Serves the first request of each key; the others wait for it.
async fn claim_distinct(
    operation: &Claiming<'_>,
    requests: &[ClaimRequest],
) -> Vec<Result<ClaimAnswer, StoreError>> {
    let mut seen = HashSet::with_capacity(requests.len());
    let first: Vec<bool> = requests.iter().map(|request| seen.insert(&request.claim.key)).collect();
    // The statements lock in the order of keys themselves; sorting here makes parts of a
    // batch that was split go in that order too, and costs little.
    let mut order: Vec<usize> = (0..requests.len()).filter(|index| first[*index]).collect();
    order.sort_by(|left, right| requests[*left].claim.key.cmp(&requests[*right].claim.key));
    let distinct: Vec<ClaimRequest> = order.iter().map(|index| requests[*index].clone()).collect();
    let answers = answer_each(operation, &distinct).await;
    let mut placed: Vec<Option<Result<ClaimAnswer, StoreError>>> =
        requests.iter().map(|_| None).collect();
    for (index, answer) in order.into_iter().zip(answers) {
        placed[index] = Some(answer);
    }
    placed
        .into_iter()
        .map(|answer| answer.unwrap_or(Ok(ClaimAnswer::Busy { wait: operation.lease })))
        .collect()
}

#[async_trait]
impl Notes for PostgresStore {
    async fn note(&self, key: &str) -> Result<Option<String>, StoreError> {
        let rows = self.one("reading a note", sqlx::query(self.sql.note()).bind(key)).await?;
        let value = rows.first().map(|row| row.try_get(0)).transpose();
        Ok(value.map_err(unreadable)?)
    }

    async fn note_once(&self, key: &str, value: &str) -> Result<String, StoreError> {
        let insert = sqlx::query(self.sql.note_once()).bind(key).bind(value);
        self.one("storing a note", insert).await?;
        // Whoever was first has committed: the insert waited for it.
        self.note(key).await?.ok_or_else(|| {
            StoreError::transient("PostgreSQL: a note was removed while it was stored")
        })
    }

    async fn set_note(&self, key: &str, value: &str) -> Result<(), StoreError> {
        let query = sqlx::query(self.sql.set_note()).bind(key).bind(value);
        self.one("storing a note", query).await?;
        Ok(())
    }
}

#[async_trait]
impl InboxStore for PostgresStore {
    fn limits(&self) -> StoreLimits {
        StoreLimits { body_bytes_max: BODY_BYTES_MAX }
    }

    fn describe(&self) -> String {
        let place = match self.options.get_socket() {
            Some(socket) => format!("{}", socket.display()),
            None => format!("{}:{}", self.options.get_host(), self.options.get_port()),
        };
        let database = self.options.get_database().unwrap_or(self.options.get_username());
        format!(
            "PostgreSQL at {place}, database {database}, tables {}inbox_*; a fail-over to an \
             asynchronous standby may lose what was acknowledged",
            self.config.table_qualifier()
        )
    }

    async fn claim(
        &self,
        owner: &OwnerId,
        lease: Duration,
        requests: &[ClaimRequest],
    ) -> Vec<Result<ClaimAnswer, StoreError>> {
        let operation = Claiming { sessions: &self.sessions, sql: &self.sql, owner, lease };
        claim_distinct(&operation, requests).await
    }

    async fn renew(&self, lease: Duration, claims: &[Claim]) -> Result<Vec<Token>, StoreError> {
        Ok(renew(&self.renewals, &self.sql, lease, claims).await?)
    }

    async fn count_attempts(&self, claims: &[Claim]) -> Vec<Result<Attempt, StoreError>> {
        answer_each(&Counting { sessions: &self.sessions, sql: &self.sql }, claims).await
    }

    async fn complete(&self, completions: &[Completion]) -> Vec<Result<Settled, StoreError>> {
        let operation =
            Completing { sessions: &self.sessions, sql: &self.sql, parked_sql: &self.parked_sql };
        answer_each(&operation, completions).await
    }

    async fn dead_letter(&self, letters: &[DeadLetter]) -> Vec<Result<Settled, StoreError>> {
        let operation = Burying { sessions: &self.sessions, sql: &self.sql };
        let mut answers = Vec::with_capacity(letters.len());
        for letter in letters {
            answers.extend(answer_each(&operation, std::slice::from_ref(letter)).await);
        }
        answers
    }

    async fn release(&self, releases: &[Release]) -> Vec<Result<Settled, StoreError>> {
        answer_each(&Releasing { sessions: &self.sessions, sql: &self.sql }, releases).await
    }

    async fn park(&self, parkings: &[Parking]) -> Vec<Result<Settled, StoreError>> {
        let operation =
            ParkingAll { sessions: &self.sessions, sql: &self.sql, parked_sql: &self.parked_sql };
        let mut answers = Vec::with_capacity(parkings.len());
        for portion in portions(parkings, |parking| body_bytes(&parking.copy)) {
            answers.extend(answer_each(&operation, portion).await);
        }
        answers
    }

    async fn arrive(&self, arrivals: &[Arrival]) -> Result<Vec<Arrived>, StoreError> {
        let (sql, parked_sql) = (&self.sql, &self.parked_sql);
        Arriving { sessions: &self.sessions, sql, parked_sql }.run(arrivals).await
    }

    async fn take_due(
        &self,
        owner: &OwnerId,
        lease: Duration,
        request: &TakeDue,
    ) -> Result<TakenBatch, StoreError> {
        let (sql, parked_sql) = (&self.sql, &self.parked_sql);
        let taking = Taking { sessions: &self.sessions, sql, parked_sql, owner, lease, request };
        Ok(taking.run().await?)
    }

    async fn reschedule(&self, reschedules: &[Reschedule]) -> Vec<Result<Settled, StoreError>> {
        let (sql, parked_sql) = (&self.sql, &self.parked_sql);
        let operation = Rescheduling { sessions: &self.sessions, sql, parked_sql };
        answer_each(&operation, reschedules).await
    }

    async fn unpark(&self, unparks: &[Unpark]) -> Vec<Result<Settled, StoreError>> {
        let (sql, parked_sql) = (&self.sql, &self.parked_sql);
        answer_each(&Unparking { sessions: &self.sessions, sql, parked_sql }, unparks).await
    }

    async fn list_parked(
        &self,
        filter: &ParkedFilter,
        after: Option<ParkedSeq>,
        limit: u32,
    ) -> Result<Vec<ParkedRow>, StoreError> {
        let call = async {
            let mut work = self.sessions.begin(LockWait::Whole).await?;
            let rows = letters::list(&mut work, &self.parked_sql, filter, after, limit).await;
            work.end(rows).await
        };
        Ok(self.sessions.bounded("listing parked rows", call).await?)
    }

    async fn count_parked(&self, filter: &ParkedFilter, most: u64) -> Result<u64, StoreError> {
        let call = async {
            let mut work = self.sessions.begin(LockWait::Whole).await?;
            let count = letters::count(&mut work, &self.parked_sql, filter, most).await;
            work.end(count).await
        };
        Ok(self.sessions.bounded("counting parked rows", call).await?)
    }

    async fn parked_row(&self, seq: ParkedSeq) -> Result<Option<ParkedRow>, StoreError> {
        let call = async {
            let mut work = self.sessions.begin(LockWait::Whole).await?;
            let row = letters::row(&mut work, &self.parked_sql, seq).await;
            work.end(row).await
        };
        Ok(self.sessions.bounded("reading a parked row", call).await?)
    }

    async fn replay(&self, replays: &[Replay], actor: &Actor) -> Vec<Result<Replayed, StoreError>> {
        let (sql, parked_sql) = (&self.sql, &self.parked_sql);
        let operation = Replaying { sessions: &self.sessions, sql, parked_sql, actor };
        let mut answers = Vec::with_capacity(replays.len());
        for replay in replays {
            answers.extend(answer_each(&operation, std::slice::from_ref(replay)).await);
        }
        answers
    }

    async fn discard(&self, rows: &[ParkedSeq], actor: &Actor) -> Vec<Result<bool, StoreError>> {
        let parked_sql = &self.parked_sql;
        answer_each(&Discarding { sessions: &self.sessions, parked_sql, actor }, rows).await
    }

    async fn audit(&self, before: Option<i64>, limit: u32) -> Result<Vec<AuditEntry>, StoreError> {
        let call = async {
            let mut work = self.sessions.begin(LockWait::Whole).await?;
            let entries = letters::audit(&mut work, &self.parked_sql, before, limit).await;
            work.end(entries).await
        };
        Ok(self.sessions.bounded("reading the audit", call).await?)
    }

    async fn look(&self, keys: &[InboxKey]) -> Result<Vec<Look>, StoreError> {
        let call = async {
            let mut work = self.sessions.begin(LockWait::Whole).await?;
            let keys: Vec<&InboxKey> = keys.iter().collect();
            let sights = look(&mut work, &self.sql, &keys).await;
            work.end(sights).await
        };
        let sights = self.sessions.bounded("the look", call).await?;
        Ok(sights.into_iter().map(|sight| sight.look).collect())
    }

    async fn parked(&self, key: &InboxKey) -> Result<Vec<ParkedCopy>, StoreError> {
        let call = async {
            let mut work = self.sessions.begin(LockWait::Whole).await?;
            let copies = parked(&mut work, &self.sql, key).await;
            work.end(copies).await
        };
        Ok(self.sessions.bounded("reading parked rows", call).await?)
    }

    async fn explain(&self, key: &InboxKey) -> Result<Explanation, StoreError> {
        let call = async {
            let mut work = self.sessions.begin(LockWait::Whole).await?;
            let explanation = explain(&mut work, &self.sql, key).await;
            work.end(explanation).await
        };
        Ok(self.sessions.bounded("explaining a message", call).await?)
    }

    async fn stats(&self) -> Result<StoreStats, StoreError> {
        let call = async {
            let mut work = self.sessions.begin(LockWait::Whole).await?;
            let counted = stats(&mut work, &self.sql).await;
            work.end(counted).await
        };
        Ok(self.sessions.bounded("counting rows", call).await?)
    }

    async fn sweep(&self, policy: &SweepPolicy) -> Result<SweepReport, StoreError> {
        let (sql, parked_sql) = (&self.sql, &self.parked_sql);
        Ok(sweep(&self.sessions, sql, parked_sql, &self.sweep_lock, policy).await?)
    }

    async fn ping(&self) -> Result<(), StoreError> {
        let rows = self.one("a ping", sqlx::query(self.sql.ping())).await?;
        let read_only = rows.first().map(|row| row.try_get::<bool, _>(0)).transpose();
        if read_only.map_err(unreadable)? == Some(true) {
            return Err(StoreError::transient(
                "PostgreSQL is read-only (a standby, or a failover under way)",
            ));
        }
        Ok(())
    }

    async fn close(&self) {
        self.sessions.close().await;
        self.renewals.close().await;
    }
}
