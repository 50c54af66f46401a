//! Logins, and a broker that is killed.

use std::time::Duration;

use inboxd_conformance::servers::{Kind, OwnServer, kafka_url};
use inboxd_contract::{ErrorClass, Source, SourcePhase};
use inboxd_kafka::{KafkaConfig, KafkaSource};
use tokio::time::timeout;

use crate::front::FrontedBroker;
use crate::support::{
    CLOSE, PATIENCE, Place, close, config, properties, ready, settle, start, take,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sasl_logs_in_and_a_wrong_password_is_said() {
    let place = Place::new(1).await;
    place.produce(0, &["a"]).await;
    let guarded = FrontedBroker::start_guarded(&kafka_url(), Some(("inboxd", "right"))).await;
    let open = |password: &str| {
        let mut config = config(&guarded.address(), &place.topic, &place.group);
        config.properties.extend(properties(&[
            ("security.protocol", "sasl_plaintext"),
            ("sasl.mechanism", "PLAIN"),
            ("sasl.username", "inboxd"),
            ("sasl.password", password),
        ]));
        start(config)
    };
    let wrong = open("wrong");
    let mut status = wrong.status();
    let failing = status.wait_for(|status| status.phase == SourcePhase::Failing);
    let reason =
        timeout(PATIENCE, failing).await.expect("it fails").expect("it lives").reason.clone();
    assert!(reason.to_lowercase().contains("authentication"), "{reason}");
    assert!(!reason.contains("wrong"), "no password in {reason}");
    wrong.close(CLOSE).await.expect("nothing to commit");

    let mut right = open("right");
    assert_eq!(settle(&mut right, 1).await, ["a"]);
    close(right).await;
}

/// Every way to log in and to encrypt that needs no further library is compiled in.
#[tokio::test]
async fn tls_and_sasl_are_compiled_in_and_their_faults_are_named() {
    let refused = |pairs: &[(&str, &str)]| {
        let mut config = KafkaConfig::new("127.0.0.1:1", ["t"], "g");
        config.properties = properties(pairs);
        KafkaSource::start(config).err()
    };
    for pairs in [
        &[("security.protocol", "ssl")][..],
        &[
            ("security.protocol", "sasl_ssl"),
            ("sasl.mechanism", "SCRAM-SHA-512"),
            ("sasl.username", "u"),
            ("sasl.password", "p"),
        ],
        &[
            ("security.protocol", "sasl_ssl"),
            ("sasl.mechanism", "OAUTHBEARER"),
            ("sasl.oauthbearer.method", "oidc"),
            ("sasl.oauthbearer.client.id", "c"),
            ("sasl.oauthbearer.client.secret", "s"),
            ("sasl.oauthbearer.token.endpoint.url", "https://127.0.0.1:1/token"),
        ],
    ] {
        // OIDC wants libcurl, which is not there: that one is refused, by name.
        if let Some(error) = refused(pairs) {
            let text = format!("{error}: {:?}", error.source);
            assert!(pairs[1].1 == "OAUTHBEARER" && text.contains("oauthbearer"), "{text}");
        }
    }
    let error = refused(&[("security.protocol", "ssl"), ("ssl.ca.location", "/no/such/file")]);
    let error = error.expect("a file that is missing");
    assert_eq!(error.class, ErrorClass::Permanent);
    assert!(format!("{:?}", error.source).contains("ssl.ca.location"), "{:?}", error.source);
}

/// O3: not ready within 15 seconds of the kill, alive throughout, ready again by itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_broker_is_noticed_and_its_return_too() {
    let mut kafka = OwnServer::start(Kind::Kafka).await;
    let place = Place::on(kafka.url(), 1).await;
    place.produce(0, &["a", "b"]).await;
    let mut source = place.open();
    ready(&source).await;
    let mut held = take(&mut source, 2).await;
    held.remove(0).acker.ack();
    place.wait_committed(0, 1).await;
    kafka.kill().await;
    let mut status = source.status();
    let away = status.wait_for(|status| status.phase != SourcePhase::Ready);
    let away = timeout(Duration::from_secs(15), away).await.expect("noticed").expect("it lives");
    assert!(!away.reason.is_empty());
    drop(away);

    kafka.restart().await;
    let before = source.status().borrow().turned_at;
    ready(&source).await;
    assert!(source.status().borrow().turned_at > before, "the loop goes on turning");
    place.produce(0, &["c"]).await;
    // The session may have run out meanwhile: then what was held comes again.
    let lost = held[0].fence.is_lost();
    held.remove(0).acker.ack();
    let expected: &[&str] = if lost { &["b", "c"] } else { &["c"] };
    assert_eq!(settle(&mut source, expected.len()).await, expected);
    place.wait_committed(0, 3).await;
    close(source).await;
}
