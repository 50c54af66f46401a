//! What `inspect` finds, and that it leaves everything as it was.

use std::time::Duration;

use inboxd_conformance::servers::{self, Kind, control_shared};
use inboxd_contract::{Finding, Severity};
use inboxd_rabbitmq::{DeclareOptions, QueueKind, RabbitMqConfig, inspect};
use lapin::options::QueueDeclareOptions;
use lapin::types::{AMQPValue, FieldTable};
use secrecy::SecretString;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use crate::support::{Publisher, behind_proxy, close, phase, shared, start};

const WITHIN: Duration = Duration::from_secs(30);

/// The finding of this severity that says this; panics with all if there is none.
fn finding<'a>(findings: &'a [Finding], severity: Severity, what: &str) -> &'a Finding {
    let found =
        findings.iter().find(|finding| finding.severity == severity && finding.what.contains(what));
    let found = found.unwrap_or_else(|| panic!("{severity:?} {what} in {findings:#?}"));
    assert_eq!(found.remedy.is_empty(), severity == Severity::Info, "{found:?}");
    found
}

fn no_problem(findings: &[Finding]) {
    let problem = findings.iter().find(|finding| finding.severity == Severity::Problem);
    assert_eq!(problem, None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_queue_is_told_and_nothing_is_changed() {
    let (publisher, mut config) = (Publisher::shared().await, shared());
    config.prefetch = 200;
    let arguments =
        [("x-max-length", AMQPValue::LongInt(1_000)), ("x-delivery-limit", AMQPValue::LongInt(3))];
    publisher.declare_with(&config.queue, QueueKind::Quorum, &arguments).await;
    publisher.publish(&config.queue, &["m0", "m1"]).await;
    let found = inspect(&config, WITHIN).await;
    no_problem(&found);
    let server = finding(&found, Severity::Info, "RabbitMQ 3.");
    assert!(
        server.what.contains("vhost '/'") && server.subject.contains("127.0.0.1"),
        "{server:?}"
    );
    let queue = finding(&found, Severity::Info, "a quorum queue");
    assert!(queue.what.contains("x-max-length 1000"), "{queue:?}");
    assert!(queue.what.contains("0 consumers"), "{queue:?}");
    finding(&found, Severity::Info, "up to 200 messages");
    // Nothing was taken, and nobody consumes.
    let mut source = start(&config);
    let came = crate::support::take(&mut source, 2).await;
    assert!(came.iter().all(|delivery| delivery.envelope.origin.redelivered() == Some(false)));
    crate::support::ack(came);
    close(source).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_queue_is_a_problem_unless_it_is_declared() {
    let mut config = shared();
    let found = inspect(&config, WITHIN).await;
    finding(&found, Severity::Problem, "does not exist");
    config.declare = Some(DeclareOptions::durable(QueueKind::Classic));
    let found = inspect(&config, WITHIN).await;
    no_problem(&found);
    finding(&found, Severity::Info, "the source declares it");
    // And it was not created.
    let publisher = Publisher::shared().await;
    let passive = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
    let queue = config.queue.as_str();
    let there = publisher.channel.queue_declare(queue.into(), passive, FieldTable::default()).await;
    assert!(there.is_err(), "it was created");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_order_needs_is_told() {
    let publisher = Publisher::shared().await;
    let quorum = RabbitMqConfig { ordered: true, ..shared() };
    publisher.declare(&quorum.queue, QueueKind::Quorum).await;
    finding(&inspect(&quorum, WITHIN).await, Severity::Problem, "is a quorum queue");
    let mut said = quorum.clone();
    said.single_active_consumer = true;
    let found = inspect(&said, WITHIN).await;
    finding(&found, Severity::Problem, "was not declared with x-single-active-consumer");

    let mut single = RabbitMqConfig { ordered: true, ..shared() };
    let arguments = [("x-single-active-consumer", AMQPValue::Boolean(true))];
    publisher.declare_with(&single.queue, QueueKind::Classic, &arguments).await;
    let found = inspect(&single, WITHIN).await;
    finding(&found, Severity::Problem, "has a single active consumer");
    single.single_active_consumer = true;
    no_problem(&inspect(&single, WITHIN).await);

    let classic = RabbitMqConfig { ordered: true, ..shared() };
    publisher.declare(&classic.queue, QueueKind::Classic).await;
    let source = start(&classic);
    phase(&*source, inboxd_contract::SourcePhase::Ready).await;
    let found = inspect(&classic, WITHIN).await;
    no_problem(&found);
    finding(&found, Severity::Info, "stands by");
    assert_eq!(source.status().borrow().phase, inboxd_contract::SourcePhase::Ready);
    close(source).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_kind_than_is_declared_is_a_problem() {
    let (publisher, mut config) = (Publisher::shared().await, shared());
    publisher.declare(&config.queue, QueueKind::Classic).await;
    config.declare = Some(DeclareOptions::durable(QueueKind::Quorum));
    finding(&inspect(&config, WITHIN).await, Severity::Problem, "of another kind");
    config.declare = Some(DeclareOptions::durable(QueueKind::Classic));
    let found = inspect(&config, WITHIN).await;
    finding(&found, Severity::Problem, "x-expires");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_keeps_a_login_away_is_told_with_a_remedy() {
    let mut wrong = shared();
    wrong.password = SecretString::from("geheim-und-falsch");
    let found = inspect(&wrong, WITHIN).await;
    let said = finding(&found, Severity::Problem, "login of user");
    assert!(!format!("{said:?}").contains("geheim"), "{said:?}");
    assert!(!said.what.contains("trying again"), "{said:?}");

    let mut vhost = shared();
    vhost.vhost = servers::unique("no-such");
    finding(&inspect(&vhost, WITHIN).await, Severity::Problem, &vhost.vhost);

    let (proxy, away) = behind_proxy(&shared()).await;
    proxy.cut();
    finding(&inspect(&away, WITHIN).await, Severity::Problem, "cannot connect");
    // One node of two is enough, and the other is named.
    let mut two = shared();
    two.hosts.insert(0, away.hosts[0].clone());
    two.declare = Some(DeclareOptions::durable(QueueKind::Classic));
    let found = inspect(&two, WITHIN).await;
    no_problem(&found);
    finding(&found, Severity::Warning, "cannot connect");

    let odd = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let mut http = shared();
    http.hosts = vec![("127.0.0.1".into(), odd.local_addr().expect("an address").port())];
    let answering = tokio::spawn(async move {
        while let Ok((mut stream, _)) = odd.accept().await {
            // What was sent is read first: to close over it would reset the connection.
            let mut header = [0; 8];
            let _ = stream.read_exact(&mut header).await;
            let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
        }
    });
    finding(&inspect(&http, WITHIN).await, Severity::Problem, "AMQP 0-9-1");
    answering.abort();

    let invalid = RabbitMqConfig { prefetch: 0, ..shared() };
    finding(&inspect(&invalid, WITHIN).await, Severity::Problem, "prefetch");
}

/// A user that may read the queue and nothing else, and one that may not even do that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_rights_are_told() {
    let (publisher, mut config) = (Publisher::shared().await, shared());
    publisher.declare(&config.queue, QueueKind::Classic).await;
    config.user = servers::unique("u");
    config.password = SecretString::from("p");
    control_shared(Kind::RabbitMq, &["add_user", &config.user, "p"]).await;
    control_shared(
        Kind::RabbitMq,
        &["set_permissions", "-p", &config.vhost, &config.user, "^$", "^$", ".*"],
    )
    .await;
    let found = inspect(&config, WITHIN).await;
    no_problem(&found);
    finding(&found, Severity::Info, "of a kind that is not told");
    let ordered = RabbitMqConfig { ordered: true, ..config.clone() };
    finding(&inspect(&ordered, WITHIN).await, Severity::Problem, "its kind is not told");
    control_shared(Kind::RabbitMq, &["delete_user", &config.user]).await;
}
