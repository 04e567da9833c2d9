//! Making the context. Under MPS it may have to wait for the server.

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::{CudaContext, DriverError, sys};

use crate::clock::{after, now_ns};

/// The MPS server may be starting, or be busy with ending a client.
const SERVER_TIMEOUT: Duration = Duration::from_secs(10);

/// Time between two checks whether the server is ready: there is no event to wait for.
const SERVER_POLL_INTERVAL: Duration = Duration::from_millis(20);

#[derive(Debug, thiserror::Error)]
pub(super) enum GpuOpenError {
    #[error(
        "NVIDIA's driver is not there: libcuda.so.1 cannot be loaded; install the driver, or use an emulated device"
    )]
    NoDriver,
    #[error("the environment hides every GPU; is the UUID in the configuration right?")]
    NoGpu,
    #[error("the MPS server was not ready within {SERVER_TIMEOUT:?}; see its server.log")]
    NotReady(#[source] DriverError),
    #[error("the GPU cannot be opened")]
    Driver(#[source] DriverError),
}

/// Of the first GPU that the process sees: the primary context, which engines use too.
pub(super) fn context() -> Result<Arc<CudaContext>, GpuOpenError> {
    load_driver()?;
    let deadline_ns = after(now_ns(), SERVER_TIMEOUT);
    loop {
        match CudaContext::new(0).and_then(use_blocking_waits) {
            Ok(context) => return Ok(context),
            Err(error) if !is_not_ready(error) => return Err(open_error(error)),
            Err(error) if now_ns() > deadline_ns => return Err(GpuOpenError::NotReady(error)),
            Err(_) => pause(),
        }
    }
}

pub(super) fn load_driver() -> Result<(), GpuOpenError> {
    // SAFETY: loading NVIDIA's library runs its initialisers, which is what a CUDA program does.
    if unsafe { sys::is_culib_present() } { Ok(()) } else { Err(GpuOpenError::NoDriver) }
}

/// Has a thread that waits for the GPU leave its core to others.
fn use_blocking_waits(context: Arc<CudaContext>) -> Result<Arc<CudaContext>, DriverError> {
    context.set_blocking_synchronize()?;
    Ok(context)
}

/// While the server starts, recovers from a fault or ends a client, it takes no new client.
fn is_not_ready(error: DriverError) -> bool {
    use sys::CUresult::{CUDA_ERROR_MPS_CONNECTION_FAILED, CUDA_ERROR_MPS_SERVER_NOT_READY};
    matches!(error.0, CUDA_ERROR_MPS_SERVER_NOT_READY | CUDA_ERROR_MPS_CONNECTION_FAILED)
}

fn open_error(error: DriverError) -> GpuOpenError {
    match error.0 {
        sys::CUresult::CUDA_ERROR_NO_DEVICE | sys::CUresult::CUDA_ERROR_INVALID_DEVICE => GpuOpenError::NoGpu,
        _ => GpuOpenError::Driver(error),
    }
}

#[allow(clippy::disallowed_methods)] // the server announces nothing that could be waited for
fn pause() {
    std::thread::sleep(SERVER_POLL_INTERVAL);
}
