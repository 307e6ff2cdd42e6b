//! HTTPS: a certificate and its key. They are read at the start and after a renewal. Errors name the file that is wrong, and
//! the problem.

use std::path::{Path, PathBuf};
use std::sync::{Arc, RwLock};

use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{self, ServerConfig, crypto};

use crate::api::http::keys::{MAX_FILE_BYTES, read_secret};

/// The certificate and the key of a server, for TLS 1.2 and 1.3 with HTTP/1.1. All clones share one certificate.
#[derive(Clone)]
pub struct Tls(Arc<RwLock<TlsAcceptor>>);

#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("{}: {error}", path.display())]
    File { path: PathBuf, error: std::io::Error },
    #[error("{}: {problem}", path.display())]
    Content { path: PathBuf, problem: String },
    #[error("{} is not the key of the certificate in {}", key.display(), cert.display())]
    Mismatch { key: PathBuf, cert: PathBuf },
}

impl Tls {
    /// Reads two PEM files. `cert` has the server's certificate first, then the certificates of its issuers.
    pub fn read(cert: &Path, key: &Path) -> Result<Self, TlsError> {
        Ok(Self(Arc::new(RwLock::new(Self::acceptor_of(cert, key)?))))
    }

    /// Uses the certificate and key of `other` for new connections.
    pub fn renew(&self, other: &Self) {
        *self.0.write().expect("nothing panics under this lock") = other.acceptor();
    }

    pub(in crate::api) fn acceptor(&self) -> TlsAcceptor {
        self.0.read().expect("nothing panics under this lock").clone()
    }

    fn acceptor_of(cert: &Path, key: &Path) -> Result<TlsAcceptor, TlsError> {
        let content = |path: &Path, problem: &str| TlsError::Content {
            path: path.to_owned(),
            problem: problem.to_owned(),
        };
        let file = |path: &Path, error| TlsError::File { path: path.to_owned(), error };

        let pem = crate::file::read(cert, MAX_FILE_BYTES).map_err(|error| file(cert, error))?;
        let chain: Vec<_> = CertificateDer::pem_slice_iter(&pem)
            .collect::<Result<_, _>>()
            .map_err(|error| content(cert, &format!("invalid PEM: {error}")))?;
        if chain.is_empty() {
            return Err(content(cert, "holds no certificate: expected PEM, `-----BEGIN CERTIFICATE-----`"));
        }

        let pem = read_secret(key).map_err(|error| file(key, error))?;
        let private = PrivateKeyDer::from_pem_slice(&pem).map_err(|error| {
            let encrypted = pem.windows(9).any(|word| word == b"ENCRYPTED");
            match error {
                _ if encrypted => content(
                    key,
                    "the key is encrypted, and the server cannot ask for its password: decrypt it with `openssl pkey`",
                ),
                rustls::pki_types::pem::Error::NoItemsFound => {
                    content(key, "holds no private key: expected PEM, `-----BEGIN PRIVATE KEY-----`")
                }
                error => content(key, &format!("invalid PEM: {error}")),
            }
        })?;

        let provider = Arc::new(crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("ring has ciphers for both versions")
            .with_no_client_auth()
            .with_single_cert(chain, private);
        let mut config = config.map_err(|error| match error {
            rustls::Error::InconsistentKeys(_) => {
                TlsError::Mismatch { key: key.to_owned(), cert: cert.to_owned() }
            }
            rustls::Error::InvalidCertificate(_) => content(cert, &error.to_string()),
            error => content(key, &error.to_string()),
        })?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(TlsAcceptor::from(Arc::new(config)))
    }
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tls")
    }
}
