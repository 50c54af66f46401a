//! The figures of one callback: whether it rests, and how much goes to it.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::families::{Counters, FloatGauges, Gauges, Labels};

/// The states of a callback, as the engine names them.
const STATES: [&str; 7] = ["paused", "starting", "gone", "health", "open", "probing", "closed"];
/// Those of them in which it begins to rest by itself.
const REASONS: [&str; 3] = ["open", "gone", "health"];

#[derive(Clone, Default)]
pub(super) struct CallbackFamilies {
    state: Gauges<2>,
    openings: Counters<2>,
    probes: Counters<2>,
    limit: Gauges<1>,
    rate: FloatGauges<1>,
    taken_back: Counters<1>,
}

impl CallbackFamilies {
    pub(super) fn register(&self, to: &mut Registry) {
        to.register(
            "callback_state",
            "1 for the state the callback is in, 0 for the others",
            self.state.clone(),
        );
        to.register(
            "callback_openings",
            "How often the callback began to rest, by reason",
            self.openings.clone(),
        );
        to.register(
            "callback_probes",
            "Probes of a callback that rested, by result",
            self.probes.clone(),
        );
        to.register(
            "callback_concurrency_limit",
            "Attempts at the callback that may be under way at once now",
            self.limit.clone(),
        );
        to.register(
            "callback_rate_limit",
            "Attempts at the callback that may begin in a second, where that is limited",
            self.rate.clone(),
        );
        to.register(
            "callback_attempts_taken_back",
            "Attempts that are not counted against their message, since they said nothing of it",
            self.taken_back.clone(),
        );
    }
}

/// The figures of one callback. All are created at zero.
pub struct CallbackMetrics {
    families: CallbackFamilies,
    own: Labels<1>,
    /// In the order of [`STATES`].
    states: [Gauge; STATES.len()],
    /// In the order of [`REASONS`].
    openings: [Counter; REASONS.len()],
    succeeded: Counter,
    failed: Counter,
    limit: Gauge,
    taken_back: Counter,
}

impl CallbackMetrics {
    pub(super) fn new(families: &CallbackFamilies, name: &str) -> Self {
        let own = [("subscription", name.to_owned())];
        let with = |label: &'static str, value: &str| {
            [("subscription", name.to_owned()), (label, value.to_owned())]
        };
        let probes = |result| families.probes.get_or_create_owned(&with("result", result));
        Self {
            states: STATES.map(|state| families.state.get_or_create_owned(&with("state", state))),
            openings: REASONS
                .map(|reason| families.openings.get_or_create_owned(&with("reason", reason))),
            succeeded: probes("succeeded"),
            failed: probes("failed"),
            limit: families.limit.get_or_create_owned(&own),
            taken_back: families.taken_back.get_or_create_owned(&own),
            families: families.clone(),
            own,
        }
    }

    /// The state it is in now.
    pub fn state(&self, state: &str) {
        for (known, gauge) in STATES.iter().zip(&self.states) {
            gauge.set(i64::from(*known == state));
        }
    }

    /// It began to rest by itself, for this state.
    pub fn opened(&self, reason: &str) {
        if let Some(place) = REASONS.iter().position(|known| *known == reason) {
            self.openings[place].inc();
        }
    }

    /// A probe ended.
    pub fn probe(&self, has_succeeded: bool) {
        let counter = if has_succeeded { &self.succeeded } else { &self.failed };
        counter.inc();
    }

    /// How many attempts may be under way now.
    pub fn limit(&self, limit: usize) {
        self.limit.set(i64::try_from(limit).unwrap_or(i64::MAX));
    }

    /// How many may begin in a second; `None`: no series, since there is no limit.
    pub fn rate(&self, per_second: Option<f64>) {
        match per_second {
            Some(rate) => drop(self.families.rate.get_or_create(&self.own).set(rate)),
            None => drop(self.families.rate.remove(&self.own)),
        }
    }

    /// An attempt is not counted against its message.
    pub fn attempt_taken_back(&self) {
        self.taken_back.inc();
    }
}

#[cfg(test)]
mod tests {
    use crate::telemetry::Metrics;

    #[test]
    fn the_state_is_one_of_them_and_a_rate_is_shown_where_there_is_one() {
        let metrics = Metrics::new();
        let orders = metrics.subscription("orders");
        let callback = orders.callback();
        let has = |line: &str| metrics.encode().lines().any(|found| found == line);
        assert!(has("inboxd_callback_openings_total{subscription=\"orders\",reason=\"health\"} 0"));
        callback.state("open");
        assert!(has("inboxd_callback_state{subscription=\"orders\",state=\"open\"} 1"));
        callback.state("closed");
        assert!(has("inboxd_callback_state{subscription=\"orders\",state=\"open\"} 0"));
        assert!(has("inboxd_callback_state{subscription=\"orders\",state=\"closed\"} 1"));
        callback.rate(Some(2.5));
        assert!(has("inboxd_callback_rate_limit{subscription=\"orders\"} 2.5"));
        callback.rate(None);
        assert!(!metrics.encode().contains("callback_rate_limit{"));
        callback.probe(false);
        assert!(has("inboxd_callback_probes_total{subscription=\"orders\",result=\"failed\"} 1"));
    }
}
