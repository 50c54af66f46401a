//! The bound on what a message decides about a request's headers.

use std::collections::HashSet;

use http::{HeaderMap, HeaderName, HeaderValue};
use inboxd_contract::encode_percent;

/// What headers that come from the message take at most, in bytes: names, values and four per
/// line. Content type and encoding, trace context and identity are beside it.
pub const HEADERS_BYTES_MAX: usize = 8 * 1024;
/// How many lines they are at most, since common servers take 100 in all.
pub const HEADER_LINES_MAX: usize = 64;
/// The longest `Inbox-Headers-Omitted`, in bytes.
pub const OMITTED_BYTES_MAX: usize = 1024;

/// `: ` and the end of the line.
const LINE_OVERHEAD: usize = 4;
/// `, ...+` and a number.
const REST_RESERVE: usize = 32;

/// Gives headers out until the bounds are met, and remembers what was left out.
pub(super) struct Budget {
    bytes_left: usize,
    lines_left: usize,
    // Names as the message has them, in its order. Bounded by the message.
    omitted: Vec<Vec<u8>>,
    // The same in lower case: a message may have thousands of names.
    omitted_folded: HashSet<Vec<u8>>,
}

impl Budget {
    pub(super) fn new() -> Self {
        Self {
            bytes_left: HEADERS_BYTES_MAX,
            lines_left: HEADER_LINES_MAX,
            omitted: Vec::new(),
            omitted_folded: HashSet::new(),
        }
    }

    /// Appends a header if there is room, else remembers `shown` as left out. After one value of
    /// a name was left out, later ones of it are too: what is there is the beginning.
    pub(super) fn put(
        &mut self,
        headers: &mut HeaderMap,
        name: HeaderName,
        value: &str,
        shown: &[u8],
    ) {
        let cost = name.as_str().len() + value.len() + LINE_OVERHEAD;
        let fits = !self.is_spent() && cost <= self.bytes_left;
        if !fits || self.is_omitted(shown) {
            return self.omit(shown);
        }
        match HeaderValue::from_str(value).map(|value| headers.try_append(name, value)) {
            Ok(Ok(_)) => {
                self.bytes_left -= cost;
                self.lines_left -= 1;
            }
            _ => self.omit(shown),
        }
    }

    /// No further line fits.
    pub(super) fn is_spent(&self) -> bool {
        self.lines_left == 0 || self.bytes_left <= LINE_OVERHEAD
    }

    /// Remembers a name as left out.
    pub(super) fn omit(&mut self, shown: &[u8]) {
        if self.omitted_folded.insert(shown.to_ascii_lowercase()) {
            self.omitted.push(shown.to_vec());
        }
    }

    /// The value of `Inbox-Headers-Omitted`: names, percent-encoded, in the message's order;
    /// where they are too many for it, `...+<number>` stands for the rest.
    pub(super) fn omitted(&self) -> Option<String> {
        if self.omitted.is_empty() {
            return None;
        }
        let mut text = String::new();
        for (index, name) in self.omitted.iter().enumerate() {
            let separator = if text.is_empty() { "" } else { ", " };
            // A name alone may be too long; encoding makes nothing shorter.
            let encoded = (name.len() < OMITTED_BYTES_MAX).then(|| encode_percent(name));
            let room = OMITTED_BYTES_MAX - REST_RESERVE - text.len();
            match encoded.filter(|encoded| separator.len() + encoded.len() <= room) {
                Some(encoded) => {
                    text.push_str(separator);
                    text.push_str(&encoded);
                }
                None => {
                    let rest = self.omitted.len() - index;
                    text.push_str(&format!("{separator}...+{rest}"));
                    break;
                }
            }
        }
        Some(text)
    }

    fn is_omitted(&self, shown: &[u8]) -> bool {
        !self.omitted.is_empty() && self.omitted_folded.contains(&shown.to_ascii_lowercase())
    }
}
