//! inboxd: an inbox sidecar.

pub mod engine;
