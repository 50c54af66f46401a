//! The application under the callback: answers 200 at once and counts.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use anyhow::Context as _;
use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::routing::post;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// How many POSTs there were, and when the first and the last came.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Tally {
    pub(crate) posts: u64,
    pub(crate) span: Option<(Instant, Instant)>,
}

/// A listening application. Dropped: closed.
pub(crate) struct Application {
    address: SocketAddr,
    tally: Arc<Mutex<watch::Sender<Tally>>>,
    task: JoinHandle<()>,
}

type Shared = Arc<Mutex<watch::Sender<Tally>>>;

impl Application {
    pub(crate) async fn start() -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await.context("a free port")?;
        let address = listener.local_addr()?;
        let tally: Shared = Arc::new(Mutex::new(watch::Sender::new(Tally::default())));
        let router = Router::new().route("/", post(accept)).with_state(tally.clone());
        let task = tokio::spawn(async move {
            if let Err(error) = axum::serve(listener, router).await {
                eprintln!("the application ended: {error}");
            }
        });
        Ok(Self { address, tally, task })
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}/", self.address)
    }

    /// Begins to count from nothing.
    pub(crate) fn reset(&self) {
        self.sender().send_replace(Tally::default());
    }

    /// Waits for so many POSTs; seconds from the first to the last of them.
    pub(crate) async fn until(&self, posts: u64) -> anyhow::Result<f64> {
        let mut tally = self.sender().subscribe();
        let done = *tally.wait_for(|tally| tally.posts >= posts).await?;
        let (first, last) = done.span.context("no POST came")?;
        Ok((last - first).as_secs_f64())
    }

    fn sender(&self) -> std::sync::MutexGuard<'_, watch::Sender<Tally>> {
        self.tally.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Application {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn accept(State(tally): State<Shared>, _body: Bytes) {
    let now = Instant::now();
    let sender = tally.lock().unwrap_or_else(PoisonError::into_inner);
    sender.send_modify(|tally| {
        tally.posts += 1;
        tally.span = Some((tally.span.map_or(now, |(first, _)| first), now));
    });
}
