//! Checks whether the MPS server of each GPU accepts the processes that a configuration needs.

use crate::doctor::check::Check;
use crate::doctor::facts::DriverFacts;
use crate::doctor::requirements::GpuClients;
use shadowslice_config::{MPS_CLIENTS, MpsClients};
use shadowslice_control::nvml::CudaVersion;

/// The number of processes that an MPS server accepts, according to NVIDIA's documentation since CUDA
/// 13.1.
const NEWER_CLIENTS: usize = 60;

/// The first CUDA version whose MPS server accepts [`NEWER_CLIENTS`]. With a driver for CUDA 13.0, a
/// server on an H200 accepts 48.
const NEWER_CUDA: CudaVersion = CudaVersion { major: 13, minor: 1 };

/// Returns one check for each GPU under MPS. Returns none if the driver is unknown.
pub(super) fn checks(clients: &[GpuClients], driver: &DriverFacts) -> Vec<Check> {
    let Ok(host) = &driver.nvml else { return Vec::new() };
    clients.iter().map(|clients| of_gpu(clients, host.cuda)).collect()
}

fn of_gpu(GpuClients { device, needed, unplaced }: &GpuClients, cuda: CudaVersion) -> Check {
    let name = format!("gpu {device} mps clients");
    let limit = if cuda >= NEWER_CUDA { NEWER_CLIENTS } else { MPS_CLIENTS };
    let MpsClients { standing, shadows } = *needed;
    let mut needs = format!("the models need {standing} processes");
    if shadows > 0 {
        needs.push_str(&format!(", and up to {shadows} for shadows"));
    }
    if *unplaced > 0 {
        needs.push_str(&format!(", not counting {unplaced} models with `gpu: auto`"));
    }
    let finding = format!("{needs}; MPS accepts {limit} with CUDA {cuda}");
    if standing > limit {
        let advice = "some models would wait forever; set `isolation: shared` for models, or use another GPU";
        return Check::fault(name, finding, advice);
    }
    if standing + shadows > limit {
        let advice =
            "some changes of shares would wait; set `isolation: shared` for models, or use another GPU";
        return Check::warning(name, finding, advice);
    }
    Check::ok(name, finding)
}
