//! Scratch memory for intermediate tensors: one arena for all sessions of a model.
//!
//! Executions follow one another on one stream. The arena is therefore only as large as the largest
//! execution needs, not as large as all executions together. A recording writes to the addresses in
//! the arena that were allocated during the recording. All permanent memory, such as a session's
//! small tensors, must therefore be allocated before the first recording.
#![allow(unsafe_code)] // This module reads the statistics of an allocator of ONNX Runtime.

use std::ffi::CStr;
use std::ptr::null_mut;

use ort::memory::Allocator;
use ort::{AsPointer, ortsys};

/// The arena that a session uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Scratch {
    /// The [model's arena](crate::device::cuda::arena). After the warm-up, only recordings use it.
    Shared,
    /// An arena of ONNX Runtime that belongs to one session.
    Own,
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
