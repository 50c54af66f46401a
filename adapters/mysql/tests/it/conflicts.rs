//! D3 and D6: storms on the same rows, and what "rows affected" does not decide.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use inboxd_contract::{Attempt, ClaimAnswer, InboxStore, Notes, Settled};
use inboxd_mysql::{MysqlConfig, MysqlStore};
use sqlx::{AssertSqlSafe, Executor as _};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::harness::{Database, insert_message};
use crate::short::{LEASE, claim, complete, completion, key, new_claim, owner, requests};

const REPLICAS: usize = 3;
const IDS: usize = 8;
const DEADLINE: Duration = Duration::from_secs(60);

/// What one replica does with ids that all have: claims them in one batch, in an order of its own;
/// the first forward of each fails and is counted; then it completes. Every error is one
/// that goes away by trying again. Returns how many it processed.
async fn replica(store: Arc<MysqlStore>, number: usize, round: usize) -> usize {
    let end = Instant::now() + DEADLINE;
    let mut open: Vec<String> = (0..IDS).map(|id| format!("{round}-{id}")).collect();
    open.rotate_left(number * 3);
    if number % 2 == 1 {
        open.reverse();
    }
    let mut processed = 0;
    while !open.is_empty() {
        assert!(Instant::now() < end, "replica {number} still has {open:?}");
        let claims: Vec<_> = open.iter().map(|id| new_claim(id)).collect();
        let owner = owner(&format!("replica-{number}"));
        let answers = store.claim(&owner, LEASE, &requests(&claims)).await;
        let mut held = Vec::new();
        for (claim, answer) in claims.into_iter().zip(answers) {
            match answer {
                Ok(ClaimAnswer::Fresh { .. }) => held.push(claim),
                Ok(ClaimAnswer::Processed { .. }) => {
                    open.retain(|id| id != claim.key.message_id.as_str());
                }
                Ok(ClaimAnswer::Busy { .. }) => {}
                Ok(other) => panic!("nothing is dead, and yet {other:?}"),
                Err(error) => assert!(error.is_transient(), "{error}: {:?}", error.source),
            }
        }
        for answer in store.count_attempts(&held).await {
            match answer {
                Ok(Attempt::Counted(attempts)) => assert!(attempts >= 2, "{attempts}"),
                Ok(Attempt::Lost(look)) => panic!("held for 15 s, and lost: {look:?}"),
                Err(error) => assert!(error.is_transient(), "{error}: {:?}", error.source),
            }
        }
        while !held.is_empty() {
            assert!(Instant::now() < end, "replica {number} cannot complete {held:?}");
            let batch: Vec<_> = held.iter().map(completion).collect();
            let mut again = Vec::new();
            for (claim, answer) in held.into_iter().zip(store.complete(&batch).await) {
                match answer {
                    Ok(Settled::Done) => processed += 1,
                    Ok(other) => panic!("held, and yet {other:?}"),
                    Err(error) if error.is_transient() => again.push(claim),
                    Err(error) => panic!("{error}: {:?}", error.source),
                }
            }
            held = again;
        }
        sleep(Duration::from_millis(2)).await;
    }
    processed
}

/// Locks two claim rows of the round in an order against that of keys, over and over, so that
/// whoever waits for the one while holding the other is in a deadlock.
async fn nuisance(database: Arc<Database>, round: usize, turns: Arc<AtomicU32>) {
    let mut connection = database.connect().await;
    loop {
        let _ = connection.execute("START TRANSACTION").await;
        for id in (0..IDS).rev() {
            let update = format!(
                "UPDATE inbox_claims SET owner = owner WHERE consumer_id = 'billing' \
                 AND message_id = '{round}-{id}'"
            );
            // It may be the one that the server picks as the victim.
            if connection.execute(sqlx::raw_sql(AssertSqlSafe(update))).await.is_err() {
                break;
            }
            sleep(Duration::from_millis(1)).await;
        }
        let _ = connection.execute("ROLLBACK").await;
        turns.fetch_add(1, Ordering::Relaxed);
        sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_replicas_and_a_deadlocking_stranger_process_each_message_once() {
    let database = Arc::new(Database::shared().await);
    let mut stores = Vec::new();
    for _ in 0..REPLICAS {
        stores.push(Arc::new(database.open().await));
    }
    for round in 0..3 {
        let turns = Arc::new(AtomicU32::new(0));
        let stranger = tokio::spawn(nuisance(Arc::clone(&database), round, Arc::clone(&turns)));
        let mut replicas = JoinSet::new();
        for (number, store) in stores.iter().enumerate() {
            replicas.spawn(replica(Arc::clone(store), number, round));
        }
        let processed: usize = replicas.join_all().await.into_iter().sum();
        stranger.abort();
        assert_eq!(processed, IDS, "each id was processed once, by one replica");
        assert!(turns.load(Ordering::Relaxed) > 0, "the stranger was at it");
        let keys: Vec<_> = (0..IDS).map(|id| key(&format!("{round}-{id}"))).collect();
        for look in stores[0].look(&keys).await.expect("answered") {
            assert!(look.processed.is_some(), "one row each");
        }
    }
    for store in stores {
        store.close().await;
    }
}

#[tokio::test]
async fn duplicates_are_found_although_a_no_op_counts_as_a_row() {
    let database = Database::shared().await;
    let store = database.open().await;
    let held = new_claim("m");
    assert_eq!(claim(&store, &held).await.expect("answered"), ClaimAnswer::Fresh { attempts: 1 });

    // What an upsert that changes nothing is told to have affected over this very driver.
    let no_op = "INSERT INTO inbox_claims SELECT * FROM inbox_claims AS c \
         WHERE c.consumer_id = ? AND c.message_id = ? \
         ON DUPLICATE KEY UPDATE inbox_claims.owner = inbox_claims.owner";
    assert_eq!(database.with_key(no_op, &held.key).await, 1, "FOUND_ROWS: a no-op counts");

    let answer = claim(&store, &new_claim("m")).await.expect("answered");
    assert!(matches!(answer, ClaimAnswer::Busy { .. }), "{answer:?}");
    assert_eq!(complete(&store, &held).await.expect("answered"), Settled::Done);
    for _ in 0..3 {
        let answer = claim(&store, &new_claim("m")).await.expect("answered");
        assert_eq!(answer, ClaimAnswer::Processed { fingerprint: None });
    }
    assert_eq!(store.note_once("n", "first").await.expect("stored"), "first");
    assert_eq!(store.note_once("n", "second").await.expect("answered"), "first");
    store.close().await;
}

#[tokio::test]
async fn a_locked_member_does_not_stall_its_batch_for_the_lock_timeout() {
    let database = Database::shared().await;
    // Locks are waited for 10 s, by those who wait.
    let config = MysqlConfig { lease: Duration::from_secs(50), ..database.config() };
    let store = MysqlStore::connect(config).await.expect("connected");
    let claims: Vec<_> = (0..64).map(|id| new_claim(&format!("{id:02}"))).collect();
    let answers = store.claim(&owner("owner"), LEASE, &requests(&claims)).await;
    assert!(answers.iter().all(|answer| matches!(answer, Ok(ClaimAnswer::Fresh { .. }))));
    let guard = database.open_transaction(&[insert_message()], &claims[40].key).await;

    let batch: Vec<_> = claims.iter().map(completion).collect();
    let started = Instant::now();
    let answers = store.complete(&batch).await;
    let took = started.elapsed();
    for (index, answer) in answers.into_iter().enumerate() {
        match (index, answer) {
            (40, Err(error)) => assert!(error.locked && error.is_transient(), "{error}"),
            (_, answer) => assert_eq!(answer.expect("not locked"), Settled::Done, "{index}"),
        }
    }
    assert!(took < Duration::from_secs(8), "somebody waited for the lock: {took:?}");

    inboxd_conformance::store::Guard::commit(guard).await;
    let answer = complete(&store, &claims[40]).await.expect("free now");
    assert_eq!(answer, Settled::AlreadyProcessed { fingerprint: None });
    store.close().await;
}
