//! How many statements one message costs: every row of the table in docs/store-statements.md.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use inboxd_contract::{
    Actor, Claim, ClaimAnswer, ClaimRequest, Completion, DeadLetter, DeadReason, Envelope,
    InboxStore, LaneId, Origin, OwnerId, Parking, Release, Replay, Reschedule, Settled, Unpark,
};
use inboxd_sqlite::{SqliteConfig, SqliteStore};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};
use tracing_subscriber::util::SubscriberInitExt as _;

use crate::lifecycle::{claim, request};
use crate::parking::{arrival, asking};

/// Collects the first words of every statement that the database ran. The database lives in
/// this process, and its driver tells of each statement once.
#[derive(Clone, Default)]
struct Statements(Arc<Mutex<Vec<String>>>);

impl Statements {
    fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().expect("not poisoned"))
    }
}

struct Summary<'a>(&'a mut String);

impl tracing::field::Visit for Summary<'_> {
    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
        if field.name() == "summary" {
            *self.0 = format!("{value:?}");
        }
    }

    fn record_str(&mut self, field: &tracing::field::Field, value: &str) {
        if field.name() == "summary" {
            *self.0 = value.to_owned();
        }
    }
}

impl<S: tracing::Subscriber> Layer<S> for Statements {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        if event.metadata().target() == "sqlx::query" {
            let mut summary = String::new();
            event.record(&mut Summary(&mut summary));
            let words: Vec<&str> = summary.split_whitespace().take(2).collect();
            self.0.lock().expect("not poisoned").push(words.join(" "));
        }
    }
}

/// Set for the child process, which runs this one test alone.
const CHILD: &str = "INBOXD_TEST_SQLITE_STATEMENTS";

/// The driver tells of statements from threads of its own, so that whoever listens hears all
/// stores of the process: the count is taken in a process with one.
#[test]
fn one_message_costs_one_claim_and_one_completion() {
    if std::env::var_os(CHILD).is_some() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        return runtime.expect("a runtime").block_on(count_statements());
    }
    let name = "statements::one_message_costs_one_claim_and_one_completion";
    let output = std::process::Command::new(std::env::current_exe().expect("this test's binary"))
        .args(["--exact", name, "--nocapture"])
        .env(CHILD, "1")
        .output()
        .expect("started");
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

async fn count_statements() {
    let statements = Statements::default();
    tracing_subscriber::registry().with(statements.clone()).init();
    let directory = tempfile::tempdir().expect("a temporary directory");
    let config = SqliteConfig::new(directory.path().join("inbox.db"));
    let store = SqliteStore::open(config).await.expect("opened");
    let owner = OwnerId(Arc::from("owner"));
    let lease = Duration::from_secs(15);
    let held = claim("m");
    statements.take();

    let claimed = async |claim: &Claim| store.claim(&owner, lease, &[request(claim)]).await;
    let spent = |own: &[&str]| {
        assert_eq!(statements.take(), [&["BEGIN IMMEDIATE"], own, &["COMMIT"]].concat());
    };
    let (look, take, insert) = ("SELECT j.key,", "DELETE FROM", "INSERT INTO");

    let answer = claimed(&held).await.remove(0).expect("answered");
    assert_eq!(answer, ClaimAnswer::Fresh { attempts: 1 });
    spent(&[insert, look]);
    let completions = [completion(&held)];
    let settled = store.complete(&completions).await.remove(0).expect("answered");
    assert_eq!(settled, Settled::Done);
    spent(&[take, insert]);
    claimed(&claim("m")).await;
    spent(&[insert, look]);
    store.complete(&completions).await;
    spent(&[take, look]);

    let held = claim("n");
    claimed(&held).await;
    statements.take();
    let one = std::slice::from_ref(&held);
    store.count_attempts(one).await;
    spent(&["UPDATE inbox_claims"]);
    store.renew(lease, one).await.expect("answered");
    spent(&["UPDATE inbox_claims"]);
    store.dead_letter(&[letter(&held)]).await;
    spent(&[take, look, insert]);
    let again = claim("n");
    claimed(&again).await;
    statements.take();
    store.complete(&[Completion { supersedes_dead: true, ..completion(&again) }]).await;
    spent(&[take, insert, take]);

    let held = claim("o");
    claimed(&held).await;
    statements.take();
    store.release(&[Release { claim: held, attempt_back: true }]).await;
    spent(&["SELECT c.token", "UPDATE inbox_claims"]);
    count_parking(&store, &owner, spent).await;
    store.close().await;
}

/// The rows of parking, of the same table.
async fn count_parking(store: &SqliteStore, owner: &OwnerId, spent: impl Fn(&[&str])) {
    let lease = Duration::from_secs(15);
    let (look, take, insert) = ("SELECT j.key,", "DELETE FROM", "INSERT INTO");
    let lane_id = LaneId([1; 16]);
    let held = claim("p");
    let asks = ClaimRequest { lane_id: Some(lane_id), ..request(&held) };
    store.claim(owner, lease, &[asks]).await;
    spent(&[insert, look]);
    let copy = |id| arrival(id, None).copy;
    store.park(&[Parking { claim: held, copy: copy("p") }]).await;
    spent(&[take, look, take, insert]);
    store.claim(owner, lease, &[request(&claim("p"))]).await;
    spent(&[insert, look]);

    let request = asking(1, lane_id);
    let (heads, alone, next) = ("WITH RECURSIVE", "SELECT 0,", "SELECT p.due_at");
    let taken = async || store.take_due(owner, lease, &request).await.expect("answered").rows;
    let row = taken().await.remove(0);
    spent(&[heads, heads, alone, next, insert, "SELECT p.subscription,"]);
    let reschedule = Reschedule {
        claim: row.claim,
        seq: row.seq,
        attempt_back: false,
        delay: Duration::ZERO,
        last_status: None,
        last_error: None,
    };
    store.reschedule(&[reschedule]).await;
    spent(&[take, "UPDATE inbox_parked"]);
    let row = taken().await.remove(0);
    spent(&[heads, heads, alone, next, insert, "SELECT p.subscription,"]);
    store.complete(&[Completion { parked: Some(row.seq), ..completion(&row.claim) }]).await;
    spent(&[take, insert, take]);

    store.arrive(&[arrival("q", None), arrival("r", None)]).await.expect("arrived");
    spent(&[look, insert, insert]);
    let row = taken().await.remove(0);
    spent(&[heads, heads, alone, insert, "SELECT p.subscription,"]);
    store.unpark(&[Unpark { claim: row.claim, seq: row.seq }]).await;
    spent(&[take, take]);
    let row = taken().await.remove(0);
    spent(&[heads, heads, alone, next, insert, "SELECT p.subscription,"]);
    store.dead_letter(&[letter(&row.claim)]).await;
    spent(&[take, look, insert]);
    let replay = Replay {
        seq: row.seq,
        delay: Duration::from_secs(60),
        allow_processed: false,
        fresh: uuid::Uuid::new_v4(),
    };
    let actor = Actor::new("anna");
    store.replay(&[replay], &actor).await;
    let (dead, processed, same) = ("SELECT consumer_id,", "SELECT fingerprint", "SELECT 1");
    spent(&[dead, processed, same, take, "UPDATE inbox_parked", insert]);
    store.dead_letter(&[DeadLetter { token: None, ..letter(&row.claim) }]).await;
    spent(&[insert]);
    store.discard(&[row.seq], &actor).await;
    spent(&["UPDATE inbox_parked", insert]);
}

fn completion(claim: &Claim) -> Completion {
    Completion {
        claim: claim.clone(),
        record: Default::default(),
        supersedes_dead: false,
        parked: None,
    }
}

fn letter(claim: &Claim) -> DeadLetter {
    DeadLetter {
        key: claim.key.clone(),
        token: Some(claim.token),
        subscription: "orders".into(),
        lane: None,
        lane_id: None,
        first_ago: Default::default(),
        envelope: Arc::new(Envelope::new(
            Origin::Memory { stream: "orders".into(), position: 1 },
            None,
        )),
        body_kept: true,
        fingerprint: None,
        attempts: 1,
        last_status: None,
        last_error: None,
        reason: DeadReason::Refused,
    }
}
