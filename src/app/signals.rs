//! SIGTERM and SIGINT: the first drains, the second ends at once.

use std::io;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// Shells report a process that a signal ended as 128 and the signal's number.
const EXIT_SIGTERM: i32 = 143;
const EXIT_SIGINT: i32 = 130;
/// One wish may come as two signals: `timeout` and terminals signal the process and its group.
const SAME_WISH_WITHIN: Duration = Duration::from_millis(50);

/// Listens until it is dropped.
pub(super) struct Signals {
    first: CancellationToken,
    task: JoinHandle<()>,
}

impl Signals {
    pub(super) fn listen() -> io::Result<Self> {
        let terminate = signal(SignalKind::terminate())?;
        let interrupt = signal(SignalKind::interrupt())?;
        let first = CancellationToken::new();
        let task = tokio::spawn(watch(terminate, interrupt, first.clone()));
        Ok(Self { first, task })
    }

    /// Resolves with the first signal.
    ///
    /// # Cancel safety
    /// Cancel-safe.
    pub(super) async fn first(&self) {
        self.first.cancelled().await;
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn watch(mut terminate: Signal, mut interrupt: Signal, first: CancellationToken) {
    loop {
        let (name, code) = tokio::select! {
            _ = terminate.recv() => ("SIGTERM", EXIT_SIGTERM),
            _ = interrupt.recv() => ("SIGINT", EXIT_SIGINT),
        };
        if first.is_cancelled() {
            tracing::warn!(
                "{name} for the second time: ending at once; nothing unsettled is acked"
            );
            std::process::exit(code);
        }
        tracing::info!("{name}: draining; a second one ends at once");
        first.cancel();
        // Signals that come meanwhile are one at most per kind, and are taken for the first.
        tokio::time::sleep(SAME_WISH_WITHIN).await;
        let _ = futures::poll!(std::pin::pin!(terminate.recv()));
        let _ = futures::poll!(std::pin::pin!(interrupt.recv()));
    }
}
