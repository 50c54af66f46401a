//! What is read from librdkafka's statistics, which it gives each second: which brokers
//! answer, where the group stands, and where each partition ends.

use std::collections::HashMap;
use std::time::Duration;

use serde::Deserialize;

/// One report.
#[derive(Debug, Deserialize)]
pub(crate) struct Statistics {
    #[serde(default)]
    brokers: HashMap<String, Broker>,
    #[serde(default)]
    pub(crate) topics: HashMap<String, Topic>,
    cgrp: Option<Group>,
}

#[derive(Debug, Deserialize)]
struct Broker {
    state: String,
    /// Microseconds since something was received; negative: never.
    #[serde(default)]
    rxidle: i64,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Topic {
    #[serde(default)]
    pub(crate) partitions: HashMap<String, Partition>,
}

/// Offsets of one partition; negative: not known.
#[derive(Debug, Clone, Copy, Deserialize)]
pub(crate) struct Partition {
    /// Internal unassigned partition: -1.
    pub(crate) partition: i32,
    /// One past the last record or marker that was polled.
    app_offset: i64,
    committed_offset: i64,
    hi_offset: i64,
    ls_offset: i64,
}

#[derive(Debug, Deserialize)]
struct Group {
    state: String,
    join_state: String,
}

impl Statistics {
    /// Whether some broker has said something lately.
    pub(crate) fn alive(&self, silence_max: Duration) -> bool {
        let most = i64::try_from(silence_max.as_micros()).unwrap_or(i64::MAX);
        self.brokers
            .values()
            .any(|broker| broker.state == "UP" && (0..=most).contains(&broker.rxidle))
    }

    /// Whether we are a member of the group and no rebalance is under way.
    pub(crate) fn steady(&self) -> bool {
        let group = self.cgrp.as_ref();
        group.is_some_and(|group| group.state == "up" && group.join_state == "steady")
    }
}

impl Partition {
    /// Where the log ends for a reader: behind the last committed transaction, or behind the
    /// last record.
    pub(crate) fn end(&self, committed_only: bool) -> Option<i64> {
        let end = if committed_only { self.ls_offset } else { self.hi_offset };
        (end >= 0).then_some(end)
    }

    /// One past the last record or transaction marker that was polled in this assignment.
    pub(crate) fn polled(&self) -> Option<i64> {
        (self.app_offset >= 0).then_some(self.app_offset)
    }

    /// What the group had committed.
    pub(crate) fn committed(&self) -> Option<i64> {
        (self.committed_offset >= 0).then_some(self.committed_offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPORT: &str = r#"{"name":"c","brokers":{
        "a/1":{"name":"a/1","state":"UP","rxidle":2000000,"toppars":{}},
        "b/2":{"name":"b/2","state":"TRY_CONNECT","rxidle":-1}},
      "topics":{"t":{"topic":"t","partitions":{"0":{"partition":0,"fetchq_cnt":0,
        "next_offset":7,"app_offset":5,"committed_offset":-1001,"hi_offset":9,
        "ls_offset":7,"lo_offset":0}}}},
      "cgrp":{"state":"up","join_state":"steady"}}"#;

    #[test]
    fn a_report_is_read() {
        let report: Statistics = serde_json::from_str(REPORT).expect("a report");
        assert!(report.steady());
        assert!(report.alive(Duration::from_secs(3)));
        assert!(!report.alive(Duration::from_secs(1)), "silent for two seconds");
        let partition = report.topics["t"].partitions["0"];
        assert_eq!(partition.end(true), Some(7));
        assert_eq!(partition.end(false), Some(9));
        assert_eq!(partition.polled(), Some(5));
        assert_eq!(partition.committed(), None);
    }
}
