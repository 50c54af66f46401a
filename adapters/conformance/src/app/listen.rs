//! Listening so that a single connection can be reset from within a handler, and all of them
//! when the application is killed.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::extract::connect_info::Connected;
use axum::serve::{IncomingStream, Listener};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

pub(super) enum Killable {
    Tcp(TcpListener, CancellationToken),
    Unix(UnixListener, CancellationToken),
}

impl Killable {
    pub(super) fn tcp(listener: TcpListener, kill: CancellationToken) -> Self {
        Self::Tcp(listener, kill)
    }

    pub(super) fn unix(listener: UnixListener, kill: CancellationToken) -> Self {
        Self::Unix(listener, kill)
    }
}

impl Listener for Killable {
    type Io = Stream;
    type Addr = ();

    async fn accept(&mut self) -> (Stream, ()) {
        loop {
            let accepted = match self {
                Self::Tcp(listener, kill) => {
                    TcpListener::accept(listener).await.map(|(stream, _)| Stream::tcp(stream, kill))
                }
                Self::Unix(listener, kill) => UnixListener::accept(listener)
                    .await
                    .map(|(stream, _)| Stream::unix(stream, kill)),
            };
            match accepted {
                Ok(stream) => return (stream, ()),
                Err(_) => tokio::task::yield_now().await,
            }
        }
    }

    fn local_addr(&self) -> io::Result<()> {
        Ok(())
    }
}

/// What a handler knows of its connection.
#[derive(Debug, Clone)]
pub(super) struct Connection {
    kill: CancellationToken,
}

impl Connection {
    /// Ends the connection without another byte.
    pub(super) fn reset(&self) {
        self.kill.cancel();
    }
}

impl Connected<IncomingStream<'_, Killable>> for Connection {
    fn connect_info(stream: IncomingStream<'_, Killable>) -> Self {
        Self { kill: stream.io().kill.clone() }
    }
}

trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}

/// A connection whose reads and writes fail once it is killed.
pub(super) struct Stream {
    inner: Box<dyn Duplex>,
    kill: CancellationToken,
    killed: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl Stream {
    fn tcp(stream: TcpStream, kill: &CancellationToken) -> Self {
        let _ = stream.set_nodelay(true);
        Self::new(Box::new(stream), kill)
    }

    fn unix(stream: UnixStream, kill: &CancellationToken) -> Self {
        Self::new(Box::new(stream), kill)
    }

    fn new(inner: Box<dyn Duplex>, kill: &CancellationToken) -> Self {
        let kill = kill.child_token();
        let killed = Box::pin(kill.clone().cancelled_owned());
        Self { inner, kill, killed }
    }

    fn check(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        match self.killed.as_mut().poll(context) {
            Poll::Ready(()) => Err(io::Error::from(io::ErrorKind::ConnectionReset)),
            Poll::Pending => Ok(()),
        }
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check(context)?;
        Pin::new(&mut self.inner).poll_read(context, buffer)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.check(context)?;
        Pin::new(&mut self.inner).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check(context)?;
        Pin::new(&mut self.inner).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(context)
    }
}
