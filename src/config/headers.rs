//! Headers with values from the configuration: a table of names, each with its `_file` twin.

use secrecy::{ExposeSecret, SecretString};

use super::problem::{Fault, quote};
use super::reader::Section;

const NAME_BYTES_MAX: usize = 256;
const VALUE_BYTES_MAX: usize = 8 * 1024;

/// Reads every header of a table; `allowed` refuses names that are not the operator's to set.
pub(super) fn read(
    section: &Section<'_>,
    allowed: impl Fn(&str) -> Result<(), Fault>,
) -> Vec<(String, SecretString)> {
    let mut headers: Vec<(String, SecretString)> = Vec::new();
    for name in section.secret_names() {
        if let Err(fault) = allowed(name) {
            section.unreadable(name, fault);
        }
        let value = section
            .parse_secret(name, |value| check_value(value.expose_secret()).map(|()| value.clone()));
        if let Some(value) = value {
            headers.push((name.to_owned(), value));
        }
    }
    headers
}

/// What [`is_token`] takes, for the schema.
pub(super) const TOKEN_PATTERN: &str = "^[!#$%&'*+.^_`|~0-9A-Za-z-]+$";

/// A header's name.
pub(super) fn check_name(name: &str) -> Result<(), Fault> {
    if is_token(name) && name.len() <= NAME_BYTES_MAX {
        return Ok(());
    }
    Err(Fault::new(
        format!("{} is no header's name", quote(name)),
        format!("use letters, digits and -, at most {NAME_BYTES_MAX}"),
    ))
}

/// The value may be a secret: no fault shows it.
pub(super) fn check_value(value: &str) -> Result<(), Fault> {
    let value = value.trim();
    let remedy = format!("use 1 to {VALUE_BYTES_MAX} bytes of visible ASCII and spaces");
    if value.is_empty() {
        return Err(Fault::new("the value is blank", remedy));
    }
    if value.len() > VALUE_BYTES_MAX {
        return Err(Fault::new(format!("the value has {} bytes", value.len()), remedy));
    }
    if value.bytes().any(|byte| !(byte.is_ascii_graphic() || byte == b' ' || byte == b'\t')) {
        return Err(Fault::new("the value has bytes that a header cannot carry", remedy));
    }
    Ok(())
}

/// A token of RFC 9110.
pub(super) fn is_token(text: &str) -> bool {
    !text.is_empty()
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b))
}
