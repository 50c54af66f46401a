//! The listeners: `/livez`, `/readyz`, `/metrics`.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use secrecy::{ExposeSecret, SecretString};
use sha2::{Digest, Sha256};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::health::HealthRegistry;
use crate::telemetry::{METRICS_CONTENT_TYPE, Metrics};

/// How long answers under way may take once the listener closes.
const CLOSE_WITHIN: Duration = Duration::from_millis(500);

/// What the endpoints answer from.
#[derive(Clone)]
pub struct Endpoints {
    /// Liveness and readiness.
    pub health: HealthRegistry,
    /// The figures.
    pub metrics: Metrics,
}

/// One listener, from its bind until it is closed or dropped.
pub struct AdminServer {
    address: SocketAddr,
    stop: CancellationToken,
    task: Option<JoinHandle<()>>,
}

impl AdminServer {
    /// Binds and serves. With a token, every request must carry it as a bearer token.
    ///
    /// # Errors
    /// The address cannot be bound.
    pub async fn start(
        address: SocketAddr,
        endpoints: Endpoints,
        token: Option<&SecretString>,
    ) -> io::Result<Self> {
        let listener = TcpListener::bind(address).await?;
        let address = listener.local_addr()?;
        let stop = CancellationToken::new();
        let stopped = stop.clone().cancelled_owned();
        let router = router(endpoints, token);
        let task = tokio::spawn(async move {
            let served = axum::serve(listener, router).with_graceful_shutdown(stopped).await;
            if let Err(error) = served {
                tracing::error!(%address, %error, "a listener ended");
            }
        });
        Ok(Self { address, stop, task: Some(task) })
    }

    /// Where it listens: with port 0 in the configuration, the port that it got.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Stops listening; answers under way have half a second.
    pub async fn close(mut self) {
        self.stop.cancel();
        if let Some(mut task) = self.task.take()
            && tokio::time::timeout(CLOSE_WITHIN, &mut task).await.is_err()
        {
            task.abort();
        }
    }
}

impl Drop for AdminServer {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

fn router(endpoints: Endpoints, token: Option<&SecretString>) -> Router {
    let router = Router::new()
        .route("/livez", get(livez))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics))
        .with_state(endpoints);
    match token {
        Some(token) => {
            let expected: Arc<[u8]> = Arc::from(digest(token.expose_secret().as_bytes()));
            router.layer(middleware::from_fn_with_state(expected, authorize))
        }
        None => router,
    }
}

async fn livez(State(endpoints): State<Endpoints>) -> Response {
    let liveness = endpoints.health.liveness();
    (status(liveness.live), Json(liveness)).into_response()
}

async fn readyz(State(endpoints): State<Endpoints>) -> Response {
    let readiness = endpoints.health.readiness();
    (status(readiness.ready), Json(readiness)).into_response()
}

async fn metrics(State(endpoints): State<Endpoints>) -> Response {
    ([(header::CONTENT_TYPE, METRICS_CONTENT_TYPE)], endpoints.metrics.encode()).into_response()
}

fn status(good: bool) -> StatusCode {
    if good { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}

async fn authorize(State(expected): State<Arc<[u8]>>, request: Request, next: Next) -> Response {
    let token = request
        .headers()
        .get(header::AUTHORIZATION)
        .and_then(|value| value.as_bytes().split_at_checked("Bearer ".len()))
        .filter(|(scheme, _)| scheme.eq_ignore_ascii_case(b"Bearer "))
        .map(|(_, token)| token);
    // Digests are compared, so that the time taken tells nothing of the token.
    if token.is_some_and(|token| digest(token)[..] == expected[..]) {
        return next.run(request).await;
    }
    let challenge = [(header::WWW_AUTHENTICATE, "Bearer")];
    (StatusCode::UNAUTHORIZED, challenge, "a bearer token is needed\n").into_response()
}

fn digest(bytes: &[u8]) -> [u8; 32] {
    Sha256::digest(bytes).into()
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpStream;

    use super::*;

    async fn start(token: Option<&SecretString>) -> (AdminServer, HealthRegistry) {
        let health = HealthRegistry::new(Duration::from_secs(60));
        let endpoints = Endpoints { health: health.clone(), metrics: Metrics::new() };
        let server =
            AdminServer::start(([127, 0, 0, 1], 0).into(), endpoints, token).await.unwrap();
        (server, health)
    }

    /// The whole answer to a GET.
    async fn ask(server: &AdminServer, path: &str, headers: &str) -> String {
        let mut stream = TcpStream::connect(server.address()).await.unwrap();
        let request =
            format!("GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n{headers}\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    #[tokio::test]
    async fn readiness_follows_the_registry_and_gives_the_reason() {
        let (server, health) = start(None).await;
        let database = health.dependency("database");
        let answer = ask(&server, "/readyz", "").await;
        assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("not tried yet"), "{answer}");
        database.set(true, "");
        assert!(ask(&server, "/readyz", "").await.starts_with("HTTP/1.1 200"));
        health.set_draining();
        let answer = ask(&server, "/readyz", "").await;
        assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("\"draining\":true"));
        assert!(ask(&server, "/livez", "").await.starts_with("HTTP/1.1 200"));
        server.close().await;
    }

    #[tokio::test]
    async fn metrics_are_openmetrics() {
        let (server, _) = start(None).await;
        let answer = ask(&server, "/metrics", "").await;
        assert!(answer.contains(METRICS_CONTENT_TYPE) && answer.contains("# EOF"), "{answer}");
    }

    #[tokio::test]
    async fn with_a_token_nothing_is_answered_without_it() {
        let (server, _) = start(Some(&"geheim-und-lang-genug".into())).await;
        for headers in
            ["", "Authorization: Bearer falsch\r\n", "Authorization: geheim-und-lang-genug\r\n"]
        {
            for path in ["/livez", "/readyz", "/metrics"] {
                let answer = ask(&server, path, headers).await;
                assert!(answer.starts_with("HTTP/1.1 401"), "{path} {headers}: {answer}");
            }
        }
        let good = "Authorization: bearer geheim-und-lang-genug\r\n";
        assert!(ask(&server, "/livez", good).await.starts_with("HTTP/1.1 200"));
    }

    #[tokio::test]
    async fn closing_does_not_wait_for_an_idle_connection() {
        let (server, _) = start(None).await;
        let _idle = TcpStream::connect(server.address()).await.unwrap();
        tokio::time::timeout(Duration::from_secs(10), server.close()).await.unwrap();
    }
}
