//! A part of a file in host memory from which the GPU copies directly. All processes that pin the same
//! file share its pages.
#![allow(unsafe_code)] // This module maps a file and registers the mapping with the driver.

use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::sys;
use nix::libc::off_t;
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};

use super::exclusion::Exclusion;
use super::paced::PacedCopies;
use super::{CudaError, CudaGpu, cuda_error};

/// The alignment of a mapped part in bytes. It is a multiple of the page size of every platform.
const PAGE: u64 = 1 << 16;

/// The reasons why a file cannot be pinned.
#[derive(Debug, thiserror::Error)]
pub enum PinError {
    #[error("cannot map the file")]
    Map(#[source] io::Error),
    #[error("the driver refuses to pin the file")]
    Register(#[source] CudaError),
}

/// A part of a file whose pages stay in host memory. Their content is that of the file at any time, so only
/// files that no process changes may be pinned.
#[derive(Debug)]
pub struct PinnedFile {
    start: NonNull<std::ffi::c_void>,
    /// The offset in the file at which the mapping begins.
    offset: u64,
    bytes: usize,
    gpu: Arc<CudaGpu>,
}

impl PinnedFile {
    /// Pins this part of a file.
    pub fn pin(gpu: &Arc<CudaGpu>, file: &File, part: Range<u64>) -> Result<Self, PinError> {
        let invalid = || PinError::Map(io::Error::other("the part of the file is invalid"));
        let offset = part.start / PAGE * PAGE;
        let bytes = part.end.checked_sub(offset).and_then(|bytes| usize::try_from(bytes).ok());
        let length = bytes.and_then(NonZeroUsize::new).ok_or_else(invalid)?;
        if file.metadata().map_err(PinError::Map)?.len() < part.end {
            return Err(invalid());
        }
        let from = off_t::try_from(offset).map_err(|_| invalid())?;
        // SAFETY: a new mapping at an address that the kernel chooses does not affect other mappings.
        let mapped = unsafe { mmap(None, length, ProtFlags::PROT_READ, MapFlags::MAP_SHARED, file, from) };
        let start = mapped.map_err(|errno| PinError::Map(errno.into()))?;
        let _exclusion = Exclusion::of_setup();
        let flags = sys::CU_MEMHOSTREGISTER_READ_ONLY;
        // SAFETY: the memory is mapped in this size, and stays mapped until it is unregistered.
        let registered = unsafe { sys::cuMemHostRegister_v2(start.as_ptr(), length.get(), flags) };
        if let Err(error) = registered.result() {
            // SAFETY: the mapping was created above, and nothing uses it.
            unsafe { munmap(start, length.get()) }.ok();
            return Err(PinError::Register(cuda_error("register a file")(error)));
        }
        Ok(Self { start, offset, bytes: length.get(), gpu: Arc::clone(gpu) })
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copies parts of the file to the GPU. Batches that start later wait for the copies.
    ///
    /// # Safety
    ///
    /// The memory at each destination on the GPU must be as large as its part, and no work that was queued
    /// earlier may use it.
    ///
    /// # Panics
    ///
    /// Panics if a part is outside the pinned part of the file.
    pub unsafe fn copy(
        &self,
        parts: impl Iterator<Item = (Range<u64>, NonNull<u8>)>,
    ) -> Result<(), CudaError> {
        let mut copies = PacedCopies::on(&self.gpu);
        for (part, to) in parts {
            assert!(
                self.offset <= part.start && part.end <= self.offset + self.bytes as u64,
                "the part is not pinned"
            );
            let (begin, bytes) = ((part.start - self.offset) as usize, (part.end - part.start) as usize);
            // SAFETY: the source is inside the mapping, and the caller guarantees the destination. The
            // driver reads pinned pages without faults, even if the file is truncated.
            unsafe { copies.copy_in(self.start.as_ptr().byte_add(begin), bytes, to.as_ptr() as u64) }?;
        }
        Ok(())
    }
}

impl Drop for PinnedFile {
    fn drop(&mut self) {
        let _exclusion = Exclusion::of_setup();
        // If these calls fail, the context is unusable, and the driver has dropped the registration.
        self.gpu.bind().and_then(|()| self.gpu.synchronize()).ok();
        // SAFETY: the GPU has finished all copies, and nothing else uses the mapping.
        unsafe {
            sys::cuMemHostUnregister(self.start.as_ptr());
            munmap(self.start, self.bytes).ok();
        }
    }
}
