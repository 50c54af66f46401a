//! Finding the servers that tests share, and owning one that may be killed.
//!
//! The shared ones are named by `INBOXD_TEST_{POSTGRES,MYSQL,RABBITMQ,KAFKA}_URL`, else by
//! `target/services/env`, which `scripts/services up` writes. A server that is missing fails
//! the test: it is never skipped.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Output;

use tempfile::TempDir;

/// A kind of server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// PostgreSQL.
    Postgres,
    /// MariaDB, behind the MySQL protocol.
    MySql,
    /// RabbitMQ.
    RabbitMq,
    /// Apache Kafka.
    Kafka,
}

impl Kind {
    /// The environment variable that names the shared server of this kind.
    pub fn variable(self) -> &'static str {
        match self {
            Self::Postgres => "INBOXD_TEST_POSTGRES_URL",
            Self::MySql => "INBOXD_TEST_MYSQL_URL",
            Self::RabbitMq => "INBOXD_TEST_RABBITMQ_URL",
            Self::Kafka => "INBOXD_TEST_KAFKA_URL",
        }
    }

    /// The kind's name for `scripts/services`.
    fn script_name(self) -> &'static str {
        match self {
            Self::Postgres => "postgres",
            Self::MySql => "mariadb",
            Self::RabbitMq => "rabbitmq",
            Self::Kafka => "kafka",
        }
    }
}

/// The URL of the shared server of this kind.
///
/// # Panics
/// Where there is none, with a message that names `scripts/services up`.
pub fn url(kind: Kind) -> String {
    let variable = kind.variable();
    if let Ok(url) = std::env::var(variable)
        && !url.is_empty()
    {
        return url;
    }
    let file = state_dir().join("env");
    std::fs::read_to_string(&file)
        .ok()
        .and_then(|text| variable_in(&text, variable))
        .unwrap_or_else(|| {
            panic!(
                "no {kind:?} server for tests: {variable} is not set, and {} does not name it. \
                 Run `scripts/services up`.",
                file.display()
            )
        })
}

/// The shared PostgreSQL.
pub fn postgres_url() -> String {
    url(Kind::Postgres)
}

/// The shared MariaDB.
pub fn mysql_url() -> String {
    url(Kind::MySql)
}

/// The shared RabbitMQ (`amqp://user:password@host:port/vhost`).
pub fn rabbitmq_url() -> String {
    url(Kind::RabbitMq)
}

/// The shared Kafka (`host:port[,host:port…]`).
pub fn kafka_url() -> String {
    url(Kind::Kafka)
}

/// `<prefix>_<32 hex digits>`: for names of topics, queues, schemas and databases.
pub fn unique(prefix: &str) -> String {
    format!("{prefix}_{}", uuid::Uuid::new_v4().simple())
}

/// A server of the test's own: killed, stopped or frozen at will. Dropped: killed, and its
/// directory removed.
#[derive(Debug)]
pub struct OwnServer {
    kind: Kind,
    dir: TempDir,
    config: String,
    url: String,
    pid: u32,
}

impl OwnServer {
    /// Starts one; returns when it answers.
    pub async fn start(kind: Kind) -> Self {
        Self::start_with(kind, "").await
    }

    /// Starts one with further lines in its configuration file, in that server's own grammar.
    pub async fn start_with(kind: Kind, config: &str) -> Self {
        let dir = own_dir(kind);
        let (url, pid) = start(kind, dir.path(), config).await;
        Self { kind, dir, config: config.to_owned(), url, pid }
    }

    /// Its address; the same after a restart.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The process id of its main process.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Where its data, configuration and log are.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// SIGKILL, children included.
    pub async fn kill(&self) {
        self.run("own-kill").await;
    }

    /// A clean stop.
    pub async fn stop(&self) {
        self.run("own-stop").await;
    }

    /// Starts it again after [`OwnServer::kill`] or [`OwnServer::stop`], with the same data and
    /// port; returns when it answers.
    pub async fn restart(&mut self) {
        let (url, pid) = start(self.kind, self.dir.path(), &self.config).await;
        assert_eq!(url, self.url, "an own server keeps its address over a restart");
        self.pid = pid;
    }

    /// SIGSTOP.
    pub async fn pause(&self) {
        self.run("own-pause").await;
    }

    /// SIGCONT.
    pub async fn resume(&self) {
        self.run("own-resume").await;
    }

    /// The server's own tool (`rabbitmqctl`, `psql` or `mariadb`) on it; its standard output.
    pub async fn control(&self, arguments: &[&str]) -> String {
        control(self.dir.path(), arguments).await
    }

    async fn run(&self, command: &str) {
        services(&[OsStr::new(command), self.dir.path().as_os_str()], None).await;
    }
}

impl Drop for OwnServer {
    fn drop(&mut self) {
        // A drop cannot wait asynchronously; a kill takes well under a second. That it fails
        // because the test has killed the server before is expected.
        let _ = std::process::Command::new(script()).arg("own-kill").arg(self.dir.path()).output();
    }
}

/// The tool of the *shared* server of this kind (`rabbitmqctl`, `psql` or `mariadb`).
pub async fn control_shared(kind: Kind, arguments: &[&str]) -> String {
    control(Path::new(kind.script_name()), arguments).await
}

async fn control(place: &Path, arguments: &[&str]) -> String {
    let mut all = vec![OsStr::new("ctl"), place.as_os_str()];
    all.extend(arguments.iter().map(OsStr::new));
    String::from_utf8_lossy(&services(&all, None).await.stdout).into_owned()
}

async fn start(kind: Kind, dir: &Path, config: &str) -> (String, u32) {
    let name = OsStr::new(kind.script_name());
    let lines = (!config.is_empty()).then(|| dir.join("lines.conf"));
    if let Some(file) = &lines {
        std::fs::write(file, config).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    }
    let output = services(&[OsStr::new("own"), name, dir.as_os_str()], lines.as_deref()).await;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    parse_started(&text)
        .unwrap_or_else(|| panic!("`scripts/services own` printed no `url=… pid=…`: {text:?}"))
}

fn parse_started(text: &str) -> Option<(String, u32)> {
    let words = || text.split_whitespace();
    let url = words().find_map(|word| word.strip_prefix("url="))?;
    let pid = words().find_map(|word| word.strip_prefix("pid="))?.parse().ok()?;
    Some((url.to_owned(), pid))
}

async fn services(arguments: &[&OsStr], config: Option<&Path>) -> Output {
    let mut command = tokio::process::Command::new(script());
    command.args(arguments);
    if let Some(file) = config {
        command.env("INBOXD_OWN_CONFIG", file);
    }
    let output = command
        .output()
        .await
        .unwrap_or_else(|error| panic!("{} cannot be run: {error}", script().display()));
    assert!(
        output.status.success(),
        "scripts/services {arguments:?} failed ({}): {}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    output
}

/// Short, since some servers keep a Unix socket in it, and enterable by other users, since
/// PostgreSQL does not run as root.
fn own_dir(kind: Kind) -> TempDir {
    use std::os::unix::fs::PermissionsExt;
    tempfile::Builder::new()
        .prefix(&format!("inboxd-own-{}-", kind.script_name()))
        .permissions(std::fs::Permissions::from_mode(0o755))
        .tempdir()
        .unwrap_or_else(|error| panic!("no temporary directory: {error}"))
}

/// The root of the workspace: the nearest directory at or above this crate's with `scripts/services`.
fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .ancestors()
        .find(|dir| dir.join("scripts/services").is_file())
        .unwrap_or_else(|| panic!("no scripts/services above {}", env!("CARGO_MANIFEST_DIR")))
        .to_owned()
}

fn script() -> PathBuf {
    repository().join("scripts/services")
}

fn state_dir() -> PathBuf {
    match std::env::var_os("INBOXD_TEST_DIR") {
        Some(dir) => PathBuf::from(dir),
        None => repository().join("target/services"),
    }
}

/// The value of `variable` in lines of `[export ]NAME=value`, quotes of either kind removed.
fn variable_in(text: &str, variable: &str) -> Option<String> {
    text.lines().find_map(|line| {
        let line = line.trim();
        let line = line.strip_prefix("export ").unwrap_or(line);
        let value = line.strip_prefix(variable)?.strip_prefix('=')?.trim();
        let bare = ['\'', '"']
            .iter()
            .find_map(|quote| value.strip_prefix(*quote)?.strip_suffix(*quote))
            .unwrap_or(value);
        (!bare.is_empty()).then(|| bare.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_read_with_and_without_export_and_quotes() {
        let text = "# servers\nexport A='x=1'\nB=\"y\"\nC=z\nD=\n";
        assert_eq!(variable_in(text, "A").as_deref(), Some("x=1"));
        assert_eq!(variable_in(text, "B").as_deref(), Some("y"));
        assert_eq!(variable_in(text, "C").as_deref(), Some("z"));
        assert_eq!(variable_in(text, "D"), None);
        assert_eq!(variable_in(text, "E"), None);
    }

    #[test]
    fn a_started_server_is_read_from_its_line() {
        let line = "url=postgres://a@127.0.0.1:5/x pid=77\n";
        assert_eq!(parse_started(line), Some(("postgres://a@127.0.0.1:5/x".to_owned(), 77)));
        assert_eq!(parse_started("url=x"), None);
    }

    #[test]
    fn unique_names_differ() {
        assert_ne!(unique("q"), unique("q"));
    }
}
