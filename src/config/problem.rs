//! What is wrong with a configuration: all of it at once, each with its place and remedy.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::sync::Arc;

/// Where a value was set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// A file.
    File {
        /// Its path as it was given.
        path: Arc<str>,
        /// From 1.
        line: usize,
    },
    /// An environment variable.
    Environment(Arc<str>),
    /// A flag of the command line, or the variable that stands for it.
    Flag(&'static str),
    /// Nowhere: it is missing.
    Unset,
}

impl Place {
    /// Files from top to bottom, then variables, then flags.
    fn order(&self) -> (u8, &str, usize) {
        match self {
            Self::File { path, line } => (0, path, *line),
            Self::Environment(name) => (1, name, 0),
            Self::Flag(name) => (2, name, 0),
            Self::Unset => (3, "", 0),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File { path, line } => write!(f, "{path}:{line}"),
            Self::Environment(name) => f.write_str(name),
            Self::Flag(name) => f.write_str(name),
            Self::Unset => f.write_str("not set"),
        }
    }
}

/// One thing that is wrong. Never contains a secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Where it was set.
    pub place: Place,
    /// The key, in the form of the file (`subscription.orders.lease`); empty for a whole file.
    pub key: String,
    /// What is wrong, with the value and the limit.
    pub what: String,
    /// What to do.
    pub remedy: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.key.as_str() {
            "" if self.place == Place::Unset => return write!(f, "{}; {}", self.what, self.remedy),
            "" => write!(f, "{}", self.place)?,
            key => write!(f, "{key} ({})", self.place)?,
        }
        write!(f, ": {}; {}", self.what, self.remedy)
    }
}

/// A configuration that is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError(pub Vec<Problem>);

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.len() {
            1 => f.write_str("the configuration has a problem")?,
            count => write!(f, "the configuration has {count} problems")?,
        }
        for problem in &self.0 {
            write!(f, "\n  {problem}")?;
        }
        Ok(())
    }
}

impl std::error::Error for ConfigError {}

/// What is wrong with one value, before it is known where that stood.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Fault {
    pub(super) what: String,
    pub(super) remedy: String,
}

impl Fault {
    pub(super) fn new(what: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { what: what.into(), remedy: remedy.into() }
    }
}

/// The full name of a key; what is no bare key is quoted, and cut where it is long.
pub(super) fn join(path: &str, key: &str) -> String {
    let bare = !key.is_empty()
        && key.len() <= QUOTED_MAX
        && key.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b));
    let key = if bare { key.to_owned() } else { quote(key) };
    if path.is_empty() { key } else { format!("{path}.{key}") }
}

/// Text from outside as problems show it: on one line, and cut where it is long.
pub(super) fn quote(text: &str) -> String {
    match text.char_indices().nth(QUOTED_MAX) {
        None => format!("{text:?}"),
        Some((end, _)) => format!("{:?}…", &text[..end]),
    }
}

/// Characters of a text from outside that are shown.
const QUOTED_MAX: usize = 80;

/// Problems that are told one by one.
const PROBLEMS_MAX: usize = 200;

/// Collects problems while the configuration is read.
#[derive(Default)]
pub(super) struct Problems {
    told: RefCell<Vec<Problem>>,
    /// Those beyond [`PROBLEMS_MAX`].
    more: Cell<usize>,
}

impl Problems {
    pub(super) fn add(&self, place: Place, key: impl Into<String>, fault: Fault) {
        if self.is_full() {
            return self.count_one_more();
        }
        let mut problems = self.told.borrow_mut();
        let problem = Problem { place, key: key.into(), what: fault.what, remedy: fault.remedy };
        if !problems.contains(&problem) {
            problems.push(problem);
        }
    }

    /// Whether no further one is told.
    pub(super) fn is_full(&self) -> bool {
        self.told.borrow().len() >= PROBLEMS_MAX
    }

    pub(super) fn count_one_more(&self) {
        self.more.set(self.more.get() + 1);
    }

    /// What a value was found to be when it was read: told unless something of its key is.
    pub(super) fn add_unless_told(&self, place: Place, key: impl Into<String>, fault: Fault) {
        let key = key.into();
        if !self.told.borrow().iter().any(|problem| problem.key == key) {
            self.add(place, key, fault);
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.told.borrow().is_empty()
    }

    /// Whether something is wrong with what this flag, or the variable for it, gave.
    pub(super) fn has_flag(&self, names: &[&str]) -> bool {
        let named = |place: &Place| matches!(place, Place::Flag(name) if names.contains(name));
        self.told.borrow().iter().any(|problem| named(&problem.place))
    }

    pub(super) fn into_result<T>(self, value: Option<T>) -> Result<T, ConfigError> {
        let mut problems = self.told.into_inner();
        problems.sort_by(|one, other| one.place.order().cmp(&other.place.order()));
        if self.more.get() > 0 {
            problems.push(Problem {
                place: Place::Unset,
                key: String::new(),
                what: format!("there are about {} more", self.more.get()),
                remedy: "correct these first".to_owned(),
            });
        }
        match value {
            Some(value) if problems.is_empty() => Ok(value),
            _ => Err(ConfigError(problems)),
        }
    }
}
