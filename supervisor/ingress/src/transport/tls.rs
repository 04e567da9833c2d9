//! Encrypted connections over TCP.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{RootCertStore, ServerConfig};
use tokio_rustls::server::TlsStream;
use webpki::EndEntityCert;

use super::certificate_expiry::{CertificateExpiry, certificates, expiries, expiry_warnings};
use crate::admission::{BindError, ReloadingFile};
use shadowslice_config::Tls;

/// The time that a client has for the handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug, Clone)]
pub(crate) struct Encryption {
    loaded: Arc<ReloadingFile<Loaded>>,
    /// True if clients need certificates.
    pub(super) identifies_clients: bool,
}

/// The contents of a listener's files.
struct Loaded {
    config: Arc<ServerConfig>,
    expiries: Vec<CertificateExpiry>,
}

impl Encryption {
    /// Reads a listener's files. `protocol` is the ALPN name of the encrypted protocol.
    pub(super) fn read(files: &Tls, protocol: &'static [u8]) -> Result<Self, BindError> {
        let mut watched = vec![files.certificate.clone(), files.key.clone()];
        watched.extend(files.client_ca.clone());
        let identifies_clients = files.client_ca.is_some();
        let files = files.clone();
        let load = move || {
            let config = Arc::new(server_config(&files, protocol)?);
            Ok::<_, BindError>(Loaded { config, expiries: expiries(&files) })
        };
        Ok(Self { loaded: ReloadingFile::read(watched, load)?, identifies_clients })
    }

    /// Returns when the certificates in use expire.
    pub(super) fn expiries(&self) -> Vec<CertificateExpiry> {
        self.loaded.current().expiries.clone()
    }

    /// Performs the handshake. Returns the names in the client's certificate if clients need one.
    pub(super) async fn accept(&self, stream: TcpStream) -> io::Result<(TlsStream<TcpStream>, Vec<String>)> {
        let acceptor = TlsAcceptor::from(Arc::clone(&self.loaded.current().config));
        let stream = timeout(HANDSHAKE_TIMEOUT, acceptor.accept(stream)).await??;
        let certificates = stream.get_ref().1.peer_certificates().unwrap_or_default();
        let names = certificates.first().map(names).unwrap_or_default();
        Ok((stream, names))
    }
}

/// Returns a certificate's names of hosts, and URIs such as those of SPIFFE.
fn names(certificate: &CertificateDer<'_>) -> Vec<String> {
    let Ok(certificate) = EndEntityCert::try_from(certificate) else { return Vec::new() };
    certificate.valid_dns_names().chain(certificate.valid_uri_names()).map(str::to_owned).collect()
}

fn server_config(files: &Tls, protocol: &[u8]) -> Result<ServerConfig, BindError> {
    let provider = Arc::new(ring::default_provider());
    let unusable = |what: &str, file: &PathBuf, why: &(dyn std::fmt::Display + Sync)| {
        let message = format!("cannot use the {what} in {} for TLS", file.display());
        BindError::new(message, Some(io::Error::other(why.to_string())))
    };
    let chain =
        certificates(&files.certificate).map_err(|why| unusable("certificate", &files.certificate, &why))?;
    let key = PrivateKeyDer::from_pem_file(&files.key).map_err(|why| unusable("key", &files.key, &why))?;
    let builder =
        ServerConfig::builder_with_provider(Arc::clone(&provider)).with_safe_default_protocol_versions();
    let builder = builder.map_err(|why| unusable("certificate", &files.certificate, &why))?;
    let builder = match &files.client_ca {
        None => builder.with_no_client_auth(),
        Some(file) => {
            let mut roots = RootCertStore::empty();
            for root in certificates(file).map_err(|why| unusable("client_ca", file, &why))? {
                roots.add(root).map_err(|why| unusable("client_ca", file, &why))?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build();
            builder.with_client_cert_verifier(verifier.map_err(|why| unusable("client_ca", file, &why))?)
        }
    };
    let config = builder.with_single_cert(chain, key);
    let mut config = config.map_err(|why| unusable("certificate with its key", &files.certificate, &why))?;
    config.alpn_protocols = vec![protocol.to_vec()];
    // The warnings also appear whenever the files are read again.
    for warning in expiry_warnings(files) {
        tracing::warn!(
            %warning,
            "a TLS certificate is not valid, or expires soon; the supervisor loads a new file without a restart"
        );
    }
    Ok(config)
}
