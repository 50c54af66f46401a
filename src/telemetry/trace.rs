//! The spans of deliveries, after the messaging conventions of OpenTelemetry.
//!
//! One `process <destination>` span (kind consumer) from taking a delivery to settling it, a
//! child of the message's own context; below it one `POST` span (kind client) for each attempt,
//! whose context the application gets.
//!
//! Invariants: a context is always handed over, never ambient, so that none bleeds into another
//! message; the message's trace id and tracestate are kept, and its sampled flag too unless
//! `OTEL_TRACES_SAMPLER` names a sampler that does not ask the parent; an invalid context counts as
//! none. Destinations in names and metrics are topics and queues, never what a publisher chose.

use std::sync::Arc;

use inboxd_contract::{
    Envelope, InboxKey, Origin, Outcome, TraceContext, Verdict, is_valid_traceparent,
    is_valid_tracestate,
};
use opentelemetry::trace::{
    Span as _, SpanContext, SpanId, SpanKind, Status, TraceContextExt as _, TraceFlags, TraceId,
    TraceState, Tracer as _,
};
use opentelemetry::{Context, KeyValue};
use opentelemetry_sdk::trace::{SdkTracer, Span};
use tokio::time::Instant;
use url::Url;

use super::families::{Families, FreeLabels};

/// The longest value that a publisher gives an attribute, in bytes of what is exported.
const VALUE_BYTES_MAX: usize = 256;
/// W3C Trace Context level 2: the trace id is random. Kept as it came.
const FLAG_RANDOM: u8 = 0x02;

/// What does not change from one delivery of a subscription to the next.
#[derive(Debug, Clone)]
pub struct Described {
    /// The subscription's name.
    pub subscription: Arc<str>,
    /// The Kafka group, where there is one.
    pub group: Option<String>,
    /// The callback, without credentials.
    pub url: Url,
    /// The Unix socket's path instead of a host.
    pub socket: Option<String>,
}

/// Follows the deliveries of one subscription. Cheap to clone.
#[derive(Clone)]
pub struct SubscriptionTracer(Arc<Inner>);

struct Inner {
    tracer: Option<SdkTracer>,
    conventions: Option<Families>,
    described: Described,
    server_address: String,
    server_port: Option<u16>,
}

/// Follows one delivery. Dropped unfinished, the delivery counts as released.
pub struct DeliveryTrace {
    owner: Arc<Inner>,
    span: Option<Span>,
    /// The message's, as it came.
    state: Option<String>,
    random: u8,
    started_at: Instant,
    labels: FreeLabels,
    ended: bool,
}

/// Follows one POST. Dropped unfinished, the request was abandoned.
pub struct AttemptTrace {
    span: Span,
    context: TraceContext,
}

/// What log lines about a message carry.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TraceIds {
    /// 32 digits.
    pub trace_id: Option<String>,
    /// 16 digits: the delivery's span, or the publisher's where nothing is exported.
    pub span_id: Option<String>,
}

impl TraceIds {
    /// Those of the message's own context, where that is valid.
    pub fn of_message(envelope: &Envelope) -> Self {
        match valid_parent(envelope) {
            Some(parent) => Self {
                trace_id: Some(parent[3..35].to_owned()),
                span_id: Some(parent[36..52].to_owned()),
            },
            None => Self::default(),
        }
    }
}

impl SubscriptionTracer {
    pub(super) fn new(
        tracer: Option<SdkTracer>,
        conventions: Option<Families>,
        described: Described,
    ) -> Self {
        let host = described.url.host_str().unwrap_or_default().trim_matches(['[', ']']);
        let server_address = described.socket.clone().unwrap_or_else(|| host.to_owned());
        let server_port = match described.socket {
            Some(_) => None,
            None => described.url.port_or_known_default(),
        };
        Self(Arc::new(Inner { tracer, conventions, described, server_address, server_port }))
    }

    /// A delivery was taken.
    pub fn delivery(&self, envelope: &Envelope, key: &InboxKey) -> DeliveryTrace {
        let owner = self.0.clone();
        let labels = match &owner.conventions {
            Some(_) => owner.labels(&envelope.origin),
            None => Vec::new(),
        };
        if let Some(families) = &owner.conventions {
            families.consumed.get_or_create(&labels).inc();
        }
        let span = owner.tracer.as_ref().map(|tracer| {
            let name = format!("process {}", destination(&envelope.origin));
            let builder = tracer.span_builder(name).with_kind(SpanKind::Consumer);
            let mut span = tracer.build_with_context(builder, &parent(envelope));
            if span.is_recording() {
                span.set_attributes(owner.attributes(envelope, key));
            }
            span
        });
        DeliveryTrace {
            span,
            state: valid_state(envelope).map(str::to_owned),
            random: valid_parent(envelope).map_or(0, |parent| flags(parent) & FLAG_RANDOM),
            started_at: Instant::now(),
            labels,
            ended: false,
            owner,
        }
    }
}

impl Inner {
    fn labels(&self, origin: &Origin) -> FreeLabels {
        let mut labels = vec![
            ("messaging.system", system(origin).to_owned()),
            ("messaging.operation.name", "process".to_owned()),
            ("messaging.operation.type", "process".to_owned()),
            ("messaging.destination.name", destination(origin).to_owned()),
        ];
        if let Some(group) = &self.described.group {
            labels.push(("messaging.consumer.group.name", group.clone()));
        }
        labels
    }

    fn attributes(&self, envelope: &Envelope, key: &InboxKey) -> Vec<KeyValue> {
        let origin = &envelope.origin;
        let body_bytes = envelope.body.as_ref().map_or(0, bytes::Bytes::len);
        let mut attributes = vec![
            KeyValue::new("messaging.system", system(origin)),
            KeyValue::new("messaging.operation.name", "process"),
            KeyValue::new("messaging.operation.type", "process"),
            KeyValue::new(
                "messaging.message.id",
                attribute_text(key.message_id.as_str().as_bytes()),
            ),
            KeyValue::new("messaging.message.body.size", size(body_bytes as u64)),
            KeyValue::new("inboxd.subscription", self.described.subscription.to_string()),
            KeyValue::new("inboxd.consumer_id", key.consumer_id.as_str().to_owned()),
        ];
        if let Some(group) = &self.described.group {
            attributes.push(KeyValue::new("messaging.consumer.group.name", group.clone()));
        }
        if let Some(id) = &envelope.correlation_id {
            attributes.push(KeyValue::new("messaging.message.conversation_id", attribute_text(id)));
        }
        match origin {
            Origin::Kafka { topic, partition, offset, .. } => {
                attributes.extend([
                    KeyValue::new("messaging.destination.name", topic.to_string()),
                    KeyValue::new("messaging.destination.partition.id", partition.to_string()),
                    KeyValue::new("messaging.kafka.offset", *offset),
                ]);
                if let Some(key) = &envelope.key {
                    attributes
                        .push(KeyValue::new("messaging.kafka.message.key", attribute_text(key)));
                }
                if envelope.body.is_none() {
                    attributes.push(KeyValue::new("messaging.kafka.message.tombstone", true));
                }
            }
            Origin::RabbitMq { queue, exchange, routing_key, .. } => {
                // Exchange, routing key and queue, each once.
                let mut parts: Vec<&str> = Vec::new();
                for part in [exchange, routing_key, queue] {
                    if !part.is_empty() && !parts.contains(&&**part) {
                        parts.push(part);
                    }
                }
                let name = attribute_text(parts.join(":").as_bytes());
                attributes.push(KeyValue::new("messaging.destination.name", name));
                if !routing_key.is_empty() {
                    attributes.push(KeyValue::new(
                        "messaging.rabbitmq.destination.routing_key",
                        attribute_text(routing_key.as_bytes()),
                    ));
                }
            }
            Origin::Memory { stream, .. } => {
                attributes.push(KeyValue::new("messaging.destination.name", stream.to_string()));
            }
        }
        attributes
    }
}

impl DeliveryTrace {
    /// A POST is about to be made, to the path of a route or to the callback's own. `None` where
    /// no traces are exported: the message's own context goes on.
    pub fn attempt(&self, attempt: u32, path: Option<&str>) -> Option<AttemptTrace> {
        let (tracer, delivery) = (self.owner.tracer.as_ref()?, self.span.as_ref()?);
        let context = Context::new().with_remote_span_context(delivery.span_context().clone());
        let builder = tracer.span_builder("POST").with_kind(SpanKind::Client);
        let mut span = tracer.build_with_context(builder, &context);
        if span.is_recording() {
            let mut url = self.owner.described.url.clone();
            if let Some(path) = path {
                url.set_path(path.split('?').next().unwrap_or_default());
            }
            // May hold a secret.
            url.set_query(None);
            span.set_attributes([
                KeyValue::new("http.request.method", "POST"),
                KeyValue::new("url.full", url.to_string()),
                KeyValue::new("server.address", self.owner.server_address.clone()),
            ]);
            if let Some(port) = self.owner.server_port {
                span.set_attribute(KeyValue::new("server.port", i64::from(port)));
            }
            if attempt > 1 {
                let resend = i64::from(attempt - 1);
                span.set_attribute(KeyValue::new("http.request.resend_count", resend));
            }
        }
        let own = span.span_context();
        let flags = own.trace_flags().to_u8() | self.random;
        let context = TraceContext {
            traceparent: format!("00-{}-{}-{flags:02x}", own.trace_id(), own.span_id()),
            tracestate: self.state.clone(),
        };
        Some(AttemptTrace { span, context })
    }

    /// What log lines about this delivery carry; `None` where no traces are exported.
    pub fn ids(&self) -> Option<TraceIds> {
        let context = self.span.as_ref()?.span_context();
        Some(TraceIds {
            trace_id: Some(context.trace_id().to_string()),
            span_id: Some(context.span_id().to_string()),
        })
    }

    /// The delivery is settled.
    pub fn end(mut self, outcome: Outcome) {
        self.finish(outcome);
    }

    fn finish(&mut self, outcome: Outcome) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        let error = error_type(outcome);
        if let Some(span) = &mut self.span {
            span.set_attribute(KeyValue::new("inboxd.outcome", outcome.as_str()));
            if let Some(error) = error {
                span.set_attribute(KeyValue::new("error.type", error));
                span.set_status(Status::error(""));
            }
            span.end();
        }
        if let Some(families) = &self.owner.conventions {
            let mut labels = std::mem::take(&mut self.labels);
            labels.extend(error.map(|error| ("error.type", error.to_owned())));
            let seconds = self.started_at.elapsed().as_secs_f64();
            families.process_seconds.get_or_create(&labels).observe(seconds);
        }
    }
}

impl Drop for DeliveryTrace {
    fn drop(&mut self) {
        self.finish(Outcome::Released);
    }
}

impl AttemptTrace {
    /// What the application gets.
    pub fn context(&self) -> &TraceContext {
        &self.context
    }

    /// What the attempt came to.
    pub fn end(mut self, verdict: &Verdict) {
        let (status, reason) = match verdict {
            Verdict::Accepted { status }
            | Verdict::Refused { status, .. }
            | Verdict::Park { status }
            | Verdict::Drop { status } => (Some(*status), None),
            Verdict::Retry { status, reason, .. } => (*status, Some(<&str>::from(*reason))),
        };
        self.span.set_attribute(KeyValue::new("inboxd.verdict", verdict.as_str()));
        if let Some(status) = status {
            let code = i64::from(status);
            self.span.set_attribute(KeyValue::new("http.response.status_code", code));
        }
        let error = match (status, reason) {
            (Some(status), _) if status >= 400 => Some(status.to_string()),
            (None, Some(reason)) => Some(reason.to_owned()),
            _ => None,
        };
        if let Some(error) = error {
            self.span.set_attribute(KeyValue::new("error.type", error));
            self.span.set_status(Status::error(""));
        }
        self.span.end();
    }
}

/// What failed, for `error.type`; a message that was processed before is no failure.
fn error_type(outcome: Outcome) -> Option<&'static str> {
    let failed = matches!(
        outcome,
        Outcome::IdConflict | Outcome::DeadLettered | Outcome::Released | Outcome::Parked
    );
    failed.then(|| outcome.as_str())
}

fn system(origin: &Origin) -> &'static str {
    match origin {
        Origin::Kafka { .. } => "kafka",
        Origin::RabbitMq { .. } => "rabbitmq",
        Origin::Memory { .. } => "memory",
    }
}

/// Topic or queue: as many as are configured.
fn destination(origin: &Origin) -> &str {
    match origin {
        Origin::Kafka { topic, .. } => topic,
        Origin::RabbitMq { queue, .. } => queue,
        Origin::Memory { stream, .. } => stream,
    }
}

fn valid_parent(envelope: &Envelope) -> Option<&str> {
    let value = envelope.traceparent.as_deref()?;
    is_valid_traceparent(value).then(|| std::str::from_utf8(value).ok()).flatten()
}

/// Only with a valid parent: a state belongs to its trace.
fn valid_state(envelope: &Envelope) -> Option<&str> {
    let value = envelope.tracestate.as_deref()?;
    valid_parent(envelope)?;
    is_valid_tracestate(value).then(|| std::str::from_utf8(value).ok()).flatten()
}

fn flags(parent: &str) -> u8 {
    u8::from_str_radix(&parent[53..55], 16).unwrap_or_default()
}

/// The message's context as the parent of a span, or none.
fn parent(envelope: &Envelope) -> Context {
    let none = Context::new();
    let Some(parent) = valid_parent(envelope) else { return none };
    let (Ok(trace_id), Ok(span_id)) =
        (TraceId::from_hex(&parent[3..35]), SpanId::from_hex(&parent[36..52]))
    else {
        return none;
    };
    let sampled = TraceFlags::new(flags(parent) & TraceFlags::SAMPLED.to_u8());
    let state = valid_state(envelope).and_then(|state| state.parse::<TraceState>().ok());
    let state = state.unwrap_or_default();
    none.with_remote_span_context(SpanContext::new(trace_id, span_id, sampled, true, state))
}

/// What a publisher chose, as the value of an attribute.
fn attribute_text(value: &[u8]) -> String {
    bounded(value, VALUE_BYTES_MAX)
}

/// Text of at most `max` bytes for what may be no text and of any length, and a sign where something
/// was left out.
pub(crate) fn bounded(value: &[u8], max: usize) -> String {
    // What is no text grows when it is decoded; a character that is cut here ends beyond `max`.
    let beginning = &value[..value.len().min(max.saturating_add(4))];
    let mut text = String::from_utf8_lossy(beginning).into_owned();
    if text.len() > max {
        text.truncate(text.floor_char_boundary(max));
        text.push('…');
    }
    text
}

fn size(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use inboxd_contract::{ConsumerId, Header, MessageId};

    use super::*;
    use crate::telemetry::Metrics;

    const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    fn described() -> Described {
        Described {
            subscription: "orders".into(),
            group: None,
            url: Url::parse("http://127.0.0.1:8080/orders?token=geheim").unwrap(),
            socket: None,
        }
    }

    fn envelope(number: usize) -> Envelope {
        let mut envelope = Envelope::new(
            Origin::RabbitMq {
                queue: "orders".into(),
                exchange: format!("exchange-{number}").into(),
                routing_key: format!("key-{number}").into(),
                redelivered: false,
                delivery_count: None,
            },
            None,
        );
        envelope.message_type = Some(format!("type-{number}").into());
        envelope.headers.push(Header::new(format!("name-{number}"), "value"));
        envelope
    }

    fn key(number: usize) -> InboxKey {
        InboxKey {
            consumer_id: ConsumerId::new("billing").unwrap(),
            message_id: MessageId::generated(&number.to_string()),
        }
    }

    #[test]
    fn ten_thousand_routing_keys_are_one_series() {
        let metrics = Metrics::new();
        let conventions = Some(metrics.families().clone());
        let tracer = SubscriptionTracer::new(None, conventions, described());
        let series =
            || metrics.encode().lines().count() + metrics.encode_conventions().lines().count();
        tracer.delivery(&envelope(0), &key(0)).end(Outcome::Processed);
        let before = series();
        for number in 1..10_000 {
            tracer.delivery(&envelope(number), &key(number)).end(Outcome::Processed);
        }
        assert_eq!(series(), before);
        let text = metrics.encode_conventions();
        assert!(text.contains("messaging.destination.name=\"orders\"") && text.contains(" 10000"));
    }

    #[test]
    fn without_traces_there_are_no_attempts_and_no_ids_but_the_message_s() {
        let metrics = Metrics::new();
        let conventions = Some(metrics.families().clone());
        let tracer = SubscriptionTracer::new(None, conventions, described());
        let mut envelope = envelope(0);
        let delivery = tracer.delivery(&envelope, &key(0));
        assert!(delivery.attempt(1, None).is_none());
        assert_eq!(delivery.ids(), None);
        assert_eq!(TraceIds::of_message(&envelope), TraceIds::default());
        envelope.traceparent = Some(PARENT.into());
        let ids = TraceIds::of_message(&envelope);
        assert_eq!(ids.trace_id.as_deref(), Some("4bf92f3577b34da6a3ce929d0e0e4736"));
        assert_eq!(ids.span_id.as_deref(), Some("00f067aa0ba902b7"));
    }

    #[test]
    fn what_publishers_choose_is_cut_after_it_was_decoded() {
        let cut = attribute_text;
        assert_eq!(cut(&[b'x'; 256]), "x".repeat(256));
        assert_eq!(cut(&[b'x'; 10_240]), format!("{}…", "x".repeat(256)));
        assert_eq!(cut("é".repeat(10_240).as_bytes()), format!("{}…", "é".repeat(128)));
        // Three bytes for each that is no text.
        assert_eq!(cut(&[0xff; 10_240]), format!("{}…", "\u{fffd}".repeat(85)));
        assert_eq!(cut(&[0xff; 100]), format!("{}…", "\u{fffd}".repeat(85)));
        // The character at the end of the part that is looked at is no wrong one.
        let text = format!("{}€€€", "x".repeat(255));
        assert_eq!(cut(text.as_bytes()), format!("{}…", "x".repeat(255)));
    }

    #[test]
    fn an_abandoned_delivery_counts_as_released() {
        let metrics = Metrics::new();
        let conventions = Some(metrics.families().clone());
        let tracer = SubscriptionTracer::new(None, conventions, described());
        drop(tracer.delivery(&envelope(0), &key(0)));
        assert!(metrics.encode_conventions().contains("error.type=\"released\""));
    }
}
