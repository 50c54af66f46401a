//! inboxd: an inbox sidecar.

/// The process may be made to die here, by its name in `crate::failpoints`; nothing in every build
/// without that feature.
#[cfg(feature = "failpoints")]
macro_rules! failpoint {
    ($point:ident) => {
        crate::failpoints::pass(crate::failpoints::Failpoint::$point)
    };
}
#[cfg(not(feature = "failpoints"))]
macro_rules! failpoint {
    ($point:ident) => {};
}

pub mod admin;
pub mod app;
mod causes;
pub mod cli;
pub mod config;
#[cfg(all(feature = "kafka", feature = "sqlite"))]
pub mod demo;
pub mod engine;
#[cfg(feature = "failpoints")]
pub mod failpoints;
#[cfg(feature = "mutations")]
pub mod mutations;
pub mod telemetry;
