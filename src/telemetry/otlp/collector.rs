//! One collector's endpoint for one signal.
//!
//! Invariants: an export has a bound in time; nothing here retries; a collector in trouble is
//! told once when it begins, once in a while as long as it lasts, and when it is over.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use inboxd_contract::ErrorCode;
use prometheus_client::metrics::counter::Counter;
use reqwest::header::{CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use reqwest::{Client, Response, StatusCode};
use tokio::time::Instant;

use super::settings::{Signal, Target, TelemetryError};
use crate::causes::chain;
use crate::telemetry::Metrics;

const PROTOBUF: HeaderValue = HeaderValue::from_static("application/x-protobuf");
const CONNECT_WITHIN: Duration = Duration::from_secs(5);
/// Between two lines about a collector whose trouble lasts.
const TELL_EVERY: Duration = Duration::from_secs(60);
const RETRY_AFTER_MAX: Duration = Duration::from_secs(30);
/// Answers are a few bytes; they are read so that the connection can be used again.
const ANSWER_BYTES_MAX: usize = 64 * 1024;

/// What one export came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sent {
    /// Taken.
    Done,
    /// To be tried again, not before this time.
    Again(Duration),
    /// Never to be tried again.
    Refused,
}

/// Sends protobuf messages.
pub(super) struct Collector {
    signal: Signal,
    target: Target,
    client: Client,
    good: Counter,
    bad: Counter,
    /// When the trouble was told last, and how many exports failed since.
    told: Mutex<Option<(Instant, u64)>>,
}

impl Collector {
    pub(super) fn new(
        signal: Signal,
        target: Target,
        metrics: &Metrics,
    ) -> Result<Self, TelemetryError> {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut builder = Client::builder()
            .user_agent(concat!("inboxd/", env!("CARGO_PKG_VERSION")))
            .redirect(reqwest::redirect::Policy::none())
            .retry(reqwest::retry::never())
            .connect_timeout(CONNECT_WITHIN.min(target.timeout))
            .timeout(target.timeout)
            .no_proxy();
        if target.url.scheme() == "http" {
            // Nothing to trust is needed, and a machine may have nothing.
            builder = builder.tls_certs_only([]);
        } else if let Some(roots) = target.roots.clone() {
            builder = builder.tls_certs_only(roots);
        }
        let client = builder.build().map_err(|error| TelemetryError {
            name: "telemetry.endpoint".into(),
            what: format!(
                "no HTTPS client can be made ({}): does this machine have a CA bundle?",
                error.without_url()
            ),
        })?;
        let counter = |result: &str| {
            let labels = [("signal", signal.as_str().to_owned()), ("result", result.to_owned())];
            metrics.families().exports.get_or_create_owned(&labels)
        };
        let (good, bad) = (counter("sent"), counter("failed"));
        Ok(Self { signal, target, client, good, bad, told: Mutex::default() })
    }

    /// One POST.
    ///
    /// # Cancel safety
    /// Cancel-safe: the collector may have seen it.
    pub(super) async fn send(&self, body: Vec<u8>) -> Sent {
        let request = self
            .client
            .post(self.target.url.clone())
            .headers(self.target.headers.clone())
            .header(CONTENT_TYPE, PROTOBUF)
            .body(body);
        let (sent, problem) = match request.send().await {
            Ok(response) => judge(response).await,
            Err(error) => (Sent::Again(Duration::ZERO), Some(chain(&error.without_url()))),
        };
        self.tell(problem.as_deref());
        sent
    }

    fn tell(&self, problem: Option<&str>) {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        let signal = self.signal.as_str();
        let Some(problem) = problem else {
            self.good.inc();
            if told.take().is_some() {
                tracing::info!(signal, "the collector takes it again");
            }
            return;
        };
        self.bad.inc();
        let now = Instant::now();
        match &mut *told {
            Some((at, untold)) if now < *at + TELL_EVERY => *untold += 1,
            _ => {
                let untold = told.map_or(0, |(_, untold)| untold);
                *told = Some((now, 0));
                tracing::warn!(
                    code = %ErrorCode::TelemetryNotSent,
                    signal,
                    endpoint = self.target.shown(),
                    problem,
                    untold,
                    "the collector does not take it; messages are not affected"
                );
            }
        }
    }
}

async fn judge(mut response: Response) -> (Sent, Option<String>) {
    let status = response.status();
    let after = response
        .headers()
        .get(RETRY_AFTER)
        .and_then(|value| value.to_str().ok()?.trim().parse().ok())
        .map(Duration::from_secs)
        .unwrap_or_default()
        .min(RETRY_AFTER_MAX);
    let mut left = ANSWER_BYTES_MAX;
    while let Ok(Some(chunk)) = response.chunk().await {
        left = left.saturating_sub(chunk.len());
        if left == 0 {
            break;
        }
    }
    match status {
        _ if status.is_success() => (Sent::Done, None),
        StatusCode::TOO_MANY_REQUESTS
        | StatusCode::BAD_GATEWAY
        | StatusCode::SERVICE_UNAVAILABLE
        | StatusCode::GATEWAY_TIMEOUT => (Sent::Again(after), Some(format!("it answers {status}"))),
        _ => (Sent::Refused, Some(format!("it answers {status}"))),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use reqwest::header::HeaderMap;
    use reqwest::{Certificate, Url};
    use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;
    use tokio_rustls::TlsAcceptor;

    use super::*;

    /// Takes everything over TLS, with this certificate; answers its port.
    async fn takes_everything(own: &rcgen::CertifiedKey<rcgen::KeyPair>) -> u16 {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(own.signing_key.serialize_der()));
        let tls = rustls::ServerConfig::builder()
            .with_no_client_auth()
            .with_single_cert(vec![own.cert.der().clone()], key)
            .unwrap();
        let acceptor = TlsAcceptor::from(Arc::new(tls));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let Ok(mut stream) = acceptor.accept(stream).await else { continue };
                let mut request = Vec::new();
                while !request.ends_with(b"a body")
                    && stream.read_buf(&mut request).await.is_ok_and(|read| read > 0)
                {
                }
                let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
                drop(stream.write_all(answer).await);
                drop(stream.shutdown().await);
            }
        });
        port
    }

    #[tokio::test]
    async fn a_collector_is_trusted_by_the_named_roots_alone() {
        let certified = || rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        let (own, another) = (certified(), certified());
        let port = takes_everything(&own).await;
        let send = async |root: &rcgen::Certificate| {
            let target = Target {
                url: Url::parse(&format!("https://localhost:{port}/v1/traces")).unwrap(),
                roots: Some(vec![Certificate::from_der(root.der()).unwrap()]),
                headers: HeaderMap::new(),
                timeout: Duration::from_secs(20),
            };
            let collector = Collector::new(Signal::Traces, target, &Metrics::new()).unwrap();
            collector.send(b"a body".to_vec()).await
        };
        assert_eq!(send(&another.cert).await, Sent::Again(Duration::ZERO));
        assert_eq!(send(&own.cert).await, Sent::Done);
    }
}
