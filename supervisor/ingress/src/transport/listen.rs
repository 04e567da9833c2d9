//! The binding of listeners to their addresses.

use std::fs::Permissions;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, PermissionsExt, chown};
use std::path::Path;
use std::sync::Arc;

use nix::unistd::Group;
use tokio::net::{TcpListener, TcpSocket, UnixListener, UnixSocket, UnixStream};

use super::certificate_expiry::CertificateExpiry;
use super::tls::Encryption;
use crate::admission::{BindError, Origin, Tokens};
use shadowslice_config::{Listener, SOCKET_MODE};
use shadowslice_datapath::peer::{Guard, Refusals};
use shadowslice_datapath::sockets::{Inherited, PassableSocket, SocketFile};

/// The maximum number of connections that wait to be accepted. The system limits it to
/// `net.core.somaxconn`, which is usually the same number. If the backlog of a Unix socket is full,
/// a non-blocking client is refused at once.
const BACKLOG: u32 = 4096;

#[derive(Debug)]
pub(crate) enum BoundListener {
    Unix {
        listener: Arc<UnixListener>,
        file: Arc<SocketFile>,
        guard: Guard,
    },
    Tcp {
        listener: Arc<TcpListener>,
        /// The address as it is configured.
        address: SocketAddr,
        origin: Origin,
        encryption: Option<Encryption>,
        tokens: Option<Tokens>,
    },
}

impl BoundListener {
    /// Returns the address as the configuration writes it.
    pub(crate) fn address(&self) -> String {
        match self {
            Self::Unix { file, .. } => unix_address(file.path()),
            Self::Tcp { address, .. } => address.to_string(),
        }
    }

    pub(crate) fn passable(&self) -> PassableSocket {
        match self {
            Self::Unix { listener, file, .. } => {
                PassableSocket::new(unix_address(file.path()), listener, Some(file))
            }
            Self::Tcp { listener, address, .. } => PassableSocket::new(address.to_string(), listener, None),
        }
    }
}

/// The certificates of listeners.
#[derive(Debug, Clone)]
pub struct Certificates(Vec<Encryption>);

impl Certificates {
    pub(crate) fn of<'b>(bound: impl IntoIterator<Item = &'b BoundListener>) -> Self {
        let encryption = |bound: &BoundListener| match bound {
            BoundListener::Tcp { encryption, .. } => encryption.clone(),
            BoundListener::Unix { .. } => None,
        };
        Self(bound.into_iter().filter_map(encryption).collect())
    }

    /// Returns when the certificates in use expire, with one entry for each file.
    pub fn expiries(&self) -> Vec<CertificateExpiry> {
        let mut all: Vec<CertificateExpiry> = Vec::new();
        for expiry in self.0.iter().flat_map(Encryption::expiries) {
            // Several listeners may use the same file.
            if !all.iter().any(|known| (&known.file, known.kind) == (&expiry.file, expiry.kind)) {
                all.push(expiry);
            }
        }
        all
    }
}

fn unix_address(path: &Path) -> String {
    format!("unix:{}", path.display())
}

/// The protocol of a listener.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Protocol {
    /// The name for the log.
    name: &'static str,
    /// The name of the encrypted protocol in TLS.
    alpn: &'static [u8],
}

impl Protocol {
    pub(crate) const HTTP: Self = Self { name: "HTTP", alpn: b"http/1.1" };
    pub(crate) const GRPC: Self = Self { name: "gRPC", alpn: b"h2" };
    pub(crate) const METRICS: Self = Self { name: "metrics", ..Self::HTTP };
}

/// Binds all addresses, or none of them.
pub(crate) async fn bind_all(
    protocol: Protocol,
    listeners: &[Listener],
    inherited: &mut Inherited,
    refusals: &Arc<Refusals>,
) -> Result<Vec<BoundListener>, BindError> {
    let mut bound = Vec::with_capacity(listeners.len());
    for listener in listeners {
        let taken = bind(protocol, listener, inherited, refusals).await?;
        log_address(protocol.name, &taken);
        bound.push(taken);
    }
    Ok(bound)
}

/// Logs the address of a TCP listener, and warns about missing protection. Port 0 means any free
/// port, and only the log contains the port that was chosen.
fn log_address(protocol: &str, bound: &BoundListener) {
    let BoundListener::Tcp { listener, origin, encryption, tokens, .. } = bound else { return };
    let Ok(address) = listener.local_addr() else { return };
    tracing::info!(protocol, %address, "listening");
    let identifies_clients =
        tokens.is_some() || encryption.as_ref().is_some_and(|tls| tls.identifies_clients);
    let (missing, advice) = match (encryption.is_some(), identifies_clients) {
        (true, true) => return,
        (false, false) => ("encryption and authentication", "set `tls` and `tokens`"),
        (false, true) => ("encryption, so that others can read the tokens", "set `tls`"),
        (true, false) => ("authentication", "set `tokens`, or `client_ca` in `tls`"),
    };
    if *origin == Origin::Network {
        tracing::warn!(
            protocol,
            %address,
            missing,
            advice,
            "a listener without this protection is open to other hosts; follow the advice, or listen on a Unix socket"
        );
    }
}

async fn bind(
    protocol: Protocol,
    listener: &Listener,
    inherited: &mut Inherited,
    refusals: &Arc<Refusals>,
) -> Result<BoundListener, BindError> {
    match listener {
        Listener::Tcp { address, tls, tokens } => {
            let encryption = tls.as_ref().map(|tls| Encryption::read(tls, protocol.alpn)).transpose()?;
            let tokens = tokens.as_ref().map(|file| Tokens::read(file, refusals)).transpose()?;
            let failed = |source| {
                let message = format!(
                    "cannot listen on {address}; stop the program that listens there, or set another address in `listen`"
                );
                BindError::new(message, Some(source))
            };
            let listener = match inherited.take(&address.to_string()) {
                Some(socket) => TcpListener::from_std(socket.into()),
                None => bind_tcp(*address),
            };
            let (listener, origin) = (Arc::new(listener.map_err(failed)?), Origin::of_tcp(*address));
            Ok(BoundListener::Tcp { listener, address: *address, origin, encryption, tokens })
        }
        Listener::Unix { path, mode, group, peers } => {
            let group = group.as_deref().map(|group| group_id(path, group)).transpose()?;
            let guard = peers.as_ref().map(|peers| Guard::only(peers, refusals)).transpose()?;
            let guard = guard.unwrap_or_else(Guard::everybody);
            let socket = inherited.take(&unix_address(path));
            if socket.is_none() {
                remove_stale_socket(path).await?;
            }
            bind_unix(path, socket, (mode.unwrap_or(SOCKET_MODE), group), guard).map_err(|source| {
                let message = format!(
                    "cannot listen on {}; its folder must exist, and this user must be able to write to it",
                    path.display()
                );
                BindError::new(message, Some(source))
            })
        }
    }
}

fn bind_tcp(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

fn bind_unix(
    path: &Path,
    inherited: Option<OwnedFd>,
    (mode, group): (u32, Option<u32>),
    guard: Guard,
) -> io::Result<BoundListener> {
    let protect = || {
        chown(path, None, group)?;
        std::fs::set_permissions(path, Permissions::from_mode(mode))
    };
    let (file, listener) = match inherited {
        Some(socket) => {
            protect()?;
            (SocketFile::inherited(path)?, UnixListener::from_std(socket.into())?)
        }
        None => {
            let socket = UnixSocket::new_stream()?;
            socket.bind(path)?;
            let file = SocketFile::new(path)?;
            // Clients cannot connect before `listen`, so the mode and the group are set in time.
            protect()?;
            (file, socket.listen(BACKLOG)?)
        }
    };
    Ok(BoundListener::Unix { listener: Arc::new(listener), file: Arc::new(file), guard })
}

fn group_id(path: &Path, group: &str) -> Result<u32, BindError> {
    let unknown = |source| {
        let message =
            format!("the group {group:?} of the socket {} does not exist on this host", path.display());
        BindError::new(message, source)
    };
    match Group::from_name(group) {
        Ok(Some(found)) => Ok(found.gid.as_raw()),
        Ok(None) => Err(unknown(None)),
        Err(errno) => Err(unknown(Some(errno.into()))),
    }
}

/// Removes a socket on which no process listens.
async fn remove_stale_socket(path: &Path) -> Result<(), BindError> {
    let shown = path.display();
    let stale = |source| {
        let message =
            format!("cannot remove the old socket at {shown}; remove the socket, or listen elsewhere");
        BindError::new(message, Some(source))
    };
    let in_use = || {
        let message = format!("another process listens on {shown}; stop that process, or listen elsewhere");
        BindError::new(message, None)
    };
    match path.symlink_metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(stale(error)),
        Ok(found) if !found.file_type().is_socket() => {
            let message = format!("{shown} exists and is not a socket; remove the file, or listen elsewhere");
            return Err(BindError::new(message, None));
        }
        Ok(_) => {}
    }
    match UnixStream::connect(path).await {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path).map_err(stale)
        }
        // The other process is too busy to accept a connection.
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(in_use()),
        Err(error) => Err(stale(error)),
        Ok(_) => Err(in_use()),
    }
}

#[cfg(test)]
#[path = "listen_tests.rs"]
mod tests;
