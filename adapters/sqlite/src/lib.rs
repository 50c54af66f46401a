//! The SQLite inbox store: one file, one instance, nothing to set up.
//!
//! Invariants: a lock file proves that no other life uses the database, so claims of former
//! lives are freed at start (their attempts stay). All writes go through one connection,
//! each in a `BEGIN IMMEDIATE` transaction that is durable when it answers (WAL with
//! `synchronous = FULL`). A batch is one JSON parameter of a statement whose text never
//! changes. Times are SQLite's own clock.
//!
//! What it does not do: serve two instances (deduplication holds for this one only), or work
//! on a network file system.

mod batch;
mod claims;
mod config;
mod connection;
mod due;
mod error;
mod explain;
mod letters;
mod lock;
mod look;
mod migrate;
mod notes;
mod park;
mod settle;
mod sql;
mod sweep;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use futures::FutureExt;
use inboxd_contract::{
    Actor, Arrival, Arrived, Attempt, AuditEntry, Claim, ClaimAnswer, ClaimRequest, Completion,
    DeadLetter, ErrorClass, Explanation, InboxKey, InboxStore, Look, OwnerId, ParkedCopy,
    ParkedFilter, ParkedRow, ParkedSeq, Parking, Release, Replay, Replayed, Reschedule, Settled,
    StoreError, StoreLimits, StoreStats, SweepPolicy, SweepReport, TakeDue, TakenBatch, Token,
    Unpark,
};
use sqlx::sqlite::SqlitePool;

pub use config::SqliteConfig;

use connection::{Writer, reader_pool};
use error::store_error;
use lock::OwnerLock;
use sql::Sql;

/// SQLite takes rows of 1,000,000,000 bytes; what is left is for the row's other columns.
const BODY_BYTES_MAX: u64 = 900_000_000;

/// An inbox in a SQLite file.
pub struct SqliteStore {
    path: PathBuf,
    sql: Arc<Sql>,
    writer: Arc<Writer>,
    readers: SqlitePool,
    /// Held from open to close; `None` if the store is shared, and after close.
    lock: Mutex<Option<OwnerLock>>,
    /// Held while a sweep runs, so that a second one does nothing.
    sweeping: tokio::sync::Mutex<()>,
}

impl std::fmt::Debug for SqliteStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SqliteStore").field("path", &self.path).finish_non_exhaustive()
    }
}

impl SqliteStore {
    /// Locks the database, opens it (making it if needed), migrates it, and frees what former
    /// lives held.
    ///
    /// # Errors
    /// Permanent: unfit configuration, a database in use by another instance (named with its
    /// process id), one that a newer binary has changed for good, a file system that cannot
    /// hold it. Transient: a write lock that another program would not let go.
    pub async fn open(config: SqliteConfig) -> Result<Self, StoreError> {
        config.validate()?;
        let exclusive = config.exclusive;
        let checked = config.clone();
        let (path, lock) = tokio::task::spawn_blocking(move || {
            let path = checked.resolve()?;
            let lock = exclusive.then(|| OwnerLock::take(&path)).transpose()?;
            Ok::<_, StoreError>((path, lock))
        })
        .await
        .map_err(|error| StoreError::new(ErrorClass::Bug, "locking the database", error))??;

        let lock_wait = config.lease / 5;
        let writer = Writer::new(&path, lock_wait);
        migrate::migrate(&writer, &config.table_prefix).await?;
        let store = Self {
            sql: Arc::new(Sql::new(&config.table_prefix)),
            readers: reader_pool(&path, lock_wait, config.readers_max),
            writer,
            path,
            lock: Mutex::new(lock),
            sweeping: tokio::sync::Mutex::new(()),
        };
        if exclusive {
            store.free_former_lives().await?;
        }
        Ok(store)
    }

    /// Opens a database that exists, to look into it: nothing is locked, migrated or freed, also
    /// beside the instance that uses it. Only what reads may be called.
    ///
    /// # Errors
    /// Permanent: unfit configuration, or there is no such file.
    pub async fn open_to_read(config: SqliteConfig) -> Result<Self, StoreError> {
        config.validate()?;
        let path = tokio::fs::canonicalize(&config.path).await.map_err(|error| {
            let what = format!("finding the SQLite database {}", config.path.display());
            StoreError::new(ErrorClass::Permanent, what, error)
        })?;
        let lock_wait = config.lease / 5;
        let readers = reader_pool(&path, lock_wait, config.readers_max);
        // Reads the file's header.
        sqlx::query("PRAGMA schema_version").execute(&readers).await.map_err(|error| {
            store_error(format!("opening the SQLite database {}", path.display()), error)
        })?;
        Ok(Self {
            sql: Arc::new(Sql::new(&config.table_prefix)),
            readers,
            writer: Writer::new(&path, lock_wait),
            path,
            lock: Mutex::new(None),
            sweeping: tokio::sync::Mutex::new(()),
        })
    }

    /// The database's absolute path, links followed.
    pub fn path(&self) -> &Path {
        &self.path
    }

    async fn free_former_lives(&self) -> Result<(), StoreError> {
        let sql = Arc::clone(&self.sql);
        let freed = self
            .writer
            .transaction("freeing claims of former lives", move |connection| {
                async move { sql.free_all.query().execute(connection).await }.boxed()
            })
            .await?
            .rows_affected();
        if freed > 0 {
            tracing::info!(claims = freed, "freed claims that a former life left");
        }
        Ok(())
    }
}

#[async_trait]
impl InboxStore for SqliteStore {
    fn limits(&self) -> StoreLimits {
        StoreLimits { body_bytes_max: BODY_BYTES_MAX }
    }

    fn describe(&self) -> String {
        format!("SQLite at {}; deduplication holds for this instance only", self.path.display())
    }

    async fn claim(
        &self,
        owner: &OwnerId,
        lease: Duration,
        requests: &[ClaimRequest],
    ) -> Vec<Result<ClaimAnswer, StoreError>> {
        self.claim_batch(owner, lease, requests).await
    }

    async fn renew(&self, lease: Duration, claims: &[Claim]) -> Result<Vec<Token>, StoreError> {
        self.renew_batch(lease, claims).await
    }

    async fn count_attempts(&self, claims: &[Claim]) -> Vec<Result<Attempt, StoreError>> {
        self.count_batch(claims).await
    }

    async fn complete(&self, completions: &[Completion]) -> Vec<Result<Settled, StoreError>> {
        self.complete_batch(completions).await
    }

    async fn dead_letter(&self, letters: &[DeadLetter]) -> Vec<Result<Settled, StoreError>> {
        self.dead_letter_batch(letters).await
    }

    async fn release(&self, releases: &[Release]) -> Vec<Result<Settled, StoreError>> {
        self.release_batch(releases).await
    }

    async fn park(&self, parkings: &[Parking]) -> Vec<Result<Settled, StoreError>> {
        self.park_batch(parkings).await
    }

    async fn arrive(&self, arrivals: &[Arrival]) -> Result<Vec<Arrived>, StoreError> {
        self.arrive_batch(arrivals).await
    }

    async fn take_due(
        &self,
        owner: &OwnerId,
        lease: Duration,
        request: &TakeDue,
    ) -> Result<TakenBatch, StoreError> {
        self.take_due_rows(owner, lease, request).await
    }

    async fn reschedule(&self, reschedules: &[Reschedule]) -> Vec<Result<Settled, StoreError>> {
        self.reschedule_batch(reschedules).await
    }

    async fn unpark(&self, unparks: &[Unpark]) -> Vec<Result<Settled, StoreError>> {
        self.unpark_batch(unparks).await
    }

    async fn list_parked(
        &self,
        filter: &ParkedFilter,
        after: Option<ParkedSeq>,
        limit: u32,
    ) -> Result<Vec<ParkedRow>, StoreError> {
        self.list_rows(filter, after, limit).await
    }

    async fn count_parked(&self, filter: &ParkedFilter, most: u64) -> Result<u64, StoreError> {
        self.count_rows(filter, most).await
    }

    async fn parked_row(&self, seq: ParkedSeq) -> Result<Option<ParkedRow>, StoreError> {
        self.one_row(seq).await
    }

    async fn replay(&self, replays: &[Replay], actor: &Actor) -> Vec<Result<Replayed, StoreError>> {
        self.replay_batch(replays, actor).await
    }

    async fn discard(&self, rows: &[ParkedSeq], actor: &Actor) -> Vec<Result<bool, StoreError>> {
        self.discard_batch(rows, actor).await
    }

    async fn audit(&self, before: Option<i64>, limit: u32) -> Result<Vec<AuditEntry>, StoreError> {
        self.audit_entries(before, limit).await
    }

    async fn look(&self, keys: &[InboxKey]) -> Result<Vec<Look>, StoreError> {
        self.look_batch(keys).await
    }

    async fn parked(&self, key: &InboxKey) -> Result<Vec<ParkedCopy>, StoreError> {
        self.parked_copies(key).await
    }

    async fn explain(&self, key: &InboxKey) -> Result<Explanation, StoreError> {
        self.explain_one(key).await
    }

    async fn stats(&self) -> Result<StoreStats, StoreError> {
        self.stats_now().await
    }

    async fn sweep(&self, policy: &SweepPolicy) -> Result<SweepReport, StoreError> {
        self.sweep_once(policy).await
    }

    async fn ping(&self) -> Result<(), StoreError> {
        self.writer.ping().await?;
        self.look_batch(&[]).await.map(drop)
    }

    async fn close(&self) {
        self.readers.close().await;
        self.writer.close().await;
        let lock = self.lock.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(lock);
    }
}
