//! Every declared key: set from the environment it changes what is loaded, and no secret is ever
//! shown. What is tested follows from the declarations, so a new key is tested too.

use std::fmt::Write as _;
use std::time::Duration;

use secrecy::{ExposeSecret, SecretString};
use sha2::{Digest as _, Sha256};

use super::super::address::BrokerKind;
use super::super::declare::{Group, Key, Kind};
use super::super::*;

/// Names and values.
type Variables = Vec<(String, String)>;

/// A key that can be set, with a value that differs from what holds without it.
struct Leaf {
    /// As in the file, with names for NAME.
    path: Vec<String>,
    key: &'static Key,
    kind: &'static Kind,
    value: String,
    secret: bool,
}

/// Values that could be recognised wherever they were shown, encoded ones too.
const CANARIES: [&str; 2] = ["canary-secret", "Y2FuYXJ5"];

/// Files that keys name.
struct Files {
    directory: tempfile::TempDir,
}

impl Files {
    fn new() -> Self {
        Self { directory: tempfile::tempdir().unwrap() }
    }

    fn holding(&self, text: &str) -> String {
        let path = self.directory.path().join(hex::encode(Sha256::digest(text)));
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    }
}

/// Every key that can be set, twins included.
fn leaves(files: &Files) -> Vec<Leaf> {
    let mut found = Vec::new();
    collect(&keys::ROOT, &[], files, &mut found);
    found
}

fn collect(group: &'static Group, path: &[String], files: &Files, found: &mut Vec<Leaf>) {
    for key in group.keys {
        let at = |names: &[&str]| -> Vec<String> {
            path.iter().cloned().chain(names.iter().map(|name| (*name).to_owned())).collect()
        };
        let mut leaf = |path: Vec<String>, kind: &'static Kind, value: String, secret: bool| {
            found.push(Leaf { path, key, kind, value, secret });
        };
        match &key.kind {
            Kind::Table(below) => collect(below, &at(&[key.name]), files, found),
            Kind::Tables { group: below, .. } => {
                let name = match key.name {
                    "broker" => "main",
                    "subscription" => "orders",
                    _ => "refunds",
                };
                collect(below, &at(&[key.name, name]), files, found);
            }
            Kind::SwitchOrTable(below) => {
                leaf(at(&[key.name]), &key.kind, "true".into(), false);
                collect(below, &at(&[key.name]), files, found);
            }
            Kind::Values { names, value, .. } => {
                let sample = sample(value, files);
                let secret = matches!(value, Kind::Secret(_));
                if secret {
                    let twin = format!("{}_file", names.sample);
                    leaf(at(&[key.name, &twin]), value, files.holding(&sample), false);
                }
                leaf(at(&[key.name, names.sample]), value, sample, secret);
            }
            kind @ (Kind::Secret(_) | Kind::Secrets { .. }) => {
                let value = match key.name {
                    "url" if path[0] == "broker" => "amqp://inbox:canary-secret@other/".to_owned(),
                    _ => sample(kind, files),
                };
                leaf(at(&[&key.twin().unwrap()]), kind, files.holding(&value), false);
                leaf(at(&[key.name]), kind, value, true);
            }
            kind => leaf(at(&[key.name]), kind, sample(kind, files), false),
        }
    }
}

/// A file that is a certificate and a key, as far as is looked.
fn pem(content: &str) -> String {
    let section = |label| format!("-----BEGIN {label}-----\n{content}\n-----END {label}-----\n");
    section("CERTIFICATE") + &section("PRIVATE KEY")
}

/// A value that fits and is not the default.
fn sample(kind: &Kind, files: &Files) -> String {
    let show = |duration: Duration| humantime::format_duration(duration).to_string();
    match kind {
        Kind::Duration { default, least, most } => {
            let halved = default.map(|default| Duration::from_secs((default / 2).as_secs()));
            match halved.filter(|halved| halved >= least && halved <= most) {
                Some(halved) => show(halved),
                None => show(*least),
            }
        }
        Kind::Size { default, .. } => (default - 1).to_string(),
        Kind::Count { default, least, .. } => (default.unwrap_or(*least) + 1).to_string(),
        Kind::Number { default, least, most } => {
            ((default.unwrap_or(*most) + least) / 2.0).to_string()
        }
        Kind::Switch { default } => (!default.unwrap_or(true)).to_string(),
        Kind::Choice { words, .. } => words[words.len() - 1].to_owned(),
        Kind::Text(form) | Kind::Secret(form) => form.sample.to_owned(),
        Kind::List { entry, .. } | Kind::Secrets { entry, .. } => entry.sample.to_owned(),
        Kind::PemFile => files.holding(&pem("AAAA")),
        Kind::SwitchOrTable(_) | Kind::Table(_) | Kind::Tables { .. } | Kind::Values { .. } => {
            unreachable!("no single value")
        }
    }
}

const RABBITMQ: &str = "[broker.main]\nurl = \"amqp://mq/\"\n[broker.another]\nurl = \"amqp://b/\"\n\
    [subscription.orders]\ncallback = \"http://127.0.0.1:8080/orders\"\n\
    source = { broker = \"main\", queue = \"orders\" }\n";
const KAFKA: &str = "[broker.main]\nurl = \"kafka://k\"\n[subscription.orders]\n\
    callback = \"http://127.0.0.1:8080/orders\"\n\
    source = { topics = [\"orders\"], group = \"billing\" }\n";
/// Two subscriptions with one consumer id: refused unless it is shared on purpose.
const SHARED: &str = "[broker.main]\nurl = \"amqp://mq/\"\n[subscription.a]\n\
    callback = \"http://a/\"\nsource = { queue = \"a\" }\nconsumer_id = \"another\"\n\
    [subscription.b]\ncallback = \"http://b/\"\nsource = { queue = \"b\" }\n\
    consumer_id = \"another\"\n";
/// A broker whose kind does not follow from its address.
const NO_KIND: &str = "[broker.main]\nurl = \"mq\"\n[subscription.orders]\n\
    callback = \"http://127.0.0.1:8080/orders\"\nsource = { queue = \"orders\" }\n";

/// The file that a key is set beside.
fn file_for(leaf: &Leaf) -> &'static str {
    match (leaf.path.join(".").as_str(), leaf.key.only) {
        ("shared_consumer_ids", _) => SHARED,
        ("broker.main.kind", _) => NO_KIND,
        (_, Some(BrokerKind::Kafka)) => KAFKA,
        _ => RABBITMQ,
    }
}

/// What a key needs beside it.
fn beside(path: &str) -> &'static [(&'static str, &'static str)] {
    const POSTGRES: (&str, &str) = ("database.url", "postgres://inbox@db/inbox");
    const DEAD_TO_BROKER: (&str, &str) = ("subscription.orders.dead_letter.to", "broker");
    match path.trim_end_matches("_file") {
        "database.password" | "database.migrate_url" | "database.schema" => &[POSTGRES],
        "database.migrate_password" => {
            &[POSTGRES, ("database.migrate_url", "postgres://owner@db/inbox")]
        }
        "broker.main.user" => &[("broker.main.password", "x")],
        "broker.main.password" => &[("broker.main.user", "inbox")],
        "subscription.orders.ordering_key" => &[("subscription.orders.ordering", "key")],
        "subscription.orders.on_blocked_lane" | "subscription.orders.on_dead_letter" => &[
            ("subscription.orders.ordering", "key"),
            ("subscription.orders.ordering_key", "header:tenant"),
        ],
        "subscription.orders.health_interval" => {
            &[("subscription.orders.health_url", "http://127.0.0.1:8080/health")]
        }
        "subscription.orders.dead_letter.to" => {
            &[("subscription.orders.dead_letter.routing_key", "dead")]
        }
        "subscription.orders.dead_letter.topic" => &[DEAD_TO_BROKER],
        "subscription.orders.dead_letter.broker" | "subscription.orders.dead_letter.exchange" => {
            &[DEAD_TO_BROKER, ("subscription.orders.dead_letter.routing_key", "dead")]
        }
        "subscription.orders.dead_letter.routing_key" => {
            &[DEAD_TO_BROKER, ("subscription.orders.dead_letter.exchange", "dead")]
        }
        "subscription.orders.route.refunds.path" => {
            &[("subscription.orders.route.refunds.type", "refund")]
        }
        "subscription.orders.route.refunds.type"
        | "subscription.orders.route.refunds.routing_key"
        | "subscription.orders.route.refunds.header" => {
            &[("subscription.orders.route.refunds.path", "/refunds")]
        }
        "subscription.orders.on_unrouted" => &[
            ("subscription.orders.route.refunds.path", "/refunds"),
            ("subscription.orders.route.refunds.type", "refund"),
        ],
        _ => &[],
    }
}

/// How a variable writes a key.
fn variable<T: AsRef<str>>(path: impl IntoIterator<Item = T>) -> String {
    let parts: Vec<_> = path
        .into_iter()
        .map(|part| part.as_ref().to_ascii_uppercase().replace(['-', '.'], "_"))
        .collect();
    format!("INBOXD__{}", parts.join("__"))
}

fn variable_of(leaf: &Leaf) -> String {
    variable(&leaf.path)
}

fn load_with(file: &str, variables: &[(String, String)]) -> Result<Config, ConfigError> {
    load_file(file, ".toml", variables)
}

fn load_file(
    file: &str,
    suffix: &str,
    variables: &[(String, String)],
) -> Result<Config, ConfigError> {
    let written = tempfile::Builder::new().suffix(suffix).tempfile().unwrap();
    std::fs::write(written.path(), file).unwrap();
    load(Inputs {
        file: Some(written.path().to_owned()),
        environment: variables.iter().map(|(name, value)| (name.into(), value.into())).collect(),
        needs_subscriptions: true,
        ..Inputs::default()
    })
}

/// Everything that a configuration says, secrets too.
fn told(config: &Config) -> String {
    let mut text = format!("{config:?}");
    let mut secret = |value: Option<&SecretString>| {
        let value = value.map(|value| value.expose_secret().to_owned());
        write!(text, "\n{value:?}").unwrap();
    };
    secret(config.admin.token.as_ref());
    secret(config.database.migrate_url.as_ref());
    match &config.database.url {
        DatabaseUrl::Postgres(url) | DatabaseUrl::MySql(url) => secret(Some(url)),
        DatabaseUrl::Sqlite(_) => {}
    }
    for (_, value) in &config.telemetry.headers {
        secret(Some(value));
    }
    for SubscriptionConfig { callback, source, dead_letter, .. } in &config.subscriptions {
        match dead_letter {
            Some(DeadLetterTargetConfig::RabbitMq { password, .. }) => secret(Some(password)),
            Some(DeadLetterTargetConfig::Kafka { properties, .. }) => {
                for (name, value) in properties.iter() {
                    secret(Some(&format!("{name}={value}").into()));
                }
            }
            None => {}
        }
        for value in callback.signing.iter().chain(callback.headers_set.iter().map(|(_, v)| v)) {
            secret(Some(value));
        }
        match source {
            SourceConfig::RabbitMq(rabbitmq) => secret(Some(&rabbitmq.password)),
            SourceConfig::Kafka(kafka) => {
                for (name, value) in kafka.properties.iter() {
                    secret(Some(&format!("{name}={value}").into()));
                }
            }
        }
    }
    text
}

fn assert_shows_no_secret(shown: &str, of: &str) {
    for canary in CANARIES {
        assert!(!shown.contains(canary), "{of}: {shown}");
    }
}

/// The variables that a key is set by, after those that it needs.
fn setting(leaf: &Leaf, files: &Files) -> (Variables, Variables) {
    let path = leaf.path.join(".");
    let mut before: Vec<_> = beside(&path)
        .iter()
        .map(|(path, value)| (variable(path.split('.')), (*value).to_owned()))
        .collect();
    // A certificate and its key belong together.
    for (one, other) in [("cert_file", "key_file"), ("key_file", "cert_file")] {
        if leaf.key.name == one {
            let path = path.replace(one, other);
            before.push((variable(path.split('.')), files.holding(&pem("BBBB"))));
        }
    }
    let mut after = before.clone();
    after.push((variable_of(leaf), leaf.value.clone()));
    (before, after)
}

#[test]
fn every_key_is_reached_from_the_environment() {
    let files = Files::new();
    let leaves = leaves(&files);
    assert!(leaves.len() > 90, "{}", leaves.len());
    for leaf in &leaves {
        let name = variable_of(leaf);
        let file = file_for(leaf);
        let (before, after) = setting(leaf, &files);
        let without = load_with(file, &before).map(|config| told(&config)).ok();
        let with = load_with(file, &after).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_ne!(without, Some(told(&with)), "{name} changed nothing");
        assert_shows_no_secret(&format!("{with:?}"), &name);
    }
}

#[test]
fn every_key_means_the_same_in_toml_in_yaml_and_in_a_variable() {
    let files = Files::new();
    for leaf in &leaves(&files) {
        let name = variable_of(leaf);
        let (before, after) = setting(leaf, &files);
        let variable = told(&load_with(file_for(leaf), &after).unwrap());
        let mut document: ::toml::Table = file_for(leaf).parse().unwrap();
        let (last, above) = leaf.path.split_last().unwrap();
        let mut table = &mut document;
        for part in above {
            let below = table.entry(part).or_insert_with(|| ::toml::Table::new().into());
            table = below.as_table_mut().unwrap();
        }
        // Its twin is the same key.
        table.remove(last.strip_suffix("_file").unwrap_or(last));
        table.insert(last.clone(), leaf.value.as_str().into());
        let toml = ::toml::to_string(&document).unwrap();
        // JSON is YAML.
        let yaml = serde_json::to_string_pretty(&document).unwrap();
        for (text, suffix) in [(toml, ".toml"), (yaml, ".yaml")] {
            let loaded = load_file(&text, suffix, &before);
            assert_eq!(told(&loaded.unwrap()), variable, "{name}: {text}");
        }
    }
}

#[test]
fn every_secret_has_its_twin_and_both_at_once_are_refused() {
    let files = Files::new();
    let leaves = leaves(&files);
    let secrets: Vec<_> = leaves.iter().filter(|leaf| leaf.secret).collect();
    assert!(secrets.len() >= 10, "{}", secrets.len());
    for leaf in secrets {
        let file = file_for(leaf);
        let (_, mut variables) = setting(leaf, &files);
        let plain = told(&load_with(file, &variables).unwrap());
        let (name, value) = variables.pop().unwrap();
        let twin = match leaf.kind {
            Kind::Secrets { .. } => name.replace("SECRETS", "SECRET_FILES"),
            _ => format!("{name}_FILE"),
        };
        variables.push((twin.clone(), files.holding(&format!("{value}\n"))));
        assert_eq!(told(&load_with(file, &variables).unwrap()), plain, "{twin}");
        variables.push((name.clone(), value));
        let error = load_with(file, &variables).unwrap_err();
        assert!(error.to_string().contains("not both"), "{name}: {error}");
        assert_shows_no_secret(&format!("{error} {error:?}"), &name);
    }
}

/// Secrets that are malformed, each in its own way.
const MALFORMED: [&str; 12] = [
    "canary-secret",
    "canary-secret:with a blank",
    "canary-secret\u{1}\n",
    "canary-secret\r\nX-Evil: 1",
    "amqp://inbox:canary-secret@h:0/%zz?x",
    "amqp://inbox:canary-secret@[::zz]/",
    "amqp://canary-secret/a/b",
    "postgres://inbox:canary-secret@h:x/y",
    "postgres:canary-secret",
    "sqlite:canary-secret/",
    "whsec_canary-secret",
    "canary-secret,canary-secret\u{fffd}",
];

#[test]
fn no_malformed_secret_is_shown() {
    let files = Files::new();
    for leaf in leaves(&files).iter().filter(|leaf| leaf.secret) {
        let (mut variables, _) = setting(leaf, &files);
        let name = variable_of(leaf);
        // A neighbour that is wrong, so that there is always something to report.
        variables.push(("INBOXD__SHUTDOWN_GRACE".into(), "soon".into()));
        for malformed in MALFORMED {
            for (name, value) in [
                (name.clone(), malformed.to_owned()),
                (format!("{name}_FILE"), files.holding(malformed)),
                // The secret where a file is meant.
                (format!("{name}_FILE"), malformed.to_owned()),
                (format!("{name}_FILE"), leaf.value.clone()),
            ] {
                let mut variables = variables.clone();
                variables.push((name.clone(), value));
                let error = load_with(file_for(leaf), &variables).unwrap_err();
                assert_shows_no_secret(&format!("{error} {error:?}"), &name);
            }
        }
    }
}

#[test]
fn no_secret_of_a_broken_file_is_shown() {
    let broken = [
        "[admin]\ntoken = canary-secret\n",
        "[admin]\ntoken = \"canary-secret\n",
        "[admin]\ntoken = \"\\q canary-secret\"\n",
        "[admin]\ntoken = [\"canary-secret\"]\n",
        "[admin]\ntoken = { a = \"canary-secret\" }\n",
        "[admin]\ntoken = \"canary-secret\"\ntoken = \"canary-secret\"\n",
        "admin = \"canary-secret\"\n",
        "[[admin]]\ntoken = \"canary-secret\"\n",
        "broker = [\"canary-secret\"]\n",
        "[broker.a]\nurl = [[\"canary-secret\"]]\n",
        "[broker.a]\nproperties = \"canary-secret\"\n",
        "[broker.a]\nproperties = { \"sasl.password\" = [\"canary-secret\"] }\n",
        "[subscription.a]\nsigning = [\"canary-secret\"]\n",
        "[subscription.a]\nsigning = { secrets = { a = \"canary-secret\" } }\n",
        "[subscription.a]\nheaders = { set = [\"canary-secret\"] }\n",
        "[subscription.a.headers.set]\nAuthorization = { a = \"canary-secret\" }\n",
        "telemetry = { headers = \"canary-secret\" }\n",
        "admin:\n  token: 'canary-secret\n",
        "admin:\n  token: \"\\q canary-secret\"\n",
        "admin:\n  token: [canary-secret\n",
        "admin:\n  token: &canary canary-secret\n  tokens: *canary\n",
        "admin:\n  token: canary-secret\n  token: canary-secret\n",
        "admin:\n  token: !!str canary-secret\n",
        "admin:\n\ttoken: canary-secret\n",
        "admin:\n  token: canary-secret: more\n",
        "admin:\n  token: |\n canary-secret\n",
        "%YAML canary-secret\n---\na: b\n",
    ];
    for (at, text) in broken.iter().enumerate() {
        for suffix in [".toml", ".yaml"] {
            let written = tempfile::Builder::new().suffix(suffix).tempfile().unwrap();
            std::fs::write(written.path(), text).unwrap();
            let inputs = Inputs { file: Some(written.path().to_owned()), ..Inputs::default() };
            // YAML that is written in TOML, and the other way round, is broken as well.
            if let Err(error) = load(inputs) {
                assert_shows_no_secret(&format!("{error} {error:?}"), &format!("{suffix} {at}"));
            }
        }
    }
}
