//! The HTTP endpoints that operators, kubelet and Prometheus ask.

mod api;
mod guard;
mod health;
mod message;
mod problem;
mod server;
mod words;

#[cfg(test)]
mod tests;

pub use api::{
    DatabaseStatus, DrainAnswer, ExplainError, Operator, Running, RunningMessage, Status,
    SubscriptionStatus, Which,
};
pub use health::{
    Dependency, DependencyState, HealthRegistry, Heartbeat, Liveness, Readiness, SubscriptionHealth,
};
pub use message::{Answering, ConsumerReport, MessageReport, ReadAs, State, readings, shown};
pub use server::{AdminServer, Endpoints};
pub use words::waits;
