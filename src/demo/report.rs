//! The table at the end, and what it means.

use std::fmt::Write;
use std::time::Duration;

use super::judge::Judgement;

/// How many ids a fault names.
const IDS_SHOWN_MAX: usize = 20;

/// How long things took.
#[derive(Debug, Clone, Copy)]
pub(super) struct Times {
    /// From the first POST of each life to its last answer, both together.
    pub(super) forwarding: Duration,
    /// From the kill to the next life's first POST.
    pub(super) down: Duration,
    /// Deliveries that came to an end.
    pub(super) settled: u64,
}

impl Times {
    fn per_second(&self) -> u64 {
        let seconds = self.forwarding.as_secs_f64();
        if seconds > 0.0 { (self.settled as f64 / seconds).round() as u64 } else { 0 }
    }
}

/// What was done and what it came to, as text.
pub(super) fn table(judgement: &Judgement, times: &Times) -> String {
    let mut text = String::new();
    let count = |ids: &[String]| ids.len() as u64;
    let rows: [(&str, u64, String); 13] = [
        ("published", judgement.published, String::new()),
        ("  distinct ids", judgement.distinct, String::new()),
        ("duplicates suppressed", judgement.suppressed, "by the sidecar's own count".into()),
        ("  republished", judgement.suppressed_republished, "the same id again, later".into()),
        ("  concurrent", judgement.suppressed_concurrent, "the same id twice at once".into()),
        (
            "  redelivered",
            judgement.suppressed_redelivered,
            "read again after the kill and restart".into(),
        ),
        (
            "forwarded (POSTs)",
            judgement.forwarded,
            format!(
                "{} of them not accepted: answered 503, tried again",
                grouped(judgement.turned_down)
            ),
        ),
        ("accepted by the application", judgement.accepted, "distinct ids, its own count".into()),
        ("lost", count(&judgement.lost), String::new()),
        (
            "accepted again because of the kill",
            count(&judgement.again_by_kill),
            "POST begun, no row yet; same Idempotency-Key".into(),
        ),
        ("accepted twice for any other reason", count(&judgement.again_otherwise), String::new()),
        (
            "messages/s",
            times.per_second(),
            format!("deliveries, in {:.1} s of forwarding", times.forwarding.as_secs_f64()),
        ),
        (
            "kill to next POST, ms",
            u64::try_from(times.down.as_millis()).unwrap_or(u64::MAX),
            "restart, and the group's wait for the dead member".into(),
        ),
    ];
    for (name, value, note) in rows {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{}", format!("{name:<36}{:>8}  {note}", grouped(value)).trim_end());
    }
    text
}

/// The verdict, what is wrong with which ids, and what would close the window.
pub(super) fn verdict(judgement: &Judgement) -> String {
    let mut text = String::new();
    for (what, ids) in judgement.faults() {
        let shown = ids.iter().take(IDS_SHOWN_MAX).map(String::as_str).collect::<Vec<_>>();
        let more = match ids.len().saturating_sub(IDS_SHOWN_MAX) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let _ = writeln!(text, "FAULT: {what}: {}{more}", shown.join(", "));
    }
    if text.is_empty() {
        text.push_str("Nothing lost; nothing accepted twice but what was in flight at the kill.\n");
    }
    text.push_str(
        "What would close that window: commit = \"app\", where the application writes the \
         inbox row in its own transaction.\n",
    );
    text
}

/// With a comma between thousands.
pub(super) fn grouped(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thousands_are_grouped() {
        let grouped = [0, 999, 1_000, 20_000, 1_234_567].map(grouped);
        assert_eq!(grouped, ["0", "999", "1,000", "20,000", "1,234,567"]);
    }

    #[test]
    fn the_table_shows_what_was_judged_and_nothing_else() {
        let judgement = Judgement {
            published: 20_000,
            suppressed: 7_001,
            lost: vec!["a".into()],
            again_by_kill: vec!["b".into(), "c".into()],
            ..Judgement::default()
        };
        let times = Times {
            forwarding: Duration::from_secs(4),
            down: Duration::from_millis(8_100),
            settled: 22_000,
        };
        let table = table(&judgement, &times);
        let value = |name: &str| {
            let line = table.lines().find(|line| line.trim_start().starts_with(name)).unwrap();
            line[36..44].trim().to_owned()
        };
        assert_eq!(value("published"), "20,000");
        assert_eq!(value("duplicates suppressed"), "7,001");
        assert_eq!(value("lost"), "1");
        assert_eq!(value("accepted again because"), "2");
        assert_eq!(value("accepted twice for any other"), "0");
        assert_eq!(value("messages/s"), "5,500");
        assert_eq!(value("kill to next POST"), "8,100");
    }

    #[test]
    fn a_fault_names_its_ids_up_to_a_bound() {
        let lost = (0..23).map(|n| format!("order-{n:06}")).collect();
        let text = verdict(&Judgement { lost, ..Judgement::default() });
        assert!(text.contains("order-000019 and 3 more"), "{text}");
        assert!(!text.contains("Nothing lost"));
        assert!(text.contains("commit = \"app\""));
        assert!(verdict(&Judgement::default()).contains("Nothing lost"));
    }
}
