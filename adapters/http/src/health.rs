//! The application's health URL: asked with GET, healthy with 2xx.

use std::time::Duration;

use http::{HeaderMap, Method};
use reqwest::{Client, Request};
use tokio::time::{Instant, timeout_at};

use crate::forwarder::{client_of, fixed_headers};
use crate::response::{printable, read_some};
use crate::{Callback, HttpConfig, HttpConfigError, sending};

/// How much of an answer is read: enough for what an application says of its state.
const BODY_BYTES_MAX: usize = 16 * 1024;
/// How much of it is told.
const TOLD_BYTES_MAX: usize = 200;

/// Who is asked how the application is.
pub(crate) struct Health {
    target: Callback,
    client: Client,
    // The callback's own, where it is the same host; values are marked sensitive.
    headers: HeaderMap,
    timeout: Duration,
}

impl Health {
    /// `client`: the callback's, used where the health URL is on the same host.
    pub(crate) fn new(
        config: &HttpConfig,
        callback: &Callback,
        client: &Client,
    ) -> Result<Option<Self>, HttpConfigError> {
        let Some(text) = &config.health_url else { return Ok(None) };
        let target = match text.trim() {
            path if path.starts_with('/') && !path.starts_with("//") => callback.at(path),
            whole => Callback::parse(whole).map_err(|error| match error {
                HttpConfigError::Callback(what) => HttpConfigError::HealthUrl(what),
                other => other,
            })?,
        };
        let is_same_host = target.has_host_of(callback);
        // What authenticates us to the callback is nobody else's business.
        let fixed: &[_] = if is_same_host { &config.fixed_headers } else { &[] };
        let mut headers = fixed_headers(fixed, &target)?;
        if is_same_host && target.credentials().is_none() {
            for (name, value) in &fixed_headers(&[], callback)? {
                headers.entry(name).or_insert_with(|| value.clone());
            }
        }
        let client = match is_same_host {
            true => client.clone(),
            false => client_of(config, &target)?,
        };
        Ok(Some(Self { target, client, headers, timeout: config.health_timeout }))
    }

    /// Prints without credentials.
    pub(crate) fn target(&self) -> &Callback {
        &self.target
    }

    /// `Err`: what it said, or why it said nothing; without credentials, bounded.
    pub(crate) async fn ask(&self) -> Result<(), String> {
        let deadline = Instant::now() + self.timeout;
        let mut request = Request::new(Method::GET, self.target.url().clone());
        request.headers_mut().clone_from(&self.headers);
        let response = match timeout_at(deadline, self.client.execute(request)).await {
            Ok(Ok(response)) => response,
            Ok(Err(error)) => {
                return Err(format!("{}: {}", self.target, sending::failure(error)));
            }
            Err(_) => return Err(format!("{}: no answer within {:?}", self.target, self.timeout)),
        };
        let status = response.status();
        // Read, so that its connection can be used again.
        let (body, _) = read_some(response, TOLD_BYTES_MAX, BODY_BYTES_MAX, deadline).await;
        match (status.is_success(), printable(&body)) {
            (true, _) => Ok(()),
            (false, said) if said.is_empty() => {
                Err(format!("{}: {}", self.target, status.as_u16()))
            }
            (false, said) => Err(format!("{}: {}: {said}", self.target, status.as_u16())),
        }
    }
}
