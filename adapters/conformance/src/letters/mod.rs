//! What every target of dead letters must do, whatever broker it publishes to.
//!
//! An adapter brings a [`LettersHarness`] and calls [`run`]. Each case has a place (a topic, an
//! exchange with its queue) of its own. The rule that runs through all of them: what was answered
//! with `Ok` is there, whole, and what is there was asked for.

mod cases;
mod faults;

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::FutureExt;
use futures::future::join_all;
use inboxd_contract::DeadLetterTarget;
use tokio::sync::Semaphore;

/// A copy as the broker has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SeenCopy {
    /// The record's key, where [`Abilities::keys`].
    pub key: Option<Bytes>,
    /// All headers in order, those of inboxd too. Values as the bytes that they are made of.
    pub headers: Vec<(Bytes, Option<Bytes>)>,
    /// `None` is a tombstone.
    pub body: Option<Bytes>,
}

impl SeenCopy {
    /// The headers that are inboxd's own.
    pub fn stamps(&self) -> BTreeMap<String, String> {
        let text = |bytes: &Bytes| String::from_utf8_lossy(bytes).into_owned();
        let ours = self.headers.iter().filter(|(name, _)| name.starts_with(b"inbox-"));
        ours.map(|(name, value)| (text(name), value.as_ref().map(text).unwrap_or_default()))
            .collect()
    }

    /// The others, in order.
    pub fn own_headers(&self) -> Vec<(Bytes, Option<Bytes>)> {
        let own = self.headers.iter().filter(|(name, _)| !name.starts_with(b"inbox-"));
        own.cloned().collect()
    }
}

/// In what a target differs from others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Abilities {
    /// A null body exists and is not the empty one.
    pub tombstones: bool,
    /// Records have a key.
    pub keys: bool,
    /// What is published may lead nowhere, and [`LettersPlace::set_routed`] makes it so.
    pub routes: bool,
    /// A place's broker takes no body of so many bytes.
    pub refuses_bytes: Option<usize>,
    /// Names of headers that the broker itself acts on, and that make way like `inbox-` ones.
    pub taken_names: &'static [&'static str],
    /// Bodies of this size are taken; the case of a large one has it.
    pub large_bytes: usize,
    /// Several copies keep no order among each other, and a try that failed may be published
    /// nevertheless.
    pub real: bool,
}

/// An adapter's side of the suite.
#[async_trait]
pub trait LettersHarness: Send + Sync + 'static {
    /// The adapter's name as printed, for instance `kafka`.
    fn adapter(&self) -> &'static str;

    /// In what it differs.
    fn abilities(&self) -> Abilities;

    /// The bound on each try of the targets that it makes.
    fn publish_timeout(&self) -> Duration;

    /// How many cases run side by side.
    fn concurrency(&self) -> usize {
        4
    }

    /// A new, empty place and a target that publishes to it.
    async fn fresh(&self) -> Box<dyn LettersPlace>;
}

/// One place and the network between it and its target.
#[async_trait]
pub trait LettersPlace: Send + Sync {
    /// The target.
    fn target(&self) -> Arc<dyn DeadLetterTarget>;

    /// All copies that the broker has had since the beginning.
    async fn copies(&self) -> Vec<SeenCopy>;

    /// False: cuts the target's connections, and refuses new ones until it is called with true.
    async fn set_reachable(&self, reachable: bool);

    /// From now on nothing passes either way, while connections stay open; until
    /// [`LettersPlace::set_reachable`] is called with true.
    async fn hang(&self);

    /// Whether what is published leads somewhere; called only where [`Abilities::routes`].
    async fn set_routed(&self, routed: bool);
}

/// Runs every case that applies to this adapter and prints one line on stdout:
/// `conformance letters <adapter>: <n> cases`.
///
/// # Panics
/// After all cases have run, if any failed; the message names them.
pub async fn run(harness: impl LettersHarness) {
    let harness: Arc<dyn LettersHarness> = Arc::new(harness);
    let abilities = harness.abilities();
    let all = cases::CASES.iter().chain(faults::CASES);
    let applying: Vec<_> = all.filter(|case| (case.applies)(&abilities)).collect();
    let permits = Semaphore::new(harness.concurrency().max(1));
    let running = applying.iter().map(async |case| {
        let _permit = permits.acquire().await;
        // The panic of one case must not end the others.
        let done = AssertUnwindSafe((case.run)(Arc::clone(&harness))).catch_unwind().await;
        done.err().map(|panic| format!("{}: {}", case.name, crate::forward::panic_text(&*panic)))
    });
    let failed: Vec<_> = join_all(running).await.into_iter().flatten().collect();
    let count = applying.len();
    println!("conformance letters {}: {count} cases", harness.adapter());
    assert!(
        failed.is_empty(),
        "conformance letters {}: {} of {count} cases failed:\n{}",
        harness.adapter(),
        failed.len(),
        failed.join("\n")
    );
}
