//! The target of dead letters as one process sees it, and what the broker does to publications.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use async_trait::async_trait;
use inboxd_contract::{DeadLetterTarget, LetterCopy, PublishError};
use inboxd_memory::{LetterFault, MemoryLetters};

use super::chance::Chance;
use super::life::Life;
use super::oracle::Oracle;
use super::parking::LetterProfile;

/// A broker for dead letters that fares as the seed says, and tells the oracle what it has.
pub fn broker(
    profile: LetterProfile,
    chance: Chance,
    calm: Arc<AtomicBool>,
    oracle: Oracle,
) -> MemoryLetters {
    let letters = MemoryLetters::new();
    let witness = oracle.clone();
    letters.watch(move |letter| witness.letter_published(letter));
    letters.set_plan(move |_| {
        let delay = chance.up_to(profile.slow_max);
        if calm.load(SeqCst) {
            return (delay, None);
        }
        let faults = [
            (profile.away, LetterFault::Away),
            (profile.unrouted, LetterFault::Unrouted),
            (profile.refused, LetterFault::Refused),
            (profile.answer_lost, LetterFault::AnswerLost),
        ];
        let hit = |(rate, _): &(u32, LetterFault)| chance.hits(*rate);
        (delay, faults.into_iter().find(hit).map(|(_, fault)| fault))
    });
    letters
}

/// One process's way to it.
pub struct SimLetters {
    pub life: Arc<Life>,
    pub oracle: Oracle,
    pub inner: MemoryLetters,
}

#[async_trait]
impl DeadLetterTarget for SimLetters {
    fn describe(&self) -> String {
        self.inner.describe()
    }

    async fn publish(&self, letter: LetterCopy<'_>) -> Result<(), PublishError> {
        self.life.pass("before a publication").await;
        let answer = self.inner.publish(letter).await;
        self.life.pass("after a publication").await;
        self.oracle.letter_answered(&self.life, letter, &answer);
        answer
    }

    async fn close(&self, deadline: Duration) {
        self.inner.close(deadline).await;
    }
}
