//! Answers of a batch, member by member.

use std::future::Future;

use inboxd_contract::{ErrorClass, InboxKey, MESSAGE_ID_BYTES_MAX, MessageRecord, StoreError};

use crate::error::repeat;

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

    /// Has `run` answer `members` together. An error that only one of them may be the reason
    /// for (a value that the database refuses) is traced by running each alone.
    pub(crate) async fn run<F, R>(&mut self, members: Vec<usize>, mut run: F)
    where
        F: FnMut(Vec<usize>) -> R,
        R: Future<Output = Result<Vec<A>, StoreError>>,
    {
        if members.is_empty() {
            return;
        }
        match run(members.clone()).await {
            Ok(answers) => {
                for (index, answer) in members.into_iter().zip(answers) {
                    self.set(index, Ok(answer));
                }
            }
            Err(error) if error.class == ErrorClass::Transient || members.len() == 1 => {
                for index in members {
                    self.set(index, Err(repeat(&error)));
                }
            }
            Err(_) => {
                for index in members {
                    let alone = run(vec![index]).await.and_then(|answers| {
                        answers.into_iter().next().ok_or_else(|| unanswered("a batch of one"))
                    });
                    self.set(index, alone);
                }
            }
        }
    }

    pub(crate) fn finish(self) -> Vec<Result<A, StoreError>> {
        self.slots
            .into_iter()
            .map(|slot| slot.unwrap_or_else(|| Err(unanswered("a member of a batch"))))
            .collect()
    }
}

fn unanswered(what: &str) -> StoreError {
    StoreError {
        class: ErrorClass::Bug,
        what: format!("{what} was left without an answer"),
        locked: false,
        refused: false,
        code: None,
        source: None,
    }
}

/// A key that the columns hold to the byte.
pub(crate) fn check_key(key: &InboxKey) -> Result<(), StoreError> {
    let id = key.message_id.as_str();
    if id.is_empty() || id.len() > MESSAGE_ID_BYTES_MAX || id.contains('\0') {
        return Err(StoreError::refused(format!(
            "a message id of {} bytes cannot be stored: it has 1 to {MESSAGE_ID_BYTES_MAX} \
             bytes and no NUL",
            id.len()
        )));
    }
    Ok(())
}

/// The longest recorded text, in bytes.
const TEXT_BYTES_MAX: usize = 256;

/// Text that the columns hold to the byte.
pub(crate) fn check_record(record: &MessageRecord) -> Result<(), StoreError> {
    let texts =
        [&record.producer, &record.message_type, &record.correlation_id, &record.causation_id];
    if texts.into_iter().flatten().any(|text| text.len() > TEXT_BYTES_MAX || text.contains('\0')) {
        return Err(StoreError::refused(format!(
            "a recorded text (producer, type, correlation or causation id) has more than \
             {TEXT_BYTES_MAX} bytes, or a NUL"
        )));
    }
    Ok(())
}
