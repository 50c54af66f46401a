//! What is made for other programs to read: `inboxd config-schema`, `inboxd completions`.

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
    print(&match arguments.markdown {
        true => config::reference(),
        false => format!("{:#}\n", config::schema()),
    })
}

pub(super) fn completions(arguments: &CompletionsArgs, command: &mut clap::Command) -> ExitCode {
    let mut text = Vec::new();
    clap_complete::generate(arguments.shell, command, "inboxd", &mut text);
    print(&String::from_utf8_lossy(&text))
}

/// A reader that wants no more (`| head`) is no failure.
fn print(text: &str) -> ExitCode {
    let mut output = std::io::stdout().lock();
    match output.write_all(text.as_bytes()).and_then(|()| output.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            eprintln!("inboxd: {error}");
            ExitCode::FAILURE
        }
        _ => ExitCode::SUCCESS,
    }
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
