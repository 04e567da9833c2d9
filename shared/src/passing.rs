//! Messages that carry file descriptors, over sockets between the supervisor and its workers.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use nix::sys::socket::{AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, sendmsg, socketpair};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The maximum size of a message in bytes, without the descriptors. The longest message contains two
/// paths, each of at most 4 KiB.
const MAX_MESSAGE_BYTES: usize = 16 << 10;

/// The maximum number of descriptors in a message.
pub const MAX_FILES: usize = 12;

/// A message with the descriptors that it carries.
#[derive(Debug)]
pub struct FileMessage<M> {
    /// The content of the message.
    pub content: M,
    /// The descriptors, in the order in which they were sent. Each is close-on-exec.
    pub files: Vec<OwnedFd>,
}

/// Creates a pair of connected sockets for such messages.
pub fn socket_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?)
}

/// Sends a message without blocking.
///
/// # Errors
///
/// Returns [`io::ErrorKind::WouldBlock`] if the socket is full, [`io::ErrorKind::InvalidInput`] if the
/// message is too long or has more than [`MAX_FILES`] descriptors, or another error of the socket.
pub fn send(socket: impl AsFd, content: &impl Serialize, files: &[BorrowedFd<'_>]) -> io::Result<()> {
    let message = postcard::to_stdvec(content).map_err(io::Error::other)?;
    if message.len() > MAX_MESSAGE_BYTES || files.len() > MAX_FILES {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let (socket, files) = (socket.as_fd().as_raw_fd(), files.iter().map(AsRawFd::as_raw_fd));
    let files: Vec<_> = files.collect();
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
    sendmsg::<()>(socket, &[IoSlice::new(&message)], &[ControlMessage::ScmRights(&files)], flags, None)?;
    Ok(())
}

/// Receives a message without blocking. Returns `None` if no message has arrived, or if the peer has
/// closed the socket.
///
/// # Errors
///
/// Returns an error if the content of a message is invalid.
pub fn receive<M: DeserializeOwned>(socket: impl AsFd) -> io::Result<Option<FileMessage<M>>> {
    let mut message = [0; MAX_MESSAGE_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
    let mut rights = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = match recvmsg(socket, &mut [IoSliceMut::new(&mut message)], &mut rights, flags) {
        Ok(received) if received.bytes == 0 => return Ok(None),
        Ok(received) => received,
        Err(rustix::io::Errno::AGAIN) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let content = postcard::from_bytes(&message[..received.bytes]).map_err(io::Error::other)?;
    let files = rights.drain().flat_map(|right| match right {
        RecvAncillaryMessage::ScmRights(files) => files.collect::<Vec<_>>(),
        _ => Vec::new(),
    });
    Ok(Some(FileMessage { content, files: files.collect() }))
}
