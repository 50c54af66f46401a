//! What is wrong with a configuration: all of it at once, each with its place and remedy.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::path::Path;
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

impl Place {
    /// How a table is written where this is.
    pub(super) fn write_table(&self, full: &str) -> String {
        match self {
            Self::Environment(_) => {
                let name = full.to_ascii_uppercase().replace(['-', ' '], "_").replace('.', "__");
                format!("set its keys by themselves: INBOXD__{name}__KEY")
            }
            Self::File { path, .. } if is_yaml(Path::new(&**path)) => {
                let name = full.rsplit('.').next().unwrap_or_default();
                match full.strip_suffix(".NAME") {
                    Some(above) => format!("indent NAME: below {above}: and its keys below that"),
                    None => format!("write {name}: and its keys below, indented"),
                }
            }
            _ => format!("write [{full}] and its keys below"),
        }
    }

    /// Whether it is in a file in TOML, where a key belongs to the table above it.
    pub(super) fn is_toml(&self) -> bool {
        matches!(self, Self::File { path, .. } if !is_yaml(Path::new(&**path)))
    }
}

/// Whether a file is in YAML, by its name.
pub(super) fn is_yaml(path: &Path) -> bool {
    path.extension()
        .is_some_and(|of| ["yaml", "yml"].iter().any(|end| of.eq_ignore_ascii_case(end)))
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

/// What is said of a key that must be set.
pub(super) const MISSING: &str = "it is missing";
/// What is said of a table that is something else.
pub(super) const NO_TABLE: &str = "it is a table";
/// What is said of a key that is set to nothing.
pub(super) const NULL: &str = "it is null";

/// The remedy of a key that is written almost like this one.
pub(super) fn did_you_mean(key: &str) -> String {
    format!("did you mean {key:?}?")
}

/// Collects problems while the configuration is read.
#[derive(Default)]
pub(super) struct Problems {
    told: RefCell<Vec<Problem>>,
    /// Those beyond [`PROBLEMS_MAX`].
    more: Cell<usize>,
    /// Where the file's text could not be read.
    broken: RefCell<Vec<Place>>,
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

    /// The text of the file cannot be read here: what seems missing may stand there.
    pub(super) fn add_broken(&self, place: Place, fault: Fault) {
        self.broken.borrow_mut().push(place.clone());
        self.add(place, "", fault);
    }

    /// Leaves out what another problem explains: a key that is missing since its value was
    /// refused, since its name was misspelt, or since the file cannot be read; and what the rest
    /// of an unreadable line was taken for.
    fn without_consequences(&self) -> Vec<Problem> {
        let broken = self.broken.take();
        let (missing, mut told): (Vec<_>, Vec<_>) =
            self.told.take().into_iter().partition(|problem| problem.what == MISSING);
        told.retain(|problem| problem.key.is_empty() || !broken.contains(&problem.place));
        for problem in missing {
            let meant = did_you_mean(&problem.key);
            let mut explained = !broken.is_empty();
            for other in &mut told {
                let same = other.key == problem.key;
                let below = other.what == NO_TABLE
                    && problem
                        .key
                        .strip_prefix(&other.key)
                        .is_some_and(|rest| rest.starts_with('.'));
                explained |= same && other.what != MISSING || below || other.remedy == meant;
                if same && other.what == NULL {
                    other.remedy = format!("give it a value: {}", problem.remedy);
                }
            }
            if !explained {
                told.push(problem);
            }
        }
        told
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
        let mut problems = self.without_consequences();
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
