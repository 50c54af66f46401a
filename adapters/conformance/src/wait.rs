//! Waiting on conditions.

use std::fmt::Display;
use std::time::Duration;

use tokio::time::{Instant, sleep};

const POLL: Duration = Duration::from_millis(10);

/// Polls `condition` until it is `Ok` and returns its value. After `deadline` panics with the
/// state that the last `Err` reported. A condition that itself hangs is cut at the deadline.
pub async fn eventually<T, S: Display>(
    deadline: Duration,
    mut condition: impl AsyncFnMut() -> Result<T, S>,
) -> T {
    let end = Instant::now() + deadline;
    let mut last = String::from("the condition never answered");
    loop {
        match tokio::time::timeout_at(end, condition()).await {
            Ok(Ok(value)) => return value,
            Ok(Err(state)) => last = state.to_string(),
            Err(_) => panic!("not within {deadline:?}; the last state was: {last}"),
        }
        assert!(Instant::now() < end, "not within {deadline:?}; the last state was: {last}");
        sleep(POLL).await;
    }
}

/// For [`eventually`]: `Ok` if `holds`, else what `state` says.
pub fn ensure(holds: bool, state: impl Display) -> Result<(), String> {
    if holds { Ok(()) } else { Err(state.to_string()) }
}
