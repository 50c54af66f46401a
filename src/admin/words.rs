//! What is known of a message, in sentences for a person at night.

use std::time::Duration;

use inboxd_contract::ExplainedClaim;

use super::letters::RowState;
use super::message::{Claim, ConsumerReport, Copy, InFlight, Processed, State};
use crate::engine::{Flight, Stage};

/// One sentence per fact, the most telling first.
pub(super) fn of(report: &ConsumerReport, retention: Duration) -> Vec<String> {
    let mut words = Vec::new();
    if let Some(row) = &report.processed {
        words.push(processed(row));
        words.extend(lineage(row));
    }
    words.extend(report.in_flight.iter().map(in_flight));
    if let Some(row) = &report.claim {
        words.push(claim(row, report));
    }
    words.extend(report.copies.iter().map(|row| copy(row, report.state == State::Processed)));
    if report.older_copies > 0 {
        words.push(format!(
            "and {} older parked copies or dead letters of this id",
            report.older_copies
        ));
    }
    if report.state == State::Unknown {
        words.push(format!(
            "not known: this consumer id has never seen it, or processed it more than {} ago \
             (database.retention) and has forgotten it; a delivery of it would be forwarded. Ids \
             are compared byte by byte: letter case, spaces and a producer's prefix count",
            span(retention)
        ));
    }
    words
}

fn processed(row: &Processed) -> String {
    format!(
        "processed {} ago ({}): accepted or dropped by the application, or ignored for want of a \
         route, and its row is committed; every \
         further delivery is acked as a duplicate, without a call",
        span(Duration::from_millis(row.ago_ms)),
        row.at
    )
}

fn lineage(row: &Processed) -> Option<String> {
    let told: Vec<_> = [
        ("type", &row.message_type),
        ("producer", &row.producer),
        ("correlation id", &row.correlation_id),
        ("causation id", &row.causation_id),
        ("fingerprint", &row.fingerprint),
    ]
    .into_iter()
    .filter_map(|(name, value)| Some(format!("{name} {}", value.as_ref()?)))
    .collect();
    (!told.is_empty()).then(|| told.join(", "))
}

fn in_flight(flight: &InFlight) -> String {
    format!(
        "this process is working on it (subscription {}, from {}, received {} ago): {}{}",
        flight.subscription,
        flight.origin,
        span(Duration::from_millis(flight.taken_ms)),
        flight.waits,
        flight.trace_id.as_ref().map(|id| format!("; trace id {id}")).unwrap_or_default(),
    )
}

/// What a delivery waits for; `claim` is what the inbox has of its message.
pub fn waits(flight: &Flight, claim: Option<&ExplainedClaim>) -> String {
    let since = span(flight.in_stage);
    match flight.stage {
        Stage::Lane => format!("waiting for its lane for {since}: what came before it is not done"),
        Stage::Twin => format!(
            "waiting for {since} for another delivery of the same id, which is under way here"
        ),
        Stage::Slot => {
            format!("waiting for a free slot for {since}: `concurrency` others are at it")
        }
        Stage::Claim => format!("waiting for the database to answer its claim for {since}"),
        Stage::Busy { .. } => match claim.filter(|claim| claim.expires_in.is_some()) {
            Some(claim) => {
                format!("waiting for {since} for a claim that {} holds", claim.owner)
            }
            None => format!("waiting for {since} for a claim or a lock that somebody else holds"),
        },
        Stage::Callback => {
            format!("at the callback for {since}, attempt {}", flight.attempts)
        }
        Stage::Backoff { delay } => format!(
            "waiting {} before attempt {} ({} left); the last one came to: {}",
            span(delay),
            flight.attempts.saturating_add(1),
            span(delay.saturating_sub(flight.in_stage)),
            flight.last.as_deref().unwrap_or("nothing"),
        ),
        Stage::LaneBlocked { again_in } => format!(
            "waiting for {since} behind a parked message of its lane (`on_blocked_lane` is halt); \
             looked at again every {}",
            span(again_in)
        ),
        Stage::Publish => {
            format!("waiting for {since} for the broker to confirm its dead letter")
        }
        Stage::Record => format!("waiting for {since} for the database to record what came of it"),
    }
}

fn claim(row: &Claim, report: &ConsumerReport) -> String {
    let attempts = attempts(row.attempts);
    match row.expires_in_ms.map(|left| span(Duration::from_millis(left))) {
        Some(left) if row.is_own && !report.in_flight.is_empty() => {
            format!(
                "claimed by this process ({}), {attempts}; its lease is good for {left} and is renewed",
                row.owner
            )
        }
        Some(left) => format!(
            "claimed by {} for another {left}, {attempts}; where that process is gone, the next \
             delivery takes over when the lease has run out",
            row.owner
        ),
        None if report.state == State::Parked => format!(
            "nobody has a claim on it now; {attempts}, the last by {}. A worker takes it at its time",
            row.owner
        ),
        None => format!(
            "nobody has a claim on it now; {attempts}, the last by {}. It is forwarded when the \
             broker delivers it again",
            row.owner
        ),
    }
}

fn copy(row: &Copy, is_processed: bool) -> String {
    let since = span(Duration::from_millis(row.ago_ms));
    let state = match (row.state, row.due_in_ms) {
        (RowState::Due, Some(left)) if left > 0 => {
            format!("parked, due in {}, since", span(Duration::from_millis(left)))
        }
        (RowState::Due, _) => "parked, due now, since".to_owned(),
        (RowState::Dead, _) => "dead letter since".to_owned(),
        (RowState::Discarded, _) => "dead letter, discarded by an operator, since".to_owned(),
    };
    let mut text =
        format!("{state} {since} ({}): {}; {}", row.at, why(&row.reason), attempts(row.attempts));
    let mut add = |name: &str, value: Option<String>| {
        if let Some(value) = value {
            text.push_str(&format!("; {name}{value}"));
        }
    };
    add("lane ", row.lane.clone());
    add("last status ", row.last_status.map(|status| status.to_string()));
    add("last error: ", row.last_error.clone());
    add("came from ", Some(format!("{} through subscription {}", row.origin, row.subscription)));
    let body = match row.body_bytes {
        Some(bytes) => format!("body of {bytes} bytes"),
        None => "no body is kept".to_owned(),
    };
    add("", Some(body));
    add("content type ", row.content_type.clone());
    add("type ", row.message_type.clone());
    add("fingerprint ", row.fingerprint.clone());
    add("trace id ", row.trace_id.clone());
    if is_processed && row.state != RowState::Due {
        add("", Some("it is not the content that was processed".to_owned()));
    }
    text
}

fn why(reason: &str) -> &str {
    match reason {
        "refused" => "the application refused it",
        "id_conflict" => "another message has the same id and other content",
        "unidentified" => "it carries no message id",
        "unrouted" => "its type has no route",
        "body_too_large" => "its body is larger than body_bytes_max",
        "attempts_exhausted" => "park.attempts_max attempts came to nothing",
        "too_old" => "park.elapsed_max is over since it was received first",
        "failed" => "its attempts in place came to nothing",
        "asked" => "the application asked to have it later",
        "lane_blocked" => "it waits behind a parked message of its lane",
        "stored" => "it was stored on arrival (delivery = \"stored\")",
        "held_too_long" => "it was held for hold_max",
        "delivery_limit" => "the broker has handed it over half as often as it will",
        "replayed" => "an operator has it forwarded again",
        other => other,
    }
}

fn attempts(count: u32) -> String {
    match count {
        0 => "no attempt was counted".to_owned(),
        1 => "1 attempt".to_owned(),
        count => format!("{count} attempts"),
    }
}

/// A duration in its two largest units.
pub fn span(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let shown = match seconds {
        0 => return format!("{} ms", duration.as_millis()),
        1..3_600 => seconds,
        3_600..86_400 => seconds / 60 * 60,
        _ => seconds / 3_600 * 3_600,
    };
    let (days, hours) = (shown / 86_400, shown % 86_400 / 3_600);
    let (minutes, seconds) = (shown % 3_600 / 60, shown % 60);
    let units = [(days, "d"), (hours, "h"), (minutes, "min"), (seconds, "s")];
    let told: Vec<_> = units
        .iter()
        .filter(|(count, _)| *count > 0)
        .map(|(count, unit)| format!("{count} {unit}"))
        .collect();
    told.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_has_two_units_at_most() {
        let told = |seconds| span(Duration::from_secs(seconds));
        assert_eq!(told(200), "3 min 20 s");
        assert_eq!(told(3_600), "1 h");
        assert_eq!(told(3_725), "1 h 2 min");
        assert_eq!(told(14 * 86_400 + 3_700), "14 d 1 h");
        assert_eq!(span(Duration::from_millis(120)), "120 ms");
    }
}
