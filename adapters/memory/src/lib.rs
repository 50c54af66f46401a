//! In-memory source, store and forwarder, driven by a fault plan.

mod source;

pub use source::{MemoryBroker, MemoryBrokerOptions, MemoryKind, MemorySource};
