//! The health URL.

use inboxd_contract::{Forwarder, Severity};
use inboxd_http::{HttpConfig, HttpConfigError, HttpForwarder};
use secrecy::SecretString;

use crate::support::{Connection, OK, Raw, config};

const SICK: &[u8] =
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 17\r\n\r\nno database\r\nyet\n";

fn with_health(callback: String, health_url: &str) -> HttpConfig {
    HttpConfig { health_url: Some(health_url.to_owned()), ..config(callback) }
}

fn made(config: HttpConfig) -> HttpForwarder {
    HttpForwarder::new(config).expect("a valid configuration")
}

#[tokio::test]
async fn a_path_is_asked_on_the_callback_s_host_with_its_headers_and_no_body() {
    let raw = Raw::answering(OK).await;
    let mut config = with_health(format!("http://me:secret@{}/orders", raw.addr), "/health?deep=1");
    config.fixed_headers.push(("X-Key".into(), SecretString::from("k")));
    let forwarder = made(config);
    assert!(forwarder.has_health());
    assert_eq!(forwarder.probe().await, Ok(()));
    assert_eq!(forwarder.probe().await, Ok(()));
    let requests = raw.requests();
    assert_eq!(requests.len(), 2);
    let head = &requests[0];
    assert!(head.lines()[0].starts_with("GET /health?deep=1 HTTP/1.1"), "{}", head.lines()[0]);
    assert_eq!(head.value("x-key"), Some("k"));
    assert_eq!(head.value("authorization"), Some("Basic bWU6c2VjcmV0"));
    assert!(head.body.is_empty());
}

#[tokio::test]
async fn another_host_is_asked_and_gets_nothing_that_is_the_callback_s() {
    let (app, other) = (Raw::answering(OK).await, Raw::answering(OK).await);
    let mut config = with_health(
        format!("http://me:secret@{}/orders", app.addr),
        &format!("http://{}/up", other.addr),
    );
    config.fixed_headers.push(("Authorization".into(), SecretString::from("Bearer t")));
    assert_eq!(made(config).probe().await, Ok(()));
    assert!(app.requests().is_empty());
    assert_eq!(other.requests()[0].value("authorization"), None);
}

#[tokio::test]
async fn anything_but_2xx_is_unwell_and_says_why_without_secrets() {
    let raw = Raw::answering(SICK).await;
    let forwarder = made(with_health(format!("http://{}/", raw.addr), "/health?key=secret"));
    let said = forwarder.probe().await.unwrap_err();
    assert!(said.contains("/health?\u{2026}: 503: no database  yet"), "{said}");
    assert!(!said.contains("secret"), "{said}");

    let moved =
        Raw::answering(b"HTTP/1.1 302 Found\r\nlocation: /\r\ncontent-length: 0\r\n\r\n").await;
    let forwarder = made(with_health(format!("http://{}/", moved.addr), "/health"));
    assert!(forwarder.probe().await.unwrap_err().ends_with("/health: 302"));
    assert_eq!(moved.requests().len(), 1, "a redirect is not followed");
}

#[tokio::test]
async fn one_that_does_not_answer_has_a_timeout_of_its_own() {
    let raw = Raw::start(|mut connection: Connection| async move {
        connection.read().await;
        std::future::pending::<()>().await;
    })
    .await;
    let mut config = with_health(format!("http://{}/", raw.addr), "/health");
    config.health_timeout = std::time::Duration::from_millis(200);
    let said = made(config).probe().await.unwrap_err();
    assert!(said.contains("no answer within 200ms"), "{said}");
}

#[tokio::test]
async fn a_unix_socket_s_path_is_asked_there() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("app.sock");
    let listener = tokio::net::UnixListener::bind(&path).unwrap();
    let served = tokio::spawn(async move {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut bytes = vec![0; 4_096];
        let read = stream.read(&mut bytes).await.unwrap();
        stream.write_all(OK).await.unwrap();
        String::from_utf8_lossy(&bytes[..read]).into_owned()
    });
    let forwarder = made(with_health(format!("unix:{}:/orders", path.display()), "/health"));
    assert_eq!(forwarder.probe().await, Ok(()));
    assert!(served.await.unwrap().starts_with("GET /health HTTP/1.1"));
}

/// `inboxd check --connect` tells of both.
#[tokio::test]
async fn it_is_inspected_beside_the_callback() {
    let sick = Raw::answering(SICK).await;
    let health_url = format!("http://{}/health", sick.addr);
    let raw = Raw::start(|mut connection: Connection| async move {
        let mut bytes = [0; 4_096];
        use tokio::io::AsyncReadExt;
        while connection.stream.read(&mut bytes).await.is_ok_and(|read| read > 0) {
            connection.write(OK).await;
        }
    })
    .await;
    let findings = made(with_health(format!("http://{}/", raw.addr), &health_url)).inspect().await;
    let severities: Vec<_> = findings.iter().map(|finding| finding.severity).collect();
    assert_eq!(severities, [Severity::Info, Severity::Problem], "{findings:?}");
    assert!(findings[1].what.contains("503: no database"), "{findings:?}");
}

#[test]
fn what_is_no_url_is_refused_under_its_own_name() {
    for bad in ["health", "//elsewhere/health", "ftp://a/"] {
        let error = HttpForwarder::new(with_health("http://a/".into(), bad)).err().unwrap();
        assert!(matches!(error, HttpConfigError::HealthUrl(_)), "{bad}: {error}");
        assert!(error.to_string().starts_with("health_url: "), "{error}");
    }
}
