//! The execution providers that compute a model's operators.
#![allow(unsafe_code)] // This module passes a stream to ONNX Runtime, and makes it load its providers.

use std::path::Path;
use std::ptr::{null, null_mut};
use std::sync::Arc;

use ort::ep::{self, ExecutionProviderDispatch};
use ort::ortsys;
use shadowslice_shared::boot::ProviderSpec;

use crate::device::cuda::CudaGpu;

/// The NVIDIA libraries that ONNX Runtime's provider for CUDA 13 needs. Each library precedes those
/// that depend on it.
const LIBRARIES: [&str; 5] =
    ["libcudart.so.13", "libcublasLt.so.13", "libcublas.so.13", "libcurand.so.10", "libcudnn.so.9"];

/// The environment variable for the sizes of cuBLAS's workspaces. The value means two buffers of 4
/// MiB and eight of 16 KiB, as on GPUs before Hopper.
const SMALL_WORKSPACES: (&str, &str) = ("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8");

/// Makes cuBLAS use 56 MiB less memory for each session of the process. Convolutional networks have
/// a session for each batch size, and are no slower with this setting (measured on an H200).
/// Networks that mainly multiply matrices are up to 19 % slower. Call this before any library is
/// loaded.
#[allow(clippy::disallowed_methods)] // cuBLAS reads this setting only from the environment.
pub(super) fn give_small_workspaces() {
    let (variable, sizes) = SMALL_WORKSPACES;
    if std::env::var_os(variable).is_none() {
        // SAFETY: the process does not have another thread yet that could read the environment.
        unsafe { std::env::set_var(variable, sizes) };
    }
}

/// Loads NVIDIA's libraries without accessing the GPU, so that a process can start before its share
/// is known. The provider creates a context only when ONNX Runtime registers it.
pub(super) fn load_libraries() {
    for name in LIBRARIES {
        // If a library is missing or has the wrong version, the provider reports that library's
        // name.
        ort::util::preload_dylib(name).ok();
    }
}

/// Makes ONNX Runtime load its CUDA provider and the libraries that the provider needs. This does
/// not access the GPU, because no session receives the options that this call creates. The options
/// are never freed.
///
/// Only ONNX Runtime can load the provider, because the provider calls ONNX Runtime while the
/// linker loads it.
pub(super) fn load_cuda() -> ort::Result<()> {
    let mut options = null_mut();
    // SAFETY: the call writes a pointer to the options that it creates.
    ortsys![unsafe CreateCUDAProviderOptions(&mut options)?];
    // SAFETY: the options were created above, and the call reads no keys or values.
    ortsys![unsafe UpdateCUDAProviderOptions(options, null(), null(), 0)?];
    Ok(())
}

/// Makes ONNX Runtime load its TensorRT provider, in the same way as [`load_cuda`].
pub(super) fn load_tensorrt() -> ort::Result<()> {
    let mut options = null_mut();
    // SAFETY: the call writes a pointer to the options that it creates.
    ortsys![unsafe CreateTensorRTProviderOptions(&mut options)?];
    // SAFETY: the options were created above, and the call reads no keys or values.
    ortsys![unsafe UpdateTensorRTProviderOptions(options, null(), null(), 0)?];
    Ok(())
}

/// Returns the execution providers of a session. The host's CPU computes the operators that no
/// provider supports.
pub(super) fn on_gpu(
    providers: &[ProviderSpec],
    gpu: &Arc<CudaGpu>,
    channels_last: bool,
) -> ort::Result<Vec<ExecutionProviderDispatch>> {
    providers.iter().map(|provider| dispatch(provider, gpu, channels_last)).collect()
}

fn dispatch(
    provider: &ProviderSpec,
    gpu: &Arc<CudaGpu>,
    channels_last: bool,
) -> ort::Result<ExecutionProviderDispatch> {
    Ok(match provider {
        // At the first run of each shape, the provider chooses the algorithms of convolutions for
        // the SMs of this process.
        ProviderSpec::Cuda => {
            let cuda = ep::CUDA::default()
                .with_tf32(true)
                .with_prefer_nhwc(channels_last)
                // If the arena doubled in size at each growth, it would take memory that shadows
                // and other models need.
                .with_arena_extend_strategy(ep::ArenaExtendStrategy::SameAsRequested)
                .with_conv_algorithm_search(ep::cuda::ConvAlgorithmSearch::Heuristic);
            // SAFETY: the owner of the session also holds an `Arc` of the GPU, and drops the
            // session first.
            unsafe { cuda.with_compute_stream(gpu.compute_stream()) }.build().error_on_failure()
        }
        ProviderSpec::TensorRt { cache } => {
            let cache = utf8(cache)?;
            let tensorrt = ep::TensorRT::default()
                .with_engine_cache(true)
                .with_engine_cache_path(cache)
                .with_timing_cache(true)
                .with_timing_cache_path(cache);
            // SAFETY: as for the CUDA provider, the owner of the session holds an `Arc` of the GPU,
            // and drops the session first.
            unsafe { tensorrt.with_compute_stream(gpu.compute_stream()) }.build().error_on_failure()
        }
    })
}

fn utf8(path: &Path) -> ort::Result<&str> {
    let invalid =
        || ort::Error::new(format!("the path of TensorRT's cache is not valid UTF-8: {}", path.display()));
    path.to_str().ok_or_else(invalid)
}
