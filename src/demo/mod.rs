//! `inboxd demo`: shows on one machine, with nothing installed, what the sidecar promises.
//!
//! Broker (librdkafka's mock cluster) and application live in this process; the sidecar
//! is a child, `inboxd run` with an inbox in SQLite, and is killed once by SIGKILL while POSTs
//! are open, then started again. Afterwards the application's ledger and the inbox's rows
//! are held against what was published ([`judge`]).
//!
//! Invariants: nothing is reported that was not counted in this run. Exit code 0 means that
//! nothing was lost and that every id accepted twice had a POST begun and no row at the kill.
//! Whatever ends the demo ends the child, and its files go, except after a failure.
//!
//! It is no benchmark: broker, application and sidecar share the machine.

mod application;
mod broker;
mod inbox;
mod judge;
mod ledger;
mod plan;
mod progress;
mod publisher;
mod report;
mod sidecar;
mod stage;

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, anyhow};
use tokio::signal::unix::{SignalKind, signal};

use self::judge::{Evidence, Judgement};
use self::stage::Stage;

/// The fewest messages: with less, all may be over before the kill.
const MESSAGES_MIN: i64 = 1_000;
/// The most messages: far below what the embedded broker keeps (5 MiB per partition).
const MESSAGES_MAX: i64 = 100_000;
/// 128 + SIGINT, as shells report it.
const INTERRUPTED: u8 = 130;

/// What `inboxd demo` can be told.
#[derive(Debug, Clone, clap::Args)]
pub struct DemoOptions {
    /// How many messages to publish, 1,000 to 100,000; a third of them are duplicates
    #[arg(
        long,
        value_name = "COUNT",
        default_value_t = 20_000,
        value_parser = clap::value_parser!(u32).range(MESSAGES_MIN..=MESSAGES_MAX)
    )]
    pub messages: u32,
    /// Draws the same messages, failures and moment of the kill again [default: random]
    #[arg(long, value_name = "NUMBER")]
    pub seed: Option<u64>,
}

/// Runs the demo; prints the table to standard output and everything else to standard error.
///
/// The exit code is 0 if all promises held, 1 if one was broken or the run failed (it says
/// which and names the sidecar's log), 130 after SIGINT or SIGTERM.
///
/// # Errors
/// When there is no place for temporary files or signals cannot be received.
pub async fn run(options: DemoOptions) -> anyhow::Result<ExitCode> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let directory = tempfile::Builder::new()
        .prefix("inboxd-demo-")
        .tempdir()
        .context("making a directory for the demo's files")?;
    let passed = tokio::select! {
        passed = play(&options, directory.path()) => passed,
        _ = interrupt.recv() => return Ok(ExitCode::from(INTERRUPTED)),
        _ = terminate.recv() => return Ok(ExitCode::from(INTERRUPTED)),
    };
    match passed {
        Ok(true) => return Ok(ExitCode::SUCCESS),
        Ok(false) => {}
        Err(error) => eprintln!("The demo failed: {error:#}"),
    }
    eprintln!("Database and the sidecar's log are kept in {}", directory.keep().display());
    Ok(ExitCode::FAILURE)
}

/// Whether all promises held.
async fn play(options: &DemoOptions, directory: &Path) -> anyhow::Result<bool> {
    let stage = Stage::set(options, directory).await?;
    let story = tokio::select! {
        story = stage.act() => story,
        error = stage.stalled() => Err(error),
        () = stage.show() => Err(anyhow!("nothing more to show")),
    };
    stage.progress.clear();
    let story = story.map_err(|error| stage.with_log(error))?;
    let judgement = Judgement::of(&Evidence {
        plan: &stage.plan,
        posts: &stage.ledger.posts(),
        rows_at_kill: &story.rows_at_kill,
        rows_at_end: &story.rows_at_end,
        before_kill: story.before_kill,
        at_end: story.at_end,
    });
    print!("\n{}\n{}", report::table(&judgement, &story.times), report::verdict(&judgement));
    Ok(judgement.faults().is_empty())
}
