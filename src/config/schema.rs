//! The JSON Schema of a configuration file, from the declarations.
//!
//! It takes whatever the program takes, and names most of what it refuses: what contradicts
//! another key or the world outside is `inboxd check`'s to tell. Nothing is required, since the
//! environment and flags may have the rest.

use serde_json::{Map, Value, json};

use super::declare::{Form, Group, Key, Kind, twin};
use super::{keys, names, reference};

const DURATION_PATTERN: &str = r"^\s*\d+\s*[A-Za-z]+(\s*\d+\s*[A-Za-z]+)*\s*$";
const SIZE_PATTERN: &str = r"^\s*\d+\s*([bB]|[kmgKMG]([iI]?[bB]?)?)?\s*$";

/// The schema, in the dialect 2020-12.
pub fn schema() -> Value {
    let mut schema = group(&keys::ROOT);
    schema["$schema"] = json!("https://json-schema.org/draft/2020-12/schema");
    schema["title"] = json!("inboxd");
    schema["description"] = json!(
        "A configuration file of inboxd, in TOML or YAML. What is required may also come from the \
         environment or from flags."
    );
    schema
}

fn group(group: &Group) -> Value {
    let mut properties = Map::new();
    let mut twins = Vec::new();
    for key in group.keys {
        properties.insert(key.name.to_owned(), described(value(&key.kind), key));
        if let Some(twin) = key.twin() {
            twins.push(json!({ "not": { "required": [key.name, twin] } }));
            let form = match key.kind {
                Kind::Secrets { most, .. } => list(json!({ "type": "string" }), most),
                _ => json!({ "type": "string", "minLength": 1 }),
            };
            let mut form = form;
            form["description"] = json!(format!("Instead of {}: read from there.", key.name));
            properties.insert(twin, form);
        }
    }
    let mut schema = json!({
        "type": "object",
        "properties": properties,
        "additionalProperties": false,
    });
    if !twins.is_empty() {
        schema["allOf"] = json!(twins);
    }
    schema
}

fn described(mut schema: Value, key: &Key) -> Value {
    let mut text = capital(key.doc);
    if !key.unset.is_empty() {
        text.push_str(&format!(" Not set: {}.", key.unset));
    }
    let limits = reference::limits(key);
    if !limits.is_empty() {
        text.push_str(&format!(" Limits: {limits}."));
    }
    schema["description"] = json!(text.replace('`', ""));
    schema
}

/// The first letter is one, and the end a full stop.
fn capital(doc: &str) -> String {
    let mut characters = doc.chars();
    let first = characters.next().into_iter().flat_map(char::to_uppercase);
    first.chain(characters).chain(['.']).collect()
}

fn value(kind: &Kind) -> Value {
    let mut schema = match kind {
        Kind::Duration { .. } => json!({ "type": "string", "pattern": DURATION_PATTERN }),
        Kind::Size { least, most, .. } => json!({
            "type": ["integer", "string"], "minimum": least, "maximum": most, "pattern": SIZE_PATTERN,
        }),
        Kind::Count { least, most, .. } => json!({
            "type": ["integer", "string"], "minimum": least, "maximum": most,
            "pattern": r"^\s*\+?\d+\s*$",
        }),
        Kind::Number { least, most, .. } => json!({
            "type": ["number", "string"], "minimum": least, "maximum": most,
            "pattern": r"^\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*$",
        }),
        Kind::Switch { .. } => words(&["true", "false"]),
        Kind::Choice { words: known, .. } => words(known),
        Kind::Text(form) => with_example(text(form), form),
        Kind::PemFile => json!({ "type": "string", "minLength": 1 }),
        Kind::List { entry, most, .. } => list(with_example(text(entry), entry), *most),
        Kind::Secret(form) => {
            let mut schema = text(form);
            schema["writeOnly"] = json!(true);
            schema
        }
        Kind::Secrets { entry, most, .. } => {
            let mut schema = list(text(entry), *most);
            schema["writeOnly"] = json!(true);
            schema
        }
        Kind::Table(below) => group(below),
        Kind::SwitchOrTable(below) => {
            json!({ "anyOf": [words(&["true", "false"]), group(below)] })
        }
        Kind::Tables { group: below, most } => json!({
            "type": "object",
            "patternProperties": { (names::TABLE_NAME_PATTERN): group(below) },
            "additionalProperties": false,
            "maxProperties": most,
        }),
        Kind::Values { names, value, most, .. } => values(names, value, *most),
    };
    if let Some(default) = default(kind) {
        schema["default"] = default;
    }
    schema
}

fn default(kind: &Kind) -> Option<Value> {
    match kind {
        Kind::Count { default, .. } => default.map(Value::from),
        Kind::Number { default, .. } => default.map(|number| json!(f64::from(number))),
        Kind::Switch { default } => default.map(Value::from),
        _ => kind.default_text().map(Value::from),
    }
}

/// Words, and the same as JSON has them.
fn words(words: &[&str]) -> Value {
    let booleans = words.iter().filter_map(|word| word.parse::<bool>().ok()).map(Value::from);
    let words = words.iter().copied().map(Value::from);
    json!({ "enum": words.chain(booleans).collect::<Vec<_>>() })
}

fn text(form: &Form) -> Value {
    match form.pattern {
        "" => json!({ "type": "string" }),
        pattern => json!({ "type": "string", "pattern": pattern }),
    }
}

fn with_example(mut schema: Value, form: &Form) -> Value {
    schema["examples"] = json!([form.sample]);
    schema
}

/// A list, or text with commas.
fn list(entry: Value, most: usize) -> Value {
    json!({ "type": ["array", "string"], "items": entry, "maxItems": most })
}

fn values(names: &Form, kind: &Kind, most: usize) -> Value {
    let own = value(kind);
    let patterns = match kind {
        Kind::Secret(_) => json!({
            (format!("{}$", twin("."))): { "type": "string", "minLength": 1 },
            (format!("^(?!.*{}$){}", twin(""), names.pattern.trim_start_matches('^'))): own,
        }),
        _ => json!({ (names.pattern): own }),
    };
    json!({
        "type": "object",
        "patternProperties": patterns,
        "additionalProperties": false,
        "maxProperties": most,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn valid(file: &str) -> Result<(), String> {
        let validator = jsonschema::draft202012::new(&schema()).unwrap();
        let table: ::toml::Table = file.parse().unwrap();
        let json = serde_json::to_value(table).unwrap();
        let errors: Vec<_> = validator.iter_errors(&json).map(|error| error.to_string()).collect();
        if errors.is_empty() { Ok(()) } else { Err(errors.join("; ")) }
    }

    #[test]
    fn the_schema_is_one() {
        assert!(jsonschema::draft202012::meta::validate(&schema()).is_ok());
    }

    #[test]
    fn every_example_of_the_documentation_fits_the_schema() {
        let documentation = include_str!("../../docs/configuration.md");
        let examples: Vec<_> = documentation
            .split("```toml\n")
            .skip(1)
            .filter_map(|rest| rest.split_once("```").map(|(example, _)| example))
            .collect();
        assert!(!examples.is_empty());
        for example in examples {
            valid(example).unwrap_or_else(|error| panic!("{error}\n{example}"));
        }
        valid(
            "shutdown_grace = \"5s\"\n[broker.a]\nurl = \"amqp://h/\"\ntls = { ca_file = \"/a\" }\n\
             [broker.b]\ntls = true\nproperties = { \"a.b\" = \"c\", \"d_file\" = \"/e\" }\n\
             [subscription.s]\nconcurrency = 4\nin_flight_bytes_max = 65536\ncallback_http2 = \"true\"\n\
             source = { queue = \"q\", declare = true }\nmessage_id = \"property, body-hash\"\n\
             [subscription.s.status_map]\n404 = \"retry\"\n5xx = \"retry\"\n\
             [subscription.s.route.a]\ntype = \"x\"\npath = \"/x\"\n",
        )
        .unwrap();
    }

    #[test]
    fn mistakes_do_not_fit_the_schema() {
        for file in [
            "colour = 1",
            "shutdown_grace = 5",
            "shutdown_grace = \"soon\"",
            "[admin]\ntoken = \"0123456789abcdef\"\ntoken_file = \"/a\"",
            "[log]\nformat = \"xml\"",
            "[subscription.s]\ncallback = \"ftp://h/\"",
            "[subscription.s]\nconcurrency = 0",
            "[subscription.s]\nconcurency = 1",
            "[subscription.\"a b\"]",
            "[[subscription]]",
            "[subscription.s.status_map]\n404 = \"ignore\"",
            "[subscription.s.status_map]\n4 = \"retry\"",
            "[subscription.s.headers.set]\n\"a b\" = \"c\"",
            "[subscription.s.signing]\nsecrets = [\"x\"]",
            "[subscription.s.signing]\nsecrets = []\nsecret_files = []",
        ] {
            assert!(valid(file).is_err(), "{file}");
        }
    }

    /// A value that the program takes must not be underlined in an editor.
    #[test]
    fn the_schema_refuses_nothing_that_is_taken() {
        let texts = [
            "",
            " ",
            "0",
            "1",
            "16",
            "+5",
            " 7 ",
            "1.5",
            "1e1",
            ".5",
            "2.",
            "5s",
            " 1h 30m ",
            "10 s",
            "1KiB",
            "64 mb",
            "9 g",
            "7b",
            "true",
            "false",
            "off",
            "127.0.0.1:1",
            "[::1]:80",
            "body",
            "json:/a",
            "json:/",
            "header:x",
            "header:a:b",
            "hash:/a,/b",
            "unix:/a.sock:/x",
            " http://h/ ",
            "https://h",
            "sqlite:a",
            "sqlite:///a",
            "mariadb://h/d",
            "h",
            "h:1,[::1]:2",
            "amqp://h/",
            "kafka://h",
            "orders",
            "^a.*",
            "a.b-c_d",
            "4xx",
            "5XX",
            "200",
            "X-A",
            "a=b",
            " a = b* ",
            "/",
            "/a?b=c",
            " /x ",
            "info,inboxd=debug",
            "dead_letter",
            "none",
            "_a1",
        ];
        fn leaves(group: &'static Group, found: &mut Vec<&'static Kind>) {
            for key in group.keys {
                match &key.kind {
                    Kind::Table(below) | Kind::Tables { group: below, .. } => leaves(below, found),
                    Kind::SwitchOrTable(below) => leaves(below, found),
                    Kind::Values { value, .. } => found.push(value),
                    kind => found.push(kind),
                }
            }
        }
        let mut kinds = Vec::new();
        leaves(&keys::ROOT, &mut kinds);
        assert!(kinds.len() > 80);
        let mut taken = 0;
        for kind in kinds {
            let validator = jsonschema::draft202012::new(&value(kind)).unwrap();
            let sample = match kind {
                Kind::Text(form) | Kind::Secret(form) => form.sample,
                _ => "",
            };
            for text in texts.iter().copied().chain([sample]) {
                let is_list = matches!(kind, Kind::List { .. } | Kind::Secrets { .. });
                if kind.check(text).is_ok() && !is_list && !matches!(kind, Kind::PemFile) {
                    taken += 1;
                    let value = Value::from(text);
                    assert!(validator.is_valid(&value), "{text:?} is refused by {validator:?}");
                }
            }
        }
        assert!(taken > 500, "{taken}");
    }
}
