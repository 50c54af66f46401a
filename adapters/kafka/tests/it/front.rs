//! Puts a proxy in the way of a Kafka client.
//!
//! A client follows the addresses that brokers advertise, so a proxy alone is left aside after
//! the first connection. This front stands between proxy and broker and puts the proxy's port
//! in the place of the broker's in every answer.

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use inboxd_conformance::net::Proxy;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};

const HOST: &[u8] = b"127.0.0.1";

/// A broker behind a [`Proxy`]; dropped, both are gone.
pub struct FrontedBroker {
    pub proxy: Proxy,
    accepting: JoinHandle<()>,
}

impl FrontedBroker {
    /// Stands before the broker at `127.0.0.1:<port>`.
    pub async fn start(broker: &str) -> Self {
        let port: u16 = broker.rsplit(':').next().and_then(|p| p.parse().ok()).expect("a port");
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let front = listener.local_addr().expect("an address");
        let advertised = Arc::new(AtomicU16::new(0));
        let proxy = Proxy::start(front).await;
        advertised.store(proxy.port(), Ordering::SeqCst);
        let accepting = tokio::spawn(async move {
            let mut running = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                let advertised = Arc::clone(&advertised);
                running.spawn(forward(client, port, advertised));
            }
        });
        Self { proxy, accepting }
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

async fn forward(client: TcpStream, port: u16, advertised: Arc<AtomicU16>) {
    let Ok(broker) = TcpStream::connect(("127.0.0.1", port)).await else { return };
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_broker, mut to_broker) = broker.into_split();
    let requests = async move {
        let _ = tokio::io::copy(&mut from_client, &mut to_broker).await;
    };
    let answers = async move {
        let mut size = [0; 4];
        while from_broker.read_exact(&mut size).await.is_ok() {
            let mut frame = vec![0; u32::from_be_bytes(size) as usize];
            if from_broker.read_exact(&mut frame).await.is_err() {
                return;
            }
            replace(&mut frame, port, advertised.load(Ordering::SeqCst));
            if to_client.write_all(&size).await.is_err()
                || to_client.write_all(&frame).await.is_err()
            {
                return;
            }
        }
    };
    // Whichever side ends, the connection is over.
    tokio::select! {
        () = requests => {}
        () = answers => {}
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
