//! What the process says about itself: metrics, traces and log lines.

mod callback;
mod families;
mod log;
mod metrics;
mod otlp;
mod subscription;
mod trace;

pub use callback::CallbackMetrics;
pub use log::{LogError, LogFormat, LogSettings, init_log};
pub use metrics::{METRICS_CONTENT_TYPE, Metrics, StoreCall};
pub use otlp::{Telemetry, TelemetryError};
pub use subscription::{ParkedResult, SubscriptionMetrics};
pub(crate) use trace::bounded;
pub use trace::{AttemptTrace, DeliveryTrace, Described, SubscriptionTracer, TraceIds};
