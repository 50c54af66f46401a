//! `https`: own roots, client certificates, and failures that point to the endpoint.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use inboxd_contract::{RetryReason, Severity, Verdict};
use inboxd_http::{HttpConfig, HttpConfigError, HttpForwarder, TlsFiles, install_crypto_provider};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use crate::support::{ACCEPTED, Message, OK, Raw, config, reason};

/// A certificate authority, and what it signed, in files.
struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    dir: TempDir,
}

impl Authority {
    fn new() -> Self {
        install_crypto_provider();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let authority = Self { issuer, dir: tempfile::tempdir().unwrap() };
        authority.write("ca.pem", &authority.issuer.pem());
        authority
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    fn ca_file(&self) -> Option<PathBuf> {
        Some(self.dir.path().join("ca.pem"))
    }

    fn signed(&self, name: &str) -> (rcgen::Certificate, KeyPair) {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        (params.signed_by(&key, &self.issuer).unwrap(), key)
    }

    fn roots(&self) -> Arc<RootCertStore> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from(self.issuer.der().to_vec())).unwrap();
        Arc::new(roots)
    }

    /// A server for `name` that answers 200, and asks for a client certificate if it is told.
    async fn serve(&self, name: &str, mutual: bool) -> SocketAddr {
        let (certificate, key) = self.signed(name);
        let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
        let builder = match mutual {
            true => ServerConfig::builder().with_client_cert_verifier(
                WebPkiClientVerifier::builder(self.roots()).build().unwrap(),
            ),
            false => ServerConfig::builder().with_no_client_auth(),
        };
        let config = builder.with_single_cert(vec![certificate.der().clone()], key).unwrap();
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let acceptor = acceptor.clone();
                tokio::spawn(async move {
                    let Ok(mut stream) = acceptor.accept(stream).await else { return };
                    let mut request = [0; 16 * 1024];
                    while stream.read(&mut request).await.is_ok_and(|read| read > 0) {
                        let _ = stream.write_all(OK).await;
                    }
                });
            }
        });
        addr
    }
}

async fn verdict(addr: SocketAddr, tls: TlsFiles) -> Verdict {
    let config = HttpConfig { tls, ..config(format!("https://localhost:{}/", addr.port())) };
    Message::new("m").send(&HttpForwarder::new(config).unwrap()).await
}

#[tokio::test]
async fn own_roots_are_trusted_and_others_are_an_endpoints_fault() {
    let (authority, stranger) = (Authority::new(), Authority::new());
    let addr = authority.serve("localhost", false).await;
    let trusting = TlsFiles { ca_file: authority.ca_file(), ..TlsFiles::default() };
    assert_eq!(verdict(addr, trusting.clone()).await, ACCEPTED);

    let distrusting = TlsFiles { ca_file: stranger.ca_file(), ..TlsFiles::default() };
    let unknown = verdict(addr, distrusting).await;
    assert_eq!(reason(&unknown), Some(RetryReason::Endpoint), "{unknown:?}");

    let other_name = authority.serve("elsewhere.test", false).await;
    let wrong_name = verdict(other_name, trusting.clone()).await;
    assert_eq!(reason(&wrong_name), Some(RetryReason::Endpoint), "{wrong_name:?}");

    let looked_at = async |addr: SocketAddr| {
        let url = format!("https://localhost:{}/", addr.port());
        let config = HttpConfig { tls: trusting.clone(), ..config(url) };
        HttpForwarder::new(config).unwrap().inspect().await.remove(0)
    };
    assert_eq!(looked_at(addr).await.severity, Severity::Info);
    let found = looked_at(other_name).await;
    assert_eq!(found.severity, Severity::Problem);
    assert!(found.remedy.contains("tls.ca_file"), "{found:?}");
}

#[tokio::test]
async fn a_client_certificate_is_presented_and_missing_it_is_an_endpoints_fault() {
    let authority = Authority::new();
    let addr = authority.serve("localhost", true).await;
    let (certificate, key) = authority.signed("client");
    let with = TlsFiles {
        ca_file: authority.ca_file(),
        cert_file: Some(authority.write("client.pem", &certificate.pem())),
        key_file: Some(authority.write("client.key", &key.serialize_pem())),
    };
    assert_eq!(verdict(addr, with).await, ACCEPTED);

    let without = TlsFiles { ca_file: authority.ca_file(), ..TlsFiles::default() };
    let refused = verdict(addr, without).await;
    let seen = reason(&refused);
    // The server's alert may be overtaken by its reset.
    let expected = [Some(RetryReason::Endpoint), Some(RetryReason::Disconnected)];
    assert!(expected.contains(&seen), "{refused:?}");
}

#[tokio::test]
async fn https_to_a_plain_server_is_an_endpoints_fault() {
    let authority = Authority::new();
    let raw = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = raw.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = raw.accept().await {
            let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
            let mut rest = Vec::new();
            let _ = stream.read_to_end(&mut rest).await;
        }
    });
    let tls = TlsFiles { ca_file: authority.ca_file(), ..TlsFiles::default() };
    let verdict = verdict(addr, tls).await;
    assert_eq!(reason(&verdict), Some(RetryReason::Endpoint), "{verdict:?}");
}

#[tokio::test]
async fn files_that_are_missing_or_wrong_are_named() {
    let authority = Authority::new();
    let text = authority.write("text", "no certificate");
    let tls = |ca_file: Option<PathBuf>, cert_file, key_file| HttpConfig {
        tls: TlsFiles { ca_file, cert_file, key_file },
        ..config("https://localhost/")
    };
    let missing = Some(authority.dir.path().join("missing.pem"));
    for (config, words) in [
        (tls(missing.clone(), None, None), ["tls.ca_file", "missing.pem"]),
        (tls(Some(text.clone()), None, None), ["tls.ca_file", "certificate"]),
        (tls(None, Some(text.clone()), missing.clone()), ["tls.key_file", "missing.pem"]),
        (tls(None, Some(text.clone()), Some(text.clone())), ["tls.cert_file", "PEM"]),
        (tls(None, Some(text), None), ["tls.cert_file", "tls.key_file"]),
    ] {
        let error = HttpForwarder::new(config).err().expect("refused").to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    }
}

#[tokio::test]
async fn without_a_ca_bundle_http_works_and_https_says_what_is_missing() {
    // H4, in a child, since the bundle's place is told by the environment.
    if std::env::var("INBOXD_TEST_NO_ROOTS_CHILD").is_ok() {
        let raw = Raw::answering(OK).await;
        let plain = HttpForwarder::new(config(raw.url())).unwrap();
        assert_eq!(Message::new("m").send(&plain).await, ACCEPTED);
        let error = HttpForwarder::new(config("https://app.invalid/")).err().expect("refused");
        assert!(matches!(error, HttpConfigError::NoRoots(_)), "{error:?}");
        assert!(error.to_string().contains("ca-certificates"), "{error}");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let empty = dir.path().join("empty.pem");
    std::fs::write(&empty, "").unwrap();
    let child = tokio::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "tls::without_a_ca_bundle_http_works_and_https_says_what_is_missing"])
        .env("INBOXD_TEST_NO_ROOTS_CHILD", "1")
        .env("SSL_CERT_FILE", &empty)
        .env("SSL_CERT_DIR", dir.path().join("none"))
        .output()
        .await
        .unwrap();
    assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stdout));
}
