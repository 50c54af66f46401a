//! What the program says of a configuration, as an operator meets it: output and exit codes.

use std::process::{Command, Output};

const SEVEN: &str = "\
shutdown_grace = \"soon\"
lag = { level = \"info\" }

[log]
format = [\"json\"]

[admin]
token = \"canary-secret-0123456789\"
token_file = \"/run/secrets/token\"

[broker.main]
url = \"amqp://mq/\"
user = \"inbox\"
password_file = \"/does/not/exist\"

[subscription.orders]
ordering = \"sometimes\"
source = { queue = \"orders\" }
";

/// The same lines.
const SEVEN_IN_YAML: &str = "\
shutdown_grace: soon
lag: { level: info }

log:
  format: [json]

admin:
  token: canary-secret-0123456789
  token_file: /run/secrets/token

broker: { main: {
  url: 'amqp://mq/',
  user: inbox,
  password_file: /does/not/exist } }

subscription: { orders: {
  ordering: sometimes,
  source: { queue: orders } } }
";

fn inboxd(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_inboxd"))
        .args(arguments)
        .env_clear()
        .output()
        .expect("the command ends")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("text")
}

#[test]
fn seven_mistakes_are_told_at_once_with_lines_and_remedies() {
    let directory = tempfile::tempdir().expect("a directory");
    for (name, content) in [("inboxd.toml", SEVEN), ("inboxd.yaml", SEVEN_IN_YAML)] {
        let path = directory.path().join(name);
        std::fs::write(&path, content).expect("written");
        for command in ["check", "run"] {
            let output = inboxd(&[command, "--config", path.to_str().expect("text")]);
            assert_eq!(output.status.code(), Some(78), "{command} {name}");
            let told = text(&output.stdout) + &text(&output.stderr);
            assert!(told.contains("7 problems"), "{told}");
            for (line, key, what) in [
                (1, "shutdown_grace", "write a number with its unit"),
                (2, "lag", "did you mean \"log\"?"),
                (5, "log.format", "set auto or human or json"),
                (9, "admin.token_file", "set token or token_file, not both"),
                (14, "broker.main.password_file", "name a readable file"),
                (16, "subscription.orders.callback", "set the application's route"),
                (17, "subscription.orders.ordering", "\"partition\""),
            ] {
                let place = format!("{key} ({}:{line})", path.display());
                let found = told.lines().any(|told| told.contains(&place) && told.contains(what));
                assert!(found, "no {place} with {what:?} in {told}");
            }
            assert!(!told.contains("canary-secret"), "{told}");
        }
    }
}

#[test]
fn the_schema_the_reference_and_completions_go_to_standard_output() {
    let output = inboxd(&["config-schema"]);
    assert!(output.status.success());
    let schema: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(schema["$schema"], "https://json-schema.org/draft/2020-12/schema");
    let output = inboxd(&["config-schema", "--markdown"]);
    let reference = text(&output.stdout);
    let documentation = include_str!("../../docs/configuration.md");
    assert!(output.status.success() && documentation.contains(&reference));
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = inboxd(&["completions", shell]);
        assert!(output.status.success(), "{shell}");
        assert!(text(&output.stdout).contains("config-schema"), "{shell}");
    }
    let output = inboxd(&["--version"]);
    assert_eq!(text(&output.stdout), format!("inboxd {}\n", env!("CARGO_PKG_VERSION")));
}
