//! `inboxd demo` as a newcomer runs it, with fewer messages.

use std::process::Output;
use std::time::Duration;

use tokio::process::Command;

/// It takes about 25 s, most of it waiting for the consumer group.
const DEADLINE: Duration = Duration::from_secs(180);

async fn demo(arguments: &[&str]) -> Output {
    let run = Command::new(env!("CARGO_BIN_EXE_inboxd"))
        .arg("demo")
        .args(arguments)
        // Settings of a sidecar, which are not for the demo's own.
        .env("INBOXD_CONSUMER_ID", "another")
        .env("INBOXD_DATABASE", "sqlite:/nowhere/inbox.db")
        .kill_on_drop(true)
        .output();
    tokio::time::timeout(DEADLINE, run).await.expect("ends in time").expect("runs")
}

/// The figure in the table's row of that name.
fn figure(table: &str, name: &str) -> u64 {
    let row = table.lines().find_map(|line| line.trim_start().strip_prefix(name));
    let row = row.unwrap_or_else(|| panic!("no row {name:?} in\n{table}"));
    let value = row.split_whitespace().next().unwrap_or_default().replace(',', "");
    value.parse().unwrap_or_else(|_| panic!("no figure in {name}{row}"))
}

#[tokio::test]
async fn it_loses_nothing_and_the_kill_explains_all_that_was_accepted_twice() {
    let output = demo(&["--messages", "2000"]).await;
    let table = String::from_utf8_lossy(&output.stdout).into_owned();
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{table}{told}");
    assert!(told.contains("SIGKILL"), "{told}");
    assert_eq!(figure(&table, "published"), 2_000);
    assert_eq!(figure(&table, "accepted by the application"), figure(&table, "distinct ids"));
    assert_eq!(figure(&table, "lost"), 0);
    assert_eq!(figure(&table, "accepted twice for any other reason"), 0);
    assert!(figure(&table, "duplicates suppressed") >= 600, "{table}");
    assert!(table.contains("commit = \"app\""), "{table}");
}

#[tokio::test]
async fn a_number_of_messages_out_of_bounds_is_refused_with_the_bounds() {
    let output = demo(&["--messages", "999"]).await;
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{told}");
    assert!(told.contains("--messages") && told.contains("1000..=100000"), "{told}");
}
