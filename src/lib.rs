//! inboxd: an inbox sidecar.

pub mod admin;
pub mod engine;
pub mod telemetry;
