//! Reads the command line. What is wrong with it is told without addresses: they may hold
//! passwords, and standard error ends in logs.

use std::process::ExitCode;

use clap::Parser as _;

use super::Cli;

/// The command, or the code to end with; what there is to say has been said.
pub(super) fn read() -> Result<Cli, ExitCode> {
    Cli::try_parse().map_err(|error| {
        if !error.use_stderr() {
            // Help or the version, on standard output; a reader that wants no more is no failure.
            let _ = error.print();
            return ExitCode::SUCCESS;
        }
        let arguments = std::env::args_os().map(|argument| argument.to_string_lossy().into_owned());
        eprint!("{}", without_addresses(&error.to_string(), arguments));
        ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2))
    })
}

/// A text that may repeat arguments, with each that is an address hidden.
fn without_addresses(text: &str, arguments: impl Iterator<Item = String>) -> String {
    arguments.fold(text.to_owned(), |text, argument| {
        let value = match argument.split_once('=') {
            Some((flag, value)) if flag.starts_with('-') => value,
            _ => &argument,
        };
        match value.split_once("://") {
            Some((scheme, rest)) if !rest.is_empty() => {
                let shown = if scheme.len() <= 10 { scheme } else { "…" };
                text.replace(value, &format!("{shown}://…"))
            }
            _ => text,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_clap_says_of_a_misplaced_address_shows_no_password() {
        for arguments in [
            vec!["inboxd", "run", "amqp://u:geheim@h/"],
            vec!["inboxd", "run", "--sauce=amqp://u:geheim@h/"],
            vec!["inboxd", "run", "--sauce", "amqp://u:geheim@h/"],
            vec!["inboxd", "amqp://u:geheim@h/"],
            vec!["inboxd", "check", "--connect", "--timeout", "postgres://u:geheim@h/d"],
            vec!["inboxd", "check", "--connect", "--timeout=postgres://u:geheim@h/d"],
        ] {
            let Err(error) = Cli::try_parse_from(&arguments) else {
                panic!("taken: {arguments:?}")
            };
            let owned = arguments.iter().map(|argument| (*argument).to_owned());
            let told = without_addresses(&error.to_string(), owned);
            assert!(told.contains("error: ") && !told.contains("geheim"), "{told}");
        }
    }
}
