//! The figures of one subscription, resolved once so that counting is one atomic addition, and
//! what follows its deliveries where something is exported.

use std::collections::HashSet;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

use inboxd_contract::{
    Envelope, InboxKey, Outcome, RetryReason, SourceCounts, SourcePhase, SourceStatus,
};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use strum::{EnumIter, IntoEnumIterator, IntoStaticStr};

use super::callback::CallbackMetrics;
use super::families::{Counters, Families, Labels};
use super::trace::{DeliveryTrace, SubscriptionTracer};

/// All values of `verdict`, those of later issues included where the contract has them.
const VERDICTS: [&str; 5] = ["accepted", "refused", "retry", "park", "drop"];

const PHASES: [(SourcePhase, &str); 5] = [
    (SourcePhase::Connecting, "connecting"),
    (SourcePhase::Ready, "ready"),
    (SourcePhase::Standby, "standby"),
    (SourcePhase::Failing, "failing"),
    (SourcePhase::Closed, "closed"),
];

/// What became of a parked message that was taken: label `result`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, EnumIter, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum ParkedResult {
    /// Forwarded, accepted, and its row committed.
    Processed,
    /// The application asked to drop it.
    Dropped,
    /// No route leads anywhere any more, and such messages are ignored.
    Unrouted,
    /// It was processed meanwhile.
    Duplicate,
    /// It was processed meanwhile with another content.
    IdConflict,
    /// Kept as a dead letter.
    DeadLettered,
    /// Due again later.
    Rescheduled,
    /// Given back: nothing may start.
    Released,
    /// The claim was taken over before the result was recorded.
    ClaimLost,
}

/// The figures of one subscription. Cheap to clone: all clones are the same figures.
#[derive(Clone)]
pub struct SubscriptionMetrics {
    own: Arc<Subscription>,
    tracer: Option<SubscriptionTracer>,
}

struct Subscription {
    name: String,
    families: Families,
    /// By the outcome's place in its enum.
    outcomes: Vec<Counter>,
    /// In the order of [`VERDICTS`].
    verdicts: [Counter; VERDICTS.len()],
    /// By the result's place in its enum.
    parked_settled: Vec<Counter>,
    letters_published: Counter,
    letters_waiting: Gauge,
    forward_seconds: Histogram,
    settled_seconds: Histogram,
    in_flight: Gauge,
    in_flight_bytes: Gauge,
    held: Gauge,
    unidentified_held: Gauge,
    lane_waiting: Gauge,
    id_conflicts: Counter,
    panics: Counter,
    paused: Gauge,
    callback: CallbackMetrics,
    reconnects: Counter,
    /// In the order of [`counts`].
    counts: [Counter; 6],
    /// The partitions of the last status: those that are gone lose their series.
    partitions: Mutex<HashSet<String>>,
}

/// The families of what [`SourceCounts`] counts, in the order of [`values`].
fn counts(families: &Families) -> [&Counters<1>; 6] {
    [
        &families.rebalances,
        &families.commit_errors,
        &families.foreign_commits,
        &families.started_over,
        &families.consumer_cancels,
        &families.source_releases,
    ]
}

fn values(counts: &SourceCounts) -> [u64; 6] {
    let SourceCounts {
        rebalances,
        commit_errors,
        foreign_commits,
        started_over,
        cancels,
        releases,
    } = *counts;
    [rebalances, commit_errors, foreign_commits, started_over, cancels, releases]
}

impl Subscription {
    fn new(families: Families, name: &str) -> Self {
        let own = [("subscription", name.to_owned())];
        let with = |label: &'static str, value: &str| {
            [("subscription", name.to_owned()), (label, value.to_owned())]
        };
        for reason in RetryReason::iter() {
            drop(families.retries.get_or_create(&with("reason", reason.into())));
        }
        for (_, phase) in PHASES {
            drop(families.source_phase.get_or_create(&with("phase", phase)));
        }
        Self {
            name: name.to_owned(),
            outcomes: Outcome::iter()
                .map(|outcome| {
                    families.deliveries.get_or_create_owned(&with("outcome", outcome.as_str()))
                })
                .collect(),
            verdicts: VERDICTS
                .map(|verdict| families.forwards.get_or_create_owned(&with("verdict", verdict))),
            parked_settled: ParkedResult::iter()
                .map(|result| {
                    let labels = with("result", result.into());
                    families.parked_settled.get_or_create_owned(&labels)
                })
                .collect(),
            letters_published: families.letters_published.get_or_create_owned(&own),
            letters_waiting: families.letters_waiting.get_or_create_owned(&own),
            forward_seconds: families.forward_seconds.get_or_create_owned(&own),
            settled_seconds: families.settled_seconds.get_or_create_owned(&own),
            in_flight: families.in_flight.get_or_create_owned(&own),
            in_flight_bytes: families.in_flight_bytes.get_or_create_owned(&own),
            held: families.held.get_or_create_owned(&own),
            unidentified_held: families.unidentified_held.get_or_create_owned(&own),
            lane_waiting: families.lane_waiting.get_or_create_owned(&own),
            id_conflicts: families.id_conflicts.get_or_create_owned(&own),
            panics: families.panics.get_or_create_owned(&own),
            paused: families.paused.get_or_create_owned(&own),
            callback: CallbackMetrics::new(&families.callback, name),
            reconnects: families.reconnects.get_or_create_owned(&own),
            counts: counts(&families).map(|family| family.get_or_create_owned(&own)),
            partitions: Mutex::default(),
            families,
        }
    }

    fn partition(&self, stream: &str) -> Labels<2> {
        [("subscription", self.name.clone()), ("partition", stream.to_owned())]
    }
}

impl SubscriptionMetrics {
    pub(super) fn new(families: Families, name: &str) -> Self {
        Self { own: Arc::new(Subscription::new(families, name)), tracer: None }
    }

    /// The same figures, with what follows each delivery where something is exported.
    pub fn traced(self, tracer: Option<SubscriptionTracer>) -> Self {
        Self { tracer, ..self }
    }

    /// Follows a delivery that was taken; `None` where nothing is exported.
    pub fn delivery(&self, envelope: &Envelope, key: &InboxKey) -> Option<DeliveryTrace> {
        self.tracer.as_ref().map(|tracer| tracer.delivery(envelope, key))
    }

    /// What became of one delivery.
    pub fn outcome(&self, outcome: Outcome) {
        self.own.outcomes[outcome as usize].inc();
    }

    /// What became of a parked message that was taken.
    pub fn parked_settled(&self, result: ParkedResult) {
        self.own.parked_settled[result as usize].inc();
    }

    /// The broker has confirmed and routed a dead letter.
    pub fn letter_published(&self) {
        self.own.letters_published.inc();
    }

    /// Dead letters that began (positive) or ceased (negative) to wait for their target.
    pub fn letters_waiting(&self, delta: i64) {
        self.own.letters_waiting.inc_by(delta);
    }

    /// What one attempt came to: [`inboxd_contract::Verdict::as_str`].
    pub fn verdict(&self, verdict: &'static str) {
        match VERDICTS.iter().position(|known| *known == verdict) {
            Some(place) => self.own.verdicts[place].inc(),
            None => {
                let labels =
                    [("subscription", self.own.name.clone()), ("verdict", verdict.to_owned())];
                self.own.families.forwards.get_or_create(&labels).inc()
            }
        };
    }

    /// Why an attempt is to be made again.
    pub fn retry(&self, reason: RetryReason) {
        let reason: &'static str = reason.into();
        let labels = [("subscription", self.own.name.clone()), ("reason", reason.to_owned())];
        self.own.families.retries.get_or_create(&labels).inc();
    }

    /// How long one attempt took.
    pub fn attempt_seconds(&self, seconds: f64) {
        self.own.forward_seconds.observe(seconds);
    }

    /// How long a delivery took from being taken to being settled.
    pub fn settled_seconds(&self, seconds: f64) {
        self.own.settled_seconds.observe(seconds);
    }

    /// Deliveries and their bytes taken (positive) or settled (negative).
    pub fn in_flight(&self, delta_count: i64, delta_bytes: i64) {
        self.own.in_flight.inc_by(delta_count);
        self.own.in_flight_bytes.inc_by(delta_bytes);
    }

    /// Deliveries that began (positive) or ceased (negative) to be tried beyond `hold_max`.
    pub fn held(&self, delta: i64) {
        self.own.held.inc_by(delta);
    }

    /// Deliveries that began (positive) or ceased (negative) to be held unsettled because no
    /// message of the subscription carried an id yet.
    pub fn unidentified_held(&self, delta: i64) {
        self.own.unidentified_held.inc_by(delta);
    }

    /// The same id came with other content.
    pub fn id_conflict(&self) {
        self.own.id_conflicts.inc();
    }

    /// Deliveries that began (positive) or ceased (negative) to wait for their lane.
    pub fn lane_waiting(&self, delta: i64) {
        self.own.lane_waiting.inc_by(delta);
    }

    /// An attempt panicked.
    pub fn panicked(&self) {
        self.own.panics.inc();
    }

    /// Those of its callback.
    pub fn callback(&self) -> &CallbackMetrics {
        &self.own.callback
    }

    /// Whether the subscription is paused until an operator acts.
    pub fn paused(&self, paused: bool) {
        self.own.paused.set(i64::from(paused));
    }

    /// The source's state as it tells it; partitions that are no longer in it disappear.
    pub fn source_status(&self, status: &SourceStatus) {
        let own = &self.own;
        for (phase, label) in PHASES {
            let labels = [("subscription", own.name.clone()), ("phase", label.to_owned())];
            own.families.source_phase.get_or_create(&labels).set(i64::from(phase == status.phase));
        }
        // The source counts from its own start: only ever upwards.
        own.reconnects.inner().fetch_max(status.reconnects, Ordering::Relaxed);
        for (counter, value) in own.counts.iter().zip(values(&status.counts)) {
            counter.inner().fetch_max(value, Ordering::Relaxed);
        }
        let labels = [("subscription", own.name.clone())];
        match status.queue_depth {
            Some(depth) => {
                let depth = i64::try_from(depth).unwrap_or(i64::MAX);
                own.families.queue_depth.get_or_create(&labels).set(depth);
            }
            None => drop(own.families.queue_depth.remove(&labels)),
        }
        self.partitions(status);
    }

    fn partitions(&self, status: &SourceStatus) {
        let own = &self.own;
        let mut known = own.partitions.lock().unwrap_or_else(PoisonError::into_inner);
        let now: HashSet<String> =
            status.partitions.iter().map(|report| report.stream.to_string()).collect();
        for gone in known.difference(&now) {
            let labels = own.partition(gone);
            own.families.partition_lag.remove(&labels);
            own.families.partition_oldest_seconds.remove(&labels);
            own.families.partition_paused.remove(&labels);
        }
        for report in &status.partitions {
            let labels = own.partition(&report.stream.0);
            match report.lag {
                Some(lag) => drop(own.families.partition_lag.get_or_create(&labels).set(lag)),
                None => drop(own.families.partition_lag.remove(&labels)),
            }
            let age = report.oldest_unsettled_at.map_or(0.0, |at| at.elapsed().as_secs_f64());
            own.families.partition_oldest_seconds.get_or_create(&labels).set(age);
            own.families.partition_paused.get_or_create(&labels).set(i64::from(report.paused));
        }
        *known = now;
    }
}
