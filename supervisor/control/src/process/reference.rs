//! A model's reference answers. A reference worker writes them once. The supervisor then seals
//! them, and every worker that must prove its own answers inherits them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};

#[derive(Debug, thiserror::Error)]
pub enum ReferenceFileError {
    #[error(
        "cannot create a shared memory file (memfd) for the reference answers; free host memory, or raise the limit on open files"
    )]
    Create(#[source] Errno),
    #[error(
        "cannot make the shared memory file (memfd) of the reference answers read-only; this needs Linux 5.1 or later"
    )]
    Seal(#[source] Errno),
}

/// Reference answers, or the empty file that will hold them.
#[derive(Debug)]
pub struct ReferenceFile(OwnedFd);

impl ReferenceFile {
    pub fn create(model: &str) -> Result<Self, ReferenceFileError> {
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let name = format!("shadowslice-{model}-reference");
        memfd_create(name.as_str(), flags).map(Self).map_err(ReferenceFileError::Create)
    }

    /// Prevents all further writes and writable mappings. `F_SEAL_WRITE` would also cover older
    /// mappings, which do not exist here, but fails with `EBUSY` while the kernel holds one of the
    /// file's pages.
    pub fn seal(&self) -> Result<(), ReferenceFileError> {
        let seals = SealFlag::F_SEAL_FUTURE_WRITE
            | SealFlag::F_SEAL_GROW
            | SealFlag::F_SEAL_SHRINK
            | SealFlag::F_SEAL_SEAL;
        fcntl(&self.0, FcntlArg::F_ADD_SEALS(seals)).map(drop).map_err(ReferenceFileError::Seal)
    }
}

impl AsFd for ReferenceFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use nix::fcntl::{OFlag, SpliceFFlags, splice};
    use nix::unistd::pipe2;

    use super::*;

    const ANSWERS: &[u8] = b"what the model answers";

    fn written() -> (ReferenceFile, File) {
        let reference = ReferenceFile::create("m").unwrap();
        let file = File::from(reference.as_fd().try_clone_to_owned().unwrap());
        file.write_all_at(ANSWERS, 0).unwrap();
        (reference, file)
    }

    #[test]
    fn what_is_sealed_can_be_read_and_no_longer_changed() {
        let (reference, file) = written();
        reference.seal().unwrap();
        assert!(file.write_all_at(b"W", 0).is_err());
        assert!(file.write_all_at(b"more", ANSWERS.len() as u64).is_err());
        assert!(file.set_len(0).is_err());
        let mut read = vec![0; ANSWERS.len()];
        file.read_exact_at(&mut read, 0).unwrap();
        assert_eq!(read, ANSWERS);
    }

    #[test]
    fn it_is_sealed_though_the_kernel_holds_on_to_its_pages() {
        let (reference, file) = written();
        let (_reads, holds) = pipe2(OFlag::O_CLOEXEC).unwrap();
        let spliced = splice(&file, Some(&mut 0), &holds, None, ANSWERS.len(), SpliceFFlags::empty());
        assert_eq!(spliced, Ok(ANSWERS.len()));
        reference.seal().unwrap();
    }
}
