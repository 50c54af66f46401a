//! Copies of dead letters and a broker of one's own: alarms, limits on size, a stop.

use bytes::Bytes;
use inboxd_conformance::eventually;
use inboxd_conformance::servers::{Kind, OwnServer};
use inboxd_contract::ErrorCode;
use inboxd_rabbitmq::RabbitMqConfig;
use lapin::ExchangeKind;

use crate::letters::{Bound, envelope, publish, target};
use crate::support::{PATIENCE, Publisher, ack, close, start, take};

/// R5, with one server for all of it: starting one takes longer than the tests.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_alarm_a_size_and_a_stop_are_errors_until_they_are_over() {
    let mut server = OwnServer::start_with(Kind::RabbitMq, "max_message_size = 500000\n").await;
    let config = RabbitMqConfig::from_uri(server.url(), "dead").expect("a URI");
    let publisher = Publisher::connect(server.url()).await;
    let bound = Bound::new(config.clone(), publisher, ExchangeKind::Fanout).await;
    bound.bind("").await;
    let mut letters = bound.letters();
    letters.publish_timeout = std::time::Duration::from_secs(2);
    let target = target(letters);
    publish(&target, "first", &envelope("k")).await.expect("published");

    // A memory alarm: an error that says so, for what is written and for what is not any more.
    server.control(&["set_vm_memory_high_watermark", "absolute", "1MB"]).await;
    eventually(PATIENCE, async || match publish(&target, "blocked", &envelope("k")).await {
        Err(error) if error.what.contains("alarm") => Ok(()),
        other => Err(format!("{other:?}")),
    })
    .await;
    let error = publish(&target, "blocked", &envelope("k")).await.expect_err("still blocked");
    assert_eq!((error.code, error.refused), (ErrorCode::DeadLetterTargetAway, false), "{error}");
    // Who consumes by another connection is not stopped.
    let mut source = start(&config);
    ack(take(&mut source, 1).await);
    close(source).await;
    server.control(&["set_vm_memory_high_watermark", "0.8"]).await;
    eventually(PATIENCE, async || publish(&target, "unblocked", &envelope("k")).await).await;

    // A body beyond the broker's limit.
    let mut large = envelope("k");
    large.body = Some(Bytes::from(vec![b'x'; 600_000]));
    let error = publish(&target, "large", &large).await.expect_err("too large");
    assert!(error.refused && error.code == ErrorCode::DeadLetterTargetRefused, "{error}");
    eventually(PATIENCE, async || publish(&target, "small", &envelope("k")).await).await;

    // The broker is stopped and comes back; the exchange was not durable, and is made again.
    server.stop().await;
    let error = publish(&target, "away", &envelope("k")).await.expect_err("nobody is there");
    assert!(!error.refused, "{error}");
    server.restart().await;
    let publisher = Publisher::connect(server.url()).await;
    let bound = Bound::new(config, publisher, ExchangeKind::Fanout).await;
    bound.bind("").await;
    eventually(PATIENCE, async || publish(&target, "back", &envelope("k")).await).await;
}
