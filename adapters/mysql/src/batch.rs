//! Answers of a batch, member by member, and how a batch is split.

use std::future::Future;
use std::time::Duration;

use inboxd_contract::{
    CONSUMER_ID_BYTES_MAX, ErrorClass, InboxKey, MESSAGE_ID_BYTES_MAX, MessageRecord, StoreError,
};
use tokio::time::{Instant, sleep};

use crate::error::repeat;
use crate::sql::Patience;

/// The longest recorded text, in bytes.
const TEXT_BYTES_MAX: usize = 256;
/// Waits between tries of one member that met a lock in a batch: enough to outlast another
/// instance's transaction, too short to stall the others.
const RETRY_PAUSES_MS: [u64; 3] = [5, 10, 20];

/// One slot per member, filled once.
pub(crate) struct Answers<A> {
    slots: Vec<Option<Result<A, StoreError>>>,
}

impl<A> Answers<A> {
    pub(crate) fn new(len: usize) -> Self {
        Self { slots: std::iter::repeat_with(|| None).take(len).collect() }
    }

    pub(crate) fn set(&mut self, index: usize, answer: Result<A, StoreError>) {
        self.slots[index] = Some(answer);
    }

    pub(crate) fn get(&self, index: usize) -> Option<&Result<A, StoreError>> {
        self.slots[index].as_ref()
    }

    /// Members without an answer so far.
    pub(crate) fn open(&self) -> Vec<usize> {
        (0..self.slots.len()).filter(|index| self.slots[*index].is_none()).collect()
    }

    /// Has `run` answer `members`, in the order given, `chunk_max` at once. A group that
    /// meets a lock, or a value that the server refuses, is halved until the member that is
    /// the reason stands alone. A single member of a single call waits for its lock;
    /// one of a batch gets a few short tries. After `patience_max` what is still open is
    /// answered as locked.
    pub(crate) async fn run<F, R>(
        &mut self,
        members: Vec<usize>,
        chunk_max: usize,
        patience_max: Duration,
        mut run: F,
    ) where
        F: FnMut(Vec<usize>, Patience) -> R,
        R: Future<Output = Result<Vec<A>, StoreError>>,
    {
        let patience = if members.len() == 1 { Patience::Wait } else { Patience::NoWait };
        let deadline = Instant::now() + patience_max;
        // A stack, first members on top.
        let mut groups: Vec<Vec<usize>> =
            members.chunks(chunk_max).rev().map(<[usize]>::to_vec).collect();
        let mut tries = 0;
        while let Some(mut group) = groups.pop() {
            let error = match run(group.clone(), patience).await {
                Ok(answers) => {
                    for (index, answer) in group.into_iter().zip(answers) {
                        self.set(index, Ok(answer));
                    }
                    tries = 0;
                    continue;
                }
                Err(error) => error,
            };
            let splits = error.locked || error.class == ErrorClass::Permanent;
            if splits && group.len() > 1 {
                let rest = group.split_off(group.len() / 2);
                groups.push(rest);
                groups.push(group);
            } else if error.locked && tries < RETRY_PAUSES_MS.len() && Instant::now() < deadline {
                sleep(Duration::from_millis(RETRY_PAUSES_MS[tries])).await;
                tries += 1;
                groups.push(group);
            } else if splits {
                tries = 0;
                self.set(group[0], Err(error));
            } else {
                // The server is gone: no use asking it for the others.
                for index in group.into_iter().chain(groups.drain(..).flatten()) {
                    self.set(index, Err(repeat(&error)));
                }
            }
        }
    }

    pub(crate) fn finish(self) -> Vec<Result<A, StoreError>> {
        let unanswered = || StoreError {
            class: ErrorClass::Bug,
            what: String::from("a member of a batch was left without an answer"),
            locked: false,
            refused: false,
            code: None,
            source: None,
        };
        self.slots.into_iter().map(|slot| slot.unwrap_or_else(|| Err(unanswered()))).collect()
    }
}

/// A key that the columns hold to the byte.
pub(crate) fn check_key(key: &InboxKey) -> Result<(), StoreError> {
    let (consumer, message) = (key.consumer_id.as_str().len(), key.message_id.as_str().len());
    if consumer > CONSUMER_ID_BYTES_MAX || message == 0 || message > MESSAGE_ID_BYTES_MAX {
        return Err(StoreError::refused(format!(
            "a message id of {message} bytes cannot be stored: it has 1 to \
             {MESSAGE_ID_BYTES_MAX} bytes"
        )));
    }
    Ok(())
}

/// Text that the columns hold to the byte.
pub(crate) fn check_record(record: &MessageRecord) -> Result<(), StoreError> {
    let texts =
        [&record.producer, &record.message_type, &record.correlation_id, &record.causation_id];
    if texts.into_iter().flatten().any(|text| text.len() > TEXT_BYTES_MAX) {
        return Err(StoreError::refused(format!(
            "a recorded text (producer, type, correlation or causation id) has more than \
             {TEXT_BYTES_MAX} bytes"
        )));
    }
    Ok(())
}
