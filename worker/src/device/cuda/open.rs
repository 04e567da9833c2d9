//! Opens the GPU. Under MPS, the process may first have to wait for the MPS server.

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::{CudaContext, DriverError, sys};

use crate::clock::{after, now_ns};

/// The maximum time to wait for the MPS server. The server may be starting, or may be cleaning up
/// after a client.
const SERVER_TIMEOUT: Duration = Duration::from_secs(10);

/// The time between two attempts to connect to the MPS server. The server does not signal when it
/// is ready.
const SERVER_POLL_INTERVAL: Duration = Duration::from_millis(20);

#[derive(Debug, thiserror::Error)]
pub(super) enum GpuOpenError {
    #[error("cannot load NVIDIA's driver (libcuda.so.1); install the driver, or use an emulated device")]
    NoDriver,
    #[error("no GPU is visible to this process; check the UUID in the configuration (`nvidia-smi -L`)")]
    NoGpu,
    #[error(
        "the MPS server did not accept this process within {SERVER_TIMEOUT:?}; run `shadowslice doctor`, and see \
         server.log in private/mpsN/log of run_dir"
    )]
    NotReady(#[source] DriverError),
    #[error("the MPS server accepts no further process")]
    NoClient(#[source] DriverError),
    #[error("cannot open the GPU; check `nvidia-smi`, and look for Xid errors in `dmesg`")]
    Driver(#[source] DriverError),
}

/// Returns the primary context of the first visible GPU. Inference engines such as ONNX Runtime use
/// this context too.
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
    // SAFETY: loading NVIDIA's library runs its initialisers, as every CUDA program does.
    if unsafe { sys::is_culib_present() } { Ok(()) } else { Err(GpuOpenError::NoDriver) }
}

/// Makes threads sleep instead of spin while they wait for the GPU.
fn use_blocking_waits(context: Arc<CudaContext>) -> Result<Arc<CudaContext>, DriverError> {
    context.set_blocking_synchronize()?;
    Ok(context)
}

/// Returns true if the MPS server currently accepts no new client. This happens while the server
/// starts, recovers from a fault or cleans up after a client.
fn is_not_ready(error: DriverError) -> bool {
    use sys::CUresult::{CUDA_ERROR_MPS_CONNECTION_FAILED, CUDA_ERROR_MPS_SERVER_NOT_READY};
    matches!(error.0, CUDA_ERROR_MPS_SERVER_NOT_READY | CUDA_ERROR_MPS_CONNECTION_FAILED)
}

fn open_error(error: DriverError) -> GpuOpenError {
    match error.0 {
        sys::CUresult::CUDA_ERROR_MPS_MAX_CLIENTS_REACHED => GpuOpenError::NoClient(error),
        sys::CUresult::CUDA_ERROR_NO_DEVICE | sys::CUresult::CUDA_ERROR_INVALID_DEVICE => GpuOpenError::NoGpu,
        _ => GpuOpenError::Driver(error),
    }
}

#[allow(clippy::disallowed_methods)] // The MPS server offers no event to wait for.
fn pause() {
    std::thread::sleep(SERVER_POLL_INTERVAL);
}
