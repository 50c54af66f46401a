//! Traces and metrics over OTLP/HTTP, where an endpoint is named.
//!
//! Purpose: the SDK makes spans and decides which are sampled; what is sent, when, and what
//! becomes of it if nobody takes it is decided here, on the process's own runtime.
//!
//! Invariants: a collector that is away costs no message anything: queues are bounded, exports
//! have a bound in time, and the end of the process waits for no longer than it is told to.

mod collector;
mod points;
mod settings;
mod spans;

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use opentelemetry::trace::TracerProvider as _;
use opentelemetry::{InstrumentationScope, KeyValue};
use opentelemetry_proto::tonic::resource::v1 as proto;
use opentelemetry_proto::transform::common::tonic::ResourceAttributesWithSchema;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider};
use prost::Message as _;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use self::collector::Collector;
pub use self::settings::TelemetryError;
use self::settings::{Settings, Signal};
use self::spans::Exporter;
use super::Metrics;
use super::trace::{Described, SubscriptionTracer};
use crate::config::TelemetryConfig;

/// What exports, as long as it runs.
pub struct Telemetry {
    metrics: Metrics,
    exports_metrics: bool,
    tracer: Option<SdkTracer>,
    stop: CancellationToken,
    tasks: Vec<JoinHandle<()>>,
}

impl Telemetry {
    /// Starts the exports that the configuration and the process's environment ask for; nothing
    /// runs where they ask for none.
    ///
    /// # Errors
    /// A variable that cannot be followed, or an HTTPS client that cannot be made.
    pub fn start(config: &TelemetryConfig, metrics: &Metrics) -> Result<Self, TelemetryError> {
        let settings = Settings::resolve(config, |name| std::env::var(name).ok())?;
        let mut telemetry = Self {
            metrics: metrics.clone(),
            exports_metrics: false,
            tracer: None,
            stop: CancellationToken::new(),
            tasks: Vec::new(),
        };
        if let Some(settings) = settings {
            telemetry.start_exports(settings)?;
        }
        Ok(telemetry)
    }

    /// Whether the configuration and the process's environment can be followed. Starts nothing.
    ///
    /// # Errors
    /// As those of [`Telemetry::start`], but for what only a start shows.
    pub fn check(config: &TelemetryConfig) -> Result<(), TelemetryError> {
        Settings::resolve(config, |name| std::env::var(name).ok()).map(drop)
    }

    fn start_exports(&mut self, settings: Settings) -> Result<(), TelemetryError> {
        for notice in &settings.notices {
            tracing::warn!("{notice}");
        }
        let resource = resource(settings.resource);
        if let Some(target) = settings.traces {
            let endpoint = target.shown();
            let collector = Arc::new(Collector::new(Signal::Traces, target, &self.metrics)?);
            let (queue, exporter) = Exporter::new(
                collector,
                ResourceAttributesWithSchema::from(&resource),
                settings.batching,
                self.metrics.families().spans_dropped.clone(),
                self.stop.clone(),
            );
            let provider = SdkTracerProvider::builder()
                .with_sampler(settings.sampler)
                .with_resource(resource.clone())
                .with_span_processor(queue)
                .build();
            self.tracer = Some(provider.tracer_with_scope(scope()));
            self.tasks.push(tokio::spawn(exporter.run()));
            tracing::info!(endpoint, "traces are exported");
        }
        if let Some(target) = settings.metrics {
            let endpoint = target.shown();
            let collector = Collector::new(Signal::Metrics, target, &self.metrics)?;
            let exporter = MetricsExporter {
                metrics: self.metrics.clone(),
                collector,
                resource: proto_resource(&resource),
                interval: settings.metrics_interval,
                start_nanos: now_nanos(),
            };
            self.exports_metrics = true;
            self.tasks.push(tokio::spawn(exporter.run(self.stop.clone())));
            tracing::info!(endpoint, "metrics are exported");
        }
        Ok(())
    }

    /// What follows the deliveries of one subscription; `None` where nothing is exported.
    pub fn subscription(&self, described: Described) -> Option<SubscriptionTracer> {
        let conventions = self.exports_metrics.then(|| self.metrics.families().clone());
        (self.tracer.is_some() || conventions.is_some())
            .then(|| SubscriptionTracer::new(self.tracer.clone(), conventions, described))
    }

    /// Sends what is left, for at most `within`.
    pub async fn shutdown(mut self, within: Duration) {
        self.stop.cancel();
        let ends = futures::future::join_all(self.tasks.iter_mut());
        if tokio::time::timeout(within, ends).await.is_err() {
            tracing::debug!("the collector did not take the last spans and metrics in time");
        }
    }
}

/// No task outlives it.
impl Drop for Telemetry {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

struct MetricsExporter {
    metrics: Metrics,
    collector: Collector,
    resource: proto::Resource,
    interval: Duration,
    start_nanos: u64,
}

impl MetricsExporter {
    /// Exports once an interval and once at the end. What was not taken is in the next export,
    /// since all points are cumulative.
    async fn run(self, stop: CancellationToken) {
        let mut ticks = tokio::time::interval(self.interval);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                _ = ticks.tick() => {}
            }
            tokio::select! {
                biased;
                _ = self.export() => {}
                () = stop.cancelled() => break,
            }
        }
        self.export().await;
    }

    async fn export(&self) {
        let texts = [self.metrics.encode(), self.metrics.encode_conventions()];
        let span = points::Span { start_nanos: self.start_nanos, now_nanos: now_nanos() };
        let scope = (&scope(), None).into();
        let request = points::request(&texts, self.resource.clone(), scope, span);
        self.collector.send(request.encode_to_vec()).await;
    }
}

fn scope() -> InstrumentationScope {
    InstrumentationScope::builder("inboxd").with_version(env!("CARGO_PKG_VERSION")).build()
}

fn resource(attributes: Vec<(String, String)>) -> Resource {
    Resource::builder_empty()
        .with_attributes([
            KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
            KeyValue::new("service.instance.id", uuid::Uuid::new_v4().to_string()),
        ])
        .with_attributes(attributes.into_iter().map(|(key, value)| KeyValue::new(key, value)))
        .build()
}

fn proto_resource(resource: &Resource) -> proto::Resource {
    let attributes = ResourceAttributesWithSchema::from(resource).attributes.0;
    proto::Resource { attributes, ..proto::Resource::default() }
}

fn now_nanos() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}
