//! Reads TOML: every leaf as text, every node with its line.

use std::sync::Arc;

use ::toml::de::{DeTable, DeValue};

use super::problem::{Fault, Place, Problems, quote};
use super::tree::{Node, Table, Value};

/// Reads a TOML document. What can be read is returned even where there are problems.
pub(super) fn read(path: &str, text: &str, problems: &Problems) -> Table {
    let file = File::new(path, text);
    let (document, errors) = DeTable::parse_recoverable(text);
    for error in errors {
        // The error's own Display shows the line, which may hold a secret.
        let span = error.span().unwrap_or_default();
        let offset = span.start;
        let mut message = error.message().trim_end().to_owned();
        if message == "duplicate key" {
            message.push_str(
                &text.get(span).map(|key| format!(", {}", quote(key))).unwrap_or_default(),
            );
        }
        problems.add_broken(
            file.place(offset),
            Fault::new(
                format!("not TOML: {message}"),
                "correct the file; see docs/configuration.md for its form",
            ),
        );
    }
    file.table(document.into_inner())
}

struct File {
    path: Arc<str>,
    /// Where each line begins.
    lines: Vec<usize>,
}

impl File {
    fn new(path: &str, text: &str) -> Self {
        let breaks = text.bytes().enumerate().filter(|(_, byte)| *byte == b'\n');
        let lines = std::iter::once(0).chain(breaks.map(|(at, _)| at + 1)).collect();
        Self { path: path.into(), lines }
    }

    fn place(&self, offset: usize) -> Place {
        let line = self.lines.partition_point(|begin| *begin <= offset);
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
    use super::super::tree::get;
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
        let table = read(
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
        read("inboxd.toml", "password = hunter2\nb = 1\n[c\nd = 1\n", &problems);
        let error = problems.into_result::<()>(None).unwrap_err();
        assert!(error.0.len() >= 2, "{error}");
        assert!(error.0.iter().any(|problem| problem.place.to_string() == "inboxd.toml:1"));
        assert!(error.0.iter().any(|problem| problem.place.to_string() == "inboxd.toml:3"));
        assert!(!error.to_string().contains("hunter2"), "{error}");
    }

    #[test]
    fn two_subscriptions_of_one_name_are_refused() {
        let problems = Problems::default();
        read("inboxd.toml", "[subscription.a]\nx = 1\n[subscription.a]\ny = 1\n", &problems);
        let error = problems.into_result::<()>(None).unwrap_err();
        assert!(error.to_string().contains("duplicate key"), "{error}");
    }

    #[test]
    fn nesting_without_end_is_an_error_and_no_stack_overflow() {
        for text in
            ["a = ".to_owned() + &"[".repeat(100_000), "a = ".to_owned() + &"{a=".repeat(100_000)]
        {
            let problems = Problems::default();
            read("inboxd.toml", &text, &problems);
            assert!(!problems.is_empty());
        }
    }
}
