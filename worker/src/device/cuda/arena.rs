//! An arena of GPU memory for the intermediate results of one model. It grows at its end, and its
//! addresses stay the same while it exists.
//!
//! ONNX Runtime allocates through two C functions that have no parameter for an arena. They use the
//! arena of the calling thread, because each model has a thread of its own.
#![allow(unsafe_code)] // This module calls CUDA's functions for virtual memory, and is called from C.

use std::cell::RefCell;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;

use cudarc::driver::{CudaContext, sys};

use super::blocks::Blocks;
use super::region::{Access, allocate_pages, allow, location, release, round_up};
use super::{CudaError, CudaGpu, cuda_error};
use crate::log_line;

/// The arena of one model.
#[derive(Debug)]
pub struct Arena {
    base: sys::CUdeviceptr,
    /// The size of the reserved addresses in bytes, which bounds the size of the arena.
    reserved: usize,
    /// The memory behind the mapped addresses, in the order of the addresses.
    pages: Vec<Pages>,
    mapped: usize,
    blocks: Blocks,
    gpu: Arc<CudaGpu>,
}

#[derive(Debug)]
struct Pages {
    memory: sys::CUmemGenericAllocationHandle,
    bytes: usize,
}

thread_local! {
    static OF_THREAD: RefCell<Option<Arena>> = const { RefCell::new(None) };
}

/// The use of an arena by this thread. Dropping this frees the arena's memory, so all sessions that use
/// the arena must have been dropped before.
#[derive(Debug)]
pub struct ThreadArena(Arc<CudaContext>);

impl ThreadArena {
    /// Creates an empty arena, from which sessions on this thread allocate.
    pub fn create(gpu: &Arc<CudaGpu>) -> Result<Self, CudaError> {
        gpu.bind()?;
        let reserved = round_up(gpu, gpu.memory()?.total)?;
        let mut base = 0;
        // SAFETY: the call reserves unused addresses.
        let made = unsafe { sys::cuMemAddressReserve(&raw mut base, reserved, 0, 0, 0) };
        made.result().map_err(cuda_error("reserve addresses"))?;
        let (pages, blocks) = (Vec::new(), Blocks::default());
        let arena = Arena { base, reserved, pages, mapped: 0, blocks, gpu: Arc::clone(gpu) };
        OF_THREAD.set(Some(arena));
        Ok(Self(Arc::clone(&gpu.context)))
    }

    /// Returns the size of the arena's memory in bytes.
    pub fn bytes(&self) -> u64 {
        OF_THREAD.with_borrow(|arena| arena.as_ref().map_or(0, |arena| arena.mapped as u64))
    }

    /// Returns the addresses of the functions through which ONNX Runtime allocates and frees memory.
    pub fn functions() -> [usize; 2] {
        [allocate as *const () as usize, free as *const () as usize]
    }
}

impl Drop for ThreadArena {
    fn drop(&mut self) {
        // If the context is unusable, its mappings no longer exist.
        let is_usable = self.0.synchronize().is_ok();
        let Some(arena) = OF_THREAD.take() else { return };
        if is_usable {
            arena.unmap();
        }
    }
}

impl Arena {
    fn allocate(&mut self, bytes: usize) -> Result<sys::CUdeviceptr, CudaError> {
        let offset = match self.blocks.take(bytes) {
            Ok(offset) => offset,
            Err(missing) => {
                self.grow(missing)?;
                let out_of_memory = cuda_error("allocate memory in the model's arena");
                let no_memory = sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY;
                self.blocks.take(bytes).map_err(|_| out_of_memory(cudarc::driver::DriverError(no_memory)))?
            }
        };
        Ok(self.base + offset as u64)
    }

    fn grow(&mut self, missing: usize) -> Result<(), CudaError> {
        let failed = cuda_error("add memory to the model's arena");
        let bytes = round_up(&self.gpu, missing)?;
        if self.mapped + bytes > self.reserved {
            return Err(failed(cudarc::driver::DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)));
        }
        let memory = allocate_pages(&self.gpu, bytes).map_err(&failed)?;
        let address = self.base + self.mapped as u64;
        // SAFETY: the addresses are reserved, and are not mapped yet.
        let placed = unsafe { sys::cuMemMap(address, bytes, 0, memory, 0) };
        placed.result().inspect_err(|_| release(memory)).map_err(&failed)?;
        self.pages.push(Pages { memory, bytes });
        self.mapped += bytes;
        allow(address, bytes, Access::ReadWrite, location(&self.gpu))?;
        self.blocks.grow(bytes);
        Ok(())
    }

    fn free(&mut self, address: sys::CUdeviceptr) {
        let offset = address.checked_sub(self.base).and_then(|offset| usize::try_from(offset).ok());
        if !offset.is_some_and(|offset| self.blocks.give_back(offset)) {
            log_line(
                "error: ONNX Runtime freed memory that is not in the model's arena; please report this bug",
            );
        }
    }

    /// Frees the memory and the addresses. The GPU must have finished all work that uses them.
    fn unmap(self) {
        let mut address = self.base;
        for Pages { memory, bytes } in self.pages {
            // SAFETY: the addresses are mapped in this size, and no work uses them.
            unsafe { sys::cuMemUnmap(address, bytes) };
            release(memory);
            address += bytes as u64;
        }
        // SAFETY: the addresses were reserved in this size, and are no longer mapped.
        unsafe { sys::cuMemAddressFree(self.base, self.reserved) };
    }
}

/// Allocates memory in the arena of this thread. Returns null if there is no memory.
extern "C" fn allocate(bytes: usize) -> *mut c_void {
    OF_THREAD.with_borrow_mut(|arena| match arena.as_mut().map(|arena| arena.allocate(bytes)) {
        Some(Ok(address)) => address as *mut c_void,
        Some(Err(_)) | None => null_mut(),
    })
}

/// Frees memory of the arena of this thread.
extern "C" fn free(start: *mut c_void) {
    if start.is_null() {
        return;
    }
    OF_THREAD.with_borrow_mut(|arena| {
        if let Some(arena) = arena {
            arena.free(start as u64);
        }
    });
}
