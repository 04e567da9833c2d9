//! What computes a model's operators.
#![allow(unsafe_code)] // hands a stream to ONNX Runtime, and has it load its providers

use std::path::Path;
use std::ptr::{null, null_mut};
use std::sync::Arc;

use ort::ep::{self, ExecutionProviderDispatch};
use ort::ortsys;
use shadowslice_shared::boot::ProviderSpec;

use crate::device::cuda::CudaGpu;

/// NVIDIA's libraries that ONNX Runtime's provider for CUDA 13 needs, each before those that depend
/// on it.
const LIBRARIES: [&str; 5] =
    ["libcudart.so.13", "libcublasLt.so.13", "libcublas.so.13", "libcurand.so.10", "libcudnn.so.9"];

/// 8 MiB and 128 KiB, as on GPUs before Hopper.
const SMALL_WORKSPACES: (&str, &str) = ("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8");

/// Has cuBLAS take 56 MiB less for each of the process's sessions. Networks of convolutions, which
/// have a session for each batch size, are no slower for it (measured on an H200); networks of
/// products of matrices are, by up to 19 %. Before any library is loaded.
#[allow(clippy::disallowed_methods)] // handles that ONNX Runtime makes can be told in no other way
pub(super) fn give_small_workspaces() {
    let (variable, sizes) = SMALL_WORKSPACES;
    if std::env::var_os(variable).is_none() {
        // SAFETY: the process has no other thread yet that could read the environment.
        unsafe { std::env::set_var(variable, sizes) };
    }
}

/// Loads NVIDIA's libraries without touching the GPU, so that a process can start before its share
/// is known. (The provider itself makes a context as soon as it is registered.)
pub(super) fn load_libraries() {
    for name in LIBRARIES {
        // If a library is missing or has another version, the provider reports that with its name.
        ort::util::preload_dylib(name).ok();
    }
}

/// Has ONNX Runtime load the provider with the libraries that it names. The GPU is not touched, as
/// no session gets the options; they live as long as the process.
///
/// (The provider cannot be loaded without ONNX Runtime: it calls that as soon as it is there.)
pub(super) fn load_cuda() -> ort::Result<()> {
    let mut options = null_mut();
    // SAFETY: writes a pointer to the options that it makes.
    ortsys![unsafe CreateCUDAProviderOptions(&mut options)?];
    // SAFETY: they were made above; no keys and values are read.
    ortsys![unsafe UpdateCUDAProviderOptions(options, null(), null(), 0)?];
    Ok(())
}

/// As [`load_cuda`].
pub(super) fn load_tensorrt() -> ort::Result<()> {
    let mut options = null_mut();
    // SAFETY: writes a pointer to the options that it makes.
    ortsys![unsafe CreateTensorRTProviderOptions(&mut options)?];
    // SAFETY: they were made above; no keys and values are read.
    ortsys![unsafe UpdateTensorRTProviderOptions(options, null(), null(), 0)?];
    Ok(())
}

/// The host's processor takes the operators that no provider has.
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
        // The kernels of convolutions are tried at the first run of each shape, under this
        // process's share.
        ProviderSpec::Cuda => {
            let cuda = ep::CUDA::default()
                .with_tf32(true)
                .with_prefer_nhwc(channels_last)
                // Doubling would take memory that shadows and neighbours need.
                .with_arena_extend_strategy(ep::ArenaExtendStrategy::SameAsRequested)
                .with_conv_algorithm_search(ep::cuda::ConvAlgorithmSearch::Heuristic);
            // SAFETY: the session lives beside an `Arc` of the GPU, and is dropped before it.
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
    path.to_str().ok_or_else(|| format!("the cache of TensorRT, {}, is no UTF-8", path.display()))
}
