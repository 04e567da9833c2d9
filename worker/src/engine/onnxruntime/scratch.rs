//! Memory for what a model computes on the way to its outputs: one arena for all of a worker's
//! sessions.
//!
//! Executions follow one another on one stream, so the need is that of the largest and not the sum.
//! A recording writes to the places that it had in the arena when it was made. So whatever is to
//! stay, such as a session's small tensors, must lie there before the first recording is made.
#![allow(unsafe_code)] // registers an allocator with ONNX Runtime

use std::ffi::CStr;
use std::ptr::null_mut;

use ort::environment::Environment;
use ort::memory::{AllocationDevice, Allocator, AllocatorType, MemoryInfo, MemoryType};
use ort::{AsPointer, ortsys};

/// The arena grows by what is asked for: doubling would take memory that neighbours need.
const AS_REQUESTED: usize = 1;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Scratch {
    /// In the arena of all sessions. After the warm-up only recordings run there.
    Shared,
    Own,
}

/// Once a process.
pub(super) fn share(environment: &Environment) -> ort::Result<()> {
    let memory = MemoryInfo::new(AllocationDevice::CUDA, 0, AllocatorType::Arena, MemoryType::Default)?;
    let (keys, values) = ([c"arena_extend_strategy".as_ptr()], [AS_REQUESTED]);
    let mut arena = null_mut();
    // SAFETY: reads a key and a value, and writes a pointer to the configuration that it makes.
    ortsys![unsafe CreateArenaCfgV2(keys.as_ptr(), values.as_ptr(), keys.len(), &mut arena)?];
    let (environment, provider) = (environment.ptr().cast_mut(), c"CUDAExecutionProvider".as_ptr());
    let (names, settings) = ([c"device_id".as_ptr()], [c"0".as_ptr()]);
    let register = || -> ort::Result<()> {
        // SAFETY: all are alive during the call, which copies what it keeps.
        ortsys![unsafe CreateAndRegisterAllocatorV2(environment, provider, memory.ptr(), arena, names.as_ptr(), settings.as_ptr(), 1)?];
        Ok(())
    };
    let registered = register();
    // SAFETY: made above, and used no more.
    ortsys![unsafe ReleaseArenaCfg(arena)];
    registered
}

/// Bytes that the allocator's arena has of the GPU's memory; `None` if it does not say.
pub(super) fn bytes(allocator: &Allocator) -> Option<u64> {
    let mut stats = null_mut();
    let mut ask = || -> ort::Result<()> {
        // SAFETY: the allocator is alive; the call writes a pointer to figures of the caller's.
        ortsys![unsafe AllocatorGetStats(allocator.ptr(), &mut stats)?];
        Ok(())
    };
    ask().ok().filter(|()| !stats.is_null())?;
    // SAFETY: the figures are alive until they are released; the text is theirs.
    let value = unsafe {
        let value = ortsys![GetKeyValue](stats, c"TotalAllocated".as_ptr());
        (!value.is_null()).then(|| CStr::from_ptr(value).to_str().ok()?.parse().ok()).flatten()
    };
    // SAFETY: the caller's own, and used no more.
    ortsys![unsafe ReleaseKeyValuePairs(stats)];
    value
}
