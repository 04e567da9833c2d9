//! Passes listening sockets from one supervisor to the next, so that at any moment at least one
//! supervisor listens.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

/// A listening socket that can be passed to another supervisor while it is in use.
#[derive(Clone)]
pub struct PassableSocket {
    /// The address as it is written in the configuration.
    pub address: String,
    socket: Weak<dyn AsFd + Send + Sync>,
    /// The socket's file. For TCP, the weak reference is empty.
    file: Weak<SocketFile>,
}

impl fmt::Debug for PassableSocket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Passable").field(&self.address).finish()
    }
}

impl PassableSocket {
    pub fn new<S: AsFd + Send + Sync + 'static>(
        address: String,
        socket: &Arc<S>,
        file: Option<&Arc<SocketFile>>,
    ) -> Self {
        let socket: Weak<S> = Arc::downgrade(socket);
        Self { address, socket, file: file.map(Arc::downgrade).unwrap_or_default() }
    }

    /// Duplicates the socket's descriptor. Fails if the socket is closed.
    pub fn duplicate(&self) -> io::Result<OwnedFd> {
        let socket = self.socket.upgrade().ok_or(io::ErrorKind::NotConnected)?;
        socket.as_fd().try_clone_to_owned()
    }

    /// Leaves the socket's file to another supervisor. This process no longer removes the file when
    /// the socket is dropped.
    pub fn release(&self) {
        if let Some(file) = self.file.upgrade() {
            file.is_released.store(true, Ordering::Relaxed);
        }
    }

    /// Takes over the file of an inherited socket. This process then removes the file when the
    /// socket is dropped.
    pub fn retain(&self) {
        if let Some(file) = self.file.upgrade() {
            file.is_released.store(false, Ordering::Relaxed);
        }
    }
}

/// The sockets inherited from the previous supervisor, by address. Dropping this value closes the
/// sockets that were not taken.
#[derive(Debug, Default)]
pub struct Inherited(HashMap<String, Vec<OwnedFd>>);

impl Inherited {
    pub fn insert(&mut self, address: String, socket: OwnedFd) {
        self.0.entry(address).or_default().push(socket);
    }

    /// Takes the first remaining socket with this address. Several sockets may have port 0.
    pub fn take(&mut self, address: &str) -> Option<OwnedFd> {
        let sockets = self.0.get_mut(address)?;
        (!sockets.is_empty()).then(|| sockets.remove(0))
    }

    /// Removes the files of Unix sockets that were not taken, because no process listens on them
    /// any more.
    pub fn remove_unclaimed(self) {
        for (address, sockets) in self.0 {
            if let (Some(path), false) = (address.strip_prefix("unix:"), sockets.is_empty())
                && let Err(error) = std::fs::remove_file(path)
            {
                tracing::warn!(
                    path,
                    %error,
                    "cannot remove the file of a Unix socket on which no process listens; remove the file manually"
                );
            }
        }
    }
}

/// The file of a Unix socket. Dropping this value removes the file, unless another file has
/// replaced it.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    identity: (u64, u64),
    is_released: AtomicBool,
}

impl SocketFile {
    pub fn new(path: &Path) -> io::Result<Self> {
        Ok(Self { path: path.to_owned(), identity: identity(path)?, is_released: AtomicBool::new(false) })
    }

    /// Returns the file of a socket on which the previous supervisor still listens. Dropping the
    /// returned value does not remove the file unless the file is
    /// [retained](PassableSocket::retain).
    pub fn inherited(path: &Path) -> io::Result<Self> {
        let file = Self::new(path)?;
        file.is_released.store(true, Ordering::Relaxed);
        Ok(file)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if !self.is_released.load(Ordering::Relaxed)
            && identity(&self.path).is_ok_and(|identity| identity == self.identity)
            && let Err(error) = std::fs::remove_file(&self.path)
            // During an upgrade, the other supervisor may have removed the file first.
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(
                path = %self.path.display(),
                %error,
                "cannot remove the file of a Unix socket that has closed; the next start replaces the file"
            );
        }
    }
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    path.symlink_metadata().map(|file| (file.dev(), file.ino()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_socket_that_was_passed_on_keeps_its_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.sock");
        let socket = Arc::new(UnixListener::bind(&path).unwrap());
        let file = Arc::new(SocketFile::new(&path).unwrap());
        let passable = PassableSocket::new("unix:x.sock".to_owned(), &socket, Some(&file));
        let copy = passable.duplicate().unwrap();
        passable.release();
        drop((socket, file));
        assert!(passable.duplicate().is_err(), "the copy does not keep it open");
        drop(passable);
        std::os::unix::net::UnixStream::connect(&path).unwrap();
        let socket = Arc::new(UnixListener::from(copy));
        let next = || Arc::new(SocketFile::inherited(&path).unwrap());
        drop(next());
        assert!(path.try_exists().unwrap(), "the previous supervisor listens there");
        let file = next();
        PassableSocket::new("unix:x.sock".to_owned(), &socket, Some(&file)).retain();
        drop(file);
        assert!(!path.try_exists().unwrap());
    }

    #[test]
    fn sockets_of_one_address_are_taken_in_turn() {
        let mut inherited = Inherited::default();
        let socket = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        inherited.insert("a:0".to_owned(), socket());
        inherited.insert("a:0".to_owned(), socket());
        assert!(inherited.take("b").is_none());
        assert!(inherited.take("a:0").is_some() && inherited.take("a:0").is_some());
        assert!(inherited.take("a:0").is_none());
    }
}
