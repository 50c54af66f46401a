//! Command lines: every program that the documentation calls is known here, and its arguments
//! are held against the program where it is ours.

use inboxd::config::{self, Flags, Inputs};
use secrecy::{ExposeSecret as _, SecretString};

use super::markdown::Block;
use super::repository::Repository;

/// Not ours: what they are asked for was tried by hand.
const OTHERS: &[&str] = &[
    "apt-get",
    "cat",
    "cd",
    "docker",
    "echo",
    "eval",
    "export",
    "git",
    "kcat",
    "kill",
    "amqp-publish",
    "psql",
    "rm",
    "sleep",
    "source",
    "sqlite3",
    "grep",
    "promtool",
    "helm",
    "wait",
    "mkdir",
];

/// The shell's own.
const KEYWORDS: &[&str] = &["do", "done", "until", "while"];

/// Checks each command of a block.
pub fn check(repository: &Repository, block: &Block) -> Result<(), String> {
    lines(&block.text).iter().try_for_each(|line| check_line(repository, line))
}

fn check_line(repository: &Repository, line: &str) -> Result<(), String> {
    let mut words = Vec::new();
    let mut is_target = false;
    for word in shlex::split(line).ok_or_else(|| format!("cannot be split: {line}"))? {
        if let Some(inner) = word.strip_prefix("$(").and_then(|word| word.strip_suffix(')')) {
            check_line(repository, inner)?;
        }
        let redirects = matches!(word.as_str(), ">" | ">>" | "2>" | "2>>" | "<");
        if !redirects && !std::mem::replace(&mut is_target, redirects) {
            match word.strip_suffix(';') {
                Some(word) => words.extend([word.to_owned(), ";".to_owned()]),
                None => words.push(word),
            }
        }
        is_target = redirects;
    }
    for command in words.split(|word| matches!(word.as_str(), "|" | "&&" | "||" | ";" | "&")) {
        let plain = |word: &&String| is_assignment(word) || KEYWORDS.contains(&word.as_str());
        let skipped = command.iter().take_while(plain).count();
        let Some((program, arguments)) = command[skipped..].split_first() else { continue };
        one(repository, program, arguments).map_err(|why| format!("{line}: {why}"))?;
    }
    Ok(())
}

/// Lines as the shell has them: continued ones joined, here-documents left out.
fn lines(text: &str) -> Vec<String> {
    let joined = text.replace("\\\n", " ");
    let mut lines = Vec::new();
    let mut until: Option<String> = None;
    for line in joined.lines() {
        if let Some(end) = &until {
            if line == end {
                until = None;
            }
            continue;
        }
        if let Some((command, end)) = line.split_once("<<") {
            until = Some(end.split_whitespace().next().unwrap_or("").trim_matches('\'').to_owned());
            lines.push(command.to_owned());
        } else {
            lines.push(line.to_owned());
        }
    }
    lines
}

fn is_assignment(word: &str) -> bool {
    word.split_once('=').is_some_and(|(name, _)| {
        !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
    })
}

fn one(repository: &Repository, program: &str, arguments: &[String]) -> Result<(), String> {
    match program.rsplit('/').next().unwrap_or(program) {
        "inboxd" => ours(arguments),
        "cargo" => cargo(repository, arguments),
        "curl" => curl(repository, arguments),
        "python3" => arguments
            .first()
            .filter(|file| repository.exists(file))
            .map(drop)
            .ok_or("no such file".into()),
        name if program.starts_with("scripts/") => script(repository, name, arguments),
        name if OTHERS.contains(&name) => Ok(()),
        name => Err(format!("nobody checks the arguments of {name}")),
    }
}

/// inboxd's own command line can be read.
fn ours(arguments: &[String]) -> Result<(), String> {
    let line = std::iter::once("inboxd".to_owned()).chain(arguments.iter().cloned());
    match inboxd::cli::grammar().try_get_matches_from(line) {
        Ok(matches) => match matches.subcommand() {
            Some(("run", matches)) => is_configuration(matches),
            _ => Ok(()),
        },
        // Help and version.
        Err(error) if !error.use_stderr() => Ok(()),
        Err(error) => Err(error.to_string()),
    }
}

/// What the flags say is a configuration: the source's grammar, the callback, the database.
fn is_configuration(matches: &clap::ArgMatches) -> Result<(), String> {
    if matches.contains_id("config") && matches.get_one::<std::path::PathBuf>("config").is_some() {
        // A file of the reader's; those that are shown are blocks of their own.
        return Ok(());
    }
    let secret = |id: &str| {
        matches.get_one::<SecretString>(id).map(|value| {
            let value = value.expose_secret();
            let broker = match value.starts_with("kafka://") {
                true => "127.0.0.1:9092",
                false => "amqp://guest:guest@127.0.0.1:5672/%2f",
            };
            SecretString::from(value.replace("$BROKER", broker))
        })
    };
    let text = |id: &str| matches.get_one::<String>(id).cloned();
    let flags = Flags {
        source: secret("source").map(|value| (value, "--source")),
        database: secret("database").map(|value| (value, "--database")),
        callback: text("callback").map(|value| (value, "--callback")),
        consumer_id: text("consumer_id").map(|value| (value, "--consumer-id")),
        admin: text("admin").map(|value| (value, "--admin")),
        ..Flags::default()
    };
    let inputs = Inputs { file: None, environment: Vec::new(), flags, needs_subscriptions: true };
    config::load(inputs).map(drop).map_err(|error| error.to_string())
}

fn cargo(repository: &Repository, arguments: &[String]) -> Result<(), String> {
    let split = arguments.iter().position(|word| word == "--");
    let (own, passed) = arguments.split_at(split.unwrap_or(arguments.len()));
    let value_of = |flag: &str| {
        own.iter().position(|word| word == flag).and_then(|at| own.get(at + 1)).cloned()
    };
    if let Some(profile) = value_of("--profile")
        && !repository.text("Cargo.toml").contains(&format!("[profile.{profile}]"))
    {
        return Err(format!("no profile {profile}"));
    }
    if let Some(package) = value_of("-p")
        && !repository.has_package(&package)
    {
        return Err(format!("no package {package}"));
    }
    match own.first().map(String::as_str) {
        Some("run") if value_of("-p").is_none() => ours(passed.get(1..).unwrap_or_default()),
        Some("run" | "build" | "test" | "check") => Ok(()),
        other => Err(format!("cargo {other:?}")),
    }
}

/// The script is there, and knows each option and the first word.
fn script(repository: &Repository, name: &str, arguments: &[String]) -> Result<(), String> {
    let path = format!("scripts/{name}");
    if !repository.exists(&path) {
        return Err(format!("there is no {path}"));
    }
    let mut text = repository.text(&path);
    if name == "bench" {
        // The options are those of the program that it starts.
        text.push_str(&repository.sources_below("bench/src").to_lowercase().replace('_', "-"));
    }
    let options = arguments.iter().filter(|word| word.starts_with('-'));
    let first = arguments.first().filter(|word| !word.starts_with('-'));
    for word in options.chain(first) {
        let bare = word.trim_start_matches("--").split('=').next().unwrap_or(word);
        if !text.contains(bare) {
            return Err(format!("{path} does not know {word}"));
        }
    }
    Ok(())
}

/// What is asked of a listener of ours has a route.
fn curl(repository: &Repository, arguments: &[String]) -> Result<(), String> {
    for word in arguments {
        let address = word.strip_prefix("http://").unwrap_or(word);
        let ours = ["127.0.0.1:7461", "127.0.0.1:7462"];
        let Some(path) = ours.iter().find_map(|host| address.strip_prefix(host)) else { continue };
        if !repository.has_route(path) {
            return Err(format!("no listener answers {path}"));
        }
    }
    Ok(())
}
