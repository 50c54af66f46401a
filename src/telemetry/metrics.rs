//! The metrics that operators read, in the OpenMetrics text format.
//!
//! Purpose: one registry for the process. What is counted per delivery is resolved
//! once per subscription ([`SubscriptionMetrics`]), so that counting is one atomic
//! addition.
//!
//! Invariants: every label value comes from a closed set, from the configuration (subscription
//! names) or from the broker's assignment (partitions, removed when they are
//! assigned elsewhere); nothing that a publisher sends becomes a label. Every
//! outcome, verdict and phase exists at zero from the start, so that a rate over the first
//! event is right. Units are base units: seconds, bytes.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use inboxd_contract::SweepReport;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use strum::{EnumIter, IntoEnumIterator, IntoStaticStr};

use super::subscription::SubscriptionMetrics;

/// The `Content-Type` of [`Metrics::encode`].
pub const METRICS_CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

pub(super) type Labels<const N: usize> = [(&'static str, String); N];
type Counters<const N: usize> = Family<Labels<N>, Counter>;
type Gauges<const N: usize> = Family<Labels<N>, Gauge>;
type FloatGauges<const N: usize> = Family<Labels<N>, Gauge<f64, AtomicU64>>;
type Histograms<const N: usize> = Family<Labels<N>, Histogram, Buckets>;

/// Bucket bounds of a histogram family, in seconds.
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

/// The kinds of calls to the store, label `call`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, EnumIter, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum StoreCall {
    /// Claims and looks.
    Claim,
    /// Renews claims.
    Renew,
    /// Counts further attempts.
    CountAttempts,
    /// Records processed messages.
    Complete,
    /// Records dead letters.
    DeadLetter,
    /// Gives claims up.
    Release,
    /// Looks without claiming.
    Look,
}

/// The process's metrics. Cheap to clone: all clones are one registry.
#[derive(Clone)]
pub struct Metrics(Arc<Inner>);

struct Inner {
    registry: Registry,
    families: Families,
}

#[derive(Clone)]
pub(super) struct Families {
    pub(super) deliveries: Counters<2>,
    pub(super) forwards: Counters<2>,
    pub(super) retries: Counters<2>,
    pub(super) forward_seconds: Histograms<1>,
    pub(super) in_flight: Gauges<1>,
    pub(super) in_flight_bytes: Gauges<1>,
    pub(super) held: Gauges<1>,
    pub(super) lane_waiting: Gauges<1>,
    pub(super) id_conflicts: Counters<1>,
    pub(super) panics: Counters<1>,
    pub(super) paused: Gauges<1>,
    pub(super) source_phase: Gauges<2>,
    pub(super) reconnects: Counters<1>,
    pub(super) partition_lag: Gauges<2>,
    pub(super) partition_oldest_seconds: FloatGauges<2>,
    pub(super) partition_paused: Gauges<2>,
    store_seconds: Histograms<1>,
    store_members: Counters<1>,
    store_failures: Counters<1>,
    claims_lost: Counter,
    sweeps: Counters<1>,
    swept_rows: Counters<1>,
}

impl Families {
    fn new() -> Self {
        Self {
            deliveries: Family::default(),
            forwards: Family::default(),
            retries: Family::default(),
            forward_seconds: Family::new_with_constructor(FORWARD_BUCKETS),
            in_flight: Family::default(),
            in_flight_bytes: Family::default(),
            held: Family::default(),
            lane_waiting: Family::default(),
            id_conflicts: Family::default(),
            panics: Family::default(),
            paused: Family::default(),
            source_phase: Family::default(),
            reconnects: Family::default(),
            partition_lag: Family::default(),
            partition_oldest_seconds: Family::default(),
            partition_paused: Family::default(),
            store_seconds: Family::new_with_constructor(STORE_BUCKETS),
            store_members: Family::default(),
            store_failures: Family::default(),
            claims_lost: Counter::default(),
            sweeps: Family::default(),
            swept_rows: Family::default(),
        }
    }

    fn register(&self, registry: &mut Registry) {
        self.register_deliveries(registry);
        self.register_source(registry);
        self.register_store(registry);
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
            "Deliveries without a message id that are held unsettled until the first id is seen",
            self.held.clone(),
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
    }

    fn register_store(&self, to: &mut Registry) {
        to.register_with_unit(
            "store_call_duration",
            "Time of one call to the inbox database",
            Unit::Seconds,
            self.store_seconds.clone(),
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
            "sweeps",
            "Sweeps of old rows; skipped while another instance is at it",
            self.sweeps.clone(),
        );
        to.register("swept_rows", "Old rows deleted, by table", self.swept_rows.clone());
    }

    fn create_process_wide(&self) {
        for call in StoreCall::iter() {
            let labels = [("call", <&str>::from(call).to_owned())];
            drop(self.store_seconds.get_or_create(&labels));
            drop(self.store_members.get_or_create(&labels));
            drop(self.store_failures.get_or_create(&labels));
        }
        for result in ["ran", "skipped", "failed"] {
            drop(self.sweeps.get_or_create(&[("result", result.to_owned())]));
        }
        for table in ["messages", "parked", "claims"] {
            drop(self.swept_rows.get_or_create(&[("table", table.to_owned())]));
        }
    }
}

impl Metrics {
    /// A registry of its own.
    pub fn new() -> Self {
        let families = Families::new();
        let mut registry = Registry::with_prefix("inboxd");
        families.register(&mut registry);
        families.create_process_wide();
        Self(Arc::new(Inner { registry, families }))
    }

    /// The figures of one subscription, all of its labels created at zero.
    pub fn subscription(&self, name: &str) -> SubscriptionMetrics {
        SubscriptionMetrics::new(self.0.families.clone(), name)
    }

    /// One call to the store (a [`StoreCall`] or its name): what it carried, how long it
    /// took, and for how many of its members it failed.
    pub fn store_call(
        &self,
        call: impl Into<&'static str>,
        members: usize,
        seconds: f64,
        failed: usize,
    ) {
        let families = &self.0.families;
        let labels = [("call", call.into().to_owned())];
        families.store_seconds.get_or_create(&labels).observe(seconds);
        families.store_members.get_or_create(&labels).inc_by(members as u64);
        if failed > 0 {
            families.store_failures.get_or_create(&labels).inc_by(failed as u64);
        }
    }

    /// A claim was taken over before its result was recorded.
    pub fn claims_lost(&self) {
        self.0.families.claims_lost.inc();
    }

    /// A sweep answered.
    pub fn sweep(&self, report: &SweepReport) {
        let families = &self.0.families;
        let result = if report.ran { "ran" } else { "skipped" };
        families.sweeps.get_or_create(&[("result", result.to_owned())]).inc();
        for (table, rows) in
            [("messages", report.messages), ("parked", report.dead), ("claims", report.claims)]
        {
            families.swept_rows.get_or_create(&[("table", table.to_owned())]).inc_by(rows);
        }
    }

    /// A sweep failed.
    pub fn sweep_failed(&self) {
        self.0.families.sweeps.get_or_create(&[("result", "failed".to_owned())]).inc();
    }

    /// The whole registry as OpenMetrics text, see [`METRICS_CONTENT_TYPE`].
    pub fn encode(&self) -> String {
        let mut text = String::new();
        encode(&mut text, &self.0.registry)
            .unwrap_or_else(|error| unreachable!("writing to a string cannot fail: {error}"));
        text
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use inboxd_contract::{Outcome, PartitionReport, SourcePhase, SourceStatus, StreamId};

    use super::*;

    fn has(text: &str, line: &str) -> bool {
        text.lines().any(|found| found == line)
    }

    #[test]
    fn every_outcome_exists_at_zero_from_the_start() {
        let metrics = Metrics::new();
        let _orders = metrics.subscription("orders");
        let text = metrics.encode();
        for outcome in Outcome::iter() {
            let line = format!(
                "inboxd_deliveries_total{{subscription=\"orders\",outcome=\"{}\"}} 0",
                outcome.as_str()
            );
            assert!(has(&text, &line), "{line} is missing in\n{text}");
        }
        assert!(has(&text, "inboxd_forwards_total{subscription=\"orders\",verdict=\"retry\"} 0"));
        assert!(text.contains("# HELP inboxd_deliveries "));
        assert!(text.ends_with("# EOF\n"));
    }

    #[test]
    fn an_outcome_counts_under_its_own_name() {
        let metrics = Metrics::new();
        let orders = metrics.subscription("orders");
        for outcome in Outcome::iter() {
            orders.outcome(outcome);
        }
        orders.outcome(Outcome::ClaimLost);
        let text = metrics.encode();
        assert!(has(
            &text,
            "inboxd_deliveries_total{subscription=\"orders\",outcome=\"claim_lost\"} 2"
        ));
        assert!(has(
            &text,
            "inboxd_deliveries_total{subscription=\"orders\",outcome=\"duplicate\"} 1"
        ));
    }

    #[test]
    fn clones_and_second_handles_count_together() {
        let metrics = Metrics::new();
        metrics.subscription("orders").verdict("accepted");
        metrics.clone().subscription("orders").verdict("accepted");
        assert!(has(
            &metrics.encode(),
            "inboxd_forwards_total{subscription=\"orders\",verdict=\"accepted\"} 2"
        ));
    }

    #[test]
    fn units_stand_at_the_end_of_names() {
        let metrics = Metrics::new();
        let orders = metrics.subscription("orders");
        orders.in_flight(2, 2048);
        orders.attempt_seconds(0.02);
        metrics.store_call(StoreCall::Claim, 16, 0.004, 1);
        let text = metrics.encode();
        assert!(has(&text, "inboxd_in_flight_bytes{subscription=\"orders\"} 2048"));
        assert!(has(&text, "inboxd_in_flight_deliveries{subscription=\"orders\"} 2"));
        assert!(has(&text, "inboxd_forward_duration_seconds_count{subscription=\"orders\"} 1"));
        assert!(has(&text, "inboxd_store_call_members_total{call=\"claim\"} 16"));
        assert!(has(&text, "inboxd_store_call_failures_total{call=\"claim\"} 1"));
        assert!(has(&text, "inboxd_store_call_failures_total{call=\"dead_letter\"} 0"));
    }

    fn status(phase: SourcePhase, partitions: &[&str]) -> SourceStatus {
        let mut status = SourceStatus::connecting();
        status.phase = phase;
        status.reconnects = 3;
        status.partitions = partitions
            .iter()
            .map(|name| PartitionReport {
                stream: StreamId(Arc::from(*name)),
                lag: Some(7),
                oldest_unsettled_at: None,
                paused: true,
            })
            .collect();
        status
    }

    #[tokio::test(start_paused = true)]
    async fn a_source_s_status_is_followed_and_lost_partitions_disappear() {
        let metrics = Metrics::new();
        let orders = metrics.subscription("orders");
        let mut first = status(SourcePhase::Ready, &["t/0", "t/1"]);
        first.partitions[0].oldest_unsettled_at = Some(tokio::time::Instant::now());
        tokio::time::advance(Duration::from_secs(5)).await;
        orders.source_status(&first);
        let text = metrics.encode();
        assert!(has(&text, "inboxd_source_phase{subscription=\"orders\",phase=\"ready\"} 1"));
        assert!(has(&text, "inboxd_source_phase{subscription=\"orders\",phase=\"connecting\"} 0"));
        assert!(has(&text, "inboxd_source_reconnects_total{subscription=\"orders\"} 3"));
        assert!(has(
            &text,
            "inboxd_partition_oldest_unsettled_seconds{subscription=\"orders\",partition=\"t/0\"} 5.0"
        ));
        assert!(has(
            &text,
            "inboxd_partition_lag_records{subscription=\"orders\",partition=\"t/1\"} 7"
        ));

        orders.source_status(&status(SourcePhase::Ready, &["t/1"]));
        assert!(!metrics.encode().contains("t/0"));
    }

    #[test]
    fn sweeps_count_rows_by_table() {
        let metrics = Metrics::new();
        metrics.sweep(&SweepReport { ran: true, messages: 5, dead: 1, claims: 2 });
        metrics.sweep(&SweepReport::default());
        let text = metrics.encode();
        assert!(has(&text, "inboxd_swept_rows_total{table=\"messages\"} 5"));
        assert!(has(&text, "inboxd_sweeps_total{result=\"ran\"} 1"));
        assert!(has(&text, "inboxd_sweeps_total{result=\"skipped\"} 1"));
    }
}
