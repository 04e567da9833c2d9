//! The worker's library as the Python module `shadowslice._worker`.
//!
//! A Python worker has the same phases as `shadowslice-worker`: boot, proof and batches. Only the
//! code that loads and runs the model is in Python, in the package `shadowslice`.

mod host;

use std::path::PathBuf;

use pyo3::prelude::*;
use shadowslice_shared::errors::chain;
use shadowslice_worker::boot::{ConnectedWorker, WorkerError};
use shadowslice_worker::{log_line, sandbox};

use host::PythonHost;

/// Boots the worker and serves until the supervisor closes the socket. Returns the exit code.
/// `runner` is a `Runner` of the package. If `user` is given, the process first changes to that
/// user.
#[pyfunction]
#[pyo3(signature = (runner, user = None))]
fn serve(py: Python<'_>, runner: Py<PyAny>, user: Option<u32>) -> u8 {
    // This thread detaches from the interpreter, so that the model's own threads can run while the
    // worker waits.
    py.detach(|| match run(runner, user) {
        // These results are not logged. If the supervisor has exited, no process reads the log. If
        // the worker refused to start, it has already sent the reason to the supervisor.
        Ok(()) | Err(WorkerError::SupervisorGone) => 0,
        Err(WorkerError::Refused(_)) => 1,
        Err(fault) => {
            log_line(&format!("error: {}", chain(&fault)));
            1
        }
    })
}

fn run(runner: Py<PyAny>, user: Option<u32>) -> Result<(), WorkerError> {
    if let Err(error) = sandbox::harden_process() {
        log_line(&format!(
            "cannot harden this process, so other processes of the same user can read its memory: {error}"
        ));
    }
    if let Some(user) = user {
        sandbox::become_user(user).map_err(WorkerError::User)?;
    }
    let host = Box::new(PythonHost::new(runner));
    match ConnectedWorker::new(Some(host))?.load()?.warm()? {
        Some(warm) => Ok(warm.serve()?),
        None => Ok(()),
    }
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
