//! What the stub application was sent and what it answered.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use bytes::Bytes;
use http::request::Parts;
use inboxd_contract::decode_percent;
use sha2::{Digest, Sha256};
use tokio::time::Instant;

/// Bodies up to this length are kept, of longer ones only hash and length.
const BODY_KEPT_MAX: usize = 1024 * 1024;

/// One POST.
#[derive(Debug, Clone)]
pub struct Post {
    /// Its place in the ledger, from 0.
    pub index: usize,
    /// When its head had come.
    pub begun_at: Instant,
    /// The same by the wall clock.
    pub begun_at_wall: SystemTime,
    /// When its answer was decided; `None` while it is open or if it was cut off.
    pub answered_at: Option<Instant>,
    /// The same by the wall clock.
    pub answered_at_wall: Option<SystemTime>,
    /// The status of its answer, also where the answer was lost.
    pub status: Option<u16>,
    /// The request's method.
    pub method: String,
    /// The request's path and query.
    pub path: String,
    /// `Inbox-Message-Id`, decoded; empty where it is missing.
    pub id: String,
    /// `Inbox-Consumer-Id`, decoded; empty where it is missing.
    pub consumer_id: String,
    /// `Inbox-Attempt`; 0 where it is missing or no number.
    pub attempt: u32,
    /// Headers as they came, names in lower case; the values of one name in order.
    pub headers: Vec<(String, Bytes)>,
    /// The body, where it is at most 1 MiB and was received whole.
    pub body: Option<Bytes>,
    /// The body's length in bytes; 0 until it was received whole.
    pub body_len: usize,
    /// SHA-256 of the body in lower-case hex; empty until it was received whole.
    pub body_sha256: String,
}

impl Post {
    /// The first value of a header as text, bytes that are not UTF-8 replaced.
    pub fn header(&self, name: &str) -> Option<String> {
        self.headers_named(name).into_iter().next()
    }

    /// All values of a header in order.
    pub fn headers_named(&self, name: &str) -> Vec<String> {
        self.headers
            .iter()
            .filter(|(found, _)| found.eq_ignore_ascii_case(name))
            .map(|(_, value)| String::from_utf8_lossy(value).into_owned())
            .collect()
    }

    /// It was answered with 2xx.
    pub fn is_accepted(&self) -> bool {
        self.status.is_some_and(|status| (200..300).contains(&status))
    }

    /// It began and has no answer.
    pub fn is_open(&self) -> bool {
        self.status.is_none()
    }
}

/// The record of every POST since the application's first start. Cheap to clone; all clones
/// are one ledger.
#[derive(Debug, Clone, Default)]
pub struct Ledger {
    book: Arc<Mutex<Book>>,
}

/// Counts are kept beside the posts, since tests ask for them every few milliseconds.
#[derive(Debug, Default)]
struct Book {
    posts: Vec<Post>,
    answered: usize,
    accepted_total: usize,
    accepted: BTreeMap<String, usize>,
}

impl Ledger {
    /// Every POST in the order in which they began.
    pub fn all(&self) -> Vec<Post> {
        self.lock().posts.clone()
    }

    /// The POSTs of one id.
    pub fn posts(&self, id: &str) -> Vec<Post> {
        self.lock().posts.iter().filter(|post| post.id == id).cloned().collect()
    }

    /// How many POSTs have begun.
    pub fn begun(&self) -> usize {
        self.lock().posts.len()
    }

    /// How many POSTs of one id have begun.
    pub fn begun_of(&self, id: &str) -> usize {
        self.lock().posts.iter().filter(|post| post.id == id).count()
    }

    /// How many POSTs were answered, whatever the answer was.
    pub fn answered_count(&self) -> usize {
        self.lock().answered
    }

    /// How often one id was accepted (2xx).
    pub fn accepted(&self, id: &str) -> usize {
        self.lock().accepted.get(id).copied().unwrap_or(0)
    }

    /// How many POSTs were accepted, repetitions included.
    pub fn accepted_total(&self) -> usize {
        self.lock().accepted_total
    }

    /// The ids that were accepted at least once.
    pub fn accepted_ids(&self) -> BTreeSet<String> {
        self.lock().accepted.keys().cloned().collect()
    }

    /// How many ids were accepted at least once.
    pub fn accepted_distinct(&self) -> usize {
        self.lock().accepted.len()
    }

    /// The ids that were accepted more than once, with how often.
    pub fn accepted_more_than_once(&self) -> BTreeMap<String, usize> {
        let book = self.lock();
        let twice = book.accepted.iter().filter(|(_, count)| **count > 1);
        twice.map(|(id, count)| (id.clone(), *count)).collect()
    }

    /// Ids in the order in which they were accepted, repetitions included.
    pub fn acceptance_order(&self) -> Vec<String> {
        let mut accepted: Vec<_> =
            self.all().into_iter().filter(|post| post.is_accepted()).collect();
        accepted.sort_by_key(|post| (post.answered_at, post.index));
        accepted.into_iter().map(|post| post.id).collect()
    }

    /// The POSTs that have begun and have no answer. Those that a killed application left
    /// behind stay open for ever.
    pub fn open(&self) -> Vec<Post> {
        self.lock().posts.iter().filter(|post| post.is_open()).cloned().collect()
    }

    /// Empties it. What is under way is recorded no more.
    pub fn clear(&self) {
        *self.lock() = Book::default();
    }

    pub(super) fn begin(&self, parts: &Parts) -> Entry {
        let posts = &mut self.lock().posts;
        let post = Post::new(posts.len(), parts);
        let entry = Entry { index: post.index, begun_at: post.begun_at };
        posts.push(post);
        entry
    }

    pub(super) fn received(&self, entry: Entry, body: &Bytes) -> Post {
        let sha256 = hex::encode(Sha256::digest(body));
        let mut book = self.lock();
        let Some(post) = entry.find(&mut book.posts) else {
            // Cleared meanwhile.
            return Post::orphan(entry);
        };
        post.body_len = body.len();
        post.body_sha256 = sha256;
        post.body = (body.len() <= BODY_KEPT_MAX).then(|| body.clone());
        post.clone()
    }

    pub(super) fn answered(&self, entry: Entry, status: u16) {
        let mut book = self.lock();
        let Some(post) = entry.find(&mut book.posts) else { return };
        post.answered_at = Some(Instant::now());
        post.answered_at_wall = Some(SystemTime::now());
        post.status = Some(status);
        let accepted = post.is_accepted().then(|| post.id.clone());
        book.answered += 1;
        if let Some(id) = accepted {
            book.accepted_total += 1;
            *book.accepted.entry(id).or_default() += 1;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A POST's place; the time tells it from a successor after [`Ledger::clear`].
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    index: usize,
    begun_at: Instant,
}

impl Entry {
    fn find(self, posts: &mut [Post]) -> Option<&mut Post> {
        posts.get_mut(self.index).filter(|post| post.begun_at == self.begun_at)
    }
}

impl Post {
    fn new(index: usize, parts: &Parts) -> Self {
        let text = |name: &str| {
            let value = parts.headers.get(name)?.to_str().ok()?;
            String::from_utf8(decode_percent(value)).ok()
        };
        let path = parts.uri.path_and_query().map_or("", |path| path.as_str());
        Self {
            begun_at: Instant::now(),
            begun_at_wall: SystemTime::now(),
            answered_at: None,
            answered_at_wall: None,
            status: None,
            method: parts.method.to_string(),
            path: path.to_owned(),
            id: text("inbox-message-id").unwrap_or_default(),
            consumer_id: text("inbox-consumer-id").unwrap_or_default(),
            attempt: text("inbox-attempt").and_then(|value| value.parse().ok()).unwrap_or(0),
            headers: parts
                .headers
                .iter()
                .map(|(name, value)| {
                    (name.as_str().to_owned(), Bytes::copy_from_slice(value.as_bytes()))
                })
                .collect(),
            body: None,
            body_len: 0,
            body_sha256: String::new(),
            index,
        }
    }

    fn orphan(entry: Entry) -> Self {
        let (parts, ()) = http::Request::new(()).into_parts();
        Self { begun_at: entry.begun_at, ..Self::new(entry.index, &parts) }
    }
}
