//! The suite that every forwarder passes, over TCP, a Unix socket, and HTTP/2.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use inboxd_conformance::app::{Answer, App, Post};
use inboxd_conformance::forward::{self, Application, Behaviour, ForwardHarness, Seen};
use inboxd_contract::{Forwarder, decode_percent};
use inboxd_http::{HttpConfig, HttpForwarder};

use crate::support::config;

#[derive(Clone, Copy)]
enum Way {
    Tcp,
    Unix,
    Http2,
}

#[async_trait]
impl ForwardHarness for Way {
    fn adapter(&self) -> &'static str {
        match self {
            Self::Tcp => "http",
            Self::Unix => "http-unix",
            Self::Http2 => "http-h2",
        }
    }

    async fn fresh(&self) -> Box<dyn Application> {
        let dir = tempfile::tempdir().expect("a directory");
        let app = match self {
            Self::Unix => App::start_unix(dir.path().join("app.sock")).await,
            Self::Tcp | Self::Http2 => App::start().await,
        };
        let config = HttpConfig {
            http2_prior_knowledge: matches!(self, Self::Http2),
            ..config(app.url("/orders"))
        };
        let forwarder = Arc::new(HttpForwarder::new(config).expect("valid"));
        Box::new(Http { app, forwarder, _dir: dir })
    }
}

struct Http {
    app: App,
    forwarder: Arc<HttpForwarder>,
    _dir: tempfile::TempDir,
}

#[async_trait]
impl Application for Http {
    fn forwarder(&self) -> Arc<dyn Forwarder> {
        Arc::clone(&self.forwarder) as Arc<dyn Forwarder>
    }

    fn plan(&self, behaviours: Vec<Behaviour>) {
        let mut behaviours = behaviours.into_iter();
        self.app.plan_with(move |_| behaviours.next().map(answer));
    }

    fn seen(&self) -> Vec<Seen> {
        self.app.ledger().all().into_iter().map(seen).collect()
    }

    async fn set_reachable(&mut self, reachable: bool) {
        match reachable {
            true => self.app.restart().await,
            false => self.app.stop().await,
        }
    }
}

fn answer(behaviour: Behaviour) -> Answer {
    match behaviour {
        Behaviour::Status(status) => Answer::status(status),
        Behaviour::RetryAfter(status, seconds) => {
            Answer::status(status).header("retry-after", &seconds.to_string())
        }
        Behaviour::After(delay, status) => Answer::status(status).after(delay),
        Behaviour::LostAnswer => Answer::lost(200),
        Behaviour::Hang => Answer::status(200).after(Duration::from_secs(3_600)),
    }
}

fn seen(post: Post) -> Seen {
    let decoded = |name: &str| post.header(name).map(|value| decode_percent(&value));
    let text = |name: &str| String::from_utf8(decoded(name).unwrap_or_default()).expect("UTF-8");
    assert_eq!((post.method.as_str(), post.path.as_str()), ("POST", "/orders"));
    Seen {
        message_id: text("inbox-message-id"),
        consumer_id: text("inbox-consumer-id"),
        subscription: text("inbox-subscription"),
        attempt: post.attempt,
        ordering_key: decoded("inbox-ordering-key"),
        body: post.body.filter(|_| post.headers.iter().all(|(name, _)| name != "inbox-tombstone")),
    }
}

#[tokio::test]
async fn http_conforms() {
    forward::run(Way::Tcp).await;
}

#[tokio::test]
async fn http_over_a_unix_socket_conforms() {
    forward::run(Way::Unix).await;
}

#[tokio::test]
async fn http2_conforms() {
    forward::run(Way::Http2).await;
}
