//! The descriptors that a worker inherits.
#![allow(unsafe_code)] // inherited descriptors have no other owner to get them from

use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::{Errno, FdFlags, fcntl_setfd, ioctl_fionbio};
use shadowslice_shared::boot::descriptors as number;

#[derive(Debug)]
pub struct Descriptors {
    pub batches: OwnedFd,
    pub requests: OwnedFd,
    pub responses: OwnedFd,
    pub reference: OwnedFd,
    pub pool: Option<OwnedFd>,
    /// The socket for weights on a GPU.
    pub weights: Option<OwnedFd>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AdoptError {
    #[error("descriptor {0} was not passed to the worker")]
    Missing(RawFd),
    #[error("a socket cannot be made to wait")]
    Blocking(#[source] Errno),
    #[error("the inherited descriptors were adopted before")]
    Twice,
}

/// The socket of the boot, and the others. Once, and before the process opens any descriptor of its own, which could otherwise get the
/// number of one that was not passed.
pub fn adopt() -> Result<(OwnedFd, Descriptors), AdoptError> {
    static ADOPTED: AtomicBool = AtomicBool::new(false);
    if ADOPTED.swap(true, Ordering::Relaxed) {
        return Err(AdoptError::Twice);
    }
    let needed = |number| take(number).ok_or(AdoptError::Missing(number));
    let (boot, batches) = (needed(number::BOOT)?, needed(number::BATCHES)?);
    // The supervisor's ends never wait, and a pair may have been made with that flag on both.
    for socket in [&boot, &batches] {
        ioctl_fionbio(socket, false).map_err(AdoptError::Blocking)?;
    }
    let descriptors = Descriptors {
        batches,
        requests: needed(number::REQUESTS)?,
        responses: needed(number::RESPONSES)?,
        reference: needed(number::REFERENCE)?,
        pool: take(number::POOL),
        weights: take(number::WEIGHTS),
    };
    Ok((boot, descriptors))
}

/// `None` if the descriptor is not open.
fn take(number: RawFd) -> Option<OwnedFd> {
    // SAFETY: it is only passed to one call, which answers EBADF if it is not open.
    let maybe_open = unsafe { BorrowedFd::borrow_raw(number) };
    fcntl_setfd(maybe_open, FdFlags::CLOEXEC).ok()?;
    // SAFETY: it is open, and has no other owner: the process opened none of its own yet, and
    // `adopt` comes here once.
    Some(unsafe { OwnedFd::from_raw_fd(number) })
}
