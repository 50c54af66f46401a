//! The forwarder itself: one client, one callback.

use std::sync::Once;
use std::time::Duration;

use async_trait::async_trait;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::header::CONTENT_LENGTH;
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use inboxd_contract::{ForwardRequest, Forwarder, RetryReason, Verdict};
use reqwest::{Certificate, Client, Identity, Request};
use secrecy::{ExposeSecret, SecretString};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::{Instant, timeout, timeout_at};
use url::Url;

use crate::answers::Rules;
use crate::callback::set_path_and_query;
use crate::headers::{self, CopyRule};
use crate::health::Health;
use crate::response::{self, Bounds};
use crate::signing::{Signed, Signer};
use crate::{Callback, Clock, HttpConfig, HttpConfigError, TlsFiles, sending};

/// How often an HTTP/2 connection is asked whether it lives, and how long it may think about
/// it: without that, a dead one would time out every request that shares it.
const PING_INTERVAL: Duration = Duration::from_secs(10);
const PING_TIMEOUT: Duration = Duration::from_secs(5);

/// Signing more bytes than these would hold up the runtime.
const SIGNED_INLINE_BYTES_MAX: usize = 256 * 1024;

const USER_AGENT: &str = concat!("inboxd/", env!("CARGO_PKG_VERSION"));

/// Makes ring the process's provider of cryptography. Any number of calls; the first
/// counts, and one that the process chose before stays.
pub fn install_crypto_provider() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // Err: there is a provider already, which is as good.
        let _ = rustls::crypto::ring::default_provider().install_default();
    });
}

/// Sends messages to one callback over HTTP.
pub struct HttpForwarder {
    callback: Callback,
    pub(crate) client: Client,
    // What `probe` connects to in place of the callback's host.
    proxy: Option<Url>,
    rule: CopyRule,
    // Replace whatever else has their names. Values are marked sensitive.
    pub(crate) fixed: HeaderMap,
    connect_timeout: Duration,
    pub(crate) callback_timeout: Duration,
    retry_after_cap: Duration,
    response_bytes_max: usize,
    rules: Rules,
    signer: Option<Signer>,
    clock: Clock,
    pub(crate) health: Option<Health>,
}

impl HttpForwarder {
    /// Validates the configuration and reads the files it names (blocking: for start-up).
    /// Connects to nothing.
    ///
    /// # Errors
    /// Whatever makes sending impossible from the start; the text says what to do.
    pub fn new(config: HttpConfig) -> Result<Self, HttpConfigError> {
        install_crypto_provider();
        for (key, value) in [
            ("connect_timeout", config.connect_timeout),
            ("callback_timeout", config.callback_timeout),
            ("health_timeout", config.health_timeout),
        ] {
            if value.is_zero() {
                return Err(HttpConfigError::ZeroTimeout(key));
            }
        }
        let callback = Callback::parse(&config.callback)?;
        let proxy = config.proxies.proxy_for(&callback)?;
        let client = client(&config, &callback, proxy.as_ref())?;
        Ok(Self {
            health: Health::new(&config, &callback, &client)?,
            client,
            fixed: fixed_headers(&config.fixed_headers, &callback)?,
            rule: CopyRule::new(config.headers)?,
            rules: Rules { dialect: config.dialect, map: config.status_map },
            signer: Signer::new(&config.signing_secrets)?,
            clock: config.clock,
            callback,
            proxy,
            connect_timeout: config.connect_timeout,
            callback_timeout: config.callback_timeout,
            retry_after_cap: config.retry_after_cap,
            response_bytes_max: config.response_bytes_max,
        })
    }

    /// Where it sends to; prints without credentials.
    pub fn callback(&self) -> &Callback {
        &self.callback
    }

    async fn request(&self, request: &ForwardRequest<'_>) -> Request {
        let mut post = Request::new(Method::POST, self.url(request.path));
        *post.headers_mut() = headers::build(&self.rule, &self.fixed, request);
        if let Some(signed) = self.sign(request).await {
            for (name, value) in [
                ("webhook-id", signed.id),
                ("webhook-timestamp", signed.timestamp),
                ("webhook-signature", signed.signature),
            ] {
                // Percent-encoded, digits, base64: nothing in them that a value may not have.
                if let Ok(value) = HeaderValue::try_from(value) {
                    post.headers_mut().insert(HeaderName::from_static(name), value);
                }
            }
        }
        match request.envelope.body.clone().filter(|body| !body.is_empty()) {
            Some(body) => *post.body_mut() = Some(body.into()),
            // The client leaves the length of nothing out, and strict servers answer 411.
            None => {
                post.headers_mut().insert(CONTENT_LENGTH, HeaderValue::from_static("0"));
            }
        }
        post
    }

    /// The callback's URL; a route's path and query take the place of its own, never its host.
    fn url(&self, path: Option<&str>) -> Url {
        let mut url = self.callback.url().clone();
        if let Some(path) = path {
            set_path_and_query(&mut url, path);
        }
        url
    }

    /// A large body is signed off the runtime.
    async fn sign(&self, request: &ForwardRequest<'_>) -> Option<Signed> {
        let signer = self.signer.as_ref()?;
        let now = self.clock.now();
        let id = request.key.message_id.as_str();
        let body = request.envelope.body.clone().unwrap_or_default();
        if body.len() <= SIGNED_INLINE_BYTES_MAX {
            return Some(signer.sign(id, now, &body));
        }
        let (signer, id) = (signer.clone(), id.to_owned());
        match tokio::task::spawn_blocking(move || signer.sign(&id, now, &body)).await {
            Ok(signed) => Some(signed),
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        }
    }

    /// The callback's host accepts a connection.
    pub(crate) async fn connects(&self) -> Result<(), String> {
        match timeout(self.connect_timeout, self.connect()).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(format!("{}: {error}", self.callback)),
            Err(_) => {
                Err(format!("{}: no connection within {:?}", self.callback, self.connect_timeout))
            }
        }
    }

    async fn connect(&self) -> std::io::Result<()> {
        if let Some(path) = self.callback.socket() {
            return UnixStream::connect(path).await.map(drop);
        }
        let url = self.proxy.as_ref().unwrap_or(self.callback.url());
        // Both have a host and a scheme with a default port: they were parsed so.
        let host = url.host_str().unwrap_or_default().trim_matches(['[', ']']);
        let port = url.port_or_known_default().unwrap_or_default();
        TcpStream::connect((host, port)).await.map(drop)
    }
}

#[async_trait]
impl Forwarder for HttpForwarder {
    async fn forward(&self, request: ForwardRequest<'_>) -> Verdict {
        let bound = request.timeout.min(self.callback_timeout);
        let deadline = Instant::now() + bound;
        // Making it is within the bound too: a request that is made late must not be sent late.
        let sent = async { self.client.execute(self.request(&request).await).await };
        match timeout_at(deadline, sent).await {
            Ok(Ok(response)) => {
                let bounds = Bounds {
                    bytes_max: self.response_bytes_max,
                    deadline,
                    retry_after_cap: self.retry_after_cap,
                };
                response::judge(response, &self.rules, &bounds, self.clock.now()).await
            }
            Ok(Err(error)) => sending::judge_failure(error),
            Err(_) => sending::retry(RetryReason::Timeout, &format!("no answer within {bound:?}")),
        }
    }

    async fn probe(&self) -> Result<(), String> {
        match &self.health {
            Some(health) => health.ask().await,
            None => self.connects().await,
        }
    }

    fn has_health(&self) -> bool {
        self.health.is_some()
    }
}

/// A client for another target than the callback, by the same settings.
pub(crate) fn client_of(config: &HttpConfig, target: &Callback) -> Result<Client, HttpConfigError> {
    let proxy = config.proxies.proxy_for(target)?;
    client(config, target, proxy.as_ref())
}

fn client(
    config: &HttpConfig,
    callback: &Callback,
    proxy: Option<&Url>,
) -> Result<Client, HttpConfigError> {
    let mut builder = Client::builder()
        .user_agent(USER_AGENT)
        .referer(false)
        .redirect(reqwest::redirect::Policy::none())
        // Each POST is an attempt that is counted.
        .retry(reqwest::retry::never())
        .connect_timeout(config.connect_timeout)
        .pool_idle_timeout(config.idle_timeout)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(PING_INTERVAL)
        .http2_keep_alive_timeout(PING_TIMEOUT)
        .no_proxy();
    if let Some(url) = proxy {
        let proxy = reqwest::Proxy::all(url.clone()).map_err(|_| HttpConfigError::Proxy)?;
        builder = builder.proxy(proxy);
    }
    if let Some(path) = callback.socket() {
        builder = builder.unix_socket(path);
    }
    if config.http2_prior_knowledge && !callback.is_https() {
        builder = builder.http2_prior_knowledge();
    }
    let own_roots = config.tls.ca_file.is_some();
    if !callback.is_https() {
        // Nothing to trust is needed, and a machine may have nothing.
        builder = builder.tls_certs_only([]);
    } else {
        builder = with_tls(builder, &config.tls)?;
    }
    builder.build().map_err(|error| {
        let error = Box::new(error.without_url());
        match callback.is_https() && !own_roots {
            true => HttpConfigError::NoRoots(error),
            false => HttpConfigError::Client(error),
        }
    })
}

fn with_tls(
    mut builder: reqwest::ClientBuilder,
    tls: &TlsFiles,
) -> Result<reqwest::ClientBuilder, HttpConfigError> {
    if let Some(path) = &tls.ca_file {
        let pem = read("tls.ca_file", path)?;
        let certificates = Certificate::from_pem_bundle(&pem).unwrap_or_default();
        if certificates.is_empty() {
            return Err(pem_error("tls.ca_file", path, "certificate"));
        }
        builder = builder.tls_certs_only(certificates);
    }
    match (&tls.cert_file, &tls.key_file) {
        (Some(cert_file), Some(key_file)) => {
            let mut pem = read("tls.key_file", key_file)?;
            pem.push(b'\n');
            pem.extend(read("tls.cert_file", cert_file)?);
            let identity = Identity::from_pem(&pem).map_err(|_| {
                pem_error("tls.cert_file and tls.key_file", cert_file, "certificate with its key")
            })?;
            Ok(builder.identity(identity))
        }
        (None, None) => Ok(builder),
        _ => Err(HttpConfigError::CertWithoutKey),
    }
}

fn read(key: &'static str, path: &std::path::Path) -> Result<Vec<u8>, HttpConfigError> {
    std::fs::read(path).map_err(|source| HttpConfigError::File {
        key,
        path: path.to_owned(),
        source,
    })
}

fn pem_error(key: &'static str, path: &std::path::Path, wanted: &'static str) -> HttpConfigError {
    HttpConfigError::Pem { key, path: path.to_owned(), wanted }
}

pub(crate) fn fixed_headers(
    set: &[(String, SecretString)],
    callback: &Callback,
) -> Result<HeaderMap, HttpConfigError> {
    let mut fixed = HeaderMap::new();
    if let Some(credentials) = callback.credentials() {
        let basic = format!("Basic {}", STANDARD.encode(credentials));
        insert_fixed(&mut fixed, "authorization", &basic)?;
    }
    for (name, value) in set {
        insert_fixed(&mut fixed, name, value.expose_secret())?;
    }
    Ok(fixed)
}

fn insert_fixed(fixed: &mut HeaderMap, name: &str, value: &str) -> Result<(), HttpConfigError> {
    let parsed = HeaderName::try_from(name)
        .map_err(|_| HttpConfigError::FixedHeader(format!("{name:?} is no header's name")))?;
    if !headers::is_settable(name) {
        return Err(HttpConfigError::FixedHeader(format!(
            "{name} belongs to the contract with the application or to HTTP itself"
        )));
    }
    let mut value = HeaderValue::from_str(value.trim()).map_err(|_| {
        HttpConfigError::FixedHeader(format!("the value of {name} has bytes that HTTP forbids"))
    })?;
    value.set_sensitive(true);
    fixed.insert(parsed, value);
    Ok(())
}
