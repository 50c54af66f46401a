//! A TCP proxy on loopback that injects faults, and ports that stay ours while nobody listens.
//!
//! Invariants: while a [`Proxy`] lives its port is nobody else's, also while it refuses
//! connections; faults act on every connection at once. Bytes are never altered, only held,
//! swallowed or cut off.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

const CHUNK: usize = 16 * 1024;
const BACKLOG: u32 = 1024;

/// A loopback port that is kept, whether somebody listens on it or not. While nobody does,
/// connections are refused; no other socket can be given the port meanwhile.
#[derive(Debug)]
pub struct ReservedPort {
    addr: SocketAddr,
    // Bound and never listening: what keeps the port.
    _holder: TcpSocket,
}

impl ReservedPort {
    /// Takes a free one.
    pub fn new() -> io::Result<Self> {
        let holder = socket(SocketAddr::from(([127, 0, 0, 1], 0)))?;
        Ok(Self { addr: holder.local_addr()?, _holder: holder })
    }

    /// Where it is.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Listens on it. Dropping the listener makes the port refuse connections again.
    pub fn listen(&self) -> io::Result<TcpListener> {
        socket(self.addr)?.listen(BACKLOG)
    }
}

fn socket(addr: SocketAddr) -> io::Result<TcpSocket> {
    let socket = TcpSocket::new_v4()?;
    socket.set_reuseaddr(true)?;
    socket.set_reuseport(true)?;
    socket.bind(addr)?;
    Ok(socket)
}

/// Which way bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the client to the target.
    ToServer,
    /// From the target to the client.
    ToClient,
}

/// What a hook decides about a chunk of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Act {
    /// Forward it.
    Pass,
    /// Forward its first bytes, then reset the connection on both sides.
    CutAfter(usize),
    /// Do not forward it, and nothing after it in this direction on this connection.
    Swallow,
}

/// What happens to bytes and to new connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Forward,
    /// New connections are refused.
    Refuse,
    /// Connections stay and are accepted; nothing is read, so nothing is lost either.
    BlackHole,
    /// What the target sends is read and thrown away.
    DropReplies,
}

type Hook = Box<dyn FnMut(usize, Direction, &[u8]) -> Act + Send>;

struct Shared {
    target: String,
    mode: watch::Sender<Mode>,
    // Cancelled and replaced to reset every connection of its generation.
    generation: Mutex<CancellationToken>,
    hook: Mutex<Option<Hook>>,
    open: AtomicUsize,
    accepted: AtomicUsize,
    tasks: TaskTracker,
}

/// A proxy between a client and `target`. Dropped: every connection is reset and the port freed.
pub struct Proxy {
    /// Where clients connect to.
    pub addr: SocketAddr,
    shared: Arc<Shared>,
    port: Arc<ReservedPort>,
    stop: CancellationToken,
}

impl fmt::Debug for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Proxy")
            .field("addr", &self.addr)
            .field("target", &self.shared.target)
            .finish_non_exhaustive()
    }
}

impl Proxy {
    /// Starts forwarding to `target` (`host:port`), which is connected to once per client.
    pub async fn start(target: impl ToString) -> Self {
        let port = Arc::new(ReservedPort::new().unwrap_or_else(|error| panic!("no port: {error}")));
        let (mode, modes) = watch::channel(Mode::Forward);
        let shared = Arc::new(Shared {
            target: target.to_string(),
            mode,
            generation: Mutex::new(CancellationToken::new()),
            hook: Mutex::new(None),
            open: AtomicUsize::new(0),
            accepted: AtomicUsize::new(0),
            tasks: TaskTracker::new(),
        });
        let stop = CancellationToken::new();
        let listener = port.listen().unwrap_or_else(|error| panic!("cannot listen: {error}"));
        let accept = accept_loop(Arc::clone(&shared), Arc::clone(&port), listener, modes);
        let stopped = stop.clone();
        shared.tasks.spawn(async move {
            tokio::select! {
                () = stopped.cancelled() => {}
                () = accept => {}
            }
        });
        Self { addr: port.addr(), shared, port, stop }
    }

    /// The proxy's port.
    pub fn port(&self) -> u16 {
        self.port.addr().port()
    }

    /// Resets every connection and refuses new ones, until [`Proxy::heal`].
    pub fn cut(&self) {
        self.shared.mode.send_replace(Mode::Refuse);
        self.sever();
    }

    /// Back to forwarding. What a black hole held flows on; connections that lost replies are
    /// reset, since their streams have a gap.
    pub fn heal(&self) {
        lock(&self.shared.hook).take();
        if self.shared.mode.send_replace(Mode::Forward) == Mode::DropReplies {
            self.sever();
        }
    }

    /// Keeps connections, accepts new ones, and forwards nothing either way: a half-open peer.
    pub fn black_hole(&self) {
        self.shared.mode.send_replace(Mode::BlackHole);
    }

    /// Forwards what clients send and throws away what the target answers.
    pub fn drop_replies(&self) {
        self.shared.mode.send_replace(Mode::DropReplies);
    }

    /// Resets the connection that receives the next `bytes`-th byte from the target, after that
    /// byte; counted over all connections from now. Once: what comes later is forwarded.
    pub fn cut_after_reply_bytes(&self, bytes: usize) {
        self.cut_after(Direction::ToClient, bytes);
    }

    /// The same, of bytes from clients to the target.
    pub fn cut_after_request_bytes(&self, bytes: usize) {
        self.cut_after(Direction::ToServer, bytes);
    }

    /// Asks `hook` about every chunk from now until [`Proxy::heal`]; replaces an earlier one.
    pub fn hook(&self, mut hook: impl FnMut(Direction, &[u8]) -> Act + Send + 'static) {
        self.hook_each(move |_, direction, bytes| hook(direction, bytes));
    }

    /// The same for a hook that tells connections apart: each has a number, counted from 0 in the
    /// order in which they were accepted.
    pub fn hook_each(&self, hook: impl FnMut(usize, Direction, &[u8]) -> Act + Send + 'static) {
        *lock(&self.shared.hook) = Some(Box::new(hook));
    }

    /// Resets every connection; new ones are accepted.
    pub fn sever(&self) {
        let old = std::mem::replace(&mut *lock(&self.shared.generation), CancellationToken::new());
        old.cancel();
    }

    /// Client connections that are open now.
    pub fn connections(&self) -> usize {
        self.shared.open.load(Ordering::SeqCst)
    }

    /// Client connections accepted since the start.
    pub fn accepted(&self) -> usize {
        self.shared.accepted.load(Ordering::SeqCst)
    }

    fn cut_after(&self, wanted: Direction, bytes: usize) {
        let mut left = Some(bytes);
        self.hook(move |direction, chunk| match left {
            Some(budget) if direction == wanted => {
                if chunk.len() >= budget {
                    left = None;
                    return Act::CutAfter(budget);
                }
                left = Some(budget - chunk.len());
                Act::Pass
            }
            _ => Act::Pass,
        });
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.stop.cancel();
        self.sever();
    }
}

async fn accept_loop(
    shared: Arc<Shared>,
    port: Arc<ReservedPort>,
    listener: TcpListener,
    mut modes: watch::Receiver<Mode>,
) {
    let mut listener = Some(listener);
    loop {
        if *modes.borrow_and_update() == Mode::Refuse {
            listener = None;
        } else if listener.is_none() {
            listener = port.listen().ok();
        }
        tokio::select! {
            changed = modes.changed() => if changed.is_err() { return },
            accepted = accept(listener.as_ref()) => {
                if let Ok(client) = accepted {
                    begin(&shared, client);
                }
            }
        }
    }
}

async fn accept(listener: Option<&TcpListener>) -> io::Result<TcpStream> {
    match listener {
        Some(listener) => listener.accept().await.map(|(stream, _)| stream),
        None => std::future::pending().await,
    }
}

fn begin(shared: &Arc<Shared>, client: TcpStream) {
    let number = shared.accepted.fetch_add(1, Ordering::SeqCst);
    let open = Open::new(Arc::clone(shared));
    let generation = lock(&shared.generation).clone();
    let _ = client.set_nodelay(true);
    // Dropping either stream resets its connection, unless both sides said goodbye.
    let _ = client.set_zero_linger();
    // Refused meanwhile: it was in the backlog. Its generation is that of connections to come,
    // which must not be reset with it.
    if *shared.mode.borrow() == Mode::Refuse {
        return;
    }
    shared.tasks.spawn(async move {
        tokio::select! {
            () = generation.cancelled() => {}
            () = run(&open.shared, number, client) => {}
        }
    });
}

/// Counts one open connection for as long as it lives.
struct Open {
    shared: Arc<Shared>,
}

impl Open {
    fn new(shared: Arc<Shared>) -> Self {
        shared.open.fetch_add(1, Ordering::SeqCst);
        Self { shared }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.shared.open.fetch_sub(1, Ordering::SeqCst);
    }
}

async fn run(shared: &Shared, number: usize, mut client: TcpStream) {
    let mut modes = shared.mode.subscribe();
    if modes.wait_for(|mode| *mode != Mode::BlackHole).await.is_err() {
        return;
    }
    let Ok(mut server) = TcpStream::connect(&shared.target).await else { return };
    let _ = server.set_nodelay(true);
    let _ = server.set_zero_linger();
    // Borrowed halves: owned ones would say goodbye (FIN) when dropped, before the reset.
    let (client_read, client_write) = client.split();
    let (server_read, server_write) = server.split();
    // An end of one direction is passed on and waits for the other's; a failure ends both.
    let _ = tokio::try_join!(
        copy(shared, number, Direction::ToServer, client_read, server_write),
        copy(shared, number, Direction::ToClient, server_read, client_write),
    );
}

/// The connection is to be reset.
struct Reset;

async fn copy(
    shared: &Shared,
    number: usize,
    direction: Direction,
    mut from: ReadHalf<'_>,
    mut to: WriteHalf<'_>,
) -> Result<(), Reset> {
    let mut modes = shared.mode.subscribe();
    let mut chunk = vec![0; CHUNK];
    let mut swallow = false;
    loop {
        let read = from.read(&mut chunk).await.map_err(|_| Reset)?;
        // What was read when the hole opened is held here, what came later in the kernel.
        let mode = *modes.wait_for(|mode| *mode != Mode::BlackHole).await.map_err(|_| Reset)?;
        if read == 0 {
            to.shutdown().await.map_err(|_| Reset)?;
            return Ok(());
        }
        swallow |= mode == Mode::DropReplies && direction == Direction::ToClient;
        let act = match lock(&shared.hook).as_mut() {
            Some(hook) if !swallow => hook(number, direction, &chunk[..read]),
            _ => Act::Pass,
        };
        match act {
            Act::Swallow => swallow = true,
            Act::Pass if swallow => {}
            Act::Pass => to.write_all(&chunk[..read]).await.map_err(|_| Reset)?,
            Act::CutAfter(bytes) => {
                to.write_all(&chunk[..bytes.min(read)]).await.map_err(|_| Reset)?;
                return Err(Reset);
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{ensure, eventually};

    const DEADLINE: Duration = Duration::from_secs(20);

    /// Answers every byte with itself.
    async fn echo() -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let (mut read, mut write) = stream.split();
                    let _ = tokio::io::copy(&mut read, &mut write).await;
                });
            }
        });
        addr
    }

    async fn round_trip(stream: &mut TcpStream, bytes: &[u8]) -> io::Result<Vec<u8>> {
        stream.write_all(bytes).await?;
        let mut answer = vec![0; bytes.len()];
        stream.read_exact(&mut answer).await?;
        Ok(answer)
    }

    #[tokio::test]
    async fn a_cut_resets_and_refuses_until_healed() {
        let proxy = Proxy::start(echo().await).await;
        let mut stream = TcpStream::connect(proxy.addr).await.unwrap();
        assert_eq!(round_trip(&mut stream, b"abc").await.unwrap(), b"abc");
        assert_eq!(proxy.connections(), 1);

        proxy.cut();
        assert!(round_trip(&mut stream, b"x").await.is_err());
        eventually(DEADLINE, async || match TcpStream::connect(proxy.addr).await {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(()),
            other => Err(format!("{other:?}")),
        })
        .await;
        eventually(DEADLINE, async || ensure(proxy.connections() == 0, proxy.connections())).await;

        proxy.heal();
        let mut stream = eventually(DEADLINE, async || TcpStream::connect(proxy.addr).await).await;
        assert_eq!(round_trip(&mut stream, b"abc").await.unwrap(), b"abc");
    }

    #[tokio::test]
    async fn a_black_hole_holds_bytes_and_lets_them_go() {
        let proxy = Proxy::start(echo().await).await;
        let mut stream = TcpStream::connect(proxy.addr).await.unwrap();
        round_trip(&mut stream, b"a").await.unwrap();
        proxy.black_hole();
        stream.write_all(b"b").await.unwrap();
        let mut answer = [0];
        let held =
            tokio::time::timeout(Duration::from_millis(100), stream.read_exact(&mut answer)).await;
        assert!(held.is_err());
        proxy.heal();
        stream.read_exact(&mut answer).await.unwrap();
        assert_eq!(&answer, b"b");
    }

    #[tokio::test]
    async fn replies_are_cut_after_so_many_bytes_once() {
        let proxy = Proxy::start(echo().await).await;
        let mut stream = TcpStream::connect(proxy.addr).await.unwrap();
        proxy.cut_after_reply_bytes(5);
        stream.write_all(b"12345678").await.unwrap();
        let mut got = Vec::new();
        let end = stream.read_to_end(&mut got).await;
        assert!(end.is_err(), "a reset, not an end");
        assert!(b"12345".starts_with(&got), "{got:?}");
        let mut stream = TcpStream::connect(proxy.addr).await.unwrap();
        assert_eq!(round_trip(&mut stream, b"12345678").await.unwrap(), b"12345678");
    }

    #[tokio::test]
    async fn dropped_replies_never_come_and_severed_connections_may_be_made_again() {
        let proxy = Proxy::start(echo().await).await;
        let mut stream = TcpStream::connect(proxy.addr).await.unwrap();
        proxy.drop_replies();
        stream.write_all(b"b").await.unwrap();
        let mut answer = [0];
        let nothing =
            tokio::time::timeout(Duration::from_millis(100), stream.read_exact(&mut answer)).await;
        assert!(nothing.is_err());
        proxy.heal();
        assert!(stream.read_exact(&mut answer).await.is_err());
        let mut stream = TcpStream::connect(proxy.addr).await.unwrap();
        assert_eq!(round_trip(&mut stream, b"abc").await.unwrap(), b"abc");
        proxy.sever();
        assert!(round_trip(&mut stream, b"abc").await.is_err());
        assert_eq!(proxy.accepted(), 2);
    }
}
