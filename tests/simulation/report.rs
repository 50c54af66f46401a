//! What a run came to.

use std::fmt;
use std::ops::AddAssign;

/// Counts of one run or of many.
macro_rules! stats {
    ($($field:ident: $text:literal),* $(,)?) => {
        #[derive(Debug, Clone, Default)]
        pub struct Stats {
            $(pub $field: u64,)*
        }

        impl AddAssign for Stats {
            fn add_assign(&mut self, other: Self) {
                $(self.$field += other.$field;)*
            }
        }

        impl fmt::Display for Stats {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                $(writeln!(f, "| {} | {} |", $text, self.$field)?;)*
                Ok(())
            }
        }
    };
}

stats! {
    runs: "seeds",
    messages: "messages published, copies included",
    deliveries: "deliveries",
    posts: "POSTs",
    accepted: "accepted or dropped by the application",
    accepted_twice: "accepted once more, each with its reason",
    residual: "begun in the residual window of I3",
    excused_by_clock: "POSTs not judged, since the database's clock had jumped ahead",
    dead_letters: "dead letters",
    parked: "messages parked after attempts",
    arrived: "messages parked on arrival, or behind their lane",
    taken: "parked messages taken by workers",
    rescheduled: "parked messages put off",
    letters_published: "dead letters published to the broker",
    letters_failed: "publications of dead letters that failed",
    replayed: "dead letters replayed",
    probes: "probes of the application",
    releases: "deliveries given back",
    crashes: "crashes",
    drains: "graceful stops",
    cut: "deliveries cut by a grace period",
    freezes: "processes stopped and continued",
    takeovers: "claims taken over",
    busy: "claims found busy",
    severs: "connections cut",
    revokes: "partitions revoked",
    expels: "members expelled",
    answers_lost: "answers of the application lost",
    store_failures: "store calls failed before the commit",
    store_answers_lost: "store calls failed after the commit",
    locks: "locks of others",
    panics: "panics of an attempt",
    virtual_seconds: "seconds of paused time",
}

/// How a run ended.
pub struct Report {
    pub violation: Option<String>,
    pub trace: Vec<String>,
    pub stats: Stats,
}
