//! Forwards parked messages: takes due rows as there is room, and sends each on its way.
//!
//! Invariants: every instance has one taker per subscription, which asks for its own rows alone,
//! so that no subscription waits for another; what is in hand is bounded by count and bytes of
//! its own, beside the intake's budget; rows of one lane go one at a time, in the lane's
//! order, and none goes after one that stays; what was taken and not started is given back with
//! its attempt; nothing is taken once the subscription stops, while the application was not
//! reachable yet, or while dead letters wait for their target.
//!
//! | died after | what is left | what comes of it |
//! |---|---|---|
//! | taking | due rows, claims that run out | taken again after the lease, an attempt more |

use std::collections::{HashMap, VecDeque};
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::FutureExt as _;
use futures::future::join_all;
use inboxd_contract::{ErrorCode, LaneId, TakeDue, Taken};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::callback::{self, Flow};
use super::keeper::Lease;
use super::progress::Stage;
use super::settings::SubscriptionSettings;
use super::subscription::Shared;
use super::taken::{Fate, TakenRow};
use super::target;
use crate::telemetry::ParkedResult;

/// Without news the database is asked this often: other instances park too.
const IDLE: Duration = Duration::from_secs(5);
/// Rows of one lane that are taken at once.
const RUN_MAX: usize = 32;
/// Rows in hand for each POST that may be under way, so that slots never wait for the database.
const ROWS_PER_SLOT: usize = 4;
const ROWS_MAX: usize = 1_024;
/// How long a little room waits to become more, so that a call carries more than one row.
const GATHER: Duration = Duration::from_millis(20);

/// When the database is to be asked for due rows again.
pub(super) struct Due {
    at: Mutex<Instant>,
    sooner: Notify,
}

impl Due {
    pub(super) fn new() -> Self {
        Self { at: Mutex::new(Instant::now()), sooner: Notify::new() }
    }

    /// Something is due now.
    pub(super) fn now(&self) {
        self.within(Duration::ZERO);
    }

    /// Something is due after this.
    pub(super) fn within(&self, delay: Duration) {
        let then = Instant::now() + delay.min(IDLE);
        let mut at = locked(&self.at);
        if then < *at {
            *at = then;
            self.sooner.notify_one();
        }
    }

    /// The database is being asked: what becomes due from now on counts anew.
    fn asked(&self) {
        *locked(&self.at) = Instant::now() + IDLE;
    }

    async fn reached(&self) {
        loop {
            let at = *locked(&self.at);
            if at <= Instant::now() {
                return;
            }
            tokio::select! {
                biased;
                () = self.sooner.notified() => {}
                () = tokio::time::sleep_until(at) => {}
            }
        }
    }
}

/// What may be in hand.
struct Room {
    rows_max: usize,
    left: Mutex<Left>,
    more: Notify,
}

#[derive(Clone, Copy)]
struct Left {
    rows: usize,
    /// Negative where a row overshot.
    bytes: i64,
    /// Rows that may still wait for one of the slots of further attempts.
    further: usize,
}

/// A row that waits for one of the slots of further attempts.
pub(super) struct WaitsFurther<'a>(&'a Room);

impl Drop for WaitsFurther<'_> {
    fn drop(&mut self) {
        locked(&self.0.left).further += 1;
    }
}

/// One row's part of the room.
pub(super) struct Place {
    room: Arc<Room>,
    bytes: i64,
}

impl Room {
    fn new(settings: &SubscriptionSettings) -> Self {
        let rows_max = settings.concurrency.saturating_mul(ROWS_PER_SLOT).clamp(1, ROWS_MAX);
        let bytes = i64::try_from(settings.in_flight_bytes_max / 2).unwrap_or(i64::MAX).max(1);
        // What fails waits in one half of the room at most, so that the rest is the others'.
        let left = Mutex::new(Left { rows: rows_max, bytes, further: (rows_max / 2).max(1) });
        Self { rows_max, left, more: Notify::new() }
    }

    fn left(&self) -> Left {
        *locked(&self.left)
    }

    /// Waits until there is some.
    async fn some(&self) -> Left {
        let is_enough = |left: Left, rows| left.rows >= rows && left.bytes > 0;
        while !is_enough(self.left(), 1) {
            self.more.notified().await;
        }
        let much = async {
            while !is_enough(self.left(), self.rows_max / 4) {
                self.more.notified().await;
            }
        };
        let _ = tokio::time::timeout(GATHER, much).await;
        self.left()
    }

    fn take(self: &Arc<Self>, bytes: usize) -> Place {
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        let mut left = locked(&self.left);
        left.rows = left.rows.saturating_sub(1);
        left.bytes = left.bytes.saturating_sub(bytes);
        Place { room: self.clone(), bytes }
    }
}

impl Place {
    /// `None`: enough of them wait already.
    pub(super) fn wait_further(&self) -> Option<WaitsFurther<'_>> {
        let mut left = locked(&self.room.left);
        left.further = left.further.checked_sub(1)?;
        Some(WaitsFurther(&self.room))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut left = locked(&self.room.left);
        left.rows += 1;
        left.bytes = left.bytes.saturating_add(self.bytes);
        drop(left);
        self.room.more.notify_one();
    }
}

/// Takes and starts rows until the subscription stops.
pub(super) async fn run(shared: Arc<Shared>) {
    tokio::select! {
        biased;
        () = shared.intake_stop.cancelled() => {}
        () = shared.draining.cancelled() => {}
        () = take(&shared) => {}
    }
}

async fn take(shared: &Arc<Shared>) {
    let room = Arc::new(Room::new(&shared.settings));
    let (flow, mut failures) = (shared.callback.flow(), 0);
    loop {
        shared.due.reached().await;
        target::wait_while_away(shared).await;
        callback::may_take(&flow).await;
        let left = room.some().await;
        let rows = match flow.get() {
            Flow::Free => left.rows,
            Flow::One => 1,
            // While there was no room.
            Flow::Nothing => continue,
        };
        shared.due.asked();
        match take_once(shared, &room, rows, left.bytes).await {
            true => failures = 0,
            false => {
                failures += 1;
                tokio::time::sleep(shared.hub.patience(failures)).await;
                shared.due.now();
            }
        }
    }
}

/// One call, and the start of what it brought; false: the store did not answer.
async fn take_once(shared: &Arc<Shared>, room: &Arc<Room>, rows: usize, bytes: i64) -> bool {
    let request = TakeDue {
        consumer_id: shared.settings.consumer_id.clone(),
        subscription: shared.settings.name.clone(),
        tokens: (0..rows).map(|_| shared.hub.token()).collect(),
        run_max: RUN_MAX.min(rows),
        bytes_max: u64::try_from(bytes).unwrap_or(1),
        lanes_from: shared.hub.lane(),
    };
    // On a task of its own: an answer that comes after the stop still gives its rows back.
    let (taker, room) = (shared.clone(), room.clone());
    let taking = shared.tasks.spawn(async move {
        tokio::select! {
            biased;
            () = taker.cut.cancelled() => true,
            answered = take_and_start(&taker, &room, &request) => answered,
        }
    });
    taking.await.unwrap_or(false)
}

async fn take_and_start(shared: &Arc<Shared>, room: &Arc<Room>, request: &TakeDue) -> bool {
    failpoint!(TakeBegins);
    let Ok((batch, leases)) = shared.hub.take_due(request).await else { return false };
    if let Some(next_in) = batch.next_in {
        shared.due.within(next_in);
    }
    if !batch.rows.is_empty() {
        shared.callback.one_was_taken();
    }
    // Rows of one lane stand in its order, with others between them.
    let mut runs: Vec<Vec<(Taken, Lease, Place)>> = Vec::new();
    let mut run_of: HashMap<LaneId, usize> = HashMap::new();
    for (taken, lease) in batch.rows.into_iter().zip(leases) {
        failpoint!(TakeCommitted);
        let place = room.take(taken.copy.envelope.bytes());
        let known = taken.lane_id.map(|lane| *run_of.entry(lane).or_insert(runs.len()));
        match known.and_then(|run| runs.get_mut(run)) {
            Some(run) => run.push((taken, lease, place)),
            None => runs.push(vec![(taken, lease, place)]),
        }
    }
    for run in runs {
        start(shared, run);
    }
    true
}

fn start(shared: &Arc<Shared>, rows: Vec<(Taken, Lease, Place)>) {
    let rows: VecDeque<TakenRow> = rows
        .into_iter()
        .map(|(taken, lease, place)| TakenRow::new(shared, taken, lease, place))
        .collect();
    let task = shared.clone();
    shared.tasks.spawn(async move {
        tokio::select! {
            biased;
            () = task.cut.cancelled() => {}
            () = go(&task, rows) => {}
        }
    });
}

/// One after the other, as long as each leaves its place.
async fn go(shared: &Shared, mut rows: VecDeque<TakenRow>) {
    let mut in_lane = false;
    for row in rows.iter().skip(1) {
        row.message.progress.stage(Stage::Lane);
    }
    while let Some(row) = rows.pop_front() {
        in_lane |= row.message.lane_id.is_some();
        let fate = match AssertUnwindSafe(row.process(shared)).catch_unwind().await {
            Ok(fate) => fate,
            Err(_) => {
                shared.metrics.panicked();
                tracing::error!(code = %ErrorCode::Bug, key = ?row.message.key, "an attempt panicked; it is made again");
                shared.hub.release_claim(row.lease.claim().clone(), false).await;
                Fate::Stays(ParkedResult::Released)
            }
        };
        row.end(shared, fate);
        if matches!(fate, Fate::Stays(_)) {
            in_lane = false;
            break;
        }
    }
    let releases = rows.into_iter().map(|row| async move {
        shared.hub.release_claim(row.lease.claim().clone(), true).await;
        row.end(shared, Fate::Stays(ParkedResult::Released));
    });
    join_all(releases).await;
    if in_lane {
        // The lane's next, if there is one, is free.
        shared.due.now();
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
