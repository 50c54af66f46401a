//! The configuration: flags over environment over file, checked whole before anything starts.
//!
//! Every key is declared once ([`keys`]). Each layer is a tree of text with places ([`tree`]),
//! checked alone ([`check`]), so that a mistake in the file is told although a variable hides it;
//! then they become one tree, from which sections are read ([`reader`]). Every problem is
//! collected with its place and its remedy before one is reported. No secret is printed, in
//! `Debug`, in a problem or in a log line.
//!
//! What it does not do: connect to anything.

mod address;
mod broker;
mod callback;
mod check;
mod declare;
mod environment;
mod failure;
mod flags;
mod forms;
mod headers;
mod identity;
mod keys;
mod model;
mod names;
mod problem;
mod process;
mod reader;
mod reference;
mod routes;
mod schema;
mod subscription;
mod telemetry;
mod toml;
mod tree;
mod units;
mod yaml;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub use flags::{Flag, Flags, Given};
pub use model::*;
pub use problem::{ConfigError, Place, Problem};
pub use reference::reference;
pub use schema::schema;

use problem::{Fault, Problems};
use reader::Section;
use tree::Table;

use crate::engine::SubscriptionSettings;

const FILE_BYTES_MAX: u64 = 4 * units::MIB;
/// MySQL's lock timeouts are whole seconds, and a statement waits at most a fifth of the lease.
const MYSQL_LEASE_MIN: Duration = units::seconds(5);

/// Where a configuration comes from.
#[derive(Default)]
pub struct Inputs {
    /// The file, if there is one.
    pub file: Option<PathBuf>,
    /// The environment's variables.
    pub environment: Vec<(OsString, OsString)>,
    /// The command line, and the short variables that stand for it.
    pub flags: Flags,
    /// False for commands that consume nothing: no subscription is needed.
    pub needs_subscriptions: bool,
}

/// Reads and checks everything.
///
/// # Errors
/// All problems that were found, not only the first.
pub fn load(inputs: Inputs) -> Result<Config, ConfigError> {
    let problems = Problems::default();
    let mut tree = match &inputs.file {
        Some(path) => read_file(path, &problems),
        None => Table::new(),
    };
    check::layer(&tree, &keys::ROOT, &problems);
    flags::make_room(&inputs.flags, &mut tree, &problems);
    let strays = environment::strays(&inputs.environment);
    let environment = environment::layer(inputs.environment, &tree, &problems);
    check::layer(&environment, &keys::ROOT, &problems);
    tree::overlay(&mut tree, environment);
    let flags = flags::layer(&inputs.flags, &tree, &problems);
    check::layer(&flags, &keys::ROOT, &problems);
    tree::overlay(&mut tree, flags);
    let mut config = read(&tree, inputs.needs_subscriptions, &problems);
    config.notices.extend(strays);
    problems.into_result(Some(config))
}

fn read_file(path: &Path, problems: &Problems) -> Table {
    let remedy = "name a readable file in TOML or YAML (.yaml, .yml)";
    match reader::read_file(path, &format!("the file {}", path.display()), FILE_BYTES_MAX, remedy) {
        Ok(text) => {
            // An editor's byte order mark is not part of the text.
            let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
            let shown = path.display().to_string();
            if problem::is_yaml(path) {
                yaml::read(&shown, text, problems)
            } else {
                toml::read(&shown, text, problems)
            }
        }
        Err(fault) => {
            problems.add(Place::Flag("--config"), "", fault);
            Table::new()
        }
    }
}

fn read(tree: &Table, needs_subscriptions: bool, problems: &Problems) -> Config {
    let root = Section::root(tree, &keys::ROOT, problems);
    let mut notices = Vec::new();
    let admin = process::admin(&root.section("admin"));
    let health_listen = process::health(&root.section("health"), admin.listen);
    let log = process::log(&root.section("log"));
    let telemetry = telemetry::read(&root.section("telemetry"));
    let database = process::database(&root.section("database"));
    let brokers = brokers(&root);
    if brokers.is_empty()
        && root.has("subscription")
        && !root.has("broker")
        && !problems.has_flag(subscription::SOURCE_FLAGS)
    {
        let remedy = "add [broker.main] with its url (or give --source)";
        problems.add(Place::Unset, "broker", Fault::new(problem::MISSING, remedy));
    }
    let mut subscriptions = subscriptions(&root, &brokers, &mut notices);
    if subscriptions.is_empty() && needs_subscriptions && problems.is_empty() {
        let remedy = "give --source and --callback, or a file with --config";
        problems.add(Place::Unset, "subscription", Fault::new("there is none", remedy));
    }
    check_consumer_ids(&root, &subscriptions);
    let lease = one_lease(&mut subscriptions, &mut notices);
    check_lease(&root, &database, lease, &subscriptions);
    for SubscriptionConfig { settings, source, .. } in &subscriptions {
        failure::notice(settings, source, database.retention, &mut notices);
    }
    Config {
        admin,
        health_listen,
        database,
        log,
        telemetry,
        shutdown_grace: root.duration("shutdown_grace"),
        stale_after: root.duration("stale_after"),
        lease,
        subscriptions,
        notices,
    }
}

fn brokers<'a>(root: &Section<'a>) -> BTreeMap<&'a str, Option<broker::Broker>> {
    let names = root.section("broker").names();
    names.into_iter().map(|name| (name, broker::read(&root.entry("broker", name)))).collect()
}

fn subscriptions(
    root: &Section<'_>,
    brokers: &BTreeMap<&str, Option<broker::Broker>>,
    notices: &mut Vec<String>,
) -> Vec<SubscriptionConfig> {
    let names = root.section("subscription").names();
    names
        .into_iter()
        .filter_map(|name| {
            subscription::read(name, &root.entry("subscription", name), brokers, notices)
        })
        .collect()
}

/// Two subscriptions of one consumer id suppress each other's messages: right where they feed one
/// application, and a silent loss where they do not.
fn check_consumer_ids(root: &Section<'_>, subscriptions: &[SubscriptionConfig]) {
    let shared = root.list("shared_consumer_ids").unwrap_or_default();
    for (at, second) in subscriptions.iter().enumerate() {
        let SubscriptionSettings { name, consumer_id, .. } = &second.settings;
        let other = subscriptions[..at].iter().find(|first| {
            first.settings.consumer_id == *consumer_id && first.callback.url != second.callback.url
        });
        let Some(first) = other else { continue };
        if shared.iter().any(|id| id == consumer_id.as_str()) {
            continue;
        }
        root.entry("subscription", name).problem(
            "consumer_id",
            Fault::new(
                format!(
                    "{consumer_id:?} is the consumer id of subscription.{} too, which calls \
                     another application: each message would reach only one of them",
                    first.settings.name
                ),
                format!(
                    "give each its own, or, if that is meant, set shared_consumer_ids = [{:?}]",
                    consumer_id.as_str()
                ),
            ),
        );
    }
}

/// Claims are made in batches for all subscriptions, so there is one lease: the longest.
fn one_lease(subscriptions: &mut [SubscriptionConfig], notices: &mut Vec<String>) -> Duration {
    let longest = subscriptions.iter().map(|subscription| subscription.settings.lease).max();
    let lease = longest.unwrap_or(units::seconds(15));
    for subscription in subscriptions {
        if subscription.settings.lease != lease {
            notices.push(format!(
                "subscription.{}.lease: {} holds for the whole process, the longest of all leases",
                subscription.settings.name,
                units::show_duration(lease)
            ));
        }
        subscription.settings.lease = lease;
    }
    lease
}

fn check_lease(
    root: &Section<'_>,
    database: &DatabaseConfig,
    lease: Duration,
    subscriptions: &[SubscriptionConfig],
) {
    let consumes = !subscriptions.is_empty();
    let shown = units::show_duration(lease);
    let section = root.section("database");
    for (key, retention) in
        [("retention", database.retention), ("dead_retention", database.dead_retention)]
    {
        if consumes && retention < lease {
            section.problem(
                key,
                Fault::new(
                    format!(
                        "{} is below the lease, {shown}: a message could be forgotten while it is \
                         under way",
                        units::show_duration(retention)
                    ),
                    format!("set at least {shown}; days are usual"),
                ),
            );
        }
    }
    if consumes && lease < MYSQL_LEASE_MIN && matches!(database.url, DatabaseUrl::MySql(_)) {
        // The longest holds, so one of them is to be raised: whichever has it.
        let names = subscriptions.iter().map(|subscription| &*subscription.settings.name);
        let mut entries = names.map(|name| root.entry("subscription", name));
        let Some(entry) = entries.find(|entry| entry.duration("lease") == lease) else { return };
        entry.problem(
            "lease",
            Fault::new(
                format!("{shown} is too short for MySQL and MariaDB, which count lock timeouts in whole seconds"),
                format!("set at least {}", units::show_duration(MYSQL_LEASE_MIN)),
            ),
        );
    }
}
