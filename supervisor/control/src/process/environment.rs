//! The environment of a worker. It contains only some of the supervisor's variables, so that
//! secrets do not reach a model's code.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};

use crate::backend::{Grant, NO_TELEMETRY};

/// The variables for the paths of programs, libraries and caches, and for texts and logs.
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

/// The prefixes of variables of the dynamic loader, NVIDIA's libraries, ONNX Runtime, and libraries
/// for threads and memory.
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

/// The prefix of the supervisor's own variables and of those of its tests.
const OWN: &str = "SHADOWSLICE_";

/// The prefix of MPS's variables, which only a worker's grant sets.
const MPS: &str = "CUDA_MPS_";

/// Returns a worker's environment. `also` contains the variables that the configuration adds.
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
