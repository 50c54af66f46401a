//! O1, O2: contexts of messages, valid and not, with an exporter and without.

use std::collections::BTreeMap;

use inboxd_conformance::app::App;
use inboxd_conformance::{ensure, eventually};

use super::{Collector, SOON, attribute, table};
use crate::support::{
    Broker, BrokerKind, Database, DatabaseKind, Message, PATIENCE, Sidecar, config,
};

fn hostile() -> Vec<(&'static str, String)> {
    let (trace, parent) = ("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7");
    vec![
        ("upper", format!("00-{}-{}-01", trace.to_uppercase(), parent.to_uppercase())),
        ("zero-trace", format!("00-{}-{parent}-01", "0".repeat(32))),
        ("zero-parent", format!("00-{trace}-{}-01", "0".repeat(16))),
        ("version-ff", format!("ff-{trace}-{parent}-01")),
        ("short", format!("00-{trace}-{parent}-0")),
        ("more-in-version-00", format!("00-{trace}-{parent}-01-more")),
        ("digits", "1234567890".repeat(5)),
        ("long", "a".repeat(10_240)),
        ("line-breaks", format!("00-{trace}-{parent}-01\r\nInbox-Message-Id: forged")),
        ("empty", String::new()),
    ]
}

const LATER_VERSION: &str = "01-5bf92f3577b34da6a3ce929d0e0e4736-10f067aa0ba902b7-01-more-fields";

/// All hostile contexts and one of a later version are delivered; answers what the application
/// got, by id.
async fn delivered(collector: Option<&Collector>) -> (BTreeMap<String, Option<String>>, Sidecar) {
    let app = App::start().await;
    let broker = Broker::new(BrokerKind::RabbitClassic).await;
    let database = Database::new(DatabaseKind::Sqlite);
    let telemetry = collector.map(table).unwrap_or_default();
    let config = config(&broker, &database, &broker.name, &app.url("/"), "", &telemetry);
    let sidecar = Sidecar::start_with(&config, &[SOON]);
    let mut contexts = hostile();
    contexts.push(("later-version", LATER_VERSION.to_owned()));
    let count = contexts.len();
    broker
        .publish(
            contexts.iter().map(|(id, context)| Message::id(*id).header("traceparent", context)),
        )
        .await;
    eventually(PATIENCE, async || ensure(app.ledger().accepted_distinct() == count, sidecar.log()))
        .await;
    let got = app.ledger().all().iter().map(|p| (p.id.clone(), p.header("traceparent"))).collect();
    (got, sidecar)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_invalid_context_starts_a_new_trace_where_traces_are_exported() {
    let collector = Collector::start().await;
    let (mut got, sidecar) = delivered(Some(&collector)).await;
    let later = got.remove("later-version").flatten().expect("a context");
    assert!(later.starts_with("00-5bf92f3577b34da6a3ce929d0e0e4736-"), "{later}");
    assert!(later.ends_with("-01") && !later.contains("10f067aa0ba902b7"), "{later}");
    let mut traces = Vec::new();
    for (id, context) in &got {
        let context = context.clone().unwrap_or_else(|| panic!("{id} has no context"));
        assert_eq!((context.len(), &context[..3], &context[52..]), (55, "00-", "-01"), "{id}");
        assert!(!context.contains("4bf92f3577b34da6"), "{id}: {context}");
        traces.push(context[3..35].to_owned());
    }
    traces.sort();
    traces.dedup();
    assert_eq!(traces.len(), hostile().len(), "each has a trace of its own");
    // They are roots.
    eventually(PATIENCE, async || {
        let spans = collector.spans();
        let roots = spans.iter().filter(|span| span.parent_span_id.is_empty()).count();
        ensure(roots == hostile().len(), format!("{roots} roots; {}", sidecar.log()))
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_an_exporter_a_valid_context_passes_unchanged_and_none_is_invented() {
    let (mut got, _sidecar) = delivered(None).await;
    assert_eq!(got.remove("later-version").flatten().as_deref(), Some(LATER_VERSION));
    for (id, context) in got {
        assert_eq!(context, None, "{id}");
    }
}

/// What a message of this number carries: nothing, a sampled context, nothing, an unsampled one.
fn context(number: usize) -> Option<String> {
    let flags = match number % 4 {
        1 => "01",
        3 => "00",
        _ => return None,
    };
    Some(format!("00-{:032x}-{:016x}-{flags}", number + 1, number + 7_000))
}

#[tokio::test(flavor = "multi_thread")]
async fn no_context_bleeds_into_another_message_and_flags_are_kept() {
    const COUNT: usize = 400;
    let (collector, app) = (Collector::start().await, App::start().await);
    let broker = Broker::new(BrokerKind::RabbitClassic).await;
    let database = Database::new(DatabaseKind::Sqlite);
    let config = config(&broker, &database, &broker.name, &app.url("/"), "", &table(&collector));
    let sidecar = Sidecar::start_with(&config, &[SOON]);
    broker
        .publish((0..COUNT).map(|number| {
            let message = Message::id(format!("m-{number}"));
            match context(number) {
                Some(context) => message.header("traceparent", context),
                None => message,
            }
        }))
        .await;
    eventually(PATIENCE, async || ensure(app.ledger().accepted_distinct() == COUNT, sidecar.log()))
        .await;
    let mut new_traces = Vec::new();
    for number in 0..COUNT {
        let post = app.ledger().posts(&format!("m-{number}")).remove(0);
        let got = post.header("traceparent").expect("a context");
        match context(number) {
            Some(own) => {
                assert_eq!((&got[..36], &got[52..]), (&own[..36], &own[52..]), "{number}");
                assert_ne!(got[36..52], own[36..52], "the parent is our own span");
            }
            None => new_traces.push(got[3..35].to_owned()),
        }
    }
    new_traces.sort();
    new_traces.dedup();
    assert_eq!(new_traces.len(), COUNT / 2, "a trace of its own for each without a context");

    // Two spans for each but the quarter that is not sampled.
    let expected = 2 * (COUNT - COUNT / 4);
    eventually(PATIENCE, async || {
        let spans = collector.spans();
        ensure(spans.len() == expected, format!("{} spans; {}", spans.len(), sidecar.log()))
    })
    .await;
    for span in collector.spans() {
        let id = attribute(&span.attributes, "messaging.message.id");
        let Some(number) = id.strip_prefix("m-").and_then(|n| n.parse::<usize>().ok()) else {
            continue;
        };
        let (trace, parent) = (hex::encode(&span.trace_id), hex::encode(&span.parent_span_id));
        match context(number) {
            Some(own) => {
                assert_eq!((trace.as_str(), parent.as_str()), (&own[3..35], &own[36..52]));
            }
            None => assert_eq!(parent, "", "{id}"),
        }
    }
}
