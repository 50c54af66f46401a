//! What an answer means: the response table, what the configuration puts over it, and Dapr's way
//! of saying it in the body.

use std::borrow::Cow;
use std::fmt;
use std::ops::RangeInclusive;
use std::time::Duration;

use inboxd_contract::{RetryReason, Verdict};
use serde::de::{self, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// How the application answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Dialect {
    /// By the status alone.
    #[default]
    Plain,
    /// As an application behind Dapr does: the `status` in the JSON body of a 2xx decides.
    Dapr,
}

/// What a status is made to mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meaning {
    /// Processed.
    Accepted,
    /// Never to be accepted.
    Refused,
    /// To be tried again.
    Retry,
    /// Recorded as processed, though the application did not want it.
    Drop,
}

/// How answers are read.
#[derive(Debug, Clone, Default)]
pub(crate) struct Rules {
    pub(crate) dialect: Dialect,
    /// The first that has the status decides, whatever else would.
    pub(crate) map: Vec<(RangeInclusive<u16>, Meaning)>,
}

/// What was read of a body.
pub(crate) struct Body<'a> {
    pub(crate) bytes: &'a [u8],
    /// It was read to its end.
    pub(crate) is_whole: bool,
    /// It came with a `Content-Encoding`, which is not undone here.
    pub(crate) is_encoded: bool,
}

impl Rules {
    fn meaning(&self, status: u16) -> Option<Meaning> {
        self.map.iter().find(|(range, _)| range.contains(&status)).map(|(_, meaning)| *meaning)
    }

    /// The body decides: all of it has to be read.
    pub(crate) fn needs_body(&self, status: u16) -> bool {
        self.dialect == Dialect::Dapr
            && (200..=299).contains(&status)
            && self.meaning(status).is_none()
    }

    /// The status alone says that the message is done with: nothing that follows it may change
    /// that, or make it wait.
    pub(crate) fn is_decided(&self, status: u16) -> bool {
        match self.meaning(status) {
            Some(meaning) => matches!(meaning, Meaning::Accepted | Meaning::Drop),
            None => (200..=299).contains(&status) && !self.needs_body(status),
        }
    }

    /// The verdict. `detail` is the body's printable beginning.
    pub(crate) fn judge(
        &self,
        status: u16,
        after: Option<Duration>,
        body: &Body<'_>,
        detail: String,
    ) -> Verdict {
        if self.needs_body(status) {
            return dapr(status, after, body);
        }
        match self.meaning(status) {
            None => Verdict::of_status(status, after, detail),
            Some(Meaning::Accepted) => Verdict::Accepted { status },
            Some(Meaning::Refused) => Verdict::Refused { status, detail },
            Some(Meaning::Drop) => Verdict::Drop { status },
            Some(Meaning::Retry) => {
                match Verdict::of_status(status, after, detail.clone()) {
                    // Its own reason, where it has one.
                    retry @ Verdict::Retry { .. } => retry,
                    _ => Verdict::Retry {
                        reason: RetryReason::ServerError,
                        status: Some(status),
                        after,
                        detail,
                    },
                }
            }
        }
    }
}

/// The one field of an answer that counts. Its name is compared without regard to case: Dapr is
/// written in Go, whose JSON decoder takes `Status` for `status`, and applications rely on it.
struct Answer {
    status: Option<String>,
}

impl<'de> Deserialize<'de> for Answer {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields;

        impl<'de> Visitor<'de> for Fields {
            type Value = Answer;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Answer, A::Error> {
                let mut status = None;
                while let Some(name) = map.next_key::<Cow<'de, str>>()? {
                    if !name.eq_ignore_ascii_case("status") {
                        map.next_value::<IgnoredAny>()?;
                    } else if status.is_none() {
                        status = Some(map.next_value::<Option<String>>()?);
                    } else {
                        return Err(de::Error::duplicate_field("status"));
                    }
                }
                Ok(Answer { status: status.flatten() })
            }
        }

        deserializer.deserialize_map(Fields)
    }
}

/// Dapr's subscriber contract: `{"status": "SUCCESS" | "RETRY" | "DROP"}`, and `PARK` beside it.
/// No body, no JSON object, and an object without a status (or with an empty one) are successes
/// there and here. What looks like an answer and cannot be read is none: it is tried again, since a
/// wish to retry must not be taken for success.
fn dapr(status: u16, after: Option<Duration>, body: &Body<'_>) -> Verdict {
    let again =
        |reason, detail: String| Verdict::Retry { reason, status: Some(status), after, detail };
    let text = body.bytes.trim_ascii();
    if body.is_encoded && !text.is_empty() {
        let detail = "the answer has a Content-Encoding, so its status cannot be read";
        return again(RetryReason::ServerError, detail.to_owned());
    }
    if !body.is_whole {
        let detail = "the answer did not end within its bounds, so its status is unknown";
        return again(RetryReason::Disconnected, detail.to_owned());
    }
    if !text.starts_with(b"{") {
        return Verdict::Accepted { status };
    }
    let answer = match serde_json::from_slice::<Answer>(text) {
        Ok(answer) => answer.status.unwrap_or_default(),
        Err(error) => {
            let detail = format!("the answer is no JSON with a status: {error}");
            return again(RetryReason::ServerError, detail);
        }
    };
    match answer.to_ascii_uppercase().as_str() {
        "" | "SUCCESS" => Verdict::Accepted { status },
        "DROP" => Verdict::Drop { status },
        "PARK" => Verdict::Park { status },
        "RETRY" => again(RetryReason::Busy, "the application asked for it again".to_owned()),
        _ => {
            let known = "SUCCESS, RETRY, DROP or PARK";
            let answer: String = answer.chars().take(64).collect();
            again(RetryReason::ServerError, format!("the status {answer:?} is not {known}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(dialect: Dialect, map: &[(RangeInclusive<u16>, Meaning)]) -> Rules {
        Rules { dialect, map: map.to_vec() }
    }

    fn judge(rules: &Rules, status: u16, body: &[u8]) -> Verdict {
        let body = Body { bytes: body, is_whole: true, is_encoded: false };
        rules.judge(status, Some(Duration::from_secs(7)), &body, "detail".into())
    }

    fn is_retry(verdict: &Verdict) -> bool {
        matches!(verdict, Verdict::Retry { after: Some(_), .. })
    }

    #[test]
    fn the_map_is_over_the_table_and_the_first_entry_wins() {
        let rules = rules(
            Dialect::Plain,
            &[
                (404..=404, Meaning::Drop),
                (503..=503, Meaning::Refused),
                (400..=499, Meaning::Retry),
                (200..=299, Meaning::Retry),
            ],
        );
        assert_eq!(judge(&rules, 404, b""), Verdict::Drop { status: 404 });
        let refused = Verdict::Refused { status: 503, detail: "detail".into() };
        assert_eq!(judge(&rules, 503, b""), refused);
        for (status, reason) in [
            (422, RetryReason::ServerError),
            (204, RetryReason::ServerError),
            (429, RetryReason::Overloaded),
            (410, RetryReason::Gone),
        ] {
            let verdict = judge(&rules, status, b"");
            assert!(is_retry(&verdict));
            assert!(matches!(verdict, Verdict::Retry { reason: found, .. } if found == reason));
        }
        // What the map does not have is the table's.
        assert!(is_retry(&judge(&rules, 500, b"")));
    }

    #[test]
    fn accepted_can_be_any_status() {
        let rules = rules(Dialect::Plain, &[(409..=409, Meaning::Accepted)]);
        assert_eq!(judge(&rules, 409, b""), Verdict::Accepted { status: 409 });
    }

    #[test]
    fn dapr_s_status_decides_in_any_case() {
        let rules = rules(Dialect::Dapr, &[]);
        for success in [
            &b""[..],
            b" \r\n",
            b"OK",
            b"true",
            b"\"RETRY\"",
            b"{}",
            br#"{"status":""}"#,
            br#"{"status":null}"#,
            br#" {"status":"SUCCESS","more":[1]} "#,
            br#"{"status":"success"}"#,
        ] {
            assert_eq!(
                judge(&rules, 200, success),
                Verdict::Accepted { status: 200 },
                "{}",
                String::from_utf8_lossy(success)
            );
        }
        assert_eq!(judge(&rules, 202, br#"{"status":"DROP"}"#), Verdict::Drop { status: 202 });
        assert_eq!(judge(&rules, 200, br#"{"status":"park"}"#), Verdict::Park { status: 200 });
        for again in [
            &br#"{"status":"RETRY"}"#[..],
            br#"{"status":"Whatever"}"#,
            br#"{"status":5}"#,
            br#"{"status":"RETRY""#,
            br#"{"status":"SUCCESS","status":"RETRY"}"#,
            br#"{"more":{"status":"SUCCESS"},"Status":"RETRY"}"#,
            br#"{"\u0073tatus":"RETRY"}"#,
            br#"{"Status":"SUCCESS","status":"RETRY"}"#,
            b"{\"status\":\"\xff\"}",
        ] {
            let verdict = judge(&rules, 200, again);
            assert!(is_retry(&verdict), "{} {verdict:?}", String::from_utf8_lossy(again));
        }
        // A depth that would overflow a stack is an answer that cannot be read.
        let deep = format!("{{\"a\":{}", "[".repeat(60_000));
        assert!(is_retry(&judge(&rules, 200, deep.as_bytes())));
        // Other statuses are the table's.
        let refused = judge(&rules, 422, br#"{"status":"SUCCESS"}"#);
        assert!(matches!(refused, Verdict::Refused { .. }));
    }

    #[test]
    fn an_answer_that_cannot_be_read_to_its_end_is_no_success() {
        let rules = rules(Dialect::Dapr, &[]);
        for (bytes, is_whole, is_encoded) in
            [(&b"{"[..], false, false), (b"", false, false), (b"\x1f\x8b", true, true)]
        {
            let body = Body { bytes, is_whole, is_encoded };
            assert!(matches!(rules.judge(200, None, &body, String::new()), Verdict::Retry { .. }));
        }
    }

    #[test]
    fn the_map_is_over_dapr_too() {
        let rules = rules(Dialect::Dapr, &[(200..=200, Meaning::Accepted)]);
        let answer = br#"{"status":"RETRY"}"#;
        assert_eq!(judge(&rules, 200, answer), Verdict::Accepted { status: 200 });
        assert!(is_retry(&judge(&rules, 201, answer)));
    }
}
