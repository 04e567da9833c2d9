//! Checks ONNX Runtime and its providers.

use crate::doctor::check::Check;
use crate::doctor::facts::{DriverFacts, EngineFacts};
use shadowslice_control::backend::{OnnxRuntime, ProbedLibraries};

const GET_GPU_BUILD: &str = "put all libraries of one ONNX Runtime for GPUs into one folder (Python's `onnxruntime-gpu` has them in `onnxruntime/capi`)";

const FIND_LIBRARY: &str =
    "install the named library (CUDA, cuDNN), or add its folder to LD_LIBRARY_PATH of `serve`";

impl EngineFacts {
    pub(super) fn loaded(&self) -> Option<&ProbedLibraries> {
        self.loaded.as_ref()?.as_ref().ok()
    }

    /// Returns the loaded ONNX Runtime. Returns `None` if ONNX Runtime was not found or no worker
    /// reported its libraries.
    fn onnxruntime(&self) -> Option<&Result<OnnxRuntime, String>> {
        self.loaded()?.onnxruntime.as_ref()
    }
}

/// Returns a fault if no worker could report its libraries.
pub(super) fn answer(engine: &EngineFacts) -> Vec<Check> {
    let problem = engine.loaded.as_ref().and_then(|loaded| loaded.as_ref().err());
    problem.map(|problem| Check::of_problem("libraries", problem)).into_iter().collect()
}

pub(super) fn library(engine: &EngineFacts) -> Vec<Check> {
    let name = "onnxruntime";
    let path = match &engine.library {
        Ok(path) => path.display(),
        Err(problem) => return vec![Check::of_problem(name, problem)],
    };
    let check = |loaded: &Result<OnnxRuntime, String>| match loaded {
        Ok(OnnxRuntime { minor: Some(minor), .. }) => Check::ok(name, format!("version 1.{minor} at {path}")),
        Ok(_) => Check::ok(name, path.to_string()),
        Err(why) => Check::fault(
            name,
            why,
            "install ONNX Runtime 1.24 or later, or set `onnxruntime: {library: PATH}` to another library",
        ),
    };
    engine.onnxruntime().map(check).into_iter().collect()
}

pub(super) fn cuda(engine: &EngineFacts, driver: &DriverFacts) -> Vec<Check> {
    match (engine.loaded(), engine.onnxruntime()) {
        (Some(libraries), Some(Ok(loaded))) => {
            vec![provider(&loaded.cuda, driver), cudnn(&libraries.cudnn, &loaded.cuda)]
        }
        _ => Vec::new(),
    }
}

fn provider(loaded: &Result<Option<u32>, String>, driver: &DriverFacts) -> Check {
    let name = "cuda provider";
    let offered = driver.nvml.as_ref().ok().map(|host| host.cuda);
    match (loaded, offered) {
        (Err(why), _) if is_of_the_build(why) => Check::fault(name, why, GET_GPU_BUILD),
        (Err(why), _) => Check::fault(name, why, FIND_LIBRARY),
        (Ok(Some(built)), Some(offered)) if *built > offered.major => Check::fault(
            name,
            format!("built for CUDA {built}, but the driver supports CUDA only up to {offered}"),
            format!("update the driver, or install an ONNX Runtime for CUDA {}", offered.major),
        ),
        (Ok(Some(built)), _) => Check::ok(name, format!("can be loaded, built for CUDA {built}")),
        (Ok(None), _) => Check::ok(name, "can be loaded"),
    }
}

/// Returns whether the provider itself is broken, absent or not included in the build. If it is
/// none of these, the cause is a library that the provider needs.
fn is_of_the_build(why: &str) -> bool {
    let is_at_fault = |word: &str| word.contains("libonnxruntime_providers_") && word.ends_with(".so:");
    why.contains("not enabled in this build") || why.split_whitespace().any(is_at_fault)
}

/// Checks cuDNN. Newer providers load cuDNN when a model first needs it. Older providers need cuDNN
/// when they are loaded.
fn cudnn(loaded: &Result<(), String>, provider: &Result<Option<u32>, String>) -> Check {
    let name = "cudnn";
    let Err(why) = loaded else { return Check::ok(name, "can be loaded") };
    let advice = "install cuDNN for the CUDA that ONNX Runtime was built for, or add its folder to LD_LIBRARY_PATH of `serve`";
    if provider.as_ref().is_err_and(|why| why.contains("libcudnn")) {
        return Check::fault(name, why, advice);
    }
    let finding = format!("{why}; models with convolutions and some others cannot be served");
    Check::warning(name, finding, advice)
}

pub(super) fn tensorrt(engine: &EngineFacts) -> Vec<Check> {
    let name = "tensorrt";
    let Some(Ok(loaded)) = engine.onnxruntime() else { return Vec::new() };
    vec![match &loaded.tensorrt {
        Ok(()) => Check::ok(name, "can be loaded"),
        Err(why) if is_of_the_build(why) => Check::fault(
            name,
            why,
            "use an ONNX Runtime with TensorRT, or remove `tensorrt` from the models' `providers`",
        ),
        Err(why) => Check::fault(name, why, FIND_LIBRARY),
    }]
}
