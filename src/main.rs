//! The inboxd binary.

use std::process::ExitCode;

fn main() -> ExitCode {
    inboxd::cli::main()
}
