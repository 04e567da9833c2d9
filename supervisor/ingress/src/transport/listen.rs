//! Binding the addresses.

use std::fs::Permissions;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, PermissionsExt, chown};
use std::path::Path;
use std::sync::Arc;

use nix::unistd::Group;
use tokio::net::{TcpListener, TcpSocket, UnixListener, UnixSocket, UnixStream};

use crate::admission::origin::Site;
use crate::admission::tokens::Tokens;
use crate::transport::expiry::CertificateExpiry;
use crate::transport::tls::Encryption;
use shadowslice_config::{Listener, SOCKET_MODE};
use shadowslice_datapath::peer::{Guard, Refusals, UnknownAccount};
use shadowslice_datapath::sockets::{Inherited, PassableSocket, SocketFile};

/// At most `net.core.somaxconn`, which is usually the same number. Beyond it, a client of a Unix
/// socket that does not block is turned away at once.
const BACKLOG: u32 = 4096;

#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct BindError {
    message: String,
    #[source]
    source: Option<io::Error>,
}

impl BindError {
    pub(crate) fn new(message: String, source: Option<io::Error>) -> Self {
        Self { message, source }
    }
}

#[derive(Debug)]
pub(crate) enum Bound {
    Unix {
        listener: Arc<UnixListener>,
        file: Arc<SocketFile>,
        guard: Guard,
    },
    Tcp {
        listener: Arc<TcpListener>,
        /// As it is configured.
        address: SocketAddr,
        site: Site,
        encryption: Option<Encryption>,
        tokens: Option<Tokens>,
    },
}

impl Bound {
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
    pub(crate) fn of<'b>(bound: impl IntoIterator<Item = &'b Bound>) -> Self {
        let encryption = |bound: &Bound| match bound {
            Bound::Tcp { encryption, .. } => encryption.clone(),
            Bound::Unix { .. } => None,
        };
        Self(bound.into_iter().filter_map(encryption).collect())
    }

    /// Returns when the certificates in use expire, each file once.
    pub fn expiries(&self) -> Vec<CertificateExpiry> {
        let mut all: Vec<CertificateExpiry> = Vec::new();
        for expiry in self.0.iter().flat_map(Encryption::expiries) {
            // Listeners share files.
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

/// What is spoken on an address.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Spoken {
    /// For the log.
    pub(crate) name: &'static str,
    /// Inside TLS, by its name there.
    pub(crate) alpn: &'static [u8],
}

/// Takes all the addresses, or none of them.
pub(crate) async fn bind_all(
    spoken: Spoken,
    listeners: &[Listener],
    inherited: &mut Inherited,
    refusals: &Arc<Refusals>,
) -> Result<Vec<Bound>, BindError> {
    let mut bound = Vec::with_capacity(listeners.len());
    for listener in listeners {
        let taken = bind(spoken, listener, inherited, refusals).await?;
        say(spoken.name, &taken);
        bound.push(taken);
    }
    Ok(bound)
}

/// Port 0 means any free port; only the log says which port was taken.
fn say(what: &str, bound: &Bound) {
    let Bound::Tcp { listener, site, encryption, tokens, .. } = bound else { return };
    let Ok(address) = listener.local_addr() else { return };
    tracing::info!(protocol = what, %address, "listening");
    let knows_clients = tokens.is_some() || encryption.as_ref().is_some_and(|tls| tls.knows_clients);
    let (missing, advice) = match (encryption.is_some(), knows_clients) {
        (true, true) => return,
        (false, false) => ("encryption and authentication", "set `tls` and `tokens`"),
        (false, true) => ("encryption, so that others can read the tokens", "set `tls`"),
        (true, false) => ("authentication", "set `tokens`, or `client_ca` in `tls`"),
    };
    if *site == Site::Network {
        tracing::warn!(
            protocol = what,
            %address,
            missing,
            advice,
            "a listener without this protection is open to other hosts; follow the advice, or listen on a Unix socket"
        );
    }
}

pub(crate) async fn bind(
    spoken: Spoken,
    listener: &Listener,
    inherited: &mut Inherited,
    refusals: &Arc<Refusals>,
) -> Result<Bound, BindError> {
    match listener {
        Listener::Tcp { address, tls, tokens } => {
            let encryption = tls.as_ref().map(|tls| Encryption::read(tls, spoken.alpn)).transpose()?;
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
            let (listener, site) = (Arc::new(listener.map_err(failed)?), Site::of_tcp(*address));
            Ok(Bound::Tcp { listener, address: *address, site, encryption, tokens })
        }
        Listener::Unix { path, mode, group, peers } => {
            let group = group.as_deref().map(|group| group_id(path, group)).transpose()?;
            let guard = peers.as_ref().map(|peers| Guard::only(peers, refusals)).transpose()?;
            let guard = guard.unwrap_or_else(Guard::everybody);
            let socket = inherited.take(&unix_address(path));
            if socket.is_none() {
                make_way(path).await?;
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
) -> io::Result<Bound> {
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
            // No client can connect before `listen`; mode and group are set by then.
            protect()?;
            (file, socket.listen(BACKLOG)?)
        }
    };
    Ok(Bound::Unix { listener: Arc::new(listener), file: Arc::new(file), guard })
}

fn group_id(path: &Path, group: &str) -> Result<u32, BindError> {
    let unknown = |source| BindError {
        message: format!("the group {group:?} of the socket {} does not exist on this host", path.display()),
        source,
    };
    match Group::from_name(group) {
        Ok(Some(found)) => Ok(found.gid.as_raw()),
        Ok(None) => Err(unknown(None)),
        Err(errno) => Err(unknown(Some(errno.into()))),
    }
}

/// Removes a socket on which no process listens.
async fn make_way(path: &Path) -> Result<(), BindError> {
    let shown = path.display();
    let stale = |source| BindError {
        message: format!("cannot remove the old socket at {shown}; remove the socket, or listen elsewhere"),
        source: Some(source),
    };
    let in_use = || BindError {
        message: format!("another process listens on {shown}; stop that process, or listen elsewhere"),
        source: None,
    };
    match path.symlink_metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(stale(error)),
        Ok(found) if !found.file_type().is_socket() => {
            let message = format!("{shown} exists and is not a socket; remove the file, or listen elsewhere");
            return Err(BindError { message, source: None });
        }
        Ok(_) => {}
    }
    match UnixStream::connect(path).await {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path).map_err(stale)
        }
        // A server that is too busy to take another connection.
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(in_use()),
        Err(error) => Err(stale(error)),
        Ok(_) => Err(in_use()),
    }
}

impl From<UnknownAccount> for BindError {
    fn from(unknown: UnknownAccount) -> Self {
        Self { message: unknown.to_string(), source: None }
    }
}

#[cfg(test)]
#[path = "listen_tests.rs"]
mod tests;
