//! The command line as the uppermost layer.

use std::path::PathBuf;

use secrecy::{ExposeSecret, SecretString};

use super::address::{Address, BrokerKind, parse};
use super::declare::Group;
use super::keys;
use super::problem::{Fault, Place, Problem, Problems, quote};
use super::reader::read_secret;
use super::tree::{Node, Table, Value, get, remove, set};

/// The name of the subscription, and of its broker, that flags make.
const DEFAULT: &str = "default";
/// The keys of a broker that a source's parameters may set, beside its properties.
const BROKER_KEYS: &[&str] = &["heartbeat", "tls"];
/// What has a flag of its own, or would name another source.
const NOT_PARAMETERS: &[&str] = &["broker", "callback", "consumer_id", "source"];

/// A value with the name of what gave it.
pub type Flag<T> = Option<(T, &'static str)>;

/// What the command line, or a short variable (`INBOXD_SOURCE`), set.
#[derive(Default)]
pub struct Flags {
    /// `--source`.
    pub source: Flag<SecretString>,
    /// `--callback`.
    pub callback: Flag<String>,
    /// `--database`.
    pub database: Flag<SecretString>,
    /// `--consumer-id`.
    pub consumer_id: Flag<String>,
    /// `--admin`.
    pub admin: Flag<String>,
    /// What was wrong already (two that exclude each other, an unreadable file).
    pub problems: Vec<Problem>,
}

/// Before the environment is laid onto the file: a source from a flag replaces the file's
/// whole, and does not mix with it.
pub(super) fn make_room(flags: &Flags, tree: &mut Table, problems: &Problems) {
    for problem in &flags.problems {
        let fault = Fault::new(problem.what.clone(), problem.remedy.clone());
        problems.add(problem.place.clone(), problem.key.clone(), fault);
    }
    if flags.source.is_none() {
        return;
    }
    if let Some(name) = only_subscription(tree) {
        remove(tree, &["subscription", &name, "source"]);
        remove(tree, &["broker", DEFAULT]);
    }
}

/// The flags as keys.
pub(super) fn layer(flags: &Flags, tree: &Table, problems: &Problems) -> Table {
    let mut layer = Table::new();
    if let Some((url, flag)) = &flags.database {
        set(&mut layer, &["database", "url"], Node::scalar(url.expose_secret(), Place::Flag(flag)));
    }
    if let Some((listen, flag)) = &flags.admin {
        set(&mut layer, &["admin", "listen"], Node::scalar(listen.as_str(), Place::Flag(flag)));
    }
    let first = [
        flags.source.as_ref().map(|(_, flag)| *flag),
        flags.callback.as_ref().map(|(_, flag)| *flag),
        flags.consumer_id.as_ref().map(|(_, flag)| *flag),
    ]
    .into_iter()
    .flatten()
    .next();
    let Some(first) = first else { return layer };
    let Some(name) = only_subscription(tree) else {
        problems.add(
            Place::Flag(first),
            "",
            Fault::new(
                "there are several subscriptions, and it does not say which",
                "set the key in the file, or INBOXD__SUBSCRIPTION__NAME__KEY",
            ),
        );
        return layer;
    };
    if let Some((source, flag)) = &flags.source {
        match parse(source.expose_secret()) {
            Ok(address) => {
                add_source(&mut layer, &name, address, Place::Flag(flag), problems);
            }
            Err(fault) => problems.add(Place::Flag(flag), "", fault),
        }
    }
    for (key, value) in [("callback", &flags.callback), ("consumer_id", &flags.consumer_id)] {
        if let Some((value, flag)) = value {
            let node = Node::scalar(value.as_str(), Place::Flag(flag));
            set(&mut layer, &["subscription", &name, key], node);
        }
    }
    layer
}

/// The one subscription that flags are about; `None` where there are several.
fn only_subscription(tree: &Table) -> Option<String> {
    match get(tree, &["subscription"]).map(|node| &node.value) {
        Some(Value::Table(subscriptions)) => {
            let mut names = subscriptions.keys();
            match (names.next(), names.next()) {
                (None, _) => Some(DEFAULT.to_owned()),
                (Some(name), None) => Some(name.clone()),
                (Some(_), Some(_)) => None,
            }
        }
        _ => Some(DEFAULT.to_owned()),
    }
}

fn add_source(layer: &mut Table, name: &str, address: Address, place: Place, problems: &Problems) {
    let scalar = |text: &str| Node::scalar(text, place.clone());
    let at = |key: &'static str| ["subscription", name, "source", key];
    let scheme = match (address.kind, address.tls) {
        (BrokerKind::RabbitMq, false) => "amqp",
        (BrokerKind::RabbitMq, true) => "amqps",
        (BrokerKind::Kafka, _) => "kafka",
    };
    let url = format!("{scheme}://{}", address.hosts.join(","));
    set(layer, &at("broker"), scalar(DEFAULT));
    set(layer, &["broker", DEFAULT, "url"], scalar(&url));
    if let Some(user) = &address.user {
        set(layer, &["broker", DEFAULT, "user"], scalar(user));
    }
    if let Some(password) = &address.password {
        set(layer, &["broker", DEFAULT, "password"], scalar(password));
    }
    match (address.kind, address.path.as_slice()) {
        (_, []) => {}
        (BrokerKind::RabbitMq, [vhost, ..]) => {
            set(layer, &["broker", DEFAULT, "vhost"], scalar(vhost));
        }
        (BrokerKind::Kafka, topics) => {
            set(layer, &at("topics"), Node::list(topics.iter().cloned(), place.clone()));
        }
    }
    for (key, value) in &address.parameters {
        add_parameter(layer, name, key, scalar(value), problems);
    }
}

fn add_parameter(layer: &mut Table, name: &str, key: &str, node: Node, problems: &Problems) {
    if let Some(property) = key.strip_prefix("properties.") {
        set(layer, &["broker", DEFAULT, "properties", property], node);
        return;
    }
    let segments: Vec<&str> = key.split('.').collect();
    let first = segments.first().copied().unwrap_or_default();
    let is_key_of = |group: &Group| group.find(first).is_some() && !NOT_PARAMETERS.contains(&first);
    // `tls` of a source is the broker's.
    let parent: &[&str] = if is_key_of(&keys::SOURCE) {
        &["subscription", name, "source"]
    } else if is_key_of(&keys::SUBSCRIPTION) && first != "tls" {
        &["subscription", name]
    } else if BROKER_KEYS.contains(&first) {
        &["broker", DEFAULT]
    } else {
        let remedy = format!(
            "use {}, properties.NAME, {} or a key of the subscription",
            keys::SOURCE
                .keys
                .iter()
                .map(|key| key.name)
                .filter(|key| *key != "broker")
                .collect::<Vec<_>>()
                .join(", "),
            BROKER_KEYS.join(", ")
        );
        let fault = Fault::new(format!("the parameter {} is not known", quote(key)), remedy);
        problems.add(node.place, "", fault);
        return;
    };
    let path: Vec<&str> = parent.iter().copied().chain(segments).collect();
    set(layer, &path, node);
}

/// What one secret was given by on one level: itself, or a file that holds it, with the names
/// of both.
pub struct Given {
    /// The value and its name.
    pub value: (Option<SecretString>, &'static str),
    /// The file and its name.
    pub file: (Option<PathBuf>, &'static str),
}

impl Flags {
    /// The secret of the first level that has one; what is wrong with it goes to `problems`.
    pub fn secret(&mut self, levels: impl IntoIterator<Item = Given>) -> Flag<SecretString> {
        for Given { value: (value, name), file: (file, file_name) } in levels {
            match (value, file) {
                (None, None) => {}
                (Some(value), None) => return Some((value, name)),
                (Some(_), Some(_)) => {
                    let fault = Fault::new(
                        format!("{name} is there too"),
                        format!("give {name} or {file_name}, not both"),
                    );
                    self.problem(file_name, fault);
                    return None;
                }
                (None, Some(path)) => {
                    return read_secret(&path)
                        .map(|value| (value, file_name))
                        .map_err(|fault| self.problem(file_name, fault))
                        .ok();
                }
            }
        }
        None
    }

    fn problem(&mut self, name: &'static str, fault: Fault) {
        self.problems.push(Problem {
            place: Place::Flag(name),
            key: String::new(),
            what: fault.what,
            remedy: fault.remedy,
        });
    }
}
