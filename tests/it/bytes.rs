//! What publishers put into messages, from both brokers to the application: forbidden bytes,
//! reserved names, every type, text that is none, binary and large bodies.

use std::time::Duration;

use bytes::Bytes;
use hex::encode as hex;
use inboxd_conformance::app::{Answer, App, Post};
use inboxd_conformance::{ensure, eventually};
use lapin::BasicProperties;
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::types::{AMQPValue, DecimalValue, FieldTable};
use rand::rngs::SmallRng;
use rand::{RngCore as _, SeedableRng as _};
use sha2::{Digest as _, Sha256};

use crate::support::raw::{HEADERS, MESSAGE_ID, TYPE, amqp_publisher, long, produce_bytes, short};
use crate::support::{
    Broker, BrokerKind, Database, DatabaseKind, Message, PATIENCE, Sidecar, config, stop_all,
    subscription,
};

fn sha256(bytes: impl AsRef<[u8]>) -> String {
    hex(Sha256::digest(bytes))
}

fn random_bytes(seed: u64, length: usize) -> Bytes {
    let mut bytes = vec![0; length];
    SmallRng::seed_from_u64(seed).fill_bytes(&mut bytes);
    bytes.into()
}

/// One subscription with an inbox and an application of its own.
struct World {
    app: App,
    broker: Broker,
    database: Database,
    sidecar: Sidecar,
}

impl World {
    async fn new(broker: BrokerKind, database: DatabaseKind) -> Self {
        Self::with(Broker::new(broker).await, Database::new(database), "").await
    }

    async fn with(broker: Broker, database: Database, keys: &str) -> Self {
        let app = App::start().await;
        let callback = app.url("/orders?tenant=1");
        let config = config(&broker, &database, &broker.name, &callback, keys, "");
        let sidecar = Sidecar::start(&config);
        Self { app, broker, database, sidecar }
    }

    /// Waits until all these ids are processed; their first POSTs, in this order.
    async fn posts(&self, ids: &[&str]) -> Vec<Post> {
        eventually(LONG, async || {
            let rows = self.database.rows(&self.broker.name).await;
            let missing: Vec<_> = ids.iter().filter(|id| !rows.contains(**id)).collect();
            let log = self.sidecar.log();
            ensure(missing.is_empty(), format!("{missing:?} missing in {rows:?}; log:\n{log}"))
        })
        .await;
        ids.iter().map(|id| self.app.ledger().posts(id).remove(0)).collect()
    }

    /// Everything was delivered once, and nothing is left.
    async fn ends_well(self) {
        assert!(self.database.dead(&self.broker.name).await.is_empty());
        assert!(self.app.ledger().accepted_more_than_once().is_empty());
        stop_all(&self.broker, &self.broker.name, &mut [self.sidecar]).await;
    }
}

fn header(post: &Post, name: &str) -> Vec<String> {
    post.headers_named(&format!("inbox-header-{}", name.to_ascii_lowercase()))
}

/// B1: bytes that HTTP forbids.
async fn forbidden_bytes(broker: BrokerKind, database: DatabaseKind) {
    let world = World::new(broker, database).await;
    let message = Message::id("m1")
        .header("x-control", [b'a', 0x02, b'b'])
        .header("x-lines", "a\r\nx-evil: 1\r\n\r\nPOST / HTTP/1.1")
        .header("x-high", [0xff, 0x00])
        .header("a name", "with a space")
        .header("x-name\r\nx-evil", "1")
        .header("x-spaces", " a ")
        .header("naïve", "ü 100%")
        .null_header("x-null");
    world.broker.publish([message]).await;
    let post = world.posts(&["m1"]).await.remove(0);
    for (name, value) in [
        ("x-control", "a%02b"),
        ("x-lines", "a%0D%0Ax-evil: 1%0D%0A%0D%0APOST / HTTP/1.1"),
        ("x-high", "%FF%00"),
        ("a%20name", "with a space"),
        ("x-name%0D%0Ax-evil", "1"),
        ("x-spaces", "%20a%20"),
        ("na%C3%AFve", "%C3%BC 100%25"),
        ("x-null", ""),
    ] {
        assert_eq!(header(&post, name), [value], "{name}: {:?}", post.headers);
    }
    assert_eq!(post.header("x-evil"), None, "smuggled");
    assert_eq!(post.path, "/orders?tenant=1");
    assert_eq!(post.body.as_deref(), Some(&b"body of m1"[..]));
    assert_eq!(world.app.ledger().begun(), 1, "one request and no other");
    world.ends_well().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_that_http_forbids_come_encoded_and_smuggle_nothing() {
    tokio::join!(
        forbidden_bytes(BrokerKind::RabbitClassic, DatabaseKind::Postgres),
        forbidden_bytes(BrokerKind::Kafka, DatabaseKind::MariaDb),
    );
}

/// B2: names that frame a request, or that say who asks.
async fn reserved_names(broker: BrokerKind, database: DatabaseKind) {
    let world = World::new(broker, database).await;
    let reserved = [
        ("content-length", "777"),
        ("Transfer-Encoding", "chunked"),
        ("host", "elsewhere"),
        ("connection", "close"),
        ("authorization", "Bearer of the publisher"),
        ("cookie", "a=b"),
        ("expect", "100-continue"),
        ("te", "trailers"),
        ("upgrade", "h2c"),
    ];
    let forged = [("inbox-attempt", "99"), ("x-inbox", "own"), ("webhook-id", "w")];
    let mut message = Message::id("m1");
    for (name, value) in reserved.iter().chain(&forged) {
        message = message.header(name, value);
    }
    world.broker.publish([message, Message::id("m2")]).await;
    let [post, after] = &world.posts(&["m1", "m2"]).await[..] else { panic!("two posts") };
    assert_eq!(post.headers_named("content-length"), ["10"]);
    assert_eq!(post.headers_named("host"), [world.app.addr().to_string()]);
    assert_eq!(post.body.as_deref(), Some(&b"body of m1"[..]));
    let omitted = post.headers_named("inbox-headers-omitted").join(",").to_ascii_lowercase();
    for (name, value) in reserved {
        assert!(header(post, name).is_empty(), "{name} is copied: {:?}", post.headers);
        assert!(!post.headers_named(&name.to_ascii_lowercase()).contains(&value.to_owned()));
        let name = name.to_ascii_lowercase();
        assert!(omitted.split(',').any(|one| one.trim() == name), "{name} not in {omitted}");
    }
    for (name, value) in forged {
        assert_eq!(header(post, name), [value]);
    }
    assert_eq!(post.headers_named("inbox-attempt"), ["1"], "not forged");
    assert_eq!(after.body.as_deref(), Some(&b"body of m2"[..]), "the connection is in step");
    world.ends_well().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reserved_names_are_never_copied_and_framing_is_correct() {
    tokio::join!(
        reserved_names(BrokerKind::RabbitQuorum, DatabaseKind::Sqlite),
        reserved_names(BrokerKind::Kafka, DatabaseKind::Postgres),
    );
}

/// B3.
#[tokio::test(flavor = "multi_thread")]
async fn amqp_headers_of_every_type_are_forwarded() {
    let world = World::new(BrokerKind::RabbitClassic, DatabaseKind::MariaDb).await;
    let mut table = FieldTable::default();
    table.insert("count".into(), AMQPValue::LongLongInt(7));
    let array = vec![AMQPValue::Boolean(true), AMQPValue::Void, AMQPValue::LongString("é".into())];
    let decimal = DecimalValue { scale: 2, value: 314 };
    let mut headers = FieldTable::default();
    let values = [
        ("t-array", AMQPValue::FieldArray(array.into()), r#"[true,null,"%C3%A9"]"#),
        ("t-bool", AMQPValue::Boolean(false), "false"),
        ("t-bytes", AMQPValue::ByteArray(vec![0xff, b'a'].into()), "%FFa"),
        ("t-decimal", AMQPValue::DecimalValue(decimal), "3.14"),
        ("t-double", AMQPValue::Double(0.5), "0.5"),
        ("t-float", AMQPValue::Float(0.25), "0.25"),
        ("t-int", AMQPValue::LongInt(-5), "-5"),
        ("t-long", AMQPValue::LongLongInt(i64::MIN), "-9223372036854775808"),
        ("t-short", AMQPValue::ShortInt(-3), "-3"),
        ("t-table", AMQPValue::FieldTable(table), r#"{"count":7}"#),
        ("t-timestamp", AMQPValue::Timestamp(1_700_000_000), "1700000000"),
        ("t-tiny", AMQPValue::ShortShortUInt(200), "200"),
        ("t-void", AMQPValue::Void, ""),
        ("x-death", AMQPValue::LongString("no list".into()), "no list"),
    ];
    for (name, value, _) in &values {
        headers.insert((*name).into(), value.clone());
    }
    let properties = BasicProperties::default()
        .with_message_id("m1".into())
        .with_type("order.placed".into())
        .with_app_id("shop 1".into())
        .with_correlation_id("c/1".into())
        .with_headers(headers);
    let connection = world.broker.amqp().await;
    let channel = connection.create_channel().await.expect("a channel");
    channel.confirm_select(ConfirmSelectOptions::default()).await.expect("confirms");
    let (queue, options) = (world.broker.name.as_str(), BasicPublishOptions::default());
    channel
        .basic_publish("".into(), queue.into(), options, b"body", properties)
        .await
        .expect("published");
    channel.wait_for_confirms().await.expect("confirmed");

    let post = world.posts(&["m1"]).await.remove(0);
    for (name, _, expected) in values {
        assert_eq!(header(&post, name), [expected], "{name}");
    }
    for (name, value) in [
        ("inbox-message-type", "order.placed"),
        ("inbox-producer", "shop%201"),
        ("inbox-correlation-id", "c%2F1"),
    ] {
        assert_eq!(post.headers_named(name), [value]);
    }
    connection.close(0, "".into()).await.expect("closed");
    world.ends_well().await;
}

/// B4: beside a subscription that is not concerned, in the same process.
#[tokio::test(flavor = "multi_thread")]
async fn text_that_is_no_text_is_delivered_from_rabbitmq_and_others_flow() {
    let app = App::start().await;
    let database = Database::new(DatabaseKind::Postgres);
    let odd = Broker::new(BrokerKind::RabbitClassic).await;
    let other = odd.sibling().await;
    let config = format!(
        "{}\n{}\n{}\n{}",
        database.config(),
        odd.config(),
        subscription("orders", &odd, &odd.name, &app.url("/odd"), ""),
        subscription("other", &other, &other.name, &app.url("/other"), ""),
    );
    let mut sidecar = Sidecar::start(&config);
    let mut publisher = amqp_publisher(&odd).await;
    let (id, kind) = (&[b'i', 0xc3, 0x28][..], &[b'k', 0x80][..]);
    let mut table = Vec::new();
    for (name, value) in [(&[0xff, b'n'][..], &[0xfe][..]), (b"plain", b"value")] {
        table.extend([short(name), vec![b'S'], long(value)].concat());
    }
    let properties = [long(&table), short(id), short(kind)].concat();
    let flags = HEADERS | MESSAGE_ID | TYPE;
    let to = (&b""[..], odd.name.as_bytes());
    publisher.publish(to, flags, &properties, b"odd").await;
    publisher.publish(to, flags, &properties, b"odd").await;
    // What RabbitMQ makes of AMQP 1.0: an id that is a UUID is its sixteen bytes, and what
    // 0-9-1 has no place for is a binary header.
    let uuid = [0xc3, 0x28, 0, 1, 0x80, 0xff, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16];
    let section = [0x00, 0x53, 0x73, 0xc0, 0x12, 0x01, 0x98];
    let table = [short(b"x-amqp-1.0-properties"), vec![b'S'], long(&section)].concat();
    let properties = [long(&table), short(&uuid)].concat();
    publisher.publish(to, HEADERS | MESSAGE_ID, &properties, b"from 1.0").await;
    odd.publish([Message::id("after")]).await;
    other.publish([Message::id("elsewhere")]).await;

    // An id that no column can hold is its hash, everywhere the same.
    let (hashed, hashed_uuid) =
        (format!("sha256:{}", sha256(id)), format!("sha256:{}", sha256(uuid)));
    eventually(PATIENCE, async || {
        let rows = (database.rows(&odd.name).await, database.rows(&other.name).await);
        let duplicates = sidecar.duplicates().await;
        let all = [&hashed, &hashed_uuid, "after"].iter().all(|id| rows.0.contains(*id));
        let state = format!("{rows:?}, {duplicates} duplicates; log:\n{}", sidecar.log());
        ensure(all && rows.1.contains("elsewhere") && duplicates == 1, state)
    })
    .await;
    let posts = app.ledger().posts(&hashed);
    assert_eq!(posts.len(), 1, "the same bytes are the same id");
    let post = &posts[0];
    assert_eq!(post.headers_named("inbox-header-%ffn"), ["%FE"], "{:?}", post.headers);
    assert_eq!(post.headers_named("inbox-header-plain"), ["value"]);
    assert_eq!(post.headers_named("inbox-message-type"), ["k%80"]);
    assert_eq!(post.body.as_deref(), Some(&b"odd"[..]));
    let post = &app.ledger().posts(&hashed_uuid)[0];
    assert_eq!(post.headers_named("inbox-header-x-amqp-1.0-properties"), ["%00Ss%C0%12%01%98"]);
    assert_eq!(post.body.as_deref(), Some(&b"from 1.0"[..]));
    sidecar.ready().await;
    let reconnects = sidecar.metric("inboxd_source_reconnects_total", &[]).await;
    assert_eq!(reconnects as u64, 0, "nothing broke on the way");
    let status = sidecar.stop().await;
    assert!(status.success(), "{status}:\n{}", sidecar.log());
    eventually(PATIENCE, async || {
        let left = (odd.left(&odd.name).await, other.left(&other.name).await);
        ensure(left == (0, 0), format!("{left:?} left"))
    })
    .await;
}

/// B4.
#[tokio::test(flavor = "multi_thread")]
async fn text_that_is_no_text_is_delivered_from_kafka() {
    let world = World::new(BrokerKind::Kafka, DatabaseKind::Sqlite).await;
    let id = &[b'i', 0xc3, 0x28][..];
    let headers: [(&[u8], &[u8]); 4] = [
        (b"message-id", id),
        (b"message-type", &[b'k', 0x80]),
        (&[0xff, b'n'], &[0xfe]),
        (b"plain", b"value"),
    ];
    produce_bytes(&world.broker, &headers, b"odd").await;
    produce_bytes(&world.broker, &headers, b"odd").await;
    world.broker.publish([Message::id("after")]).await;
    let hashed = format!("sha256:{}", sha256(id));
    let post = world.posts(&[&hashed, "after"]).await.remove(0);
    assert_eq!(post.headers_named("inbox-header-%ffn"), ["%FE"], "{:?}", post.headers);
    assert_eq!(post.headers_named("inbox-header-plain"), ["value"]);
    assert_eq!(post.headers_named("inbox-message-type"), ["k%80"]);
    assert_eq!(post.body.as_deref(), Some(&b"odd"[..]));
    eventually(PATIENCE, async || ensure(world.sidecar.duplicates().await == 1, "no duplicate"))
        .await;
    world.ends_well().await;
}

/// B5, B6: bodies and what they are said to be.
async fn bodies(broker: BrokerKind, database: DatabaseKind) {
    let world = World::new(broker, database).await;
    // An empty gzip stream.
    let zipped = [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let latin1 = Bytes::from_static(&[b'n', b'a', 0xef, b'v', b'e']);
    let bodies: [(&str, Bytes, Option<&str>, Option<&str>); 7] = [
        ("odd", Bytes::from_static(&[0, 1, 0x7f, 0x80, 0xff, 0xfe, 0xc3, 0x28]), None, None),
        ("random", random_bytes(5, 1 << 20), Some("application/octet-stream"), None),
        ("empty", Bytes::new(), Some("application/json"), None),
        ("xml", Bytes::from_static(b"<a>\r\n</a>\n"), Some("application/xml"), None),
        ("latin1", latin1, Some("text/plain; charset=latin1"), None),
        ("json", Bytes::from_static(b"{ \"a\" : 1.0 }\n"), Some("Application/JSON"), None),
        ("gzip", Bytes::copy_from_slice(&zipped), Some("application/json"), Some("gzip")),
    ];
    let messages = bodies.iter().map(|(id, body, content_type, encoding)| {
        let mut message = Message::id(*id).body(body.clone());
        message.content_type = content_type.map(str::to_owned);
        message.content_encoding = encoding.map(str::to_owned);
        message
    });
    world.broker.publish(messages).await;
    let ids: Vec<_> = bodies.iter().map(|(id, ..)| *id).collect();
    for (post, (id, body, content_type, encoding)) in world.posts(&ids).await.iter().zip(&bodies) {
        assert_eq!((post.body_len, &post.body_sha256), (body.len(), &sha256(body)), "{id}");
        assert_eq!(post.headers_named("content-length"), [body.len().to_string()], "{id}");
        let expected = content_type.unwrap_or("application/octet-stream");
        assert_eq!(post.headers_named("content-type"), [expected], "{id}");
        let encodings = post.headers_named("content-encoding");
        assert_eq!(encodings, encoding.iter().copied().collect::<Vec<_>>(), "{id}");
        assert_eq!(post.header("inbox-tombstone"), None, "{id}");
    }
    world.ends_well().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_and_their_types_come_verbatim() {
    tokio::join!(
        bodies(BrokerKind::RabbitQuorum, DatabaseKind::Postgres),
        bodies(BrokerKind::RabbitClassic, DatabaseKind::Sqlite),
        bodies(BrokerKind::Kafka, DatabaseKind::MariaDb),
    );
}

const MIB: usize = 1 << 20;
/// Without optimisation bodies are hashed at some 10 MiB/s, on a machine that is busy.
const LONG: Duration = Duration::from_secs(240);

/// How often this consumer has a dead letter whose body has this hash.
async fn dead_bodies(database: &Database, hash: &str) -> i64 {
    let equal = match database.kind {
        DatabaseKind::Postgres => format!("encode(sha256(body), 'hex') = '{hash}'"),
        _ => format!("SHA2(body, 256) = '{hash}'"),
    };
    let table = database.table("inbox_parked");
    let count = format!("SELECT COUNT(*) FROM {table} WHERE {equal}");
    database.session().await.number(&count).await
}

/// B7: 16 MiB, accepted once and refused once.
async fn sixteen_mebibytes(broker: BrokerKind, database: DatabaseKind) {
    let world = World::new(broker, database).await;
    let (good, bad) = (random_bytes(1, 16 * MIB), random_bytes(2, 16 * MIB));
    world.app.plan("bad", [Answer::status(413)]);
    let messages = [
        Message::id("good").body(good.clone()),
        Message::id("bad").body(bad.clone()),
        Message::id("after"),
    ];
    world.broker.publish(messages).await;
    let post = world.posts(&["good", "after"]).await.remove(0);
    assert_eq!((post.body_len, post.body_sha256), (16 * MIB, sha256(good)));
    let group = &world.broker.name;
    eventually(LONG, async || {
        let dead = world.database.dead(group).await;
        ensure(dead.contains_key("bad"), format!("{dead:?}; log:\n{}", world.sidecar.log()))
    })
    .await;
    assert_eq!(dead_bodies(&world.database, &sha256(bad)).await, 1, "kept to the byte");
    assert_eq!(world.app.ledger().begun_of("bad"), 1);
    stop_all(&world.broker, group, &mut [world.sidecar]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sixteen_mebibytes_come_through_and_are_kept_as_a_dead_letter() {
    sixteen_mebibytes(BrokerKind::RabbitClassic, DatabaseKind::MariaDb).await;
    sixteen_mebibytes(BrokerKind::Kafka, DatabaseKind::Postgres).await;
}

/// B7: 4 MiB fifty times while the application is slow; `most_mib` bounds the sidecar's memory.
async fn four_mebibytes_fifty_times(broker: Broker, database: DatabaseKind, most_mib: u64) {
    let what = format!("{:?}", broker.kind);
    let keys = "in_flight_bytes_max = \"16 MiB\"\nconcurrency = 50\nfingerprint = \"off\"";
    let world = World::with(broker, Database::new(database), keys).await;
    world.app.plan("m7", [Answer::status(413)]);
    world.app.set_default(Answer::status(200).after(Duration::from_millis(20)));
    // A few different ones: hashing takes long without optimisation.
    let bodies: Vec<_> = (0..5).map(|n| random_bytes(n, 4 * MIB)).collect();
    let hashes: Vec<_> = bodies.iter().map(sha256).collect();
    for tens in 0..5 {
        let messages = (10 * tens..10 * tens + 10)
            .map(|n| Message::id(format!("m{n}")).body(bodies[n % 5].clone()));
        world.broker.publish(messages).await;
    }
    let group = &world.broker.name;
    eventually(LONG, async || {
        let (rows, dead) =
            (world.database.rows(group).await.len(), world.database.dead(group).await.len());
        let log = world.sidecar.log();
        ensure((rows, dead) == (49, 1), format!("{what}: {rows} rows, {dead} dead; log:\n{log}"))
    })
    .await;
    for n in 0..50 {
        let posts = world.app.ledger().posts(&format!("m{n}"));
        let seen: Vec<_> = posts.iter().map(|post| (post.body_len, &post.body_sha256)).collect();
        assert_eq!(seen, [(4 * MIB, &hashes[n % 5])], "m{n}");
    }
    assert_eq!(dead_bodies(&world.database, &hashes[7 % 5]).await, 1, "kept to the byte");
    let peak = world.sidecar.resident_peak_mib();
    println!("{what}: at most {peak} MiB resident");
    assert!(peak < most_mib, "{what}: {peak} MiB resident");
    stop_all(&world.broker, group, &mut [world.sidecar]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fifty_times_four_mebibytes_take_bounded_memory_from_rabbitmq() {
    let broker = Broker::new(BrokerKind::RabbitClassic).await.with_source_keys("prefetch = 50");
    // The client holds as much as the prefetch allows: here all of it.
    four_mebibytes_fifty_times(broker, DatabaseKind::MariaDb, 400).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fifty_times_four_mebibytes_take_bounded_memory_from_kafka() {
    let broker = Broker::new(BrokerKind::Kafka).await;
    four_mebibytes_fifty_times(broker, DatabaseKind::Postgres, 200).await;
}
