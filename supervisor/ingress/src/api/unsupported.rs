//! Triton's extensions that this server does not support. Clients receive the answers of a Triton
//! that was built without these extensions.

use crate::admission::{Clipped, RequestError};
use shadowslice_datapath::pipeline::RequestFailure;

pub(super) const TRACING: &str = "tracing";
pub(super) const LOGGING: &str = "dynamic logging";

pub(super) fn extension(what: &str) -> RequestError {
    RequestFailure::Unavailable(format!("the server does not support {what}")).into()
}

pub(super) fn register_cuda(name: &str) -> RequestError {
    let name = Clipped(name);
    let why = "CUDA shared memory is not supported here; use system shared memory";
    RequestFailure::Invalid(format!("failed to register CUDA shared memory region: '{name}', {why}")).into()
}

/// Checks the name of a region. Only the empty name, which means all regions, is accepted, because
/// there are no regions.
pub(super) fn cuda_status(name: &str) -> Result<(), RequestError> {
    if name.is_empty() {
        return Ok(());
    }
    Err(RequestError::NotFound(format!("Unable to find cuda shared memory region: '{}'", Clipped(name))))
}

pub(super) fn call(path: &str) -> RequestError {
    RequestError::Unsupported(format!("the server does not support {}", Clipped(path)))
}
