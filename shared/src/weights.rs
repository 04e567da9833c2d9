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

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use serde::{Deserialize, Serialize};

pub use crate::passing::socket_pair;
use crate::passing::{self, FileMessage};

/// The maximum number of regions that the supervisor sends to a worker. The same maximum applies to
/// the regions that the supervisor accepts from a worker.
pub const MAX_REGIONS: usize = 16;

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

/// Sends a region without blocking.
///
/// # Errors
///
/// Returns [`io::ErrorKind::WouldBlock`] if the socket is full, or another error of the socket.
pub fn send(socket: impl AsFd, content: &RegionContent, file: BorrowedFd<'_>) -> io::Result<()> {
    passing::send(socket, content, &[file])
}

/// Receives a region without blocking. Returns `None` if no region has arrived, or if the peer has
/// closed the socket.
///
/// # Errors
///
/// Returns an error if a message does not describe a region or has no descriptor.
pub fn receive(socket: impl AsFd) -> io::Result<Option<WeightRegion>> {
    let Some(FileMessage { content, files }) = passing::receive(socket)? else { return Ok(None) };
    let file = files.into_iter().next();
    let file = file.ok_or_else(|| io::Error::other("a message about a region has no descriptor"))?;
    Ok(Some(WeightRegion { content, file }))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Seek, Write};

    use std::os::fd::AsRawFd;

    use nix::sys::memfd::{MFdFlags, memfd_create};
    use nix::sys::socket::MsgFlags;

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
