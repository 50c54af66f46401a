//! The HTTP endpoints that operators, kubelet and Prometheus ask.

mod health;
mod server;

pub use health::{
    Dependency, DependencyState, HealthRegistry, Heartbeat, Liveness, Readiness, SubscriptionHealth,
};
pub use server::{AdminServer, Endpoints};
