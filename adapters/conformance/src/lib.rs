//! The suites that every source, store, forwarder and target of dead letters passes, and what tests share: real
//! servers, a TCP proxy that injects faults, a stub application with a ledger.
//!
//! Everything here panics with a message instead of returning an error: it is for tests.

pub mod app;
pub mod forward;
pub mod letters;
pub mod net;
pub mod servers;
pub mod source;
pub mod store;
mod wait;

pub use wait::{ensure, eventually};
