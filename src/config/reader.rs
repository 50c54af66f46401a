//! Reads one table of the layers' sum, key by key, as `keys.rs` declares them, and collects what is
//! wrong.
//!
//! A value with a problem is read as its default, so that the rest is checked too. What the
//! check of the single layers has told of a value is not told again.

use std::fmt::Display;
use std::path::Path;
use std::time::Duration;

use secrecy::SecretString;

use super::address::BrokerKind;
use super::check::{both, items, no_scalar};
use super::declare::{Group, Kind, twin};
use super::problem::{Fault, MISSING, Place, Problems, join};
use super::tree::{Node, Table, Value};
use super::units;

/// The largest file that holds a secret or a URL.
const SECRET_BYTES_MAX: u64 = 64 * units::KIB;

/// One table.
pub(super) struct Section<'a> {
    pub(super) path: String,
    pub(super) problems: &'a Problems,
    group: &'static Group,
    table: Option<&'a Table>,
    place: Place,
}

/// What tables of values by name have: no fixed key.
static NO_KEYS: Group = Group { keys: &[], apart: false };

impl<'a> Section<'a> {
    pub(super) fn root(table: &'a Table, group: &'static Group, problems: &'a Problems) -> Self {
        Self { path: String::new(), problems, group, table: Some(table), place: Place::Unset }
    }

    /// The full name of a key.
    pub(super) fn key(&self, key: &str) -> String {
        join(&self.path, key)
    }

    fn place_of(&self, key: &str) -> Place {
        self.node(key).map_or_else(|| self.place.clone(), |node| node.place.clone())
    }

    /// A key contradicts another, or what the file that it names holds.
    pub(super) fn problem(&self, key: &str, fault: Fault) {
        self.problems.add(self.place_of(key), self.key(key), fault);
    }

    /// The value of a key cannot be read.
    pub(super) fn unreadable(&self, key: &str, fault: Fault) {
        self.problems.add_unless_told(self.place_of(key), self.key(key), fault);
    }

    /// A key is missing; its place is that of its table.
    pub(super) fn missing(&self, key: &str, remedy: impl Into<String>) {
        let fault = Fault::new(MISSING, remedy);
        self.problems.add(self.place.clone(), self.key(key), fault);
    }

    pub(super) fn node(&self, key: &str) -> Option<&'a Node> {
        self.table.and_then(|table| table.get(key))
    }

    /// Whether a key is set, well or not.
    pub(super) fn has(&self, key: &str) -> bool {
        self.node(key).is_some()
    }

    /// Whether a secret is set, itself or by its file.
    pub(super) fn has_secret(&self, key: &str) -> bool {
        self.has(key) || self.has(&twin(key))
    }

    /// The keys that are set, in alphabetical order.
    pub(super) fn names(&self) -> Vec<&'a str> {
        self.table.into_iter().flatten().map(|(key, _)| key.as_str()).collect()
    }

    /// The names of values, each once where a secret can have a twin.
    pub(super) fn secret_names(&self) -> Vec<&'a str> {
        let mut names: Vec<&str> = self
            .names()
            .into_iter()
            .map(|name| name.strip_suffix("_file").unwrap_or(name))
            .collect();
        names.dedup();
        names
    }

    /// A table below; empty where it is not set.
    pub(super) fn section(&self, key: &str) -> Section<'a> {
        match self.group.kind(key) {
            Kind::Table(group) | Kind::SwitchOrTable(group) => self.below(key, group),
            // Their entries are read by `entry`, or by name.
            _ => self.below(key, &NO_KEYS),
        }
    }

    /// The table of a name that the operator chose, in the table `key`.
    pub(super) fn entry(&self, key: &str, name: &str) -> Section<'a> {
        match self.group.kind(key) {
            Kind::Tables { group, .. } => self.section(key).below(name, group),
            _ => self.section(key).below(name, &NO_KEYS),
        }
    }

    fn below(&self, key: &str, group: &'static Group) -> Section<'a> {
        let node = self.node(key);
        let table = match node.map(|node| &node.value) {
            Some(Value::Table(table)) => Some(table),
            // What is no table is told by the check of its layer.
            _ => None,
        };
        Section {
            path: self.key(key),
            problems: self.problems,
            group,
            table,
            place: node.map_or_else(|| self.place.clone(), |node| node.place.clone()),
        }
    }

    /// Names the keys that are set and mean nothing to this broker.
    pub(super) fn refuse_those_of_others(&self, broker: BrokerKind) {
        for key in self.group.keys {
            if let Some(only) = key.only.filter(|only| *only != broker)
                && self.has(key.name)
            {
                let what = format!("it is {}'s, and the broker is {}", only.name(), broker.name());
                self.problem(key.name, Fault::new(what, "leave it out"));
            }
        }
    }

    /// A value's text; a list is a problem.
    pub(super) fn text(&self, key: &str) -> Option<&'a str> {
        match &self.node(key)?.value {
            Value::Scalar(text) => Some(text),
            Value::List(_) | Value::Table(_) => {
                self.unreadable(key, no_scalar());
                None
            }
        }
    }

    /// A value that `parse` understands.
    pub(super) fn parse<T>(
        &self,
        key: &str,
        parse: impl FnOnce(&str) -> Result<T, Fault>,
    ) -> Option<T> {
        let text = self.text(key)?;
        parse(text).map_err(|fault| self.unreadable(key, fault)).ok()
    }

    pub(super) fn duration(&self, key: &str) -> Duration {
        match self.group.kind(key) {
            Kind::Duration { default: Some(default), .. } => {
                self.duration_if_set(key).unwrap_or(*default)
            }
            _ => unreachable!("{key} is declared without a default duration"),
        }
    }

    pub(super) fn duration_if_set(&self, key: &str) -> Option<Duration> {
        match self.group.kind(key) {
            Kind::Duration { least, most, .. } => {
                self.parse(key, |text| units::duration(text, &(*least..=*most)))
            }
            _ => unreachable!("{key} is declared as no duration"),
        }
    }

    pub(super) fn size(&self, key: &str) -> u64 {
        match self.group.kind(key) {
            Kind::Size { default, least, most } => {
                self.parse(key, |text| units::size(text, &(*least..=*most))).unwrap_or(*default)
            }
            _ => unreachable!("{key} is declared as no size"),
        }
    }

    pub(super) fn count(&self, key: &str) -> u64 {
        match self.group.kind(key) {
            Kind::Count { default: Some(default), .. } => self.count_or(key, *default),
            _ => unreachable!("{key} is declared without a default count"),
        }
    }

    /// A count whose default depends on something else.
    pub(super) fn count_or(&self, key: &str, default: u64) -> u64 {
        match self.group.kind(key) {
            Kind::Count { least, most, .. } => {
                self.parse(key, |text| units::count(text, &(*least..=*most))).unwrap_or(default)
            }
            _ => unreachable!("{key} is declared as no count"),
        }
    }

    pub(super) fn number(&self, key: &str) -> f32 {
        match self.group.kind(key) {
            Kind::Number { default: Some(default), .. } => {
                self.number_if_set(key).unwrap_or(*default)
            }
            _ => unreachable!("{key} is declared without a default number"),
        }
    }

    pub(super) fn number_if_set(&self, key: &str) -> Option<f32> {
        match self.group.kind(key) {
            Kind::Number { least, most, .. } => {
                self.parse(key, |text| units::number(text, &(*least..=*most)))
            }
            _ => unreachable!("{key} is declared as no number"),
        }
    }

    pub(super) fn switch(&self, key: &str) -> bool {
        match self.group.kind(key) {
            Kind::Switch { default: Some(default) } => self.switch_if_set(key).unwrap_or(*default),
            _ => unreachable!("{key} is declared without a default switch"),
        }
    }

    pub(super) fn switch_if_set(&self, key: &str) -> Option<bool> {
        self.parse(key, units::switch)
    }

    /// One of some words, with the declared one where it is not set.
    pub(super) fn choice<T: Copy, const N: usize>(
        &self,
        key: &str,
        pairs: &[(&'static str, T); N],
    ) -> T {
        match self.group.kind(key) {
            Kind::Choice { default: Some(default), .. } => {
                let declared = pairs.iter().find(|(word, _)| word == default);
                let Some((_, declared)) = declared else {
                    unreachable!("{key}'s default is none of its words")
                };
                self.word(key, pairs).unwrap_or(*declared)
            }
            _ => unreachable!("{key} is declared without a default choice"),
        }
    }

    /// One of some words, if it is set.
    pub(super) fn word<T: Copy, const N: usize>(
        &self,
        key: &str,
        pairs: &[(&'static str, T); N],
    ) -> Option<T> {
        let words = super::declare::words(pairs);
        self.parse(key, |text| units::word(text, &words)).map(|at| pairs[at].1)
    }

    /// A list, or text with commas.
    pub(super) fn list(&self, key: &str) -> Option<Vec<String>> {
        let items = items(self.node(key)?).map_err(|fault| self.unreadable(key, fault)).ok()?;
        match self.group.kind(key) {
            Kind::List { gather, .. } => Some(gather(items)),
            _ => Some(items),
        }
    }

    /// Secrets by their key, or by the twin that names files with one each. Only one of the two.
    pub(super) fn secrets(&self, key: &str) -> (Vec<SecretString>, &'static str) {
        let Kind::Secrets { twin, .. } = self.group.kind(key) else {
            unreachable!("{key} is declared as no list of secrets")
        };
        let read = |key: &str| {
            let items = items(self.node(key)?);
            items.map_err(|fault| self.unreadable(key, fault)).ok()
        };
        match (self.has(key), read(twin)) {
            (true, Some(_)) => {
                self.unreadable(twin, both(key, twin));
                (Vec::new(), twin)
            }
            (false, Some(files)) => {
                let mut secrets = Vec::new();
                for file in files {
                    match read_secret(Path::new(&file)) {
                        Ok(secret) => secrets.push(secret),
                        Err(fault) => self.problem(twin, fault),
                    }
                }
                (secrets, twin)
            }
            (_, None) => {
                let secrets = read(key).unwrap_or_default();
                (secrets.into_iter().map(SecretString::from).collect(), "secrets")
            }
        }
    }

    /// A secret by its key, or by the twin `<key>_file` that names a file with it. Only one.
    pub(super) fn secret(&self, key: &str) -> Option<SecretString> {
        let twin = twin(key);
        let given = self.text(key);
        let file = self.text(&twin);
        match (given, file) {
            (Some(_), Some(_)) => {
                self.unreadable(&twin, both(key, &twin));
                None
            }
            (Some(text), None) => Some(text.into()),
            (None, Some(path)) => {
                read_secret(Path::new(path)).map_err(|fault| self.problem(&twin, fault)).ok()
            }
            (None, None) => None,
        }
    }

    /// A secret that `parse` understands, which shows nothing of it.
    pub(super) fn parse_secret<T>(
        &self,
        key: &str,
        parse: impl FnOnce(&SecretString) -> Result<T, Fault>,
    ) -> Option<T> {
        let secret = self.secret(key)?;
        let twin = twin(key);
        let key = if self.has(&twin) { &twin } else { key };
        parse(&secret).map_err(|fault| self.unreadable(key, fault)).ok()
    }
}

/// A file's content without the line break at its end. Errors name the path alone.
pub(super) fn read_secret(path: &Path) -> Result<SecretString, Fault> {
    let remedy = "name a readable file that holds the value and nothing else";
    let shown = shown_path(path);
    let content = read_file(path, &shown, SECRET_BYTES_MAX, remedy)?;
    let content = content.strip_suffix('\n').unwrap_or(&content);
    let content = content.strip_suffix('\r').unwrap_or(content);
    if content.is_empty() {
        return Err(Fault::new(format!("{shown} is empty"), remedy));
    }
    Ok(content.into())
}

/// A path as errors show it. Somebody may have written the secret itself, where the name of its
/// file belongs: what does not look like a path is not shown.
pub(super) fn shown_path(path: &Path) -> String {
    let text = path.to_string_lossy();
    let odd = |c: char| c.is_control() || c.is_whitespace() || c == '@';
    let parent = path.parent().filter(|parent| parent.components().next().is_some());
    let is_path = path.is_absolute()
        || parent.is_some_and(Path::is_dir)
        || parent.is_none() && path.extension().is_some();
    if is_path && !text.contains("://") && !text.contains(odd) {
        format!("the file {text}")
    } else {
        "the file that it names".to_owned()
    }
}

/// The text of a file of at most so many bytes. Only regular files are read: opening a pipe could
/// wait for ever, and what is read once cannot be checked before it is used.
pub(super) fn read_file(
    path: &Path,
    shown: &dyn Display,
    bytes_max: u64,
    remedy: &str,
) -> Result<String, Fault> {
    let unreadable = |error| Fault::new(format!("{shown} cannot be read: {error}"), remedy);
    let metadata = std::fs::metadata(path).map_err(unreadable)?;
    if metadata.is_dir() {
        return Err(Fault::new(format!("{shown} is a directory"), remedy));
    }
    if !metadata.is_file() {
        let what = format!("{shown} is no regular file (a pipe, a terminal or a device)");
        return Err(Fault::new(what, remedy));
    }
    if metadata.len() > bytes_max {
        let what = format!("{shown} has {} bytes, the most is {bytes_max}", metadata.len());
        return Err(Fault::new(what, remedy));
    }
    let bytes = std::fs::read(path).map_err(unreadable)?;
    String::from_utf8(bytes).map_err(|error| {
        let (at, bytes) = (error.utf8_error().valid_up_to(), error.as_bytes());
        let line = bytes[..at].iter().filter(|byte| **byte == b'\n').count() + 1;
        Fault::new(
            format!("{shown} is not UTF-8: byte {} in line {line}", at + 1),
            "save it as UTF-8",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_s_file_that_is_missing_empty_or_no_file_is_named() {
        let fault = |path: &Path| read_secret(path).unwrap_err().what;
        assert!(fault(Path::new("/nowhere/at/all")).contains("/nowhere/at/all"));
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(fault(file.path()).contains("is empty"));
        assert!(fault(&std::env::temp_dir()).contains("is a directory"));
        assert!(fault(Path::new("/dev/null")).contains("no regular file"));
        std::fs::write(file.path(), b"geheim\n\xff").unwrap();
        let what = fault(file.path());
        assert!(what.contains("not UTF-8: byte 8 in line 2") && !what.contains("geheim"), "{what}");
        std::fs::write(file.path(), vec![b'a'; SECRET_BYTES_MAX as usize + 1]).unwrap();
        assert!(fault(file.path()).contains("the most is 65536"));
    }
}
