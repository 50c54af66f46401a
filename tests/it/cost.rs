//! What one message through an idle sidecar costs, counted where it arrives: statements and
//! acks on the wire by proxies, POSTs by the application, calls by the sidecar's own figures.
//! The numbers are those of docs/store-statements.md.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use inboxd_conformance::app::App;
use inboxd_conformance::net::{Act, Direction, Proxy};
use inboxd_conformance::{ensure, eventually};
use url::Url;

use crate::support::{
    Broker, BrokerKind, Database, DatabaseKind, Message, PATIENCE, Sidecar, config, stop_all,
};

const MESSAGES: usize = 5;

/// Transactions, each with its statements; an ack is one of one.
type Log = Arc<Mutex<Vec<Vec<String>>>>;

/// What clients send through a proxy: one reader per connection.
fn listen<R: Reader + 'static>(proxy: &Proxy) -> Log {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&seen);
    let mut connections: HashMap<usize, R> = HashMap::new();
    proxy.hook_each(move |connection, direction, chunk| {
        if direction == Direction::ToServer {
            let reader = connections.entry(connection).or_default();
            reader.buffer().extend_from_slice(chunk);
            while let Some(what) = reader.next() {
                log.lock().expect("no panic").extend(what);
            }
        }
        Act::Pass
    });
    seen
}

/// Reads a protocol's messages from what a client sends.
trait Reader: Default + Send {
    fn buffer(&mut self) -> &mut Vec<u8>;
    /// What the next whole message completes, if that is of interest; `None` without a whole one.
    fn next(&mut self) -> Option<Option<Vec<String>>>;
}

/// Statements since a beginning.
#[derive(Default)]
struct Transaction(Option<Vec<String>>);

impl Transaction {
    /// Adds a statement; at its commit the transaction is whole.
    fn add(&mut self, statement: String) -> Option<Vec<String>> {
        if statement.starts_with("BEGIN") || statement.contains("START TRANSACTION") {
            self.0 = Some(Vec::new());
            return None;
        }
        if statement == "COMMIT" {
            return self.0.take();
        }
        match &mut self.0 {
            Some(statements) => {
                statements.push(statement);
                None
            }
            // What sets a new connection up is not a message's.
            None => statement.contains("inbox_").then(|| vec![format!("outside: {statement}")]),
        }
    }
}

fn number(bytes: &[u8]) -> usize {
    bytes.iter().fold(0, |number, byte| number << 8 | usize::from(*byte))
}

fn take(buffer: &mut Vec<u8>, length: usize) -> Option<Vec<u8>> {
    (buffer.len() >= length).then(|| buffer.drain(..length).collect())
}

/// Text up to a zero byte, and what is behind it.
fn text(bytes: &[u8]) -> (String, &[u8]) {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    let rest = bytes.get(end + 1..).unwrap_or_default();
    (String::from_utf8_lossy(&bytes[..end]).into_owned(), rest)
}

/// PostgreSQL: simple queries, and executions of prepared statements by their text.
#[derive(Default)]
struct Postgres {
    buffer: Vec<u8>,
    has_begun: bool,
    prepared: HashMap<String, String>,
    bound: HashMap<String, String>,
    transaction: Transaction,
}

impl Reader for Postgres {
    fn buffer(&mut self) -> &mut Vec<u8> {
        &mut self.buffer
    }

    fn next(&mut self) -> Option<Option<Vec<String>>> {
        let head = if self.has_begun { 1 } else { 0 };
        let length = head + number(self.buffer.get(head..head + 4)?);
        let message = take(&mut self.buffer, length)?;
        let body = &message[head + 4..];
        if !self.has_begun {
            // A wish for TLS comes before the start.
            self.has_begun = number(&body[..4]) != 80_877_103;
            return Some(None);
        }
        let (name, rest) = text(body);
        Some(match message[0] {
            b'Q' => self.transaction.add(name),
            b'P' => {
                self.prepared.insert(name, text(rest).0);
                None
            }
            b'B' => {
                let statement = self.prepared.get(&text(rest).0).cloned().unwrap_or_default();
                self.bound.insert(name, statement);
                None
            }
            b'E' => self.transaction.add(self.bound.get(&name).cloned().unwrap_or_default()),
            _ => None,
        })
    }
}

/// MySQL: queries, and executions of prepared statements by their number.
#[derive(Default)]
struct MySql {
    buffer: Vec<u8>,
    transaction: Transaction,
}

impl Reader for MySql {
    fn buffer(&mut self) -> &mut Vec<u8> {
        &mut self.buffer
    }

    fn next(&mut self) -> Option<Option<Vec<String>>> {
        let head = self.buffer.get(..4)?;
        let length = usize::from(head[0]) | usize::from(head[1]) << 8 | usize::from(head[2]) << 16;
        let message = take(&mut self.buffer, 4 + length)?;
        // Commands begin a count of packets.
        Some(match (message[3], message.get(4)) {
            (0, Some(0x03)) => self.transaction.add(text(&message[5..]).0),
            (0, Some(0x17)) => self.transaction.add(format!("EXECUTE {}", message[5])),
            _ => None,
        })
    }
}

/// RabbitMQ: acks, nacks and rejects.
#[derive(Default)]
struct Amqp {
    buffer: Vec<u8>,
    has_begun: bool,
}

impl Reader for Amqp {
    fn buffer(&mut self) -> &mut Vec<u8> {
        &mut self.buffer
    }

    fn next(&mut self) -> Option<Option<Vec<String>>> {
        if !self.has_begun {
            self.has_begun = true;
            return take(&mut self.buffer, 8).map(|_| None);
        }
        let size = number(self.buffer.get(3..7)?);
        let frame = take(&mut self.buffer, 7 + size + 1)?;
        let is_method = frame[0] == 1;
        Some(match frame.get(7..11) {
            Some([0, 60, 0, 80]) if is_method => Some(vec!["ack".to_owned()]),
            Some([0, 60, 0, 90 | 120]) if is_method => Some(vec!["no ack".to_owned()]),
            _ => None,
        })
    }
}

/// The number of statements in each transaction but for the looks whether the database is there,
/// which are of one statement.
fn spent(database: DatabaseKind, transactions: &[Vec<String>]) -> Vec<usize> {
    let is_ping = |transaction: &[String]| match database {
        DatabaseKind::Postgres => transaction[0].contains("pg_is_in_recovery"),
        _ => transaction.len() == 1,
    };
    transactions.iter().filter(|one| !is_ping(one)).map(Vec::len).collect()
}

/// `claim` and `completion` are the statements of each between beginning and commit.
async fn one_message(broker: BrokerKind, database: DatabaseKind, claim: usize, completion: usize) {
    let what = format!("{broker:?}, {database:?}");
    let app = App::start().await;
    let mut database = Database::new(database);
    let mut statements = None;
    // Kept to the end: they are the way.
    let mut proxies = Vec::new();
    if database.kind != DatabaseKind::Sqlite {
        let proxy = Proxy::start(database.address()).await;
        statements = Some(match database.kind {
            DatabaseKind::Postgres => listen::<Postgres>(&proxy),
            _ => listen::<MySql>(&proxy),
        });
        database = database.through(proxy.addr);
        proxies.push(proxy);
    }
    let broker = Broker::new(broker).await;
    let group = broker.name.clone();
    let direct = config(&broker, &database, &group, &app.url("/"), "", "");
    let mut acks = None;
    let config = if broker.kind == BrokerKind::Kafka {
        direct
    } else {
        let mut url = Url::parse(broker.url()).expect("a URL");
        let address = format!("{}:{}", url.host_str().expect("a host"), url.port().unwrap_or(5672));
        let proxy = Proxy::start(address).await;
        acks = Some(listen::<Amqp>(&proxy));
        url.set_ip_host(proxy.addr.ip()).expect("a host");
        url.set_port(Some(proxy.port())).expect("a port");
        proxies.push(proxy);
        direct.replace(&broker.config(), &broker.config_with(url.as_str()))
    };
    let sidecar = Sidecar::start(&config);
    sidecar.ready().await;

    // The first one also connects and prepares.
    for n in 0..=MESSAGES {
        for log in statements.iter().chain(&acks) {
            log.lock().expect("no panic").clear();
        }
        let calls_before = calls(&sidecar).await;
        broker.publish([Message::id(format!("m{n}"))]).await;
        eventually(PATIENCE, async || {
            let (processed, in_flight) =
                (sidecar.outcomes("processed").await as usize, sidecar.in_flight().await);
            let acked = acks.as_ref().is_none_or(|acks| !acks.lock().expect("no panic").is_empty());
            let state = format!("{what}: {processed}, {acked}; log:\n{}", sidecar.log());
            ensure(processed == n + 1 && in_flight == 0 && acked, state)
        })
        .await;
        if n == 0 {
            continue;
        }
        let calls: Vec<_> = calls(&sidecar)
            .await
            .into_iter()
            .zip(calls_before)
            .map(|(now, then)| now - then)
            .collect();
        assert_eq!(calls, [1, 1, 1, 0], "{what}: {CALLS:?}");
        if let Some(log) = &statements {
            let log = log.lock().expect("no panic");
            assert_eq!(spent(database.kind, &log), [claim, completion], "{what}: {log:#?}");
        }
        if let Some(log) = &acks {
            assert_eq!(*log.lock().expect("no panic"), [["ack"]], "{what}");
        }
    }
    assert_eq!(app.ledger().begun(), MESSAGES + 1, "one POST each");
    stop_all(&broker, &group, &mut [sidecar]).await;
}

const CALLS: [&str; 4] = ["claim", "complete", "POST", "any other call of the store"];

/// So many of each, so far.
async fn calls(sidecar: &Sidecar) -> [u64; 4] {
    let name = "inboxd_store_call_duration_seconds_count";
    let all = sidecar.metric(name, &[]).await as u64;
    let claims = sidecar.metric(name, &["call=\"claim\""]).await as u64;
    let completions = sidecar.metric(name, &["call=\"complete\""]).await as u64;
    let posts = sidecar.metric("inboxd_forwards_total", &[]).await as u64;
    [claims, completions, posts, all - claims - completions]
}

#[tokio::test(flavor = "multi_thread")]
async fn one_message_is_one_claim_one_post_one_completion_and_one_ack() {
    tokio::join!(
        one_message(BrokerKind::RabbitQuorum, DatabaseKind::Postgres, 2, 1),
        one_message(BrokerKind::RabbitClassic, DatabaseKind::MariaDb, 2, 3),
        one_message(BrokerKind::RabbitClassic, DatabaseKind::Sqlite, 2, 2),
        one_message(BrokerKind::Kafka, DatabaseKind::Postgres, 2, 1),
    );
}
