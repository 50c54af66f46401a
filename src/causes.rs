//! What is behind an error, for a person.

use std::error::Error;

/// An error and what is behind it, in one line.
pub(crate) fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let cause = error.to_string();
        // Libraries often repeat their cause in their own words.
        if !text.ends_with(&cause) {
            text.push_str(": ");
            text.push_str(&cause);
        }
        source = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use inboxd_contract::{ErrorClass, StoreError};

    use super::*;

    #[test]
    fn an_error_is_told_with_its_causes() {
        let cause = std::io::Error::other("connection refused");
        let error = StoreError::new(ErrorClass::Transient, "pinging the database", cause);
        assert_eq!(chain(&error), "pinging the database: connection refused");
    }

    #[test]
    fn a_cause_that_was_told_is_not_told_again() {
        let cause = std::io::Error::other("connection refused");
        let repeated = "pinging: connection refused";
        let error = StoreError::new(ErrorClass::Transient, repeated, cause);
        assert_eq!(chain(&error), repeated);
    }
}
