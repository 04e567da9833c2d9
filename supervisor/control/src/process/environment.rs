//! Which of the supervisor's variables a worker has. The others, such as secrets, do not reach what
//! runs models.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};

use crate::backend::{Grant, NO_TELEMETRY};

/// Where programs, libraries and caches are, and how text is shown.
const NAMES: [&str; 12] = [
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "LANG",
    "LANGUAGE",
    "TZ",
    "TMPDIR",
    "XDG_CACHE_HOME",
    "RUST_LOG",
    "RUST_BACKTRACE",
    "GLIBC_TUNABLES",
];

/// Of the loader, of NVIDIA's libraries, of ONNX Runtime and of those for threads and memory.
const PREFIXES: [&str; 15] = [
    "LC_",
    "LD_",
    "CUDA_",
    "CUDNN_",
    "CUBLAS_",
    "CUBLASLT_",
    "NVIDIA_",
    "NV_",
    "NCCL_",
    "ORT_",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "MALLOC_",
];

/// The supervisor's own, and those of its tests.
const OWN: &str = "SHADOWSLICE_";

/// Set for a worker by its grant alone.
const MPS: &str = "CUDA_MPS_";

/// `also`: names that the configuration lets through.
pub(super) fn environment(grant: &Grant, also: &[String]) -> Vec<(OsString, OsString)> {
    let passes = |(name, _): &(OsString, OsString)| passes(name, also);
    let mut environment: BTreeMap<OsString, OsString> = std::env::vars_os().filter(passes).collect();
    let granted = grant.environment().into_iter().map(|(name, value)| (name.into(), value.into()));
    environment.extend(granted);
    let (name, value) = NO_TELEMETRY;
    environment.insert(name.into(), value.into());
    environment.into_iter().collect()
}

fn passes(name: &OsStr, also: &[String]) -> bool {
    let name = name.to_string_lossy();
    let known = NAMES.contains(&&*name) || PREFIXES.iter().chain([&OWN]).any(|start| name.starts_with(start));
    (known || also.iter().any(|also| *also == name)) && !name.starts_with(MPS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_libraries_need_passes_and_nothing_else() {
        let also = ["HTTPS_PROXY".to_owned()];
        for name in
            ["PATH", "LC_ALL", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "HTTPS_PROXY"]
        {
            assert!(passes(OsStr::new(name), &also), "{name}");
        }
        for name in
            ["AWS_SECRET_ACCESS_KEY", "NOTIFY_SOCKET", "PATHS", "CUDA_MPS_PIPE_DIRECTORY", "HTTP_PROXY"]
        {
            assert!(!passes(OsStr::new(name), &also), "{name}");
        }
    }
}
