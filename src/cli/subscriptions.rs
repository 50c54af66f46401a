//! `inboxd status` and `inboxd subscriptions`: how a running sidecar stands, and what of it can be
//! changed while it runs.

use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Subcommand};
use inboxd_contract::encode_percent;
use reqwest::Method;
use serde_json::{Map, Value};

use super::client::Client;
use super::letters_told::json;
use super::print::print;
use super::reach::read;
use super::{AskArgs, actor, exit_with};
use crate::admin::{Status, SubscriptionStatus, shown, span};
use crate::app;
use crate::config::Config;

const ANSWER_WITHIN: Duration = Duration::from_secs(10);
const AFTER_HELP: &str = "\
A pause and limits hold for the process that is asked, until it is started again: each replica has \
its own.

Exit codes: 0 done, 2 the command line cannot be read, 69 no sidecar can be asked or there is no \
such subscription, 78 the configuration is refused.";

#[derive(Args)]
#[command(after_help = "\
Exit codes: 0 told, 2 the command line cannot be read, 69 no sidecar can be asked, 78 the \
configuration is refused.")]
pub(super) struct StatusArgs {
    /// Prints JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    pub(super) ask: AskArgs,
}

#[derive(Args)]
pub(super) struct SubscriptionsArgs {
    #[command(subcommand)]
    pub(super) command: SubscriptionsCommand,
}

#[derive(Subcommand)]
pub(super) enum SubscriptionsCommand {
    /// Lists subscriptions and how they stand
    List(SubscriptionsListArgs),
    /// Takes and sends nothing of one, until it is resumed
    Pause(ChangeArgs),
    /// Ends a pause
    Resume(ChangeArgs),
    /// Changes how many POSTs there are at once, and in a second
    Limits(LimitsArgs),
}

#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub(super) struct SubscriptionsListArgs {
    /// Prints JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    ask: AskArgs,
}

#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub(super) struct ChangeArgs {
    /// The subscription
    #[arg(value_name = "NAME")]
    name: String,
    /// Who does it, for the log; the user and host where it is not given
    #[arg(long, value_name = "WHO")]
    actor: Option<String>,
    /// Prints JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    ask: AskArgs,
}

#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub(super) struct LimitsArgs {
    #[command(flatten)]
    change: ChangeArgs,
    /// POSTs at once
    #[arg(
        long, value_name = "POSTS", required_unless_present = "rate",
        value_parser = clap::value_parser!(u32).range(1..=4_096)
    )]
    concurrency: Option<u32>,
    /// POSTs begun in a second; none: as many as there are
    #[arg(long, value_name = "PER_SECOND", value_parser = rate)]
    rate: Option<Rate>,
}

/// A rate, or none.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Rate(Option<f64>);

fn rate(text: &str) -> Result<Rate, String> {
    if text == "none" {
        return Ok(Rate(None));
    }
    let rate = text.parse().ok().filter(|rate| (0.001..=1_000_000.0).contains(rate));
    rate.map(|rate| Rate(Some(rate)))
        .ok_or_else(|| "it is a number from 0.001 to 1000000, or none".to_owned())
}

impl SubscriptionsCommand {
    /// Where to ask, taken out.
    pub(super) fn ask(&mut self) -> AskArgs {
        std::mem::take(match self {
            Self::List(arguments) => &mut arguments.ask,
            Self::Pause(arguments) | Self::Resume(arguments) => &mut arguments.ask,
            Self::Limits(arguments) => &mut arguments.change.ask,
        })
    }
}

pub(super) async fn status(config: Config, arguments: StatusArgs) -> ExitCode {
    match ask_status(&config).await {
        Ok(status) => {
            let text = if arguments.json { json(&status) } else { for_people(&status) };
            print(&text, ExitCode::SUCCESS)
        }
        Err(reason) => exit_with(app::EXIT_UNAVAILABLE, &reason),
    }
}

pub(super) async fn run(config: Config, command: SubscriptionsCommand) -> ExitCode {
    let text = match command {
        SubscriptionsCommand::List(arguments) => {
            let told = |status: Status| match arguments.json {
                true => json(&status.subscriptions),
                false => {
                    let lines = status.subscriptions.iter();
                    lines.map(|(name, status)| subscription(name, status)).collect()
                }
            };
            ask_status(&config).await.map(told)
        }
        SubscriptionsCommand::Pause(arguments) => {
            change(&config, &arguments, Method::POST, "pause", None).await
        }
        SubscriptionsCommand::Resume(arguments) => {
            change(&config, &arguments, Method::POST, "resume", None).await
        }
        SubscriptionsCommand::Limits(arguments) => {
            let mut body = Map::new();
            if let Some(concurrency) = arguments.concurrency {
                body.insert("concurrency".into(), concurrency.into());
            }
            if let Some(Rate(rate)) = arguments.rate {
                body.insert("rate".into(), rate.into());
            }
            let body = Value::Object(body);
            change(&config, &arguments.change, Method::PATCH, "limits", Some(&body)).await
        }
    };
    match text {
        Ok(text) => print(&text, ExitCode::SUCCESS),
        Err(reason) => exit_with(app::EXIT_UNAVAILABLE, &reason),
    }
}

fn client(config: &Config) -> Result<Client, String> {
    Client::of(&config.admin, ANSWER_WITHIN)
        .map_err(|error| error.to_string())?
        .ok_or_else(|| "admin.listen is off: no sidecar can be asked".to_owned())
}

async fn ask_status(config: &Config) -> Result<Status, String> {
    let client = client(config)?;
    let answer = client.ask(Method::GET, "/v1/status").await.map_err(|error| error.to_string())?;
    read(&client, answer)
}

async fn change(
    config: &Config,
    arguments: &ChangeArgs,
    method: Method,
    what: &str,
    body: Option<&Value>,
) -> Result<String, String> {
    let client = client(config)?;
    let actor = actor::of(arguments.actor.as_deref());
    let name = encode_percent(arguments.name.as_bytes());
    let path = format!("/v1/subscriptions/{name}/{what}");
    let answer = client.change(method, &path, &actor, body).await;
    let status: SubscriptionStatus = read(&client, answer.map_err(|error| error.to_string())?)?;
    Ok(if arguments.json { json(&status) } else { subscription(&arguments.name, &status) })
}

fn for_people(status: &Status) -> String {
    let ready = if status.ready { "ready" } else { "not ready" };
    let uptime = span(Duration::from_secs(status.uptime_s));
    let mut text =
        format!("inboxd {}, {}, {ready}, up {uptime}\n", status.version, shown(&status.phase));
    let database = &status.database;
    text.push_str(&match (&database.description, database.state.ready) {
        (Some(description), true) => format!("database: {}\n", shown(description)),
        _ => format!("database: not ready: {}\n", shown(&database.state.reason)),
    });
    for (name, status) in &status.subscriptions {
        text.push_str(&subscription(name, status));
    }
    text
}

fn subscription(name: &str, status: &SubscriptionStatus) -> String {
    let ready = if status.ready { "ready" } else { "not ready" };
    let mut text = format!(
        "subscription {} (consumer id {}): {}, {ready}, {} in flight\n",
        shown(name),
        shown(&status.consumer_id),
        shown(&status.phase),
        status.in_flight
    );
    for reason in &status.reasons {
        text.push_str(&format!("    {}\n", shown(reason)));
    }
    if let Some(callback) = &status.callback {
        let since = span(Duration::from_millis(callback.since_ms));
        let rate = callback.rate.map_or("no limit".to_owned(), |rate| format!("{rate}"));
        let why = match callback.why.is_empty() {
            true => String::new(),
            false => format!(": {}", shown(&callback.why)),
        };
        text.push_str(&format!(
            "    callback {} for {since}{why}; {} of {} POSTs at once (at most {}), {} wait; POSTs \
             in a second: {rate}\n",
            shown(&callback.state),
            callback.in_use,
            callback.limit,
            callback.concurrency,
            callback.waiting,
        ));
    }
    text
}
