//! The conformance suites on the adapters in memory.

mod forward;
mod letters;
mod letters_conformance;
mod parking;
mod source;
mod store;
