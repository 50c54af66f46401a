//! `inboxd explain`: what is known of one message.

use std::os::unix::ffi::OsStrExt as _;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use clap::builder::{OsStringValueParser, TypedValueParser as _};
use inboxd_contract::encode_percent;
use reqwest::Method;

use super::client::{AskError, Client};
use super::print::print;
use super::{AskArgs, exit_with};
use crate::admin::{ExplainError, MessageReport, ReadAs, Which, shown};
use crate::app;
use crate::config::Config;

/// The sidecar gives its database 10 s for each of its consumer ids.
const ANSWER_WITHIN: Duration = Duration::from_secs(60);
const EXIT_UNKNOWN: u8 = 1;

#[derive(Args)]
#[command(after_help = "\
The id is taken as the publisher set it, or percent-encoded as the application has it in \
Inbox-Message-Id: both are looked for, and what was found says which. The running sidecar is asked \
first, at admin.listen; where none answers, the database itself, which is neither migrated nor \
written to.

Exit codes: 0 known, 1 not known, 2 the command line cannot be read, 69 neither the sidecar nor \
the database can be asked, 78 the configuration is refused.")]
pub(super) struct ExplainArgs {
    /// The message id
    #[arg(value_name = "MESSAGE_ID", value_parser = OsStringValueParser::new().try_map(not_empty))]
    message_id: std::ffi::OsString,
    /// Of this consumer id alone, whether the configuration names it or not
    #[arg(long, value_name = "ID", conflicts_with = "subscription")]
    consumer_id: Option<String>,
    /// Of this subscription's consumer id alone
    #[arg(long, value_name = "NAME")]
    subscription: Option<String>,
    /// Prints the report as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    pub(super) ask: AskArgs,
}

/// Where a report comes from.
enum Told {
    BySidecar(MessageReport),
    ByDatabase { report: MessageReport, no_sidecar: String },
}

fn not_empty(id: std::ffi::OsString) -> Result<std::ffi::OsString, &'static str> {
    if id.is_empty() { Err("the id is empty") } else { Ok(id) }
}

pub(super) async fn run(config: Config, arguments: ExplainArgs) -> ExitCode {
    let which = match (&arguments.consumer_id, &arguments.subscription) {
        (Some(id), _) => Which::ConsumerId(id.clone()),
        (None, Some(name)) => Which::Subscription(name.clone()),
        (None, None) => Which::All,
    };
    let told = match tell(&config, arguments.message_id.as_bytes(), &which).await {
        Ok(told) => told,
        Err(reason) => return exit_with(app::EXIT_UNAVAILABLE, &reason),
    };
    let (report, no_sidecar) = match &told {
        Told::BySidecar(report) => (report, None),
        Told::ByDatabase { report, no_sidecar } => (report, Some(no_sidecar.as_str())),
    };
    let text = match arguments.json {
        true => format!("{}\n", escaped(&serde_json::to_string_pretty(report).unwrap_or_default())),
        false => for_people(report, no_sidecar),
    };
    let code = match report.is_known() {
        true => ExitCode::SUCCESS,
        false => ExitCode::from(EXIT_UNKNOWN),
    };
    print(&text, code)
}

async fn tell(config: &Config, asked: &[u8], which: &Which) -> Result<Told, String> {
    let client = Client::of(&config.admin, ANSWER_WITHIN).map_err(|error| error.to_string())?;
    let no_sidecar = match client {
        Some(client) => match ask(&client, asked, which).await {
            Ok(report) => return Ok(Told::BySidecar(report)),
            Err(AskError::Nobody(base)) => format!("no sidecar answers at {base}"),
            Err(AskError::Failed(reason)) => return Err(reason),
        },
        None => "admin.listen is off".to_owned(),
    };
    match app::explain_from_database(config, asked, which).await {
        Ok(report) => Ok(Told::ByDatabase { report, no_sidecar }),
        Err(ExplainError::Asked(reason)) => Err(match config.admin.listen {
            Some(_) => format!(
                "{no_sidecar}: start it, or give its configuration with --config, or its address \
                 with --admin. Nor can the database alone be asked: {reason}"
            ),
            None => format!("{no_sidecar}, and the database alone cannot be asked: {reason}"),
        }),
        Err(ExplainError::Inbox(reason)) => {
            Err(format!("{no_sidecar}, and the database cannot be read: {reason}"))
        }
    }
}

async fn ask(client: &Client, asked: &[u8], which: &Which) -> Result<MessageReport, AskError> {
    let query = match which {
        Which::All => String::new(),
        Which::ConsumerId(id) => format!("&consumer_id={}", encode_percent(id.as_bytes())),
        Which::Subscription(name) => {
            format!("&subscription={}", encode_percent(name.as_bytes()))
        }
    };
    // Not in the path: there `.` and `..` would be folded away.
    let path = format!("/v1/messages?id={}{query}", encode_percent(asked));
    let answer = client.ask(Method::GET, &path).await?;
    let report = match answer.status {
        200 => Some(answer.body.clone()),
        404 => answer.body.get("report").cloned(),
        _ => None,
    };
    report
        .and_then(|report| serde_json::from_value(report).ok())
        .ok_or_else(|| AskError::Failed(format!("{}: {}", client.base(), answer.detail())))
}

/// The report in lines; `no_sidecar` says why it comes from the database alone.
fn for_people(report: &MessageReport, no_sidecar: Option<&str>) -> String {
    let mut text = format!("message {}\n", shown(&report.asked));
    for consumer in &report.consumers {
        let by = match consumer.subscriptions.as_slice() {
            [] => "no subscription of this configuration".to_owned(),
            [one] => format!("subscription {one}"),
            several => format!("subscriptions {}", several.join(", ")),
        };
        text.push_str(&format!(
            "\nconsumer id {} ({})\n",
            shown(&consumer.consumer_id),
            shown(&by)
        ));
        let read_as = match consumer.read_as {
            ReadAs::Given => None,
            ReadAs::Decoded => Some("read percent-decoded"),
            ReadAs::Stored => Some("read as the inbox stores it"),
            ReadAs::DecodedStored => Some("read percent-decoded, as the inbox stores it"),
        };
        if let Some(read_as) = read_as {
            text.push_str(&format!("  {read_as}: {}\n", shown(&consumer.message_id)));
        } else if consumer.message_id != report.asked {
            text.push_str(&format!("  the inbox stores it as {}\n", shown(&consumer.message_id)));
        }
        for sentence in &consumer.words {
            text.push_str(&format!("  - {}\n", shown(sentence)));
        }
    }
    if let Some(reason) = no_sidecar {
        text.push_str(&format!(
            "\n{reason}: this is what the database has; what a process is doing with the message \
             right now is not known\n"
        ));
    }
    text
}

/// JSON whose strings carry nothing to a terminal: what serde leaves as it is, as escapes.
pub(super) fn escaped(json: &str) -> String {
    let mut escaped = String::with_capacity(json.len());
    for character in json.chars() {
        match character {
            '\n' => escaped.push('\n'),
            _ if shown(character.encode_utf8(&mut [0; 4])).len() != character.len_utf8() => {
                for unit in character.encode_utf16(&mut [0; 2]) {
                    escaped.push_str(&format!("\\u{unit:04x}"));
                }
            }
            _ => escaped.push(character),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_keeps_its_value_and_has_nothing_for_a_terminal() {
        let text = "a\u{9b}31m\u{202e}\u{1b}[0m grün\u{e0041}";
        let json = serde_json::to_string(text).unwrap();
        let escaped = escaped(&json);
        assert!(!escaped.contains(['\u{9b}', '\u{202e}', '\u{1b}', '\u{e0041}']), "{escaped}");
        assert_eq!(serde_json::from_str::<String>(&escaped).unwrap(), text);
    }
}
