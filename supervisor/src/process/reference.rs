//! A model's reference answers: written once by a reference worker, then sealed and inherited by
//! every worker that has to prove its own.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};

/// What failed about a file of reference answers.
#[derive(Debug, thiserror::Error)]
pub enum ReferenceError {
    /// It could not be made.
    #[error("a memory file for the reference answers cannot be made")]
    Create(#[source] Errno),
    /// It could not be sealed.
    #[error("the reference answers cannot be sealed")]
    Seal(#[source] Errno),
}

/// Reference answers, or the empty file that will hold them.
#[derive(Debug)]
pub struct ReferenceFile(OwnedFd);

impl ReferenceFile {
    /// An empty file that a reference worker can write.
    pub fn create(model: &str) -> Result<Self, ReferenceError> {
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let name = format!("shadowslice-{model}-reference");
        memfd_create(name.as_str(), flags).map(Self).map_err(ReferenceError::Create)
    }

    /// No more changes.
    pub fn seal(&self) -> Result<(), ReferenceError> {
        let seals =
            SealFlag::F_SEAL_WRITE | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_SEAL;
        fcntl(&self.0, FcntlArg::F_ADD_SEALS(seals)).map(drop).map_err(ReferenceError::Seal)
    }
}

impl AsFd for ReferenceFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
