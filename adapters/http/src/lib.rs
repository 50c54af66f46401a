//! Sends messages to one HTTP callback.
//!
//! Purpose: the HTTP contract with the application. One [`HttpForwarder`] makes one POST per
//! attempt, with the body's bytes untouched, and turns whatever comes of it into a verdict.
//!
//! Invariants: one call is one POST at most (the client's own retries and redirects are off);
//! nothing that a publisher puts into a message can forge a reserved header or break
//! framing; every phase has a bound in time, and what is read of a response has one in bytes.
//!
//! What it does not do: count attempts, wait between them, or decide what follows a verdict.

mod answers;
mod callback;
mod config;
mod forwarder;
mod headers;
mod health;
mod inspect;
mod proxy;
mod response;
mod sending;
mod signing;

pub use answers::{Dialect, Meaning};
pub use callback::Callback;
pub use config::{Clock, HeaderCopy, HeaderPolicy, HttpConfig, HttpConfigError, TlsFiles};
pub use forwarder::{HttpForwarder, install_crypto_provider};
pub use headers::{
    HEADER_LINES_MAX, HEADERS_BYTES_MAX, OMITTED_BYTES_MAX, VALUE_BYTES_MAX, is_settable,
};
pub use proxy::ProxyVariables;
