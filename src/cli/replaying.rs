//! Replays and discards of many rows, call by call, with a progress bar on a terminal.
//!
//! | died after | what comes of it |
//! |---|---|
//! | some calls | what they did is done; the same command finds the rest |

use std::time::Duration;

use inboxd_contract::ParkedState;
use indicatif::{ProgressBar, ProgressStyle};

use super::reach::Reach;
use crate::admin::{
    DiscardAnswer, DiscardAsk, ParkedAsk, ROWS_MAX, ReplayAnswer, ReplayAsk, Selection,
};

/// A replay of all that is selected, in calls of bounded size.
pub(super) async fn replay_all(
    reach: &Reach,
    mut ask: ReplayAsk,
    actor: &str,
) -> Result<ReplayAnswer, String> {
    let mut whole = ReplayAnswer { dry_run: ask.dry_run, ..ReplayAnswer::default() };
    let mut calls = Calls::of(reach, &ask.selection).await?;
    while let Some(selection) = calls.next() {
        ask.selection = selection;
        let answer = reach.replay(&ask, actor).await.map_err(|why| calls.ended(&why))?;
        for row in &answer.rows {
            whole.counts.add(row.result);
        }
        let rows = answer.rows.len();
        whole.rows.extend(answer.rows);
        match answer.next {
            Some(next) => ask.delay = Duration::from_millis(next.delay_ms),
            // The rows that are named go on where the ones before ended.
            None => ask.delay += spread(ask.rate, rows),
        }
        calls.done(rows, answer.next.map(|next| next.after));
    }
    Ok(whole)
}

fn spread(rate: Option<f64>, rows: usize) -> Duration {
    rate.map_or(Duration::ZERO, |rate| Duration::from_millis((rows as f64 * 1_000.0 / rate) as u64))
}

/// A discard of all that is selected, in calls of bounded size.
pub(super) async fn discard_all(
    reach: &Reach,
    mut ask: DiscardAsk,
    actor: &str,
) -> Result<DiscardAnswer, String> {
    let mut whole = DiscardAnswer { dry_run: ask.dry_run, ..DiscardAnswer::default() };
    let mut calls = Calls::of(reach, &ask.selection).await?;
    while let Some(selection) = calls.next() {
        ask.selection = selection;
        let answer = reach.discard(&ask, actor).await.map_err(|why| calls.ended(&why))?;
        for row in &answer.rows {
            whole.counts.add(row.result);
        }
        calls.done(answer.rows.len(), answer.next);
        whole.rows.extend(answer.rows);
    }
    Ok(whole)
}

/// The calls that a selection takes.
struct Calls {
    /// Rows that are named and still to come, or none.
    seqs: Vec<i64>,
    /// The filter, where there is one, and the next call by it.
    filter: Option<Selection>,
    by_filter: Option<Selection>,
    bar: ProgressBar,
    rows: usize,
}

impl Calls {
    async fn of(reach: &Reach, selection: &Selection) -> Result<Self, String> {
        let total = match selection {
            Selection::Seqs(seqs) => seqs.len() as u64,
            Selection::Filter { filter, .. } => {
                let filter = filter.clone();
                let states = vec![ParkedState::Dead];
                let ask = ParkedAsk { filter, states, after: None, limit: 1, count: true };
                reach.list("/v1/dead-letters", &ask).await?.matching.unwrap_or_default()
            }
        };
        // Hidden by itself where standard error is no terminal.
        let bar = ProgressBar::new(total);
        if let Ok(style) = ProgressStyle::with_template("{bar:40} {pos}/{len} {eta}") {
            bar.set_style(style);
        }
        let (seqs, by_filter) = match selection {
            Selection::Seqs(seqs) => (seqs.clone(), None),
            filter => (Vec::new(), Some(filter.clone())),
        };
        Ok(Self { seqs, filter: by_filter.clone(), by_filter, bar, rows: 0 })
    }

    fn next(&mut self) -> Option<Selection> {
        if let Some(selection) = self.by_filter.take() {
            return Some(selection);
        }
        let count = self.seqs.len().min(ROWS_MAX as usize);
        let next: Vec<_> = self.seqs.drain(..count).collect();
        if next.is_empty() {
            self.bar.finish_and_clear();
            return None;
        }
        Some(Selection::Seqs(next))
    }

    /// A call has ended; there is more behind `after`.
    fn done(&mut self, rows: usize, after: Option<i64>) {
        self.rows += rows;
        self.bar.inc(rows as u64);
        if let (Some(after), Some(Selection::Filter { filter, limit, .. })) =
            (after, self.filter.as_ref())
        {
            let (filter, limit) = (filter.clone(), *limit);
            self.by_filter = Some(Selection::Filter { filter, after: Some(after), limit });
        }
    }

    /// What to say of a call that failed.
    fn ended(&self, why: &str) -> String {
        self.bar.finish_and_clear();
        match self.rows {
            0 => why.to_owned(),
            rows => format!("{why}; {rows} rows were gone through before, and stay as they are"),
        }
    }
}
