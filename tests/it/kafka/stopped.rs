//! K6: members, static and dynamic ones, that are stopped beyond their session. They come back
//! or end with an error; none is ready and takes nothing.

use std::time::Duration;

use inboxd_conformance::app::App;
use inboxd_conformance::{ensure, eventually};
use nix::sys::signal::Signal;

use super::{accepted, configured, drained, nothing_twice, spread, stop, topic};
use crate::support::{Broker, Database, DatabaseKind, PATIENCE, Sidecar, all_consume};

/// The session of the tests' consumers is 6 s.
const BEYOND_THE_SESSION: Duration = Duration::from_secs(8);

/// A static one with this name, or, with an empty name, a dynamic one.
fn member(broker: &Broker, database: &Database, app: &App, instance: &str) -> Sidecar {
    // So that a stop is longer than what may be between two polls, too.
    let properties = [("group.instance.id", instance), ("max.poll.interval.ms", "6000")];
    Sidecar::start(&configured(broker, database, app, "lease = \"2s\"", &properties))
}

/// The first of these members is stopped. Nobody takes its place meanwhile, or the other does.
async fn stopped_and_continued(names: &[&str]) {
    let alone = names.len() == 1;
    let app = App::start().await;
    let database = Database::new(DatabaseKind::Postgres);
    let broker = topic(4).await;
    let mut members: Vec<_> =
        names.iter().map(|name| member(&broker, &database, &app, name)).collect();
    all_consume(&broker, &members).await;
    let warm_up = app.ledger().accepted_distinct();

    members[0].signal(Signal::SIGSTOP);
    broker.publish(spread("meanwhile-", 20, 4)).await;
    if alone {
        tokio::time::sleep(BEYOND_THE_SESSION).await;
    } else {
        // Its partitions go over when its session has ended.
        accepted(&app, warm_up + 20, &[&members[1]]).await;
    }
    members[0].signal(Signal::SIGCONT);
    broker.publish(spread("afterwards-", 20, 4)).await;
    let all: Vec<_> = members.iter().collect();
    accepted(&app, warm_up + 40, &all).await;
    drained(PATIENCE, &broker, &all).await;
    nothing_twice(&app);
    if members[0].is_running() {
        members[0].ready().await;
        if !alone {
            // Ready means alive: it takes its share again.
            let before = members[0].outcomes("processed").await;
            let mut round = 0;
            eventually(PATIENCE, async || {
                round += 1;
                broker.publish(spread(&format!("share-{round}-"), 4, 4)).await;
                let processed = members[0].outcomes("processed").await;
                ensure(processed > before, format!("{processed}:\n{}", members[0].log()))
            })
            .await;
        }
    } else {
        let status = members[0].ended().await;
        assert!(!status.success(), "{status}:\n{}", members[0].log());
        members.remove(0);
    }
    for member in &mut members {
        stop(member).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_static_member_that_was_stopped_comes_back() {
    tokio::join!(stopped_and_continued(&["one"]), stopped_and_continued(&["one", "two"]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dynamic_member_that_was_stopped_comes_back() {
    tokio::join!(stopped_and_continued(&[""]), stopped_and_continued(&["", ""]));
}

/// Another process has its name meanwhile: it ends with an error that says so.
#[tokio::test(flavor = "multi_thread")]
async fn a_static_member_that_was_replaced_ends_with_an_error() {
    let app = App::start().await;
    let database = Database::new(DatabaseKind::Postgres);
    let broker = topic(4).await;
    let mut old = member(&broker, &database, &app, "one");
    broker.publish(spread("before-", 8, 4)).await;
    accepted(&app, 8, &[&old]).await;
    drained(PATIENCE, &broker, &[&old]).await;
    old.signal(Signal::SIGSTOP);
    let mut new = member(&broker, &database, &app, "one");
    broker.publish(spread("meanwhile-", 20, 4)).await;
    accepted(&app, 28, &[&new]).await;
    old.signal(Signal::SIGCONT);
    let status = old.ended().await;
    assert_eq!(status.code(), Some(69), "{status}:\n{}", old.log());
    assert!(old.log().contains("group.instance.id"), "{}", old.log());

    broker.publish(spread("afterwards-", 20, 4)).await;
    accepted(&app, 48, &[&new]).await;
    drained(PATIENCE, &broker, &[&new]).await;
    nothing_twice(&app);
    assert!(new.is_running(), "{}", new.log());
    stop(&mut new).await;
}
