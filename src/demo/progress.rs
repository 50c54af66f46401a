//! Where the run stands: bars on a terminal, a line now and then elsewhere.

use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::ledger::Tally;
use super::report::grouped;

/// Between two looks at the figures.
const TURN: Duration = Duration::from_millis(100);
/// Between two lines where there are no bars.
const LINE_EVERY: Duration = Duration::from_secs(2);

/// Shows it on standard error.
pub(super) struct Progress {
    bars: MultiProgress,
    published: ProgressBar,
    accepted: ProgressBar,
    terminal: bool,
}

impl Progress {
    /// For so many records with so many different ids.
    pub(super) fn new(messages: u64, distinct: u64) -> Self {
        let terminal = std::io::stderr().is_terminal();
        let target =
            if terminal { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bars = MultiProgress::with_draw_target(target);
        let bar = |name: &'static str, length| {
            let style = ProgressStyle::with_template("{prefix:9} {wide_bar} {pos:>7} of {len:7}")
                .unwrap_or_else(|_| ProgressStyle::default_bar());
            bars.add(ProgressBar::new(length).with_style(style).with_prefix(name))
        };
        let (published, accepted) = (bar("published", messages), bar("accepted", distinct));
        Self { bars, published, accepted, terminal }
    }

    /// Something happened.
    pub(super) fn say(&self, text: &str) {
        if self.terminal {
            // The next line shows whether the terminal is still there.
            let _ = self.bars.println(text);
        } else {
            eprintln!("{text}");
        }
    }

    /// Follows the figures until it is dropped.
    pub(super) async fn follow(
        &self,
        published: watch::Receiver<u64>,
        tally: watch::Receiver<Tally>,
    ) {
        let mut turn = interval(TURN);
        turn.set_missed_tick_behavior(MissedTickBehavior::Skip);
        let mut last = (Instant::now(), (0, 0));
        loop {
            turn.tick().await;
            let now = (*published.borrow(), tally.borrow().accepted);
            self.published.set_position(now.0);
            self.accepted.set_position(now.1);
            if !self.terminal && now != last.1 && last.0.elapsed() >= LINE_EVERY {
                last = (Instant::now(), now);
                self.line(now.0, now.1);
            }
        }
    }

    fn line(&self, published: u64, accepted: u64) {
        eprintln!(
            "published {} of {}, accepted {} of {}",
            grouped(published),
            grouped(self.published.length().unwrap_or_default()),
            grouped(accepted),
            grouped(self.accepted.length().unwrap_or_default()),
        );
    }

    /// Takes the bars away.
    pub(super) fn clear(&self) {
        // Nothing depends on it.
        let _ = self.bars.clear();
    }
}
