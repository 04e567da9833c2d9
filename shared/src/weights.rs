//! The messages with which the supervisor and its workers exchange regions of GPU memory that hold
//! weights.
//!
//! ```text
//! supervisor ── all regions that it keeps for the model ──▶ worker, before it starts
//! supervisor ◀── a region that the worker has allocated ── worker, before it is warm
//! ```
//!
//! Each message carries a file descriptor of the region, over a socket that the worker inherits. The
//! open descriptor keeps the memory allocated, so the supervisor does not need CUDA.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use nix::sys::socket::{AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, sendmsg, socketpair};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use serde::{Deserialize, Serialize};

/// The maximum number of regions that the supervisor sends to a worker. The same maximum applies to
/// the regions that the supervisor accepts from a worker.
pub const MAX_REGIONS: usize = 16;

/// The maximum size of a message in bytes, without the descriptor.
const MESSAGE: usize = 64;

/// The description of a region's content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct RegionContent {
    /// The hash of the region's tensors and of their order.
    pub fingerprint: [u8; 32],
    /// The size of the region in bytes.
    pub bytes: u64,
}

/// A region of GPU memory that holds weights.
#[derive(Debug)]
pub struct WeightRegion {
    /// The content of the region.
    pub content: RegionContent,
    /// The file descriptor, which keeps the memory allocated.
    pub file: OwnedFd,
}

/// Creates a pair of connected sockets over which regions are sent.
pub fn socket_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?)
}

/// Sends a region without blocking.
///
/// # Errors
///
/// Returns [`io::ErrorKind::WouldBlock`] if the socket is full, or another error of the socket.
pub fn send(socket: impl AsFd, content: &RegionContent, file: BorrowedFd<'_>) -> io::Result<()> {
    let message = postcard::to_stdvec(content).map_err(io::Error::other)?;
    let (socket, files) = (socket.as_fd().as_raw_fd(), [file.as_raw_fd()]);
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
    sendmsg::<()>(socket, &[IoSlice::new(&message)], &[ControlMessage::ScmRights(&files)], flags, None)?;
    Ok(())
}

/// Receives a region without blocking. Returns `None` if no region has arrived, or if the peer has
/// closed the socket.
///
/// # Errors
///
/// Returns an error if a message does not describe a region or has no descriptor.
pub fn receive(socket: impl AsFd) -> io::Result<Option<WeightRegion>> {
    let mut message = [0; MESSAGE];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut rights = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = match recvmsg(socket, &mut [IoSliceMut::new(&mut message)], &mut rights, flags) {
        Ok(received) if received.bytes == 0 => return Ok(None),
        Ok(received) => received,
        Err(rustix::io::Errno::AGAIN) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let content = postcard::from_bytes(&message[..received.bytes]).map_err(io::Error::other)?;
    let mut files = rights.drain().flat_map(|right| match right {
        RecvAncillaryMessage::ScmRights(files) => files.collect::<Vec<_>>(),
        _ => Vec::new(),
    });
    let file = files.next().ok_or_else(|| io::Error::other("a message about a region has no descriptor"))?;
    Ok(Some(WeightRegion { content, file }))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Seek, Write};

    use nix::sys::memfd::{MFdFlags, memfd_create};

    use super::*;

    #[test]
    fn regions_arrive_with_their_descriptors_and_nothing_blocks() {
        let (ours, theirs) = socket_pair().unwrap();
        assert!(receive(&theirs).unwrap().is_none());
        let mut file = File::from(memfd_create("region", MFdFlags::MFD_CLOEXEC).unwrap());
        file.write_all(b"weights").unwrap();
        let content = RegionContent { fingerprint: [7; 32], bytes: u64::MAX };
        send(&ours, &content, file.as_fd()).unwrap();
        drop(file);
        let region = receive(&theirs).unwrap().unwrap();
        assert_eq!(region.content, content);
        let (mut file, mut text) = (File::from(region.file), String::new());
        file.rewind().unwrap();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text, "weights");
        assert!(receive(&theirs).unwrap().is_none());
    }

    #[test]
    fn invalid_messages_are_errors_and_a_closed_socket_gives_none() {
        let (ours, theirs) = socket_pair().unwrap();
        for garbage in [&b"x"[..], &[0; 40], &[255; 400]] {
            nix::sys::socket::send(ours.as_raw_fd(), garbage, MsgFlags::empty()).unwrap();
            assert!(receive(&theirs).is_err());
        }
        drop(ours);
        assert!(receive(&theirs).unwrap().is_none());
    }
}
