//! GPU memory that outlives the process that allocated it. Each process that has the memory's
//! descriptor keeps the memory alive and can map it.
#![allow(unsafe_code)] // This module calls CUDA's functions for virtual memory.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::{CudaContext, result, sys};

use super::exclusion::Exclusion;
use super::{CudaError, CudaGpu, cuda_error};

const HANDLE_TYPE: sys::CUmemAllocationHandleType =
    sys::CUmemAllocationHandleType_enum::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// A mapped region of memory that other processes can also map.
#[derive(Debug)]
pub struct SharedRegion {
    start: NonNull<u8>,
    /// The number of reserved bytes, rounded up to whole pages.
    mapped: usize,
    /// The memory at the addresses, or `None` while it is released.
    pages: Option<Pages>,
    context: Arc<CudaContext>,
}

/// Memory on the GPU. It is freed when no process has its descriptor or maps it.
#[derive(Debug)]
pub(super) struct Pages {
    /// The driver's handle of the memory.
    memory: sys::CUmemGenericAllocationHandle,
    /// The descriptor, or `None` if no other process uses the memory.
    file: Option<OwnedFd>,
}

// SAFETY: the driver lets any thread use a mapping and remove it. All changes need `&mut`.
unsafe impl Send for SharedRegion {}
// SAFETY: the reasons for `Send` apply here too.
unsafe impl Sync for SharedRegion {}

impl SharedRegion {
    /// Allocates `bytes` bytes of memory, lets `fill` write to the memory, and then makes the
    /// memory read-only.
    pub fn filled<E: From<CudaError>>(
        gpu: &CudaGpu,
        bytes: usize,
        fill: impl FnOnce(&Self) -> Result<(), E>,
    ) -> Result<Self, E> {
        let _exclusion = Exclusion::of_setup();
        let mapped = round_up(gpu, bytes)?;
        let region = Self::map(gpu, Pages::allocate(gpu, mapped)?.exported()?, mapped, Access::ReadWrite)?;
        fill(&region)?;
        // A copy from pageable memory can return while the driver still writes the last bytes to the
        // GPU. A write to read-only memory is a fault, which ends all clients of the MPS server.
        gpu.synchronize_context()?;
        allow(region.address(), mapped, Access::Read, location(gpu))?;
        Ok(region)
    }

    pub fn import(gpu: &CudaGpu, file: OwnedFd, bytes: usize) -> Result<Self, CudaError> {
        let mapped = round_up(gpu, bytes)?;
        let mut memory = 0;
        let number = file.as_raw_fd() as usize as *mut std::ffi::c_void;
        // SAFETY: the descriptor is open, and the driver checks that it refers to GPU memory.
        let imported = unsafe { sys::cuMemImportFromShareableHandle(&raw mut memory, number, HANDLE_TYPE) };
        imported.result().map_err(cuda_error("import memory"))?;
        Self::map(gpu, Pages { memory, file: Some(file) }, mapped, Access::Read)
    }

    fn map(gpu: &CudaGpu, pages: Pages, mapped: usize, access: Access) -> Result<Self, CudaError> {
        let mut address = 0;
        // SAFETY: the call reserves unused addresses.
        let reserved = unsafe { sys::cuMemAddressReserve(&raw mut address, mapped, 0, 0, 0) };
        reserved.result().map_err(cuda_error("reserve addresses"))?;
        let start = NonNull::new(address as *mut u8).expect("the driver does not reserve address zero");
        let mut region = Self { start, mapped, pages: None, context: Arc::clone(&gpu.context) };
        region.place(pages, access, location(gpu))?;
        Ok(region)
    }

    /// Maps memory at the region's addresses, which must not be mapped.
    fn place(&mut self, pages: Pages, access: Access, at: sys::CUmemLocation) -> Result<(), CudaError> {
        pages.map_at(self.address(), self.mapped)?;
        self.pages = Some(pages);
        allow(self.address(), self.mapped, access, at)
    }

    /// Frees the memory, unless another process uses it too. The addresses stay reserved, but no work may
    /// use them before [`Self::restore`].
    ///
    /// # Safety
    ///
    /// All work on the GPU that uses the memory must have ended.
    pub unsafe fn release(&mut self) -> Result<(), CudaError> {
        if self.pages.is_none() {
            return Ok(());
        }
        // SAFETY: the addresses are mapped in this size, and the caller guarantees that no work uses
        // them.
        let unmapped = unsafe { sys::cuMemUnmap(self.address(), self.mapped) };
        unmapped.result().map_err(cuda_error("unmap memory"))?;
        self.pages = None;
        Ok(())
    }

    /// Maps new memory at the same addresses. Its content is undefined, and it stays writable.
    pub fn restore(&mut self, gpu: &CudaGpu) -> Result<(), CudaError> {
        if self.pages.is_some() {
            return Ok(());
        }
        self.place(Pages::allocate(gpu, self.mapped)?.exported()?, Access::ReadWrite, location(gpu))
    }

    fn address(&self) -> sys::CUdeviceptr {
        self.start.as_ptr() as u64
    }

    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Returns the descriptor, which keeps the memory alive in any process that holds it. Returns `None`
    /// while the memory is released.
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        self.pages.as_ref()?.file.as_ref().map(|file| file.as_fd())
    }

    /// Copies bytes to this offset of the region, and returns when `bytes` can change. The copy itself
    /// may end later.
    ///
    /// # Panics
    ///
    /// Panics if the bytes extend past the end of the region, or if its memory is released.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), CudaError> {
        let end = offset.checked_add(bytes.len());
        assert!(self.pages.is_some(), "the region has no memory");
        assert!(end.is_some_and(|end| end <= self.mapped), "the bytes exceed the region");
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: the destination is within the region, whose memory is mapped. When the call returns,
        // it has read all bytes. The GPU may receive them later.
        unsafe { result::memcpy_htod_sync(self.address() + offset as u64, bytes) }
            .map_err(cuda_error("copy weights"))
    }
}

impl Drop for SharedRegion {
    fn drop(&mut self) {
        let _exclusion = Exclusion::of_setup();
        // If the context is unusable, its mappings no longer exist.
        if self.context.synchronize().is_ok() {
            // SAFETY: all work that used the memory has ended. The addresses are reserved in this size.
            unsafe {
                self.release().ok();
                sys::cuMemAddressFree(self.address(), self.mapped);
            }
        }
    }
}

impl Pages {
    /// Maps the memory at addresses that are reserved in this size and not mapped.
    pub(super) fn map_at(&self, address: sys::CUdeviceptr, bytes: usize) -> Result<(), CudaError> {
        // SAFETY: the driver refuses addresses that are not reserved or already mapped.
        let placed = unsafe { sys::cuMemMap(address, bytes, 0, self.memory, 0) };
        placed.result().map_err(cuda_error("map memory"))
    }

    /// Allocates memory without addresses. Its size must consist of whole pages.
    pub(super) fn allocate(gpu: &CudaGpu, bytes: usize) -> Result<Self, CudaError> {
        let properties = properties(location(gpu));
        let mut memory = 0;
        // SAFETY: the call allocates memory and writes its handle.
        let allocated = unsafe { sys::cuMemCreate(&raw mut memory, bytes, &raw const properties, 0) };
        allocated.result().map_err(cuda_error("allocate memory"))?;
        Ok(Self { memory, file: None })
    }

    /// Opens a descriptor with which other processes can map the memory.
    fn exported(mut self) -> Result<Self, CudaError> {
        let mut number = -1_i32;
        // SAFETY: the call writes the number of a new descriptor, which has no other owner.
        let exported = unsafe {
            let exported =
                sys::cuMemExportToShareableHandle((&raw mut number).cast(), self.memory, HANDLE_TYPE, 0);
            exported.result().map(|()| OwnedFd::from_raw_fd(number))
        };
        self.file = Some(exported.map_err(cuda_error("export a descriptor of memory"))?);
        Ok(self)
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the handle belongs to this value. A mapping keeps the memory until it is removed.
        unsafe { sys::cuMemRelease(self.memory) };
    }
}

/// The accesses to memory that the GPU permits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    Read,
    ReadWrite,
}

/// Sets the access to mapped addresses.
pub(super) fn allow(
    address: sys::CUdeviceptr,
    mapped: usize,
    access: Access,
    location: sys::CUmemLocation,
) -> Result<(), CudaError> {
    let flags = match access {
        Access::Read => sys::CUmemAccess_flags_enum::CU_MEM_ACCESS_FLAGS_PROT_READ,
        Access::ReadWrite => sys::CUmemAccess_flags_enum::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    let access = sys::CUmemAccessDesc { location, flags };
    // SAFETY: the caller has mapped the addresses in this size.
    let set = unsafe { sys::cuMemSetAccess(address, mapped, &raw const access, 1) };
    set.result().map_err(cuda_error("set the access to memory"))
}

pub(super) fn location(gpu: &CudaGpu) -> sys::CUmemLocation {
    let id = gpu.context.cu_device();
    sys::CUmemLocation { type_: sys::CUmemLocationType_enum::CU_MEM_LOCATION_TYPE_DEVICE, id }
}

fn properties(location: sys::CUmemLocation) -> sys::CUmemAllocationProp {
    sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType_enum::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: HANDLE_TYPE,
        location,
        win32HandleMetaData: std::ptr::null_mut(),
        // SAFETY: these are plain numbers, for which zero is the default.
        allocFlags: unsafe { std::mem::zeroed() },
    }
}

/// Rounds up to whole pages, because the driver maps only whole pages.
pub(super) fn round_up(gpu: &CudaGpu, bytes: usize) -> Result<usize, CudaError> {
    gpu.bind()?;
    let properties = properties(location(gpu));
    let mut page = 0;
    let least = sys::CUmemAllocationGranularity_flags_enum::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
    // SAFETY: the call writes a number.
    let status = unsafe { sys::cuMemGetAllocationGranularity(&raw mut page, &raw const properties, least) };
    status.result().map_err(cuda_error("read the page size of memory"))?;
    Ok(bytes.max(1).next_multiple_of(page.max(1)))
}
