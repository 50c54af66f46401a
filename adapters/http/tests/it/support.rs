//! A server that shows the bytes as they came and answers whatever it is told, and messages.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use inboxd_contract::{
    ConsumerId, Envelope, ForwardRequest, Forwarder, Header, InboxKey, MessageId, Origin,
    RetryReason, Verdict,
};
use inboxd_http::{HttpConfig, HttpForwarder, ProxyVariables};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

pub const AMPLE: Duration = Duration::from_secs(30);
pub const ACCEPTED: Verdict = Verdict::Accepted { status: 200 };
pub const OK: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n";

/// The defaults, without the proxies of whoever runs the tests.
pub fn config(callback: impl Into<String>) -> HttpConfig {
    HttpConfig { proxies: ProxyVariables::default(), ..HttpConfig::new(callback) }
}

pub fn forwarder(callback: impl Into<String>) -> HttpForwarder {
    HttpForwarder::new(config(callback)).expect("a valid configuration")
}

/// A message to be sent.
pub struct Message {
    pub envelope: Envelope,
    pub key: InboxKey,
    pub ordering_key: Option<Vec<u8>>,
    pub attempt: u32,
    pub timeout: Duration,
}

impl Message {
    pub fn new(id: &str) -> Self {
        let origin = Origin::Kafka {
            topic: "orders".into(),
            partition: 3,
            offset: 42,
            position_scope: None,
        };
        Self {
            envelope: Envelope::new(origin, Some(Bytes::from_static(b"{}"))),
            key: InboxKey {
                consumer_id: ConsumerId::new("billing").expect("valid"),
                message_id: MessageId::from_bytes(id.as_bytes()).expect("not blank"),
            },
            ordering_key: None,
            attempt: 1,
            timeout: AMPLE,
        }
    }

    pub fn with_headers<'a>(headers: impl IntoIterator<Item = (&'a [u8], &'a [u8])>) -> Self {
        let mut message = Self::new("m");
        for (name, value) in headers {
            message.header(name, value);
        }
        message
    }

    pub fn header(&mut self, name: &[u8], value: &[u8]) {
        let header = Header::new(Bytes::copy_from_slice(name), Bytes::copy_from_slice(value));
        self.envelope.headers.push(header);
    }

    pub fn within(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    pub async fn send(&self, forwarder: &HttpForwarder) -> Verdict {
        let request = ForwardRequest {
            envelope: &self.envelope,
            key: &self.key,
            subscription: "orders",
            attempt: self.attempt,
            ordering_key: self.ordering_key.as_deref(),
            timeout: self.timeout,
            path: None,
            trace: None,
        };
        forwarder.forward(request).await
    }
}

pub fn reason(verdict: &Verdict) -> Option<RetryReason> {
    match verdict {
        Verdict::Retry { reason, .. } => Some(*reason),
        _ => None,
    }
}

/// One request as bytes.
#[derive(Debug, Clone)]
pub struct RawRequest {
    pub head: String,
    pub body: Vec<u8>,
}

impl RawRequest {
    pub fn lines(&self) -> Vec<&str> {
        self.head.split("\r\n").filter(|line| !line.is_empty()).collect()
    }

    /// The values of a header in order, exactly as on the wire.
    pub fn values(&self, name: &str) -> Vec<&str> {
        let of_name = |line: &&str| line.split(": ").next() == Some(name);
        let lines = self.lines().into_iter().skip(1).filter(of_name);
        lines.map(|line| line.split_once(": ").expect("a header").1).collect()
    }

    /// The only value of a header.
    pub fn value(&self, name: &str) -> Option<&str> {
        let values = self.values(name);
        assert!(values.len() <= 1, "{name} came {} times", values.len());
        values.first().copied()
    }

    pub fn names(&self) -> Vec<&str> {
        let lines = self.lines().into_iter().skip(1);
        lines.filter_map(|line| line.split(": ").next()).collect()
    }
}

/// Reads one request; none at the connection's end. A head that is not ASCII fails the test:
/// nothing that we send may have such bytes.
pub async fn read_request(stream: &mut TcpStream) -> Option<RawRequest> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.ok()?);
    }
    assert!(head.is_ascii(), "{}", String::from_utf8_lossy(&head));
    let head = String::from_utf8(head).expect("ASCII");
    let request = RawRequest { head, body: Vec::new() };
    let lengths = request.values("content-length");
    if request.head.starts_with("GET ") {
        assert!(lengths.is_empty(), "no body: {}", request.head);
        return Some(request);
    }
    assert_eq!(lengths.len(), 1, "one length: {}", request.head);
    assert!(request.values("transfer-encoding").is_empty(), "{}", request.head);
    let mut body = vec![0; lengths[0].parse().expect("a length")];
    stream.read_exact(&mut body).await.ok()?;
    Some(RawRequest { body, ..request })
}

/// A server of raw bytes. Dropped: ends.
pub struct Raw {
    pub addr: SocketAddr,
    requests: Arc<Mutex<Vec<RawRequest>>>,
    task: JoinHandle<()>,
}

impl Raw {
    /// Answers every request of every connection with `response`.
    pub async fn answering(response: impl Into<Vec<u8>>) -> Self {
        let response: Arc<[u8]> = response.into().into();
        Self::start(move |mut connection| {
            let response = Arc::clone(&response);
            async move {
                while connection.read().await.is_some() {
                    connection.write(&response).await;
                }
            }
        })
        .await
    }

    /// Runs `serve` for every connection.
    pub async fn start<F>(serve: impl Fn(Connection) -> F + Send + 'static) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let addr = listener.local_addr().expect("bound");
        let requests = Arc::new(Mutex::new(Vec::new()));
        let recorded = Arc::clone(&requests);
        let task = tokio::spawn(async move {
            let mut running = tokio::task::JoinSet::new();
            let mut index = 0;
            while let Ok((stream, _)) = listener.accept().await {
                let requests = Arc::clone(&recorded);
                running.spawn(serve(Connection { index, stream, requests }));
                index += 1;
            }
        });
        Self { addr, requests, task }
    }

    pub fn url(&self) -> String {
        format!("http://{}/orders", self.addr)
    }

    pub fn requests(&self) -> Vec<RawRequest> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The only request.
    pub fn request(&self) -> RawRequest {
        let requests = self.requests();
        assert_eq!(requests.len(), 1, "one request");
        requests[0].clone()
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// One connection to a [`Raw`] server.
pub struct Connection {
    /// From 0, in the order of acceptance.
    pub index: usize,
    pub stream: TcpStream,
    requests: Arc<Mutex<Vec<RawRequest>>>,
}

impl Connection {
    /// Reads and records one request.
    pub async fn read(&mut self) -> Option<RawRequest> {
        let request = read_request(&mut self.stream).await?;
        self.requests.lock().unwrap_or_else(PoisonError::into_inner).push(request.clone());
        Some(request)
    }

    pub async fn write(&mut self, bytes: &[u8]) {
        // The client may be gone: what it makes of the rest is what the test looks at.
        let _ = self.stream.write_all(bytes).await;
    }

    /// Waits until the client closes.
    pub async fn until_closed(&mut self) {
        let mut rest = Vec::new();
        let _ = self.stream.read_to_end(&mut rest).await;
    }
}
