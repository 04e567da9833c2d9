//! The arena of a model: the GPU memory that ONNX Runtime allocates for it, such as intermediate results
//! and weights that are not shared. The arena grows at its end, and its addresses stay the same while it
//! exists. While the model sleeps, the content waits in host memory.
//!
//! ONNX Runtime allocates through the CUDA runtime, whose functions have no parameter for an arena. The
//! worker's program replaces these functions (`cuda_runtime.rs`). They use the arena of the calling thread,
//! because each model has a thread.
#![allow(unsafe_code)] // This module calls CUDA's functions for virtual memory.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::num::NonZeroUsize;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use cudarc::driver::{DriverError, sys};
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use parking_lot::Mutex;

use super::blocks::Blocks;
use super::exclusion::Exclusion;
use super::paced::PacedCopies;
use super::region::{Access, Pages, allow, location, round_up};
use super::{CudaError, CudaGpu, cuda_error};

/// The memory of one model.
#[derive(Debug)]
struct Arena {
    base: sys::CUdeviceptr,
    /// The size of the reserved addresses in bytes, which bounds the size of the arena.
    reserved: usize,
    /// The sizes of the mapped parts in bytes, in the order of their addresses, each with its memory. The
    /// memory is `None` while the model sleeps.
    parts: Vec<ArenaPart>,
    mapped: usize,
    blocks: Blocks,
    /// The host memory for the content of the arena, from the first sleep on.
    host: Option<HostBuffer>,
    gpu: Arc<CudaGpu>,
}

#[derive(Debug)]
struct ArenaPart {
    bytes: usize,
    pages: Option<Pages>,
}

/// Host memory. The GPU copies it directly if it is pinned.
#[derive(Debug)]
struct HostBuffer {
    start: NonNull<c_void>,
    bytes: usize,
    is_pinned: bool,
}

// SAFETY: the driver lets any thread use pinned memory, and only the owner of the buffer uses it.
unsafe impl Send for HostBuffer {}

/// The arenas of all models of the process, by their first address.
static ARENAS: Mutex<BTreeMap<u64, Arc<Mutex<Arena>>>> = Mutex::new(BTreeMap::new());

thread_local! {
    /// The arena from which this thread allocates.
    static OF_THREAD: RefCell<Option<Arc<Mutex<Arena>>>> = const { RefCell::new(None) };
}

/// The use of an arena by this thread. All sessions that use the arena must be dropped before.
#[derive(Debug)]
pub struct ThreadArena(Arc<Mutex<Arena>>);

/// The outcome of an attempt to allocate or free memory in an arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ArenaOutcome<T> {
    Done(T),
    OutOfMemory,
    /// No arena is responsible, so the CUDA runtime must do the work.
    NotOurs,
}

impl ThreadArena {
    /// Creates an empty arena, from which this thread allocates.
    pub fn create(gpu: &Arc<CudaGpu>) -> Result<Self, CudaError> {
        gpu.bind()?;
        let reserved = round_up(gpu, gpu.memory()?.total)?;
        let mut base = 0;
        // SAFETY: the call reserves unused addresses.
        let made = unsafe { sys::cuMemAddressReserve(&raw mut base, reserved, 0, 0, 0) };
        made.result().map_err(cuda_error("reserve addresses"))?;
        let (parts, blocks, gpu) = (Vec::new(), Blocks::default(), Arc::clone(gpu));
        let arena = Arena { base, reserved, parts, mapped: 0, blocks, host: None, gpu };
        let arena = Arc::new(Mutex::new(arena));
        ARENAS.lock().insert(base, Arc::clone(&arena));
        OF_THREAD.set(Some(Arc::clone(&arena)));
        Ok(Self(arena))
    }

    /// Returns the size of the arena's memory in bytes.
    pub fn bytes(&self) -> u64 {
        self.0.lock().mapped as u64
    }

    /// Copies the content to host memory, which is pinned if `pin` is true, and frees the memory on the GPU.
    /// Returns the size of the pinned memory in bytes.
    ///
    /// # Safety
    ///
    /// All work on the GPU that uses the arena must have ended.
    pub unsafe fn release(&self, pin: bool) -> Result<u64, CudaError> {
        // SAFETY: the caller guarantees that no work uses the memory.
        unsafe { self.0.lock().release(pin) }
    }

    /// Brings the memory and its content back to the same addresses. Batches that start later wait for the
    /// copies. If this fails, the memory stays released.
    pub fn restore(&self) -> Result<(), CudaError> {
        self.0.lock().restore()
    }
}

impl Drop for ThreadArena {
    fn drop(&mut self) {
        let _exclusion = Exclusion::of_setup();
        OF_THREAD.set(None);
        let mut arena = self.0.lock();
        ARENAS.lock().remove(&arena.base);
        arena.unmap();
    }
}

impl Arena {
    fn allocate(&mut self, bytes: usize) -> Result<sys::CUdeviceptr, CudaError> {
        let offset = match self.blocks.take(bytes) {
            Ok(offset) => offset,
            Err(missing) => {
                self.grow(missing)?;
                self.blocks.take(bytes).map_err(|_| out_of_memory())?
            }
        };
        Ok(self.base + offset as u64)
    }

    fn grow(&mut self, missing: usize) -> Result<(), CudaError> {
        let bytes = round_up(&self.gpu, missing)?;
        if bytes > self.reserved - self.mapped {
            return Err(out_of_memory());
        }
        let mut part = ArenaPart { bytes, pages: None };
        part.map(self.base + self.mapped as u64, &self.gpu)?;
        self.parts.push(part);
        self.mapped += bytes;
        self.blocks.grow(bytes);
        Ok(())
    }

    /// Frees the block at this address. Returns false if no block begins there.
    fn free(&mut self, address: sys::CUdeviceptr) -> bool {
        // Work that was queued before may still use the block.
        self.gpu.synchronize_unless_recording();
        let offset = address.checked_sub(self.base).and_then(|offset| usize::try_from(offset).ok());
        let was_used = offset.is_some_and(|offset| self.blocks.give_back(offset));
        self.trim();
        was_used
    }

    /// Frees the memory of parts at the end that have no used block.
    fn trim(&mut self) {
        while let Some(mut last) = self.parts.pop_if(|last| self.blocks.shrink(last.bytes)) {
            self.mapped -= last.bytes;
            last.unmap(self.base + self.mapped as u64);
        }
    }

    unsafe fn release(&mut self, pin: bool) -> Result<u64, CudaError> {
        let is_released = self.parts.iter().any(|part| part.pages.is_none());
        if !is_released && self.mapped > 0 {
            let known = self.host.take().filter(|host| host.bytes == self.mapped && host.is_pinned == pin);
            let host = known.map_or_else(|| HostBuffer::allocate(self.mapped, pin), Ok)?;
            // SAFETY: both sides have this number of bytes, and the buffer is dropped after the wait.
            unsafe { PacedCopies::on(&self.gpu).copy_out(self.base, self.mapped, host.start.as_ptr()) }
                .and_then(|()| self.gpu.synchronize())?;
            self.host = Some(host);
            self.unmap_parts();
        }
        let pinned = self.host.as_ref().filter(|host| host.is_pinned);
        Ok(pinned.map_or(0, |host| host.bytes as u64))
    }

    fn restore(&mut self) -> Result<(), CudaError> {
        if self.parts.iter().all(|part| part.pages.is_some()) {
            return Ok(());
        }
        let restored = self.map_parts().and_then(|()| {
            let Some(host) = &self.host else { return Ok(()) };
            // SAFETY: the host memory contains the whole arena, and only a later sleep replaces it.
            unsafe { PacedCopies::on(&self.gpu).copy_in(host.start.as_ptr(), host.bytes, self.base) }
        });
        if restored.is_err() {
            self.gpu.synchronize().ok();
            self.unmap_parts();
        }
        restored
    }

    fn map_parts(&mut self) -> Result<(), CudaError> {
        let mut address = self.base;
        for part in &mut self.parts {
            part.map(address, &self.gpu)?;
            address += part.bytes as u64;
        }
        Ok(())
    }

    /// Unmaps all memory. The GPU must have finished all work that uses it.
    fn unmap_parts(&mut self) {
        let mut address = self.base;
        for part in &mut self.parts {
            part.unmap(address);
            address += part.bytes as u64;
        }
    }

    /// Frees the memory and the addresses.
    fn unmap(&mut self) {
        // If the context is unusable, its mappings no longer exist.
        if self.gpu.synchronize().is_err() {
            return;
        }
        self.unmap_parts();
        // SAFETY: the driver has reserved the addresses in this size, and nothing is mapped there.
        unsafe { sys::cuMemAddressFree(self.base, self.reserved) };
    }
}

impl ArenaPart {
    /// Frees the memory, which no work uses any longer.
    fn unmap(&mut self, address: sys::CUdeviceptr) {
        if self.pages.take().is_some() {
            // SAFETY: the addresses are mapped in this size, and the caller guarantees that no work uses
            // them.
            unsafe { sys::cuMemUnmap(address, self.bytes) };
        }
    }

    fn map(&mut self, address: sys::CUdeviceptr, gpu: &CudaGpu) -> Result<(), CudaError> {
        let pages = Pages::allocate(gpu, self.bytes)?;
        pages.map_at(address, self.bytes)?;
        self.pages = Some(pages);
        allow(address, self.bytes, Access::ReadWrite, location(gpu))
    }
}

impl HostBuffer {
    fn allocate(bytes: usize, is_pinned: bool) -> Result<Self, CudaError> {
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

fn out_of_memory() -> CudaError {
    cuda_error("allocate memory for the model")(OUT_OF_MEMORY)
}

/// Returns whether this thread has an arena.
pub fn is_used() -> bool {
    OF_THREAD.with_borrow(Option::is_some)
}

/// Allocates memory in the arena of this thread.
pub fn allocate(bytes: usize) -> ArenaOutcome<*mut c_void> {
    OF_THREAD.with_borrow(|arena| match arena {
        None => ArenaOutcome::NotOurs,
        Some(arena) => match arena.lock().allocate(bytes) {
            Ok(address) => ArenaOutcome::Done(address as *mut c_void),
            Err(_) => ArenaOutcome::OutOfMemory,
        },
    })
}

/// Frees memory of any arena.
pub fn free(start: *mut c_void) -> ArenaOutcome<()> {
    let address = start as u64;
    let arena = ARENAS.lock().range(..=address).next_back().map(|(_, arena)| Arc::clone(arena));
    match arena.map(|arena| arena.lock().free(address)) {
        Some(true) => ArenaOutcome::Done(()),
        Some(false) | None => ArenaOutcome::NotOurs,
    }
}
