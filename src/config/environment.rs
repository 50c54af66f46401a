//! The environment as a layer: `INBOXD__SUBSCRIPTION__ORDERS__CALLBACK` is the key
//! `subscription.orders.callback`.

use std::collections::BTreeMap;
use std::ffi::OsString;

use super::declare::{Group, Kind};
use super::keys;
use super::names::plain;
use super::problem::{Fault, Place, Problems};
use super::tree::{Node, Table, Value, get, set};

const PREFIX: &str = "INBOXD__";
const SEPARATOR: &str = "__";
/// Before the short variables, which stand for flags.
const SHORT_PREFIX: &str = "INBOXD_";
const SHORT: [&str; 8] = [
    "ADMIN",
    "CALLBACK",
    "CONFIG",
    "CONSUMER_ID",
    "DATABASE",
    "DATABASE_FILE",
    "SOURCE",
    "SOURCE_FILE",
];
/// What is shorter is like anything.
const STRAY_BYTES_MIN: usize = 5;
/// Notices of one start.
const STRAYS_MAX: usize = 16;
/// Parts of a variable's name; the longest key has six.
const DEPTH_MAX: usize = 16;

/// Reads the variables that begin with `INBOXD__` (and `RUST_LOG`, as `log.level`).
///
/// Variables are written in capitals and cannot hold `-` or `.`: a name that the operator chose
/// and that differs from one of `base` by that alone means that one; else it is taken in lower
/// case. Below `properties`, `_` stands for the dots of librdkafka's names, below
/// `headers.set` and `telemetry.headers` for the `-` of a header's.
pub(super) fn layer(
    variables: impl IntoIterator<Item = (OsString, OsString)>,
    base: &Table,
    problems: &Problems,
) -> Table {
    let mut readable = Vec::new();
    for (name, value) in variables {
        match name.into_string() {
            Ok(name) if name.starts_with(PREFIX) || name == "RUST_LOG" => {
                readable.push((name, value));
            }
            Err(name) if name.as_encoded_bytes().starts_with(PREFIX.as_bytes()) => {
                let place = Place::Environment(name.to_string_lossy().into());
                problems.add(place, "", Fault::new("the name is not UTF-8", "unset it"));
            }
            _ => {}
        }
    }
    let mut variables = readable;
    variables.sort();

    let mut layer = Table::new();
    let mut taken = BTreeMap::new();
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
        let path = match resolve(path, base) {
            Ok(path) => path,
            Err(fault) => {
                problems.add(place, "", fault);
                continue;
            }
        };
        if let Some(other) = in_the_way(&taken, &path) {
            let fault = Fault::new(
                format!("{other} sets the same key, or one that contains it"),
                "unset one of the two",
            );
            problems.add(place, "", fault);
            continue;
        }
        let keys: Vec<&str> = path.iter().map(String::as_str).collect();
        set(&mut layer, &keys, Node::scalar(value, place));
        taken.insert(path, name);
    }
    layer
}

/// Variables of this program that are no flag's and no key's, told since they look as if they were
/// meant to be: never a problem, for others set names with this beginning too (Kubernetes for
/// a service of the program's name).
pub(super) fn strays(variables: &[(OsString, OsString)]) -> Vec<String> {
    let meant = |name: &str| {
        let rest = name.strip_prefix(SHORT_PREFIX)?;
        if rest.starts_with('_') || SHORT.contains(&rest) || rest.len() < STRAY_BYTES_MIN {
            return None;
        }
        let long = keys_of_one_table().find(|key| key.replace('.', "_").eq_ignore_ascii_case(rest));
        if let Some(key) = long {
            return Some(format!("{PREFIX}{}", key.to_ascii_uppercase().replace('.', SEPARATOR)));
        }
        let distance = |known: &&&str| strsim::damerau_levenshtein(known, rest);
        let near = SHORT.iter().min_by_key(distance)?;
        (distance(&near) <= 2).then(|| format!("{SHORT_PREFIX}{near}"))
    };
    let names = variables.iter().filter_map(|(name, _)| name.to_str());
    names
        .filter_map(|name| Some((name, meant(name)?)))
        .take(STRAYS_MAX)
        .map(|(name, meant)| format!("{name} is set and means nothing here: is {meant} meant?"))
        .collect()
}

/// Keys whose full names the program knows.
fn keys_of_one_table() -> impl Iterator<Item = String> {
    keys::ROOT.keys.iter().flat_map(|key| match key.kind {
        Kind::Table(below) => below.names().map(|name| format!("{}.{name}", key.name)).collect(),
        _ => vec![key.name.to_owned()],
    })
}

/// A variable of the same key, or of one above or below it.
fn in_the_way<'a>(taken: &'a BTreeMap<Vec<String>, String>, path: &[String]) -> Option<&'a str> {
    let above = (1..=path.len()).find_map(|length| taken.get(&path[..length]));
    let below = || {
        let (known, name) = taken.range(path.to_vec()..).next()?;
        known.starts_with(path).then_some(name)
    };
    above.or_else(below).map(String::as_str)
}

/// What the names of a table are.
#[derive(Clone, Copy)]
enum Names {
    /// Keys of the program.
    Keys(&'static Group),
    /// The operator's names for tables.
    Tables(&'static Group),
    /// The operator's names for values; what joins their words; whether they have twins.
    Values(&'static str, bool),
    /// No table, or one that is not known.
    Unknown,
}

fn below(names: Names, key: &str) -> Names {
    match names {
        Names::Tables(group) => Names::Keys(group),
        Names::Keys(group) => match group.find(key).map(|key| &key.kind) {
            Some(Kind::Table(group) | Kind::SwitchOrTable(group)) => Names::Keys(group),
            Some(Kind::Tables { group, .. }) => Names::Tables(group),
            Some(Kind::Values { join, value, .. }) => {
                Names::Values(join, matches!(value, Kind::Secret(_)))
            }
            _ => Names::Unknown,
        },
        Names::Values(..) | Names::Unknown => Names::Unknown,
    }
}

fn resolve(path: &str, base: &Table) -> Result<Vec<String>, Fault> {
    let mut names = Names::Keys(&keys::ROOT);
    let mut table = Some(base);
    let mut resolved: Vec<String> = Vec::new();
    for segment in path.split(SEPARATOR) {
        if resolved.len() == DEPTH_MAX {
            return Err(Fault::new(
                format!("the name has more than {DEPTH_MAX} parts, which no key has"),
                "unset it",
            ));
        }
        if segment.is_empty() {
            return Err(Fault::new(
                "the name has an empty part",
                "join the parts of a key by two underscores: INBOXD__SUBSCRIPTION__ORDERS__CALLBACK",
            ));
        }
        let key = match names {
            Names::Keys(_) | Names::Unknown => segment.to_ascii_lowercase(),
            Names::Tables(_) => {
                alike(segment, table).unwrap_or_else(|| segment.to_ascii_lowercase())
            }
            Names::Values(join, twins) => alike(segment, table)
                .or_else(|| twin(segment, table).filter(|_| twins))
                .unwrap_or_else(|| joined(segment, join, twins)),
        };
        names = below(names, &key);
        table = match table.and_then(|table| table.get(&key)) {
            Some(Node { value: Value::Table(table), .. }) => Some(table),
            _ => None,
        };
        resolved.push(key);
    }
    Ok(resolved)
}

/// The one key of a table that is written like this.
fn alike(name: &str, table: Option<&Table>) -> Option<String> {
    let mut same = table?.keys().filter(|key| plain(key) == plain(name));
    let first = same.next()?;
    // Two are told apart by no variable, which the check of the file says.
    Some(first.clone())
}

/// Where `_` stands for what librdkafka's names, or those of headers, are joined by.
fn joined(name: &str, by: &str, twins: bool) -> String {
    let name = name.to_ascii_lowercase();
    // The twin that names a file keeps its suffix.
    match name.strip_suffix("_file").filter(|_| twins) {
        Some(name) => format!("{}_file", name.replace('_', by)),
        None => name.replace('_', by),
    }
}

/// A secret and its `_file` twin are one key, whose spelling is that of the table.
fn twin(name: &str, table: Option<&Table>) -> Option<String> {
    let name = plain(name);
    table?.keys().find_map(|key| match (key.strip_suffix("_file"), name.strip_suffix("_file")) {
        (Some(key), None) if plain(key) == name => Some(key.to_owned()),
        (None, Some(name)) if plain(key) == name => Some(format!("{key}_file")),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::super::toml::read as from_toml;
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
    fn variables_that_contradict_each_other_are_both_named() {
        for (first, second) in [
            ("INBOXD__SUBSCRIPTION__ORDERS", "INBOXD__SUBSCRIPTION__ORDERS__CALLBACK"),
            ("INBOXD__SUBSCRIPTION__A__TLS__CA_FILE", "INBOXD__SUBSCRIPTION__a__TLS__CA_FILE"),
            ("INBOXD__BROKER__A__TLS", "INBOXD__BROKER__A__TLS__CA_FILE"),
        ] {
            let (_, problems) = layer_of(&[(first, "x"), (second, "y")], "");
            let error = problems.into_result::<()>(None).unwrap_err().to_string();
            assert!(error.contains(first) && error.contains(second), "{error}");
        }
        let names = ["INBOXD__SUBSCRIPTION__A__LEASE", "INBOXD__SUBSCRIPTION__A_B__LEASE"];
        let (_, problems) = layer_of(&[(names[0], "x"), (names[1], "y")], "");
        assert!(problems.is_empty());
    }

    #[test]
    fn a_variable_that_looks_misspelt_is_noticed_and_kubernetes_s_are_not() {
        let told = |names: &[&str]| {
            let variables: Vec<_> = names.iter().map(|name| (name.into(), "x".into())).collect();
            strays(&variables)
        };
        let notices = told(&["INBOXD_SORCE", "INBOXD_LOG_LEVEL", "INBOXD_SHUTDOWN_GRACE"]);
        for (notice, meant) in notices.iter().zip([
            "is INBOXD_SOURCE meant",
            "is INBOXD__LOG__LEVEL meant",
            "is INBOXD__SHUTDOWN_GRACE meant",
        ]) {
            assert!(notice.contains(meant), "{notice}");
        }
        assert_eq!(notices.len(), 3);
        let others = [
            "INBOXD_SERVICE_HOST",
            "INBOXD_SERVICE_PORT",
            "INBOXD_PORT",
            "INBOXD_PORT_7461_TCP",
            "INBOXD_PORT_7461_TCP_ADDR",
            "INBOXD_SERVICE_PORT_HTTP",
            "INBOXD_SOURCE",
            "INBOXD_DATABASE_FILE",
            "INBOXD__LOG__LEVEL",
            "INBOXD_BIN",
        ];
        assert_eq!(told(&others), Vec::<String>::new());
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
