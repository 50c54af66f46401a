//! The layers of a configuration as one tree: file, environment, flags.
//!
//! Every leaf is text, whatever wrote it, and is parsed by the type that its key wants: so
//! that a value means the same in the file and in the environment. Each node
//! remembers where it was set. A tree holds secrets and is therefore not printable.

use std::collections::BTreeMap;

use super::problem::Place;

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
            // A switch takes the place of the table that it turns on. Other text is a mistake
            // which the check of its layer has told: it does not hide what is below.
            (
                Some(Node { value: Value::Table(_), .. }),
                Node { value: Value::Scalar(text), .. },
            ) if text.trim().parse::<bool>().is_err() => {}
            (_, node) => {
                base.insert(key, node);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::problem::Problems;
    use super::super::toml::read as from_toml;
    use super::*;

    fn text<'a>(table: &'a Table, path: &[&str]) -> &'a str {
        match get(table, path) {
            Some(Node { value: Value::Scalar(text), .. }) => text,
            _ => panic!("no scalar at {path:?}"),
        }
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
