//! In-memory source, store and forwarder, driven by a fault plan.

mod forward;
mod source;
mod store;

pub use forward::{MemoryForwarder, MemoryPost, Reply};
pub use source::{
    MemoryBroker, MemoryBrokerFlaw, MemoryBrokerOptions, MemoryBrokerWitness, MemoryKind,
    MemorySource,
};
pub use store::{
    FaultPoint, MemoryChange, MemoryDatabase, MemoryFlaw, MemoryLock, MemoryStore, MemoryTable,
    MemoryWitness, NoFaults, ScriptedFaults, StoreCall, StoreFault, StoreFaults,
};
