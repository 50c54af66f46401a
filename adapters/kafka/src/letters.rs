//! Copies of dead letters, to a topic.
//!
//! Purpose: [`DeadLetterTopic`] produces each copy with an idempotent producer and answers once all
//! replicas in sync have it.
//!
//! Invariants
//! - `Ok` follows a delivery report without an error, nothing else.
//! - Each try ends within `publish_timeout` and a second, whatever the brokers do: librdkafka gives
//!   a record up by then, and its report is not waited for longer.
//! - A producer that librdkafka calls broken for good is replaced by the next try.
//! - No call here blocks: producers are closed and dropped on threads of their own.
//!
//! What it does not do: create the topic, or gather records (one in a request, so that one that is
//! too large fails alone).
//!
//! | died after | left | what comes of it |
//! |---|---|---|
//! | the record was sent | the record, perhaps | the original is delivered again and a second copy is published: same `inbox-message-id` |
//! | the report | the record | the same, unless the row of the dead letter has committed |

use std::borrow::Cow;
use std::ffi::CString;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use inboxd_contract::{
    DeadLetterTarget, Envelope, ErrorClass, ErrorCode, LetterCopy, PublishError, SourceError,
    kept_name,
};
use rdkafka::ClientContext;
use rdkafka::config::{ClientConfig, FromClientConfigAndContext};
use rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};
use rdkafka::producer::{DeliveryResult, Producer as _, ProducerContext, ThreadedProducer};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, timeout_at};

use crate::letter_config::DeadLetterTopicConfig;
use crate::raw;

/// Beyond librdkafka's own bound on a record.
const MARGIN: Duration = Duration::from_secs(1);
/// Between two looks at a full queue.
const FULL: Duration = Duration::from_millis(20);
/// Words of trouble with a connection that are no older say why nothing was confirmed.
const WORDS_MAX_AGE: Duration = Duration::from_secs(30);

/// A record's report: `None` where librdkafka has none.
type Report = Result<(), Code>;

/// Takes reports and words of trouble from librdkafka's thread.
#[derive(Clone, Default)]
struct Reports {
    trouble: Arc<Mutex<Option<(Instant, String)>>>,
}

impl ClientContext for Reports {
    fn error(&self, error: KafkaError, words: &str) {
        // That one connection of several was closed says nothing.
        if error.rdkafka_error_code() != Some(Code::BrokerTransportFailure)
            || !words.contains("Disconnected")
        {
            *lock(&self.trouble) = Some((Instant::now(), words.to_owned()));
        }
    }
}

impl ProducerContext for Reports {
    type DeliveryOpaque = Box<Mutex<Option<oneshot::Sender<Report>>>>;

    fn delivery(&self, result: &DeliveryResult<'_>, to: Self::DeliveryOpaque) {
        let report = match result {
            Ok(_) => Ok(()),
            Err((error, _)) => Err(error.rdkafka_error_code().unwrap_or(Code::Unknown)),
        };
        if let Some(to) = lock(&to).take() {
            // Whoever published it may have gone.
            let _ = to.send(report);
        }
    }
}

/// A producer that is dropped on a thread of its own: librdkafka's end may block.
struct Producer(Option<ThreadedProducer<Reports>>);

impl Producer {
    fn get(&self) -> Option<&ThreadedProducer<Reports>> {
        self.0.as_ref()
    }
}

impl Drop for Producer {
    fn drop(&mut self) {
        if let Some(producer) = self.0.take() {
            let dropping = std::thread::Builder::new().name("inboxd-kafka-end".into());
            // Without a thread it is dropped here: the closure comes back with the error.
            let _ = dropping.spawn(move || drop(producer));
        }
    }
}

/// Publishes copies of dead letters to a topic.
pub struct DeadLetterTopic {
    config: DeadLetterTopicConfig,
    client: ClientConfig,
    topic: CString,
    reports: Reports,
    /// `None` once closed.
    producer: Mutex<Option<Arc<Producer>>>,
}

impl DeadLetterTopic {
    /// Makes the producer; connecting goes on behind.
    ///
    /// # Errors
    /// Permanent: the configuration is not valid, with the property named.
    pub fn start(config: DeadLetterTopicConfig) -> Result<Self, SourceError> {
        let client = config.client()?;
        let reports = Reports::default();
        let producer = made(&client, &reports)?;
        let topic = CString::new(config.topic.as_str())
            .map_err(|_| SourceError::permanent("the topic's name contains a NUL character"))?;
        let producer = Mutex::new(Some(Arc::new(producer)));
        Ok(Self { config, client, topic, reports, producer })
    }

    fn producer(&self) -> Result<Arc<Producer>, PublishError> {
        let closed = || self.away("is closed".into());
        lock(&self.producer).clone().ok_or_else(closed)
    }

    /// Puts another in the place of a producer that cannot go on.
    fn replace(&self, broken: &Arc<Producer>) {
        let mut current = lock(&self.producer);
        let same = current.as_ref().is_some_and(|current| Arc::ptr_eq(current, broken));
        if same && let Ok(producer) = made(&self.client, &self.reports) {
            *current = Some(Arc::new(producer));
        }
    }

    async fn try_publish(&self, letter: &LetterCopy<'_>) -> Result<(), PublishError> {
        let deadline = Instant::now() + self.config.publish_timeout + MARGIN;
        let headers = headers(letter, SystemTime::now());
        let record = raw::Outgoing {
            key: letter.envelope.key.as_deref(),
            body: letter.envelope.body.as_deref(),
            headers: &headers,
        };
        loop {
            let producer = self.producer()?;
            let Some(threaded) = producer.get() else {
                return Err(self.away("is closed".into()));
            };
            let (report, reported) = oneshot::channel();
            let opaque = Box::new(Mutex::new(Some(report)));
            let failed = match raw::produce(threaded.client(), &self.topic, &record, opaque) {
                Ok(()) => match timeout_at(deadline, reported).await {
                    Ok(Ok(Ok(()))) => return Ok(()),
                    Ok(Ok(Err(code))) => code,
                    // The producer is gone, and its records with it.
                    Ok(Err(_)) => Code::PurgeInflight,
                    Err(_) => Code::MessageTimedOut,
                },
                Err(Code::QueueFull) if Instant::now() + FULL < deadline => {
                    sleep(FULL).await;
                    continue;
                }
                Err(code) => code,
            };
            if threaded.client().fatal_error().is_some() {
                self.replace(&producer);
            }
            return Err(self.failed(failed, letter.envelope));
        }
    }

    fn failed(&self, code: Code, envelope: &Envelope) -> PublishError {
        let topic = &self.config.topic;
        let (what, refused) = match code {
            Code::UnknownTopic | Code::UnknownTopicOrPartition | Code::UnknownPartition => (
                format!(
                    "does not exist: create topic '{topic}' (the brokers create none by themselves, or \
                     not yet)"
                ),
                false,
            ),
            Code::TopicAuthorizationFailed | Code::ClusterAuthorizationFailed => {
                ("may not be written to: grant the user WRITE on the topic".into(), false)
            }
            Code::MessageSizeTooLarge | Code::InvalidMessageSize => (
                format!(
                    "takes no record of {} bytes: raise max.message.bytes of the topic",
                    envelope.bytes()
                ),
                true,
            ),
            // A compacted topic takes no record without a key.
            Code::InvalidRecord | Code::PolicyViolation => {
                (format!("refuses this record ({code}): see the topic's settings"), true)
            }
            Code::InvalidTopic => ("has a name that Kafka does not allow".into(), false),
            Code::MessageTimedOut | Code::RequestTimedOut | Code::QueueFull => {
                return self.away(self.not_in_time());
            }
            Code::PurgeQueue | Code::PurgeInflight => {
                return self.away("was closed before it confirmed the copy".into());
            }
            code => return self.away(format!("did not take the copy: {code}")),
        };
        let code = ErrorCode::DeadLetterTargetRefused;
        PublishError { what: format!("topic '{topic}' for dead letters {what}"), refused, code }
    }

    fn not_in_time(&self) -> String {
        let within = self.config.publish_timeout;
        let trouble = lock(&self.reports.trouble);
        let fresh = trouble.as_ref().filter(|(at, _)| at.elapsed() < WORDS_MAX_AGE);
        match fresh {
            Some((_, words)) => format!("did not confirm the copy within {within:?}: {words}"),
            None => format!(
                "did not confirm the copy within {within:?}: check the brokers, and that enough \
                 replicas are in sync (min.insync.replicas)"
            ),
        }
    }

    fn away(&self, what: String) -> PublishError {
        PublishError {
            what: format!("topic '{}' for dead letters {what}", self.config.topic),
            refused: false,
            code: ErrorCode::DeadLetterTargetAway,
        }
    }
}

#[async_trait]
impl DeadLetterTarget for DeadLetterTopic {
    fn describe(&self) -> String {
        format!("topic '{}' of Kafka at {}", self.config.topic, self.config.brokers)
    }

    async fn publish(&self, letter: LetterCopy<'_>) -> Result<(), PublishError> {
        self.try_publish(&letter).await
    }

    async fn close(&self, deadline: Duration) {
        let Some(producer) = lock(&self.producer).take() else { return };
        let (done, flushed) = oneshot::channel::<()>();
        let flushing = std::thread::Builder::new().name("inboxd-kafka-close".into());
        let spawned = flushing.spawn(move || {
            if let Some(threaded) = producer.get() {
                // Reports reach those who wait for them, in time or not.
                let _ = threaded.flush(deadline);
            }
            drop(producer);
            let _ = done.send(());
        });
        if spawned.is_ok() {
            let _ = timeout_at(Instant::now() + deadline, flushed).await;
        }
    }
}

fn made(client: &ClientConfig, reports: &Reports) -> Result<Producer, SourceError> {
    let made = ThreadedProducer::from_config_and_context(client, reports.clone());
    let refused =
        |error| SourceError::new(ErrorClass::Permanent, "librdkafka cannot make a producer", error);
    made.map(|producer| Producer(Some(producer))).map_err(refused)
}

/// The copy's headers: what AMQP keeps in properties, the message's own, inboxd's.
fn headers<'a>(letter: &LetterCopy<'a>, now: SystemTime) -> Vec<raw::OutgoingHeader<'a>> {
    let envelope = letter.envelope;
    let mut headers = Vec::new();
    for (name, value) in [
        ("message-id", &envelope.property_id),
        ("message-type", &envelope.message_type),
        ("correlation-id", &envelope.correlation_id),
        ("content-type", &envelope.content_type),
        ("content-encoding", &envelope.content_encoding),
        ("producer", &envelope.producer),
    ] {
        // First, so that whoever reads the first of a name reads what counted here.
        if let Some(value) = value
            && envelope.header(name) != Some(value)
        {
            headers.push((Cow::Borrowed(name.as_bytes()), Some(Cow::Borrowed(value.as_ref()))));
        }
    }
    headers.extend(envelope.headers.iter().map(|header| {
        let value = header.value.as_ref().map(|value| Cow::Borrowed(value.as_ref()));
        (kept_name(&header.name, |_| false), value)
    }));
    headers.extend(letter.stamps(now).into_iter().map(|(name, value)| {
        (Cow::Borrowed(name.as_bytes()), Some(Cow::Owned(value.into_bytes())))
    }));
    headers
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
