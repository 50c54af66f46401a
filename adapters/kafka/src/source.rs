//! The source itself: starts the consumer's thread and speaks for it.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use inboxd_contract::{
    Delivery, ErrorClass, HorizonAnswer, Room, Source, SourceError, SourceStatus, SourceTraits,
};
use rdkafka::config::{ClientConfig, FromClientConfigAndContext};
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::KafkaError;
use tokio::runtime::Handle;
use tokio::sync::{oneshot, watch};
use tokio::time::Instant;

use crate::beginning::Beginning;
use crate::config::{KafkaConfig, StartAt};
use crate::context::{Context, Settings};
use crate::health::Health;
use crate::horizon;
use crate::partitions::Partitions;
use crate::shared::{End, KafkaCounters, Shared};
use crate::worker::{Joining, Worker};

/// The share of the budget that may wait between the consumer's thread and the engine.
const WAITING_SHARE: usize = 8;

/// Consumes topics as a member of a group.
///
/// Dropped without [`Source::close`] it leaves the group and commits nothing.
pub struct KafkaSource {
    shared: Arc<Shared>,
    client: ClientConfig,
    topics: Vec<String>,
    done: Option<oneshot::Receiver<Result<(), String>>>,
}

impl KafkaSource {
    /// Starts consuming; connecting goes on behind. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// Permanent: the configuration is not valid, with the property named.
    pub fn start(config: KafkaConfig) -> Result<Self, SourceError> {
        let client = config.client()?;
        let settings = Arc::new(Settings::new(&config));
        let partitions = Partitions::new(
            (config.in_flight_bytes_max / WAITING_SHARE).max(1),
            config.offset_span_max,
        );
        let shared = Arc::new(Shared::new(partitions, Health::new(&config.group)));
        let context = Context::new(Arc::clone(&shared), Arc::clone(&settings));
        let consumer = BaseConsumer::from_config_and_context(&client, context)
            .map_err(|error| refused("librdkafka cannot make a consumer", error))?;
        let latest = config.start == StartAt::Latest;
        let mut joining = Joining {
            topics: config.topics.clone(),
            wait_until_asked: config.join_when_asked,
            beginning: None,
        };
        let notes = match (&config.notes, config.position_identity || latest) {
            (Some(notes), true) => {
                let runtime = Handle::try_current()
                    .map_err(|error| refused("a Kafka source needs a tokio runtime", error))?;
                Some((Arc::clone(notes), runtime))
            }
            _ => None,
        };
        if latest {
            let topics = config.topics.clone();
            joining.beginning = Some(Beginning::new(config.group.clone(), topics, notes.clone()));
        } else if !config.join_when_asked {
            subscribe(&consumer, &joining.topics)
                .map_err(|error| refused(&cannot_subscribe(&joining.topics), error))?;
            joining.topics.clear();
        }
        let identified = notes.filter(|_| config.position_identity);
        let (theirs, named) = (Arc::clone(&shared), config.topics.clone());
        let (done, ended) = oneshot::channel();
        std::thread::Builder::new()
            .name("inboxd-kafka".into())
            .spawn(move || {
                Worker::new(consumer, theirs, settings, identified, joining, &named).run(done);
            })
            .map_err(|error| refused("cannot start the Kafka consumer's thread", error))?;
        Ok(Self { shared, client, topics: config.topics, done: Some(ended) })
    }

    /// Figures for metrics; they outlive the source.
    pub fn counters(&self) -> Arc<KafkaCounters> {
        Arc::clone(&self.shared.counters)
    }
}

impl Drop for KafkaSource {
    fn drop(&mut self) {
        self.shared.end(End::Drop);
    }
}

#[async_trait]
impl Source for KafkaSource {
    fn traits(&self) -> SourceTraits {
        // What is released comes again here, but in a lane it would come too late.
        SourceTraits { releasable: false, unsettled_max: None }
    }

    fn status(&self) -> watch::Receiver<SourceStatus> {
        self.shared.status()
    }

    async fn next_batch(&mut self, room: Room) -> Result<Vec<Delivery>, SourceError> {
        self.shared.next(room).await
    }

    fn redelivery_horizon(&self) -> HorizonAnswer {
        let assigned = self.shared.lock().partitions.assigned();
        let assigned = assigned.into_iter().map(|(topic, _)| topic.to_string());
        let named = self.topics.iter().filter(|topic| !topic.starts_with('^')).cloned();
        let topics: BTreeSet<String> = assigned.chain(named).collect();
        Box::pin(horizon::ask(self.client.clone(), topics.into_iter().collect()))
    }

    async fn stop_taking(&mut self) {
        self.shared.lock().partitions.stop_taking();
    }

    async fn close(mut self: Box<Self>, deadline: Duration) -> Result<(), SourceError> {
        let Some(done) = self.done.take() else { return Ok(()) };
        self.shared.end(End::Close(Instant::now() + deadline));
        let why = match tokio::time::timeout(deadline, done).await {
            Ok(Ok(Ok(()))) => return Ok(()),
            Ok(Ok(Err(why))) => why,
            Ok(Err(_)) => "the consumer's thread ended early".to_owned(),
            // The thread is left behind: librdkafka gives its end no deadline.
            Err(_) => format!("the broker did not let go within {deadline:?}"),
        };
        Err(SourceError::new(ErrorClass::Transient, "closing the Kafka source", why))
    }
}

pub(crate) fn subscribe(
    consumer: &BaseConsumer<Context>,
    topics: &[String],
) -> Result<(), KafkaError> {
    let topics: Vec<&str> = topics.iter().map(String::as_str).collect();
    consumer.subscribe(&topics)
}

pub(crate) fn cannot_subscribe(topics: &[String]) -> String {
    format!("cannot subscribe to {topics:?}")
}

fn refused(what: &str, error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> SourceError {
    SourceError::new(ErrorClass::Permanent, what, error)
}
