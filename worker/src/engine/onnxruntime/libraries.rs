//! The libraries that a worker can load. This process loads them in the same way as a worker, and
//! does not access the GPU.

use std::path::Path;

use serde_json::{Value, json};

use super::{Library, linker_says, providers};

/// Tries to load each library. The error texts come from the dynamic linker or from ONNX Runtime.
pub fn try_libraries(onnxruntime: Option<&Path>) -> Value {
    json!({
        "libcuda": load("libcuda.so.1"),
        "onnxruntime": onnxruntime.map(try_onnxruntime),
        "cudnn": load("libcudnn.so.9"),
    })
}

fn try_onnxruntime(path: &Path) -> Result<Value, String> {
    let _library = Library::load(path, true).map_err(|refusal| refusal.to_string())?;
    let reason = |fault: ort::Error| without_source_position(fault.message()).to_owned();
    let cuda = providers::load_cuda().map_err(reason);
    let files = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    Ok(json!({
        "minor": ort::util::probe(path),
        "cuda": cuda.map(|()| cuda_version(&files)),
        "tensorrt": providers::load_tensorrt().map_err(reason),
    }))
}

fn load(name: &str) -> Result<(), String> {
    ort::util::preload_dylib(name).map_err(|fault| linker_says(&fault))
}

/// Returns the major version of the CUDA libraries that the provider uses, for example 13. This
/// process always loads the libraries of CUDA 13. If `files` contains two versions, the provider
/// has therefore loaded the lower one.
fn cuda_version(files: &str) -> Option<u32> {
    let versions = files.split("libcublas.so.").skip(1);
    versions.filter_map(|rest| rest.split(['.', '\n']).next()?.parse().ok()).min()
}

/// Returns ONNX Runtime's message without the position in ONNX Runtime's source code.
fn without_source_position(message: &str) -> &str {
    message.rsplit_once(" : ").map_or(message, |(_, rest)| rest).trim().trim_end_matches('.')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cudas_version_is_in_its_files_names() {
        let line = |name: &str| format!("7f00-7f10 r-xp 00000000 fe:00 17  /usr/lib/{name}\n");
        let (new, old) = (line("libcublas.so.13"), line("libcublas.so.12.4.5.8"));
        assert_eq!(cuda_version(&[line("libcublasLt.so.14"), new.clone()].concat()), Some(13));
        assert_eq!(cuda_version(&[new, old].concat()), Some(12));
        assert_eq!(cuda_version(&line("libc.so.6")), None);
    }

    #[test]
    fn the_place_in_the_source_is_left_out() {
        let message = "/src/provider_bridge_ort.cc:2043 onnxruntime::Provider& onnxruntime::ProviderLibrary::Get() \
                    [ONNXRuntimeError] : 1 : FAIL : Failed to load library /a.so with error: b.so: no file\n";
        assert_eq!(
            without_source_position(message),
            "Failed to load library /a.so with error: b.so: no file"
        );
        assert_eq!(
            without_source_position("CUDA is not enabled in this build."),
            "CUDA is not enabled in this build"
        );
    }
}
