//! GPU memory that belongs to one tensor. Engines do not use this memory for intermediate results.

use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::{CudaContext, result};

use super::exclusion::Exclusion;
use super::{CudaError, CudaGpu, cuda_error};

/// A block of memory on the GPU.
#[derive(Debug)]
pub struct DeviceBuffer {
    start: NonNull<u8>,
    bytes: usize,
    context: Arc<CudaContext>,
}

impl DeviceBuffer {
    /// Allocates `bytes` bytes, but at least one byte, and sets the memory to zero.
    pub fn zeroed(gpu: &CudaGpu, bytes: usize) -> Result<Self, CudaError> {
        let _exclusion = Exclusion::of_setup();
        let failed = cuda_error("allocate memory");
        // SAFETY: a new allocation affects no other memory. `drop` frees the allocation.
        let address = unsafe { result::malloc_sync(bytes.max(1)) }.map_err(&failed)?;
        let start = NonNull::new(address as *mut u8).expect("the driver gives no memory at address zero");
        let buffer = Self { start, bytes, context: Arc::clone(&gpu.context) };
        // SAFETY: the memory was allocated with this size, and nothing uses it yet.
        unsafe { result::memset_d8_sync(address, 0, bytes.max(1)) }.map_err(&failed)?;
        // `memset_d8_sync` can return before the memory is set, and the streams of this process do
        // not wait for that.
        gpu.synchronize_context()?;
        Ok(buffer)
    }

    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Returns the first bytes of the buffer, after all batches that have started.
    ///
    /// # Panics
    ///
    /// Panics if the buffer has fewer bytes.
    pub fn read(&self, gpu: &CudaGpu, bytes: usize) -> Result<Vec<u8>, CudaError> {
        assert!(bytes <= self.bytes, "the buffer is smaller");
        let mut content = vec![0_u8; bytes];
        let to = NonNull::new(content.as_mut_ptr()).expect("a vector has an address");
        // SAFETY: both sides have this number of bytes, and the copy ends before this function returns.
        unsafe { gpu.copy_out(self.start, to, bytes) }.and_then(|()| gpu.synchronize())?;
        Ok(content)
    }

    /// Writes bytes to the start of the buffer. No batch may be using the buffer.
    ///
    /// # Panics
    ///
    /// Panics if the buffer has fewer bytes.
    pub fn write(&self, gpu: &CudaGpu, content: &[u8]) -> Result<(), CudaError> {
        assert!(content.len() <= self.bytes, "the buffer is smaller");
        // SAFETY: the buffer is large enough, and the copy ends before this function returns.
        unsafe { gpu.copy_in(content, self.start) }.and_then(|()| gpu.synchronize())
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        let _exclusion = Exclusion::of_setup();
        // If the context is unusable, the driver has already freed its memory.
        if self.context.synchronize().is_ok() {
            // SAFETY: this value owns the memory, and all work that used the memory has ended. If
            // the call fails, the memory is freed when the process exits.
            unsafe { result::free_sync(self.start.as_ptr() as u64) }.ok();
        }
    }
}
