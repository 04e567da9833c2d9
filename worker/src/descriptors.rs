//! The descriptors that a worker inherits from the supervisor.
#![allow(unsafe_code)] // Inherited descriptors have no owner yet.

use std::collections::BTreeMap;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, OFlag, fcntl};
use shadowslice_shared::boot::descriptors::{BATCHES, BOOT, POOL, REFERENCE, REQUESTS, RESPONSES, WEIGHTS};
use shadowslice_shared::members::MEMBERS;

/// The inherited descriptors, except for the boot socket.
#[derive(Debug)]
pub struct Descriptors {
    pub batches: OwnedFd,
    pub requests: OwnedFd,
    pub responses: OwnedFd,
    pub reference: OwnedFd,
    pub pool: Option<OwnedFd>,
    /// The socket over which workers and supervisor exchange a model's weights on a GPU.
    pub weights: Option<OwnedFd>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AdoptError {
    #[error("the supervisor did not pass descriptor {0} to this worker")]
    Missing(RawFd),
    #[error("cannot make an inherited socket blocking")]
    Blocking(#[source] Errno),
    #[error("this worker has already adopted its inherited descriptors; please report this bug")]
    Twice,
}

/// Takes ownership of the inherited descriptors, and returns the boot socket separately from the
/// rest. Call this once, before the process opens any other descriptor. If the supervisor has not
/// passed an optional descriptor, the next descriptor that the process opens could get the number
/// of the missing one.
pub fn adopt() -> Result<(OwnedFd, Descriptors), AdoptError> {
    static ADOPTED: AtomicBool = AtomicBool::new(false);
    if ADOPTED.swap(true, Ordering::Relaxed) {
        return Err(AdoptError::Twice);
    }
    let numbers = [BOOT, BATCHES, REQUESTS, RESPONSES, REFERENCE, POOL, WEIGHTS];
    adopt_from(numbers.into_iter().filter_map(|number| Some((number, take(number)?))).collect())
}

/// Takes the socket over which the supervisor adds members to this shared worker. Call this once, before
/// the process opens any other descriptor.
pub(crate) fn adopt_members_socket() -> Result<OwnedFd, AdoptError> {
    take(MEMBERS).ok_or(AdoptError::Missing(MEMBERS))
}

/// Returns the boot socket and the other descriptors of a worker, from all its descriptors by their
/// numbers.
pub(crate) fn adopt_from(mut files: BTreeMap<RawFd, OwnedFd>) -> Result<(OwnedFd, Descriptors), AdoptError> {
    let mut needed = |number| files.remove(&number).ok_or(AdoptError::Missing(number));
    let (boot, batches) = (needed(BOOT)?, needed(BATCHES)?);
    // The supervisor needs non-blocking ends, and `socketpair` may have made both ends
    // non-blocking. The worker needs blocking ends.
    for socket in [&boot, &batches] {
        fcntl(socket, FcntlArg::F_SETFL(OFlag::empty())).map_err(AdoptError::Blocking)?;
    }
    let (requests, responses, reference) = (needed(REQUESTS)?, needed(RESPONSES)?, needed(REFERENCE)?);
    let (pool, weights) = (files.remove(&POOL), files.remove(&WEIGHTS));
    Ok((boot, Descriptors { batches, requests, responses, reference, pool, weights }))
}

/// Takes ownership of the descriptor with this number. Returns `None` if the descriptor is not
/// open.
fn take(number: RawFd) -> Option<OwnedFd> {
    // SAFETY: only the next call uses the descriptor. That call fails with EBADF if the descriptor
    // is not open.
    let maybe_open = unsafe { BorrowedFd::borrow_raw(number) };
    fcntl(maybe_open, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC)).ok()?;
    // SAFETY: the descriptor is open and has no other owner: the process has opened no descriptors
    // yet, and `adopt` takes each number once.
    Some(unsafe { OwnedFd::from_raw_fd(number) })
}
