//! Named places at which the process can be made to kill itself, for the crash tests. With the
//! feature `failpoints` alone, which no release build can have.
//!
//! One list makes the places in the code (`failpoint!`), the tests (`tests/it/failpoints`) and the
//! table in docs/crash-points.md. `INBOXD_FAILPOINT=park-committed` kills the process at the first
//! pass of that place, `park-committed:3` at the third.
//!
//! Invariants: without the variable nothing differs; the death is SIGKILL, so that nothing is
//! flushed, closed or released on the way.

use std::str::FromStr as _;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use strum::{EnumIter, EnumString, IntoEnumIterator as _, IntoStaticStr};

#[cfg(not(debug_assertions))]
compile_error!("the feature `failpoints` lets a variable kill the process: it is for tests alone");

/// The variable that arms one.
pub const VARIABLE: &str = "INBOXD_FAILPOINT";

/// A place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, EnumIter, EnumString, IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum Failpoint {
    /// A delivery's claim is committed.
    InPlaceClaimed,
    /// The application has accepted a delivery.
    InPlaceAccepted,
    /// A delivery's row is committed.
    InPlaceCompleted,
    /// Its ack is with the source.
    InPlaceAcked,
    /// The attempts in place are used up.
    ParkBegins,
    /// The parked copy is committed.
    ParkCommitted,
    /// A batch of arrivals is on its way to the database.
    ArriveBegins,
    /// A batch of arrivals is committed.
    ArriveCommitted,
    /// A worker asks for rows that are due.
    TakeBegins,
    /// A worker has claimed rows.
    TakeCommitted,
    /// The application has accepted what a worker sent.
    WorkerAccepted,
    /// A worker's completion is committed.
    WorkerCompleted,
    /// The application has failed what a worker sent.
    RescheduleBegins,
    /// The row's next time is committed.
    RescheduleCommitted,
    /// A dead letter is about to be published.
    LetterBegins,
    /// The broker has confirmed the copy of a dead letter.
    LetterPublished,
    /// A dead letter's row is committed.
    LetterKept,
    /// An operator has asked for a replay.
    ReplayBegins,
    /// A replay is committed.
    ReplayCommitted,
}

/// What there is to say of a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct About {
    /// Where it is.
    pub place: &'static str,
    /// What is left when the process dies there.
    pub left: &'static str,
    /// What comes of it after the next start.
    pub then: &'static str,
    /// POSTs of the message that begin because of the death, at most.
    pub posts_more: usize,
}

impl Failpoint {
    /// Its name in the variable.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// What there is to say of it.
    pub fn about(self) -> About {
        let about = |place, left, then, posts_more| About { place, left, then, posts_more };
        match self {
            Self::InPlaceClaimed => about(
                "direct: the claim is committed, nothing is sent",
                "a claim; the delivery, unsettled",
                "delivered again; forwarded when the claim has run out",
                0,
            ),
            Self::InPlaceAccepted => about(
                "direct: the application has accepted, no row is written",
                "a claim; the delivery, unsettled",
                "delivered again; forwarded once more when the claim has run out, with the same \
                 `Idempotency-Key`",
                1,
            ),
            Self::InPlaceCompleted => about(
                "direct: the row is committed, the ack not sent",
                "the row; the delivery, unsettled",
                "delivered again; a duplicate, acked",
                0,
            ),
            Self::InPlaceAcked => about(
                "the ack is with the source, which may not have sent it",
                "the row or the copy; the delivery, settled or not",
                "delivered again where the broker did not get the ack; a duplicate, acked",
                0,
            ),
            Self::ParkBegins => about(
                "direct: the attempts in place are used up, no copy is written",
                "a claim that counts the attempts; the delivery, unsettled",
                "delivered again; tried once more when the claim has run out, then parked",
                1,
            ),
            Self::ParkCommitted => about(
                "direct: the parked copy is committed, the ack not sent",
                "the copy, due; the delivery, unsettled",
                "delivered again, known as parked, acked; a worker forwards the copy at its time",
                0,
            ),
            Self::ArriveBegins => about(
                "stored, or behind a parked message of its lane: no copy is written",
                "the delivery, unsettled",
                "delivered again, in its order; parked then",
                0,
            ),
            Self::ArriveCommitted => about(
                "stored, or behind a parked message of its lane: the copy is committed, the ack \
                 not sent",
                "the copy, due; the delivery, unsettled",
                "delivered again, known as parked, acked; a worker forwards the copy",
                0,
            ),
            Self::TakeBegins => about(
                "a worker asks for rows that are due",
                "the rows as they were",
                "a worker of any instance takes them",
                0,
            ),
            Self::TakeCommitted => about(
                "a worker has claimed rows, nothing is sent",
                "claims; the rows, due",
                "taken when the claims have run out; each counts an attempt more",
                0,
            ),
            Self::WorkerAccepted => about(
                "the application has accepted what a worker sent, nothing is written",
                "a claim; the row, due",
                "taken and forwarded once more when the claim has run out, with the same \
                 `Idempotency-Key`",
                1,
            ),
            Self::WorkerCompleted => about(
                "the row is in `inbox_messages`, and gone from `inbox_parked`",
                "the row",
                "nothing is left to do",
                0,
            ),
            Self::RescheduleBegins => about(
                "the application has failed what a worker sent, nothing is written",
                "a claim that counts the attempt; the row, due",
                "tried again when the claim has run out instead of at its next time",
                0,
            ),
            Self::RescheduleCommitted => about(
                "the row's next time is committed",
                "the row, due later",
                "tried again at that time",
                0,
            ),
            Self::LetterBegins => about(
                "a dead letter is about to be published",
                "a claim; the delivery, unsettled, or the row, due",
                "forwarded once more when the claim has run out; a dead letter by that answer",
                1,
            ),
            Self::LetterPublished => about(
                "the broker has confirmed the copy, no row is written",
                "the copy on the broker; a claim; the delivery, unsettled, or the row, due",
                "forwarded once more when the claim has run out; refused, it is published a second \
                 time, with the same message id",
                1,
            ),
            Self::LetterKept => about(
                "a dead letter's row is committed, the ack not sent",
                "the dead letter; the delivery, unsettled",
                "delivered again from the same place, known as dead, acked; on RabbitMQ, where \
                 nothing tells that from a second publishing, forwarded once more, and dead again \
                 by that answer",
                1,
            ),
            Self::ReplayBegins => about(
                "an operator has asked for a replay, nothing is written",
                "the dead letter",
                "the operator gets no answer, and asks again",
                0,
            ),
            Self::ReplayCommitted => about(
                "a replay is committed, not answered",
                "the copy, due; the entry of the audit",
                "a worker forwards it; asked again, there is no dead letter any more",
                0,
            ),
        }
    }
}

/// The list as a table in Markdown, for docs/crash-points.md.
pub fn table() -> String {
    let mut text = String::from(
        "| name | where | what is left | what comes of it | POSTs more, at most |\n|---|---|---|---|---|\n",
    );
    for point in Failpoint::iter() {
        let About { place, left, then, posts_more } = point.about();
        text += &format!("| `{}` | {place} | {left} | {then} | {posts_more} |\n", point.name());
    }
    text
}

/// What the variable says.
struct Armed {
    point: Failpoint,
    /// Passes until the death, the last one included.
    left: AtomicU32,
}

static ARMED: OnceLock<Option<Armed>> = OnceLock::new();

/// Reads the variable, and says what is armed.
///
/// # Errors
/// A name that does not exist, or a pass that is no number from 1.
pub fn arm() -> Result<(), String> {
    let Some(text) = std::env::var_os(VARIABLE) else { return Ok(()) };
    let armed = read(&text.to_string_lossy())?;
    tracing::warn!(name = armed.point.name(), "the process will kill itself here");
    let _ = ARMED.set(Some(armed));
    Ok(())
}

fn read(text: &str) -> Result<Armed, String> {
    let (name, pass) = text.split_once(':').unwrap_or((text, "1"));
    let point =
        Failpoint::from_str(name).map_err(|_| format!("{VARIABLE}: there is no place {name:?}"))?;
    match pass.parse() {
        Ok(pass @ 1..) => Ok(Armed { point, left: AtomicU32::new(pass) }),
        _ => Err(format!("{VARIABLE}: {pass:?} is no number of a pass")),
    }
}

/// Dies here, if that is what the variable says.
pub fn pass(point: Failpoint) {
    let Some(Some(armed)) = ARMED.get() else { return };
    if armed.point != point || armed.left.fetch_sub(1, Ordering::SeqCst) != 1 {
        return;
    }
    let _ = kill(Pid::this(), Signal::SIGKILL);
    // The signal is on its way; nothing may happen until it is here.
    loop {
        std::thread::park();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEGIN: &str = "<!-- The places: made from src/failpoints.rs. -->\n";
    const END: &str = "<!-- End of the places. -->\n";

    #[test]
    fn every_place_is_found_by_its_name() {
        for point in Failpoint::iter() {
            assert_eq!(read(point.name()).map(|armed| armed.point), Ok(point));
        }
        let third = read("park-committed:3").unwrap();
        assert_eq!((third.point, third.left.into_inner()), (Failpoint::ParkCommitted, 3));
        for bad in ["", "nowhere", "park-committed:0", "park-committed:x"] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_documentation_has_every_place_as_it_is_listed() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/crash-points.md");
        let documentation = std::fs::read_to_string(path).unwrap();
        let (before, rest) = documentation.split_once(BEGIN).unwrap();
        let (written, after) = rest.split_once(END).unwrap();
        let listed = format!("\n{}\n", table());
        if written == listed {
            return;
        }
        assert!(
            std::env::var_os("INBOXD_BLESS").is_some(),
            "docs/crash-points.md differs from src/failpoints.rs; to write it anew: \
             INBOXD_BLESS=1 cargo test -p inboxd --features failpoints --lib failpoints"
        );
        std::fs::write(path, format!("{before}{BEGIN}{listed}{END}{after}")).unwrap();
    }
}
