//! What the stub application answers.

use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use http::{HeaderName, HeaderValue, StatusCode};

/// One answer.
#[derive(Debug, Clone)]
pub struct Answer {
    delay: Duration,
    status: u16,
    headers: Vec<(String, String)>,
    body: Bytes,
    lost: bool,
}

impl Answer {
    /// This status (100 to 999), at once, without a body.
    pub fn status(status: u16) -> Self {
        Self { delay: Duration::ZERO, status, headers: Vec::new(), body: Bytes::new(), lost: false }
    }

    /// Recorded with this status, but never sent: the connection is reset instead. With 200 it
    /// is the answer that gets lost after the application has committed.
    pub fn lost(status: u16) -> Self {
        Self { lost: true, ..Self::status(status) }
    }

    /// Answers after so much time.
    pub fn after(mut self, delay: Duration) -> Self {
        self.delay = delay;
        self
    }

    /// With a header more.
    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    /// With a body.
    pub fn body(mut self, body: impl Into<Bytes>) -> Self {
        self.body = body.into();
        self
    }

    pub(super) fn delay(&self) -> Duration {
        self.delay
    }

    pub(super) fn code(&self) -> u16 {
        self.status
    }

    pub(super) fn is_lost(&self) -> bool {
        self.lost
    }

    pub(super) fn into_response(self) -> Response {
        let mut response = Response::new(Body::from(self.body));
        *response.status_mut() = StatusCode::from_u16(self.status)
            .unwrap_or_else(|_| panic!("{} is no HTTP status", self.status));
        for (name, value) in self.headers {
            let (Ok(name), Ok(value)) =
                (HeaderName::try_from(&name), HeaderValue::try_from(&value))
            else {
                panic!("{name}: {value} is no HTTP header");
            };
            response.headers_mut().append(name, value);
        }
        response
    }
}
