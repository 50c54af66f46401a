//! The sidecar under test: this same program, as a child process.
//!
//! Invariant: a child that is dropped is killed. Its output goes to a file, so that a failure
//! can be read about.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::process::{Child, Command};

/// How long one answer of the sidecar's local API may take.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// How long the sidecar may take to end after SIGTERM: its own grace and a little more.
const STOP_WITHIN: Duration = Duration::from_secs(30);
/// How much of the log's end a failure shows, in bytes.
const LOG_TAIL_BYTES: u64 = 4_096;
/// Deliveries that came to these were kept away from the application because the inbox, or
/// another delivery in flight, had their message already.
const SUPPRESSED: [&str; 2] = ["duplicate", "duplicate_in_flight"];

/// How the sidecar is started, each time the same.
#[derive(Debug, Clone)]
pub(super) struct Sidecar {
    program: PathBuf,
    arguments: Vec<String>,
    directory: PathBuf,
    admin: SocketAddr,
    http: reqwest::Client,
}

/// What the sidecar counted since it started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Counters {
    /// Deliveries that were kept away from the application.
    pub(super) suppressed: u64,
    /// Deliveries that came to any outcome.
    pub(super) settled: u64,
}

impl Sidecar {
    /// With its database and log in `directory`.
    pub(super) fn new(source: String, callback: String, directory: &Path) -> anyhow::Result<Self> {
        let admin = free_port()?;
        let database = format!("sqlite:{}", directory.join("inbox.db").display());
        let arguments = ["run", "--source", &source, "--callback", &callback]
            .into_iter()
            .chain(["--database", &database, "--consumer-id", "demo"])
            .chain(["--admin", &admin.to_string()])
            .map(str::to_owned)
            .collect();
        // The client panics without one; a second installation is no error to us.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let http = reqwest::Client::builder().no_proxy().timeout(ANSWER_WITHIN).build()?;
        Ok(Self {
            program: std::env::current_exe().context("finding this program's own file")?,
            arguments,
            directory: directory.to_owned(),
            admin,
            http,
        })
    }

    /// Where its output goes.
    pub(super) fn log(&self) -> PathBuf {
        self.directory.join("sidecar.log")
    }

    /// The inbox's database file.
    pub(super) fn database(&self) -> PathBuf {
        self.directory.join("inbox.db")
    }

    /// The end of its output.
    pub(super) fn log_tail(&self) -> String {
        let read = || -> std::io::Result<String> {
            let mut file = File::open(self.log())?;
            let length = file.metadata()?.len();
            file.seek(SeekFrom::Start(length.saturating_sub(LOG_TAIL_BYTES)))?;
            let mut tail = Vec::new();
            file.read_to_end(&mut tail)?;
            Ok(String::from_utf8_lossy(&tail).into_owned())
        };
        read().unwrap_or_default()
    }

    /// Starts it.
    pub(super) fn start(&self) -> anyhow::Result<Running> {
        let log = OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.log())
            .with_context(|| format!("opening {}", self.log().display()))?;
        let mut command = Command::new(&self.program);
        // What is set for another sidecar is not for this one.
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("INBOXD_") {
                command.env_remove(name);
            }
        }
        let child = command
            .args(&self.arguments)
            .current_dir(&self.directory)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("starting {} run", self.program.display()))?;
        Ok(Running {
            child,
            metrics: format!("http://{}/metrics", self.admin),
            http: self.http.clone(),
        })
    }
}

/// A free loopback port. Nothing keeps it free, but nothing else asks for it by number.
fn free_port() -> anyhow::Result<SocketAddr> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("finding a free port")?;
    Ok(listener.local_addr()?)
}

/// One life of the sidecar. Dropped: killed.
pub(super) struct Running {
    child: Child,
    metrics: String,
    http: reqwest::Client,
}

impl Running {
    /// Reads its counters.
    pub(super) async fn counters(&self) -> anyhow::Result<Counters> {
        let response = self.http.get(&self.metrics).send().await?.error_for_status()?;
        Ok(read_counters(&response.text().await?))
    }

    /// Returns when it ends by itself, which it must not: always an error.
    ///
    /// # Cancel safety
    /// Cancel-safe.
    pub(super) async fn ended(&mut self) -> anyhow::Error {
        match self.child.wait().await {
            Ok(status) => anyhow!("the sidecar ended by itself ({status})"),
            Err(error) => anyhow::Error::new(error).context("waiting for the sidecar"),
        }
    }

    /// SIGKILL; returns when it is gone.
    pub(super) async fn kill(mut self) -> anyhow::Result<()> {
        self.child.kill().await.context("killing the sidecar")
    }

    /// SIGTERM; returns when it is gone, which must be soon and with exit code 0.
    pub(super) async fn stop(mut self) -> anyhow::Result<()> {
        let pid = self.child.id().context("the sidecar ended by itself")?;
        kill(Pid::from_raw(pid.cast_signed()), Signal::SIGTERM).context("stopping the sidecar")?;
        let status: ExitStatus = tokio::time::timeout(STOP_WITHIN, self.child.wait())
            .await
            .map_err(|_| anyhow!("the sidecar did not end within {STOP_WITHIN:?} of SIGTERM"))??;
        if !status.success() {
            bail!("the sidecar did not end well after SIGTERM ({status})");
        }
        Ok(())
    }
}

/// From the metrics' text.
fn read_counters(text: &str) -> Counters {
    let mut counters = Counters::default();
    for line in text.lines() {
        let Some(sample) = line.strip_prefix("inboxd_deliveries_total{") else { continue };
        let Some((labels, value)) = sample.rsplit_once("} ") else { continue };
        // OpenMetrics allows a timestamp behind the value.
        let Some(Ok(value)) = value.split(' ').next().map(str::parse::<u64>) else { continue };
        counters.settled += value;
        let is = |outcome: &&str| labels.contains(&format!("outcome=\"{outcome}\""));
        if SUPPRESSED.iter().any(is) {
            counters.suppressed += value;
        }
    }
    counters
}

#[cfg(test)]
mod tests {
    use inboxd_contract::Outcome;

    use super::*;
    use crate::telemetry::Metrics;

    #[test]
    fn the_counters_are_read_from_the_metrics_as_the_sidecar_writes_them() {
        let metrics = Metrics::new();
        let subscription = metrics.subscription("default");
        for (outcome, times) in [
            (Outcome::Processed, 5),
            (Outcome::Duplicate, 3),
            (Outcome::DuplicateInFlight, 2),
            (Outcome::Released, 1),
        ] {
            (0..times).for_each(|_| subscription.outcome(outcome));
        }
        let counters = read_counters(&metrics.encode());
        assert_eq!(counters, Counters { suppressed: 5, settled: 11 });
    }

    #[test]
    fn the_names_of_suppressed_outcomes_are_those_of_the_contract() {
        let names = [Outcome::Duplicate, Outcome::DuplicateInFlight].map(Outcome::as_str);
        assert_eq!(names, SUPPRESSED);
    }

    #[tokio::test]
    async fn a_child_that_ends_by_itself_is_an_error_with_its_output_at_hand() {
        let directory = tempfile::tempdir().unwrap();
        let mut sidecar = Sidecar::new("s".into(), "c".into(), directory.path()).unwrap();
        sidecar.program = "/bin/sh".into();
        sidecar.arguments = vec!["-c".into(), "echo no such broker; exit 3".into()];
        let mut running = sidecar.start().unwrap();
        let error = running.ended().await.to_string();
        assert!(error.contains("exit status: 3"), "{error}");
        assert_eq!(sidecar.log_tail(), "no such broker\n");
    }

    #[tokio::test]
    async fn one_that_is_killed_is_gone_and_one_that_is_stopped_must_end_well() {
        let directory = tempfile::tempdir().unwrap();
        let mut sidecar = Sidecar::new("s".into(), "c".into(), directory.path()).unwrap();
        sidecar.program = "/bin/sh".into();
        sidecar.arguments = vec!["-c".into(), "exec sleep 600".into()];
        sidecar.start().unwrap().kill().await.unwrap();
        let error = sidecar.start().unwrap().stop().await.unwrap_err().to_string();
        assert!(error.contains("signal: 15"), "{error}");
    }
}
