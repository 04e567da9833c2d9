//! Extensions that Triton may have and this server has not: clients get the answers of a Triton
//! that was built without them. Pure.

use crate::admission::request_error::RequestError;
use crate::tensors::check::Clipped;
use shadowslice_datapath::pipeline::RequestFailure;

pub(crate) const TRACING: &str = "tracing";
pub(crate) const LOGGING: &str = "dynamic logging";

pub(crate) fn extension(what: &str) -> RequestError {
    RequestFailure::Unavailable(format!("the server does not support {what}")).into()
}

pub(crate) fn register_cuda(name: &str) -> RequestError {
    let name = Clipped(name);
    let why = "CUDA shared memory is not supported here; use system shared memory";
    RequestFailure::Invalid(format!("failed to register CUDA shared memory region: '{name}', {why}")).into()
}

/// An empty name stands for all regions, of which there are none.
pub(crate) fn cuda_status(name: &str) -> Result<(), RequestError> {
    if name.is_empty() {
        return Ok(());
    }
    Err(RequestError::NotFound(format!("Unable to find cuda shared memory region: '{}'", Clipped(name))))
}

pub(crate) fn call(path: &str) -> RequestError {
    RequestError::Unsupported(format!("the server does not support {}", Clipped(path)))
}
