//! One connection, and a hand on its socket.
//!
//! The client runs a thread per connection, which outlives a dropped attempt as long as its
//! peer is silent. With the socket in hand, an attempt that took too long ends at once, and a
//! source that is dropped leaves the way a crash does: without a `basic.cancel`, which would
//! hand the queue to the next consumer before what is unacked has gone back to its place.

use std::io;
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_rs::Runtime;
use inboxd_contract::ErrorCode;
use lapin::tcp::{AMQPUriTcpExt, OwnedIdentity, OwnedTLSConfig};
use lapin::uri::{AMQPAuthority, AMQPQueryString, AMQPScheme, AMQPUri, AMQPUserInfo};
use lapin::{AsyncTcpStream, Connection, ConnectionProperties};
use secrecy::ExposeSecret;
use tokio::time::timeout;

use crate::config::RabbitMqTls;
use crate::letter_config::RabbitMqBroker;
use crate::stream::{Filtered, Kit};
use crate::trouble::{Remedy, Trouble};
use crate::wire::Aside;

/// The socket of the present connection, if any.
#[derive(Debug, Clone, Default)]
pub(crate) struct Socket(Arc<Mutex<Option<TcpStream>>>);

impl Socket {
    fn hold(&self, socket: TcpStream) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(socket);
    }

    /// Ends the connection, whatever its state.
    pub(crate) fn cut(&self) {
        if let Some(socket) = self.0.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // It may be gone already, which is what was wanted.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

/// A connection. Dropped, its socket is closed.
#[derive(Debug)]
pub(crate) struct Link {
    /// The client's connection.
    pub(crate) connection: Connection,
    /// `host:port`.
    pub(crate) peer: String,
    /// What publishers wrote around bodies.
    pub(crate) aside: Aside,
    pub(crate) socket: Socket,
}

impl Link {
    /// Ends the connection as a crash would.
    pub(crate) fn cut(&self) {
        self.socket.cut();
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.socket.cut();
    }
}

/// Cuts the socket unless the attempt came to a connection.
struct Attempt(Option<Socket>);

impl Drop for Attempt {
    fn drop(&mut self) {
        if let Some(socket) = &self.0 {
            socket.cut();
        }
    }
}

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Nothing is published on it.
    Consume,
    /// Copies go out by way of its outbox.
    Publish,
}

/// Connects to the host whose turn it is and logs in, within the configured time.
pub(crate) async fn connect(
    config: &RabbitMqBroker,
    turn: usize,
    socket: &Socket,
    purpose: Purpose,
) -> Result<Link, Trouble> {
    let (host, port) = &config.hosts[turn % config.hosts.len()];
    let peer = format!("{host}:{port}");
    let tls = match &config.tls {
        Some(tls) => Some(read_tls(tls).await?),
        None => None,
    };
    let uri = uri(config, host, *port);
    let properties = ConnectionProperties::default()
        .with_connection_name(config.connection_name.as_str().into())
        .with_client_property("product".into(), "inboxd".into())
        .with_client_property("version".into(), env!("CARGO_PKG_VERSION").into());
    let kit = Kit::current();
    let tokio = kit.tokio().clone();
    let aside = Aside::default();
    let mut attempt = Attempt(Some(socket.clone()));
    let (held, within, set_aside) = (socket.clone(), config.connect_timeout, aside.clone());
    let connecting = Connection::connector(
        uri,
        Runtime::new(kit),
        async move |uri, _| {
            let plain = AMQPUri { scheme: AMQPScheme::AMQP, ..uri.clone() };
            let connected = timeout(within, async {
                let none = OwnedTLSConfig::default();
                let stream = plain.connect_with_config_async(none.as_ref(), &tokio).await?;
                let AsyncTcpStream::Plain(tcp) = &stream else {
                    return Err(io::Error::other("a plain stream was asked for"));
                };
                held.hold(TcpStream::from(tcp.get_ref().as_fd().try_clone_to_owned()?));
                let stream = match &tls {
                    Some(tls) => stream.into_tls(&uri.authority.host, tls.as_ref()).await?,
                    None => stream,
                };
                let filtered = match purpose {
                    Purpose::Consume => Filtered::new(stream, set_aside.clone()),
                    Purpose::Publish => Filtered::publishing(stream, set_aside.clone()),
                };
                Ok(AsyncTcpStream::Plain(filtered))
            });
            let connected = connected.await.unwrap_or_else(|_| Err(too_slow(within)));
            Ok(connected?)
        },
        properties,
    );
    match timeout(config.connect_timeout, connecting).await {
        Ok(Ok(connection)) => {
            attempt.0 = None;
            Ok(Link { connection, peer, aside, socket: socket.clone() })
        }
        Ok(Err(error)) => Err(Trouble::connecting(&error, config, &peer)),
        Err(_) => Err(Trouble::connecting(&too_slow(within).into(), config, &peer)),
    }
}

fn too_slow(within: Duration) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, format!("no answer within {within:?}"))
}

fn uri(config: &RabbitMqBroker, host: &str, port: u16) -> AMQPUri {
    AMQPUri {
        scheme: if config.tls.is_some() { AMQPScheme::AMQPS } else { AMQPScheme::AMQP },
        authority: AMQPAuthority {
            userinfo: AMQPUserInfo {
                username: config.user.clone(),
                password: config.password.expose_secret().to_owned(),
            },
            host: host.to_owned(),
            port,
        },
        vhost: config.vhost.clone(),
        query: AMQPQueryString {
            heartbeat: u16::try_from(config.heartbeat.as_secs()).ok(),
            ..AMQPQueryString::default()
        },
    }
}

async fn read_tls(tls: &RabbitMqTls) -> Result<OwnedTLSConfig, Trouble> {
    let read = async |file: &std::path::Path| {
        tokio::fs::read(file).await.map_err(|error| {
            let file = file.display();
            let reason = format!("TLS file {file} cannot be read: {error}");
            Trouble::failing(ErrorCode::SourceTls, Remedy::Reconnect, reason)
        })
    };
    let cert_chain = match &tls.ca_file {
        Some(file) => {
            let pem = String::from_utf8(read(file).await?).map_err(|_| {
                let file = file.display();
                Trouble::failing(
                    ErrorCode::SourceTls,
                    Remedy::Reconnect,
                    format!("TLS file {file} is not PEM"),
                )
            })?;
            Some(pem)
        }
        None => None,
    };
    let identity = match (&tls.cert_file, &tls.key_file) {
        (Some(cert), Some(key)) => {
            Some(OwnedIdentity::PKCS8 { pem: read(cert).await?, key: read(key).await? })
        }
        _ => None,
    };
    Ok(OwnedTLSConfig { identity, cert_chain })
}
