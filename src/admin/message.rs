//! What is known of one message, as it is answered and shown.
//!
//! Invariants: everything of a message here is text that a publisher or an application may have
//! chosen; it is shown through [`shown`], which leaves no control character to a terminal.

use std::time::{Duration, SystemTime};

use inboxd_contract::{
    ConsumerId, Envelope, ExplainedClaim, ExplainedCopy, ExplainedMessage, Explanation, MessageId,
    OwnerId, ParkedState, decode_percent,
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::letters::RowState;
use super::words;
use crate::engine::{Flight, Stage};
use crate::telemetry::TraceIds;

/// The answer about one message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MessageReport {
    /// The id as it was asked for.
    pub asked: String,
    /// How long processed messages are known.
    pub retention_ms: u64,
    /// What each consumer id knows, in the order of subscriptions; twice where the id can be read
    /// in two ways and both are known.
    pub consumers: Vec<ConsumerReport>,
}

impl MessageReport {
    /// Something is known of it.
    pub fn is_known(&self) -> bool {
        self.consumers.iter().any(|consumer| consumer.state != State::Unknown)
    }
}

/// How the id that was asked for was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ReadAs {
    /// As the publisher set it.
    Given,
    /// Percent-decoded, as the application has it in `Inbox-Message-Id`.
    Decoded,
    /// As the inbox stores it (`sha256:…`, `generated:…`).
    Stored,
    /// Percent-decoded, then as the inbox stores it.
    DecodedStored,
}

/// Where a message stands, in one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// Its row exists.
    Processed,
    /// This process is at it.
    InFlight,
    /// A process has a claim on it.
    Claimed,
    /// It lies in the inbox, and a worker forwards it at its time.
    Parked,
    /// It is kept as a dead letter.
    DeadLetter,
    /// It was tried and given back; nobody is at it.
    Released,
    /// Nothing is known.
    Unknown,
}

/// What one consumer id knows of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ConsumerReport {
    /// Which.
    pub consumer_id: String,
    /// The subscriptions that have this consumer id.
    pub subscriptions: Vec<String>,
    /// The id in the form of the inbox.
    pub message_id: String,
    /// How it was read.
    pub read_as: ReadAs,
    /// Where it stands.
    pub state: State,
    /// What is known, in words: one sentence each.
    pub words: Vec<String>,
    /// Its row.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub processed: Option<Processed>,
    /// Its claim, held or given up.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub claim: Option<Claim>,
    /// The newest of its parked copies and dead letters, oldest first; 20 at most.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub copies: Vec<Copy>,
    /// How many older ones it has beside them.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub older_copies: u64,
    /// Its deliveries under way in the process that answers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub in_flight: Vec<InFlight>,
}

/// The row of a processed message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Processed {
    /// How long ago, by the database's clock.
    pub ago_ms: u64,
    /// When, by the clock of who answers; RFC 3339 in UTC.
    pub at: String,
    /// Tells contents of one id apart.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fingerprint: Option<String>,
    /// Who produced it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub producer: Option<String>,
    /// Its type.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message_type: Option<String>,
    /// Correlation id.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub correlation_id: Option<String>,
    /// Causation id.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub causation_id: Option<String>,
}

/// A claim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Claim {
    /// Host, process id and life of who took it.
    pub owner: String,
    /// It is the process that answers.
    pub is_own: bool,
    /// Attempts so far.
    pub attempts: u32,
    /// Until it runs out; not there where it has run out or was given up.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expires_in_ms: Option<u64>,
}

/// A copy that lies in the inbox: due, or a dead letter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Copy {
    /// What it is.
    pub state: RowState,
    /// Until it is due; 0 when it is, not there where no worker will forward it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub due_in_ms: Option<u64>,
    /// Its ordering key, where it has one; bytes that are no text are replaced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lane: Option<String>,
    /// Why.
    pub reason: String,
    /// How long ago it came into its state, by the database's clock.
    pub ago_ms: u64,
    /// When, by the clock of who answers; RFC 3339 in UTC.
    pub at: String,
    /// An operator discarded it; its body is gone.
    pub discarded: bool,
    /// The subscription it came through.
    pub subscription: String,
    /// Where it was delivered from, in the form of `Inbox-Origin`.
    pub origin: String,
    /// Attempts made.
    pub attempts: u32,
    /// The last HTTP status.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_status: Option<u16>,
    /// What went wrong last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
    /// Bytes of the body that is kept; not there where none is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub body_bytes: Option<u64>,
    /// As the publisher set it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content_type: Option<String>,
    /// Its type.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message_type: Option<String>,
    /// Of its `traceparent`, where that is valid.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trace_id: Option<String>,
    /// Tells contents of one id apart.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fingerprint: Option<String>,
}

/// A delivery that the answering process has in hand.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct InFlight {
    /// Through which subscription.
    pub subscription: String,
    /// `lane`, `twin`, `slot`, `claim`, `busy`, `callback`, `backoff` or `record`.
    pub stage: String,
    /// What it waits for, in words.
    pub waits: String,
    /// For how long.
    pub in_stage_ms: u64,
    /// Since it was received.
    pub taken_ms: u64,
    /// Attempts counted so far.
    pub attempts: u32,
    /// What the last attempt came to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last: Option<String>,
    /// Where it was delivered from.
    pub origin: String,
    /// Of its `traceparent`, where that is valid.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trace_id: Option<String>,
}

/// The ids that a person may mean, in the order in which they are looked for.
pub fn readings(asked: &[u8]) -> Vec<(MessageId, ReadAs)> {
    let decoded = decode_percent(&String::from_utf8_lossy(asked));
    let is_encoded = std::str::from_utf8(asked).is_ok() && decoded != asked;
    let mut readings = Vec::new();
    let mut add = |id: Option<MessageId>, read_as| {
        if let Some(id) = id
            && !readings.iter().any(|(known, _)| *known == id)
        {
            readings.push((id, read_as));
        }
    };
    add(stored(asked), ReadAs::Stored);
    if is_encoded {
        add(stored(&decoded), ReadAs::DecodedStored);
    }
    add(MessageId::from_bytes(asked), ReadAs::Given);
    if is_encoded {
        add(MessageId::from_bytes(&decoded), ReadAs::Decoded);
    }
    readings
}

/// An id that no publisher can set: what the inbox made itself.
fn stored(bytes: &[u8]) -> Option<MessageId> {
    let text = std::str::from_utf8(bytes).ok().filter(|text| !text.contains('\0'))?;
    let is_hash = text.strip_prefix("sha256:").is_some_and(|hash| {
        hash.len() == 64 && hash.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
    });
    let is_made = text.starts_with("generated:");
    (is_hash || is_made).then(|| MessageId::from_stored(text))
}

/// Who answers.
pub struct Answering<'a> {
    /// Its process life; `None` where no sidecar answers.
    pub owner: Option<&'a OwnerId>,
    /// The wall clock.
    pub now: SystemTime,
    /// How long processed messages are known.
    pub retention: Duration,
}

impl ConsumerReport {
    /// What the store and the engine know, put together.
    pub fn new(
        answering: &Answering<'_>,
        (consumer_id, subscriptions): (&ConsumerId, &[String]),
        (message_id, read_as): (&MessageId, ReadAs),
        explanation: &Explanation,
        flights: &[(String, Flight)],
    ) -> Self {
        let claim = explanation.claim.as_ref();
        let mut report = Self {
            consumer_id: consumer_id.to_string(),
            subscriptions: subscriptions.to_vec(),
            message_id: message_id.to_string(),
            read_as,
            state: state(explanation, flights),
            words: Vec::new(),
            processed: explanation.message.as_ref().map(|row| Processed::new(answering, row)),
            claim: claim.map(|claim| Claim::new(answering, claim)),
            copies: explanation.copies.iter().map(|copy| Copy::new(answering, copy)).collect(),
            older_copies: explanation.copies_total.saturating_sub(explanation.copies.len() as u64),
            in_flight: flights
                .iter()
                .map(|(subscription, flight)| InFlight::new(subscription, flight, claim))
                .collect(),
        };
        report.words = words::of(&report, answering.retention);
        report
    }
}

fn state(explanation: &Explanation, flights: &[(String, Flight)]) -> State {
    match &explanation.claim {
        _ if explanation.message.is_some() => State::Processed,
        _ if !flights.is_empty() => State::InFlight,
        Some(claim) if claim.expires_in.is_some() => State::Claimed,
        _ if explanation.copies.iter().any(|copy| copy.state == ParkedState::Due) => State::Parked,
        _ if !explanation.copies.is_empty() => State::DeadLetter,
        Some(_) => State::Released,
        None => State::Unknown,
    }
}

impl Processed {
    fn new(answering: &Answering<'_>, row: &ExplainedMessage) -> Self {
        let record = row.record.clone();
        Self {
            ago_ms: millis(row.processed_ago),
            at: answering.at(row.processed_ago),
            fingerprint: record.fingerprint.map(|fingerprint| fingerprint.as_str().to_owned()),
            producer: record.producer,
            message_type: record.message_type,
            correlation_id: record.correlation_id,
            causation_id: record.causation_id,
        }
    }
}

impl Claim {
    fn new(answering: &Answering<'_>, claim: &ExplainedClaim) -> Self {
        Self {
            owner: claim.owner.to_string(),
            is_own: answering.owner == Some(&claim.owner),
            attempts: claim.attempts,
            expires_in_ms: claim.expires_in.map(millis),
        }
    }
}

impl Copy {
    fn new(answering: &Answering<'_>, row: &ExplainedCopy) -> Self {
        let copy = &row.copy;
        let reason = copy.reason.as_str();
        Self {
            state: row.state.into(),
            due_in_ms: row.due_in.map(millis),
            lane: copy.lane.as_deref().map(lossy),
            reason: reason.to_owned(),
            ago_ms: millis(row.parked_ago),
            at: answering.at(row.parked_ago),
            discarded: row.state == ParkedState::Discarded,
            subscription: copy.subscription.clone(),
            origin: copy.envelope.origin.to_string(),
            attempts: copy.attempts,
            last_status: copy.last_status,
            last_error: copy.last_error.clone().filter(|error| !error.is_empty()),
            body_bytes: row.body_bytes,
            content_type: copy.envelope.content_type.as_deref().map(lossy),
            message_type: copy.envelope.message_type.as_deref().map(lossy),
            trace_id: trace_id(&copy.envelope),
            fingerprint: copy.fingerprint.as_ref().map(|print| print.as_str().to_owned()),
        }
    }
}

impl InFlight {
    /// One delivery; `claim` is what the inbox has of the message.
    fn new(subscription: &str, flight: &Flight, claim: Option<&ExplainedClaim>) -> Self {
        let stage = match flight.stage {
            Stage::Lane => "lane",
            Stage::Twin => "twin",
            Stage::Slot => "slot",
            Stage::Claim => "claim",
            Stage::Busy { .. } => "busy",
            Stage::Callback => "callback",
            Stage::Backoff { .. } => "backoff",
            Stage::LaneBlocked { .. } => "lane_blocked",
            Stage::Publish => "publish",
            Stage::Record => "record",
        };
        Self {
            subscription: subscription.to_owned(),
            stage: stage.to_owned(),
            waits: words::waits(flight, claim),
            in_stage_ms: millis(flight.in_stage),
            taken_ms: millis(flight.taken),
            attempts: flight.attempts,
            last: flight.last.clone(),
            origin: flight.envelope.origin.to_string(),
            trace_id: trace_id(&flight.envelope),
        }
    }
}

impl Answering<'_> {
    fn at(&self, ago: Duration) -> String {
        at(self.now, ago)
    }
}

/// When that was, in RFC 3339, UTC.
pub(super) fn at(now: SystemTime, ago: Duration) -> String {
    let at = now.checked_sub(ago).filter(|at| *at >= SystemTime::UNIX_EPOCH);
    humantime::format_rfc3339_seconds(at.unwrap_or(SystemTime::UNIX_EPOCH)).to_string()
}

/// The trace id of a valid `traceparent`.
pub(super) fn trace_id(envelope: &Envelope) -> Option<String> {
    TraceIds::of_message(envelope).trace_id
}

pub(super) fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

pub(super) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Text for a terminal: what would steer one is written as its escape.
pub fn shown(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            _ if character.is_control() || is_invisible(character) => {
                shown.extend(character.escape_unicode());
            }
            _ => shown.push(character),
        }
    }
    shown
}

/// Changes the direction of what follows, or cannot be seen.
fn is_invisible(character: char) -> bool {
    matches!(
        character,
        '\u{200b}'..='\u{200f}'
            | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}'
            | '\u{feff}'
            | '\u{fff9}'..='\u{fffb}'
            | '\u{e0000}'..='\u{e007f}'
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(asked: &[u8]) -> Vec<(String, ReadAs)> {
        readings(asked).into_iter().map(|(id, as_)| (id.to_string(), as_)).collect()
    }

    #[test]
    fn a_trace_id_is_that_of_a_context_that_is_valid_as_a_whole() {
        let origin = inboxd_contract::Origin::Memory { stream: "".into(), position: 0 };
        let mut envelope = Envelope::new(origin, None);
        let id = "4bf92f3577b34da6a3ce929d0e0e4736";
        let mut told = |parent: String| {
            envelope.traceparent = Some(parent.into());
            trace_id(&envelope)
        };
        assert_eq!(told(format!("00-{id}-00f067aa0ba902b7-01")).as_deref(), Some(id));
        assert_eq!(told(format!("00-{id}")), None);
        assert_eq!(told(format!("00-{id}-0000000000000000-01")), None);
    }

    #[test]
    fn an_id_is_read_as_it_was_given_and_as_the_application_has_it() {
        assert_eq!(read(b"order-1"), [("order-1".into(), ReadAs::Given)]);
        assert_eq!(
            read(b"a%2Fb"),
            [("a%2Fb".into(), ReadAs::Given), ("a/b".into(), ReadAs::Decoded)]
        );
        assert_eq!(read(b"100%"), [("100%".into(), ReadAs::Given)]);
        assert!(read(b"  ").is_empty());
    }

    #[test]
    fn an_id_that_the_inbox_made_is_found_by_what_the_inbox_made_of_it() {
        let made = MessageId::from_bytes(b"a\0b").unwrap();
        let hash = made.as_str().to_owned();
        assert_eq!(read(hash.as_bytes())[0], (hash.clone(), ReadAs::Stored));
        let encoded = hash.replace(':', "%3A");
        assert_eq!(read(encoded.as_bytes())[0], (hash.clone(), ReadAs::DecodedStored));
        // The publisher's own bytes, and the form in which the application had them.
        assert_eq!(read(b"a\0b"), [(hash.clone(), ReadAs::Given)]);
        assert_eq!(read(b"a%00b")[1], (hash, ReadAs::Decoded));
        // A publisher's own text of that form is hashed, and still found.
        assert_eq!(read(b"sha256:mine").len(), 1);
    }

    #[test]
    fn nothing_that_a_publisher_chose_steers_a_terminal() {
        assert_eq!(
            shown("a\u{1b}[2Jb\u{9b}1m\u{202e}\r\n\u{7f}"),
            "a\\u{1b}[2Jb\\u{9b}1m\\u{202e}\\u{d}\\u{a}\\u{7f}"
        );
        assert_eq!(shown("grün 注文 ✓"), "grün 注文 ✓");
    }

    #[test]
    fn a_trace_id_is_told_only_where_it_is_one() {
        let of = |traceparent: &str| {
            let origin = inboxd_contract::Origin::Memory { stream: "s".into(), position: 0 };
            let mut envelope = Envelope::new(origin, None);
            envelope.traceparent = Some(traceparent.to_owned().into());
            trace_id(&envelope)
        };
        let id = "4bf92f3577b34da6a3ce929d0e0e4736";
        assert_eq!(of(&format!("00-{id}-00f067aa0ba902b7-01")).as_deref(), Some(id));
        for bad in ["", "00", "00-00000000000000000000000000000000-00f067aa0ba902b7-01", "\u{1b}"] {
            assert_eq!(of(bad), None, "{bad}");
        }
    }
}
