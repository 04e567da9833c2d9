//! Whether partitions inside processes keep apart, measured as `serve` does it: under a daemon of
//! MPS that ends with the measurement.

use std::path::Path;

use crate::doctor::facts::{Facts, Partitions, Trouble};
use shadowslice_config::{CudaDevice, GpuConfig, Partitioning};
use shadowslice_control::host;

pub(in crate::doctor) fn partitions(facts: &Facts, devices: Option<&[CudaDevice]>) -> Vec<Partitions> {
    let found = facts.driver.nvml.iter().flat_map(|host| host.gpus.iter().flatten());
    let all = || found.map(|gpu| CudaDevice::Index(gpu.identity.index)).collect();
    let devices = devices.map_or_else(all, <[CudaDevice]>::to_vec);
    let worker = &facts.system.worker;
    let of_gpu = |device: CudaDevice| Partitions {
        device: device.to_string(),
        groups: worker.clone().and_then(|worker| measure(&worker, device)),
    };
    devices.into_iter().map(of_gpu).collect()
}

fn measure(worker: &Path, device: CudaDevice) -> Result<Result<Vec<u32>, String>, Trouble> {
    let private = tempfile::tempdir().map_err(|error| Trouble {
        finding: format!("there is no folder for a daemon of MPS: {error}"),
        advice: "make the temporary directory writable".to_owned(),
    })?;
    let gpu = GpuConfig::Cuda { device, partition: Partitioning::Mps };
    let gpus = host::gpus(&[gpu], private.path(), worker, false, &[]).map_err(|error| Trouble::of(&error))?;
    let division = gpus.first().map(|gpu| gpu.division().map(|division| division.sizes().to_vec()));
    let Some(division) = division else { return Ok(Err("there is no GPU".to_owned())) };
    Ok(division.map(|sizes| sizes.iter().map(|sms| sms.0).collect()).map_err(str::to_owned))
}
