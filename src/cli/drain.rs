//! `inboxd drain`: the running sidecar takes nothing more and finishes what it has.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use reqwest::Method;

use super::client::{AskError, Client};
use super::print::print;
use super::{AskArgs, exit_with, within_an_hour};
use crate::admin::{DrainAnswer, shown};
use crate::app;
use crate::config::Config;

/// For the answer to come back after the sidecar's patience is over.
const ANSWER_MARGIN: Duration = Duration::from_secs(5);
const EXIT_STILL_RUNNING: u8 = 1;

#[derive(Args)]
#[command(after_help = "\
The sidecar is not ready from then on, forwards under way end and are recorded, the rest goes back \
to the broker, and the consumers leave it. The process goes on until SIGTERM, and then ends at \
once. A drain cannot be undone; asked again, it is the same drain.

Exit codes: 0 drained, 1 something still runs (the drain goes on), 2 the command line cannot be \
read, 69 no sidecar can be asked, 78 the configuration is refused.")]
pub(super) struct DrainArgs {
    /// How long to wait, such as 20s; shutdown_grace where it is not set, 1h at most
    #[arg(long, value_name = "DURATION", value_parser = within_an_hour)]
    timeout: Option<Duration>,
    /// Who asks, for the log; the user and host where it is not given
    #[arg(long, value_name = "NAME")]
    actor: Option<String>,
    #[command(flatten)]
    pub(super) ask: AskArgs,
}

pub(super) async fn run(config: Config, arguments: DrainArgs) -> ExitCode {
    let patience = arguments.timeout.unwrap_or(config.shutdown_grace);
    let path = format!("/v1/drain?timeout={}ms", patience.as_millis());
    let actor = super::actor::of(arguments.actor.as_deref());
    let answer = match Client::of(&config.admin, patience + ANSWER_MARGIN) {
        Ok(Some(client)) => client.change(Method::POST, &path, &actor, None).await,
        Ok(None) => {
            let reason = "admin.listen is off: send SIGTERM instead";
            return exit_with(app::EXIT_UNAVAILABLE, reason);
        }
        Err(error) => Err(error),
    };
    let answer = match answer {
        Ok(answer) if matches!(answer.status, 200 | 504) => answer,
        Ok(answer) => return exit_with(app::EXIT_UNAVAILABLE, &answer.detail()),
        Err(AskError::Nobody(base)) => {
            let reason = format!("no sidecar answers at {base}: nothing is to be drained there");
            return exit_with(app::EXIT_UNAVAILABLE, &reason);
        }
        Err(error) => return exit_with(app::EXIT_UNAVAILABLE, &error.to_string()),
    };
    match serde_json::from_value::<DrainAnswer>(answer.body.clone()) {
        Ok(DrainAnswer { drained: true, .. }) => {
            print("drained: nothing is in flight, and nothing more is taken\n", ExitCode::SUCCESS)
        }
        Ok(answer) => print(&for_people(&answer), ExitCode::from(EXIT_STILL_RUNNING)),
        Err(_) => exit_with(app::EXIT_UNAVAILABLE, &answer.detail()),
    }
}

fn for_people(answer: &DrainAnswer) -> String {
    let mut text = "not drained in time; the drain goes on\n".to_owned();
    for running in &answer.running {
        let name = shown(&running.subscription);
        match running.in_flight {
            0 => text.push_str(&format!("subscription {name}: its consumer is being closed\n")),
            count => text.push_str(&format!("subscription {name}: {count} in flight\n")),
        }
        for message in &running.oldest {
            let (id, waits) = (shown(&message.message_id), shown(&message.waits));
            text.push_str(&format!("  - {id}: {waits}\n"));
        }
    }
    text
}
