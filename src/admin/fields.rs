//! What requests of the API may carry: declared once, read and described from that.
//!
//! Invariants: whatever is read here was declared, is within its bounds and came once; what was
//! not declared is refused by its name. A refusal names the field, and is a 400 where the
//! document says so, a 422 where only a person can know.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use axum::http::StatusCode;
use inboxd_contract::decode_percent;
use serde_json::Value;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use super::problem::Problem;

/// A parameter, or a member of a body.
#[derive(Debug, Clone, Copy)]
pub(super) struct Field {
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    pub(super) about: &'static str,
    /// It must be there.
    pub(super) needed: bool,
}

/// What a field may be.
#[derive(Debug, Clone, Copy)]
pub(super) enum Kind {
    /// 1 to so many characters, none of them NUL.
    Text { most: usize },
    /// A message id: 1 to so many characters; in a query as it came, percent-decoded, with any
    /// bytes, and `+` is a plus.
    Id { most: usize },
    /// A whole number.
    Integer { least: i64, most: i64 },
    /// A number.
    Number { least: f64, most: f64 },
    /// As [`Kind::Number`], or null.
    NumberOrNull { least: f64, most: f64 },
    /// `true` or `false`.
    Flag,
    /// RFC 3339.
    Time,
    /// A whole number and `ms`, `s`, `m` or `h`.
    Duration,
    /// One of these.
    Choice(fn() -> Vec<&'static str>),
    /// 1 to so many keys of rows; in bodies alone.
    Seqs { most: usize },
}

/// What a [`Kind::Duration`] looks like.
pub(super) const DURATION_PATTERN: &str = "^[0-9]{1,7}(ms|s|m|h)$";

impl Field {
    pub(super) const fn new(name: &'static str, kind: Kind, about: &'static str) -> Self {
        Self { name, kind, about, needed: false }
    }

    pub(super) const fn needed(mut self) -> Self {
        self.needed = true;
        self
    }
}

/// A field's value.
#[derive(Debug, Clone, PartialEq)]
enum Read {
    Text(String),
    Bytes(Vec<u8>),
    Integer(i64),
    Number(Option<f64>),
    Flag(bool),
    Time(SystemTime),
    Duration(Duration),
    Seqs(Vec<i64>),
}

/// The fields that a request carries.
#[derive(Debug, Default)]
pub(super) struct Given(BTreeMap<&'static str, Read>);

impl Given {
    /// Of a query, as it came.
    pub(super) fn of_query(fields: &[Field], query: Option<&str>) -> Result<Self, Problem> {
        let mut given = Self::default();
        for pair in query.unwrap_or_default().split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let name = text_of(name).unwrap_or_else(|| name.to_owned());
            let field = declared(fields, &name, "query parameter")?;
            let read = match field.kind {
                Kind::Id { most } => id(field, decode_percent(value), most)?,
                _ => {
                    let text = text_of(value);
                    let text = text.ok_or_else(|| bad(field.name, "it is no UTF-8"))?;
                    read_text(field, &text)?
                }
            };
            given.put(field, read)?;
        }
        given.complete(fields)
    }

    /// Of a segment of a path, decoded.
    pub(super) fn of_path(field: &Field, decoded: Vec<u8>) -> Result<Self, Problem> {
        let read = match field.kind {
            Kind::Id { most } => id(field, decoded, most)?,
            _ => {
                let text = String::from_utf8(decoded);
                read_text(field, &text.map_err(|_| bad(field.name, "it is no UTF-8"))?)?
            }
        };
        Ok(Self(BTreeMap::from([(field.name, read)])))
    }

    /// Of a body, which is a JSON object.
    pub(super) fn of_json(fields: &[Field], body: &[u8]) -> Result<Self, Problem> {
        let members: Members = serde_json::from_slice(body)
            .map_err(|error| bad_request(format!("the body is no JSON object: {error}")))?;
        let mut given = Self::default();
        for (name, value) in &members.0 {
            let field = declared(fields, name, "member")?;
            given.put(field, read_json(field, value)?)?;
        }
        given.complete(fields)
    }

    fn put(&mut self, field: &Field, read: Read) -> Result<(), Problem> {
        match self.0.insert(field.name, read) {
            None => Ok(()),
            Some(_) => Err(bad(field.name, "it is given more than once")),
        }
    }

    fn complete(self, fields: &[Field]) -> Result<Self, Problem> {
        match fields.iter().find(|field| field.needed && !self.0.contains_key(field.name)) {
            None => Ok(self),
            Some(missing) => Err(bad(missing.name, "it is missing")),
        }
    }

    /// Nothing is given.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn text(&self, name: &str) -> Option<String> {
        match self.0.get(name) {
            Some(Read::Text(text)) => Some(text.clone()),
            _ => None,
        }
    }

    pub(super) fn id(&self, name: &str) -> Option<Vec<u8>> {
        match self.0.get(name) {
            Some(Read::Bytes(bytes)) => Some(bytes.clone()),
            _ => None,
        }
    }

    pub(super) fn integer(&self, name: &str) -> Option<i64> {
        match self.0.get(name) {
            Some(Read::Integer(number)) => Some(*number),
            _ => None,
        }
    }

    /// As [`Given::integer`], of a field that has no negative values.
    pub(super) fn count(&self, name: &str) -> Option<u64> {
        self.integer(name).and_then(|number| u64::try_from(number).ok())
    }

    /// `Some(None)` is null.
    pub(super) fn number(&self, name: &str) -> Option<Option<f64>> {
        match self.0.get(name) {
            Some(Read::Number(number)) => Some(*number),
            _ => None,
        }
    }

    pub(super) fn flag(&self, name: &str) -> bool {
        matches!(self.0.get(name), Some(Read::Flag(true)))
    }

    pub(super) fn time(&self, name: &str) -> Option<SystemTime> {
        match self.0.get(name) {
            Some(Read::Time(time)) => Some(*time),
            _ => None,
        }
    }

    pub(super) fn duration(&self, name: &str) -> Option<Duration> {
        match self.0.get(name) {
            Some(Read::Duration(duration)) => Some(*duration),
            _ => None,
        }
    }

    pub(super) fn seqs(&self, name: &str) -> Vec<i64> {
        match self.0.get(name) {
            Some(Read::Seqs(seqs)) => seqs.clone(),
            _ => Vec::new(),
        }
    }
}

/// A JSON object's members as they came, repeated ones too.
struct Members(Vec<(String, Value)>);

impl<'de> serde::Deserialize<'de> for Members {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl<'de> serde::de::Visitor<'de> for Visitor {
            type Value = Members;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: serde::de::MapAccess<'de>>(
                self,
                mut map: A,
            ) -> Result<Members, A::Error> {
                let mut members = Vec::new();
                while let Some(member) = map.next_entry()? {
                    members.push(member);
                }
                Ok(Members(members))
            }
        }
        deserializer.deserialize_map(Visitor)
    }
}

/// A point in time in RFC 3339; one before 1970 is 1970.
pub fn parse_time(text: &str) -> Option<SystemTime> {
    let time = OffsetDateTime::parse(text, &Rfc3339).ok()?;
    let since = u64::try_from(time.unix_timestamp_nanos() / 1_000_000).unwrap_or_default();
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(since))
}

/// Makes no sense, as the document says.
pub(super) fn bad(field: &str, why: impl std::fmt::Display) -> Problem {
    bad_request(format!("{field}: {why}")).with("field", field)
}

/// Reads well, and makes no sense.
pub(super) fn senseless(field: &str, why: impl std::fmt::Display) -> Problem {
    let detail = format!("{field}: {why}");
    Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "senseless", detail).with("field", field)
}

pub(super) fn bad_request(detail: impl Into<String>) -> Problem {
    Problem::new(StatusCode::BAD_REQUEST, "bad_request", detail)
}

fn declared<'a>(fields: &'a [Field], name: &str, what: &str) -> Result<&'a Field, Problem> {
    fields.iter().find(|field| field.name == name).ok_or_else(|| {
        let known: Vec<_> = fields.iter().map(|field| field.name).collect();
        let known = match known.is_empty() {
            true => "there are none here".to_owned(),
            false => format!("there are: {}", known.join(", ")),
        };
        // What is echoed is short, whatever was sent.
        let name: String = name.chars().take(64).collect();
        bad_request(format!("there is no {what} {name:?}; {known}")).with("field", name)
    })
}

/// Form-decoded; `None`: no UTF-8.
fn text_of(encoded: &str) -> Option<String> {
    String::from_utf8(decode_percent(&encoded.replace('+', " "))).ok()
}

fn read_text(field: &Field, text: &str) -> Result<Read, Problem> {
    let name = field.name;
    match field.kind {
        Kind::Text { most } => words(name, text, most),
        Kind::Id { most } => id(field, text.as_bytes().to_vec(), most),
        Kind::Integer { least, most } => {
            let number = text.parse().map_err(|_| bad(name, "it is no whole number"))?;
            within(name, number, least, most).map(Read::Integer)
        }
        Kind::Number { least, most } | Kind::NumberOrNull { least, most } => {
            let number = text.parse().map_err(|_| bad(name, "it is no number"))?;
            within(name, number, least, most).map(|number| Read::Number(Some(number)))
        }
        Kind::Flag => match text {
            "true" => Ok(Read::Flag(true)),
            "false" => Ok(Read::Flag(false)),
            _ => Err(bad(name, "it is true or false")),
        },
        Kind::Time => parse_time(text)
            .map(Read::Time)
            .ok_or_else(|| bad(name, "it is no time of RFC 3339, such as 2026-01-31T22:00:00Z")),
        Kind::Duration => duration(text).map(Read::Duration).ok_or_else(|| {
            bad(name, "it is a whole number with its unit: ms, s, m or h, such as 20s")
        }),
        Kind::Choice(choices) => {
            let choices = choices();
            match choices.contains(&text) {
                true => Ok(Read::Text(text.to_owned())),
                false => Err(bad(name, format!("it is one of: {}", choices.join(", ")))),
            }
        }
        Kind::Seqs { .. } => Err(bad(name, "it is a list")),
    }
}

fn read_json(field: &Field, value: &Value) -> Result<Read, Problem> {
    let name = field.name;
    match (field.kind, value) {
        (Kind::Integer { least, most }, value) => {
            let number = whole(value).ok_or_else(|| bad(name, "it is no whole number"))?;
            within(name, number, least, most).map(Read::Integer)
        }
        (Kind::NumberOrNull { .. }, Value::Null) => Ok(Read::Number(None)),
        (Kind::Number { least, most } | Kind::NumberOrNull { least, most }, value) => {
            let number = value.as_f64().ok_or_else(|| bad(name, "it is no number"))?;
            within(name, number, least, most).map(|number| Read::Number(Some(number)))
        }
        (Kind::Flag, Value::Bool(flag)) => Ok(Read::Flag(*flag)),
        (Kind::Flag, _) => Err(bad(name, "it is true or false")),
        (Kind::Seqs { most }, Value::Array(seqs)) if (1..=most).contains(&seqs.len()) => {
            let seq = |value: &Value| whole(value).filter(|seq| *seq >= 1);
            let seqs: Option<Vec<_>> = seqs.iter().map(seq).collect();
            seqs.map(Read::Seqs).ok_or_else(|| bad(name, "each is a whole number from 1"))
        }
        (Kind::Seqs { most }, _) => Err(bad(name, format!("it is a list of 1 to {most}"))),
        (_, Value::String(text)) => read_text(field, text),
        (_, _) => Err(bad(name, "it is text")),
    }
}

/// A whole number, also one that is written as 7.0, which JSON Schema takes for one.
fn whole(value: &Value) -> Option<i64> {
    // What an f64 has exactly.
    const EXACT: f64 = 9_007_199_254_740_992.0;
    let written = || value.as_f64().filter(|number| number.fract() == 0.0 && number.abs() <= EXACT);
    value.as_i64().or_else(|| written().map(|number| number as i64))
}

fn words(name: &str, text: &str, most: usize) -> Result<Read, Problem> {
    match text.chars().count() {
        0 => Err(bad(name, "it is empty")),
        count if count > most => Err(bad(name, format!("it has at most {most} characters"))),
        _ if text.contains('\0') => Err(bad(name, "it has a NUL")),
        _ => Ok(Read::Text(text.to_owned())),
    }
}

fn id(field: &Field, bytes: Vec<u8>, most: usize) -> Result<Read, Problem> {
    match String::from_utf8_lossy(&bytes).chars().count() {
        0 => Err(bad(field.name, "it is empty")),
        count if count > most => Err(bad(field.name, format!("it has at most {most} characters"))),
        _ => Ok(Read::Bytes(bytes)),
    }
}

fn within<T: PartialOrd + std::fmt::Display + Copy>(
    name: &str,
    number: T,
    least: T,
    most: T,
) -> Result<T, Problem> {
    if number >= least && number <= most {
        return Ok(number);
    }
    Err(bad(name, format!("it is from {least} to {most}")))
}

fn duration(text: &str) -> Option<Duration> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().ok().filter(|_| digits <= 7)?;
    match unit {
        "ms" => Some(Duration::from_millis(number)),
        "s" => Some(Duration::from_secs(number)),
        "m" => Some(Duration::from_secs(number * 60)),
        "h" => Some(Duration::from_secs(number * 3_600)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIELDS: &[Field] = &[
        Field::new("limit", Kind::Integer { least: 1, most: 200 }, ""),
        Field::new("id", Kind::Id { most: 8 }, ""),
        Field::new("error", Kind::Text { most: 4 }, ""),
        Field::new("since", Kind::Time, ""),
        Field::new("all", Kind::Flag, ""),
        Field::new("rate", Kind::NumberOrNull { least: 0.5, most: 9.0 }, ""),
        Field::new("wait", Kind::Duration, ""),
        Field::new("seqs", Kind::Seqs { most: 2 }, ""),
        Field::new("state", Kind::Choice(|| vec!["due", "dead"]), ""),
    ];

    #[test]
    fn a_query_is_read_as_declared() {
        let query = "limit=200&id=a%2Fb+%ff&error=a+b&since=1970-01-01T01:00:01%2B01:00&all=true\
                     &rate=2&wait=90s&state=due";
        let given = Given::of_query(FIELDS, Some(query)).unwrap();
        assert_eq!(given.count("limit"), Some(200));
        assert_eq!(given.id("id").unwrap(), b"a/b+\xff");
        assert_eq!(given.text("error").as_deref(), Some("a b"));
        assert_eq!(given.time("since"), Some(SystemTime::UNIX_EPOCH + Duration::from_secs(1)));
        assert!(given.flag("all"));
        assert_eq!(given.number("rate"), Some(Some(2.0)));
        assert_eq!(given.duration("wait"), Some(Duration::from_secs(90)));
        assert_eq!(given.text("state").as_deref(), Some("due"));
        assert!(Given::of_query(FIELDS, None).unwrap().is_empty());
    }

    #[test]
    fn what_is_wrong_in_a_query_is_named() {
        for (query, field) in [
            ("limit=0", "limit"),
            ("limit=201", "limit"),
            ("limit=", "limit"),
            ("limit", "limit"),
            ("limit=1&limit=1", "limit"),
            ("id=", "id"),
            ("id=123456789", "id"),
            ("error=12345", "error"),
            ("error=%00", "error"),
            ("error=%ff", "error"),
            ("since=2026-01-01", "since"),
            ("since=2026-13-01T00:00:00Z", "since"),
            ("all=yes", "all"),
            ("rate=NaN", "rate"),
            ("rate=inf", "rate"),
            ("wait=1 day", "wait"),
            ("wait=12345678s", "wait"),
            ("wait=s", "wait"),
            ("state=gone", "state"),
            ("seqs=1", "seqs"),
            ("limits=1", "limits"),
        ] {
            let problem = Given::of_query(FIELDS, Some(query)).unwrap_err();
            assert_eq!(problem.member("field"), Some(&Value::from(field)), "{query}: {problem:?}");
        }
    }

    #[test]
    fn a_body_is_read_as_declared() {
        let body = br#"{"limit": 7.0, "rate": null, "seqs": [3, 1], "all": false, "id": "x"}"#;
        let given = Given::of_json(FIELDS, body).unwrap();
        assert_eq!((given.integer("limit"), given.number("rate")), (Some(7), Some(None)));
        assert_eq!(given.seqs("seqs"), [3, 1]);
        assert!(!given.flag("all"));
        for (body, field) in [
            (r#"{"limit": "7"}"#, "limit"),
            (r#"{"limit": 7.5}"#, "limit"),
            (r#"{"limit": 1, "limit": 2}"#, "limit"),
            (r#"{"all": "true"}"#, "all"),
            (r#"{"all": null}"#, "all"),
            (r#"{"seqs": []}"#, "seqs"),
            (r#"{"seqs": [0]}"#, "seqs"),
            (r#"{"seqs": [1, 2, 3]}"#, "seqs"),
            (r#"{"error": 1}"#, "error"),
            (r#"{"limits": 1}"#, "limits"),
        ] {
            let problem = Given::of_json(FIELDS, body.as_bytes()).unwrap_err();
            assert_eq!(problem.member("field"), Some(&Value::from(field)), "{body}");
        }
        for body in ["", "[]", "null", "{", "1", "{} x"] {
            assert!(Given::of_json(FIELDS, body.as_bytes()).is_err(), "{body}");
        }
    }

    #[test]
    fn times_have_their_offset_and_their_bounds() {
        let seconds = |text: &str| {
            parse_time(text)
                .map(|time| time.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs())
        };
        assert_eq!(seconds("1970-01-02T00:00:00+02:00"), Some(22 * 3_600));
        assert_eq!(seconds("0001-01-01T00:00:00Z"), Some(0));
        assert_eq!(seconds("9999-12-31T23:59:59Z"), Some(253_402_300_799));
        assert_eq!(seconds("2026-02-30T00:00:00Z"), None);
    }
}
