//! What a key is: one declaration, from which it is read, checked layer by layer, described in the
//! JSON Schema and in the reference, and set by the test of the environment. `keys.rs` has them
//! all.

use std::time::Duration;

use super::address::BrokerKind;
use super::problem::Fault;
use super::units;

/// A table with a fixed set of keys.
pub(super) struct Group {
    pub(super) keys: &'static [Key],
    /// The reference gives it a heading of its own.
    pub(super) apart: bool,
}

/// One key of a table.
pub(super) struct Key {
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    /// What holds where it is not set, in words; empty: the kind's default says it.
    pub(super) unset: &'static str,
    /// What bounds it beside its kind.
    pub(super) limits: &'static str,
    /// The broker that it is for; `None`: both.
    pub(super) only: Option<BrokerKind>,
    pub(super) doc: &'static str,
}

/// What a key holds.
pub(super) enum Kind {
    Duration {
        default: Option<Duration>,
        least: Duration,
        most: Duration,
    },
    Size {
        default: u64,
        least: u64,
        most: u64,
    },
    Count {
        default: Option<u64>,
        least: u64,
        most: u64,
    },
    Number {
        default: Option<f32>,
        least: f32,
        most: f32,
    },
    Switch {
        default: Option<bool>,
    },
    Choice {
        default: Option<&'static str>,
        words: &'static [&'static str],
    },
    Text(&'static Form),
    /// Names a file that holds PEM.
    PemFile,
    /// `gather` joins what commas have split.
    List {
        entry: &'static Form,
        most: usize,
        gather: fn(Vec<String>) -> Vec<String>,
    },
    /// A secret; its twin `<key>_file` names a file that holds it.
    Secret(&'static Form),
    /// Secrets; `twin` names files that hold one each.
    Secrets {
        twin: &'static str,
        entry: &'static Form,
        most: usize,
    },
    Table(&'static Group),
    /// A switch, or a table, which is the switch on.
    SwitchOrTable(&'static Group),
    /// Tables of one form by names that the operator chooses.
    Tables {
        most: usize,
        group: &'static Group,
    },
    /// Values of one kind by names; `join` is what `_` stands for in a variable's name.
    Values {
        most: usize,
        names: &'static Form,
        join: &'static str,
        value: &'static Kind,
    },
}

/// A form of text.
pub(super) struct Form {
    /// For the reference.
    pub(super) limits: &'static str,
    /// For the schema: an expression of ECMA 262. Empty: any text.
    pub(super) pattern: &'static str,
    /// One that fits.
    pub(super) sample: &'static str,
    /// Refuses what does not fit, whatever the other keys say. Of a secret it shows nothing.
    pub(super) check: fn(&str) -> Result<(), Fault>,
}

impl Key {
    pub(super) const fn new(name: &'static str, kind: Kind, doc: &'static str) -> Self {
        Self { name, kind, unset: "", limits: "", only: None, doc }
    }

    pub(super) const fn unset(mut self, words: &'static str) -> Self {
        self.unset = words;
        self
    }

    pub(super) const fn limits(mut self, words: &'static str) -> Self {
        self.limits = words;
        self
    }

    pub(super) const fn only(mut self, kind: BrokerKind) -> Self {
        self.only = Some(kind);
        self
    }

    /// The key that names a file instead.
    pub(super) fn twin(&self) -> Option<String> {
        match self.kind {
            Kind::Secret(_) => Some(twin(self.name)),
            Kind::Secrets { twin, .. } => Some(twin.to_owned()),
            _ => None,
        }
    }
}

impl Group {
    /// The key of this name, be it the key's own or its twin's.
    pub(super) fn find(&self, name: &str) -> Option<&'static Key> {
        self.keys.iter().find(|key| key.name == name || key.twin().as_deref() == Some(name))
    }

    /// The kind of a key that the program itself asks for.
    pub(super) fn kind(&self, name: &str) -> &'static Kind {
        match self.keys.iter().find(|key| key.name == name) {
            Some(key) => &key.kind,
            // A mistake in the program, which reading any configuration shows.
            None => unreachable!("{name} is not declared in keys.rs"),
        }
    }

    /// Every name that may stand in the table.
    pub(super) fn names(&self) -> impl Iterator<Item = String> {
        self.keys.iter().flat_map(|key| [Some(key.name.to_owned()), key.twin()]).flatten()
    }
}

impl Kind {
    /// What holds where the key is not set.
    pub(super) fn default_text(&self) -> Option<String> {
        match self {
            Self::Duration { default, .. } => default.map(units::show_duration),
            Self::Size { default, .. } => Some(units::show_size(*default)),
            Self::Count { default, .. } => default.map(|count| count.to_string()),
            Self::Number { default, .. } => default.map(|number| number.to_string()),
            Self::Switch { default } => default.map(|on| on.to_string()),
            Self::Choice { default, .. } => default.map(str::to_owned),
            _ => None,
        }
    }

    /// Refuses a single value that does not fit, whatever the other keys say.
    pub(super) fn check(&self, text: &str) -> Result<(), Fault> {
        match self {
            Self::Duration { least, most, .. } => {
                units::duration(text, &(*least..=*most)).map(drop)
            }
            Self::Size { least, most, .. } => units::size(text, &(*least..=*most)).map(drop),
            Self::Count { least, most, .. } => units::count(text, &(*least..=*most)).map(drop),
            Self::Number { least, most, .. } => units::number(text, &(*least..=*most)).map(drop),
            Self::Switch { .. } | Self::SwitchOrTable(_) => units::switch(text).map(drop),
            Self::Choice { words, .. } => units::word(text, words).map(drop),
            Self::Text(form) | Self::Secret(form) => (form.check)(text),
            // Files are looked at where they hold, not where they are overridden.
            Self::PemFile
            | Self::List { .. }
            | Self::Secrets { .. }
            | Self::Table(_)
            | Self::Tables { .. }
            | Self::Values { .. } => Ok(()),
        }
    }
}

/// The twin of a secret.
pub(super) fn twin(name: &str) -> String {
    format!("{name}_file")
}

/// The words of a choice, from the pairs that it is read by.
pub(super) const fn words<T: Copy, const N: usize>(
    pairs: &[(&'static str, T); N],
) -> [&'static str; N] {
    let mut words = [""; N];
    let mut at = 0;
    while at < N {
        words[at] = pairs[at].0;
        at += 1;
    }
    words
}
