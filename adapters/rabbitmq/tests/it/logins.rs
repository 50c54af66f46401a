//! Users, vhosts, and brokers that are not there.

use std::time::Duration;

use inboxd_conformance::servers::{self, Kind, control_shared};
use inboxd_conformance::{ensure, eventually};
use inboxd_contract::SourcePhase;
use inboxd_rabbitmq::{QueueKind, RabbitMqConfig, RabbitMqSource};
use secrecy::SecretString;
use tokio::io::AsyncReadExt;
use tokio::net::TcpListener;
use tokio::time::timeout;

use crate::support::{
    PATIENCE, Publisher, ack, behind_proxy, close, phase, shared, start, status, take,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_password_is_said_and_tried_again() {
    let (proxy, mut config) = behind_proxy(&shared()).await;
    config.password = SecretString::from("geheim-und-falsch");
    let source = start(&config);
    let failing = phase(&*source, SourcePhase::Failing).await;
    assert!(failing.reason.contains("login of user"), "{}", failing.reason);
    assert!(!failing.reason.contains("geheim"), "{}", failing.reason);
    eventually(PATIENCE, async || ensure(proxy.accepted() >= 3, proxy.accepted())).await;
    assert_eq!(source.status().borrow().phase, SourcePhase::Failing);
    close(source).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_vhost_is_named() {
    let mut config = shared();
    config.vhost = servers::unique("no/such");
    let source = start(&config);
    let failing = phase(&*source, SourcePhase::Failing).await;
    assert!(failing.reason.contains(&config.vhost), "{}", failing.reason);
    close(source).await;
}

/// A vhost with a slash, a percent sign and a letter beyond ASCII, by field and by URI.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vhost_is_percent_encoded_in_a_uri() {
    let id = servers::unique("v");
    let (vhost, encoded) = (format!("{id}/a%b\u{fc}"), format!("{id}%2Fa%25b%C3%BC"));
    control_shared(Kind::RabbitMq, &["add_vhost", &vhost]).await;
    let shared_config = shared();
    let user = &shared_config.user;
    let all = ["set_permissions", "-p", &vhost, user, ".*", ".*", ".*"];
    control_shared(Kind::RabbitMq, &all).await;

    let uri = servers::rabbitmq_url();
    let (server, _) = uri.rsplit_once('/').expect("a vhost at the end");
    let uri = format!("{server}/{encoded}");
    let publisher = Publisher::connect(&uri).await;
    let config = RabbitMqConfig::from_uri(&uri, "q").expect("a URI");
    assert_eq!(config.vhost, vhost);
    publisher.declare("q", QueueKind::Classic).await;
    publisher.publish("q", &["m"]).await;
    let mut source = start(&config);
    ack(take(&mut source, 1).await);
    close(source).await;
    control_shared(Kind::RabbitMq, &["delete_vhost", &vhost]).await;
}

/// The nodes of a cluster are tried in turn.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_next_host_is_tried() {
    let publisher = Publisher::shared().await;
    let (proxy, away) = behind_proxy(&shared()).await;
    proxy.cut();
    let mut config = shared();
    config.hosts.insert(0, away.hosts[0].clone());
    publisher.declare(&config.queue, QueueKind::Classic).await;
    let source = start(&config);
    phase(&*source, SourcePhase::Ready).await;
    close(source).await;
}

/// A peer that accepts and says nothing is given up after the time to connect, and tried again;
/// what was given up is closed, so that nothing piles up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_peer_is_given_up() {
    let silent = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let mut config = shared();
    config.hosts = vec![("127.0.0.1".into(), silent.local_addr().expect("an address").port())];
    config.connect_timeout = Duration::from_millis(300);
    let source = start(&config);
    for _ in 0..3 {
        let accepted = timeout(PATIENCE, silent.accept()).await.expect("tried again");
        let (mut stream, _) = accepted.expect("a connection");
        let mut said = Vec::new();
        let read = timeout(PATIENCE, stream.read_to_end(&mut said)).await.expect("given up");
        assert!(read.is_err() || said.starts_with(b"AMQP"), "{said:?}");
    }
    status(source.status(), |status| status.reason.contains("no answer within")).await;
    close(source).await;
}

#[tokio::test]
async fn an_invalid_configuration_is_refused_at_start() {
    let config = RabbitMqConfig { prefetch: 0, ..RabbitMqConfig::new("h", 1, "q") };
    let error = RabbitMqSource::start(config).expect_err("refused").to_string();
    assert!(error.contains("prefetch"), "{error}");
}
