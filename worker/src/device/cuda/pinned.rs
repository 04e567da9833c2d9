//! Host memory that the GPU reads and writes directly.

use std::ptr::NonNull;

use cudarc::driver::sys;
use shadowslice_shared::slab::{AnswerWriter, ReadableSlab};

use super::CudaGpu;

/// Registers the slabs with the driver, so that copies do not go through the driver's own buffers.
/// The slabs stay mapped while the process uses the GPU. If the driver refuses the registration,
/// the worker still works, but copies are slower.
pub fn pin(gpu: &CudaGpu, requests: &ReadableSlab, responses: &AnswerWriter) {
    let supported = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED;
    if gpu.context.attribute(supported).unwrap_or(0) != 0 {
        register(requests.whole(), sys::CU_MEMHOSTREGISTER_READ_ONLY);
    }
    register(responses.whole(), 0);
}

fn register((start, bytes): (NonNull<u8>, u64), flags: u32) {
    let bytes = usize::try_from(bytes).expect("the slab is mapped");
    // SAFETY: the memory is mapped and stays mapped. The registration neither reads nor writes it.
    let registered = unsafe { sys::cuMemHostRegister_v2(start.as_ptr().cast(), bytes, flags) };
    registered.result().ok();
}
