//! TLS of the operators' listener, from PEM files.
//!
//! The files are read once, at the start; the same files tell a command on the same machine which
//! certificate the sidecar has, so that it needs no authority to trust.

use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::TlsAcceptor;

/// A certificate or key cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read, or has no such thing in PEM.
    #[error("{file} has no {what} in PEM that can be read: {why}")]
    File {
        /// Which.
        file: String,
        /// `certificate` or `key`.
        what: &'static str,
        /// Why.
        why: String,
    },
    /// Certificate and key do not go together, or cannot be used for a server.
    #[error("certificate and key cannot be used")]
    Pair(#[from] rustls::Error),
}

/// What a listener shakes hands with.
///
/// # Errors
/// The files are not there, are no PEM, or do not go together.
pub fn acceptor(cert_file: &Path, key_file: &Path) -> Result<TlsAcceptor, TlsError> {
    let chain = certificates(cert_file)?;
    let key =
        PrivateKeyDer::from_pem_file(key_file).map_err(|error| unread(key_file, "key", error))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_single_cert(chain, key)?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// The certificates of a file, the listener's own first.
///
/// # Errors
/// The file is not there, or has none.
pub fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let read = CertificateDer::pem_file_iter(file).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    match read {
        Ok(chain) if chain.is_empty() => Err(unread(file, "certificate", "there is none")),
        Ok(chain) => Ok(chain),
        Err(error) => Err(unread(file, "certificate", error)),
    }
}

fn unread(file: &Path, what: &'static str, why: impl std::fmt::Display) -> TlsError {
    TlsError::File { file: file.display().to_string(), what, why: why.to_string() }
}
