//! The command line.
//!
//! Flags override the environment, which overrides the file; what they mean together is
//! decided by [`crate::config`]. Exit codes: 0, 78 for a configuration that is refused
//! (`EX_CONFIG`), 69 for a dependency that cannot be used (`EX_UNAVAILABLE`), 1 otherwise, 2 for a
//! command line that cannot be read.

mod actor;
mod arguments;
mod check;
mod client;
mod dead_letters;
mod drain;
mod explain;
mod health;
mod letters_told;
mod pinned;
mod print;
mod reach;
mod replaying;
mod subscriptions;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use inboxd_contract::ErrorCode;
use secrecy::SecretString;

use crate::admin::shown;
use crate::app::{self, AppError};
use crate::config::{self, Config, Flag, Flags, Given, Inputs};
use crate::telemetry::init_log;

/// The longest time that anything is waited for.
const DURATION_MAX: Duration = Duration::from_secs(60 * 60);
/// How long blocking work may go on behind the end of the runtime.
const RUNTIME_END_WITHIN: Duration = Duration::from_millis(500);

#[derive(Parser)]
#[command(name = "inboxd", version, about, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Consumes, deduplicates, forwards and acknowledges, until SIGTERM
    Run(RunArgs),
    /// Creates or updates the inbox's tables, and ends
    Migrate(MigrateArgs),
    /// Reads a configuration and tells all its problems; with --connect, tries what it names
    Check(check::CheckArgs),
    /// Tells what is known of one message
    Explain(explain::ExplainArgs),
    /// Lists, shows, replays and discards dead letters
    DeadLetters(dead_letters::DeadLettersArgs),
    /// Lists messages that wait in the inbox to be forwarded
    Parked(dead_letters::ParkedArgs),
    /// Tells how the running sidecar stands
    Status(subscriptions::StatusArgs),
    /// Lists, pauses, resumes and limits subscriptions of the running sidecar
    Subscriptions(subscriptions::SubscriptionsArgs),
    /// Tells the running sidecar to take nothing more, and waits until it has finished
    Drain(drain::DrainArgs),
    /// Asks the running sidecar whether it is ready, or lives
    Health(health::HealthArgs),
    /// Prints the JSON Schema of the configuration file, for editors
    ConfigSchema(print::SchemaArgs),
    /// Prints the completions of a shell
    Completions(print::CompletionsArgs),
    /// Shows on this machine, with nothing installed, that nothing is lost when it is killed
    #[cfg(all(feature = "kafka", feature = "sqlite"))]
    Demo(crate::demo::DemoOptions),
}

#[derive(Args, Default)]
struct RunArgs {
    #[command(flatten)]
    common: CommonArgs,
    /// Where to consume, as amqp://user:password@host:5672/vhost?queue=NAME or
    /// kafka://host:9092/TOPIC?group=NAME [env: INBOXD_SOURCE]
    #[arg(long, value_name = "URL")]
    source: Option<SecretString>,
    /// A file that holds the source [env: INBOXD_SOURCE_FILE]
    #[arg(long, value_name = "FILE")]
    source_file: Option<PathBuf>,
    /// What to call: http://…, https://… or unix:/path.sock:/route [env: INBOXD_CALLBACK]
    #[arg(long, value_name = "URL")]
    callback: Option<String>,
    /// The logical subscriber, half of the deduplication key; the group or queue where it is
    /// not set [env: INBOXD_CONSUMER_ID]
    #[arg(long, value_name = "ID")]
    consumer_id: Option<String>,
    /// Where probes and metrics are served, or off; 127.0.0.1:7461 where it is not set
    /// [env: INBOXD_ADMIN]
    #[arg(long, value_name = "ADDRESS")]
    admin: Option<String>,
}

/// Of commands that ask a running sidecar.
#[derive(Args, Default)]
struct AskArgs {
    #[command(flatten)]
    common: CommonArgs,
    /// Where the sidecar's admin API listens; 127.0.0.1:7461 where it is not set
    /// [env: INBOXD_ADMIN]
    #[arg(long, value_name = "ADDRESS")]
    admin: Option<String>,
}

#[derive(Args)]
struct MigrateArgs {
    #[command(flatten)]
    common: CommonArgs,
}

#[derive(Args, Default)]
struct CommonArgs {
    /// A configuration file in TOML or YAML [env: INBOXD_CONFIG]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The inbox: sqlite:FILE, postgres://… or mysql://…; sqlite:inbox.db where it is not set
    /// [env: INBOXD_DATABASE]
    #[arg(long, value_name = "URL")]
    database: Option<SecretString>,
    /// A file that holds the database's URL [env: INBOXD_DATABASE_FILE]
    #[arg(long, value_name = "FILE")]
    database_file: Option<PathBuf>,
}

/// The command line's grammar, as clap has it.
pub fn grammar() -> clap::Command {
    <Cli as clap::CommandFactory>::command()
}

/// Runs the command that the process was started with.
pub fn main() -> ExitCode {
    let cli = match arguments::read() {
        Ok(cli) => cli,
        Err(code) => return code,
    };
    match cli.command {
        Command::Run(arguments) => start(run_inputs(arguments), app::run),
        Command::Migrate(arguments) => start(migrate_inputs(arguments), app::migrate),
        Command::Check(arguments) => check::run(arguments),
        Command::Explain(mut arguments) => {
            let ask = std::mem::take(&mut arguments.ask);
            once(explain_inputs(ask), app::EXIT_CONFIG, |config| explain::run(config, arguments))
        }
        Command::DeadLetters(mut arguments) => {
            let ask = ask_inputs(arguments.command.ask());
            once(ask, app::EXIT_CONFIG, |config| dead_letters::run(config, arguments.command))
        }
        Command::Parked(mut arguments) => {
            let ask = ask_inputs(arguments.command.ask());
            once(ask, app::EXIT_CONFIG, |config| {
                dead_letters::run_parked(config, arguments.command)
            })
        }
        Command::Status(mut arguments) => {
            let ask = std::mem::take(&mut arguments.ask);
            once(ask_inputs(ask), app::EXIT_CONFIG, |config| {
                subscriptions::status(config, arguments)
            })
        }
        Command::Subscriptions(mut arguments) => {
            let ask = ask_inputs(arguments.command.ask());
            once(ask, app::EXIT_CONFIG, |config| subscriptions::run(config, arguments.command))
        }
        Command::Drain(mut arguments) => {
            let ask = std::mem::take(&mut arguments.ask);
            once(ask_inputs(ask), app::EXIT_CONFIG, |config| drain::run(config, arguments))
        }
        Command::Health(mut arguments) => {
            let ask = std::mem::take(&mut arguments.ask);
            // What probes make of other codes is their own business.
            once(ask_inputs(ask), 1, |config| health::run(config, arguments))
        }
        Command::ConfigSchema(arguments) => print::schema(&arguments),
        Command::Completions(arguments) => print::completions(&arguments, &mut grammar()),
        #[cfg(all(feature = "kafka", feature = "sqlite"))]
        Command::Demo(options) => demo(options),
    }
}

/// Loads the configuration and runs a command that ends by itself and keeps no log.
fn once<F>(inputs: Inputs, exit_config: u8, run: impl FnOnce(Config) -> F) -> ExitCode
where
    F: Future<Output = ExitCode>,
{
    match config::load(inputs) {
        Ok(config) => on_runtime(run(config)),
        Err(error) => exit_with(
            exit_config,
            &format!("{error}\n({}: docs/errors.md)", ErrorCode::ConfigRefused),
        ),
    }
}

/// A duration as the admin listener takes it too: more would be a typing error.
fn within_an_hour(text: &str) -> Result<Duration, String> {
    let duration = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    match duration <= DURATION_MAX {
        true => Ok(duration),
        false => Err("1h is the most".to_owned()),
    }
}

/// Says why a command could not do what it was asked.
fn exit_with(code: u8, reason: &str) -> ExitCode {
    let lines: Vec<_> = reason.lines().map(shown).collect();
    print::complain(&lines.join("\n"));
    ExitCode::from(code)
}

#[cfg(all(feature = "kafka", feature = "sqlite"))]
fn demo(options: crate::demo::DemoOptions) -> ExitCode {
    on_runtime(async {
        crate::demo::run(options).await.unwrap_or_else(|error| {
            print::complain(&format!("{error:#}"));
            ExitCode::FAILURE
        })
    })
}

/// Loads the configuration, sets up the log, runs, and names what went wrong.
fn start<F>(inputs: Inputs, run: impl FnOnce(Config) -> F) -> ExitCode
where
    F: Future<Output = Result<(), AppError>>,
{
    let config = match config::load(inputs) {
        Ok(config) => config,
        Err(error) => {
            print::complain(&format!("{error}\n({}: docs/errors.md)", ErrorCode::ConfigRefused));
            return ExitCode::from(app::EXIT_CONFIG);
        }
    };
    if let Err(error) = init_log(&config.log) {
        print::complain(&format!("{error}"));
        return ExitCode::FAILURE;
    }
    on_runtime(async {
        match run(config).await {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                let (code, exit_code) = (error.code(), error.exit_code());
                let error = anyhow::Error::new(error);
                tracing::error!(%code, exit_code, "{error:#}");
                ExitCode::from(exit_code)
            }
        }
    })
}

fn on_runtime(work: impl Future<Output = ExitCode>) -> ExitCode {
    match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => {
            let code = runtime.block_on(work);
            runtime.shutdown_timeout(RUNTIME_END_WITHIN);
            code
        }
        Err(error) => {
            print::complain(&format!("the runtime cannot start: {error}"));
            ExitCode::FAILURE
        }
    }
}

fn run_inputs(arguments: RunArgs) -> Inputs {
    let mut flags = Flags::default();
    flags.source = flags.secret([
        Given {
            value: (arguments.source, "--source"),
            file: (arguments.source_file, "--source-file"),
        },
        Given {
            value: (variable("INBOXD_SOURCE").map(Into::into), "INBOXD_SOURCE"),
            file: (variable("INBOXD_SOURCE_FILE").map(Into::into), "INBOXD_SOURCE_FILE"),
        },
    ]);
    flags.callback = either(arguments.callback, "--callback", "INBOXD_CALLBACK");
    flags.consumer_id = either(arguments.consumer_id, "--consumer-id", "INBOXD_CONSUMER_ID");
    flags.admin = either(arguments.admin, "--admin", "INBOXD_ADMIN");
    inputs(arguments.common, flags, true)
}

fn ask_inputs(arguments: AskArgs) -> Inputs {
    let flags =
        Flags { admin: either(arguments.admin, "--admin", "INBOXD_ADMIN"), ..Flags::default() };
    inputs(arguments.common, flags, false)
}

/// The consumer ids are wanted too. A sidecar may have its source from the environment and its
/// callback from a flag that is not known here.
fn explain_inputs(arguments: AskArgs) -> Inputs {
    if variable("INBOXD_CALLBACK").is_none() {
        return ask_inputs(arguments);
    }
    let AskArgs { common, admin } = arguments;
    let inputs = run_inputs(RunArgs { common, admin, ..RunArgs::default() });
    Inputs { needs_subscriptions: false, ..inputs }
}

fn migrate_inputs(arguments: MigrateArgs) -> Inputs {
    inputs(arguments.common, Flags::default(), false)
}

fn inputs(common: CommonArgs, mut flags: Flags, needs_subscriptions: bool) -> Inputs {
    flags.database = flags.secret([
        Given {
            value: (common.database, "--database"),
            file: (common.database_file, "--database-file"),
        },
        Given {
            value: (variable("INBOXD_DATABASE").map(Into::into), "INBOXD_DATABASE"),
            file: (variable("INBOXD_DATABASE_FILE").map(Into::into), "INBOXD_DATABASE_FILE"),
        },
    ]);
    Inputs {
        file: common.config.or_else(|| variable("INBOXD_CONFIG").map(PathBuf::from)),
        environment: std::env::vars_os().collect(),
        flags,
        needs_subscriptions,
    }
}

fn either(flag: Option<String>, name: &'static str, variable_name: &'static str) -> Flag<String> {
    flag.map(|value| (value, name))
        .or_else(|| variable(variable_name).map(|value| (value, variable_name)))
}

/// A variable of the environment; an empty one is none, as compose files write them.
fn variable(name: &str) -> Option<String> {
    std::env::var_os(name).map(OsString::into_string)?.ok().filter(|value| !value.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        grammar().debug_assert();
    }

    #[test]
    fn nothing_is_waited_for_longer_than_an_hour() {
        let timeouts =
            [(u64::MAX.to_string() + "s", false), ("3601s".into(), false), ("1h".into(), true)];
        for (timeout, is_taken) in timeouts {
            let drain = ["inboxd", "drain", "--timeout", &timeout];
            assert_eq!(Cli::try_parse_from(drain).is_ok(), is_taken, "{timeout}");
            let check = ["inboxd", "check", "--connect", "--timeout", &timeout];
            assert_eq!(Cli::try_parse_from(check).is_ok(), is_taken, "{timeout}");
        }
    }

    #[test]
    fn flags_name_themselves() {
        let cli = Cli::parse_from([
            "inboxd",
            "run",
            "--source",
            "amqp://h/?queue=a",
            "--callback",
            "http://h/",
            "--admin",
            "off",
        ]);
        let Command::Run(arguments) = cli.command else { panic!("run") };
        let flags = run_inputs(arguments).flags;
        assert_eq!(flags.source.unwrap().1, "--source");
        assert_eq!(flags.callback.unwrap(), ("http://h/".to_owned(), "--callback"));
        assert_eq!(flags.admin.unwrap().0, "off");
        assert!(flags.problems.is_empty());
    }

    #[test]
    fn a_value_and_its_file_exclude_each_other() {
        let cli = Cli::parse_from([
            "inboxd",
            "migrate",
            "--database",
            "sqlite:a",
            "--database-file",
            "b",
        ]);
        let Command::Migrate(arguments) = cli.command else { panic!("migrate") };
        let inputs = migrate_inputs(arguments);
        assert_eq!(inputs.flags.problems.len(), 1);
        assert!(!inputs.needs_subscriptions);
    }

    #[test]
    fn secrets_of_the_command_line_come_from_files() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "amqp://h/?queue=a\n").unwrap();
        let path = file.path().to_str().unwrap();
        let cli = Cli::parse_from(["inboxd", "run", "--source-file", path]);
        let Command::Run(arguments) = cli.command else { panic!("run") };
        let (source, name) = run_inputs(arguments).flags.source.unwrap();
        assert_eq!(name, "--source-file");
        assert_eq!(secrecy::ExposeSecret::expose_secret(&source), "amqp://h/?queue=a");
    }
}
