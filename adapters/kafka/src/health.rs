//! Whether the source may call itself ready, and why not.
//!
//! Purpose: turns librdkafka's errors and statistics into a phase. Ready is: some broker
//! answers, and the group has us as a member (with or without partitions).
//!
//! What it does not do: it heals nothing; librdkafka reconnects and rejoins by itself.

use std::collections::BTreeMap;
use std::time::Duration;

use inboxd_contract::{ErrorCode, SourcePhase};
use rdkafka::error::RDKafkaErrorCode;
use tokio::time::Instant;

/// A rebalance of a member is no loss of readiness for this long.
const REJOIN_MAX: Duration = Duration::from_secs(15);
/// An error that is not repeated is over.
const TROUBLE_LASTS: Duration = Duration::from_secs(45);

/// See the module.
pub(crate) struct Health {
    group: String,
    alive: bool,
    /// Alive at any time before.
    was_alive: bool,
    joined: bool,
    /// Since when the group's state is not steady, while joined.
    unsteady_since: Option<Instant>,
    /// What an operator must mend.
    trouble: Option<(String, Instant)>,
    /// What that is.
    trouble_code: ErrorCode,
    /// The last word of a failed connection.
    last_error: Option<String>,
    reconnects: u64,
    closed: bool,
    /// Topics whose records wait for an identity, and why.
    withheld: BTreeMap<String, String>,
    /// Topics that are named and not there, or not for us, and why.
    missing: BTreeMap<String, String>,
    /// All topics that are named are among those, and no pattern could match another.
    nothing_there: bool,
}

/// What an error means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Trouble {
    /// No broker answers.
    Down,
    /// Mended by an operator only (rights, credentials, certificates).
    Operator,
    /// A connection failed; others may stand.
    Connection,
    /// Normal, or mended by librdkafka.
    Passing,
}

impl Trouble {
    pub(crate) fn of(code: RDKafkaErrorCode) -> Self {
        use RDKafkaErrorCode as Code;
        match code {
            Code::AllBrokersDown => Self::Down,
            Code::Authentication
            | Code::SaslAuthenticationFailed
            | Code::UnsupportedSASLMechanism
            | Code::SSL
            | Code::TopicAuthorizationFailed
            | Code::GroupAuthorizationFailed
            | Code::ClusterAuthorizationFailed => Self::Operator,
            _ if is_unreadable(code) => Self::Operator,
            Code::BrokerTransportFailure | Code::Resolve | Code::OperationTimedOut => {
                Self::Connection
            }
            _ => Self::Passing,
        }
    }
}

fn operators_code(code: RDKafkaErrorCode) -> ErrorCode {
    use RDKafkaErrorCode as Code;
    match code {
        Code::SSL => ErrorCode::SourceTls,
        Code::Authentication | Code::SaslAuthenticationFailed | Code::UnsupportedSASLMechanism => {
            ErrorCode::SourceLoginRefused
        }
        _ if is_unreadable(code) => ErrorCode::FrameUndecodable,
        _ => ErrorCode::SourceForbidden,
    }
}

/// Records came that librdkafka cannot read; it goes on behind them.
pub(crate) fn is_unreadable(code: RDKafkaErrorCode) -> bool {
    use RDKafkaErrorCode as Code;
    matches!(code, Code::BadMessage | Code::BadCompression | Code::InvalidMessage)
}

impl Health {
    pub(crate) fn new(group: &str) -> Self {
        Self {
            group: group.to_owned(),
            alive: false,
            was_alive: false,
            joined: false,
            unsteady_since: None,
            trouble: None,
            trouble_code: ErrorCode::SourceForbidden,
            last_error: None,
            reconnects: 0,
            closed: false,
            withheld: BTreeMap::new(),
            missing: BTreeMap::new(),
            nothing_there: false,
        }
    }

    /// librdkafka reported an error. True if an operator has not been told of it yet.
    pub(crate) fn error(&mut self, code: RDKafkaErrorCode, words: &str, now: Instant) -> bool {
        let words = match is_unreadable(code) {
            false => format!("{words} ({code})"),
            true => format!(
                "records cannot be read, and may be passed over: {words} ({code}); look at the \
                 topic's log at that offset"
            ),
        };
        let mut news = true;
        match Trouble::of(code) {
            Trouble::Down => {
                self.alive = false;
                self.last_error.get_or_insert(words);
            }
            Trouble::Operator => {
                news = self.trouble.as_ref().is_none_or(|(before, _)| *before != words);
                self.trouble = Some((words, now));
                self.trouble_code = operators_code(code);
            }
            Trouble::Connection => self.last_error = Some(words),
            Trouble::Passing => {}
        }
        news
    }

    /// Statistics came.
    pub(crate) fn observe(&mut self, alive: bool, steady: bool, now: Instant) {
        if alive && !self.alive {
            self.reconnects += u64::from(self.was_alive);
            self.was_alive = true;
            self.last_error = None;
        }
        self.alive = alive;
        if steady {
            self.joined = true;
            self.unsteady_since = None;
        } else if self.joined {
            let since = *self.unsteady_since.get_or_insert(now);
            self.joined = now - since < REJOIN_MAX;
        }
        let over = |at: Instant| now - at > TROUBLE_LASTS;
        if self.trouble.as_ref().is_some_and(|(_, at)| over(*at)) {
            self.trouble = None;
        }
    }

    /// The group has given us an assignment.
    pub(crate) fn assigned(&mut self) {
        self.joined = true;
        self.unsteady_since = None;
        self.trouble = None;
    }

    /// We are not a member any more.
    pub(crate) fn expelled(&mut self) {
        self.joined = false;
    }

    pub(crate) fn close(&mut self) {
        self.closed = true;
    }

    pub(crate) fn reconnects(&self) -> u64 {
        self.reconnects
    }

    /// What the phase's reason is for an operator. A first connection that is under way is
    /// nothing to speak of.
    pub(crate) fn code(&self) -> Option<ErrorCode> {
        match (&self.trouble, self.closed) {
            (_, true) => None,
            (Some(_), _) => Some(self.trouble_code),
            (None, _) => {
                let lost = !self.alive && (self.was_alive || self.last_error.is_some());
                let gone = (self.alive && self.nothing_there).then_some(ErrorCode::TopicMissing);
                lost.then_some(ErrorCode::SourceUnreachable).or(gone)
            }
        }
    }

    /// The phase and its reason.
    pub(crate) fn phase(&self, failure: Option<&str>) -> (SourcePhase, String) {
        if let Some(failure) = failure {
            return (SourcePhase::Failing, failure.to_owned());
        }
        if self.closed {
            return (SourcePhase::Closed, "closed".into());
        }
        if let Some((trouble, _)) = &self.trouble {
            let words = match self.trouble_code {
                ErrorCode::FrameUndecodable => trouble.clone(),
                _ => format!("Kafka refuses: {trouble}"),
            };
            return (SourcePhase::Failing, words);
        }
        if !self.alive {
            let silence = match self.was_alive {
                true => "nothing was heard from one for a while",
                false => "nothing was heard from one yet",
            };
            let words = self.last_error.as_deref().unwrap_or(silence);
            return (SourcePhase::Connecting, format!("no Kafka broker answers: {words}"));
        }
        let withheld = self.withheld.iter().map(|(topic, why)| {
            format!("records of topic {topic} wait: its positions cannot be identified ({why})")
        });
        let missing = self.missing.iter().map(|(topic, why)| {
            format!("topic {topic} is not consumed: {why}; check its name and the rights to it")
        });
        let words: Vec<_> = missing.chain(withheld).collect();
        let words = words.join("; ");
        if self.nothing_there {
            // The group is not even joined then.
            return (SourcePhase::Failing, format!("group {}: {words}", self.group));
        }
        if !self.joined {
            let group = &self.group;
            return (SourcePhase::Connecting, format!("not a member of the group {group} yet"));
        }
        (SourcePhase::Ready, words)
    }

    /// Of which topics the records wait for an identity, and why; replaces what was told before.
    pub(crate) fn withheld(&mut self, withheld: BTreeMap<String, String>) {
        self.withheld = withheld;
    }

    /// The group's name.
    pub(crate) fn group(&self) -> &str {
        &self.group
    }

    /// Which named topics are not there, and why; replaces what was told before. Answers those
    /// that are new.
    pub(crate) fn missing(
        &mut self,
        missing: BTreeMap<String, String>,
        nothing_there: bool,
    ) -> Vec<(String, String)> {
        let before = std::mem::replace(&mut self.missing, missing);
        self.nothing_there = nothing_there;
        let new = self.missing.iter().filter(|(topic, _)| !before.contains_key(*topic));
        new.map(|(topic, why)| (topic.clone(), why.clone())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ready_means_reachable_and_a_member() {
        let now = Instant::now();
        let mut health = Health::new("g");
        assert_eq!(health.phase(None).0, SourcePhase::Connecting);
        assert_eq!(health.code(), None, "a first connection may take a moment");
        health.observe(true, false, now);
        assert!(health.phase(None).1.contains("group g"));
        health.observe(true, true, now);
        assert_eq!(health.phase(None), (SourcePhase::Ready, String::new()));
        health.error(RDKafkaErrorCode::AllBrokersDown, "1/1 brokers are down", now);
        assert_eq!(health.phase(None).0, SourcePhase::Connecting);
        assert!(health.phase(None).1.contains("1/1"));
        assert_eq!(health.code(), Some(ErrorCode::SourceUnreachable));
        health.observe(true, true, now);
        assert_eq!(health.phase(None).0, SourcePhase::Ready);
        assert_eq!(health.reconnects(), 1);
    }

    /// Not ready for a while: whoever watches must have the time to see it.
    #[test]
    fn records_that_cannot_be_read_are_said() {
        let now = Instant::now();
        let mut health = Health::new("g");
        health.observe(true, true, now);
        health.error(RDKafkaErrorCode::BadMessage, "MessageSet at offset 5", now);
        let (phase, reason) = health.phase(None);
        assert_eq!(phase, SourcePhase::Failing);
        assert!(reason.contains("offset 5") && reason.contains("cannot be read"), "{reason}");
        health.observe(true, true, now + TROUBLE_LASTS * 2);
        assert_eq!(health.phase(None), (SourcePhase::Ready, String::new()));
    }

    #[test]
    fn a_missing_topic_is_said_once_and_is_no_failure_while_others_flow() {
        let now = Instant::now();
        let mut health = Health::new("g");
        health.observe(true, true, now);
        let missing = || [("orders".to_owned(), "it does not exist".to_owned())].into();
        assert_eq!(health.missing(missing(), false).len(), 1);
        assert_eq!(health.missing(missing(), false).len(), 0, "told before");
        let (phase, reason) = health.phase(None);
        assert_eq!(phase, SourcePhase::Ready);
        assert!(reason.contains("orders"), "{reason}");
        assert_eq!(health.code(), None, "nothing keeps it from being ready");
        health.missing(missing(), true);
        assert_eq!(health.phase(None).0, SourcePhase::Failing, "nothing can be consumed");
        assert_eq!(health.code(), Some(ErrorCode::TopicMissing));
        health.missing(BTreeMap::new(), false);
        assert_eq!(health.phase(None), (SourcePhase::Ready, String::new()));
    }

    #[test]
    fn a_rebalance_costs_no_readiness_unless_it_does_not_end() {
        let now = Instant::now();
        let mut health = Health::new("g");
        health.observe(true, true, now);
        health.observe(true, false, now);
        assert_eq!(health.phase(None).0, SourcePhase::Ready);
        health.observe(true, false, now + REJOIN_MAX);
        assert_eq!(health.phase(None).0, SourcePhase::Connecting);
    }

    #[test]
    fn what_an_operator_must_mend_is_said_until_it_is_over() {
        let now = Instant::now();
        let mut health = Health::new("g");
        health.error(RDKafkaErrorCode::TopicAuthorizationFailed, "topic t", now);
        let (phase, reason) = health.phase(None);
        assert_eq!(phase, SourcePhase::Failing);
        assert_eq!(health.code(), Some(ErrorCode::SourceForbidden));
        assert!(reason.contains("topic t"), "{reason}");
        health.assigned();
        health.observe(true, true, now);
        assert_eq!(health.phase(None).0, SourcePhase::Ready);
    }
}
