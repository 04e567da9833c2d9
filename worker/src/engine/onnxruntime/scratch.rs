//! Scratch memory for intermediate tensors: one arena for all sessions of a worker. In a shared worker,
//! each session has an arena of its own, because several models execute at the same time.
//!
//! Executions follow one another on one stream. The arena is therefore only as large as the largest
//! execution needs, not as large as all executions together. A recording writes to the addresses in
//! the arena that were allocated during the recording. All permanent memory, such as a session's
//! small tensors, must therefore be allocated before the first recording.
#![allow(unsafe_code)] // This module registers an allocator with ONNX Runtime.

use std::ffi::CStr;
use std::ptr::null_mut;

use ort::environment::Environment;
use ort::memory::{AllocationDevice, Allocator, AllocatorType, MemoryInfo, MemoryType};
use ort::{AsPointer, ortsys};

/// The setting that makes the arena grow only by the requested size. If the arena doubled in size
/// at each growth, it would take memory that other models need.
const AS_REQUESTED: usize = 1;

/// The arena that a session uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Scratch {
    /// The arena that sessions share. After the warm-up, only recordings use it.
    Shared,
    /// An arena that belongs to one session. In a shared worker, all sessions have one.
    Own,
}

/// Registers the shared arena with ONNX Runtime. Call this only once in a process.
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
        // SAFETY: all arguments exist during the call, and the call copies everything that it
        // keeps.
        ortsys![unsafe CreateAndRegisterAllocatorV2(environment, provider, memory.ptr(), arena, names.as_ptr(), settings.as_ptr(), 1)?];
        Ok(())
    };
    let registered = register();
    // SAFETY: the configuration was created above, and nothing uses it any longer.
    ortsys![unsafe ReleaseArenaCfg(arena)];
    registered
}

/// Returns the number of bytes of GPU memory that the allocator's arena holds, or `None` if ONNX
/// Runtime does not report the number.
pub(super) fn bytes(allocator: &Allocator) -> Option<u64> {
    let mut stats = null_mut();
    let mut ask = || -> ort::Result<()> {
        // SAFETY: the allocator exists. The call writes a pointer to statistics that the caller
        // owns.
        ortsys![unsafe AllocatorGetStats(allocator.ptr(), &mut stats)?];
        Ok(())
    };
    ask().ok().filter(|()| !stats.is_null())?;
    // SAFETY: the statistics exist until they are released, and they own the text.
    let value = unsafe {
        let value = ortsys![GetKeyValue](stats, c"TotalAllocated".as_ptr());
        (!value.is_null()).then(|| CStr::from_ptr(value).to_str().ok()?.parse().ok()).flatten()
    };
    // SAFETY: the caller owns the statistics and no longer uses them.
    ortsys![unsafe ReleaseKeyValuePairs(stats)];
    value
}
