//! Order per key and per partition, over retries, restarts and members that come and go.

use std::collections::BTreeMap;

use inboxd_conformance::app::{Answer, App};

use super::{MS, accepted, configured, drained, stop};
use crate::support::{Broker, BrokerKind, Database, DatabaseKind, Message, PATIENCE, Sidecar};

const MESSAGES: usize = 400;
const KEYS: usize = 12;
const PARTITIONS: usize = 4;

/// `2/k06/0018`: its partition, its key and its place.
fn messages() -> Vec<Message> {
    let message = |n: usize| {
        let (partition, key) = (n % PARTITIONS, n % KEYS);
        Message::id(format!("{partition}/k{key:02}/{n:04}"))
            .key(format!("k{key:02}"))
            .partition(i32::try_from(partition).expect("small"))
    };
    (0..MESSAGES).map(message).collect()
}

/// POSTs began and were accepted in the order of each lane. Answers how many were accepted once
/// more.
fn in_order(app: &App, by_key: bool) -> usize {
    let lane_and_place = |id: &str| {
        let parts: Vec<_> = id.split('/').collect();
        let lane = if by_key { parts[1] } else { parts[0] };
        (lane.to_owned(), parts[2].to_owned())
    };
    let begun: Vec<_> = app.ledger().all().into_iter().map(|post| post.id).collect();
    let accepted = app.ledger().acceptance_order();
    for (what, ids) in [("begun", &begun), ("accepted", &accepted)] {
        let mut lanes: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for id in ids {
            let (lane, place) = lane_and_place(id);
            lanes.entry(lane).or_default().push(place);
        }
        assert_eq!(lanes.len(), if by_key { KEYS } else { PARTITIONS });
        for (lane, places) in lanes {
            assert!(places.is_sorted(), "{what} in lane {lane}: {places:?}");
        }
    }
    app.ledger().accepted_more_than_once().len()
}

async fn kept(ordering: &str, assignor: &str) {
    let by_key = ordering == "key";
    let app = App::start().await;
    app.plan_with(|post| {
        let place: usize = post.id.rsplit('/').next()?.parse().ok()?;
        match post.attempt {
            1 if place.is_multiple_of(7) => Some(Answer::status(503).after(5 * MS)),
            _ => Some(Answer::status(200).after(15 * MS)),
        }
    });
    let database = Database::new(DatabaseKind::Postgres);
    let broker = Broker::new(BrokerKind::Kafka).await;
    let keys =
        format!("ordering = \"{ordering}\"\nlease = \"2s\"\nretry = {{ initial = \"50ms\" }}");
    let properties = [("partition.assignment.strategy", assignor)];
    let config = configured(&broker, &database, &app, &keys, &properties);
    let mut first = Sidecar::start(&config);
    let mut second = Sidecar::start(&config);
    first.ready().await;
    second.ready().await;
    broker.publish(messages()).await;
    accepted(&app, MESSAGES / 8, &[&first, &second]).await;
    stop(&mut first).await;
    first.start_again();
    accepted(&app, MESSAGES / 3, &[&first, &second]).await;
    stop(&mut second).await;
    second.start_again();
    accepted(&app, MESSAGES / 2, &[&first, &second]).await;
    first.kill().await;
    let through = app.ledger().accepted_distinct();
    assert!(through < MESSAGES, "all were through before the kill");
    first.start_again();
    accepted(&app, MESSAGES, &[&first, &second]).await;
    drained(PATIENCE, &broker, &[&first, &second]).await;
    let again = in_order(&app, by_key);
    // What the killed one had at the application: one in each of its lanes.
    let most = if by_key { KEYS } else { PARTITIONS };
    assert!(again <= most, "{again} accepted once more");
    stop(&mut first).await;
    stop(&mut second).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn order_per_key_is_kept_over_retries_restarts_and_a_kill() {
    kept("key", "cooperative-sticky").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn order_per_partition_is_kept_over_retries_restarts_and_a_kill() {
    kept("partition", "range").await;
}
