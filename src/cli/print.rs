//! What commands print, and what is made for other programs to read: `inboxd config-schema`,
//! `inboxd completions`.
//!
//! Invariant: whatever becomes of standard output, nothing here panics.

use std::io::{ErrorKind, Write as _};
use std::process::ExitCode;

use clap::Args;
use clap_complete::Shell;

use crate::config;

#[derive(Args)]
pub(super) struct SchemaArgs {
    /// The reference of all keys instead, as Markdown
    #[arg(long)]
    markdown: bool,
}

#[derive(Args)]
pub(super) struct CompletionsArgs {
    /// For which shell
    shell: Shell,
}

pub(super) fn schema(arguments: &SchemaArgs) -> ExitCode {
    let text = match arguments.markdown {
        true => config::reference(),
        false => format!("{:#}\n", config::schema()),
    };
    print(&text, ExitCode::SUCCESS)
}

pub(super) fn completions(arguments: &CompletionsArgs, command: &mut clap::Command) -> ExitCode {
    let mut text = Vec::new();
    clap_complete::generate(arguments.shell, command, "inboxd", &mut text);
    print(&String::from_utf8_lossy(&text), ExitCode::SUCCESS)
}

/// Prints what a command has to say, and answers the code it ends with. A reader that wants no
/// more (`| head`) is no failure; text that cannot be written is one, of a command that has no
/// other.
pub(super) fn print(text: &str, code: ExitCode) -> ExitCode {
    let mut output = std::io::stdout().lock();
    match output.write_all(text.as_bytes()).and_then(|()| output.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            complain(&format!("standard output cannot be written to: {error}"));
            if code == ExitCode::SUCCESS { ExitCode::FAILURE } else { code }
        }
        _ => code,
    }
}

/// A line to standard error; where that cannot be written to either, nobody is left to be told.
pub(super) fn complain(text: &str) {
    let _ = writeln!(std::io::stderr(), "inboxd: {text}");
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum as _;

    use super::*;

    #[test]
    fn every_shell_gets_every_command() {
        for shell in Shell::value_variants() {
            let mut text = Vec::new();
            let mut command = super::super::grammar();
            clap_complete::generate(*shell, &mut command, "inboxd", &mut text);
            let text = String::from_utf8(text).unwrap();
            for name in ["run", "migrate", "check", "config-schema", "completions"] {
                assert!(text.contains(name), "{shell}: {name}");
            }
        }
    }
}
