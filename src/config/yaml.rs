//! Reads YAML with the meaning that the same text would have in TOML: tables, lists and text, every
//! node with its line.
//!
//! Every scalar stays the text as it is written (`no`, `0123`, `1_000` and dates are no other
//! type's), since keys want text. What could mean more than is seen is refused, in words: anchors
//! and aliases, merge keys, tags, null, keys that are no text, duplicate keys, further documents.
//! Nesting is bounded.

use std::collections::BTreeMap;
use std::sync::Arc;

use saphyr_parser::{Event, Parser, ScalarStyle, Span};

use super::problem::{Fault, NULL, Place, Problems, join, quote};
use super::tree::{Node, Table, Value};

/// Tables within tables; the deepest key has six.
const DEPTH_MAX: usize = 32;

/// Reads a YAML document. What can be read is returned even where there are problems.
pub(super) fn read(path: &str, text: &str, problems: &Problems) -> Table {
    let mut reader =
        Reader { path: path.into(), problems, open: Vec::new(), root: None, documents: 0 };
    for event in Parser::new_from_str(text) {
        match event {
            Ok((event, span)) => {
                if reader.event(event, span).is_err() {
                    break;
                }
            }
            Err(error) => {
                // Its own Display would do as well; it has the line a second time.
                let place = reader.place(error.marker().line());
                let what = format!("not YAML: {}", error.info());
                let fault = Fault::new(what, "correct the file; indent with spaces");
                reader.problems.add_broken(place, fault);
                break;
            }
        }
    }
    reader.end()
}

/// Nothing further can be read.
struct Stop;

/// A table or a list whose end has not come.
enum Open {
    Table { table: Table, place: Place, key: Slot, lines: BTreeMap<String, usize> },
    List { items: Vec<Node>, place: Place },
}

/// What comes next in a table.
enum Slot {
    Key,
    /// The value of a key that stands in this line.
    Value(String, Place),
    /// A value that nothing is done with: its key is refused.
    Refused,
}

struct Reader<'a> {
    path: Arc<str>,
    problems: &'a Problems,
    open: Vec<Open>,
    root: Option<Node>,
    documents: usize,
}

impl Reader<'_> {
    fn place(&self, line: usize) -> Place {
        Place::File { path: Arc::clone(&self.path), line }
    }

    /// A problem of the key whose value is being read.
    fn problem(&self, place: Place, fault: Fault) {
        let key = self.open.iter().fold(String::new(), |path, open| match open {
            Open::Table { key: Slot::Value(key, _), .. } => join(&path, key),
            _ => path,
        });
        self.problems.add(place, key, fault);
    }

    fn event(&mut self, event: Event<'_>, span: Span) -> Result<(), Stop> {
        let place = self.place(span.start.line());
        match event {
            Event::DocumentStart(_) => self.document(place)?,
            Event::Alias(_) => {
                let fault = Fault::new("it is an alias (*)", "write the value out");
                self.problem(place, fault);
                self.skip();
            }
            Event::Scalar(text, style, anchor, tag) => {
                self.refuse_extras(&place, anchor, tag.is_some());
                self.scalar(&text, style, place);
            }
            Event::SequenceStart(anchor, tag) => {
                self.refuse_extras(&place, anchor, tag.is_some());
                self.open(Open::List { items: Vec::new(), place: place.clone() }, place)?;
            }
            Event::MappingStart(anchor, tag) => {
                self.refuse_extras(&place, anchor, tag.is_some());
                let lines = BTreeMap::new();
                let table = Open::Table {
                    table: Table::new(),
                    place: place.clone(),
                    key: Slot::Key,
                    lines,
                };
                self.open(table, place)?;
            }
            Event::SequenceEnd | Event::MappingEnd => self.close(),
            Event::Nothing | Event::StreamStart | Event::StreamEnd | Event::DocumentEnd => {}
        }
        Ok(())
    }

    fn document(&mut self, place: Place) -> Result<(), Stop> {
        self.documents += 1;
        if self.documents > 1 {
            let fault = Fault::new(
                "a second document begins here",
                "write one document: remove the --- and merge what follows",
            );
            self.problem(place, fault);
            return Err(Stop);
        }
        Ok(())
    }

    fn refuse_extras(&self, place: &Place, anchor: usize, tagged: bool) {
        if anchor > 0 {
            let fault = Fault::new("it has an anchor (&)", "leave it out, and write values out");
            self.problem(place.clone(), fault);
        }
        if tagged {
            let fault = Fault::new("it has a tag (!)", "leave it out; every value is text");
            self.problem(place.clone(), fault);
        }
    }

    fn open(&mut self, open: Open, place: Place) -> Result<(), Stop> {
        if self.open.len() >= DEPTH_MAX {
            let fault = Fault::new(
                format!("it is nested deeper than {DEPTH_MAX}"),
                "no key is so deep; correct the indentation",
            );
            self.problem(place, fault);
            return Err(Stop);
        }
        if let Some(Open::Table { key: Slot::Key, .. }) = self.open.last() {
            let fault = Fault::new("a key is no text here", "write one word before the colon");
            self.problem(place, fault);
            return Err(Stop);
        }
        self.open.push(open);
        Ok(())
    }

    fn scalar(&mut self, text: &str, style: ScalarStyle, place: Place) {
        let plain = style == ScalarStyle::Plain;
        let null = plain && matches!(text, "" | "~" | "null" | "Null" | "NULL");
        if let Some(Open::Table { key: Slot::Key, .. }) = self.open.last() {
            return self.key(text, null, plain, place);
        }
        if null && !self.open.is_empty() {
            let fault = Fault::new(NULL, "leave the key out, or quote the text");
            self.problem(place, fault);
            return self.skip();
        }
        if null {
            // A document of comments.
            return;
        }
        self.attach(Node::scalar(text, place));
    }

    fn key(&mut self, text: &str, null: bool, plain: bool, place: Place) {
        let line = match &place {
            Place::File { line, .. } => *line,
            _ => 0,
        };
        let Some(Open::Table { key, lines, .. }) = self.open.last_mut() else { return };
        let fault = if null {
            Some(Fault::new("a key is null", "write one word before the colon"))
        } else if plain && text == "<<" {
            Some(Fault::new("it is a merge key (<<)", "write the keys out"))
        } else {
            lines.get(text).map(|first| {
                Fault::new(
                    format!("{} is there twice, first in line {first}", quote(text)),
                    "remove one of the two",
                )
            })
        };
        match fault {
            None => {
                lines.insert(text.to_owned(), line);
                *key = Slot::Value(text.to_owned(), place);
            }
            Some(fault) => {
                *key = Slot::Refused;
                self.problem(place, fault);
            }
        }
    }

    /// The value that would come next is refused.
    fn skip(&mut self) {
        if let Some(Open::Table { key, .. }) = self.open.last_mut() {
            *key = match key {
                Slot::Key => Slot::Refused,
                Slot::Value(..) | Slot::Refused => Slot::Key,
            };
        }
    }

    fn close(&mut self) {
        match self.open.pop() {
            Some(Open::Table { table, place, .. }) => self.attach(Node::table(table, place)),
            Some(Open::List { items, place }) => {
                self.attach(Node { value: Value::List(items), place });
            }
            None => {}
        }
    }

    fn attach(&mut self, mut node: Node) {
        match self.open.last_mut() {
            None => self.root = Some(node),
            Some(Open::List { items, .. }) => items.push(node),
            Some(Open::Table { table, key, .. }) => match std::mem::replace(key, Slot::Key) {
                Slot::Value(name, place) => {
                    node.place = place;
                    table.insert(name, node);
                }
                Slot::Refused | Slot::Key => {}
            },
        }
    }

    fn end(mut self) -> Table {
        while !self.open.is_empty() {
            self.close();
        }
        match self.root.take() {
            None => Table::new(),
            Some(Node { value: Value::Table(table), .. }) => table,
            Some(Node { place, .. }) => {
                let fault = Fault::new("the document is no table of keys", "write key: value");
                self.problem(place, fault);
                Table::new()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tree::get;
    use super::*;

    fn good(text: &str) -> Table {
        let problems = Problems::default();
        let table = read("inboxd.yaml", text, &problems);
        problems.into_result(Some(table)).unwrap_or_else(|error| panic!("{error}"))
    }

    /// The problems, one text each.
    fn bad(text: &str) -> Vec<String> {
        let problems = Problems::default();
        read("inboxd.yaml", text, &problems);
        let error = problems.into_result::<()>(None).unwrap_err();
        assert!(!error.0.is_empty(), "taken: {text}");
        error.0.iter().map(ToString::to_string).collect()
    }

    fn text<'a>(table: &'a Table, path: &[&str]) -> &'a str {
        match get(table, path) {
            Some(Node { value: Value::Scalar(text), .. }) => text,
            _ => panic!("no scalar at {path:?}"),
        }
    }

    #[test]
    fn every_leaf_is_text_as_it_is_written() {
        let table = good(
            "# first\na:\n  no: on\n  b: 0123\n  c: 1_000\n  d: 2026-01-01\n  e: \"~\"\n  404: 1e3\n  f: [x, 'y z', {g: h}]\n  i: |\n    two\n    lines\n",
        );
        for (key, expected) in [
            ("no", "on"),
            ("b", "0123"),
            ("c", "1_000"),
            ("d", "2026-01-01"),
            ("e", "~"),
            ("404", "1e3"),
            ("i", "two\nlines\n"),
        ] {
            assert_eq!(text(&table, &["a", key]), expected);
        }
        assert_eq!(get(&table, &["a", "c"]).unwrap().place.to_string(), "inboxd.yaml:5");
        let Value::List(items) = &get(&table, &["a", "f"]).unwrap().value else { panic!("list") };
        assert_eq!(items.len(), 3);
    }

    #[test]
    fn an_empty_document_is_an_empty_table() {
        for text in ["", "\n", "# nothing\n", "---\n", "---\n# nothing\n...\n", "{}"] {
            assert!(good(text).is_empty(), "{text:?}");
        }
        assert_eq!(text(&good("a: b\r\nc: d\r\n"), &["c"]), "d");
    }

    #[test]
    fn what_means_more_than_is_seen_is_refused_with_its_line() {
        for (text, line, what) in [
            ("a: &x 1\nb: 2\n", 1, "anchor"),
            ("a: &x {c: 1}\nb: *x\n", 2, "alias"),
            ("a: {}\nb:\n  <<: {c: 1}\n", 3, "merge key"),
            ("a: !!int 1\n", 1, "tag"),
            ("a: !secret x\n", 1, "tag"),
            ("a:\nb: 1\n", 1, "null"),
            ("a: ~\n", 1, "null"),
            ("a:\n  - ~\n", 2, "null"),
            ("~: 1\n", 1, "a key is null"),
            ("? [a, b]\n: 1\n", 1, "a key is no text"),
            ("? {a: b}\n: 1\n", 1, "a key is no text"),
            ("a: 1\nb: 2\na: 3\n", 3, "first in line 1"),
            ("a: {b: 1,\n b: 2}\n", 2, "first in line 1"),
            ("a: 1\n---\nb: 2\n", 2, "second document"),
            ("- a\n- b\n", 1, "no table of keys"),
            ("just words\n", 1, "no table of keys"),
            ("a:\n\tb: 1\n", 2, "not YAML"),
            ("a: [1, 2\n", 2, "not YAML"),
            ("a: b: c\n", 1, "not YAML"),
            ("a: \"\\q\"\n", 1, "not YAML"),
        ] {
            let problems = bad(text);
            let place = format!("inboxd.yaml:{line}");
            assert!(
                problems.iter().any(|problem| problem.contains(&place) && problem.contains(what)),
                "{text:?}: {problems:?}"
            );
        }
    }

    #[test]
    fn one_refusal_hides_no_other_and_shows_no_value() {
        let problems =
            bad("a: &x geheim\nb: *x\nc: !!str geheim\nd:\ne: 1\ne: geheim\nf: [geheim\n");
        assert_eq!(problems.len(), 6, "{problems:?}");
        assert!(!problems.iter().any(|problem| problem.contains("geheim")), "{problems:?}");
    }

    #[test]
    fn nesting_without_end_is_an_error_and_no_stack_overflow() {
        let deep = (0..200).map(|depth| " ".repeat(depth) + "a:\n").collect::<String>();
        for text in [
            "[".repeat(100_000),
            "{a: ".repeat(100_000),
            "- ".repeat(100_000),
            "? ".repeat(100_000),
            deep,
        ] {
            assert!(bad(&text)[0].contains("inboxd.yaml:"));
        }
    }

    #[test]
    fn a_large_file_is_read_in_time() {
        let text: String = (0..200_000).map(|at| format!("key{at}: value\n")).collect();
        let begun = std::time::Instant::now();
        assert_eq!(good(&text).len(), 200_000);
        assert!(begun.elapsed() < std::time::Duration::from_secs(20));
    }
}
