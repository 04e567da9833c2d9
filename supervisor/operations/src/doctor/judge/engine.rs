//! ONNX Runtime and its providers.

use crate::doctor::check::Check;
use crate::doctor::facts::{Driver, EngineFacts, Shared, Version};

/// The oldest ONNX Runtime that workers can use: workers speak its interface.
const LEAST_VERSION: Version = Version(1, 24, 0);

const GET_GPU_BUILD: &str = "put the libraries of an ONNX Runtime for GPUs there (Python's `onnxruntime-gpu` has them in `onnxruntime/capi`)";

pub(super) fn library(engine: &EngineFacts) -> Check {
    let name = "onnxruntime";
    let library = match &engine.library {
        Ok(library) => library,
        Err(trouble) => return Check::met(name, trouble),
    };
    let path = library.path.display();
    if let Some(fault) = broken(name, library) {
        return fault;
    }
    match engine.version {
        Some(version) if version < LEAST_VERSION => Check::fault(
            name,
            format!("version {version} at {path}, and {LEAST_VERSION} is the oldest that serves"),
            "install a newer one, or name another as `onnxruntime: {library: PATH}`",
        ),
        Some(version) => Check::ok(name, format!("version {version} at {path}")),
        None => Check::warning(
            name,
            format!("{path} does not tell its version"),
            format!("see to it that it is ONNX Runtime, {LEAST_VERSION} or later"),
        ),
    }
}

pub(super) fn cuda(engine: &EngineFacts, driver: &Driver) -> Vec<Check> {
    let Ok(library) = &engine.library else { return Vec::new() };
    vec![provider(library, engine, driver), cudnn(engine)]
}

fn provider(library: &Shared, engine: &EngineFacts, driver: &Driver) -> Check {
    let name = "cuda provider";
    let folder = library.path.parent().unwrap_or(&library.path).display();
    let (cuda, shared) = match (&engine.cuda, &engine.shared) {
        (Some(cuda), Some(shared)) => (cuda, shared),
        (None, _) => {
            let finding =
                format!("libonnxruntime_providers_cuda.so is not in {folder}: models run on the CPU only");
            return Check::fault(name, finding, GET_GPU_BUILD);
        }
        (_, None) => {
            let finding =
                format!("libonnxruntime_providers_shared.so is not in {folder}, and providers need it");
            return Check::fault(name, finding, GET_GPU_BUILD);
        }
    };
    if let Some(fault) = broken(name, shared).or_else(|| broken(name, cuda)) {
        return fault;
    }
    let path = cuda.path.display();
    let offered = driver.nvml.as_ref().ok().map(|host| host.cuda);
    match (cuda_of(cuda), offered) {
        (Some(built), Some(offered)) if built > offered.major => Check::fault(
            name,
            format!("{path} was built for CUDA {built}, and the driver supports CUDA up to {offered}"),
            format!("update the driver, or install an ONNX Runtime for CUDA {}", offered.major),
        ),
        (Some(built), _) => Check::ok(name, format!("{path}, built for CUDA {built}")),
        (None, _) => Check::ok(name, path.to_string()),
    }
}

/// The CUDA that a provider was built for: 13 if it needs `libcudart.so.13` or `libcublas.so.13`.
fn cuda_of(provider: &Shared) -> Option<u32> {
    let major = |name: &String| {
        let version = ["libcudart.so.", "libcublas.so.", "libcublasLt.so."]
            .iter()
            .find_map(|library| name.strip_prefix(library))?;
        version.split('.').next()?.parse().ok()
    };
    provider.needs.iter().find_map(major)
}

fn broken(name: &str, library: &Shared) -> Option<Check> {
    let path = library.path.display();
    if let Some(why) = &library.unreadable {
        return Some(Check::fault(name, format!("{path} cannot be read: {why}"), "install it anew"));
    }
    if library.missing.is_empty() {
        return None;
    }
    let own = library.path.file_name().unwrap_or_default().to_string_lossy();
    let told = library.missing.iter().map(|missing| match missing.by == own {
        true => missing.name.clone(),
        false => format!("{} (for {})", missing.name, missing.by),
    });
    let finding =
        format!("{path} needs {}, not found by the dynamic linker", told.collect::<Vec<_>>().join(", "));
    let advice = match cuda_of(library) {
        Some(major) => format!(
            "install CUDA {major}'s libraries and cuDNN, or add the folder that has them to LD_LIBRARY_PATH of `serve`"
        ),
        None => "install them, or add the folder that has them to LD_LIBRARY_PATH of `serve`".to_owned(),
    };
    Some(Check::fault(name, finding, advice))
}

/// Newer providers look for cuDNN when a model first needs it; older providers cannot be loaded
/// without it.
fn cudnn(engine: &EngineFacts) -> Check {
    let name = "cudnn";
    let (library, found) = &engine.cudnn;
    if let Some(path) = found {
        return Check::ok(name, path.display().to_string());
    }
    let finding = format!("{library} is not found by the dynamic linker");
    let advice = "install cuDNN for the CUDA that ONNX Runtime was built for, or add its folder to LD_LIBRARY_PATH of `serve`";
    if engine.cuda.as_ref().is_some_and(|cuda| cuda.needs.contains(library)) {
        return Check::fault(name, finding, advice);
    }
    let finding = format!("{finding}; models with convolutions and some others will be refused");
    Check::warning(name, finding, advice)
}

pub(super) fn tensorrt(engine: &EngineFacts) -> Vec<Check> {
    let name = "tensorrt";
    let Ok(library) = &engine.library else { return Vec::new() };
    let folder = library.path.parent().unwrap_or(&library.path).display();
    let check = match &engine.tensorrt {
        None => {
            let finding = format!("libonnxruntime_providers_tensorrt.so is not in {folder}");
            Check::fault(name, finding, "put it there, or leave `tensorrt` out of the models' `providers`")
        }
        Some(provider) => {
            let fine = || Check::ok(name, provider.path.display().to_string());
            broken(name, provider).unwrap_or_else(fine)
        }
    };
    vec![check]
}
