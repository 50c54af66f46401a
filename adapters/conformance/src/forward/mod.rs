//! What every forwarder must do, whatever carries the message.
//!
//! An adapter brings a [`ForwardHarness`] and calls [`run`]. Each case has an application of its
//! own. What only HTTP has (headers, framing) is tested by that adapter.

mod cases;

use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::FutureExt;
use inboxd_contract::Forwarder;

/// What the application does with one POST.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Behaviour {
    /// Answers with this status.
    Status(u16),
    /// Answers with this status and `Retry-After: <seconds>`.
    RetryAfter(u16, u64),
    /// Answers with this status after so much time.
    After(Duration, u16),
    /// Accepts it with 200, and the connection breaks before the answer arrives.
    LostAnswer,
    /// Never answers.
    Hang,
}

/// One POST that the application got whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    /// The message id, decoded.
    pub message_id: String,
    /// The consumer id, decoded.
    pub consumer_id: String,
    /// The subscription's name, decoded.
    pub subscription: String,
    /// The attempt's number.
    pub attempt: u32,
    /// The ordering key, decoded.
    pub ordering_key: Option<Vec<u8>>,
    /// The body; `None` is a tombstone.
    pub body: Option<Bytes>,
}

/// An adapter's side of the suite.
#[async_trait]
pub trait ForwardHarness: Send + Sync + 'static {
    /// The adapter's name as printed, for instance `http`.
    fn adapter(&self) -> &'static str;

    /// A reachable application of its own that answers 200, and a forwarder to it that caps
    /// `Retry-After` at 30 s.
    async fn fresh(&self) -> Box<dyn Application>;
}

/// One application and the forwarder that sends to it.
#[async_trait]
pub trait Application: Send + Sync {
    /// The forwarder.
    fn forwarder(&self) -> Arc<dyn Forwarder>;

    /// What it does with the next POSTs, in the order in which they begin; then 200 again.
    fn plan(&self, behaviours: Vec<Behaviour>);

    /// The POSTs it got, in the order in which they began.
    fn seen(&self) -> Vec<Seen>;

    /// False: refuses connections and breaks those that are open. True: back again.
    async fn set_reachable(&mut self, reachable: bool);
}

/// Runs every case and prints one line on stdout: `conformance forward <adapter>: <n> cases`.
///
/// # Panics
/// After all cases have run, if any failed; the message names them.
pub async fn run(harness: impl ForwardHarness) {
    let harness = Arc::new(harness);
    let cases = cases::all();
    let count = cases.len();
    let mut failed = Vec::new();
    for (name, case) in cases {
        let mut application = harness.fresh().await;
        // The panic of one case must not end the others.
        let done = AssertUnwindSafe(case(&mut *application)).catch_unwind().await;
        if let Err(panic) = done {
            failed.push(format!("{name}: {}", panic_text(&*panic)));
        }
    }
    println!("conformance forward {}: {count} cases", harness.adapter());
    assert!(
        failed.is_empty(),
        "conformance forward {}: {} of {count} cases failed:\n{}",
        harness.adapter(),
        failed.len(),
        failed.join("\n")
    );
}

pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()))
        .unwrap_or_else(|| "a panic without a text".to_owned())
}
