//! The loops that people write by hand: consume, POST, acknowledge; and the same with one
//! durable insert per message before the acknowledgement.
//!
//! Neither looks a message up, claims it or tries it again: they are what the sidecar's cost is
//! compared with, not what it competes with.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use bytes::Bytes;
use futures::StreamExt as _;
use inboxd_conformance::servers;
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicQosOptions};
use lapin::types::FieldTable;
use rdkafka::Message as _;
use rdkafka::consumer::{CommitMode, Consumer as _, StreamConsumer};
use sqlx::postgres::PgPoolOptions;
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous};
use sqlx::{AssertSqlSafe, PgPool, SqlitePool};

use crate::queue::{self, Queue};
use crate::topic::{self, Topic};

/// Where the ledger loop inserts.
#[derive(Clone)]
pub(crate) enum Ledger {
    /// Nowhere: the raw loop.
    None,
    /// A file, flushed at each commit, one writer at a time.
    Sqlite(SqlitePool),
    /// A table of its own.
    Postgres(PgPool, Arc<str>),
}

impl Ledger {
    pub(crate) async fn sqlite(directory: &std::path::Path) -> anyhow::Result<Self> {
        let options = SqliteConnectOptions::new()
            .filename(directory.join("ledger.db"))
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Full)
            .busy_timeout(Duration::from_secs(30));
        let pool = SqlitePoolOptions::new().max_connections(1).connect_with(options).await?;
        sqlx::query("CREATE TABLE ledger (id TEXT PRIMARY KEY)").execute(&pool).await?;
        Ok(Self::Sqlite(pool))
    }

    pub(crate) async fn postgres(connections: u32) -> anyhow::Result<Self> {
        let url = servers::postgres_url();
        let pool = PgPoolOptions::new().max_connections(connections).connect(&url).await;
        let pool = pool.context("PostgreSQL")?;
        let table = servers::unique("ledger").replace('-', "_");
        let create = format!("CREATE TABLE {table} (id text PRIMARY KEY)");
        sqlx::query(AssertSqlSafe(create)).execute(&pool).await?;
        let insert = format!("INSERT INTO {table} (id) VALUES ($1) ON CONFLICT DO NOTHING");
        Ok(Self::Postgres(pool, insert.into()))
    }

    async fn insert(&self, id: &str) -> anyhow::Result<()> {
        match self {
            Self::None => {}
            Self::Sqlite(pool) => {
                let insert = "INSERT INTO ledger (id) VALUES (?) ON CONFLICT DO NOTHING";
                sqlx::query(insert).bind(id).execute(pool).await?;
            }
            Self::Postgres(pool, insert) => {
                sqlx::query(AssertSqlSafe(insert.to_string())).bind(id).execute(pool).await?;
            }
        }
        Ok(())
    }
}

/// What a loop is made of.
#[derive(Clone)]
pub(crate) struct Loop {
    pub(crate) ledger: Ledger,
    pub(crate) callback: String,
    pub(crate) concurrency: usize,
    pub(crate) prefetch: u16,
}

impl Loop {
    async fn handle(&self, http: &reqwest::Client, id: &str, body: Bytes) -> anyhow::Result<()> {
        let response = http.post(&self.callback).header("message-id", id).body(body).send().await?;
        if !response.status().is_success() {
            bail!("the application answered {}", response.status());
        }
        self.ledger.insert(id).await
    }

    /// Consumes this many messages of a queue.
    pub(crate) async fn queue(self, queue: &Queue, messages: usize) -> anyhow::Result<()> {
        let connection = queue::connect().await?;
        let channel = connection.create_channel().await?;
        channel.basic_qos(self.prefetch, BasicQosOptions::default()).await?;
        let consumer = channel
            .basic_consume(
                queue.name.as_str().into(),
                "loop".into(),
                BasicConsumeOptions::default(),
                FieldTable::default(),
            )
            .await?;
        let http = client()?;
        let mut done = consumer
            .take(messages)
            .map(|delivery| {
                let (this, http) = (self.clone(), http.clone());
                async move {
                    let delivery = delivery?;
                    let id = delivery.properties.message_id().as_ref().context("an id")?;
                    let body = Bytes::copy_from_slice(&delivery.data);
                    this.handle(&http, id.as_str(), body).await?;
                    delivery.ack(BasicAckOptions::default()).await?;
                    anyhow::Ok(())
                }
            })
            .buffer_unordered(self.concurrency);
        while let Some(result) = done.next().await {
            result?;
        }
        connection.close(0, "".into()).await?;
        Ok(())
    }

    /// Consumes this many records of a topic; offsets follow in order, committed now and then.
    pub(crate) async fn topic(self, topic: &Topic, records: usize) -> anyhow::Result<()> {
        let consumer: StreamConsumer = topic::client()
            .set("group.id", servers::unique("loop"))
            .set("auto.offset.reset", "earliest")
            .set("enable.auto.offset.store", "false")
            .set("auto.commit.interval.ms", "1000")
            .create()?;
        consumer.subscribe(&[&topic.name])?;
        let http = client()?;
        let mut done = consumer
            .stream()
            .take(records)
            .map(|record| {
                let (this, http) = (self.clone(), http.clone());
                async move {
                    let record = record?;
                    let id = format!("{}/{}", record.partition(), record.offset());
                    let body = Bytes::copy_from_slice(record.payload().unwrap_or_default());
                    this.handle(&http, &id, body).await?;
                    anyhow::Ok(record)
                }
            })
            .buffered(self.concurrency);
        while let Some(record) = done.next().await {
            consumer.store_offset_from_message(&record?)?;
        }
        drop(done);
        consumer.commit_consumer_state(CommitMode::Sync)?;
        Ok(())
    }
}

fn client() -> anyhow::Result<reqwest::Client> {
    Ok(reqwest::Client::builder().no_proxy().tcp_nodelay(true).build()?)
}
