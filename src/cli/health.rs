//! `inboxd health`: a probe for images without curl.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use reqwest::Method;

use super::AskArgs;
use super::client::{Answer, AskError, Client};
use super::print::print;
use crate::admin::{Liveness, Readiness, shown};
use crate::config::Config;

const ANSWER_WITHIN: Duration = Duration::from_secs(2);

#[derive(Args)]
#[command(after_help = "\
The listener of [health] is asked where there is one, else that of [admin], for at most 2 s.

Exit codes: 0 yes, 1 no, for whatever reason, 2 the command line cannot be read.")]
pub(super) struct HealthArgs {
    /// Asks whether the process lives, instead of whether it is ready
    #[arg(long, conflicts_with = "ready")]
    live: bool,
    /// Asks whether everything that it needs can be used (the default)
    #[arg(long)]
    ready: bool,
    #[command(flatten)]
    pub(super) ask: AskArgs,
}

pub(super) async fn run(config: Config, arguments: HealthArgs) -> ExitCode {
    match probe(&config, arguments.live).await {
        Ok(lines) => print(&format!("{lines}\n"), ExitCode::SUCCESS),
        Err(lines) => print(&format!("{lines}\n"), ExitCode::FAILURE),
    }
}

async fn probe(config: &Config, live: bool) -> Result<String, String> {
    let admin = &config.admin;
    let (listen, token, tls) = match (config.health_listen, admin.listen) {
        (Some(listen), _) => (listen, None, None),
        (None, Some(listen)) => (listen, admin.token.as_ref(), admin.tls.as_ref()),
        (None, None) => return Err("neither admin.listen nor health.listen is set".to_owned()),
    };
    let told = |error: AskError| error.to_string();
    let client = Client::new(listen, token, tls, ANSWER_WITHIN).map_err(told)?;
    if live {
        let answer = client.ask(Method::GET, "/livez").await.map_err(told)?;
        liveness(&answer)
    } else {
        let answer = client.ask(Method::GET, "/readyz").await.map_err(told)?;
        readiness(&answer)
    }
}

fn liveness(answer: &Answer) -> Result<String, String> {
    let liveness: Liveness =
        serde_json::from_value(answer.body.clone()).map_err(|_| answer.detail())?;
    if liveness.live {
        return Ok("live".to_owned());
    }
    let stale = liveness.stale_seconds.iter();
    let stale = stale.map(|(name, seconds)| format!("\n  {name}: has not turned for {seconds} s"));
    Err(format!("not live{}", shown_lines(stale)))
}

fn readiness(answer: &Answer) -> Result<String, String> {
    let readiness: Readiness =
        serde_json::from_value(answer.body.clone()).map_err(|_| answer.detail())?;
    if readiness.ready {
        return Ok("ready".to_owned());
    }
    let draining = readiness.draining.then(|| format!("\n  {}", readiness.reason));
    let unready = readiness.dependencies.iter().filter(|(_, state)| !state.ready);
    let unready = unready.map(|(name, state)| match &state.code {
        Some(code) => format!("\n  {name}: {} [{code}]", state.reason),
        None => format!("\n  {name}: {}", state.reason),
    });
    Err(format!("not ready{}", shown_lines(draining.into_iter().chain(unready))))
}

/// Lines that begin with their own line break.
fn shown_lines(lines: impl Iterator<Item = String>) -> String {
    lines.map(|line| format!("\n{}", shown(line.trim_start_matches('\n')))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_told_and_steer_no_terminal() {
        let body = serde_json::json!({
            "ready": false, "draining": false,
            "dependencies": {
                "database": {"ready": true},
                "source:orders": {"ready": false, "code": "queue_missing", "reason": "gone\u{1b}[2J"},
            },
        });
        let told = readiness(&Answer { status: 503, body }).unwrap_err();
        assert_eq!(told, "not ready\n  source:orders: gone\\u{1b}[2J [queue_missing]");
    }
}
