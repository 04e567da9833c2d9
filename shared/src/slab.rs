//! The shared memory of the supervisor and its workers. It consists of *slabs*: memory files (`memfd`)
//! of a fixed size. Seals prevent either process from shrinking a file that the other process has
//! mapped.
//!
//! By protocol, each part of a slab has one owner at a time, which transfers the ownership with a
//! message. The supervisor never holds a reference into memory that a worker can write. It copies the
//! bytes instead.
#![allow(unsafe_code)] // Memory mappings need unsafe code.

use std::num::NonZeroUsize;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use nix::sys::stat::fstat;
use nix::unistd::ftruncate;

use crate::pause::{PAUSE_BYTES, PauseWord};

/// The alignment of tensors in a slab, in bytes: the size of the widest vector registers.
pub const ALIGNMENT: u64 = 64;

/// The error of creating or mapping shared memory.
#[derive(Debug, thiserror::Error)]
pub enum SlabError {
    /// The kernel did not create the memory file.
    #[error(
        "cannot create a shared memory file (memfd) of {bytes} bytes; free host memory, or raise the limit on open files"
    )]
    Create {
        /// The size of the file in bytes.
        bytes: u64,
        /// The error of the system call.
        #[source]
        source: Errno,
    },
    /// The kernel did not add the seals.
    #[error("cannot seal a shared memory file (memfd); this needs Linux 5.1 or later")]
    Seal(#[source] Errno),
    /// The kernel did not map the file.
    #[error("cannot map {bytes} bytes of shared memory; check the limit of the address space (ulimit -v)")]
    Map {
        /// The size of the mapping in bytes.
        bytes: u64,
        /// The error of the system call.
        #[source]
        source: Errno,
    },
    /// The kernel did not report the file's size.
    #[error(
        "cannot read the size of a shared memory file (memfd), which is a bug in shadowslice; please report it"
    )]
    Inspect(#[source] Errno),
    /// The memory file that the other process created is too small.
    #[error(
        "a shared memory file (memfd) has {got} bytes instead of {want}; install both programs from one build"
    )]
    Size {
        /// The size of the file in bytes.
        got: u64,
        /// The required size in bytes.
        want: u64,
    },
}

/// The error for a range of bytes that does not lie inside a slab.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{len} bytes at offset {offset} exceed a shared memory file of {bytes} bytes")]
pub struct OutOfSlab {
    offset: u64,
    len: u64,
    bytes: u64,
}

/// The error of copying bytes out of a slab.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum CopyError {
    /// The range does not lie inside the slab.
    #[error(transparent)]
    Outside(#[from] OutOfSlab),
    /// The process cannot allocate this number of bytes.
    #[error("cannot allocate {0} bytes; free host memory")]
    NoMemory(usize),
}

#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    bytes: u64,
}

// SAFETY: the mapping exists until the value is dropped, and any thread may use it. The protocol
// defines which process is allowed to access each part at a time. The documentation of the types below
// describes this protocol.
unsafe impl Send for Mapping {}
// SAFETY: the reasons for `Send` also apply to `Sync`.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(file: BorrowedFd<'_>, bytes: u64, access: ProtFlags) -> Result<Self, SlabError> {
        Self::of_range(file, 0, bytes, access)
    }

    /// Maps `bytes` bytes at `offset`, which is a multiple of the page size. Any process may write there.
    pub(crate) fn writable_at(file: BorrowedFd<'_>, offset: u64, bytes: u64) -> Result<Self, SlabError> {
        check_size(file, offset.saturating_add(bytes))?;
        Self::of_range(file, offset, bytes, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE)
    }

    fn of_range(file: BorrowedFd<'_>, offset: u64, bytes: u64, access: ProtFlags) -> Result<Self, SlabError> {
        let failed = |source| SlabError::Map { bytes, source };
        let length = usize::try_from(bytes).ok().and_then(NonZeroUsize::new);
        let length = length.ok_or(failed(Errno::EINVAL))?;
        let offset = i64::try_from(offset).map_err(|_| failed(Errno::EOVERFLOW))?;
        // SAFETY: a new mapping at an address that the kernel chooses does not affect other mappings.
        // The caller has checked or set the file's size and sealed the file, so no access can fault.
        let start =
            unsafe { mmap(None, length, access, MapFlags::MAP_SHARED, file, offset) }.map_err(failed)?;
        Ok(Self { start: start.cast(), bytes })
    }

    fn at(&self, offset: u64, len: u64) -> Result<NonNull<u8>, OutOfSlab> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.bytes);
        if !inside {
            return Err(OutOfSlab { offset, len, bytes: self.bytes });
        }
        let offset = usize::try_from(offset).expect("below the mapping's size, which is a usize");
        // SAFETY: `offset` is at most the mapping's size.
        Ok(unsafe { self.start.add(offset) })
    }

    /// Writes bytes into the mapping, which must be writable. No caller gets a reference to memory that
    /// this function writes. A concurrent reader in another process sees torn bytes at worst.
    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), OutOfSlab> {
        let start = self.at(offset, bytes.len() as u64)?;
        // SAFETY: `start` has room for `bytes`. The two do not overlap, because no caller gets a
        // reference into the mapping.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), start.as_ptr(), bytes.len()) };
        Ok(())
    }

    /// Copies bytes out of the mapping, which must be readable.
    fn copy(&self, offset: u64, len: u64) -> Result<Vec<u8>, CopyError> {
        let start = self.at(offset, len)?;
        let len = usize::try_from(len).expect("it lies inside the mapping");
        let mut bytes = Vec::<u8>::new();
        bytes.try_reserve_exact(len).map_err(|_| CopyError::NoMemory(len))?;
        // SAFETY: `start` has `len` readable bytes, and `bytes` has the capacity for them. The copy
        // creates no reference to memory that another process may write, and every byte is a valid u8.
        unsafe {
            std::ptr::copy_nonoverlapping(start.as_ptr(), bytes.as_mut_ptr(), len);
            bytes.set_len(len);
        }
        Ok(bytes)
    }
}

impl Mapping {
    /// Returns the first word of the mapping, which must be writable.
    pub(crate) fn word(&self) -> &AtomicU32 {
        // SAFETY: the mapping is page-aligned, and not empty. All processes access the word only through
        // atomic operations.
        unsafe { self.start.cast::<AtomicU32>().as_ref() }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let length = usize::try_from(self.bytes).expect("it was mapped with this size");
        // SAFETY: this value owns the mapping, and references into it borrow from this value.
        let unmapped = unsafe { munmap(self.start.cast(), length) };
        debug_assert!(unmapped.is_ok(), "our own mapping can be unmapped");
    }
}

#[derive(Debug)]
struct MemoryFile {
    fd: OwnedFd,
    bytes: u64,
}

impl MemoryFile {
    fn create(name: &str, bytes: u64) -> Result<Self, SlabError> {
        let failed = |source| SlabError::Create { bytes, source };
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let fd = memfd_create(name, flags).map_err(failed)?;
        let length = i64::try_from(bytes).map_err(|_| failed(Errno::EFBIG))?;
        ftruncate(&fd, length).map_err(failed)?;
        Ok(Self { fd, bytes })
    }

    fn seal(&self, seals: SealFlag) -> Result<(), SlabError> {
        fcntl(&self.fd, FcntlArg::F_ADD_SEALS(seals)).map(drop).map_err(SlabError::Seal)
    }
}

/// Returns the seals that fix a file's size permanently.
fn fixed_size() -> SealFlag {
    SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL
}

fn check_size(file: BorrowedFd<'_>, want: u64) -> Result<(), SlabError> {
    let status = fstat(file).map_err(SlabError::Inspect)?;
    let got = u64::try_from(status.st_size).unwrap_or(0);
    if got < want { Err(SlabError::Size { got, want }) } else { Ok(()) }
}

/// A slab that this process creates and writes. Other processes can only read it.
#[derive(Debug)]
pub struct WritableSlab {
    file: MemoryFile,
    mapping: Mapping,
}

impl WritableSlab {
    /// Creates a slab of `bytes` bytes. The kernel allocates a page when the page is first written.
    pub fn create(name: &str, bytes: u64) -> Result<Self, SlabError> {
        let file = MemoryFile::create(name, bytes)?;
        let mapping = Mapping::new(file.fd.as_fd(), bytes, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE)?;
        // This seal prevents later writable mappings, even in a process that inherits the file.
        file.seal(fixed_size() | SealFlag::F_SEAL_FUTURE_WRITE)?;
        Ok(Self { file, mapping })
    }

    /// Returns the size of the slab in bytes.
    pub fn bytes(&self) -> u64 {
        self.file.bytes
    }

    /// Writes bytes into the slab. The caller must own that part of the slab: no other thread or
    /// process may read or write the part during the call.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), OutOfSlab> {
        self.mapping.write(offset, bytes)
    }

    /// Copies bytes out of the slab. The caller must own that part of the slab.
    pub fn copy(&self, offset: u64, len: u64) -> Result<Vec<u8>, CopyError> {
        self.mapping.copy(offset, len)
    }

    /// Returns whether the slab holds `bytes` at `offset`. The caller must own that part of the slab.
    pub fn holds(&self, offset: u64, bytes: &[u8]) -> bool {
        let Ok(start) = self.mapping.at(offset, bytes.len() as u64) else { return false };
        // SAFETY: the bytes lie inside the mapping and are readable. Only this process can write to the
        // slab, and the caller is the only owner of that part.
        let there = unsafe { std::slice::from_raw_parts(start.as_ptr(), bytes.len()) };
        there == bytes
    }
}

impl AsFd for WritableSlab {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.fd.as_fd()
    }
}

/// A worker's read-only view of a [`WritableSlab`].
#[derive(Debug)]
pub struct ReadableSlab {
    mapping: Mapping,
}

impl ReadableSlab {
    /// Maps the first `bytes` bytes of `file`, which may be longer.
    pub fn map(file: BorrowedFd<'_>, bytes: u64) -> Result<Self, SlabError> {
        check_size(file, bytes)?;
        Ok(Self { mapping: Mapping::new(file, bytes, ProtFlags::PROT_READ)? })
    }

    /// Returns the start of the mapping and its size in bytes. A device that reads the mapping directly
    /// needs both.
    pub fn whole(&self) -> (NonNull<u8>, u64) {
        (self.mapping.start, self.mapping.bytes)
    }

    /// Returns bytes of the slab. They stay unchanged until the worker has answered the batch.
    pub fn bytes(&self, offset: u64, len: u64) -> Result<&[u8], OutOfSlab> {
        let start = self.mapping.at(offset, len)?;
        let len = usize::try_from(len).expect("it lies inside the mapping");
        // SAFETY: the bytes lie inside the mapping and are readable. Only the supervisor writes to the
        // slab, and it does not change a request's part until the worker has answered.
        Ok(unsafe { std::slice::from_raw_parts(start.as_ptr(), len) })
    }
}

/// A slab that a worker writes and that the supervisor creates and reads. After the slab, its file contains
/// the worker's [pause word](crate::pause).
#[derive(Debug)]
pub struct AnswerSlab {
    file: MemoryFile,
    mapping: Mapping,
    pause: Arc<PauseWord>,
}

impl AnswerSlab {
    /// Creates a slab of `bytes` bytes, which this process only reads.
    pub fn create(name: &str, bytes: u64) -> Result<Self, SlabError> {
        let file = MemoryFile::create(name, PauseWord::offset(bytes).saturating_add(PAUSE_BYTES))?;
        file.seal(fixed_size())?;
        let mapping = Mapping::new(file.fd.as_fd(), bytes, ProtFlags::PROT_READ)?;
        let pause = PauseWord::map(file.fd.as_fd(), bytes).map(Arc::new)?;
        Ok(Self { file, mapping, pause })
    }

    /// Returns the size of the slab in bytes.
    pub fn bytes(&self) -> u64 {
        self.mapping.bytes
    }

    /// Returns the pause word of the worker that writes the slab.
    pub fn pause_word(&self) -> &Arc<PauseWord> {
        &self.pause
    }

    /// Copies bytes out of the slab. The offset comes from a worker, so the function checks that the
    /// bytes lie inside the slab.
    pub fn copy(&self, offset: u64, len: u64) -> Result<Vec<u8>, CopyError> {
        self.mapping.copy(offset, len)
    }
}

impl AsFd for AnswerSlab {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.fd.as_fd()
    }
}

/// A worker's writable view of its [`AnswerSlab`].
#[derive(Debug)]
pub struct AnswerWriter {
    mapping: Mapping,
    pause: Arc<PauseWord>,
}

impl AnswerWriter {
    /// Maps the file of a slab of `bytes` bytes.
    pub fn map(file: BorrowedFd<'_>, bytes: u64) -> Result<Self, SlabError> {
        let pause = PauseWord::map(file, bytes).map(Arc::new)?;
        let mapping = Mapping::new(file, bytes, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE)?;
        Ok(Self { mapping, pause })
    }

    /// Returns the worker's pause word.
    pub fn pause_word(&self) -> &Arc<PauseWord> {
        &self.pause
    }

    /// Returns the start of the mapping and its size in bytes. A device that writes to the mapping
    /// directly needs both.
    pub fn whole(&self) -> (NonNull<u8>, u64) {
        (self.mapping.start, self.mapping.bytes)
    }

    /// Returns the address to which a device writes `len` bytes.
    pub fn place(&self, offset: u64, len: u64) -> Result<NonNull<u8>, OutOfSlab> {
        self.mapping.at(offset, len)
    }

    /// Writes bytes into the slab. The range must lie in the slot of the current batch.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), OutOfSlab> {
        self.mapping.write(offset, bytes)
    }
}

/// An array of 32-bit words that several processes read and write concurrently.
#[derive(Debug)]
pub struct SharedWords {
    file: OwnedFd,
    mapping: Mapping,
}

impl SharedWords {
    /// Creates `count` words, all zero.
    pub fn create(name: &str, count: u32) -> Result<Self, SlabError> {
        let bytes = u64::from(count) * 4;
        let file = MemoryFile::create(name, bytes)?;
        file.seal(fixed_size())?;
        Self::map(file.fd, bytes)
    }

    /// Maps the first `count` words of `file`, which another process created.
    pub fn adopt(file: OwnedFd, count: u32) -> Result<Self, SlabError> {
        let bytes = u64::from(count) * 4;
        check_size(file.as_fd(), bytes)?;
        Self::map(file, bytes)
    }

    fn map(file: OwnedFd, bytes: u64) -> Result<Self, SlabError> {
        let mapping = Mapping::new(file.as_fd(), bytes, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE)?;
        Ok(Self { file, mapping })
    }

    /// Returns the words.
    pub fn words(&self) -> &[AtomicU32] {
        let count = usize::try_from(self.mapping.bytes / 4).expect("it was mapped");
        // SAFETY: the mapping is page-aligned, readable and writable, and has this number of words. All
        // processes access the words only through atomic operations.
        unsafe { std::slice::from_raw_parts(self.mapping.start.cast::<AtomicU32>().as_ptr(), count) }
    }
}

impl AsFd for SharedWords {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_other_side_reads_written_bytes() {
        let slab = WritableSlab::create("test", 1 << 20).unwrap();
        let view = ReadableSlab::map(slab.as_fd(), 1 << 20).unwrap();
        slab.write(4096, b"tensor").unwrap();
        assert_eq!(view.bytes(4096, 6).unwrap(), b"tensor");
        assert!(slab.write((1 << 20) - 3, b"tensor").is_err());
        assert!(view.bytes(u64::MAX, 2).is_err());
    }

    #[test]
    fn an_inheriting_process_can_neither_write_nor_shrink_a_request_slab() {
        let slab = WritableSlab::create("test", 8192).unwrap();
        assert!(matches!(Mapping::writable_at(slab.as_fd(), 0, 8192), Err(SlabError::Map { .. })));
        assert_eq!(ftruncate(slab.as_fd(), 0), Err(Errno::EPERM));
    }

    #[test]
    fn answers_are_copied_and_ranges_outside_are_refused() {
        let slab = AnswerSlab::create("test", 8192).unwrap();
        let writer = AnswerWriter::map(slab.as_fd(), 8192).unwrap();
        writer.write(100, b"answer").unwrap();
        assert_eq!(slab.copy(100, 6).unwrap(), b"answer");
        assert!(slab.copy(8190, 6).is_err());
        assert_eq!(ftruncate(slab.as_fd(), 0), Err(Errno::EPERM));
    }

    #[test]
    fn a_file_that_is_too_small_is_refused() {
        let slab = AnswerSlab::create("test", 4096).unwrap();
        assert!(matches!(AnswerWriter::map(slab.as_fd(), 8192), Err(SlabError::Size { .. })));
    }
}
