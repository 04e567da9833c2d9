//! The supervisor's end of a worker's batch socket, and the registration of file descriptors with
//! the async reactor.
#![allow(unsafe_code)] // registering a descriptor with the reactor is unsafe

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::socket::{AddressFamily, MsgFlags, Shutdown, SockFlag, SockType, recv, shutdown, socketpair};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// A socket over which the supervisor sends batches to a worker.
#[derive(Debug)]
pub struct BatchSocket(AsyncFd<OwnedFd>);

impl BatchSocket {
    /// Creates a connected pair of sockets: the supervisor's end, and the blocking end that the
    /// worker inherits.
    pub fn pair() -> io::Result<(Self, OwnedFd)> {
        let (ours, theirs) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?;
        fcntl(&ours, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        Ok((Self(adopt(ours)?), theirs))
    }

    /// Receives the next message into `message`. Returns its length, or 0 if the worker has ended.
    pub async fn receive(&self, message: &mut [u8]) -> io::Result<usize> {
        let receive = |socket: &OwnedFd| Ok(recv(socket.as_raw_fd(), message, MsgFlags::empty())?);
        self.0.async_io(Interest::READABLE, receive).await
    }

    /// Shuts the socket down for writing. The worker then completes its batches, sends the answers
    /// and exits. Afterwards this end reads the end of file.
    pub fn close(&self) {
        // An error means that the worker has already ended, so the error is ignored.
        shutdown(self.0.as_raw_fd(), Shutdown::Write).ok();
    }
}

/// Registers a non-blocking descriptor with the reactor for reading.
pub(crate) fn adopt(descriptor: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` refers to the same open file during its whole lifetime, and the
    // reactor's registration ends before the `OwnedFd` is dropped.
    Ok(unsafe { AsyncFd::register_with_interest(descriptor, Interest::READABLE) }?)
}

impl AsRawFd for BatchSocket {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}
