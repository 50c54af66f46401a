//! The layers of a configuration as one tree: file, environment, flags.
//!
//! Every leaf is text, whatever wrote it, and is parsed by the type that its key wants: so
//! that a value means the same in the file and in the environment. Each node
//! remembers where it was set. A tree holds secrets and is therefore not printable.

use std::collections::BTreeMap;
use std::sync::Arc;

use toml::de::{DeTable, DeValue};

use super::problem::{Fault, Place, Problems};

/// A value and where it was set.
#[derive(Clone)]
pub(super) struct Node {
    pub(super) value: Value,
    pub(super) place: Place,
}

/// The shape of a value.
#[derive(Clone)]
pub(super) enum Value {
    Scalar(String),
    List(Vec<Node>),
    Table(Table),
}

/// Nodes by key.
pub(super) type Table = BTreeMap<String, Node>;

impl Node {
    pub(super) fn scalar(text: impl Into<String>, place: Place) -> Self {
        Self { value: Value::Scalar(text.into()), place }
    }

    pub(super) fn list(items: impl IntoIterator<Item = String>, place: Place) -> Self {
        let items = items.into_iter().map(|item| Self::scalar(item, place.clone())).collect();
        Self { value: Value::List(items), place }
    }

    pub(super) fn table(table: Table, place: Place) -> Self {
        Self { value: Value::Table(table), place }
    }
}

/// Sets the value at a path, making the tables on the way.
pub(super) fn set(table: &mut Table, path: &[&str], node: Node) {
    match path {
        [] => {}
        [key] => {
            table.insert((*key).to_owned(), node);
        }
        [key, rest @ ..] => {
            let place = node.place.clone();
            let below = table
                .entry((*key).to_owned())
                .or_insert_with(|| Node::table(Table::new(), place.clone()));
            if !matches!(below.value, Value::Table(_)) {
                *below = Node::table(Table::new(), place);
            }
            if let Value::Table(below) = &mut below.value {
                set(below, rest, node);
            }
        }
    }
}

/// The node at a path.
pub(super) fn get<'a>(table: &'a Table, path: &[&str]) -> Option<&'a Node> {
    let (key, rest) = path.split_first()?;
    let node = table.get(*key)?;
    match (&node.value, rest) {
        (_, []) => Some(node),
        (Value::Table(below), rest) => get(below, rest),
        _ => None,
    }
}

/// Removes the node at a path.
pub(super) fn remove(table: &mut Table, path: &[&str]) {
    match path {
        [] => {}
        [key] => {
            table.remove(*key);
        }
        [key, rest @ ..] => {
            if let Some(Node { value: Value::Table(below), .. }) = table.get_mut(*key) {
                remove(below, rest);
            }
        }
    }
}

/// Lays `over` onto `base`: tables are joined, anything else is replaced. A secret and its
/// `_file` twin are one key: what is set above replaces the one below in whichever form.
pub(super) fn overlay(base: &mut Table, over: Table) {
    for (key, node) in &over {
        if !matches!(node.value, Value::Table(_)) {
            match key.strip_suffix("_file") {
                Some(plain) => base.remove(plain),
                None => base.remove(format!("{key}_file").as_str()),
            };
        }
    }
    for (key, node) in over {
        match (base.get_mut(&key), node) {
            (
                Some(Node { value: Value::Table(below), .. }),
                Node { value: Value::Table(over), .. },
            ) => overlay(below, over),
            (_, node) => {
                base.insert(key, node);
            }
        }
    }
}

/// Reads a TOML document. What can be read is returned even where there are problems.
pub(super) fn from_toml(path: &str, text: &str, problems: &Problems) -> Table {
    let file = File { path: path.into(), text };
    let (document, errors) = DeTable::parse_recoverable(text);
    for error in errors {
        // The error's own Display shows the line, which may hold a secret.
        let offset = error.span().map_or(0, |span| span.start);
        problems.add(
            file.place(offset),
            "",
            Fault::new(
                format!("not TOML: {}", error.message().trim_end()),
                "correct the file; see docs/configuration.md for its form",
            ),
        );
    }
    file.table(document.into_inner())
}

struct File<'a> {
    path: Arc<str>,
    text: &'a str,
}

impl File<'_> {
    fn place(&self, offset: usize) -> Place {
        let before = self.text.as_bytes().get(..offset).unwrap_or(self.text.as_bytes());
        let line = before.iter().filter(|byte| **byte == b'\n').count() + 1;
        Place::File { path: Arc::clone(&self.path), line }
    }

    fn table(&self, table: DeTable<'_>) -> Table {
        table
            .into_iter()
            .map(|(key, value)| {
                let place = self.place(key.span().start);
                (key.into_inner().into_owned(), self.node(value.into_inner(), place))
            })
            .collect()
    }

    fn node(&self, value: DeValue<'_>, place: Place) -> Node {
        match value {
            DeValue::Table(table) => Node::table(self.table(table), place),
            DeValue::Array(array) => {
                let items = array
                    .into_iter()
                    .map(|item| {
                        let place = self.place(item.span().start);
                        self.node(item.into_inner(), place)
                    })
                    .collect();
                Node { value: Value::List(items), place }
            }
            DeValue::String(text) => Node::scalar(text.into_owned(), place),
            DeValue::Boolean(value) => Node::scalar(value.to_string(), place),
            DeValue::Datetime(value) => Node::scalar(value.to_string(), place),
            DeValue::Float(value) => Node::scalar(value.as_str().replace('_', ""), place),
            DeValue::Integer(value) => {
                let digits = value.as_str();
                // Digits of the right radix, or the parser had refused them; out of range they
                // stay as they are, and the key's own limit names them.
                let text = i128::from_str_radix(digits, value.radix())
                    .map_or_else(|_| digits.to_owned(), |number| number.to_string());
                Node::scalar(text, place)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text<'a>(table: &'a Table, path: &[&str]) -> &'a str {
        match get(table, path) {
            Some(Node { value: Value::Scalar(text), .. }) => text,
            _ => panic!("no scalar at {path:?}"),
        }
    }

    #[test]
    fn every_leaf_of_a_file_is_text_with_its_line() {
        let problems = Problems::default();
        let table = from_toml(
            "inboxd.toml",
            "a = 0x10\n[b.c]\nd = true\ne = 1_000\nf = 2.5\n\"g.h\" = \"i\"\n",
            &problems,
        );
        assert!(problems.is_empty());
        assert_eq!(text(&table, &["a"]), "16");
        assert_eq!(text(&table, &["b", "c", "d"]), "true");
        assert_eq!(text(&table, &["b", "c", "e"]), "1000");
        assert_eq!(text(&table, &["b", "c", "f"]), "2.5");
        assert_eq!(text(&table, &["b", "c", "g.h"]), "i");
        let place = &get(&table, &["b", "c", "e"]).unwrap().place;
        assert_eq!(place.to_string(), "inboxd.toml:4");
    }

    #[test]
    fn two_mistakes_in_a_file_are_both_named_and_show_no_value() {
        let problems = Problems::default();
        from_toml("inboxd.toml", "password = hunter2\nb = 1\n[c\nd = 1\n", &problems);
        let error = problems.into_result::<()>(None).unwrap_err();
        assert!(error.0.len() >= 2, "{error}");
        assert!(error.0.iter().any(|problem| problem.place.to_string() == "inboxd.toml:1"));
        assert!(error.0.iter().any(|problem| problem.place.to_string() == "inboxd.toml:3"));
        assert!(!error.to_string().contains("hunter2"), "{error}");
    }

    #[test]
    fn two_subscriptions_of_one_name_are_refused() {
        let problems = Problems::default();
        from_toml("inboxd.toml", "[subscription.a]\nx = 1\n[subscription.a]\ny = 1\n", &problems);
        let error = problems.into_result::<()>(None).unwrap_err();
        assert!(error.to_string().contains("duplicate key"), "{error}");
    }

    #[test]
    fn an_upper_layer_replaces_leaves_and_joins_tables() {
        let problems = Problems::default();
        let mut base = from_toml("a", "[t]\nx = 1\ny = [1, 2]\n", &problems);
        overlay(&mut base, from_toml("b", "[t]\ny = 3\nz = 4\n", &problems));
        assert_eq!(text(&base, &["t", "x"]), "1");
        assert_eq!(text(&base, &["t", "y"]), "3");
        assert_eq!(text(&base, &["t", "z"]), "4");
    }

    #[test]
    fn setting_makes_the_tables_on_the_way() {
        let mut table = Table::new();
        set(&mut table, &["a", "b"], Node::scalar("1", Place::Unset));
        set(&mut table, &["a", "c"], Node::scalar("2", Place::Unset));
        assert_eq!(text(&table, &["a", "b"]), "1");
        remove(&mut table, &["a", "b"]);
        assert!(get(&table, &["a", "b"]).is_none());
        assert_eq!(text(&table, &["a", "c"]), "2");
    }
}
