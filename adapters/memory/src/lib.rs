//! In-memory source, store and forwarder, driven by a fault plan.

mod source;
mod store;

pub use source::{MemoryBroker, MemoryBrokerOptions, MemoryKind, MemorySource};
pub use store::{
    FaultPoint, MemoryDatabase, MemoryLock, MemoryStore, MemoryTable, NoFaults, ScriptedFaults,
    StoreCall, StoreFault, StoreFaults,
};
