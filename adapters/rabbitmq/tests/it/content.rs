//! What publishers put into messages, the undecodable included.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use inboxd_contract::{Header, Origin, Room, SourcePhase};
use inboxd_rabbitmq::QueueKind;
use lapin::BasicProperties;
use lapin::options::QueueBindOptions;
use lapin::types::{AMQPValue, DecimalValue, FieldTable};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;

use crate::raw::{HEADERS, MESSAGE_ID, RawPublisher, TYPE, long, short};
use crate::support::{Publisher, ack, close, counts, ids, shared, start, status, take};

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

/// R9: `x-death` decides nothing, whatever it is: absent, a number, text, or of several queues.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_x_death_of_any_shape_arrives() {
    let (publisher, config) = (Publisher::shared().await, shared());
    publisher.declare(&config.queue, QueueKind::Classic).await;
    let died = |queue: &str, count: i64| {
        let mut table = FieldTable::default();
        table.insert("count".into(), AMQPValue::LongLongInt(count));
        table.insert("queue".into(), AMQPValue::LongString(queue.into()));
        AMQPValue::FieldTable(table)
    };
    let several = AMQPValue::FieldArray(vec![died("a", 3), died("b", 1)].into());
    let expected = [
        (None, None),
        (Some(AMQPValue::LongInt(4)), Some("4")),
        (Some(AMQPValue::LongString("four".into())), Some("four")),
        (Some(several), Some(r#"[{"count":3,"queue":"a"},{"count":1,"queue":"b"}]"#)),
    ];
    for (value, _) in &expected {
        let mut headers = FieldTable::default();
        if let Some(value) = value {
            headers.insert("x-death".into(), value.clone());
        }
        let properties = BasicProperties::default().with_headers(headers);
        publisher.publish_with(&config.queue, b"body", properties).await;
    }
    let mut source = start(&config);
    let came = take(&mut source, expected.len()).await;
    for (delivery, (_, text)) in came.iter().zip(&expected) {
        let header = delivery.envelope.header("x-death").map(|value| value.to_vec());
        assert_eq!(header.as_deref(), text.map(str::as_bytes));
        let Origin::RabbitMq { delivery_count, .. } = &delivery.envelope.origin else {
            panic!("{:?}", delivery.envelope.origin)
        };
        assert_eq!(*delivery_count, None);
    }
    ack(came);
    close(source).await;
}

/// I7: what waits to be handed over is held as it came. A thousand messages with ten thousand
/// headers of one byte each are 80 MB on the wire, and would be ten times that once read.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_small_headers_do_not_fill_the_memory() {
    const MESSAGES: usize = 1_000;
    let publisher = Publisher::shared().await;
    let mut config = shared();
    config.prefetch = 1_000;
    let queue = config.queue.as_str();
    publisher.declare(queue, QueueKind::Classic).await;
    let mut raw = RawPublisher::connect(&config).await;
    let table = [&short(b"n")[..], b"S", &long(b"v")].concat().repeat(10_000);
    let properties = long(&table);
    for _ in 0..MESSAGES {
        raw.publish((b"", queue.as_bytes()), HEADERS, &properties, b"body").await;
    }
    let before = resident_bytes();
    let mut source = start(&config);
    counts(&publisher, queue, (0, 1)).await;
    let room = Room { deliveries: MESSAGES, bytes: 8 << 20 };
    let came = source.next_batch(room).await.expect("a batch");
    assert!(came.len() < 20, "{} deliveries in a room of 8 MiB", came.len());
    let grown = resident_bytes().saturating_sub(before);
    assert!(grown < 500 << 20, "{} MiB", grown >> 20);
    drop((came, source));
}

fn resident_bytes() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").expect("on Linux");
    let pages: usize = pages.split(' ').nth(1).and_then(|n| n.parse().ok()).expect("a number");
    pages * 4096
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

/// B4: names, ids and types that are not UTF-8, repeated names: all as they were published, and
/// what is behind them flows.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn text_that_is_no_text_arrives_to_the_byte() {
    let (publisher, config) = (Publisher::shared().await, shared());
    let queue = config.queue.as_str();
    publisher.declare(queue, QueueKind::Classic).await;
    let mut raw = RawPublisher::connect(&config).await;
    let (name, id, kind) = (&[0xff, 0xfe, b'n'][..], &[b'i', 0xc3, 0x28][..], &[0x80][..]);
    let mut table = Vec::new();
    for (name, value) in [(&b"z"[..], b'1'), (name, b'2'), (b"a", b'3'), (b"z", b'4')] {
        table.extend([short(name), vec![b'S'], long(&[value])].concat());
    }
    let properties = [long(&table), short(id), short(kind)].concat();
    raw.publish((b"", queue.as_bytes()), HEADERS | MESSAGE_ID | TYPE, &properties, b"body").await;
    publisher.publish(queue, &["after"]).await;

    let mut source = start(&config);
    let came = take(&mut source, 2).await;
    let envelope = &came[0].envelope;
    assert_eq!(envelope.property_id.as_deref(), Some(id));
    assert_eq!(envelope.message_type.as_deref(), Some(kind));
    assert_eq!(envelope.body.as_deref(), Some(&b"body"[..]));
    let expected: Vec<_> = [(&b"z"[..], "1"), (name, "2"), (b"a", "3"), (b"z", "4")]
        .map(|(name, value)| Header::new(name.to_vec(), value))
        .into();
    assert_eq!(envelope.headers, expected);
    assert_eq!(ids(&came[1..]), ["after"]);
    assert_eq!(source.status().borrow().reconnects, 0, "nothing broke on the way");
    ack(came);
    close(source).await;
}

/// Tables nested twenty thousand deep, which no stack bears, stop nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nesting_without_end_stops_nothing() {
    let (publisher, config) = (Publisher::shared().await, shared());
    let queue = config.queue.as_str();
    publisher.declare(queue, QueueKind::Quorum).await;
    let mut raw = RawPublisher::connect(&config).await;
    let mut value = vec![b'V'];
    for _ in 0..20_000 {
        value = [b"A".to_vec(), long(&value)].concat();
    }
    let table = long(&[short(b"deep"), value].concat());
    raw.publish((b"", queue.as_bytes()), HEADERS, &table, b"body").await;
    publisher.publish(queue, &["after"]).await;
    let mut source = start(&config);
    let came = take(&mut source, 2).await;
    let deep = came[0].envelope.header("deep").expect("kept, as far as it goes");
    assert!(deep.starts_with(b"[[[") && deep.ends_with(b"]]]"), "{deep:?}");
    assert_eq!(ids(&came[1..]), ["after"]);
    ack(came);
    close(source).await;
}

/// A routing key that is not UTF-8.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_routing_key_that_is_no_text_stops_nothing() {
    let (publisher, config) = (Publisher::shared().await, shared());
    let queue = config.queue.as_str();
    publisher.declare(queue, QueueKind::Classic).await;
    let bound = publisher.channel.queue_bind(
        queue.into(),
        "amq.topic".into(),
        format!("{queue}.#").as_str().into(),
        QueueBindOptions::default(),
        FieldTable::default(),
    );
    bound.await.expect("bound");
    let mut raw = RawPublisher::connect(&config).await;
    let key = [queue.as_bytes(), &[b'.', 0xff]].concat();
    raw.publish((b"amq.topic", &key), 0, b"", b"body").await;
    let mut source = start(&config);
    let came = take(&mut source, 1).await;
    let Origin::RabbitMq { exchange, routing_key, .. } = &came[0].envelope.origin else {
        panic!("{:?}", came[0].envelope.origin)
    };
    assert_eq!(exchange.as_ref(), "amq.topic");
    assert_eq!(routing_key.as_ref(), format!("{queue}.\u{fffd}"));
    ack(came);
    close(source).await;
}

/// What speaks no AMQP is named, not ready, and no hot loop.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_no_rabbitmq_is_named() {
    let odd = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let mut config = shared();
    config.hosts = vec![("127.0.0.1".into(), odd.local_addr().expect("an address").port())];
    let tries = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&tries);
    let answering = tokio::spawn(async move {
        while let Ok((mut stream, _)) = odd.accept().await {
            counted.fetch_add(1, Relaxed);
            let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
        }
    });
    let source = start(&config);
    let said = status(source.status(), |status| status.reason.contains("AMQP 0-9-1")).await;
    assert!(said.reason.contains("15672"), "what to look at: {}", said.reason);
    assert!(!said.reason.contains("Parse"), "no parser's words: {}", said.reason);
    assert_ne!(source.status().borrow().phase, SourcePhase::Ready);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(tries.load(Relaxed) < 20, "{tries:?}");
    close(source).await;
    answering.abort();
}
