//! Values at JSON pointers (RFC 6901), taken as they were written.
//!
//! Numbers are never parsed: two long integers that one float would fold stay two ids.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde_json::value::RawValue;

/// The value at `pointer` if it is a string, number or boolean, as text: strings unescaped,
/// numbers as written. `None` for null, containers, a missing value or a body that is no JSON.
pub fn scalar_at(body: &[u8], pointer: &str) -> Option<String> {
    let text = raw_at(body, pointer)?.get().trim();
    match text.as_bytes().first()? {
        b'{' | b'[' => None,
        _ => unquote(text),
    }
}

/// As [`scalar_at`], but objects and arrays are taken too, as written.
pub fn text_at(body: &[u8], pointer: &str) -> Option<String> {
    unquote(raw_at(body, pointer)?.get().trim())
}

fn unquote(text: &str) -> Option<String> {
    match text.as_bytes().first()? {
        b'"' => serde_json::from_str(text).ok(),
        b'n' => None,
        _ => Some(text.to_owned()),
    }
}

fn raw_at<'a>(body: &'a [u8], pointer: &str) -> Option<&'a RawValue> {
    let mut value: &RawValue = serde_json::from_slice(body).ok()?;
    if pointer.is_empty() {
        return Some(value);
    }
    for token in pointer.strip_prefix('/')?.split('/') {
        let token = token.replace("~1", "/").replace("~0", "~");
        value = match value.get().trim_start().as_bytes().first()? {
            b'{' => {
                let mut object: BTreeMap<Cow<'a, str>, &RawValue> =
                    serde_json::from_str(value.get()).ok()?;
                object.remove(token.as_str())?
            }
            b'[' => {
                let array: Vec<&RawValue> = serde_json::from_str(value.get()).ok()?;
                *array.get(token.parse::<usize>().ok()?)?
            }
            _ => return None,
        };
    }
    Some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_taken_as_written() {
        let body = br#"{"a":{"b":[12345678901234567890123, 12345678901234567890124]}}"#;
        assert_eq!(scalar_at(body, "/a/b/0").unwrap(), "12345678901234567890123");
        assert_eq!(scalar_at(body, "/a/b/1").unwrap(), "12345678901234567890124");
    }

    #[test]
    fn pointers_escape_and_strings_unescape() {
        let body = br#"{"a/b":{"~":"x\u00e9"}, "n": null, "o": {}}"#;
        assert_eq!(scalar_at(body, "/a~1b/~0").unwrap(), "x\u{e9}");
        assert_eq!(scalar_at(body, "/n"), None);
        assert_eq!(scalar_at(body, "/o"), None);
        assert_eq!(text_at(body, "/o").unwrap(), "{}");
        assert_eq!(scalar_at(b"not json", "/n"), None);
    }
}
