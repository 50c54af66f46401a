//! What publishers put into messages, the undecodable included.

use std::time::Duration;

use inboxd_contract::{Origin, SourcePhase};
use inboxd_rabbitmq::QueueKind;
use lapin::BasicProperties;
use lapin::types::{AMQPValue, DecimalValue, FieldTable};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

use crate::support::{
    PATIENCE, Publisher, ack, behind_proxy, close, ids, shared, start, status, take,
};

/// B3 and R9: headers of every type, and an `x-death` of no known shape.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn headers_of_every_type_arrive() {
    let (publisher, config) = (Publisher::shared().await, shared());
    publisher.declare(&config.queue, QueueKind::Classic).await;
    let mut inner = FieldTable::default();
    inner.insert("count".into(), AMQPValue::LongLongInt(7));
    let mut headers = FieldTable::default();
    let decimal = DecimalValue { scale: 2, value: 314 };
    for (name, value) in [
        ("array", AMQPValue::FieldArray(vec![AMQPValue::Boolean(true), AMQPValue::Void].into())),
        ("bool", AMQPValue::Boolean(false)),
        ("bytes", AMQPValue::ByteArray(vec![0xff, 0x00].into())),
        ("decimal", AMQPValue::DecimalValue(decimal)),
        ("double", AMQPValue::Double(0.5)),
        ("int", AMQPValue::LongInt(-5)),
        ("table", AMQPValue::FieldTable(inner)),
        ("timestamp", AMQPValue::Timestamp(1_700_000_000)),
        ("void", AMQPValue::Void),
        ("x-death", AMQPValue::LongString("no list".into())),
    ] {
        headers.insert(name.into(), value);
    }
    let properties = BasicProperties::default()
        .with_message_id("m".into())
        .with_app_id("shop".into())
        .with_type("order.placed".into())
        .with_correlation_id("c".into())
        .with_content_type("text/plain; charset=latin1".into())
        .with_content_encoding("gzip".into())
        .with_headers(headers);
    publisher.publish_with(&config.queue, b"", properties).await;
    let mut source = start(&config);
    let came = take(&mut source, 1).await;
    let envelope = &came[0].envelope;
    let text = |bytes: &Option<bytes::Bytes>| {
        bytes.as_ref().map(|bytes| String::from_utf8_lossy(bytes).into_owned())
    };
    let shown: Vec<_> = envelope
        .headers
        .iter()
        .map(|header| (String::from_utf8_lossy(&header.name).into_owned(), text(&header.value)))
        .collect();
    let expected = [
        ("array", Some("[true,null]")),
        ("bool", Some("false")),
        ("bytes", Some("\u{fffd}\0")),
        ("decimal", Some("3.14")),
        ("double", Some("0.5")),
        ("int", Some("-5")),
        ("table", Some(r#"{"count":7}"#)),
        ("timestamp", Some("1700000000")),
        ("void", None),
        ("x-death", Some("no list")),
    ];
    let expected: Vec<_> = expected
        .iter()
        .map(|(name, value)| ((*name).to_owned(), value.map(str::to_owned)))
        .collect();
    assert_eq!(shown, expected);
    assert_eq!(envelope.header("bytes").map(|bytes| bytes.to_vec()), Some(vec![0xff, 0x00]));
    assert_eq!(text(&envelope.producer).as_deref(), Some("shop"));
    assert_eq!(text(&envelope.message_type).as_deref(), Some("order.placed"));
    assert_eq!(text(&envelope.correlation_id).as_deref(), Some("c"));
    assert_eq!(text(&envelope.content_type).as_deref(), Some("text/plain; charset=latin1"));
    assert_eq!(text(&envelope.content_encoding).as_deref(), Some("gzip"));
    assert_eq!(envelope.body.as_deref(), Some(b"".as_slice()), "empty, and not null");
    let Origin::RabbitMq { queue, exchange, routing_key, redelivered, delivery_count } =
        &envelope.origin
    else {
        panic!("{:?}", envelope.origin)
    };
    assert_eq!((queue.as_ref(), routing_key.as_ref()), (config.queue.as_str(), queue.as_ref()));
    assert_eq!((exchange.as_ref(), *redelivered, *delivery_count), ("", false, None));
    ack(came);
    close(source).await;
}

/// A quorum queue says how often a message was delivered before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_delivery_count_of_a_quorum_queue_is_told() {
    let (publisher, config) = (Publisher::shared().await, shared());
    publisher.declare(&config.queue, QueueKind::Quorum).await;
    publisher.publish(&config.queue, &["m"]).await;
    let mut source = start(&config);
    for expected in [None, Some(1), Some(2)] {
        let came = take(&mut source, 1).await.remove(0);
        let Origin::RabbitMq { redelivered, delivery_count, .. } = came.envelope.origin else {
            panic!("{:?}", came.envelope.origin)
        };
        assert_eq!(delivery_count, expected);
        assert_eq!(redelivered, expected.is_some());
        came.acker.release();
    }
    close(source).await;
}

/// Relays to the broker, with the bytes of one word made into what is not UTF-8.
async fn spoiling_relay(target: String) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("an address").port();
    tokio::spawn(async move {
        let Ok((client, _)) = listener.accept().await else { return };
        let Ok(server) = TcpStream::connect(target).await else { return };
        let (mut from_client, mut to_client) = client.into_split();
        let (mut from_server, mut to_server) = server.into_split();
        let back = tokio::io::copy(&mut from_server, &mut to_client);
        let forth = async {
            let mut chunk = vec![0; 64 << 10];
            while let Ok(read @ 1..) = from_client.read(&mut chunk).await {
                let word = b"SPOILED";
                for at in 0..read.saturating_sub(word.len() - 1) {
                    if chunk[at..].starts_with(word) {
                        chunk[at] = 0xff;
                    }
                }
                if to_server.write_all(&chunk[..read]).await.is_err() {
                    return;
                }
            }
        };
        tokio::select! {
            _ = back => {}
            () = forth => {}
        }
    });
    port
}

/// B4: a short string that is not UTF-8 is named, not ready, and not a hot loop; what is ahead of
/// it flows; once it is removed, so does the rest.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_that_cannot_be_decoded_is_named() {
    let publisher = Publisher::shared().await;
    let (proxy, config) = behind_proxy(&shared()).await;
    let direct = shared();
    publisher.declare(&config.queue, QueueKind::Classic).await;
    let relay = spoiling_relay(format!("{}:{}", direct.hosts[0].0, direct.hosts[0].1)).await;
    let uri = inboxd_conformance::servers::rabbitmq_url();
    let uri = uri.replace(&format!(":{}", direct.hosts[0].1), &format!(":{relay}"));
    let spoiler = Publisher::connect(&uri).await;

    publisher.publish(&config.queue, &["before"]).await;
    spoiler.publish(&config.queue, &["SPOILED"]).await;
    publisher.publish(&config.queue, &["after"]).await;

    let mut source = start(&config);
    let failing = async {
        // What is ahead of it is handed over alone, and settled.
        let mut before = take(&mut source, 1).await;
        while timeout(Duration::from_secs(2), before[0].fence.lost()).await.is_ok() {
            before = take(&mut source, 1).await;
            assert_eq!(ids(&before), ["before"]);
        }
        ack(before);
        status(source.status(), |status| status.reason.contains("not UTF-8")).await
    };
    let failing = timeout(PATIENCE, failing).await.expect("it is named");
    assert_eq!(failing.phase, SourcePhase::Failing);
    assert!(failing.reason.contains(&config.queue), "{}", failing.reason);
    let connections = proxy.accepted();
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(proxy.accepted(), connections, "no hot loop");
    let left = publisher.count(&config.queue).await;
    assert_eq!(left.0, 2, "the one ahead is settled, nothing else is");
    close(source).await;
}
