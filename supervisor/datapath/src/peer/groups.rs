//! Reads the groups of the process at the other end of a Unix socket.
#![allow(unsafe_code)] // no safe crate supports this socket option yet

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use nix::errno::Errno;
use nix::libc;

/// The number of groups for which the first read has room. Few processes have more groups.
const USUAL_GROUPS: usize = 64;

/// The largest number of groups that Linux allows for a process.
const MAX_GROUPS: usize = 65_536;

/// Returns the peer's supplementary groups at the time when it connected. The list is empty if the
/// kernel does not support the query (before Linux 4.13).
pub(super) fn supplementary(socket: BorrowedFd<'_>) -> io::Result<Vec<u32>> {
    let found = match read(socket, USUAL_GROUPS) {
        Err(Errno::ERANGE) => read(socket, MAX_GROUPS),
        found => found,
    };
    match found {
        Err(Errno::ENOPROTOOPT) => Ok(Vec::new()),
        found => Ok(found?),
    }
}

fn read(socket: BorrowedFd<'_>, max_groups: usize) -> Result<Vec<u32>, Errno> {
    let mut groups: Vec<libc::gid_t> = vec![0; max_groups];
    let size = size_of_val(groups.as_slice());
    let mut bytes = libc::socklen_t::try_from(size).map_err(|_| Errno::EOVERFLOW)?;
    // SAFETY: the kernel writes at most `bytes` bytes to `groups`, which has this length, and then
    // writes the number of these bytes to `bytes`. Both variables outlive the call.
    let code = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERGROUPS,
            groups.as_mut_ptr().cast(),
            &raw mut bytes,
        )
    };
    Errno::result(code)?;
    groups.truncate(bytes as usize / size_of::<libc::gid_t>());
    Ok(groups)
}
