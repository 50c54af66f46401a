//! Dead letters and parked rows as a terminal shows them.
//!
//! Invariant: whatever a publisher or an application put into them goes through [`shown`].

use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Serialize;

use super::explain::escaped;
use crate::admin::{
    AuditPage, COUNT_MAX, DiscardAnswer, DiscardResult, LetterWhole, ParkedItem, ParkedPage,
    ReplayAnswer, ReplayResult, RowState, shown, span,
};

/// Rows of one answer that are told one by one.
const ROWS_TOLD: usize = 20;
/// Bytes of a body that are shown, where it is text.
const BODY_TOLD: usize = 4_096;

/// JSON with nothing for a terminal in it.
pub(super) fn json(answer: &impl Serialize) -> String {
    format!("{}\n", escaped(&serde_json::to_string_pretty(answer).unwrap_or_default()))
}

/// 0 where everything was done.
pub(super) fn code(all: bool) -> ExitCode {
    if all { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// A page of rows.
pub(super) fn page(page: &ParkedPage, from: Option<String>) -> String {
    let mut text: String = page.rows.iter().map(row).collect();
    let matching = page.matching.unwrap_or(page.rows.len() as u64);
    text.push_str(&match matching {
        0 => "none\n".to_owned(),
        COUNT_MAX.. => format!("{} shown of {COUNT_MAX} or more\n", page.rows.len()),
        _ => format!("{} shown of {matching}\n", page.rows.len()),
    });
    if let Some(next) = page.next {
        text.push_str(&format!("there may be more: --after {next}\n"));
    }
    from_where(&mut text, from);
    text
}

/// What is said of a row in two lines.
fn row(row: &ParkedItem) -> String {
    let since = span(Duration::from_millis(row.parked_ago_ms));
    let state = match (row.state, row.due_in_ms) {
        (RowState::Due, None | Some(0)) => "due now".to_owned(),
        (RowState::Due, Some(left)) => {
            format!("due in {}", span(Duration::from_millis(left)))
        }
        (RowState::Dead, _) => format!("dead for {since}"),
        (RowState::Discarded, _) => format!("discarded {since} ago"),
    };
    let mut text = format!(
        "{} {}\n    {state}, {}, subscription {}, {}",
        row.seq,
        shown(&row.message_id),
        shown(&row.reason),
        shown(&row.subscription),
        attempts(row.attempts)
    );
    if let Some(lane) = row.lane.as_ref().filter(|_| row.blocks_lane) {
        text.push_str(&format!(", in lane {}", shown(lane)));
    }
    if let Some(status) = row.last_status {
        text.push_str(&format!(", last status {status}"));
    }
    if let Some(error) = &row.last_error {
        text.push_str(&format!("\n    {}", shown(error)));
    }
    text.push('\n');
    text
}

fn attempts(count: u32) -> String {
    if count == 1 { "1 attempt".to_owned() } else { format!("{count} attempts") }
}

fn from_where(text: &mut String, from: Option<String>) {
    if let Some(from) = from {
        text.push_str(&format!("({})\n", shown(&from)));
    }
}

/// A row, whole.
pub(super) fn letter(letter: &LetterWhole, from: Option<String>) -> String {
    let mut text = row(&letter.row);
    let item = &letter.row;
    let mut add = |name: &str, value: Option<&str>| {
        if let Some(value) = value {
            text.push_str(&format!("{name}: {}\n", shown(value)));
        }
    };
    add("consumer id", Some(&item.consumer_id));
    add("came from", Some(&item.origin));
    add("received first", Some(&item.first_at));
    add("in this state since", Some(&item.parked_at));
    add("ordering key", item.lane.as_deref());
    add("type", item.message_type.as_deref());
    add("content type", item.content_type.as_deref());
    add("content encoding", letter.content_encoding.as_deref());
    add("producer", letter.producer.as_deref());
    add("correlation id", letter.correlation_id.as_deref());
    add("causation id", letter.causation_id.as_deref());
    add("fingerprint", item.fingerprint.as_deref());
    add("traceparent", letter.traceparent.as_deref());
    for header in &letter.headers {
        let name = format!("header {}", shown(&header.name));
        add(&name, Some(header.value.as_deref().unwrap_or("(null)")));
    }
    text.push_str(&body(letter));
    from_where(&mut text, from);
    text
}

/// The body where it is text, its size where it is not.
fn body(letter: &LetterWhole) -> String {
    let size = letter.row.body_bytes.unwrap_or_default();
    let bytes = letter.body_base64.as_ref().and_then(|body| STANDARD.decode(body).ok());
    let Some(bytes) = bytes else { return "body: none is kept\n".to_owned() };
    let told = &bytes[..bytes.len().min(BODY_TOLD)];
    // Cut within a character, it is text up to there.
    let told = match std::str::from_utf8(told) {
        Ok(text) => Some(text),
        Err(error) if error.error_len().is_none() => {
            std::str::from_utf8(&told[..error.valid_up_to()]).ok()
        }
        Err(_) => None,
    };
    match told {
        None => format!("body: {size} bytes that are no text; --body FILE writes them\n"),
        Some(text) => {
            let lines: Vec<_> = text.lines().map(|line| format!("    {}", shown(line))).collect();
            let more = match size as usize > text.len() {
                true => "\n    … --body FILE writes all of it",
                false => "",
            };
            format!("body: {size} bytes\n{}{more}\n", lines.join("\n"))
        }
    }
}

/// Writes a body.
pub(super) fn write(file: &Path, body: &[u8]) -> Result<(), String> {
    let written = match file.to_str() {
        Some("-") => {
            let mut output = std::io::stdout().lock();
            output.write_all(body).and_then(|()| output.flush())
        }
        _ => std::fs::write(file, body),
    };
    written.map_err(|error| format!("{} cannot be written: {error}", file.display()))
}

/// What a replay came to.
pub(super) fn replayed(answer: &ReplayAnswer, from: Option<String>) -> String {
    let counts = &answer.counts;
    let due = if answer.dry_run { "would be forwarded again" } else { "will be forwarded again" };
    let mut text = String::new();
    let told = answer.rows.iter().filter(|row| {
        answer.dry_run || row.result != ReplayResult::Due || row.replayed_as.is_some()
    });
    for row in told.clone().take(ROWS_TOLD) {
        let what = match row.result {
            ReplayResult::Due => match &row.replayed_as {
                Some(id) if !answer.dry_run => format!("as {}", shown(id)),
                Some(_) => "under an id of its own".to_owned(),
                None => due.to_owned(),
            },
            ReplayResult::NotDead => "is no dead letter (any more)".to_owned(),
            ReplayResult::NoBody => "keeps no body that could be forwarded".to_owned(),
            ReplayResult::Processed => {
                "is processed: --allow-processed forwards it all the same".to_owned()
            }
            ReplayResult::Exists => "is parked already under the id that it would get".to_owned(),
            ReplayResult::Failed => {
                format!("failed: {}", shown(row.error.as_deref().unwrap_or_default()))
            }
        };
        text.push_str(&line(row.seq, row.message_id.as_deref(), &what));
    }
    more(&mut text, told.count());
    text.push_str(&sentence(&[
        (counts.due, due),
        (counts.processed, "are processed already"),
        (counts.no_body, "keep no body"),
        (counts.exists, "are parked already"),
        (counts.not_dead, "are no dead letters (any more)"),
        (counts.failed, "failed"),
    ]));
    from_where(&mut text, from);
    text
}

/// What a discard came to.
pub(super) fn discarded(answer: &DiscardAnswer, from: Option<String>) -> String {
    let counts = &answer.counts;
    let gone = if answer.dry_run { "would be discarded" } else { "are discarded" };
    let mut text = String::new();
    let told =
        answer.rows.iter().filter(|row| answer.dry_run || row.result != DiscardResult::Discarded);
    for row in told.clone().take(ROWS_TOLD) {
        let what = match row.result {
            DiscardResult::Discarded => gone.to_owned(),
            DiscardResult::NotDead => "is no dead letter (any more)".to_owned(),
            DiscardResult::Failed => {
                format!("failed: {}", shown(row.error.as_deref().unwrap_or_default()))
            }
        };
        text.push_str(&line(row.seq, row.message_id.as_deref(), &what));
    }
    more(&mut text, told.count());
    text.push_str(&sentence(&[
        (counts.discarded, gone),
        (counts.not_dead, "are no dead letters (any more)"),
        (counts.failed, "failed"),
    ]));
    from_where(&mut text, from);
    text
}

fn line(seq: i64, message_id: Option<&str>, what: &str) -> String {
    match message_id {
        Some(id) => format!("{seq} {}: {what}\n", shown(id)),
        None => format!("{seq}: {what}\n"),
    }
}

fn more(text: &mut String, rows: usize) {
    if rows > ROWS_TOLD {
        text.push_str(&format!("and {} more: --json tells all\n", rows - ROWS_TOLD));
    }
}

fn sentence(counts: &[(u32, &str)]) -> String {
    let told = counts.iter().filter(|(count, _)| *count > 0);
    let told: Vec<_> = told.map(|(count, what)| format!("{count} {what}")).collect();
    match told.is_empty() {
        true => "there are none\n".to_owned(),
        false => format!("{}\n", told.join(", ")),
    }
}

/// A page of the audit.
pub(super) fn audit(page: &AuditPage, from: Option<String>) -> String {
    let mut text = String::new();
    for entry in &page.entries {
        let replayed_as = entry.replayed_as.as_ref().map(|id| format!(" as {}", shown(id)));
        text.push_str(&format!(
            "{} {} {} {} (row {}, consumer id {}){}\n",
            entry.at,
            shown(&entry.actor),
            shown(&entry.action),
            shown(&entry.message_id),
            entry.seq,
            shown(&entry.consumer_id),
            replayed_as.unwrap_or_default(),
        ));
    }
    if page.entries.is_empty() {
        text.push_str("none\n");
    }
    if let Some(next) = page.next {
        text.push_str(&format!("there may be more: --before {next}\n"));
    }
    from_where(&mut text, from);
    text
}
