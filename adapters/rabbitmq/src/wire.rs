//! What the broker sends, on its way to the client.
//!
//! The client decodes properties strictly and by recursion: a short string that is not UTF-8 ends
//! its connection, again on every redelivery, and a table nested a few thousand deep overflows
//! its thread's stack, which ends the process. A publisher can send both, and the broker lets them
//! pass. So the client is not shown what publishers write: here, each delivery's properties are
//! set aside as bytes, under its channel and tag, and the client sees a delivery without any;
//! likewise a routing key that is not UTF-8. A message that was published here and comes back as not
//! routed is not shown at all; it is noted by its copy's id ([`crate::outgoing`]).
//!
//! Invariants: frames stay frames, in order; bodies pass untouched; what is not understood passes
//! untouched. What is set aside is bounded by the prefetch. Pure: no I/O.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use bytes::Bytes;

use crate::outgoing::{COPY_ID, Outbox};
use crate::properties::{Properties, Reader, Value};

const HEAD_BYTES: usize = 7;
const END: u8 = 0xce;
const METHOD: u8 = 1;
const HEADER: u8 = 2;
const BODY: u8 = 3;
const HEARTBEAT: u8 = 8;
/// Class, weight and body size: what comes before the properties.
const BEFORE_PROPERTIES_BYTES: usize = 12;
/// No method or header frame is larger: servers negotiate 128 KiB.
const WHOLE_FRAME_BYTES_MAX: usize = 64 << 20;

const CONNECTION_START: (u16, u16) = (10, 10);
const BASIC_DELIVER: (u16, u16) = (60, 60);
const CHANNEL_CLOSE: (u16, u16) = (20, 40);
const CONNECTION_CLOSE: (u16, u16) = (10, 50);
const CONNECTION_BLOCKED: (u16, u16) = (10, 60);
const CONNECTION_UNBLOCKED: (u16, u16) = (10, 61);
const BASIC_RETURN: (u16, u16) = (60, 50);

/// What a publisher wrote around a body.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Raw {
    /// The exchange's name.
    pub(crate) exchange: Bytes,
    /// The routing key.
    pub(crate) routing_key: Bytes,
    /// Property flags and properties, as on the wire.
    pub(crate) properties: Bytes,
}

/// What was set aside on one connection, and what the server said of itself.
#[derive(Debug, Clone, Default)]
pub(crate) struct Aside {
    deliveries: Arc<Mutex<HashMap<(u16, u64), Raw>>>,
    server: Arc<OnceLock<Server>>,
    /// What is being published on this connection.
    pub(crate) outbox: Outbox,
}

/// What the server says of itself, as text; empty where it says nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Server {
    pub(crate) product: String,
    pub(crate) version: String,
}

impl Aside {
    /// What belongs to a delivery; once.
    pub(crate) fn take(&self, channel: u16, tag: u64) -> Option<Raw> {
        self.lock().remove(&(channel, tag))
    }

    /// A channel is gone, and its number may be used again.
    pub(crate) fn forget(&self, channel: u16) {
        self.lock().retain(|(of, _), _| *of != channel);
    }

    /// What the server says it is, once it has.
    pub(crate) fn server(&self) -> Option<Server> {
        self.server.get().cloned()
    }

    fn put(&self, channel: u16, tag: u64, raw: Raw) {
        self.lock().insert((channel, tag), raw);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<(u16, u64), Raw>> {
        self.deliveries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Takes the bytes of one connection, in pieces of any size, and gives those for the client.
#[derive(Debug)]
pub(crate) struct Rewriter {
    aside: Aside,
    /// The beginning of a frame that has not come whole.
    partial: Vec<u8>,
    /// So many bytes more pass as they are: a body and its end.
    passing: usize,
    /// So many bytes more are not shown: a body that came back, and its end.
    skipping: usize,
    /// This is no AMQP: everything passes.
    transparent: bool,
    /// Messages that come back, by channel: the bytes of their bodies that are still to come;
    /// `None` before their header.
    returning: HashMap<u16, Option<u64>>,
    /// Deliveries whose properties come next, by channel.
    awaited: HashMap<u16, (u64, Raw)>,
}

impl Rewriter {
    /// For a new connection.
    pub(crate) fn new(aside: Aside) -> Self {
        Self {
            aside,
            partial: Vec::new(),
            passing: 0,
            skipping: 0,
            transparent: false,
            returning: HashMap::new(),
            awaited: HashMap::new(),
        }
    }

    /// So many of the next bytes may go to the client as they come.
    pub(crate) fn passing(&self) -> usize {
        if self.transparent { usize::MAX } else { self.passing }
    }

    /// Bytes have gone to the client as they came.
    pub(crate) fn passed(&mut self, bytes: usize) {
        if !self.transparent {
            self.passing -= bytes;
        }
    }

    /// Takes bytes of the broker and appends what the client is to see.
    pub(crate) fn feed(&mut self, mut input: &[u8], out: &mut Vec<u8>) {
        while !input.is_empty() {
            if self.skipping > 0 {
                let skipped = self.skipping.min(input.len());
                self.skipping -= skipped;
                input = &input[skipped..];
                continue;
            }
            if self.passing() > 0 {
                let (pass, rest) = input.split_at(self.passing().min(input.len()));
                out.extend_from_slice(pass);
                self.passed(pass.len());
                input = rest;
                continue;
            }
            if !self.gather(HEAD_BYTES, &mut input) {
                return;
            }
            let size = self.partial[3..HEAD_BYTES].iter();
            let size = size.fold(0, |size, byte| size << 8 | usize::from(*byte));
            let kind = self.partial[0];
            match kind {
                METHOD | HEADER if size <= WHOLE_FRAME_BYTES_MAX => {
                    if !self.gather(HEAD_BYTES + size + 1, &mut input) {
                        return;
                    }
                    let frame = Bytes::from(std::mem::take(&mut self.partial));
                    self.frame(&frame, out);
                }
                BODY if self.comes_back(size) => {
                    self.partial.clear();
                    self.skipping = size + 1;
                }
                BODY | HEARTBEAT => {
                    out.append(&mut self.partial);
                    self.passing = size + 1;
                }
                _ => {
                    out.append(&mut self.partial);
                    self.transparent = true;
                }
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

    /// A whole method or header frame.
    fn frame(&mut self, frame: &Bytes, out: &mut Vec<u8>) {
        let channel = u16::from_be_bytes([frame[1], frame[2]]);
        let payload = frame.slice(HEAD_BYTES..frame.len() - 1);
        if frame[frame.len() - 1] == END && self.is_return(frame[0], channel, &payload) {
            return;
        }
        let rewritten = match frame[0] {
            _ if frame[frame.len() - 1] != END => None,
            METHOD => self.method(channel, &payload),
            _ => self.header(channel, &payload),
        };
        match rewritten {
            None => out.extend_from_slice(frame),
            Some(payload) => {
                out.extend_from_slice(&frame[..3]);
                // It is at most as long as what came.
                out.extend_from_slice(&(payload.len() as u32).to_be_bytes());
                out.extend_from_slice(&payload);
                out.push(END);
            }
        }
    }

    /// Takes in the beginning of a message that comes back, which the client is not shown: it would
    /// decode it like a delivery, and hand it to the next confirm, whosever that is.
    fn is_return(&mut self, kind: u8, channel: u16, payload: &Bytes) -> bool {
        let mut reader = Reader::new(payload.clone());
        if kind == METHOD {
            let is_return =
                matches!((reader.u16(), reader.u16()), (Ok(a), Ok(b)) if (a, b) == BASIC_RETURN);
            if is_return {
                self.returning.insert(channel, None);
            }
            return is_return;
        }
        let Some(waiting) = self.returning.get_mut(&channel).filter(|left| left.is_none()) else {
            return false;
        };
        // Class and weight come before the size.
        let size = reader.u16().and_then(|_| reader.u16()).and_then(|_| reader.u64());
        *waiting = Some(size.unwrap_or(0));
        if size.unwrap_or(0) == 0 {
            self.returning.remove(&channel);
        }
        let (properties, _) = Properties::read(reader.rest());
        let mut headers = properties.headers.into_iter();
        // The last is inboxd's.
        if let Some((_, Value::Bytes(copy_id))) =
            headers.rfind(|(name, _)| name.as_ref() == COPY_ID.as_bytes())
        {
            self.aside.outbox.give_back(&String::from_utf8_lossy(&copy_id));
        }
        true
    }

    /// The frame that begins in `partial` is of a body that comes back.
    fn comes_back(&mut self, size: usize) -> bool {
        let channel = u16::from_be_bytes([self.partial[1], self.partial[2]]);
        let Some(Some(left)) = self.returning.get_mut(&channel) else { return false };
        *left = left.saturating_sub(u64::try_from(size).unwrap_or(u64::MAX));
        if *left == 0 {
            self.returning.remove(&channel);
        }
        true
    }

    fn method(&mut self, channel: u16, payload: &Bytes) -> Option<Vec<u8>> {
        let mut reader = Reader::new(payload.clone());
        match (reader.u16().ok()?, reader.u16().ok()?) {
            BASIC_DELIVER => {
                let consumer_tag = reader.short().ok()?;
                let (tag, redelivered) = (reader.u64().ok()?, reader.u8().ok()?);
                let (exchange, routing_key) = (reader.short().ok()?, reader.short().ok()?);
                let text = [&exchange, &routing_key].into_iter().all(is_text);
                let raw = Raw { exchange, routing_key, properties: Bytes::new() };
                self.awaited.insert(channel, (tag, raw));
                if text {
                    return None;
                }
                let mut shown = payload[..4].to_vec();
                shown.push(consumer_tag.len() as u8);
                shown.extend_from_slice(&consumer_tag);
                shown.extend_from_slice(&tag.to_be_bytes());
                // Redelivered, and two short strings of no length.
                shown.extend_from_slice(&[redelivered, 0, 0]);
                Some(shown)
            }
            CONNECTION_START => {
                // Major and minor version.
                reader.u16().ok()?;
                let mut table = Vec::new();
                reader.table(&mut table).ok()?;
                let text = |name: &[u8]| {
                    table.iter().find_map(|(key, value)| match value {
                        Value::Bytes(bytes) if key.as_ref() == name => {
                            Some(String::from_utf8_lossy(bytes).into_owned())
                        }
                        _ => None,
                    })
                };
                let product = text(b"product").unwrap_or_default();
                let version = text(b"version").unwrap_or_default();
                // Said once in a connection's life.
                let _ = self.aside.server.set(Server { product, version });
                None
            }
            CONNECTION_BLOCKED => {
                let reason = String::from_utf8_lossy(&reader.short().ok()?).into_owned();
                self.aside.outbox.set_blocked(Some(reason));
                None
            }
            CONNECTION_UNBLOCKED => {
                self.aside.outbox.set_blocked(None);
                None
            }
            // A reply text is cut at 255 bytes, within a character if that is where they end.
            CHANNEL_CLOSE | CONNECTION_CLOSE => {
                let code = reader.u16().ok()?;
                let text = reader.short().ok()?;
                let valid = std::str::from_utf8(&text).err()?.valid_up_to();
                let mut shown = payload[..4].to_vec();
                shown.extend_from_slice(&code.to_be_bytes());
                shown.push(valid as u8);
                shown.extend_from_slice(&text[..valid]);
                shown.extend_from_slice(&reader.rest());
                Some(shown)
            }
            _ => None,
        }
    }

    fn header(&mut self, channel: u16, payload: &Bytes) -> Option<Vec<u8>> {
        let (tag, mut raw) = self.awaited.remove(&channel)?;
        if payload.len() < BEFORE_PROPERTIES_BYTES {
            return None;
        }
        raw.properties = payload.slice(BEFORE_PROPERTIES_BYTES..);
        self.aside.put(channel, tag, raw);
        let mut shown = payload[..BEFORE_PROPERTIES_BYTES].to_vec();
        // No property follows.
        shown.extend_from_slice(&[0, 0]);
        Some(shown)
    }
}

fn is_text(bytes: &Bytes) -> bool {
    std::str::from_utf8(bytes).is_ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frame(kind: u8, channel: u16, payload: &[u8]) -> Vec<u8> {
        let mut frame = vec![kind];
        frame.extend(channel.to_be_bytes());
        frame.extend((payload.len() as u32).to_be_bytes());
        frame.extend(payload);
        frame.push(END);
        frame
    }

    fn deliver(tag: u64, exchange: &[u8], routing_key: &[u8]) -> Vec<u8> {
        let mut payload = vec![0, 60, 0, 60, 3];
        payload.extend(b"tag");
        payload.extend(tag.to_be_bytes());
        payload.push(1);
        for text in [exchange, routing_key] {
            payload.push(text.len() as u8);
            payload.extend(text);
        }
        frame(METHOD, 7, &payload)
    }

    fn header(properties: &[u8]) -> Vec<u8> {
        let mut payload = vec![0, 60, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4];
        payload.extend(properties);
        frame(HEADER, 7, &payload)
    }

    fn close(text: &[u8]) -> Vec<u8> {
        let mut payload = vec![0, 20, 0, 40, 1, 150, text.len() as u8];
        payload.extend(text);
        payload.extend([0, 1, 0, 2]);
        frame(METHOD, 7, &payload)
    }

    /// What the client sees of `stream`, fed in pieces of these sizes.
    fn rewritten(stream: &[u8], mut pieces: impl Iterator<Item = usize>) -> (Vec<u8>, Aside) {
        let aside = Aside::default();
        let (mut rewriter, mut out) = (Rewriter::new(aside.clone()), Vec::new());
        let mut rest = stream;
        while !rest.is_empty() {
            let (piece, behind) = rest.split_at(pieces.next().unwrap_or(1).clamp(1, rest.len()));
            rewriter.feed(piece, &mut out);
            rest = behind;
        }
        (out, aside)
    }

    proptest! {
        #[test]
        fn the_pieces_do_not_matter(pieces in proptest::collection::vec(1_usize..40, 1..100)) {
            let odd = [&[0x20, 0x00][..], &[0, 0, 0, 7, 2, 0xff, 0xfe], b"A\0\0\0\0"].concat();
            let stream = [
                deliver(1, b"ex", b"key"),
                header(&odd),
                frame(BODY, 7, b"body"),
                frame(HEARTBEAT, 0, b""),
                deliver(2, b"", &[0xff, b'k']),
                header(&[0, 0]),
                frame(BODY, 7, b"\xce\x01\x02\xce"),
                close(b"fine"),
                close(&[b'o', b'k', 0xc3]),
            ]
            .concat();
            let (seen, aside) = rewritten(&stream, pieces.into_iter().cycle());
            let expected = [
                deliver(1, b"ex", b"key"),
                header(&[0, 0]),
                frame(BODY, 7, b"body"),
                frame(HEARTBEAT, 0, b""),
                deliver(2, b"", b""),
                header(&[0, 0]),
                frame(BODY, 7, b"\xce\x01\x02\xce"),
                close(b"fine"),
                close(b"ok"),
            ]
            .concat();
            prop_assert_eq!(seen, expected);
            let first = aside.take(7, 1).expect("set aside");
            prop_assert_eq!(first.properties.as_ref(), odd.as_slice());
            prop_assert_eq!(first.exchange.as_ref(), b"ex");
            let second = aside.take(7, 2).expect("set aside");
            prop_assert_eq!(second.routing_key.as_ref(), &[0xff, b'k']);
            prop_assert_eq!(aside.take(7, 1), None);
        }

        #[test]
        fn nothing_panics(stream in proptest::collection::vec(any::<u8>(), 0..300)) {
            rewritten(&stream, std::iter::repeat(13));
            let framed = frame(stream.first().map_or(1, |byte| 1 + byte % 3), 7, &stream);
            rewritten(&framed, std::iter::repeat(13));
        }
    }

    #[test]
    fn what_is_no_amqp_passes() {
        let stream = b"AMQP\0\0\x09\x01 and more";
        assert_eq!(rewritten(stream, std::iter::repeat(3)).0, stream);
    }
}
