//! Host memory that the GPU reads and writes directly.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use cudarc::driver::sys;
use shadowslice_shared::slab::{AnswerWriter, ReadableSlab};

use super::CudaGpu;
use super::exclusion::Exclusion;
use super::pause::RegisteredPause;

/// The registration of a model's slabs with the driver. Drop this before the slabs are unmapped.
#[derive(Debug)]
pub struct PinnedSlabs {
    starts: Vec<NonNull<u8>>,
    gpu: Arc<CudaGpu>,
}

impl PinnedSlabs {
    /// Registers the slabs with the driver, so that copies do not go through the driver's own
    /// buffers. If the driver refuses the registration, the worker still works, but copies are slower.
    /// Only the first `request_bytes` bytes of the request slab are registered. `may_be_paused` is true if
    /// the supervisor can pause the worker's batches.
    pub fn pin(
        gpu: &Arc<CudaGpu>,
        requests: &ReadableSlab,
        request_bytes: u64,
        responses: &AnswerWriter,
        may_be_paused: bool,
    ) -> Self {
        let _exclusion = Exclusion::of_setup();
        let supported = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED;
        let is_supported = gpu.context.attribute(supported).unwrap_or(0) != 0;
        let (start, bytes) = requests.whole();
        let part = (start, bytes.min(request_bytes));
        gpu.pinned_end.store(part.0.as_ptr().addr() + part.1 as usize, Ordering::Relaxed);
        let requests = is_supported.then(|| register(part, sys::CU_MEMHOSTREGISTER_READ_ONLY));
        let word = responses.pause_word();
        let pause =
            may_be_paused.then(|| register(RegisteredPause::memory(word), sys::CU_MEMHOSTREGISTER_DEVICEMAP));
        if let Some(pause) = pause.flatten().and_then(|_| RegisteredPause::of(word, gpu)) {
            gpu.pause.get_or_init(|| pause);
        }
        let starts = [requests.flatten(), register(responses.whole(), 0), pause.flatten()];
        Self { starts: starts.into_iter().flatten().collect(), gpu: Arc::clone(gpu) }
    }
}

impl Drop for PinnedSlabs {
    fn drop(&mut self) {
        let _exclusion = Exclusion::of_setup();
        self.gpu.end_pause();
        // If these calls fail, the context is unusable, and the driver has dropped the registration.
        self.gpu.bind().and_then(|()| self.gpu.synchronize()).ok();
        for start in &self.starts {
            // SAFETY: the memory is still mapped, and the GPU has finished all copies.
            unsafe { sys::cuMemHostUnregister(start.as_ptr().cast()) };
        }
    }
}

/// Registers memory. Returns its start if the driver accepts it.
fn register((start, bytes): (NonNull<u8>, u64), flags: u32) -> Option<NonNull<u8>> {
    let bytes = usize::try_from(bytes).expect("the slab is mapped");
    // SAFETY: the memory is mapped and stays mapped. The registration neither reads nor writes it.
    let registered = unsafe { sys::cuMemHostRegister_v2(start.as_ptr().cast(), bytes, flags) };
    registered.result().is_ok().then_some(start)
}
