//! The listeners: `/livez`, `/readyz`, `/metrics`, and for operators the API below `/v1`.
//!
//! Invariants: a listener serves a bounded number of connections, each for a bounded time, and
//! reads a bounded head within a bounded time; no body is read. HTTP/1.1 alone is spoken.
//! Every request passes the [`Guard`].

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Extension, Json, Router, middleware};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use secrecy::SecretString;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::api::{Api, Peer};
use super::guard::{Guard, guard};
use super::health::HealthRegistry;
use super::operator::Operator;
use super::problem::Problem;
use super::routes;
use crate::telemetry::Metrics;

/// How long answers under way may take once the listener closes.
const CLOSE_WITHIN: Duration = Duration::from_millis(500);
/// More wait in the kernel's queue until one has ended.
const CONNECTIONS_MAX: usize = 64;
/// For the head of each request, the wait for it included.
const HEAD_WITHIN: Duration = Duration::from_secs(10);
/// Request line and headers.
const HEAD_BYTES_MAX: usize = 16 * 1024;
const HEADER_LINES_MAX: usize = 64;
/// A connection to a listener without a token, whose peer may be anybody and may read slowly.
const PROBE_CONNECTION_MAX: Duration = Duration::from_secs(60);
/// A connection to the operators' listener; a drain answers after up to an hour.
const API_CONNECTION_MAX: Duration = Duration::from_secs(2 * 60 * 60);
/// After an accept that failed, mostly for want of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

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
    /// Binds and serves probes and metrics, and with an operator the API too. With a token, every
    /// request must carry it as a bearer token; with TLS, every connection begins with it.
    ///
    /// # Errors
    /// The address cannot be bound.
    pub async fn start(
        address: SocketAddr,
        endpoints: Endpoints,
        operator: Option<Arc<dyn Operator>>,
        token: Option<&SecretString>,
        tls: Option<TlsAcceptor>,
    ) -> io::Result<Self> {
        let listener = TcpListener::bind(address).await?;
        let address = listener.local_addr()?;
        let stop = CancellationToken::new();
        let longest = match operator {
            Some(_) => API_CONNECTION_MAX,
            None => PROBE_CONNECTION_MAX,
        };
        let router = router(endpoints, operator, Guard::new(address, token));
        let how = How { router, tls, longest };
        let task = tokio::spawn(serve(listener, how, stop.clone()));
        Ok(Self { address, stop, task: Some(task) })
    }

    /// Where it listens: with port 0 in the configuration, the port that it got.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Stops listening; answers under way have half a second.
    pub async fn close(mut self) {
        self.stop.cancel();
        if let Some(task) = self.task.take()
            && let Err(error) = task.await
        {
            tracing::error!(address = %self.address, %error, "a listener ended");
        }
    }
}

impl Drop for AdminServer {
    fn drop(&mut self) {
        self.stop.cancel();
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

/// How connections of a listener are served.
struct How {
    router: Router,
    tls: Option<TlsAcceptor>,
    longest: Duration,
}

/// Accepts until `stop`, then lets answers under way end.
async fn serve(listener: TcpListener, how: How, stop: CancellationToken) {
    let slots = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let connections = TaskTracker::new();
    // Cut with this task, however it ends.
    let cut = CancellationToken::new();
    let _cut = cut.clone().drop_guard();
    loop {
        let accepted = async {
            // Never closed.
            let slot = slots.clone().acquire_owned().await.ok();
            (slot, listener.accept().await)
        };
        let (slot, accepted) = tokio::select! {
            biased;
            () = stop.cancelled() => break,
            accepted = accepted => accepted,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::debug!(%error, "a connection was not accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let (stop, cut) = (stop.clone(), cut.clone());
        let router = how.router.clone().layer(Extension(Peer(peer)));
        let (tls, longest) = (how.tls.clone(), how.longest);
        connections.spawn(async move {
            tokio::select! {
                () = cut.cancelled() => {}
                () = shake_hands(stream, tls, router, longest, stop) => {}
            }
            drop(slot);
        });
    }
    drop(listener);
    connections.close();
    let _ = tokio::time::timeout(CLOSE_WITHIN, connections.wait()).await;
}

/// TLS first, where there is TLS.
async fn shake_hands(
    stream: TcpStream,
    tls: Option<TlsAcceptor>,
    router: Router,
    longest: Duration,
    stop: CancellationToken,
) {
    let _ = stream.set_nodelay(true);
    let Some(tls) = tls else { return answer(stream, router, longest, stop).await };
    let shaken = tokio::select! {
        biased;
        () = stop.cancelled() => return,
        shaken = tokio::time::timeout(HEAD_WITHIN, tls.accept(stream)) => shaken,
    };
    match shaken {
        Ok(Ok(stream)) => answer(stream, router, longest, stop).await,
        Ok(Err(error)) => tracing::debug!(%error, "a TLS handshake with a listener failed"),
        Err(_) => tracing::debug!("a TLS handshake with a listener took too long"),
    }
}

/// Serves one connection: until its peer leaves, it is told to stop, or its time is over.
async fn answer<S>(stream: S, router: Router, longest: Duration, stop: CancellationToken)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_WITHIN)
        .max_buf_size(HEAD_BYTES_MAX)
        .max_headers(HEADER_LINES_MAX)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    tokio::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.as_mut().await
        }
        () = tokio::time::sleep(longest) => return,
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection to a listener ended");
    }
}

fn router(endpoints: Endpoints, operator: Option<Arc<dyn Operator>>, rules: Guard) -> Router {
    let probes = Router::new()
        .route("/livez", get(livez))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics))
        .with_state(endpoints);
    let router = match operator {
        Some(operator) => probes.merge(routes::router(Api::new(operator))),
        None => probes,
    };
    router
        .fallback(async || Problem::new(StatusCode::NOT_FOUND, "no_such_path", "nothing is here"))
        .method_not_allowed_fallback(other_method)
        .layer(middleware::from_fn_with_state(rules, guard))
}

/// `Allow` is put there by the router.
async fn other_method(method: Method) -> Response {
    if method == Method::OPTIONS {
        return StatusCode::NO_CONTENT.into_response();
    }
    let detail = "the path is right, the method is not: Allow says which are";
    Problem::new(StatusCode::METHOD_NOT_ALLOWED, "wrong_method", detail).into_response()
}

async fn livez(State(endpoints): State<Endpoints>) -> Response {
    let liveness = endpoints.health.liveness();
    (status(liveness.live), Json(liveness)).into_response()
}

async fn readyz(State(endpoints): State<Endpoints>) -> Response {
    let readiness = endpoints.health.readiness();
    (status(readiness.ready), Json(readiness)).into_response()
}

async fn metrics(State(endpoints): State<Endpoints>, headers: HeaderMap) -> Response {
    let accept: Vec<_> =
        headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok()).collect();
    let (content_type, text) = endpoints.metrics.encode_for(&accept.join(","));
    ([(header::CONTENT_TYPE, content_type)], text).into_response()
}

fn status(good: bool) -> StatusCode {
    if good { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpStream;

    use super::*;
    use crate::telemetry::METRICS_CONTENT_TYPE;

    async fn start(token: Option<&SecretString>) -> (AdminServer, HealthRegistry) {
        let health = HealthRegistry::new(Duration::from_secs(60));
        let endpoints = Endpoints { health: health.clone(), metrics: Metrics::new() };
        let server = AdminServer::start(([127, 0, 0, 1], 0).into(), endpoints, None, token, None)
            .await
            .unwrap();
        (server, health)
    }

    /// The whole answer to a GET.
    async fn ask(server: &AdminServer, path: &str, headers: &str) -> String {
        let mut stream = TcpStream::connect(server.address()).await.unwrap();
        let request =
            format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}\r\n");
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
        health.set_draining("told to stop");
        let answer = ask(&server, "/readyz", "").await;
        assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("\"draining\":true"));
        assert!(ask(&server, "/livez", "").await.starts_with("HTTP/1.1 200"));
        server.close().await;
    }

    #[tokio::test]
    async fn metrics_are_in_the_format_that_is_asked_for() {
        let (server, _) = start(None).await;
        let openmetrics =
            "Accept: application/openmetrics-text;version=1.0.0;q=0.75,text/plain\r\n";
        let answer = ask(&server, "/metrics", openmetrics).await;
        assert!(answer.contains(METRICS_CONTENT_TYPE) && answer.contains("# EOF"), "{answer}");
        for plain in ["", "Accept: text/plain;version=0.0.4\r\n", "Accept: */*\r\n"] {
            let answer = ask(&server, "/metrics", plain).await;
            assert!(answer.contains("text/plain; version=0.0.4"), "{answer}");
            assert!(answer.contains("# TYPE inboxd_sweeps_total counter"), "{answer}");
            assert!(!answer.contains("# EOF"), "{answer}");
        }
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
