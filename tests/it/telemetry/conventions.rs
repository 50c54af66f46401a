//! The names of OpenTelemetry's conventions, as a collector gets them from a run.

use inboxd_conformance::app::{Answer, App};
use inboxd_conformance::{ensure, eventually};
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::metrics::v1::Metric;
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;

use super::{Collector, SOON, attribute, table};
use crate::support::{
    Broker, BrokerKind, Database, DatabaseKind, Message, PATIENCE, Sidecar, config,
};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00f067aa0ba902b7";

#[tokio::test(flavor = "multi_thread")]
async fn a_run_on_rabbitmq_has_the_names_of_the_conventions() {
    let run = Run::new(BrokerKind::RabbitQuorum).await;
    let queue = run.broker.name.clone();
    let span = run.process_span("m-accepted");
    assert_eq!(attribute(&span.attributes, "messaging.system"), "rabbitmq");
    assert_eq!(attribute(&span.attributes, "messaging.destination.name"), queue);
    assert_eq!(attribute(&span.attributes, "messaging.rabbitmq.destination.routing_key"), queue);
    run.common("rabbitmq", "").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_on_kafka_has_the_names_of_the_conventions() {
    let run = Run::new(BrokerKind::Kafka).await;
    let topic = run.broker.name.clone();
    let span = run.process_span("m-accepted");
    for (name, value) in [
        ("messaging.system", "kafka"),
        ("messaging.destination.name", &topic),
        ("messaging.destination.partition.id", "0"),
        ("messaging.kafka.offset", "0"),
        ("messaging.kafka.message.key", "k"),
        ("messaging.consumer.group.name", &topic),
    ] {
        assert_eq!(attribute(&span.attributes, name), value, "{name}");
    }
    run.common("kafka", &topic).await;
}

/// One message that is accepted, one that is tried twice, one that is refused, one that comes
/// twice; all with one context.
struct Run {
    collector: Collector,
    app: App,
    broker: Broker,
    spans: Vec<Span>,
    sidecar: Sidecar,
}

impl Run {
    async fn new(kind: BrokerKind) -> Self {
        let (collector, app) = (Collector::start().await, App::start().await);
        let (broker, database) = (Broker::new(kind).await, Database::new(DatabaseKind::Sqlite));
        app.plan("m-retried", [Answer::status(503), Answer::status(200)]);
        app.plan("m-refused", [Answer::status(400)]);
        let config = config(
            &broker,
            &database,
            &broker.name,
            &app.url("/orders?token=geheim"),
            "retry.initial = \"10ms\"",
            &table(&collector),
        );
        let sidecar = Sidecar::start_with(
            &config,
            &[SOON, ("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")],
        );
        let message = |id: &str| {
            let message = Message::id(id)
                .header("traceparent", format!("00-{TRACE}-{PARENT}-01"))
                .header("tracestate", "vendor=x")
                .body("12345");
            match kind {
                BrokerKind::Kafka => message.key("k").partition(0),
                _ => message,
            }
        };
        broker.publish([message("m-accepted"), message("m-retried"), message("m-refused")]).await;
        eventually(PATIENCE, async || {
            ensure(sidecar.outcomes("dead_lettered").await == 1, sidecar.log())
        })
        .await;
        broker.publish([message("m-accepted")]).await;
        eventually(PATIENCE, async || {
            let spans = collector.spans();
            ensure(spans.len() == 4 + 4, format!("{} spans\n{}", spans.len(), sidecar.log()))
        })
        .await;
        Self { spans: collector.spans(), collector, app, broker, sidecar }
    }

    /// The first span of this message's processing.
    fn process_span(&self, id: &str) -> &Span {
        let is_of = |span: &&Span| attribute(&span.attributes, "messaging.message.id") == id;
        self.spans.iter().find(is_of).unwrap_or_else(|| panic!("no span of {id}"))
    }

    fn children(&self, parent: &Span) -> Vec<&Span> {
        let mut children: Vec<_> =
            self.spans.iter().filter(|span| span.parent_span_id == parent.span_id).collect();
        children.sort_by_key(|span| span.start_time_unix_nano);
        children
    }

    async fn common(&self, system: &str, group: &str) {
        self.processes();
        self.posts();
        self.resource();
        self.metrics(system, group).await;
    }

    fn processes(&self) {
        let destination = &self.broker.name;
        for id in ["m-accepted", "m-retried", "m-refused"] {
            let span = self.process_span(id);
            assert_eq!(span.name, format!("process {destination}"));
            assert_eq!(span.kind, SpanKind::Consumer as i32);
            assert_eq!(hex::encode(&span.trace_id), TRACE);
            assert_eq!(hex::encode(&span.parent_span_id), PARENT);
            assert_eq!(span.trace_state, "vendor=x");
            for (name, value) in [
                ("messaging.operation.type", "process"),
                ("messaging.operation.name", "process"),
                ("messaging.message.body.size", "5"),
                ("inboxd.subscription", "orders"),
            ] {
                assert_eq!(attribute(&span.attributes, name), value, "{name}");
            }
        }
        let of = |id, name| attribute(&self.process_span(id).attributes, name);
        assert_eq!(of("m-accepted", "inboxd.outcome"), "processed");
        assert_eq!(of("m-accepted", "error.type"), "");
        assert_eq!(of("m-refused", "inboxd.outcome"), "dead_lettered");
        assert_eq!(of("m-refused", "error.type"), "dead_lettered");
        let is_duplicate =
            |span: &&Span| attribute(&span.attributes, "inboxd.outcome") == "duplicate";
        let duplicate = self.spans.iter().find(is_duplicate).expect("a duplicate's span");
        assert!(self.children(duplicate).is_empty(), "a duplicate is not forwarded");
    }

    fn posts(&self) {
        let retried = self.children(self.process_span("m-retried"));
        assert_eq!(retried.len(), 2);
        for (post, (status, resends, error)) in
            retried.iter().zip([("503", "", "503"), ("200", "1", "")])
        {
            assert_eq!((post.name.as_str(), post.kind), ("POST", SpanKind::Client as i32));
            for (name, value) in [
                ("http.request.method", "POST"),
                ("http.response.status_code", status),
                ("http.request.resend_count", resends),
                ("error.type", error),
                ("server.address", "127.0.0.1"),
                ("server.port", &self.app.addr().port().to_string()),
                ("url.full", &self.app.url("/orders")),
            ] {
                assert_eq!(attribute(&post.attributes, name), value, "{name}");
            }
        }
        // The application was given the context of the very POST that reached it.
        let given: Vec<_> = self
            .app
            .ledger()
            .posts("m-retried")
            .iter()
            .map(|post| post.header("traceparent").unwrap_or_default())
            .collect();
        let expected: Vec<_> = retried
            .iter()
            .map(|span| format!("00-{TRACE}-{}-01", hex::encode(&span.span_id)))
            .collect();
        assert_eq!(given, expected);
        let states = self.app.ledger().posts("m-retried");
        assert!(states.iter().all(|post| post.header("tracestate").as_deref() == Some("vendor=x")));
    }

    fn resource(&self) {
        let resource = self.collector.resource();
        assert_eq!(attribute(&resource, "service.name"), "inboxd");
        assert_eq!(attribute(&resource, "deployment.environment.name"), "test");
        assert!(!attribute(&resource, "service.instance.id").is_empty());
        let types = self.collector.headers();
        assert!(types.iter().all(|headers| headers["content-type"] == "application/x-protobuf"));
    }

    async fn metrics(&self, system: &str, group: &str) {
        let destination = &self.broker.name;
        let is_own = |attributes: &[KeyValue]| {
            attribute(attributes, "messaging.system") == system
                && attribute(attributes, "messaging.destination.name") == *destination
                && attribute(attributes, "messaging.operation.name") == "process"
                && attribute(attributes, "messaging.consumer.group.name") == group
        };
        eventually(PATIENCE, async || {
            let metrics = self.collector.metrics();
            let consumed = find(&metrics, "messaging.client.consumed.messages")?;
            ensure(consumed.unit == "{message}", &consumed.unit)?;
            let Some(Data::Sum(sum)) = &consumed.data else { return Err("no sum".into()) };
            ensure(sum.data_points.iter().all(|p| is_own(&p.attributes)), format!("{sum:?}"))?;

            let duration = find(&metrics, "messaging.process.duration")?;
            ensure(duration.unit == "s", &duration.unit)?;
            let Some(Data::Histogram(duration)) = &duration.data else { return Err("none".into()) };
            let counts: Vec<_> = duration
                .data_points
                .iter()
                .filter(|point| is_own(&point.attributes))
                .map(|point| (attribute(&point.attributes, "error.type"), point.count))
                .collect();
            let failed = ("dead_lettered".to_owned(), 1);
            ensure(
                counts.len() == 2
                    && counts.contains(&failed)
                    && counts.contains(&(String::new(), 3)),
                format!("{counts:?}\n{}", self.sidecar.log()),
            )?;
            find(&metrics, "inboxd.deliveries").map(drop)
        })
        .await;
    }
}

fn find<'a>(metrics: &'a [Metric], name: &str) -> Result<&'a Metric, String> {
    metrics.iter().find(|metric| metric.name == name).ok_or_else(|| format!("no {name} yet"))
}
