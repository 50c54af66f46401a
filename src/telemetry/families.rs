//! Every metric: its name, unit, labels and what it says.
//!
//! Invariants: see [`super::metrics`]; a metric that is not registered here does not exist.

use std::sync::atomic::AtomicU64;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use strum::IntoEnumIterator as _;

use super::callback::CallbackFamilies;
use super::metrics::StoreCall;

pub(super) type Labels<const N: usize> = [(&'static str, String); N];
pub(super) type Counters<const N: usize> = Family<Labels<N>, Counter>;
pub(super) type Gauges<const N: usize> = Family<Labels<N>, Gauge>;
pub(super) type FloatGauges<const N: usize> = Family<Labels<N>, Gauge<f64, AtomicU64>>;
pub(super) type Histograms<const N: usize> = Family<Labels<N>, Histogram, Buckets>;

/// Labels whose number depends on what happened.
pub(super) type FreeLabels = Vec<(&'static str, String)>;

/// Bucket bounds of a histogram family.
#[derive(Clone, Copy)]
pub(super) struct Buckets(&'static [f64]);

impl MetricConstructor<Histogram> for Buckets {
    fn new_metric(&self) -> Histogram {
        Histogram::new(self.0.iter().copied())
    }
}

/// From a callback next door to one at the default timeout.
const FORWARD_BUCKETS: Buckets = Buckets(&[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
]);
/// From one statement on a local disk to a lock timeout.
const STORE_BUCKETS: Buckets =
    Buckets(&[0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 3.0]);

/// From a message that the application takes at once to one that waits for a night.
const SETTLED_BUCKETS: Buckets =
    Buckets(&[0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0, 300.0, 1_800.0]);
/// Messages of one call of the store.
const BATCH_BUCKETS: Buckets = Buckets(&[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0]);
/// What the messaging conventions of OpenTelemetry advise.
const PROCESS_BUCKETS: Buckets =
    Buckets(&[0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0]);

#[derive(Clone)]
pub(super) struct Families {
    pub(super) deliveries: Counters<2>,
    pub(super) forwards: Counters<2>,
    pub(super) retries: Counters<2>,
    pub(super) forward_seconds: Histograms<1>,
    pub(super) settled_seconds: Histograms<1>,
    pub(super) in_flight: Gauges<1>,
    pub(super) in_flight_bytes: Gauges<1>,
    pub(super) held: Gauges<1>,
    pub(super) unidentified_held: Gauges<1>,
    pub(super) lane_waiting: Gauges<1>,
    pub(super) id_conflicts: Counters<1>,
    pub(super) parked_settled: Counters<2>,
    pub(super) letters_published: Counters<1>,
    pub(super) letters_waiting: Gauges<1>,
    pub(super) panics: Counters<1>,
    pub(super) paused: Gauges<1>,
    pub(super) callback: CallbackFamilies,
    pub(super) source_phase: Gauges<2>,
    pub(super) reconnects: Counters<1>,
    pub(super) partition_lag: Gauges<2>,
    pub(super) partition_oldest_seconds: FloatGauges<2>,
    pub(super) partition_paused: Gauges<2>,
    pub(super) queue_depth: Gauges<1>,
    pub(super) rebalances: Counters<1>,
    pub(super) commit_errors: Counters<1>,
    pub(super) foreign_commits: Counters<1>,
    pub(super) started_over: Counters<1>,
    pub(super) consumer_cancels: Counters<1>,
    pub(super) source_releases: Counters<1>,
    pub(super) store_seconds: Histograms<1>,
    pub(super) store_batch: Histograms<1>,
    pub(super) store_members: Counters<1>,
    pub(super) store_failures: Counters<1>,
    pub(super) claims_lost: Counter,
    pub(super) claims_taken_over: Counter,
    pub(super) sweeps: Counters<1>,
    pub(super) swept_rows: Counters<1>,
    pub(super) inbox_rows: Gauges<1>,
    pub(super) inbox_oldest_seconds: FloatGauges<1>,
    pub(super) spans_dropped: Counter,
    pub(super) exports: Counters<2>,
    build_info: Gauges<1>,
    pub(super) consumed: Family<FreeLabels, Counter>,
    pub(super) process_seconds: Family<FreeLabels, Histogram, Buckets>,
}

impl Families {
    pub(super) fn new() -> Self {
        Self {
            deliveries: Family::default(),
            forwards: Family::default(),
            retries: Family::default(),
            forward_seconds: Family::new_with_constructor(FORWARD_BUCKETS),
            settled_seconds: Family::new_with_constructor(SETTLED_BUCKETS),
            in_flight: Family::default(),
            in_flight_bytes: Family::default(),
            held: Family::default(),
            unidentified_held: Family::default(),
            lane_waiting: Family::default(),
            id_conflicts: Family::default(),
            parked_settled: Family::default(),
            letters_published: Family::default(),
            letters_waiting: Family::default(),
            panics: Family::default(),
            paused: Family::default(),
            callback: CallbackFamilies::default(),
            source_phase: Family::default(),
            reconnects: Family::default(),
            partition_lag: Family::default(),
            partition_oldest_seconds: Family::default(),
            partition_paused: Family::default(),
            queue_depth: Family::default(),
            rebalances: Family::default(),
            commit_errors: Family::default(),
            foreign_commits: Family::default(),
            started_over: Family::default(),
            consumer_cancels: Family::default(),
            source_releases: Family::default(),
            store_seconds: Family::new_with_constructor(STORE_BUCKETS),
            store_batch: Family::new_with_constructor(BATCH_BUCKETS),
            store_members: Family::default(),
            store_failures: Family::default(),
            claims_lost: Counter::default(),
            claims_taken_over: Counter::default(),
            sweeps: Family::default(),
            swept_rows: Family::default(),
            inbox_rows: Family::default(),
            inbox_oldest_seconds: Family::default(),
            spans_dropped: Counter::default(),
            exports: Family::default(),
            build_info: Family::default(),
            consumed: Family::default(),
            process_seconds: Family::new_with_constructor(PROCESS_BUCKETS),
        }
    }

    pub(super) fn register(&self, registry: &mut Registry) {
        self.register_deliveries(registry);
        self.callback.register(registry);
        self.register_source(registry);
        self.register_store(registry);
        self.register_process(registry);
    }

    /// What the conventions of OpenTelemetry name, for exports alone.
    pub(super) fn register_conventions(&self, to: &mut Registry) {
        to.register_with_unit(
            "messaging.client.consumed.messages",
            "Number of messages that were delivered to the application",
            Unit::Other("{message}".into()),
            self.consumed.clone(),
        );
        to.register_with_unit(
            "messaging.process.duration",
            "Duration of processing operation",
            Unit::Seconds,
            self.process_seconds.clone(),
        );
    }

    fn register_process(&self, to: &mut Registry) {
        to.register("build_info", "1, with the version as a label", self.build_info.clone());
        to.register(
            "telemetry_spans_dropped",
            "Spans that were not exported: the queue was full, or the collector refused them",
            self.spans_dropped.clone(),
        );
        to.register(
            "telemetry_exports",
            "Exports to the OTLP collector, by signal and result",
            self.exports.clone(),
        );
    }

    fn register_deliveries(&self, to: &mut Registry) {
        to.register("deliveries", "What became of deliveries", self.deliveries.clone());
        to.register("forwards", "Attempts at the callback, by verdict", self.forwards.clone());
        to.register(
            "forward_retries",
            "Attempts to be made again, by reason",
            self.retries.clone(),
        );
        to.register_with_unit(
            "forward_duration",
            "Time of one attempt at the callback, response included",
            Unit::Seconds,
            self.forward_seconds.clone(),
        );
        to.register_with_unit(
            "delivery_duration",
            "Time from taking a delivery to settling it, waits and retries included",
            Unit::Seconds,
            self.settled_seconds.clone(),
        );
        to.register(
            "in_flight_deliveries",
            "Deliveries taken from the broker and not settled",
            self.in_flight.clone(),
        );
        to.register_with_unit(
            "in_flight",
            "Size of the deliveries taken from the broker and not settled",
            Unit::Bytes,
            self.in_flight_bytes.clone(),
        );
        to.register(
            "held_deliveries",
            "Deliveries held for longer than hold_max because their lane halts",
            self.held.clone(),
        );
        to.register(
            "unidentified_held_deliveries",
            "Deliveries without a message id that are held unsettled until the first id is seen",
            self.unidentified_held.clone(),
        );
        to.register(
            "lane_waiting_deliveries",
            "Deliveries that wait for another of their ordering lane",
            self.lane_waiting.clone(),
        );
        to.register(
            "id_conflicts",
            "Deliveries with a known message id and other content",
            self.id_conflicts.clone(),
        );
        to.register(
            "parked_settled",
            "What became of parked messages that were taken, by result",
            self.parked_settled.clone(),
        );
        to.register(
            "dead_letters_published",
            "Dead letters that the broker has confirmed and routed",
            self.letters_published.clone(),
        );
        to.register(
            "dead_letters_waiting",
            "Dead letters that wait for the broker to take them; meanwhile nothing is taken",
            self.letters_waiting.clone(),
        );
        to.register(
            "attempt_panics",
            "Attempts that panicked and gave their delivery back",
            self.panics.clone(),
        );
        to.register(
            "subscription_paused",
            "1 while the subscription is paused and an operator must act",
            self.paused.clone(),
        );
    }

    fn register_source(&self, to: &mut Registry) {
        to.register(
            "source_phase",
            "1 for the phase the source is in, 0 for the others",
            self.source_phase.clone(),
        );
        to.register(
            "source_reconnects",
            "Connections and channels opened after the first",
            self.reconnects.clone(),
        );
        to.register(
            "partition_lag_records",
            "Records between the committed position and the end of the partition",
            self.partition_lag.clone(),
        );
        to.register_with_unit(
            "partition_oldest_unsettled",
            "Age of the oldest unsettled delivery of the partition, 0 without one",
            Unit::Seconds,
            self.partition_oldest_seconds.clone(),
        );
        to.register(
            "partition_paused",
            "1 while the broker is asked to send no more of the partition",
            self.partition_paused.clone(),
        );
        to.register(
            "queue_depth_messages",
            "Messages ready in the queue, where the broker can be asked",
            self.queue_depth.clone(),
        );
        to.register(
            "source_rebalances",
            "Assignments and revocations of partitions",
            self.rebalances.clone(),
        );
        to.register(
            "source_commit_errors",
            "Commits of offsets that failed",
            self.commit_errors.clone(),
        );
        to.register(
            "source_foreign_commits",
            "Assigned partitions whose committed offset carries another inbox's id",
            self.foreign_commits.clone(),
        );
        to.register(
            "source_started_over",
            "Partitions read from their beginning since their topic was made again",
            self.started_over.clone(),
        );
        to.register(
            "source_consumer_cancels",
            "Consumers that the broker cancelled",
            self.consumer_cancels.clone(),
        );
        to.register(
            "source_releases",
            "Deliveries given back to the broker",
            self.source_releases.clone(),
        );
    }

    fn register_store(&self, to: &mut Registry) {
        to.register_with_unit(
            "store_call_duration",
            "Time of one call to the inbox database",
            Unit::Seconds,
            self.store_seconds.clone(),
        );
        to.register(
            "store_batch_members",
            "Messages that one call to the inbox database carried",
            self.store_batch.clone(),
        );
        to.register(
            "store_call_members",
            "Messages that calls to the inbox database carried",
            self.store_members.clone(),
        );
        to.register(
            "store_call_failures",
            "Messages for which a call to the inbox database failed",
            self.store_failures.clone(),
        );
        to.register(
            "claims_lost",
            "Claims that another instance took over before the result was recorded",
            self.claims_lost.clone(),
        );
        to.register(
            "claims_taken_over",
            "Claims of messages that were tried before, by another instance or an earlier attempt",
            self.claims_taken_over.clone(),
        );
        to.register(
            "sweeps",
            "Sweeps of old rows; skipped while another instance is at it",
            self.sweeps.clone(),
        );
        to.register("swept_rows", "Old rows deleted, by table", self.swept_rows.clone());
        to.register(
            "inbox_rows",
            "Rows of the inbox, by table; may be the database's estimate",
            self.inbox_rows.clone(),
        );
        to.register_with_unit(
            "inbox_oldest_row",
            "Age of the oldest row, by table",
            Unit::Seconds,
            self.inbox_oldest_seconds.clone(),
        );
    }

    pub(super) fn create_process_wide(&self) {
        for call in StoreCall::iter() {
            let labels = [("call", <&str>::from(call).to_owned())];
            drop(self.store_seconds.get_or_create(&labels));
            drop(self.store_batch.get_or_create(&labels));
            drop(self.store_members.get_or_create(&labels));
            drop(self.store_failures.get_or_create(&labels));
        }
        for (signal, result) in
            [("traces", "sent"), ("traces", "failed"), ("metrics", "sent"), ("metrics", "failed")]
        {
            let labels = [("signal", signal.to_owned()), ("result", result.to_owned())];
            drop(self.exports.get_or_create(&labels));
        }
        for result in ["ran", "skipped", "failed"] {
            drop(self.sweeps.get_or_create(&[("result", result.to_owned())]));
        }
        for table in ["messages", "parked", "claims"] {
            drop(self.swept_rows.get_or_create(&[("table", table.to_owned())]));
        }
        self.build_info.get_or_create(&[("version", env!("CARGO_PKG_VERSION").to_owned())]).set(1);
    }
}
