//! Percent-encoding as the HTTP contract defines it: every byte but RFC 3986's
//! unreserved characters, `%` included, so that one decoding gives the bytes back.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, percent_encode};

const ALL_BUT_UNRESERVED: &AsciiSet =
    &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// Encodes every byte that is not unreserved (RFC 3986, section 2.3).
pub fn encode_percent(bytes: &[u8]) -> String {
    percent_encode(bytes, ALL_BUT_UNRESERVED).to_string()
}

/// The inverse of [`encode_percent`].
pub fn decode_percent(text: &str) -> Vec<u8> {
    percent_decode_str(text).collect()
}
