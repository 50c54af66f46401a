//! In-memory source, store, forwarder and target of dead letters, driven by a fault plan.

mod forward;
mod letters;
mod source;
mod store;

pub use forward::{MemoryForwarder, MemoryPost, Reply};
pub use letters::{LetterFault, MemoryLetter, MemoryLetters};
pub use source::{
    MemoryBroker, MemoryBrokerFlaw, MemoryBrokerOptions, MemoryBrokerWitness, MemoryKind,
    MemorySource,
};
pub use store::{
    FaultPoint, MemoryChange, MemoryDatabase, MemoryFlaw, MemoryLock, MemoryStore, MemoryTable,
    MemoryWitness, NoFaults, ScriptedFaults, StoreCall, StoreFault, StoreFaults,
};
