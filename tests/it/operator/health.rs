//! `inboxd health`: a probe without curl.

use inboxd_conformance::app::App;
use inboxd_conformance::net::ReservedPort;
use inboxd_conformance::{ensure, eventually};

use crate::support::{Broker, BrokerKind, Database, DatabaseKind, PATIENCE, Sidecar, config};

const TOKEN: &str = "a-token-that-is-long-enough";

#[tokio::test(flavor = "multi_thread")]
async fn health_tells_ready_and_live_by_exit_codes_and_why_not() {
    let mut app = App::not_started();
    let database = Database::new(DatabaseKind::Sqlite);
    let broker = Broker::new(BrokerKind::RabbitClassic).await;
    let config = config(&broker, &database, &broker.name, &app.url("/"), "", "");
    // With the token of the configuration, which other requests want.
    let mut sidecar = Sidecar::start_with(&config, &[("INBOXD__ADMIN__TOKEN", TOKEN)]);
    eventually(PATIENCE, async || {
        let told = sidecar.command("health", &[]).await;
        let says = told.code == Some(1)
            && told.out.starts_with("not ready\n")
            && told.out.contains("callback:orders: ");
        ensure(says, format!("{told:?}; log:\n{}", sidecar.log()))
    })
    .await;
    let live = sidecar.command("health", &["--live"]).await;
    assert_eq!((live.code, live.out.as_str()), (Some(0), "live\n"), "{live:?}");
    assert_eq!(sidecar.get("/readyz").await.map(|(status, _)| status), Some(401));
    app.restart().await;
    eventually(PATIENCE, async || {
        let told = sidecar.command("health", &["--ready"]).await;
        ensure(told.code == Some(0) && told.out == "ready\n", format!("{told:?}"))
    })
    .await;
    assert!(sidecar.stop().await.success(), "{}", sidecar.log());
    let gone = sidecar.command("health", &["--live"]).await;
    assert_eq!(gone.code, Some(1), "{gone:?}");
    assert!(gone.out.contains("no sidecar answers"), "{gone:?}");
}

/// The listener of `[health]` asks for no token, and has nothing but probes.
#[tokio::test(flavor = "multi_thread")]
async fn the_health_listener_is_asked_first_and_has_no_api() {
    let app = App::start().await;
    let database = Database::new(DatabaseKind::Sqlite);
    let broker = Broker::new(BrokerKind::RabbitClassic).await;
    let port = ReservedPort::new().expect("a free port");
    let address = port.addr().to_string();
    let config = config(&broker, &database, &broker.name, &app.url("/"), "", "");
    let mut sidecar = Sidecar::start_with(&config, &[("INBOXD__HEALTH__LISTEN", &address)]);
    sidecar.ready().await;
    let client = reqwest::Client::builder().no_proxy().build().expect("a client");
    let status = async |path: &str| {
        let answer = client.get(format!("http://{address}{path}")).send().await;
        answer.expect("served").status().as_u16()
    };
    for path in ["/livez", "/readyz", "/metrics"] {
        assert_eq!(status(path).await, 200, "{path}");
    }
    for path in ["/v1/status", "/v1/messages/m1", "/v1/drain"] {
        assert_eq!(status(path).await, 404, "{path}");
    }
    assert_eq!(sidecar.get("/v1/status").await.map(|(status, _)| status), Some(200));
    // Only the health listener can be asked here: the other has no such port.
    let told = sidecar.command("health", &["--admin", "127.0.0.1:1"]).await;
    assert_eq!(told.code, Some(0), "{told:?}");
    assert!(sidecar.stop().await.success(), "{}", sidecar.log());
}
