//! `docs/metrics.md` has every metric, as the registry has it.

use std::collections::BTreeMap;
use std::time::Duration;

use inboxd::telemetry::Metrics;
use inboxd_contract::{PartitionReport, SourceStatus, StoreStats, StreamId};

const BEGIN: &str = "<!-- metrics: generated -->\n";
const END: &str = "<!-- metrics: end -->";

/// A registry in which every metric has a series.
fn full() -> Metrics {
    let metrics = Metrics::new();
    let mut status = SourceStatus::connecting();
    status.queue_depth = Some(0);
    status.partitions.push(PartitionReport {
        stream: StreamId("orders/0".into()),
        lag: Some(0),
        oldest_unsettled_at: None,
        paused: false,
    });
    metrics.subscription("orders").source_status(&status);
    metrics.subscription("orders").callback().rate(Some(10.0));
    metrics.inbox(Some(&StoreStats {
        messages: Some(0),
        claims: Some(0),
        dead: Some(0),
        due: Some(0),
        oldest_due: Some(Duration::ZERO),
        oldest_message: Some(Duration::ZERO),
        oldest_dead: Some(Duration::ZERO),
    }));
    metrics
}

/// The table: one line for each metric, in the registry's order.
fn table(text: &str) -> String {
    let mut labels = BTreeMap::<&str, &str>::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let name = line.split(['{', ' ']).next().unwrap_or_default();
        let inside = line.split_once('{').and_then(|(_, rest)| rest.split_once('}'));
        labels.entry(name).or_insert(inside.map_or("", |(inside, _)| inside));
    }
    let named = |name: &str| -> Vec<String> {
        let text = labels.get(name).copied().unwrap_or_default();
        let names = text.split("\",").filter_map(|label| label.split_once('=').map(|(n, _)| n));
        names.filter(|name| *name != "le").map(|name| format!("`{name}`")).collect()
    };
    let mut table = String::from("| metric | type | labels | meaning |\n|---|---|---|---|\n");
    let mut help = BTreeMap::new();
    for line in text.lines() {
        if let Some((name, words)) = line.strip_prefix("# HELP ").and_then(|l| l.split_once(' ')) {
            help.insert(name, words.trim_end_matches('.'));
        } else if let Some((name, kind)) =
            line.strip_prefix("# TYPE ").and_then(|line| line.split_once(' '))
        {
            let sample = match kind {
                "histogram" => format!("{name}_bucket"),
                _ => name.to_owned(),
            };
            let labels = named(&sample).join(", ");
            let meaning = help.get(name).copied().unwrap_or_default();
            table.push_str(&format!("| `{name}` | {kind} | {labels} | {meaning} |\n"));
        }
    }
    table
}

#[test]
fn the_documentation_has_every_metric_as_the_registry_has_it() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/metrics.md");
    let page = std::fs::read_to_string(path).expect("docs/metrics.md");
    let (_, rest) = page.split_once(BEGIN).expect("the marker of the table's beginning");
    let (found, _) = rest.split_once(END).expect("the marker of its end");
    let expected = table(&full().encode_for("").1);
    assert!(expected.lines().count() > 35);
    assert_eq!(found, expected, "put this between the markers of docs/metrics.md:\n{expected}");
}
