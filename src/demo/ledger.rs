//! What the sample application was sent and what it did about it: the truth that the sidecar
//! is judged by.
//!
//! Invariant: entries are only added and answered, never removed or corrected. A POST belongs
//! to the sidecar's life that was running when it arrived; the next life begins only when no
//! POST of the former one is open any more, so that none is taken for the next one's.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::watch;

/// One POST.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Post {
    /// Which life of the sidecar sent it, from 1.
    pub(super) life: u32,
    /// `Idempotency-Key` as it came; `None` without one.
    pub(super) key: Option<String>,
    /// The body's bytes are those that were published.
    pub(super) intact: bool,
    /// `Inbox-Origin`: which record it was.
    pub(super) origin: String,
    /// `None` while it is open, or cut off before an answer.
    pub(super) status: Option<u16>,
}

impl Post {
    /// The `Idempotency-Key`.
    pub(super) fn key(&self) -> Option<&str> {
        self.key.as_deref()
    }

    /// It was answered by a 2xx.
    pub(super) fn accepted(&self) -> bool {
        self.status.is_some_and(|status| (200..300).contains(&status))
    }
}

/// All POSTs of each message id, in the order of their arrival.
pub(super) type Posts = HashMap<String, Vec<Post>>;

/// Figures that change with every POST.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Tally {
    /// POSTs that arrived.
    pub(super) begun: u64,
    /// POSTs that are not answered yet.
    pub(super) open: u64,
    /// Different ids that were accepted.
    pub(super) accepted: u64,
    /// When the first POST of the latest life arrived, and the last answer was given.
    pub(super) span: Option<(Instant, Instant)>,
}

/// A handle on one POST between its arrival and its answer.
#[derive(Debug)]
pub(super) struct Entry {
    id: String,
    place: usize,
}

impl Entry {
    /// How many POSTs of the same id came before this one.
    pub(super) fn place(&self) -> usize {
        self.place
    }
}

/// The ledger. Cheap to clone: all clones are one.
#[derive(Debug, Clone)]
pub(super) struct Ledger(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    pages: Mutex<Pages>,
    tally: watch::Sender<Tally>,
}

#[derive(Debug, Default)]
struct Pages {
    posts: Posts,
    life: u32,
}

impl Ledger {
    /// An empty one, in the sidecar's first life.
    pub(super) fn new() -> Self {
        let pages = Mutex::new(Pages { posts: Posts::new(), life: 1 });
        Self(Arc::new(Inner { pages, tally: watch::Sender::new(Tally::default()) }))
    }

    /// A POST arrived.
    pub(super) fn begin(
        &self,
        id: &str,
        key: Option<String>,
        intact: bool,
        origin: String,
    ) -> Entry {
        let mut pages = self.pages();
        let life = pages.life;
        let posts = pages.posts.entry(id.to_owned()).or_default();
        let place = posts.len();
        posts.push(Post { life, key, intact, origin, status: None });
        self.0.tally.send_modify(|tally| {
            let now = Instant::now();
            tally.begun += 1;
            tally.open += 1;
            tally.span.get_or_insert((now, now));
        });
        Entry { id: id.to_owned(), place }
    }

    /// The application answers this. An accepted message has taken effect by now.
    pub(super) fn answer(&self, entry: &Entry, status: u16) {
        let mut pages = self.pages();
        let Some(posts) = pages.posts.get_mut(&entry.id) else { return };
        let known = posts.iter().any(Post::accepted);
        let Some(post) = posts.get_mut(entry.place) else { return };
        post.status = Some(status);
        let first = post.accepted() && !known;
        self.0.tally.send_modify(|tally| {
            tally.open -= 1;
            tally.accepted += u64::from(first);
            if let Some((_, last)) = &mut tally.span {
                *last = Instant::now();
            }
        });
    }

    /// POSTs that arrive from now on are of the sidecar's next life. Answers the span of the
    /// former one: its first POST and its last answer.
    pub(super) fn next_life(&self) -> Option<(Instant, Instant)> {
        self.pages().life += 1;
        let mut span = None;
        self.0.tally.send_modify(|tally| span = tally.span.take());
        span
    }

    /// The figures as they change.
    pub(super) fn watch(&self) -> watch::Receiver<Tally> {
        self.0.tally.subscribe()
    }

    /// The figures now.
    pub(super) fn tally(&self) -> Tally {
        *self.0.tally.borrow()
    }

    /// A copy of everything.
    pub(super) fn posts(&self) -> Posts {
        self.pages().posts.clone()
    }

    fn pages(&self) -> MutexGuard<'_, Pages> {
        self.0.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn begin(ledger: &Ledger, id: &str) -> Entry {
        ledger.begin(id, Some(format!("{id:?}")), true, "kafka:orders/0/0".into())
    }

    #[test]
    fn an_id_accepted_twice_counts_once_and_keeps_both_posts() {
        let ledger = Ledger::new();
        let first = begin(&ledger, "a");
        ledger.answer(&first, 503);
        let second = begin(&ledger, "a");
        assert_eq!(second.place(), 1);
        ledger.answer(&second, 200);
        let third = begin(&ledger, "a");
        ledger.answer(&third, 204);
        let tally = ledger.tally();
        assert_eq!((tally.begun, tally.open, tally.accepted), (3, 0, 1));
        let statuses: Vec<_> = ledger.posts()["a"].iter().map(|post| post.status).collect();
        assert_eq!(statuses, [Some(503), Some(200), Some(204)]);
    }

    #[test]
    fn a_post_belongs_to_the_life_in_which_it_arrived() {
        let ledger = Ledger::new();
        let open = begin(&ledger, "a");
        assert!(ledger.next_life().is_some());
        ledger.answer(&open, 200);
        begin(&ledger, "a");
        let lives: Vec<_> = ledger.posts()["a"].iter().map(|post| post.life).collect();
        assert_eq!(lives, [1, 2]);
        assert_eq!(ledger.tally().open, 1);
    }
}
