//! The execution providers that compute a model's operators.
#![allow(unsafe_code)] // hands a stream to ONNX Runtime, and has it load its providers

use std::path::Path;
use std::ptr::{null, null_mut};
use std::sync::Arc;

use ort::ep::{self, ExecutionProviderDispatch};
use ort::ortsys;
use shadowslice_shared::boot::ProviderSpec;

use crate::device::cuda::CudaGpu;

/// The libraries of NVIDIA that ONNX Runtime's provider for CUDA 13 needs, each before those that
/// depend on it.
const LIBRARIES: [&str; 5] =
    ["libcudart.so.13", "libcublasLt.so.13", "libcublas.so.13", "libcurand.so.10", "libcudnn.so.9"];

/// The variable that sets the workspaces of cuBLAS, with 8 MiB and 128 KiB, as on GPUs before
/// Hopper.
const SMALL_WORKSPACES: (&str, &str) = ("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8");

/// Makes cuBLAS take 56 MiB less for each session of the process. Networks of convolutions, which
/// have a session for each batch size, are no slower with that (measured on an H200). Networks of
/// matrix products are slower by up to 19 %. Call this before any library is loaded.
#[allow(clippy::disallowed_methods)] // cuBLAS reads this only from the environment
pub(super) fn give_small_workspaces() {
    let (variable, sizes) = SMALL_WORKSPACES;
    if std::env::var_os(variable).is_none() {
        // SAFETY: the process has no other thread yet that could read the environment.
        unsafe { std::env::set_var(variable, sizes) };
    }
}

/// Loads NVIDIA's libraries without touching the GPU, so that a process can start before its share
/// is known. The provider itself creates a context when it is registered.
pub(super) fn load_libraries() {
    for name in LIBRARIES {
        // If a library is missing or has the wrong version, the provider reports that with its
        // name.
        ort::util::preload_dylib(name).ok();
    }
}

/// Makes ONNX Runtime load its CUDA provider, with the libraries that the provider needs. This does
/// not touch the GPU, because no session gets the options, which live as long as the process.
///
/// The provider cannot be loaded without ONNX Runtime, because it calls ONNX Runtime when it is
/// loaded.
pub(super) fn load_cuda() -> ort::Result<()> {
    let mut options = null_mut();
    // SAFETY: the call writes a pointer to the options that it creates.
    ortsys![unsafe CreateCUDAProviderOptions(&mut options)?];
    // SAFETY: the options were created above; no keys and values are read.
    ortsys![unsafe UpdateCUDAProviderOptions(options, null(), null(), 0)?];
    Ok(())
}

/// Makes ONNX Runtime load its TensorRT provider, as [`load_cuda`] does for CUDA.
pub(super) fn load_tensorrt() -> ort::Result<()> {
    let mut options = null_mut();
    // SAFETY: the call writes a pointer to the options that it creates.
    ortsys![unsafe CreateTensorRTProviderOptions(&mut options)?];
    // SAFETY: the options were created above; no keys and values are read.
    ortsys![unsafe UpdateTensorRTProviderOptions(options, null(), null(), 0)?];
    Ok(())
}

/// Returns the providers. The host's processor computes the operators that no provider supports.
pub(super) fn on_gpu(
    providers: &[ProviderSpec],
    gpu: &Arc<CudaGpu>,
    channels_last: bool,
) -> Result<Vec<ExecutionProviderDispatch>, String> {
    providers.iter().map(|provider| dispatch(provider, gpu, channels_last)).collect()
}

fn dispatch(
    provider: &ProviderSpec,
    gpu: &Arc<CudaGpu>,
    channels_last: bool,
) -> Result<ExecutionProviderDispatch, String> {
    Ok(match provider {
        // The algorithms of convolutions are chosen at the first run of each shape, with the share
        // of this process.
        ProviderSpec::Cuda => {
            let cuda = ep::CUDA::default()
                .with_tf32(true)
                .with_prefer_nhwc(channels_last)
                // Doubling the arena would take memory that shadows and other models need.
                .with_arena_extend_strategy(ep::ArenaExtendStrategy::SameAsRequested)
                .with_conv_algorithm_search(ep::cuda::ConvAlgorithmSearch::Heuristic);
            // SAFETY: the session's owner also holds an `Arc` of the GPU, and drops the session
            // first.
            unsafe { cuda.with_compute_stream(gpu.compute_stream()) }.build().error_on_failure()
        }
        ProviderSpec::TensorRt { cache } => {
            let cache = utf8(cache)?;
            let tensorrt = ep::TensorRT::default()
                .with_engine_cache(true)
                .with_engine_cache_path(cache)
                .with_timing_cache(true)
                .with_timing_cache_path(cache);
            // SAFETY: as above.
            unsafe { tensorrt.with_compute_stream(gpu.compute_stream()) }.build().error_on_failure()
        }
    })
}

fn utf8(path: &Path) -> Result<&str, String> {
    path.to_str()
        .ok_or_else(|| format!("the path of TensorRT's cache is not valid UTF-8: {}", path.display()))
}
