//! A publisher that writes frames itself: what other clients can send and the test's own cannot.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use inboxd_rabbitmq::RabbitMqConfig;
use secrecy::ExposeSecret;

/// Flags of the properties.
pub const HEADERS: u16 = 1 << 13;
pub const MESSAGE_ID: u16 = 1 << 7;
pub const TYPE: u16 = 1 << 5;

/// Less than the frame size that is agreed on.
const BODY_BYTES_MAX: usize = 100_000;

pub struct RawPublisher(TcpStream);

/// A short string.
pub fn short(text: &[u8]) -> Vec<u8> {
    let length = u8::try_from(text.len()).expect("a short string");
    [&[length], text].concat()
}

/// A long string, table or array: its length and itself.
pub fn long(bytes: &[u8]) -> Vec<u8> {
    let length = u32::try_from(bytes.len()).expect("a long string").to_be_bytes();
    [&length, bytes].concat()
}

impl RawPublisher {
    pub async fn connect(config: &RabbitMqConfig) -> Self {
        let (host, port) = &config.hosts[0];
        let stream = TcpStream::connect((host.as_str(), *port)).await.expect("the broker listens");
        let mut this = Self(stream);
        this.0.write_all(b"AMQP\0\0\x09\x01").await.expect("written");
        this.expect(&[0, 10, 0, 10]).await;
        let (user, password) = (&config.user, config.password.expose_secret());
        let login = long(format!("\0{user}\0{password}").as_bytes());
        let start_ok =
            [&[0, 10, 0, 11][..], &long(b""), &short(b"PLAIN"), &login, &short(b"en_US")];
        this.method(0, &start_ok.concat()).await;
        this.expect(&[0, 10, 0, 30]).await;
        this.method(0, &[0, 10, 0, 31, 7, 255, 0, 2, 0, 0, 0, 0]).await;
        let open = [&[0, 10, 0, 40][..], &short(config.vhost.as_bytes()), &[0, 0]].concat();
        this.method(0, &open).await;
        this.expect(&[0, 10, 0, 41]).await;
        this.method(1, &[0, 20, 0, 10, 0]).await;
        this.expect(&[0, 20, 0, 11]).await;
        // Confirms.
        this.method(1, &[0, 85, 0, 10, 0]).await;
        this.expect(&[0, 85, 0, 11]).await;
        this
    }

    /// Publishes with the properties' bytes as they are, and waits for the confirm.
    pub async fn publish(
        &mut self,
        (exchange, routing_key): (&[u8], &[u8]),
        flags: u16,
        properties: &[u8],
        body: &[u8],
    ) {
        let publish =
            [&[0, 60, 0, 40, 0, 0][..], &short(exchange), &short(routing_key), &[0]].concat();
        self.method(1, &publish).await;
        let size = u64::try_from(body.len()).expect("a size").to_be_bytes();
        let header = [&[0, 60, 0, 0][..], &size, &flags.to_be_bytes(), properties].concat();
        self.frame(2, 1, &header).await;
        for chunk in body.chunks(BODY_BYTES_MAX) {
            self.frame(3, 1, chunk).await;
        }
        self.expect(&[0, 60, 0, 80]).await;
    }

    async fn method(&mut self, channel: u16, payload: &[u8]) {
        self.frame(1, channel, payload).await;
    }

    async fn frame(&mut self, kind: u8, channel: u16, payload: &[u8]) {
        let frame = [&[kind][..], &channel.to_be_bytes(), &long(payload), &[0xce]].concat();
        self.0.write_all(&frame).await.expect("written");
    }

    /// The next frame is this method.
    async fn expect(&mut self, method: &[u8; 4]) {
        let mut head = [0; 7];
        self.0.read_exact(&mut head).await.expect("a frame");
        let size = u32::from_be_bytes([head[3], head[4], head[5], head[6]]);
        let mut payload = vec![0; usize::try_from(size).expect("a size") + 1];
        self.0.read_exact(&mut payload).await.expect("a frame");
        assert_eq!(&payload[..4], method, "{:?}", String::from_utf8_lossy(&payload));
    }
}
