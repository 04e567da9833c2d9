//! Binding the addresses.

use std::fs::Permissions;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::unistd::Group;
use tokio::net::{TcpListener, TcpSocket, UnixListener, UnixSocket, UnixStream};

use super::site::Site;
use shadowslice_config::{Address, Listener};
use shadowslice_datapath::peer::{Guard, Refusals, UnknownAccount};

/// At most `net.core.somaxconn`, which is usually the same number. Beyond it, a client of a Unix
/// socket that does not block is turned away at once.
const BACKLOG: u32 = 4096;

/// Where no mode is configured: the socket's owner and its group may connect.
const MODE: u32 = 0o660;

#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct BindError {
    message: String,
    #[source]
    source: Option<io::Error>,
}

#[derive(Debug)]
pub(super) enum Bound {
    Unix { listener: UnixListener, file: SocketFile, guard: Guard },
    Tcp { listener: TcpListener, site: Site },
}

/// Takes all the addresses, or none of them. `what` names the service for the log.
pub(super) async fn bind_all(
    what: &str,
    listeners: &[Listener],
    refusals: &Arc<Refusals>,
) -> Result<Vec<Bound>, BindError> {
    let mut bound = Vec::with_capacity(listeners.len());
    for listener in listeners {
        let taken = bind(listener, refusals).await?;
        // Port 0 means any free port; only this line says which port was taken.
        if let Bound::Tcp { listener, site } = &taken
            && let Ok(address) = listener.local_addr()
        {
            tracing::info!(%address, "listening for {what}");
            if *site == Site::Network {
                tracing::warn!(
                    %address,
                    "{what} is open to other hosts, without encryption and without authentication; listen on \
                     127.0.0.1 or on a Unix socket, behind a proxy that knows its clients"
                );
            }
        }
        bound.push(taken);
    }
    Ok(bound)
}

pub(super) async fn bind(listener: &Listener, refusals: &Arc<Refusals>) -> Result<Bound, BindError> {
    match &listener.address {
        Address::Tcp(address) => bind_tcp(*address).map_err(|source| BindError {
            message: format!(
                "cannot listen on {address}; stop what serves there, or give another address in `listen`"
            ),
            source: Some(source),
        }),
        Address::Unix(path) => {
            let group = listener.group.as_deref().map(|group| group_id(path, group)).transpose()?;
            let guard = listener.peers.as_ref().map(|peers| Guard::only(peers, refusals)).transpose()?;
            let guard = guard.unwrap_or_else(Guard::everybody);
            make_way(path).await?;
            bind_unix(path, listener.mode.unwrap_or(MODE), group, guard).map_err(|source| BindError {
                message: format!(
                    "cannot listen on {}; its folder must be there, and this user's to write to",
                    path.display()
                ),
                source: Some(source),
            })
        }
    }
}

fn bind_tcp(address: SocketAddr) -> io::Result<Bound> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    Ok(Bound::Tcp { listener: socket.listen(BACKLOG)?, site: Site::of_tcp(address) })
}

/// No client can connect before `listen`; mode and group are set by then.
fn bind_unix(path: &Path, mode: u32, group: Option<u32>, guard: Guard) -> io::Result<Bound> {
    let socket = UnixSocket::new_stream()?;
    socket.bind(path)?;
    let file = SocketFile::new(path)?;
    chown(path, None, group)?;
    std::fs::set_permissions(path, Permissions::from_mode(mode))?;
    Ok(Bound::Unix { listener: socket.listen(BACKLOG)?, file, guard })
}

fn group_id(path: &Path, group: &str) -> Result<u32, BindError> {
    let unknown = |source| BindError {
        message: format!("the group {group:?} of the socket {} is not known here", path.display()),
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
        message: format!("a socket that is in the way at {shown} could not be removed"),
        source: Some(source),
    };
    let in_use = || BindError {
        message: format!("another process serves on {shown}; stop it, or listen elsewhere"),
        source: None,
    };
    match path.symlink_metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(stale(error)),
        Ok(found) if !found.file_type().is_socket() => {
            let message = format!("{shown} is there and no socket; remove it, or listen elsewhere");
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

/// A Unix socket's file, removed when dropped if it is still the file that was made here.
#[derive(Debug)]
pub(super) struct SocketFile {
    path: PathBuf,
    identity: (u64, u64),
}

impl From<UnknownAccount> for BindError {
    fn from(unknown: UnknownAccount) -> Self {
        Self { message: unknown.to_string(), source: None }
    }
}

impl SocketFile {
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    fn new(path: &Path) -> io::Result<Self> {
        Ok(Self { path: path.to_owned(), identity: identity(path)? })
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if identity(&self.path).is_ok_and(|identity| identity == self.identity)
            && let Err(error) = std::fs::remove_file(&self.path)
        {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove the socket");
        }
    }
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    path.symlink_metadata().map(|file| (file.dev(), file.ino()))
}

#[cfg(test)]
#[path = "listen_tests.rs"]
mod tests;
