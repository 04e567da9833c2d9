//! Scratch memory, for intermediate tensors: one arena for all sessions of a worker.
//!
//! Executions follow one another on one stream, so the arena's size is that of the largest and not
//! the sum. A recording writes to the addresses in the arena that it got when it was recorded. So
//! everything permanent, such as a session's small tensors, must be allocated before the first
//! recording.
#![allow(unsafe_code)] // registers an allocator with ONNX Runtime

use std::ffi::CStr;
use std::ptr::null_mut;

use ort::environment::Environment;
use ort::memory::{AllocationDevice, Allocator, AllocatorType, MemoryInfo, MemoryType};
use ort::{AsPointer, ortsys};

/// The strategy by which the arena grows: by the requested size, because doubling would take memory
/// that other models need.
const AS_REQUESTED: usize = 1;

/// The arena of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Scratch {
    /// The arena of all sessions. After the warm-up only recordings use it.
    Shared,
    /// An arena of the session itself.
    Own,
}

/// Registers the shared arena. Call this once in a process.
pub(super) fn share(environment: &Environment) -> ort::Result<()> {
    let memory = MemoryInfo::new(AllocationDevice::CUDA, 0, AllocatorType::Arena, MemoryType::Default)?;
    let (keys, values) = ([c"arena_extend_strategy".as_ptr()], [AS_REQUESTED]);
    let mut arena = null_mut();
    // SAFETY: the call reads a key and a value, and writes a pointer to the configuration that it
    // creates.
    ortsys![unsafe CreateArenaCfgV2(keys.as_ptr(), values.as_ptr(), keys.len(), &mut arena)?];
    let (environment, provider) = (environment.ptr().cast_mut(), c"CUDAExecutionProvider".as_ptr());
    let (names, settings) = ([c"device_id".as_ptr()], [c"0".as_ptr()]);
    let register = || -> ort::Result<()> {
        // SAFETY: all arguments are alive during the call, which copies what it keeps.
        ortsys![unsafe CreateAndRegisterAllocatorV2(environment, provider, memory.ptr(), arena, names.as_ptr(), settings.as_ptr(), 1)?];
        Ok(())
    };
    let registered = register();
    // SAFETY: the configuration was created above, and nothing uses it any more.
    ortsys![unsafe ReleaseArenaCfg(arena)];
    registered
}

/// Returns the bytes of the GPU's memory that the allocator's arena holds, or `None` if ONNX
/// Runtime does not report them.
pub(super) fn bytes(allocator: &Allocator) -> Option<u64> {
    let mut stats = null_mut();
    let mut ask = || -> ort::Result<()> {
        // SAFETY: the allocator is alive; the call writes a pointer to statistics that the caller
        // owns.
        ortsys![unsafe AllocatorGetStats(allocator.ptr(), &mut stats)?];
        Ok(())
    };
    ask().ok().filter(|()| !stats.is_null())?;
    // SAFETY: the statistics are alive until they are released, and own the text.
    let value = unsafe {
        let value = ortsys![GetKeyValue](stats, c"TotalAllocated".as_ptr());
        (!value.is_null()).then(|| CStr::from_ptr(value).to_str().ok()?.parse().ok()).flatten()
    };
    // SAFETY: the caller owns the statistics, and does not use them any more.
    ortsys![unsafe ReleaseKeyValuePairs(stats)];
    value
}
