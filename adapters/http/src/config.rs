//! What a forwarder is told, and what may be wrong with it.

use std::fmt;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use secrecy::SecretString;

use crate::{Dialect, Meaning, ProxyVariables};

/// Which of the message's own headers are copied.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum HeaderCopy {
    /// All but those that never are.
    #[default]
    All,
    /// Those with these names, compared without regard to ASCII case. May be empty.
    Allow(Vec<String>),
}

/// How the message's own headers travel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeaderPolicy {
    /// Which.
    pub copy: HeaderCopy,
    /// What is put before each name; empty only with [`HeaderCopy::Allow`].
    pub prefix: String,
}

impl Default for HeaderPolicy {
    fn default() -> Self {
        Self { copy: HeaderCopy::All, prefix: "Inbox-Header-".to_owned() }
    }
}

/// Files in PEM form, read when the forwarder is made.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TlsFiles {
    /// Certificates to trust *instead of* the system's.
    pub ca_file: Option<PathBuf>,
    /// The client's certificate chain; with `key_file`.
    pub cert_file: Option<PathBuf>,
    /// The client's private key; with `cert_file`.
    pub key_file: Option<PathBuf>,
}

/// A wall clock.
#[derive(Clone)]
pub struct Clock(Arc<dyn Fn() -> SystemTime + Send + Sync>);

impl Clock {
    /// One that answers what `now` does.
    pub fn new(now: impl Fn() -> SystemTime + Send + Sync + 'static) -> Self {
        Self(Arc::new(now))
    }

    pub(crate) fn now(&self) -> SystemTime {
        (self.0)()
    }
}

/// The system's.
impl Default for Clock {
    fn default() -> Self {
        Self::new(SystemTime::now)
    }
}

/// What a forwarder is told. Start from [`HttpConfig::new`].
#[derive(Clone)]
pub struct HttpConfig {
    /// `http://host:port/route`, `https://…` or `unix:/path/to.sock:/route`.
    pub callback: String,
    /// Asked with GET whether the application can take messages: a whole URL like `callback`, or a
    /// path and query on the callback's host. 2xx: it can; redirects are not followed. Gets
    /// `fixed_headers` and the callback's credentials on the callback's host alone.
    pub health_url: Option<String>,
    /// The bound on one question at `health_url`, its answer included.
    pub health_timeout: Duration,
    /// The bound on connecting, name resolution and TLS included.
    pub connect_timeout: Duration,
    /// The bound on a whole attempt; the request's own bound holds where it is smaller.
    pub callback_timeout: Duration,
    /// The longest wait that `Retry-After` can ask for.
    pub retry_after_cap: Duration,
    /// How much of a response's body is read; the connection of a longer one is dropped.
    pub response_bytes_max: usize,
    /// How long an unused connection is kept. Shorter than common servers keep theirs (5 s),
    /// so that a request seldom meets a connection that is being closed.
    pub idle_timeout: Duration,
    /// Speak HTTP/2 without negotiation on `http://` and `unix:`.
    pub http2_prior_knowledge: bool,
    /// The message's own headers.
    pub headers: HeaderPolicy,
    /// Headers that every request gets, over everything else (`Authorization`).
    pub fixed_headers: Vec<(String, SecretString)>,
    /// How the application answers.
    pub dialect: Dialect,
    /// Statuses and what they are made to mean, over the response table; the first that fits wins.
    pub status_map: Vec<(RangeInclusive<u16>, Meaning)>,
    /// Secrets of Standard Webhooks (`whsec_` and base64 of 24 to 64 bytes); every request is
    /// signed with all of them. None: nothing is signed.
    pub signing_secrets: Vec<SecretString>,
    /// The wall clock, for signatures and for `Retry-After` as a date.
    pub clock: Clock,
    /// For `https`.
    pub tls: TlsFiles,
    /// Proxies; never used for a callback on this machine.
    pub proxies: ProxyVariables,
}

impl HttpConfig {
    /// The defaults, with the proxies of the environment.
    pub fn new(callback: impl Into<String>) -> Self {
        Self {
            callback: callback.into(),
            health_url: None,
            health_timeout: Duration::from_secs(5),
            connect_timeout: Duration::from_secs(5),
            callback_timeout: Duration::from_secs(30),
            retry_after_cap: Duration::from_secs(30),
            response_bytes_max: 64 * 1024,
            idle_timeout: Duration::from_secs(4),
            http2_prior_knowledge: false,
            headers: HeaderPolicy::default(),
            fixed_headers: Vec::new(),
            dialect: Dialect::default(),
            status_map: Vec::new(),
            signing_secrets: Vec::new(),
            clock: Clock::default(),
            tls: TlsFiles::default(),
            proxies: ProxyVariables::from_environment(),
        }
    }
}

/// Leaves out what may hold a password.
impl fmt::Debug for HttpConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpConfig")
            .field("callback", &crate::Callback::parse(&self.callback).ok())
            .field("connect_timeout", &self.connect_timeout)
            .field("callback_timeout", &self.callback_timeout)
            .field("headers", &self.headers)
            .field("tls", &self.tls)
            .finish_non_exhaustive()
    }
}

/// A forwarder cannot be made of this configuration. The text says what, where, and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum HttpConfigError {
    /// The callback is none.
    #[error("callback: {0}")]
    Callback(String),
    /// The health URL is none.
    #[error("health_url: {0}")]
    HealthUrl(String),
    /// A timeout of zero.
    #[error("{0} must be longer than zero")]
    ZeroTimeout(&'static str),
    /// A policy for headers that would let publishers forge.
    #[error("headers: {0}")]
    Headers(String),
    /// A fixed header is no header.
    #[error("headers.set: {0}")]
    FixedHeader(String),
    /// A signing secret is none.
    #[error(
        "signing: secret number {number} is not whsec_ followed by the base64 of 24 to 64 bytes: \
         make one with openssl rand -base64 32"
    )]
    SigningSecret {
        /// Which, from 1.
        number: usize,
    },
    /// A file cannot be read.
    #[error("{key}: {} cannot be read: check the path and its permissions", path.display())]
    File {
        /// The key that names it.
        key: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A file does not hold what it should.
    #[error("{key}: {} holds no {wanted} in PEM form", path.display())]
    Pem {
        /// The key that names it.
        key: &'static str,
        /// The file.
        path: PathBuf,
        /// What it should hold.
        wanted: &'static str,
    },
    /// Only one of certificate and key is set.
    #[error("tls.cert_file and tls.key_file belong together: set both or neither")]
    CertWithoutKey,
    /// `https` without anything to trust.
    #[error(
        "an https callback needs certificates to trust and the system has none: install its \
         CA bundle (Debian: ca-certificates) or set tls.ca_file"
    )]
    NoRoots(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// A proxy variable is no URL.
    #[error(
        "HTTP_PROXY, HTTPS_PROXY or ALL_PROXY in the environment is no http or https URL: mend \
         it, unset it, or name the callback's host in NO_PROXY"
    )]
    Proxy,
    /// The client could not be made.
    #[error("the HTTP client cannot be made")]
    Client(#[source] Box<dyn std::error::Error + Send + Sync>),
}
