//! Who may ask: the token, the name that a listener is asked by, and no browsers.
//!
//! Invariants: every request of a listener passes here, those for paths that do not exist
//! included; with a token, nothing but the need for it is told without it. A listener on a
//! loopback address answers only to loopback's names, so that no web page reaches it through a
//! name that its owner points at 127.0.0.1.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use secrecy::{ExposeSecret as _, SecretString};
use sha2::{Digest as _, Sha256};

use super::api::too_large;
use super::problem::Problem;

/// No request has a use for more.
pub(super) const BODY_BYTES_MAX: usize = 64 * 1024;
const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// The rules of one listener.
#[derive(Clone)]
pub(super) struct Guard(Arc<Rules>);

struct Rules {
    /// The SHA-256 of the bearer token.
    token: Option<[u8; 32]>,
    is_loopback: bool,
}

impl Guard {
    pub(super) fn new(address: SocketAddr, token: Option<&SecretString>) -> Self {
        let token = token.map(|token| digest(token.expose_secret().as_bytes()));
        Self(Arc::new(Rules { token, is_loopback: address.ip().is_loopback() }))
    }

    fn check(&self, request: &Request) -> Result<(), Problem> {
        let headers = request.headers();
        self.check_host(request.uri(), headers)?;
        self.check_token(headers)?;
        self.check_browser(request.method(), request.uri(), headers)?;
        check_body(headers)
    }

    fn check_host(&self, uri: &Uri, headers: &HeaderMap) -> Result<(), Problem> {
        let host = only(headers, &header::HOST)
            .ok_or_else(|| bad_request("there is more than one Host header"))?;
        if !self.0.is_loopback {
            return Ok(());
        }
        let of_header = host.map(|host| host.to_str().ok().and_then(|host| host.parse().ok()));
        let of_uri = uri.authority().map(|authority| Some(authority.clone()));
        let mut named = [of_header, of_uri].into_iter().flatten();
        if named.all(|host: Option<Authority>| host.is_some_and(|host| is_local(host.host()))) {
            return Ok(());
        }
        let detail = "this listener is on a loopback address and answers only to localhost and \
                      loopback addresses as Host";
        Err(Problem::new(StatusCode::MISDIRECTED_REQUEST, "wrong_host", detail))
    }

    fn check_token(&self, headers: &HeaderMap) -> Result<(), Problem> {
        let Some(expected) = self.0.token else { return Ok(()) };
        let token = only(headers, &header::AUTHORIZATION)
            .flatten()
            .and_then(|value| value.as_bytes().split_at_checked("Bearer ".len()))
            .filter(|(scheme, _)| scheme.eq_ignore_ascii_case(b"Bearer "))
            .map(|(_, token)| token);
        // Digests are compared, so that the time taken tells nothing of the token.
        if token.is_some_and(|token| digest(token) == expected) {
            return Ok(());
        }
        let detail = "a bearer token is needed: Authorization: Bearer, with what admin.token_file \
                      holds";
        Err(Problem::new(StatusCode::UNAUTHORIZED, "unauthorized", detail))
    }

    /// Without a token, a page in a browser on this machine could send what it cannot read the
    /// answer of: changes, and questions that cost the database something.
    fn check_browser(
        &self,
        method: &Method,
        uri: &Uri,
        headers: &HeaderMap,
    ) -> Result<(), Problem> {
        let is_browser =
            headers.contains_key(header::ORIGIN) || headers.contains_key(SEC_FETCH_SITE);
        if self.0.token.is_some() || !is_browser {
            return Ok(());
        }
        let detail = if !matches!(*method, Method::GET | Method::HEAD) {
            "a browser may not change anything here; use inboxd or curl, or set a token"
        } else if uri.path().starts_with("/v1/") && is_cross_site(headers) {
            "a page of another site may not ask this; use inboxd or curl, or set a token"
        } else {
            return Ok(());
        };
        Err(Problem::new(StatusCode::FORBIDDEN, "browser", detail))
    }
}

/// The middleware.
pub(super) async fn guard(State(guard): State<Guard>, request: Request, next: Next) -> Response {
    let mut response = match guard.check(&request) {
        Ok(()) => next.run(request).await,
        Err(problem) => problem.into_response(),
    };
    let refused = response.status() == StatusCode::UNAUTHORIZED;
    let headers = response.headers_mut();
    if refused {
        headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

fn check_body(headers: &HeaderMap) -> Result<(), Problem> {
    let length = headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok());
    // A length that is no number never comes here: it cannot be framed.
    if length
        .and_then(|length| length.parse().ok())
        .is_some_and(|bytes: u64| bytes > BODY_BYTES_MAX as u64)
    {
        return Err(too_large());
    }
    Ok(())
}

/// `Some(None)` without the header, `None` with several.
fn only<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<Option<&'a HeaderValue>> {
    let mut values = headers.get_all(name).iter();
    let first = values.next();
    values.next().is_none().then_some(first)
}

/// A browser asks for a page that did not come from here, as far as it says.
fn is_cross_site(headers: &HeaderMap) -> bool {
    let host = headers.get(header::HOST).map(HeaderValue::as_bytes);
    let is_foreign = |origin: &HeaderValue| {
        let named = origin.as_bytes().strip_prefix(b"http://");
        !named.is_some_and(|named| host.is_some_and(|host| named.eq_ignore_ascii_case(host)))
    };
    // `none` is a person who typed the address.
    let is_far = |site: &HeaderValue| !matches!(site.as_bytes(), b"same-origin" | b"none");
    headers.get_all(header::ORIGIN).iter().any(is_foreign)
        || headers.get_all(SEC_FETCH_SITE).iter().any(is_far)
}

/// `localhost` or a loopback address, in brackets where it is one of IPv6.
fn is_local(host: &str) -> bool {
    let address = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    host.eq_ignore_ascii_case("localhost")
        || address.parse().is_ok_and(|address: IpAddr| address.is_loopback())
}

fn bad_request(detail: &str) -> Problem {
    Problem::new(StatusCode::BAD_REQUEST, "bad_request", detail)
}

fn digest(bytes: &[u8]) -> [u8; 32] {
    Sha256::digest(bytes).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_has_a_few_names() {
        for local in ["localhost", "LOCALHOST", "127.0.0.1", "127.9.0.1", "[::1]"] {
            assert!(is_local(local), "{local}");
        }
        for other in ["localhost.evil.test", "10.0.0.1", "", "127.0.0.1.evil.test", "[::2]", "0"] {
            assert!(!is_local(other), "{other}");
        }
    }
}
