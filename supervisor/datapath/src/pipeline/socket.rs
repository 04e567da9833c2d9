//! The supervisor's end of a worker's batch socket, and descriptors in the reactor.
#![allow(unsafe_code)] // adopting a descriptor into the reactor

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::socket::{AddressFamily, MsgFlags, Shutdown, SockFlag, SockType, recv, shutdown, socketpair};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

#[derive(Debug)]
pub struct BatchSocket(AsyncFd<OwnedFd>);

impl BatchSocket {
    /// A connected pair: ours, and the end that the worker inherits, which blocks.
    pub fn pair() -> io::Result<(Self, OwnedFd)> {
        let (ours, theirs) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?;
        fcntl(&ours, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        Ok((Self(adopt(ours)?), theirs))
    }

    /// The next message, into `message`; 0 when the worker is gone.
    pub async fn receive(&self, message: &mut [u8]) -> io::Result<usize> {
        let receive = |socket: &OwnedFd| Ok(recv(socket.as_raw_fd(), message, MsgFlags::empty())?);
        self.0.async_io(Interest::READABLE, receive).await
    }

    /// Tells the worker that there is no more work. The worker finishes its batches, answers, and
    /// exits; then this end reads its end of file.
    pub fn close(&self) {
        // An error means that the worker is gone already.
        shutdown(self.0.as_raw_fd(), Shutdown::Write).ok();
    }
}

/// Puts a descriptor, which does not block, into the reactor, to be read.
pub(crate) fn adopt(descriptor: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` names the same open file for as long as it lives, and the reactor's
    // registration ends before it does.
    Ok(unsafe { AsyncFd::register_with_interest(descriptor, Interest::READABLE) }?)
}

impl AsRawFd for BatchSocket {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}
