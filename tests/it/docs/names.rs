//! What the documentation names in backticks exists, where its form tells what it is.

use super::repository::Repository;

/// Endings of files.
const FILES: &[&str] = &[".md", ".rs", ".toml", ".sql", ".yaml", ".yml", ".py", ".txt", ".json"];
/// Folders of this repository that paths begin with.
const FOLDERS: &[&str] =
    &["docs/", "src/", "adapters/", "tests/", "scripts/", "examples/", "bench/", "migrations/"];
/// First parts of keys.
const TABLES: &[&str] = &[
    "admin",
    "breaker",
    "broker",
    "database",
    "dead_letter",
    "headers",
    "health",
    "log",
    "park",
    "retry",
    "signing",
    "source",
    "subscription",
    "telemetry",
    "tls",
];

/// Checks one span. `Err` says what does not exist.
pub fn check(repository: &Repository, span: &str) -> Result<(), String> {
    let word = span.split([' ', '=']).next().unwrap_or(span);
    if span.contains("::") && !span.contains("//") {
        return items(repository, span);
    }
    if word.starts_with("--") && word.len() > 3 {
        return flag(repository, word);
    }
    if let Some(command) = span.strip_prefix("inboxd ") {
        return subcommand(command);
    }
    if word.starts_with("inboxd_") {
        return metric(repository, word);
    }
    if word.starts_with("INBOXD_") {
        return variable(repository, word);
    }
    if let Some(path) = path_of(span) {
        return expanded(path).iter().try_for_each(|path| match repository.exists(path) {
            true => Ok(()),
            false => Err(format!("there is no {path}")),
        });
    }
    let asked = span.trim_start_matches("GET ").trim_start_matches("POST ");
    if ["/v1/", "/livez", "/readyz", "/metrics"].iter().any(|start| asked.starts_with(start)) {
        let collector = ["/v1/traces", "/v1/metrics"].contains(&asked);
        return match collector || repository.has_route(asked) {
            true => Ok(()),
            false => Err(format!("no listener answers {asked}")),
        };
    }
    if let Some((table, key)) = word.rsplit_once('.')
        && TABLES.contains(&table.split('.').next().unwrap_or(table))
        && key.chars().all(|c| c.is_ascii_lowercase() || c == '_')
    {
        return key_is_known(repository, word, key);
    }
    let is_test = word.matches('_').count() >= 4
        && word.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
    match is_test && !repository.has_item(word) && !repository.says(word) {
        true => Err(format!("there is no {word}")),
        false => Ok(()),
    }
}

/// `module::{one, other}`: each part is a function, a module or a type.
fn items(repository: &Repository, span: &str) -> Result<(), String> {
    for span in expanded(span) {
        let parts = span.split(|c: char| !c.is_alphanumeric() && c != '_');
        let missing = parts.filter(|part| !part.is_empty()).find(|part| !repository.has_item(part));
        if let Some(part) = missing {
            return Err(format!("there is no {part}"));
        }
    }
    Ok(())
}

/// `a{b, c}d` is `abd` and `acd`; one pair of braces.
fn expanded(text: &str) -> Vec<String> {
    let Some((before, rest)) = text.split_once('{') else { return vec![text.to_owned()] };
    let Some((inner, after)) = rest.split_once('}') else { return vec![text.to_owned()] };
    inner.split(',').map(|part| format!("{before}{}{after}", part.trim())).collect()
}

/// A flag of inboxd, of a script or of the benchmarks.
fn flag(repository: &Repository, word: &str) -> Result<(), String> {
    let name = word.trim_start_matches("--");
    fn knows(command: &clap::Command, name: &str) -> bool {
        command.get_arguments().any(|argument| argument.get_long() == Some(name))
            || command.get_subcommands().any(|command| knows(command, name))
    }
    // Of cargo and of the programs beside it.
    let others = ["release", "profile", "help", "version"];
    match knows(&inboxd::cli::grammar(), name)
        || others.contains(&name)
        || repository.says(&format!("--{name}"))
    {
        true => Ok(()),
        false => Err(format!("nothing has the flag {word}")),
    }
}

fn subcommand(command: &str) -> Result<(), String> {
    let name = command.split_whitespace().next().unwrap_or(command);
    match name.starts_with('-') || inboxd::cli::grammar().find_subcommand(name).is_some() {
        true => Ok(()),
        false => Err(format!("there is no command inboxd {name}")),
    }
}

/// Families are registered without their prefix, `_total` and, mostly, their unit.
fn metric(repository: &Repository, word: &str) -> Result<(), String> {
    let telemetry = repository.sources_below("src/telemetry");
    let name = word.split('{').next().unwrap_or(word);
    if let Some(start) = name.strip_suffix('*') {
        let start = start.trim_start_matches("inboxd_");
        return match telemetry.contains(&format!("\"{start}")) {
            true => Ok(()),
            false => Err(format!("no metric begins with {start}")),
        };
    }
    let mut name = name.trim_start_matches("inboxd_");
    loop {
        if telemetry.contains(&format!("\"{name}\"")) {
            return Ok(());
        }
        match name.rsplit_once('_') {
            Some((
                rest,
                "total" | "seconds" | "bytes" | "count" | "sum" | "bucket" | "records",
            )) => {
                name = rest;
            }
            // A crate, as `inboxd_conformance`.
            _ if repository.has_package(&word.replace('_', "-")) => return Ok(()),
            _ => return Err(format!("there is no metric {word}")),
        }
    }
}

/// `INBOXD__A__B` is the key `a.b`; any other is said by a source or a script.
fn variable(repository: &Repository, word: &str) -> Result<(), String> {
    match word.strip_prefix("INBOXD__") {
        // A pattern, as `INBOXD_TEST_*_URL`.
        _ if word.contains('*') => Ok(()),
        Some(key) => {
            let last = key.rsplit("__").next().unwrap_or(key).to_ascii_lowercase();
            key_is_known(repository, word, &last)
        }
        None if repository.says(word) => Ok(()),
        None => Err(format!("nothing reads the variable {word}")),
    }
}

fn key_is_known(repository: &Repository, shown: &str, key: &str) -> Result<(), String> {
    match repository.sources_below("src/config").contains(&format!("\"{key}\"")) {
        true => Ok(()),
        false => Err(format!("the configuration has no key {shown}")),
    }
}

fn path_of(span: &str) -> Option<&str> {
    let path = span.split(' ').next()?.split(':').next()?;
    let is_file = FILES.iter().any(|ending| path.ends_with(ending));
    let is_ours = FOLDERS.iter().any(|folder| path.starts_with(folder));
    let is_page = path.ends_with(".md") && !path.contains('/');
    ((is_ours && (is_file || path.contains('/'))) || is_page).then_some(path)
}
