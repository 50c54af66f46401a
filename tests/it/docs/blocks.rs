//! What a fenced block must be, by its language.

use std::path::Path;
use std::process::Command;

use inboxd::config::{self, Flags, Inputs};
use secrecy::SecretString;

use super::commands;
use super::markdown::Block;
use super::repository::Repository;

/// What a part of a file is laid upon.
const KAFKA_BASE: &str = r#"
[database]
url = "sqlite:inbox.db"
[broker.main]
kind = "kafka"
url = "127.0.0.1:9092"
[subscription.orders]
callback = "http://127.0.0.1:8080/orders"
source = { broker = "main", topics = ["orders"], group = "billing" }
"#;
const RABBITMQ_BASE: &str = r#"
[database]
url = "sqlite:inbox.db"
[broker.main]
kind = "rabbitmq"
url = "127.0.0.1:5672"
[subscription.orders]
callback = "http://127.0.0.1:8080/orders"
source = { broker = "main", queue = "orders" }
"#;

/// Checks one block.
///
/// Languages: `toml` and `yaml` are configurations (`toml fragment` or `toml fragment rabbitmq`
/// a part of one), `console` and `sh` commands, `json`, `python` and `sql` a file of this
/// repository word for word, `text` (or none) a drawing or an output, without commands.
pub fn check(repository: &Repository, block: &Block) -> Result<(), String> {
    let mut words = block.info.split_whitespace();
    let language = words.next().unwrap_or("");
    let words: Vec<&str> = words.collect();
    match language {
        "toml" if words.first() == Some(&"fragment") => {
            let base = if words.contains(&"rabbitmq") { RABBITMQ_BASE } else { KAFKA_BASE };
            load(&laid_upon(base, &block.text)?, "toml")
        }
        "toml" | "yaml" => load(&block.text, language),
        "console" | "sh" => shell(&block.text).and_then(|()| commands::check(repository, block)),
        "json" => serde_json::from_str::<serde_json::Value>(&block.text)
            .map(drop)
            .map_err(|error| error.to_string()),
        "python" | "sql" => match repository.has_text(&block.text) {
            true => Ok(()),
            false => Err(format!("no file of examples/ or migrations/ has this {language}")),
        },
        "text" | "" => no_commands(&block.text),
        other => Err(format!("nobody checks blocks of the language {other:?}")),
    }
}

/// Reads a configuration as `inboxd run --config` does. Files of secrets are made up.
fn load(text: &str, extension: &str) -> Result<(), String> {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join(format!("inboxd.{extension}"));
    std::fs::write(&file, with_secret_files(directory.path(), text)).unwrap();
    let inputs = Inputs {
        file: Some(file),
        environment: Vec::new(),
        flags: Flags::default(),
        needs_subscriptions: true,
    };
    config::load(inputs).map(drop).map_err(|error| error.to_string())
}

/// Replaces what a `…_file` or `…_files` names by a file that exists.
fn with_secret_files(directory: &Path, text: &str) -> String {
    let made_up = |key: &str, path: &str| -> String {
        let content: SecretString = match key {
            "url_file" | "migrate_url_file" => "postgres://inbox@127.0.0.1/inbox".into(),
            key if key.contains("secret") => "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw".into(),
            _ => "made-up-and-long-enough".into(),
        };
        let file = directory.join(path.trim_start_matches('/').replace('/', "-"));
        std::fs::write(&file, secrecy::ExposeSecret::expose_secret(&content)).unwrap();
        file.display().to_string()
    };
    let rewritten = text.lines().map(|line| {
        let Some((key, value)) = line.split_once(['=', ':']) else { return line.to_owned() };
        let key = key.trim().trim_start_matches("- ").rsplit('.').next().unwrap_or_default();
        if !key.ends_with("_file") && !key.ends_with("_files") {
            return line.to_owned();
        }
        let mut value = value.to_owned();
        let paths: Vec<String> = value.split('"').skip(1).step_by(2).map(str::to_owned).collect();
        for path in paths {
            value = value.replace(&format!("\"{path}\""), &format!("{:?}", made_up(key, &path)));
        }
        let separator = if line.contains(" = ") {
            "="
        } else {
            &line[line.find([':', '=']).unwrap_or(0)..][..1]
        };
        format!("{}{separator}{value}", line.split(['=', ':']).next().unwrap_or_default())
    });
    rewritten.collect::<Vec<_>>().join("\n")
}

/// A part of a configuration over one that is whole.
fn laid_upon(base: &str, part: &str) -> Result<String, String> {
    fn lay(under: &mut toml::Table, over: toml::Table) {
        for (key, value) in over {
            match (under.get_mut(&key), value) {
                (Some(toml::Value::Table(under)), toml::Value::Table(over)) => lay(under, over),
                (_, value) => drop(under.insert(key, value)),
            }
        }
    }
    let mut whole: toml::Table = base.parse().unwrap();
    lay(&mut whole, part.parse().map_err(|error: toml::de::Error| error.to_string())?);
    Ok(whole.to_string())
}

/// The shell can read it.
fn shell(text: &str) -> Result<(), String> {
    let read = Command::new("bash").args(["-n", "-c", text]).output().unwrap();
    match read.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&read.stderr).into_owned()),
    }
}

/// A command hides in no block that nobody checks.
fn no_commands(text: &str) -> Result<(), String> {
    let command = |line: &&str| {
        let line = line.trim_start_matches("$ ");
        ["inboxd ", "scripts/", "cargo ", "curl ", "docker "]
            .iter()
            .any(|word| line.starts_with(word))
    };
    match text.lines().find(command) {
        Some(line) => Err(format!("a command in a block without a language: {line}")),
        None => Ok(()),
    }
}
