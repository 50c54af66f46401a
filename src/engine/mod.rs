//! The engine: from a delivery to its settlement.
//!
//! In the order of the flow: [`Subscription`] starts an intake, which takes deliveries
//! within a budget, finds their identity and gives them a place in a lane; each then makes its
//! own journey: single flight, claim, forward, completion, settlement. The [`Hub`] holds
//! what all subscriptions of a process share.
//!
//! What it does not do: no broker, database or HTTP library is named here, and no database
//! transaction is open while the application is called.

/// True where the simulator has broken this on purpose (`crate::mutations`); false in every build
/// without that feature.
#[cfg(feature = "mutations")]
macro_rules! broken {
    ($mutation:ident) => {
        crate::mutations::is_on(crate::mutations::Mutation::$mutation)
    };
}
#[cfg(not(feature = "mutations"))]
macro_rules! broken {
    ($mutation:ident) => {
        false
    };
}

mod alone;
mod arrivals;
mod attempt;
mod batcher;
mod budget;
mod callback;
mod flights;
mod gone;
mod horizon;
mod hub;
mod identity;
mod intake;
mod journey;
mod json;
mod keeper;
mod lanes;
mod letter;
mod message;
mod newcomer;
mod progress;
mod routes;
mod schedule;
mod settings;
mod shown;
mod subscription;
mod taken;
mod target;
mod trouble;
mod worker;

pub use callback::{CallbackReport, CallbackState};
pub use horizon::compare_retention;
pub use hub::Hub;
pub use progress::{Flight, Stage};
pub use settings::*;
pub use subscription::{DrainReport, Subscription};
