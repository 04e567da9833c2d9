//! The functions through which PyTorch allocates GPU memory in the arena of the model's thread. PyTorch
//! finds them by their names in this library (`_arena.py`).
#![allow(unsafe_code)] // This module defines functions that C++ code calls.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

use shadowslice_worker::device::cuda::arena::{self, ArenaOutcome};

/// Allocates memory. Returns null if the GPU has too little.
#[unsafe(no_mangle)]
extern "C" fn shadowslice_allocate(bytes: isize, _device: c_int, _stream: *mut c_void) -> *mut c_void {
    match usize::try_from(bytes).map(arena::allocate) {
        Ok(ArenaOutcome::Done(start)) => start,
        _ => null_mut(),
    }
}

/// Frees memory that `shadowslice_allocate` has allocated.
///
/// # Safety
///
/// No work that is queued later may use the memory.
#[unsafe(no_mangle)]
unsafe extern "C" fn shadowslice_free(
    start: *mut c_void,
    _bytes: isize,
    _device: c_int,
    _stream: *mut c_void,
) {
    arena::free_after_all_work(start);
}
