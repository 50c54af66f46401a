//! Copies of dead letters at an exchange: the suite that every target passes, and what only RabbitMQ has.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::future::join_all;
use inboxd_conformance::eventually;
use inboxd_conformance::letters::{Abilities, LettersHarness, LettersPlace, SeenCopy, run};
use inboxd_conformance::net::Proxy;
use inboxd_contract::{
    ConsumerId, DeadLetterTarget, DeadReason, Envelope, ErrorCode, Header, InboxKey, LetterCopy,
    MessageId, Origin, PublishError, Room, Severity, Source,
};
use inboxd_rabbitmq::{
    DeadLetterExchange, DeadLetterExchangeConfig, QueueKind, RabbitMqConfig, inspect_dead_letters,
};
use lapin::ExchangeKind;
use lapin::options::{ExchangeDeclareOptions, QueueBindOptions};
use lapin::types::{AMQPValue, FieldTable};
use tokio::sync::Mutex;
use tokio::time::timeout;

use crate::support::{PATIENCE, Publisher, ack, behind_proxy, close, shared, start, take};

const PUBLISH: Duration = Duration::from_secs(5);
const WITHIN: Duration = Duration::from_secs(10);

/// An exchange and a queue, bound or not.
pub struct Bound {
    pub publisher: Publisher,
    pub exchange: String,
    /// The queue's.
    pub config: RabbitMqConfig,
}

impl Bound {
    /// A new exchange of this kind with a queue that is not bound to it.
    pub async fn new(config: RabbitMqConfig, publisher: Publisher, kind: ExchangeKind) -> Self {
        publisher.declare(&config.queue, QueueKind::Classic).await;
        let exchange = format!("x-{}", config.queue);
        let options = ExchangeDeclareOptions::default();
        let name = exchange.as_str().into();
        let declared =
            publisher.channel.exchange_declare(name, kind, options, FieldTable::default());
        declared.await.expect("declared");
        Self { publisher, exchange, config }
    }

    pub async fn bind(&self, key: &str) {
        let (queue, exchange) = (self.config.queue.as_str(), self.exchange.as_str());
        let options = QueueBindOptions::default();
        let table = FieldTable::default();
        let bound = self.publisher.channel.queue_bind(
            queue.into(),
            exchange.into(),
            key.into(),
            options,
            table,
        );
        bound.await.expect("bound");
    }

    pub async fn unbind(&self, key: &str) {
        let (queue, exchange) = (self.config.queue.as_str(), self.exchange.as_str());
        let table = FieldTable::default();
        let unbound =
            self.publisher.channel.queue_unbind(queue.into(), exchange.into(), key.into(), table);
        unbound.await.expect("unbound");
    }

    pub fn letters(&self) -> DeadLetterExchangeConfig {
        letters(&self.config, &self.exchange)
    }
}

fn letters(server: &RabbitMqConfig, exchange: &str) -> DeadLetterExchangeConfig {
    let mut config = DeadLetterExchangeConfig::of_source(server, exchange);
    config.publish_timeout = PUBLISH;
    config
}

pub fn target(config: DeadLetterExchangeConfig) -> DeadLetterExchange {
    DeadLetterExchange::start(config).expect("a valid configuration")
}

struct RabbitMqLetters;

struct Place {
    bound: Bound,
    proxy: Proxy,
    target: Arc<DeadLetterExchange>,
    /// What has come so far, and what brings it.
    came: Mutex<(Vec<SeenCopy>, Box<dyn Source>)>,
}

#[async_trait]
impl LettersHarness for RabbitMqLetters {
    fn adapter(&self) -> &'static str {
        "rabbitmq"
    }

    fn abilities(&self) -> Abilities {
        Abilities {
            tombstones: false,
            keys: false,
            routes: true,
            // Only a broker of one's own has a limit that is small.
            refuses_bytes: None,
            taken_names: &[
                "x-death",
                "CC",
                "BCC",
                "x-first-death-queue",
                "x-last-death-reason",
                "x-delivery-count",
                "X-Delay",
            ],
            large_bytes: 3 << 20,
            real: true,
        }
    }

    fn publish_timeout(&self) -> Duration {
        PUBLISH
    }

    async fn fresh(&self) -> Box<dyn LettersPlace> {
        let bound = Bound::new(shared(), Publisher::shared().await, ExchangeKind::Fanout).await;
        bound.bind("").await;
        let (proxy, behind) = behind_proxy(&bound.config).await;
        let target = Arc::new(target(letters(&behind, &bound.exchange)));
        let came = Mutex::new((Vec::new(), start(&bound.config)));
        Box::new(Place { bound, proxy, target, came })
    }
}

#[async_trait]
impl LettersPlace for Place {
    fn target(&self) -> Arc<dyn DeadLetterTarget> {
        self.target.clone()
    }

    async fn copies(&self) -> Vec<SeenCopy> {
        let mut came = self.came.lock().await;
        let (copies, source) = &mut *came;
        let room = Room { deliveries: 1_000, bytes: 64 << 20 };
        while let Ok(batch) = timeout(Duration::from_millis(100), source.next_batch(room)).await {
            let batch = batch.expect("a batch");
            copies.extend(batch.iter().map(|delivery| SeenCopy {
                key: None,
                headers: pairs(&delivery.envelope.headers),
                body: delivery.envelope.body.clone(),
            }));
            ack(batch);
        }
        copies.clone()
    }

    async fn set_reachable(&self, reachable: bool) {
        match reachable {
            true => self.proxy.heal(),
            false => self.proxy.cut(),
        }
    }

    async fn hang(&self) {
        self.proxy.black_hole();
    }

    async fn set_routed(&self, routed: bool) {
        match routed {
            true => self.bound.bind("").await,
            false => self.bound.unbind("").await,
        }
    }
}

fn pairs(headers: &[Header]) -> Vec<(Bytes, Option<Bytes>)> {
    headers.iter().map(|header| (header.name.clone(), header.value.clone())).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_exchange_conforms() {
    run(RabbitMqLetters).await;
}

pub async fn publish(
    target: &DeadLetterExchange,
    id: &str,
    envelope: &Envelope,
) -> Result<(), PublishError> {
    let key = InboxKey {
        consumer_id: ConsumerId::new("shop").expect("an id"),
        message_id: MessageId::from_stored(id),
    };
    let copy = LetterCopy {
        envelope,
        key: &key,
        subscription: "orders",
        reason: DeadReason::Refused,
        attempts: 1,
        last_status: Some(422),
        last_error: None,
        first_ago: Duration::ZERO,
    };
    target.publish(copy).await
}

/// What was published with this routing key.
pub fn envelope(key: &str) -> Envelope {
    let origin = Origin::RabbitMq {
        queue: "q".into(),
        exchange: "shop".into(),
        routing_key: key.into(),
        redelivered: false,
        delivery_count: None,
    };
    Envelope::new(origin, Some(Bytes::from_static(b"body")))
}

/// A return and a confirm are of one copy, however many are under way: what leads somewhere is `Ok`,
/// what does not is not, whichever comes between.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_of_many_hears_what_became_of_itself() {
    const MANY: usize = 400;
    let bound = Bound::new(shared(), Publisher::shared().await, ExchangeKind::Direct).await;
    bound.bind("somewhere").await;
    let target = Arc::new(target(bound.letters()));
    let publishing = join_all((0..MANY).map(|n| {
        let target = Arc::clone(&target);
        tokio::spawn(async move {
            let mut letter = envelope(if n % 3 == 0 { "nowhere" } else { "somewhere" });
            // Some of what comes back comes in several frames.
            letter.body = Some(vec![b'x'; (n % 5) * 100_000].into());
            (n, publish(&target, &n.to_string(), &letter).await)
        })
    }));
    for answer in publishing.await {
        let (n, answer) = answer.expect("no panic");
        match n % 3 {
            0 => {
                let error = answer.expect_err("it leads nowhere");
                assert_eq!(error.code, ErrorCode::DeadLetterUnrouted, "{n}: {error}");
                assert!(error.what.contains("'nowhere'") && error.what.contains("bind"), "{error}");
            }
            _ => answer.unwrap_or_else(|error| panic!("{n}: {error}")),
        }
    }
    let routed = (0..MANY).filter(|n| n % 3 != 0).count();
    eventually(PATIENCE, async || {
        let ready = bound.publisher.count(&bound.config.queue).await.0;
        inboxd_conformance::ensure(ready as usize == routed, ready)
    })
    .await;
}

/// A message from a queue comes back with its properties and its headers, by way of both adapters.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_properties_and_the_routing_key_are_those_of_the_message() {
    let bound = Bound::new(shared(), Publisher::shared().await, ExchangeKind::Direct).await;
    bound.bind("order.placed").await;
    let mut letter = envelope("order.placed");
    let bytes = |text: &'static [u8]| Some(Bytes::from_static(text));
    letter.property_id = bytes(b"id\xff");
    letter.message_type = bytes(b"order.placed");
    letter.correlation_id = bytes(b"c");
    letter.content_type = bytes(b"text/plain; charset=latin1");
    letter.content_encoding = bytes(b"gzip");
    letter.producer = bytes(b"web");
    letter.headers = vec![
        Header::new(&b"\xff\xfe"[..], &b"\x00\x80"[..]),
        Header { name: Bytes::from_static(b"null"), value: None },
        Header::new("x-death", r#"[{"count":3,"queue":"a"}]"#),
    ];
    let target = target(bound.letters());
    publish(&target, "m", &letter).await.expect("published");
    let mut source = start(&bound.config);
    let came = take(&mut source, 1).await;
    let copy = came[0].envelope.clone();
    ack(came);
    close(source).await;
    assert_eq!(copy.property_id, letter.property_id);
    assert_eq!(copy.message_type, letter.message_type);
    assert_eq!(copy.correlation_id, letter.correlation_id);
    assert_eq!(copy.content_type, letter.content_type);
    assert_eq!(copy.content_encoding, letter.content_encoding);
    assert_eq!(copy.producer, letter.producer);
    assert_eq!(copy.headers[..2], letter.headers[..2]);
    assert_eq!(copy.headers[2].name, &b"original-x-death"[..]);
    assert_eq!(copy.headers[2].value, letter.headers[2].value);
    let header = |name: &str| copy.header(name).map(|value| value.to_vec());
    assert_eq!(header("inbox-origin-exchange").as_deref(), Some(&b"shop"[..]));
    assert_eq!(header("inbox-origin-routing-key").as_deref(), Some(&b"order.placed"[..]));
    let Origin::RabbitMq { routing_key, .. } = &copy.origin else { panic!("{:?}", copy.origin) };
    assert_eq!(routing_key.as_ref(), "order.placed");
}

/// A queue that is full and rejects gives a nack, which is no `Ok`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_queue_that_rejects_is_an_error_until_it_has_room() {
    let (config, publisher) = (shared(), Publisher::shared().await);
    let arguments = [
        ("x-max-length", AMQPValue::LongInt(1)),
        ("x-overflow", AMQPValue::LongString("reject-publish".into())),
    ];
    publisher.declare_with(&config.queue, QueueKind::Classic, &arguments).await;
    // The default exchange, and a queue of its own for dead letters.
    let mut letters = letters(&config, "");
    letters.routing_key = Some(config.queue.clone());
    let target = target(letters);
    publish(&target, "m", &envelope("any")).await.expect("there is room");
    let error = publish(&target, "n", &envelope("any")).await.expect_err("it is full");
    assert_eq!((error.code, error.refused), (ErrorCode::DeadLetterTargetAway, false), "{error}");
    assert!(error.what.contains("nack"), "{error}");
    let mut source = start(&config);
    ack(take(&mut source, 1).await);
    eventually(PATIENCE, async || publish(&target, "n", &envelope("any")).await).await;
    ack(take(&mut source, 1).await);
    close(source).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_exchange_is_named_until_it_is_there() {
    let (config, publisher) = (shared(), Publisher::shared().await);
    let letters = letters(&config, &format!("x-{}", config.queue));
    let target = target(letters.clone());
    let error = publish(&target, "m", &envelope("k")).await.expect_err("there is none");
    assert_eq!((error.code, error.refused), (ErrorCode::DeadLetterTargetRefused, false), "{error}");
    assert!(error.what.contains(&letters.exchange) && error.what.contains("create"), "{error}");
    let found = inspect_dead_letters(&letters, WITHIN).await;
    let problem = found.iter().find(|finding| finding.severity == Severity::Problem);
    let problem = problem.unwrap_or_else(|| panic!("a missing exchange is a problem: {found:?}"));
    assert!(problem.what.contains("does not exist"), "{problem:?}");

    let bound = Bound::new(config, publisher, ExchangeKind::Direct).await;
    bound.bind("k").await;
    eventually(PATIENCE, async || publish(&target, "m", &envelope("k")).await).await;
    let found = inspect_dead_letters(&letters, WITHIN).await;
    assert!(found.iter().all(|finding| finding.severity < Severity::Problem), "{found:?}");
    // Gone again while the target is connected: the same words, and back again.
    let deleting = bound.publisher.channel.exchange_delete(
        bound.exchange.as_str().into(),
        lapin::options::ExchangeDeleteOptions::default(),
    );
    deleting.await.expect("deleted");
    let error = publish(&target, "n", &envelope("k")).await.expect_err("it is gone");
    assert_eq!(error.code, ErrorCode::DeadLetterTargetRefused, "{error}");
    let bound = Bound::new(bound.config, bound.publisher, ExchangeKind::Direct).await;
    bound.bind("k").await;
    eventually(PATIENCE, async || publish(&target, "n", &envelope("k")).await).await;
}

/// A queue of the default exchange that is not there: said by the return, and by the inspection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_queue_of_the_default_exchange_is_named() {
    let config = shared();
    let mut letters = letters(&config, "");
    letters.routing_key = Some(config.queue.clone());
    let target = target(letters.clone());
    let error = publish(&target, "m", &envelope("k")).await.expect_err("there is no queue");
    assert_eq!(error.code, ErrorCode::DeadLetterUnrouted, "{error}");
    assert!(error.what.contains(&config.queue), "{error}");
    let found = inspect_dead_letters(&letters, WITHIN).await;
    assert!(
        found
            .iter()
            .any(|finding| finding.severity == Severity::Problem
                && finding.what.contains(&config.queue)),
        "{found:?}"
    );
    Publisher::shared().await.declare(&config.queue, QueueKind::Classic).await;
    publish(&target, "m", &envelope("k")).await.expect("it is there");
    let found = inspect_dead_letters(&letters, WITHIN).await;
    assert!(found.iter().all(|finding| finding.severity < Severity::Problem), "{found:?}");
}

/// A name that AMQP cannot carry: the letter stays in the table, whole.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn headers_that_amqp_cannot_carry_are_refused() {
    let bound = Bound::new(shared(), Publisher::shared().await, ExchangeKind::Fanout).await;
    bound.bind("").await;
    let target = target(bound.letters());
    let mut letter = envelope("k");
    letter.headers = vec![Header::new("n".repeat(256), "v")];
    let error = publish(&target, "m", &letter).await.expect_err("too long a name");
    assert!(error.refused && error.what.contains("256"), "{error}");
    letter.headers = vec![Header::new("n", "v".repeat(200_000))];
    let error = publish(&target, "m", &letter).await.expect_err("too large a frame");
    assert!(error.refused && error.what.contains("frame_max"), "{error}");
    letter.headers.clear();
    publish(&target, "m", &letter).await.expect("and then it goes on");
}
