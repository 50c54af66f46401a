//! What 1 % of messages that fail for long costs the other 99 %: the healthy ones' rate with and
//! without them, at four fifths of what the application can do. The failing ones answer 500 at
//! once in one run and hang until the timeout in another; in the end the application heals and
//! every one of them has to arrive.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::post;
use clap::Args;
use inboxd_conformance::servers;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use crate::queue::Queue;
use crate::sidecar::Sidecar;
use crate::throughput::median;

/// One message in so many fails.
const FAILS_EVERY: u64 = 100;
const CONCURRENCY: u64 = 16;
const SERVICE: Duration = Duration::from_millis(100);
/// Of what the application can do, so much is published.
const UTILISATION: f64 = 0.8;
const TICK: Duration = Duration::from_millis(100);
const TIMEOUT: Duration = Duration::from_millis(500);
const HEALED_WITHIN: Duration = Duration::from_secs(120);

#[derive(Args)]
pub(crate) struct Options {
    /// Messages of each run
    #[arg(long, default_value_t = 2_500)]
    messages: u64,
    /// How often each is run
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// The database; SQLite in a new file where it is not set
    #[arg(long, value_name = "URL")]
    database: Option<String>,
}

/// How the application treats what is to fail.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Healthy,
    Refusing,
    Hanging,
}

struct Ledger {
    mode: Mode,
    accepted: HashSet<Bytes>,
    /// When the first and the last of the healthy ones were accepted.
    span: Option<(Instant, Instant)>,
    healthy: u64,
}

type Shared = Arc<Mutex<Ledger>>;

pub(crate) async fn run(program: &Path, options: Options) -> anyhow::Result<()> {
    let (mut alone, mut refusing, mut hanging) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..options.rounds {
        let rate = one(program, &options, Mode::Healthy).await?;
        alone.push(rate);
        refusing.push(one(program, &options, Mode::Refusing).await? / rate);
        hanging.push(one(program, &options, Mode::Hanging).await? / rate);
    }
    println!(
        "{} messages at {:.0} % of {CONCURRENCY} × {SERVICE:?}, {} rounds, median",
        options.messages,
        UTILISATION * 100.0,
        options.rounds
    );
    println!("{:<56} {:>8.0} messages/s", "the healthy 99 %, nothing fails", median(&mut alone));
    println!("{:<56} {:>8.2}", "ratio, 1 % answers 500 at once", median(&mut refusing));
    println!("{:<56} {:>8.2}", "ratio, 1 % hangs until the timeout", median(&mut hanging));
    Ok(())
}

/// The healthy ones' rate. All failing ones have arrived when it answers.
async fn one(program: &Path, options: &Options, mode: Mode) -> anyhow::Result<f64> {
    let (address, ledger, application) = application(mode).await?;
    let directory = tempfile::tempdir()?;
    let queue = Queue::declare().await?;
    let database = options.database.as_deref().unwrap_or("sqlite:inbox.db");
    let config = format!(
        "[database]\nurl = \"{database}\"\n\
         [broker.main]\nurl = \"{}\"\n\
         [subscription.orders]\nconsumer_id = \"{}\"\ncallback = \"http://{address}/\"\n\
         concurrency = {CONCURRENCY}\ncallback_timeout = \"{TIMEOUT:?}\"\n\
         park = {{ initial = \"1s\", cap = \"5s\", attempts_max = 1000 }}\n\
         source = {{ broker = \"main\", queue = \"{}\" }}\n",
        servers::rabbitmq_url(),
        servers::unique("bench"),
        queue.name,
    );
    std::fs::write(directory.path().join("inboxd.toml"), config)?;
    let flags = ["--config", "inboxd.toml"].map(str::to_owned);
    let mut sidecar = Sidecar::start(program, directory.path(), &flags)?;
    sidecar.ready().await?;
    publish(&queue, options.messages).await?;
    let healthy = options.messages - options.messages / FAILS_EVERY;
    until(&ledger, "the healthy ones", |ledger| ledger.healthy >= healthy).await?;
    let (first, last) = locked(&ledger).span.context("no POST came")?;
    locked(&ledger).mode = Mode::Healthy;
    let all = usize::try_from(options.messages)?;
    until(&ledger, "the failing ones", |ledger| ledger.accepted.len() >= all).await?;
    sidecar.stop().await?;
    application.abort();
    queue.delete().await?;
    Ok(healthy as f64 / (last - first).as_secs_f64())
}

/// At an even rate, as producers do; every so many fails.
async fn publish(queue: &Queue, messages: u64) -> anyhow::Result<()> {
    let capacity = CONCURRENCY as f64 / SERVICE.as_secs_f64();
    let started = Instant::now();
    let mut ticks = tokio::time::interval(TICK);
    let mut sent = 0;
    while sent < messages {
        ticks.tick().await;
        let due = (started.elapsed().as_secs_f64() * capacity * UTILISATION) as u64;
        for number in sent + 1..=due.min(messages) {
            let kind = if number % FAILS_EVERY == 0 { "fails" } else { "healthy" };
            queue.send(format!("{kind} {number}").as_bytes()).await?;
        }
        sent = due.clamp(sent, messages);
        queue.confirmed().await?;
    }
    Ok(())
}

async fn application(mode: Mode) -> anyhow::Result<(SocketAddr, Shared, JoinHandle<()>)> {
    let ledger: Shared =
        Arc::new(Mutex::new(Ledger { mode, accepted: HashSet::new(), span: None, healthy: 0 }));
    let listener = TcpListener::bind("127.0.0.1:0").await.context("a free port")?;
    let address = listener.local_addr()?;
    let router = Router::new().route("/", post(accept)).with_state(ledger.clone());
    let task = tokio::spawn(async move {
        if let Err(error) = axum::serve(listener, router).await {
            eprintln!("the application ended: {error}");
        }
    });
    Ok((address, ledger, task))
}

async fn accept(State(ledger): State<Shared>, body: Bytes) -> StatusCode {
    let fails = body.starts_with(b"fails");
    let mode = locked(&ledger).mode;
    match mode {
        Mode::Refusing if fails => return StatusCode::INTERNAL_SERVER_ERROR,
        Mode::Hanging if fails => {
            tokio::time::sleep(TIMEOUT * 2).await;
            return StatusCode::INTERNAL_SERVER_ERROR;
        }
        _ => tokio::time::sleep(SERVICE).await,
    }
    let mut ledger = locked(&ledger);
    if ledger.accepted.insert(body) && !fails {
        let now = Instant::now();
        ledger.healthy += 1;
        ledger.span = Some((ledger.span.map_or(now, |(first, _)| first), now));
    }
    StatusCode::OK
}

async fn until(
    ledger: &Shared,
    what: &str,
    reached: impl Fn(&Ledger) -> bool,
) -> anyhow::Result<()> {
    let (mut last, mut moved_at) = (0, Instant::now());
    while !reached(&locked(ledger)) {
        let accepted = locked(ledger).accepted.len();
        if accepted > last {
            (last, moved_at) = (accepted, Instant::now());
        }
        if moved_at.elapsed() > HEALED_WITHIN {
            bail!("{what} did not all arrive: {accepted} were accepted");
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}

fn locked(ledger: &Shared) -> std::sync::MutexGuard<'_, Ledger> {
    ledger.lock().unwrap_or_else(PoisonError::into_inner)
}
