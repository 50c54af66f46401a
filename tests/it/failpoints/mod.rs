//! The process dies by SIGKILL at every place that `src/failpoints.rs` lists, with a real broker
//! and store, and is started again: nothing is lost, and the application sees no more POSTs than
//! the list says.
//!
//! Brokers and stores take turns over the list, so that each is met. A place that is added there
//! wants its scenario here, or this does not compile.

use std::os::unix::process::ExitStatusExt as _;
use std::panic::AssertUnwindSafe;

use futures::FutureExt as _;
use futures::future::join_all;
use inboxd::failpoints::{Failpoint, VARIABLE};
use inboxd_conformance::app::{Answer, App};
use inboxd_conformance::{ensure, eventually};
use strum::IntoEnumIterator as _;

use crate::support::{
    Broker, BrokerKind, Database, DatabaseKind, Message, PATIENCE, Sidecar, config,
};

const BROKERS: [BrokerKind; 2] = [BrokerKind::Kafka, BrokerKind::RabbitQuorum];
const STORES: [DatabaseKind; 3] =
    [DatabaseKind::Sqlite, DatabaseKind::Postgres, DatabaseKind::MariaDb];
/// How often the application fails a message that is to be parked and put off.
const FAILURES: usize = 3;
const VICTIM: &str = "victim";

/// What brings the process to a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scenario {
    /// Forwarded at once, and accepted.
    Direct,
    /// Fails in place, is parked, fails once more, and is accepted then.
    Parked,
    /// Parked on arrival.
    Stored,
    /// Refused: a dead letter, on the broker and in the table.
    Letter,
    /// A dead letter that is replayed.
    Replay,
}

fn scenario(point: Failpoint) -> Scenario {
    match point {
        Failpoint::InPlaceClaimed
        | Failpoint::InPlaceAccepted
        | Failpoint::InPlaceCompleted
        | Failpoint::InPlaceAcked => Scenario::Direct,
        Failpoint::ParkBegins
        | Failpoint::ParkCommitted
        | Failpoint::TakeCommitted
        | Failpoint::RescheduleBegins
        | Failpoint::RescheduleCommitted
        | Failpoint::WorkerAccepted => Scenario::Parked,
        Failpoint::ArriveBegins
        | Failpoint::ArriveCommitted
        | Failpoint::TakeBegins
        | Failpoint::WorkerCompleted => Scenario::Stored,
        Failpoint::LetterBegins | Failpoint::LetterPublished | Failpoint::LetterKept => {
            Scenario::Letter
        }
        Failpoint::ReplayBegins | Failpoint::ReplayCommitted => Scenario::Replay,
    }
}

/// One place, and what it is met with.
struct Trial {
    point: Failpoint,
    scenario: Scenario,
    app: App,
    broker: Broker,
    /// Where dead letters are published.
    letters: Broker,
    database: Database,
    sidecar: Sidecar,
}

impl Trial {
    async fn start(point: Failpoint, at: usize) -> Self {
        let scenario = scenario(point);
        let (broker, store) = (BROKERS[at % BROKERS.len()], STORES[at % STORES.len()]);
        let app = App::start().await;
        match scenario {
            Scenario::Direct | Scenario::Stored => {}
            Scenario::Parked => app.plan(VICTIM, vec![Answer::status(500); FAILURES]),
            // Also where it is forwarded again because of the death.
            Scenario::Letter => app.plan(VICTIM, vec![Answer::status(422); 10]),
            Scenario::Replay => app.plan(VICTIM, [Answer::status(422)]),
        }
        let broker = Broker::new(broker).await;
        let letters = broker.sibling().await;
        let database = Database::new(store);
        // MariaDB counts lock timeouts in whole seconds.
        let lease = if store == DatabaseKind::MariaDb { "5s" } else { "1s" };
        let mut keys = format!(
            "lease = \"{lease}\"\nretry = {{ initial = \"10ms\", attempts_max = 2 }}\n\
             park = {{ initial = \"100ms\", factor = 1, jitter = \"none\" }}\n"
        );
        match scenario {
            Scenario::Stored => keys.push_str("delivery = \"stored\"\n"),
            Scenario::Letter => keys.push_str(&format!(
                "dead_letter = {{ to = \"both\", {} = \"{}\" }}\n",
                if broker.kind == BrokerKind::Kafka { "topic" } else { "routing_key" },
                letters.name
            )),
            Scenario::Direct | Scenario::Parked | Scenario::Replay => {}
        }
        let text = config(&broker, &database, &broker.name, &app.url("/"), &keys, "");
        let sidecar = Sidecar::start_with(&text, &[(VARIABLE, point.name())]);
        Self { point, scenario, app, broker, letters, database, sidecar }
    }

    fn told(&self) -> String {
        let (broker, store) = (self.broker.kind, self.database.kind);
        format!("{}, {broker:?}, {store:?}\n{}", self.point.name(), self.sidecar.log())
    }

    /// Runs into the place and dies there.
    async fn die(&mut self) {
        // On Kafka the whole batch is one: an ack of another message would come first.
        self.broker.publish([Message::id(VICTIM)]).await;
        if self.scenario == Scenario::Replay {
            self.dead_letter_is_there().await;
            let answer = self.replay().await;
            assert!(answer.is_none(), "it answered {answer:?}: {}", self.told());
        }
        let status = self.sidecar.ended().await;
        assert_eq!(status.signal(), Some(9), "{status}: {}", self.told());
    }

    async fn replay(&self) -> Option<(u16, String)> {
        let body = "{\"all\":true}";
        self.sidecar.post("/v1/dead-letters/replay", body).await
    }

    async fn dead_letter_is_there(&self) {
        eventually(PATIENCE, async || {
            let dead = self.database.dead(&self.broker.name).await;
            ensure(dead.get(VICTIM) == Some(&1), format!("dead: {dead:?}; {}", self.told()))
        })
        .await;
    }

    async fn processed(&self, ids: &[&str]) {
        eventually(PATIENCE, async || {
            let rows = self.database.rows(&self.broker.name).await;
            let parked = self.database.parked(&self.broker.name).await;
            let claims = self.database.claims(&self.broker.name).await;
            ensure(
                ids.iter().all(|id| rows.contains(*id)) && parked.is_empty() && claims.is_empty(),
                format!("{rows:?}, parked {parked:?}, claims {claims:?}; {}", self.told()),
            )
        })
        .await;
    }

    /// Started again: what was under way comes to its end, and so does what follows.
    async fn recover(&mut self) {
        self.sidecar.start_again_with(&[]);
        self.broker.publish([Message::id("later")]).await;
        match self.scenario {
            Scenario::Letter => {
                self.processed(&["later"]).await;
                self.dead_letter_is_there().await;
            }
            Scenario::Replay if self.point == Failpoint::ReplayBegins => {
                self.sidecar.ready().await;
                let answer = self.replay().await;
                assert!(
                    answer.as_ref().is_some_and(|(status, _)| *status < 300),
                    "{answer:?}: {}",
                    self.told()
                );
                self.processed(&[VICTIM, "later"]).await;
            }
            _ => self.processed(&[VICTIM, "later"]).await,
        }
        let status = self.sidecar.stop().await;
        assert!(status.success(), "{status}: {}", self.told());
        eventually(PATIENCE, async || {
            let left = self.broker.left(&self.broker.name).await;
            ensure(left == 0, format!("{left} left on the broker; {}", self.told()))
        })
        .await;
    }

    /// POSTs, accepted ones and dead letters are those that the list allows.
    async fn account(&self) {
        let (ledger, more) = (self.app.ledger(), self.point.about().posts_more);
        let without = match self.scenario {
            Scenario::Direct | Scenario::Stored | Scenario::Letter => 1,
            Scenario::Parked => FAILURES + 1,
            Scenario::Replay => 2,
        };
        let begun = ledger.begun_of(VICTIM);
        assert!(
            (without..=without + more).contains(&begun),
            "{begun} POSTs instead of {without} to {}: {}",
            without + more,
            self.told()
        );
        assert_eq!(ledger.begun_of("later"), 1, "{}", self.told());
        let dead = self.database.dead(&self.broker.name).await;
        if self.scenario != Scenario::Letter {
            assert!(dead.is_empty(), "dead: {dead:?}; {}", self.told());
            return;
        }
        assert_eq!(ledger.accepted(VICTIM), 0, "{}", self.told());
        let copies = self.letters.left("nobody").await;
        let most = if self.point == Failpoint::LetterBegins { 1 } else { 2 };
        assert!((1..=most).contains(&copies), "{copies} copies; {}", self.told());
    }
}

async fn dies_at(point: Failpoint, at: usize) {
    let mut trial = Trial::start(point, at).await;
    trial.die().await;
    trial.recover().await;
    trial.account().await;
    println!("failpoint {}: {:?}, {:?}", point.name(), trial.broker.kind, trial.database.kind);
}

/// All of one scenario, side by side.
async fn all_of(wanted: Scenario) {
    let points: Vec<_> =
        Failpoint::iter().enumerate().filter(|(_, point)| scenario(*point) == wanted).collect();
    assert!(!points.is_empty());
    let trials = points.into_iter().map(|(at, point)| async move {
        // One that fails says why by itself, and hides no other.
        let trial = AssertUnwindSafe(dies_at(point, at)).catch_unwind().await;
        (point.name(), trial.is_ok())
    });
    let ended = join_all(trials).await;
    let failed: Vec<_> = ended.iter().filter(|(_, passed)| !passed).collect();
    assert!(failed.is_empty(), "{failed:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost_where_a_message_is_forwarded_at_once() {
    all_of(Scenario::Direct).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost_where_a_message_fails_and_is_parked() {
    all_of(Scenario::Parked).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost_where_a_message_is_stored_first() {
    all_of(Scenario::Stored).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost_where_a_message_becomes_a_dead_letter() {
    all_of(Scenario::Letter).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost_where_a_dead_letter_is_replayed() {
    all_of(Scenario::Replay).await;
}
