//! The conformance suites on the adapters in memory.

mod forward;
mod letters;
mod parking;
mod source;
mod store;
