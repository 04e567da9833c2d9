//! GPU memory that outlives the process that allocated it. Each process that has the memory's
//! descriptor keeps the memory alive and can map it.
#![allow(unsafe_code)] // This module calls CUDA's functions for virtual memory.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::{CudaContext, DriverError, result, sys};

use super::exclusion::Exclusion;
use super::{CudaError, CudaGpu, cuda_error};

const HANDLE_TYPE: sys::CUmemAllocationHandleType =
    sys::CUmemAllocationHandleType_enum::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// A mapped region of memory that other processes can also map.
#[derive(Debug)]
pub struct SharedRegion {
    start: NonNull<u8>,
    /// The number of mapped bytes, rounded up to whole pages.
    mapped: usize,
    /// The driver's handle of the memory.
    memory: sys::CUmemGenericAllocationHandle,
    file: OwnedFd,
    context: Arc<CudaContext>,
}

// SAFETY: the driver lets any thread use a mapping and remove it. This value does not change.
unsafe impl Send for SharedRegion {}
// SAFETY: the reasons for `Send` apply here too.
unsafe impl Sync for SharedRegion {}

impl SharedRegion {
    /// Allocates `bytes` bytes of memory, lets `fill` write to the memory, and then makes the
    /// memory read-only.
    pub fn filled<E: From<CudaError>>(
        gpu: &CudaGpu,
        bytes: usize,
        fill: impl FnOnce(&mut Writer<'_>) -> Result<(), E>,
    ) -> Result<Self, E> {
        let _exclusion = Exclusion::of_setup();
        let mapped = round_up(gpu, bytes)?;
        let memory = allocate_pages(gpu, mapped).map_err(cuda_error("allocate memory for weights"))?;
        let mut number = -1_i32;
        // SAFETY: the call writes the number of a new descriptor, which has no other owner.
        let exported = unsafe {
            let exported =
                sys::cuMemExportToShareableHandle((&raw mut number).cast(), memory, HANDLE_TYPE, 0);
            exported.result().map(|()| OwnedFd::from_raw_fd(number))
        };
        let file =
            exported.inspect_err(|_| release(memory)).map_err(cuda_error("export a descriptor of memory"))?;
        let region = Self::map(gpu, Mapping { file, memory, mapped }, Access::ReadWrite)?;
        fill(&mut Writer { region: &region, bytes })?;
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
        Self::map(gpu, Mapping { file, memory, mapped }, Access::Read)
    }

    /// Maps the memory. Releases the memory if the mapping fails.
    fn map(gpu: &CudaGpu, mapping: Mapping, access: Access) -> Result<Self, CudaError> {
        let Mapping { file, memory, mapped } = mapping;
        let mut address = 0;
        // SAFETY: the call reserves unused addresses.
        let reserved = unsafe { sys::cuMemAddressReserve(&raw mut address, mapped, 0, 0, 0) };
        if let Err(error) = reserved.result() {
            release(memory);
            return Err(cuda_error("reserve addresses")(error));
        }
        // SAFETY: the addresses are reserved in this size, and are not mapped yet.
        let placed = unsafe { sys::cuMemMap(address, mapped, 0, memory, 0) };
        if let Err(error) = placed.result() {
            // SAFETY: the addresses were reserved above, and are not mapped.
            unsafe { sys::cuMemAddressFree(address, mapped) };
            release(memory);
            return Err(cuda_error("map memory")(error));
        }
        let start = NonNull::new(address as *mut u8).expect("the driver does not reserve address zero");
        let region = Self { start, mapped, memory, file, context: Arc::clone(&gpu.context) };
        allow(region.address(), mapped, access, location(gpu))?;
        Ok(region)
    }

    fn address(&self) -> sys::CUdeviceptr {
        self.start.as_ptr() as u64
    }

    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Returns the descriptor, which keeps the memory alive in any process that holds it.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for SharedRegion {
    fn drop(&mut self) {
        let _exclusion = Exclusion::of_setup();
        // If the context is unusable, its mappings no longer exist.
        if self.context.synchronize().is_ok() {
            // SAFETY: the addresses are mapped in this size. All work that used them has ended.
            unsafe {
                sys::cuMemUnmap(self.address(), self.mapped);
                sys::cuMemAddressFree(self.address(), self.mapped);
            }
            release(self.memory);
        }
    }
}

/// The parameters of a mapping to create.
struct Mapping {
    file: OwnedFd,
    memory: sys::CUmemGenericAllocationHandle,
    mapped: usize,
}

/// Write access to a new region, before the region becomes read-only.
#[derive(Debug)]
pub struct Writer<'r> {
    region: &'r SharedRegion,
    bytes: usize,
}

impl Writer<'_> {
    /// Writes bytes at this offset of the region.
    ///
    /// # Panics
    ///
    /// Panics if the bytes extend past the end of the region.
    pub fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<(), CudaError> {
        assert!(
            offset.checked_add(bytes.len()).is_some_and(|end| end <= self.bytes),
            "the bytes exceed the region"
        );
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: the destination is within the region, and no other code uses the region yet. When
        // the call returns, it has read all bytes. The GPU may receive them later.
        unsafe { result::memcpy_htod_sync(self.region.address() + offset as u64, bytes) }
            .map_err(cuda_error("copy weights"))
    }
}

/// The accesses to memory that the GPU permits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Access {
    Read,
    ReadWrite,
}

/// Sets the access to mapped addresses.
fn allow(
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

fn location(gpu: &CudaGpu) -> sys::CUmemLocation {
    let id = gpu.context.cu_device();
    sys::CUmemLocation { type_: sys::CUmemLocationType_enum::CU_MEM_LOCATION_TYPE_DEVICE, id }
}

/// Allocates memory without addresses. Its size must consist of whole pages.
fn allocate_pages(gpu: &CudaGpu, bytes: usize) -> Result<sys::CUmemGenericAllocationHandle, DriverError> {
    let properties = properties(location(gpu));
    let mut memory = 0;
    // SAFETY: the call allocates memory and writes its handle.
    unsafe { sys::cuMemCreate(&raw mut memory, bytes, &raw const properties, 0) }.result()?;
    Ok(memory)
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
fn round_up(gpu: &CudaGpu, bytes: usize) -> Result<usize, CudaError> {
    gpu.bind()?;
    let properties = properties(location(gpu));
    let mut page = 0;
    let least = sys::CUmemAllocationGranularity_flags_enum::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
    // SAFETY: the call writes a number.
    let status = unsafe { sys::cuMemGetAllocationGranularity(&raw mut page, &raw const properties, least) };
    status.result().map_err(cuda_error("read the page size of memory"))?;
    Ok(bytes.max(1).next_multiple_of(page.max(1)))
}

fn release(memory: sys::CUmemGenericAllocationHandle) {
    // SAFETY: the handle belongs to the caller, who no longer uses it.
    unsafe { sys::cuMemRelease(memory) };
}
