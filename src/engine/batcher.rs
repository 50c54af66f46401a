//! Batches that form by themselves: while one call is under way, what arrives queues up and
//! goes with the next one. No timer delays a member when nothing is under way.
//!
//! Invariants: every member gets exactly one answer; a call that panics answers its members
//! with an error and the next call goes on; the queue is bounded, and its senders wait.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;

use futures::FutureExt as _;
use inboxd_contract::StoreError;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

/// Members that wait while a call is under way; more wait in front of the queue.
const QUEUE_MAX: usize = 4_096;

type Reply<O> = oneshot::Sender<Result<O, StoreError>>;
type Call<I, O> = Box<
    dyn Fn(Vec<I>) -> Pin<Box<dyn Future<Output = Vec<Result<O, StoreError>>> + Send>>
        + Send
        + Sync,
>;

/// Collects single requests into calls of the store.
pub struct Batcher<I, O> {
    queue: mpsc::Sender<(I, Reply<O>)>,
    /// Ends when the queue's last sender is gone.
    _worker: JoinHandle<()>,
}

impl<I: Send + 'static, O: Send + 'static> Batcher<I, O> {
    /// Starts the worker: `call` gets 1 to `members_max` members and answers each, in order.
    pub fn start<F, Fut>(members_max: usize, call: F) -> Self
    where
        F: Fn(Vec<I>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Vec<Result<O, StoreError>>> + Send + 'static,
    {
        let (queue, receiver) = mpsc::channel(QUEUE_MAX);
        let call: Call<I, O> = Box::new(move |members| Box::pin(call(members)));
        Self { queue, _worker: tokio::spawn(work(receiver, members_max, call)) }
    }

    /// Hands one member in and waits for its answer.
    ///
    /// # Cancel safety
    /// Not cancel-safe: a member whose future is dropped may still be carried out, and its
    /// answer is gone.
    pub async fn submit(&self, member: I) -> Result<O, StoreError> {
        let (reply, answer) = oneshot::channel();
        if self.queue.send((member, reply)).await.is_err() {
            return Err(StoreError::transient("the store's worker has ended"));
        }
        answer.await.unwrap_or_else(|_| Err(StoreError::transient("the store's worker has ended")))
    }
}

async fn work<I: Send, O>(
    mut queue: mpsc::Receiver<(I, Reply<O>)>,
    members_max: usize,
    call: Call<I, O>,
) {
    let mut waiting = Vec::with_capacity(members_max);
    while queue.recv_many(&mut waiting, members_max).await > 0 {
        let (members, replies): (Vec<I>, Vec<Reply<O>>) = waiting.drain(..).unzip();
        let answers = AssertUnwindSafe(async { call(members).await }).catch_unwind().await;
        let mut answers = answers.unwrap_or_default().into_iter();
        for reply in replies {
            let answer = answers.next().unwrap_or_else(|| {
                Err(StoreError::transient("a call of the store ended without an answer"))
            });
            let _ = reply.send(answer);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::sync::Semaphore;

    use super::*;

    #[tokio::test]
    async fn what_arrives_during_a_call_goes_with_the_next_one() {
        let gate = Arc::new(Semaphore::new(0));
        let calls = Arc::new(AtomicUsize::new(0));
        let (seen_gate, seen_calls) = (gate.clone(), calls.clone());
        let batcher = Arc::new(Batcher::start(64, move |members: Vec<u32>| {
            let (gate, calls) = (seen_gate.clone(), seen_calls.clone());
            async move {
                calls.fetch_add(1, Ordering::SeqCst);
                let _permit = gate.acquire().await;
                members.into_iter().map(Ok).collect()
            }
        }));
        let submit = |n| {
            let batcher = batcher.clone();
            tokio::spawn(async move { batcher.submit(n).await })
        };
        let first = submit(0);
        while calls.load(Ordering::SeqCst) == 0 {
            tokio::task::yield_now().await;
        }
        let rest: Vec<_> = (1..=50).map(submit).collect();
        for _ in 0..1_000 {
            tokio::task::yield_now().await;
        }
        gate.add_permits(2);
        assert_eq!(first.await.unwrap().unwrap(), 0);
        for (n, task) in (1..=50).zip(rest) {
            assert_eq!(task.await.unwrap().unwrap(), n);
        }
        assert_eq!(calls.load(Ordering::SeqCst), 2);
    }

    #[tokio::test]
    async fn a_call_that_panics_answers_and_the_next_goes_on() {
        let batcher = Batcher::start(8, |members: Vec<u32>| async move {
            assert!(members[0] != 0, "asked to");
            members.into_iter().map(Ok).collect()
        });
        assert!(batcher.submit(0).await.is_err());
        assert_eq!(batcher.submit(1).await.unwrap(), 1);
    }
}
