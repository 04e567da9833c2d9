//! The worker's library as the Python module `shadowslice._worker`.
//!
//! A Python worker has the same phases as `shadowslice-worker`: boot, proof and batches. Only the
//! code that loads and runs the model is in Python, in the package `shadowslice`.

mod allocator;
mod host;

use std::path::PathBuf;

use pyo3::prelude::*;
use shadowslice_worker::boot::run;
use shadowslice_worker::sandbox;

use host::PythonHost;

/// Boots the worker and serves until the supervisor closes the socket. Returns the exit code.
/// `runner` is a `Runner` of the package. If `user` is given, the process first changes to that
/// user.
#[pyfunction]
#[pyo3(signature = (runner, user = None))]
fn serve(py: Python<'_>, runner: Py<PyAny>, user: Option<u32>) -> u8 {
    // This thread detaches from the interpreter, so that the model's own threads can run while the
    // worker waits.
    py.detach(|| run(user, Some(Box::new(PythonHost::new(runner)))))
}

/// Enters a worker's sandbox in a process that only checks a model. After this call, the process
/// can write only to the folders in `writable`.
#[pyfunction]
fn enter_sandbox(writable: Vec<PathBuf>) {
    // Failures are ignored here, because every worker reports its own failures when it starts.
    sandbox::harden_process().ok();
    sandbox::enter(&writable);
}

#[pymodule]
fn _worker(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(enter_sandbox, module)?)?;
    module.add_function(wrap_pyfunction!(serve, module)?)
}
