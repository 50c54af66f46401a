//! Spans on their way to the collector: a bounded queue and one task that sends batches.
//!
//! Invariants: ending a span never waits; a full queue drops the span and counts it; a batch that
//! the collector did not take is sent again, with backoff, while the queue holds what is newer.
//!
//! What it does not do: the batch processor of the SDK, which has a thread of its own, tells
//! nobody how much it dropped, and whose exporter retries at the end of the process.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use opentelemetry::Context;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::transform::common::tonic::ResourceAttributesWithSchema;
use opentelemetry_proto::transform::trace::tonic::group_spans_by_resource_and_scope;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{Span, SpanData, SpanProcessor};
use prometheus_client::metrics::counter::Counter;
use prost::Message as _;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::collector::{Collector, Sent};
use super::settings::Batching;

const RETRY_MIN: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_secs(30);

/// The SDK's end of the queue.
pub(super) struct Queue {
    spans: mpsc::Sender<SpanData>,
    dropped: Counter,
}

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Queue")
    }
}

impl SpanProcessor for Queue {
    fn on_start(&self, _: &mut Span, _: &Context) {}

    fn on_end(&self, span: SpanData) {
        if span.span_context.is_sampled() && self.spans.try_send(span).is_err() {
            self.dropped.inc();
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        Ok(())
    }

    fn shutdown_with_timeout(&self, _: Duration) -> OTelSdkResult {
        Ok(())
    }
}

/// The sending end.
pub(super) struct Exporter {
    spans: mpsc::Receiver<SpanData>,
    dropped: Counter,
    collector: Arc<Collector>,
    resource: ResourceAttributesWithSchema,
    batching: Batching,
    stop: CancellationToken,
}

impl Exporter {
    pub(super) fn new(
        collector: Arc<Collector>,
        resource: ResourceAttributesWithSchema,
        batching: Batching,
        dropped: Counter,
        stop: CancellationToken,
    ) -> (Queue, Self) {
        let (sender, spans) = mpsc::channel(batching.queue_max);
        let queue = Queue { spans: sender, dropped: dropped.clone() };
        (queue, Self { spans, dropped, collector, resource, batching, stop })
    }

    /// Sends until it is stopped, then what is left, each batch once.
    pub(super) async fn run(mut self) {
        let stop = self.stop.clone();
        let mut unsent = None;
        while unsent.is_none() && !stop.is_cancelled() {
            let batch = self.collect().await;
            if !batch.is_empty() {
                unsent = self.send(batch).await;
            }
        }
        self.spans.close();
        if let Some((body, members)) = unsent {
            self.send_once(body, members).await;
        }
        while let Ok(first) = self.spans.try_recv() {
            let mut batch = vec![first];
            while batch.len() < self.batching.batch_max
                && let Ok(span) = self.spans.try_recv()
            {
                batch.push(span);
            }
            let members = batch.len();
            let body = self.encode(batch);
            self.send_once(body, members).await;
        }
    }

    /// The next batch: full, or what came within the delay. Empty when it is stopped.
    async fn collect(&mut self) -> Vec<SpanData> {
        let Batching { batch_max, delay, .. } = self.batching;
        let mut batch = Vec::new();
        tokio::select! {
            biased;
            () = self.stop.cancelled() => return batch,
            _ = self.spans.recv_many(&mut batch, batch_max) => {}
        }
        let late = tokio::time::sleep(delay);
        tokio::pin!(late);
        while batch.len() < batch_max {
            let room = batch_max - batch.len();
            tokio::select! {
                biased;
                () = self.stop.cancelled() => break,
                () = &mut late => break,
                taken = self.spans.recv_many(&mut batch, room) => if taken == 0 { break },
            }
        }
        batch
    }

    fn encode(&self, batch: Vec<SpanData>) -> Vec<u8> {
        let resource_spans = group_spans_by_resource_and_scope(batch, &self.resource);
        ExportTraceServiceRequest { resource_spans }.encode_to_vec()
    }

    /// Sends for as long as it takes; `Some` if it was stopped first.
    async fn send(&self, batch: Vec<SpanData>) -> Option<(Vec<u8>, usize)> {
        let members = batch.len();
        let body = self.encode(batch);
        let mut wait = RETRY_MIN;
        loop {
            let sent = tokio::select! {
                biased;
                sent = self.collector.send(body.clone()) => sent,
                () = self.stop.cancelled() => return Some((body, members)),
            };
            let at_least = match sent {
                Sent::Done => return None,
                Sent::Refused => {
                    self.dropped.inc_by(members as u64);
                    return None;
                }
                Sent::Again(at_least) => at_least,
            };
            tokio::select! {
                biased;
                () = self.stop.cancelled() => return Some((body, members)),
                () = tokio::time::sleep(wait.max(at_least)) => {}
            }
            wait = (wait * 2).min(RETRY_MAX);
        }
    }

    async fn send_once(&self, body: Vec<u8>, members: usize) {
        if self.collector.send(body).await != Sent::Done {
            self.dropped.inc_by(members as u64);
        }
    }
}
