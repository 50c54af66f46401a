//! What the sidecar says of itself: traces, metrics and log lines, read back as their users do.

mod collector;
mod conventions;
mod dead_collector;
mod figures;
mod log;
mod propagation;
mod reference;

pub use collector::{Collector, attribute};

/// Exports to this collector, soon.
fn table(collector: &Collector) -> String {
    format!(
        "[telemetry]\nendpoint = \"{}\"\nmetrics_interval = \"1s\"\ntimeout = \"5s\"\n",
        collector.url()
    )
}

/// Batches of spans leave soon.
const SOON: (&str, &str) = ("OTEL_BSP_SCHEDULE_DELAY", "50");
