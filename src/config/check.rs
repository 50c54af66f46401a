//! Looks at one layer alone, before it is laid onto another: what is wrong in the file is told
//! although a variable hides it.
//!
//! What one value cannot show (what is missing, what contradicts another key, what a file holds)
//! is the readers' to tell, of what holds in the end.

use super::declare::{Group, Key, Kind};
use super::keys;
use super::names;
use super::problem::{Fault, NO_TABLE, Place, Problems, did_you_mean, join};
use super::tree::{Node, Table, Value};

/// Checks every value of a layer against its declaration.
pub(super) fn layer(table: &Table, group: &'static Group, problems: &Problems) {
    Layer { problems }.table(table, group, "");
}

struct Layer<'a> {
    problems: &'a Problems,
}

impl Layer<'_> {
    fn problem(&self, place: &Place, key: &str, fault: Fault) {
        self.problems.add(place.clone(), key, fault);
    }

    fn table(&self, table: &Table, group: &'static Group, path: &str) {
        for (name, node) in table {
            let full = join(path, name);
            match group.find(name) {
                // Finding the nearest key is not free, and there may be many.
                None if self.problems.is_full() => self.problems.count_one_more(),
                None => self.problem(&node.place, &full, unknown(group, path, name, &node.place)),
                Some(key) if key.name == name => self.value(node, &key.kind, &full),
                Some(key) => self.twin(table, node, key, &full),
            }
        }
    }

    /// The key that names files; `node` is its value.
    fn twin(&self, table: &Table, node: &Node, key: &Key, full: &str) {
        if table.contains_key(key.name) {
            let twin = key.twin().unwrap_or_default();
            self.problem(&node.place, full, both(key.name, &twin));
        }
        match (&key.kind, &node.value) {
            (Kind::Secrets { .. }, Value::Table(_)) => self.problem(&node.place, full, no_list()),
            (Kind::Secrets { .. }, _) | (_, Value::Scalar(_)) => {}
            _ => self.problem(&node.place, full, no_scalar()),
        }
    }

    fn value(&self, node: &Node, kind: &'static Kind, full: &str) {
        match (kind, &node.value) {
            (Kind::Table(group) | Kind::SwitchOrTable(group), Value::Table(table)) => {
                self.table(table, group, full);
            }
            (Kind::Tables { group, most }, Value::Table(tables)) => {
                self.tables(tables, group, *most, &node.place, full);
            }
            (Kind::Values { .. }, Value::Table(table)) => self.values(table, kind, node, full),
            (Kind::Table(_), _) => self.problem(&node.place, full, no_table(full, &node.place)),
            (Kind::Tables { .. } | Kind::Values { .. }, _) => {
                self.problem(&node.place, full, no_table(&format!("{full}.NAME"), &node.place));
            }
            (Kind::List { entry, most, gather }, _) => {
                self.list(node, entry.check, *most, *gather, full);
            }
            (Kind::Secrets { entry, most, .. }, _) => {
                self.list(node, entry.check, *most, |items| items, full);
            }
            (_, Value::Scalar(text)) => {
                if let Err(fault) = kind.check(text) {
                    self.problem(&node.place, full, fault);
                }
            }
            (Kind::Choice { words, .. }, _) => {
                let fault =
                    Fault::new("it is a single value", format!("set {}", words.join(" or ")));
                self.problem(&node.place, full, fault);
            }
            (_, Value::List(_) | Value::Table(_)) => self.problem(&node.place, full, no_scalar()),
        }
    }

    fn tables(
        &self,
        tables: &Table,
        group: &'static Group,
        most: usize,
        place: &Place,
        full: &str,
    ) {
        if tables.len() > most {
            let fault = Fault::new(
                format!("there are {}, the most is {most}", tables.len()),
                "divide them among several processes, or use patterns",
            );
            self.problem(place, full, fault);
        }
        for (at, (name, node)) in tables.iter().take(most).enumerate() {
            let full = join(full, name);
            if let Err(fault) = names::table_name(name) {
                self.problem(&node.place, &full, fault);
            }
            let alike = |other: &&String| names::plain(other) == names::plain(name);
            if let Some(other) = tables.keys().take(at).find(alike) {
                let what = format!("it differs from {other} by case, -, _ or . alone");
                let remedy = "choose another name: a variable could not tell them apart";
                self.problem(&node.place, &full, Fault::new(what, remedy));
            }
            match &node.value {
                Value::Table(table) => self.table(table, group, &full),
                _ => self.problem(&node.place, &full, no_table(&full, &node.place)),
            }
        }
    }

    fn values(&self, table: &Table, kind: &'static Kind, node: &Node, full: &str) {
        let Kind::Values { most, names, value, .. } = kind else { return };
        if table.len() > *most {
            let fault = Fault::new(
                format!("it has {} entries, the most is {most}", table.len()),
                "keep those that are needed",
            );
            self.problem(&node.place, full, fault);
        }
        let secret = matches!(value, Kind::Secret(_));
        let mut seen: Vec<&str> = Vec::new();
        for (key, node) in table.iter().take(*most) {
            let full = join(full, key);
            let plain = if secret { key.strip_suffix("_file").unwrap_or(key) } else { key };
            if let Err(fault) = (names.check)(plain) {
                self.problem(&node.place, &full, fault);
            }
            if plain != key && table.contains_key(plain) {
                self.problem(&node.place, &full, both(plain, key));
            }
            match seen.iter().find(|known| **known != plain && known.eq_ignore_ascii_case(plain)) {
                Some(known) => {
                    let what = format!("{known} is set too, and case does not count here");
                    self.problem(&node.place, &full, Fault::new(what, "set one of them"));
                }
                None => seen.push(plain),
            }
            match &node.value {
                Value::Scalar(_) if plain != key => {}
                Value::Scalar(_) => self.value(node, value, &full),
                _ => self.problem(&node.place, &full, no_scalar()),
            }
        }
    }

    fn list(
        &self,
        node: &Node,
        check: fn(&str) -> Result<(), Fault>,
        most: usize,
        gather: fn(Vec<String>) -> Vec<String>,
        full: &str,
    ) {
        let items = match items(node) {
            Ok(items) => items,
            Err(fault) => return self.problem(&node.place, full, fault),
        };
        let places: Vec<&Place> = match &node.value {
            Value::List(items) => items.iter().map(|item| &item.place).collect(),
            _ => Vec::new(),
        };
        let count = items.len();
        let mut gathered = gather(items);
        if gathered.len() > most {
            let fault = Fault::new(
                format!("it has {} entries, the most is {most}", gathered.len()),
                "keep those that are needed",
            );
            self.problem(&node.place, full, fault);
        }
        let each_has_its_own = places.len() == count && gathered.len() == count;
        gathered.truncate(most);
        for (at, item) in gathered.iter().enumerate() {
            if let Err(Fault { what, remedy }) = check(item) {
                let place = if each_has_its_own { places[at] } else { &node.place };
                let fault = Fault::new(format!("entry {}: {what}", at + 1), remedy);
                self.problem(place, full, fault);
            }
        }
    }
}

/// A list, or text with commas.
pub(super) fn items(node: &Node) -> Result<Vec<String>, Fault> {
    match &node.value {
        Value::Scalar(text) => Ok(text.split(',').map(|item| item.trim().to_owned()).collect()),
        Value::List(items) => items
            .iter()
            .map(|item| match &item.value {
                Value::Scalar(text) => Ok(text.clone()),
                _ => Err(Fault::new("it is a list of values", "write [\"a\", \"b\"]")),
            })
            .collect(),
        Value::Table(_) => Err(no_list()),
    }
}

pub(super) fn no_list() -> Fault {
    Fault::new("it is a list, not a table", "write [\"a\", \"b\"]")
}

pub(super) fn no_scalar() -> Fault {
    Fault::new("it is a single value", "write one value")
}

pub(super) fn no_table(full: &str, place: &Place) -> Fault {
    Fault::new(NO_TABLE, place.write_table(full))
}

/// A secret and its twin.
pub(super) fn both(key: &str, twin: &str) -> Fault {
    Fault::new(format!("{key} is set too"), format!("set {key} or {twin}, not both"))
}

fn unknown(group: &'static Group, path: &str, name: &str, place: &Place) -> Fault {
    let nearest = group
        .names()
        .filter(|known| known.len().abs_diff(name.len()) <= 1 + known.len() / 4)
        .map(|known| (strsim::damerau_levenshtein(&name.to_ascii_lowercase(), &known), known))
        .min()
        .filter(|(distance, known)| *distance <= 1 + known.len() / 4);
    let belongs = (!path.is_empty()).then(|| belongs_to(name)).flatten();
    let remedy = match (nearest, elsewhere(group, path, name), belongs) {
        (Some((0 | 1, known)), _, _) => did_you_mean(&join(path, &known)),
        (_, Some(other), _) => did_you_mean(&other),
        // The very name, elsewhere, rather than one that is a little like it.
        (_, None, Some(other)) => match (other.contains('.'), place.is_toml()) {
            (true, _) => format!("it belongs to {other}"),
            (false, true) => {
                "it belongs to the top: such keys stand before the first [table]".to_owned()
            }
            (false, false) => "it belongs to the top".to_owned(),
        },
        (Some((_, known)), None, None) => did_you_mean(&join(path, &known)),
        (None, None, None) => {
            let known: Vec<_> = group.keys.iter().map(|key| key.name).collect();
            format!("remove it; the keys here are {}", known.join(", "))
        }
    };
    Fault::new("there is no such key", remedy)
}

/// The key of the same name at the top or in any other table.
fn belongs_to(name: &str) -> Option<String> {
    fn within(group: &'static Group, path: &str, name: &str) -> Option<String> {
        if group.find(name).is_some() {
            return Some(join(path, name));
        }
        group.keys.iter().find_map(|key| match key.kind {
            Kind::Table(below) | Kind::SwitchOrTable(below) => {
                within(below, &join(path, key.name), name)
            }
            Kind::Tables { group: below, .. } => {
                within(below, &format!("{}.NAME", join(path, key.name)), name)
            }
            _ => None,
        })
    }
    within(&keys::ROOT, "", name)
}

/// The key of the same name one table further down.
fn elsewhere(group: &'static Group, path: &str, name: &str) -> Option<String> {
    group.keys.iter().find_map(|key| match key.kind {
        Kind::Table(below) => below.find(name).map(|_| join(&join(path, key.name), name)),
        _ => None,
    })
}
