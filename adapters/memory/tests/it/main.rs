//! The conformance suites on the adapters in memory.

mod source;
mod store;
