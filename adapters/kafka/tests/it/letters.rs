//! Copies of dead letters on a topic: the suite that every target passes, and what only Kafka has.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use inboxd_conformance::letters::{Abilities, LettersHarness, LettersPlace, SeenCopy, run};
use inboxd_conformance::{eventually, servers};
use inboxd_contract::{
    ConsumerId, DeadLetterTarget, DeadReason, Envelope, ErrorCode, InboxKey, LetterCopy, MessageId,
    Origin, PublishError, Severity,
};
use inboxd_kafka::{DeadLetterTopic, DeadLetterTopicConfig, inspect_dead_letters};
use rdkafka::admin::{AdminOptions, NewTopic, TopicReplication};
use tokio::time::{Instant, timeout};

use crate::consume::read_all;
use crate::front::FrontedBroker;
use crate::support::{PATIENCE, admin, blocking, create_topic};

const PUBLISH: Duration = Duration::from_secs(5);
const WITHIN: Duration = Duration::from_secs(10);

struct KafkaLetters {
    brokers: String,
}

struct Place {
    brokers: String,
    topic: String,
    front: FrontedBroker,
    target: Arc<DeadLetterTopic>,
}

fn config(brokers: &str, topic: &str) -> DeadLetterTopicConfig {
    let mut config = DeadLetterTopicConfig::new(brokers, topic);
    config.publish_timeout = PUBLISH;
    config.properties.insert("reconnect.backoff.max.ms".into(), "500".into());
    config
}

fn target(config: DeadLetterTopicConfig) -> DeadLetterTopic {
    DeadLetterTopic::start(config).expect("a valid configuration")
}

#[async_trait]
impl LettersHarness for KafkaLetters {
    fn adapter(&self) -> &'static str {
        "kafka"
    }

    fn abilities(&self) -> Abilities {
        Abilities {
            tombstones: true,
            keys: true,
            routes: false,
            // Beyond and below max.message.bytes as brokers have it.
            refuses_bytes: Some(2_000_000),
            taken_names: &[],
            large_bytes: 900_000,
            real: true,
        }
    }

    fn publish_timeout(&self) -> Duration {
        PUBLISH
    }

    async fn fresh(&self) -> Box<dyn LettersPlace> {
        let topic = servers::unique("dead");
        create_topic(&self.brokers, &topic, 1).await;
        let front = FrontedBroker::start(&self.brokers).await;
        let target = Arc::new(target(config(&front.address(), &topic)));
        Box::new(Place { brokers: self.brokers.clone(), topic, front, target })
    }
}

#[async_trait]
impl LettersPlace for Place {
    fn target(&self) -> Arc<dyn DeadLetterTarget> {
        self.target.clone()
    }

    async fn copies(&self) -> Vec<SeenCopy> {
        let (brokers, topic) = (self.brokers.clone(), self.topic.clone());
        blocking(move || read_all(&brokers, &topic)).await
    }

    async fn set_reachable(&self, reachable: bool) {
        match reachable {
            true => self.front.proxy.heal(),
            false => self.front.proxy.cut(),
        }
    }

    async fn hang(&self) {
        self.front.proxy.black_hole();
    }

    async fn set_routed(&self, _: bool) {
        unreachable!("a topic leads where it leads")
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_topic_conforms() {
    run(KafkaLetters { brokers: servers::kafka_url() }).await;
}

async fn publish(target: &DeadLetterTopic, envelope: &Envelope) -> Result<(), PublishError> {
    let key = InboxKey {
        consumer_id: ConsumerId::new("shop").expect("an id"),
        message_id: MessageId::from_stored("m"),
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

fn envelope(origin: Origin) -> Envelope {
    Envelope::new(origin, Some(Bytes::from_static(b"body")))
}

fn memory() -> Envelope {
    envelope(Origin::Memory { stream: "s".into(), position: 1 })
}

/// What AMQP keeps beside headers is in headers of the names that sources read it from.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_properties_of_a_rabbitmq_message_are_headers() {
    let (brokers, topic) = (servers::kafka_url(), servers::unique("dead"));
    create_topic(&brokers, &topic, 1).await;
    let mut letter = envelope(Origin::RabbitMq {
        queue: "q".into(),
        exchange: "shop".into(),
        routing_key: "order placed".into(),
        redelivered: true,
        delivery_count: None,
    });
    let bytes = |text: &'static str| Some(Bytes::from_static(text.as_bytes()));
    letter.property_id = bytes("id");
    letter.message_type = bytes("order.placed");
    letter.correlation_id = bytes("c");
    letter.content_type = bytes("text/plain");
    letter.content_encoding = bytes("gzip");
    letter.producer = bytes("web");
    letter.headers = vec![
        // Named like a property and another value: the property comes first, as it counted.
        inboxd_contract::Header::new("Content-Type", "other"),
        // The same value: once.
        inboxd_contract::Header::new("correlation-id", "c"),
    ];
    let target = target(config(&brokers, &topic));
    publish(&target, &letter).await.expect("published");
    let copy = blocking(move || read_all(&brokers, &topic)).await.remove(0);
    let own: Vec<_> = copy
        .own_headers()
        .into_iter()
        .map(|(name, value)| {
            let value = value.map(|value| String::from_utf8_lossy(&value).into_owned());
            (String::from_utf8_lossy(&name).into_owned(), value.unwrap_or_default())
        })
        .collect();
    let expected = [
        ("message-id", "id"),
        ("message-type", "order.placed"),
        ("content-type", "text/plain"),
        ("content-encoding", "gzip"),
        ("producer", "web"),
        ("Content-Type", "other"),
        ("correlation-id", "c"),
    ];
    let expected = expected.map(|(name, value)| (name.to_owned(), value.to_owned()));
    assert_eq!(own, expected);
    let stamps = copy.stamps();
    assert_eq!(stamps["inbox-origin"], "rabbitmq:q");
    assert_eq!(stamps["inbox-origin-exchange"], "shop");
    assert_eq!(stamps["inbox-origin-routing-key"], "order%20placed");
}

/// No topic is made behind anyone's back, what is wrong is said, and it goes on once there is one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_topic_is_named_until_it_is_there() {
    let (brokers, topic) = (servers::kafka_url(), servers::unique("dead"));
    let target = target(config(&brokers, &topic));
    let began = Instant::now();
    let error = publish(&target, &memory()).await.expect_err("there is no topic");
    assert!(began.elapsed() < PUBLISH + Duration::from_secs(10), "{:?}", began.elapsed());
    assert_eq!((error.code, error.refused), (ErrorCode::DeadLetterTargetRefused, false), "{error}");
    assert!(error.what.contains(&topic) && error.what.contains("create"), "{error}");
    let found = inspect_dead_letters(&config(&brokers, &topic), WITHIN).await;
    let problem = found.iter().find(|finding| finding.severity == Severity::Problem);
    let problem = problem.unwrap_or_else(|| panic!("a missing topic is a problem: {found:?}"));
    assert!(problem.what.contains("does not exist"), "{problem:?}");

    create_topic(&brokers, &topic, 1).await;
    eventually(PATIENCE, async || publish(&target, &memory()).await).await;
    let found = inspect_dead_letters(&config(&brokers, &topic), WITHIN).await;
    assert!(found.iter().all(|finding| finding.severity == Severity::Info), "{found:?}");
}

/// A compacted topic takes no record without a key: the letter stays in the table, whole.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_compacted_topic_refuses_what_has_no_key() {
    let (brokers, name) = (servers::kafka_url(), servers::unique("dead"));
    let topic = NewTopic::new(&name, 1, TopicReplication::Fixed(1));
    let topic = topic.set("cleanup.policy", "compact");
    let client = admin(&brokers);
    let options = AdminOptions::new().operation_timeout(Some(PATIENCE));
    let created = client.create_topics([&topic], &options).await.expect("an answer");
    created.into_iter().for_each(|topic| drop(topic.expect("created")));
    blocking(move || drop(client)).await;
    let target = target(config(&brokers, &name));
    let mut letter = memory();
    let error = publish(&target, &letter).await.expect_err("no key");
    assert!(error.refused && error.code == ErrorCode::DeadLetterTargetRefused, "{error}");
    letter.key = Some(Bytes::from_static(b"k"));
    publish(&target, &letter).await.expect("with a key");
    let found = inspect_dead_letters(&config(&brokers, &name), WITHIN).await;
    let warned = found
        .iter()
        .any(|finding| finding.severity == Severity::Warning && finding.what.contains("compact"));
    assert!(warned, "compaction deletes letters: {found:?}");
}

/// Brokers that accept connections and never answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_inspection_of_nobody_ends_in_time() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = silent.local_addr().expect("an address").to_string();
    let within = Duration::from_secs(2);
    let config = config(&address, "dead");
    let looking = inspect_dead_letters(&config, within);
    let found = timeout(within + Duration::from_secs(10), looking).await.expect("in time");
    assert!(found.iter().any(|finding| finding.severity == Severity::Problem), "{found:?}");
}
