//! Dead letters: what is kept of a message that will not be forwarded.
//!
//! Invariants: the copy is whole, but for a body above the limit, of which size and hash are
//! kept, and for what a database refuses to take, which is then cut and named: a message that no
//! database would take must not stop its lane for ever.

use inboxd_contract::{DeadLetter, DeadReason, DeadRow, Envelope, NewCopy, ParkReason};
use sha2::{Digest as _, Sha256};

use super::intake::INLINE_BYTES_MAX;
use super::message::Message;
use super::schedule;
use super::settings::OnDeadLetter;
use super::subscription::Shared;

/// The whole message.
pub(super) fn of(shared: &Shared, message: &Message, reason: DeadReason) -> DeadLetter {
    let halts = shared.settings.on_dead_letter == OnDeadLetter::Halt;
    DeadLetter {
        key: message.key.clone(),
        token: None,
        subscription: shared.settings.name.clone(),
        lane: message.lane.clone(),
        lane_id: message.lane_id.filter(|_| halts),
        first_ago: message.first_ago(),
        envelope: message.envelope.clone(),
        body_kept: true,
        fingerprint: message.fingerprint.clone(),
        attempts: 0,
        last_status: None,
        last_error: None,
        reason,
    }
}

/// The whole message, to be forwarded later.
pub(super) fn copy(shared: &Shared, message: &Message, reason: ParkReason) -> NewCopy {
    NewCopy {
        subscription: shared.settings.name.clone(),
        lane: message.lane.clone(),
        lane_id: message.lane_id,
        envelope: message.envelope.clone(),
        fingerprint: message.fingerprint.clone(),
        attempts: 0,
        delay: std::time::Duration::ZERO,
        last_status: None,
        last_error: None,
        reason,
        first_ago: message.first_ago(),
    }
}

/// What is left to keep of a message that no column takes and that can so not be parked.
pub(super) fn of_refused(shared: &Shared, message: &Message, refusal: &str) -> DeadLetter {
    cut(&of(shared, message, DeadReason::BodyTooLarge), refusal)
}

/// Everything but the body, which is above the limit.
pub(super) async fn without_body(shared: &Shared, message: &Message) -> DeadLetter {
    let mut letter = of(shared, message, DeadReason::BodyTooLarge);
    letter.body_kept = false;
    let envelope = letter.envelope.clone();
    let description = if envelope.bytes() <= INLINE_BYTES_MAX {
        describe_body(&envelope)
    } else {
        let digest = tokio::task::spawn_blocking(move || describe_body(&envelope)).await;
        digest.unwrap_or_else(|_| "its size could not be taken".into())
    };
    letter.last_error = Some(format!("above body_bytes_max: {description}"));
    letter
}

/// What is left to keep of a letter that the database refuses: origin, ids and hashes.
pub(super) fn cut(letter: &DeadLetter, refusal: &str) -> DeadLetter {
    let whole = &letter.envelope;
    let mut envelope = Envelope::new(whole.origin.clone(), None);
    envelope.message_type = whole.message_type.clone().filter(|value| value.len() <= 256);
    let mut cut = letter.clone();
    cut.body_kept = false;
    cut.lane = letter.lane.as_deref().map(|lane| Sha256::digest(lane).to_vec());
    cut.envelope = envelope.into();
    let said = letter.last_error.as_deref().unwrap_or("nothing");
    let error = format!(
        "the database refused the whole message ({refusal}); cut: {} and {} headers; before that: \
         {said}",
        describe_body(whole),
        whole.headers.len(),
    );
    let error: String = error.chars().take(500).collect();
    cut.last_error = Some(schedule::stored_error(&error));
    cut
}

/// Whether one of these rows is the letter that was written for this very delivery.
pub(super) fn is_among(message: &Message, rows: &[DeadRow]) -> bool {
    let position = message.envelope.origin.position();
    rows.iter().any(|row| row.fingerprint == message.fingerprint && row.position == position)
}

fn describe_body(envelope: &Envelope) -> String {
    let body = envelope.body.as_deref().unwrap_or_default();
    format!("body of {} bytes with sha256 {}", body.len(), hex::encode(Sha256::digest(body)))
}
