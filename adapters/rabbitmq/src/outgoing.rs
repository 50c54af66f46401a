//! What the client sends, on its way to the broker.
//!
//! The client keeps headers in a sorted map of text: names that repeat or are not UTF-8, and the
//! publisher's order, cannot be given to it. So a copy is published with an id as its only property,
//! and here the properties that are waiting under that id go out in its place, as bytes. What the
//! broker gives back as not routed is told by the same id, which is among the copy's headers: the
//! client hands what came back to whichever confirm is next, which may be another's.
//!
//! Invariants: frames stay frames, in order, and all but those headers pass untouched. What waits is
//! bounded by what is being published; it goes with the connection. Pure: no I/O.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;

/// The name of the header that tells copies of one dead letter apart.
pub(crate) const COPY_ID: &str = "inbox-copy-id";

const PROTOCOL_HEADER_BYTES: usize = 8;
const HEAD_BYTES: usize = 7;
const HEADER: u8 = 2;
/// Class, weight and body size: what comes before the properties.
const BEFORE_PROPERTIES_BYTES: usize = 12;
/// The flags of properties that are a message id and nothing else.
const ONLY_MESSAGE_ID: [u8; 2] = (1_u16 << 7).to_be_bytes();

/// Of one connection: properties that wait to go out, what came back, whether the broker blocks.
#[derive(Debug, Clone, Default)]
pub(crate) struct Outbox(Arc<Mutex<Inner>>);

#[derive(Debug, Default)]
struct Inner {
    /// Properties by copy id, until they go out.
    waiting: HashMap<String, Bytes>,
    /// Ids of copies that somebody waits for.
    expected: HashSet<String>,
    /// Those of them that came back.
    returned: HashSet<String>,
    blocked: Option<String>,
}

impl Outbox {
    /// Puts a copy's properties here, to go out with the message whose id is `copy_id`.
    pub(crate) fn expect(&self, copy_id: &str, properties: Bytes) -> Expected {
        let mut inner = self.lock();
        inner.waiting.insert(copy_id.to_owned(), properties);
        inner.expected.insert(copy_id.to_owned());
        Expected { outbox: self.clone(), copy_id: copy_id.to_owned() }
    }

    /// The broker gave a copy back.
    pub(crate) fn give_back(&self, copy_id: &str) {
        let mut inner = self.lock();
        if inner.expected.contains(copy_id) {
            inner.returned.insert(copy_id.to_owned());
        }
    }

    /// The broker takes nothing from this connection, for this reason; or does again.
    pub(crate) fn set_blocked(&self, reason: Option<String>) {
        self.lock().blocked = reason;
    }

    /// Why the broker takes nothing from this connection, if so.
    pub(crate) fn blocked(&self) -> Option<String> {
        self.lock().blocked.clone()
    }

    fn take(&self, copy_id: &[u8]) -> Option<Bytes> {
        self.lock().waiting.remove(std::str::from_utf8(copy_id).ok()?)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A copy that is being published. Dropped, nobody waits for it; its properties stay, since the
/// client may still send it.
#[derive(Debug)]
pub(crate) struct Expected {
    outbox: Outbox,
    copy_id: String,
}

impl Expected {
    /// The broker routed it nowhere and gave it back.
    pub(crate) fn came_back(&self) -> bool {
        self.outbox.lock().returned.contains(&self.copy_id)
    }

    /// The client will not send it.
    pub(crate) fn forget(&self) {
        self.outbox.lock().waiting.remove(&self.copy_id);
    }
}

impl Drop for Expected {
    fn drop(&mut self) {
        let mut inner = self.outbox.lock();
        inner.expected.remove(&self.copy_id);
        inner.returned.remove(&self.copy_id);
    }
}

/// Takes the bytes that the client writes, in pieces of any size, and gives those for the broker.
#[derive(Debug)]
pub(crate) struct Sender {
    outbox: Outbox,
    /// The beginning of a frame that has not come whole.
    partial: Vec<u8>,
    /// So many bytes more pass as they are.
    passing: usize,
}

impl Sender {
    /// For a new connection.
    pub(crate) fn new(outbox: Outbox) -> Self {
        Self { outbox, partial: Vec::new(), passing: PROTOCOL_HEADER_BYTES }
    }

    /// Takes bytes of the client and appends what the broker is to see.
    pub(crate) fn feed(&mut self, mut input: &[u8], out: &mut Vec<u8>) {
        while !input.is_empty() {
            if self.passing > 0 {
                let (pass, rest) = input.split_at(self.passing.min(input.len()));
                out.extend_from_slice(pass);
                self.passing -= pass.len();
                input = rest;
                continue;
            }
            if !self.gather(HEAD_BYTES, &mut input) {
                return;
            }
            let size = self.partial[3..HEAD_BYTES].iter();
            let size = size.fold(0, |size, byte| size << 8 | usize::from(*byte));
            if self.partial[0] == HEADER {
                if !self.gather(HEAD_BYTES + size + 1, &mut input) {
                    return;
                }
                let frame = std::mem::take(&mut self.partial);
                self.header(&frame, out);
            } else {
                out.append(&mut self.partial);
                // The frame's end with it.
                self.passing = size + 1;
            }
        }
    }

    /// True once `partial` has so many bytes.
    fn gather(&mut self, wanted: usize, input: &mut &[u8]) -> bool {
        let missing = wanted.saturating_sub(self.partial.len()).min(input.len());
        let (taken, rest) = input.split_at(missing);
        self.partial.extend_from_slice(taken);
        *input = rest;
        self.partial.len() >= wanted
    }

    fn header(&self, frame: &[u8], out: &mut Vec<u8>) {
        let payload = &frame[HEAD_BYTES..frame.len() - 1];
        let Some(properties) = message_id(payload).and_then(|id| self.outbox.take(id)) else {
            return out.extend_from_slice(frame);
        };
        let size = BEFORE_PROPERTIES_BYTES + properties.len();
        out.extend_from_slice(&frame[..3]);
        // Whoever puts properties here has compared them with the largest frame.
        out.extend_from_slice(&u32::try_from(size).unwrap_or(u32::MAX).to_be_bytes());
        out.extend_from_slice(&payload[..BEFORE_PROPERTIES_BYTES]);
        out.extend_from_slice(&properties);
        out.push(frame[frame.len() - 1]);
    }
}

/// The message id, where it is the only property.
fn message_id(payload: &[u8]) -> Option<&[u8]> {
    let (_, properties) = payload.split_at_checked(BEFORE_PROPERTIES_BYTES)?;
    let rest = properties.strip_prefix(&ONLY_MESSAGE_ID)?;
    let (length, id) = rest.split_first()?;
    (id.len() == usize::from(*length)).then_some(id)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frame(kind: u8, payload: &[u8]) -> Vec<u8> {
        let mut frame = vec![kind, 0, 7];
        frame.extend((payload.len() as u32).to_be_bytes());
        frame.extend(payload);
        frame.push(0xce);
        frame
    }

    fn header(properties: &[u8]) -> Vec<u8> {
        frame(HEADER, &[&[0, 60, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4], properties].concat())
    }

    fn with_id(id: &[u8]) -> Vec<u8> {
        header(&[&ONLY_MESSAGE_ID[..], &[id.len() as u8], id].concat())
    }

    proptest! {
        #[test]
        fn whatever_the_pieces(pieces in proptest::collection::vec(1_usize..40, 1..100)) {
            let outbox = Outbox::default();
            let expected = outbox.expect("copy", Bytes::from_static(b"\x20\x00whole"));
            let stream = [
                b"AMQP\0\0\x09\x01".to_vec(),
                frame(1, b"publish"),
                with_id(b"copy"),
                frame(3, b"\x02body"),
                with_id(b"other"),
                with_id(b"copy"),
                header(b"\0\0"),
                frame(8, b""),
            ]
            .concat();
            let (mut sender, mut seen) = (Sender::new(outbox), Vec::new());
            let (mut rest, mut pieces) = (&stream[..], pieces.into_iter().cycle());
            while !rest.is_empty() {
                let (piece, left) = rest.split_at(pieces.next().unwrap_or(1).min(rest.len()));
                sender.feed(piece, &mut seen);
                rest = left;
            }
            // Once: what is published again has an id of its own.
            let replaced = stream.len() - with_id(b"copy").len() + header(b"\x20\x00whole").len();
            prop_assert_eq!(seen.len(), replaced);
            let at = 8 + frame(1, b"publish").len();
            prop_assert_eq!(&seen[..at], &stream[..at]);
            prop_assert!(seen[at..].starts_with(&header(b"\x20\x00whole")));
            prop_assert!(seen.ends_with(&stream[at + with_id(b"copy").len()..]));
            drop(expected);
        }
    }

    #[test]
    fn only_what_is_expected_comes_back() {
        let outbox = Outbox::default();
        let (one, other) = (outbox.expect("a", Bytes::new()), outbox.expect("b", Bytes::new()));
        for copy in ["a", "unknown"] {
            outbox.give_back(copy);
        }
        assert!(one.came_back() && !other.came_back());
        drop((one, other));
        let inner = outbox.lock();
        assert!(inner.expected.is_empty() && inner.returned.is_empty());
        assert_eq!(inner.waiting.len(), 2, "the client may still send them");
    }
}
