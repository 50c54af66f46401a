//! Batches: tried whole, then in parts, so that one member spoils nothing for the others.

use std::future::Future;
use std::time::Duration;

use inboxd_contract::StoreError;
use tokio::time::Instant;

use crate::error::Failure;
use crate::session::LockWait;

/// The size of the parts that a batch is split into before its members are tried alone.
const PART: usize = 8;

/// One call of the store, for any number of members.
pub(crate) trait Operation: Sync {
    /// What is asked for each member.
    type Member: Sync;
    /// What is answered for each.
    type Answer: Send;

    /// How long members are tried in smaller parts.
    fn patience(&self) -> Duration;

    /// One transaction for these members: as many answers, or nothing happened.
    fn run(
        &self,
        members: &[&Self::Member],
        wait: LockWait,
    ) -> impl Future<Output = Result<Vec<Self::Answer>, Failure>> + Send;
}

/// Answers every member. A batch that meets a lock or a value that the database refuses is split
/// into parts, and a part that does so too into its members; those wait for locks only shortly,
/// so that the whole call takes little longer than the lock timeout. Where many members are locked
/// it would: once the operation's patience is over, what was not tried yet is answered as locked,
/// which makes the caller try it alone. Once the database is not there, nothing further is tried.
pub(crate) async fn answer_each<O: Operation>(
    operation: &O,
    members: &[O::Member],
) -> Vec<Result<O::Answer, StoreError>> {
    let members: Vec<&O::Member> = members.iter().collect();
    let mut answers =
        Answers { answers: Vec::with_capacity(members.len()), outage: None, until: Instant::now() };
    if members.is_empty() {
        return answers.answers;
    }
    let whole = operation.run(&members, LockWait::Whole).await;
    let Some(()) = answers.take(whole, members.len()) else { return answers.answers };
    answers.until = Instant::now() + operation.patience();
    for part in members.chunks(PART) {
        if members.len() > PART {
            let run = answers.run(operation, part).await;
            if answers.take(run, part.len()).is_none() {
                continue;
            }
        }
        for member in part {
            let alone = answers.run(operation, &[member]).await;
            if answers.take(alone, 1).is_some() {
                unreachable!("a member alone is never split");
            }
        }
    }
    answers.answers
}

struct Answers<T> {
    answers: Vec<Result<T, StoreError>>,
    /// The database is not there: what remains fails alike.
    outage: Option<Failure>,
    /// The end of patience.
    until: Instant,
}

impl<T: Send> Answers<T> {
    async fn run<O: Operation<Answer = T>>(
        &self,
        operation: &O,
        members: &[&O::Member],
    ) -> Result<Vec<T>, Failure> {
        match &self.outage {
            Some(failure) => Err(failure.clone()),
            None if Instant::now() >= self.until => Err(Failure::out_of_patience()),
            None => operation.run(members, LockWait::Part).await,
        }
    }

    /// Notes what a run came to. `Some` where its members must be tried in smaller parts.
    fn take(&mut self, run: Result<Vec<T>, Failure>, members: usize) -> Option<()> {
        match run {
            Ok(answers) => self.answers.extend(answers.into_iter().map(Ok)),
            Err(failure) if failure.concerns_a_member() && members > 1 => return Some(()),
            Err(failure) => {
                self.answers.extend((0..members).map(|_| Err(failure.clone().into())));
                if !failure.concerns_a_member() {
                    self.outage = Some(failure);
                }
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Is waited for, in vain.
    const LOCKED: i32 = 98;

    /// Members below zero are refused; 99 is an outage.
    #[derive(Default)]
    struct Fake {
        runs: AtomicUsize,
        done: Mutex<Vec<i32>>,
    }

    impl Operation for Fake {
        type Member = i32;
        type Answer = i32;

        fn patience(&self) -> Duration {
            Duration::from_secs(1)
        }

        async fn run(&self, members: &[&i32], _wait: LockWait) -> Result<Vec<i32>, Failure> {
            self.runs.fetch_add(1, Ordering::SeqCst);
            if members.iter().any(|member| **member == LOCKED) {
                tokio::time::sleep(Duration::from_millis(50)).await;
                return Err(Failure::out_of_patience());
            }
            if members.iter().any(|member| **member == 99) && members.len() == 1 {
                return Err(Failure::of("a test", sqlx::Error::PoolTimedOut));
            }
            if members.iter().any(|member| **member < 0 || **member == 99) {
                let error = sqlx::Error::Encode("refused".into());
                return Err(Failure::of("a test", error));
            }
            let members: Vec<i32> = members.iter().map(|member| **member).collect();
            self.done.lock().unwrap().extend(&members);
            Ok(members)
        }
    }

    #[tokio::test]
    async fn one_bad_member_of_many_costs_its_part() {
        let fake = Fake::default();
        let mut members: Vec<i32> = (0..64).collect();
        members[20] = -1;
        let answers = answer_each(&fake, &members).await;
        assert_eq!(answers.len(), 64);
        for (member, answer) in members.iter().zip(&answers) {
            match answer {
                Ok(answer) => assert_eq!(answer, member),
                Err(_) => assert_eq!(*member, -1),
            }
        }
        assert_eq!(fake.runs.load(Ordering::SeqCst), 1 + 8 + 8);
        assert_eq!(fake.done.lock().unwrap().len(), 63, "each once");
    }

    #[tokio::test(start_paused = true)]
    async fn many_locked_members_do_not_hold_the_others_up() {
        let fake = Fake::default();
        let mut members = vec![LOCKED; 256];
        members[3] = 3;
        let begun = Instant::now();
        let answers = answer_each(&fake, &members).await;
        assert!(begun.elapsed() <= Duration::from_millis(1_100), "{:?}", begun.elapsed());
        assert_eq!(answers.len(), 256);
        for (place, answer) in answers.iter().enumerate() {
            match answer {
                Ok(answer) => assert_eq!((place, *answer), (3, 3)),
                Err(error) => assert!(error.locked && error.is_transient(), "{error}"),
            }
        }
        assert!(answers[3].is_ok(), "it was tried in time");
    }

    #[tokio::test]
    async fn after_an_outage_nothing_is_tried() {
        let fake = Fake::default();
        let answers = answer_each(&fake, &[1, 99, 2, 3]).await;
        assert_eq!(answers.len(), 4);
        assert!(answers[0].is_ok());
        assert!(answers[1..].iter().all(|answer| answer.as_ref().is_err_and(|e| e.is_transient())));
        assert_eq!(fake.runs.load(Ordering::SeqCst), 3, "whole, first, second");
    }
}
