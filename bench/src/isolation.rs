//! One subscription's rate, alone and beside two in trouble: one whose broker is away and one
//! whose application never answers.

use std::path::Path;

use anyhow::Context as _;
use clap::Args;
use inboxd_conformance::servers;
use tokio::net::TcpListener;

use crate::application::Application;
use crate::queue::Queue;
use crate::sidecar::Sidecar;
use crate::throughput::{BODY, median};

#[derive(Args)]
pub(crate) struct Options {
    /// Messages of each run
    #[arg(long, default_value_t = 20_000)]
    messages: u64,
    /// How often each is run
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// The database; SQLite in a new file where it is not set
    #[arg(long, value_name = "URL")]
    database: Option<String>,
}

pub(crate) async fn run(program: &Path, options: Options) -> anyhow::Result<()> {
    let application = Application::start().await?;
    // Takes connections and never answers.
    let hanging = TcpListener::bind("127.0.0.1:0").await?;
    // Given back at once: nobody listens there.
    let away = TcpListener::bind("127.0.0.1:0").await?.local_addr()?;
    let hung = Queue::declare().await?;
    hung.publish(1_000, BODY).await?;
    let troubled = format!(
        "[broker.away]\nurl = \"amqp://guest:guest@{away}/\"\n\
         [subscription.away]\nconsumer_id = \"{}\"\ncallback = \"{}\"\n\
         source = {{ broker = \"away\", queue = \"orders\" }}\n\
         [subscription.hung]\nconsumer_id = \"{}\"\ncallback = \"http://{}/\"\n\
         source = {{ broker = \"main\", queue = \"{}\" }}\n",
        servers::unique("bench"),
        application.url(),
        servers::unique("bench"),
        hanging.local_addr()?,
        hung.name,
    );
    let (mut alone, mut beside, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..options.rounds {
        alone.push(one(program, &application, &options, "").await?);
        beside.push(one(program, &application, &options, &troubled).await?);
        let last = alone.last().zip(beside.last()).context("a round")?;
        ratios.push(last.1 / last.0);
    }
    println!("{} messages, {} rounds, median", options.messages, options.rounds);
    println!("{:<56} {:>8.0} messages/s", "alone", median(&mut alone));
    println!(
        "{:<56} {:>8.0} messages/s",
        "beside a broker that is away and an application that hangs",
        median(&mut beside)
    );
    println!("{:<56} {:>8.2}", "ratio", median(&mut ratios));
    hung.delete().await
}

async fn one(
    program: &Path,
    application: &Application,
    options: &Options,
    troubled: &str,
) -> anyhow::Result<f64> {
    application.reset();
    let directory = tempfile::tempdir()?;
    let queue = Queue::declare().await?;
    queue.publish(options.messages, BODY).await?;
    let database = options.database.as_deref().unwrap_or("sqlite:inbox.db");
    let config = format!(
        "[database]\nurl = \"{database}\"\n\
         [broker.main]\nurl = \"{}\"\n\
         [subscription.good]\nconsumer_id = \"{}\"\ncallback = \"{}\"\n\
         source = {{ broker = \"main\", queue = \"{}\", prefetch = 200 }}\n{troubled}",
        servers::rabbitmq_url(),
        servers::unique("bench"),
        application.url(),
        queue.name,
    );
    std::fs::write(directory.path().join("inboxd.toml"), config)?;
    let flags = ["--config", "inboxd.toml"].map(str::to_owned);
    let sidecar = Sidecar::start(program, directory.path(), &flags)?;
    let seconds = application.until(options.messages).await?;
    // What hangs is cut at the end of the grace period, which nobody needs to wait for.
    drop(sidecar);
    queue.delete().await?;
    Ok(options.messages as f64 / seconds)
}
