//! The worker's library as the Python module `shadowslice._worker`.
//!
//! All of a worker's phases are those of `shadowslice-worker`: the boot, the proof, the batches. Only
//! what loads and runs the model is Python, in the package `shadowslice`.

mod host;

use std::path::PathBuf;

use pyo3::prelude::*;
use shadowslice_shared::errors::chain;
use shadowslice_worker::boot::{ConnectedWorker, WorkerError};
use shadowslice_worker::{log_line, sandbox};

use host::PythonHost;

/// Serves as the supervisor orders, until there is no more work. `runner` has the methods `load` and
/// `run` of the package's `Runner`; `user` is whom the process becomes first. Returns the exit code.
#[pyfunction]
#[pyo3(signature = (runner, user = None))]
fn serve(py: Python<'_>, runner: Py<PyAny>, user: Option<u32>) -> u8 {
    // While the worker waits, the model's own threads run.
    py.detach(|| match run(runner, user) {
        // The supervisor is gone, so there is nothing to report; or it was told why.
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
        log_line(&format!("other processes of its user can read it: {error}"));
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

/// A worker's walls, around a process that only looks at a model and writes to these folders.
#[pyfunction]
fn enter_sandbox(writable: Vec<PathBuf>) {
    sandbox::harden_process().ok();
    // What does not stand is told when a worker starts.
    sandbox::enter(&writable);
}

#[pymodule]
fn _worker(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(enter_sandbox, module)?)?;
    module.add_function(wrap_pyfunction!(serve, module)?)
}
