//! The sidecar as a process of its own.

use std::fs::File;
use std::net::SocketAddr;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use inboxd_conformance::net::ReservedPort;
use inboxd_conformance::{ensure, eventually};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;
use tokio::process::{Child, Command};

use super::PATIENCE;

/// What a command that has ended said.
#[derive(Debug)]
pub struct Told {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

/// A running (or ended) `inboxd run`. Dropped: killed.
pub struct Sidecar {
    child: Child,
    dir: TempDir,
    admin: ReservedPort,
    lives: usize,
    client: reqwest::Client,
    arguments: Vec<String>,
    environment: Vec<(String, String)>,
}

impl Sidecar {
    /// Starts with this configuration, to which an `[admin]` table is added.
    pub fn start(config: &str) -> Self {
        Self::start_with(config, &[])
    }

    /// As [`Sidecar::start`], with variables in its environment.
    pub fn start_with(config: &str, environment: &[(&str, &str)]) -> Self {
        Self::start_at(Some(config), &["--config", "inboxd.toml"], environment)
    }

    /// Starts with these flags of `inboxd run` alone, to which `--admin` is added.
    pub fn start_flags(flags: &[&str]) -> Self {
        Self::start_at(None, flags, &[])
    }

    fn start_at(config: Option<&str>, flags: &[&str], environment: &[(&str, &str)]) -> Self {
        inboxd_http::install_crypto_provider();
        let dir = tempfile::tempdir().expect("a temporary directory");
        let admin = ReservedPort::new().expect("a free port");
        let address = admin.addr().to_string();
        let mut arguments: Vec<_> =
            ["run"].iter().chain(flags).map(|word| (*word).to_owned()).collect();
        if let Some(config) = config {
            let whole = format!("{config}\n[admin]\nlisten = \"{address}\"\n");
            std::fs::write(dir.path().join("inboxd.toml"), whole)
                .expect("the configuration is written");
        } else {
            arguments.extend(["--admin".to_owned(), address]);
        }
        let environment: Vec<_> =
            environment.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        let child = spawn(&dir, 0, &arguments, &environment);
        let client = reqwest::Client::builder()
            .no_proxy()
            .timeout(Duration::from_secs(5))
            .build()
            .expect("an HTTP client");
        Self { child, dir, admin, lives: 1, client, arguments, environment }
    }

    /// Starts again with the same configuration after it has ended.
    pub fn start_again(&mut self) {
        self.child = spawn(&self.dir, self.lives, &self.arguments, &self.environment);
        self.lives += 1;
    }

    /// The same with another environment than before.
    pub fn start_again_with(&mut self, environment: &[(&str, &str)]) {
        self.environment =
            environment.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        self.start_again();
    }

    /// Another command of the binary, with the same configuration, environment and directory.
    pub async fn command(&self, command: &str, arguments: &[&str]) -> Told {
        let command = Command::new(env!("CARGO_BIN_EXE_inboxd"))
            .arg(command)
            .args(arguments)
            .args(["--config", "inboxd.toml"])
            .current_dir(self.dir.path())
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .output();
        let output = tokio::time::timeout(PATIENCE, command).await.expect("the command ends");
        let output = output.expect("the command starts");
        Told {
            code: output.status.code(),
            out: String::from_utf8(output.stdout).expect("text"),
            err: String::from_utf8(output.stderr).expect("text"),
        }
    }

    /// Where its admin API listens.
    pub fn admin(&self) -> SocketAddr {
        self.admin.addr()
    }

    /// The process id.
    pub fn pid(&self) -> Pid {
        let id = self.child.id().expect("the sidecar was not waited for");
        Pid::from_raw(i32::try_from(id).expect("a process id"))
    }

    /// The most memory that it has had resident, in MiB.
    pub fn resident_peak_mib(&self) -> u64 {
        let path = format!("/proc/{}/status", self.pid());
        let status = std::fs::read_to_string(path).expect("the sidecar's process exists");
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let words = peak.and_then(|line| line.split_whitespace().next());
        words.and_then(|kib| kib.parse::<u64>().ok()).expect("VmHWM in KiB") / 1024
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        kill(self.pid(), signal).expect("the sidecar's process exists");
    }

    /// SIGKILL, and waits until it is gone.
    pub async fn kill(&mut self) {
        self.child.kill().await.expect("the sidecar's process exists");
    }

    /// SIGTERM, and waits until it has ended.
    pub async fn stop(&mut self) -> ExitStatus {
        self.signal(Signal::SIGTERM);
        self.ended().await
    }

    /// Waits until it has ended by itself.
    pub async fn ended(&mut self) -> ExitStatus {
        match tokio::time::timeout(PATIENCE, self.child.wait()).await {
            Ok(status) => status.expect("the sidecar's process exists"),
            Err(_) => panic!("the sidecar did not end; its log:\n{}", self.log()),
        }
    }

    /// True while the process runs.
    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().expect("the sidecar's process exists").is_none()
    }

    /// Status and body of a path of the admin API; `None` while nobody listens.
    pub async fn get(&self, path: &str) -> Option<(u16, String)> {
        let url = format!("http://{}{path}", self.admin());
        let response = self.client.get(url).send().await.ok()?;
        let status = response.status().as_u16();
        Some((status, response.text().await.ok()?))
    }

    /// Status and body of a POST of this JSON to the admin API; `None` without an answer.
    pub async fn post(&self, path: &str, json: &str) -> Option<(u16, String)> {
        let url = format!("http://{}{path}", self.admin());
        let request = self.client.post(url).header("content-type", "application/json");
        let response = request.body(json.to_owned()).send().await.ok()?;
        let status = response.status().as_u16();
        Some((status, response.text().await.ok()?))
    }

    /// Waits until `/readyz` says yes.
    pub async fn ready(&self) {
        self.readiness(200, "").await;
    }

    /// Waits until `/readyz` answers this status with a body that contains this text.
    pub async fn readiness(&self, status: u16, text: &str) {
        eventually(PATIENCE, async || match self.get("/readyz").await {
            Some((found, body)) => ensure(
                found == status && body.contains(text),
                format!("{found} {body}; log:\n{}", self.log()),
            ),
            None => Err(format!("nobody listens; log:\n{}", self.log())),
        })
        .await;
    }

    /// Waits until `/readyz` says that this dependency, such as `database`, is not ready.
    pub async fn not_ready(&self, dependency: &str) {
        self.readiness(503, &format!("\"{dependency}\":{{\"ready\":false")).await;
    }

    /// The sum of all series of a metric whose labels contain each of `labels` (`name="value"`).
    pub async fn metric(&self, name: &str, labels: &[&str]) -> f64 {
        let Some((200, text)) = self.get("/metrics").await else { return 0.0 };
        text.lines()
            .filter(|line| {
                line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' ']))
                    && labels.iter().all(|label| line.contains(label))
            })
            .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
            .sum()
    }

    /// Deliveries of the subscription `orders` that came to this outcome.
    pub async fn outcomes(&self, outcome: &str) -> u64 {
        self.outcomes_of("orders", outcome).await
    }

    /// Deliveries of this subscription that came to this outcome.
    pub async fn outcomes_of(&self, subscription: &str, outcome: &str) -> u64 {
        let outcome = format!("outcome=\"{outcome}\"");
        let subscription = format!("subscription=\"{subscription}\"");
        self.metric("inboxd_deliveries_total", &[&subscription, &outcome]).await as u64
    }

    /// Duplicates of the subscription `orders`, of either kind.
    pub async fn duplicates(&self) -> u64 {
        self.outcomes("duplicate").await + self.outcomes("duplicate_in_flight").await
    }

    /// Deliveries that it holds now.
    pub async fn in_flight(&self) -> u64 {
        self.metric("inboxd_in_flight_deliveries", &[]).await as u64
    }

    /// Everything it has written, all lives.
    pub fn log(&self) -> String {
        (0..self.lives)
            .map(|life| {
                let path = self.dir.path().join(format!("log.{life}"));
                std::fs::read_to_string(path).unwrap_or_default()
            })
            .collect::<Vec<_>>()
            .join("\n---- started again ----\n")
    }
}

fn spawn(
    dir: &TempDir,
    life: usize,
    arguments: &[String],
    environment: &[(String, String)],
) -> Child {
    let log = File::create(dir.path().join(format!("log.{life}"))).expect("a log file");
    let errors = log.try_clone().expect("a log file");
    Command::new(env!("CARGO_BIN_EXE_inboxd"))
        .args(arguments)
        .current_dir(dir.path())
        .envs(environment.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::null())
        .stdout(log)
        .stderr(errors)
        .kill_on_drop(true)
        .spawn()
        .expect("the sidecar starts")
}
