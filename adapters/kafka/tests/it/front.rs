//! Puts a proxy in the way of a Kafka client.
//!
//! A client follows the addresses that brokers advertise, so a proxy alone is left aside after
//! the first connection. This front stands between proxy and broker and puts the proxy's port
//! in the place of the broker's in every answer.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};

use inboxd_conformance::net::Proxy;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};

const HOST: &[u8] = b"127.0.0.1";
/// What is changed on its way, so that a record's checksum is wrong.
pub const CORRUPTED: &str = "corrupted on its way";
/// A header's name whose length is changed on its way, so that the headers cannot be read.
pub const OVERLONG: &str = "longer than it is";
const API_VERSIONS: u16 = 18;
const SASL_HANDSHAKE: u16 = 17;
const SASL_AUTHENTICATE: u16 = 36;
const SASL_AUTHENTICATION_FAILED: u16 = 58;

/// A broker behind a [`Proxy`]; dropped, both are gone.
pub struct FrontedBroker {
    pub proxy: Proxy,
    /// Records with [`CORRUPTED`] or [`OVERLONG`] in them are changed on their way.
    pub corrupts: Arc<AtomicBool>,
    accepting: JoinHandle<()>,
}

impl FrontedBroker {
    /// Stands before the broker at `127.0.0.1:<port>`.
    pub async fn start(broker: &str) -> Self {
        Self::start_guarded(broker, None).await
    }

    /// The same, and asks for SASL PLAIN with this user and password.
    pub async fn start_guarded(broker: &str, login: Option<(&str, &str)>) -> Self {
        let login = login.map(|(user, password)| format!("\0{user}\0{password}").into_bytes());
        let login = Arc::new(login);
        let port: u16 = broker.rsplit(':').next().and_then(|p| p.parse().ok()).expect("a port");
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let front = listener.local_addr().expect("an address");
        let advertised = Arc::new(AtomicU16::new(0));
        let proxy = Proxy::start(front).await;
        advertised.store(proxy.port(), Ordering::SeqCst);
        let corrupts = Arc::new(AtomicBool::new(false));
        let corrupting = Arc::clone(&corrupts);
        let accepting = tokio::spawn(async move {
            let mut running = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                let (advertised, login) = (Arc::clone(&advertised), Arc::clone(&login));
                let corrupting = Arc::clone(&corrupting);
                running.spawn(async move {
                    let _ =
                        forward(client, port, (&advertised, &corrupting), login.as_deref()).await;
                });
            }
        });
        Self { proxy, corrupts, accepting }
    }

    /// What clients are told.
    pub fn address(&self) -> String {
        self.proxy.addr.to_string()
    }
}

impl Drop for FrontedBroker {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn forward(
    mut client: TcpStream,
    port: u16,
    (advertised, corrupts): (&AtomicU16, &AtomicBool),
    login: Option<&[u8]>,
) -> io::Result<()> {
    let mut broker = TcpStream::connect(("127.0.0.1", port)).await?;
    if let Some(login) = login {
        guard(&mut client, &mut broker, login).await?;
    }
    let (mut from_client, mut to_client) = client.split();
    let (mut from_broker, mut to_broker) = broker.split();
    let requests = tokio::io::copy(&mut from_client, &mut to_broker);
    let answers = async {
        loop {
            let mut frame = read(&mut from_broker).await?;
            replace(&mut frame, port, advertised.load(Ordering::SeqCst));
            if corrupts.load(Ordering::SeqCst) {
                corrupt(&mut frame);
            }
            write(&mut to_client, &frame).await?;
        }
    };
    // Whichever side ends, the connection is over.
    tokio::select! {
        ended = requests => ended.map(drop),
        ended = answers => ended,
    }
}

/// Answers the SASL requests of a connection's beginning; anything but a question for
/// versions before them ends it.
async fn guard(client: &mut TcpStream, broker: &mut TcpStream, login: &[u8]) -> io::Result<()> {
    loop {
        let request = read(client).await?;
        let (key, correlation) = (&request[..2], &request[4..8]);
        match u16::from_be_bytes([key[0], key[1]]) {
            API_VERSIONS => {
                write(broker, &request).await?;
                let answer = read(broker).await?;
                write(client, &answer).await?;
            }
            SASL_HANDSHAKE => {
                // No error; one mechanism.
                let body = [&[0, 0, 0, 0, 0, 1, 0, 5][..], b"PLAIN"].concat();
                write(client, &[correlation, &body].concat()).await?;
            }
            SASL_AUTHENTICATE => {
                let welcome = request.ends_with(login);
                let code = if welcome { 0 } else { SASL_AUTHENTICATION_FAILED };
                // Error, its message (null), bytes (none), lifetime of the session (unlimited).
                let body = [&code.to_be_bytes()[..], &[0xff, 0xff], &[0; 4], &[0; 8]].concat();
                write(client, &[correlation, &body].concat()).await?;
                if welcome {
                    return Ok(());
                }
            }
            other => return Err(io::Error::other(format!("api {other} before the login"))),
        }
    }
}

/// One frame, without its size.
async fn read(from: &mut (impl AsyncRead + Unpin)) -> io::Result<Vec<u8>> {
    let mut frame = vec![0; from.read_u32().await? as usize];
    from.read_exact(&mut frame).await?;
    Ok(frame)
}

async fn write(to: &mut (impl AsyncWrite + Unpin), frame: &[u8]) -> io::Result<()> {
    let size = u32::try_from(frame.len()).map_err(io::Error::other)?;
    to.write_all(&[&size.to_be_bytes(), frame].concat()).await
}

fn corrupt(frame: &mut [u8]) {
    let found = frame.windows(CORRUPTED.len()).position(|part| part == CORRUPTED.as_bytes());
    if let Some(found) = found {
        frame[found] ^= 1;
    }
    let found = frame.windows(OVERLONG.len()).position(|part| part == OVERLONG.as_bytes());
    if let Some(found) = found {
        // 63, which is more than is left of the record.
        frame[found - 1] = 63 << 1;
    }
}

/// Every `host` that is followed by `old` as a big-endian number of four bytes.
fn replace(frame: &mut [u8], old: u16, new: u16) {
    let pattern = [HOST, &u32::from(old).to_be_bytes()].concat();
    let mut start = 0;
    while let Some(found) = frame[start..].windows(pattern.len()).position(|part| part == pattern) {
        let port = start + found + HOST.len();
        frame[port..port + 4].copy_from_slice(&u32::from(new).to_be_bytes());
        start = port + 4;
    }
}
