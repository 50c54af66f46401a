//! Messages per second of the sidecar, of the raw loop and of the ledger loop, in turns.
//!
//! The rate is that between the first and the last POST of a run: starting, joining a group and
//! ending are not in it. What counts is the ratio to the raw loop of the same round.

use std::path::Path;

use clap::{Args, ValueEnum};
use tempfile::TempDir;

use crate::application::Application;
use crate::loops::{Ledger, Loop};
use crate::queue::Queue;
use crate::sidecar::Sidecar;
use crate::topic::Topic;

pub(crate) const BODY: &[u8] = &[b'x'; 200];

#[derive(Args)]
pub(crate) struct Options {
    /// Messages of each run
    #[arg(long, default_value_t = 20_000)]
    messages: u64,
    /// How often each is run
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// POSTs at once
    #[arg(long, default_value_t = 16)]
    concurrency: usize,
    /// Unsettled deliveries on RabbitMQ
    #[arg(long, default_value_t = 200)]
    prefetch: u16,
    /// Only this broker
    #[arg(long)]
    broker: Option<Broker>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Broker {
    Rabbitmq,
    Kafka,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Database {
    Sqlite,
    Postgres,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Contestant {
    Raw,
    Ledger(Database),
    Sidecar(Database),
}

impl Contestant {
    const ALL: [Self; 5] = [
        Self::Raw,
        Self::Ledger(Database::Sqlite),
        Self::Sidecar(Database::Sqlite),
        Self::Ledger(Database::Postgres),
        Self::Sidecar(Database::Postgres),
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw loop: consume, POST, ack",
            Self::Ledger(Database::Sqlite) => "the same with an insert, SQLite",
            Self::Ledger(Database::Postgres) => "the same with an insert, PostgreSQL",
            Self::Sidecar(Database::Sqlite) => "inboxd, SQLite",
            Self::Sidecar(Database::Postgres) => "inboxd, PostgreSQL",
        }
    }
}

pub(crate) async fn run(program: &Path, options: Options) -> anyhow::Result<()> {
    let application = Application::start().await?;
    for broker in [Broker::Rabbitmq, Broker::Kafka] {
        if options.broker.is_some_and(|only| only != broker) {
            continue;
        }
        println!(
            "\n{broker:?}: {} messages of {} bytes, {} POSTs at once, {} rounds",
            options.messages,
            BODY.len(),
            options.concurrency,
            options.rounds
        );
        let mut rates = vec![Vec::new(); Contestant::ALL.len()];
        let mut ratios = vec![Vec::new(); Contestant::ALL.len()];
        for _ in 0..options.rounds {
            let mut raw = None;
            for (index, contestant) in Contestant::ALL.into_iter().enumerate() {
                let rate = one(program, &application, &options, broker, contestant).await?;
                rates[index].push(rate);
                ratios[index].push(rate / *raw.get_or_insert(rate));
            }
        }
        println!("{:<40} {:>10} {:>14}", "", "messages/s", "of the raw one");
        for (index, contestant) in Contestant::ALL.into_iter().enumerate() {
            let (rate, ratio) = (median(&mut rates[index]), median(&mut ratios[index]));
            println!("{:<40} {rate:>10.0} {ratio:>14.2}", contestant.name());
        }
    }
    Ok(())
}

async fn one(
    program: &Path,
    application: &Application,
    options: &Options,
    broker: Broker,
    contestant: Contestant,
) -> anyhow::Result<f64> {
    application.reset();
    let directory = tempfile::tempdir()?;
    let seconds = match broker {
        Broker::Rabbitmq => {
            let queue = Queue::declare().await?;
            queue.publish(options.messages, BODY).await?;
            let seconds = match contestant {
                Contestant::Sidecar(database) => {
                    let source = queue.source(options.prefetch);
                    sidecar(program, application, options, &directory, database, &source).await?
                }
                _ => {
                    let by_hand = by_hand(application, options, &directory, contestant).await?;
                    by_hand.queue(&queue, usize::try_from(options.messages)?).await?;
                    application.until(options.messages).await?
                }
            };
            queue.delete().await?;
            seconds
        }
        Broker::Kafka => {
            let topic = Topic::create().await?;
            topic.produce(options.messages, BODY).await?;
            let seconds = match contestant {
                Contestant::Sidecar(database) => {
                    let source = topic.source("bench");
                    sidecar(program, application, options, &directory, database, &source).await?
                }
                _ => {
                    let by_hand = by_hand(application, options, &directory, contestant).await?;
                    by_hand.topic(&topic, usize::try_from(options.messages)?).await?;
                    application.until(options.messages).await?
                }
            };
            topic.delete().await?;
            seconds
        }
    };
    Ok(options.messages as f64 / seconds)
}

async fn sidecar(
    program: &Path,
    application: &Application,
    options: &Options,
    directory: &TempDir,
    database: Database,
    source: &str,
) -> anyhow::Result<f64> {
    let database = match database {
        Database::Sqlite => "sqlite:inbox.db".to_owned(),
        Database::Postgres => inboxd_conformance::servers::postgres_url(),
    };
    let source = format!("{source}&concurrency={}", options.concurrency);
    // Each run of its own: a topic's name makes ids different, a shared table would not.
    let consumer_id = inboxd_conformance::servers::unique("bench");
    let callback = application.url();
    let flags = ["--source", &source, "--callback", &callback]
        .into_iter()
        .chain(["--database", &database, "--consumer-id", &consumer_id])
        .map(str::to_owned)
        .collect::<Vec<_>>();
    let running = Sidecar::start(program, directory.path(), &flags)?;
    let seconds = application.until(options.messages).await?;
    running.stop().await?;
    Ok(seconds)
}

async fn by_hand(
    application: &Application,
    options: &Options,
    directory: &TempDir,
    contestant: Contestant,
) -> anyhow::Result<Loop> {
    let ledger = match contestant {
        Contestant::Ledger(Database::Sqlite) => Ledger::sqlite(directory.path()).await?,
        Contestant::Ledger(Database::Postgres) => Ledger::postgres(4).await?,
        Contestant::Raw | Contestant::Sidecar(_) => Ledger::None,
    };
    Ok(Loop {
        ledger,
        callback: application.url(),
        concurrency: options.concurrency,
        prefetch: options.prefetch,
    })
}

pub(crate) fn median(values: &mut [f64]) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
}
