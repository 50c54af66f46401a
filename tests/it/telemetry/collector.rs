//! A collector of OTLP over HTTP that keeps what it gets.

use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::metrics::v1::Metric;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message as _;

/// Everything that came.
#[derive(Default)]
struct Kept {
    spans: Vec<Span>,
    /// Of the last export.
    metrics: Vec<Metric>,
    resource: Vec<KeyValue>,
    headers: Vec<HeaderMap>,
}

/// A running collector.
pub struct Collector {
    kept: Arc<Mutex<Kept>>,
    address: std::net::SocketAddr,
    task: tokio::task::JoinHandle<()>,
}

impl Collector {
    pub async fn start() -> Self {
        let kept = Arc::new(Mutex::new(Kept::default()));
        let router = Router::new()
            .route("/v1/traces", post(take_traces))
            .route("/v1/metrics", post(take_metrics))
            .with_state(kept.clone());
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("its address");
        let task = tokio::spawn(async move {
            axum::serve(listener, router).await.expect("the collector serves");
        });
        Self { kept, address, task }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn spans(&self) -> Vec<Span> {
        self.kept.lock().unwrap().spans.clone()
    }

    /// The last export.
    pub fn metrics(&self) -> Vec<Metric> {
        self.kept.lock().unwrap().metrics.clone()
    }

    pub fn resource(&self) -> Vec<KeyValue> {
        self.kept.lock().unwrap().resource.clone()
    }

    /// Of each export.
    pub fn headers(&self) -> Vec<HeaderMap> {
        self.kept.lock().unwrap().headers.clone()
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn take_traces(
    State(kept): State<Arc<Mutex<Kept>>>,
    headers: HeaderMap,
    body: Bytes,
) -> StatusCode {
    let Ok(request) = ExportTraceServiceRequest::decode(body) else {
        return StatusCode::BAD_REQUEST;
    };
    let mut kept = kept.lock().unwrap();
    kept.headers.push(headers);
    for resource_spans in request.resource_spans {
        kept.resource = resource_spans.resource.unwrap_or_default().attributes;
        kept.spans.extend(resource_spans.scope_spans.into_iter().flat_map(|scope| scope.spans));
    }
    StatusCode::OK
}

async fn take_metrics(
    State(kept): State<Arc<Mutex<Kept>>>,
    headers: HeaderMap,
    body: Bytes,
) -> StatusCode {
    let Ok(request) = ExportMetricsServiceRequest::decode(body) else {
        return StatusCode::BAD_REQUEST;
    };
    let mut kept = kept.lock().unwrap();
    kept.headers.push(headers);
    kept.metrics = request
        .resource_metrics
        .into_iter()
        .flat_map(|resource| resource.scope_metrics)
        .flat_map(|scope| scope.metrics)
        .collect();
    StatusCode::OK
}

/// The value of an attribute as text; empty where there is none.
pub fn attribute(attributes: &[KeyValue], name: &str) -> String {
    let value = attributes.iter().find(|attribute| attribute.key == name);
    match value.and_then(|attribute| attribute.value.as_ref()) {
        Some(AnyValue { value: Some(Value::StringValue(text)) }) => text.clone(),
        Some(AnyValue { value: Some(Value::IntValue(number)) }) => number.to_string(),
        Some(AnyValue { value: Some(Value::BoolValue(flag)) }) => flag.to_string(),
        _ => String::new(),
    }
}
