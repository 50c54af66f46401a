//! `inboxd dead-letters` and `inboxd parked`: what lies in the inbox and why, forwarded again or
//! given up.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use clap::builder::PossibleValuesParser;
use clap::{Args, Subcommand};
use inboxd_contract::ParkedState;

use super::letters_told as told;
use super::print::print;
use super::reach::{Purpose, Reach};
use super::replaying::{discard_all, replay_all};
use super::{AskArgs, actor, exit_with};
use crate::admin::{
    DiscardAsk, LetterFilter, ParkedAsk, ROWS_MAX, ReplayAsk, Selection, all_reasons, dead_reasons,
    parse_time,
};
use crate::app;
use crate::config::Config;

const AFTER_HELP: &str = "\
The running sidecar is asked, at admin.listen; where none answers, the database itself. A SQLite \
file that a sidecar has open can be looked into, and is changed by that sidecar alone.

Exit codes: 0 done, 1 some rows were not done or there is no such row, 2 the command line cannot be \
read, 69 neither the sidecar nor the database can be used, 78 the configuration is refused.";

#[derive(Args)]
pub(super) struct DeadLettersArgs {
    #[command(subcommand)]
    pub(super) command: DeadLettersCommand,
}

#[derive(Subcommand)]
pub(super) enum DeadLettersCommand {
    /// Lists dead letters, oldest place first
    List(ListArgs),
    /// Shows one dead letter, whole
    Show(ShowArgs),
    /// Has dead letters forwarded again
    Replay(ReplayArgs),
    /// Gives dead letters up: the rows stay for a while, the bodies go
    Discard(DiscardArgs),
    /// Tells who did what to dead letters, newest first
    Audit(AuditArgs),
}

#[derive(Args)]
pub(super) struct ParkedArgs {
    #[command(subcommand)]
    pub(super) command: ParkedCommand,
}

#[derive(Subcommand)]
pub(super) enum ParkedCommand {
    /// Lists parked messages, oldest place first
    List(ParkedListArgs),
}

/// Which rows.
#[derive(Args, Default, Clone)]
pub(super) struct FilterArgs {
    /// Of this message: its id as the publisher set it, or percent-encoded
    #[arg(long, value_name = "MESSAGE_ID")]
    id: Option<OsString>,
    /// With this text in the last error
    #[arg(long, value_name = "TEXT")]
    error: Option<String>,
    /// In their state since then: 2026-01-31T22:00:00Z, or 2h ago
    #[arg(long, value_name = "TIME", value_parser = point_in_time)]
    since: Option<SystemTime>,
    /// In their state since before then
    #[arg(long, value_name = "TIME", value_parser = point_in_time)]
    until: Option<SystemTime>,
    /// Of this subscription
    #[arg(long, value_name = "NAME")]
    subscription: Option<String>,
    /// Of this consumer id
    #[arg(long, value_name = "ID")]
    consumer_id: Option<String>,
}

#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub(super) struct ListArgs {
    #[command(flatten)]
    filter: FilterArgs,
    /// For this reason
    #[arg(long, value_parser = PossibleValuesParser::new(dead_reasons()))]
    reason: Option<String>,
    /// Discarded ones too
    #[arg(long)]
    discarded: bool,
    #[command(flatten)]
    page: PageArgs,
}

#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub(super) struct ParkedListArgs {
    #[command(flatten)]
    filter: FilterArgs,
    /// For this reason
    #[arg(long, value_parser = PossibleValuesParser::new(all_reasons()))]
    reason: Option<String>,
    /// In this state
    #[arg(long, default_value = "due", value_parser = ["due", "dead", "discarded", "any"])]
    state: String,
    #[command(flatten)]
    page: PageArgs,
}

#[derive(Args)]
pub(super) struct PageArgs {
    /// Those behind this seq, which the page before ended with
    #[arg(long, value_name = "SEQ", value_parser = clap::value_parser!(i64).range(0..))]
    after: Option<i64>,
    /// So many at most
    #[arg(
        long, value_name = "ROWS", default_value_t = 100,
        value_parser = clap::value_parser!(u32).range(1..=i64::from(ROWS_MAX))
    )]
    limit: u32,
    /// Prints JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    ask: AskArgs,
}

#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub(super) struct ShowArgs {
    /// Which, as lists show it
    #[arg(value_name = "SEQ", value_parser = clap::value_parser!(i64).range(1..))]
    seq: i64,
    /// Writes the body alone, all of it, to this file; - is standard output
    #[arg(long, value_name = "FILE", conflicts_with = "json")]
    body: Option<PathBuf>,
    /// Prints JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    ask: AskArgs,
}

/// Which dead letters something is done to.
#[derive(Args)]
pub(super) struct SelectArgs {
    /// Which, as lists show them; without any, those that the options below find
    #[arg(value_name = "SEQ", value_parser = clap::value_parser!(i64).range(1..))]
    seqs: Vec<i64>,
    #[command(flatten)]
    filter: FilterArgs,
    /// For this reason
    #[arg(long, value_parser = PossibleValuesParser::new(dead_reasons()))]
    reason: Option<String>,
    /// All dead letters
    #[arg(long)]
    all: bool,
    /// Changes nothing; tells what would be done
    #[arg(long)]
    dry_run: bool,
    /// Prints JSON
    #[arg(long)]
    json: bool,
    /// Who does it, for the audit; the user and host where it is not given
    #[arg(long, value_name = "NAME")]
    actor: Option<String>,
    #[command(flatten)]
    ask: AskArgs,
}

#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub(super) struct ReplayArgs {
    #[command(flatten)]
    select: SelectArgs,
    /// So many in a second at most: their times are spread in the database, so that the command
    /// ends at once
    #[arg(long, value_name = "PER_SECOND", value_parser = per_second)]
    rate: Option<f64>,
    /// Forwards messages that are processed too, under ids of their own; the audit names it
    #[arg(long)]
    allow_processed: bool,
}

#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub(super) struct DiscardArgs {
    #[command(flatten)]
    select: SelectArgs,
    /// Yes, with --all: everything
    #[arg(long)]
    yes: bool,
}

#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub(super) struct AuditArgs {
    /// Those older than this entry, which the page before ended with
    #[arg(long, value_name = "ENTRY", value_parser = clap::value_parser!(i64).range(1..))]
    before: Option<i64>,
    /// So many at most
    #[arg(
        long, value_name = "ENTRIES", default_value_t = 100,
        value_parser = clap::value_parser!(u32).range(1..=i64::from(ROWS_MAX))
    )]
    limit: u32,
    /// Prints JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    ask: AskArgs,
}

impl DeadLettersCommand {
    /// Where to ask, taken out.
    pub(super) fn ask(&mut self) -> AskArgs {
        std::mem::take(match self {
            Self::List(arguments) => &mut arguments.page.ask,
            Self::Show(arguments) => &mut arguments.ask,
            Self::Replay(arguments) => &mut arguments.select.ask,
            Self::Discard(arguments) => &mut arguments.select.ask,
            Self::Audit(arguments) => &mut arguments.ask,
        })
    }
}

impl ParkedCommand {
    /// Where to ask, taken out.
    pub(super) fn ask(&mut self) -> AskArgs {
        let Self::List(arguments) = self;
        std::mem::take(&mut arguments.page.ask)
    }
}

pub(super) async fn run(config: Config, command: DeadLettersCommand) -> ExitCode {
    let ended = match command {
        DeadLettersCommand::List(arguments) => {
            let states = match arguments.discarded {
                true => vec![ParkedState::Dead, ParkedState::Discarded],
                false => vec![ParkedState::Dead],
            };
            let filter = filter(arguments.filter, arguments.reason);
            list(&config, "/v1/dead-letters", filter, states, &arguments.page).await
        }
        DeadLettersCommand::Show(arguments) => show(&config, &arguments).await,
        DeadLettersCommand::Replay(arguments) => replay(&config, arguments).await,
        DeadLettersCommand::Discard(arguments) => discard(&config, arguments).await,
        DeadLettersCommand::Audit(arguments) => audit(&config, &arguments).await,
    };
    ended.unwrap_or_else(|reason| exit_with(app::EXIT_UNAVAILABLE, &reason))
}

pub(super) async fn run_parked(config: Config, command: ParkedCommand) -> ExitCode {
    let ParkedCommand::List(arguments) = command;
    let states = arguments.state.parse().map(|state| vec![state]).unwrap_or_default();
    let filter = filter(arguments.filter, arguments.reason);
    let ended = list(&config, "/v1/parked", filter, states, &arguments.page).await;
    ended.unwrap_or_else(|reason| exit_with(app::EXIT_UNAVAILABLE, &reason))
}

async fn list(
    config: &Config,
    path: &str,
    filter: LetterFilter,
    states: Vec<ParkedState>,
    page: &PageArgs,
) -> Result<ExitCode, String> {
    let reach = Reach::of(config, Purpose::Look).await?;
    let ask = ParkedAsk { filter, states, after: page.after, limit: page.limit, count: true };
    let answer = reach.list(path, &ask).await;
    let text = answer.map(|answer| match page.json {
        true => told::json(&answer),
        false => told::page(&answer, reach.told()),
    });
    reach.close().await;
    Ok(print(&text?, ExitCode::SUCCESS))
}

async fn show(config: &Config, arguments: &ShowArgs) -> Result<ExitCode, String> {
    let reach = Reach::of(config, Purpose::Look).await?;
    let seq = arguments.seq;
    if let Some(file) = &arguments.body {
        let body = reach.body(seq).await;
        reach.close().await;
        return match body? {
            Some(body) => told::write(file, &body).map(|()| ExitCode::SUCCESS),
            None => Ok(exit_with(1, &format!("there is no row {seq}, or it keeps no body"))),
        };
    }
    let letter = reach.show(seq).await;
    let from = reach.told();
    reach.close().await;
    let Some(letter) = letter? else {
        return Ok(exit_with(1, &format!("there is no row {seq} (any more)")));
    };
    let text = match arguments.json {
        true => told::json(&letter),
        false => told::letter(&letter, from),
    };
    Ok(print(&text, ExitCode::SUCCESS))
}

async fn replay(config: &Config, arguments: ReplayArgs) -> Result<ExitCode, String> {
    let select = arguments.select;
    let (dry_run, json, actor) = (select.dry_run, select.json, actor::of(select.actor.as_deref()));
    let selection = match selection(select) {
        Ok(selection) => selection,
        Err(reason) => return Ok(exit_with(2, reason)),
    };
    let purpose = if dry_run { Purpose::Look } else { Purpose::Change };
    let reach = Reach::of(config, purpose).await?;
    let ask = ReplayAsk {
        selection,
        dry_run,
        rate: arguments.rate,
        delay: Duration::ZERO,
        allow_processed: arguments.allow_processed,
    };
    let done = replay_all(&reach, ask, &actor).await;
    let from = reach.told();
    reach.close().await;
    let answer = done?;
    let all_due = answer.rows.len() == answer.counts.due as usize;
    let text = if json { told::json(&answer) } else { told::replayed(&answer, from) };
    Ok(print(&text, told::code(all_due)))
}

async fn discard(config: &Config, arguments: DiscardArgs) -> Result<ExitCode, String> {
    let select = arguments.select;
    let (dry_run, json, actor) = (select.dry_run, select.json, actor::of(select.actor.as_deref()));
    if select.all && !dry_run && !arguments.yes {
        let reason = "all dead letters would be given up, their bodies for good: say --yes, or \
                      look first with --dry-run";
        return Ok(exit_with(2, reason));
    }
    let selection = match selection(select) {
        Ok(selection) => selection,
        Err(reason) => return Ok(exit_with(2, reason)),
    };
    let purpose = if dry_run { Purpose::Look } else { Purpose::Change };
    let reach = Reach::of(config, purpose).await?;
    let done = discard_all(&reach, DiscardAsk { selection, dry_run }, &actor).await;
    let from = reach.told();
    reach.close().await;
    let answer = done?;
    let all_gone = answer.rows.len() == answer.counts.discarded as usize;
    let text = if json { told::json(&answer) } else { told::discarded(&answer, from) };
    Ok(print(&text, told::code(all_gone)))
}

async fn audit(config: &Config, arguments: &AuditArgs) -> Result<ExitCode, String> {
    let reach = Reach::of(config, Purpose::Look).await?;
    let page = reach.audit(arguments.before, arguments.limit).await;
    let from = reach.told();
    reach.close().await;
    let page = page?;
    let text = if arguments.json { told::json(&page) } else { told::audit(&page, from) };
    Ok(print(&text, ExitCode::SUCCESS))
}

fn filter(arguments: FilterArgs, reason: Option<String>) -> LetterFilter {
    LetterFilter {
        consumer_id: arguments.consumer_id,
        subscription: arguments.subscription,
        id: arguments.id.map(|id| id.as_bytes().to_vec()),
        reason,
        since: arguments.since,
        until: arguments.until,
        error: arguments.error,
    }
}

fn selection(arguments: SelectArgs) -> Result<Selection, &'static str> {
    let filter = filter(arguments.filter, arguments.reason);
    match (arguments.seqs.is_empty(), filter.is_empty(), arguments.all) {
        (false, true, false) => Ok(Selection::Seqs(arguments.seqs)),
        (false, _, _) => Err("rows that are named need no filter beside them"),
        (true, true, false) => Err("say which: by seq, by a filter, or --all"),
        (true, false, true) => Err("--all goes without a filter"),
        (true, _, _) => Ok(Selection::Filter { filter, after: None, limit: ROWS_MAX }),
    }
}

/// A point in time, or how long ago.
fn point_in_time(text: &str) -> Result<SystemTime, String> {
    let help = "give a time such as 2026-01-31T22:00:00Z, or 2h ago";
    match text.strip_suffix("ago") {
        Some(ago) => {
            let ago = humantime::parse_duration(ago.trim()).map_err(|_| help.to_owned())?;
            SystemTime::now().checked_sub(ago).ok_or_else(|| help.to_owned())
        }
        None => parse_time(text).ok_or_else(|| help.to_owned()),
    }
}

fn per_second(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|rate| (0.001..=1_000_000.0).contains(rate))
        .ok_or_else(|| "it is a number of messages in a second, from 0.001 to 1000000".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_a_point_or_how_long_ago() {
        let ago = |text| {
            let point = point_in_time(text).unwrap();
            SystemTime::now().duration_since(point).unwrap()
        };
        assert!((7_200..7_260).contains(&ago("2h ago").as_secs()));
        assert!((90..150).contains(&ago("1m 30s ago").as_secs()));
        assert!(point_in_time("2026-01-31T22:00:00+01:00").is_ok());
        for bad in ["2h", "yesterday", "ago", "2026-01-31"] {
            assert!(point_in_time(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_rate_is_a_positive_number() {
        assert_eq!(per_second("2.5"), Ok(2.5));
        for bad in ["0", "-1", "NaN", "inf", "x"] {
            assert!(per_second(bad).is_err(), "{bad}");
        }
    }
}
