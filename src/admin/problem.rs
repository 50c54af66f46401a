//! Errors of the API as problem details (RFC 9457).
//!
//! Invariants: `code` is stable, and `type` is made from it; no text says more than the asker
//! may know, and none has a secret.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

const CONTENT_TYPE: HeaderValue = HeaderValue::from_static("application/problem+json");

/// One error: a stable code, and words for a person.
#[derive(Debug, Clone, PartialEq)]
pub struct Problem {
    status: StatusCode,
    code: &'static str,
    detail: String,
    more: Map<String, Value>,
}

impl Problem {
    /// An error. `detail` is for a person: what, and what to do.
    pub fn new(status: StatusCode, code: &'static str, detail: impl Into<String>) -> Self {
        Self { status, code, detail: detail.into(), more: Map::new() }
    }

    /// With a further member.
    pub fn with(mut self, name: &str, value: impl serde::Serialize) -> Self {
        if let Ok(value) = serde_json::to_value(value) {
            self.more.insert(name.to_owned(), value);
        }
        self
    }

    /// A further member.
    #[cfg(test)]
    pub(super) fn member(&self, name: &str) -> Option<&Value> {
        self.more.get(name)
    }
}

/// The members that every problem has; some have more. For the document alone.
#[derive(ToSchema)]
#[schema(as = Problem)]
#[allow(dead_code)]
pub(super) struct ProblemDocument {
    /// `urn:inboxd:problem:` and the code.
    r#type: String,
    /// Of the status.
    title: String,
    /// The HTTP status.
    #[schema(minimum = 400, maximum = 599)]
    status: u16,
    /// Stable.
    #[schema(pattern = "^[a-z_]+$")]
    code: String,
    /// What, and what to do, for a person.
    detail: String,
    /// The field that it is about, where it is about one.
    field: Option<String>,
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let Value::Object(mut body) = json!({
            "type": format!("urn:inboxd:problem:{}", self.code),
            "title": self.status.canonical_reason().unwrap_or_default(),
            "status": self.status.as_u16(),
            "code": self.code,
            "detail": self.detail,
        }) else {
            unreachable!("it is an object")
        };
        body.extend(self.more);
        let mut response = (self.status, Json(body)).into_response();
        response.headers_mut().insert(header::CONTENT_TYPE, CONTENT_TYPE);
        response
    }
}
