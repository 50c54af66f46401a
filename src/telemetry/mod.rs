//! What the process says about itself: metrics and log lines.

mod families;
mod log;
mod metrics;
mod subscription;

pub use log::{LogError, LogFormat, LogSettings, init_log};
pub use metrics::{METRICS_CONTENT_TYPE, Metrics, StoreCall};
pub use subscription::SubscriptionMetrics;
