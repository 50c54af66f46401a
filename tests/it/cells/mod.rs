//! Every delivery × ordering × broker × store on real servers: ids that come twice, messages that
//! fail until they are parked and for longer, and a restart in the middle. Each is processed once,
//! in the order that was asked for, and nothing is left unsettled, claimed or parked.
//!
//! `scripts/cells` prints which cells there are from what each prints here.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use inboxd_conformance::app::{Answer, App, Ledger};
use inboxd_conformance::{ensure, eventually};

use crate::support::{
    Broker, BrokerKind, Database, DatabaseKind, Message, PATIENCE, Sidecar, config,
};

const MESSAGES: usize = 60;
const KEYS: usize = 5;
const PARTITIONS: usize = 4;
/// Messages that fail, one of them the last of its lane.
const FAILING: [usize; 4] = [2, 9, 21, 59];
/// How often each does: more often than it is tried in place.
const FAILURES: usize = 3;
const SUBSCRIPTION: &str = "concurrency = 4\nlease = \"6s\"\n\
    retry = { initial = \"10ms\", attempts_max = 2 }\n\
    park = { initial = \"200ms\", factor = 1, jitter = \"none\" }";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Delivery {
    Direct,
    Stored,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ordering {
    None,
    Key,
    Partition,
}

#[derive(Debug, Clone, Copy)]
struct Cell {
    delivery: Delivery,
    ordering: Ordering,
    broker: BrokerKind,
    store: DatabaseKind,
}

impl Cell {
    /// A queue whose kind goes with the ordering.
    fn broker(self) -> BrokerKind {
        match (self.broker, self.ordering) {
            (BrokerKind::RabbitQuorum, Ordering::Key | Ordering::Partition) => {
                BrokerKind::RabbitClassic
            }
            (kind, _) => kind,
        }
    }

    fn keys(self) -> String {
        let word = |name: String| name.to_lowercase();
        let mut keys = format!(
            "{SUBSCRIPTION}\ndelivery = \"{}\"\nordering = \"{}\"\n",
            word(format!("{:?}", self.delivery)),
            word(format!("{:?}", self.ordering))
        );
        if self.ordering == Ordering::Key && self.broker != BrokerKind::Kafka {
            keys.push_str("ordering_key = \"header:key\"\n");
        }
        keys
    }

    /// `k3/017`: its lane and its place.
    fn id(self, n: usize) -> String {
        let lane = match (self.ordering, self.broker) {
            (Ordering::Partition, BrokerKind::Kafka) => format!("p{}", n % PARTITIONS),
            (Ordering::Partition, _) => "queue".to_owned(),
            _ => format!("k{}", n % KEYS),
        };
        format!("{lane}/{n:03}")
    }

    fn message(self, n: usize) -> Message {
        let partition = i32::try_from(n % PARTITIONS).expect("few partitions");
        let message = Message::id(self.id(n)).key(format!("k{}", n % KEYS));
        // One key is in one partition, or the order would be lost before it is kept.
        match self.ordering {
            Ordering::Partition => message.partition(partition),
            Ordering::None | Ordering::Key => message,
        }
    }

    /// Every tenth a second time, a little later.
    fn messages(self) -> Vec<Message> {
        let mut published = Vec::new();
        for n in 0..MESSAGES {
            published.push(self.message(n));
            if n % 10 == 5 {
                published.push(self.message(n - 3));
            }
        }
        published
    }
}

async fn run(cell: Cell) {
    let app = App::start().await;
    app.set_default(Answer::status(200).after(Duration::from_millis(30)));
    let failing: BTreeSet<String> = FAILING.iter().map(|n| cell.id(*n)).collect();
    for id in &failing {
        app.plan(id, vec![Answer::status(500); FAILURES]);
    }
    let database = Database::new(cell.store);
    let broker = Broker::new(cell.broker()).await;
    let group = broker.name.clone();
    let mut sidecar =
        Sidecar::start(&config(&broker, &database, &group, &app.url("/"), &cell.keys(), ""));
    broker.publish(cell.messages()).await;

    let ledger = app.ledger();
    accepted(ledger, MESSAGES / 3, &sidecar).await;
    let mut parked = sidecar.outcomes("parked").await;
    let status = sidecar.stop().await;
    assert!(status.success(), "{status}:\n{}", sidecar.log());
    assert!(ledger.accepted_distinct() < MESSAGES, "all were through before the restart");
    sidecar.start_again();
    accepted(ledger, MESSAGES, &sidecar).await;
    eventually(PATIENCE, async || {
        let rows = database.rows(&group).await.len();
        let due = database.parked(&group).await;
        let claims = database.claims(&group).await;
        ensure(
            rows == MESSAGES && due.is_empty() && claims.is_empty(),
            format!("{rows} rows, due {due:?}, claims {claims:?}\n{}", sidecar.log()),
        )
    })
    .await;
    parked += sidecar.outcomes("parked").await;
    let status = sidecar.stop().await;
    assert!(status.success(), "{status}:\n{}", sidecar.log());

    eventually(PATIENCE, async || {
        let left = broker.left(&group).await;
        ensure(left == 0, format!("{left} left on the broker\n{}", sidecar.log()))
    })
    .await;
    let twice = ledger.accepted_more_than_once();
    assert!(twice.is_empty(), "accepted more than once: {twice:?}\n{}", sidecar.log());
    assert!(database.dead(&group).await.is_empty(), "{}", sidecar.log());
    let least = match cell.delivery {
        Delivery::Direct => 1,
        // Those of the first life may have been parked after it was looked.
        Delivery::Stored => FAILING.len() as u64,
    };
    assert!(parked >= least, "{parked} parked\n{}", sidecar.log());
    for id in failing {
        let begun = ledger.begun_of(&id);
        assert_eq!(begun, FAILURES + 1, "POSTs of {id}\n{}", sidecar.log());
    }
    if cell.ordering != Ordering::None {
        assert_in_order(ledger, &sidecar);
    }
}

async fn accepted(ledger: &Ledger, at_least: usize, sidecar: &Sidecar) {
    eventually(PATIENCE, async || {
        let accepted = ledger.accepted_distinct();
        ensure(accepted >= at_least, format!("{accepted} accepted; log:\n{}", sidecar.log()))
    })
    .await;
}

/// In every lane POSTs began in the broker's order; one that failed began again.
fn assert_in_order(ledger: &Ledger, sidecar: &Sidecar) {
    let mut lanes: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for post in ledger.all() {
        let (lane, place) = post.id.split_once('/').expect("a lane and a place");
        lanes.entry(lane.to_owned()).or_default().push(place.to_owned());
    }
    for (lane, places) in lanes {
        assert!(places.is_sorted(), "lane {lane}: {places:?}\n{}", sidecar.log());
    }
}

/// Runs a cell and says that it ran, for `scripts/cells`.
macro_rules! cell {
    ($name:ident, $delivery:ident, $ordering:ident, $broker:ident, $store:ident) => {
        #[tokio::test(flavor = "multi_thread")]
        async fn $name() {
            run(Cell {
                delivery: Delivery::$delivery,
                ordering: Ordering::$ordering,
                broker: BrokerKind::$broker,
                store: DatabaseKind::$store,
            })
            .await;
            let (_, path) = module_path!().split_once("cells::").expect("this module");
            let path = path.replace("::", " ");
            println!("cell {path} {}: {MESSAGES} messages", stringify!($name));
        }
    };
}

macro_rules! stores {
    ($delivery:ident, $ordering:ident, $broker:ident) => {
        use super::super::super::*;
        cell!(postgres, $delivery, $ordering, $broker, Postgres);
        cell!(mysql, $delivery, $ordering, $broker, MariaDb);
        cell!(sqlite, $delivery, $ordering, $broker, Sqlite);
    };
}

macro_rules! brokers {
    ($delivery:ident, $ordering:ident) => {
        mod kafka {
            stores!($delivery, $ordering, Kafka);
        }
        mod rabbitmq {
            stores!($delivery, $ordering, RabbitQuorum);
        }
    };
}

macro_rules! orderings {
    ($delivery:ident) => {
        mod none {
            brokers!($delivery, None);
        }
        mod key {
            brokers!($delivery, Key);
        }
        mod partition {
            brokers!($delivery, Partition);
        }
    };
}

mod direct {
    orderings!(Direct);
}
mod stored {
    orderings!(Stored);
}
