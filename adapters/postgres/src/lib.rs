//! The inbox on PostgreSQL, the recommended database.
//!
//! Purpose: [`PostgresStore`] implements the contract's store with batches as arrays (`UNNEST`),
//! in few round trips; `docs/store-statements.md` counts them.
//!
//! Invariants:
//! - Every call is one transaction at READ COMMITTED whose settings are `SET LOCAL`, so that they
//!   hold behind a transaction pooler: a lock timeout of at most a fifth of the lease, and
//!   `synchronous_commit = on`.
//! - Claim first, then look, as two statements; who holds a claim is read back.
//! - Locks are taken in the order of the keys' bytes, by every statement.
//! - A connection goes back to the pool only after its transaction has ended by COMMIT or
//!   ROLLBACK; whatever happens otherwise (error, timeout, dropped future) closes it.
//! - A call takes one connection at a time, so that an exhausted pool only means waiting.
//!
//! What it does not do: retry. An error says whether trying again may help.

mod arrive;
mod batch;
mod claim;
mod config;
mod dead;
mod error;
mod explain;
mod letters;
mod look;
mod migrate;
mod parked_sql;
mod parking;
mod pooler;
mod session;
mod settle;
mod sql;
mod store;
mod sweep;
mod take;

pub use config::{PostgresConfig, PostgresConfigError};
pub use store::PostgresStore;
