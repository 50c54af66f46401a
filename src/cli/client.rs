//! Asks a running sidecar over its admin listener, whose address and token the configuration has.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use reqwest::Method;
use secrecy::{ExposeSecret as _, SecretString};
use serde_json::Value;

use super::pinned;
use crate::admin::ACTOR_HEADER;
use crate::causes::chain;
use crate::config::{AdminConfig, ServerTls};

const CONNECT_WITHIN: Duration = Duration::from_secs(2);
/// Reports of many subscriptions with long errors stay far below; a body may have so much.
const ANSWER_BYTES_MAX: usize = 1024 * 1024 * 1024;

/// A listener to be asked.
pub(super) struct Client {
    base: String,
    token: Option<SecretString>,
    http: reqwest::Client,
}

/// What was answered.
pub(super) struct Answer {
    pub(super) status: u16,
    pub(super) body: Value,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum AskError {
    /// Nobody listens there.
    #[error("no sidecar answers at {0}: is it running, and is this its admin.listen?")]
    Nobody(String),
    /// Somebody does, and something else went wrong.
    #[error("{0}")]
    Failed(String),
}

impl Client {
    /// For the operators' listener of this configuration; `None`: it is off.
    pub(super) fn of(
        config: &AdminConfig,
        answer_within: Duration,
    ) -> Result<Option<Self>, AskError> {
        let Some(listen) = config.listen else { return Ok(None) };
        Self::new(listen, config.token.as_ref(), config.tls.as_ref(), answer_within).map(Some)
    }

    /// For a listener at this address; one that listens on all addresses is asked on loopback.
    pub(super) fn new(
        listen: SocketAddr,
        token: Option<&SecretString>,
        tls: Option<&ServerTls>,
        answer_within: Duration,
    ) -> Result<Self, AskError> {
        inboxd_http::install_crypto_provider();
        let http = reqwest::Client::builder()
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .retry(reqwest::retry::never())
            .connect_timeout(CONNECT_WITHIN.min(answer_within))
            .timeout(answer_within);
        let (scheme, http) = match tls {
            None => ("http", http.tls_certs_only([])),
            Some(tls) => {
                let pinned = pinned::config(tls).map_err(AskError::Failed)?;
                ("https", http.tls_backend_preconfigured(pinned))
            }
        };
        let http =
            http.build().map_err(|error| AskError::Failed(format!("no HTTP client: {error}")))?;
        let base = format!("{scheme}://{}", reachable(listen));
        Ok(Self { base, token: token.cloned(), http })
    }

    /// Where it asks.
    pub(super) fn base(&self) -> &str {
        &self.base
    }

    /// Sends one request and reads the answer, which is JSON.
    pub(super) async fn ask(&self, method: Method, path: &str) -> Result<Answer, AskError> {
        let (status, body) = self.fetch(self.request(method, path)).await?;
        self.read(status, &body)
    }

    /// Has something changed, in somebody's name; reads the answer, which is JSON.
    pub(super) async fn change(
        &self,
        method: Method,
        path: &str,
        actor: &str,
        body: Option<&Value>,
    ) -> Result<Answer, AskError> {
        let mut request = self.request(method, path).header(ACTOR_HEADER, actor);
        if let Some(body) = body {
            request = request.json(body);
        }
        let (status, body) = self.fetch(request).await?;
        self.read(status, &body)
    }

    /// Bytes, or a problem.
    pub(super) async fn bytes(&self, path: &str) -> Result<Result<Vec<u8>, Answer>, AskError> {
        match self.fetch(self.request(Method::GET, path)).await? {
            (200, body) => Ok(Ok(body)),
            (status, body) => self.read(status, &body).map(Err),
        }
    }

    fn request(&self, method: Method, path: &str) -> reqwest::RequestBuilder {
        let request = self.http.request(method, format!("{}{path}", self.base));
        match &self.token {
            Some(token) => request.bearer_auth(token.expose_secret()),
            None => request,
        }
    }

    async fn fetch(&self, request: reqwest::RequestBuilder) -> Result<(u16, Vec<u8>), AskError> {
        let mut response = request.send().await.map_err(|error| self.failed(&error))?;
        let mut body = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(|error| self.failed(&error))? {
            if body.len() + chunk.len() > ANSWER_BYTES_MAX {
                return Err(AskError::Failed(format!("{} answers without end", self.base)));
            }
            body.extend_from_slice(&chunk);
        }
        let status = response.status().as_u16();
        if status == 401 {
            return Err(AskError::Failed(format!(
                "{} wants a token, and another than the configuration's: set admin.token_file as \
                 the running sidecar has it",
                self.base
            )));
        }
        Ok((status, body))
    }

    fn read(&self, status: u16, body: &[u8]) -> Result<Answer, AskError> {
        let body = serde_json::from_slice(body).map_err(|_| {
            AskError::Failed(format!(
                "{} answered {status} with something that is no JSON: is it a sidecar of this \
                 version?",
                self.base
            ))
        })?;
        Ok(Answer { status, body })
    }

    fn failed(&self, error: &reqwest::Error) -> AskError {
        if error.is_connect() && !chain(error).contains("certificate") {
            return AskError::Nobody(self.base.clone());
        }
        if error.is_timeout() {
            return AskError::Failed(format!("{} did not answer in time", self.base));
        }
        AskError::Failed(format!("{} did not answer: {}", self.base, chain(error)))
    }
}

impl Answer {
    /// The words of a problem, or its status.
    pub(super) fn detail(&self) -> String {
        match self.body.get("detail").and_then(Value::as_str) {
            Some(detail) => detail.to_owned(),
            None => format!("it answered {}", self.status),
        }
    }
}

fn reachable(listen: SocketAddr) -> SocketAddr {
    let ip = match listen.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, listen.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_on_all_addresses_is_asked_on_loopback() {
        let reached = |listen: &str| reachable(listen.parse().unwrap()).to_string();
        assert_eq!(reached("0.0.0.0:7461"), "127.0.0.1:7461");
        assert_eq!(reached("[::]:7461"), "[::1]:7461");
        assert_eq!(reached("10.0.0.7:1"), "10.0.0.7:1");
    }
}
