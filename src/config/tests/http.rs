//! What is called and how its answers are read; routes; telemetry.

use std::time::Duration;

use secrecy::ExposeSecret;

use super::*;
use crate::engine::OnUnrouted;

/// One subscription; `#` is where further keys go.
const ORDERS: &str = "[broker.rabbit]\nurl = \"amqp://mq/\"\n[subscription.orders]\n\
                      callback = \"http://127.0.0.1:8080/orders\"\nsource = { queue = \"orders\" }\n#";

const WEBHOOK: &str = "whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=";

#[test]
fn answers_are_read_as_the_file_says() {
    let keys = "\ncontract = \"dapr\"\n[subscription.orders.status_map]\n4xx = \"retry\"\n404 = \"drop\"\n";
    let config = file(&ORDERS.replacen('#', keys, 1)).good();
    let callback = &config.subscriptions[0].callback;
    assert_eq!(callback.contract, Contract::Dapr);
    assert_eq!(
        callback.status_map,
        [
            (StatusPattern::Code(404), MappedVerdict::Drop),
            (StatusPattern::Class(4), MappedVerdict::Retry)
        ]
    );
    for bad in ["100", "1xx", "4x", "40x", "4xxx", "+12", "four"] {
        let keys = format!("\n[subscription.orders.status_map]\n\"{bad}\" = \"drop\"\n");
        let error = file(&ORDERS.replacen('#', &keys, 1)).bad();
        assert_says(
            &error,
            &problem::join("subscription.orders.status_map", bad),
            "no final status",
        );
    }
}

#[test]
fn every_signing_secret_is_checked_and_none_is_shown() {
    let config = flags(RABBITMQ, CALLBACK)
        .env("INBOXD__SUBSCRIPTION__DEFAULT__SIGNING__SECRETS", &format!("{WEBHOOK},{WEBHOOK}"))
        .good();
    assert_eq!(config.subscriptions[0].callback.signing.len(), 2);
    assert!(!format!("{config:?}").contains("whsec_M"));
    for (bad, what) in [
        ("geheim", "begin with whsec_"),
        ("whsec_geheim!", "no base64"),
        ("whsec_Z2VoZWlt", "6 bytes"),
        ("whsec_", "0 bytes"),
    ] {
        let error = flags(RABBITMQ, CALLBACK)
            .env("INBOXD__SUBSCRIPTION__DEFAULT__SIGNING__SECRETS", &format!("{WEBHOOK},{bad}"))
            .bad();
        assert_says(&error, "subscription.default.signing.secrets", what);
        assert_says(&error, "subscription.default.signing.secrets", "entry 2");
        assert!(!error.to_string().contains("geheim"), "{error}");
    }
    let secret = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(secret.path(), format!("{WEBHOOK}\n")).unwrap();
    let files = secret.path().display().to_string();
    let files =
        |given: Given| given.env("INBOXD__SUBSCRIPTION__DEFAULT__SIGNING__SECRET_FILES", &files);
    let config = files(flags(RABBITMQ, CALLBACK)).good();
    assert_eq!(config.subscriptions[0].callback.signing[0].expose_secret(), WEBHOOK);
    let both = files(flags(RABBITMQ, CALLBACK))
        .env("INBOXD__SUBSCRIPTION__DEFAULT__SIGNING__SECRETS", WEBHOOK);
    assert_says(&both.bad(), "subscription.default.signing.secret_files", "not both");
}

#[test]
fn fixed_headers_come_from_values_files_and_variables() {
    let secret = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(secret.path(), "Bearer geheim\n").unwrap();
    let keys = "\n[subscription.orders.headers.set]\nX-Api-Key = \"one\"\nAuthorization_file = \"/nowhere\"\n";
    let config = file(&ORDERS.replacen('#', keys, 1))
        .env("INBOXD__SUBSCRIPTION__ORDERS__HEADERS__SET__X_API_KEY", "two")
        .env("INBOXD__SUBSCRIPTION__ORDERS__HEADERS__SET__X_TENANT_ID", "three")
        .env("INBOXD__SUBSCRIPTION__ORDERS__HEADERS__SET__AUTHORIZATION", "Basic geheim")
        .good();
    let headers: Vec<_> = config.subscriptions[0]
        .callback
        .headers_set
        .iter()
        .map(|(name, value)| (name.as_str(), value.expose_secret()))
        .collect();
    assert_eq!(
        headers,
        [("Authorization", "Basic geheim"), ("X-Api-Key", "two"), ("x-tenant-id", "three")]
    );
    assert!(!format!("{config:?}").contains("geheim"));

    let config = flags(RABBITMQ, CALLBACK)
        .env(
            "INBOXD__SUBSCRIPTION__DEFAULT__HEADERS__SET__AUTHORIZATION_FILE",
            secret.path().to_str().unwrap(),
        )
        .good();
    let [(name, value)] = &config.subscriptions[0].callback.headers_set[..] else { panic!("one") };
    assert_eq!((name.as_str(), value.expose_secret()), ("authorization", "Bearer geheim"));

    for (name, value, what) in [
        ("Inbox-Message-Id", "x", "belongs to the contract"),
        ("Content-Length", "7", "belongs to the contract"),
        ("a b", "x", "no header's name"),
        ("x-a", "geheim\\r\\nb: c", "cannot carry"),
        ("x-a", "", "blank"),
    ] {
        let keys = format!("\n[subscription.orders.headers.set]\n\"{name}\" = \"{value}\"\n");
        let error = file(&ORDERS.replacen('#', &keys, 1)).bad();
        assert_says(&error, &problem::join("subscription.orders.headers.set", name), what);
        assert!(!error.to_string().contains("geheim"), "{error}");
    }
    let keys = "\n[subscription.orders.headers.set]\nX-A = \"1\"\nx-a = \"2\"\n";
    let error = file(&ORDERS.replacen('#', keys, 1)).bad();
    assert_says(&error, "subscription.orders.headers.set.x-a", "case does not count");
}

#[test]
fn routes_are_read_in_the_order_of_their_names() {
    let keys = r#"
on_unrouted = "ignore"
[subscription.orders.route.b]
type = "refund.*"
header = "tenant=a=*"
path = "/refunds?x=1"
[subscription.orders.route.a]
routing_key = "orders.#.eu"
path = "/eu"
"#;
    let config = file(&ORDERS.replacen('#', keys, 1)).good();
    let settings = &config.subscriptions[0].settings;
    let [a, b] = &settings.routes[..] else { panic!("two routes") };
    assert_eq!((&*a.name, a.routing_key.as_deref(), &*a.path), ("a", Some("orders.#.eu"), "/eu"));
    assert_eq!(b.message_type.as_deref(), Some("refund.*"));
    let header = b.header.as_ref().unwrap();
    assert_eq!((header.name.as_str(), header.value.as_str()), ("tenant", "a=*"));
    assert_eq!(&*b.path, "/refunds?x=1");
    assert_eq!(settings.on_unrouted, OnUnrouted::Ignore);
}

#[test]
fn a_route_that_cannot_be_taken_is_refused() {
    for (key, keys, what) in [
        ("on_unrouted", "on_unrouted = \"forward\"", "no effect without a route"),
        ("route.a.type", "route.a.path = \"/x\"", "say what it matches"),
        ("route.a.path", "route.a.type = \"x\"", "set the path"),
        ("route.a.path", "route.a = { type = \"x\", path = \"x\" }", "no path"),
        ("route.a.path", "route.a = { type = \"x\", path = \"//evil/x\" }", "no path"),
        ("route.a.path", "route.a = { type = \"x\", path = \"/a b\" }", "no path"),
        ("route.a.path", "route.a = { type = \"x\", path = \"/a#b\" }", "no path"),
        ("route.a.header", "route.a = { header = \"x\", path = \"/\" }", "name=value"),
        ("route.a.type", "route.a = { type = \"\", path = \"/\" }", "blank"),
        ("route.a.typ", "route.a = { type = \"x\", typ = \"x\", path = \"/\" }", "did you mean"),
    ] {
        let error = file(&ORDERS.replacen('#', &format!("\n{keys}\n"), 1)).bad();
        assert_says(&error, &format!("subscription.orders.{key}"), what);
    }
    let error = flags("kafka://h/t?group=g&route.a.routing_key=x&route.a.path=/x", CALLBACK).bad();
    assert_says(&error, "subscription.default.route.a.routing_key", "it is RabbitMQ's");
}

#[test]
fn telemetry_is_what_the_file_says_and_nothing_more() {
    let unset = flags(RABBITMQ, CALLBACK).good().telemetry;
    assert!(unset.endpoint.is_none() && unset.traces.is_none() && unset.headers.is_empty());
    let config = flags(RABBITMQ, CALLBACK)
        .env("INBOXD__TELEMETRY__ENDPOINT", "http://127.0.0.1:4318/")
        .env("INBOXD__TELEMETRY__TRACES", "false")
        .env("INBOXD__TELEMETRY__HEADERS__X_API_KEY", "geheim")
        .env("INBOXD__TELEMETRY__SERVICE_NAME", "orders-inbox")
        .env("INBOXD__TELEMETRY__SAMPLE_RATIO", "0.25")
        .env("INBOXD__TELEMETRY__METRICS_INTERVAL", "5s")
        .env("INBOXD__TELEMETRY__TIMEOUT", "3s")
        .good();
    let telemetry = &config.telemetry;
    assert_eq!(telemetry.endpoint.as_deref(), Some("http://127.0.0.1:4318"));
    assert_eq!((telemetry.traces, telemetry.metrics), (Some(false), None));
    assert_eq!(telemetry.headers[0].0, "x-api-key");
    assert_eq!(telemetry.sample_ratio, Some(0.25));
    assert_eq!(telemetry.metrics_interval, Some(Duration::from_secs(5)));
    assert!(!format!("{config:?}").contains("geheim"));
    for (value, what) in [
        ("grpc://h", "\"grpc\""),
        ("http://u:geheim@h", "credentials"),
        ("http://h/v1/traces", "appended"),
        ("h:4318", "scheme"),
    ] {
        let error = flags(RABBITMQ, CALLBACK).env("INBOXD__TELEMETRY__ENDPOINT", value).bad();
        assert_says(&error, "telemetry.endpoint", what);
        assert!(!error.to_string().contains("geheim"), "{error}");
    }
    let error = flags(RABBITMQ, CALLBACK).env("INBOXD__TELEMETRY__SAMPLE_RATIO", "1.5").bad();
    assert_says(&error, "telemetry.sample_ratio", "not between 0 and 1");
}
