//! inboxd: an inbox sidecar.

pub mod admin;
pub mod app;
mod causes;
pub mod cli;
pub mod config;
#[cfg(all(feature = "kafka", feature = "sqlite"))]
pub mod demo;
pub mod engine;
#[cfg(feature = "mutations")]
pub mod mutations;
pub mod telemetry;
