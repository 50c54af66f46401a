//! Pause, resume and limits while it runs, and the listener with a token and TLS.

use std::time::Duration;

use inboxd_conformance::app::App;
use inboxd_conformance::{ensure, eventually};
use serde_json::Value;

use crate::support::{
    Broker, BrokerKind, Database, DatabaseKind, Message, PATIENCE, Sidecar, config,
};

async fn says(sidecar: &Sidecar, command: &str, arguments: &[&str], code: i32) -> String {
    let told = sidecar.command(command, arguments).await;
    assert_eq!(told.code, Some(code), "{command} {arguments:?}: {told:?}");
    format!("{}{}", told.out, told.err)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_subscription_is_paused_resumed_and_limited_while_it_runs() {
    let app = App::start().await;
    let database = Database::new(DatabaseKind::Sqlite);
    let broker = Broker::new(BrokerKind::RabbitClassic).await;
    let config = config(&broker, &database, &broker.name, &app.url("/"), "", "");
    let mut sidecar = Sidecar::start(&config);
    sidecar.ready().await;
    let subscriptions = async |arguments: &[&str], code: i32| {
        says(&sidecar, "subscriptions", arguments, code).await
    };

    let paused = subscriptions(&["pause", "orders", "--actor", "alice"], 0).await;
    assert!(paused.contains("callback paused") && paused.contains("paused by alice"), "{paused}");
    broker.publish([Message::id("m1")]).await;
    let status = says(&sidecar, "status", &[], 0).await;
    assert!(status.contains("paused by alice (127.0.0.1)"), "{status}");
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(app.ledger().begun(), 0, "paused: nothing is sent");
    let resumed = subscriptions(&["resume", "orders"], 0).await;
    assert!(!resumed.contains("paused"), "{resumed}");
    eventually(PATIENCE, async || ensure(app.ledger().accepted("m1") == 1, sidecar.log())).await;

    let limits = &["limits", "orders", "--concurrency", "3", "--rate", "2.5", "--json"];
    let limited: Value = serde_json::from_str(&subscriptions(limits, 0).await).unwrap();
    let callback = &limited["callback"];
    assert_eq!((callback["concurrency"].as_u64(), callback["rate"].as_f64()), (Some(3), Some(2.5)));
    let cleared = subscriptions(&["limits", "orders", "--rate", "none", "--json"], 0).await;
    let cleared: Value = serde_json::from_str(&cleared).unwrap();
    let callback = &cleared["callback"];
    assert_eq!(callback["concurrency"], 3, "what is not given stays: {cleared}");
    assert!(callback["rate"].is_null(), "{cleared}");
    let list = subscriptions(&["list"], 0).await;
    assert!(list.contains("subscription orders") && list.contains("at most 3"), "{list}");

    subscriptions(&["limits", "orders"], 2).await;
    subscriptions(&["limits", "orders", "--concurrency", "0"], 2).await;
    let unknown = subscriptions(&["pause", "bills"], 69).await;
    assert!(
        unknown.contains("there is no subscription") && unknown.contains("orders"),
        "{unknown}"
    );
    let (status, body) = sidecar.get("/v1/subscriptions/bills").await.expect("served");
    assert!(status == 404 && body.contains("unknown_subscription"), "{status} {body}");
    assert!(sidecar.stop().await.success(), "{}", sidecar.log());
    let gone = says(&sidecar, "status", &[], 69).await;
    assert!(gone.contains("no sidecar answers"), "{gone}");
}

/// With TLS and a token, commands of the same configuration get in, and nobody else does.
#[tokio::test(flavor = "multi_thread")]
async fn a_listener_with_tls_and_a_token_lets_its_own_commands_in() {
    let app = App::start().await;
    let database = Database::new(DatabaseKind::Sqlite);
    let broker = Broker::new(BrokerKind::RabbitClassic).await;
    let config = config(&broker, &database, &broker.name, &app.url("/"), "", "");
    let files = tempfile::tempdir().expect("a directory");
    let write = |name: &str, text: &str| {
        let path = files.path().join(name);
        std::fs::write(&path, text).expect("written");
        path.to_str().expect("text").to_owned()
    };
    // Of a name that nobody asks by, and signed by itself.
    let pair = || rcgen::generate_simple_self_signed(vec!["inboxd.test".to_owned()]).unwrap();
    let (own, other) = (pair(), pair());
    let (cert, key) =
        (write("cert", &own.cert.pem()), write("key", &own.signing_key.serialize_pem()));
    let token = write("token", "not-a-secret-of-anybody");
    let environment = [
        ("INBOXD__ADMIN__TLS__CERT_FILE", cert.as_str()),
        ("INBOXD__ADMIN__TLS__KEY_FILE", key.as_str()),
        ("INBOXD__ADMIN__TOKEN_FILE", token.as_str()),
    ];
    let mut sidecar = Sidecar::start_with(&config, &environment);
    eventually(PATIENCE, async || {
        let told = sidecar.command("health", &[]).await;
        ensure(told.code == Some(0), format!("{told:?}; log:\n{}", sidecar.log()))
    })
    .await;
    for (command, arguments) in [
        ("status", &[][..]),
        ("dead-letters", &["list"]),
        ("parked", &["list"]),
        ("subscriptions", &["pause", "orders"]),
        ("subscriptions", &["resume", "orders"]),
    ] {
        says(&sidecar, command, arguments, 0).await;
    }
    let plain = sidecar.get("/v1/status").await;
    assert!(plain.is_none(), "no answer without TLS: {plain:?}");

    let client = |certificate: &str| {
        let root = reqwest::Certificate::from_pem(certificate.as_bytes()).expect("PEM");
        let client = reqwest::Client::builder().no_proxy().tls_certs_only([root]);
        client.resolve("inboxd.test", sidecar.admin()).build().expect("a client")
    };
    let url = format!("https://inboxd.test:{}/livez", sidecar.admin().port());
    let stranger = client(&own.cert.pem()).get(&url).send().await;
    // By its name it is asked from elsewhere, and a loopback listener answers to loopback's alone.
    assert!(stranger.is_ok_and(|answer| answer.status() == 421), "the handshake is good");
    assert!(client(&other.cert.pem()).get(&url).send().await.is_err(), "and no other's is");

    // Another certificate in the command's configuration: not this sidecar.
    std::fs::write(&cert, other.cert.pem()).expect("written");
    let mistaken = says(&sidecar, "status", &[], 69).await;
    assert!(mistaken.contains("certificate"), "{mistaken}");
    std::fs::write(&cert, own.cert.pem()).expect("written");
    std::fs::write(&token, "another-than-it-was-before").expect("written");
    let unauthorized = says(&sidecar, "status", &[], 69).await;
    assert!(unauthorized.contains("wants a token"), "{unauthorized}");
    assert!(sidecar.stop().await.success(), "{}", sidecar.log());

    std::fs::write(&key, "no key").expect("written");
    sidecar.start_again();
    assert_eq!(sidecar.ended().await.code(), Some(78), "{}", sidecar.log());
    assert!(sidecar.log().contains("admin.tls"), "{}", sidecar.log());
}
