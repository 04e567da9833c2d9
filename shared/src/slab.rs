//! Memory that supervisor and worker share: memory files of a fixed size, sealed so that neither
//! side can shrink a file that the other has mapped.
//!
//! By protocol, a part of a slab belongs to one side at a time, and changes hands with a message.
//! The supervisor never holds a reference into memory that a worker can write; it copies.
#![allow(unsafe_code)] // memory mappings

use std::num::NonZeroUsize;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use nix::sys::stat::fstat;
use nix::unistd::ftruncate;

/// Tensors start at multiples of this many bytes, the widest vector registers' size.
pub const ALIGNMENT: u64 = 64;

#[derive(Debug, thiserror::Error)]
pub enum SlabError {
    #[error("a memory file of {bytes} bytes cannot be made")]
    Create {
        bytes: u64,
        #[source]
        source: Errno,
    },
    #[error("a memory file cannot be sealed")]
    Seal(#[source] Errno),
    #[error("{bytes} bytes of shared memory cannot be mapped; is the address space limited?")]
    Map {
        bytes: u64,
        #[source]
        source: Errno,
    },
    #[error("a shared memory file does not tell its size")]
    Inspect(#[source] Errno),
    #[error("a shared memory file has {got} bytes instead of {want}")]
    Size { got: u64, want: u64 },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{len} bytes at {offset} lie outside of a slab of {bytes} bytes")]
pub struct OutOfSlab {
    offset: u64,
    len: u64,
    bytes: u64,
}

/// Why bytes could not be copied out of a slab.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum CopyError {
    #[error(transparent)]
    Outside(#[from] OutOfSlab),
    #[error("there is no memory for {0} bytes")]
    NoMemory(usize),
}

#[derive(Debug)]
struct Mapping {
    start: NonNull<u8>,
    bytes: u64,
}

// SAFETY: the mapping lives as long as the value and is not tied to a thread; the protocol says
// which side may touch which part when, see the types below.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(file: BorrowedFd<'_>, bytes: u64, access: ProtFlags) -> Result<Self, SlabError> {
        let failed = |source| SlabError::Map { bytes, source };
        let length = usize::try_from(bytes).ok().and_then(NonZeroUsize::new);
        let length = length.ok_or(failed(Errno::EINVAL))?;
        // SAFETY: a new mapping at an address of the kernel's choice disturbs no other; the file's
        // size was checked or set by the caller and is sealed, so no access can fault.
        let start = unsafe { mmap(None, length, access, MapFlags::MAP_SHARED, file, 0) }.map_err(failed)?;
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

    /// The mapping is readable.
    fn copy(&self, offset: u64, len: u64) -> Result<Vec<u8>, CopyError> {
        let start = self.at(offset, len)?;
        let len = usize::try_from(len).expect("it lies inside the mapping");
        let mut bytes = Vec::<u8>::new();
        bytes.try_reserve_exact(len).map_err(|_| CopyError::NoMemory(len))?;
        // SAFETY: `start` has `len` readable bytes, and `bytes` room for them; no reference to
        // memory that another process could be writing is made, and any byte is a valid u8.
        unsafe {
            std::ptr::copy_nonoverlapping(start.as_ptr(), bytes.as_mut_ptr(), len);
            bytes.set_len(len);
        }
        Ok(bytes)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let length = usize::try_from(self.bytes).expect("it was mapped with this size");
        // SAFETY: the mapping is ours, and references into it borrow from the value that drops.
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

/// Seals after which a file keeps its size for ever.
fn fixed_size() -> SealFlag {
    SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL
}

fn check_size(file: BorrowedFd<'_>, want: u64) -> Result<(), SlabError> {
    let status = fstat(file).map_err(SlabError::Inspect)?;
    let got = u64::try_from(status.st_size).unwrap_or(0);
    if got < want { Err(SlabError::Size { got, want }) } else { Ok(()) }
}

/// A slab that this process made and writes, and that others can only read.
#[derive(Debug)]
pub struct WritableSlab {
    file: MemoryFile,
    mapping: Mapping,
}

impl WritableSlab {
    /// Pages are taken as they are first written.
    pub fn create(name: &str, bytes: u64) -> Result<Self, SlabError> {
        let file = MemoryFile::create(name, bytes)?;
        let mapping = Mapping::new(file.fd.as_fd(), bytes, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE)?;
        // From here on no other writable mapping can be made, even by a process that inherits the
        // file.
        file.seal(fixed_size() | SealFlag::F_SEAL_FUTURE_WRITE)?;
        Ok(Self { file, mapping })
    }

    pub fn bytes(&self) -> u64 {
        self.file.bytes
    }

    /// The caller owns that part of the slab: no other thread or process reads or writes it now.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), OutOfSlab> {
        let start = self.mapping.at(offset, bytes.len() as u64)?;
        // SAFETY: `start` has room for `bytes`, which cannot overlap the mapping as no reference
        // into it is ever given out; a racing reader in another process sees torn bytes at worst.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), start.as_ptr(), bytes.len()) };
        Ok(())
    }

    /// The caller owns that part of the slab.
    pub fn copy(&self, offset: u64, len: u64) -> Result<Vec<u8>, CopyError> {
        self.mapping.copy(offset, len)
    }

    /// Whether `bytes` lie there; the caller owns that part of the slab.
    pub fn holds(&self, offset: u64, bytes: &[u8]) -> bool {
        let Ok(start) = self.mapping.at(offset, bytes.len() as u64) else { return false };
        // SAFETY: inside the mapping and readable. Only this process can write there, and that part
        // of it has one owner, the caller.
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

    /// For a device that reads there by itself: where the mapping starts, and its size in bytes.
    pub fn whole(&self) -> (NonNull<u8>, u64) {
        (self.mapping.start, self.mapping.bytes)
    }

    /// The bytes stay as they are until the batch is answered.
    pub fn bytes(&self, offset: u64, len: u64) -> Result<&[u8], OutOfSlab> {
        let start = self.mapping.at(offset, len)?;
        let len = usize::try_from(len).expect("it lies inside the mapping");
        // SAFETY: inside the mapping and readable. The writer is the supervisor, which does not
        // touch a request's part of the slab between sending it and having its answer.
        Ok(unsafe { std::slice::from_raw_parts(start.as_ptr(), len) })
    }
}

/// The supervisor's side of a slab that a worker writes.
#[derive(Debug)]
pub struct AnswerSlab {
    file: MemoryFile,
    mapping: Mapping,
}

impl AnswerSlab {
    /// This process only reads the slab.
    pub fn create(name: &str, bytes: u64) -> Result<Self, SlabError> {
        let file = MemoryFile::create(name, bytes)?;
        file.seal(fixed_size())?;
        let mapping = Mapping::new(file.fd.as_fd(), bytes, ProtFlags::PROT_READ)?;
        Ok(Self { file, mapping })
    }

    pub fn bytes(&self) -> u64 {
        self.file.bytes
    }

    /// A copy of the bytes at a place that the worker named.
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
}

impl AnswerWriter {
    /// Maps the first `bytes` bytes of `file`, which may be longer.
    pub fn map(file: BorrowedFd<'_>, bytes: u64) -> Result<Self, SlabError> {
        check_size(file, bytes)?;
        let mapping = Mapping::new(file, bytes, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE)?;
        Ok(Self { mapping })
    }

    /// For a device that writes there by itself: where the mapping starts, and its size in bytes.
    pub fn whole(&self) -> (NonNull<u8>, u64) {
        (self.mapping.start, self.mapping.bytes)
    }

    /// An address for such a device.
    pub fn place(&self, offset: u64, len: u64) -> Result<NonNull<u8>, OutOfSlab> {
        self.mapping.at(offset, len)
    }

    /// Only for the slot that the current batch was given.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), OutOfSlab> {
        let start = self.mapping.at(offset, bytes.len() as u64)?;
        // SAFETY: `start` has room for `bytes`; no reference into the mapping is ever given out.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), start.as_ptr(), bytes.len()) };
        Ok(())
    }
}

/// Shared 32-bit words, for state that several processes change at once.
#[derive(Debug)]
pub struct SharedWords {
    file: OwnedFd,
    mapping: Mapping,
}

impl SharedWords {
    /// `count` words, all zero.
    pub fn create(name: &str, count: u32) -> Result<Self, SlabError> {
        let bytes = u64::from(count) * 4;
        let file = MemoryFile::create(name, bytes)?;
        file.seal(fixed_size())?;
        Self::map(file.fd, bytes)
    }

    pub fn adopt(file: OwnedFd, count: u32) -> Result<Self, SlabError> {
        let bytes = u64::from(count) * 4;
        check_size(file.as_fd(), bytes)?;
        Self::map(file, bytes)
    }

    fn map(file: OwnedFd, bytes: u64) -> Result<Self, SlabError> {
        let mapping = Mapping::new(file.as_fd(), bytes, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE)?;
        Ok(Self { file, mapping })
    }

    pub fn words(&self) -> &[AtomicU32] {
        let count = usize::try_from(self.mapping.bytes / 4).expect("it was mapped");
        // SAFETY: the mapping is page-aligned, readable, writable and of this many words; every
        // process touches them only as atomics.
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
    fn what_is_written_is_read_on_the_other_side() {
        let slab = WritableSlab::create("test", 1 << 20).unwrap();
        let view = ReadableSlab::map(slab.as_fd(), 1 << 20).unwrap();
        slab.write(4096, b"tensor").unwrap();
        assert_eq!(view.bytes(4096, 6).unwrap(), b"tensor");
        assert!(slab.write((1 << 20) - 3, b"tensor").is_err());
        assert!(view.bytes(u64::MAX, 2).is_err());
    }

    #[test]
    fn a_request_slab_cannot_be_written_or_shrunk_by_who_inherits_it() {
        let slab = WritableSlab::create("test", 8192).unwrap();
        assert!(matches!(AnswerWriter::map(slab.as_fd(), 8192), Err(SlabError::Map { .. })));
        assert_eq!(ftruncate(slab.as_fd(), 0), Err(Errno::EPERM));
    }

    #[test]
    fn answers_are_copied_out_and_places_outside_refused() {
        let slab = AnswerSlab::create("test", 8192).unwrap();
        let writer = AnswerWriter::map(slab.as_fd(), 8192).unwrap();
        writer.write(100, b"answer").unwrap();
        assert_eq!(slab.copy(100, 6).unwrap(), b"answer");
        assert!(slab.copy(8190, 6).is_err());
        assert_eq!(ftruncate(slab.as_fd(), 0), Err(Errno::EPERM));
    }

    #[test]
    fn a_file_smaller_than_agreed_is_refused() {
        let slab = AnswerSlab::create("test", 4096).unwrap();
        assert!(matches!(AnswerWriter::map(slab.as_fd(), 8192), Err(SlabError::Size { .. })));
    }
}
