//! The engine: from a delivery to its settlement.

mod settings;

pub use settings::*;
