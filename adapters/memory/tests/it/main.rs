//! The conformance suites on the adapters in memory.

mod forward;
mod source;
mod store;
