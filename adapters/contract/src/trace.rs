//! Which trace contexts count: those that W3C Trace Context calls valid.

const TRACE_PARENT_LEN: usize = 55;
/// A later version may add fields; nobody needs this many bytes of them.
const TRACE_PARENT_LEN_MAX: usize = 256;
const TRACE_STATE_LEN_MAX: usize = 1_024;
const TRACE_STATE_MEMBERS_MAX: usize = 32;

/// A `traceparent` that may be passed on as it is. A version above 00 is valid where its first
/// four fields are, and may have more of them.
pub fn is_valid_traceparent(value: &[u8]) -> bool {
    if value.len() < TRACE_PARENT_LEN || value.len() > TRACE_PARENT_LEN_MAX {
        return false;
    }
    let (known, more) = value.split_at(TRACE_PARENT_LEN);
    let version = &known[0..2];
    let fields = known[2] == b'-' && known[35] == b'-' && known[52] == b'-';
    let hex = is_hex(version)
        && is_hex(&known[3..35])
        && is_hex(&known[36..52])
        && is_hex(&known[53..55]);
    let not_zero = !is_zero(&known[3..35]) && !is_zero(&known[36..52]);
    let rest = match version {
        b"ff" => false,
        b"00" => more.is_empty(),
        _ => more.is_empty() || (more[0] == b'-' && more.iter().all(u8::is_ascii_graphic)),
    };
    fields && hex && not_zero && rest
}

/// A `tracestate` that may be passed on as it is.
pub fn is_valid_tracestate(value: &[u8]) -> bool {
    if value.len() > TRACE_STATE_LEN_MAX {
        return false;
    }
    let mut keys: Vec<&[u8]> = Vec::new();
    for member in value.split(|byte| *byte == b',') {
        let member = member.trim_ascii();
        if member.is_empty() {
            continue;
        }
        let Some(equals) = member.iter().position(|byte| *byte == b'=') else { return false };
        let (key, value) = (&member[..equals], &member[equals + 1..]);
        if !is_state_key(key) || !is_state_value(value) || keys.contains(&key) {
            return false;
        }
        keys.push(key);
    }
    // White space inside is spaces and tabs alone: line breaks would have been trimmed above.
    let no_breaks = value.iter().all(|byte| *byte == b'\t' || (0x20..0x7f).contains(byte));
    no_breaks && !keys.is_empty() && keys.len() <= TRACE_STATE_MEMBERS_MAX
}

fn is_state_key(key: &[u8]) -> bool {
    let first = key.first().is_some_and(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
    let all = key
        .iter()
        .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"_-*/@".contains(byte));
    first && all && key.len() <= 256 && key.iter().filter(|byte| **byte == b'@').count() <= 1
}

fn is_state_value(value: &[u8]) -> bool {
    let all = value.iter().all(|byte| (0x20..0x7f).contains(byte) && *byte != b'=');
    all && !value.is_empty() && value.len() <= 256
}

fn is_hex(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(byte))
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == b'0')
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn valid_parents_pass() {
        for valid in [
            GOOD,
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00",
            "01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more.fields-7",
            "cc-12345678901234567890123456789012-1234567890123456-01",
        ] {
            assert!(is_valid_traceparent(valid.as_bytes()), "{valid}");
        }
    }

    #[test]
    fn malformed_parents_do_not() {
        let long = format!("{GOOD}{}", "0".repeat(10_000));
        let long_fields = format!("01{}-{}", &GOOD[2..], "x".repeat(10_000));
        for invalid in [
            "",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00F067AA0BA902B7-01",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e473-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-0",
            "01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01.x",
            "01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-a\r\nb",
            "00_4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            " 0-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "12345678901234567890123456789012",
            "1234567890123456789012345678901234567890123456789012345",
            &long,
            &long_fields,
        ] {
            assert!(!is_valid_traceparent(invalid.as_bytes()), "{invalid}");
        }
    }

    #[test]
    fn states_are_lists_of_distinct_members() {
        for valid in ["a=1", "congo=t61rcWkgMzE,rojo=00f067aa0ba902b7", "a@b=1 2 , c=d", "a=1,,b=2"]
        {
            assert!(is_valid_tracestate(valid.as_bytes()), "{valid}");
        }
        let many: Vec<_> = (0..33).map(|index| format!("k{index}=1")).collect();
        let long = format!("a={}", "x".repeat(300));
        for invalid in [
            "",
            "a",
            "a=1,a=2",
            "A=1",
            "a=1\r\nb: c",
            "a=b=c",
            "a=",
            "a=\u{e9}",
            &many.join(","),
            &long,
        ] {
            assert!(!is_valid_tracestate(invalid.as_bytes()), "{invalid}");
        }
    }
}
