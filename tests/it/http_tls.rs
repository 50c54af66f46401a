//! An `https` callback from the configuration: own authority, client certificate, a fixed
//! `Authorization` from a file; a certificate of another host costs time and no message.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use inboxd_conformance::{ensure, eventually};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

use crate::support::{
    Broker, BrokerKind, Database, DatabaseKind, Message, PATIENCE, Sidecar, config, stop_all,
};

struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        Self { issuer: CertifiedIssuer::self_signed(params, key).unwrap() }
    }

    fn signed(&self, name: &str) -> (rcgen::Certificate, KeyPair) {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        (params.signed_by(&key, &self.issuer).unwrap(), key)
    }

    /// A server that is `name` and takes nobody without a certificate of this authority.
    fn server(&self, name: &str) -> TlsAcceptor {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from(self.issuer.der().to_vec())).unwrap();
        let clients = WebPkiClientVerifier::builder(Arc::new(roots)).build().unwrap();
        let (certificate, key) = self.signed(name);
        let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
        let config = ServerConfig::builder()
            .with_client_cert_verifier(clients)
            .with_single_cert(vec![certificate.der().clone()], key)
            .unwrap();
        TlsAcceptor::from(Arc::new(config))
    }
}

/// Answers 200 and keeps the head of each request. Dropped: ends.
struct Application {
    addr: SocketAddr,
    identity: Arc<Mutex<TlsAcceptor>>,
    heads: Arc<Mutex<Vec<String>>>,
    task: tokio::task::JoinHandle<()>,
}

impl Application {
    async fn start(identity: TlsAcceptor) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let identity = Arc::new(Mutex::new(identity));
        let heads = Arc::new(Mutex::new(Vec::new()));
        let (acceptor, kept) = (Arc::clone(&identity), Arc::clone(&heads));
        let task = tokio::spawn(async move {
            let mut running = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let (acceptor, kept) = (acceptor.lock().unwrap().clone(), Arc::clone(&kept));
                running.spawn(async move {
                    let Ok(mut stream) = acceptor.accept(stream).await else { return };
                    while let Some(head) = read_request(&mut stream).await {
                        kept.lock().unwrap().push(head);
                        let _ =
                            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
                    }
                });
            }
        });
        Self { addr, identity, heads, task }
    }

    fn heads(&self) -> Vec<String> {
        self.heads.lock().unwrap().clone()
    }
}

impl Drop for Application {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn read_request(stream: &mut (impl AsyncRead + Unpin)) -> Option<String> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.ok()?);
    }
    let head = String::from_utf8(head).expect("a request's head is ASCII");
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    let mut body = vec![0; length.expect("a length").parse().expect("a number")];
    stream.read_exact(&mut body).await.ok()?;
    Some(head)
}

fn write(dir: &Path, name: &str, text: &str) -> PathBuf {
    let path = dir.join(name);
    std::fs::write(&path, text).unwrap();
    path
}

#[tokio::test(flavor = "multi_thread")]
async fn an_https_callback_is_called_with_a_client_certificate_and_a_wrong_host_is_waited_for() {
    inboxd_http::install_crypto_provider();
    let (authority, files) = (Authority::new(), tempfile::tempdir().unwrap());
    let (certificate, key) = authority.signed("sidecar");
    let ca_file = write(files.path(), "ca.pem", &authority.issuer.pem());
    let cert_file = write(files.path(), "client.pem", &certificate.pem());
    let key_file = write(files.path(), "client.key", &key.serialize_pem());
    let token_file = write(files.path(), "token", "Bearer geheim\n");
    let app = Application::start(authority.server("elsewhere.test")).await;

    let database = Database::new(DatabaseKind::Sqlite);
    let broker = Broker::new(BrokerKind::RabbitClassic).await;
    let group = broker.name.clone();
    let keys = format!(
        "retry = {{ initial = \"20ms\", cap = \"100ms\" }}\n\
         tls = {{ ca_file = \"{}\", cert_file = \"{}\", key_file = \"{}\" }}\n\
         headers.set = {{ Authorization_file = \"{}\", X-Team = \"billing\" }}",
        ca_file.display(),
        cert_file.display(),
        key_file.display(),
        token_file.display(),
    );
    let callback = format!("https://localhost:{}/orders", app.addr.port());
    let sidecar = Sidecar::start(&config(&broker, &database, &group, &callback, &keys, ""));
    broker.publish([Message::id("m1").header("Authorization", "Bearer forged")]).await;
    eventually(PATIENCE, async || {
        let labels = ["reason=\"endpoint\""];
        let again = sidecar.metric("inboxd_forward_retries_total", &labels).await;
        ensure(again >= 2.0, format!("{again}; log:\n{}", sidecar.log()))
    })
    .await;
    assert!(database.dead(&group).await.is_empty(), "the message is not at fault");
    assert!(sidecar.log().contains("TLS failed"), "it is named:\n{}", sidecar.log());

    *app.identity.lock().unwrap() = authority.server("localhost");
    eventually(PATIENCE, async || {
        let rows = database.rows(&group).await;
        ensure(rows.contains("m1"), format!("{rows:?}; log:\n{}", sidecar.log()))
    })
    .await;
    let heads = app.heads();
    assert_eq!(heads.len(), 1, "nothing was sent to the wrong host: {heads:?}");
    assert!(heads[0].starts_with("POST /orders HTTP/1.1\r\n"), "{}", heads[0]);
    let authorizations: Vec<_> =
        heads[0].lines().filter(|line| line.starts_with("authorization")).collect();
    assert_eq!(authorizations, ["authorization: Bearer geheim"], "{}", heads[0]);
    assert!(heads[0].contains("\r\nx-team: billing\r\n"), "{}", heads[0]);
    assert!(!heads[0].contains("forged"), "{}", heads[0]);
    assert!(!sidecar.log().contains("geheim"), "a secret is in the log");
    stop_all(&broker, &group, &mut [sidecar]).await;
}
