//! TLS material for a listener, from PEM text. Decides protocols and whether peers must show certificates; reads no file.

use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};

/// What is spoken inside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Alpn {
    /// HTTP/2, else HTTP/1.1.
    Http,
    /// HTTP/1.1 alone: the link begins with an upgrade.
    Upgrade,
}

/// Why TLS material was refused; displays without any of it.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum TlsError {
    #[error("is no certificate chain in PEM: {0}")]
    Cert(String),
    #[error("is no private key in PEM: {0}")]
    Key(String),
    #[error("does not fit the certificate: {0}")]
    Pair(String),
    #[error("is no certificate authority in PEM: {0}")]
    ClientCa(String),
}

impl TlsError {
    /// The configuration key at fault.
    pub const fn part(&self) -> &'static str {
        match self {
            TlsError::Cert(_) => "cert",
            TlsError::Key(_) | TlsError::Pair(_) => "key",
            TlsError::ClientCa(_) => "client_ca",
        }
    }
}

/// A listener's configuration; with `client_ca` peers without a certificate of that authority are refused.
///
/// # Errors
/// Text that is not what it should be, or a key of another certificate.
pub fn server_config(
    cert: &str,
    key: &str,
    client_ca: Option<&str>,
    alpn: Alpn,
) -> Result<Arc<ServerConfig>, TlsError> {
    let chain = certificates(cert).map_err(TlsError::Cert)?;
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).map_err(|e| TlsError::Key(e.to_string()))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let versions = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|e| TlsError::Pair(e.to_string()))?;
    let peers = match client_ca {
        None => versions.with_no_client_auth(),
        Some(pem) => {
            let mut roots = RootCertStore::empty();
            for ca in certificates(pem).map_err(TlsError::ClientCa)? {
                roots.add(ca).map_err(|e| TlsError::ClientCa(e.to_string()))?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
                .build()
                .map_err(|e| TlsError::ClientCa(e.to_string()))?;
            versions.with_client_cert_verifier(verifier)
        }
    };
    let mut config = peers
        .with_single_cert(chain, key)
        .map_err(|e| TlsError::Pair(e.to_string()))?;
    config.alpn_protocols = match alpn {
        Alpn::Http => vec![b"h2".to_vec(), b"http/1.1".to_vec()],
        Alpn::Upgrade => vec![b"http/1.1".to_vec()],
    };
    Ok(Arc::new(config))
}

fn certificates(pem: &str) -> Result<Vec<CertificateDer<'static>>, String> {
    let chain: Vec<_> = CertificateDer::pem_slice_iter(pem.as_bytes())
        .collect::<Result<_, _>>()
        .map_err(|e| e.to_string())?;
    if chain.is_empty() {
        Err(String::from("none found"))
    } else {
        Ok(chain)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (String, String) {
        let made = rcgen::generate_simple_self_signed(vec![String::from("localhost")]).unwrap();
        (made.cert.pem(), made.signing_key.serialize_pem())
    }

    #[test]
    fn a_fault_is_laid_at_its_key() {
        let (cert, key) = pair();
        let (_, other) = pair();
        let part = |c: &str, k: &str, ca| {
            server_config(c, k, ca, Alpn::Http)
                .map(|_| ())
                .map_err(|e| e.part())
        };
        assert_eq!(part(&cert, &key, None), Ok(()));
        assert_eq!(part(&cert, &key, Some(&cert)), Ok(()));
        assert_eq!(part("", &key, None), Err("cert"));
        assert_eq!(part(&cert, &cert, None), Err("key"));
        assert_eq!(part(&cert, &other, None), Err("key"));
        assert_eq!(part(&cert, &key, Some("nothing")), Err("client_ca"));
    }

    #[test]
    fn only_the_link_does_without_http2() {
        let (cert, key) = pair();
        let alpn = |a| {
            server_config(&cert, &key, None, a)
                .unwrap()
                .alpn_protocols
                .clone()
        };
        assert_eq!(alpn(Alpn::Http), [b"h2".to_vec(), b"http/1.1".to_vec()]);
        assert_eq!(alpn(Alpn::Upgrade), [b"http/1.1".to_vec()]);
    }
}
