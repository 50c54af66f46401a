//! The worst that an operator can write: each is told with place and remedy, or taken by a rule.

use std::ffi::OsString;
use std::path::PathBuf;

use super::super::*;

const GOOD: &str = "[broker.main]\nurl = \"amqp://mq/\"\n[subscription.orders]\n\
                    callback = \"http://h/\"\nsource = { queue = \"q\" }\n";

struct Written {
    directory: tempfile::TempDir,
}

impl Written {
    fn new() -> Self {
        Self { directory: tempfile::tempdir().unwrap() }
    }

    fn file(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.directory.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }
}

fn load_path(path: PathBuf, variables: &[(&str, &str)]) -> Result<Config, ConfigError> {
    load(Inputs {
        file: Some(path),
        environment: variables.iter().map(|(name, value)| (name.into(), value.into())).collect(),
        needs_subscriptions: true,
        ..Inputs::default()
    })
}

fn load_text(name: &str, text: impl AsRef<[u8]>) -> Result<Config, ConfigError> {
    load_path(Written::new().file(name, text), &[])
}

fn load_with(variables: &[(&str, &str)]) -> Result<Config, ConfigError> {
    load_path(Written::new().file("inboxd.toml", GOOD), variables)
}

/// The problems as `file:line key: what; remedy`, without the directory.
fn told(error: &ConfigError) -> Vec<String> {
    let line = |problem: &Problem| {
        let place = problem.place.to_string();
        let place = place.rsplit('/').next().unwrap_or_default().to_owned();
        let Problem { key, what, remedy, .. } = problem;
        assert!(!remedy.is_empty(), "{problem}");
        format!("{place} {key}: {what}; {remedy}")
    };
    error.0.iter().map(line).collect()
}

#[track_caller]
fn assert_told(error: &ConfigError, expected: &[&[&str]]) {
    let told = told(error);
    for parts in expected {
        let found = told.iter().any(|line| parts.iter().all(|part| line.contains(part)));
        assert!(found, "no problem with {parts:?} in {told:#?}");
    }
    assert_eq!(told.len(), expected.len(), "{told:#?}");
}

const SEVEN: &str = r#"shutdown_grace = "soon"
lag = { level = "info" }

[log]
format = ["json"]

[admin]
token = "0123456789abcdef"
token_file = "/run/secrets/token"

[broker.main]
url = "amqp://mq/"
user = "inbox"
password_file = "/does/not/exist"

[subscription.orders]
ordering = "sometimes"
source = { queue = "orders" }
"#;

const SEVEN_IN_YAML: &str = "\
shutdown_grace: soon
lag: { level: info }

log:
  format: [json]

admin:
  token: 0123456789abcdef
  token_file: /run/secrets/token

broker: { main: {
  url: 'amqp://mq/',
  user: inbox,
  password_file: /does/not/exist } }

subscription: { orders: {
  ordering: sometimes,
  source: { queue: orders } } }
";

#[test]
fn seven_mistakes_are_seven_problems_with_lines_and_remedies() {
    for (name, text) in [("inboxd.toml", SEVEN), ("inboxd.yaml", SEVEN_IN_YAML)] {
        let at = |line: usize| format!("{name}:{line} ");
        let lines = [1, 2, 5, 9, 14, 16, 17].map(at);
        let error = load_text(name, text).unwrap_err();
        assert_told(
            &error,
            &[
                &[&lines[0], "shutdown_grace", "\"soon\" is no duration", "from 100ms to 1h"],
                &[&lines[1], "lag: there is no such key", "did you mean \"log\"?"],
                &[&lines[2], "log.format", "a single value", "set auto or human or json"],
                &[&lines[3], "admin.token_file", "token is set too", "not both"],
                &[&lines[4], "broker.main.password_file", "/does/not/exist", "readable file"],
                &[&lines[5], "subscription.orders.callback", "it is missing", "--callback"],
                &[&lines[6], "subscription.orders.ordering", "\"sometimes\"", "\"partition\""],
            ],
        );
    }
}

#[test]
fn a_mistake_in_the_file_is_told_although_a_variable_hides_it() {
    let text = format!("shutdown_grace = \"soon\"\n{GOOD}lease = \"never\"\n");
    let error = load_path(
        Written::new().file("inboxd.toml", text),
        &[
            ("INBOXD__SHUTDOWN_GRACE", "5s"),
            ("INBOXD__SUBSCRIPTION__ORDERS__LEASE", "1ms"),
            ("INBOXD__SUBSCRIPTION__ORDERS__HOLD_MAX", "5s"),
        ],
    )
    .unwrap_err();
    assert_told(
        &error,
        &[
            &["inboxd.toml:1 ", "\"soon\""],
            &["inboxd.toml:7 ", "\"never\""],
            &["INBOXD__SUBSCRIPTION__ORDERS__LEASE ", "\"1ms\" is below the least"],
        ],
    );
}

#[test]
fn bytes_of_a_file_that_people_do_not_see() {
    load_text("inboxd.toml", format!("\u{feff}{GOOD}")).unwrap();
    load_text("inboxd.toml", GOOD.replace('\n', "\r\n")).unwrap();
    load_text("inboxd.YML", "\u{feff}broker:\r\n  a: {url: 'amqp://h/'}\r\nsubscription:\r\n  s: {callback: 'http://h/', source: {queue: q}}\r\n").unwrap();
    for (name, bytes) in
        [("inboxd.toml", b"a = 1\n# \xe9\n".as_slice()), ("inboxd.yaml", b"a: 1\n# \xe9")]
    {
        assert_told(&load_text(name, bytes).unwrap_err(), &[&["not UTF-8", "in line 2"]]);
    }
    assert_told(&load_text("a.toml", b"\xff\xfea\0").unwrap_err(), &[&["not UTF-8", "line 1"]]);
    let nul = load_text("a.toml", "a = \"\0\"\n").unwrap_err();
    assert!(told(&nul)[0].contains("not TOML"), "{nul}");
    for name in ["empty.toml", "empty.yaml"] {
        assert_told(&load_text(name, "").unwrap_err(), &[&["subscription: there is none"]]);
    }
}

#[test]
fn what_is_no_file_is_named_and_not_waited_for() {
    let written = Written::new();
    let directory = written.directory.path().to_owned();
    assert_told(&load_path(directory.clone(), &[]).unwrap_err(), &[&["is a directory"]]);
    let pipe = directory.join("pipe.toml");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    assert_told(&load_path(pipe.clone(), &[]).unwrap_err(), &[&["no regular file"]]);
    assert_told(&load_path("/dev/zero".into(), &[]).unwrap_err(), &[&["no regular file"]]);
    let pipe = pipe.to_str().unwrap();
    let error = load_with(&[("INBOXD__ADMIN__TOKEN_FILE", pipe)]).unwrap_err();
    assert_told(&error, &[&["INBOXD__ADMIN__TOKEN_FILE admin.token_file", "no regular file"]]);
    let large = written.file("large.toml", vec![b'#'; FILE_BYTES_MAX as usize + 1]);
    assert_told(&load_path(large, &[]).unwrap_err(), &[&["4194305 bytes", "4194304"]]);
}

#[test]
fn numbers_and_durations_out_of_reach() {
    let huge = "9".repeat(100_000);
    let text = format!(
        "{GOOD}concurrency = {huge}\nin_flight_max = -1\nbody_bytes_max = 1.5\nlease = \"-5s\"\n\
         hold_max = 5\ncallback_timeout = \"1e3s\"\nconnect_timeout = 2026-01-01\n\
         retry = {{ factor = nan, cap = \"18446744073709551615y\" }}\noffset_span_max = inf\n"
    );
    let error = load_text("inboxd.toml", text).unwrap_err();
    assert!(error.to_string().len() < 5_000, "values are cut: {} bytes", error.to_string().len());
    let told = told(&error);
    for (line, key) in [
        (6, "concurrency"),
        (7, "in_flight_max"),
        (8, "body_bytes_max"),
        (9, "lease"),
        (10, "hold_max"),
        (11, "callback_timeout"),
        (12, "connect_timeout"),
        (13, "retry.factor"),
        (13, "retry.cap"),
        (14, "offset_span_max"),
    ] {
        let begin = format!("inboxd.toml:{line} subscription.orders.{key}: ");
        assert!(told.iter().any(|one| one.starts_with(&begin)), "no {begin} in {told:#?}");
    }
    let exponent = load_text("inboxd.toml", format!("{GOOD}concurrency = 1e3\n")).unwrap_err();
    assert_told(&exponent, &[&["\"1e3\" is no whole number"]]);
}

#[test]
fn keys_that_are_none() {
    let keys = "\"ключ\" = 1\n\"a\\nb\" = 2\n\"\" = 3\nCallback = \"x\"\nqueue = \"q\"\n";
    let error = load_text("inboxd.toml", format!("{GOOD}{keys}")).unwrap_err();
    assert_told(
        &error,
        &[
            &["inboxd.toml:6 subscription.orders.\"ключ\": there is no such key"],
            &["inboxd.toml:7 subscription.orders.\"a\\nb\": "],
            &["inboxd.toml:8 subscription.orders.\"\": "],
            &["inboxd.toml:9 ", "did you mean \"subscription.orders.callback\"?"],
            &["inboxd.toml:10 ", "did you mean \"subscription.orders.source.queue\"?"],
        ],
    );
    load_text("inboxd.toml", format!("{GOOD}retry.cap = \"5s\"\nretry.initial = \"1s\"\n"))
        .unwrap();
    let twice = load_text("inboxd.toml", format!("{GOOD}lease = \"5s\"\nlease = \"6s\"\n"));
    assert_told(&twice.unwrap_err(), &[&["inboxd.toml:7 ", "duplicate key, \"lease\""]]);
    let arrays = load_text("inboxd.toml", "[[subscription]]\n[[broker]]\n[[log]]\n").unwrap_err();
    assert_told(
        &arrays,
        &[
            &["inboxd.toml:1 ", "write [subscription.NAME]"],
            &["inboxd.toml:2 ", "write [broker.NAME]"],
            &["inboxd.toml:3 ", "write [log]"],
        ],
    );
    let text = format!(
        "{GOOD}[subscription.Orders]\ncallback = \"http://h/\"\nsource = {{ queue = \"q\" }}\n"
    );
    let alike = load_text("inboxd.toml", text).unwrap_err();
    assert_told(&alike, &[&["subscription.orders: it differs from Orders by case"]]);
    let long = format!("{GOOD}{} = 1\n", "k".repeat(100_000));
    assert!(load_text("inboxd.toml", long).unwrap_err().to_string().len() < 2_000);
}

#[test]
fn variables_that_cannot_be_meant() {
    let error = load_with(&[
        ("INBOXD__SUBSCRIPTION__ORDERS", "x"),
        ("INBOXD__SUBSCRIPTION__ORDERS__CALLBACK", "http://a/"),
    ]);
    assert_told(
        &error.unwrap_err(),
        &[
            &["INBOXD__SUBSCRIPTION__ORDERS__CALLBACK", "INBOXD__SUBSCRIPTION__ORDERS sets"],
            &["INBOXD__SUBSCRIPTION__ORDERS ", "it is a table"],
        ],
    );
    // An empty value is one.
    let error = load_with(&[("INBOXD__SUBSCRIPTION__ORDERS__CALLBACK", "")]).unwrap_err();
    assert_told(&error, &[&["subscription.orders.callback", "no URL"]]);
    let error = load_with(&[("INBOXD__SUBSCRIPTION__ORDERS__LEASE__X", "5s")]).unwrap_err();
    assert_told(&error, &[&["subscription.orders.lease", "a single value"]]);
    let error = load_with(&[("INBOXD__SUBSCRIPTION__ORDERS__CONCURENCY", "5")]).unwrap_err();
    assert_told(&error, &[&["did you mean \"subscription.orders.concurrency\"?"]]);
    let error = load_with(&[("INBOXD__", "x"), ("INBOXD__A____B", "x")]).unwrap_err();
    assert_told(&error, &[&["INBOXD__ ", "empty part"], &["INBOXD__A____B", "empty part"]]);
    // Those of Kubernetes, for a service of this name, are not ours.
    load_with(&[("INBOXD_SERVICE_HOST", "10.0.0.1"), ("INBOXD_PORT", "tcp://10.0.0.1:80")])
        .unwrap();
}

#[cfg(unix)]
#[test]
fn a_variable_s_name_that_is_not_utf_8_is_named() {
    use std::os::unix::ffi::OsStringExt as _;
    let name = OsString::from_vec(b"INBOXD__LOG__\xff".to_vec());
    let error = load(Inputs { environment: vec![(name, "x".into())], ..Inputs::default() });
    assert_told(&error.unwrap_err(), &[&["INBOXD__LOG__", "not UTF-8"]]);
}

#[test]
fn keys_of_the_other_broker_are_named_as_such() {
    let text = format!("{GOOD}offset_span_max = 5\n")
        .replace("queue = \"q\"", "queue = \"q\", group = \"g\"");
    assert_told(
        &load_text("inboxd.toml", text).unwrap_err(),
        &[
            &["subscription.orders.offset_span_max: it is Kafka's", "leave it out"],
            &["subscription.orders.source.group: it is Kafka's"],
        ],
    );
}

#[test]
fn one_mistake_is_one_problem() {
    let with = |from: &str, to: &str| {
        assert!(GOOD.contains(from));
        load_text("inboxd.toml", GOOD.replace(from, to)).unwrap_err()
    };
    let kind = "url = \"mq\"\nkind = \"rabbit\"";
    assert_told(&with("url = \"amqp://mq/\"", kind), &[&["broker.main.kind", "\"rabbit\""]]);
    let misspelt = with("callback", "callbak");
    assert_told(&misspelt, &[&["inboxd.toml:4 ", "did you mean \"subscription.orders.callback\""]]);
    let broker = "queue = \"q\", broker = \"mian\", topics = [\"t\"], group = \"g\"";
    let unknown = with("queue = \"q\"", broker);
    assert_told(&unknown, &[&["source.broker", "there is no [broker.mian]", "main"]]);
    let bare = with("url = \"amqp://mq/\"", "url = \"amqp://mq/\"\npassword = text");
    assert_told(&bare, &[&["inboxd.toml:3 ", "not TOML"]]);
    let octal = with("queue = \"q\"", "queue = \"q\", prefetch = 0123");
    assert_told(&octal, &[&["inboxd.toml:5 ", "not TOML"]]);
    let none = with("[broker.main]\nurl = \"amqp://mq/\"\n", "");
    assert_told(&none, &[&["broker: it is missing", "add [broker.main] with its url"]]);
}

#[test]
fn null_of_a_required_key_is_one_problem_and_wants_a_value() {
    let text = "broker: { main: { url: 'amqp://mq/' } }\nsubscription:\n  orders:\n    \
                callback: null\n    source: { queue: q }\n";
    let told = ["inboxd.yaml:4 subscription.orders.callback", "null", "give it a value"];
    assert_told(&load_text("inboxd.yaml", text).unwrap_err(), &[&told]);
    let twice = text.replace("    source", "    callback: 'http://h/'\n    source");
    let error = load_text("inboxd.yaml", twice).unwrap_err();
    assert_told(&error, &[&told, &["inboxd.yaml:5 ", "is there twice"]]);
}

#[test]
fn a_key_of_another_table_is_told_where_it_belongs() {
    let error = load_text(
        "inboxd.toml",
        format!("{GOOD}retention = \"5d\"\nshutdown_grace = \"5s\"\npool_max = 5\n"),
    );
    assert_told(
        &error.unwrap_err(),
        &[
            &["inboxd.toml:6 ", "it belongs to database.retention"],
            &["inboxd.toml:7 ", "before the first [table]"],
            &["inboxd.toml:8 ", "it belongs to database.pool_max"],
        ],
    );
}

#[test]
fn a_remedy_has_the_form_of_its_layer() {
    let error = load_text("inboxd.yaml", "log: 1\nbroker: 2\nsubscription: { a: 3 }\n");
    let error = error.unwrap_err();
    assert!(!error.to_string().contains("write ["), "{error}");
    assert_eq!(error.0.len(), 3, "{error}");
    assert!(error.to_string().contains("write log: and its keys below"), "{error}");
    let error = load_with(&[("INBOXD__SUBSCRIPTION__ORDERS", "x")]).unwrap_err();
    assert_told(&error, &[&["it is a table", "INBOXD__SUBSCRIPTION__ORDERS__KEY"]]);
}

#[test]
fn problems_without_end_are_cut_and_take_no_time() {
    let begun = std::time::Instant::now();
    let many = |line: &dyn Fn(usize) -> String| (0..20_000).map(line).collect::<String>();
    for (name, text) in [
        ("keys.toml", many(&|at| format!("k{at} = 1\n"))),
        ("keys.yaml", many(&|at| format!("k{at}: 1\n"))),
        ("subscriptions.toml", many(&|at| format!("[subscription.s{at}]\n"))),
        ("brokers.toml", many(&|at| format!("[broker.s{at}]\n"))),
        (
            "headers.toml",
            format!("[subscription.s.headers.set]\n{}", many(&|at| format!("k{at} = 1\n"))),
        ),
        ("list.toml", format!("shared_consumer_ids = [{}]\n", "\" \",".repeat(50_000))),
        ("dots.toml", format!("a{} = 1\n", ".a".repeat(100_000))),
        ("head.toml", format!("[a{}]\n", ".a".repeat(100_000))),
    ] {
        let error = load_text(name, text).unwrap_err();
        assert!(error.0.len() <= 201, "{name}: {}", error.0.len());
    }
    assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
    let deep = format!("INBOXD__A{}", "__A".repeat(40_000));
    let error = load_with(&[(&deep, "1")]).unwrap_err();
    assert!(told(&error)[0].contains("more than 16 parts"));
}
