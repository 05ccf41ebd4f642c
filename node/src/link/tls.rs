//! TLS towards an edge: the system's authorities or a configured one, and the node's own certificate if the edge asks.

use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use rustls_platform_verifier::BuilderVerifierExt;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::config::EdgeTls;
use crate::providers::client::install_crypto;

/// A ready TLS client for one edge.
#[derive(Clone)]
pub(super) struct Connector {
    tls: TlsConnector,
    name: ServerName<'static>,
}

impl Connector {
    pub(super) fn new(files: &EdgeTls, host: &str) -> Result<Self, String> {
        install_crypto();
        let name = ServerName::try_from(host.to_owned())
            .map_err(|_| format!("{host} is no name for a certificate"))?;
        let builder = ClientConfig::builder();
        let builder = match &files.ca {
            None => builder
                .with_platform_verifier()
                .map_err(|e| format!("the system's authorities: {e}"))?,
            Some(path) => {
                let mut roots = RootCertStore::empty();
                for certificate in certificates(path)? {
                    roots
                        .add(certificate)
                        .map_err(|e| format!("{}: {e}", path.display()))?;
                }
                builder.with_root_certificates(roots)
            }
        };
        let config = match (&files.cert, &files.key) {
            (Some(cert), Some(key)) => {
                let chain = certificates(cert)?;
                let key_der = PrivateKeyDer::from_pem_file(key)
                    .map_err(|e| format!("cannot read {}: {e}", key.display()))?;
                builder
                    .with_client_auth_cert(chain, key_der)
                    .map_err(|e| format!("{}: {e}", cert.display()))?
            }
            (None, None) => builder.with_no_client_auth(),
            (Some(_), None) | (None, Some(_)) => return Err(String::from("cert and key belong together")),
        };
        Ok(Self {
            tls: TlsConnector::from(Arc::new(config)),
            name,
        })
    }

    pub(super) async fn connect(&self, socket: TcpStream) -> std::io::Result<TlsStream<TcpStream>> {
        self.tls.connect(self.name.clone(), socket).await
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let fail = |e: &dyn std::fmt::Display| format!("cannot read {}: {e}", path.display());
    let all = CertificateDer::pem_file_iter(path)
        .map_err(|e| fail(&e))?
        .collect::<Result<Vec<_>, _>>()
        .map_err(|e| fail(&e))?;
    if all.is_empty() {
        Err(fail(&"it holds no certificate"))
    } else {
        Ok(all)
    }
}
