//! The MySQL and MariaDB inbox store, by SQL that both understand.
//!
//! Invariants: every call is a READ COMMITTED transaction whose settings come with its first
//! round trip. Who holds a claim is read back by token, never inferred from a number of rows.
//! Members of a batch are locked without waiting, in the order of their keys; a batch that
//! meets a lock is halved until the locked member stands alone. Ids are binary columns. Times
//! are the server's, in UTC whatever its time zone.
//!
//! What it does not do: create the database, or work on servers older than MariaDB 10.6 and
//! MySQL 8.0.13.

mod batch;
mod claims;
mod config;
mod due;
mod error;
mod explain;
mod letters;
mod look;
mod migrate;
mod notes;
mod park;
mod server;
mod settle;
mod sql;
mod sweep;
mod transaction;

use std::time::Duration;

use async_trait::async_trait;
use inboxd_contract::{
    Actor, Arrival, Arrived, Attempt, AuditEntry, Claim, ClaimAnswer, ClaimRequest, Completion,
    DeadLetter, Explanation, InboxKey, InboxStore, Look, OwnerId, ParkedCopy, ParkedFilter,
    ParkedRow, ParkedSeq, Parking, Release, Replay, Replayed, Reschedule, Settled, StoreError,
    StoreLimits, StoreStats, SweepPolicy, SweepReport, TakeDue, TakenBatch, Token, Unpark,
};
use sha2::{Digest, Sha256};
use sqlx::Connection;
use sqlx::mysql::MySqlConnectOptions;

pub use config::MysqlConfig;

use error::store_error;
use server::Server;
use sql::{Sql, query};
use transaction::{Connections, connect};

/// Members of one statement at most.
const CHUNK_MAX: u64 = 256;
/// What a member may take in a statement: its key, in the look three times, and its record.
const MEMBER_BYTES_MAX: u64 = 4_096;

/// An inbox in a MySQL or MariaDB database.
#[derive(Debug)]
pub struct MysqlStore {
    sql: Sql,
    main: Connections,
    /// A connection of its own: renewals never queue behind other calls.
    renewals: Connections,
    /// Holds the sweep's lock, so that a pool of one connection suffices.
    sweeping: Connections,
    sweep_lock: String,
    packet_bytes_max: u64,
    chunk_max: usize,
    lock_wait: Duration,
    description: String,
}

impl MysqlStore {
    /// Connects, checks the server, and migrates.
    ///
    /// # Errors
    /// Permanent: unfit configuration, a server that is too old or does not flush its log at each
    /// commit, a database that does not exist or that a newer binary has changed for good.
    /// Transient: the server cannot be reached, or another instance is migrating for long.
    pub async fn connect(config: MysqlConfig) -> Result<Self, StoreError> {
        Self::open(config, true).await
    }

    /// Connects to look into a database as it is: nothing is migrated. Only what reads may be
    /// called.
    ///
    /// # Errors
    /// As [`MysqlStore::connect`].
    pub async fn open_to_read(config: MysqlConfig) -> Result<Self, StoreError> {
        Self::open(config, false).await
    }

    async fn open(config: MysqlConfig, migrates: bool) -> Result<Self, StoreError> {
        config.validate()?;
        let options = config.options()?;
        let place = place_of(&options);
        let failed = |error| {
            let hint = error::hint(&error).map(|hint| format!(" failed; {hint}"));
            let hint = hint.unwrap_or_default();
            store_error(format!("connecting to the database at {place}{hint}"), error)
        };
        let mut first = connect(&options).await.map_err(failed)?;
        let server = Server::inspect(&mut first, config.allow_weak_durability).await?;
        // An orderly goodbye is a courtesy.
        let _ = first.close().await;

        let scope =
            format!("{}.{}", options.get_database().unwrap_or_default(), config.table_prefix);
        if migrates {
            migrate::migrate(
                &config.migrate_options()?,
                &config.table_prefix,
                &lock_name("migrate", &scope),
            )
            .await?;
        }

        let lock_wait_s = config.lock_wait_s();
        let connections =
            |max| Connections::new(options.clone(), max, lock_wait_s, config.lease * 2);
        Ok(Self {
            sql: Sql::new(&config.table_prefix),
            main: connections(config.pool_max),
            renewals: connections(1),
            sweeping: connections(1),
            sweep_lock: lock_name("sweep", &scope),
            packet_bytes_max: server.packet_bytes_max,
            chunk_max: usize::try_from(
                (server.packet_bytes_max / 2 / MEMBER_BYTES_MAX).clamp(1, CHUNK_MAX),
            )
            .unwrap_or(1),
            lock_wait: Duration::from_secs(lock_wait_s),
            description: describe(&server, &place),
        })
    }

    /// The name (for `GET_LOCK`) of the lock that a sweep holds, for operators and tests.
    pub fn sweep_lock_name(&self) -> &str {
        &self.sweep_lock
    }
}

/// `host:port/database` or the socket's path: no user, no password.
fn place_of(options: &MySqlConnectOptions) -> String {
    let database = options.get_database().unwrap_or_default();
    match options.get_socket() {
        Some(socket) => format!("{}/{database}", socket.display()),
        None => format!("{}:{}/{database}", options.get_host(), options.get_port()),
    }
}

fn describe(server: &Server, place: &str) -> String {
    let weak = if server.durable {
        ""
    } else {
        "; it does not flush its log at each commit: a crash of its host may lose messages"
    };
    format!("{} at {place}{weak}", server.name)
}

/// At most 64 characters, as MySQL wants it.
fn lock_name(what: &str, scope: &str) -> String {
    format!("inboxd.{what}.{}", &hex::encode(Sha256::digest(scope))[..32])
}

#[async_trait]
impl InboxStore for MysqlStore {
    fn limits(&self) -> StoreLimits {
        // A sixteenth, or 1 MiB, is left for headers, lane and the statement itself.
        let room = (self.packet_bytes_max / 16).max(1_024 * 1_024).min(self.packet_bytes_max / 2);
        StoreLimits { body_bytes_max: self.packet_bytes_max - room }
    }

    fn describe(&self) -> String {
        self.description.clone()
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
        let work = async {
            let mut transaction = self.main.begin().await?;
            // Meets no row and no lock, and is refused all the same where writes are.
            let text = self.sql.with_prefix("DELETE FROM {p}inbox_notes WHERE name = ''");
            let result = query(text).execute(transaction.connection()).await.map(drop);
            transaction.end(result).await
        };
        self.main.in_time("asking whether the database takes writes", work).await
    }

    async fn close(&self) {
        futures::join!(self.main.close(), self.renewals.close(), self.sweeping.close());
    }
}
