//! D1: another program writes to the same file most of the time.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use inboxd_contract::{ClaimAnswer, Completion, InboxStore, OwnerId, Settled};
use inboxd_sqlite::{SqliteConfig, SqliteStore};

use crate::harness::connect;
use crate::lifecycle::{claim, request};

const LEASE: Duration = Duration::from_secs(15);
const HELD: Duration = Duration::from_millis(200);
const FREE: Duration = Duration::from_millis(100);

/// Holds the write lock 200 ms of every 300 until told to stop, on a thread and a runtime of its
/// own, as another process would.
struct Nuisance {
    stop: Arc<AtomicBool>,
    rounds: Arc<AtomicU32>,
    thread: thread::JoinHandle<()>,
}

impl Nuisance {
    fn start(path: PathBuf) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let rounds = Arc::new(AtomicU32::new(0));
        let (stopped, counted) = (Arc::clone(&stop), Arc::clone(&rounds));
        let thread = thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime");
            runtime.block_on(async {
                let mut connection = connect(&path).await;
                while !stopped.load(Ordering::Relaxed) {
                    sqlx::query("BEGIN IMMEDIATE").execute(&mut connection).await.expect("locked");
                    thread::sleep(HELD);
                    sqlx::query("COMMIT").execute(&mut connection).await.expect("unlocked");
                    counted.fetch_add(1, Ordering::Relaxed);
                    thread::sleep(FREE);
                }
            });
        });
        Self { stop, rounds, thread }
    }

    fn end(self) -> u32 {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("the other writer never failed");
        self.rounds.load(Ordering::Relaxed)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixteen_callers_beside_another_writer_all_succeed() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("inbox.db");
    let config = SqliteConfig { lease: LEASE, ..SqliteConfig::new(&path) };
    let store = Arc::new(SqliteStore::open(config).await.expect("opened"));
    let nuisance = Nuisance::start(path);
    let until = Instant::now() + Duration::from_secs(3);

    let mut callers = tokio::task::JoinSet::new();
    for caller in 0..16 {
        let store = Arc::clone(&store);
        callers.spawn(async move {
            let owner = OwnerId(Arc::from(format!("caller-{caller}")));
            let mut processed = 0;
            while Instant::now() < until {
                let held = claim(&format!("{caller}-{processed}"));
                let answer = store.claim(&owner, LEASE, &[request(&held)]).await.remove(0);
                assert_eq!(answer.expect("no claim fails"), ClaimAnswer::Fresh { attempts: 1 });
                let completion = Completion {
                    claim: held,
                    record: Default::default(),
                    supersedes_dead: false,
                    parked: None,
                };
                let settled = store.complete(&[completion]).await.remove(0);
                assert_eq!(settled.expect("no completion fails"), Settled::Done);
                processed += 1;
            }
            processed
        });
    }
    let processed: u32 = callers.join_all().await.into_iter().sum();
    let rounds = nuisance.end();
    assert!(rounds >= 5, "the other writer was there: {rounds} rounds");
    assert!(processed >= 16 * 2, "all callers got on: {processed} messages");
    store.close().await;
}

#[tokio::test]
async fn a_lock_held_for_longer_than_a_fifth_of_the_lease_is_told_as_such() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("inbox.db");
    let lease = Duration::from_secs(1);
    let config = SqliteConfig { lease, ..SqliteConfig::new(&path) };
    let store = SqliteStore::open(config).await.expect("opened");
    let mut other = connect(&path).await;
    sqlx::query("BEGIN IMMEDIATE").execute(&mut other).await.expect("locked");

    let owner = OwnerId(Arc::from("owner"));
    let held = claim("m");
    let started = Instant::now();
    let error = store.claim(&owner, lease, &[request(&held)]).await.remove(0).expect_err("locked");
    assert!(error.is_transient() && error.locked, "{error}");
    assert!(started.elapsed() >= lease / 5, "{:?}", started.elapsed());

    sqlx::query("COMMIT").execute(&mut other).await.expect("unlocked");
    let answer = store.claim(&owner, lease, &[request(&held)]).await.remove(0).expect("answered");
    assert_eq!(answer, ClaimAnswer::Fresh { attempts: 1 });
    store.close().await;
}
