//! The environment as a layer: `INBOXD__SUBSCRIPTION__ORDERS__CALLBACK` is the key
//! `subscription.orders.callback`.

use std::ffi::OsString;

use super::problem::{Fault, Place, Problems};
use super::tree::{Node, Table, Value, get, set};

const PREFIX: &str = "INBOXD__";
const SEPARATOR: &str = "__";
/// Tables of headers.
const HEADERS: [&[&str]; 2] = [&["headers", "set"], &["telemetry", "headers"]];

/// Reads the variables that begin with `INBOXD__` (and `RUST_LOG`, as `log.level`).
///
/// Environment variables are written in capitals and cannot hold `-` or `.`: a name that differs
/// from one of `base` by that alone means that one; else it is taken in lower
/// case. Below `properties`, `_` stands for the dots of librdkafka's names, below
/// `headers.set` and `telemetry.headers` for the `-` of a header's.
pub(super) fn layer(
    variables: impl IntoIterator<Item = (OsString, OsString)>,
    base: &Table,
    problems: &Problems,
) -> Table {
    let mut variables: Vec<_> = variables
        .into_iter()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value)))
        .filter(|(name, _)| name.starts_with(PREFIX) || name == "RUST_LOG")
        .collect();
    variables.sort();

    let mut layer = Table::new();
    for (name, value) in variables {
        let place = Place::Environment(name.as_str().into());
        let Ok(value) = value.into_string() else {
            let fault = Fault::new("the value is not UTF-8", "set it to text in UTF-8");
            problems.add(place, "", fault);
            continue;
        };
        let Some(path) = name.strip_prefix(PREFIX) else {
            // Sorts behind every INBOXD__ variable: the one meant for inboxd wins.
            if !value.is_empty() && get(&layer, &["log", "level"]).is_none() {
                set(&mut layer, &["log", "level"], Node::scalar(value, place));
            }
            continue;
        };
        let segments: Vec<&str> = path.split(SEPARATOR).collect();
        if segments.iter().any(|segment| segment.is_empty()) {
            let fault = Fault::new(
                "the name has an empty part",
                "join the parts of a key by two underscores: INBOXD__SUBSCRIPTION__ORDERS__CALLBACK",
            );
            problems.add(place, "", fault);
            continue;
        }
        let path = resolve(&segments, base);
        let path: Vec<&str> = path.iter().map(String::as_str).collect();
        set(&mut layer, &path, Node::scalar(value, place));
    }
    layer
}

fn resolve(segments: &[&str], base: &Table) -> Vec<String> {
    let mut below = Some(base);
    let mut path: Vec<String> = Vec::with_capacity(segments.len());
    for segment in segments {
        let mut same = below
            .into_iter()
            .flatten()
            .map(|(key, _)| key)
            .filter(|key| plain(key) == plain(segment));
        let key = match (same.next(), same.next(), twin(segment, below)) {
            (Some(key), None, _) => key.clone(),
            (None, None, Some(twin)) => twin,
            _ if ends_with(&path, &["properties"]) => joined(segment, "."),
            _ if HEADERS.iter().any(|parents| ends_with(&path, parents)) => joined(segment, "-"),
            _ => segment.to_ascii_lowercase(),
        };
        below = match below.and_then(|table| table.get(&key)) {
            Some(Node { value: Value::Table(table), .. }) => Some(table),
            _ => None,
        };
        path.push(key);
    }
    path
}

fn plain(name: &str) -> String {
    name.to_ascii_lowercase().replace(['-', '.'], "_")
}

/// Where `_` stands for what librdkafka's names, or those of headers, are joined by.
fn joined(name: &str, by: &str) -> String {
    let name = name.to_ascii_lowercase();
    // The twin that names a file keeps its suffix.
    match name.strip_suffix("_file") {
        Some(name) => format!("{}_file", name.replace('_', by)),
        None => name.replace('_', by),
    }
}

/// A secret and its `_file` twin are one key, whose spelling is that of `base`.
fn twin(name: &str, base: Option<&Table>) -> Option<String> {
    let name = plain(name);
    base?.keys().find_map(|key| match (key.strip_suffix("_file"), name.strip_suffix("_file")) {
        (Some(key), None) if plain(key) == name => Some(key.to_owned()),
        (None, Some(name)) if plain(key) == name => Some(format!("{key}_file")),
        _ => None,
    })
}

fn ends_with(path: &[String], parents: &[&str]) -> bool {
    path.len() >= parents.len() && path[path.len() - parents.len()..] == *parents
}

#[cfg(test)]
mod tests {
    use super::super::tree::from_toml;
    use super::*;

    fn layer_of(variables: &[(&str, &str)], base: &str) -> (Table, Problems) {
        let problems = Problems::default();
        let base = from_toml("base", base, &problems);
        let variables = variables.iter().map(|(name, value)| (name.into(), value.into()));
        let layer = layer(variables, &base, &problems);
        (layer, problems)
    }

    fn text(table: &Table, path: &[&str]) -> String {
        match get(table, path) {
            Some(Node { value: Value::Scalar(text), .. }) => text.clone(),
            _ => panic!("no scalar at {path:?}"),
        }
    }

    #[test]
    fn a_variable_names_a_key() {
        let (layer, problems) = layer_of(
            &[
                ("INBOXD__SUBSCRIPTION__ORDERS__CALLBACK", "http://a/"),
                ("INBOXD__SHUTDOWN_GRACE", "5s"),
                ("INBOXD_CALLBACK", "not of this layer"),
                ("PATH", "/bin"),
            ],
            "",
        );
        assert!(problems.is_empty());
        assert_eq!(text(&layer, &["subscription", "orders", "callback"]), "http://a/");
        assert_eq!(text(&layer, &["shutdown_grace"]), "5s");
        assert_eq!(layer.len(), 2);
    }

    #[test]
    fn a_name_of_the_file_is_found_whatever_its_case_and_dashes() {
        let (layer, _) = layer_of(
            &[("INBOXD__SUBSCRIPTION__NEW_ORDERS__LEASE", "5s")],
            "[subscription.New-Orders]\nlease = \"15s\"\n",
        );
        assert_eq!(text(&layer, &["subscription", "New-Orders", "lease"]), "5s");
    }

    #[test]
    fn librdkafka_s_properties_have_dots() {
        let (layer, _) = layer_of(
            &[
                ("INBOXD__BROKER__MAIN__PROPERTIES__FETCH_WAIT_MAX_MS", "50"),
                ("INBOXD__BROKER__MAIN__PROPERTIES__SASL_PASSWORD_FILE", "/run/secret"),
            ],
            "",
        );
        assert_eq!(text(&layer, &["broker", "main", "properties", "fetch.wait.max.ms"]), "50");
        assert_eq!(
            text(&layer, &["broker", "main", "properties", "sasl.password_file"]),
            "/run/secret"
        );
    }

    #[test]
    fn rust_log_is_the_level_unless_inboxd_s_own_variable_says_otherwise() {
        let (layer, _) = layer_of(&[("RUST_LOG", "debug")], "");
        assert_eq!(text(&layer, &["log", "level"]), "debug");
        let (layer, _) = layer_of(&[("RUST_LOG", "debug"), ("INBOXD__LOG__LEVEL", "warn")], "");
        assert_eq!(text(&layer, &["log", "level"]), "warn");
    }

    #[test]
    fn an_empty_part_is_named() {
        let (_, problems) = layer_of(&[("INBOXD__SUBSCRIPTION____LEASE", "5s")], "");
        let error = problems.into_result::<()>(None).unwrap_err();
        assert!(error.to_string().contains("INBOXD__SUBSCRIPTION____LEASE"), "{error}");
    }

    #[cfg(unix)]
    #[test]
    fn a_value_that_is_not_utf_8_is_named_and_not_shown() {
        use std::os::unix::ffi::OsStringExt;
        let problems = Problems::default();
        let bad = OsString::from_vec(vec![0xff, 0xfe]);
        layer([("INBOXD__LOG__LEVEL".into(), bad)], &Table::new(), &problems);
        assert!(!problems.is_empty());
    }
}
