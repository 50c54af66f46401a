//! Copies of dead letters, to an exchange.
//!
//! Purpose: [`DeadLetterExchange`] publishes each copy as mandatory and persistent, and answers once
//! the broker has confirmed it and has not given it back.
//!
//! Invariants
//! - `Ok` follows a confirm of this very copy by the broker, and only where the broker did not give
//!   the copy back before: RabbitMQ confirms what it could not route too, right behind the return.
//! - The connection is no source's: a memory alarm, which stops whoever publishes, stops no acks.
//! - Copies are handed to the client one after the other, since it counts confirms by the order of
//!   calls; their confirms are waited for side by side.
//! - Each try ends within `publish_timeout`. Nothing is handed to a connection that is blocked, so
//!   that nothing gathers in the client.
//! - No task: who publishes first connects, and others wait for it.
//!
//! | died after | left | what comes of it |
//! |---|---|---|
//! | the copy was written | the copy, perhaps | the original is delivered again and a second copy is published: same `inbox-message-id`, another `inbox-copy-id` |
//! | the confirm | the copy | the same, unless the row of the dead letter has committed |
//! | a copy that was written timed out while the connection was blocked | the copy, once the alarm is over | the next try publishes another |

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use bytes::Bytes;
use inboxd_contract::{DeadLetterTarget, ErrorCode, LetterCopy, Origin, PublishError, SourceError};
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions, ExchangeDeclareOptions};
use lapin::types::FieldTable;
use lapin::{BasicProperties, Channel, Confirmation, Error, ExchangeKind};
use tokio::sync::{Mutex as AsyncMutex, Semaphore};
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};
use uuid::Uuid;

use crate::letter_config::DeadLetterExchangeConfig;
use crate::letter_message::{self, NameTooLong};
use crate::link::{self, Link, Purpose, Socket};
use crate::outgoing::Expected;
use crate::supervisor::backoff;
use crate::trouble::{self, Trouble, channel_reply};

/// Copies under way at once; more wait for a place.
const UNDER_WAY_MAX: u32 = 1_024;
/// Between two looks at a connection that is blocked.
const BLOCKED: Duration = Duration::from_millis(50);
/// A goodbye that nothing hangs on.
const POLITE: Duration = Duration::from_secs(1);
/// Frame head and end, class, weight and body size: what a header frame has beside properties.
const HEADER_FRAME_BYTES: usize = 7 + 12 + 1;

/// A connection and its channel, which confirms.
struct Line {
    link: Link,
    channel: Channel,
    /// Held while a copy is handed to the client.
    handing: AsyncMutex<()>,
    /// When the broker confirmed something last.
    heard: Mutex<Instant>,
    /// Nothing more is to be published here.
    broken: AtomicBool,
}

impl Line {
    fn usable(&self) -> bool {
        let connected =
            self.link.connection.status().connected() && self.channel.status().connected();
        connected && !self.broken.load(Ordering::Relaxed)
    }

    fn give_up(&self) {
        self.broken.store(true, Ordering::Relaxed);
        self.link.cut();
    }

    fn blocked(&self) -> Option<String> {
        self.link.aside.outbox.blocked()
    }
}

#[derive(Default)]
struct State {
    line: Option<Arc<Line>>,
    /// Attempts to connect in a row that came to nothing.
    failures: u32,
    not_before: Option<Instant>,
    /// Whose turn it is among the hosts.
    turn: usize,
}

/// Publishes copies of dead letters to an exchange.
pub struct DeadLetterExchange {
    config: DeadLetterExchangeConfig,
    /// One permit for each copy under way; closed with the target.
    under_way: Semaphore,
    state: AsyncMutex<State>,
    /// Why connecting failed last.
    last: Mutex<Option<PublishError>>,
}

impl DeadLetterExchange {
    /// A target that connects when something is published first.
    ///
    /// # Errors
    /// Permanent: the configuration is not valid.
    pub fn start(config: DeadLetterExchangeConfig) -> Result<Self, SourceError> {
        config.validate()?;
        let under_way = Semaphore::new(UNDER_WAY_MAX as usize);
        Ok(Self { config, under_way, state: AsyncMutex::default(), last: Mutex::default() })
    }

    async fn try_publish(&self, letter: &LetterCopy<'_>) -> Result<(), PublishError> {
        let began = Instant::now();
        let deadline = began + self.config.publish_timeout;
        let Ok(permit) = timeout_at(deadline, self.under_way.acquire()).await else {
            return Err(self.away("has too many copies under way".into()));
        };
        let Ok(_permit) = permit else { return Err(self.away("is closed".into())) };
        let copy_id = Uuid::new_v4().simple().to_string();
        let properties = letter_message::properties(letter, &copy_id, SystemTime::now());
        let properties = properties.map_err(|NameTooLong(bytes)| {
            self.refused(
                true,
                format!("takes no header whose name has {bytes} bytes; AMQP allows 255"),
            )
        })?;
        let line = match timeout_at(deadline, self.line()).await {
            Ok(line) => line?,
            Err(_) => return Err(self.not_connected()),
        };
        self.fits(&line, &properties)?;
        let expected = line.link.aside.outbox.expect(&copy_id, properties);
        let handed = self.hand_over(&line, letter, &copy_id, &expected);
        match timeout_at(deadline, handed).await {
            Ok(Ok(confirmation)) => {
                *lock(&line.heard) = Instant::now();
                self.confirmed(&confirmation, &expected, letter)
            }
            Ok(Err(error)) => Err(self.lost(&error, letter)),
            Err(_) => Err(self.unconfirmed(&line, began)),
        }
    }

    /// Publishes and waits for the confirm.
    async fn hand_over(
        &self,
        line: &Line,
        letter: &LetterCopy<'_>,
        copy_id: &str,
        expected: &Expected,
    ) -> Result<Confirmation, Error> {
        let published = {
            let _handing = line.handing.lock().await;
            while line.blocked().is_some() {
                sleep(BLOCKED).await;
            }
            let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
            let body = letter.envelope.body.as_deref().unwrap_or_default();
            let marked = BasicProperties::default().with_message_id(copy_id.into());
            let (exchange, key) = (self.config.exchange.as_str(), self.routing_key(letter));
            line.channel.basic_publish(exchange.into(), key.into(), options, body, marked).await
        };
        match published {
            Ok(confirm) => confirm.await,
            Err(error) => {
                expected.forget();
                Err(error)
            }
        }
    }

    fn routing_key<'a>(&'a self, letter: &LetterCopy<'a>) -> &'a str {
        letter_message::routing_key(match (&self.config.routing_key, &letter.envelope.origin) {
            (Some(key), _) => key,
            (None, Origin::RabbitMq { routing_key, .. }) => routing_key,
            (None, _) => letter.subscription,
        })
    }

    fn fits(&self, line: &Line, properties: &Bytes) -> Result<(), PublishError> {
        let most = usize::try_from(line.link.connection.configuration().frame_max());
        let most = most.unwrap_or(usize::MAX);
        match properties.len() + HEADER_FRAME_BYTES > most {
            false => Ok(()),
            true => {
                let bytes = properties.len();
                let what = format!(
                    "takes no headers of {bytes} bytes: they must fit a frame, {most} bytes (frame_max)"
                );
                Err(self.refused(true, what))
            }
        }
    }

    fn confirmed(
        &self,
        confirmation: &Confirmation,
        expected: &Expected,
        letter: &LetterCopy<'_>,
    ) -> Result<(), PublishError> {
        match confirmation {
            Confirmation::Ack(_) if expected.came_back() => {
                let (exchange, key) = (self.shown(), self.routing_key(letter));
                let what = match self.config.exchange.is_empty() {
                    true => format!("no queue is named '{key}': create it"),
                    false => format!("bind a queue to it with the routing key '{key}'"),
                };
                Err(PublishError {
                    what: format!("{exchange} for dead letters leads a copy to no queue: {what}"),
                    refused: false,
                    code: ErrorCode::DeadLetterUnrouted,
                })
            }
            Confirmation::Ack(_) => Ok(()),
            Confirmation::Nack(_) => Err(self.away(
                "did not take the copy (nack): a queue behind it is full (x-max-length with \
                 reject-publish) or not available"
                    .into(),
            )),
            Confirmation::NotRequested => {
                Err(self.away("does not confirm, though it was asked to".into()))
            }
        }
    }

    /// The channel or the connection went away, for this reason.
    fn lost(&self, error: &Error, letter: &LetterCopy<'_>) -> PublishError {
        match channel_reply(error) {
            Some((trouble::NOT_FOUND, text)) => self.missing(&text),
            Some((trouble::ACCESS_REFUSED, text)) => self.forbidden(&text),
            Some((trouble::PRECONDITION_FAILED, text)) => {
                // The channel is closed over one copy, and all others on it fail with it.
                let size = letter.envelope.body.as_ref().map_or(0, Bytes::len);
                let mine = text.split(|c: char| !c.is_ascii_digit());
                let mine =
                    mine.filter_map(|digits| digits.parse::<usize>().ok()).any(|said| said == size);
                match mine && text.contains("size") {
                    true => self.refused(true, format!("takes no message of {size} bytes: {text}")),
                    false => self.away(format!("did not take the copy: {text}")),
                }
            }
            _ => self.away(format!("is lost: {}", Trouble::lost(error).reason)),
        }
    }

    fn unconfirmed(&self, line: &Line, began: Instant) -> PublishError {
        let within = self.config.publish_timeout;
        if let Some(reason) = line.blocked() {
            // Kept: the broker says when it takes copies again, and what was written comes then.
            return self.away(format!(
                "is blocked by an alarm of the broker ({reason}), longer than {within:?}: consume from \
                 its queues, or give it memory or disk"
            ));
        }
        if *lock(&line.heard) < began {
            // It says nothing at all: another connection may.
            line.give_up();
        }
        self.away(format!("did not confirm the copy within {within:?}"))
    }

    /// The present line, or a new one.
    async fn line(&self) -> Result<Arc<Line>, PublishError> {
        let mut state = self.state.lock().await;
        if let Some(line) = state.line.as_ref().filter(|line| line.usable()) {
            return Ok(Arc::clone(line));
        }
        state.line = None;
        if let Some(not_before) = state.not_before {
            sleep_until(not_before).await;
        }
        let opened = self.open(state.turn).await;
        match opened {
            Ok(line) => {
                let line = Arc::new(line);
                (state.failures, state.not_before) = (0, None);
                state.line = Some(Arc::clone(&line));
                Ok(line)
            }
            Err(error) => {
                state.failures = state.failures.saturating_add(1);
                state.not_before = Some(Instant::now() + backoff(state.failures));
                state.turn = state.turn.wrapping_add(1);
                *lock(&self.last) = Some(error.clone());
                Err(error)
            }
        }
    }

    async fn open(&self, turn: usize) -> Result<Line, PublishError> {
        let mut broker = self.config.broker.clone();
        // One try has time for one host, and knows what came of it.
        let share = self.config.publish_timeout.mul_f64(0.8);
        broker.connect_timeout = broker.connect_timeout.min(share / 2);
        let connected = link::connect(&broker, turn, &Socket::default(), Purpose::Publish).await;
        let link = connected.map_err(|trouble| self.troubled(&trouble))?;
        match timeout(share / 2, self.channel(&link)).await {
            Ok(Ok(channel)) => Ok(Line {
                link,
                channel,
                handing: AsyncMutex::default(),
                heard: Mutex::new(Instant::now()),
                broken: AtomicBool::new(false),
            }),
            Ok(Err(error)) => {
                // So that the broker logs no lost connection.
                let _ = timeout(POLITE, link.connection.close(200, "leaving".into())).await;
                Err(error)
            }
            Err(_) => {
                Err(self.away(format!("is silent: RabbitMQ at {} does not answer", link.peer)))
            }
        }
    }

    /// A channel that confirms; the exchange is there.
    async fn channel(&self, link: &Link) -> Result<Channel, PublishError> {
        let refused = |error: Error| match channel_reply(&error) {
            Some((trouble::NOT_FOUND, text)) => self.missing(&text),
            Some((trouble::ACCESS_REFUSED, text)) => self.forbidden(&text),
            _ => self.away(format!("is lost: {}", Trouble::lost(&error).reason)),
        };
        let channel = link.connection.create_channel().await.map_err(refused)?;
        channel.confirm_select(ConfirmSelectOptions::default()).await.map_err(refused)?;
        if !self.config.exchange.is_empty() {
            let options =
                ExchangeDeclareOptions { passive: true, ..ExchangeDeclareOptions::default() };
            let exchange = self.config.exchange.as_str().into();
            let looked = channel.exchange_declare(
                exchange,
                ExchangeKind::Direct,
                options,
                FieldTable::default(),
            );
            looked.await.map_err(refused)?;
        }
        Ok(channel)
    }

    fn troubled(&self, trouble: &Trouble) -> PublishError {
        let code = match trouble.code {
            ErrorCode::SourceUnreachable => ErrorCode::DeadLetterTargetAway,
            _ => ErrorCode::DeadLetterTargetRefused,
        };
        let reason = trouble.reason.trim_end_matches("; trying again");
        let what = format!("{} for dead letters: {reason}", self.shown());
        PublishError { what, refused: false, code }
    }

    /// Why there is no connection yet.
    fn not_connected(&self) -> PublishError {
        let last = lock(&self.last).clone();
        let within = self.config.publish_timeout;
        last.unwrap_or_else(|| self.away(format!("is not reached within {within:?}")))
    }

    fn missing(&self, text: &str) -> PublishError {
        let vhost = &self.config.broker.vhost;
        self.refused(
            false,
            format!("does not exist in vhost '{vhost}': create it and bind a queue to it ({text})"),
        )
    }

    fn forbidden(&self, text: &str) -> PublishError {
        let user = &self.config.broker.user;
        let what = format!("may not be written to: grant user '{user}' write on it ({text})");
        self.refused(false, what)
    }

    fn refused(&self, refused: bool, what: String) -> PublishError {
        let what = format!("{} for dead letters {what}", self.shown());
        PublishError { what, refused, code: ErrorCode::DeadLetterTargetRefused }
    }

    fn away(&self, what: String) -> PublishError {
        PublishError {
            what: format!("{} for dead letters {what}", self.shown()),
            refused: false,
            code: ErrorCode::DeadLetterTargetAway,
        }
    }

    fn shown(&self) -> String {
        match self.config.exchange.as_str() {
            "" => "the default exchange".into(),
            name => format!("exchange '{name}'"),
        }
    }
}

#[async_trait]
impl DeadLetterTarget for DeadLetterExchange {
    fn describe(&self) -> String {
        let broker = &self.config.broker;
        let hosts = broker.hosts.iter().map(|(host, port)| format!("{host}:{port}"));
        let hosts = hosts.collect::<Vec<_>>().join(", ");
        format!("{} of RabbitMQ at {hosts}, vhost '{}'", self.shown(), broker.vhost)
    }

    async fn publish(&self, letter: LetterCopy<'_>) -> Result<(), PublishError> {
        self.try_publish(&letter).await
    }

    async fn close(&self, deadline: Duration) {
        let by = Instant::now() + deadline;
        // What is under way has its time; nothing new comes.
        let _ = timeout_at(by - deadline / 2, self.under_way.acquire_many(UNDER_WAY_MAX)).await;
        self.under_way.close();
        let closing = async {
            let line = self.state.lock().await.line.take();
            if let Some(line) = line {
                let _ = line.link.connection.close(200, "closing".into()).await;
                line.give_up();
            }
        };
        let _ = timeout_at(by, closing).await;
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
