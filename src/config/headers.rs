//! Headers with values from the configuration: a table of names, each with its `_file` twin.

use secrecy::{ExposeSecret, SecretString};

use super::problem::Fault;
use super::reader::Section;

const HEADERS_MAX: usize = 64;
const NAME_BYTES_MAX: usize = 256;
const VALUE_BYTES_MAX: usize = 8 * 1024;

/// Reads every header of a table; `allowed` refuses names that are not the operator's to set.
pub(super) fn read(
    section: &Section<'_>,
    allowed: impl Fn(&str) -> Result<(), Fault>,
) -> Vec<(String, SecretString)> {
    let mut headers: Vec<(String, SecretString)> = Vec::new();
    for key in section.names() {
        let name = key.strip_suffix("_file").unwrap_or(key);
        if headers.iter().any(|(known, _)| known == name) {
            continue;
        }
        let twin = headers.iter().find(|(known, _)| known.eq_ignore_ascii_case(name));
        if let Some((twin, _)) = twin {
            let what = format!("{twin} is set too, and names of headers have no case");
            section.problem(key, Fault::new(what, "set one of them"));
            continue;
        }
        if let Err(fault) = check_name(name).and_then(|()| allowed(name)) {
            section.problem(key, fault);
            continue;
        }
        let Some(value) = section.secret(name) else { continue };
        match check_value(value.expose_secret().trim()) {
            Ok(()) => headers.push((name.to_owned(), value)),
            Err(fault) => section.problem(key, fault),
        }
    }
    if headers.len() > HEADERS_MAX {
        section.problems.add(
            section.place(),
            section.path.clone(),
            Fault::new(
                format!("it has {} headers", headers.len()),
                format!("set at most {HEADERS_MAX}"),
            ),
        );
    }
    headers
}

fn check_name(name: &str) -> Result<(), Fault> {
    if is_token(name) && name.len() <= NAME_BYTES_MAX {
        return Ok(());
    }
    Err(Fault::new(
        format!("{name:?} is no header's name"),
        format!("use letters, digits and -, at most {NAME_BYTES_MAX}"),
    ))
}

/// The value may be a secret: no fault shows it.
fn check_value(value: &str) -> Result<(), Fault> {
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
