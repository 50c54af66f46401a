//! What needs a broker of one's own: restarts, a short `consumer_timeout`, TLS.
//!
//! One server serves all of it, one after the other: starting one takes longer than the tests.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use inboxd_conformance::servers::{Kind, OwnServer};
use inboxd_conformance::{ensure, eventually};
use inboxd_contract::SourcePhase;
use inboxd_rabbitmq::{QueueKind, RabbitMqConfig, RabbitMqTls};
use tokio::time::timeout;

use crate::support::{
    CLOSE, PATIENCE, Publisher, ack, close, counts, id, ids, phase, start, status, take,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_that_restarts_times_out_and_speaks_tls() {
    let files = tempfile::tempdir().expect("a directory");
    certificates(files.path()).await;
    let tls_port = free_port();
    let file = |name: &str| files.path().join(name).display().to_string();
    let lines = format!(
        "consumer_timeout = 3000\nlisteners.ssl.default = 127.0.0.1:{tls_port}\nssl_options.cacertfile = {}\n\
         ssl_options.certfile = {}\nssl_options.keyfile = {}\nssl_options.verify = verify_peer\n\
         ssl_options.fail_if_no_peer_cert = true\n",
        file("ca.pem"),
        file("server.pem"),
        file("server.key"),
    );
    let mut server = OwnServer::start_with(Kind::RabbitMq, &lines).await;
    tls_with_a_client_certificate(&server, files.path(), tls_port).await;
    a_force_closed_connection_uses_no_old_tag(&server).await;
    a_consumer_timeout_is_recovered_from(&server).await;
    three_restarts_lose_nothing(&mut server).await;
}

fn config(server: &OwnServer, queue: &str) -> RabbitMqConfig {
    RabbitMqConfig::from_uri(server.url(), queue).expect("a URI")
}

/// R1: the broker closes the connection while work is under way; the old tag is not used.
async fn a_force_closed_connection_uses_no_old_tag(server: &OwnServer) {
    let publisher = Publisher::connect(server.url()).await;
    publisher.declare("forced", QueueKind::Classic).await;
    publisher.publish("forced", &["m0", "m1"]).await;
    drop(publisher);
    let mut source = start(&config(server, "forced"));
    let old = take(&mut source, 2).await;
    server.control(&["close_all_connections", "forced"]).await;
    timeout(PATIENCE, old[0].fence.lost()).await.expect("lost");
    let again = take(&mut source, 2).await;
    assert_eq!(ids(&again), ["m0", "m1"]);
    ack(old);
    let publisher = Publisher::connect(server.url()).await;
    // One consumer, and both with it.
    counts(&publisher, "forced", (0, 1)).await;
    drop(again);
    close(source).await;
    // Old acks settled nothing.
    counts(&publisher, "forced", (2, 0)).await;
}

/// A delivery held too long costs the channel, not the source.
async fn a_consumer_timeout_is_recovered_from(server: &OwnServer) {
    // How often channels look for it; not a matter of the configuration file.
    let tick = "application:set_env(rabbit, channel_tick_interval, 500).";
    server.control(&["eval", tick]).await;
    let publisher = Publisher::connect(server.url()).await;
    publisher.declare("slow", QueueKind::Classic).await;
    publisher.publish("slow", &["m"]).await;
    let mut source = start(&config(server, "slow"));
    let held = take(&mut source, 1).await;
    timeout(PATIENCE, held[0].fence.lost()).await.expect("the broker gives up waiting");
    let again = take(&mut source, 1).await;
    let ready = phase(&*source, SourcePhase::Ready).await;
    assert_eq!(ready.reconnects, 1);
    ack(held);
    ack(again);
    close(source).await;
    counts(&publisher, "slow", (0, 0)).await;
}

/// R2: restarted three times (two of them kills) under load: one consumer again, nothing lost.
async fn three_restarts_lose_nothing(server: &mut OwnServer) {
    let publisher = Publisher::connect(server.url()).await;
    publisher.declare("restarted", QueueKind::Classic).await;
    drop(publisher);
    let mut source = start(&config(server, "restarted"));
    let mut published = BTreeSet::new();
    let mut came = BTreeSet::new();
    for round in 0..3 {
        let publisher = Publisher::connect(server.url()).await;
        for n in 0..20 {
            let id = format!("{round}-{n}");
            publisher.publish("restarted", &[&id]).await;
            published.insert(id);
        }
        for delivery in take(&mut source, 5).await {
            came.insert(id(&delivery));
            delivery.acker.ack();
        }
        match round {
            1 => server.stop().await,
            _ => server.kill().await,
        }
        status(source.status(), |status| status.phase != SourcePhase::Ready).await;
        server.restart().await;
        phase(&*source, SourcePhase::Ready).await;
        let publisher = Publisher::connect(server.url()).await;
        eventually(PATIENCE, async || {
            let consumers = publisher.count("restarted").await.1;
            ensure(consumers == 1, consumers)
        })
        .await;
    }
    while came != published {
        for delivery in take(&mut source, 1).await {
            came.insert(id(&delivery));
            delivery.acker.ack();
        }
    }
    timeout(PATIENCE, source.close(CLOSE)).await.expect("in time").expect("answered");
}

async fn tls_with_a_client_certificate(server: &OwnServer, files: &Path, port: u16) {
    let publisher = Publisher::connect(server.url()).await;
    publisher.declare("encrypted", QueueKind::Classic).await;
    publisher.publish("encrypted", &["m"]).await;
    let mut config = config(server, "encrypted");
    config.hosts = vec![("localhost".into(), port)];
    let file = |name: &str| -> Option<PathBuf> { Some(files.join(name)) };
    config.tls = Some(RabbitMqTls {
        ca_file: file("ca.pem"),
        cert_file: file("client.pem"),
        key_file: file("client.key"),
    });
    let mut source = start(&config);
    ack(take(&mut source, 1).await);
    close(source).await;

    // Without TLS to a port that wants it.
    let plain = RabbitMqConfig { tls: None, ..config.clone() };
    let source = start(&plain);
    let said = status(source.status(), |status| status.reason.contains("AMQP 0-9-1")).await;
    assert!(said.reason.contains("5671"), "{}", said.reason);
    close(source).await;

    // Its authority is not among the system's.
    config.tls = Some(RabbitMqTls { ca_file: None, ..config.tls.expect("set above") });
    let source = start(&config);
    let failing = phase(&*source, SourcePhase::Failing).await;
    assert!(failing.reason.contains("tls.ca_file"), "{}", failing.reason);
    close(source).await;

    config.tls = Some(RabbitMqTls { ca_file: file("none.pem"), ..RabbitMqTls::default() });
    let source = start(&config);
    let failing = phase(&*source, SourcePhase::Failing).await;
    assert!(failing.reason.contains("none.pem"), "{}", failing.reason);
    close(source).await;
}

fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address").port()
}

/// An authority, and certificates of it for a server on loopback and for a client.
async fn certificates(dir: &Path) {
    let key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"];
    let mut authority = vec!["req", "-x509", "-days", "30", "-subj", "/CN=inboxd test authority"];
    authority.extend(["-keyout", "ca.key", "-out", "ca.pem"]);
    authority.extend(key);
    openssl(dir, &authority).await;
    std::fs::write(dir.join("names"), "subjectAltName = DNS:localhost, IP:127.0.0.1\n")
        .expect("written");
    for name in ["server", "client"] {
        let (key_file, request) = (format!("{name}.key"), format!("{name}.csr"));
        let certificate = format!("{name}.pem");
        let mut asking = vec!["req", "-subj", "/CN=localhost"];
        asking.extend(["-keyout", &key_file, "-out", &request]);
        asking.extend(key);
        openssl(dir, &asking).await;
        let mut signing =
            vec!["x509", "-req", "-days", "30", "-in", &request, "-out", &certificate];
        signing.extend(["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"]);
        signing.extend(["-extfile", "names"]);
        openssl(dir, &signing).await;
    }
}

async fn openssl(dir: &Path, arguments: &[&str]) {
    let mut command = tokio::process::Command::new("openssl");
    let output = command.args(arguments).current_dir(dir).output().await;
    let output = output.unwrap_or_else(|error| panic!("openssl cannot be run: {error}"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "openssl {arguments:?}: {said}");
}
