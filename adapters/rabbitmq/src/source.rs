//! The source, as the engine sees it.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use inboxd_contract::{
    Delivery, ErrorClass, HorizonAnswer, RedeliveryHorizon, Room, Source, SourceError,
    SourceStatus, SourceTraits,
};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout, timeout_at};

use crate::config::{ArgumentValue, RabbitMqConfig};
use crate::session::Wish;
use crate::supervisor::{self, Shared, Supervisor};

/// The bound on `stop_taking`.
const STOP: Duration = Duration::from_secs(15);
/// Of the time to close, what the channel may take.
const CHANNELS_SHARE: f64 = 0.9;
/// More than is ever asked at once.
const WISHES: usize = 4;

/// Consumes from one queue.
#[derive(Debug)]
pub struct RabbitMqSource {
    config: Arc<RabbitMqConfig>,
    shared: Arc<Shared>,
    status: watch::Receiver<SourceStatus>,
    wishes: mpsc::Sender<Wish>,
    /// `None` once closed.
    closed: Option<oneshot::Receiver<Result<(), SourceError>>>,
    task: JoinHandle<()>,
}

impl RabbitMqSource {
    /// Starts; returns at once, whether or not the broker is there. Must be called within a
    /// tokio runtime.
    ///
    /// # Errors
    /// Permanent: the configuration is not valid.
    pub fn start(config: RabbitMqConfig) -> Result<Self, SourceError> {
        config.validate()?;
        let config = Arc::new(config);
        let shared = Arc::new(Shared::default());
        let (status_in, status) = watch::channel(SourceStatus::connecting());
        let (wishes, wishes_out) = mpsc::channel(WISHES);
        let (closed_in, closed) = oneshot::channel();
        let task = tokio::spawn(supervisor::run(Supervisor {
            config: Arc::clone(&config),
            shared: Arc::clone(&shared),
            wishes: wishes_out,
            status: status_in,
            closed: closed_in,
        }));
        Ok(Self { config, shared, status, wishes, closed: Some(closed), task })
    }
}

/// Dropped without close it leaves like a crash: the socket is closed, and what is unsettled
/// goes back to its place.
impl Drop for RabbitMqSource {
    fn drop(&mut self) {
        self.shared.socket.cut();
        self.task.abort();
        self.shared.buffer.clear();
    }
}

#[async_trait]
impl Source for RabbitMqSource {
    fn traits(&self) -> SourceTraits {
        SourceTraits {
            releasable: !self.config.ordered,
            unsettled_max: Some(usize::from(self.config.prefetch)),
        }
    }

    fn status(&self) -> watch::Receiver<SourceStatus> {
        self.status.clone()
    }

    async fn next_batch(&mut self, room: Room) -> Result<Vec<Delivery>, SourceError> {
        let shared = &self.shared;
        shared.buffer.take(room, || shared.permanent()).await
    }

    fn redelivery_horizon(&self) -> HorizonAnswer {
        let declared = self.config.declare.iter().flat_map(|declare| &declare.arguments);
        let ttl = declared.into_iter().find_map(|(name, value)| match value {
            ArgumentValue::Integer(ms) if name == "x-message-ttl" => u64::try_from(*ms).ok(),
            _ => None,
        });
        let horizon = match ttl {
            Some(ms) => RedeliveryHorizon::Limited(Duration::from_millis(ms)),
            None => RedeliveryHorizon::Unknown(
                "AMQP has no question for a queue's message TTL; without one a queue keeps messages \
                 for ever"
                    .into(),
            ),
        };
        let answer = vec![(self.config.queue.clone(), horizon)];
        Box::pin(async { answer })
    }

    async fn stop_taking(&mut self) {
        let (done, answered) = oneshot::channel();
        if self.wishes.send(Wish::StopTaking(done)).await.is_ok() {
            // Answered by an error where the channel was lost meanwhile: nothing is held then.
            let _ = timeout(STOP, answered).await;
        }
        self.shared.buffer.clear();
    }

    async fn close(mut self: Box<Self>, deadline: Duration) -> Result<(), SourceError> {
        let now = Instant::now();
        // The channel's own end comes first, with its words, and leaves in good order.
        let (by, at_last) = (now + deadline.mul_f64(CHANNELS_SHARE), now + deadline);
        let in_time = async {
            // Full or gone only if the loop is stuck or has ended; the deadline covers both.
            let _ = self.wishes.send(Wish::Close(by)).await;
            match self.closed.take() {
                Some(closed) => closed.await.unwrap_or(Ok(())),
                None => Ok(()),
            }
        };
        let late = || SourceError {
            class: ErrorClass::Transient,
            what: format!(
                "RabbitMQ did not answer the close of queue '{}' within {deadline:?}; the last acks \
                 may be lost, their messages come again",
                self.config.queue
            ),
            code: None,
            source: None,
        };
        let answer = timeout_at(at_last, in_time).await;
        answer.unwrap_or_else(|_| Err(late()))
    }
}
