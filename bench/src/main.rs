//! Benchmarks of the sidecar: what is compared runs on one machine in one run, and what is
//! printed are ratios and, for those who want them, the figures behind them.
//!
//! Started by `scripts/bench`, which builds both binaries and starts the servers.

mod application;
mod failing;
mod isolation;
mod loops;
mod queue;
mod sidecar;
mod start;
mod throughput;
mod topic;

use std::path::PathBuf;

use anyhow::Context as _;
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "inboxd-bench", about)]
struct Cli {
    /// The sidecar's binary; the one beside this program where it is not set
    #[arg(long, value_name = "FILE", global = true)]
    inboxd: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// From the start of the process to ready, and the memory it holds when idle
    Start(start::Options),
    /// Messages per second, against a loop that consumes, POSTs and acknowledges
    Throughput(throughput::Options),
    /// One subscription's rate, alone and beside two in trouble
    Isolation(isolation::Options),
    /// What 1 % of messages that fail for long costs the other 99 %
    Failing(failing::Options),
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let cli = Cli::parse();
    // A second installation is no error to us.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let program = match cli.inboxd {
        Some(program) => program,
        None => std::env::current_exe()?.with_file_name("inboxd"),
    };
    let program = program
        .canonicalize()
        .with_context(|| format!("{} is not there: build it first", program.display()))?;
    match cli.command {
        Command::Start(options) => start::run(&program, options).await,
        Command::Throughput(options) => throughput::run(&program, options).await,
        Command::Isolation(options) => isolation::run(&program, options).await,
        Command::Failing(options) => failing::run(&program, options).await,
    }
}
