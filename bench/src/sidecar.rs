//! The sidecar as a process of its own. Dropped: killed.

use std::fs::File;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::process::{Child, Command};

const READY_WITHIN: Duration = Duration::from_secs(60);
/// Between two looks at `/readyz`: what a start is measured in must be much longer.
const LOOK_EVERY: Duration = Duration::from_millis(2);

pub(crate) struct Sidecar {
    child: Child,
    started_at: Instant,
    admin: SocketAddr,
    log: PathBuf,
    http: reqwest::Client,
}

/// Memory of a process, in MiB.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Memory {
    pub(crate) resident: f64,
    pub(crate) peak: f64,
}

impl Sidecar {
    /// Starts `inboxd run` with these flags in `directory`.
    pub(crate) fn start(
        program: &Path,
        directory: &Path,
        flags: &[String],
    ) -> anyhow::Result<Self> {
        // Nothing keeps it free, but nothing else asks for it by number.
        let admin = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let path = directory.join("log");
        let log = File::create(&path)?;
        let http = reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(5)).build()?;
        let started_at = Instant::now();
        let child = Command::new(program)
            .arg("run")
            .args(flags)
            .args(["--admin", &admin.to_string()])
            .current_dir(directory)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("starting {}", program.display()))?;
        Ok(Self { child, started_at, admin, log: path, http })
    }

    /// Waits until `/readyz` says yes; the time since the start of the process.
    pub(crate) async fn ready(&mut self) -> anyhow::Result<Duration> {
        let url = format!("http://{}/readyz", self.admin);
        while self.started_at.elapsed() < READY_WITHIN {
            let answer = self.http.get(&url).send().await;
            if answer.is_ok_and(|answer| answer.status().is_success()) {
                return Ok(self.started_at.elapsed());
            }
            if let Some(status) = self.child.try_wait()? {
                bail!("inboxd ended ({status}):\n{}", self.log());
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
        bail!("inboxd was not ready within {READY_WITHIN:?}:\n{}", self.log())
    }

    /// What the kernel says of its memory.
    pub(crate) fn memory(&self) -> anyhow::Result<Memory> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid()?))?;
        let field = |name: &str| -> anyhow::Result<f64> {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let kib = line.and_then(|line| line.split_whitespace().next());
            Ok(kib.with_context(|| format!("no {name}"))?.parse::<f64>()? / 1024.0)
        };
        Ok(Memory { resident: field("VmRSS:")?, peak: field("VmHWM:")? })
    }

    /// SIGTERM, and waits for a good end.
    pub(crate) async fn stop(mut self) -> anyhow::Result<()> {
        kill(self.pid()?, Signal::SIGTERM)?;
        let status = self.child.wait().await?;
        if !status.success() {
            bail!("inboxd ended with {status}:\n{}", self.log());
        }
        Ok(())
    }

    fn pid(&self) -> anyhow::Result<Pid> {
        let id = self.child.id().context("inboxd has ended")?;
        Ok(Pid::from_raw(i32::try_from(id)?))
    }

    fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }
}
