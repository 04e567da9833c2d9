//! The arena of a model: the GPU memory that ONNX Runtime or PyTorch allocates for it, such as intermediate
//! results and weights that are not shared. The arena grows at its end, and its addresses stay the same
//! while it exists. While the model sleeps, the necessary content waits in host memory.
//!
//! The libraries allocate with functions that have no parameter for an arena: ONNX Runtime with those of the
//! CUDA runtime, which the worker's program replaces (`cuda_runtime.rs`), and PyTorch with those of a memory
//! pool (`worker/python/src/allocator.rs`). They use the arena of the calling thread, because each model has
//! a thread.
#![allow(unsafe_code)] // This module calls CUDA's functions for virtual memory.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{DriverError, sys};
use parking_lot::Mutex;

use super::blocks::Blocks;
use super::exclusion::Exclusion;
use super::paced::PacedCopies;
use super::region::{Access, Pages, allow, location, round_up};
use super::saved::{HostBuffer, SavedContent};
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
    /// The content that was kept at the last sleep.
    kept: Option<SavedContent>,
    gpu: Arc<CudaGpu>,
}

#[derive(Debug)]
struct ArenaPart {
    bytes: usize,
    pages: Option<Pages>,
}

/// The part of an arena's content that is kept while the model sleeps. The other memory is zero afterwards.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KeptContent {
    All,
    /// The blocks that were allocated within [`while_loading`].
    Loaded,
    /// These addresses.
    Addresses(Vec<Range<u64>>),
}

/// The arenas of all models of the process, by their first address.
static ARENAS: Mutex<BTreeMap<u64, Arc<Mutex<Arena>>>> = Mutex::new(BTreeMap::new());

thread_local! {
    /// The arena from which this thread allocates.
    static OF_THREAD: RefCell<Option<Arc<Mutex<Arena>>>> = const { RefCell::new(None) };

    /// True if this thread allocates memory for data that comes with the model.
    static IS_LOADING: Cell<bool> = const { Cell::new(false) };
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
        let arena = Arena { base, reserved, parts, mapped: 0, blocks, kept: None, gpu };
        let arena = Arc::new(Mutex::new(arena));
        ARENAS.lock().insert(base, Arc::clone(&arena));
        OF_THREAD.set(Some(Arc::clone(&arena)));
        Ok(Self(arena))
    }

    /// Returns the size of the arena's memory in bytes.
    pub fn bytes(&self) -> u64 {
        self.0.lock().mapped as u64
    }

    /// Copies the kept content to host memory, which is pinned if `pin` is true, and frees the memory on the
    /// GPU. Returns the size of the pinned memory in bytes.
    ///
    /// # Safety
    ///
    /// All work on the GPU that uses the arena must have ended.
    pub unsafe fn release(&self, pin: bool, kept: &KeptContent) -> Result<u64, CudaError> {
        // SAFETY: the caller guarantees that no work uses the memory.
        unsafe { self.0.lock().release(pin, kept) }
    }

    /// Finds out whether `computes` succeeds if all memory is zero that is not for data of the model. If it
    /// does not, brings the content back.
    ///
    /// # Safety
    ///
    /// All work on the GPU that uses the arena must have ended.
    pub unsafe fn try_without_scratch(
        &self,
        computes: impl FnOnce() -> Result<bool, CudaError>,
    ) -> Result<bool, CudaError> {
        let arena = self.0.lock();
        // SAFETY: the caller guarantees that no work uses the memory.
        let saved = unsafe { arena.save(&KeptContent::All, false, None) };
        // SAFETY: as above.
        let loaded = unsafe { arena.save(&KeptContent::Loaded, false, None) };
        // Without enough host memory for the attempt, the model sleeps with all its content.
        let (Ok(saved), Ok(loaded)) = (saved, loaded) else { return Ok(false) };
        arena.load(&loaded)?;
        arena.gpu.synchronize()?;
        let computed = computes();
        if !matches!(computed, Ok(true)) {
            arena.load(&saved).and_then(|()| arena.gpu.synchronize())?;
        }
        computed
    }

    /// Frees the memory on the GPU again, after a [`restore`](Self::restore). The content of the last release
    /// is still in host memory.
    ///
    /// # Safety
    ///
    /// All work on the GPU that uses the arena must have ended.
    pub unsafe fn release_again(&self) {
        self.0.lock().unmap_parts();
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
    fn allocate(&mut self, bytes: usize, is_loaded: bool) -> Result<sys::CUdeviceptr, CudaError> {
        let offset = match self.blocks.take(bytes, is_loaded) {
            Ok(offset) => offset,
            Err(missing) => {
                self.grow(missing)?;
                self.blocks.take(bytes, is_loaded).map_err(|_| out_of_memory())?
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

    unsafe fn release(&mut self, pin: bool, kept: &KeptContent) -> Result<u64, CudaError> {
        let is_released = self.parts.iter().any(|part| part.pages.is_none());
        if !is_released && self.mapped > 0 {
            let known = self.kept.take().map(|saved| saved.host);
            // SAFETY: the caller guarantees that no work uses the memory.
            self.kept = Some(unsafe { self.save(kept, pin, known) }?);
            self.unmap_parts();
        }
        let pinned = self.kept.iter().filter(|saved| saved.host.is_pinned);
        Ok(pinned.map(|saved| saved.host.bytes as u64).sum())
    }

    /// Copies content to host memory, for which it uses `known` if that has the right size.
    unsafe fn save(
        &self,
        kept: &KeptContent,
        pin: bool,
        known: Option<HostBuffer>,
    ) -> Result<SavedContent, CudaError> {
        let ranges = self.ranges(kept);
        let bytes = ranges.iter().map(Range::len).sum::<usize>().max(1);
        let known = known.filter(|host| host.bytes == bytes && host.is_pinned == pin);
        let host = known.map_or_else(|| HostBuffer::allocate(bytes, pin), Ok)?;
        let saved = SavedContent { host, ranges };
        let mut copies = PacedCopies::on(&self.gpu);
        for (range, to) in saved.parts() {
            // SAFETY: both sides have this number of bytes, and the buffer is dropped after the wait.
            unsafe { copies.copy_out(self.base + range.start as u64, range.len(), to) }?;
        }
        self.gpu.synchronize()?;
        Ok(saved)
    }

    /// Returns the offsets of this content, in ascending order. Ranges do not overlap or touch.
    fn ranges(&self, kept: &KeptContent) -> Vec<Range<usize>> {
        match kept {
            KeptContent::All => std::iter::once(0..self.mapped).collect(),
            KeptContent::Loaded => merged(self.blocks.loaded()),
            KeptContent::Addresses(addresses) => {
                let offset = |address: u64| {
                    usize::try_from(address.saturating_sub(self.base)).unwrap_or(0).min(self.mapped)
                };
                let mut ranges: Vec<_> =
                    addresses.iter().map(|range| offset(range.start)..offset(range.end)).collect();
                ranges.sort_unstable_by_key(|range| range.start);
                merged(ranges.into_iter())
            }
        }
    }

    /// Sets all mapped memory to zero, and copies this content to it. Batches that start later wait for
    /// this.
    fn load(&self, saved: &SavedContent) -> Result<(), CudaError> {
        // SAFETY: the memory is mapped in this size.
        let cleared =
            unsafe { sys::cuMemsetD8Async(self.base, 0, self.mapped, self.gpu.compute.cu_stream()) };
        cleared.result().map_err(cuda_error("clear memory"))?;
        let mut copies = PacedCopies::on(&self.gpu);
        for (range, from) in saved.parts() {
            // SAFETY: both sides have this number of bytes. The host memory exists until the copies end,
            // because its release waits for them.
            unsafe { copies.copy_in(from, range.len(), self.base + range.start as u64) }?;
        }
        Ok(())
    }

    fn restore(&mut self) -> Result<(), CudaError> {
        if self.parts.iter().all(|part| part.pages.is_some()) {
            return Ok(());
        }
        let restored =
            self.map_parts().and_then(|()| self.kept.as_ref().map_or(Ok(()), |saved| self.load(saved)));
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

/// The largest gap between two parts of the content that are copied at once, in bytes. It takes less time to
/// copy than another copy takes to start.
const MAX_GAP: usize = 64 << 10;

const OUT_OF_MEMORY: DriverError = DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY);

fn out_of_memory() -> CudaError {
    cuda_error("allocate memory for the model")(OUT_OF_MEMORY)
}

/// Returns whether this thread has an arena.
pub fn is_used() -> bool {
    OF_THREAD.with_borrow(Option::is_some)
}

/// Calls `load`, which allocates memory for data that comes with the model.
pub fn while_loading<T>(load: impl FnOnce() -> T) -> T {
    let before = IS_LOADING.replace(true);
    let loaded = load();
    IS_LOADING.set(before);
    loaded
}

/// Merges ranges in ascending order if the gaps between them are small.
fn merged(ranges: impl Iterator<Item = Range<usize>>) -> Vec<Range<usize>> {
    let mut merged: Vec<Range<usize>> = Vec::new();
    for range in ranges.filter(|range| !range.is_empty()) {
        match merged.last_mut() {
            Some(last) if range.start <= last.end + MAX_GAP => last.end = last.end.max(range.end),
            _ => merged.push(range),
        }
    }
    merged
}

/// Allocates memory in the arena of this thread.
pub fn allocate(bytes: usize) -> ArenaOutcome<*mut c_void> {
    OF_THREAD.with_borrow(|arena| match arena {
        None => ArenaOutcome::NotOurs,
        Some(arena) => match arena.lock().allocate(bytes, IS_LOADING.get()) {
            Ok(address) => ArenaOutcome::Done(address as *mut c_void),
            Err(_) => ArenaOutcome::OutOfMemory,
        },
    })
}

/// Frees memory of any arena after all work of the process on the GPU. As with `cudaFree`, streams may still
/// use the memory.
pub fn free_after_all_work(start: *mut c_void) {
    OF_THREAD.with_borrow(|arena| {
        // An error means that a stream records, which uses no memory yet, or that the GPU is lost.
        arena.as_ref().and_then(|arena| arena.lock().gpu.synchronize_context().ok())
    });
    free(start);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_merge_if_the_gap_between_them_is_small() {
        let ranges = [0..10, 10..20, 20 + MAX_GAP..30 + MAX_GAP, 40 + 3 * MAX_GAP..40 + 3 * MAX_GAP];
        let ranges = ranges
            .into_iter()
            .chain([50 + 3 * MAX_GAP..60 + 3 * MAX_GAP, 55 + 3 * MAX_GAP..56 + 3 * MAX_GAP]);
        assert_eq!(merged(ranges), [0..30 + MAX_GAP, 50 + 3 * MAX_GAP..60 + 3 * MAX_GAP]);
    }
}
