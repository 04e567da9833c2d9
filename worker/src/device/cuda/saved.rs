//! Content of GPU memory that waits in host memory while a model sleeps.
#![allow(unsafe_code)] // This module allocates host memory.

use std::ffi::c_void;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::ptr::{NonNull, null_mut};

use cudarc::driver::{DriverError, sys};
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use super::exclusion::Exclusion;
use super::{CudaError, cuda_error};

/// Parts of an arena's content, one after the other in host memory.
#[derive(Debug)]
pub(super) struct SavedContent {
    pub(super) host: HostBuffer,
    /// The offsets of the parts in the arena.
    pub(super) ranges: Vec<Range<usize>>,
}

/// Host memory. The GPU copies it directly if it is pinned.
#[derive(Debug)]
pub(super) struct HostBuffer {
    start: NonNull<c_void>,
    pub(super) bytes: usize,
    pub(super) is_pinned: bool,
}

// SAFETY: the driver lets any thread use pinned memory, and only the owner of the buffer uses it.
unsafe impl Send for HostBuffer {}

impl SavedContent {
    /// Returns the parts, each with its address in host memory.
    pub(super) fn parts(&self) -> impl Iterator<Item = (&Range<usize>, *mut c_void)> {
        let mut next = self.host.start.as_ptr();
        self.ranges.iter().map(move |range| {
            let start = next;
            next = next.wrapping_byte_add(range.len());
            (range, start)
        })
    }
}

impl HostBuffer {
    pub(super) fn allocate(bytes: usize, is_pinned: bool) -> Result<Self, CudaError> {
        let failed = cuda_error("allocate host memory");
        let mut start = null_mut();
        if is_pinned {
            let _exclusion = Exclusion::of_setup();
            // SAFETY: the call allocates memory and writes its address.
            unsafe { sys::cuMemHostAlloc(&raw mut start, bytes, 0) }.result().map_err(&failed)?;
        } else {
            let length = NonZeroUsize::new(bytes).ok_or_else(|| failed(OUT_OF_MEMORY))?;
            let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
            // SAFETY: a new mapping at an address that the kernel chooses affects no other mapping.
            let mapped = unsafe { mmap_anonymous(None, length, access, MapFlags::MAP_PRIVATE) };
            start = mapped.map_err(|_| failed(OUT_OF_MEMORY))?.as_ptr();
        }
        let start = NonNull::new(start).ok_or_else(|| failed(OUT_OF_MEMORY))?;
        Ok(Self { start, bytes, is_pinned })
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        if self.is_pinned {
            let _exclusion = Exclusion::of_setup();
            // SAFETY: this value owns the memory. The call waits until the GPU has finished its copies.
            unsafe { sys::cuMemFreeHost(self.start.as_ptr()) };
        } else {
            // SAFETY: this value owns the mapping. The driver has read or written unpinned memory before
            // its calls returned.
            unsafe { munmap(self.start, self.bytes) }.ok();
        }
    }
}

const OUT_OF_MEMORY: DriverError = DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY);
