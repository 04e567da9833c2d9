//! Collects the facts about NVIDIA's driver and the GPUs.

use std::path::Path;

use nix::unistd::{AccessFlags, eaccess};

use super::processes::ProcessTable;
use crate::doctor::facts::{DeviceFile, DriverFacts, ForeignProcess, Problem};
use shadowslice_control::nvml::{NvmlHost, NvmlLibrary};

const EXPECTED: [&str; 3] = ["shadowslice-worker", "nvidia-cuda-mps-server", "nvidia-cuda-mps-control"];

pub(super) fn facts(processes: &ProcessTable) -> DriverFacts {
    let nvml = NvmlLibrary::open().and_then(|library| library.host());
    let nvml = nvml.map_err(|error| Problem::of(&error));
    let foreign = nvml.as_ref().map(|host| foreign(host, processes)).unwrap_or_default();
    DriverFacts { nvml, files: files(), foreign }
}

fn files() -> Vec<DeviceFile> {
    let entries = std::fs::read_dir("/dev").into_iter().flatten().flatten();
    let mut names: Vec<_> = entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| is_device(name))
        .collect();
    names.sort();
    let file = |name: String| {
        let path = Path::new("/dev").join(&name);
        DeviceFile { open: eaccess(&path, AccessFlags::R_OK | AccessFlags::W_OK).is_ok(), name }
    };
    names.into_iter().map(file).collect()
}

/// Returns whether CUDA opens a device file with this name: the control file, the file for unified
/// memory, or the file of a GPU.
fn is_device(name: &str) -> bool {
    let number = |rest: &str| !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit());
    matches!(name, "nvidiactl" | "nvidia-uvm") || name.strip_prefix("nvidia").is_some_and(number)
}

/// Returns the processes of other programs on the GPUs. A process that this user cannot see has the
/// name `unknown`.
fn foreign(host: &NvmlHost, processes: &ProcessTable) -> Vec<ForeignProcess> {
    let gpus = host.gpus.iter().flatten();
    let pids = gpus.flat_map(|gpu| &gpu.usage.processes).map(|process| process.pid);
    let name = |pid: u32| {
        let process = i32::try_from(pid).ok().and_then(|pid| processes.get(&pid));
        process.map_or_else(|| "unknown".to_owned(), |process| process.name.clone())
    };
    let all = pids.map(|pid| ForeignProcess { pid, name: name(pid) });
    all.filter(|process| !EXPECTED.contains(&process.name.as_str())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_files_that_cuda_opens_count() {
        let names =
            ["nvidia0", "nvidia15", "nvidiactl", "nvidia-uvm", "nvidia", "nvidia-modeset", "nvidia-caps"];
        assert_eq!(names.map(is_device), [true, true, true, true, false, false, false]);
    }
}
