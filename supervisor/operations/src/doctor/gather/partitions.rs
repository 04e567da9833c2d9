//! Measures whether partitions inside a process are isolated. The measurement runs under an MPS
//! daemon, like a worker of `serve`. The daemon stops at the end of the measurement.

use std::path::Path;

use crate::doctor::facts::{HostFacts, PartitionMeasurement, Problem};
use shadowslice_config::{CudaDevice, GpuConfig, Partitioning};
use shadowslice_control::host;

pub(in crate::doctor) fn partitions(
    facts: &HostFacts,
    devices: Option<&[CudaDevice]>,
) -> Vec<PartitionMeasurement> {
    let found = facts.driver.nvml.iter().flat_map(|host| host.gpus.iter().flatten());
    let all = || found.map(|gpu| CudaDevice::Index(gpu.identity.index)).collect();
    let devices = devices.map_or_else(all, <[CudaDevice]>::to_vec);
    let worker = &facts.system.worker;
    let of_gpu = |device: CudaDevice| PartitionMeasurement {
        device: device.to_string(),
        groups: worker.clone().and_then(|worker| measure(&worker, device)),
    };
    devices.into_iter().map(of_gpu).collect()
}

fn measure(worker: &Path, device: CudaDevice) -> Result<Result<Vec<u32>, String>, Problem> {
    let private = tempfile::tempdir().map_err(|error| Problem {
        finding: format!("cannot create a folder for the MPS daemon: {error}"),
        advice: "make the temporary directory writable, or set TMPDIR".to_owned(),
    })?;
    let gpu = GpuConfig::Cuda { device, partition: Partitioning::Mps, memory: None };
    let gpus = host::gpus(&[gpu], private.path(), worker, false, &[]).map_err(|error| Problem::of(&error))?;
    let division = gpus.first().map(|gpu| gpu.division().map(|division| division.sizes().to_vec()));
    let Some(division) = division else { return Ok(Err("no GPU was found".to_owned())) };
    Ok(division.map(|sizes| sizes.iter().map(|sms| sms.0).collect()).map_err(str::to_owned))
}
