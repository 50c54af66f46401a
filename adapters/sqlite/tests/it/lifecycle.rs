//! Opening, the lock file, former lives.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use inboxd_contract::{
    Claim, ClaimAnswer, ClaimRequest, ConsumerId, ErrorClass, InboxKey, InboxStore, MessageId,
    OwnerId, Settled, StoreError, Token,
};
use inboxd_sqlite::{SqliteConfig, SqliteStore};
use sqlx::Row as _;
use tempfile::TempDir;
use uuid::Uuid;

use crate::harness::connect;

const LEASE: Duration = Duration::from_secs(15);
/// Set for the child process that only opens a database.
const CHILD: &str = "INBOXD_TEST_SQLITE_CHILD";

fn directory() -> TempDir {
    tempfile::tempdir().expect("a temporary directory")
}

pub fn claim(id: &str) -> Claim {
    Claim {
        key: InboxKey {
            consumer_id: ConsumerId::new("billing").unwrap(),
            message_id: MessageId::from_bytes(id.as_bytes()).unwrap(),
        },
        token: Token(Uuid::new_v4()),
    }
}

pub fn request(claim: &Claim) -> ClaimRequest {
    ClaimRequest { claim: claim.clone(), fingerprint: None, position: None, lane_id: None }
}

async fn claim_one(store: &SqliteStore, claim: &Claim) -> ClaimAnswer {
    let owner = OwnerId(Arc::from(format!("owner-{}", Uuid::new_v4())));
    store.claim(&owner, LEASE, &[request(claim)]).await.remove(0).expect("answered")
}

fn refused(result: Result<SqliteStore, StoreError>) -> StoreError {
    let error = result.expect_err("refused");
    assert_eq!(error.class, ErrorClass::Permanent, "{error}");
    error
}

#[tokio::test]
async fn a_second_opening_in_the_same_process_is_refused_until_the_first_closes() {
    let directory = directory();
    let path = directory.path().join("inbox.db");
    let store = SqliteStore::open(SqliteConfig::new(&path)).await.expect("opened");
    let error = refused(SqliteStore::open(SqliteConfig::new(&path)).await).to_string();
    assert!(error.contains(path.to_str().unwrap()), "{error}");
    assert!(error.contains(&format!("pid {}", std::process::id())), "{error}");

    // Another name of the same file is the same file.
    let link = directory.path().join("link.db");
    std::os::unix::fs::symlink(&path, &link).expect("linked");
    refused(SqliteStore::open(SqliteConfig::new(&link)).await);

    store.close().await;
    SqliteStore::open(SqliteConfig::new(&path)).await.expect("free again").close().await;
}

/// The lock's name must not depend on whether the file was there when it was taken.
#[tokio::test]
async fn a_link_to_a_file_that_is_not_there_yet_is_that_file() {
    let directory = directory();
    let path = directory.path().join("inbox.db");
    let link = directory.path().join("link.db");
    std::os::unix::fs::symlink(&path, &link).expect("linked");
    let store = SqliteStore::open(SqliteConfig::new(&link)).await.expect("opened");
    refused(SqliteStore::open(SqliteConfig::new(&path)).await);
    refused(SqliteStore::open(SqliteConfig::new(&link)).await);
    store.close().await;
    SqliteStore::open(SqliteConfig::new(&path)).await.expect("free again").close().await;
}

/// Run in a child process by the next test; by itself it has nothing to do.
#[tokio::test]
async fn child_holds_a_database_while_told() {
    let Ok(path) = std::env::var(CHILD) else { return };
    let store = SqliteStore::open(SqliteConfig::new(Path::new(&path))).await.expect("opened");
    let held = claim("of-the-child");
    assert_eq!(claim_one(&store, &held).await, ClaimAnswer::Fresh { attempts: 1 });
    println!("\nholding");
    std::io::stdout().flush().expect("flushed");
    // Ends by being killed.
    std::thread::sleep(Duration::from_secs(120));
}

#[tokio::test]
async fn a_killed_process_frees_its_file_and_its_claims_but_not_their_attempts() {
    let directory = directory();
    let path = directory.path().join("inbox.db");
    let mut child = Command::new(std::env::current_exe().expect("this test's binary"))
        .args(["--exact", "lifecycle::child_holds_a_database_while_told", "--nocapture"])
        .env(CHILD, &path)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("started");
    let pid = child.id();
    let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    let holds = lines.map_while(Result::ok).any(|line| line.contains("holding"));
    assert!(holds, "the child ended without opening the database");

    let error = refused(SqliteStore::open(SqliteConfig::new(&path)).await).to_string();
    assert!(error.contains(&format!("pid {pid}")), "{error}");

    child.kill().expect("killed");
    child.wait().expect("waited for");
    let store = SqliteStore::open(SqliteConfig::new(&path)).await.expect("free again");
    let next = claim("of-the-child");
    assert_eq!(claim_one(&store, &next).await, ClaimAnswer::Fresh { attempts: 2 });
    store.close().await;
}

#[tokio::test]
async fn what_is_committed_is_there_after_opening_again() {
    let directory = directory();
    let config = SqliteConfig {
        table_prefix: String::from("app_"),
        ..SqliteConfig::new(directory.path().join("inbox.db"))
    };
    let store = SqliteStore::open(config.clone()).await.expect("opened");
    let held = claim("m");
    assert!(claim_one(&store, &held).await.is_held());
    let completion = inboxd_contract::Completion {
        claim: held.clone(),
        record: Default::default(),
        supersedes_dead: false,
        parked: None,
    };
    let settled = store.complete(&[completion]).await.remove(0).expect("answered");
    assert_eq!(settled, Settled::Done);
    store.close().await;

    let store = SqliteStore::open(config.clone()).await.expect("opened again");
    let answer = claim_one(&store, &claim("m")).await;
    assert_eq!(answer, ClaimAnswer::Processed { fingerprint: None });
    let mut direct = connect(&config.path).await;
    let row = sqlx::query("SELECT count(*) FROM app_inbox_messages").fetch_one(&mut direct).await;
    assert_eq!(row.expect("the prefixed table").get::<i64, _>(0), 1);
    store.close().await;
}

#[tokio::test]
async fn durability_and_journal_are_what_the_guarantees_need() {
    let directory = directory();
    let path = directory.path().join("inbox.db");
    let store = SqliteStore::open(SqliteConfig::new(&path)).await.expect("opened");
    let mut direct = connect(&path).await;
    let mode = sqlx::query("PRAGMA journal_mode").fetch_one(&mut direct).await.expect("asked");
    assert_eq!(mode.get::<String, _>(0), "wal");
    assert!(store.describe().contains(path.to_str().unwrap()), "{}", store.describe());
    assert!(store.describe().contains("this instance only"), "{}", store.describe());
    assert!(store.limits().body_bytes_max < 1_000_000_000);
    store.close().await;
}

#[tokio::test]
async fn unfit_configurations_are_refused_with_the_remedy() {
    let directory = directory();
    let there = SqliteConfig::new(directory.path().join("inbox.db"));
    let missing = SqliteConfig::new(directory.path().join("no/such/directory/inbox.db"));
    let error = refused(SqliteStore::open(missing).await).to_string();
    assert!(error.contains("no/such/directory") && error.contains("make it"), "{error}");
    let prefix = SqliteConfig { table_prefix: String::from("x; DROP"), ..there.clone() };
    assert!(refused(SqliteStore::open(prefix).await).to_string().contains("prefix"));
    refused(SqliteStore::open(SqliteConfig::new(":memory:")).await);
    let lease = SqliteConfig { lease: Duration::ZERO, ..there.clone() };
    assert!(refused(SqliteStore::open(lease).await).to_string().contains("lease"));

    std::fs::write(&there.path, vec![b'x'; 8_192]).expect("written");
    let error = refused(SqliteStore::open(there.clone()).await);
    assert!(error.to_string().contains("inbox.db"), "{error}");
}
