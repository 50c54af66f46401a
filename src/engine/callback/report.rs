//! What is shown of a callback: to the admin API, in metrics, in the log.

use std::time::Duration;

use strum::{EnumIter, IntoStaticStr};

/// Where a callback stands. In order of precedence: what is paused is not shown as open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EnumIter, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum CallbackState {
    /// An operator paused it: nothing is taken and nothing is sent until it is resumed.
    Paused,
    /// It has not been reached yet: nothing is taken before.
    Starting,
    /// Every path answers 410: nothing is taken; now and then one message asks again.
    Gone,
    /// Its health URL fails: nothing is taken until it answers well.
    Health,
    /// The breaker is open after failures in a row: nothing is taken until a probe succeeds.
    Open,
    /// The breaker lets one message through, whose answer decides.
    Probing,
    /// All is well: messages flow.
    Closed,
}

impl CallbackState {
    /// The word for it: in metrics, in the log and in the API.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// How a callback stands.
#[derive(Debug, Clone, PartialEq)]
pub struct CallbackReport {
    /// Its state.
    pub state: CallbackState,
    /// For how long.
    pub since: Duration,
    /// What the application or the network said last, or who paused it; bounded. Empty where all
    /// is well.
    pub why: String,
    /// Concurrent POSTs that are allowed now: below `concurrency` while it ramps up or the
    /// application does not cope.
    pub limit: usize,
    /// Concurrent POSTs that are allowed at most.
    pub concurrency: usize,
    /// POSTs begun in a second at most; `None`: as many as there are.
    pub rate: Option<f64>,
    /// POSTs under way.
    pub in_use: usize,
    /// Attempts that wait for their turn.
    pub waiting: usize,
    /// Until it is asked again; zero while it is being asked, `None` where nothing is to be asked.
    pub next_probe_in: Option<Duration>,
}
