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

use inboxd_contract::{StoreStats, SweepReport};
use prometheus_client::encoding::{prometheus_text, text};
use prometheus_client::registry::Registry;
use strum::{EnumIter, IntoStaticStr};

use super::families::Families;
use super::subscription::SubscriptionMetrics;

/// The `Content-Type` of [`Metrics::encode`].
pub const METRICS_CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

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
    /// Parks messages.
    Park,
    /// Stores messages as they arrive.
    Arrive,
    /// Takes due messages.
    TakeDue,
    /// Puts parked messages off.
    Reschedule,
    /// Removes parked copies of what is processed.
    Unpark,
}

/// The process's metrics. Cheap to clone: all clones are one registry.
#[derive(Clone)]
pub struct Metrics(Arc<Inner>);

struct Inner {
    registry: Registry,
    /// What only exports show.
    conventions: Registry,
    families: Families,
}

impl Metrics {
    /// A registry of its own.
    pub fn new() -> Self {
        let families = Families::new();
        let mut registry = Registry::with_prefix("inboxd");
        families.register(&mut registry);
        families.create_process_wide();
        let mut conventions = Registry::default();
        families.register_conventions(&mut conventions);
        Self(Arc::new(Inner { registry, conventions, families }))
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
        families.store_batch.get_or_create(&labels).observe(members as f64);
        families.store_members.get_or_create(&labels).inc_by(members as u64);
        if failed > 0 {
            families.store_failures.get_or_create(&labels).inc_by(failed as u64);
        }
    }

    /// A claim was taken over before its result was recorded.
    pub fn claims_lost(&self) {
        self.0.families.claims_lost.inc();
    }

    /// A claim was taken of a message that was tried before.
    pub fn claim_taken_over(&self) {
        self.0.families.claims_taken_over.inc();
    }

    /// What the inbox holds; `None`: not known now, so nothing is shown.
    pub fn inbox(&self, stats: Option<&StoreStats>) {
        let (rows, oldest) = (&self.0.families.inbox_rows, &self.0.families.inbox_oldest_seconds);
        let known = stats.cloned().unwrap_or_default();
        for (table, count) in
            [("messages", known.messages), ("claims", known.claims), ("dead", known.dead)]
        {
            let labels = [("table", table.to_owned())];
            match count {
                Some(count) => {
                    rows.get_or_create(&labels).set(i64::try_from(count).unwrap_or(i64::MAX));
                }
                None => drop(rows.remove(&labels)),
            }
        }
        for (table, age) in [("messages", known.oldest_message), ("dead", known.oldest_dead)] {
            let labels = [("table", table.to_owned())];
            match age {
                Some(age) => {
                    oldest.get_or_create(&labels).set(age.as_secs_f64());
                }
                None => drop(oldest.remove(&labels)),
            }
        }
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

    /// The registry in the form that a client's `Accept` asks for, and its content type.
    pub fn encode_for(&self, accept: &str) -> (&'static str, String) {
        // Whoever names the format can read it, whatever it prefers.
        if accept.to_ascii_lowercase().contains("application/openmetrics-text") {
            return (METRICS_CONTENT_TYPE, self.encode());
        }
        (prometheus_text::CONTENT_TYPE, text_of(&self.0.registry, prometheus_text::encode))
    }

    /// The registry as OpenMetrics text, see [`METRICS_CONTENT_TYPE`].
    pub fn encode(&self) -> String {
        text_of(&self.0.registry, text::encode)
    }

    /// What the conventions of OpenTelemetry name, as OpenMetrics text (with their names, which
    /// have dots).
    pub(super) fn encode_conventions(&self) -> String {
        text_of(&self.0.conventions, text::encode)
    }

    pub(super) fn families(&self) -> &Families {
        &self.0.families
    }
}

fn text_of(
    registry: &Registry,
    encode: fn(&mut String, &Registry) -> Result<(), std::fmt::Error>,
) -> String {
    let mut text = String::new();
    encode(&mut text, registry)
        .unwrap_or_else(|error| unreachable!("writing to a string cannot fail: {error}"));
    text
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

    use strum::IntoEnumIterator as _;

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

    #[tokio::test]
    async fn a_lag_that_is_no_longer_known_is_not_shown() {
        let metrics = Metrics::new();
        let orders = metrics.subscription("orders");
        let mut told = status(SourcePhase::Ready, &["t/0", "t/1"]);
        orders.source_status(&told);
        told.partitions[0].lag = None;
        orders.source_status(&told);
        let lag = |partition: &str| {
            let series =
                format!("lag_records{{subscription=\"orders\",partition=\"{partition}\"}}");
            metrics.encode().contains(&series)
        };
        assert!(!lag("t/0") && lag("t/1"), "{}", metrics.encode());
        let paused = "partition_paused{subscription=\"orders\",partition=\"t/0\"} 1";
        assert!(metrics.encode().contains(paused), "the partition itself is still there");
    }

    #[test]
    fn what_is_held_counts_up_and_down_by_its_cause() {
        let metrics = Metrics::new();
        let (one, other) = (metrics.subscription("orders"), metrics.subscription("orders"));
        one.held(1);
        other.held(1);
        one.held(-1);
        one.unidentified_held(3);
        let text = metrics.encode();
        assert!(has(&text, "inboxd_held_deliveries{subscription=\"orders\"} 1"));
        assert!(has(&text, "inboxd_unidentified_held_deliveries{subscription=\"orders\"} 3"));
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
