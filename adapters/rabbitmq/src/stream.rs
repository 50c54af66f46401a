//! The client's stream, with [`crate::wire`] in between, and the runtime that gives it to the client.

use std::future::Future;
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use async_rs::traits::{Executor, Reactor, RuntimeKit};
use async_rs::util::Task;
use async_rs::{Tokio, TokioRuntime};
use futures::io::{AsyncRead, AsyncWrite};
use futures::stream::Stream;
use lapin::AsyncTcpStream;

use crate::outgoing::Sender;
use crate::wire::{Aside, Rewriter};

/// Read from the broker at once.
const CHUNK_BYTES: usize = 64 << 10;

type Tcp = <Tokio as Reactor>::TcpStream;

/// A connection to the broker, plain or TLS, whose deliveries' properties are set aside.
pub(crate) struct Filtered {
    stream: AsyncTcpStream<Tcp>,
    rewriter: Rewriter,
    chunk: Box<[u8]>,
    /// For the client, from `at` on.
    out: Vec<u8>,
    at: usize,
    /// Where messages are published: what becomes of them on their way.
    sending: Option<Sending>,
}

/// What goes to the broker.
struct Sending {
    sender: Sender,
    /// For the broker, from `at` on.
    out: Vec<u8>,
    at: usize,
}

impl Sending {
    /// Writes what there is; ready when nothing is left.
    fn poll_drain(
        &mut self,
        stream: &mut AsyncTcpStream<Tcp>,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<()>> {
        while self.at < self.out.len() {
            let written = ready!(Pin::new(&mut *stream).poll_write(cx, &self.out[self.at..]))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.at += written;
        }
        self.out.clear();
        self.at = 0;
        Poll::Ready(Ok(()))
    }
}

impl Filtered {
    /// In front of a stream on which nothing was read yet.
    pub(crate) fn new(stream: AsyncTcpStream<Tcp>, aside: Aside) -> Self {
        Self {
            stream,
            rewriter: Rewriter::new(aside),
            chunk: vec![0; CHUNK_BYTES].into_boxed_slice(),
            out: Vec::new(),
            at: 0,
            sending: None,
        }
    }

    /// The same, where messages are published.
    pub(crate) fn publishing(stream: AsyncTcpStream<Tcp>, aside: Aside) -> Self {
        let sender = Sender::new(aside.outbox.clone());
        let sending = Some(Sending { sender, out: Vec::new(), at: 0 });
        Self { sending, ..Self::new(stream, aside) }
    }
}

impl AsyncRead for Filtered {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut [u8],
    ) -> Poll<io::Result<usize>> {
        let this = &mut *self;
        loop {
            if this.at < this.out.len() {
                let ready = &this.out[this.at..];
                let count = ready.len().min(buffer.len());
                buffer[..count].copy_from_slice(&ready[..count]);
                this.at += count;
                return Poll::Ready(Ok(count));
            }
            this.out.clear();
            this.at = 0;
            // Bodies are the bulk, and go straight to the client.
            let passing = this.rewriter.passing().min(buffer.len());
            if passing > 0 {
                let stream = Pin::new(&mut this.stream);
                let count = ready!(stream.poll_read(cx, &mut buffer[..passing]))?;
                this.rewriter.passed(count);
                return Poll::Ready(Ok(count));
            }
            let count = ready!(Pin::new(&mut this.stream).poll_read(cx, &mut this.chunk))?;
            if count == 0 {
                return Poll::Ready(Ok(0));
            }
            this.rewriter.feed(&this.chunk[..count], &mut this.out);
        }
    }
}

impl AsyncWrite for Filtered {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = &mut *self;
        let Some(sending) = &mut this.sending else {
            return Pin::new(&mut this.stream).poll_write(cx, buffer);
        };
        // No more is taken before what was taken is gone: that bounds what is held here.
        ready!(sending.poll_drain(&mut this.stream, cx))?;
        sending.sender.feed(buffer, &mut sending.out);
        match sending.poll_drain(&mut this.stream, cx) {
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            // What is left goes with the next write or flush, and the client flushes at every turn.
            Poll::Ready(Ok(())) | Poll::Pending => Poll::Ready(Ok(buffer.len())),
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if self.sending.is_none() {
            return Pin::new(&mut self.stream).poll_write_vectored(cx, buffers);
        }
        let first = buffers.iter().find(|buffer| !buffer.is_empty());
        first.map_or(Poll::Ready(Ok(0)), |first| self.as_mut().poll_write(cx, first))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if let Some(sending) = &mut this.sending {
            ready!(sending.poll_drain(&mut this.stream, cx))?;
        }
        Pin::new(&mut this.stream).poll_flush(cx)
    }

    fn poll_close(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if let Some(sending) = &mut this.sending {
            ready!(sending.poll_drain(&mut this.stream, cx))?;
        }
        Pin::new(&mut this.stream).poll_close(cx)
    }
}

/// Tokio, but that its streams are [`Filtered`].
#[derive(Debug, Clone)]
pub(crate) struct Kit(TokioRuntime);

impl Kit {
    /// Of the present runtime.
    pub(crate) fn current() -> Self {
        Self(TokioRuntime::tokio_current())
    }

    /// The runtime as it is.
    pub(crate) fn tokio(&self) -> &TokioRuntime {
        &self.0
    }
}

impl RuntimeKit for Kit {}

impl Executor for Kit {
    type Task<T: Send + 'static> = <Tokio as Executor>::Task<T>;

    fn block_on<T, F: Future<Output = T>>(&self, future: F) -> T {
        self.0.block_on(future)
    }

    fn spawn<T: Send + 'static, F: Future<Output = T> + Send + 'static>(
        &self,
        future: F,
    ) -> Task<Self::Task<T>> {
        self.0.spawn(future)
    }

    fn spawn_blocking<T: Send + 'static, F: FnOnce() -> T + Send + 'static>(
        &self,
        work: F,
    ) -> Task<Self::Task<T>> {
        self.0.spawn_blocking(work)
    }
}

impl Reactor for Kit {
    type TcpStream = Filtered;
    type Sleep = <Tokio as Reactor>::Sleep;

    fn register<H: Read + Write + AsFd + AsRawFd + Send + 'static>(
        &self,
        socket: H,
    ) -> io::Result<impl AsyncRead + AsyncWrite + Send + Unpin + 'static> {
        self.0.register(socket)
    }

    fn sleep(&self, duration: Duration) -> Self::Sleep {
        self.0.sleep(duration)
    }

    fn interval(&self, duration: Duration) -> impl Stream<Item = Instant> + Send + 'static {
        self.0.interval(duration)
    }

    /// Connections are made in [`crate::link`]; this one would set things aside for nobody.
    fn tcp_connect_addr(
        &self,
        address: SocketAddr,
    ) -> impl Future<Output = io::Result<Self::TcpStream>> + Send + 'static {
        let connecting = self.0.tcp_connect_addr(address);
        async move {
            let stream = AsyncTcpStream::Plain(connecting.await?);
            Ok(Filtered::new(stream, Aside::default()))
        }
    }
}
