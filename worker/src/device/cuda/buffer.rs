//! Memory on the GPU that no computation of an engine shares.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::{CudaContext, result};

use super::{CudaFault, CudaGpu, fault};

pub struct DeviceBuffer {
    start: NonNull<u8>,
    bytes: usize,
    context: Arc<CudaContext>,
}

impl fmt::Debug for DeviceBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBuffer").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl DeviceBuffer {
    /// Room for `bytes` bytes, but for one byte at least.
    pub fn zeroed(gpu: &CudaGpu, bytes: usize) -> Result<Self, CudaFault> {
        let failed = fault("give memory");
        // SAFETY: a new allocation disturbs no other; it is freed with the value.
        let address = unsafe { result::malloc_sync(bytes.max(1)) }.map_err(&failed)?;
        let start = NonNull::new(address as *mut u8).expect("the driver gives no memory at address zero");
        let buffer = Self { start, bytes, context: Arc::clone(&gpu.context) };
        // SAFETY: it was allocated with this size, and nothing uses it yet.
        unsafe { result::memset_d8_sync(address, 0, bytes.max(1)) }.map_err(&failed)?;
        // The call returns before memory on the GPU is set, and our streams do not wait for it.
        gpu.synchronize()?;
        Ok(buffer)
    }

    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        // If the context is beyond use, its memory is gone with it.
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: ours; the owner has synchronised with all that used it.
            unsafe { result::free_sync(self.start.as_ptr() as u64) }.ok();
        }
    }
}
