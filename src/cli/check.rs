//! `inboxd check`: a configuration before it is run.

use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, ValueEnum};
use inboxd_contract::{ErrorCode, Finding, Severity};
use serde_json::{Value, json};

use super::explain::escaped;
use super::print::print;
use super::{RunArgs, on_runtime, run_inputs, within_an_hour};
use crate::admin::shown;
use crate::app::{self, Checked};
use crate::config::{self, Config, ConfigError};

const TIMEOUT_MIN: Duration = Duration::from_millis(100);

#[derive(Args)]
#[command(after_help = "\
Without --connect nothing is connected to. With it, database, brokers and callbacks are tried at the \
same time: nothing is consumed, migrated or written, and a callback gets an OPTIONS request without \
a message.

Exit codes: 0 fine (also with warnings), 2 the command line cannot be read, 69 something cannot be \
used (--connect), 78 the configuration has problems.")]
pub(super) struct CheckArgs {
    /// Tries what the configuration names, too
    #[arg(long)]
    connect: bool,
    /// How long each thing is tried, such as 10s
    #[arg(long, value_name = "DURATION", default_value = "10s", requires = "connect",
          value_parser = enough_time)]
    timeout: Duration,
    /// For people, or as one JSON document
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
    #[command(flatten)]
    run: RunArgs,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    Text,
    Json,
}

/// Within less, nothing could answer.
fn enough_time(text: &str) -> Result<Duration, String> {
    let timeout = within_an_hour(text)?;
    match timeout < TIMEOUT_MIN {
        true => Err(format!("{TIMEOUT_MIN:?} is the least")),
        false => Ok(timeout),
    }
}

pub(super) fn run(arguments: CheckArgs) -> ExitCode {
    let CheckArgs { connect, timeout, format, run } = arguments;
    let config = match config::load(run_inputs(run)) {
        Ok(config) => config,
        Err(error) => {
            let text = match format {
                Format::Text => {
                    let lines: Vec<_> = error.to_string().lines().map(shown).collect();
                    format!(
                        "{}\n({}: docs/errors.md)\n",
                        lines.join("\n"),
                        ErrorCode::ConfigRefused
                    )
                }
                Format::Json => json_text(&json!({ "ok": false, "problems": problems(&error) })),
            };
            return print(&text, ExitCode::from(app::EXIT_CONFIG));
        }
    };
    let refused = app::check_start(&config);
    if !refused.is_empty() {
        return tell(format, &config, &refused, ExitCode::from(app::EXIT_CONFIG));
    }
    if !connect {
        return tell(format, &config, &[], ExitCode::SUCCESS);
    }
    on_runtime(async {
        let checked = app::check(&config, timeout).await;
        let code = if checked.iter().any(Checked::is_refused) {
            ExitCode::from(app::EXIT_CONFIG)
        } else if checked.iter().any(Checked::has_problem) {
            ExitCode::from(app::EXIT_UNAVAILABLE)
        } else {
            ExitCode::SUCCESS
        };
        tell(format, &config, &checked, code)
    })
}

fn tell(format: Format, config: &Config, checked: &[Checked], code: ExitCode) -> ExitCode {
    let text = match format {
        Format::Text => for_people(config, checked),
        Format::Json => json_text(&as_json(config, checked)),
    };
    print(&text, code)
}

fn for_people(config: &Config, checked: &[Checked]) -> String {
    let names: Vec<_> = config.subscriptions.iter().map(|one| &*one.settings.name).collect();
    let verdict = match checked.iter().any(Checked::has_problem) {
        true => "the configuration can be read",
        false => "the configuration has no problem",
    };
    let mut text = match names.len() {
        1 => format!("{verdict}: subscription {}\n", names[0]),
        count => format!("{verdict}: {count} subscriptions, {}\n", names.join(", ")),
    };
    for notice in &config.notices {
        text.push_str(&format!("note: {}\n", shown(notice)));
    }
    for Checked { part, findings } in checked {
        text.push_str(&format!("\n{}\n", shown(part)));
        for finding in findings {
            let Finding { subject, what, remedy, .. } = finding;
            let label = label(finding.severity);
            text.push_str(&format!("  {label:<8} {}: {}\n", shown(subject), shown(what)));
            if !remedy.is_empty() {
                text.push_str(&format!("           -> {}\n", shown(remedy)));
            }
        }
    }
    text
}

fn label(severity: Severity) -> &'static str {
    match severity {
        Severity::Info => "ok",
        Severity::Warning => "warning",
        Severity::Problem => "problem",
    }
}

fn as_json(config: &Config, checked: &[Checked]) -> Value {
    let parts: Vec<_> = checked
        .iter()
        .map(|Checked { part, findings }| {
            let findings: Vec<_> = findings
                .iter()
                .map(|Finding { severity, subject, what, remedy }| {
                    let severity = label(*severity);
                    json!({ "severity": severity, "subject": subject, "what": what, "remedy": remedy })
                })
                .collect();
            json!({ "part": part, "findings": findings })
        })
        .collect();
    json!({
        "ok": !checked.iter().any(Checked::has_problem),
        "problems": [],
        "notices": config.notices,
        "parts": parts,
    })
}

fn problems(error: &ConfigError) -> Vec<Value> {
    let ConfigError(problems) = error;
    problems
        .iter()
        .map(|problem| {
            json!({
                "place": problem.place.to_string(),
                "key": problem.key,
                "what": problem.what,
                "remedy": problem.remedy,
            })
        })
        .collect()
}

fn json_text(value: &Value) -> String {
    format!("{}\n", escaped(&serde_json::to_string_pretty(value).unwrap_or_default()))
}
