//! The life of one channel: its consumer, its tags, its fence.
//!
//! Invariants: settlements come by a channel that belongs to this session, so a tag of an older
//! channel cannot be used here; the fence is lost when the session ends in any way; no ack
//! waits for another's answer, and what is settled while frames are being written goes with
//! the next ones. An ordered session never nacks and never cancels.

use std::future::{Future, pending};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use futures::future::{FutureExt as _, try_join_all};
use inboxd_contract::{
    Acker, ErrorClass, ErrorCode, FenceHandle, Settle, Settlement, SourceError, StreamId,
};
use lapin::options::{
    BasicAckOptions, BasicCancelOptions, BasicConsumeOptions, BasicNackOptions, BasicQosOptions,
    QueueDeclareOptions,
};
use lapin::types::FieldTable;
use lapin::{Channel, Consumer, Error, Queue};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use uuid::Uuid;

use crate::bucket::TokenBucket;
use crate::buffer::{Arrival, Buffer};
use crate::config::{QueueKind, RabbitMqConfig};
use crate::counts::Counts;
use crate::link::{Link, Socket};
use crate::probe::{self, Found};
use crate::supervisor::Shared;
use crate::tracker::{AckTracker, Frame};
use crate::trouble::{Remedy, Trouble};
use crate::wire::Aside;

/// How often a replica tries to take an exclusive queue over.
pub(crate) const STANDBY: Duration = Duration::from_secs(2);
/// The bound on each answer of the broker outside of close.
const ANSWER: Duration = Duration::from_secs(10);
/// A quorum queue's channel holds acks back while many are under way, and forgets them when it
/// is closed: it is given this long between the last ack and the close.
const QUORUM_PAUSE: Duration = Duration::from_millis(100);
/// A release waits so long for a stop: whoever drains gives back what has not started and then
/// stops taking. Told before that, it would come here again, and each time costs it one of a
/// quorum queue's delivery limit.
const RELEASE_PAUSE: Duration = Duration::from_millis(250);
/// Settlements looked at in one turn.
const TURN: usize = 512;

/// What the source asks of a running session.
#[derive(Debug)]
pub(crate) enum Wish {
    /// Take no more; answered when what was not handed over is on its way back.
    StopTaking(oneshot::Sender<()>),
    /// Settle, then leave; by then at the latest.
    Close(Instant),
}

/// How a session ended.
#[derive(Debug)]
pub(crate) enum Ended {
    /// On purpose; an error if the broker did not answer in time.
    Closed(Result<(), SourceError>),
    /// Not on purpose.
    Trouble(Trouble),
}

/// One settlement of this session's.
type Settled = (u64, Settlement);
type Writing = Pin<Box<dyn Future<Output = Result<(), Error>> + Send>>;

/// Loses the fence when the session ends, however it does.
struct Fenced(FenceHandle);

impl Drop for Fenced {
    fn drop(&mut self) {
        self.0.lose();
    }
}

pub(crate) struct Session {
    config: Arc<RabbitMqConfig>,
    buffer: Arc<Buffer>,
    counts: Arc<Counts>,
    /// The connection's.
    socket: Socket,
    queue: Arc<str>,
    stream: StreamId,
    channel: Channel,
    aside: Aside,
    /// `None` once cancelled.
    consumer: Option<Consumer>,
    kind: Option<QueueKind>,
    fence: Fenced,
    tracker: AckTracker,
    bucket: TokenBucket,
    /// No release is told before, while the session is taking.
    release_from: Instant,
    /// Each delivery settles once, and the broker sends no more than the prefetch unsettled:
    /// that bounds this channel.
    settled_in: mpsc::UnboundedSender<Settled>,
    settled: mpsc::UnboundedReceiver<Settled>,
    writing: Option<Writing>,
    taking: bool,
}

impl Session {
    /// Opens a channel and consumes from the queue. What is found out of its kind is noted in `kind`.
    pub(crate) async fn open(
        config: &Arc<RabbitMqConfig>,
        shared: &Shared,
        link: &Link,
        kind: &mut Option<QueueKind>,
    ) -> Result<Self, Trouble> {
        match timeout(ANSWER, Self::try_open(config, shared, link, kind)).await {
            Ok(opened) => opened,
            Err(_) => Err(silent(link)),
        }
    }

    async fn try_open(
        config: &Arc<RabbitMqConfig>,
        shared: &Shared,
        link: &Link,
        kind: &mut Option<QueueKind>,
    ) -> Result<Self, Trouble> {
        let trouble = |error: Error| Trouble::opening(&error, config, STANDBY);
        let channel = channel_of(config, link, kind).await?;
        // `global` is refused by new brokers and by quorum queues; per consumer it bounds the same.
        let qos = BasicQosOptions { global: false };
        channel.basic_qos(config.prefetch, qos).await.map_err(trouble)?;
        let options = BasicConsumeOptions {
            exclusive: is_exclusive(config),
            ..BasicConsumeOptions::default()
        };
        let tag = format!("{}-{}", config.consumer_tag_prefix, Uuid::new_v4().simple());
        let consumer = channel
            .basic_consume(config.queue.as_str().into(), tag.into(), options, FieldTable::default())
            .await
            .map_err(trouble)?;
        let (settled_in, settled) = mpsc::unbounded_channel();
        let queue: Arc<str> = config.queue.as_str().into();
        Ok(Self {
            config: Arc::clone(config),
            buffer: Arc::clone(&shared.buffer),
            counts: Arc::clone(&shared.counts),
            socket: link.socket.clone(),
            stream: StreamId(Arc::clone(&queue)),
            queue,
            channel,
            aside: link.aside.clone(),
            consumer: Some(consumer),
            kind: *kind,
            fence: Fenced(FenceHandle::open()),
            tracker: AckTracker::default(),
            bucket: TokenBucket::new(config.releases_per_second, Instant::now()),
            release_from: Instant::now(),
            settled_in,
            settled,
            writing: None,
            taking: true,
        })
    }

    /// Runs until the end, and says whether it was still taking.
    pub(crate) async fn run(mut self, wishes: &mut mpsc::Receiver<Wish>) -> (Ended, bool) {
        let ended = self.turn(wishes).await;
        // In this order: whoever sees the fence lost finds nothing of this session any more.
        self.buffer.clear();
        self.aside.forget(self.channel.id());
        self.fence.0.lose();
        if self.config.ordered && self.channel.status().connected() {
            // What is dropped with a channel that still stands cancels its consumer, which hands
            // the queue to the next one before what is unacked is back in its place.
            self.socket.cut();
        }
        (ended, self.taking)
    }

    async fn turn(&mut self, wishes: &mut mpsc::Receiver<Wish>) -> Ended {
        let mut settled = Vec::with_capacity(TURN);
        loop {
            if let Err(trouble) = self.write() {
                return Ended::Trouble(trouble);
            }
            let releases_at = self.releases_at();
            tokio::select! {
                wish = wishes.recv() => match wish {
                    Some(Wish::StopTaking(done)) => {
                        if let Err(trouble) = self.stop_taking().await {
                            return Ended::Trouble(trouble);
                        }
                        let _ = done.send(());
                    }
                    Some(Wish::Close(by)) => return Ended::Closed(self.close(by).await),
                    // The source is gone; so is whoever could settle.
                    None => return Ended::Closed(Ok(())),
                },
                _ = self.settled.recv_many(&mut settled, TURN) => {
                    for (tag, settlement) in settled.drain(..) {
                        if let Err(trouble) = self.settle(tag, settlement) {
                            return self.reopen(trouble).await;
                        }
                    }
                }
                came = next(&mut self.consumer) => match came {
                    Some(Ok(delivery)) => {
                        if let Err(trouble) = self.receive(delivery) {
                            return Ended::Trouble(trouble);
                        }
                    }
                    Some(Err(error)) => return Ended::Trouble(Trouble::lost(&error)),
                    None => {
                        let trouble = self.cancelled();
                        // The next consumer must find this channel's deliveries back in place.
                        return match self.channel.status().connected() {
                            true => self.reopen(trouble).await,
                            false => Ended::Trouble(trouble),
                        };
                    }
                },
                written = written(&mut self.writing) => {
                    self.writing = None;
                    if let Err(error) = written {
                        return Ended::Trouble(Trouble::lost(&error));
                    }
                }
                () = sleep_until(releases_at), if self.releases_wait() => {}
            }
        }
    }

    fn receive(&mut self, delivery: lapin::message::Delivery) -> Result<(), Trouble> {
        let tag = delivery.delivery_tag;
        let Some(raw) = self.aside.take(self.channel.id(), tag) else {
            let what = "a delivery came without its properties; connecting again";
            return Err(Trouble::passing(Remedy::Reconnect, what));
        };
        self.tracker.delivered(tag);
        let settled = self.settled_in.clone();
        self.buffer.push(Arrival {
            queue: Arc::clone(&self.queue),
            raw,
            redelivered: delivery.redelivered,
            body: delivery.data,
            stream: self.stream.clone(),
            fence: self.fence.0.fence(),
            acker: Acker::new(HandOver { tag, settled }),
            received_at: Instant::now(),
        });
        Ok(())
    }

    fn settle(&mut self, tag: u64, settlement: Settlement) -> Result<(), Trouble> {
        if settlement == Settlement::Release {
            self.counts.released();
        }
        match settlement {
            Settlement::Ack => self.tracker.ack(tag),
            Settlement::Release if !self.config.ordered => {
                if self.tracker.releases_waiting() == 0 {
                    self.release_from = Instant::now() + RELEASE_PAUSE;
                }
                self.tracker.release(tag);
            }
            // What stops taking is on its way out, and the close gives it back in its place.
            Settlement::Release if !self.taking => {}
            Settlement::Release => {
                return Err(Trouble::passing(
                    Remedy::Reopen(Duration::from_secs(1)),
                    "a delivery of an ordered queue was given back: opening another channel, so \
                     that it comes again in its place",
                ));
            }
        }
        Ok(())
    }

    fn releases_wait(&self) -> bool {
        self.writing.is_none() && self.tracker.releases_waiting() > 0
    }

    fn releases_at(&self) -> Instant {
        self.bucket.next_at().max(self.release_from)
    }

    /// Begins to write what there is to tell, unless something is being written: then it
    /// gathers, and goes together.
    fn write(&mut self) -> Result<(), Trouble> {
        if self.writing.is_some() {
            return Ok(());
        }
        let waiting = self.tracker.releases_waiting();
        let most = match (waiting, self.taking) {
            (0, _) => 0,
            (_, true) if Instant::now() < self.release_from => 0,
            (waiting, true) => self.bucket.take(waiting, Instant::now()),
            // Nothing that is given back comes here again, so there is no loop to slow down.
            (waiting, false) => waiting,
        };
        let mut frames = self.tracker.take_releases(most);
        frames.extend(self.tracker.take_acks());
        if frames.is_empty() {
            return Ok(());
        }
        let mut writing = frames_written(self.channel.clone(), frames);
        // Polled once here, so that the frames are on their way before anything is waited for.
        match writing.as_mut().now_or_never() {
            Some(Ok(())) => {}
            Some(Err(error)) => return Err(Trouble::lost(&error)),
            None => self.writing = Some(writing),
        }
        Ok(())
    }

    /// The broker ended the consumer: the queue was deleted, or its leader moved.
    fn cancelled(&self) -> Trouble {
        self.counts.cancelled();
        let reason = format!(
            "RabbitMQ cancelled the consumer of queue '{}': the queue was deleted or has moved; \
             consuming again once it is there",
            self.queue
        );
        Trouble::failing(
            ErrorCode::QueueMissing,
            Remedy::Reopen(Duration::from_millis(200)),
            reason,
        )
        .queue_is_gone()
    }

    /// Unordered: cancels, and gives back what was not handed over. Ordered: only stops.
    async fn stop_taking(&mut self) -> Result<(), Trouble> {
        self.taking = false;
        if self.config.ordered {
            return Ok(());
        }
        let Some(consumer) = &self.consumer else { return Ok(()) };
        let options = BasicCancelOptions::default();
        let cancelled = timeout(ANSWER, self.channel.basic_cancel(consumer.tag(), options)).await;
        match cancelled {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return Err(Trouble::lost(&error)),
            Err(_) => {
                return Err(Trouble::passing(
                    Remedy::Reconnect,
                    format!("RabbitMQ did not answer a cancel within {ANSWER:?}"),
                ));
            }
        }
        // Behind the answer nothing comes any more; what came before it is here.
        if let Some(mut consumer) = self.consumer.take() {
            while let Some(Some(Ok(delivery))) = consumer.next().now_or_never() {
                self.receive(delivery)?;
            }
        }
        self.buffer.clear();
        self.drain_settled();
        self.write()
    }

    fn drain_settled(&mut self) {
        while let Ok((tag, settlement)) = self.settled.try_recv() {
            // Only an ordered queue that is still taking answers with an error; it ends anyway.
            let _ = self.settle(tag, settlement);
        }
    }

    /// The channel goes, the connection stays; what is unacked returns to its place.
    async fn reopen(&mut self, trouble: Trouble) -> Ended {
        let _ = self.flush(Instant::now() + ANSWER).await;
        let _ = timeout(ANSWER, self.channel.close(200, "reopening".into())).await;
        Ended::Trouble(trouble)
    }

    /// Everything settled so far is on the wire.
    async fn flush(&mut self, by: Instant) -> Result<(), Trouble> {
        loop {
            self.drain_settled();
            self.write()?;
            if self.writing.is_none() && !self.tracker.has_acks() {
                return Ok(());
            }
            let written = tokio::time::timeout_at(by, written(&mut self.writing)).await;
            self.writing = None;
            match written {
                Ok(Ok(())) => {}
                Ok(Err(error)) => return Err(Trouble::lost(&error)),
                Err(_) => return Err(Trouble::passing(Remedy::Reconnect, "no answer in time")),
            }
        }
    }

    /// Acks written and answered, then the channel closed.
    async fn close(&mut self, by: Instant) -> Result<(), SourceError> {
        let (queue, unsettled) = (Arc::clone(&self.queue), self.tracker.outstanding());
        let failed = |what: &str| SourceError {
            class: ErrorClass::Transient,
            what: format!("closing queue '{queue}': {what}; {unsettled} deliveries may come again"),
            code: None,
            source: None,
        };
        self.taking = false;
        let leaving = async {
            self.flush(by).await?;
            let answered = answered(&self.channel, &self.queue, self.kind).await;
            answered.map_err(|error| Trouble::lost(&error))?;
            // Not cancelled: the close itself gives back what is unacked, in its place.
            self.channel.close(200, "closing".into()).await.map_err(|error| Trouble::lost(&error))
        };
        match tokio::time::timeout_at(by, leaving).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(trouble)) => Err(failed(&trouble.reason)),
            Err(_) => Err(failed("RabbitMQ did not answer in time")),
        }
    }
}

/// One hand-over. Its tag means something to this session alone.
struct HandOver {
    tag: u64,
    settled: mpsc::UnboundedSender<Settled>,
}

impl Settle for HandOver {
    fn settle(self: Box<Self>, settlement: Settlement) {
        // Refused when the session has ended: then the broker has the message back already.
        let _ = self.settled.send((self.tag, settlement));
    }
}

/// Whether the queue could be consumed from; nothing is sent here yet.
pub(crate) async fn look(
    config: &RabbitMqConfig,
    link: &Link,
    kind: &mut Option<QueueKind>,
) -> Result<(), Trouble> {
    let looking = async {
        let channel = channel_of(config, link, kind).await?;
        let closed = channel.close(200, "looked".into()).await;
        closed.map_err(|error| Trouble::lost(&error))
    };
    timeout(ANSWER, looking).await.unwrap_or_else(|_| Err(silent(link)))
}

fn silent(link: &Link) -> Trouble {
    let peer = &link.peer;
    Trouble::passing(
        Remedy::Reconnect,
        format!("RabbitMQ at {peer} does not answer within {ANSWER:?}; connecting again"),
    )
}

/// No other consumer may have the queue.
fn is_exclusive(config: &RabbitMqConfig) -> bool {
    config.ordered && !config.single_active_consumer
}

/// A channel, and the queue as it must be.
async fn channel_of(
    config: &RabbitMqConfig,
    link: &Link,
    kind: &mut Option<QueueKind>,
) -> Result<Channel, Trouble> {
    let trouble = |error: Error| Trouble::opening(&error, config, STANDBY);
    let channel = link.connection.create_channel().await.map_err(trouble)?;
    let consumers = declare(&channel, config).await.map_err(trouble)?.consumer_count();
    if kind.is_none() {
        *kind = find_kind(config, link).await?;
    }
    if is_exclusive(config) && consumers > 0 {
        // It would be refused, and the broker's log would fill with refusals.
        let _ = timeout(ANSWER, channel.close(200, "standing by".into())).await;
        return Err(Trouble::standby(config, STANDBY));
    }
    Ok(channel)
}

async fn declare(channel: &Channel, config: &RabbitMqConfig) -> Result<Queue, Error> {
    let (options, arguments) = match &config.declare {
        None => {
            let passive = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
            (passive, FieldTable::default())
        }
        Some(declare) => {
            let durable = declare.durable;
            (QueueDeclareOptions { durable, ..QueueDeclareOptions::default() }, declare.table())
        }
    };
    channel.queue_declare(config.queue.as_str().into(), options, arguments).await
}

/// The queue's kind, where something depends on it.
async fn find_kind(config: &RabbitMqConfig, link: &Link) -> Result<Option<QueueKind>, Trouble> {
    if let Some(kind) = config.known_kind() {
        return Ok(Some(kind));
    }
    if !config.ordered || config.single_active_consumer {
        return Ok(None);
    }
    let queue = &config.queue;
    let found =
        probe::kind(&link.connection, queue).await.map_err(|error| Trouble::lost(&error))?;
    match found {
        Found::Classic => Ok(Some(QueueKind::Classic)),
        Found::Quorum => Err(crate::config::quorum_needs_single_active(queue)),
        Found::Stream => Err(format!(
            "'{queue}' is a stream, which this source does not consume; give a classic or quorum queue"
        )),
        Found::Unknown => Err(format!(
            "ordering needs to know that queue '{queue}' has one consumer, and its kind could not be \
             found out (that takes the right to configure it): say queue_kind = classic if it is a \
             classic queue, or single_active_consumer = true if it was declared so"
        )),
    }
    .map_err(|reason| Trouble::permanent(ErrorCode::OrderRefused, reason))
}

async fn next(consumer: &mut Option<Consumer>) -> Option<Result<lapin::message::Delivery, Error>> {
    match consumer {
        Some(consumer) => consumer.next().await,
        None => pending().await,
    }
}

async fn written(writing: &mut Option<Writing>) -> Result<(), Error> {
    match writing {
        Some(writing) => writing.await,
        None => pending().await,
    }
}

/// A round trip behind the acks: the channel and a classic queue work in order, so its answer is an
/// answer to them.
async fn answered(channel: &Channel, queue: &str, kind: Option<QueueKind>) -> Result<(), Error> {
    let look = || {
        let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
        channel.queue_declare(queue.into(), options, FieldTable::default())
    };
    look().await?;
    if kind != Some(QueueKind::Classic) {
        sleep(QUORUM_PAUSE).await;
        look().await?;
    }
    Ok(())
}

/// Writes all frames; each waits for the socket, none for an answer, all together.
fn frames_written(channel: Channel, frames: Vec<Frame>) -> Writing {
    Box::pin(async move {
        let channel = &channel;
        let writes = frames.into_iter().map(|frame| async move {
            match frame {
                Frame::Ack { tag, multiple } => {
                    channel.basic_ack(tag, BasicAckOptions { multiple }).await
                }
                Frame::Nack { tag } => {
                    let options = BasicNackOptions { multiple: false, requeue: true };
                    channel.basic_nack(tag, options).await
                }
            }
        });
        try_join_all(writes).await.map(|_| ())
    })
}
