//! Reads one table of the tree, key by key, and collects what is wrong.
//!
//! A key with a problem is read as its default, so that the rest is checked too. A key
//! that nobody asked for is a problem of its own: a misspelt key must not be silence.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::path::Path;
use std::time::Duration;

use secrecy::SecretString;

use super::problem::{Fault, Place, Problems};
use super::tree::{Node, Table, Value};
use super::units;

/// The largest file that holds a secret or a URL.
const SECRET_BYTES_MAX: u64 = 64 * units::KIB;

/// One table.
pub(super) struct Section<'a> {
    pub(super) path: String,
    pub(super) problems: &'a Problems,
    table: Option<&'a Table>,
    place: Place,
    /// The keys asked for: the known ones.
    known: RefCell<BTreeSet<String>>,
}

impl<'a> Section<'a> {
    pub(super) fn root(table: &'a Table, problems: &'a Problems) -> Self {
        Self {
            path: String::new(),
            problems,
            table: Some(table),
            place: Place::Unset,
            known: RefCell::default(),
        }
    }

    /// The full name of a key.
    pub(super) fn key(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    /// Where the table was set.
    pub(super) fn place(&self) -> Place {
        self.place.clone()
    }

    /// A key is wrong.
    pub(super) fn problem(&self, key: &str, fault: Fault) {
        let place = self
            .table
            .and_then(|table| table.get(key))
            .map_or_else(|| self.place.clone(), |node| node.place.clone());
        self.problems.add(place, self.key(key), fault);
    }

    /// A key is missing.
    pub(super) fn missing(&self, key: &str, remedy: impl Into<String>) {
        self.problems.add(Place::Unset, self.key(key), Fault::new("it is missing", remedy));
    }

    pub(super) fn node(&self, key: &str) -> Option<&'a Node> {
        self.known.borrow_mut().insert(key.to_owned());
        self.table.and_then(|table| table.get(key))
    }

    /// Whether a key is set, well or not.
    pub(super) fn has(&self, key: &str) -> bool {
        self.node(key).is_some()
    }

    /// The keys that are set, in alphabetical order.
    pub(super) fn names(&self) -> Vec<&'a str> {
        self.table.into_iter().flatten().map(|(key, _)| key.as_str()).collect()
    }

    /// A table below; empty where it is not set.
    pub(super) fn section(&self, key: &str) -> Section<'a> {
        let node = self.node(key);
        let table = match node.map(|node| &node.value) {
            Some(Value::Table(table)) => Some(table),
            Some(_) => {
                self.problem(
                    key,
                    Fault::new("it is a table", format!("write [{}]", self.key(key))),
                );
                None
            }
            None => None,
        };
        Section {
            path: self.key(key),
            problems: self.problems,
            table,
            place: node.map_or(Place::Unset, |node| node.place.clone()),
            known: RefCell::default(),
        }
    }

    /// A value's text; a list is a problem.
    pub(super) fn text(&self, key: &str) -> Option<&'a str> {
        match &self.node(key)?.value {
            Value::Scalar(text) => Some(text),
            Value::List(_) | Value::Table(_) => {
                self.problem(key, Fault::new("it is a single value", "write one value"));
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
        parse(text).map_err(|fault| self.problem(key, fault)).ok()
    }

    pub(super) fn duration(
        &self,
        key: &str,
        default: Duration,
        bounds: RangeInclusive<Duration>,
    ) -> Duration {
        self.parse(key, |text| units::duration(text, &bounds)).unwrap_or(default)
    }

    pub(super) fn size(&self, key: &str, default: u64, bounds: RangeInclusive<u64>) -> u64 {
        self.parse(key, |text| units::size(text, &bounds)).unwrap_or(default)
    }

    pub(super) fn count(&self, key: &str, default: u64, bounds: RangeInclusive<u64>) -> u64 {
        self.parse(key, |text| units::count(text, &bounds)).unwrap_or(default)
    }

    pub(super) fn number(&self, key: &str, default: f32, bounds: RangeInclusive<f32>) -> f32 {
        self.parse(key, |text| units::number(text, &bounds)).unwrap_or(default)
    }

    pub(super) fn switch(&self, key: &str, default: bool) -> bool {
        self.parse(key, units::switch).unwrap_or(default)
    }

    /// One of some words.
    pub(super) fn choice<T: Copy>(&self, key: &str, choices: &[(&str, T)]) -> Option<T> {
        self.parse(key, |text| {
            choices
                .iter()
                .find(|(word, _)| *word == text.trim())
                .map(|(_, value)| *value)
                .ok_or_else(|| {
                    let words: Vec<_> =
                        choices.iter().map(|(word, _)| format!("{word:?}")).collect();
                    Fault::new(
                        format!("{text:?} is not known"),
                        format!("set {}", words.join(" or ")),
                    )
                })
        })
    }

    /// A list, or text with commas.
    pub(super) fn list(&self, key: &str) -> Option<Vec<String>> {
        let items = match &self.node(key)?.value {
            Value::Scalar(text) => text.split(',').map(|item| item.trim().to_owned()).collect(),
            Value::List(items) => {
                let texts: Option<Vec<_>> = items
                    .iter()
                    .map(|item| match &item.value {
                        Value::Scalar(text) => Some(text.clone()),
                        _ => None,
                    })
                    .collect();
                let Some(texts) = texts else {
                    self.problem(key, Fault::new("it is a list of values", "write [\"a\", \"b\"]"));
                    return None;
                };
                texts
            }
            Value::Table(_) => {
                self.problem(key, Fault::new("it is a list, not a table", "write [\"a\", \"b\"]"));
                return None;
            }
        };
        Some(items)
    }

    /// A secret by its key, or by the twin `<key>_file` that names a file with it. Only one.
    pub(super) fn secret(&self, key: &str) -> Option<SecretString> {
        let twin = format!("{key}_file");
        let given = self.text(key);
        let file = self.text(&twin);
        match (given, file) {
            (Some(_), Some(_)) => {
                self.problem(
                    &twin,
                    Fault::new(
                        format!("{key} is set too"),
                        format!("set {key} or {twin}, not both"),
                    ),
                );
                None
            }
            (Some(text), None) => Some(text.into()),
            (None, Some(path)) => {
                read_secret(Path::new(path)).map_err(|fault| self.problem(&twin, fault)).ok()
            }
            (None, None) => None,
        }
    }

    /// Names the keys that nobody asked for.
    pub(super) fn finish(self) {
        let known = self.known.borrow();
        for name in self.names() {
            if known.contains(name) {
                continue;
            }
            let nearest = known
                .iter()
                .map(|known| (strsim::damerau_levenshtein(name, known), known))
                .min()
                .filter(|(distance, known)| *distance <= 1 + known.len() / 4);
            let remedy = match nearest {
                Some((_, known)) => format!("did you mean {:?}?", self.key(known)),
                None => {
                    let known: Vec<_> = known.iter().map(String::as_str).collect();
                    format!("remove it; the keys here are {}", known.join(", "))
                }
            };
            self.problem(name, Fault::new("there is no such key", remedy));
        }
    }
}

/// A file's content without the line break at its end. Errors name the path alone.
pub(super) fn read_secret(path: &Path) -> Result<SecretString, Fault> {
    let shown = path.display();
    let remedy = "name a readable file that holds the value and nothing else";
    let metadata = std::fs::metadata(path)
        .map_err(|error| Fault::new(format!("the file {shown} cannot be read: {error}"), remedy))?;
    if metadata.len() > SECRET_BYTES_MAX {
        return Err(Fault::new(
            format!(
                "the file {shown} has {} bytes, the most is {SECRET_BYTES_MAX}",
                metadata.len()
            ),
            remedy,
        ));
    }
    let content = std::fs::read_to_string(path)
        .map_err(|error| Fault::new(format!("the file {shown} cannot be read: {error}"), remedy))?;
    let content = content.strip_suffix('\n').unwrap_or(&content);
    let content = content.strip_suffix('\r').unwrap_or(content);
    if content.is_empty() {
        return Err(Fault::new(format!("the file {shown} is empty"), remedy));
    }
    Ok(content.into())
}

#[cfg(test)]
mod tests {
    use secrecy::ExposeSecret;

    use super::super::problem::ConfigError;
    use super::super::tree::from_toml;
    use super::*;

    fn read<T>(toml: &str, read: impl FnOnce(&Section<'_>) -> T) -> (T, ConfigError) {
        let problems = Problems::default();
        let table = from_toml("inboxd.toml", toml, &problems);
        let section = Section::root(&table, &problems);
        let value = read(&section);
        section.finish();
        (value, problems.into_result::<()>(None).unwrap_err())
    }

    #[test]
    fn a_bad_value_is_its_default_and_the_next_is_read_too() {
        let (_, error) = read("lease = \"1ms\"\nconcurrency = 0\n", |section| {
            let bounds = Duration::from_secs(1)..=Duration::from_secs(60);
            assert_eq!(section.duration("lease", Duration::from_secs(15), bounds).as_secs(), 15);
            assert_eq!(section.count("concurrency", 16, 1..=1024), 16);
        });
        assert_eq!(error.0.len(), 2);
        assert_eq!(
            error.0[0].to_string(),
            "lease (inboxd.toml:1): \"1ms\" is below the least, 1s; set a value from 1s to 1min"
        );
    }

    #[test]
    fn a_misspelt_key_is_named_with_the_nearest() {
        let (_, error) =
            read("concurency = 4\n", |section| section.count("concurrency", 16, 1..=1024));
        assert_eq!(error.0.len(), 1);
        assert_eq!(error.0[0].key, "concurency");
        assert!(error.0[0].remedy.contains("\"concurrency\""), "{error}");
    }

    #[test]
    fn a_list_is_an_array_or_has_commas() {
        let (lists, error) = read("a = [\"x\", \"y\"]\nb = \"x, y\"\nc = 1\n", |section| {
            (section.list("a"), section.list("b"), section.list("c"), section.list("d"))
        });
        let expected = Some(vec!["x".to_owned(), "y".to_owned()]);
        assert_eq!(lists, (expected.clone(), expected, Some(vec!["1".to_owned()]), None));
        assert!(error.0.is_empty());
    }

    #[test]
    fn a_secret_comes_from_its_key_or_from_a_file_but_not_from_both() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "hunter2\n").unwrap();
        let path = file.path().display();
        let (secret, _) =
            read(&format!("password_file = \"{path}\"\n"), |section| section.secret("password"));
        assert_eq!(secret.unwrap().expose_secret(), "hunter2");
        let (secret, error) =
            read(&format!("password_file = \"{path}\"\npassword = \"geheim\"\n"), |section| {
                section.secret("password")
            });
        assert!(secret.is_none());
        assert_eq!(error.0[0].key, "password_file");
        assert!(!error.to_string().contains("geheim"), "{error}");
    }

    #[test]
    fn a_secret_s_file_that_is_missing_or_empty_is_named() {
        let (_, error) =
            read("password_file = \"/nowhere/at/all\"\n", |section| section.secret("password"));
        assert!(error.to_string().contains("/nowhere/at/all"), "{error}");
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(read_secret(file.path()).unwrap_err().what.contains("is empty"));
    }
}
