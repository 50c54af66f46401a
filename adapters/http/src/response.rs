//! Reading a response: as little as a verdict needs, within bounds of time and bytes.

use std::time::{Duration, SystemTime};

use http::HeaderMap;
use http::header::{CONTENT_ENCODING, RETRY_AFTER};
use inboxd_contract::Verdict;
use reqwest::Response;
use tokio::time::{Instant, timeout_at};

use crate::answers::{Body, Rules};

/// How long a response that was accepted may take to end before its connection is dropped.
const DRAIN_MAX: Duration = Duration::from_secs(1);
/// The longest detail, in bytes.
const DETAIL_BYTES_MAX: usize = 1024;

/// Bounds on reading.
pub(crate) struct Bounds {
    pub(crate) bytes_max: usize,
    pub(crate) deadline: Instant,
    pub(crate) retry_after_cap: Duration,
}

/// The verdict. Where the status alone decides, a 2xx was said with its head: its body is read only
/// so that the connection can be used again.
pub(crate) async fn judge(
    response: Response,
    rules: &Rules,
    bounds: &Bounds,
    now: SystemTime,
) -> Verdict {
    let status = response.status().as_u16();
    let after = retry_after(response.headers(), now).map(|wait| wait.min(bounds.retry_after_cap));
    let needs_body = rules.needs_body(status);
    let deadline = match rules.is_decided(status) {
        true => bounds.deadline.min(Instant::now() + DRAIN_MAX),
        false => bounds.deadline,
    };
    let is_encoded = response
        .headers()
        .get(CONTENT_ENCODING)
        .is_some_and(|encoding| !encoding.as_bytes().eq_ignore_ascii_case(b"identity"));
    let kept_max = if needs_body { bounds.bytes_max } else { DETAIL_BYTES_MAX };
    let (bytes, is_whole) = read_some(response, kept_max, bounds.bytes_max, deadline).await;
    let body = Body { bytes: &bytes, is_whole, is_encoded };
    rules.judge(status, after, &body, printable(&bytes))
}

/// The body's beginning: at most the first `kept_max` bytes are kept of at most `bytes_max` that
/// are read; and whether that is all of it. Ends early at the deadline or when the connection breaks.
pub(crate) async fn read_some(
    mut response: Response,
    kept_max: usize,
    bytes_max: usize,
    deadline: Instant,
) -> (Vec<u8>, bool) {
    let mut kept = Vec::new();
    let mut read = 0;
    while read < bytes_max {
        let chunk = match timeout_at(deadline, response.chunk()).await {
            Ok(Ok(Some(chunk))) => chunk,
            Ok(Ok(None)) => return (kept, true),
            Ok(Err(_)) | Err(_) => return (kept, false),
        };
        read += chunk.len();
        let room = kept_max - kept.len();
        kept.extend_from_slice(&chunk[..chunk.len().min(room)]);
    }
    (kept, false)
}

/// `Retry-After` as seconds or as a date; none where it is neither.
pub(crate) fn retry_after(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        // So many digits that they are no number mean: very long. The cap is the caller's.
        return Some(Duration::from_secs(text.parse().unwrap_or(u64::MAX)));
    }
    let date = httpdate::parse_http_date(text).ok()?;
    Some(date.duration_since(now).unwrap_or(Duration::ZERO))
}

/// Text for a log or a database: no control characters, no broken UTF-8, bounded.
pub(crate) fn printable(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let clean = |character: char| if character.is_control() { ' ' } else { character };
    let mut printable = String::new();
    for character in text.trim().chars().map(clean) {
        if printable.len() + character.len_utf8() > DETAIL_BYTES_MAX {
            break;
        }
        printable.push(character);
    }
    printable
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Option<Duration> {
        let mut headers = HeaderMap::new();
        headers.insert(RETRY_AFTER, text.parse().unwrap());
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(784_111_777);
        retry_after(&headers, now)
    }

    #[test]
    fn retry_after_is_seconds_or_a_date_and_garbage_is_nothing() {
        assert_eq!(parsed("7"), Some(Duration::from_secs(7)));
        assert_eq!(parsed("0"), Some(Duration::ZERO));
        assert_eq!(parsed("Sun, 06 Nov 1994 08:49:57 GMT"), Some(Duration::from_secs(20)));
        assert_eq!(parsed("Sun, 06 Nov 1994 08:49:07 GMT"), Some(Duration::ZERO));
        assert_eq!(parsed(&"9".repeat(40)), Some(Duration::from_secs(u64::MAX)));
        for garbage in ["", "-1", "1.5", "soon", "1s", " "] {
            assert_eq!(parsed(garbage), None, "{garbage}");
        }
    }

    #[test]
    fn details_are_bounded_and_have_no_control_characters() {
        assert_eq!(printable(b" bad\r\nX: y\0\xff "), "bad  X: y \u{fffd}");
        assert!(printable("\u{e9}".repeat(5_000).as_bytes()).len() <= DETAIL_BYTES_MAX);
    }
}
