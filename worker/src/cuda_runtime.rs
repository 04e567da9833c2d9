//! Replacements for functions of CUDA's libraries. The linker exports them from this program, so ONNX
//! Runtime's CUDA provider calls them instead of the libraries' functions.
//!
//! Memory comes from the [arena](shadowslice_worker::device::cuda::arena) of the calling thread's model,
//! which a model that sleeps releases. Without an arena, the library's own function does the work.
#![allow(unsafe_code)] // This module defines functions that C code calls.

use std::cell::Cell;
use std::ffi::{CStr, c_int, c_void};
use std::ptr::null_mut;

use nix::libc::{RTLD_LAZY, RTLD_NOLOAD, dlopen, dlsym};
use shadowslice_worker::device::cuda::arena::{self, ArenaOutcome};

const SUCCESS: c_int = 0;
const OUT_OF_MEMORY: c_int = 2;

/// The error of a function whose library is not loaded. It has this meaning in both libraries.
const NOT_FOUND: c_int = 1;

/// The names of the CUDA runtime, by version.
const RUNTIMES: [&CStr; 2] = [c"libcudart.so.13", c"libcudart.so.12"];

/// The names of cuBLAS, by version.
const CUBLAS: [&CStr; 2] = [c"libcublas.so.13", c"libcublas.so.12"];

/// The size of cuBLAS's workspace in bytes: its own default for Hopper GPUs.
const WORKSPACE_BYTES: usize = 32 << 20;

/// A library's own function with one argument.
type Unary = unsafe extern "C" fn(*mut c_void) -> c_int;

/// A library's own function with two arguments.
type Binary = unsafe extern "C" fn(*mut *mut c_void, usize) -> c_int;

/// cuBLAS's own function that sets the stream of a handle.
type SetStream = unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int;

/// cuBLAS's own function that sets the workspace of a handle.
type SetWorkspace = unsafe extern "C" fn(*mut c_void, *mut c_void, usize) -> c_int;

thread_local! {
    /// The cuBLAS handle of this thread's model, and the number of sessions that use it.
    static HANDLE: Cell<(*mut c_void, usize)> = const { Cell::new((null_mut(), 0)) };

    /// The workspace of this handle, or null if it has none yet.
    static WORKSPACE: Cell<*mut c_void> = const { Cell::new(null_mut()) };
}

/// Returns a library's own function, or `None` if the library is not loaded.
fn own(libraries: [&CStr; 2], name: &CStr) -> Option<*mut c_void> {
    libraries.iter().find_map(|library| {
        // SAFETY: the texts end with a zero byte. The call only finds a library that is already loaded.
        let found = unsafe {
            let library = dlopen(library.as_ptr(), RTLD_LAZY | RTLD_NOLOAD);
            if library.is_null() { library } else { dlsym(library, name.as_ptr()) }
        };
        (!found.is_null()).then_some(found)
    })
}

fn own_unary(libraries: [&CStr; 2], name: &CStr, argument: *mut c_void) -> c_int {
    // SAFETY: all functions that this module calls by name have this type.
    let function = own(libraries, name).map(|found| unsafe { std::mem::transmute::<_, Unary>(found) });
    // SAFETY: the argument is that of the caller.
    function.map_or(NOT_FOUND, |function| unsafe { function(argument) })
}

/// Allocates GPU memory in the arena of the calling thread.
///
/// # Safety
///
/// `start` must be valid for a write.
#[unsafe(no_mangle)]
unsafe extern "C" fn cudaMalloc(start: *mut *mut c_void, bytes: usize) -> c_int {
    match if bytes == 0 { ArenaOutcome::NotOurs } else { arena::allocate(bytes) } {
        ArenaOutcome::Done(address) => {
            // SAFETY: the caller guarantees that the address is valid.
            unsafe { start.write(address) };
            SUCCESS
        }
        ArenaOutcome::OutOfMemory => OUT_OF_MEMORY,
        ArenaOutcome::NotOurs => {
            let found = own(RUNTIMES, c"cudaMalloc");
            // SAFETY: the function of this name has this type.
            let function = found.map(|found| unsafe { std::mem::transmute::<_, Binary>(found) });
            // SAFETY: the arguments are those of the caller.
            function.map_or(NOT_FOUND, |function| unsafe { function(start, bytes) })
        }
    }
}

/// Frees GPU memory.
///
/// # Safety
///
/// No work may use the memory after this call.
#[unsafe(no_mangle)]
unsafe extern "C" fn cudaFree(start: *mut c_void) -> c_int {
    match if start.is_null() { ArenaOutcome::NotOurs } else { arena::free(start) } {
        ArenaOutcome::Done(()) => SUCCESS,
        ArenaOutcome::OutOfMemory | ArenaOutcome::NotOurs => own_unary(RUNTIMES, c"cudaFree", start),
    }
}

/// Creates a cuBLAS handle. All sessions of a model share one handle with its workspace, because they run
/// on one thread and one stream.
///
/// # Safety
///
/// `handle` must be valid for a write.
#[unsafe(no_mangle)]
unsafe extern "C" fn cublasCreate_v2(handle: *mut *mut c_void) -> c_int {
    let (known, users) = HANDLE.get();
    if users > 0 {
        HANDLE.set((known, users + 1));
        // SAFETY: the caller guarantees that the address is valid.
        unsafe { handle.write(known) };
        return SUCCESS;
    }
    let status = own_unary(CUBLAS, c"cublasCreate_v2", handle.cast());
    if status == SUCCESS && arena::is_used() {
        // SAFETY: the call above has written the handle.
        HANDLE.set((unsafe { handle.read() }, 1));
    }
    status
}

/// Destroys a cuBLAS handle, unless other sessions use it.
///
/// # Safety
///
/// The caller must not use the handle after this call.
#[unsafe(no_mangle)]
unsafe extern "C" fn cublasDestroy_v2(handle: *mut c_void) -> c_int {
    let (known, users) = HANDLE.get();
    if users > 0 && known == handle {
        HANDLE.set((known, users - 1));
        if users > 1 {
            return SUCCESS;
        }
        arena::free(WORKSPACE.replace(null_mut()));
    }
    own_unary(CUBLAS, c"cublasDestroy_v2", handle)
}

/// Sets the stream of a cuBLAS handle. cuBLAS then forgets the handle's workspace, so this function sets it
/// again. Without a workspace, cuBLAS allocates memory while CUDA records a batch, and CUDA can neither copy
/// nor cut such a recording.
///
/// # Safety
///
/// Both handles must be valid.
#[unsafe(no_mangle)]
unsafe extern "C" fn cublasSetStream_v2(handle: *mut c_void, stream: *mut c_void) -> c_int {
    let Some(found) = own(CUBLAS, c"cublasSetStream_v2") else { return NOT_FOUND };
    // SAFETY: the function of this name has this type, and the arguments are those of the caller.
    let status = unsafe { std::mem::transmute::<*mut c_void, SetStream>(found)(handle, stream) };
    let (known, users) = HANDLE.get();
    if status != SUCCESS || users == 0 || known != handle {
        return status;
    }
    if WORKSPACE.get().is_null()
        && let ArenaOutcome::Done(start) = arena::allocate(WORKSPACE_BYTES)
    {
        WORKSPACE.set(start);
    }
    let (workspace, found) = (WORKSPACE.get(), own(CUBLAS, c"cublasSetWorkspace_v2"));
    let Some(found) = found.filter(|_| !workspace.is_null()) else { return status };
    // SAFETY: the function of this name has this type. The workspace has this size, and all work of the
    // handle runs on one stream, one kernel after the other.
    unsafe { std::mem::transmute::<*mut c_void, SetWorkspace>(found)(handle, workspace, WORKSPACE_BYTES) }
}
