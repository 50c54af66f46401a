//! PgBouncer between the store and the server.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::slice;
use std::sync::Arc;
use std::time::Duration;

use inboxd_conformance::eventually;
use inboxd_contract::{
    Attempt, Claim, DeadLetter, DeadReason, Envelope, ErrorClass, InboxStore, Origin, Release,
    Settled, SweepPolicy,
};
use inboxd_postgres::{PostgresConfig, PostgresStore};

use crate::failover::{DEADLINE, claim, new_claim};
use crate::harness::{Harness, config};
use crate::server::completion;

const LEASE: Duration = Duration::from_secs(15);

/// A PgBouncer of the test's own before the shared server.
struct Pooler {
    process: Child,
    url: String,
    _directory: tempfile::TempDir,
}

impl Pooler {
    async fn start(harness: &Harness, settings: &str) -> Self {
        let server = url::Url::parse(&harness.url).expect("a URL");
        let directory = tempfile::tempdir().expect("a temporary directory");
        let file = directory.path().join("pgbouncer.ini");
        let port = free_port();
        let text = format!(
            "[databases]\n\
             * = host={} port={} user={}\n\
             [pgbouncer]\n\
             listen_addr = 127.0.0.1\n\
             listen_port = {port}\n\
             unix_socket_dir =\n\
             auth_type = any\n\
             {settings}\n",
            server.host_str().expect("a host"),
            server.port().unwrap_or(5432),
            server.username(),
        );
        std::fs::write(&file, text).expect("written");
        let process = command(&file, directory.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("PgBouncer is there; `scripts/services up` installs it");
        let mut through = server.clone();
        through.set_host(Some("127.0.0.1")).expect("a host");
        through.set_port(Some(port)).expect("a port");
        through.query_pairs_mut().append_pair("sslmode", "disable");
        let pooler = Self { process, url: through.into(), _directory: directory };
        eventually(DEADLINE, async || {
            let connected = tokio::net::TcpStream::connect(("127.0.0.1", port)).await;
            connected.map(drop).map_err(|error| error.to_string())
        })
        .await;
        pooler
    }

    fn store(&self, harness: &Harness, prepared_statements: bool) -> PostgresStore {
        let config = PostgresConfig {
            pool_max: 16,
            prepared_statements,
            ..config(&self.url, &harness.schema)
        };
        PostgresStore::connect(config).expect("a valid configuration")
    }
}

impl Drop for Pooler {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Debian keeps it where only root's path leads. It refuses to run as root.
fn command(file: &Path, directory: &Path) -> Command {
    let debian = Path::new("/usr/sbin/pgbouncer");
    let program = if debian.exists() { debian } else { Path::new("pgbouncer") };
    let owner = std::fs::metadata(directory).map(|of| std::os::unix::fs::MetadataExt::uid(&of));
    if owner.expect("the directory is there") != 0 {
        let mut command = Command::new(program);
        command.arg(file);
        return command;
    }
    let mut command = Command::new("setpriv");
    command
        .args(["--reuid=postgres", "--regid=postgres", "--init-groups"])
        .args(["--inh-caps=+dac_override", "--ambient-caps=+dac_override"])
        .arg(program)
        .arg(file);
    command
}

fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address").port()
}

const TRANSACTIONS: &str = "pool_mode = transaction\ndefault_pool_size = 3";

fn letter(claim: &Claim) -> DeadLetter {
    DeadLetter {
        key: claim.key.clone(),
        token: Some(claim.token),
        subscription: "orders".into(),
        lane: None,
        lane_id: None,
        first_ago: Default::default(),
        envelope: Arc::new(Envelope::new(
            Origin::Memory { stream: "orders".into(), position: 7 },
            Some(b"body".as_slice().into()),
        )),
        body_kept: true,
        fingerprint: None,
        attempts: 1,
        last_status: None,
        last_error: None,
        reason: DeadReason::Refused,
    }
}

/// Every call that an engine makes, on messages of its own.
async fn all_calls(store: &PostgresStore) {
    let ok = "works through a pooler";
    for _ in 0..5 {
        let (one, dead) = (new_claim(), new_claim());
        assert!(claim(store, &one).await.expect(ok).is_held());
        assert!(claim(store, &dead).await.expect(ok).is_held());
        assert_eq!(store.renew(LEASE, slice::from_ref(&one)).await.expect(ok), [one.token]);
        let counted = store.count_attempts(slice::from_ref(&one)).await.remove(0).expect(ok);
        assert!(matches!(counted, Attempt::Counted(2)), "{counted:?}");
        let release = Release { claim: one.clone(), attempt_back: true };
        assert_eq!(store.release(&[release]).await.remove(0).expect(ok), Settled::Done);
        assert!(claim(store, &one).await.expect(ok).is_held());
        let done = store.complete(&[completion(&one)]).await.remove(0).expect(ok);
        assert_eq!(done, Settled::Done);
        let done = store.dead_letter(&[letter(&dead)]).await.remove(0).expect(ok);
        assert_eq!(done, Settled::Done);
        assert_eq!(store.parked(&dead.key).await.expect(ok).len(), 1);
        assert!(store.explain(&one.key).await.expect(ok).message.is_some());
        let policy = SweepPolicy {
            retention: Duration::from_secs(3_600),
            dead_retention: Duration::from_secs(3_600),
            idle_claims: Duration::from_secs(3_600),
            batch: 100,
        };
        // One at a time sweeps; the others are told so.
        store.sweep(&policy).await.expect(ok);
        store.stats().await.expect(ok);
        store.ping().await.expect(ok);
    }
}

/// D7, with the documented setting: three connections of the server for sixteen callers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transactions_are_pooled_without_prepared_statements() {
    let harness = Harness::new().await;
    let pooler = Pooler::start(&harness, TRANSACTIONS).await;
    let store = pooler.store(&harness, false);
    store.migrate().await.expect("migrated through the pooler");
    futures::future::join_all((0..16).map(|_| all_calls(&store))).await;

    // One key, sixteen who want it.
    let one = new_claim();
    let claims: Vec<Claim> =
        (0..16).map(|_| Claim { key: one.key.clone(), ..new_claim() }).collect();
    let answers = futures::future::join_all(claims.iter().map(|one| claim(&store, one))).await;
    let held = answers.iter().filter(|answer| answer.as_ref().is_ok_and(|one| one.is_held()));
    assert_eq!(held.count(), 1, "{answers:?}");
    store.close().await;
    drop(pooler);
    harness.drop_schemas().await;
}

/// D7, without it: the start is refused and names the setting, however the pooler goes round its
/// connections, and whether others use them at the same time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_prepared_statements_are_found_at_the_start() {
    let harness = Harness::new().await;
    for settings in ["", "server_round_robin = 1", "server_round_robin = 1\nmin_pool_size = 3"] {
        let pooler = Pooler::start(&harness, &format!("{TRANSACTIONS}\n{settings}")).await;
        let refused = async || {
            let store = pooler.store(&harness, true);
            let error = store.migrate().await.expect_err("prepared statements are lost");
            store.close().await;
            assert_eq!(error.class, ErrorClass::Permanent, "{settings}: {error}");
            assert!(error.what.contains("prepared_statements = false"), "{settings}: {error}");
        };
        refused().await;
        // What the first one has left on the server's connections is there for the second.
        refused().await;
        let store = pooler.store(&harness, false);
        let busy = futures::future::join_all((0..8).map(|_| all_calls(&store)));
        futures::join!(refused(), busy);
        store.close().await;
    }
    harness.drop_schemas().await;
}

/// A pooler that leaves a connection to its client is no trouble, and none at all is none.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prepared_statements_that_are_kept_are_used() {
    let harness = Harness::new().await;
    let pooler = Pooler::start(&harness, "pool_mode = session\ndefault_pool_size = 30").await;
    let store = pooler.store(&harness, true);
    store.migrate().await.expect("statements are kept");
    futures::future::join_all((0..16).map(|_| all_calls(&store))).await;
    store.close().await;
    drop(pooler);

    let store = harness.store();
    let starts = futures::future::join_all((0..4).map(|_| store.migrate())).await;
    assert!(starts.iter().all(Result::is_ok), "{starts:?}");
    store.close().await;
    harness.drop_schemas().await;
}
