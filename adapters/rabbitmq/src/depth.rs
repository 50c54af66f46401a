//! How many messages are ready in the queue.
//!
//! Asked now and then by a passive declare, on a channel of its own: a refusal closes that channel
//! and no other. What cannot be asked is not known, and asked again later.

use std::future::pending;
use std::time::Duration;

use inboxd_contract::SourceStatus;
use lapin::options::QueueDeclareOptions;
use lapin::types::FieldTable;
use lapin::{Channel, Connection, Error, Queue};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use crate::config::RabbitMqConfig;
use crate::trouble::channel_reply;

const ANSWER: Duration = Duration::from_secs(5);
const ACCESS_REFUSED: u16 = 403;

/// Keeps the depth in the status up to date for as long as it is polled. Never ends.
pub(crate) async fn watch(
    connection: &Connection,
    config: &RabbitMqConfig,
    status: &watch::Sender<SourceStatus>,
) {
    let _unknown_afterwards = Unknown(status);
    let mut channel = None;
    loop {
        let asked = timeout(ANSWER, ask(connection, &mut channel, &config.queue)).await;
        let depth = match &asked {
            Ok(Ok(queue)) => Some(u64::from(queue.message_count())),
            // The answer has closed the channel, or none came.
            Ok(Err(_)) | Err(_) => {
                channel = None;
                None
            }
        };
        set(status, depth);
        if let Ok(Err(error)) = &asked
            && channel_reply(error).is_some_and(|(code, _)| code == ACCESS_REFUSED)
        {
            // It would be refused each time, and the broker's log would fill with refusals.
            pending::<()>().await;
        }
        sleep(config.depth_interval).await;
    }
}

async fn ask(
    connection: &Connection,
    channel: &mut Option<Channel>,
    queue: &str,
) -> Result<Queue, Error> {
    let channel = match channel {
        Some(channel) => channel,
        None => channel.insert(connection.create_channel().await?),
    };
    let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
    channel.queue_declare(queue.into(), options, FieldTable::default()).await
}

fn set(status: &watch::Sender<SourceStatus>, depth: Option<u64>) {
    status.send_if_modified(|status| {
        let news = status.queue_depth != depth;
        status.queue_depth = depth;
        news
    });
}

/// Without a connection nothing is known.
struct Unknown<'a>(&'a watch::Sender<SourceStatus>);

impl Drop for Unknown<'_> {
    fn drop(&mut self) {
        set(self.0, None);
    }
}
