//! The HTTP endpoints that operators, kubelet and Prometheus ask.

mod health;

pub use health::{
    Dependency, DependencyState, HealthRegistry, Heartbeat, Liveness, Readiness, SubscriptionHealth,
};
